"""Each of two processes holds half of every sequence and ``shift_labels`` cut likewise: nothing is shifted twice, and the
label of the first half's last token is the second's first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CASES = ("cce", "flce", "chunked", "naive", "auto", "smoothing and z-loss", "statistics", "a process without labels")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, two_processes: Callable[..., Any]) -> dict[str, Any]:
    """What the two processes found, by case."""
    return two_processes(HERE / "context_parallel_worker.py", tmp_path_factory.mktemp("context_parallel") / "store")


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process_with_whole_sequences(case: str, results: dict[str, Any]) -> None:
    result = results[case]
    assert result["loss"] < 1e-10
    assert result["gradient"] < 1e-10
    assert result["entropy"] < 1e-10
    assert result["size"] > 1e-2
    assert (result["fused"], result["materialised"]) == (1, 0)
