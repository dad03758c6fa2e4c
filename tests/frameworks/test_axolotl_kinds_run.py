"""axolotl's own command with 4-bit weights, and with FSDP2 in two processes, on a CPU, by the script that runs it on GPUs.

Needs axolotl and bitsandbytes: `bash scripts/frameworks.sh axolotl` installs and runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("axolotl") is None, reason="axolotl is not installed: bash scripts/frameworks.sh axolotl"
    ),
]

SCRIPT = Path(__file__).parents[2] / "scripts" / "axolotl_runs.py"
SMALL = ["--model", "tiny", "--length", "64", "--batch", "2", "--steps", "10", "--warm", "2", "--dtype", "float32"]


@pytest.mark.parametrize(("kinds", "ranks"), [("qlora", 1), ("fsdp2,fsdp2+lora", 2)])
def test_losses_are_stocks(tmp_path: Path, kinds: str, ranks: int) -> None:
    """The script itself sees to it that weights have 4 bits, are cut over the processes, and our path is taken."""
    output = tmp_path / "runs.json"
    given = ["--kinds", kinds, "--ranks", str(ranks), "--more", "", "--rate", "1e-2", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", *SMALL, *given], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 2 * len(kinds.split(","))
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (stock["loss"], ours["loss"]) == ("stock", "ours")
        assert "failed" not in stock, stock["failed"] + done.stderr[-3000:]
        assert "failed" not in ours, ours["failed"] + done.stderr[-3000:]
        assert ours["same"], f"{ours['off']} is more than {ours['bound']}"
        assert ours["bound"] == 1e-4
        assert ours["hits"] == 10
        assert ours["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-3)
        assert len(set(stock["losses"])) == 10
