"""A tiny model and data on disk for frameworks that are driven by YAML, and a way to run their own commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from loss_plugins.integrations.hf.corpus import train_tokenizer

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "loss_plugins" / "integrations" / "README.md"
POEM = [
    "a rose is a rose is a rose, and a rose by any name",
    "the cat sat on the mat while the rat ran round the hat",
    "water, water, everywhere, and all the boards did shrink",
    "tiger tiger burning bright in the forests of the night",
]


def needs(module: str, framework: str) -> pytest.MarkDecorator:
    """A mark for tests of a framework: left out where it is not, unless scripts/frameworks.sh installed it for them."""
    missing = find_spec(module) is None and os.environ.get("LP_FRAMEWORK") != module
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed: bash scripts/frameworks.sh {module}")


def make_model(folder: Path, vocab: int = 320) -> None:
    """Two layers, width 32, and a tokenizer."""
    train_tokenizer(POEM * 4, 300).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=vocab, max_position_embeddings=256, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)


def snippet(framework: str) -> dict[str, Any]:
    """The YAML that the README shows for a framework: a fence of ``yaml FRAMEWORK``."""
    (text,) = re.findall(rf"^```yaml {framework}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def read_config(name: str) -> dict[str, Any]:
    """A file of configs/frameworks."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "frameworks" / f"{name}.yaml").read_text())
    return loaded


def pairs(count: int = 24) -> list[tuple[str, str]]:
    return [(POEM[i % 4], POEM[(i * 3 + 1) % 4][: 20 + i]) for i in range(count)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_entry_points(folder: Path) -> None:
    """The entry points of pyproject.toml, laid beside the package as an installation would, whatever is installed."""
    info = folder / "loss_plugins_entries-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loss-plugins-entries\nVersion: 1.0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def command(folder: Path, *words: str, paths: tuple[Path, ...] = (), **environment: str) -> tuple[int, str]:
    """Exit code and all output of a Python command in ``folder``, on one CPU core and without a network."""
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *before, str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "DO_NOT_TRACK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "COLUMNS": "500",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **here, **environment}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def write_yaml(path: Path, values: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def history(folder: Path, key: str = "loss") -> list[dict[str, Any]]:
    """What the Trainer logged with ``key`` in it, from its last checkpoint in ``folder``: at each step, or evaluation."""
    (state,) = sorted(folder.glob("checkpoint-*/trainer_state.json"))
    return [entry for entry in json.loads(state.read_text())["log_history"] if key in entry]


def assert_trained(code: int, output: str) -> None:
    """A command that went through, and every loss of it through ours where ours was asked for."""
    assert code == 0, output[-3000:]
    assert "NO LOSS WENT THROUGH" not in output
    assert "needs its real logits" not in output


class Runs:
    """A framework's runs in a folder, each once. ``run`` is the framework's own."""

    run: Callable[..., tuple[int, str]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, list[dict[str, Any]]] = {}

    def history(self, name: str, keys: dict[str, Any], *more: Any, **settings: Any) -> list[dict[str, Any]]:
        """What the run logged at each step; it went through."""
        if name not in self.made:
            assert_trained(*self.run(name, keys, *more, **settings))
            self.made[name] = history(self.folder / name)
        return self.made[name]


def assert_same(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    """The same losses and gradients at each step, and our numbers beside ours alone."""
    assert len(ours) == len(stock) > 0
    for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3)):
        assert [e[key] for e in ours] == pytest.approx([e[key] for e in stock], rel=tolerance)
    assert all("loss_plugins/valid_fraction" in entry for entry in ours)
    assert not any(key.startswith("loss_plugins/") for entry in stock for key in entry)


def assert_ten_steps(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    """Ten steps that learn something, with the same losses."""
    assert len(ours) == 10
    assert stock[-1]["loss"] < stock[0]["loss"]
    assert_same(ours, stock)


def assert_untouched(run: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    """The very same losses and gradients, and no number of ours."""
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in run] == [e[key] for e in stock]
    assert not any(key.startswith("loss_plugins/") for entry in run for key in entry)


def assert_lower(name: str, ours: float, stock: float) -> None:
    """A peak that is clearly lower, which is also printed."""
    print(f"{name}: a training step of {WIDE} classes takes {stock:.1f} MiB stock, {ours:.1f} MiB ours")
    assert ours < 0.8 * stock


def assert_same_in_all(ours: list[dict[str, Any]], stock: list[dict[str, Any]], but: tuple[str, ...] = ()) -> None:
    """Every number that stock logs, but those with one of these words in their key: rewards, log-probabilities and mean
    logits too."""
    assert len(ours) == len(stock) > 0
    assert len({entry["loss"] for entry in stock}) > len(stock) // 2
    for mine, theirs in zip(ours, stock, strict=True):
        for key, value in theirs.items():
            if not any(word in key for word in but):
                rel = 1e-3 if key == "grad_norm" else 1e-4
                assert mine[key] == pytest.approx(value, rel=rel, abs=1e-6 if key == "loss" else 1e-4), key


WIDE = 32768
"""Classes of a model whose logits are most of what a training step takes."""
SMALLEST: dict[str, Any] = {"loss_strategy": "cce", "loss_options": {"workspace_mb": 1}}
METER = """
import importlib.metadata, importlib.util, pathlib, sys
from importlib.abc import MetaPathFinder


class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_measure(module):
            load(module)
            measure(module.Trainer)

        spec.loader.exec_module = load_and_measure
        return spec


def measure(Trainer):
    step = Trainer.training_step

    def training_step(self, *args, **kwargs):
        Trainer.training_step = step  # the first alone: watching is slow
        ours = [name for name in sys.modules if name.partition(".")[0] == "loss_plugins"]
        import torch
        from loss_plugins.diagnostics.memory import PeakMeter

        with PeakMeter(torch.device("cpu")) as meter:
            meter.mark()
            loss = step(self, *args, **kwargs)
            pathlib.Path("peak.txt").write_text("\\n".join([str(meter.read()), *ours]))
        return loss

    Trainer.training_step = training_step


sys.meta_path.insert(0, Finder())
"""
UNINSTALLED = """
discover = importlib.metadata.Distribution.discover


def discover_others(**kwargs):
    return (found for found in discover(**kwargs) if not found._path.name.startswith("loss_plugins"))


importlib.metadata.Distribution.discover = discover_others
"""


def write_meter(folder: Path, uninstalled: bool = False) -> Path:
    """A folder for `command`'s paths with which the first training step of any Trainer writes its peak to peak.txt, and
    which modules of ours were imported before it.

    Args:
        folder: Is made if it is not there.
        uninstalled: Also hide that this project is installed, and with it its entry points.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(METER + (UNINSTALLED if uninstalled else ""))
    return folder


def read_meter(folder: Path) -> tuple[float, list[str]]:
    """MiB that the last run's first training step took at its worst, above what lived before it; and our modules."""
    path = folder / "peak.txt"
    peak, *ours = path.read_text().splitlines()
    path.unlink()
    return int(peak) / 2**20, ours


def read_peak(folder: Path) -> float:
    """The first of the two."""
    return read_meter(folder)[0]
