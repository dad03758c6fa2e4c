"""`LossPluginArguments`: one schema, from YAML, a dict, the command line and a saved file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from loss_plugins import LossConfig, LossPluginArguments
from loss_plugins.errors import ConfigError
from loss_plugins.integrations.hf.keys import own_keys

FULL = {
    "loss_strategy": "cce",
    "loss_options": {"workspace_mb": 8, "preset": "cce_exact"},
    "loss_label_smoothing": 0.1,
    "loss_z_loss": 1e-4,
    "loss_class_weight": [1.0, 2.5],
    "loss_token_weight_key": "weights",
    "loss_statistics": ["accuracy", "entropy"],
}


def test_fields_are_the_configs_own() -> None:
    mine = {f.name: f for f in fields(LossPluginArguments)}
    for f in fields(LossConfig):
        assert mine[f.name].default == f.default
        assert mine[f.name].metadata["help"] == f.metadata["help"]
    assert len(mine) == len(fields(TrainingArguments)) + len(fields(LossConfig)) + 1
    assert mine["loss_self_check"].default is False


def test_defaults_are_the_configs() -> None:
    assert LossPluginArguments(output_dir="out").loss_config() == LossConfig()


def test_from_yaml(tmp_path: Path) -> None:
    text = """
    output_dir: out
    learning_rate: 1e-3
    loss_strategy: cce
    loss_options: {workspace_mb: 8, preset: cce_exact}
    loss_label_smoothing: 0.1
    loss_z_loss: 1e-4
    loss_class_weight: [1.0, 2.5]
    loss_token_weight_key: weights
    loss_statistics: [accuracy, entropy]
    """
    (tmp_path / "job.yaml").write_text(text)
    (args,) = HfArgumentParser(LossPluginArguments).parse_yaml_file(tmp_path / "job.yaml")
    assert args.loss_config() == LossConfig(**FULL)  # type: ignore[arg-type]
    assert args.learning_rate == 1e-3


def test_from_a_dict_beside_other_dataclasses() -> None:
    (args,) = HfArgumentParser(LossPluginArguments).parse_dict({"output_dir": "out", **FULL})
    assert args.loss_config() == LossConfig(**FULL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_strategi"):
        HfArgumentParser(LossPluginArguments).parse_dict({"output_dir": "out", "loss_strategi": "cce"})


def test_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    """YAML 1.1 has 1e-3 as text, since it has no point."""
    path = tmp_path / "job.yaml"
    text = "output_dir: out\nloss_z_loss: 1e-4\nloss_class_weight: [1e-1, 2]\nloss_strategy: cce\n"
    path.write_text(text + "loss_options: {filter: 1e-3, preset: cce, workspace_mb: 64}\n")
    (args,) = HfArgumentParser(LossPluginArguments).parse_yaml_file(str(path))
    options = {"filter": 1e-3, "preset": "cce", "workspace_mb": 64}
    expected = LossConfig("cce", options, loss_z_loss=1e-4, loss_class_weight=[0.1, 2])
    assert args.loss_config() == expected
    values = yaml.safe_load(path.read_text())
    assert values["loss_options"]["filter"] == "1e-3"
    assert LossConfig.of(own_keys(values)) == expected


def test_from_the_command_line() -> None:
    line = [
        "--output_dir", "out", "--loss_strategy", "cce", "--loss_options", '{"workspace_mb": 8, "preset": "cce_exact"}',
        "--loss_label_smoothing", "0.1", "--loss_z_loss", "1e-4", "--loss_class_weight", "1.0", "2.5",
        "--loss_token_weight_key", "weights", "--loss_statistics", "accuracy", "entropy",
    ]  # fmt: skip
    (args,) = HfArgumentParser(LossPluginArguments).parse_args_into_dataclasses(line)
    assert args.loss_config() == LossConfig(**FULL)  # type: ignore[arg-type]


def test_to_dict_and_json() -> None:
    args = LossPluginArguments(output_dir="out", **FULL)
    values = args.to_dict()
    assert {name: values[name] for name in FULL} == FULL
    assert json.loads(args.to_json_string())["loss_options"] == FULL["loss_options"]
    assert args.to_sanitized_dict()["loss_strategy"] == "cce"


def test_saved_and_loaded(tmp_path: Path) -> None:
    args = LossPluginArguments(output_dir="out", **FULL)
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert type(loaded) is LossPluginArguments
    assert loaded.loss_config() == args.loss_config()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_options", "workspace_mb=8", "no JSON object"),
        ("loss_options", "[1]", "no JSON object"),
        ("liger_ops", "yes", "liger_ops must be true, false or a mapping, got the text 'yes'.*--liger_ops 'true'"),
        ("loss_label_smoothing", 1.5, r"loss_label_smoothing must be a number in \[0, 1\], got 1.5"),
        ("loss_label_smoothing", -0.1, r"loss_label_smoothing must be a number in \[0, 1\], got -0.1"),
        ("loss_z_loss", "much", "loss_z_loss must be a number"),
        ("loss_statistics", ["acuracy"], "Did you mean 'accuracy'"),
    ],
)
def test_wrong_values(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossPluginArguments(output_dir="out", **{name: value})


def test_the_two_smoothing_settings_mean_the_same() -> None:
    assert LossPluginArguments(output_dir="out", label_smoothing_factor=0.1).loss_config().loss_label_smoothing == 0.1
    both = LossPluginArguments(output_dir="out", label_smoothing_factor=0.1, loss_label_smoothing=0.1)
    assert both.loss_config().loss_label_smoothing == 0.1
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.2 and loss_label_smoothing=0\.1"):
        LossPluginArguments(output_dir="out", label_smoothing_factor=0.2, loss_label_smoothing=0.1)
