"""Per-row losses whose backward computes the logits again, tile by tile: cce always, flce where it cannot know the
gradient that will come back."""

from __future__ import annotations

import torch

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
    total = _sum_bytes(problem, workspace, marks)
    columns = _columns(problem, workspace, total)
    work = rows * columns * size  # a slice of dZ; further ones lie in dW
    if _is_cast(problem):  # the first slice is the widest
        work += max(columns, _in_room(problem, problem.vocab)) * problem.hidden * size
    if marks:
        lists, vectors = _filter_layout(problem, workspace, total)
        work = max(work, lists + vectors * (128 * size + 4))
    # the copy of the rows is gone when dX is rounded
    copied = packed if not problem.needs_hidden else 0
    return max(forward, problem.gradient_bytes + total + work + copied)


def _sum_bytes(problem: Problem, workspace: int, marks: bool) -> int:
    """What dX is summed in: float32, or 20 or 24 bits a number where that leaves too little of the workspace."""
    if not problem.needs_hidden:
        return 0
    numbers, half = problem.rows * problem.hidden, problem.dtype.itemsize == 2
    few = half and problem.bulk_copies and problem.hidden % 8 == 0 and numbers * 4 > workspace * 5 // 8
    if few:
        more = 6 if problem.dtype == torch.float16 else 0  # float16 has three bits more
        for digits in (4, 8):
            total = numbers * 2 + problem.rows * (-(-problem.hidden * digits // 128) * 16)
            if _additions(problem, workspace, total, marks) <= 4 ** (digits - 1) >> more:
                return total
    return numbers * 4


def _additions(problem: Problem, workspace: int, total: int, marks: bool) -> int:
    """How many launches add to a number of dX: slices, those in the room of dW are wide, or a sample and rounds."""
    rows, vocab, columns = problem.rows, problem.vocab, _columns(problem, workspace, total)
    first = slices = 0
    while first < vocab:
        first, slices = first + max(columns, _in_room(problem, vocab - first)), slices + 1
    if not marks:
        return slices
    blocks, (_, vectors) = -(-rows // 128), _filter_layout(problem, workspace, total)
    sample = -(-rows * vocab * problem.dtype.itemsize // (32 << 20) // 32)
    return max(slices, sample + -(-int(blocks * vocab / 12) // max(vectors - 128 * blocks, 128)))


def _columns(problem: Problem, workspace: int, total: int) -> int:
    """Columns of a slice beside dX's sums."""
    row = problem.rows + problem.hidden * _is_cast(problem)
    columns = max((workspace - total - (8 << 20)) // (row * problem.dtype.itemsize), 2048)
    return min(columns, _widest(problem))


def _in_room(problem: Problem, left: int) -> int:
    """Columns of the next slice if its dZ lies in the rows of dW behind it; so many are ``left``."""
    if not problem.needs_weight or problem.dense:
        return 0
    room = problem.hidden * ((problem.weight_dtype or problem.dtype).itemsize // problem.dtype.itemsize)
    return min((left * room - 128) // (problem.rows + room) // 256 * 256, _widest(problem))


def _is_cast(problem: Problem) -> bool:
    """Whether a slice's part of the head is cast."""
    return problem.weight_dtype not in (None, problem.dtype)


def _widest(problem: Problem) -> int:
    """The most columns of a slice: as many as take 64 MiB once they are cast."""
    if not _is_cast(problem):
        return problem.vocab
    return min(problem.vocab, max(256, (64 << 20) // (problem.hidden * problem.dtype.itemsize) // 256 * 256))


def _filter_layout(problem: Problem, workspace: int, total: int) -> tuple[int, int]:
    """(bytes of the marks and lists, vectors of a round)."""
    rows, vocab, blocks = problem.rows, problem.vocab, -(-problem.rows // 128)
    pairs = int(blocks * vocab / 12)
    lists = blocks * -(-vocab // 32) * 4 + -(-vocab // 128) * blocks * 40 + 4 * pairs + 8 * vocab
    left = workspace - total - lists - 64 * rows - (3 << 20)
    return lists, min(max(left // (128 * problem.dtype.itemsize + 4), 1 << 17, 256 * blocks), pairs + 256 * blocks)
