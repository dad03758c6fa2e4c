"""The kernels compile for GPUs that this machine need not have, with the Triton that is installed, and each tile that
the files of `tuning` give fits the shared memory of its architecture.

The interpreter runs Python, so it accepts much that the compiler does not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).parent / "compile_all.py"


def compile_all(target, folder, *words, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "XDG_CACHE_HOME": str(folder), **variables}
    return subprocess.run(
        [sys.executable, str(SCRIPT), target, *words], env=environment, capture_output=True, text=True
    )


def pytest_generate_tests(metafunc):
    """With --all also those that take the tiles of one that is here, and have as much shared memory."""
    if metafunc.function is test_every_kernel_compiles_and_fits:
        twins = ["sm_89", "gfx90a"] if metafunc.config.getoption("--all") else []
        metafunc.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", *twins])


@pytest.mark.slow
def test_every_kernel_compiles_and_fits(target, tmp_path):
    result = compile_all(target, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert result.stdout.count("shared") >= 14
    # rows that are not aligned are loaded without stages; were all of them so, their memory would prove nothing
    sizes = [int(size) for size in re.findall(r"_dz_kernel 128x128x64 .*shared (\d+)$", result.stdout, re.MULTILINE)]
    assert max(sizes) - min(sizes) >= 32 << 10  # a stage of both operands, at least


def test_a_tile_that_does_not_fit_is_seen(tmp_path):
    """Hopper's tile on a GPU with 99 KiB."""
    tile = {"bytes": 2, "tile": [128, 256, 64], "warps": 8, "stages": 4}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"device": "nvidia-sm86", "kernels": {"linear_ce": [tile]}}))
    result = compile_all("sm_86", tmp_path, LOSS_PLUGINS_TUNED=str(path))
    assert result.returncode != 0
    assert "_linear_ce_kernel 128x256x64" in result.stderr and "of 101376 bytes of shared memory" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_another_number_of_rows_compiles_nothing(target, tmp_path):
    result = compile_all(target, tmp_path, "rows")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    first, others = result.stdout.split("other rows\n")
    assert first.count("shared") >= 3 and not others, others
