"""What is computed from log-probabilities in place of cross-entropy, inside the model's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from loss_plugins import LossConfig, patch_model
from loss_plugins.errors import ConfigError
from loss_plugins.objectives import OBJECTIVES
from loss_plugins.strategies import STRATEGIES

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.randint(0, 100, (3, 9), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(IDS < 20, -100)


def make() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, **SIZES)).double().train()


def dft(model: Any, weight: Tensor | None = None) -> Tensor:
    """By hand, of real logits."""
    logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    target = LABELS[:, 1:].flatten()
    log_probs = -F.cross_entropy(logits, target, reduction="none")
    counted = (target != -100).double() * (1.0 if weight is None else weight[:, 1:].flatten())
    return (-log_probs.detach().exp() * log_probs * counted).sum() / counted.sum()


@pytest.mark.parametrize("strategy", STRATEGIES.builtin())
def test_dft(strategy: str) -> None:
    stock = make()
    ours = copy.deepcopy(stock)
    expected = dft(stock)
    expected.backward()
    with patch_model(ours, LossConfig(strategy, loss_objective="dft")) as handle:
        loss = ours(input_ids=IDS, labels=LABELS).loss
        loss.backward()
        assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
        halved = ours(input_ids=IDS, labels=LABELS, num_items_in_batch=2 * int((LABELS[:, 1:] != -100).sum())).loss
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(halved, loss / 2, rtol=1e-10, atol=1e-10)
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-10)


def test_token_weights_multiply_it() -> None:
    model, weight = make(), torch.rand(3, 9, dtype=torch.float64)
    expected = dft(model, weight)
    with patch_model(model, LossConfig("cce", loss_objective="dft")) as handle, handle.scope(token_weight=weight):
        loss = model(input_ids=IDS, labels=LABELS).loss
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)


class Made:
    """An objective of another package."""

    name = summary = "made"

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        self.compute = compute

    def __call__(self, log_probs: Tensor) -> Any:
        return self.compute(log_probs)


SUM, NOTHING, WHOLE = Made(Tensor.sum), Made(lambda log_probs: None), Made(lambda log_probs: log_probs < -1)
DETACHED, HALF = Made(lambda log_probs: -log_probs.detach()), Made(lambda log_probs: -log_probs.half())
PATH = f"{__name__}:"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SUM", r"a tensor of shape \(\) and torch.float64 .* must return one loss a label"),
        ("NOTHING", "returned NoneType .* must return one loss a label"),
        ("WHOLE", r"shape \(27,\) and torch.bool .* must return one loss a label"),
        ("DETACHED", "losses without a gradient .* nothing would be trained"),
    ],
)
def test_what_is_no_loss_a_label_is_said(name: str, words: str) -> None:
    model = make()
    patch_model(model, {"loss_strategy": "cce", "loss_objective": PATH + name})
    with pytest.raises(ConfigError, match=words):
        model(input_ids=IDS, labels=LABELS)


def test_without_gradients_none_is_asked_of_it() -> None:
    model = make()
    with patch_model(model, {"loss_strategy": "cce", "loss_objective": PATH + "DETACHED"}), torch.no_grad():
        detached = model(input_ids=IDS, labels=LABELS).loss
    with patch_model(model, "cce"), torch.no_grad():
        torch.testing.assert_close(detached, model(input_ids=IDS, labels=LABELS).loss, rtol=1e-10, atol=1e-10)


def test_sums_of_a_half_type_do_not_overflow() -> None:
    """As many tokens as float16 cannot count."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **{**SIZES, "hidden_size": 8, "intermediate_size": 8})).train()
    ids = torch.randint(0, 8, (700, 101))
    with patch_model(model, {"loss_strategy": "flce", "loss_objective": PATH + "HALF"}), torch.no_grad():
        half = model(input_ids=ids, labels=ids).loss
    with patch_model(model, "flce"), torch.no_grad():
        whole = model(input_ids=ids, labels=ids).loss
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, whole, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_objective": "dtf"}, "Did you mean 'dft'"),
        ({"loss_objective": "dft", "loss_z_loss": 0.1}, "loss_objective 'dft' and loss_z_loss=0.1"),
        ({"loss_objective": ""}, "must be a name such as 'dft'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        patch_model(make(), settings)


def test_smoothing_given_to_a_forward_is_refused() -> None:
    model = make()
    handle = patch_model(model, LossConfig("cce", loss_objective="dft"))
    with handle.scope(label_smoothing=0.1), pytest.raises(ConfigError, match="the loss is smoothed"):
        model(input_ids=IDS, labels=LABELS)


def test_all_have_what_is_needed() -> None:
    assert OBJECTIVES.names() == ["dft"]
    assert all(OBJECTIVES.get(name).name == name and OBJECTIVES.get(name).summary for name in OBJECTIVES.names())
