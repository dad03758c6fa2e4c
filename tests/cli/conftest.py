"""The tiny job as a fixture, and any command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_job import CHAT_TEMPLATE, POEM, VOCAB, Job
from typer.testing import CliRunner

from loss_plugins.cli.main import app
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
