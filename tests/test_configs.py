"""Every YAML of configs/ loads, explains each of its keys, and the single-strategy jobs are the quickstart's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from loss_plugins.cli._settings import read_job
from loss_plugins.cli.main import app
from loss_plugins.integrations.hf.job import SETTINGS, run
from loss_plugins.strategies import STRATEGIES

CONFIGS = Path(__file__).parent.parent / "configs"
FRAMEWORKS = [file for file in sorted((CONFIGS / "frameworks").glob("*.yaml")) if file.stem != "verl"]
FILES = sorted(CONFIGS.glob("*.y*ml"))  # accelerate/ has the launcher's, see cli/test_launch.py


def values_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text())
    return loaded


def test_there_is_one_for_each_strategy() -> None:
    names = {file.stem for file in FILES}
    assert {"quickstart", *STRATEGIES.names()} <= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')  # what configs/lora.yaml tells users to bring
    read_job(file, ["--use_cpu"], SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_comment_stands_above_each_key(file: Path) -> None:
    lines = file.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\w+:", line):
            assert above.startswith("# "), f"{line!r} has no comment above it"
            assert not above.startswith("# ---"), f"{line!r} has a heading above it, and no comment of its own"
        assert len(line) <= 120


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_says_where_files_are_looked_for(file: Path) -> None:
    head = file.read_text().split("# --- ")[0]
    assert "from the current folder" in head
    assert "train --keys" in head


@pytest.mark.parametrize("name", ["naive", "chunked", "flce", "cce"])
def test_it_is_the_quickstart_with_one_strategy(name: str) -> None:
    own = {"loss_strategy", "loss_options", "loss_statistics", "strategies", "output_dir"}
    one, whole = values_of(f"{name}.yaml"), values_of("quickstart.yaml")
    assert one["loss_strategy"] == name
    assert {k: v for k, v in one.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}


def test_the_quickstart_is_the_job_that_the_readme_describes() -> None:
    values = values_of("quickstart.yaml")
    assert values["strategies"] == ["naive", "chunked", "flce", "cce"]
    assert values["model_config"]["vocab_size"] >= 32768
    assert values["tokenizer_vocab_size"] >= 32768
    assert values["dtype"] == "float32"
    assert values["logging_steps"] == 1
    assert values["output_dir"] == "outputs/quickstart"


@pytest.mark.slow
def test_the_quickstart_agrees_and_saves_memory(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path / "out"), "--max_steps", "3", "--disable_tqdm", "true"]
    results = run(*read_job(CONFIGS / "quickstart.yaml", words, SETTINGS)).summary["strategies"]
    naive = results["naive"]
    for name in ("chunked", "flce", "cce"):
        assert results[name]["losses"] == pytest.approx(naive["losses"], abs=1e-3)
        assert results[name]["loss_peak_bytes"] < naive["loss_peak_bytes"] / 3


@pytest.mark.parametrize("file", FRAMEWORKS, ids=lambda file: file.stem)
def test_a_framework_s_file_asks_for_nothing_in_vain(file: Path) -> None:
    """The frameworks' own commands train by these in tests/frameworks, where they are installed."""
    said = CliRunner().invoke(app, ["doctor", str(file)])
    assert said.exit_code == 0, said.output
    assert said.output.splitlines()[-1].startswith(("All is well.", "The file is well, but"))
    assert f"configs/frameworks/{file.name}" in file.read_text().splitlines()[0]
