"""Cross-entropy of logits that exist, in plain torch: a chunk of rows at a time, in the accumulator's type.

Forward, eq. (2) and (3); backward, eq. (5) and (6), into memory of its own or over the logits themselves.
Peak beside the gradient: one chunk, `CHUNK_BYTES`, and a few columns of it.

Letters: N = B * T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._rows import accumulator, row_coefficients, row_terms
from ._tiles import row_sums, spans, to_gradient_, transform_

CHUNK_BYTES = 32 << 20


def cross_entropy_forward(
    logits: Tensor,  # (B, T, V)
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    want_entropy: bool,
    want_predicted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, maximum, log of the sum, entropy, predicted) of each row; the last two empty unless asked for."""
    rows, vocab = labels.shape[0], logits.shape[2]
    labels = labels.to(torch.int64)
    loss, nll, max_, log_sum = (logits.new_zeros(rows, dtype=accumulator(logits.dtype)) for _ in range(4))
    entropy = loss.new_zeros(rows if want_entropy else 0)
    predicted = labels.new_full((rows if want_predicted else 0,), ignore_index)

    def chunk(part: Tensor, r0: int) -> None:
        # a function, so that everything a chunk allocates is gone before the next one begins
        here = _counted(labels[r0 : r0 + part.shape[0]], ignore_index)
        z = transform_(_copy(part, here, loss.dtype), None, scale, softcap)
        rows_here = slice(r0, r0 + part.shape[0]) if here is None else r0 + here
        y = labels[rows_here]
        ok = y != ignore_index
        largest, sum_, weighted, moment = row_sums(z, class_weight, label_smoothing > 0, want_entropy)
        target = z.gather(1, torch.where(ok, y, 0)[:, None])[:, 0]
        loss[rows_here], nll[rows_here], _ = row_terms(
            largest, sum_, target, weighted, y, ok, class_weight, label_smoothing, z_loss, vocab
        )
        max_[rows_here] = torch.where(ok, largest, 0.0)
        log_sum[rows_here] = torch.where(ok, sum_.log(), 0.0)
        if want_entropy:
            entropy[rows_here] = torch.where(ok, sum_.log() - moment / sum_, 0.0)
        if want_predicted:
            predicted[rows_here] = torch.where(ok, z.argmax(1), ignore_index)

    for part, r0 in _chunks(logits):
        chunk(part, r0)
    return loss, nll, max_, log_sum, entropy, predicted


def cross_entropy_backward(
    grad: Tensor,  # (N,) d total / d loss of the row
    logits: Tensor,  # (B, T, V)
    out: Tensor,  # (B, T, V) written; may be the logits
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    max_: Tensor,  # (N,)
    log_sum: Tensor,  # (N,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write the gradient of the logits to ``out``, zeros where a row is ignored."""
    labels = labels.to(torch.int64)
    coefficients = row_coefficients(
        grad, max_ + log_sum, labels, labels != ignore_index, class_weight, label_smoothing, z_loss, logits.shape[2]
    )

    def chunk(part: Tensor, part_out: Tensor, r0: int) -> None:
        here = _counted(labels[r0 : r0 + part.shape[0]], ignore_index)
        rows_here = slice(r0, r0 + part.shape[0]) if here is None else r0 + here
        z = transform_(_copy(part, here, max_.dtype), None, scale, softcap)
        y, (coef_p, coef_label, coef_weight) = labels[rows_here], (c[rows_here] for c in coefficients)
        to_gradient_(
            z, log_sum[rows_here], y, (coef_p, coef_label, coef_weight), class_weight, label_smoothing > 0, scale,
            softcap, max_[rows_here],
        )  # fmt: skip
        if here is None:
            # whatever stood in an ignored row, infinities and NaN included
            part_out.copy_(z.masked_fill_((y == ignore_index)[:, None], 0.0))
        else:
            part_out.zero_()
            part_out[here] = z.to(out.dtype)

    for (part, r0), (part_out, _) in zip(_chunks(logits), _chunks(out), strict=True):
        chunk(part, part_out, r0)


def _chunks(logits: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Views (n, V) of a few rows each, with the number of their first row."""
    batch, length, vocab = logits.shape
    step = max(1, CHUNK_BYTES // (vocab * accumulator(logits.dtype).itemsize))
    for i in range(batch):
        for t0, t1 in spans(length, step):
            yield logits[i, t0:t1], i * length + t0


def _counted(labels: Tensor, ignore_index: int) -> Tensor | None:
    """Which rows carry a label where the host can look, on a CPU; None: all may."""
    return (labels != ignore_index).nonzero()[:, 0] if labels.device.type == "cpu" else None


def _copy(part: Tensor, here: Tensor | None, dtype: torch.dtype) -> Tensor:
    return part.to(dtype, copy=True) if here is None else part[here].to(dtype)
