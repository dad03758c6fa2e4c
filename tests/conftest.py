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


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all``: what is tested on a sample is tested on everything."""
    parser.addoption("--all", action="store_true", help="Every language model class of transformers, not a sample.")


def runs_here(item: pytest.Item) -> bool:
    """Whether this machine has what a test runs on: a GPU, or Triton's interpreter for its kernels on a CPU."""
    if not torch.cuda.is_available():
        return item.get_closest_marker("gpu") is None
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return not (parameters.get("backend") == "triton" and parameters.get("device") == "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine cannot run."""
    config.hook.pytest_deselected(items=[item for item in items if not runs_here(item)])
    items[:] = [item for item in items if runs_here(item)]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def auto_has_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which strategy "auto" takes is said once a process: not in whichever test happens to be the first."""
    from loss_plugins.strategies import STRATEGIES, _select

    monkeypatch.setattr(_select, "_said", set(STRATEGIES.builtin()))


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In tests of kernels and strategies, memory that nobody has written reads as NaN (or the largest integer).

    Without a GPU only: there it would change which of torch's own kernels run, and what they allocate.
    """
    if torch.cuda.is_available() or not any(room in request.path.parents for room in POISONED):
        yield
        return
    # torch fills uninitialised memory while deterministic algorithms are asked for
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
