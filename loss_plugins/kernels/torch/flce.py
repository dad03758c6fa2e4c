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

from .._matmul import matmul
from .._rows import accumulator, row_coefficients, row_terms
from ._tiles import COLUMNS, operand, project, project_back, row_sums, spans, to_gradient_, transform_


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
    state: dict[str, Any] = {"dtype": acc, "device": hidden.device}
    valid = labels != ignore_index
    row_scale = torch.where(valid, row_scale.to(acc), 0.0)
    loss, nll, lse = (torch.zeros(rows, **state) for _ in range(3))
    entropy = torch.zeros(rows if want_entropy else 0, **state)
    predicted = torch.zeros(rows if want_predicted else 0, dtype=torch.int64, device=hidden.device)
    d_hidden = hidden.new_zeros(rows if need_hidden else 0, width)
    d_weight = torch.zeros(vocab if need_weight else 0, width, **state)
    d_bias = torch.zeros(vocab if need_bias else 0, **state)

    def chunk(r0: int, r1: int) -> None:
        # a function, so that everything a chunk allocates is gone before the next one begins
        h, y, ok = hidden[r0:r1].to(dtype), labels[r0:r1], valid[r0:r1]
        z = transform_(project(h, weight, dtype), None if bias is None else bias.to(acc), scale, softcap)
        max_, sum_, weighted, moment = row_sums(z, class_weight, label_smoothing > 0, want_entropy)
        target = z.gather(1, torch.where(ok, y, 0)[:, None])[:, 0]
        loss[r0:r1], nll[r0:r1], lse[r0:r1] = row_terms(
            max_, sum_, target, weighted, y, ok, class_weight, label_smoothing, z_loss, vocab
        )
        if want_entropy:
            entropy[r0:r1] = torch.where(ok, sum_.log() - moment / sum_, 0.0)
        if want_predicted:
            predicted[r0:r1] = torch.where(ok, z.argmax(1), ignore_index)
        if not (need_hidden or need_weight or need_bias):
            return
        coefficients = row_coefficients(
            row_scale[r0:r1], lse[r0:r1], y, ok, class_weight, label_smoothing, z_loss, vocab
        )
        # an ignored row has no log-sum-exp: +inf makes its probabilities zero whatever its logits are
        to_gradient_(
            z,
            torch.where(ok, lse[r0:r1], torch.inf),
            y,
            coefficients,
            class_weight,
            label_smoothing > 0,
            scale,
            softcap,
        )
        if need_bias:
            d_bias.add_(z.sum(0))
        dz = operand(z, dtype)
        del z
        if need_hidden:
            d_hidden[r0:r1] = project_back(dz, weight)
        if need_weight and dz.dtype == acc:
            d_weight.addmm_(dz.T, h.to(acc))
        elif need_weight:
            for v0, v1 in spans(vocab, COLUMNS):
                d_weight[v0:v1] += matmul(dz[:, v0:v1].T, h)

    for r0, r1 in spans(rows, chunk_rows):
        chunk(r0, r1)
    return (
        (loss * row_scale).sum(),
        d_hidden,
        d_weight.to(weight.dtype) if need_weight else weight.new_empty(0),
        d_bias if bias is None else d_bias.to(bias.dtype),
        nll,
        lse,
        entropy,
        predicted,
    )


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """``saved * factor`` in the type of ``saved``, rounded once."""
    if saved.dtype.itemsize >= 4 or not saved.is_cuda:
        return saved * factor.to(torch.promote_types(saved.dtype, torch.float32))
    # a GPU would round a 0-d factor to the half type first, 65536 to infinity; one of one axis stays float32
    return torch.mul(saved, factor.reshape(1).float(), out=torch.empty_like(saved))


def scale_(saved: Tensor, factor: Tensor) -> None:
    """``saved *= factor``, rounded once."""
    torch.mul(saved, factor.reshape(1).to(accumulator(saved.dtype)), out=saved)
