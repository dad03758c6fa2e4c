"""What is added to the model's own loss, what is counted, and who is told when."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_deferred import RECORDED, Toy, below, gradients, inputs, mask_one_token, twin_toys
from tiny_models import VOCAB, assert_same_gradients, batch, make, step, twins
from torch import Tensor, nn

from loss_plugins import LossConfig, patch_model
from loss_plugins.errors import ConfigError
from loss_plugins.models.conformance.double import all_double
from loss_plugins.models.token_weight import aligned_token_weight

STRATEGIES = ["naive", "chunked", "flce", "cce"]
WEIGHTS = torch.linspace(0.5, 2.0, VOCAB, dtype=torch.float64)


def reference(stock: Any, rows: dict[str, Tensor], weights: Tensor | None = None, **kwargs: Any) -> Tensor:
    """The loss written out on stock's logits."""
    stock.eval()
    logits = stock(**{k: v for k, v in rows.items() if k != "labels"}).logits[:, :-1].double().reshape(-1, VOCAB)
    stock.train()
    target = rows["labels"][:, 1:].reshape(-1)
    z_loss, class_weight = kwargs.pop("z_loss", 0.0), kwargs.pop("class_weight", None)
    loss = F.cross_entropy(logits, target, class_weight, reduction="none", **kwargs)
    valid = (target != -100).double()
    counted = valid if weights is None else valid * weights[:, 1:].reshape(-1).double()
    total = counted if class_weight is None else counted * class_weight[target.clamp(min=0)]
    return (counted * loss + z_loss * counted * logits.logsumexp(1) ** 2).sum() / total.sum()


ADDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label smoothing": ({"loss_label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "z loss": ({"loss_z_loss": 1e-2}, {"z_loss": 1e-2}),
    "class weight": ({"loss_class_weight": WEIGHTS.float().tolist()}, {"class_weight": WEIGHTS.float().double()}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", ADDED)
def test_added_by_the_configuration(what: str, strategy: str) -> None:
    model, stock = twins("gemma3_text")
    config, kwargs = ADDED[what]
    patch_model(model, {"loss_strategy": strategy, **config})
    rows = batch()
    with all_double():
        expected = reference(stock, rows, **kwargs)
        expected.backward()
        _, ours = step(model, rows)
        torch.testing.assert_close(model(**rows).loss, expected, atol=1e-10, rtol=0)
    assert_same_gradients(ours, gradients(stock), atol=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_token_weight_follows_the_models_shift(name: str, strategy: str) -> None:
    model, stock = twins(name)
    handle = patch_model(model, strategy)
    rows = batch()
    weights = torch.rand(rows["labels"].shape)
    with all_double(), handle.scope(token_weight=weights):
        loss = model(**rows).loss
        if name == "llama":
            expected = reference(stock, rows, weights)
        else:
            logits = stock(**rows).logits.reshape(-1, VOCAB)
            each = F.cross_entropy(logits, rows["labels"].reshape(-1), reduction="none")
            counted = weights.double().reshape(-1) * (rows["labels"].reshape(-1) != -100)
            expected = (each * counted).sum() / counted.sum()
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    assert model(**rows).loss != loss


def test_token_weight_with_num_items_in_batch() -> None:
    model, stock = twins()
    handle = patch_model(model, "cce")
    rows, weights = batch(), torch.rand(2, 12)
    with all_double(), handle.scope(token_weight=weights):
        loss = model(**rows, num_items_in_batch=torch.tensor(31)).loss
        target = rows["labels"][:, 1:]
        total = (weights[:, 1:].double() * (target != -100)).sum()
        torch.testing.assert_close(loss, reference(stock, rows, weights) * total / 31, atol=1e-10, rtol=0)


LABELS = torch.tensor([[3, 4, 5, -100], [6, -100, 7, 8]])
GIVEN = torch.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (torch.tensor([4, 5, -100, -100, -100, 7, 8, -100]), [1, 2, 3, 0, 5, 6, 7, 0]),
        (torch.tensor([4, 5, -100, -100, 7, 8]), [1, 2, 3, 5, 6, 7]),
        (LABELS.reshape(-1), list(range(8))),
    ],
)
def test_alignment(target: Tensor, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert aligned_token_weight(GIVEN, LABELS, target, -100).tolist() == expected
    # as on an accelerator, where the host must not look
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert aligned_token_weight(GIVEN, LABELS, target, -100).tolist() == expected


def test_an_unknown_shift_is_an_error_or_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.tensor([9, 9, 9, 9, 9, 9, 9, 9])
    with pytest.raises(ConfigError, match="neither these labels nor these shifted"):
        aligned_token_weight(GIVEN, LABELS, other, -100)
    with pytest.raises(ConfigError, match="same shape"):
        aligned_token_weight(GIVEN[:1], LABELS, other, -100)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert aligned_token_weight(GIVEN, LABELS, other, -100).isnan().all()
    with pytest.raises(ConfigError, match="3 targets"):
        aligned_token_weight(GIVEN, LABELS, other[:3], -100)


def test_scope_label_smoothing_overrides_the_configuration() -> None:
    model, stock = twins()
    handle = patch_model(model, {"loss_strategy": "cce", "loss_label_smoothing": 0.5})
    with all_double():
        with handle.scope(label_smoothing=0.1):
            torch.testing.assert_close(
                model(**batch()).loss, reference(stock, batch(), label_smoothing=0.1), atol=1e-10, rtol=0
            )
            with handle.scope(loss_only=True):  # what is None stays as it was
                torch.testing.assert_close(
                    model(**batch()).loss, reference(stock, batch(), label_smoothing=0.1), atol=1e-10, rtol=0
                )
            with handle.scope(label_smoothing=0.0):
                torch.testing.assert_close(model(**batch()).loss, reference(stock, batch()), atol=1e-10, rtol=0)
        torch.testing.assert_close(
            model(**batch()).loss, reference(stock, batch(), label_smoothing=0.5), atol=1e-10, rtol=0
        )
    with pytest.raises(ConfigError, match="label_smoothing"), handle.scope(label_smoothing=1.5):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"label_smoothing": "0.1"}, "label_smoothing must be a number in .*, got '0.1'"),
        ({"token_weight": [[1.0]]}, "token_weight must be a tensor .* got list"),
        ({"loss_only": "no"}, "loss_only must be True, False or None, got 'no'"),
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any], message: str) -> None:
    handle = patch_model(make(), "chunked")
    with pytest.raises(ConfigError, match=message), handle.scope(**given):
        pass


@pytest.mark.parametrize("training", [True, False])
def test_token_weights_as_a_keyword_are_refused(training: bool) -> None:
    """The model's own forward takes any keyword and would pass over them."""
    model, stock = twins()
    rows = batch()
    patch_model(model, {"loss_strategy": "cce", "loss_token_weight_key": "w"})
    model.train(training)
    with pytest.raises(ConfigError, match=r"was called with w, which its forward does not know.*handle\.scope"):
        model(**rows, w=torch.ones(rows["labels"].shape))
    other = stock.train(training)(**rows).loss.double()
    torch.testing.assert_close(model(**rows, w=None).loss.double(), other, rtol=1e-5, atol=1e-5)


def test_loss_only() -> None:
    model, stock = twins()
    handle = patch_model(model, "cce")
    model.eval()
    with handle.scope(loss_only=True), torch.no_grad():
        output = model(**batch())
        assert output.logits is None
        torch.testing.assert_close(output.loss, stock(**batch()).loss.double(), atol=1e-6, rtol=0)
        assert torch.equal(model(batch()["input_ids"]).logits, stock(batch()["input_ids"]).logits)
    assert model(**batch()).logits is not None
    model.train()
    with handle.scope(loss_only=False):
        assert torch.equal(model(**batch()).logits, stock(**batch()).logits)
        assert torch.equal(model(**batch()).loss, stock(**batch()).loss)


def test_the_models_own_smoothing_and_weights_cannot_be_doubled() -> None:
    ours, _ = twin_toys(RECORDED["own arguments"])
    with patch_model(ours, {"loss_label_smoothing": 0.1}), pytest.raises(ConfigError, match=r"smooths by 0\.1"):
        ours(**inputs())
    with patch_model(ours, {"loss_class_weight": [1.0] * VOCAB}), pytest.raises(ConfigError, match="weight a class"):
        ours(**inputs())


@pytest.mark.parametrize(
    "extra", [{"loss_label_smoothing": 0.1}, {"loss_z_loss": 0.1}, {"loss_statistics": ["entropy"]}]
)
def test_what_cannot_be_added_is_refused(extra: dict[str, Any]) -> None:
    ours, _ = twin_toys(lambda m, z, y: F.cross_entropy(z.transpose(1, 2), y))
    with patch_model(ours, extra), pytest.raises(ConfigError, match=next(iter(extra))):
        ours(**inputs())
    ours, _ = twin_toys(lambda m, z, y: -z.log_softmax(-1)[:, 0].gather(1, y[:, 3:4]).mean())
    with patch_model(ours, extra), pytest.raises(ConfigError, match=next(iter(extra))):
        ours(**inputs())


def test_added_where_logits_are_real() -> None:
    ours, stock = twin_toys(mask_one_token)
    handle = patch_model(ours, {"loss_label_smoothing": 0.1, "loss_z_loss": 0.01, "loss_statistics": ["accuracy"]})
    loss = ours(**inputs())["loss"]
    logits = stock(**inputs())["logits"][:, :-1].reshape(-1, VOCAB)
    target = below(inputs()["labels"], 3, 9)[:, 1:].reshape(-1)
    valid = target != -100
    expected = F.cross_entropy(logits, target, label_smoothing=0.1) + 0.01 * logits[valid].logsumexp(1).square().mean()
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    read = handle.statistics.pop()
    assert read["accuracy"] == pytest.approx((logits.argmax(1) == target)[valid].double().mean().item())


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statistics_equal_those_of_logits(name: str, strategy: str) -> None:
    model, stock = twins(name)
    handle = patch_model(model, {"loss_strategy": strategy, "loss_statistics": ["accuracy", "entropy"]})
    hits, entropy, valid, total = 0.0, 0.0, 0, 0
    for seed in (0, 1):
        rows = batch(seed=seed, length=9 + seed)
        stock.eval()
        with torch.no_grad():
            logits = stock(input_ids=rows["input_ids"]).logits
        best = logits[:, :-1].argmax(-1)
        rows["labels"][0, 5:8] = best[0, 4:7]  # some right answers
        target = rows["labels"][:, 1:]
        keep = target != -100
        model(**rows).loss.backward()
        hits += (best == target)[keep].sum().item()
        p = logits[:, :-1].double().log_softmax(-1)
        entropy += -(p.exp() * p).sum(-1)[keep].sum().item()
        valid, total = valid + keep.sum().item(), total + rows["labels"].numel()
    read = handle.statistics.pop()
    assert read.keys() == {"valid_fraction", "accuracy", "entropy"}
    assert read["valid_fraction"] == pytest.approx(valid / total)
    assert read["accuracy"] == pytest.approx(hits / valid)
    assert read["accuracy"] > 0
    assert read["entropy"] == pytest.approx(entropy / valid, abs=1e-6)
    assert handle.statistics.pop() == {}


def test_statistics_have_only_what_was_asked_for() -> None:
    model = make()
    with patch_model(model, "cce") as handle:
        model(**batch())
        assert handle.statistics.pop().keys() == {"valid_fraction"}
    config = LossConfig("cce", {"filter": 0.001})
    with patch_model(model, config) as handle:
        model(**batch())
        assert handle.statistics.pop().keys() == {"valid_fraction", "dropped"}
    config = LossConfig("cce", loss_statistics=["dropped"])
    with patch_model(model, config) as handle:
        model(**batch())
        read = handle.statistics.pop()
        assert read.keys() == {"valid_fraction", "dropped"} and read["dropped"] == 0.0  # auto is exact on a CPU


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_labels_masked(strategy: str) -> None:
    model, stock = twins()
    patch_model(model, strategy)
    rows = batch()
    rows["labels"][:] = -100
    output, ours = step(model, rows)
    _, theirs = step(stock, rows)
    assert output.loss.isnan()
    assert ours.keys() == theirs.keys()
    assert all(not g.any() for g in ours.values())
    output, ours = step(model, rows | {"num_items_in_batch": torch.tensor(5)})
    assert output.loss == 0
    assert ours.keys() == theirs.keys()
    assert all(not g.any() for g in ours.values())


def test_one_token_has_nothing_to_predict() -> None:
    model, stock = twins()
    patch_model(model, "cce")
    rows = batch(length=1)
    rows["labels"] = rows["input_ids"].clone()
    assert stock(**rows).loss.isnan()
    output, ours = step(model, rows)
    assert output.loss.isnan()
    assert all(not g.any() for g in ours.values())


def test_listeners() -> None:
    model = make()
    handle = patch_model(model, "flce")
    told: list[str] = []
    handle.before_loss.append(lambda: told.append("before"))
    handle.after_loss_backward.append(lambda: told.append("after"))
    loss = model(**batch()).loss
    assert told == ["before"]
    model.model.embed_tokens.weight.register_hook(lambda grad: told.append("trunk"))
    loss.backward()
    assert told == ["before", "after", "trunk"]
    told.clear()
    with torch.no_grad():
        model(**batch())
    assert told == ["before", "after"]
    told.clear()
    model.model.requires_grad_(False)
    for _ in range(2):
        model(**batch()).loss.backward()
    assert told == ["before", "after"] * 2
    assert not model.lm_head.weight._backward_hooks


def test_an_exception_leaves_nothing_behind() -> None:
    model, stock = twins()
    handle = patch_model(model, "cce")
    mlp = model.model.layers[1].mlp
    hook = mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"), handle.scope(label_smoothing=0.3):
        model(**batch())
    hook.remove()
    hidden = torch.randn(2, model.config.hidden_size, dtype=torch.float64)
    assert isinstance(model.lm_head(hidden), Tensor)
    torch.testing.assert_close(model(**batch()).loss, stock(**batch()).loss.double(), atol=1e-6, rtol=0)


def test_threads_do_not_see_each_other() -> None:
    model, stock = twins()
    handle = patch_model(model, "cce")
    started, finish = threading.Event(), threading.Event()
    seen: dict[str, Any] = {}

    def wait(module: nn.Module, args: Any) -> None:
        if threading.current_thread().name == "training":
            started.set()
            assert finish.wait(20)

    model.model.layers[0].register_forward_pre_hook(wait)

    def train() -> None:
        with handle.scope(label_smoothing=0.3):
            seen["training"] = model(**batch())

    thread = threading.Thread(target=train, name="training")
    thread.start()
    assert started.wait(20)
    # in the middle of the other thread's forward
    without = model(batch()["input_ids"])
    plain = model(**batch())
    finish.set()
    thread.join()
    assert torch.equal(without.logits, stock(batch()["input_ids"]).logits)
    torch.testing.assert_close(plain.loss, stock(**batch()).loss.double(), atol=1e-6, rtol=0)
    with all_double():
        expected = reference(stock, batch(), label_smoothing=0.3)
    torch.testing.assert_close(seen["training"].loss, expected, atol=1e-6, rtol=0)
    assert seen["training"].logits is None


def test_a_replica_in_a_thread_has_the_scope() -> None:
    """As DataParallel runs it: a replica shares the handle, and its thread has no scope of its own."""
    model, stock = twins()
    handle = patch_model(model, "cce")
    model.eval()
    replica = model._replicate_for_data_parallel()
    for name, module in model.named_children():
        replica._modules[name] = module
    seen = []
    with handle.scope(loss_only=True):
        thread = threading.Thread(target=lambda: seen.append(replica(**batch())))
        thread.start()
        thread.join()
    assert seen[0].logits is None
    torch.testing.assert_close(seen[0].loss, stock.eval()(**batch()).loss.double(), atol=1e-6, rtol=0)


def test_a_forward_inside_a_forward() -> None:
    """A model that generates from itself while it trains: the inner call has no labels, and gets logits."""
    model, _ = twin_toys(RECORDED["plain"])

    class Nesting(Toy):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
            if labels is None:
                return super().forward(input_ids)
            logits = self.lm_head(self.embed(input_ids).tanh())
            with torch.no_grad():
                drawn = self(input_ids)["logits"]
            assert isinstance(drawn, Tensor)
            return {"loss": RECORDED["plain"](self, logits, labels) + drawn.mean(), "logits": logits}

    model.__class__ = Nesting
    expected = model(**inputs())["loss"]
    handle = patch_model(model, "cce")
    output = model(**inputs())
    torch.testing.assert_close(output["loss"], expected, atol=1e-10, rtol=0)
    assert output["logits"] is None
    assert (handle.counts.deferred, handle.counts.materialised) == (1, 0)


def test_a_causal_model_inside_another() -> None:
    """The outer model's loss takes the inner model's logits; with both patched the head belongs to whose labels are given."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = make()
            self.config = self.language_model.config

        def get_output_embeddings(self) -> nn.Module:
            return self.language_model.get_output_embeddings()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            inner = self.language_model(input_ids=input_ids)
            loss = RECORDED["plain"](None, inner.logits, labels)
            return {"loss": loss, "logits": inner.logits, "inner": inner}

    model = Outer().train()
    rows = batch()
    expected = model(rows["input_ids"], rows["labels"])["loss"]
    handles = [patch_model(model, "cce"), patch_model(model.language_model, "flce")]
    output = model(rows["input_ids"], rows["labels"])
    torch.testing.assert_close(output["loss"], expected, atol=1e-10, rtol=0)
    assert output["logits"] is None
    assert output["inner"].logits is None
    assert [h.counts.fused for h in handles] == [1, 0]
    assert model.language_model(**rows).logits is None
    assert [h.counts.fused for h in handles] == [1, 1]
    for handle in handles:
        handle.undo()
    assert type(model.language_model.lm_head) is nn.Linear


def test_shift_labels() -> None:
    model, stock = twins()
    handle = patch_model(model, "cce")
    rows = batch()
    shifted = F.pad(rows["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    expected = stock(**rows, shift_labels=shifted).loss
    torch.testing.assert_close(model(**rows, shift_labels=shifted).loss, expected.double(), atol=1e-6, rtol=0)
    assert handle.counts.fused == 1
    rows.pop("labels")
    ours, theirs = model(**rows, shift_labels=shifted), stock(**rows, shift_labels=shifted)
    assert theirs.loss is None
    assert ours.loss is None
    assert torch.equal(ours.logits, theirs.logits)
