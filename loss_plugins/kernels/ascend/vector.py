"""The launches of the vector kernels: what host code calls, with shapes; each has one meaning in plain torch.

The kernels are imported on the first launch, so that this folder can be read, and its memory computed, where there is
no triton-ascend.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import GROUP, SCALE_BLOCK, forward_block, gradient_block, grid_for
from .soc import soc_at


class Sums(NamedTuple):
    """The running numbers of each row."""

    numbers: Tensor  # (5, N) float32: maximum, sum, label logit as given, weighted sum, moment
    best: Tensor  # (N,) int32, or (0,)

    @classmethod
    def zeros(cls, rows: int, device: torch.device, want_predicted: bool) -> Sums:
        """Zeros, which is what rows without a label keep."""
        best = torch.zeros(rows if want_predicted else 0, dtype=torch.int32, device=device)
        return cls(torch.zeros(5, rows, dtype=torch.float32, device=device), best)

    def of(self, r0: int, r1: int) -> Sums:
        """A view of some rows."""
        return Sums(self.numbers[:, r0:r1], self.best[r0:r1])


class Transform(NamedTuple):
    """Eq. (1) after the product."""

    scale: float
    softcap: float  # 0: none


def row_sums(
    logits: Tensor,  # (n, C)
    labels: Tensor,  # (n,)
    bias: Tensor | None,  # (C,)
    class_weight: Tensor | None,  # (C,)
    before: Sums | None,  # of the columns before these
    after: Sums,  # written, but not the rows without a label
    first_column: int,
    ignore_index: int,
    transform: Transform,
    smoothing: bool,
    want_entropy: bool,
    want_predicted: bool,
    tile: tuple[Tensor, Tensor] | None = None,  # (n,) maximum and sum of these columns alone, written
) -> None:
    """Eq. (2): merge a tile of logits into its rows' sums. A row without a label is not read."""
    (rows, columns), soc = logits.shape, soc_at(logits.device)
    assert logits.stride(1) == 1 and after.numbers.stride(1) == 1
    unused = after.numbers
    old = after if before is None else before
    assert before is None or before.numbers.stride(0) == after.numbers.stride(0)
    has_class_weight = smoothing and class_weight is not None
    rewritten = transform.scale != 1.0 or transform.softcap != 0.0 or smoothing
    block = forward_block(columns, rewritten, bias is not None, want_entropy, want_predicted)
    with on(logits.device):
        kernels().row_sums_kernel[grid_for(rows, soc, GROUP)](
            logits, labels, unused if bias is None else bias, class_weight if has_class_weight else unused,
            old.numbers, old.best, after.numbers, after.best, *((unused, unused) if tile is None else tile), rows,
            columns, first_column, after.numbers.stride(0), logits.stride(0), ignore_index, float(transform.scale),
            float(transform.softcap), GROUP=GROUP, BLOCK=block, FIRST=before is None, HAS_BIAS=bias is not None,
            HAS_SCALE=transform.scale != 1.0, HAS_SOFTCAP=transform.softcap != 0.0, HAS_SMOOTHING=smoothing,
            HAS_CLASS_WEIGHT=has_class_weight, WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted,
            WANT_TILE=tile is not None,
        )  # fmt: skip


def gradient(
    logits: Tensor,  # (n, C)
    out: Tensor,  # (n, C) written, may be the logits
    labels: Tensor,  # (n,)
    bias: Tensor | None,  # (C,)
    class_weight: Tensor | None,  # (C,)
    max_: Tensor,  # (n,) float32, or the log-sum-exp
    log_sum: Tensor | None,  # (n,) float32; None where that is in ``max_``
    coefficients: tuple[Tensor, ...],  # three, (n,) float32 each
    first_column: int,
    ignore_index: int,
    transform: Transform,
    smoothing: bool,
) -> None:
    """Eq. (5) and (6) of a tile of logits; zeros where a row has no label."""
    (rows, columns), soc = logits.shape, soc_at(logits.device)
    assert logits.stride(1) == out.stride(1) == 1
    has_class_weight = smoothing and class_weight is not None
    block = gradient_block(columns)
    with on(logits.device):
        kernels().gradient_kernel[grid_for(rows, soc)](
            logits, out, labels, max_ if bias is None else bias, class_weight if has_class_weight else max_, max_,
            max_ if log_sum is None else log_sum, *(c.contiguous() for c in coefficients), rows, columns, first_column,
            logits.stride(0), out.stride(0), ignore_index, float(transform.scale), float(transform.softcap),
            BLOCK=block, HAS_LOG_SUM=log_sum is not None, HAS_BIAS=bias is not None, HAS_SCALE=transform.scale != 1.0,
            HAS_SOFTCAP=transform.softcap != 0.0, HAS_SMOOTHING=smoothing, HAS_CLASS_WEIGHT=has_class_weight,
        )  # fmt: skip


def scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    """``out = source * factor``, rounded once; both contiguous, the factor one float32 number."""
    soc, size = soc_at(source.device), source.numel()
    with on(source.device):
        kernels().scale_kernel[grid_for(size, soc, SCALE_BLOCK)](source, factor, out, size, BLOCK=SCALE_BLOCK)


@functools.cache
def kernels() -> ModuleType:
    """The compiled half of this folder."""
    from . import _kernels

    return _kernels


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.npu.device(device) if device.type == "npu" else nullcontext()  # type: ignore[attr-defined]
