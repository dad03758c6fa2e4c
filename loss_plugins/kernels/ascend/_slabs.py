"""Memory of logits, products into it, and what becomes of its rows' sums.

Letters: N rows, H hidden width, V vocabulary, C columns of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._rows import row_terms
from .blocks import WEIGHT_ROWS, aligned, spans
from .vector import Sums, Transform


def new_slab(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Flat memory for (rows, columns) logits."""
    return torch.empty(rows * aligned(columns), dtype=dtype, device=device)


def view_of(slab: Tensor, rows: int, columns: int) -> Tensor:
    """(rows, columns) over the beginning of a slab, every row beginning on whole 16 entries."""
    pitch = aligned(columns)
    return slab[: rows * pitch].view(rows, pitch)[:, :columns]


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``out = hidden @ weight.T`` in the type of ``hidden``, without a cast copy of the whole weight."""
    if weight.dtype == hidden.dtype:
        return torch.mm(hidden, weight.T, out=out)
    for v0, v1 in spans(weight.shape[0], WEIGHT_ROWS):
        torch.mm(hidden, weight[v0:v1].to(hidden.dtype).T, out=out[:, v0:v1])
    return out


class Results(NamedTuple):
    """What the sums of some rows say."""

    loss: Tensor  # (n,)
    nll: Tensor
    lse: Tensor
    max_: Tensor
    log_sum: Tensor
    entropy: Tensor  # (n,) or (0,)
    predicted: Tensor  # (n,) int64 or (0,)


def results(
    sums: Sums,
    labels: Tensor,  # (n,)
    bias: Tensor | None,  # (V,)
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    transform: Transform,
    label_smoothing: float,
    z_loss: float,
    vocab: int,
    want_entropy: bool,
) -> Results:
    """Eq. (2) to (4) from the running sums; zeros, or ``ignore_index`` for a prediction, where a row has no label."""
    valid = labels != ignore_index
    max_, sum_, target, weighted, moment = sums.numbers
    sum_ = torch.where(valid, sum_, 1.0)
    if bias is not None:
        in_range = valid & (labels >= 0) & (labels < vocab)
        target = target + bias[torch.where(in_range, labels, 0).long()].float()
    target = target * transform.scale
    if transform.softcap:
        target = transform.softcap * torch.tanh(target / transform.softcap)
    loss, nll, lse = row_terms(
        max_, sum_, target, weighted if label_smoothing else None, labels.long(), valid, class_weight, label_smoothing,
        z_loss, vocab,
    )  # fmt: skip
    log_sum = sum_.log()
    entropy = torch.where(valid, log_sum - moment / sum_, 0.0) if want_entropy else log_sum.new_zeros(0)
    predicted = sums.best.to(torch.int64)
    if predicted.numel():
        predicted = torch.where(valid, predicted, ignore_index)
    # a copy: a view would keep all five numbers alive until the backward
    return Results(loss, nll, lse, max_.clone(), log_sum, entropy, predicted)


def float16_unit(coefficients: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor | None:
    """What float16 gradients are divided by before they are rounded: a power of two that makes the rows' shares sum to
    about 64, so that small ones are not lost and a sum over rows does not overflow. None for types with more range."""
    if dtype != torch.float16:
        return None
    share = coefficients[0].abs().sum().clamp(min=1e-30) / 64
    return torch.exp2(torch.floor(torch.log2(share)))
