"""Models whose head is no plain linear layer, and their comparison with an unpatched twin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from test_deferred import gradients
from tiny_models import assert_same_gradients, batch, make
from torch import Tensor, nn

from loss_plugins import patch_model
from loss_plugins.models.conformance.double import all_double
from loss_plugins.models.statistics import Counts

STRATEGIES = ["naive", "chunked", "flce", "cce"]


def adapted(*, family: str = "llama", tied: bool = False, **kwargs: Any) -> Any:
    """A model of that family with LoRA, on ``lm_head`` unless ``target_modules`` says otherwise."""
    import peft

    model = make(family)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    torch.manual_seed(1)
    given = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    config = peft.LoraConfig(**given | {"target_modules": ["lm_head"]} | kwargs)
    return peft.get_peft_model(model, config).double().train()


def with_head(change: Callable[[nn.Module], Any]) -> Any:
    """A tiny llama whose head ``change`` has worked on."""
    model = make()
    torch.manual_seed(1)
    change(model.lm_head)
    return model.double()


class Seen(NamedTuple):
    """What a patched model says after its step."""

    counts: Counts
    explained: str


def compare(
    build: Callable[[], Any],
    strategy: str,
    *,
    atol: float = 1e-10,
    around: Callable[[Any], AbstractContextManager[Any]] = lambda model: nullcontext(),
    options: dict[str, Any] | None = None,
    double: bool = True,
    inputs: dict[str, Tensor] | None = None,
) -> Seen:
    """Loss and every gradient of a patched model and its unpatched twin, random numbers included."""
    stock, model = build(), build()
    handle = patch_model(model, {"loss_strategy": strategy, "loss_options": options})
    rows = batch() if inputs is None else inputs
    losses = []
    with all_double() if double else nullcontext():
        for each in (stock, model):
            torch.manual_seed(7)
            with around(each):
                losses.append(each(**rows).loss)
                losses[-1].backward()
    torch.testing.assert_close(losses[1].double(), losses[0].double(), atol=atol, rtol=0)
    expected = gradients(stock)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    assert_same_gradients(gradients(model), expected, atol=atol)
    return Seen(handle.counts, handle.explain())
