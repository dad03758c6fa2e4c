"""What both torch kernels do to one tile of logits. Letters: N rows, H hidden width, V vocabulary, C columns of a tile."""

from __future__ import annotations

import torch
from torch import Tensor

_MM_HAS_OUT_DTYPE = "out_dtype" in (torch.mm.__doc__ or "")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` with the accumulator's own precision as result, never rounded to a half type.

    A logit rounded to bfloat16 between the log-sum-exp and the gradient costs five times the gradient error (README,
    "Rounding"). On a CPU, and where torch has no mixed product, the operands are up-cast: exact, since a product of two
    half numbers fits float32.
    """
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda and _MM_HAS_OUT_DTYPE:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def operand(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A tile of logit gradients as the operand of the next product: half on a GPU's matrix units, as it is on a CPU."""
    return grad.to(dtype) if grad.is_cuda else grad


def transform_(logits: Tensor, bias: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Bias, scale and softcap of eq. (1), in place. ``softcap`` 0 means none."""
    if bias is not None:
        logits += bias
    if scale != 1.0:
        logits *= scale
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


def untransform_(grad: Tensor, logits: Tensor, scale: float, softcap: float) -> Tensor:
    """The chain rule back through `transform_`, in place, eq. (6); ``logits`` are the transformed ones."""
    if softcap:
        grad *= 1 - (logits / softcap).square()
    if scale != 1.0:
        grad *= scale
    return grad


def row_gradient(
    logits: Tensor,  # (n, C) transformed
    lse: Tensor,  # (n,)
    labels: Tensor,  # (n,) relative to this tile's first column, anything outside [0, C) means elsewhere
    coef_p: Tensor,  # (n,)
    coef_label: Tensor,  # (n,)
    coef_weight: Tensor,  # (n,)
    class_weight: Tensor | None,  # (C,)
    smoothing: bool,
) -> Tensor:
    """d loss / d (transformed logits) of a tile, eq. (5): ``p * coef_p - onehot * coef_label - weight * coef_weight``."""
    grad = torch.exp(logits - lse[:, None])
    grad *= coef_p[:, None]
    inside = (labels >= 0) & (labels < logits.shape[1])
    column = labels.clamp(0, logits.shape[1] - 1)[:, None]
    grad.scatter_add_(1, column, torch.where(inside, -coef_label, 0.0)[:, None])
    if smoothing:
        spread = coef_weight[:, None]
        grad -= spread if class_weight is None else spread * class_weight
    return grad


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The three numbers a row that `row_gradient` needs, eq. (5); zero where the row is ignored."""
    grad = torch.where(valid, grad.to(lse.dtype), 0.0)
    label_weight, total_weight = _weights(labels, valid, class_weight, vocab, lse.dtype)
    coef_label = grad * (1 - label_smoothing) * label_weight
    coef_weight = grad * (label_smoothing / vocab)
    coef_p = coef_label + coef_weight * total_weight + grad * (2 * z_loss) * lse
    return coef_p, coef_label, coef_weight


def _weights(
    labels: Tensor, valid: Tensor, class_weight: Tensor | None, vocab: int, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float]:
    if class_weight is None:
        return 1.0, float(vocab)
    weight = class_weight.to(dtype)
    return weight[torch.where(valid, labels, 0)], weight.sum()


def spans(length: int, step: int) -> list[tuple[int, int]]:
    """``[0, length)`` cut into half-open pieces of at most ``step``."""
    return [(start, min(start + step, length)) for start in range(0, length, max(step, 1))]
