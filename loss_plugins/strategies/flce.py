"""Fused linear cross-entropy: gradients computed in the forward, a chunk of rows at a time; the backward only scales.

One third fewer products than recomputing, for the price of a chunk of logits. With ``reduction="none"`` the gradient
that comes back is not known in the forward, so there the logits are computed again in the backward, by tiles.
Peak memory: one chunk of logits in float32 (on a GPU a half copy too), dW in float32 and in its own type, dX. Triton's
one pass (bfloat16, Hopper or later) holds a chunk in bfloat16 only, and beside dW, where there are several chunks, four
bits of each of its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..device import DeviceProfile
from ..kernels import ops
from ..kernels.torch import COLUMNS
from ._base import Problem, RowLoss, Rows
from ._options import (
    MIB,
    backend_for,
    cannot_run,
    check_kernels,
    check_workspace,
    on_ascend,
    on_triton,
    workspace_bytes,
)
from ._recompute import recomputed, triton_bytes

MOST_OF_FOUR = 64  # as in `kernels/triton/sums.py`


@dataclass(frozen=True)
class FlceOptions:
    workspace_mb: float | None = field(
        default=None,
        metadata={
            "help": "Mebibytes that a chunk's logits may take. Default in bfloat16 on a Hopper GPU or later: as many "
            "as leave 1024 for all beside the gradients; elsewhere an eighth of all logits, 16 to 1024."
        },
    )

    kernels: str = field(
        default="auto", metadata={"help": "auto, torch, triton or ascend (triton-ascend's, on an NPU)."}
    )

    def __post_init__(self) -> None:
        check_workspace(self.workspace_mb)
        check_kernels(self.kernels)


class Flce:
    name = "flce"
    summary = "gradients in the forward, chunk by chunk; fewest operations"
    Options = FlceOptions

    def check(self, problem: Problem, profile: DeviceProfile, options: FlceOptions) -> str | None:
        if problem.module:
            return "the head is a module that must be called, and flce needs its weight"
        return cannot_run(options.kernels, problem, profile)

    def chunk_rows(self, problem: Problem, options: FlceOptions, backend: str = "torch") -> int:
        if backend == "triton" and options.workspace_mb is None and _in_one_pass(problem):
            return _rows_beside(problem, 1024 * MIB)
        size = problem.accumulator.itemsize if backend == "torch" else problem.dtype.itemsize
        return max(1, min(problem.rows, self.chunk_bytes(problem, options) // (problem.vocab * size)))

    def chunk_bytes(self, problem: Problem, options: FlceOptions) -> int:
        return workspace_bytes(options.workspace_mb, 1024, problem.logits_bytes)

    def peak_bytes(self, problem: Problem, options: FlceOptions) -> int:
        if on_triton(options.kernels, problem):
            return self._triton_bytes(problem, options)
        if on_ascend(options.kernels, problem):
            return self._ascend_bytes(problem, options)
        size = problem.accumulator.itemsize
        rows, columns = self.chunk_rows(problem, options), min(problem.vocab, COLUMNS)
        chunk = rows * problem.vocab * size + rows * columns * size
        if problem.dtype.itemsize < size:
            chunk += columns * problem.hidden * size
            chunk += chunk * problem.dtype.itemsize // size
        peak = chunk + problem.gradient_bytes
        weight_size = (problem.weight_dtype or problem.dtype).itemsize
        if problem.needs_weight and weight_size < size:
            peak += problem.vocab * problem.hidden * size
        if problem.dtype == torch.float16 and problem.needs_hidden:
            peak += problem.rows * problem.hidden * 6  # a float32 copy of the rows, and dX in float32
        return peak

    def _triton_bytes(self, problem: Problem, options: FlceOptions) -> int:
        """`peak_bytes` of `kernels/triton/flce.py`: one pass, or the two of cce with a larger workspace."""
        rows, chunk_rows = problem.rows, self.chunk_rows(problem, options, "triton")
        if not (_in_one_pass(problem) and chunk_rows >= 128):
            # float16's rows are copied to float32, and so is their dX
            lifted = rows * problem.hidden * 8 if problem.needs_hidden and problem.dtype == torch.float16 else 0
            return triton_bytes(problem, chunk_rows * problem.vocab * problem.dtype.itemsize) + lifted
        blocks = -(-rows // 128)
        chunks = 1 if chunk_rows >= rows else -(-blocks // (chunk_rows // 128))
        step = -(-blocks // chunks) * 128
        return problem.gradient_bytes + step * _row_bytes(problem) + _low_bytes(problem, chunks)

    def _ascend_bytes(self, problem: Problem, options: FlceOptions) -> int:
        """`peak_bytes` of `kernels/ascend/flce.py`."""
        from ..kernels.ascend.memory import flce_bytes

        weight_size = (problem.weight_dtype or problem.dtype).itemsize
        peak = flce_bytes(
            problem.rows, problem.hidden, problem.vocab, problem.dtype.itemsize, weight_size,
            self.chunk_rows(problem, options, "ascend"), problem.needs_hidden, problem.needs_weight,
        )  # fmt: skip
        lifted = problem.rows * problem.hidden * 8 if problem.needs_hidden and problem.dtype == torch.float16 else 0
        return peak + lifted

    def kernels(self, profile: DeviceProfile, options: FlceOptions) -> str:
        return backend_for(options.kernels, profile)

    def __call__(self, rows: Rows, options: FlceOptions, profile: DeviceProfile) -> RowLoss:
        problem = rows.problem().on(profile)
        assert rows.weight is not None
        backend = backend_for(options.kernels, profile, rows.dtype)
        # gradients made in the forward know nothing of the weights that the rows will have been given
        if not rows.reduce or (torch.is_grad_enabled() and rows.row_scale.requires_grad):
            tile_bytes = self.chunk_bytes(problem, options)
            return recomputed(rows, tile_bytes, forward_kernels=backend, backward_kernels=backend)
        # float16 has no room below 6e-8, and what is rounded here has not met a loss scaler's factor yet: dX and db are
        # kept in float32, and a half head's dW is computed for a loss that is larger
        hidden = rows.hidden.float() if problem.needs_hidden and rows.hidden.dtype == torch.float16 else rows.hidden
        bias = rows.bias.float() if rows.bias is not None and rows.bias.dtype == torch.float16 else rows.bias
        factor = _lift(rows.row_scale) if rows.weight.dtype == torch.float16 else None
        row_scale = rows.row_scale if factor is None else rows.row_scale * factor
        total, _, _, _, nll, lse, entropy, predicted = ops.flce(
            hidden, rows.weight, bias, rows.labels, row_scale, rows.class_weight, rows.ignore_index,
            rows.scale, rows.softcap, rows.label_smoothing, rows.z_loss, rows.dtype, rows.want_entropy,
            rows.want_predicted, problem.needs_hidden,
            torch.is_grad_enabled() and rows.weight.requires_grad,
            torch.is_grad_enabled() and rows.bias is not None and rows.bias.requires_grad,
            self.chunk_rows(problem, options, backend), backend,
        )  # fmt: skip
        return RowLoss(total if factor is None else total / factor, nll, lse, entropy, predicted)


def _in_one_pass(problem: Problem) -> bool:
    """Whether Triton's kernels make the gradients of a chunk from logits that are computed once."""
    head = problem.weight_dtype or problem.dtype
    return problem.bulk_copies and problem.dtype == head == torch.bfloat16 and problem.differentiable


def _row_bytes(problem: Problem) -> int:
    """What a row of Triton's chunk takes: its logits, a copy of it, and beside that its product for dX, in float32, or
    its scaled copy for dW."""
    copies = 2 + max(4 * problem.needs_hidden, 2 * problem.needs_weight)
    return 2 * problem.vocab + copies * problem.hidden


def _low_bytes(problem: Problem, chunks: int) -> int:
    """What the sum of dW takes beside the result, as `kernels/triton/flce_gradients.py` keeps it."""
    bits = 0 if chunks == 1 else 4 if chunks <= MOST_OF_FOUR else 8
    return problem.needs_weight * problem.vocab * problem.hidden * bits // 8


def _rows_beside(problem: Problem, most: int) -> int:
    """The rows of a chunk, if it and the sum of dW may take ``most`` bytes; at least 1024, since few rows make slow
    products."""
    rows, row = problem.rows, _row_bytes(problem)
    if -(-rows // 128) * 128 * row <= most:
        return rows

    def step(chunks: int) -> int:
        return min(max((most - _low_bytes(problem, chunks)) // row // 128 * 128, 1024), rows)

    few = step(2)
    return few if -(-rows // few) <= MOST_OF_FOUR else step(MOST_OF_FOUR + 1)


def _lift(row_scale: Tensor) -> Tensor:
    """What makes the rows' shares sum to 64: a float16 dW then overflows where a token's hidden states exceed 1000."""
    total = row_scale.abs().sum()
    return torch.where(total > 0, 64 / total, 1.0)


STRATEGY = Flce()
