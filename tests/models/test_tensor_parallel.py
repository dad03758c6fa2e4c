"""A head whose weight is a DTensor, cut by rows over two processes: each computes its own rows, and nothing is gathered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensor_parallel_worker import CASES

HERE = Path(__file__).parent
RUNS = [f"{case}, cce" for case in CASES] + [f"llama, {name}" for name in ("flce", "chunked", "naive")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two processes found, by case."""
    store = tmp_path_factory.mktemp("tensor_parallel") / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "tensor_parallel_worker.py", str(store), str(rank)], cwd=HERE, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    return {line["case"]: line for line in map(json.loads, said[0][0].splitlines())}


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
