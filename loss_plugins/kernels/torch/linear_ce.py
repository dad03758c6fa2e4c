"""Cut cross-entropy in plain torch: no more than one tile of logits exists at any time.

Forward, eq. (2): vocabulary tiles outside, row tiles inside; each row keeps its running maximum and sum.
Backward, eq. (5) to (8): the tiles are computed again; a vocabulary tile owns its rows of dW and writes them once.
Peak beside the results: two or three tiles of ``tile_bytes``, one vocabulary tile of the weight in the compute type,
and in the backward an accumulator for dX, ``N * H * 4`` bytes, where the inputs are half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._matmul import matmul
from .._rows import accumulator, row_coefficients, row_terms
from ._tiles import operand, row_gradient, spans, transform_, untransform_


def tile_shape(rows: int, vocab: int, tile_bytes: int, itemsize: int) -> tuple[int, int]:
    """(rows, columns) of a tile of at most ``tile_bytes``, never empty. Wide rows first: few passes over the weight."""
    entries = max(tile_bytes // itemsize, 1)
    tile_rows = max(1, min(rows, 4096, entries))
    return tile_rows, max(1, min(vocab, entries // tile_rows))


def linear_ce_forward(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    tile_bytes: int,
    below: float = 0.0,
    bound: float = 1.0,
    want_dropped: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, lse, entropy, predicted, dropped, marks) of each row; entropy to dropped are empty unless asked for.

    ``bound`` is for a backend that marks columns for its backward; here there are never any marks.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    acc = accumulator(dtype)
    state: Any = {"dtype": acc, "device": hidden.device}
    max_ = torch.full((rows,), -torch.inf, **state)
    sum_ = torch.zeros(rows, **state)
    target = torch.zeros(rows, **state)
    weighted = torch.zeros(rows, **state) if label_smoothing else None
    moment = torch.zeros(rows if want_entropy else 0, **state)
    best = torch.full((rows if want_predicted else 0,), -torch.inf, **state)
    predicted = torch.zeros(rows if want_predicted else 0, dtype=torch.int64, device=hidden.device)
    tile_rows, tile_columns = tile_shape(rows, vocab, tile_bytes, acc.itemsize)
    for v0, v1 in spans(vocab, tile_columns):
        tile_weight = weight[v0:v1].to(dtype)
        for r0, r1 in spans(rows, tile_rows):
            z = _logits(hidden[r0:r1], tile_weight, bias, v0, v1, scale, softcap, dtype, acc)
            tile_max, tile_best = z.max(1)
            new_max = torch.maximum(max_[r0:r1], tile_max)
            # a row whose logits are all -inf so far keeps its zero sum: exp(-inf - -inf) would be NaN
            anchor = torch.where(new_max == -torch.inf, 0.0, new_max)
            carry = torch.exp(max_[r0:r1] - anchor)
            if want_predicted:
                better = tile_max > best[r0:r1]
                predicted[r0:r1] = torch.where(better, tile_best + v0, predicted[r0:r1])
                best[r0:r1] = torch.maximum(best[r0:r1], tile_max)
            local = labels[r0:r1] - v0
            inside = (local >= 0) & (local < v1 - v0)
            picked = z.gather(1, local.clamp(0, v1 - v0 - 1)[:, None])[:, 0]
            target[r0:r1] = torch.where(inside, picked, target[r0:r1])
            if weighted is not None:
                weighted[r0:r1] += z.sum(1) if class_weight is None else z @ class_weight[v0:v1].to(acc)
            if want_entropy:
                z -= anchor[:, None]
                share = torch.exp(z)
                # relative to the maximum, so that no two large numbers are subtracted in the end; 0 * -inf is 0 here
                moved = torch.where(max_[r0:r1] == -torch.inf, 0.0, max_[r0:r1] - anchor) * sum_[r0:r1]
                moment[r0:r1] = (moment[r0:r1] + moved) * carry + (share * torch.where(share > 0, z, 0.0)).sum(1)
                sum_[r0:r1] = sum_[r0:r1] * carry + share.sum(1)
            else:
                sum_[r0:r1] = sum_[r0:r1] * carry + z.sub_(anchor[:, None]).exp_().sum(1)
            max_[r0:r1] = new_max
    valid = labels != ignore_index
    loss, nll, lse = row_terms(
        max_, sum_, target, weighted, labels, valid, class_weight, label_smoothing, z_loss, vocab
    )
    entropy = torch.where(valid, sum_.log() - moment / sum_, 0.0) if want_entropy else moment
    if want_predicted:
        predicted = torch.where(valid, predicted, ignore_index)
    dropped = lse.new_zeros(rows if want_dropped else 0)
    if want_dropped and below:
        dropped = dropped_mass(
            hidden, weight, bias, labels, lse, ignore_index, scale, softcap, dtype, below, tile_bytes
        )
    return loss, nll, lse, entropy, predicted, dropped, labels.new_zeros(0, 0, dtype=torch.int32)


def linear_ce_backward(
    grad: Tensor,  # (N,) d total / d loss of the row
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (V,)
    lse: Tensor,  # (N,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    filter_hidden: float,
    filter_weight: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    tile_bytes: int,
    marks: Tensor | None = None,
    grad_nll: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dW, db) in the types of hidden, weight and bias; empty where not needed.

    ``filter_hidden`` and ``filter_weight`` above 0 leave out of dX, of dW, the columns of a row tile in which no row's
    ``|p - onehot|`` reaches that value.
    """
    (rows, width), vocab = hidden.shape, weight.shape[0]
    acc = accumulator(dtype)
    valid = labels != ignore_index
    coef_p, coef_label, coef_weight = row_coefficients(
        grad, lse, labels, valid, class_weight, label_smoothing, z_loss, vocab, grad_nll, grad_lse
    )
    # an ignored row has no log-sum-exp: +inf makes its probabilities zero whatever its logits are
    safe_lse = torch.where(valid, lse, torch.inf)
    d_hidden = torch.zeros(rows if need_hidden else 0, width, dtype=acc, device=hidden.device)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else weight.new_empty(0)
    d_bias = torch.zeros(vocab if need_bias else 0, dtype=acc, device=hidden.device)
    tile_rows, tile_columns = tile_shape(rows, vocab, tile_bytes, acc.itemsize)
    for v0, v1 in spans(vocab, tile_columns):
        tile_weight = weight[v0:v1].to(dtype)
        tile_d_weight = torch.zeros(v1 - v0 if need_weight else 0, width, dtype=acc, device=hidden.device)
        tile_class_weight = None if class_weight is None else class_weight[v0:v1].to(acc)
        for r0, r1 in spans(rows, tile_rows):
            h = hidden[r0:r1].to(dtype)
            local = labels[r0:r1] - v0
            z = _logits(h, tile_weight, bias, v0, v1, scale, softcap, dtype, acc)
            dz = row_gradient(
                z,
                safe_lse[r0:r1],
                local,
                coef_p[r0:r1],
                coef_label[r0:r1],
                coef_weight[r0:r1],
                tile_class_weight,
                label_smoothing > 0,
            )
            live = None
            if filter_hidden or filter_weight:
                live = _live_columns(z, safe_lse[r0:r1], local, min(filter_hidden or 1, filter_weight or 1))
            dz = untransform_(dz, z, scale, softcap)
            del z
            if need_bias:
                d_bias[v0:v1] += dz.sum(0)
            dz = operand(dz, dtype)
            if need_hidden:
                part, part_weight = _kept(dz, tile_weight, live if filter_hidden else None)
                d_hidden[r0:r1] += matmul(part, part_weight.to(part.dtype))
            if need_weight:
                if live is not None and filter_weight:
                    tile_d_weight += matmul((dz * live).T, h.to(dz.dtype))
                else:
                    tile_d_weight += matmul(dz.T, h.to(dz.dtype))
            del dz
        if need_weight:
            d_weight[v0:v1] = tile_d_weight
    return d_hidden.to(hidden.dtype), d_weight, d_bias if bias is None else d_bias.to(bias.dtype)


def _logits(
    hidden: Tensor,
    tile_weight: Tensor,
    bias: Tensor | None,
    v0: int,
    v1: int,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
    acc: torch.dtype,
) -> Tensor:
    """One tile of eq. (1): (n, C) in the accumulator's type."""
    z = matmul(hidden.to(dtype), tile_weight.T)
    return transform_(z, None if bias is None else bias[v0:v1].to(acc), scale, softcap)


def _live_columns(z: Tensor, lse: Tensor, local: Tensor, below: float) -> Tensor:
    """(C,) bool: the columns of a tile in which some row's ``|p - onehot|`` reaches ``below``."""
    p = torch.exp(z - lse[:, None])
    inside = (local >= 0) & (local < z.shape[1])
    p.scatter_add_(1, local.clamp(0, z.shape[1] - 1)[:, None], -inside.to(p.dtype)[:, None])
    return (p.abs() >= below).any(0)


def _kept(dz: Tensor, tile_weight: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """The operands of dX without the dropped columns. On a CPU they are left out of the product; elsewhere finding them
    would make the host wait, so they are zeroed."""
    if live is None:
        return dz, tile_weight
    if dz.device.type == "cpu":
        columns = live.nonzero()[:, 0]
        return dz[:, columns], tile_weight[columns]
    return dz * live, tile_weight


def dropped_mass(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    lse: Tensor,  # (N,)
    ignore_index: int,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
    below: float,
    tile_bytes: int,
) -> Tensor:
    """(N,) share of each row's probability that lies in columns which the backward would leave out."""
    (rows, _), vocab = hidden.shape, weight.shape[0]
    acc = accumulator(dtype)
    safe_lse = torch.where(labels != ignore_index, lse, torch.inf)
    dropped = torch.zeros(rows, dtype=acc, device=hidden.device)
    tile_rows, tile_columns = tile_shape(rows, vocab, tile_bytes, acc.itemsize)
    for v0, v1 in spans(vocab, tile_columns):
        tile_weight = weight[v0:v1].to(dtype)
        for r0, r1 in spans(rows, tile_rows):
            z = _logits(hidden[r0:r1], tile_weight, bias, v0, v1, scale, softcap, dtype, acc)
            live = _live_columns(z, safe_lse[r0:r1], labels[r0:r1] - v0, below)
            dropped[r0:r1] += torch.where(live, 0.0, torch.exp(z - safe_lse[r0:r1, None])).sum(1)
    return dropped
