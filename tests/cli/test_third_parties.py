"""Another package's strategy, model families, kernels and objectives, found by entry point and used from YAML.

The package is laid as pip would: a module and its ``dist-info`` on ``sys.path``.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import MODEL, Job
from transformers import LlamaConfig, LlamaForCausalLM

from loss_plugins import patch_model
from loss_plugins.device import DeviceProfile
from loss_plugins.errors import ConfigError
from loss_plugins.kernels import ops
from loss_plugins.models.families import FAMILIES, family_of
from loss_plugins.objectives import OBJECTIVES
from loss_plugins.strategies import STRATEGIES, Problem
from loss_plugins.strategies._options import BACKENDS

PACKAGE = """
from dataclasses import dataclass, field

from loss_plugins.kernels import torch as torch_kernels
from loss_plugins.models.families import ModelFamily
from loss_plugins.strategies.naive import STRATEGY as naive


@dataclass(frozen=True)
class Options:
    factor: float = field(default=2.0, metadata={"help": "What the loss is multiplied by."})


class Multiplied:
    name = "multiplied"
    summary = "naive, multiplied"
    Options = Options

    def check(self, problem, profile, options):
        return None

    def peak_bytes(self, problem, options):
        return naive.peak_bytes(problem, naive.Options())

    def kernels(self, profile, options):
        return "torch"

    def __call__(self, rows, options, profile):
        result = naive(rows, naive.Options(), profile)
        return result._replace(loss=result.loss * options.factor)


class Kernels:
    # those of torch, counted

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        function = getattr(torch_kernels, name)

        def counted(*args):
            self.calls.append(name)
            results = function(*args)
            return (*results[:6], results[6].new_zeros(0, 0)) if name == "linear_ce_forward" else results

        return counted

    def obstacle(self, profile):
        return None if profile.kind == "cpu" else "acme has kernels for CPUs only"


class Sixth:
    name = "sixth"
    summary = "the sixth part of cross-entropy"

    def __call__(self, log_probs):
        return -log_probs / 6


BACKEND = Kernels()
OBJECTIVE = Sixth()
STRATEGY = Multiplied()
HIDDEN_HEAD = ModelFamily(("acme",), "Its head is called lm_head, and no method says so.", head="lm_head")
REFUSED = ModelFamily(("mistral",), "Refused here.", "unsupported", "the package acme says so")
"""
ENTRIES = """
[loss_plugins.strategies]
multiplied = acme_package:STRATEGY
[loss_plugins.kernels]
acme = acme_package:BACKEND
[loss_plugins.objectives]
sixth = acme_package:OBJECTIVE
[loss_plugins.models.families]
acme = acme_package:HIDDEN_HEAD
acme_mistral = acme_package:REFUSED
"""


def install(folder: Path, entries: str) -> None:
    (folder / "acme_package.py").write_text(PACKAGE)
    info = folder / "acme_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture
def acme(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs the package with other entries than usual."""
    folder = tmp_path_factory.mktemp("site")

    def put(entries: str) -> None:
        install(folder, entries)
        monkeypatch.syspath_prepend(folder)

    yield put
    sys.modules.pop("acme_package", None)
    ops._added.clear()


def test_all_groups_are_those_of_pyproject() -> None:
    groups = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    ours = {name for name in groups if name.startswith("loss_plugins.")}
    assert ours == {STRATEGIES.package, FAMILIES.package, BACKENDS.package, OBJECTIVES.package}


def test_a_strategy_from_yaml(job: Job, acme: Callable[[str], None], invoke: Callable[..., Any]) -> None:
    assert "Unknown loss strategy 'multiplied'" in job.refused(loss_strategy="multiplied")
    acme(ENTRIES)
    stock = job.done(loss_strategy="naive", learning_rate=0.0)["strategies"]["naive"]
    ours = job.done(loss_strategy="multiplied", loss_options={"factor": 3.0}, learning_rate=0.0)
    assert ours["strategies"]["multiplied"]["losses"] == pytest.approx([3 * loss for loss in stock["losses"]])
    assert "Did you mean 'factor'" in job.refused(loss_strategy="multiplied", loss_options={"facto": 3.0})
    listed = json.loads(invoke("strategies", "--json").output)
    assert next(s for s in listed if s["name"] == "multiplied")["options"][0]["name"] == "factor"


@pytest.mark.parametrize(("strategy", "kernels"), [("flce", "acme"), ("cce", "acme_package:BACKEND")])
def test_kernels_from_yaml(job: Job, acme: Callable[[str], None], strategy: str, kernels: str) -> None:
    assert "Unknown value of kernels: 'acme'" in job.refused(loss_strategy=strategy, loss_options={"kernels": "acme"})
    acme(ENTRIES)
    stock = job.done(loss_strategy=strategy, loss_options={"kernels": "torch"})["strategies"][strategy]
    ours = job.done(loss_strategy=strategy, loss_options={"kernels": kernels})["strategies"][strategy]
    assert ours["losses"] == stock["losses"]
    names = {"flce": {"flce_forward", "scale_"}, "cce": {"linear_ce_forward", "linear_ce_backward"}}[strategy]
    assert set(sys.modules["acme_package"].BACKEND.calls) == names
    assert {kernel.rpartition(".")[0] for kernel in ours["kernels"]} == {kernels}


@pytest.mark.parametrize("objective", ["sixth", "acme_package:OBJECTIVE"])
def test_an_objective_from_yaml(job: Job, acme: Callable[[str], None], objective: str) -> None:
    assert "Unknown loss objective 'sixth'" in job.refused(loss_strategy="cce", loss_objective="sixth")
    acme(ENTRIES)
    stock = job.done(loss_strategy="cce", learning_rate=0.0)["strategies"]["cce"]
    ours = job.done(loss_strategy="cce", loss_objective=objective, learning_rate=0.0)["strategies"]["cce"]
    assert ours["losses"] == pytest.approx([loss / 6 for loss in stock["losses"]], rel=1e-5)


def test_kernels_for_another_device_are_refused(acme: Callable[[str], None]) -> None:
    acme(ENTRIES)
    strategy = STRATEGIES.get("cce")
    problem, profile = Problem(rows=8, hidden=8, vocab=8), DeviceProfile("cuda")
    why = strategy.check(problem, profile, strategy.Options(kernels="acme"))
    assert why == "kernels='acme' was asked for, but acme has kernels for CPUs only"
    assert strategy.check(problem, DeviceProfile("cpu"), strategy.Options(kernels="acme")) is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("acme = acme_package:NOTHING", "kernel backend 'acme' of the package acme-package could not be loaded"),
        ("acme = acme_package:REFUSED", "points at a ModelFamily without obstacle, linear_ce_forward"),
    ],
)
def test_broken_kernels_are_named(acme: Callable[[str], None], entry: str, words: str) -> None:
    acme(f"[loss_plugins.kernels]\n{entry}\n")
    with pytest.raises(ConfigError) as caught:
        STRATEGIES.get("cce").Options(kernels="acme")
    assert words in str(caught.value)


def test_a_family_from_yaml(job: Job, acme: Callable[[str], None]) -> None:
    config = {**MODEL, "model_type": "mistral"}
    assert job.done(loss_strategy="cce", model_config=config)["strategies"]["cce"]["losses"]
    acme(ENTRIES)
    result = job.run(loss_strategy="cce", model_config=config)
    assert result.exit_code == 2
    assert "cannot be patched: the package acme says so" in result.stderr


def test_a_family_that_knows_the_head(acme: Callable[[str], None]) -> None:
    class Config(LlamaConfig):
        model_type = "acme"

    class Model(LlamaForCausalLM):
        config_class = Config

        def get_output_embeddings(self) -> None:
            return None

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Model(Config(vocab_size=100, tie_word_embeddings=False, **sizes)).train()
    ids = torch.randint(0, 100, (2, 9))
    stock = model(input_ids=ids, labels=ids).loss
    acme(ENTRIES)
    assert family_of("acme") is not None
    with patch_model(model, "cce") as handle:
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, stock)
        assert handle.counts.fused == 1
        assert "Its head is called lm_head, and no method says so." in handle.explain()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("acme = acme_package:NOTHING", "model family 'acme' of the package acme-package could not be loaded"),
        ("acme = acme_missing:X", "model family 'acme' of the package acme-package could not be loaded"),
        ("acme = acme_package:STRATEGY", "points at a Multiplied without model_types"),
    ],
)
def test_a_broken_family_is_named(acme: Callable[[str], None], entry: str, words: str) -> None:
    acme(f"[loss_plugins.models.families]\n{entry}\n")
    with pytest.raises(ConfigError) as caught:
        family_of("llama")
    assert words in str(caught.value)
