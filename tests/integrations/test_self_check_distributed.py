"""`loss_self_check` in two processes (gloo): DistributedDataParallel with the Trainer and the callback, FSDP without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KINDS = ("ddp", "callback", "fsdp1", "fsdp2")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., None]) -> Any:
    """What each of the two found."""
    folder = tmp_path_factory.mktemp("self_check")
    torchrun(Path(__file__).parent / "self_check_run.py", str(folder), *KINDS)
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_equal_ranks_say_so_once(kind: str, ranks: Any) -> None:
    first, second = (rank[kind]["checked"] for rank in ranks)
    (line,) = first["lines"]
    assert "equals stock on" in line
    assert "gradients of 21 parameters" in line
    if kind.startswith("fsdp"):
        assert first["whole"] == second["whole"] < 1e-6, "of all processes"
        assert first["loss"] == second["loss"] < 1e-6
    else:
        assert second["lines"] == []


@pytest.mark.parametrize("kind", ["ddp", "callback"])
def test_training_is_the_same_to_the_bit(kind: str, ranks: Any) -> None:
    for rank in ranks:
        for name in ("losses", "norms"):
            assert rank[kind]["checked"][name] == rank[kind]["plain"][name]


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_rank_stops_all(kind: str, ranks: Any) -> None:
    said = [rank[kind]["wrong"]["error"] for rank in ranks]
    assert "'cce', LlamaForCausalLM differs from stock" in said[0]
    assert said[0] == said[1]
