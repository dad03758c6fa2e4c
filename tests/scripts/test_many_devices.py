"""The measurement on several devices, run with two CPU processes; and what its table says of wrong and broken runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
WRONG = """
from loss_plugins.strategies.naive import Naive

class Wrong(Naive):
    name = "wrong"

    def __call__(self, rows, options, profile):
        found = super().__call__(rows, options, profile)
        return found._replace(loss=found.loss * 1.05)

STRATEGY = Wrong()
"""


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclass looks there for its types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Any:
    return loaded("many_devices")


def run(folder: Path, path: str, *words: str) -> dict[str, Any]:
    (folder / "wrong_loss.py").write_text(WRONG)
    output = folder / "results.json"
    sizes = ["--model", "tiny", "--device", "cpu", "--batch", "2", "--length", "24", "--steps", "2"]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "many_devices.py"), *sizes, "--output", str(output), *words], env=environment,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert (folder / "results.md").read_text() in done.stdout
    return json.loads(output.read_text())


def check_training(rows: list[dict[str, Any]], counts: tuple[int, ...]) -> None:
    for count in counts:
        found = {row["contender"]: row for row in rows if row["ranks"] == count}
        assert set(found) == {"stock", "cce", "wrong_loss:STRATEGY", "torch eager", "quack chunked"}
        for name in ("stock", "cce", "torch eager"):
            assert found[name]["loss_off"] < 1e-5
            assert found[name]["tokens_per_s"] > 0
            assert found[name]["peak_mib"] > 0
        assert found["cce"]["norm_off"] < 1e-5
        assert found["wrong_loss:STRATEGY"]["loss_off"] == pytest.approx(0.05, abs=1e-3)
        for name in ("wrong_loss:STRATEGY", "quack chunked"):  # the last is not installed
            assert found[name]["failed"]
            assert "tokens_per_s" not in found[name]


CONTENDERS = "stock,cce,wrong_loss:STRATEGY,quack chunked,torch eager"


@pytest.mark.slow
def test_fsdp2_and_a_cut_head(tmp_path: Path) -> None:
    words = ["--engines", "fsdp2,vocab", "--contenders", CONTENDERS, "--shapes", "40x32x997"]
    found = run(tmp_path, "", *words, "--strategies", "cce,chunked")
    rows = found["rows"]
    check_training([row for row in rows if row["kind"] == "training"], (1, 2))
    cut = [row for row in rows if row["kind"] == "vocab"]
    assert [row["contender"] for row in cut] == ["cce", "chunked"]
    for row in cut:
        assert row["ms_one"] > 0
        assert row["faster"] == pytest.approx(row["ms_one"] / row["ms"])
        assert max(row["loss_off"], row["hidden_off"], row["weight_off"]) < 1e-5
    table = (tmp_path / "results.md").read_text()
    assert found["date"] in table
    assert "2 x " in table
    (line,) = [line for line in table.splitlines() if line.startswith("| wrong_loss")]
    assert line.count("wrong: loss off by 5.0e-02") == 2


@pytest.mark.slow
def test_zero3(tmp_path: Path, deepspeed_path: str) -> None:
    found = run(tmp_path, deepspeed_path, "--engines", "zero3", "--ranks", "2", "--contenders", CONTENDERS)
    check_training(found["rows"], (2,))


def test_a_run_that_hangs_or_ends_badly_is_said(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "rank.py"
    monkeypatch.setattr(script, "RANK", fake)
    settings = {"device": "cpu", "model": "tiny"}
    first = 'import json, sys\nsettings = json.load(open(sys.argv[1]))\nopen(settings["lines"], "a").write('
    first += (
        '\'{"kind": "training", "engine": "fsdp2", "model": "tiny", "contender": "stock", "ranks": 1, "ms": 1}\\n\')\n'
    )
    fake.write_text(first + "sys.exit(3)\n")
    rows = script.launch("fsdp2", 1, settings, 100)
    assert [row["contender"] for row in rows] == ["stock", "(the run)"]
    assert "ended with" in rows[1]["failed"]
    fake.write_text("import time\ntime.sleep(100)\n")
    (row,) = script.launch("fsdp2", 1, settings, 8)
    assert "no answer within 8 s" in row["failed"]
    table = "\n".join(script.training_table([*rows, row]))
    assert "no answer" in table or "ended with" in table


def test_numbers_that_are_wrong_or_no_numbers_get_no_speed(script: Any) -> None:
    judged = loaded("many_devices_rank").judged
    right = {"loss_off": 1e-4, "norm": 2.0, "ms": 1.0, "ms_low": 1.0, "ms_high": 1.0, "tokens_per_s": 5.0}
    assert judged(dict(right), 2.0)["tokens_per_s"] == 5.0
    assert judged(dict(right), None)["tokens_per_s"] == 5.0
    for change in ({"loss_off": 0.02}, {"loss_off": float("nan")}, {"norm": 3.0}, {"norm": float("nan")}):
        row = judged(right | change, 2.0)
        assert row["failed"].startswith("wrong")
        assert "tokens_per_s" not in row
        assert "ms" not in row


@pytest.mark.parametrize(("ranks", "engines"), [([0], ["fsdp2"]), ([], ["fsdp2"]), ([1], ["ddp"])])
def test_what_is_unknown_is_refused(ranks: list[int], engines: list[str], script: Any) -> None:
    with pytest.raises((script.ConfigError, ValueError)):
        script.check(ranks, engines, "cpu")
