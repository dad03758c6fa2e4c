"""`LossPluginTrainer` against the stock Trainer on tiny models: the same numbers, without logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    STOCK_SMOOTHS_BY_COUNT,
    STRATEGIES,
    VOCAB,
    arguments,
    assert_same_curve,
    count,
    llama,
    logged,
    losses,
    rows,
    run,
)
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Trainer

from loss_plugins import LossConfig, LossPluginTrainer
from loss_plugins.errors import ConfigError


def accuracy(prediction: Any) -> dict[str, float]:
    guess, labels = np.asarray(prediction.predictions).argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"acc": float((guess == labels)[labels != -100].mean())}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_curve_equals_stock(strategy: str, tmp_path: Path) -> None:
    stock = run(Trainer, tmp_path)
    ours = run(LossPluginTrainer, tmp_path, loss_strategy=strategy)
    assert_same_curve(ours, stock)
    report = ours.loss_report
    assert report["strategy"] == strategy
    assert report["hits"] == 8, "four steps of two micro-batches"
    assert report["materialised"] == 0
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_loss_config_beats_the_arguments(tmp_path: Path) -> None:
    trainer = LossPluginTrainer(llama(), arguments(tmp_path, loss_strategy="naive"), loss_config="cce")
    assert trainer.loss_handle.config == LossConfig("cce")
    trainer = LossPluginTrainer(llama(), arguments(tmp_path), loss_config={"loss_strategy": "chunked"})
    assert trainer.loss_handle.config == LossConfig("chunked")
    assert LossPluginTrainer(llama(), arguments(tmp_path)).loss_handle.config == LossConfig("auto")


def test_what_the_trainer_found_out_about_the_model_is_unchanged(tmp_path: Path) -> None:
    stock, ours = Trainer(llama(), arguments(tmp_path)), LossPluginTrainer(llama(), arguments(tmp_path))
    again = LossPluginTrainer(ours.model, arguments(tmp_path))  # here the model is patched before
    for name in ("model_accepts_loss_kwargs", "_loss_shifts_labels", "label_names", "can_return_loss"):
        if hasattr(stock, name):
            assert getattr(ours, name) == getattr(stock, name) == getattr(again, name), name


def test_accumulation_of_uneven_batches_equals_one_big_batch(tmp_path: Path) -> None:
    one = run(LossPluginTrainer, tmp_path, loss_strategy="cce", per_device_train_batch_size=8,
              gradient_accumulation_steps=1)  # fmt: skip
    four = run(LossPluginTrainer, tmp_path, loss_strategy="cce", per_device_train_batch_size=2,
               gradient_accumulation_steps=4)  # fmt: skip
    assert_same_curve(four, one)
    assert (one.loss_report["hits"], four.loss_report["hits"]) == (4, 16)


@pytest.mark.parametrize("items", [16, 16.0, torch.tensor(16), torch.tensor([16]), torch.tensor([[16.0]])], ids=repr)
def test_forms_of_the_count(items: Any, tmp_path: Path) -> None:
    stock, ours = (
        Trainer(llama(), arguments(tmp_path)),
        LossPluginTrainer(llama(), arguments(tmp_path), loss_config="cce"),
    )
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in rows(1)[0]}
    expected = stock.compute_loss(stock.model.train(), dict(batch), num_items_in_batch=items)
    actual = ours.compute_loss(ours.model.train(), dict(batch), num_items_in_batch=items)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_label_smoothing_factor_equals_stock_without_logits(strategy: str, tmp_path: Path) -> None:
    settings = {"label_smoothing_factor": 0.2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    stock = run(Trainer, tmp_path, **settings)
    ours = run(LossPluginTrainer, tmp_path, loss_strategy=strategy, **settings)
    if STOCK_SMOOTHS_BY_COUNT:
        assert_same_curve(ours, stock)
    assert ours.loss_report["hits"] == 16
    assert ours.loss_report["materialised"] == 0
    plain = run(LossPluginTrainer, tmp_path, loss_strategy=strategy, max_steps=1)
    assert abs(losses(plain)[0] - losses(ours)[0]) > 1e-4, "smoothing changes the loss"
    one = run(LossPluginTrainer, tmp_path, loss_strategy=strategy, label_smoothing_factor=0.2,
              per_device_train_batch_size=8, gradient_accumulation_steps=1)  # fmt: skip
    assert_same_curve(ours, one)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_evaluation_makes_no_logits_and_equals_stock(accumulation: int, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": accumulation}
    data = rows(6, seed=9)
    stock = Trainer(llama(), arguments(tmp_path, **settings), eval_dataset=data)
    ours = LossPluginTrainer(llama(), arguments(tmp_path, **settings), eval_dataset=data, loss_config="cce")
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], abs=1e-6)
    assert ours.loss_handle.counts.fused == 3, "six rows, two at a time"
    assert ours.loss_handle.counts.materialised == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compute_metrics_gets_real_logits(smoothing: float, tmp_path: Path) -> None:
    data = rows(6, seed=9)
    settings = {"label_smoothing_factor": smoothing}
    both = []
    for make in (Trainer, LossPluginTrainer):
        trainer = make(llama(), arguments(tmp_path, **settings), eval_dataset=data, compute_metrics=accuracy)
        both.append(trainer.evaluate())
    assert "eval_acc" in both[1]
    assert both[1]["eval_acc"] == both[0]["eval_acc"]
    if not smoothing or STOCK_SMOOTHS_BY_COUNT:
        assert both[1]["eval_loss"] == pytest.approx(both[0]["eval_loss"], abs=1e-6)


def test_predict_returns_the_stock_logits(tmp_path: Path) -> None:
    stock, ours = (
        Trainer(llama(), arguments(tmp_path)),
        LossPluginTrainer(llama(), arguments(tmp_path), loss_config="cce"),
    )
    expected, actual = stock.predict(rows(4)), ours.predict(rows(4))
    np.testing.assert_array_equal(actual.predictions, expected.predictions)
    assert actual.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-6)


def test_evaluation_during_training_with_metrics(tmp_path: Path) -> None:
    trainer = {"eval_dataset": rows(6, seed=9), "compute_metrics": accuracy}
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    stock = run(Trainer, tmp_path, trainer=trainer, **settings)
    ours = run(LossPluginTrainer, tmp_path, trainer=trainer, loss_strategy="flce", **settings)
    assert_same_curve(ours, stock)
    assert ours.loss_report["hits"] == 8, "evaluations are not counted"
    assert logged(ours, "eval_acc") == logged(stock, "eval_acc")
    assert logged(ours, "eval_loss") == pytest.approx(logged(stock, "eval_loss"), abs=1e-5)


def test_bf16_autocast(tmp_path: Path) -> None:
    stock = run(Trainer, tmp_path, bf16=True)
    for strategy in STRATEGIES:
        ours = run(LossPluginTrainer, tmp_path, bf16=True, loss_strategy=strategy)
        assert losses(ours)[0] == pytest.approx(losses(stock)[0], abs=2e-3), "stock rounds its logits to bf16"
        assert losses(ours) == pytest.approx(losses(stock), abs=2e-2)
        assert ours.loss_report["hits"] == 8


def test_compiled_model(tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "label_smoothing_factor": 0.1}
    eager = run(LossPluginTrainer, tmp_path, loss_strategy="cce", label_smoothing_factor=0.1)
    ours = run(LossPluginTrainer, tmp_path, loss_strategy="cce", trainer={"eval_dataset": rows(6)},
               eval_strategy="steps",
               eval_steps=2, **settings)  # fmt: skip
    assert_same_curve(ours, eager)
    assert ours.loss_report["hits"] == 8
    assert ours.loss_report["materialised"] == 0
    assert ours.evaluate()["eval_loss"] == pytest.approx(eager.evaluate(rows(6))["eval_loss"], abs=1e-5)


def test_gradient_checkpointing(tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    stock = run(Trainer, tmp_path)
    assert_same_curve(run(LossPluginTrainer, tmp_path, loss_strategy="cce", **settings), stock)


@pytest.mark.parametrize("strategy", ["chunked", "cce"])
@pytest.mark.parametrize("where", ["v_proj", "lm_head"])
def test_lora(strategy: str, where: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", where], lora_dropout=0.1, task_type="CAUSAL_LM")
        return peft.get_peft_model(llama(), settings)

    stock = run(Trainer, tmp_path, model=adapted)
    ours = run(LossPluginTrainer, tmp_path, model=adapted, loss_strategy=strategy)
    assert_same_curve(ours, stock)
    assert ours.loss_report["hits"] == 8
    assert ours.loss_report["materialised"] == 0


def test_router_loss_of_mixture_of_experts_is_in_the_loss(tmp_path: Path) -> None:
    def mixtral() -> PreTrainedModel:
        torch.manual_seed(0)
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
                attn_implementation="eager", experts_implementation="eager",
            )
        )  # fmt: skip

    stock = run(Trainer, tmp_path, model=mixtral)
    ours = run(LossPluginTrainer, tmp_path, model=mixtral, loss_strategy="cce")
    assert_same_curve(ours, stock)
    assert ours.loss_report["hits"] == 8


def test_resume_reproduces_the_curve(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "loss_strategy": "cce"}
    whole = run(LossPluginTrainer, tmp_path, **settings)
    again = LossPluginTrainer(llama(), arguments(tmp_path, **settings), train_dataset=rows())
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(whole), "the last two losses come from the resumed run, bit for bit"
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.loss_config() == LossConfig("cce")


def test_saved_model_is_a_stock_model(tmp_path: Path) -> None:
    trainer = run(LossPluginTrainer, tmp_path, loss_strategy="cce", max_steps=1)
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = type(llama()).from_pretrained(tmp_path / "saved")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


def nll(model: PreTrainedModel, batch: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """Per-token losses on real logits, shifted, with zeros where ignored."""
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    settings = {"reduction": "none", **settings}
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1), **settings)


def weighted_rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [row | {"token_weight": torch.rand(12, generator=generator)} for row in rows(count)]


def stack(data: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in data]) for key in data[0]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_token_weights(strategy: str, tmp_path: Path) -> None:
    data = weighted_rows(8)
    ours = run(LossPluginTrainer, tmp_path, data=data, loss_strategy=strategy, max_steps=1, learning_rate=0.0)
    batch = stack(data)
    items = count(ours, batch)
    expected = (nll(llama().eval(), batch) * batch["token_weight"][:, 1:].reshape(-1)).sum() / items
    assert losses(ours) == pytest.approx([expected.item()], rel=1e-5)
    assert ours.loss_report["hits"] == 2
    evaluated = ours.evaluate(data)["eval_loss"]
    parts = [stack(data[i : i + 2]) for i in range(0, 8, 2)]
    means = [(nll(llama().eval(), p) * p["token_weight"][:, 1:].reshape(-1)).sum() / count(ours, p) for p in parts]
    assert evaluated == pytest.approx(torch.stack(means).mean().item(), rel=1e-5)


def test_token_weights_survive_the_removal_of_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(
        [{**{k: v.tolist() for k, v in row.items()}, "unused": 1.0} for row in weighted_rows(8)]
    )
    ours = run(LossPluginTrainer, tmp_path, data=data, loss_strategy="cce", max_steps=1, learning_rate=0.0)
    plain = run(LossPluginTrainer, tmp_path, data=rows(8), loss_strategy="cce", max_steps=1, learning_rate=0.0)
    assert losses(ours)[0] < 0.7 * losses(plain)[0], "weights in [0, 1) shrink the loss"


def test_a_column_of_token_weights_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"loss_strategy": "cce", "loss_token_weight_key": "weights", "max_steps": 1}
    with pytest.raises(
        ConfigError, match="'weights' was given, and a training batch has no such column: it has input_ids"
    ):
        run(LossPluginTrainer, tmp_path, data=weighted_rows(8), **settings)
    named = [{**row, "weights": row["token_weight"]} for row in weighted_rows(8)]
    trained = run(
        LossPluginTrainer,
        tmp_path,
        data=[{k: v for k, v in r.items() if k != "token_weight"} for r in named],
        **settings,
    )
    default = run(LossPluginTrainer, tmp_path, data=weighted_rows(8), loss_strategy="cce", max_steps=1)
    assert losses(trained) == losses(default)
    assert trained.evaluate(rows(4))["eval_loss"] > 0, "data to evaluate on may have none"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_class_weights(strategy: str, tmp_path: Path) -> None:
    weights = torch.linspace(0, 2, VOCAB)
    data = rows(8)
    ours = run(LossPluginTrainer, tmp_path, data=data, loss_strategy=strategy, max_steps=1, learning_rate=0.0,
               loss_class_weight=weights.tolist())  # fmt: skip
    batch = stack(data)
    items = count(ours, batch)
    expected = nll(llama().eval(), batch, weight=weights.double()).sum() / items
    assert losses(ours) == pytest.approx([expected.item()], rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statistics(strategy: str, tmp_path: Path) -> None:
    data = rows(8)
    ours = run(LossPluginTrainer, tmp_path, data=data, loss_strategy=strategy, max_steps=2, learning_rate=0.0,
               loss_statistics=["accuracy", "entropy"], logging_steps=2)  # fmt: skip
    batch, model = stack(data), llama().eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].double()
    labels = batch["labels"][:, 1:]
    valid = labels != -100
    entropy = torch.distributions.Categorical(logits=logits).entropy()[valid].mean()
    right = (logits.argmax(-1) == labels)[valid].double().mean()
    entry = ours.state.log_history[0]
    assert entry["loss_plugins/entropy"] == pytest.approx(entropy.item(), rel=1e-5)
    assert entry["loss_plugins/token_accuracy"] == pytest.approx(right.item(), abs=1e-9)
    assert "loss_plugins/dropped" not in entry
    positions = {labels.numel(), batch["labels"].numel()}
    assert any(entry["loss_plugins/valid_fraction"] == pytest.approx(valid.sum().item() / n) for n in positions)
    metrics = ours.evaluate(data)
    assert metrics["eval_loss_plugins/entropy"] == pytest.approx(entropy.item(), rel=1e-5)
    assert metrics["eval_loss_plugins/token_accuracy"] == pytest.approx(right.item(), abs=1e-9)
    assert ours.state.log_history[-1]["eval_loss_plugins/entropy"] == metrics["eval_loss_plugins/entropy"]


def test_statistics_of_evaluation_do_not_mix_with_training(tmp_path: Path) -> None:
    settings = {"loss_strategy": "cce", "loss_statistics": ["entropy", "accuracy"], "logging_steps": 4}
    alone = run(LossPluginTrainer, tmp_path, **settings)
    trainer = {"eval_dataset": rows(20, length=6, seed=9)}
    mixed = run(LossPluginTrainer, tmp_path, trainer=trainer, eval_strategy="steps", eval_steps=1, **settings)
    for name in ("entropy", "token_accuracy", "valid_fraction"):
        assert logged(mixed, f"loss_plugins/{name}") == pytest.approx(logged(alone, f"loss_plugins/{name}"), abs=1e-12)


def test_statistics_beside_compute_metrics(tmp_path: Path) -> None:
    trainer = {"eval_dataset": rows(6, seed=9), "compute_metrics": accuracy}
    ours = run(LossPluginTrainer, tmp_path, trainer=trainer, loss_strategy="cce", loss_statistics=["accuracy"])
    metrics = ours.evaluate()
    assert metrics["eval_loss_plugins/token_accuracy"] == pytest.approx(metrics["eval_acc"])


def test_logged_numbers_and_report(tmp_path: Path) -> None:
    ours = run(LossPluginTrainer, tmp_path, loss_strategy="cce", loss_options={"workspace_mb": 1})
    assert len(logged(ours, "loss_plugins/valid_fraction")) == 4
    assert logged(ours, "loss_plugins/peak_loss_mib")[0] > 0
    assert all(rate > 0 for rate in logged(ours, "loss_plugins/tokens_per_s"))
    assert not logged(ours, "loss_plugins/entropy"), "was not asked for"
    report = ours.loss_report
    assert set(report) == {"strategy", "chosen", "kernels", "loss_peak_bytes", "tokens_per_s", "hits", "materialised"}
    assert report["chosen"] == [report["strategy"]]
    assert report["loss_peak_bytes"] > 0
    assert report["tokens_per_s"] > 0
    assert report["kernels"], "kernels of the cce strategy ran"


def test_memory_is_measured_where_it_is_spent(tmp_path: Path) -> None:
    """naive holds whole logits, the others with a small workspace do not."""

    def model() -> PreTrainedModel:
        return llama(vocab_size=8192)

    peaks = {}
    for strategy in STRATEGIES:
        options = None if strategy == "naive" else {"workspace_mb": 1}
        made = run(LossPluginTrainer, tmp_path, model=model, data=rows(16, length=64), max_steps=1,
                   loss_strategy=strategy, loss_options=options)  # fmt: skip
        peaks[strategy] = made.loss_report["loss_peak_bytes"]
    logits = 4 * 64 * 8192 * 4
    assert peaks["naive"] > 2 * logits
    for strategy in ("chunked", "flce", "cce"):
        assert 0 < peaks[strategy] < logits, peaks


def test_memory_can_be_left_unmeasured(tmp_path: Path) -> None:
    class Quick(LossPluginTrainer):
        measure_loss_memory = False

    made = run(Quick, tmp_path, loss_strategy="cce")
    assert made.loss_report["loss_peak_bytes"] == 0
    assert not logged(made, "loss_plugins/peak_loss_mib")


def test_an_interrupted_training_leaves_nothing_with_the_model(tmp_path: Path) -> None:
    data = rows(8)
    data[3]["labels"][-1] = VOCAB + 7
    trainer = LossPluginTrainer(llama(), arguments(tmp_path), loss_config="cce", train_dataset=data)
    with pytest.raises(ConfigError, match="labels hold"):
        trainer.train()
    handle = trainer.loss_handle
    assert handle is not None
    assert not handle.before_loss and not handle.after_loss_backward and not handle.shared_scopes
