"""What the script that runs axolotl says of runs; axolotl itself is run by tests/frameworks/test_axolotl_sharded_run.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

SCRIPTS = Path(__file__).parents[2] / "scripts"
LOSSES = [11.5 - 0.1 * step for step in range(12)]


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("axolotl_runs", SCRIPTS / "axolotl_runs.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def row(loss: str, factor: float = 1.0, **more: Any) -> dict[str, Any]:
    """A run whose losses are off by a factor from the fifth step on."""
    losses = [value * (1 if step < 5 else factor) for step, value in enumerate(LOSSES)]
    numbers = {"ms": 12.0, "tokens_per_s": 1e5, "peak_mib": 900.0, "peak_loss_mib": 0.0, "losses": losses}
    return {"kind": "full", "loss": loss, "ranks": 1, **numbers, **more}


@pytest.mark.parametrize(
    ("ours", "halves", "dtype", "same"),
    [
        (1 + 1e-3, 1.0, "bfloat16", True),  # below 2^-9
        (1 + 3e-3, 1.0, "bfloat16", False),
        (1 + 3e-3, 1 - 2e-3, "bfloat16", True),  # below three times stock's own
        (1 - 7e-3, 1 + 2e-3, "bfloat16", False),
        (1 + 5e-5, 1 + 1e-2, "float32", True),
        (1 - 2e-4, 1 + 1e-2, "float32", False),
    ],
)
def test_ours_may_differ_by_what_rounding_does(script: Any, ours: float, halves: float, dtype: str, same: bool) -> None:
    rows = [row("stock"), row("ours", ours), row("stock in halves", halves), {**row("ours"), "kind": "lora"}]
    script.compare(rows, dtype)
    assert rows[1]["off"] == pytest.approx(abs(ours - 1))
    assert rows[1]["same"] is same
    assert "same" not in rows[2] and "off" not in rows[0]
    assert "same" not in rows[3], "nothing to compare with"


def test_what_only_comes_later_is_not_compared(script: Any) -> None:
    late = row("ours")
    late["losses"][-1] *= 2
    rows = [row("stock"), late]
    script.compare(rows, "float32")
    assert rows[1]["same"]


def test_the_last_error_is_told(script: Any) -> None:
    output = """Traceback (most recent call last):
ValueError: the first | of two

[rank1]: torch.OutOfMemoryError: CUDA out of memory.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  error_file: <N/A>
"""
    assert script.last_error(output) == "torch.OutOfMemoryError: CUDA out of memory."
    assert script.last_error(output[:70]) == "ValueError: the first | of two"
    assert script.last_error("Killed\n") == ""


@pytest.mark.parametrize(
    ("kind", "loss", "found", "said"),
    [
        ("full", "ours", {"hits": 3, "materialised": 0}, None),
        ("full", "ours", {"hits": 0, "materialised": 2}, "0 losses went through us, and 2 logits were made"),
        ("full", "ours", {}, "0 losses went through us"),
        ("full", "stock", {"hits": 3, "materialised": 0}, "the model was patched"),
        ("fsdp2+lora", "stock", {}, "no weight is cut"),
        ("fsdp2+lora", "stock", {"sharded": True}, None),
        ("qlora", "stock", {"weights": ["bfloat16"]}, "no weight has 4 bits: bfloat16"),
        ("qlora", "stock", {"weights": ["4 bits", "bfloat16"]}, None),
    ],
)
def test_a_run_that_did_something_else_is_no_run(
    script: Any, kind: str, loss: str, found: dict[str, Any], said: str | None
) -> None:
    jobs = script.Jobs.__new__(script.Jobs)
    jobs.settings = {"ranks": 1}
    told = jobs.missing(kind, loss, [{"sharded": False, "weights": [], "materialised": 0, **found}])
    assert told is None if said is None else told.startswith(said)
    assert jobs.missing(kind, loss, []) == "0 of 1 processes came to the end of training"


def test_the_table_tells_failures_and_verdicts(script: Any, tmp_path: Path) -> None:
    ours = row("ours", 1.01, hits=12, kernels=["triton.a"])
    rows = [row("stock"), ours, {"kind": "full", "loss": "liger", "ranks": 1, "failed": "a | b"}]
    script.compare(rows, "bfloat16")
    settings = {"model": "1b", "dtype": "bfloat16", "ranks": 1, "batch": 4, "length": 2048, "steps": 12, "warm": 2}
    run = {
        "date": "2026", "command": "python x", "device": "1 x GPU", "environment": {"versions": {"torch": "2"}},
        "settings": settings | {"checkpointing": True}, "rows": rows, "notes": ["A note."],
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    script.main(source=tmp_path / "run.json", output=tmp_path / "run.md")
    text = (tmp_path / "run.md").read_text()
    assert "| ours | 11.5000, 10.7060 | 1.0e-02 (BEYOND 2.0e-03) | 12.0 | 100,000 | 900 |  | 12 | triton.a |" in text
    assert "| liger | a / b |" in text
    assert text.endswith("A note.\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kinds", "full,loar"], "unknown: ['loar']"),
        (["--losses", "stock,our"], "unknown: ['our']"),
        (["--model", "2b"], "--model is '2b'"),
        (["--dtype", "float16"], "--dtype is 'float16'"),
        (["--device", "cpu"], "Give --dtype float32"),
        (["--steps", "5"], "--steps is 5"),
        (["--batch", "3"], "--batch is 3, which has no halves"),
    ],
)
def test_refusals(script: Any, given: list[str], said: str) -> None:
    done = CliRunner().invoke(script.app, ["--device", "cuda", *given], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 2
    assert said in done.output
