"""What all backends do to per-row numbers, in torch: N values, so it costs nothing. Letters: N rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_terms(
    max_: Tensor,  # (N,)
    sum_: Tensor,  # (N,) sum of exp(z - max)
    target: Tensor,  # (N,) logit of the label
    weighted: Tensor | None,  # (N,) sum over the vocabulary of weight * z, with label smoothing
    labels: Tensor,  # (N,)
    valid: Tensor,  # (N,) bool
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, nll, lse) of each row from the running sums, eq. (2) to (4); zero where the row is ignored."""
    log_sum = sum_.log()
    lse = max_ + log_sum
    # log(sum) - (target - max), not lse - target: the difference of two large numbers would lose the small one
    nll = log_sum - (target - max_)
    label_weight, total_weight = _weights(labels, valid, class_weight, vocab, lse.dtype)
    loss = nll if class_weight is None else nll * label_weight
    if label_smoothing:
        assert weighted is not None
        loss = (1 - label_smoothing) * loss + label_smoothing / vocab * (total_weight * lse - weighted)
    if z_loss:
        loss = loss + z_loss * lse.square()
    zero = lse.new_zeros(())
    return torch.where(valid, loss, zero), torch.where(valid, nll, zero), torch.where(valid, lse, zero)


def row_coefficients(
    grad: Tensor,  # (N,) d total / d loss of the row
    lse: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    valid: Tensor,  # (N,) bool
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    vocab: int,
    grad_nll: Tensor | None = None,  # (N,) d total / d nll of the row, where that is used beside the loss
    grad_lse: Tensor | None = None,  # (N,) d total / d lse of the row
) -> tuple[Tensor, Tensor, Tensor]:
    """The three numbers a row that `row_gradient` needs, eq. (5); zero where the row is ignored."""
    grad = torch.where(valid, grad.to(lse.dtype), 0.0)
    label_weight, total_weight = _weights(labels, valid, class_weight, vocab, lse.dtype)
    coef_label = grad * (1 - label_smoothing) * label_weight
    coef_weight = grad * (label_smoothing / vocab)
    if grad_nll is not None:
        coef_label = coef_label + torch.where(valid, grad_nll.to(lse.dtype), 0.0)
    coef_p = coef_label + coef_weight * total_weight + grad * (2 * z_loss) * lse
    if grad_lse is not None:
        coef_p = coef_p + torch.where(valid, grad_lse.to(lse.dtype), 0.0)
    return coef_p, coef_label, coef_weight


def _weights(
    labels: Tensor, valid: Tensor, class_weight: Tensor | None, vocab: int, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float]:
    if class_weight is None:
        return 1.0, float(vocab)
    weight = class_weight.to(dtype)
    return weight[torch.where(valid, labels, 0)], weight.sum()
