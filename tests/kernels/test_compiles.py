"""The kernels compile for GPUs that this machine need not have, with the Triton that is installed.

The interpreter runs Python, so it accepts much that the compiler does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_90 bulk copies", "gfx942"])
def test_every_kernel_compiles(target, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parent / "compile_all.py"
    result = subprocess.run([sys.executable, str(script), target], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert result.stdout.count("shared") >= 6
