"""A head whose rows lie in two processes (gloo): loss, gradients and statistics are those of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vocab_parallel_worker import CUT, SETTINGS, SMALL, VOCAB

from loss_plugins import VocabParallel, linear_cross_entropy
from loss_plugins.errors import ConfigError

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, two_processes: Callable[..., Any]) -> dict[str, Any]:
    """What the two processes found, by case."""
    return two_processes(HERE / "vocab_parallel_worker.py", tmp_path_factory.mktemp("vocab_parallel") / "store")


@pytest.mark.parametrize("strategy", SMALL)
@pytest.mark.parametrize("settings", SETTINGS)
def test_equals_one_process(strategy: str, settings: str, results: dict[str, Any]) -> None:
    result = results[f"{strategy}, {settings}"]
    assert result["equal"], "all processes have the same loss"
    assert result["shape"]
    assert result["type"]
    assert result["size"] > 1e-3
    assert result["count"] >= 5
    assert max(result["loss"], result["gradient"], result["fields"]) < 1e-10


def test_half_types_keep_a_wide_loss(results: dict[str, Any]) -> None:
    result = results["bfloat16"]
    assert result["type"]
    assert result["loss"] < 1e-5
    assert result["gradient"] < 2e-2 * result["size"]


@pytest.mark.parametrize(
    "case",
    [
        "no token",
        "no token, items",
        "one part has all labels",
        "sequence",
        "frozen hidden",
        "frozen weight",
        "log_probs",
        "compiled",
    ],
)
def test_edge_cases(case: str, results: dict[str, Any]) -> None:
    assert results[case]["error"] < 1e-10
    assert results[case].get("nan", False) == (case == "no token")


def test_even_parts_are_torchs_chunks(results: dict[str, Any]) -> None:
    assert results["even"]["bounds"] == [0, len(torch.arange(VOCAB).chunk(2)[0]), VOCAB]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gap", "make a whole without gaps"),
        ("overlap", "make a whole without gaps"),
        ("rows of the weight", "make a whole without gaps"),
        ("other labels", "not the same in every process"),
        ("other tokens", "the same batch and options"),
        ("no such class", f"neither in [0, {VOCAB})"),
        ("whole bias", "bias must be"),
        ("unequal sequence", "Pad the sequence"),
        ("the same part", "make a whole without gaps"),
        ("a gap in what is known", "make a whole without gaps"),
        ("an overlap in what is known", "make a whole without gaps"),
        ("another vocabulary", f"have {VOCAB} classes together, and vocab={VOCAB + 1} was given"),
        ("no gradient", "UnsupportedError"),
    ],
)
def test_refusals_reach_every_process(case: str, words: str, results: dict[str, Any]) -> None:
    """None is left waiting for another."""
    for said in results[case]["said"]:
        assert words in said


@pytest.mark.parametrize("bounds", [(3, 3), (-1, 4), (5, 2), (0.0, 4), (True, 4)])
def test_bounds_that_are_none(bounds: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        VocabParallel(*bounds)


def test_without_processes() -> None:
    with pytest.raises(ConfigError, match="no process group"):
        linear_cross_entropy(
            torch.randn(4, 8), torch.randn(CUT, 8), torch.zeros(4, dtype=torch.long),
            vocab_parallel=VocabParallel(0, CUT),
        )  # fmt: skip
