"""What every test shares: Triton's interpreter where there is no GPU, seeds, poisoned memory, the ``gpu`` marker."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, which is when a test file imports one
    os.environ.setdefault("TRITON_INTERPRET", "1")

HERE = Path(__file__).parent
POISONED = (HERE / "kernels", HERE / "strategies")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all``: what is tested on a sample is tested on everything."""
    parser.addoption(
        "--all", action="store_true", help="Every language model class, and every GPU to compile for, not a sample."
    )


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


@pytest.fixture(scope="session")
def several_processes() -> Callable[..., dict[str, Any]]:
    """Runs a worker ``(store, rank)`` several times, and returns the lines of JSON that the first one printed, by their
    "case"."""

    def run(worker: Path, store: Path, seconds: float = 200, count: int = 2) -> dict[str, Any]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        started = [
            subprocess.Popen(
                [sys.executable, worker.name, str(store), str(rank)], cwd=worker.parent, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            with ThreadPoolExecutor(count) as pool:  # none may wait for its output to be read
                said = list(pool.map(lambda process: process.communicate(timeout=seconds), started))
        finally:
            for process in started:
                process.kill()
        failed = [said[rank][1][-3000:] for rank in range(count) if started[rank].returncode]
        assert not failed, "\n".join(failed)
        return {line["case"]: line for line in map(json.loads, said[0][0].splitlines())}

    return run


@pytest.fixture(scope="session")
def two_processes(several_processes: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The same, for what needs no more."""
    return several_processes


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., None]:
    """Runs a script in two processes of torch's own launcher, on a CPU."""

    def run(script: Path, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]

    return run


@pytest.fixture(scope="session")
def deepspeed_path() -> str:
    """What PYTHONPATH takes for deepspeed to be found. It lies in a folder of its own, since transformers and accelerate
    import it, and change their ways, wherever it can be."""
    apart = Path(sys.prefix) / "deepspeed"
    if not apart.is_dir() and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed; scripts/test.sh does so without HERE=1")
    return str(apart)


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
