"""What is right: loss and gradients with exact products, and how far the naive way in the inputs' type is from it.

Half inputs: the product of two half numbers fits float32, and a float32 factor is split into two half ones that sum to
it (error 2^-17 or less), so that every product runs on a GPU's matrix units with float32 sums: eight times faster than
float32 products. Wider inputs: float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs

CHUNK_BYTES = 1 << 30
_MM_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()


@dataclass(frozen=True)
class Errors:
    """Distance of a loss, and relative distances of its gradients; None for a gradient that was not computed."""

    loss: float
    hidden: float | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Truth:
    """The mean loss over labels, its gradients (float32, or float64 for wider inputs), the naive way's errors, and what
    rounding the gradients once to the inputs' type makes."""

    loss: float
    d_hidden: Tensor
    d_weight: Tensor
    naive: Errors
    rounded: Errors


def relative(actual: Tensor, exact: Tensor) -> float:
    """``|actual - exact| / |exact|``, a slice at a time; the host waits once."""
    total = torch.zeros(2, dtype=torch.float64, device=exact.device)
    for a, e in zip(actual.split(16_384), exact.split(16_384), strict=True):
        total[0] += (a.to(e.dtype) - e).norm().double() ** 2
        total[1] += e.norm().double() ** 2
    difference, size = total.sqrt().tolist()
    return difference / (size or 1.0)


@torch.no_grad()
def truth(inputs: Inputs, chunk_bytes: int = CHUNK_BYTES) -> Truth:
    """Loss, gradients and the naive way's errors, a few rows of logits at a time."""
    hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
    wide = torch.float32 if hidden.dtype.itemsize < 4 else torch.float64
    sums = torch.promote_types(hidden.dtype, torch.float32)  # what the naive way's products and softmax run in
    valid = labels != -100
    count = int(valid.sum())
    totals = torch.zeros(2, dtype=torch.float64, device=hidden.device)
    d_hidden = torch.zeros_like(hidden, dtype=wide)
    d_weight, naive_weight = (torch.zeros_like(weight, dtype=kind) for kind in (wide, sums))
    naive_hidden = torch.zeros_like(hidden)
    rows = max(1, min(len(hidden), chunk_bytes // (weight.shape[0] * wide.itemsize)))
    with _plain_products():
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            x, y, ok = hidden[part], torch.where(valid[part], labels[part], 0), valid[part]
            nll, dz = _softmax_gradient(_product(x, weight.T, wide), y, ok)
            totals[0] += nll.double().sum()
            d_hidden[part] = _product(dz, weight, wide)
            d_weight += _product(dz.T, x, wide)
            del dz
            nll, dz = _softmax_gradient((x @ weight.T).to(sums), y, ok)
            totals[1] += nll.double().sum()
            half = (dz / max(count, 1)).to(hidden.dtype)
            naive_hidden[part] = half @ weight
            naive_weight += _product(half.T, x, sums)
            del dz, half
    d_hidden /= max(count, 1)
    d_weight /= max(count, 1)
    loss, naive_loss = (totals / max(count, 1)).tolist()
    errors = Errors(
        naive_loss - loss, relative(naive_hidden, d_hidden), relative(naive_weight.to(weight.dtype), d_weight)
    )
    rounded = Errors(0.0, relative(d_hidden.to(hidden.dtype), d_hidden), relative(d_weight.to(weight.dtype), d_weight))
    return Truth(loss, d_hidden, d_weight, errors, rounded)


def _softmax_gradient(z: Tensor, y: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """(loss of each row, gradient of their sum by the logits), zero where not ``ok``. Writes over ``z``."""
    lse = z.logsumexp(1)
    nll = (lse - z.gather(1, y[:, None])[:, 0]) * ok
    dz = z.sub_(lse[:, None]).exp_()
    dz.scatter_add_(1, y[:, None], -torch.ones_like(lse)[:, None])
    return nll, dz.mul_(ok[:, None])


def _product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """``left @ right`` in ``wide``; ``right`` is of the inputs' type, ``left`` of that or ``wide``."""
    if not (right.is_cuda and right.dtype.itemsize < 4 and _MM_HAS_OUT_DTYPE):
        return left.to(wide) @ right.to(wide)
    if left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=wide)
    high = left.to(right.dtype)
    low = (left - high).to(right.dtype)
    return torch.mm(high, right, out_dtype=wide).add_(torch.mm(low, right, out_dtype=wide))


@contextmanager
def _plain_products() -> Iterator[None]:
    """No TF32, and no half sums, whatever the process has set."""
    settings = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(settings, name) for name in names}
    try:
        for name in names:
            setattr(settings, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
