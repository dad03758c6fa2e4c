"""`loss_self_check`: the first batch is compared with stock, everything is left as it was, and what is wrong is caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import VOCAB, arguments, assert_same_curve, llama, losses, norms, rows, run
from torch import nn
from transformers import Trainer

from loss_plugins import LossPluginArguments, LossPluginCallback, LossPluginTrainer, find_handle, patch_model
from loss_plugins.errors import ConfigError, UnsupportedError, VerificationError
from loss_plugins.models.verification import check_first_batch, cut_batch, verify_model
from loss_plugins.models.verification.moment import loss_of
from loss_plugins.strategies.cce import Cce

STRATEGIES = ("naive", "chunked", "flce", "cce", "auto")


def dropping() -> Any:
    """A model that draws random numbers in every forward, and has a buffer that every forward changes."""
    model = llama(attention_dropout=0.2)
    model.register_buffer("calls", torch.zeros(()))

    def count(module: Any, args: Any) -> None:
        module.calls.add_(1)

    model.register_forward_pre_hook(count)
    return model


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("loss_self_check")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_the_same_with_it(strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"loss_strategy": strategy, "loss_statistics": ["accuracy"]}
    plain = run(LossPluginTrainer, tmp_path, model=dropping, **settings)
    caplog.clear()
    checked = run(LossPluginTrainer, tmp_path, model=dropping, loss_self_check=True, **settings)
    (line,) = said(caplog)
    assert "equals stock on 48 tokens" in line
    assert "gradients of 21 parameters" in line
    assert losses(checked) == losses(plain), "to the bit: random states, parameters and gradients are as they were"
    assert norms(checked) == norms(plain)
    assert checked.model.calls == plain.model.calls
    for name in ("hits", "materialised", "chosen"):
        assert checked.loss_report[name] == plain.loss_report[name]
    for entry, other in zip(checked.state.log_history, plain.state.log_history, strict=True):
        for name in ("loss_plugins/valid_fraction", "loss_plugins/token_accuracy"):
            assert entry.get(name) == other.get(name)
    for one, other in zip(checked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_checked_unasked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(LossPluginTrainer, tmp_path, loss_strategy="cce")
    assert said(caplog) == []


def test_as_an_argument_of_the_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(LossPluginTrainer, tmp_path, trainer={"loss_config": "cce", "loss_self_check": True})
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    "added",
    [
        {
            "loss_z_loss": 1e-2,
            "label_smoothing_factor": 0.1,
            "loss_class_weight": [1.0 + i / VOCAB for i in range(VOCAB)],
        },
        {"loss_objective": "dft"},
    ],
    ids=["added", "objective"],
)
def test_what_stock_does_not_have_is_left_out_of_it(
    added: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"loss_strategy": "flce", **added}
    weighted = [row | {"token_weight": torch.linspace(0, 1, 12)} for row in rows()]
    plain = run(LossPluginTrainer, tmp_path, data=weighted, **settings)
    checked = run(LossPluginTrainer, tmp_path, data=weighted, loss_self_check=True, **settings)
    assert len(said(caplog)) == 1
    assert losses(checked) == losses(plain)
    assert checked.loss_handle.config == plain.loss_handle.config


@pytest.fixture
def wrong_cce(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A cce whose gradient is off by a factor, and whose loss is right."""

    def make(factor: float) -> None:
        plain = Cce.__call__

        def call(self: Cce, *args: Any) -> Any:
            result = plain(self, *args)
            return result._replace(loss=result.loss.detach() + factor * (result.loss - result.loss.detach()))

        monkeypatch.setattr(Cce, "__call__", call)

    return make


def test_a_wrong_strategy_stops_the_training(wrong_cce: Any, tmp_path: Path) -> None:
    wrong_cce(1.001)
    model = llama()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(VerificationError, match=r"'cce', LlamaForCausalLM differs from stock on 48 tokens") as caught:
        run(LossPluginTrainer, tmp_path, model=lambda: model, loss_strategy="cce", loss_self_check=True)
    for part in ("by 1.0e-03 (allowed 1.", "and 18 more", "Nothing was trained", "'naive'", "loss-plugins verify"):
        assert part in str(caught.value)
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(model.parameters(), before, strict=True))


class Louder(nn.Linear):
    """A head that someone has made louder."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 1.01


def test_a_head_that_does_more_than_its_weight_stops_the_training(tmp_path: Path) -> None:
    def model() -> Any:
        made = llama()
        patch_model(made, "cce")
        # a class on top of the patched one, as FSDP2 makes, but with a forward that a strategy never calls
        head = type(made.lm_head)

        def forward(self: Any, hidden: Any, **job: Any) -> Any:
            return head.forward(self, hidden, **job) * (1 if job else 1.01)

        made.lm_head.__class__ = type("Louder", (head,), {"forward": forward})
        return made

    with pytest.raises(VerificationError, match="differs from stock"):
        run(LossPluginTrainer, tmp_path, model=model, trainer={"loss_self_check": True})


def test_a_head_with_a_forward_of_its_own_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def model() -> Any:
        made = llama()
        made.lm_head.__class__ = Louder
        return made

    run(LossPluginTrainer, tmp_path, model=model, loss_strategy="chunked", loss_self_check=True)
    assert len(said(caplog)) == 1


def test_a_loss_past_the_patch_stops_the_training(tmp_path: Path) -> None:
    class TakesLabels(LossPluginTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits[:, :-1].flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    with pytest.raises(VerificationError, match="no loss went through loss_plugins"):
        run(TakesLabels, tmp_path, loss_strategy="cce", loss_self_check=True)


def test_autocast_and_accumulation(tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong_cce: Any) -> None:
    run(LossPluginTrainer, tmp_path, loss_strategy="cce", loss_self_check=True, bf16=True)
    (line,) = said(caplog)
    assert "(allowed 3.9e-03)" in line, "bfloat16's"
    wrong_cce(1.5)
    with pytest.raises(VerificationError):
        run(LossPluginTrainer, tmp_path, loss_strategy="cce", loss_self_check=True, bf16=True)


def test_a_batch_without_labels_that_count_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rows(16)
    seen = []

    def collate(features: list[Any]) -> Any:
        batch = {key: torch.stack([feature[key] for feature in features]) for key in features[0]}
        if not seen:
            batch["labels"] = torch.full_like(batch["labels"], -100)
        seen.append(1)
        return batch

    run(
        LossPluginTrainer,
        tmp_path,
        data=data,
        trainer={"data_collator": collate},
        loss_strategy="cce",
        loss_self_check=True,
    )
    assert len(said(caplog)) == 1


def test_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def model() -> Any:
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    run(LossPluginTrainer, tmp_path, model=model, loss_strategy="flce", loss_self_check=True)
    assert "gradients of 4 parameters" in said(caplog)[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_or_checkpointed(checkpointing: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = (
        {"gradient_checkpointing": True} if checkpointing else {"torch_compile": True, "torch_compile_backend": "eager"}
    )
    run(LossPluginTrainer, tmp_path, loss_strategy="cce", loss_self_check=True, max_steps=1, **settings)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    "settings", [{"optim": "lomo"}, {"optim": "galore_adamw_layerwise", "optim_target_modules": ["q"]}]
)
def test_optimizers_that_step_in_the_backward_are_refused(settings: Any, tmp_path: Path) -> None:
    from loss_plugins.integrations.hf.self_check import refuse_self_check

    args = arguments(tmp_path, loss_strategy="cce", loss_self_check=True, **settings)
    with pytest.raises(UnsupportedError, match="steps in the backward"):
        refuse_self_check(args)


def test_hooks_that_step_are_refused() -> None:
    model = llama()
    handle = patch_model(model, "cce")
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    batch = {key: torch.stack([row[key] for row in rows(2)]) for key in rows(1)[0]}
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight has a hook of .*test_self_check"):
        check_first_batch(model, handle, batch, lambda inputs, deferred: loss_of(model(**inputs)))


def test_gradients_and_random_states_come_back() -> None:
    model = dropping()
    handle = patch_model(model.train(), "cce")
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in rows(1)[0]}
    loss_of(model(**batch)).backward()
    before = {key: p.grad for key, p in model.named_parameters()}
    values = {key: gradient.clone() for key, gradient in before.items()}
    counts, calls = (handle.counts.fused, handle.counts.deferred), model.calls.clone()
    state, python = torch.get_rng_state(), random.getstate()

    def compute(inputs: dict[str, Any], deferred: bool) -> Any:
        random.random()
        with handle.scope(loss_only=deferred):
            return loss_of(model(**inputs))

    checked = check_first_batch(model, handle, batch, compute)
    assert checked is not None
    assert checked.found.loss < 1e-6
    assert all(p.grad is before[key] and torch.equal(p.grad, values[key]) for key, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert (handle.counts.fused, handle.counts.deferred) == counts
    assert model.calls == calls


def test_a_model_that_changes_itself_when_it_first_runs() -> None:
    model = llama()
    handle = patch_model(model.train(), "cce")
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in rows(1)[0]}

    def settles(module: Any, args: Any) -> None:
        module.variance_epsilon = 0.3

    model.model.norm.register_forward_hook(lambda module, args, output: settles(module, args))

    def compute(inputs: dict[str, Any], deferred: bool) -> Any:
        with handle.scope(loss_only=deferred):
            return loss_of(model(**inputs))

    assert check_first_batch(model, handle, batch, compute) is not None


def test_large_batches_are_cut_where_labels_are() -> None:
    batch = {key: torch.stack([row[key] for row in rows(6, length=40)]) for key in rows(1)[0]}
    batch["labels"][:5] = -100
    batch["labels"][5, :30] = -100
    cut = cut_batch(batch, 10)
    assert cut["labels"].shape == (1, 10)
    assert torch.equal(cut["labels"][0], batch["labels"][5, 30:])
    assert torch.equal(cut["input_ids"][0], batch["input_ids"][5, 30:])
    assert cut_batch(batch, 80)["labels"].shape == (2, 40)
    assert (cut_batch(batch, 80)["labels"] != -100).any()
    images = batch | {"pixel_values": torch.zeros(3, 4)}
    assert cut_batch(images, 10) is images, "nobody knows which rows they belong to"
    assert cut_batch(batch, 1000) is batch


def test_a_large_batch_in_training(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("loss_plugins.models.verification.first_batch._tokens_that_fit", lambda handle, batch: 24)
    run(LossPluginTrainer, tmp_path, loss_strategy="cce", loss_self_check=True)
    assert "on 24 tokens" in said(caplog)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    model = llama(vocab_size=2048, hidden_size=64).to("cuda", dtype)
    batch = {key: torch.stack([row[key] for row in rows(8, length=64)]).cuda() for key in rows(1)[0]}
    report = verify_model(model, batch)
    assert report.equal, report
    assert all(row.status == "equal" and row.peak_bytes for row in report.rows)


# The callback


def test_callback_checks_the_first_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(check: bool) -> Any:
        args = arguments(tmp_path, loss_strategy="cce", loss_self_check=check)
        made = Trainer(dropping(), args, train_dataset=rows(), callbacks=[LossPluginCallback()])
        made.train()
        return made

    plain, checked = trained(False), trained(True)
    assert len(said(caplog)) == 1
    assert losses(plain) == losses(checked)


def test_callback_stops_what_is_wrong(tmp_path: Path, wrong_cce: Any) -> None:
    wrong_cce(1.01)
    args = arguments(tmp_path, loss_strategy="cce", loss_self_check=True)
    made = Trainer(llama(), args, train_dataset=rows(), callbacks=[LossPluginCallback()])
    with pytest.raises(VerificationError, match="differs from stock"):
        made.train()


def test_callback_refuses_data_that_is_read_once(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from rows()

    args = arguments(tmp_path, loss_strategy="cce", loss_self_check=True)
    made = Trainer(llama(), args, train_dataset=Stream(), callbacks=[LossPluginCallback()])
    with pytest.raises(ConfigError, match="Use LossPluginTrainer"):
        made.train()


def test_it_must_be_true_or_false() -> None:
    with pytest.raises(ConfigError, match="loss_self_check must be true or false"):
        LossPluginArguments("out", loss_self_check="maybe")
    for value in ("false", 1, []):
        with pytest.raises(ConfigError, match="loss_self_check must be true or false, got"):
            LossPluginTrainer(llama(), loss_config="cce", loss_self_check=value)  # type: ignore[arg-type]


def test_a_run_of_before_is_still_patched(tmp_path: Path) -> None:
    made = run(LossPluginTrainer, tmp_path, loss_strategy="cce", loss_self_check=True)
    assert find_handle(made.model) is made.loss_handle
    assert_same_curve(made, run(Trainer, tmp_path))
