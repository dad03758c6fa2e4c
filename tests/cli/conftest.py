"""The tiny job as a fixture, and any command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from doctor_files import CPU
from tiny_job import CHAT_TEMPLATE, POEM, VOCAB, Job
from typer.testing import CliRunner

from loss_plugins import npu
from loss_plugins.cli.main import app
from loss_plugins.device import DeviceProfile
from loss_plugins.diagnostics import machine
from loss_plugins.integrations.hf.corpus import train_tokenizer


@pytest.fixture(autouse=True)
def quiet() -> None:
    """The libraries' bars off, so that a failing test shows our own words."""
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE with a chat template, on disk."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(POEM * 4, VOCAB)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    return Job(tmp_path)


@pytest.fixture
def invoke() -> Callable[..., Any]:
    """Any command."""
    return lambda *words: CliRunner().invoke(app, list(words))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The machine has this device, and all packages are in order."""

    def put(profile: DeviceProfile) -> None:
        monkeypatch.setattr(machine, "_profile", lambda: (profile, []))
        monkeypatch.setattr(machine, "_requirements", list)
        monkeypatch.setattr(machine, "_frameworks", list)
        monkeypatch.setattr(machine, "_unused_gpus", list)
        monkeypatch.setattr(npu, "is_meant", lambda: False)

    return put


@pytest.fixture
def doctor(
    invoke: Callable[..., Any], on: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """The command's JSON and exit code, for a device and a file's keys."""
    monkeypatch.chdir(tmp_path)
    for data in ("d.jsonl", "train.jsonl"):  # which files name
        Path(data).touch()
    for framework in ("swift", "verl"):
        lines = f"from loss_plugins.integrations.{framework} import register\nregister({{'loss_strategy': 'cce'}})\n"
        Path(f"{framework}_loss.py").write_text(lines)
    Path("wrong_loss.py").write_text("from loss_plugins.integrations.swift import register\nregister('ccee')\n")
    Path("idle_loss.py").write_text("from loss_plugins.integrations.swift import register\n")

    def run(values: dict[str, Any] | None = None, profile: DeviceProfile = CPU, **words: str) -> dict[str, Any]:
        on(profile)
        arguments = []
        if values is not None:
            path = tmp_path / "file.yaml"
            path.write_text(yaml.safe_dump(values))
            arguments.append(str(path))
        for key, value in words.items():
            arguments += [f"--{key}", value]
        result = invoke("doctor", *arguments, "--json")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        found = json.loads(result.stdout)
        assert result.exit_code == (0 if found["ok"] else 1)
        table = invoke("doctor", *arguments)
        if found["file"] is None and values is not None:  # what is no file is said on stderr
            assert table.exit_code == 2
            return {"code": result.exit_code, **found}
        assert table.exit_code == result.exit_code
        for finding in found["findings"]:
            assert finding["what"] in table.stdout
            assert all(line in table.stdout for line in finding["do"])
        return {"code": result.exit_code, **found}

    return run
