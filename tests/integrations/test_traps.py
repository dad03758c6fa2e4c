"""What silently switches a model's loss off, or changes it, in transformers' Trainer: refused, repaired or reported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import VOCAB, arguments, assert_same_curve, llama, logged, losses, rows, run
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from loss_plugins import LossConfig, LossPluginTrainer, patch_model
from loss_plugins.errors import ConfigError, PatchError
from loss_plugins.integrations.hf import LossPluginMixin


def test_compute_loss_func_is_refused(tmp_path: Path) -> None:
    def my_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        raise AssertionError

    with pytest.raises(
        ConfigError, match=r"compute_loss_func=.*my_loss.* takes the labels away .* use a plain Trainer"
    ):
        LossPluginTrainer(llama(), arguments(tmp_path), compute_loss_func=my_loss)


def test_labels_taken_by_a_subclass_are_reported_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class TakesLabels(LossPluginTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = ForCausalLMLoss(outputs.logits, labels, VOCAB, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    made = run(TakesLabels, tmp_path, loss_strategy="cce")
    said = [record for record in caplog.records if "NO LOSS WENT THROUGH loss_plugins" in record.getMessage()]
    assert len(said) == 1, "once, after the first step"
    assert said[0].levelno == logging.WARNING
    for cause in ("takes the labels out of the batch", "TRL", "no labels", "model_init", "'cce'"):
        assert cause in said[0].getMessage()
    assert made.loss_report["hits"] == 0


def test_nothing_is_said_when_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(LossPluginTrainer, tmp_path, loss_strategy="cce")
    assert not [record for record in caplog.records if record.name.startswith("loss_plugins")]


def test_logits_made_after_all_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loss_with_a_look(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        return ForCausalLMLoss(logits, labels, vocab_size, **kwargs) + 0 * logits.sum()

    def model() -> PreTrainedModel:
        made = llama()
        made.loss_function = loss_with_a_look
        return made

    made = run(LossPluginTrainer, tmp_path, model=model, loss_strategy="cce")
    assert made.loss_report["materialised"] == 8
    said = [record for record in caplog.records if record.name.startswith("loss_plugins")]
    assert len(said) == 1, [record.getMessage() for record in said]
    assert "sum" in said[0].getMessage()
    assert_same_curve(made, run(Trainer, tmp_path))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (None, "fused_linear_cross_entropy"),
        ({"rms_norm": True}, "fused_linear_cross_entropy"),
        ({"fused_linear_cross_entropy": False, "cross_entropy": True}, "cross_entropy"),
    ],
)
def test_liger_loss_is_refused(settings: Any, named: str, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    args = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config=settings)
    with pytest.raises(ConfigError, match=rf"use_liger_kernel is on with {named}.* turn its loss off"):
        LossPluginTrainer(llama(), args)


def test_liger_without_its_loss_is_welcome(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    # its layers too are off here: their kernels need a GPU, and Liger puts them into transformers for good
    off = ("fused_linear_cross_entropy", "cross_entropy", "rope", "swiglu", "rms_norm")
    settings = {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(off, False)}
    made = run(LossPluginTrainer, tmp_path, loss_strategy="cce", **settings)
    assert made.loss_report["hits"] == 8
    assert_same_curve(made, run(Trainer, tmp_path))


def test_model_init_makes_models_that_are_patched(tmp_path: Path) -> None:
    def train_twice(make: Any, **settings: Any) -> Any:
        made = make(args=arguments(tmp_path, **settings), model_init=lambda: llama(), train_dataset=rows())
        first = made.model
        made.train()
        assert made.model is not first
        made.train()
        return made

    stock, ours = train_twice(Trainer), train_twice(LossPluginTrainer, loss_strategy="cce")
    assert_same_curve(ours, stock)
    assert ours.loss_report["hits"] == 8
    assert ours.loss_handle.model is ours.model


def test_settings_changed_between_trainings_take_effect(tmp_path: Path) -> None:
    """As a hyperparameter search does."""
    made = run(LossPluginTrainer, tmp_path, loss_strategy="cce")
    before = made.loss_handle
    made.args.loss_strategy, made.args.loss_label_smoothing = "chunked", 0.3
    made.train()
    assert made.loss_report["strategy"] == "chunked"
    assert made.loss_report["hits"] == 8
    assert not before.active


@pytest.mark.parametrize("strategy", ["naive", "cce"])
def test_class_that_takes_no_count(strategy: str, tmp_path: Path) -> None:
    def model() -> PreTrainedModel:
        made = llama()
        made.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {"accepts_loss_kwargs": False})
        return made

    stock = run(Trainer, tmp_path, model=model)
    ours = run(LossPluginTrainer, tmp_path, model=model, loss_strategy=strategy)
    assert not ours.model_accepts_loss_kwargs
    assert_same_curve(ours, stock)
    assert abs(losses(stock)[0] - losses(run(Trainer, tmp_path, max_steps=1))[0]) > 1e-4, "means of means differ"


def test_a_patched_model_is_used_as_it_is(tmp_path: Path) -> None:
    model = llama()
    handle = patch_model(model, LossConfig("cce", loss_label_smoothing=0.2))
    made = LossPluginTrainer(model, arguments(tmp_path), train_dataset=rows())
    assert made.loss_handle is handle
    made.train()
    assert_same_curve(made, run(LossPluginTrainer, tmp_path, label_smoothing_factor=0.2))
    assert handle.counts.fused == 8
    same = LossPluginTrainer(model, arguments(tmp_path), loss_config=LossConfig("cce", loss_label_smoothing=0.2))
    assert same.loss_handle is handle


def test_a_model_patched_otherwise_is_refused(tmp_path: Path) -> None:
    model = llama()
    patch_model(model, "cce")
    with pytest.raises(PatchError, match=r"'cce'.*'chunked'.*find_handle.*undo"):
        LossPluginTrainer(model, arguments(tmp_path), loss_config="chunked")


def test_contradicting_smoothing_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1 and loss_label_smoothing=0\.2"):
        LossPluginTrainer(llama(), args, loss_config=LossConfig("cce", loss_label_smoothing=0.2))
    model = llama()
    patch_model(model, LossConfig("cce", loss_label_smoothing=0.2))
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1 and loss_label_smoothing=0\.2"):
        LossPluginTrainer(model, args)


def test_wrong_loss_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cce'"):
        LossPluginTrainer(llama(), arguments(tmp_path), loss_config="ccee")
    with pytest.raises(ConfigError, match="Did you mean 'loss_strategy'"):
        LossPluginTrainer(llama(), arguments(tmp_path), loss_config={"loss_strategi": "cce"})


def test_token_weights_beside_shift_labels_are_refused(tmp_path: Path) -> None:
    made = LossPluginTrainer(llama(), arguments(tmp_path), loss_config="cce")
    ids = torch.arange(8)[None]
    batch = {"input_ids": ids, "labels": ids, "shift_labels": ids, "token_weight": torch.ones(1, 8)}
    with pytest.raises(RuntimeError, match=r"token weights \('token_weight'\).*shift_labels"):
        made.compute_loss(made.model.train(), batch)


def test_shift_labels_win_over_labels(tmp_path: Path) -> None:
    """Context parallelism gives both; the count is over shift_labels."""
    generator = torch.Generator().manual_seed(0)
    ids, shifted = (torch.randint(5, VOCAB, (2, 8), generator=generator) for _ in range(2))
    batch = {"input_ids": ids, "labels": ids, "shift_labels": shifted}
    stock, ours = (
        Trainer(llama(), arguments(tmp_path)),
        LossPluginTrainer(llama(), arguments(tmp_path), loss_config="cce"),
    )
    expected = stock.compute_loss(stock.model.train(), dict(batch), num_items_in_batch=torch.tensor(16))
    actual = ours.compute_loss(ours.model.train(), dict(batch), num_items_in_batch=torch.tensor(16))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert ours.loss_handle.counts.fused == 1


def test_out_of_memory_says_what_would_take_less(tmp_path: Path) -> None:
    class Full(LossPluginTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        run(Full, tmp_path, loss_strategy="naive", model=lambda: llama(vocab_size=32768))
    (note,) = caught.value.__notes__
    assert "48 tokens, vocabulary 32768" in note
    assert "loss_strategy 'naive'" in note
    for name in ("naive", "chunked", "flce", "cce"):
        assert f"{name} " in note
    assert "takes the least" in note


def test_nothing_of_a_training_stays_with_the_model(tmp_path: Path) -> None:
    made = run(LossPluginTrainer, tmp_path, loss_strategy="cce")
    assert made.loss_handle.before_loss == []
    assert made.loss_handle.after_loss_backward == []
    made.loss_handle.undo()
    assert type(made.model) is LlamaForCausalLM


def test_direct_calls_outside_training(tmp_path: Path) -> None:
    """Outputs in evaluation have logits, and the loss is the same with and without them."""
    made = LossPluginTrainer(llama(), arguments(tmp_path, label_smoothing_factor=0.1), loss_config="cce")
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in rows(1)[0]}
    made.model.eval()
    alone = made.compute_loss(made.model, dict(batch))
    loss, outputs = made.compute_loss(made.model, dict(batch), return_outputs=True)
    torch.testing.assert_close(loss, alone)
    assert outputs.logits.shape == (4, 12, VOCAB)
    made.model.train()
    loss, outputs = made.compute_loss(made.model, dict(batch), return_outputs=True)
    torch.testing.assert_close(loss, alone)
    assert outputs.logits is None


def t5() -> PreTrainedModel:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


class LossPluginSeq2SeqTrainer(LossPluginMixin, Seq2SeqTrainer):
    """As a user would write it."""


@pytest.mark.parametrize("generate", [False, True])
def test_mixin_on_the_encoder_decoder_trainer(generate: bool, tmp_path: Path) -> None:
    def made(make: Any, **extra: Any) -> Any:
        args = arguments(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=generate, generation_max_length=6,
                         gradient_accumulation_steps=1)  # fmt: skip
        trainer = make(model=t5(), args=args, train_dataset=rows(), eval_dataset=rows(6, seed=9), **extra)
        trainer.train()
        return trainer

    stock, ours = made(Seq2SeqTrainer), made(LossPluginSeq2SeqTrainer, loss_config="cce")
    assert_same_curve(ours, stock)
    assert ours.loss_report["hits"] == 4
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], abs=1e-5)
    predicted, expected = ours.predict(rows(4)), stock.predict(rows(4))
    if generate:
        assert (predicted.predictions == expected.predictions).all()
        assert predicted.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-5)


def test_user_callbacks_and_trackers_see_the_numbers(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    seen: list[dict[str, Any]] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    made = run(LossPluginTrainer, tmp_path, trainer={"callbacks": [Tracker()]}, loss_strategy="cce")
    assert "loss_plugins/valid_fraction" in seen[0]
    assert logged(made, "loss_plugins/valid_fraction")[0] == seen[0]["loss_plugins/valid_fraction"]
