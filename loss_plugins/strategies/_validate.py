"""What the public functions refuse, each with a sentence that says what was given, why not, and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import WITHOUT_FLOAT64
from ..errors import ConfigError, unknown_name
from ._base import FIELDS

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Checked:
    """Arguments after the checks: shifted, of one meaning each."""

    hidden: Tensor  # (..., H)
    weight: Tensor | None
    labels: Tensor  # (...) int64
    vocab: int
    dtype: torch.dtype
    bias: Tensor | None
    ignore_index: int
    reduction: str
    num_items_in_batch: Tensor | None
    scale: float
    softcap: float
    label_smoothing: float
    z_loss: float
    class_weight: Tensor | None
    token_weight: Tensor | None


def check_fields(fields: Sequence[str]) -> frozenset[str]:
    """The names of per-token fields.

    Raises:
        ConfigError: a name that is no field.
    """
    if isinstance(fields, str):
        fields = (fields,)
    if not isinstance(fields, Sequence | Set):
        raise ConfigError(f"fields must be names such as ('nll', 'entropy'), got {fields!r}. Use () for the loss only.")
    for name in fields:
        if name not in FIELDS:
            raise ConfigError(unknown_name("field", str(name), FIELDS))
    return frozenset(fields)


def check_arguments(
    hidden: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    *,
    vocab: int | None,
    bias: Tensor | None,
    shift: int,
    ignore_index: int,
    reduction: str,
    num_items_in_batch: int | float | Tensor | None,
    logit_scale: float | None,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    subject: str = "hidden",
) -> Checked:
    """All checks that need no strategy. ``subject`` is what users call ``hidden``: of ``logits`` none are left out by a
    shift, since their gradient would be copied to a larger one; the labels of the last ones are ignored instead.

    Raises:
        ConfigError: see the sentence.
    """
    if subject == "logits":
        _check_logits(hidden)
        vocab = hidden.shape[-1]
    _check_head(hidden, weight)
    if vocab is None:
        assert weight is not None
        vocab = weight.shape[0]
    _check_labels(hidden, labels, token_weight, subject)
    # a part of a head has a part of its bias
    for name, tensor, classes in (("bias", bias, weight), ("class_weight", class_weight, None)):
        if tensor is not None:
            _check_per_class(name, tensor, vocab if classes is None else classes.shape[0], hidden.device, subject)
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "class_weight requires a gradient, and the loss has none for it, as torch's F.cross_entropy has none. Pass "
            "class_weight.detach(), or multiply per-token losses (reduction='none') by weights that are trained."
        )
    if reduction not in REDUCTIONS:
        raise ConfigError(unknown_name("reduction", str(reduction), REDUCTIONS))
    shift = _check_shift(shift, labels)
    # before any comparison: a narrow type would turn ignore_index into one of its own values
    labels = labels.to(torch.int64)
    number("label_smoothing", label_smoothing, 0.0, 1.0)
    number("z_loss", z_loss, 0.0, math.inf)
    number("logit_scale", 1.0 if logit_scale is None else logit_scale, -math.inf, math.inf)
    if logit_scale == 0:
        raise ConfigError(
            f"logit_scale must not be {logit_scale!r}: all logits would be 0, the loss the same for any labels, and "
            "every gradient 0. Leave it out for 1."
        )
    if softcap is not None:
        number("softcap", softcap, 0.0, math.inf)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise ConfigError(f"ignore_index must be an integer, got {ignore_index!r}. Use -100 or your padding id.")
    if shift:
        labels = labels[..., shift:]
        token_weight = None if token_weight is None else token_weight[..., shift:]
        if subject == "logits":
            labels = F.pad(labels, (0, shift), value=ignore_index)
            token_weight = None if token_weight is None else F.pad(token_weight, (0, shift))
        else:
            hidden = hidden[..., :-shift, :]
    if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_range(labels, vocab, ignore_index)
    return Checked(
        hidden=hidden,
        weight=weight,
        labels=labels,
        vocab=vocab,
        dtype=_compute_dtype(hidden, weight),
        # kernels read both by column
        bias=None if bias is None else bias.contiguous(),
        ignore_index=ignore_index,
        reduction=reduction,
        num_items_in_batch=_check_items(num_items_in_batch, reduction, hidden.device),
        scale=1.0 if logit_scale is None else float(logit_scale),
        softcap=0.0 if softcap is None else float(softcap),
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        class_weight=None if class_weight is None else class_weight.contiguous(),
        token_weight=token_weight,
    )


def number(name: str, value: float, low: float, high: float) -> None:
    """Refuse what is no finite number in [low, high]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or abs(value) == math.inf:
        bounds = "a finite number" + (f" in [{low:g}, {high:g}]" if low > -math.inf else "")
        raise ConfigError(f"{name} must be {bounds}, got {value!r}. Leave it out to switch it off.")


def _check_logits(logits: Tensor) -> None:
    if not _is_plain_float(logits) or logits.dim() < 1 or logits.shape[-1] == 0:
        raise ConfigError(
            f"logits must be a floating tensor of shape [..., V], got {_what(logits)}. Pass the head's output."
        )
    if type(logits).__name__ == "DTensor":
        raise ConfigError(
            "logits are a DTensor, and this function works on whole local tensors. Pass logits.full_tensor(), or "
            "logits.to_local() where each process has rows of its own."
        )


def _check_head(hidden: Tensor, weight: Tensor | None) -> None:
    if not _is_plain_float(hidden) or hidden.dim() < 1 or hidden.shape[-1] == 0:
        raise ConfigError(
            f"hidden must be a floating tensor of shape [..., H], got {_what(hidden)}. Pass the last hidden states."
        )
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise ConfigError(f"weight must be a tensor of shape [V, H], got {_what(weight)}. Pass lm_head.weight.")
    if type(weight).__name__ == "DTensor" or type(hidden).__name__ == "DTensor":
        raise ConfigError(
            "hidden or weight is a DTensor, and this function works on whole local tensors. "
            "Patch the model instead (patch_model), or pass weight.full_tensor()."
        )
    if weight.numel() == 0 and hasattr(weight, "ds_shape"):
        raise ConfigError(
            f"weight is partitioned by DeepSpeed ZeRO-3 (its full shape is {tuple(weight.ds_shape)}, nothing of it is "
            "here). Patch the model instead (patch_model), or call inside deepspeed.zero.GatheredParameters."
        )
    if not _is_plain_float(weight) or weight.dim() != 2:
        raise ConfigError(
            f"weight must be a floating tensor of shape [V, H], got {_what(weight)}. "
            "A quantised head must be called as a module: patch the model instead (patch_model)."
        )
    if weight.shape[1] != hidden.shape[-1]:
        turned = weight.shape[0] == hidden.shape[-1]
        advice = "It looks transposed: pass weight.T." if turned else "Check that both belong to the same model."
        raise ConfigError(
            f"weight must have shape [V, H] with H = {hidden.shape[-1]}, the last axis of hidden, got "
            f"{tuple(weight.shape)}. {advice}"
        )
    if weight.shape[0] == 0:
        raise ConfigError(
            f"weight has no rows (shape {tuple(weight.shape)}), so there is no vocabulary. Pass lm_head.weight."
        )
    if weight.device != hidden.device:
        raise ConfigError(
            f"weight is on {weight.device} and hidden on {hidden.device}. "
            f"Move one of them: weight.to({str(hidden.device)!r})."
        )


def _check_labels(hidden: Tensor, labels: Tensor, token_weight: Tensor | None, subject: str) -> None:
    integral = isinstance(labels, Tensor) and not (
        labels.is_floating_point() or labels.is_complex() or labels.is_nested
    )
    if not integral or labels.dtype == torch.bool:
        raise ConfigError(
            f"labels must be an integer tensor, got {_what(labels)}. Class probabilities are not supported; "
            "pass indices (labels.long())."
        )
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"labels must have the shape of {subject} without its last axis, {tuple(hidden.shape[:-1])}, got "
            f"{tuple(labels.shape)}. With unshifted labels pass both at full length and shift=1."
        )
    if labels.device != hidden.device:
        raise ConfigError(
            f"labels are on {labels.device} and {subject} on {hidden.device}. "
            f"Move them: labels.to({str(hidden.device)!r})."
        )
    if token_weight is not None and (
        not isinstance(token_weight, Tensor)
        or token_weight.is_complex()
        or token_weight.shape != labels.shape
        or token_weight.device != labels.device
    ):
        raise ConfigError(
            f"token_weight must be a tensor of the labels' shape {tuple(labels.shape)} on {labels.device}, got "
            f"{_what(token_weight)}."
        )


def _check_per_class(name: str, tensor: Tensor, vocab: int, device: torch.device, subject: str) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.shape != (vocab,):
        raise ConfigError(
            f"{name} must be a floating tensor of shape [{vocab}], one entry a class, got {_what(tensor)}."
        )
    if tensor.device != device:
        raise ConfigError(
            f"{name} is on {tensor.device} and {subject} on {device}. Move it: {name}.to({str(device)!r})."
        )


def _check_shift(shift: int, labels: Tensor) -> int:
    if not isinstance(shift, int) or shift < 0:
        raise ConfigError(f"shift must be 0 or a positive integer, got {shift!r}. Use 1 for unshifted causal labels.")
    shift = int(shift)
    if shift and (labels.dim() == 0 or shift > labels.shape[-1]):
        length = "no axis" if labels.dim() == 0 else f"a last axis of {labels.shape[-1]}"
        raise ConfigError(
            f"shift={shift} was asked for, but labels have {length}, so no token would have a target. "
            "Use a smaller shift, or 0 for labels that are aligned already."
        )
    return shift


def _check_range(labels: Tensor, vocab: int, ignore_index: int) -> None:
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= vocab))
    if bool(bad.any()):
        value = int(labels[bad].flatten()[0])
        raise ConfigError(
            f"labels hold {value}, which is neither in [0, {vocab}) nor ignore_index={ignore_index} "
            f"({int(bad.sum())} such). Check that tokenizer and head have the same vocabulary, or pass ignore_index."
        )


def _check_items(value: int | float | Tensor | None, reduction: str, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    if reduction != "mean":
        raise ConfigError(
            f"num_items_in_batch was given with reduction={reduction!r}, but it replaces the denominator of 'mean'. "
            "Leave one of them out."
        )
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(
                f"num_items_in_batch must be a number or a tensor of one element, got shape {tuple(value.shape)}."
            )
        if value.dtype == torch.bool or value.is_complex():
            raise ConfigError(f"num_items_in_batch must hold a number of tokens, got {_what(value)}. Pass their sum.")
        value = value.detach()
        # 0 is what a batch without any label counts; on an accelerator the host must not look
        if value.device.type == "cpu" and not torch.compiler.is_compiling() and not 0 <= float(value) < math.inf:
            raise ConfigError(
                f"num_items_in_batch must be a finite number of 0 or more, got a tensor that holds {float(value):g}. "
                "Leave it out for the mean over tokens."
            )
        return value.to(device, non_blocking=True)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"num_items_in_batch must be an int, a float or a tensor of one element, got {value!r}. Convert it, or "
            "leave it out for the mean over tokens."
        )
    if not 0 < value < math.inf:
        raise ConfigError(
            f"num_items_in_batch must be above 0 and finite, got {value!r}. Leave it out for the mean over tokens."
        )
    # full, not tensor: a fill is launched, a copy from the host would be waited for
    dtype = torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64
    return torch.full((), float(value), device=device, dtype=dtype)


def _compute_dtype(hidden: Tensor, weight: Tensor | None) -> torch.dtype:
    device = hidden.device.type
    wide = hidden.dtype if weight is None else torch.promote_types(hidden.dtype, weight.dtype)
    if device != "meta" and torch.is_autocast_enabled(device) and wide != torch.float64:
        return torch.get_autocast_dtype(device)
    return wide


def _is_plain_float(value: object) -> bool:
    """Whether ``value`` is a tensor that can be multiplied as it is; 8-bit floats mean nothing without their scales."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype.itemsize < 2:
        return False
    return value.layout == torch.strided and not value.is_nested


def _what(value: object) -> str:
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor, which has no single shape: pad it, or pass its rows one after another (values())"
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return f"one whose layout is {value.layout}: pass to_dense()"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} on {value.device}"
    return type(value).__name__
