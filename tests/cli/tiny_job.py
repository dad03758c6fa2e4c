"""A tiny job, as a user would write it, and a way to run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from loss_plugins.cli.main import app

VOCAB = 300
MODEL = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
POEM = [
    "a rose is a rose is a rose, and a rose by any name",
    "the cat sat on the mat while the rat ran round the hat",
    "water, water, everywhere, and all the boards did shrink",
    "tiger tiger burning bright in the forests of the night",
    "so much depends upon a red wheel barrow glazed with rain",
    "the woods are lovely, dark and deep, and miles to go",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Job:
    """A job in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.yaml = folder / "job.yaml"
        self.output = folder / "out"
        self.keys: dict[str, Any] = {
            "loss_strategy": "naive",
            "model_config": dict(MODEL),
            "tokenizer_vocab_size": VOCAB,
            "train_file": str(write_jsonl(folder / "text.jsonl", [{"text": line} for line in POEM])),
            "max_length": 32,
            "packing": True,
            "output_dir": str(self.output),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
        }

    def run(self, *words: str, without: tuple[str, ...] = (), **keys: Any) -> Any:
        """``loss-plugins train job.yaml words...`` with ``keys`` in the YAML."""
        values = {key: value for key, value in (self.keys | keys).items() if key not in without}
        self.yaml.write_text(yaml.safe_dump(values))
        return CliRunner().invoke(app, ["train", str(self.yaml), *words])

    def done(self, *words: str, **keys: Any) -> dict[str, Any]:
        """The summary of a run that must succeed."""
        result = self.run(*words, **keys)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        summary: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return summary

    def refused(self, *words: str, **keys: Any) -> str:
        """The sentence of a run that must be refused before anything is written."""
        before = set(self.folder.iterdir()) | {self.yaml}
        result = self.run(*words, **keys)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 2, result.output
        assert set(self.folder.iterdir()) == before
        assert "Traceback" not in result.output
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        return line.removeprefix("Error: ")
