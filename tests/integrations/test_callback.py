"""`LossPluginCallback` with the stock Trainer, and where it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import VOCAB, arguments, assert_same_curve, llama, logged, rows, run
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from loss_plugins import LossConfig, LossPluginCallback, LossPluginTrainer, patch_model
from loss_plugins.errors import ConfigError, PatchError, UnsupportedError
from loss_plugins.integrations.hf import LossPluginMixin


def accuracy(prediction: Any) -> dict[str, float]:
    return {"acc": float((np.asarray(prediction.predictions).argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}


def with_callback(callback: TrainerCallback, **others: Any) -> dict[str, Any]:
    return {"callbacks": [callback], **others}


@pytest.mark.parametrize("strategy", ["naive", "chunked", "flce", "cce"])
def test_curve_equals_stock(strategy: str, tmp_path: Path) -> None:
    callback = LossPluginCallback(strategy)
    ours = run(Trainer, tmp_path, trainer=with_callback(callback))
    assert_same_curve(ours, run(Trainer, tmp_path))
    assert callback.loss_handle is not None
    assert callback.loss_handle.counts.fused == 8
    assert callback.loss_handle.counts.materialised == 0


@pytest.mark.parametrize("by", ["callback", "arguments"])
def test_a_column_of_token_weights_is_refused(by: str, tmp_path: Path) -> None:
    """The Trainer would drop it, or the model would."""
    named = {"loss_token_weight_key": "weights"}
    make: dict[str, Callable[[], Any]] = {
        "callback": lambda: LossPluginCallback(named),
        "arguments": lambda: Trainer(llama(), arguments(tmp_path, **named), callbacks=[LossPluginCallback()]),
    }
    with pytest.raises(ConfigError, match=r"loss_token_weight_key 'weights' was given.*train with LossPluginTrainer"):
        make[by]()
    data = [row | {"token_weight": torch.ones(12)} for row in rows(8)]
    with pytest.raises(ConfigError, match=r"was called with token_weight.*Train with LossPluginTrainer"):
        run(Trainer, tmp_path, data=data, trainer=with_callback(LossPluginCallback("cce")), remove_unused_columns=False)


def test_what_the_trainer_found_out_about_the_model_is_unchanged(tmp_path: Path) -> None:
    stock = Trainer(llama(), arguments(tmp_path))
    ours = Trainer(llama(), arguments(tmp_path), callbacks=[LossPluginCallback("cce")])
    for name in ("model_accepts_loss_kwargs", "_loss_shifts_labels", "label_names", "can_return_loss"):
        if hasattr(stock, name):
            assert getattr(ours, name) == getattr(stock, name), name


def test_numbers_reach_the_history(tmp_path: Path) -> None:
    config = LossConfig("cce", loss_statistics=["accuracy", "entropy"])
    ours = run(Trainer, tmp_path, trainer=with_callback(LossPluginCallback(config)))
    for name in ("valid_fraction", "token_accuracy", "entropy"):
        assert len(logged(ours, f"loss_plugins/{name}")) == 4, name


def test_evaluation_has_logits_for_compute_metrics(tmp_path: Path) -> None:
    extra = {"eval_dataset": rows(6, seed=9), "compute_metrics": accuracy}
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    stock = run(Trainer, tmp_path, trainer=extra, **settings)
    callback = LossPluginCallback("cce")
    ours = run(Trainer, tmp_path, trainer=with_callback(callback, **extra), **settings)
    assert logged(ours, "eval_acc") == logged(stock, "eval_acc")
    assert logged(ours, "eval_loss") == pytest.approx(logged(stock, "eval_loss"), abs=1e-5)
    assert callback.loss_handle is not None
    assert callback.loss_handle.counts.fused == 8, "none of them in evaluation"


def test_evaluation_without_logits_when_only_the_loss_is_asked_for(tmp_path: Path) -> None:
    config = LossConfig("cce", loss_statistics=["entropy"])
    extra = {"eval_dataset": rows(6, length=5, seed=9)}
    settings = {"prediction_loss_only": True, "eval_strategy": "steps", "eval_steps": 1}
    callback = LossPluginCallback(config)
    ours = run(Trainer, tmp_path, trainer=with_callback(callback, **extra), **settings)
    stock = run(Trainer, tmp_path, trainer=extra, **settings)
    assert logged(ours, "eval_loss") == pytest.approx(logged(stock, "eval_loss"), abs=1e-5)
    assert callback.loss_handle is not None
    assert callback.loss_handle.counts.fused == 8 + 4 * 3
    alone = run(Trainer, tmp_path, trainer=with_callback(LossPluginCallback(config)))
    for name in ("loss_plugins/entropy", "loss_plugins/valid_fraction"):
        assert logged(ours, name) == pytest.approx(logged(alone, name), abs=1e-12), "evaluation's tokens stay out"


def test_model_init(tmp_path: Path) -> None:
    callback = LossPluginCallback("cce")
    made = Trainer(args=arguments(tmp_path), model_init=lambda: llama(), train_dataset=rows(), callbacks=[callback])
    first = callback.loss_handle
    made.train()
    assert callback.loss_handle is not first
    assert callback.loss_handle is not None
    assert callback.loss_handle.model is made.model
    assert callback.loss_handle.counts.fused == 8


def test_label_smoothing_is_the_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1 was given with LossPluginCallback"):
        Trainer(llama(), arguments(tmp_path, label_smoothing_factor=0.1), callbacks=[LossPluginCallback("cce")])
    callback = LossPluginCallback(LossConfig("cce", loss_label_smoothing=0.1))
    ours = run(Trainer, tmp_path, trainer=with_callback(callback))
    assert_same_curve(ours, run(LossPluginTrainer, tmp_path, label_smoothing_factor=0.1))


def test_labels_taken_by_compute_loss_func_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def my_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs.logits[:, :-1].reshape(-1, VOCAB)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1))

    run(Trainer, tmp_path, trainer=with_callback(LossPluginCallback("cce"), compute_loss_func=my_loss))
    said = [record.getMessage() for record in caplog.records if "NO LOSS WENT THROUGH" in record.getMessage()]
    assert len(said) == 1
    assert "compute_loss_func" in said[0]
    assert "LossPluginTrainer" in said[0]


def test_liger_loss_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    with pytest.raises(ConfigError, match="use_liger_kernel is on with fused_linear_cross_entropy"):
        Trainer(llama(), arguments(tmp_path, use_liger_kernel=True), callbacks=[LossPluginCallback("cce")])


def test_liger_applied_after_the_patch_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    made = Trainer(llama(), arguments(tmp_path), train_dataset=rows(), callbacks=[LossPluginCallback("cce")])
    _apply_liger_kernel_to_instance(made.model, rope=False, rms_norm=False, swiglu=False)
    with pytest.raises(PatchError, match=r"liger_kernel.* has set its own forward.*Turn one of them off"):
        made.train()


def sft_trainer(kind: Any, folder: Path, **extra: Any) -> Any:
    """A trainer of TRL's on the small rows."""
    trl, datasets = pytest.importorskip("trl", minversion="1.15"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(8)])
    config = trl.SFTConfig(**arguments(folder).to_dict() | {"max_length": None})
    return kind(trl)(llama(), args=config, train_dataset=data, processing_class=tokenizer, **extra)


def test_trl_that_computes_its_own_loss_is_refused(tmp_path: Path) -> None:
    made = sft_trainer(lambda trl: trl.SFTTrainer, tmp_path, callbacks=[LossPluginCallback("cce")])
    with pytest.raises(UnsupportedError, match=r"TRL computes the loss .* no effect there.* LossPluginTrainer"):
        made.train()


def test_mixin_on_trl_that_computes_its_own_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"TRL computes the loss .* no effect there.* LossPluginTrainer"):
        sft_trainer(lambda trl: type("Mine", (LossPluginMixin, trl.SFTTrainer), {}), tmp_path, loss_config="cce")


def test_model_patched_otherwise_is_refused(tmp_path: Path) -> None:
    model = llama()
    patch_model(model, "cce")
    with pytest.raises(PatchError, match=r"'cce'.*'flce'.*find_handle.*undo"):
        Trainer(model, arguments(tmp_path), callbacks=[LossPluginCallback("flce")])


def test_the_patch_stays_and_generation_is_what_it_was(tmp_path: Path) -> None:
    callback = LossPluginCallback("cce")
    made = run(Trainer, tmp_path, trainer=with_callback(callback))
    assert callback.loss_handle is not None
    assert callback.loss_handle.active
    assert callback.loss_handle.before_loss == []
    ids = torch.arange(5, 9)[None]
    kwargs: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    patched = made.model.eval().generate(ids, **kwargs)
    callback.loss_handle.undo()
    assert type(made.model) is LlamaForCausalLM
    assert torch.equal(patched, made.model.generate(ids, **kwargs))


def test_without_a_config_the_arguments_settings_are_taken(tmp_path: Path) -> None:
    callback = LossPluginCallback()
    run(Trainer, tmp_path, trainer=with_callback(callback), loss_strategy="flce", loss_z_loss=0.1)
    assert callback.loss_handle is not None
    assert callback.loss_handle.config == LossConfig("flce", loss_z_loss=0.1)
    own = LossPluginCallback("cce")
    run(Trainer, tmp_path, trainer=with_callback(own), loss_strategy="flce")
    assert own.loss_handle is not None and own.loss_handle.config == LossConfig("cce")
