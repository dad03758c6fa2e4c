"""What the vector kernels compute, in float64, and inputs for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORED = -100


class Options(NamedTuple):
    """What a kernel is compiled for."""

    bias: bool = False
    scale: bool = False
    softcap: bool = False
    smoothing: bool = False
    class_weight: bool = False
    entropy: bool = False
    predicted: bool = False

    def __str__(self) -> str:
        return "+".join(name for name, on in self._asdict().items() if on) or "plain"

    @property
    def factor(self) -> float:
        return 0.5 if self.scale else 1.0

    @property
    def cap(self) -> float:
        return 3.0 if self.softcap else 0.0


class Inputs(NamedTuple):
    """One problem: logits (N, V) as a product gives them, in rows of whole 16 entries."""

    logits: Tensor
    labels: Tensor
    bias: Tensor | None
    class_weight: Tensor | None


def inputs(
    rows: int, vocab: int, dtype: torch.dtype, options: Options, labels: torch.dtype = torch.int64, seed: int = 0
) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    logits = torch.empty(rows, -(-vocab // 16) * 16, dtype=dtype)[:, :vocab]
    logits.copy_(torch.randn(rows, vocab, generator=g) * 4)
    y = torch.randint(0, vocab, (rows,), generator=g)
    y[1::3] = IGNORED
    return Inputs(
        logits,
        y.to(labels),
        torch.randn(vocab, generator=g).to(dtype) if options.bias else None,
        torch.rand(vocab, generator=g) + 0.5 if options.class_weight else None,
    )


def transformed(given: Inputs, options: Options, dtype: torch.dtype = torch.float64) -> Tensor:
    """Eq. (1) after the product."""
    z = given.logits.to(dtype) + (0 if given.bias is None else given.bias.to(dtype))
    z = z * options.factor
    return options.cap * torch.tanh(z / options.cap) if options.cap else z


def plain_sums(z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, entropy, weighted sum) of float32 rows, added one number after the other as this CPU adds a block."""

    def sum_(rows: Tensor) -> Tensor:
        return torch.from_numpy(np.cumsum(rows.numpy(), 1, dtype=np.float32)[:, -1])

    low = z - z.amax(1, True)
    share = low.exp()
    total = sum_(share)
    return z.amax(1) + total.log(), total.log() - sum_(share * low) / total, sum_(z * weight)


def gradient(
    given: Inputs, options: Options, coefficients: tuple[Tensor, ...], dtype: torch.dtype = torch.float64
) -> Tensor:
    """Eq. (5) and (6), zeros where a row has no label."""
    z = transformed(given, options, dtype)
    valid = given.labels != IGNORED
    coef_p, coef_label, coef_weight = (c.to(dtype)[:, None] for c in coefficients)
    onehot = torch.zeros_like(z).scatter_(1, torch.where(valid, given.labels, 0).long()[:, None], 1.0)
    d = coef_p * z.softmax(1) - coef_label * onehot
    if options.smoothing:
        d = d - coef_weight * (1.0 if given.class_weight is None else given.class_weight.to(dtype))
    if options.cap:
        d = d * (1 - (z / options.cap).square())
    return torch.where(valid[:, None], d * options.factor, 0.0)
