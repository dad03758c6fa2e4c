"""DistributedDataParallel in two processes (gloo) is one process with all rows, to 1e-10 in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_run import KINDS, STRATEGIES, train
from small_runs import llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., None]) -> Path:
    """Where the two processes wrote what they found."""
    folder = tmp_path_factory.mktemp("exact")
    torchrun(Path(__file__).parent / "exact_run.py", str(folder))
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str, strategy: str, result: Any) -> None:
    """A rank without tokens, other counts in other ranks, a static graph; no parameter counts as unused."""
    found = result[f"{kind}, {strategy}"]
    assert found["gradient"] < 1e-10
    assert found["loss"] < 1e-10
    assert found["fused"] == 3
    assert (found["size"] > 1e-2) == (kind != "no token at all")


@pytest.mark.parametrize("strategy", ["cce", "auto"])
def test_after_fifty_steps_all_have_the_same_weights(strategy: str, result: Any) -> None:
    found = result["fifty"][strategy]
    assert len(set(found["digests"])) == 1
    assert found["last"] < 0.5 * found["first"]


def test_the_trainer_averages_tokens_over_devices(folder: Path, tmp_path: Path) -> None:
    """Unequal counts, and micro-batches of one rank that are masked: the weights after four steps are one process's."""
    two = torch.load(folder / "weights.pt")
    one = train(tmp_path, per_device_train_batch_size=4)
    start = llama().double().state_dict()
    assert one.keys() == two.keys()
    assert max((one[key] - two[key]).abs().max() for key in one) < 1e-10
    assert max((one[key] - start[key]).abs().max() for key in one) > 1e-2
