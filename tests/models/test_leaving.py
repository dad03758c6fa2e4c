"""Deferred logits that leave the forward: what trainers ask of them is what real logits answer."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from loss_plugins import LossConfig, patch_model
from loss_plugins.errors import ConfigError, UnsupportedError
from loss_plugins.models.leaving import LeavingLogits
from loss_plugins.strategies import STRATEGIES

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1, "head_dim": 16}


def make(kind: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(vocab_size=120, **SIZES, **HEADS))
    else:  # a softcap behind the head
        model = Gemma2ForCausalLM(Gemma2Config(vocab_size=120, final_logit_softcapping=3.0, **SIZES, **HEADS))
    return model.double().train()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 120, (4, 9))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def gathered(logits: Any, ids: Tensor) -> Tensor:
    """As LLaMA-Factory takes log-probabilities."""
    logits, labels = logits[:, :-1, :], ids[:, 1:]
    return torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("strategy", STRATEGIES.builtin())
def test_gathered_log_probs(kind: str, strategy: str, ids: Tensor) -> None:
    stock = make(kind)
    ours = copy.deepcopy(stock)
    weights = torch.rand(4, 8, dtype=torch.float64)
    expected = gathered(stock(input_ids=ids).logits, ids)
    (expected * weights).sum().backward()
    with patch_model(ours, strategy) as handle:
        with handle.scope(leaving=True):
            logits = ours(input_ids=ids).logits
        assert isinstance(logits, LeavingLogits)
        found = gathered(logits.to(torch.float64), ids)
        (found * weights).sum().backward()
        assert handle.counts.fused == 1
        assert handle.counts.materialised == 0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    theirs, mine = gradients(stock), gradients(ours)
    assert theirs.keys() == mine.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-10)


QUESTIONS: dict[str, Any] = {
    "mean": lambda z, ids: z.mean(),
    "a mean a row": lambda z, ids: z[:, :-1][ids[:, 1:] > 50].mean(-1),
    "sum": lambda z, ids: z[ids[:, 0] > 50].nansum(),
    "scaled": lambda z, ids: (z / 0.7)[:, :-1].sum(-1),
    "halves": lambda z, ids: z.chunk(2, dim=0)[1].mean() + z.split(2, dim=0)[0].mean(-1).sum(),
    "some rows": lambda z, ids: z.index_select(0, torch.tensor([2, 0])).mean(),
    "cross-entropy": lambda z, ids: F.cross_entropy(z[:2, :-1].flatten(0, 1), ids[:2, 1:].flatten()),
}


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_trainers_ask(kind: str, question: str, ids: Tensor) -> None:
    stock, ask = make(kind), QUESTIONS[question]
    ours = copy.deepcopy(stock)
    expected = ask(stock(input_ids=ids).logits, ids)
    expected.sum().backward()
    with patch_model(ours, "chunked") as handle, handle.scope(leaving=True):
        found = ask(ours(input_ids=ids).logits, ids)
        found.sum().backward()
        assert handle.counts.materialised == 0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    theirs, mine = gradients(stock), gradients(ours)
    assert theirs.keys() == mine.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_fields_and_largest(kind: str, ids: Tensor) -> None:
    model = make(kind).eval()
    counted = ids[:, 1:] > 40
    with torch.no_grad(), patch_model(model, "cce") as handle:
        real = model(input_ids=ids).logits[:, :-1]
        with handle.scope(leaving=True):
            logits = model(input_ids=ids).logits[:, :-1]
        found = logits.label_log_probs(ids[:, 1:], counted, ("entropy", "accuracy"))
        torch.testing.assert_close(logits.argmax(dim=-1), real.argmax(-1))
        assert handle.counts.materialised == 0
    log_probs = real.log_softmax(-1)
    expected = log_probs.gather(-1, ids[:, 1:, None])[..., 0] * counted
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.entropy, -(log_probs.exp() * log_probs).sum(-1) * counted, rtol=1e-9, atol=1e-10)
    assert torch.equal(found.is_top1, (real.argmax(-1) == ids[:, 1:]) & counted)


def test_anything_else_is_real_and_exact(ids: Tensor) -> None:
    model = make()
    with patch_model(model, "cce") as handle:
        expected = model(input_ids=ids).logits.softmax(-1)
        with handle.scope(leaving=True):
            logits = model(input_ids=ids).logits
            torch.testing.assert_close(logits.softmax(-1), expected, rtol=0, atol=0)
        assert handle.materialised_by == ["softmax"]
        torch.testing.assert_close(gathered(logits, ids), gathered(model(input_ids=ids).logits, ids))


def test_outside_the_scope_nothing_leaves(ids: Tensor) -> None:
    model = make()
    with patch_model(model, "cce") as handle:
        assert isinstance(model(input_ids=ids).logits, Tensor)
        assert model(input_ids=ids, labels=ids).logits is None
        with handle.scope(leaving=True):
            assert isinstance(model(input_ids=ids).logits, LeavingLogits)
        assert isinstance(model(input_ids=ids).logits, Tensor)


def test_a_model_that_adds_labels_has_both(ids: Tensor) -> None:
    model = make()
    expected = model(input_ids=ids, labels=ids)
    with patch_model(model, "cce") as handle, handle.scope(leaving=True):
        output = model(input_ids=ids, labels=ids)
        torch.testing.assert_close(output.loss.float(), expected.loss)
        torch.testing.assert_close(gathered(output.logits, ids), gathered(expected.logits, ids))


def test_writing_is_refused(ids: Tensor) -> None:
    model = make()
    with patch_model(model, "cce") as handle, handle.scope(leaving=True):
        logits = model(input_ids=ids).logits
    with pytest.raises(UnsupportedError, match="would write to logits that LlamaForCausalLM has returned"):
        logits[0] = 0.0


def test_nothing_can_be_added(ids: Tensor) -> None:
    model = make()
    with patch_model(model, LossConfig("cce", loss_label_smoothing=0.1)) as handle, handle.scope(leaving=True):
        logits = model(input_ids=ids).logits
        with pytest.raises(ConfigError, match="loss_label_smoothing was asked for, but this trainer computes"):
            gathered(logits, ids)
        with pytest.raises(ConfigError, match="Give one label a position"):
            logits.label_log_probs(ids[:, 1:])


def test_autocast_of_the_forward_stays_in_force(ids: Tensor) -> None:
    model = make().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = gathered(model(input_ids=ids).logits.float(), ids)
    with patch_model(model, "chunked") as handle, handle.scope(leaving=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids).logits
        seen: list[torch.dtype] = []
        handle.before_loss.append(lambda: seen.append(logits.dtype))
        found = gathered(logits.float(), ids)
        real = logits.softmax(-1)
    assert seen == [torch.bfloat16]
    assert real.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_hidden_states_are_freed(ids: Tensor) -> None:
    model = make()
    gc.disable()
    try:
        with patch_model(model, "cce") as handle, handle.scope(leaving=True):
            logits = model(input_ids=ids).logits
            part = logits[:, :-1]
            gone = weakref.ref(logits.hidden)
            gathered(logits, ids).sum().backward()
            del logits, part
            assert gone() is None
    finally:
        gc.enable()
