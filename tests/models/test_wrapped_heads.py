"""Heads that accelerate moves, whose weight is made from other parameters, and that somebody listens to."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as pruning
from odd_heads import STRATEGIES, adapted, compare, with_head
from tiny_models import VOCAB, WIDTH, batch, make
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from loss_plugins import patch_model
from loss_plugins.errors import UnsupportedError

accelerate = pytest.importorskip("accelerate", reason="these tests move heads with accelerate")

TO_META = pytest.mark.filterwarnings("ignore:for .*lm_head.* copying from a non-meta parameter:UserWarning")


def dispatched(model: Any) -> Any:
    """Hooks on every part, as ``device_map`` leaves them over several devices."""
    parts = {f"model.{name}": "cpu" for name, _ in model.model.named_children()} | {"lm_head": "cpu"}
    return accelerate.dispatch_model(model, parts, main_device="cpu", force_hooks=True)


def offloaded(model: Any) -> Any:
    """Weights on the meta device except while their module is called; one layer stays, to be trained."""
    model.requires_grad_(False)
    layer = model.model.layers[0]
    accelerate.cpu_offload(model.lm_head, execution_device="cpu")
    assert model.lm_head.weight.is_meta
    layer.requires_grad_(True)
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("place", [dispatched, offloaded])
def test_a_head_that_accelerate_moves(place: Any, strategy: str) -> None:
    seen = compare(lambda: place(make()), strategy)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained
    model = place(make())
    with patch_model(model, strategy):
        model(**batch()).loss.backward()
    assert model.lm_head.weight.is_meta == (place is offloaded)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lora_on_a_head_that_accelerate_moves(strategy: str) -> None:
    peft = pytest.importorskip("peft", reason="this test adapts heads with PEFT")

    def build() -> Any:
        model = dispatched(make())
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config).double().train()

    seen = compare(build, strategy)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained


def test_lora_on_a_head_that_accelerate_offloads() -> None:
    pytest.importorskip("peft", reason="this test adapts heads with PEFT")

    def build() -> Any:
        model = adapted()
        head = model.base_model.model.lm_head
        accelerate.cpu_offload(head.base_layer, execution_device="cpu")
        return model

    seen = compare(build, "chunked")
    assert seen.counts.fused == 1
    assert "accelerate loads" in seen.explained
    with pytest.raises(UnsupportedError, match="accelerate loads"):
        patch_model(build(), "flce")


def pruned(head: Any) -> None:
    pruning.random_unstructured(head, "weight", 0.3)


MADE = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm of old": torch.nn.utils.weight_norm,
    # changes at each call, so a head called on chunks would be another for each
    "spectral_norm of old": torch.nn.utils.spectral_norm,
    "pruned": pruned,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", MADE)
def test_a_weight_made_from_other_parameters(what: str, strategy: str) -> None:
    seen = compare(lambda: with_head(MADE[what]), strategy)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained
    assert "handed to the strategy" in seen.explained


def test_a_weight_that_is_parametrized_after_patching() -> None:
    model = make()
    handle = patch_model(model, "cce")
    parametrizations.weight_norm(model.lm_head)
    model.double()
    expected = model.eval()(**batch()).loss.double()
    model.train()
    torch.testing.assert_close(model(**batch()).loss, expected, atol=1e-6, rtol=0)
    assert handle.counts.fused == 1
    parametrize.remove_parametrizations(model.lm_head, "weight")
    torch.testing.assert_close(model(**batch()).loss, expected, atol=1e-6, rtol=0)
    handle.undo()
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["phi", "gpt2"])
def test_a_resized_and_padded_vocabulary(family: str, strategy: str) -> None:
    """With a bias, and tied; a label lies among the new rows, and the padding counts in every softmax."""

    def build() -> Any:
        model = make(family)
        torch.manual_seed(2)
        model.resize_token_embeddings(VOCAB + 3, pad_to_multiple_of=64, mean_resizing=False)
        return model.double()

    rows = batch()
    rows["labels"][0, -1] = VOCAB + 2
    seen = compare(build, strategy, inputs=rows)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained
    assert "(128 x 32" in seen.explained


HOOKS = {
    "forward": lambda head, calls: head.register_forward_hook(
        lambda module, args, output: calls.append(output.shape[-1]) or output * 1.5
    ),
    "before": lambda head, calls: head.register_forward_pre_hook(
        lambda module, args: calls.append(args[0].shape[-1]) or (args[0] * 1.5,)
    ),
    "backward": lambda head, calls: head.register_full_backward_hook(
        lambda module, inputs, outputs: calls.append(outputs[0].shape[-1]) or (inputs[0].clamp(-1e-3, 1e-3),)
    ),
    "before the backward": lambda head, calls: head.register_full_backward_pre_hook(
        lambda module, outputs: calls.append(outputs[0].shape[-1]) or (outputs[0].clamp(-1e-2, 1e-2),)
    ),
}


@pytest.mark.parametrize("what", HOOKS)
def test_a_hook_sees_logits_or_their_gradient(what: str) -> None:
    """What it does to them counts, and where it could not be called it is an error."""
    calls: list[int] = []
    build = functools.partial(with_head, lambda head: HOOKS[what](head, calls))
    for strategy in ("naive", "chunked", "auto"):
        calls.clear()
        seen = compare(build, strategy)
        assert seen.counts.fused == 1
        assert set(calls) == {WIDTH if what == "before" else VOCAB}
        assert len(calls) >= 2
    with pytest.raises(UnsupportedError, match="hook"):
        patch_model(build(), "cce")


@pytest.mark.parametrize("strategy", ["naive", "chunked"])
def test_a_called_head_that_is_written_before_its_backward_is_an_error(strategy: str) -> None:
    """As it is in stock, where autograd has saved the weight: chunks are computed again, with another one."""
    for patched in (False, True):
        model = with_head(lambda head: HOOKS["forward"](head, []))
        if patched:
            patch_model(model, strategy)
        loss = model(**batch()).loss
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            loss.backward()


def test_undoing_leaves_nothing_on_a_head_that_was_called() -> None:
    model = with_head(lambda head: HOOKS["forward"](head, []))
    before = set(vars(model.lm_head))
    with patch_model(model, "chunked"):
        model(**batch()).loss.backward()
    assert set(vars(model.lm_head)) == before
    assert type(model.lm_head) is nn.Linear


class Quantised(Tensor):
    """A weight of another class, whose stored numbers are not what it stands for."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            return function(args[0], args[1].as_subclass(Tensor) * 0.25, *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


def quantised(head: Any) -> None:
    head.weight = nn.Parameter((head.weight.detach() * 4).as_subclass(Quantised), requires_grad=False)


def test_a_weight_of_another_class_is_not_read() -> None:
    for strategy in ("naive", "chunked", "auto"):
        seen = compare(lambda: with_head(quantised), strategy)
        assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained
        assert "Quantised, no plain tensor" in seen.explained
    with pytest.raises(UnsupportedError, match="Quantised"):
        patch_model(with_head(quantised), "cce")


def test_a_weight_in_float8_without_its_scale_is_not_read() -> None:
    model = make()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    patch_model(model, "cce")
    with pytest.raises(UnsupportedError, match="float8"):
        model(**batch())
