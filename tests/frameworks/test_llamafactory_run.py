"""LLaMA-Factory's own commands, stock and with ours. Needs it: `bash scripts/frameworks.sh llamafactory` installs and
runs it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_job import (
    POEM,
    SMALLEST,
    WIDE,
    Runs,
    assert_lower,
    assert_same,
    assert_same_in_all,
    assert_ten_steps,
    assert_untouched,
    command,
    make_model,
    needs,
    pairs,
    read_config,
    read_meter,
    read_peak,
    snippet,
    write_jsonl,
    write_meter,
    write_yaml,
)

from loss_plugins.integrations.llamafactory.hook import install_hook, remove_hook

pytestmark = [pytest.mark.slow, needs("llamafactory", "LLaMA-Factory")]

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
        self.meter = write_meter(folder / "meter")
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


@pytest.mark.short
def test_ten_steps(jobs: Jobs) -> None:
    """Their command; ours with the README's lines; and theirs with the hook, but without a key of ours."""
    keys = {**KINDS["full"], "model_name_or_path": "./wide"}
    stock = jobs.history("stock-ten", keys, paths=(jobs.meter,))
    stock_peak, modules = read_meter(jobs.folder)
    assert modules == []
    ours = jobs.history("ours-ten", {**keys, **snippet("llamafactory"), **SMALLEST}, OURS, paths=(jobs.meter,))
    our_peak, modules = read_meter(jobs.folder)
    assert "loss_plugins.models.patch" in modules
    assert_as_stock(ours, stock)
    assert_lower("llamafactory full", our_peak, stock_peak)
    with hooked(jobs.folder / "hook") as start:
        assert_untouched(jobs.history("hooked-no-keys", keys, paths=(start,)), stock)


@pytest.mark.parametrize("kind", ["lora", "packed", "pt"])
def test_other_kinds(jobs: Jobs, kind: str) -> None:
    stock = jobs.history(f"stock-{kind}", KINDS[kind])
    ours = jobs.history(f"ours-{kind}", {**KINDS[kind], **snippet("llamafactory")}, OURS)
    assert_as_stock(ours, stock)


def assert_as_stock(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    assert_ten_steps(ours, stock)
    assert all(0 <= entry["loss_plugins/token_accuracy"] <= 1 for entry in ours)


@contextlib.contextmanager
def hooked(folder: Path) -> Iterator[Path]:
    """With the hook in a folder whose .pth files are read when Python starts with what is yielded in its path: this
    environment is not touched."""
    site, start = folder / "site", folder / "start"
    site.mkdir(parents=True)
    start.mkdir()
    (start / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    install_hook(site)
    yield start
    remove_hook(site)


@pytest.mark.parametrize("kind", LOG_PROB_KINDS)
def test_losses_made_of_log_probabilities(jobs: Jobs, kind: str) -> None:
    stock = jobs.history(f"stock-{kind}", LOG_PROB_KINDS[kind])
    ours = jobs.history(f"ours-{kind}", {**LOG_PROB_KINDS[kind], "loss_strategy": "cce"}, OURS)
    assert len(ours) == STEPS
    assert_same_in_all(ours, stock)


@pytest.mark.parametrize("kind", ["dpo", "kto", "dft"])
def test_memory_is_lower(jobs: Jobs, kind: str) -> None:
    keys = {**{**KINDS, **LOG_PROB_KINDS}[kind], "model_name_or_path": "./wide", "max_steps": 1, "save_steps": 1}
    jobs.history(f"stock-wide-{kind}", keys, paths=(jobs.meter,))
    stock = read_peak(jobs.folder)
    jobs.history(f"ours-wide-{kind}", {**keys, **SMALLEST}, OURS, paths=(jobs.meter,))
    ours = read_peak(jobs.folder)
    assert_lower(f"llamafactory {kind}", ours, stock)


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
    keys = {**KINDS["full"], "loss_strategy": "chunked"}
    with hooked(jobs.folder / "hooked-keys") as start:
        assert_same(jobs.history("hooked", keys, paths=(start,)), stock)
        code, output = jobs.run("hooked-rm", {**KINDS["full"], "stage": "rm", "loss_strategy": "cce"}, paths=(start,))
        assert code != 0
        assert "stage: rm and loss_strategy 'cce' were both given" in output
    code, output = jobs.run("unhooked", keys, paths=(start,))
    assert code != 0
    assert "Some keys are not used by the HfArgumentParser: ['loss_strategy']" in output


def test_refusals_are_one_sentence(jobs: Jobs) -> None:
    code, output = jobs.run("refused", {**KINDS["full"], "use_eaft_loss": True}, OURS)
    assert code == 2, output[-2000:]
    (line,) = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert "Delete the line `use_eaft_loss: true`" in line
    assert not (jobs.folder / "refused").exists()
