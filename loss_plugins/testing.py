"""What this package's own tests measure with, for anyone who adds a strategy or a backend."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor


def assert_within_reference_error(
    name: str, actual: Tensor, oracle: Tensor, reference: Tensor, rounded: Tensor | None = None
) -> None:
    """Fail unless ``actual`` is as near to the float64 ``oracle`` as plain torch in the same type is.

    The bound comes from data, not from taste: ``|actual - oracle| <= 2 * (|reference - oracle| + eps * |rounded|)`` in
    the 2-norm, with ``eps`` of the type of ``actual``.

    Args:
        name: What is compared, for the message.
        actual: The result under test.
        oracle: The same in float64, from the formula.
        reference: The same from plain torch in the type under test.
        rounded: Numbers whose rounding the result inherits, the oracle itself by default. A small entropy, for example,
            comes from large logits.

    Raises:
        AssertionError: with both errors and the bound.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    size = (oracle if rounded is None else rounded).double().norm().item()
    error = (actual.double() - oracle).norm().item()
    bound = 2 * ((reference.double() - oracle).norm().item() + torch.finfo(actual.dtype).eps * size)
    assert error <= bound, f"{name}: error {error:.3e} exceeds {bound:.3e} (norm {size:.3e})"


def relative_error(actual: Tensor, oracle: Tensor) -> float:
    """``|actual - oracle| / |oracle|`` as 2-norms; the plain norm of the difference where the oracle is 0."""
    oracle = oracle.double()
    norm = oracle.norm().item()
    return (actual.double() - oracle).norm().item() / (norm or 1.0)


def leave_group() -> NoReturn:
    """End this process of a group with exit code 0, once all processes of the group have come as far."""
    dist.barrier()  # gloo aborts a process whose peer has gone
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # on a busy machine torch's own threads sometimes abort an interpreter that ends at the same time
