"""Liger's kernels in a Trainer: ours with `liger_ops`, the Trainer's own `use_liger_kernel`, and both losses at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import VOCAB, arguments, assert_same_curve, llama, losses, rows, run
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
)
from transformers.models.llama import modeling_llama

from loss_plugins import LossConfig, LossPluginArguments, LossPluginCallback, LossPluginTrainer, patch_model
from loss_plugins.cli._settings import read_job
from loss_plugins.errors import ConfigError, LossPluginError

pytest.importorskip("triton", reason="liger-kernel needs Triton, which is not installed")
pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="liger-kernel is not installed (extra: liger)")

ROPE = {"rms_norm": False, "swiglu": False}
"""Of a Llama's kernels the only one that Triton's interpreter runs as it is."""


def short(make: type[Trainer], folder: Path, trainer: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Few tokens: the interpreter takes milliseconds for each."""
    sizes = {"max_steps": 2, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    trainer = {"eval_dataset": rows(2, length=9, seed=4)} | (trainer or {})
    return run(make, folder, lambda: llama(num_hidden_layers=1), rows(4, length=9), trainer, **(sizes | settings))


@pytest.fixture
def ropes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What transformers' Llama calls from now on, one entry a call of Liger's; and at the end it is as before."""
    from liger_kernel.transformers import monkey_patch

    calls: list[Any] = []
    original = monkey_patch.liger_rotary_pos_emb

    def watched(q: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(q.shape)
        return original(q, *args, **kwargs)

    watched.__module__ = original.__module__
    monkeypatch.setattr(monkey_patch, "liger_rotary_pos_emb", watched)
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):  # what use_liger_kernel leaves there
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    return calls


@pytest.mark.parametrize("way", ["arguments", "trainer", "callback"])
def test_liger_ops_beside_our_loss(way: str, ropes: list[Any], tmp_path: Path) -> None:
    stock = short(Trainer, tmp_path)
    before = dict(vars(modeling_llama))
    config = {"loss_strategy": "cce", "liger_ops": ROPE}
    if way == "arguments":
        ours = short(LossPluginTrainer, tmp_path, **config)
    elif way == "trainer":
        ours = short(LossPluginTrainer, tmp_path, {"loss_config": config})
    else:
        ours = short(Trainer, tmp_path, {"callbacks": [LossPluginCallback(config)]})
    assert_same_curve(ours, stock)
    assert len(ropes) == 4, "one layer, four micro-batches"
    assert dict(vars(modeling_llama)) == before


def test_the_trainers_flag_works_beside_our_loss(ropes: list[Any], tmp_path: Path) -> None:
    stock = short(Trainer, tmp_path)
    expected = stock.evaluate()["eval_loss"]
    settings = {**ROPE, "fused_linear_cross_entropy": False}
    ours = short(LossPluginTrainer, tmp_path, loss_strategy="cce", use_liger_kernel=True, liger_kernel_config=settings,
                 prediction_loss_only=True)  # fmt: skip
    assert ours.loss_report["hits"] == 4
    assert len(ropes) == 4
    evaluated = ours.evaluate()["eval_loss"]  # the Trainer hands skip_logits to the model here
    assert len(ropes) == 4 + 2
    assert_same_curve(ours, stock)
    assert evaluated == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Liger's copies of forwards use names of older transformers
def test_the_trainers_flag_alone_works_as_ever(ropes: list[Any], tmp_path: Path) -> None:
    expected = losses(short(Trainer, tmp_path, max_steps=1))
    assert not ropes
    flagged = short(Trainer, tmp_path, max_steps=1, use_liger_kernel=True, liger_kernel_config=ROPE)
    assert "liger_kernel" in flagged.model.forward.__func__.__module__
    assert ropes
    assert losses(flagged) == pytest.approx(expected, abs=1e-5)


def granite() -> PreTrainedModel:
    torch.manual_seed(0)
    return GraniteForCausalLM(
        GraniteConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                      num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2))  # fmt: skip


def test_a_loss_that_liger_turns_on_for_this_model_only_is_refused(tmp_path: Path) -> None:
    """Liger has no fused loss for Granite, and replaces torch's cross_entropy in its place."""
    args = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False})
    with pytest.raises(ConfigError, match=r"use_liger_kernel is on with cross_entropy .*\"cross_entropy\": false"):
        LossPluginTrainer(granite(), args)
    args = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config={"cross_entropy": False})
    assert LossPluginTrainer(granite(), args).loss_handle.active


def test_a_model_that_liger_leaves_alone_is_no_clash(tmp_path: Path) -> None:
    ours = run(LossPluginTrainer, tmp_path, model=gpt2, loss_strategy="cce", use_liger_kernel=True)
    assert_same_curve(ours, run(Trainer, tmp_path, model=gpt2))
    assert ours.loss_report["hits"] == 8


@pytest.mark.parametrize("how", ["trainer", "patched", "callback"])
def test_both_ways_to_ask_for_ligers_kernels_are_refused(how: str, tmp_path: Path) -> None:
    off = {**ROPE, "fused_linear_cross_entropy": False}
    args, model = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config=off), llama()
    config = LossConfig("cce", liger_ops=ROPE)
    if how == "patched":
        patch_model(model, config)
    make = partial(LossPluginTrainer, loss_config=config if how == "trainer" else None)
    if how == "callback":
        make = partial(Trainer, callbacks=[LossPluginCallback(config)])
    with pytest.raises(ConfigError, match=r"both put Liger's kernels into the model\. Leave use_liger_kernel out"):
        make(model, args)


# how it is written


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("liger_ops: true", [], True),
        ("liger_ops: {rms_norm: true, rope: false}", [], {"rms_norm": True, "rope": False}),
        ("", [], None),
        ("", ["--liger_ops"], True),
        ("liger_ops: true", ["--liger_ops", "false"], False),
        ("", ["--liger_ops", '{"rms_norm": true}'], {"rms_norm": True}),
        ("liger_ops: {rope: false}", ["--liger_ops.swiglu", "false"], {"rope": False, "swiglu": False}),
    ],
)
def test_in_a_job(text: str, words: list[str], expected: Any, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"output_dir: {tmp_path}\nloss_strategy: cce\n{text}\n")
    (args,) = read_job(job, words, (LossPluginArguments,))
    assert args.loss_config() == LossConfig("cce", liger_ops=expected)


def test_what_a_job_cannot_mean(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"output_dir: {tmp_path}\nliger_ops: [rms_norm]\n")
    with pytest.raises(LossPluginError, match=r"liger_ops in .* must be a mapping or true or false"):
        read_job(job, [], (LossPluginArguments,))


@pytest.mark.parametrize(
    ("words", "expected"), [("true", True), ("False", False), ('{"rms_norm": true}', {"rms_norm": True})]
)
def test_on_the_command_line_of_a_script(words: str, expected: Any) -> None:
    line = ["--output_dir", "out", "--loss_strategy", "cce", "--liger_ops", words]
    (args,) = HfArgumentParser(LossPluginArguments).parse_args_into_dataclasses(line)
    assert args.loss_config().liger_ops == expected
    assert LossPluginArguments(output_dir="out", liger_ops=words).loss_config().liger_ops == expected


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_on_a_gpu(attention: str, tmp_path: Path) -> None:
    def model() -> PreTrainedModel:
        return llama(vocab_size=4096, hidden_size=64, attn_implementation=attention)

    data = rows(32, length=64)
    stock = run(Trainer, tmp_path, model=model, data=data, max_steps=10, use_cpu=False)
    ours = run(LossPluginTrainer, tmp_path, model=model, data=data, max_steps=10, use_cpu=False,
               loss_strategy="cce", liger_ops=True)  # fmt: skip
    assert ours.loss_handle.liger.names == ("rope", "rms_norm", "swiglu")
    assert ours.loss_report["hits"] == 20
    assert losses(ours)[0] == pytest.approx(losses(stock)[0], abs=1e-4)
    assert losses(ours) == pytest.approx(losses(stock), abs=5e-3)
    assert losses(ours)[-1] < losses(ours)[0]
    ours.loss_handle.undo()
    assert type(ours.model.model.norm).forward is modeling_llama.LlamaRMSNorm.forward
