"""Tensor parallelism and FSDP2 at once, four processes: a head that both cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hybrid_worker import CASES

HERE = Path(__file__).parent
HEAD = 120 * 32

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, several_processes: Callable[..., Any]) -> dict[str, Any]:
    """What the processes found, by case."""
    return several_processes(HERE / "hybrid_worker.py", tmp_path_factory.mktemp("hybrid") / "store", count=4)


@pytest.mark.parametrize("case", [", ".join(case) for case in CASES])
def test_equals_one_process(case: str, results: dict[str, Any]) -> None:
    result = results[case]
    assert result["loss"] < 1e-10
    assert result["gradient"] < 1e-10
    assert result["size"] > 1e-2
    assert (result["fused"], result["materialised"]) == (2, 0)
    if ", own" in case:
        assert result["sizes"].count(HEAD // 2) == 2, "a process's rows, for the forward and the backward"
        assert HEAD not in result["sizes"], "nobody gathers the whole head"
