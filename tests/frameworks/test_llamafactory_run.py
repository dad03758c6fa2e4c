"""LLaMA-Factory's own commands, stock and with ours. Needs it: `bash scripts/frameworks.sh llamafactory` installs and
runs it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from small_job import (
    POEM,
    SMALLEST,
    WIDE,
    Runs,
    assert_same,
    assert_same_in_all,
    command,
    make_model,
    pairs,
    read_config,
    read_peak,
    snippet,
    write_jsonl,
    write_meter,
    write_yaml,
)

from loss_plugins.integrations.llamafactory.hook import install_hook, remove_hook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llamafactory") is None,
        reason="LLaMA-Factory is not installed: bash scripts/frameworks.sh llamafactory",
    ),
]

STEPS = 10
KEYS: dict[str, Any] = {
    "model_name_or_path": "./tiny",
    "do_train": True,
    "dataset_dir": "./data",
    "template": "default",
    "cutoff_len": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "num_train_epochs": 10,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_steps": STEPS,
    "report_to": "none",
    "use_cpu": True,
    "disable_gradient_checkpointing": True,
    "preprocessing_num_workers": 1,
    "overwrite_cache": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"stage": "sft", "dataset": "pairs", "finetuning_type": "full"},
    "lora": {"stage": "sft", "dataset": "pairs", "finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"},
    "packed": {"stage": "sft", "dataset": "pairs", "finetuning_type": "full", "packing": True},
    "pt": {"stage": "pt", "dataset": "texts", "finetuning_type": "full"},
}
DPO = {"stage": "dpo", "dataset": "preferences", "finetuning_type": "full", "learning_rate": 2e-3}
LOG_PROB_KINDS: dict[str, dict[str, Any]] = {
    "dpo": DPO,
    "dpo-lora": {**DPO, "finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"},
    "dpo-sft": {**DPO, "pref_ftx": 0.5, "pref_bco_weight": 0.5},
    "ld-dpo": {**DPO, "ld_alpha": 0.5},
    "orpo": {**DPO, "pref_loss": "orpo"},
    "simpo": {**DPO, "pref_loss": "simpo"},
    "kto": {**DPO, "stage": "kto", "dataset": "marked", "pref_ftx": 0.5},
    "dft": {**KINDS["full"], "use_dft_loss": True},
}
THEIRS = ("-m", "llamafactory.cli", "train")
OURS = ("-m", "loss_plugins", "llamafactory", "train")


class Jobs(Runs):
    """A folder with a model and data, and LLaMA-Factory's runs in it, each once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_model(folder / "tiny")
        make_model(folder / "wide", WIDE)
        data = folder / "data"
        data.mkdir()
        write_jsonl(data / "pairs.jsonl", [{"instruction": a, "input": "", "output": b} for a, b in pairs()])
        write_jsonl(data / "texts.jsonl", [{"text": line * 8} for line in POEM * 6])
        write_jsonl(
            data / "preferences.jsonl",
            [{"instruction": a, "input": "", "chosen": b, "rejected": b[::-1]} for a, b in pairs()],
        )
        marked = [
            {"instruction": a, "input": "", "output": b, "mark": place % 2 == 0} for place, (a, b) in enumerate(pairs())
        ]
        write_jsonl(data / "marked.jsonl", marked)
        columns = {"prompt": "instruction", "query": "input", "response": "output"}
        info = {
            "pairs": {"file_name": "pairs.jsonl", "columns": columns},
            "preferences": {
                "file_name": "preferences.jsonl",
                "ranking": True,
                "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
            },
            "marked": {"file_name": "marked.jsonl", "columns": {**columns, "kto_tag": "mark"}},
            "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
        }
        (data / "dataset_info.json").write_text(json.dumps(info))

    def run(
        self, name: str, keys: dict[str, Any], words: tuple[str, ...] = THEIRS, *after: str, **settings: Any
    ) -> tuple[int, str]:
        write_yaml(self.folder / f"{name}.yaml", {**KEYS, "output_dir": f"./{name}", **keys})
        return command(self.folder, *words, f"{name}.yaml", *after, **settings)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("llamafactory"))


@pytest.mark.parametrize("kind", KINDS)
def test_our_command(jobs: Jobs, kind: str) -> None:
    stock = jobs.history(f"stock-{kind}", KINDS[kind])
    ours = jobs.history(f"ours-{kind}", {**KINDS[kind], **snippet("llamafactory")}, OURS)
    assert len(ours) == STEPS
    assert stock[-1]["loss"] < stock[0]["loss"]
    assert_same(ours, stock)
    assert all(0 <= entry["loss_plugins/token_accuracy"] <= 1 for entry in ours)


@pytest.mark.parametrize("kind", LOG_PROB_KINDS)
def test_losses_made_of_log_probabilities(jobs: Jobs, kind: str) -> None:
    stock = jobs.history(f"stock-{kind}", LOG_PROB_KINDS[kind])
    ours = jobs.history(f"ours-{kind}", {**LOG_PROB_KINDS[kind], "loss_strategy": "cce"}, OURS)
    assert len(ours) == STEPS
    assert_same_in_all(ours, stock)


@pytest.mark.parametrize("kind", ["full", "dpo", "kto", "dft"])
def test_memory_is_lower(jobs: Jobs, kind: str) -> None:
    meter = write_meter(jobs.folder / "meter")
    keys = {**{**KINDS, **LOG_PROB_KINDS}[kind], "model_name_or_path": "./wide", "max_steps": 1, "save_steps": 1}
    jobs.history(f"stock-wide-{kind}", keys, paths=(meter,))
    stock = read_peak(jobs.folder)
    jobs.history(f"ours-wide-{kind}", {**keys, **SMALLEST}, OURS, paths=(meter,))
    ours = read_peak(jobs.folder)
    print(f"llamafactory {kind}: a training step of {WIDE} classes takes {stock:.1f} MiB stock, {ours:.1f} MiB ours")
    assert ours < 0.8 * stock


@pytest.mark.parametrize(("name", "kind"), [("llamafactory", "full"), ("llamafactory_dpo", "dpo")])
def test_the_file_in_configs(jobs: Jobs, name: str, kind: str) -> None:
    """With a tiny model, data and float32 in place of what it names."""
    given = read_config(name)
    tiny = {**KEYS, **{**KINDS, **LOG_PROB_KINDS}[kind], "bf16": False, "max_steps": 2, "save_steps": 2}
    assert len(jobs.history(name, {**given, **tiny, "output_dir": f"./{name}"}, OURS)) == 2


def test_words_behind_the_file(jobs: Jobs) -> None:
    stock = jobs.history("stock-full", KINDS["full"])
    ours = jobs.history("words", KINDS["full"], OURS, "loss_strategy=flce", "max_steps=3", "save_steps=3")
    assert_same(ours, stock[:3])


def test_under_torchrun(jobs: Jobs) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29577")
    keys = {**KINDS["full"], "max_steps": 3, "save_steps": 3, "ddp_backend": "gloo"}
    stock = jobs.history("stock-two", keys, (*launcher, "-m", "llamafactory.launcher"))
    ours = jobs.history("ours-two", {**keys, "loss_strategy": "cce"}, (*launcher, *OURS))
    assert_same(ours, stock)


def test_preferences_under_torchrun(jobs: Jobs) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29578")
    keys = {**LOG_PROB_KINDS["dpo"], "max_steps": 3, "save_steps": 3, "ddp_backend": "gloo"}
    found = {**keys, "ddp_find_unused_parameters": False}
    stock = jobs.history("stock-two-dpo", found, (*launcher, "-m", "llamafactory.launcher"))
    ours = jobs.history("ours-two-dpo", {**found, "loss_strategy": "cce"}, (*launcher, *OURS))
    assert len(ours) == 3
    for key, rel in (("loss", 1e-4), ("grad_norm", 1e-3), ("logps/chosen", 1e-4)):
        assert [e[key] for e in ours] == pytest.approx([e[key] for e in stock], rel=rel)
    code, output = jobs.run("refused-two-dpo", {**keys, "loss_strategy": "cce"}, (*launcher, *OURS))
    assert code != 0
    assert "Set ddp_find_unused_parameters: false." in output


def test_the_hook_on_their_own_command(jobs: Jobs) -> None:
    stock = jobs.history("stock-full", KINDS["full"])
    site = jobs.folder / "site"
    site.mkdir()
    install_hook(site)
    # a folder whose .pth files are read when Python starts, without touching this environment
    (jobs.folder / "start").mkdir()
    (jobs.folder / "start" / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    paths = (jobs.folder / "start",)
    keys = {**KINDS["full"], "loss_strategy": "chunked"}
    assert_same(jobs.history("hooked", keys, paths=paths), stock)
    assert jobs.history("hooked-no-keys", KINDS["full"], paths=paths) == stock, (
        "without a key of ours it changes nothing"
    )
    code, output = jobs.run("hooked-rm", {**KINDS["full"], "stage": "rm", "loss_strategy": "cce"}, paths=paths)
    assert code != 0
    assert "stage: rm and loss_strategy 'cce' were both given" in output
    remove_hook(site)
    code, output = jobs.run("unhooked", keys, paths=paths)
    assert code != 0
    assert "Some keys are not used by the HfArgumentParser: ['loss_strategy']" in output


def test_refusals_are_one_sentence(jobs: Jobs) -> None:
    code, output = jobs.run("refused", {**KINDS["full"], "use_eaft_loss": True}, OURS)
    assert code == 2, output[-2000:]
    (line,) = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert "Delete the line `use_eaft_loss: true`" in line
    assert not (jobs.folder / "refused").exists()
