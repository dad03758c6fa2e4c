"""``loss-plugins train`` end to end on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_job import MODEL, POEM, Job, write_jsonl

from loss_plugins.integrations.hf.job import SETTINGS
from loss_plugins.strategies import STRATEGIES

REPORTED = {"final_loss", "losses", "tokens_per_s", "loss_peak_bytes", "kernels"}


@pytest.mark.parametrize("strategy", [*STRATEGIES.names(), "auto"])
def test_one_strategy_trains_and_reports(job: Job, strategy: str) -> None:
    summary = job.done(loss_strategy=strategy)
    (name,) = summary["strategies"]
    result = summary["strategies"][name]
    assert name == strategy
    assert set(result) >= REPORTED
    assert len(result["losses"]) == 2
    assert result["final_loss"] == result["losses"][-1] < result["losses"][0] < 7
    assert result["tokens_per_s"] > 0
    assert result["loss_peak_bytes"] > 0
    assert all(isinstance(kernel, str) for kernel in result["kernels"])
    assert result["kernels"]
    assert result["chosen"] == ["naive" if strategy == "auto" else strategy], "little logits: auto takes naive"
    assert {"versions", "device", "date"} <= set(summary)


def test_strategies_of_one_job_agree_and_are_compared(job: Job) -> None:
    result = job.run(without=("loss_strategy",), strategies=["naive", "chunked", "flce", "cce"], max_steps=4)
    assert result.exit_code == 0, result.output
    results = json.loads((job.output / "summary.json").read_text())["strategies"]
    assert list(results) == ["naive", "chunked", "flce", "cce"]
    for name in results:
        assert results[name]["losses"] == pytest.approx(results["naive"]["losses"], abs=1e-5)
        assert name in result.stdout
    assert len(set(results["naive"]["losses"])) == 4, "the curve of a model that does not train proves nothing"
    assert {path.name for path in job.output.iterdir()} == {"summary.json", "loss.png", "memory.png", "tokenizer"}
    for figure in ("loss.png", "memory.png"):
        assert (job.output / figure).read_bytes().startswith(b"\x89PNG")
        assert figure in result.stdout


def test_a_seed_makes_a_run_repeatable_and_another_does_not(job: Job) -> None:
    first = job.done()["strategies"]["naive"]["losses"]
    assert job.done()["strategies"]["naive"]["losses"] == first
    assert job.done(seed=7)["strategies"]["naive"]["losses"] != first


def test_the_command_line_stands_over_the_file(job: Job) -> None:
    words = ["--loss_strategy", "chunked", "--max-steps=3", "--loss_options", '{"workspace_mb": 1}']
    results = job.done(*words)["strategies"]
    assert list(results) == ["chunked"]
    assert len(results["chunked"]["losses"]) == 3


def test_a_strategy_on_the_command_line_stands_over_the_files_list(job: Job) -> None:
    job.keys.pop("loss_strategy")
    assert list(job.done("--loss_strategy", "cce", strategies=["naive", "flce"])["strategies"]) == ["cce"]
    assert list(job.done("--strategies", "cce", "naive", strategies=["naive", "flce"])["strategies"]) == [
        "cce",
        "naive",
    ]


def test_what_a_filter_left_out_is_asked_of_those_that_have_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from loss_plugins.integrations.hf import job as module

    asked = {}

    class Recorder(module.JobTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            done = super().train(*args, **kwargs)
            asked[self.args.loss_strategy] = {key for entry in self.state.log_history for key in entry}
            return done

    monkeypatch.setattr(module, "JobTrainer", Recorder)
    job.keys.pop("loss_strategy")
    job.done(strategies=["naive", "cce"], loss_statistics=["dropped", "accuracy"])
    assert {name: "loss_plugins/dropped" in keys for name, keys in asked.items()} == {"naive": False, "cce": True}
    assert all("loss_plugins/token_accuracy" in keys for keys in asked.values())


def test_a_dotted_option_replaces_one_entry(job: Job) -> None:
    summary = job.done("--model_config.hidden_size", "16", "--model_config.num_hidden_layers", "1")
    problem = summary["problem"]
    assert 32 < problem.pop("labels") < 64
    assert problem == {"rows": 64, "hidden": 16, "vocab": 320}


def test_the_problem_is_the_batch_that_was_measured(job: Job) -> None:
    """Without packing sequences are shorter than max_length, and padded to the longest."""
    summary = job.done(packing=False, max_length=60, per_device_train_batch_size=8, max_steps=1)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(job.output / "tokenizer")
    lengths = [len(tokenizer(line)["input_ids"]) + 1 for line in POEM]
    assert max(lengths) < 60
    assert summary["problem"]["rows"] == len(POEM) * max(lengths)
    assert summary["problem"]["labels"] == sum(lengths) - len(POEM)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_final_loss_is_the_last_steps(job: Job, accumulation: int) -> None:
    keys = {"max_steps": 3, "gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 1}
    every = job.done(**keys)["strategies"]["naive"]
    seldom = job.done(**keys, logging_steps=500)["strategies"]["naive"]
    assert seldom["steps"] == [3], "the last step is logged"
    assert seldom["final_loss"] == pytest.approx(every["losses"][-1], abs=1e-6)
    assert every["losses"][0] - every["losses"][-1] > 1e-3, "the mean would be the same"
    assert seldom["losses"] == pytest.approx([sum(every["losses"]) / 3], abs=1e-5)
    assert (job.output / "loss.png").exists()


def test_a_job_that_does_not_say_how_often_is_logged_often(job: Job) -> None:
    for key in ("logging_steps", "max_steps"):
        job.keys.pop(key)
    steps = job.done(num_train_epochs=25, per_device_train_batch_size=4)["strategies"]["naive"]["steps"]
    assert 13 <= len(steps) <= 26
    assert (job.output / "loss.png").exists()


def test_no_logging_is_no_logging(job: Job) -> None:
    naive = job.done(logging_strategy="no")["strategies"]["naive"]
    assert naive["losses"] == []
    assert 0 < naive["final_loss"] < 7


def test_a_failed_comparison_leaves_no_empty_folders(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from loss_plugins.integrations.hf.job import JobTrainer

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(JobTrainer, "training_step", broken)
    assert "out of luck" in str(job.run(without=("loss_strategy",), strategies=["naive", "cce"]).exception)
    assert [path.name for path in job.output.iterdir()] == ["tokenizer"]


def test_the_table_is_short(job: Job) -> None:
    result = job.run("--strategies", "naive", "cce")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] in (["naive"], ["cce"])]
    assert [row[0] for row in rows] == ["naive", "cce"]
    for row in rows:
        assert row[-1] in ("torch", "triton", "torch + triton")
        assert re.fullmatch(r"\d+\.\d", row[3])
        assert row[4] in ("KiB", "MiB")


def test_kernels_are_named_by_what_they_are_written_in() -> None:
    from loss_plugins.cli.train import _kernels

    assert _kernels(["torch.linear_ce_forward", "torch.linear_ce_backward"]) == "torch"
    assert _kernels(["triton.linear_ce_forward", "torch.linear_ce_backward"]) == "triton + torch"
    assert _kernels(["mine"]) == "mine"


def test_a_comparison_from_the_command_line_shares_the_files_options(job: Job) -> None:
    keys = {"loss_strategy": "cce", "loss_options": {"preset": "cce_exact"}}
    result = job.run("--strategies", "naive", "cce", **keys)
    assert result.exit_code == 0, result.output
    assert "naive has no option preset and runs without." in result.stderr
    assert list(json.loads((job.output / "summary.json").read_text())["strategies"]) == ["naive", "cce"]
    shutil.rmtree(job.output)
    refused = job.refused("--strategies", "naive", "chunked", **keys)
    assert refused.startswith("Unknown entry of loss_options for naive, chunked: 'preset'.")


def _conversation(line: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": line[:10]}, {"role": "assistant", "content": line[10:]}]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows", ["text", "messages", "prompt"])
def test_every_kind_of_row_trains(job: Job, tokenizer_folder: Path, rows: str, packing: bool) -> None:
    shapes: dict[str, Any] = {
        "text": [{"text": line} for line in POEM],
        "messages": [{"messages": _conversation(line)} for line in POEM],
        "prompt": [{"prompt": line[:10], "completion": line[10:]} for line in POEM],
    }
    file = write_jsonl(job.folder / "rows.jsonl", shapes[rows])
    summary = job.done(train_file=str(file), packing=packing, tokenizer_name_or_path=str(tokenizer_folder))
    losses = summary["strategies"]["naive"]["losses"]
    assert all(0 < loss < 7 for loss in losses)


def test_parquet_and_txt_give_what_jsonl_gives(job: Job, tokenizer_folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    job.keys["tokenizer_name_or_path"] = str(tokenizer_folder)
    expected = job.done()["strategies"]["naive"]["losses"]
    parquet.write_table(pyarrow.table({"text": POEM}), job.folder / "rows.parquet")
    assert job.done(train_file=str(job.folder / "rows.parquet"))["strategies"]["naive"]["losses"] == expected
    (job.folder / "rows.txt").write_text("\n\n\n".join(POEM))
    assert job.done(train_file=str(job.folder / "rows.txt"))["strategies"]["naive"]["losses"] == expected


def test_the_embedded_corpus_needs_no_file_and_its_tokenizer_is_kept(job: Job) -> None:
    job.keys.pop("train_file")
    keys = {"embedded_corpus": "python_stdlib", "corpus_mb": 0.05}
    first = job.run(**keys)
    assert first.exit_code == 0, first.output
    assert "Trained a tokenizer of 300 entries" in first.stderr
    again = job.run(**keys)
    assert again.exit_code == 0, again.output
    assert "Trained a tokenizer" not in again.stderr
    other = job.run(**keys, model_config=MODEL | {"vocab_size": 310}, tokenizer_vocab_size=310)
    assert "Trained a tokenizer of 310 entries" in other.stderr, "a kept tokenizer of another size was used"


def test_an_eval_file_is_evaluated_at_the_end(job: Job) -> None:
    assert 0 < job.done(eval_file=job.keys["train_file"])["strategies"]["naive"]["eval_loss"] < 7


def _saved_model(job: Job, tokenizer_folder: Path) -> Path:
    folder = job.folder / "model"
    settings = {key: value for key, value in MODEL.items() if key != "model_type"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ["naive", "cce"])
def test_a_local_model_is_fine_tuned_and_saved(job: Job, tokenizer_folder: Path, strategy: str) -> None:
    folder = _saved_model(job, tokenizer_folder)
    job.keys.pop("model_config")
    job.done(model_name_or_path=str(folder), loss_strategy=strategy, save_strategy="steps")
    before = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    after = transformers.LlamaForCausalLM.from_pretrained(job.output).state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    assert transformers.AutoTokenizer.from_pretrained(job.output)("rose")["input_ids"]


def test_lora_trains_adapters_and_nothing_else(job: Job, tokenizer_folder: Path) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    folder = _saved_model(job, tokenizer_folder)
    job.keys.pop("model_config")
    keys = {"model_name_or_path": str(folder), "save_strategy": "steps", "lora_r": 4}
    naive = job.done(**keys, lora_target_modules=["q_proj", "v_proj"])["strategies"]["naive"]
    saved = load_file(job.output / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in saved} == {"q_proj", "v_proj"}
    assert all(tensor.any() for name, tensor in saved.items() if "lora_B" in name), "lora_B starts at 0"
    cce = job.done(**keys, lora_target_modules=["q_proj", "v_proj"], loss_strategy="cce")["strategies"]["cce"]
    assert cce["losses"] == pytest.approx(naive["losses"], abs=1e-5)


def test_a_run_goes_on_from_a_checkpoint(job: Job) -> None:
    whole = job.done(max_steps=4, save_strategy="steps", save_steps=2)["strategies"]["naive"]["losses"]
    job.keys["resume_from_checkpoint"] = str(job.output / "checkpoint-2")
    assert job.done(max_steps=4)["strategies"]["naive"]["losses"] == pytest.approx(whole, abs=1e-6)


def test_the_module_runs_as_a_program(job: Job) -> None:
    assert job.run().exit_code == 0
    command = [sys.executable, "-m", "loss_plugins", "train", str(job.yaml), "--max_steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=job.folder)
    assert done.returncode == 0, done.stderr
    assert "final loss" in done.stdout
    assert "naive" in done.stdout
    refused = subprocess.run([*command, "--max_stepz", "1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.strip() == "Error: Unknown option '--max_stepz'. Did you mean 'max_steps'?"


def test_help_stands_behind_a_file_too(job: Job) -> None:
    result = job.run("--help")
    assert result.exit_code == 0
    assert "CONFIG.yaml" in result.output
    assert not job.output.exists()


def test_help_names_the_main_keys_and_keeps_its_lines(invoke: Any) -> None:
    text = invoke("train", "--help").output
    lines = [line.strip() for line in text.splitlines()]
    assert "loss-plugins train job.yaml --loss_strategy chunked --max_steps 20" in lines
    known = {entry.name for cls in SETTINGS for entry in dataclasses.fields(cls)}
    start = next(i for i, line in enumerate(lines) if line.startswith("The main keys"))
    named = [line.split()[0] for line in lines[start + 1 : lines.index("", start)]]
    assert {"train_file", "packing", "model_config", "loss_strategy", "strategies"} <= set(named)
    assert {name.rstrip(",") for name in named} <= known
    assert "from the current folder" in text


def test_keys_lists_every_key_with_its_default(job: Job, invoke: Any) -> None:
    text = invoke("train", "--keys").output
    cells = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for cls in SETTINGS:
        for entry in dataclasses.fields(cls):
            assert not entry.init or entry.name in cells, entry.name
    assert cells["max_length"].split()[1] == "1024"
    assert cells["logging_steps"].split()[1] == "0.05"
    assert max(map(len, text.splitlines())) <= 120
    assert job.run("--keys").output == text
