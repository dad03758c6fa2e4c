"""Two processes with DistributedDataParallel (gloo): as the stock Trainer in two, and as one with twice the batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import STOCK_SMOOTHS_BY_COUNT, losses, run

from loss_plugins import LossPluginTrainer


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., None]) -> Any:
    folder = tmp_path_factory.mktemp("ddp")
    torchrun(Path(__file__).parent / "ddp_run.py", str(folder))
    return json.loads((folder / "result.json").read_text())


PAIRS = [("cce", "stock"), ("chunked", "stock")]
if STOCK_SMOOTHS_BY_COUNT:
    PAIRS.append(("flce smoothed", "smoothed"))


@pytest.mark.parametrize(("ours", "stock"), PAIRS)
def test_two_processes_equal_stock(ours: str, stock: str, result: Any) -> None:
    for name in ("losses", "norms"):
        assert result[ours][name] == pytest.approx(result[stock][name], rel=1e-4, abs=1e-5)
    mine, theirs = result[ours]["metrics"], result[stock]["metrics"]
    assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-5)


def test_statistics_are_of_all_processes(result: Any, tmp_path: Path) -> None:
    one = run(LossPluginTrainer, tmp_path, loss_strategy="cce", loss_statistics=["accuracy", "entropy"])
    assert result["cce"]["losses"] == pytest.approx(losses(one), abs=1e-4)
    for entry, expected in zip(result["cce"]["logs"], one.state.log_history, strict=False):
        for name in ("valid_fraction", "token_accuracy", "entropy"):
            key = f"loss_plugins/{name}"
            assert entry[key] == pytest.approx(expected[key], abs=1e-4), key
    assert "eval_loss_plugins/entropy" in result["cce"]["metrics"]


def test_a_rank_without_tokens_neither_hangs_nor_drifts(result: Any) -> None:
    assert all(0 < loss < 10 for loss in result["masked"]["losses"])
    assert result["masked"]["equal"] == 1
