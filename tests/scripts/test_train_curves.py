"""The comparison of training curves: its data, its statistic, and a whole run of a tiny model."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from loss_plugins.errors import ConfigError

FILE = Path(__file__).parents[2] / "scripts" / "train_curves.py"
VARIANTS = "naive,chunked,flce,cce,cce:filter=off"
SIZES = ["--hidden", "32", "--layers", "1", "--batch", "4", "--length", "16", "--validation-tokens", "256",
         "--learning-rate", "3e-3", "--device", "cpu", "--precision", "float32", "--validations", "3"]  # fmt: skip


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("train_curves", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_curves"] = module  # its dataclass looks there for its types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokens(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    sentences = (f"The {a} of a {b} is {a} {b}, said page {i}.\n" * 3 for i, (a, b) in enumerate(
        (a, b) for a in ("loss", "token", "head", "row") for b in ("model", "kernel", "word") for _ in range(12)
    ))  # fmt: skip
    (folder / "text.txt").write_text("\f".join(sentences))
    output = folder / "tokens.npz"
    words = ["prepare", str(output), str(folder / "text.txt"), "--vocab", "300", "--validation-share", "0.2"]
    result = CliRunner().invoke(script.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return output


def invoke(script: Any, *words: str) -> Any:
    return CliRunner().invoke(script.app, ["run", *words], catch_exceptions=False)


def test_every_document_is_on_one_side_and_ends(script: Any, tokens: Path) -> None:
    data = script.load_tokens(tokens)
    assert data.train.dtype == data.validation.dtype == np.uint32 and data.vocab == 300
    assert data.train.max() < 300
    ends = (data.train == 0).sum(), (data.validation == 0).sum()
    assert sum(ends) == 144 and ends[1] > 10, "an end-of-text token a document, on both sides"


def test_a_run_writes_all_and_finds_the_strategies_equal(script: Any, tokens: Path, tmp_path: Path) -> None:
    result = invoke(script, str(tokens), str(tmp_path), "--steps", "12", "--variants", VARIANTS, *SIZES)
    assert result.exit_code == 0 and "every variant is within" in result.output, result.output
    written = json.loads((tmp_path / "curves.json").read_text())
    assert len(written["runs"]) == 15 and len(written["verdict"]) == 12
    by_variant = {run["variant"]: run for run in written["runs"] if run["seed"] == 1}
    naive = by_variant.pop("naive")
    assert naive["training"][-1] < naive["training"][0] - 0.1, "nothing was trained"
    for run in by_variant.values():
        assert run["training"] == pytest.approx(naive["training"], abs=1e-4)
        assert dict(run["validation"]) == pytest.approx(dict(naive["validation"]), abs=1e-4)
    assert by_variant["flce"]["kernels"] == ["torch.flce_forward"]
    with (tmp_path / "curves.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 15 * 12
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_starved_gradient_is_outside(script: Any, tokens: Path, tmp_path: Path) -> None:
    result = invoke(script, str(tokens), str(tmp_path), "--steps", "20", "--variants", "naive,cce:filter=0.9", *SIZES)
    assert result.exit_code == 1 and "outside seed noise of naive: cce:filter=0.9" in result.output, result.output


def test_a_trained_model_is_fine_tuned(script: Any, tokens: Path, tmp_path: Path) -> None:
    settings = script.Settings(5, 4, 16, 1e-3, "float32", 1, 1, "cpu")
    script.new_model(32, 1, 300, settings)(0).save_pretrained(tmp_path / "model")
    words = ["--steps", "10", "--variants", "naive,cce", "--seeds", "2", "--model", str(tmp_path / "model")]
    result = invoke(script, str(tokens), str(tmp_path / "out"), *words, *SIZES)
    runs = json.loads((tmp_path / "out" / "curves.json").read_text())["runs"]
    assert result.exit_code == 0 and len(runs) == 4, result.output
    assert runs[0]["training"][0] != runs[2]["training"][0], "another seed sees other batches"


def runs_of(script: Any, **curves: list[float]) -> list[Any]:
    """Runs of 10 steps whose losses are flat at these values, one a seed."""
    return [
        script.Run(name, seed, [value] * 10, [(5, value), (10, value)], 1.0, [])
        for name, values in curves.items()
        for seed, value in enumerate(values)
    ]


def test_the_statistic_by_hand(script: Any) -> None:
    measure = script.verdict(runs_of(script, naive=[1.0, 2.0, 3.0], other=[1.1, 2.2, 3.3]))[0]
    assert measure.difference == pytest.approx(0.2) and measure.noise == pytest.approx(1.0)
    # the differences' standard deviation is 0.1; Student's t for two degrees of freedom is 4.303
    assert measure.high - measure.difference == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert measure.within and measure.naive == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("other", "within"),
    [([1.9, 2.9, 3.9], True), ([2.1, 3.1, 4.1], False), ([-0.1, 0.9, 1.9], False), ([1.0, float("nan"), 3.0], False)],
)
def test_what_is_within(script: Any, other: list[float], within: bool) -> None:
    measures = script.verdict(runs_of(script, naive=[1.0, 2.0, 3.0], other=other))
    assert {m.within for m in measures} == {within}


def test_one_bad_validation_in_the_middle_is_found(script: Any) -> None:
    runs = runs_of(script, naive=[1.0, 2.0, 3.0], other=[1.0, 2.0, 3.0])
    runs = [r if r.variant == "naive" else r._replace(validation=[(5, 9.0), r.validation[1]]) for r in runs]
    assert [m.measure for m in script.verdict(runs) if not m.within] == ["validation after 5 steps"]


def test_one_seed_gives_no_verdict(script: Any) -> None:
    with pytest.raises(ConfigError, match="two seeds"):
        script.verdict(runs_of(script, naive=[1.0], other=[1.0]))


def test_too_small_a_budget_is_said_at_once(script: Any, tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Raise --budget-seconds"):
        invoke(script, str(tokens), str(tmp_path), "--variants", "naive,cce", "--budget-seconds", "0.01", *SIZES)


def test_a_larger_job_than_the_budget_takes_fewer_steps(script: Any, tokens: Path, tmp_path: Path) -> None:
    words = ["--variants", "naive,cce", "--steps", "1000000", "--budget-seconds", "6", "--seeds", "2"]
    result = invoke(script, str(tokens), str(tmp_path), *words, *SIZES)
    steps = len(json.loads((tmp_path / "curves.json").read_text())["runs"][0]["training"])
    assert 10 <= steps < 1_000_000 and f"taking {steps}" in result.output


def test_variants_are_read(script: Any) -> None:
    assert script.Variant.parse(" cce:filter=off:workspace_mb=64") == (
        "cce:filter=off:workspace_mb=64", "cce", {"filter": False, "workspace_mb": 64}
    )  # fmt: skip
    assert script.Variant.parse("naive").options is None
    with pytest.raises(ConfigError, match="no variant"):
        script.Variant.parse("cce:filter")
