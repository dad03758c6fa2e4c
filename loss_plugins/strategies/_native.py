"""Losses by torch_npu's own operators, for strategies that were asked for them: what they cannot do is said here."""

from __future__ import annotations

import torch

from ..device import DeviceProfile
from ..errors import UnsupportedError
from ..kernels import native
from ._base import Problem, RowLoss, Rows
from ._logits import loss_from_logits, project

_ASKED = "kernels='native' was asked for, but torch_npu's operator"


def cannot_run(problem: Problem, profile: DeviceProfile) -> str | None:
    """Why the operator without logits cannot compute, or None."""
    if problem.dtype.itemsize != 2:
        dtype = str(problem.dtype).removeprefix("torch.")
        return f"{_ASKED} takes bfloat16 and float16 only, and the products are in {dtype}"
    if problem.vocab < native.LEAST_VOCAB:
        return f"{_ASKED} needs a vocabulary of {native.LEAST_VOCAB} or more, and this has {problem.vocab}"
    return _missing(native.LINEAR, profile)


def cannot_run_on_logits(problem: Problem, profile: DeviceProfile) -> str | None:
    """Why the operator that takes logits cannot compute, or None."""
    if problem.dtype == torch.float64:
        return f"{_ASKED} has no float64"
    if problem.rows > native.MOST_ROWS:
        return f"{_ASKED} takes {native.MOST_ROWS} tokens at most, and this loss has {problem.rows}"
    return _missing(native.CROSS_ENTROPY, profile)


def _missing(operators: tuple[str, ...], profile: DeviceProfile) -> str | None:
    obstacle = profile.native_obstacle(*operators)
    if obstacle is None:
        return None
    return f"kernels='native' was asked for, but {obstacle}; `loss-plugins doctor` says which releases have them"


def peak_bytes(problem: Problem) -> int:
    """Of the operator without logits. Both gradients are made, needed or not; inputs of another type are copied."""
    if not problem.differentiable:
        return 0
    weight = problem.vocab * problem.hidden * 2
    both = problem.rows * problem.hidden * 2 + weight
    is_copied = problem.weight_dtype not in (None, problem.dtype)
    return both + (weight + problem.gradient_bytes if is_copied else 0)


def row_loss(rows: Rows) -> RowLoss:
    """The loss without logits.

    Raises:
        UnsupportedError: something is asked for that the operator does not compute.
    """
    assert rows.weight is not None
    asked = {
        "a bias": rows.bias is not None,
        "logit_scale": rows.scale != 1,
        "softcap": rows.softcap != 0,
        "label_smoothing": rows.label_smoothing != 0,
        "z_loss": rows.z_loss != 0,
        "the statistic entropy": rows.want_entropy,
        "the statistic accuracy": rows.want_predicted,
        "a head in parts": rows.shard,
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise UnsupportedError(
            f"kernels='native' was asked for with {' and '.join(refused)}, and torch_npu's operator computes nothing "
            "but the plain loss of a weight. Use kernels: auto, which takes them all, or leave them out."
        )
    valid = rows.labels != rows.ignore_index
    nll, lse = native.linear_nll(rows.hidden.to(rows.dtype), rows.weight.to(rows.dtype), rows.labels, valid)
    loss = nll
    if rows.class_weight is not None:
        loss = loss * rows.class_weight.to(loss.dtype)[torch.where(valid, rows.labels, 0)]
    loss = loss * rows.row_scale
    return RowLoss(loss.sum() if rows.reduce else loss, nll, lse)


def row_loss_of_logits(rows: Rows) -> tuple[torch.Tensor, ...]:
    """The loss of all logits, as `loss_from_logits` returns it.

    Raises:
        UnsupportedError: label smoothing is asked for.
    """
    if rows.label_smoothing:
        raise UnsupportedError(
            f"kernels='native' was asked for with label_smoothing={rows.label_smoothing:g}, which torch_npu's operator "
            "does not take for losses of single tokens. Use kernels: torch, or no smoothing."
        )
    return loss_from_logits(rows, project(rows, rows.hidden), rows.labels, rows.row_scale, native.row_nll)
