"""The loss of logits that exist already: one kernel, which reads them once forward and once backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedError
from ..kernels import ops
from ._api import Reduction, compute, no_rows
from ._base import LossOutput, Problem, RowLoss, Rows
from ._options import backend_for, cannot_run, check_kernels
from ._select import profile_of
from ._validate import check_arguments, check_fields


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    inplace: bool = False,
    kernels: str = "auto",
    shift: int = 0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of logits, with nothing of their size in memory but their gradient. Equal to::

        logits = logits.float() * logit_scale
        logits = softcap * torch.tanh(logits / softcap)
        F.cross_entropy(logits[..., :-shift, :].flatten(0, -2), labels[..., shift:].flatten(), ...)

    in value, gradients, edge cases and shape. Where the logits come from a linear head, `linear_cross_entropy` needs
    less memory.

    Args:
        logits: Shape ``[..., V]``, floating, of any strides. Leave the last positions in and use ``shift``: cutting
            them off makes torch copy the gradient.
        labels: Shape ``[...]``, any integer type, in ``[0, V)`` or ``ignore_index``.
        inplace: Let the backward write the gradient over the logits, which nobody may read after it. Allowed where they
            are another operation's result. Autograd raises where that operation, or another loss, still needs them, and
            so does a second backward. Under ``torch.compile``, which plans memory itself, it changes nothing.
        kernels: ``auto`` (Triton or triton-ascend wherever one can launch), ``torch``, ``triton`` or ``ascend``.

    The other arguments, and what is returned, are `linear_cross_entropy`'s.

    Raises:
        ConfigError: an argument's name, type, shape or range is wrong, or the logits must not be written over. A label
            out of range raises on a CPU; elsewhere the loss becomes NaN.
        UnsupportedError: the kernels asked for cannot run here.
    """
    return cross_entropy_stats(
        logits, labels, fields=(), inplace=inplace, kernels=kernels, shift=shift, ignore_index=ignore_index,
        reduction=reduction, num_items_in_batch=num_items_in_batch, logit_scale=logit_scale, softcap=softcap,
        label_smoothing=label_smoothing, z_loss=z_loss, class_weight=class_weight, token_weight=token_weight,
    ).loss  # fmt: skip


def cross_entropy_stats(
    logits: Tensor,
    labels: Tensor,
    *,
    fields: Sequence[str] = ("nll", "lse", "accuracy"),
    inplace: bool = False,
    kernels: str = "auto",
    shift: int = 0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
) -> LossOutput:
    """`cross_entropy` with per-token statistics from the same pass.

    Args:
        fields: Any of ``nll``, ``lse``, ``entropy``, ``accuracy``, ``predicted``, ``dropped``; see `LossOutput`.
    """
    checked = check_arguments(
        logits, None, labels, vocab=None, bias=None, shift=shift, ignore_index=ignore_index, reduction=reduction,
        num_items_in_batch=num_items_in_batch, logit_scale=logit_scale, softcap=softcap,
        label_smoothing=label_smoothing, z_loss=z_loss, class_weight=class_weight, token_weight=token_weight,
        subject="logits",
    )  # fmt: skip
    check_kernels(kernels)
    _check_inplace(inplace, logits)
    # under torch.compile the saved logits are the compiler's to reuse
    inplace = inplace and not torch.compiler.is_compiling()

    def run(rows: Rows) -> RowLoss:
        profile = profile_of(logits.device)
        why_not = cannot_run(kernels, Problem(rows.labels.shape[0], 0, rows.vocab, rows.accumulator), profile)
        if why_not is not None:
            raise UnsupportedError(f"The cross-entropy cannot run here: {why_not}. Use kernels='auto'.")
        if rows.labels.shape[0] == 0:
            return no_rows(rows)
        backend = backend_for(kernels, profile, rows.accumulator)
        loss, nll, max_, log_sum, entropy, predicted = ops.cross_entropy(
            _three_axes(rows.hidden), rows.labels, rows.class_weight, rows.ignore_index, rows.scale, rows.softcap,
            rows.label_smoothing, rows.z_loss, rows.want_entropy, rows.want_predicted, inplace, backend,
        )  # fmt: skip
        loss = loss * rows.row_scale
        return RowLoss(loss.sum() if rows.reduce else loss, nll, max_ + log_sum, entropy, predicted)

    out = compute(checked, check_fields(fields), run, flat=False)
    return _without_the_last(out, shift, reduction) if shift else out


def _three_axes(logits: Tensor) -> Tensor:
    """(B, T, V) without a copy where strides allow: a batch cut along its second axis is no matrix of rows."""
    if logits.dim() < 3:
        return logits.reshape(1, -1, logits.shape[-1])
    strides, shape = logits.stride(), logits.shape
    if all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(logits.dim() - 2)):
        return logits.view(1, -1, shape[-1])
    return logits.reshape(-1, *shape[-2:])


def _without_the_last(out: LossOutput, shift: int, reduction: str) -> LossOutput:
    """Fields of the labels' shape without the positions that a shift leaves without a label."""
    reduced = ("loss", "z_loss") if reduction != "none" else ()
    return LossOutput._make(
        value if value is None or name in reduced else value[..., :-shift]
        for name, value in zip(LossOutput._fields, out, strict=True)
    )


def _check_inplace(inplace: bool, logits: Tensor) -> None:
    """Refuse to write over logits that somebody else owns. Whoever saved them for a backward is autograd's to find."""
    if not isinstance(inplace, bool):
        raise ConfigError(f"inplace must be true or false, got {inplace!r}.")
    if not inplace or torch.compiler.is_compiling() or not (logits.requires_grad and torch.is_grad_enabled()):
        return
    owner = logits._base if logits._base is not None else logits
    if logits.is_leaf or (owner.is_leaf and owner.requires_grad):
        raise ConfigError(
            "inplace=True was asked for, but the logits are a leaf that requires a gradient, or a view of one, so its "
            "values would be lost. Leave inplace out."
        )
    if _may_overlap(logits):
        raise ConfigError(
            f"inplace=True was asked for, but logits of shape {tuple(logits.shape)} and strides {logits.stride()} have "
            "entries that share memory (as expand makes them). Leave inplace out, or pass logits.contiguous()."
        )
    if _saves_through_hooks():
        raise UnsupportedError(
            "inplace=True was asked for under saved-tensor hooks (activation checkpointing or offloading), where "
            "autograd cannot tell whether the logits are needed elsewhere. Leave inplace out, or compute the loss "
            "outside."
        )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two entries may lie at one address: False only where the strides are those of boxes within boxes."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _saves_through_hooks() -> bool:
    """Whether what autograd saves now goes through hooks: a saved tensor takes them once only."""
    with torch.enable_grad():
        probe = torch.zeros((), device="cpu", requires_grad=True).square()
    try:
        probe.grad_fn._raw_saved_self.register_hooks(lambda saved: saved, lambda packed: packed)  # type: ignore[union-attr]
    except RuntimeError:
        return True
    return False
