"""axolotl's own command, stock and with ours. Needs axolotl: `bash scripts/frameworks.sh axolotl` installs and runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_job import (
    SMALLEST,
    WIDE,
    Runs,
    assert_lower,
    assert_same,
    assert_same_in_all,
    assert_ten_steps,
    assert_trained,
    assert_untouched,
    command,
    history,
    make_model,
    needs,
    pairs,
    read_config,
    read_meter,
    read_peak,
    snippet,
    write_entry_points,
    write_jsonl,
    write_meter,
    write_yaml,
)

pytestmark = [pytest.mark.slow, needs("axolotl", "axolotl")]

STEPS = 10
KEYS: dict[str, Any] = {
    "base_model": "./tiny",
    "datasets": [{"path": "./text.jsonl", "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "./prepared",
    "sequence_len": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "num_epochs": 10,
    "learning_rate": 0.01,
    "optimizer": "adamw_torch",
    "lr_scheduler": "constant",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "logging_steps": 1,
    "save_steps": STEPS,
    "val_set_size": 0.25,
    "eval_steps": STEPS // 2,
    "seed": 7,
}
PLUGIN = {"plugins": ["loss_plugins.integrations.axolotl.LossPlugin"]}
CUDA_ONLY = {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, **CUDA_ONLY}
PACKED = {
    "sample_packing": True,
    "sdp_attention": True,
    "pad_to_sequence_len": True,
    "dataset_prepared_path": "./packed",
}
KINDS: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "packed": PACKED}

RL = {"learning_rate": 0.002, "val_set_size": 0, "gradient_accumulation_steps": 1, "eval_steps": None}


def rl(kind: str, data: str, **more: Any) -> dict[str, Any]:
    """A job on data that has the columns of its trainer already."""
    data_keys = {"datasets": [{"path": f"./{data}.jsonl", "ds_type": "json"}], "dataset_prepared_path": f"./{data}"}
    return {**RL, **data_keys, "rl": kind, **more}


REWARD = {"reward_funcs": ["rewards.length"], "num_generations": 2, "max_completion_length": 12, "beta": 0.1}
LOG_PROB_KINDS: dict[str, dict[str, Any]] = {
    "dpo": rl("dpo", "preferences"),
    "dpo-lora": rl("dpo", "preferences", **LORA),
    "ipo": rl("ipo", "preferences"),
    "kto": rl("kto", "marked", remove_unused_columns=False),
    "orpo": rl("orpo", "preferences"),
    "simpo": rl("simpo", "preferences", simpo_gamma=0.5),
    "grpo": rl("grpo", "prompts", trl=REWARD),
    "dft": {"use_dft": True},
}


def write_preferences(folder: Path) -> None:
    rows = [{"prompt": a, "chosen": b, "rejected": b[::-1]} for a, b in pairs()]
    write_jsonl(folder / "preferences.jsonl", rows)
    rows = [{"prompt": a, "completion": b, "label": place % 2 == 0} for place, (a, b) in enumerate(pairs())]
    write_jsonl(folder / "marked.jsonl", rows)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": a[: 8 + place]} for place, (a, _) in enumerate(pairs())])
    reward = "def length(completions, **kwargs):\n    return [float(len(str(text)) % 5) for text in completions]\n"
    (folder / "rewards.py").write_text(reward)


class Jobs(Runs):
    """A folder with a model and data, and axolotl's runs in it, each once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entries = folder / "entries"
        make_model(folder / "tiny")
        make_model(folder / "wide", WIDE)
        self.meter = write_meter(folder / "meter")
        self.elsewhere = write_meter(folder / "elsewhere", uninstalled=True)
        write_jsonl(folder / "text.jsonl", [{"text": f"{a} {b}"} for a, b in pairs()])
        write_preferences(folder)
        write_entry_points(self.entries)

    def run(
        self, name: str, keys: dict[str, Any], installed: bool | None = None, measured: bool = False
    ) -> tuple[int, str]:
        """``installed``: whether axolotl can find us by itself; by default as it happens to be here."""
        write_yaml(self.folder / f"{name}.yaml", {**KEYS, "output_dir": f"./{name}", **keys})
        paths = (self.entries,) if installed else (self.elsewhere,) if installed is False else ()
        paths = (*paths, self.meter) if measured else paths
        return command(self.folder, "-m", "axolotl.cli.train", f"{name}.yaml", paths=paths)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("axolotl"))


@pytest.mark.short
def test_ten_steps(jobs: Jobs) -> None:
    """Where we are not installed; with the README's lines; and with these deleted again, where we are."""
    keys = {"base_model": "./wide"}
    stock = jobs.history("stock-ten", keys, installed=False)
    stock_peak, modules = read_meter(jobs.folder)
    assert modules == []
    ours = jobs.history("ours-ten", {**keys, **snippet("axolotl"), **SMALLEST}, measured=True)
    our_peak, modules = read_meter(jobs.folder)
    assert "loss_plugins.models.patch" in modules
    assert_as_stock(jobs, "ten", ours, stock)
    assert_lower("axolotl full", our_peak, stock_peak)
    assert_untouched(jobs.history("deleted-ten", keys, installed=True), stock)


@pytest.mark.parametrize("kind", ["lora", "packed"])
def test_other_kinds(jobs: Jobs, kind: str) -> None:
    stock = jobs.history(f"stock-{kind}", KINDS[kind])
    ours = jobs.history(f"ours-{kind}", {**snippet("axolotl"), **KINDS[kind]})
    assert_as_stock(jobs, kind, ours, stock)


def assert_as_stock(jobs: Jobs, kind: str, ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    assert_ten_steps(ours, stock)
    assert all(entry["loss_plugins/entropy"] > 0 for entry in ours)
    assert all(0 <= entry["loss_plugins/token_accuracy"] <= 1 for entry in ours)
    evaluations = [history(jobs.folder / f"{name}-{kind}", "eval_loss") for name in ("ours", "stock")]
    assert len(evaluations[0]) >= 2
    ours_eval, stock_eval = ([entry["eval_loss"] for entry in entries] for entries in evaluations)
    assert ours_eval == pytest.approx(stock_eval, rel=1e-4)


@pytest.mark.parametrize("kind", LOG_PROB_KINDS)
def test_losses_made_of_log_probabilities(jobs: Jobs, kind: str) -> None:
    stock = jobs.history(f"stock-{kind}", LOG_PROB_KINDS[kind])
    ours = jobs.history(f"ours-{kind}", {**PLUGIN, **LOG_PROB_KINDS[kind], "loss_strategy": "cce"})
    assert len(ours) == STEPS
    assert_same_in_all(ours, stock, but=("time", "per_sec", "memory", "tokens/"))


@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo", "dft"])
def test_memory_is_lower(jobs: Jobs, kind: str) -> None:
    keys = {**{**KINDS, **LOG_PROB_KINDS}[kind], "base_model": "./wide", "max_steps": 1, "save_steps": 1}
    peaks = []
    for name, ours in (("stock", {}), ("ours", {**PLUGIN, **SMALLEST})):
        assert_trained(*jobs.run(f"{name}-wide-{kind}", {**keys, **ours}, measured=True))
        peaks.append(read_peak(jobs.folder))
    assert_lower(f"axolotl {kind}", peaks[1], peaks[0])


@pytest.mark.parametrize(("name", "kind"), [("axolotl", "full"), ("axolotl_dpo", "dpo")])
def test_the_file_in_configs(jobs: Jobs, name: str, kind: str) -> None:
    """With a tiny model, data and float32 in place of what it names."""
    given = read_config(name)
    tiny = {**KEYS, "eval_steps": 2, **{**KINDS, **LOG_PROB_KINDS}[kind], "max_steps": 2, "save_steps": 2}
    assert len(jobs.history(name, {**given, **tiny, "output_dir": f"./{name}"})) == 2


def test_found_by_itself(jobs: Jobs) -> None:
    stock = jobs.history("stock-full", {})
    ours = jobs.history("found", {"loss_strategy": "chunked", "loss_options": {"workspace_mb": 1}}, installed=True)
    assert len(ours) == STEPS
    assert_same(ours, stock)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"loss_strategy": "ccee"}, "Unknown loss strategy 'ccee'. Did you mean 'cce'?"),
        ({"loss_strategy": "cce", "loss_options": {"filtr": "off"}}, "Did you mean 'filter'?"),
        ({"loss_strategi": "cce"}, "Unknown loss setting 'loss_strategi'. Did you mean 'loss_strategy'?"),
        ({"loss_strategy": "cce", "chunked_cross_entropy": True}, "the line `chunked_cross_entropy: true` asks for"),
        ({"loss_strategy": "cce", "reward_model": True}, "reward_model: true and loss_strategy 'cce' were both given"),
    ],
    ids=["strategy", "option", "misspelled", "two-losses", "reward"],
)
def test_refusals_are_validation_errors(jobs: Jobs, keys: dict[str, Any], sentence: str) -> None:
    code, output = jobs.run("refused", {**PLUGIN, **keys})
    assert code != 0
    assert "validation error" in output
    assert sentence in output
    assert not list((jobs.folder / "refused").glob("checkpoint-*"))


def test_axolotls_other_losses_are_refused(jobs: Jobs) -> None:
    keys = {"plugins": [*PLUGIN["plugins"], "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}
    code, output = jobs.run("refused", {**keys, "loss_strategy": "cce"})
    assert code != 0
    assert "`- axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin` asks for another loss" in output
