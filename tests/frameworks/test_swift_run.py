"""ms-swift's own command, stock and with ours. Needs it: `bash scripts/frameworks.sh swift` installs and runs it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_job import (
    README,
    ROOT,
    SMALLEST,
    WIDE,
    assert_lower,
    assert_same_in_all,
    assert_ten_steps,
    assert_trained,
    command,
    history,
    make_model,
    needs,
    pairs,
    read_config,
    read_meter,
    snippet,
    write_jsonl,
    write_meter,
    write_yaml,
)

from loss_plugins import LossConfig
from loss_plugins.errors import ConfigError
from loss_plugins.integrations.swift import refuse

needs_swift = needs("swift", "ms-swift")

STEPS = 10
KEYS: dict[str, Any] = {
    "model": "./tiny",
    "model_type": "llama",
    "template": "dummy",
    "dataset": "./chats.jsonl",
    "add_version": False,
    "max_length": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_steps": STEPS,
    "report_to": "none",
    "torch_dtype": "float32",
    "dataset_num_proc": 1,
    "split_dataset_ratio": 0,
    "eval_strategy": "no",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "check_model": False,  # it asks a server whether the model is the newest, and waits where there is no network
}
LORA = {"tuner_type": "lora", "lora_rank": 4, "target_modules": "all-linear"}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swift")
    for name, vocab in (("tiny", 320), ("wide", WIDE)):
        make_model(folder / name, vocab)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    chats = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs()]
    write_jsonl(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    rows = [{"messages": chat, "rejected_response": chat[1]["content"][::-1]} for chat in chats]
    write_jsonl(folder / "preferences.jsonl", rows)
    write_jsonl(
        folder / "marked.jsonl", [{"messages": chat, "label": place % 2 == 0} for place, chat in enumerate(chats)]
    )
    (code,) = re.findall(r"^```python swift\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "loss.py").write_text(code)
    return folder


def trained(
    folder: Path, name: str, paths: tuple[Path, ...] = (), command_name: str = "sft", **keys: Any
) -> list[dict[str, Any]]:
    write_yaml(folder / f"{name}.yaml", {**KEYS, "output_dir": f"./{name}", **keys})
    words = ("-c", "from swift.cli.main import cli_main; cli_main()", command_name, f"{name}.yaml")
    assert_trained(*command(folder, *words, paths=paths))
    return history(folder / name)


@needs_swift
@pytest.mark.short
def test_ten_steps(folder: Path) -> None:
    """With the README's lines, and with these deleted again."""
    meter = (write_meter(folder / "meter"),)
    code = (folder / "loss.py").read_text()
    (folder / "small.py").write_text(code.replace('"cce",', f'"cce", "loss_options": {SMALLEST["loss_options"]},'))
    keys = {"model": "./wide", "tuner_type": "full"}
    ours = trained(folder, "ours-ten", meter, **keys, **{**snippet("swift"), "external_plugins": "small.py"})
    our_peak, modules = read_meter(folder)
    assert "loss_plugins.models.patch" in modules
    stock = trained(folder, "stock-ten", meter, **keys)
    stock_peak, modules = read_meter(folder)
    assert modules == []
    assert_ten_steps(ours, stock)
    assert_lower("swift full", our_peak, stock_peak)
    assert all(0 <= entry["loss_plugins/token_accuracy"] <= 1 for entry in ours)


@needs_swift
@pytest.mark.slow
def test_lora(folder: Path) -> None:
    stock = trained(folder, "stock-lora", **LORA)
    ours = trained(folder, "ours-lora", **LORA, **snippet("swift"))
    assert_ten_steps(ours, stock)


@needs_swift
@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"rlhf_type": "dpo", "tuner_type": "full"},
        {"rlhf_type": "dpo", **LORA},
        {"rlhf_type": "orpo", "tuner_type": "full"},
        {"rlhf_type": "simpo", "tuner_type": "full"},
        {"rlhf_type": "kto", "tuner_type": "full", "dataset": "./marked.jsonl"},
    ],
    ids=["dpo", "dpo-lora", "orpo", "simpo", "kto"],
)
def test_losses_made_of_log_probabilities(folder: Path, keys: dict[str, Any]) -> None:
    (folder / "served.py").write_text("from loss_plugins.integrations.swift import register\nregister('cce')\n")
    keys = {"dataset": "./preferences.jsonl", "learning_rate": 0.002, "command_name": "rlhf", **keys}
    name = f"{keys['rlhf_type']}-{keys['tuner_type']}"
    stock = trained(folder, f"stock-{name}", **keys)
    ours = trained(folder, f"ours-{name}", **keys, external_plugins="served.py", callbacks="loss_plugins")
    assert len(ours) == STEPS
    assert_same_in_all(ours, stock, but=("memory", "time", "speed"))


@needs_swift
@pytest.mark.slow
def test_the_file_in_configs(folder: Path) -> None:
    """With a tiny model, data and float32 in place of what it names."""
    given = read_config("swift")
    plugin = {"external_plugins": str(ROOT / given["external_plugins"]), "output_dir": "./config"}
    assert len(trained(folder, "config", **{**given, **plugin, **KEYS, "max_steps": 2, "save_steps": 2})) == 2


@pytest.mark.parametrize(
    ("args", "template", "words"),
    [
        ({"loss_type": "cross_entropy"}, {}, "loss_type 'cross_entropy' and loss_strategy 'cce'"),
        ({"enable_dft_loss": True}, {}, "enable_dft_loss True"),
        ({}, {"sequence_parallel_size": 2}, "sequence_parallel_size 2"),
        ({"loss_scale": "react"}, {"loss_scale": SimpleNamespace(is_binary_loss_scale=False)}, "loss_scale 'react'"),
    ],
)
def test_refusals(args: dict[str, Any], template: dict[str, Any], words: str) -> None:
    refuse(SimpleNamespace(loss_type=None), SimpleNamespace(template=SimpleNamespace()), LossConfig("cce"))
    with pytest.raises(ConfigError, match=words):
        refuse(SimpleNamespace(**args), SimpleNamespace(template=SimpleNamespace(**template)), LossConfig("cce"))


@pytest.mark.parametrize(
    ("name", "loss_type", "words"),
    [
        ("GRPOTrainer", None, "rlhf_type 'grpo'"),
        ("RewardTrainer", None, "rlhf_type 'reward'"),
        ("DPOTrainer", ["sigmoid"], None),
    ],
)
def test_kinds_of_rlhf(name: str, loss_type: Any, words: str | None) -> None:
    trainer = type(name, (), {"__module__": "swift.rlhf_trainers.some"})()
    if words is None:
        refuse(SimpleNamespace(loss_type=loss_type), trainer, LossConfig("cce"))
        with pytest.raises(ConfigError, match="Leave loss_z_loss out"):
            refuse(SimpleNamespace(loss_type=loss_type), trainer, LossConfig("cce", loss_z_loss=0.1))
        return
    with pytest.raises(ConfigError, match=words):
        refuse(SimpleNamespace(loss_type=loss_type), trainer, LossConfig("cce"))
