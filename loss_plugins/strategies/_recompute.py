"""Per-row losses whose backward computes the logits again, tile by tile: cce always, flce where it cannot know the
gradient that will come back."""

from __future__ import annotations

from ..kernels import ops
from ._base import Problem, RowLoss, Rows


def recomputed(
    rows: Rows,
    tile_bytes: int,
    filter_hidden: float = 0.0,
    filter_weight: float = 0.0,
    forward_kernels: str = "torch",
    backward_kernels: str = "torch",
    filter_bound: float = 1.0,
) -> RowLoss:
    """The row losses of ``rows``; the filters leave small probabilities out of dX and of dW (0: exact), no more than
    ``filter_bound`` of a row where the kernels can tell."""
    assert rows.weight is not None
    loss, nll, lse, entropy, predicted, dropped, _ = ops.linear_ce(
        rows.hidden, rows.weight, rows.bias, rows.labels, rows.class_weight, rows.ignore_index, rows.scale,
        rows.softcap, rows.label_smoothing, rows.z_loss, rows.dtype, rows.want_entropy,
        rows.want_predicted, filter_hidden, filter_weight, "dropped" in rows.fields,
        tile_bytes, forward_kernels, backward_kernels, filter_bound,
    )  # fmt: skip
    loss = loss * rows.row_scale
    return RowLoss(loss.sum() if rows.reduce else loss, nll, lse, entropy, predicted, dropped)


def triton_bytes(problem: Problem, workspace: int, marks: bool = False) -> int:
    """``peak_bytes`` of this way by Triton's kernels, as `kernels/triton/backward.py` divides the workspace; ``marks``:
    with a filter."""
    rows, size, blocks = problem.rows, problem.dtype.itemsize, -(-problem.rows // 128)
    packed = rows * problem.hidden * size  # a copy of the rows, those that count first
    # six numbers a program and row, and a byte for each column and block until bits are made of them; the more programs
    # a block of rows has, the fewer rows are read at a time, which should stay in the device's cache
    tall = 256 if size == 2 and rows >= 256 else 128
    strips = -(-132 * tall * problem.hidden * size // (25 << 20))
    forward = packed + max(-(-rows // tall) * strips, 132) * tall * 24 + blocks * problem.vocab * marks
    if not problem.differentiable:
        return forward
    total = rows * problem.hidden * 4 * problem.needs_hidden  # dX in float32
    columns = min(max((workspace - total - (8 << 20)) // (rows * size), 2048), problem.vocab)
    work = rows * columns * size  # a slice of dZ; further ones lie in dW
    if problem.weight_dtype not in (None, problem.dtype):
        work += columns * problem.hidden * size  # its part of the head, cast
    if marks:
        lists = blocks * problem.vocab
        least = max(1 << 17, 256 * blocks)
        vectors = max((workspace - total - lists) // (128 * size), least)
        work = max(work, lists + min(vectors, lists // 12 + 256 * blocks) * 128 * size)
    # the copy of the rows is gone when dX is rounded
    copied = packed if not problem.needs_hidden else 0
    return max(forward, problem.gradient_bytes + total + work + copied)
