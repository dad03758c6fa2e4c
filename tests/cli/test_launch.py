"""``accelerate launch`` with each file of configs/accelerate, two processes on a CPU; and what is said without it."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tiny_job import Job
from transformers import LlamaConfig, LlamaForCausalLM

from loss_plugins.errors import ConfigError
from loss_plugins.integrations.hf import job as jobs
from loss_plugins.integrations.hf.launch import launch_line, refuse_what_a_cpu_leaves_out
from loss_plugins.integrations.hf.loading import ModelArguments, load_model

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
FILES = sorted(CONFIGS.glob("*.yaml"))
CPU = torch.device("cpu")


def launched(file: str, *words: str, fails: bool = False, **environment: str) -> str:
    """What two processes on a CPU said."""
    # below those that the system hands out itself, one of which would be gone before the launcher has imported torch
    port = random.SystemRandom().randint(20_000, 32_000)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"} | environment
    done = subprocess.run(
        [*command, "--main_process_port", str(port), *words], env=environment, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, (
        done.stdout[-2000:] + done.stderr[-15_000:]
    )  # the launcher's own words are the last
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary two processes cannot halve."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, vocab_size=321, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_ddp_trains_as_one_process_with_twice_the_batch(job: Job) -> None:
    one = job.done(loss_strategy="cce", packing=False, per_device_train_batch_size=2)
    keys = job.keys | {
        "loss_strategy": "cce",
        "packing": False,
        "per_device_train_batch_size": 1,
        "ddp_backend": "gloo",
    }
    job.yaml.write_text(yaml.safe_dump(keys))
    launched("ddp.yaml", "-m", "loss_plugins", "train", str(job.yaml))
    two = json.loads((job.output / "summary.json").read_text())
    assert two["strategies"]["cce"]["losses"] == pytest.approx(one["strategies"]["cce"]["losses"], abs=1e-4)


@pytest.mark.slow
def test_zero3_trains_as_one_process_with_twice_the_batch(
    job: Job, saved: Path, tokenizer_folder: Path, deepspeed_path: str
) -> None:
    """Each strategy in turn, by DeepSpeed itself, and the weights it saves load without it."""
    keys = {
        "packing": False, "strategies": ["naive", "chunked", "flce", "cce"], "optim": "adamw_torch",
        "model_name_or_path": str(saved), "tokenizer_name_or_path": str(tokenizer_folder),
        "eval_file": job.keys["train_file"], "loss_statistics": ["accuracy", "entropy"],
    }  # fmt: skip
    for key in ("loss_strategy", "model_config", "tokenizer_vocab_size"):
        del job.keys[key]
    one = job.done(**keys, per_device_train_batch_size=2)
    two = job.keys | keys | {"per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 2}
    job.yaml.write_text(yaml.safe_dump(two))
    script = str(Path(__file__).parent / "launched_zero.py")
    said = launched("zero3.yaml", script, "train", str(job.yaml), PYTHONPATH=deepspeed_path, DS_ACCELERATOR="cpu")
    assert said.count("ENGINE stage 3, 0 numbers held whole") == 2 * len(keys["strategies"])
    results = json.loads((job.output / "summary.json").read_text())["strategies"]
    for name in keys["strategies"]:
        assert results[name]["losses"] == pytest.approx(one["strategies"][name]["losses"], abs=1e-4)
        # the Trainer's mean over the batches of two processes is another one than over those of one
        assert results[name]["eval_loss"] == pytest.approx(results["naive"]["eval_loss"], abs=1e-4)
        assert results[name]["chosen"] == [name]
        whole = LlamaForCausalLM.from_pretrained(job.output / name)
        start = LlamaForCausalLM.from_pretrained(saved)
        assert whole.lm_head.weight.shape == start.lm_head.weight.shape
        assert 1e-3 < (whole.lm_head.weight - start.lm_head.weight).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("file", ["fsdp2.yaml", "tp.yaml"])
def test_a_model_in_parts_is_the_whole_one(file: str, saved: Path) -> None:
    said = launched(file, str(Path(__file__).parent / "launched.py"), str(saved))
    (line,) = [line for line in said.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-5
    assert found["size"] > 1e-2
    assert found["rows"] == 161, "the first part of 321 classes"
    assert (found["fused"], found["materialised"]) == (1, 0)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_it(file: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))
    assert config.num_processes == 2
    assert {file.stem for file in FILES} == {"ddp", "fsdp2", "zero3", "tp"}
    known = {
        "ddp": ("MULTI_GPU", {}),
        "fsdp2": ("FSDP", {"fsdp_config": ("fsdp_version", 2)}),
        "zero3": ("DEEPSPEED", {"deepspeed_config": ("zero_stage", 3)}),
        "tp": ("MULTI_GPU", {"parallelism_config": ("parallelism_config_tp_size", 2)}),
    }
    kind, settings = known[file.stem]
    assert str(config.distributed_type).endswith(kind)
    for name, (key, value) in settings.items():
        assert getattr(config, name)[key] == value


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_comments_say_how_to_use_it(file: Path) -> None:
    text = file.read_text()
    line = f"accelerate launch --config_file configs/accelerate/{file.name} -m loss_plugins train"
    assert line in text
    assert all(len(each) <= 120 for each in text.splitlines())
    assert yaml.safe_load(text)["num_machines"] == 1


def test_the_line_for_several_devices(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["loss-plugins", "train", "my job.yaml", "--max_steps", "3"])
    expected = "accelerate launch --multi_gpu --num_processes 4 -m loss_plugins train 'my job.yaml' --max_steps 3"
    assert launch_line(4) == expected
    args: Any = SimpleNamespace(n_gpu=4)
    with caplog.at_level(logging.WARNING, logger="loss_plugins"):
        jobs._use_one_gpu(args)
    assert expected in caplog.text
    assert args._n_gpu == 1
    monkeypatch.setattr(sys, "argv", ["script.py"])
    assert launch_line(2).endswith("-m loss_plugins train job.yaml")


def test_what_accelerate_would_leave_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    refuse_what_a_cpu_leaves_out(CPU)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "fsdp_config" in job.refused(loss_strategy="cce")
    refuse_what_a_cpu_leaves_out(torch.device("cuda"))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    refuse_what_a_cpu_leaves_out(CPU)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with pytest.raises(ConfigError, match="parallelism_config_tp_size"):
        refuse_what_a_cpu_leaves_out(CPU)


@pytest.mark.parametrize(
    "model",
    [
        ModelArguments(model_config={"model_type": "llama"}),
        ModelArguments(model_name_or_path="a.gguf"),
        ModelArguments(model_name_or_path="a", lora_r=4),
    ],
    ids=["new", "gguf", "lora"],
)
def test_what_cannot_be_cut(model: ModelArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ConfigError, match="parallelism_config_tp_size"):
        load_model(model, LlamaConfig())
