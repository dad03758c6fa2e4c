"""Fused linear cross-entropy in plain torch: one chunk of rows at a time, gradients in the forward.

For each chunk of rows: logits, eq. (1); log-sum-exp, eq. (2); the logits overwritten by their gradient, eq. (5); dX of
the chunk, eq. (7); its share of dW added in float32, eq. (8). The backward has nothing left to do but scale.
Peak beside the results: one chunk of logits (``chunk * V * 4`` bytes, on a GPU a half copy of it too), and dW in
float32 (``V * H * 4`` bytes) while it is summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._rows import accumulator, row_coefficients, row_terms
from ._tiles import matmul, operand, row_gradient, spans, transform_, untransform_

_COLUMNS = 4096  # columns that the softmax gradient handles at once, so that its temporaries stay small


def flce_forward(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    row_scale: Tensor,  # (N,) what each row's loss is multiplied by in the total
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(total, dX, dW, db, nll, lse, entropy, predicted); gradients are those of the total, empty where not needed."""
    (rows, width), vocab = hidden.shape, weight.shape[0]
    acc = accumulator(dtype)
    state: Any = {"dtype": acc, "device": hidden.device}
    valid = labels != ignore_index
    loss, nll, lse = (torch.zeros(rows, **state) for _ in range(3))
    entropy = torch.zeros(rows if want_entropy else 0, **state)
    predicted = torch.zeros(rows if want_predicted else 0, dtype=torch.int64, device=hidden.device)
    d_hidden = hidden.new_zeros(rows if need_hidden else 0, width)
    d_weight = torch.zeros(vocab if need_weight else 0, width, **state)
    d_bias = torch.zeros(vocab if need_bias else 0, **state)
    columns = spans(vocab, _COLUMNS)
    for r0, r1 in spans(rows, chunk_rows):
        h, y, ok = hidden[r0:r1].to(dtype), labels[r0:r1], valid[r0:r1]
        z = torch.empty(r1 - r0, vocab, **state)
        for v0, v1 in _product_spans(columns, vocab, weight, dtype):
            z[:, v0:v1] = matmul(h, weight[v0:v1].to(dtype).T)
        transform_(z, None if bias is None else bias.to(acc), scale, softcap)
        max_ = z.amax(1) if vocab else z.new_zeros(r1 - r0)
        anchor = torch.where(max_ == -torch.inf, 0.0, max_)
        sum_ = torch.zeros_like(max_)
        moment = torch.zeros_like(max_)
        weighted = torch.zeros_like(max_) if label_smoothing else None
        for v0, v1 in columns:
            share = torch.exp(z[:, v0:v1] - anchor[:, None])
            sum_ += share.sum(1)
            if want_entropy:
                moment += (share * torch.where(share > 0, z[:, v0:v1] - anchor[:, None], 0.0)).sum(1)
            if weighted is not None:
                weighted += z[:, v0:v1].sum(1) if class_weight is None else z[:, v0:v1] @ class_weight[v0:v1].to(acc)
        target = z.gather(1, torch.where(ok, y, 0)[:, None])[:, 0]
        loss[r0:r1], nll[r0:r1], lse[r0:r1] = row_terms(
            max_, sum_, target, weighted, y, ok, class_weight, label_smoothing, z_loss, vocab
        )
        if want_entropy:
            entropy[r0:r1] = torch.where(ok, sum_.log() - moment / sum_, 0.0)
        if want_predicted:
            predicted[r0:r1] = torch.where(ok, z.argmax(1), ignore_index)
        if not (need_hidden or need_weight or need_bias):
            continue
        coef_p, coef_label, coef_weight = row_coefficients(
            row_scale[r0:r1], lse[r0:r1], y, ok, class_weight, label_smoothing, z_loss, vocab
        )
        safe_lse = torch.where(ok, lse[r0:r1], torch.inf)
        for v0, v1 in columns:
            tile = z[:, v0:v1]
            part = row_gradient(
                tile, safe_lse, y - v0, coef_p, coef_label, coef_weight,
                None if class_weight is None else class_weight[v0:v1].to(acc), label_smoothing > 0,
            )
            tile.copy_(untransform_(part, tile, scale, softcap))
        if need_bias:
            d_bias += z.sum(0)
        dz = operand(z, dtype)
        del z
        if need_hidden:
            d_chunk = torch.zeros(r1 - r0, width, **state)
            for v0, v1 in _product_spans(columns, vocab, weight, dz.dtype):
                d_chunk += matmul(dz[:, v0:v1], weight[v0:v1].to(dz.dtype))
            d_hidden[r0:r1] = d_chunk
        if need_weight:
            if dz.dtype == acc:
                d_weight.addmm_(dz.T, h.to(acc))
            else:
                for v0, v1 in columns:
                    d_weight[v0:v1] += matmul(dz[:, v0:v1].T, h)
    total = (loss * torch.where(valid, row_scale.to(acc), 0.0)).sum()
    return (
        total,
        d_hidden,
        d_weight.to(weight.dtype) if need_weight else weight.new_empty(0),
        d_bias if bias is None else d_bias.to(bias.dtype),
        nll,
        lse,
        entropy,
        predicted,
    )


def _product_spans(
    columns: list[tuple[int, int]], vocab: int, weight: Tensor, dtype: torch.dtype
) -> list[tuple[int, int]]:
    """One product over the whole vocabulary, or a product a column tile where the weight must be cast: a cast of all of
    it would be another ``V * H`` in memory."""
    casts = weight.dtype != dtype or (dtype.itemsize < 4 and not weight.is_cuda)
    return columns if casts else [(0, vocab)]
