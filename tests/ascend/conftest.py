"""These tests run where triton-ascend is, which takes the place of Triton: in the environment of scripts/ascend.sh.

Elsewhere nothing here is collected; the host half of the same code is tested in tests/kernels/test_ascend_host.py.
"""

from __future__ import annotations

import importlib.metadata
import os

import pytest

try:
    importlib.metadata.version("triton-ascend")
except importlib.metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
else:
    # tests/conftest.py asks for Triton's interpreter, which would compile nothing
    os.environ["TRITON_INTERPRET"] = "0"


@pytest.fixture(scope="session", autouse=True)
def _driver():
    """Launches are compiled for a 910B3, noted, and run on this CPU."""
    import ascend_driver

    ascend_driver.install()


@pytest.fixture
def launches():
    """The launches of a test."""
    import ascend_driver

    ascend_driver.forget()
    return ascend_driver.LAUNCHES
