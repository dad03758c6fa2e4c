"""Each of two processes holds half of every sequence and ``shift_labels`` cut likewise: nothing is shifted twice, and the
label of the first half's last token is the second's first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CASES = ("cce", "flce", "chunked", "naive", "auto", "smoothing and z-loss", "statistics", "a process without labels")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two processes found, by case."""
    store = tmp_path_factory.mktemp("context_parallel") / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "context_parallel_worker.py", str(store), str(rank)], cwd=HERE, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    return {line["case"]: line for line in map(json.loads, said[0][0].splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process_with_whole_sequences(case: str, results: dict[str, Any]) -> None:
    result = results[case]
    assert result["loss"] < 1e-10
    assert result["gradient"] < 1e-10
    assert result["entropy"] < 1e-10
    assert result["size"] > 1e-2
    assert (result["fused"], result["materialised"]) == (1, 0)
