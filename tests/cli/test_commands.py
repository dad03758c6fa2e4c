"""The commands that compute nothing: strategies, plan, estimate, env."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from tiny_job import Job

import loss_plugins
from loss_plugins.device import DeviceProfile
from loss_plugins.strategies import STRATEGIES, Problem, select


def test_help_names_every_command_and_imports_nothing_heavy(invoke: Any) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("train", "strategies", "plan", "estimate", "env"):
        assert command in result.output
    code = "import sys, loss_plugins.cli.main; sys.exit(bool({'torch', 'transformers', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version(invoke: Any) -> None:
    assert invoke("--version").output.strip() == loss_plugins.__version__


def test_an_unknown_command_is_a_usage_error(invoke: Any) -> None:
    result = invoke("trian")
    assert result.exit_code == 2
    assert "train" in result.output


def test_strategies_lists_every_one_with_its_options(invoke: Any) -> None:
    found = json.loads(invoke("strategies", "--json").output)
    assert [entry["name"] for entry in found] == STRATEGIES.names()
    table = invoke("strategies").output
    for entry in found:
        assert entry["summary"]
        assert entry["name"] in table
        for option in entry["options"]:
            assert option["help"], f"{entry['name']}.{option['name']} has no help"
            assert option["name"] in table


@pytest.mark.parametrize(("rows", "vocab", "chosen"), [(64, 1000, "naive"), (8192, 128256, "flce")])
def test_plan_says_what_auto_would_choose(invoke: Any, rows: int, vocab: int, chosen: str) -> None:
    words = ["plan", "--rows", str(rows), "--hidden", "64", "--vocab", str(vocab), "--device", "cpu"]
    found = json.loads(invoke(*words, "--json").output)
    assert found["chosen"] == chosen
    problem, profile = Problem(rows, 64, vocab, dtype=torch.bfloat16), DeviceProfile.probe("cpu")
    for entry in found["strategies"]:
        plan = select(entry["strategy"], None, problem, profile)
        assert entry["peak_bytes"] == plan.strategy.peak_bytes(problem, plan.options)
    text = invoke(*words).output
    assert f"auto on cpu: {chosen}" in text
    assert "100%" in text
    assert f"gradients included: {rows} tokens, hidden 64, vocabulary {vocab}, bf16" in text
    assert all(word in text for word in ("--rows", "--hidden", "--vocab", "--dtype", "loss-plugins estimate"))


def test_plan_alone_is_of_a_usual_head(invoke: Any) -> None:
    result = invoke("plan", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["rows"], found["hidden"], found["vocab"], found["dtype"]) == (8192, 4096, 128_256, "bf16")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--dtype", "bf17"], "Did you mean 'bf16'?"),
        (["--device", "gpu"], "Unknown device 'gpu'"),
        (["--device", "xpu"], "this machine has only"),
    ],
)
def test_plan_refuses_what_it_does_not_know(invoke: Any, words: list[str], what: str) -> None:
    result = invoke("plan", "--rows", "8", "--hidden", "8", "--vocab", "8", *words)
    assert result.exit_code == 2
    assert what in result.stderr
    assert invoke("plan", "--rows", "0", "--hidden", "8", "--vocab", "8").exit_code == 2


def test_estimate_reads_a_job_and_a_models_folder(job: Job, invoke: Any) -> None:
    import transformers

    job.run("--help")  # writes the YAML
    words = ["--batch", "4", "--seq", "16", "--dtype", "fp32", "--device", "cpu", "--json"]
    of_job = json.loads(invoke("estimate", str(job.yaml), *words).output)
    assert (of_job["rows"], of_job["hidden"], of_job["vocab"]) == (64, 32, 320)
    settings = {key: value for key, value in job.keys["model_config"].items() if key != "model_type"}
    transformers.LlamaConfig(**settings).save_pretrained(job.folder / "model")  # no weights: none are read
    assert json.loads(invoke("estimate", str(job.folder / "model"), *words).output) == of_job
    assert "4 x 16 tokens, hidden 32, vocabulary 320" in invoke("estimate", str(job.yaml), *words[:-1]).output


@pytest.mark.parametrize(
    ("keys", "words", "rows", "dtype"),
    [
        ({}, [], 64, "fp32"),
        ({"dtype": "bfloat16"}, [], 64, "bf16"),
        ({"bf16": True}, [], 64, "bf16"),
        ({"fp16": True, "per_device_train_batch_size": 3}, [], 96, "fp16"),
        ({"dtype": "bfloat16"}, ["--dtype", "fp64", "--batch", "5", "--seq", "7"], 35, "fp64"),
    ],
)
def test_estimate_takes_the_sizes_of_a_job(
    job: Job, invoke: Any, keys: dict[str, Any], words: list[str], rows: int, dtype: str
) -> None:
    job.run("--help", **keys)  # writes the YAML
    found = json.loads(invoke("estimate", str(job.yaml), "--device", "cpu", "--json", *words).output)
    assert (found["rows"], found["dtype"]) == (rows, dtype)
    job.run("--help", without=("per_device_train_batch_size", "max_length"))
    assert json.loads(invoke("estimate", str(job.yaml), "--json").output)["rows"] == 8 * 1024, "the Trainer's defaults"


def test_estimate_of_a_model_needs_sizes(invoke: Any) -> None:
    result = invoke("estimate", ".", "--seq", "8")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --batch must be given")


@pytest.mark.parametrize("name", ["./nowhere", "nowhere.yaml"])
def test_estimate_refuses_what_is_not_there(invoke: Any, name: str) -> None:
    result = invoke("estimate", name, "--batch", "1", "--seq", "8")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_env_has_what_a_bug_report_needs(invoke: Any) -> None:
    found = json.loads(invoke("env", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["kind"] == ("cuda" if torch.cuda.is_available() else "cpu")
    table = invoke("env").output
    assert found["versions"]["transformers"] in table
    assert found["cpu"] in table


def test_env_on_a_cpu_says_what_is_known(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loss_plugins.diagnostics.environment.best_device", lambda: "cpu")
    found = json.loads(invoke("env", "--json").output)
    assert found["ram_bytes"] > 1 << 28
    assert set(found["device"]) == {"kind", "name", "has_triton", "interpreted"}
    table = invoke("env").output
    assert "memory" in table
    assert "(0, 0)" not in table
    assert "total_bytes" not in table


def test_brackets_in_tables_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    from loss_plugins.cli._show import show_table

    show_table("[a title]", ("key",), [("pip install 'loss-plugins[peft]' [bold]",)], note="[a note]")
    text = capsys.readouterr().out
    for words in ("[a title]", "[a note]", "pip install 'loss-plugins[peft]' [bold]"):
        assert words in text
