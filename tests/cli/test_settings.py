"""Values of a job's keys: what fits which type, from YAML and from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.trainer_utils import IntervalStrategy

from loss_plugins.cli._settings import read_job, read_overrides
from loss_plugins.errors import ConfigError
from loss_plugins.integrations.hf.job import SETTINGS

MINIMAL = "model_name_or_path: somewhere\nembedded_corpus: python_stdlib\nuse_cpu: true\n"


def read(tmp_path: Path, text: str = "", *words: str) -> tuple[Any, ...]:
    file = tmp_path / "job.yaml"
    file.write_text(MINIMAL + text)
    return read_job(file, words, SETTINGS)


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("learning_rate: 1e-3", "learning_rate", 1e-3),  # YAML 1.1 reads it as text
        ("learning_rate: 1", "learning_rate", 1.0),
        ("max_steps: 1e2", "max_steps", 100),
        ("max_steps: 20.0", "max_steps", 20),
        ("eval_strategy: no", "eval_strategy", IntervalStrategy.NO),  # YAML reads it as false
        ("save_strategy: no", "save_strategy", "no"),
        ('eval_strategy: "no"', "eval_strategy", IntervalStrategy.NO),
        ("bf16: true", "bf16", True),
        ("data_seed: null", "data_seed", None),
        ("report_to: [none]", "report_to", []),
        ("loss_options: {workspace_mb: 4}", "loss_options", {"workspace_mb": 4}),
        ("loss_z_loss: 1e-4", "loss_z_loss", 1e-4),
        ("loss_statistics: [accuracy]", "loss_statistics", ["accuracy"]),
        ("loss_statistics: accuracy", "loss_statistics", ["accuracy"]),
        ("max_steps: 3", "logging_steps", 0.05),
        ("logging_steps: 500", "logging_steps", 500),
        ("eval_strategy: steps", "eval_steps", 500),
    ],
)
def test_values_of_the_file(tmp_path: Path, line: str, key: str, expected: Any) -> None:
    assert getattr(read(tmp_path, line)[0], key) == expected


@pytest.mark.parametrize(
    ("words", "place", "key", "expected"),
    [
        (["--learning_rate", "1e-3"], 0, "learning_rate", 1e-3),
        (["--learning_rate=2"], 0, "learning_rate", 2.0),
        (["--max_steps", "-1"], 0, "max_steps", -1),
        (["--run_name", "5"], 0, "run_name", "5"),
        (["--run_name", "a: b"], 0, "run_name", "a: b"),
        (["--run_name", "2026-01-01"], 0, "run_name", "2026-01-01"),
        (["--eval_strategy", "no"], 0, "eval_strategy", IntervalStrategy.NO),
        (["--packing"], 2, "packing", True),
        (["--packing", "false"], 2, "packing", False),
        (["--loss_options", '{"workspace_mb": 64}'], 0, "loss_options", {"workspace_mb": 64}),
        (["--loss_options.workspace_mb", "64"], 0, "loss_options", {"workspace_mb": 64}),
        (["--loss_options", "null"], 0, "loss_options", None),
        (["--loss_statistics", "accuracy", "entropy"], 0, "loss_statistics", ["accuracy", "entropy"]),
        (["--loss_statistics", "[entropy]"], 0, "loss_statistics", ["entropy"]),
        (["--strategies", "cce"], 3, "strategies", ["cce"]),
        (["--strategies", "cce", "naive"], 3, "strategies", ["cce", "naive"]),
        (["--strategies", "null"], 3, "strategies", None),
        (["--strategies", "null"], 0, "loss_strategy", "cce"),
        (["--loss_statistics", "accuracy"], 0, "loss_statistics", ["accuracy"]),
        (["--lora_r", "4", "--lora_target_modules", "q_proj"], 1, "lora_target_modules", ["q_proj"]),
    ],
)
def test_values_of_the_command_line(tmp_path: Path, words: list[str], place: int, key: str, expected: Any) -> None:
    assert getattr(read(tmp_path, "loss_strategy: cce", *words)[place], key) == expected


def test_overrides_are_read_as_written() -> None:
    found = read_overrides(["--a", "1", "--b-c=x=y", "--d", "--e", "1", "-2", "--f.g-h", "3"])
    assert found == {"a": ["1"], "b_c": ["x=y"], "d": [], "e": ["1", "-2"], "f.g-h": ["3"]}


def test_every_key_of_the_arguments_accepts_its_own_default() -> None:
    import typing
    from dataclasses import MISSING, fields

    from loss_plugins.cli._settings import _fitted

    for cls in SETTINGS:
        hints = typing.get_type_hints(cls)
        for entry in fields(cls):
            if entry.init and entry.default is not MISSING:
                default = getattr(entry.default, "value", entry.default)  # enums are written as text
                assert _fitted(default, hints[entry.name]) == default, entry.name


def test_a_literal_takes_its_members_only() -> None:
    from loss_plugins.cli._settings import _fitted

    assert _fitted(False, Literal[False] | None) is False
    with pytest.raises(ValueError, match="False or null"):
        _fitted(0, Literal[False] | None)


def test_a_refusal_by_training_arguments_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job.yaml was refused by TrainingArguments: .*Correct the key"):
        read(tmp_path, "warmup_steps: -1")
