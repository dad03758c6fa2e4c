"""FSDP2 and FSDP1 with what users set: where the head is sharded, offloading, half types, wrapping policies; what is
gathered, what is saved, and that ranks stay equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_policies_worker import FIFTY, GATHERED, HALVES, RUNS, SEEN, WRAPPED

HERE = Path(__file__).parent
CASES = [f"fsdp2 {case}, {strategy}" for case, strategy in RUNS] + [
    f"fsdp1 {policy} {orig} {extra}, {strategy}" for policy, orig, extra in WRAPPED for strategy in ("cce", "chunked")
]
HEAD = 3840
"""Numbers of the head's weight."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, two_processes: Callable[..., Any]) -> dict[str, Any]:
    """What the two processes found, by case."""
    store = tmp_path_factory.mktemp("fsdp_policies") / "store"
    return two_processes(HERE / "fsdp_policies_worker.py", store, seconds=500)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(case: str, results: dict[str, Any]) -> None:
    """The rank with more tokens has more chunks; offloaded parameters are, and the others go back after each use."""
    result = results[case]
    assert result["loss"] < 1e-10
    assert result["gradient"] < 1e-10
    assert result["size"] > 1e-2
    assert result["keys"]
    assert (result["fused"], result["materialised"]) == (2, 0)


@pytest.mark.parametrize("strategy", SEEN)
@pytest.mark.parametrize("case", [*(f"fsdp2 half {case}" for case in HALVES), "fsdp1 half"])
def test_half_weights_and_float32_sums_are_as_near_as_stock(case: str, strategy: str, results: dict[str, Any]) -> None:
    """Beside float64: the gradients are no further away than stock's under the same policy."""
    ours, stock = results[f"{case}, {strategy}"], results[f"{case}, None"]
    assert (ours["fused"], ours["materialised"], stock["fused"]) == (2, 0, 0)
    assert stock["norm"] > 1e-3, "half types round"
    assert ours["norm"] < 1.1 * stock["norm"]
    assert ours["loss"] < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("strategy", SEEN)
@pytest.mark.parametrize(
    "case",
    [*(f"fsdp2 {c}" for c in GATHERED), *(f"fsdp1 {p}_WRAP" for p in ("TRANSFORMER_BASED", "SIZE_BASED", "NO"))],
)
def test_weights_are_gathered_as_often_as_in_stock(case: str, strategy: str, results: dict[str, Any]) -> None:
    """Each once for the forward and once for the backward, and not for each chunk."""
    ours, stock = (results[f"gathers {case}, {name}"]["sizes"] for name in (strategy, None))
    assert ours == stock
    if case.startswith("fsdp2 own"):
        assert ours.count(HEAD) == (1 if "kept" in case else 2)


@pytest.mark.parametrize(("kind", "strategy"), FIFTY)
def test_ranks_never_differ(kind: str, strategy: str, results: dict[str, Any]) -> None:
    """After each of 50 steps. With ``hsdp`` and ``ddp`` each rank has a whole copy of its own."""
    result = results[f"fifty {kind} {strategy}"]
    assert result["differing"] == 0
    assert result["last"] < 0.1 * result["first"]


@pytest.mark.parametrize("moment", ["at once", "after a step"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
@pytest.mark.parametrize("ours", [True, False], ids=["saved with us", "loaded with us"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_checkpoints_do_not_know_us(kind: str, ours: bool, whole: bool, moment: str, results: dict[str, Any]) -> None:
    """Weights and the optimizer's state, which the next step shows."""
    difference = results[f"checkpoints {kind}"][f"{moment}, ours={ours}, whole={whole}"]
    assert difference == 0 if moment == "at once" else difference < 1e-10
