"""Row losses from logits that exist: shared by the strategies that make some (all of them, or a chunk's)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from ._base import Rows


def project(rows: Rows, hidden: Tensor) -> Tensor:
    """Transformed logits (n, V) of some rows, in the accumulator's type."""
    if rows.project is not None:
        logits = rows.project(hidden)
        shape = hidden.shape[0], rows.vocab
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.shape != shape:
            is_tensor = isinstance(logits, Tensor)
            got = f"{logits.dtype} of shape {tuple(logits.shape)}" if is_tensor else type(logits).__name__
            raise ConfigError(
                f"project must return floating logits of shape {shape} for these rows, got {got}. Check vocab."
            )
        return logits.to(rows.accumulator)
    assert rows.weight is not None
    bias = None if rows.bias is None else rows.bias.to(rows.dtype)
    logits = F.linear(hidden.to(rows.dtype), rows.weight.to(rows.dtype), bias)
    return transform(rows, logits.to(rows.accumulator))


def transform(rows: Rows, logits: Tensor) -> Tensor:
    """Scale and softcap, out of place."""
    if rows.scale != 1.0:
        logits = logits * rows.scale
    if rows.softcap:
        logits = rows.softcap * torch.tanh(logits / rows.softcap)
    return logits


def loss_from_logits(
    rows: Rows,
    logits: Tensor,
    labels: Tensor,
    row_scale: Tensor,
    nll_of: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """(scaled loss, nll, lse, entropy, predicted) of some rows; unasked fields are empty, and all detached except
    ``nll`` and ``lse`` of a shard.

    ``nll_of`` is a cross-entropy in place of torch's: of logits, labels, and which of those count; without smoothing.
    """
    class_weight = None if rows.class_weight is None else rows.class_weight.to(logits.dtype)
    valid = labels != rows.ignore_index
    if nll_of is not None:
        loss = nll_of(logits, labels, valid)
        loss = loss if class_weight is None else loss * class_weight[torch.where(valid, labels, 0)]
    else:
        loss = F.cross_entropy(
            logits,
            labels,
            class_weight,
            ignore_index=rows.ignore_index,
            reduction="none",
            label_smoothing=rows.label_smoothing,
        )
    if rows.z_loss:
        loss = loss + rows.z_loss * torch.where(valid, logits.logsumexp(1), 0.0).square()
    loss = loss * row_scale
    empty = logits.new_zeros(0)
    nll, lse = empty, empty
    with torch.set_grad_enabled(torch.is_grad_enabled() and rows.shard):
        if rows.fields & {"nll", "lse", "entropy"} or rows.z_loss or rows.shard:
            lse = torch.where(valid, logits.logsumexp(1), 0.0)
            picked = logits.gather(1, torch.where(valid, labels, 0)[:, None])[:, 0]
            nll = torch.where(valid, lse - picked, 0.0)
    with torch.no_grad():
        logits = logits.detach()
        entropy, predicted = empty, empty
        if rows.want_entropy:
            log_p = torch.log_softmax(logits, 1)
            p = log_p.exp()
            entropy = torch.where(valid, -(p * torch.where(p > 0, log_p, 0.0)).sum(1), 0.0)
        if rows.want_predicted:
            predicted = torch.where(valid, logits.argmax(1), rows.ignore_index)
    return loss, nll, lse, entropy, predicted
