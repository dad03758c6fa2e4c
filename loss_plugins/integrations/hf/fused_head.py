"""TRL >= 1.15 puts a forward on the model that computes log-probabilities from the backbone and the head's weight. Here
the same question is answered by the model's own forward, with what it does to its logits, and a loss strategy."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models.forwarding import run_around
from ...models.patch import PatchHandle

THEIRS = "_loss_plugin_fused_forward"
"""On our forward: the one that it has taken the place of."""


def fused_forward(model: torch.nn.Module) -> Any:
    """TRL's forward on this model, itself and not what others have wrapped around it; None if there is none."""
    function = getattr(model.__dict__.get("forward"), "__func__", model.__dict__.get("forward"))
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames:
            return function
        # accelerate keeps what it wraps in objects of its own
        function = getattr(function, "__wrapped__", None) or getattr(function, "model_forward", None)
        function = getattr(function, "__func__", function)
    return None


def refuse_fused_extras(trainer: Any) -> None:
    """Raises:
    UnsupportedError: TRL's head is asked for what a loss strategy does not compute.
    """
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        theirs = None if model is None else fused_forward(_inner(model))
        if theirs is None:
            continue
        asked = inspect.getclosurevars(theirs).nonlocals
        name = type(trainer).__name__
        if "log_sum_sq_probs" in asked["outputs"]:
            raise UnsupportedError(
                f"use_weighting is on, for which {name} needs the sum of squared probabilities, which no loss strategy "
                "computes. Leave use_weighting out, or loss_plugins."
            )
        if asked["cast_lm_head_to_fp32"]:
            raise UnsupportedError(
                f"cast_lm_head_to_fp32 is on in {name}, and loss strategies multiply in the model's own type, with "
                "sums in float32. Leave cast_lm_head_to_fp32 out, or loss_plugins."
            )
    if getattr(trainer, "_entropy_bonus_enabled", False):
        raise UnsupportedError(
            f"{type(trainer).__name__} was given an entropy bonus, whose gradient no loss strategy computes. Leave the "
            "bonus out, or loss_plugins."
        )


def put_on(model: torch.nn.Module, handle: PatchHandle) -> None:
    """Put our forward in the place of TRL's."""
    outer: Any = model.__dict__["forward"]
    theirs = fused_forward(model)
    asked = inspect.getclosurevars(theirs).nonlocals
    make_output = theirs.__globals__["FusedCausalLMOutput"]

    @functools.wraps(theirs)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.pop("fused_lm_head", False):
            return outer(*args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        items = kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        with handle.scope(leaving=True):
            output = run_around(self, lambda _, *a, **k: outer(*a, **k), args, kwargs)
        logits: Any = output.logits
        if shifted is None:
            logits, labels = logits[:, :-1], labels[:, 1:]
        else:
            labels = shifted
        found = _answer(logits, labels.to(logits.device), asked["temperature"], asked["outputs"])
        mask = labels != -100
        count = mask.sum().clamp(min=1) if items is None else items
        loss, aux_loss = -found["log_probs"].sum() / count, getattr(output, "aux_loss", None)
        if aux_loss is not None:
            config: Any = self.config
            loss = loss + getattr(config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
        return make_output(loss=loss, label_mask=mask, aux_loss=aux_loss, **found)

    del forward.__wrapped__  # it is not called any more, and would be taken for what computes the loss
    forward.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
    setattr(forward, THEIRS, outer)
    model.__dict__["forward"] = types.MethodType(forward, model)


def take_off(handle: PatchHandle) -> None:
    """Give the model TRL's forward back, where ours is still in its place."""
    forward: Callable[..., Any] | None = handle.model.__dict__.get("forward")
    theirs = getattr(forward, THEIRS, None)
    if theirs is not None:
        handle.model.__dict__["forward"] = theirs


def _answer(logits: Any, labels: Tensor, temperature: float, outputs: tuple[str, ...]) -> dict[str, Any]:
    mask = labels != -100
    if temperature != 1.0:
        logits = logits / temperature
    fields = tuple(ours for theirs, ours in (("entropy", "entropy"), ("is_top1", "accuracy")) if theirs in outputs)
    found = logits.label_log_probs(labels, mask, fields)
    mean = logits.detach().mean(-1).masked_fill(~mask, 0) if "mean_logits" in outputs else None
    return {"log_probs": found.log_probs, "entropy": found.entropy, "is_top1": found.is_top1, "mean_logits": mean}


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
