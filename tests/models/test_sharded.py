"""Heads that FSDP, DDP and tensor parallelism hold: two CPU processes get the loss and gradients of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sharded_worker import SAVED

HERE = Path(__file__).parent
CASES = [
    f"{place} {strategy}"
    for place in (
        "fsdp2 root", "fsdp2 own", "fsdp2 own late", "fsdp1 root", "fsdp1 own", "fsdp1 own late", "ddp", "tp",
    )
    for strategy in ("cce", "flce", "chunked")
] + [
    f"lora {place} {strategy}"
    for place in ("fsdp2 root", "fsdp2 own", "fsdp1 root", "fsdp1 own", "ddp")
    for strategy in ("cce", "flce", "chunked")
] + [
    "lora fsdp2 parts chunked", "fsdp2 tied", "fsdp2 bf16", "ddp empty", "fsdp2 empty", "fsdp1 empty",
    "fsdp2 checkpointed", "fsdp1 checkpointed",
]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "sharded_worker.py",
        str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=500)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(case: str, results: dict[str, Any]) -> None:
    result = results[case]
    assert "error" not in result, result
    assert result["fused"] == 2
    assert result["materialised"] == 0
    assert result["keys"]
    assert result["size"] > 1e-2
    loss, gradient = (1e-2, 1e-2) if "bf16" in case else (1e-10, 1e-10)
    assert result["loss"] < loss
    assert result["gradient"] < gradient


@pytest.mark.parametrize("case", SAVED)
def test_what_is_saved_loads_without_us(case: str, results: dict[str, Any]) -> None:
    assert results[case]["saved"]


@pytest.mark.parametrize("strategy", ["cce", "flce"])
def test_parts_of_an_adapter_that_are_sharded_each_on_its_own(strategy: str, results: dict[str, Any]) -> None:
    """None of their weights is whole when the head is called, and a gathered one would miss the other ranks' part of
    its gradient."""
    assert "UnsupportedError" in results[f"lora fsdp2 parts {strategy}"]["error"]
