"""What the torch kernels do to one tile of logits.

Letters: N rows, H hidden width, V vocabulary, C columns of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._matmul import matmul
from .._rows import accumulator

COLUMNS = 4096
"""Columns handled at once where a temporary must stay small beside a chunk of logits."""


def project(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``hidden @ weight.T`` in the accumulator's type, never with a cast copy of the whole weight."""
    pieces = _product_spans(weight, dtype)
    if len(pieces) == 1:
        return matmul(hidden, weight.to(dtype).T)
    z = torch.empty(hidden.shape[0], weight.shape[0], dtype=accumulator(dtype), device=hidden.device)
    for v0, v1 in pieces:
        z[:, v0:v1] = matmul(hidden, weight[v0:v1].to(dtype).T)
    return z


def project_back(dz: Tensor, weight: Tensor) -> Tensor:
    """``dz @ weight`` in the accumulator's type, likewise."""
    pieces = _product_spans(weight, dz.dtype)
    if len(pieces) == 1:
        return matmul(dz, weight.to(dz.dtype))
    total = torch.zeros(dz.shape[0], weight.shape[1], dtype=accumulator(dz.dtype), device=dz.device)
    for v0, v1 in pieces:
        total += matmul(dz[:, v0:v1], weight[v0:v1].to(dz.dtype))
    return total


def _product_spans(weight: Tensor, dtype: torch.dtype) -> list[tuple[int, int]]:
    """One product over the whole vocabulary, or a product a column tile where the weight must be cast: a cast of all of
    it would be another ``V * H`` in memory."""
    casts = weight.dtype != dtype or (dtype.itemsize < 4 and not weight.is_cuda)
    return spans(weight.shape[0], COLUMNS if casts else weight.shape[0])


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
    """Eq. (5), d loss / d (transformed logits): ``p * coef_p - onehot * coef_label - weight * coef_weight``."""
    grad = (logits - lse[:, None]).exp_()
    grad *= coef_p[:, None]
    inside = (labels >= 0) & (labels < logits.shape[1])
    column = labels.clamp(0, logits.shape[1] - 1)[:, None]
    grad.scatter_add_(1, column, torch.where(inside, -coef_label, 0.0)[:, None])
    if smoothing:
        spread = coef_weight[:, None]
        grad -= spread if class_weight is None else spread * class_weight
    return grad


def row_sums(
    z: Tensor,  # (n, V)
    class_weight: Tensor | None,
    smoothing: bool,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(maximum, sum of exp(z - maximum), weighted sum of z, sum of exp(z - maximum) * (z - maximum)) of each row."""
    max_ = z.amax(1)
    anchor = torch.where(max_ == -torch.inf, 0.0, max_)
    sum_, moment = torch.zeros_like(max_), torch.zeros_like(max_)
    weighted = torch.zeros_like(max_) if smoothing else None
    for v0, v1 in spans(z.shape[1], COLUMNS):
        if weighted is not None:
            weighted += z[:, v0:v1].sum(1) if class_weight is None else z[:, v0:v1] @ class_weight[v0:v1].to(z.dtype)
        low = z[:, v0:v1] - anchor[:, None]
        if want_entropy:
            share = low.exp()
            moment += (share * torch.where(share > 0, low, 0.0)).sum(1)  # 0 * -inf is 0 here
            del share
        sum_ += low.exp_().sum(1)
        del low
    return max_, sum_, weighted, moment


def to_gradient_(
    z: Tensor,  # (n, V)
    lse: Tensor,  # (n,)
    labels: Tensor,  # (n,)
    coefficients: tuple[Tensor, Tensor, Tensor],
    class_weight: Tensor | None,
    smoothing: bool,
    scale: float,
    softcap: float,
    max_: Tensor | None = None,  # (n,)
) -> None:
    """Overwrite logits by their gradient, eq. (5) and (6), a few columns at a time.

    With ``max_`` the probabilities are ``exp((z - max_) - lse)``: ``lse`` is then the log of the sum alone.
    """
    for v0, v1 in spans(z.shape[1], COLUMNS):
        tile = z[:, v0:v1]
        low = tile if max_ is None else tile - max_[:, None]
        weight = None if class_weight is None else class_weight[v0:v1].to(z.dtype)
        part = row_gradient(low, lse, labels - v0, *coefficients, weight, smoothing)
        del low
        tile.copy_(untransform_(part, tile, scale, softcap))
        del part


def spans(length: int, step: int) -> list[tuple[int, int]]:
    """``[0, length)`` cut into half-open pieces of at most ``step``."""
    return [(start, min(start + step, length)) for start in range(0, length, max(step, 1))]
