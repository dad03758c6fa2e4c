"""A head whose weight is a DTensor, cut by rows over two processes: each computes its own rows, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensor_parallel_worker import CASES

HERE = Path(__file__).parent
RUNS = [f"{case}, cce" for case in CASES] + [f"llama, {name}" for name in ("flce", "chunked", "naive")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, two_processes: Callable[..., Any]) -> dict[str, Any]:
    """What the two processes found, by case."""
    return two_processes(HERE / "tensor_parallel_worker.py", tmp_path_factory.mktemp("tensor_parallel") / "store")


@pytest.mark.parametrize("case", [*RUNS, "llama, cce, torch"])
def test_equals_one_process(case: str, results: dict[str, Any]) -> None:
    """``torch``: cut by torch's own `parallelize_module`, which hands the head DTensors."""
    result = results[case]
    assert result["loss"] < 1e-10
    assert result["gradient"] < 1e-10
    assert result["size"] > 1e-2
    assert (result["fused"], result["materialised"]) == (2, 0)
    assert (result["gathers"] > 0) == (case == "columns, cce"), "only where rows are cut out is the weight gathered"
    assert result["kind"] == "Tensor"
    assert "cut by rows" in result["explained"]


def test_statistics_are_of_the_whole_vocabulary(results: dict[str, Any]) -> None:
    one, two = results["statistics, cce"]["statistics"]
    assert two == pytest.approx(one, abs=1e-10)
    assert {"accuracy", "entropy", "valid_fraction"} == two.keys()


def test_processes_with_batches_of_their_own_are_refused(results: dict[str, Any]) -> None:
    for said in results["own batches"]["said"]:
        assert "Give all processes of the group the same batch" in said


def test_hidden_states_that_are_a_dtensor_are_counted(results: dict[str, Any]) -> None:
    result = results["hidden is a DTensor"]
    assert result["loss"] < 1e-6
    assert result["materialised"] == 1
    assert result["why"] == ["hidden states that are a DTensor"]
