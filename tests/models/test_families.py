"""A patched model is the stock one: loss and gradients with each strategy, outputs, generation, names and classes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, FAMILIES, VOCAB, assert_same_gradients, batch, make, step, twins
from torch.utils._python_dispatch import TorchDispatchMode

from loss_plugins import patch_model
from loss_plugins.models.conformance.double import all_double

STRATEGIES = ["naive", "chunked", "flce", "cce"]


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_equal_stock(name: str, items: int | None) -> None:
    model, stock = twins(name)
    inputs = batch(name)
    if items is not None:
        inputs["num_items_in_batch"] = torch.tensor(items)
    if name == "mixtral":
        inputs.pop("attention_mask")  # its router loss mixes float32 masks with float64
    with all_double():
        expected, expected_gradients = step(stock, inputs)
        for strategy in STRATEGIES:
            with patch_model(model, strategy) as handle:
                output, gradients = step(model, inputs)
                counts = handle.counts
                assert (counts.deferred, counts.fused, counts.materialised) == (1, 1, 0), handle.explain()
                assert output.logits is None
                torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
                assert_same_gradients(gradients, expected_gradients, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_without_help(name: str) -> None:
    model, stock = twins(name, dtype=torch.float32)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in batch(name).items()}
    expected, expected_gradients = step(stock, inputs)
    patch_model(model, "cce")
    output, gradients = step(model, inputs)
    assert output.loss.dtype == expected.loss.dtype
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients, expected_gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_labels_nothing_changes(name: str) -> None:
    model, stock = twins(name)
    inputs = batch(name)
    labels = inputs.pop("labels")
    if name in ("bart", "t5"):
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    with patch_model(model, "cce") as handle:
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
        assert handle.counts.deferred == 0
        model.eval(), stock.eval()
        inputs["labels"] = labels
        inputs.pop("decoder_input_ids", None)
        ours, theirs = model(**inputs), stock(**inputs)
        assert torch.equal(ours.logits, theirs.logits)
        assert torch.equal(ours.loss, theirs.loss)
        assert handle.counts.deferred == 0


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_is_identical_also_after_a_step(name: str, cache: bool) -> None:
    model, stock = twins(name)
    inputs = batch(name)
    patch_model(model, "cce")
    step(model, inputs)
    model.zero_grad()
    inputs.pop("labels")
    for m in (model, stock):
        m.config.output_router_logits = False  # transformers 5.6 cannot generate with them
    wanted = {"max_new_tokens": 4, "do_sample": False, "use_cache": cache, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(**inputs, **wanted), stock.eval().generate(**inputs, **wanted))


@pytest.mark.parametrize("name", FAMILIES)
def test_names_classes_and_signatures_stay(name: str) -> None:
    from transformers.utils.generic import find_labels

    model = make(name)
    head = model.get_output_embeddings()
    cls, head_cls = type(model), type(head)
    state = model.state_dict()
    parameters = {key: id(p) for key, p in model.named_parameters()}
    handle = patch_model(model, "cce")
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert {key: id(p) for key, p in model.named_parameters()} == parameters
    assert (type(model).__name__, type(model).__qualname__, type(model).__module__) == (
        cls.__name__, cls.__qualname__, cls.__module__,
    )  # fmt: skip
    assert isinstance(model, cls)
    assert inspect.signature(model.forward) == inspect.signature(cls.forward.__get__(model))
    assert inspect.signature(type(model).forward) == inspect.signature(cls.forward)
    assert find_labels(type(model)) == find_labels(cls)
    assert repr(model) == repr(make(name))
    handle.undo()
    assert type(model) is cls
    assert type(head) is head_cls
    assert not handle.active
    assert not any("loss_plugin" in key for module in model.modules() for key in module.__dict__)


@pytest.mark.parametrize("name", DECODERS)
def test_tuples_keep_their_places(name: str) -> None:
    model, stock = twins(name)
    patch_model(model, "flce")
    inputs = batch(name) | {"return_dict": False, "output_hidden_states": True, "use_cache": name != "mixtral"}
    ours, theirs = model(**inputs), stock(**inputs)
    assert len(ours) == len(theirs)
    place = next(i for i, v in enumerate(theirs) if isinstance(v, torch.Tensor) and v.shape[-1:] == (VOCAB,))
    assert ours[place] is None
    torch.testing.assert_close(ours[0], theirs[0].double(), atol=1e-6, rtol=0)
    for left, right in zip(ours[place + 1 :], theirs[place + 1 :], strict=True):
        assert type(left) is type(right)
        if isinstance(right, tuple):
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_other_outputs_are_intact() -> None:
    model, stock = twins("mixtral")
    patch_model(model, "cce")
    inputs = batch("mixtral") | {"output_hidden_states": True, "output_attentions": True}
    for m in (model, stock):
        m.set_attn_implementation("eager")
    ours, theirs = model(**inputs), stock(**inputs)
    assert list(ours) == list(theirs)
    assert ours["logits"] is None
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss, atol=0, rtol=0)
    for name in ("hidden_states", "attentions", "router_logits"):
        assert all(torch.equal(a, b) for a, b in zip(ours[name], theirs[name], strict=True))
    assert theirs.aux_loss > 0


def test_the_cap_matters_where_it_is_tested() -> None:
    stock = make("gemma2")
    logits = stock(**batch("gemma2")).logits
    assert logits.abs().max() > 0.9 * stock.config.final_logit_softcapping


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("keep", [5, "positions"])
def test_logits_to_keep(name: str, keep: int | str) -> None:
    model, stock = twins(name)
    patch_model(model, "cce")
    inputs = batch(name)
    inputs["logits_to_keep"] = torch.tensor([1, 2, 5, 7, 8]) if keep == "positions" else keep
    inputs["labels"] = inputs["labels"][:, -5:]
    with all_double():
        expected, expected_gradients = step(stock, inputs)
        output, gradients = step(model, inputs)
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert_same_gradients(gradients, expected_gradients, atol=1e-10)


@pytest.mark.parametrize("items", [16, 16.0, torch.tensor(16), torch.tensor([16]), torch.tensor([[16.0]])])
def test_every_form_of_num_items_in_batch(items: object) -> None:
    model, stock = twins(dtype=torch.float32)
    patch_model(model, "cce")
    ours, theirs = (m(**batch(), num_items_in_batch=items).loss for m in (model, stock))
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


class Widest(TorchDispatchMode):
    """The most rows of any tensor that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.shape[-1:] == (VOCAB,):
                self.rows = max(self.rows, value.numel() // VOCAB)
        return result


@pytest.mark.parametrize("strategy", ["chunked", "flce", "cce"])
@pytest.mark.parametrize("evaluation", [False, True])
def test_no_logits_are_made(strategy: str, evaluation: bool) -> None:
    model, rows = make("gemma2"), batch(rows=8, length=40)
    handle = patch_model(model, {"loss_strategy": strategy, "loss_options": {"workspace_mb": 0.02}})
    with Widest() as seen:
        if evaluation:
            with handle.scope(loss_only=True), torch.no_grad():
                model.eval()(**rows)
        else:
            model(**rows).loss.backward()
    assert seen.rows <= 64  # 0 where a kernel makes them, out of sight
    assert (seen.rows > 0) == (strategy == "chunked")
    handle.undo()
    with Widest() as seen:
        model(**rows)
    assert seen.rows == 8 * 40
