"""DeepSpeed's own ZeRO-1, 2 and 3 with patched models: two CPU processes get the loss and gradients of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed_worker import CASES, FIFTY, STAGES, STRATEGIES

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, two_processes: Callable[..., Any], deepspeed_path: str
) -> dict[str, Any]:
    """What the two processes found, by case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", deepspeed_path)
        store = tmp_path_factory.mktemp("deepspeed") / "store"
        return two_processes(HERE / "deepspeed_worker.py", store, seconds=500)


@pytest.mark.parametrize(("stage", "strategy", "kind"), CASES)
def test_equals_one_process(stage: int, strategy: str, kind: str, results: dict[str, Any]) -> None:
    """In float32, which ZeRO keeps its sums in."""
    result = results[f"zero-{stage} {strategy}, {kind}"]
    assert result["loss"] < 1e-5
    assert result["gradient"] < 1e-6
    assert result["size"] > 1e-2
    assert (result["fused"], result["materialised"]) == (2, 0)
    assert (result["held"] == 0) == (stage == 3), "between steps a process of ZeRO-3 has no whole head"


@pytest.mark.parametrize(("stage", "strategy"), FIFTY)
def test_ranks_never_differ(stage: int, strategy: str, results: dict[str, Any]) -> None:
    result = results[f"fifty zero-{stage} {strategy}"]
    assert result["differing"] == 0
    assert result["last"] < 0.1 * result["first"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_is_patched_and_unpatched(stage: int, results: dict[str, Any]) -> None:
    result = results[f"late {stage}"]
    assert (result["fused"], result["found"], result["logits"]) == (2, True, True)
    assert result["off"] < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_head_is_gathered_as_often_as_in_stock(strategy: str, results: dict[str, Any]) -> None:
    """Once for the forward and once for the backward, not for each chunk."""
    ours, stock = results[f"gathers {strategy}"], results["gathers None"]
    assert ours["sizes"] == stock["sizes"]
    assert stock["sizes"].count(stock["head"]) == 4, "the embedding is as large: two each"


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_do_not_know_us(stage: int, results: dict[str, Any]) -> None:
    """Saved with a patched model and loaded without, and the other way round, the optimizer's state included."""
    result = results[f"checkpoints {stage}"]
    for ours in (True, False):
        assert result[f"loaded, ours={ours}"]
        assert result[f"at once, ours={ours}"] == 0
        assert result[f"after a step, ours={ours}"] < 1e-5
    assert result["whole"]
