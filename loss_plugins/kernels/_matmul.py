"""The product that all backends share: half operands, float32 result."""

from __future__ import annotations

import torch
from torch import Tensor

_MM_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()


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
