"""What every test shares: Triton's interpreter where there is no GPU, seeds, poisoned memory, the ``gpu`` marker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, which is when a test file imports one
    os.environ.setdefault("TRITON_INTERPRET", "1")

HERE = Path(__file__).parent
POISONED = (HERE / "kernels", HERE / "strategies")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In tests of kernels and strategies, memory that nobody has written reads as NaN (or the largest integer)."""
    wanted = not torch.cuda.is_available() and any(room in request.path.parents for room in POISONED)
    if not wanted:
        yield
        return
    # torch fills uninitialised memory while deterministic algorithms are asked for
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
