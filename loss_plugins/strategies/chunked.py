"""Chunks of rows under torch's non-reentrant checkpoint: a chunk's logits live while it is computed, twice.

Works for any head, also one that is only a module to be called. For a weight in a half type the products keep their
float32 accumulators, and dW is summed over the chunks in float32 and rounded once.
Peak memory: one chunk's naive peak; with a half weight dW twice in float32 (the sum and one chunk's share).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ..device import DeviceProfile
from ..kernels.torch import matmul, project_back
from ..kernels.torch import project as product
from ._base import Problem, RowLoss, Rows
from ._logits import loss_from_logits, project, transform
from ._options import check_workspace, workspace_bytes


@dataclass(frozen=True)
class ChunkedOptions:
    workspace_mb: float | None = field(
        default=None,
        metadata={"help": "Mebibytes that a chunk's logits may take. Default: an eighth of all logits, 16 to 1024."},
    )

    def __post_init__(self) -> None:
        check_workspace(self.workspace_mb)


class _HalfWeight(torch.autograd.Function):
    """A stand-in for a half weight whose gradient is summed in float32: shape (V, H), one element of storage."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros(1, dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


def _no_autocast(tensor: Tensor) -> Any:
    """Inside, float32 products of half operands stay float32. Meta tensors know no autocast."""
    kind = tensor.device.type
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


class _HalfLinear(torch.autograd.Function):
    """``hidden @ weight.T`` with float32 logits and a float32 gradient for the stand-in."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stand_in: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        with _no_autocast(hidden):
            return product(hidden, weight, hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        half = grad.to(hidden.dtype) if grad.is_cuda else grad
        with _no_autocast(grad):
            d_hidden = project_back(half, weight).to(hidden.dtype) if ctx.needs_input_grad[0] else None
            d_weight = matmul(half.T, hidden.to(half.dtype)) if ctx.needs_input_grad[1] else None
        return d_hidden, d_weight, None


class Chunked:
    name = "chunked"
    summary = "chunks of tokens under torch checkpoint, logits computed twice; any head"
    Options = ChunkedOptions

    def check(self, problem: Problem, profile: DeviceProfile, options: ChunkedOptions) -> str | None:
        return None

    def chunk_rows(self, problem: Problem, options: ChunkedOptions) -> int:
        budget = workspace_bytes(options.workspace_mb, 1024, problem.logits_bytes)
        return max(1, min(problem.rows, budget // (problem.vocab * problem.accumulator.itemsize)))

    def peak_bytes(self, problem: Problem, options: ChunkedOptions) -> int:
        size = problem.accumulator.itemsize
        entries = self.chunk_rows(problem, options) * problem.vocab
        peak = entries * size * (3 if problem.differentiable else 2) + problem.gradient_bytes
        if problem.needs_weight:
            peak += problem.vocab * problem.hidden * size * (2 if problem.dtype.itemsize < size else 1)
        return peak

    def kernels(self, profile: DeviceProfile, options: ChunkedOptions) -> str:
        return "torch"

    def __call__(self, rows: Rows, options: ChunkedOptions, profile: DeviceProfile) -> RowLoss:
        problem = rows.problem()
        # len(range()) makes torch.compile take a plain number here: a checkpointed region cannot take a symbol
        step = len(range(self.chunk_rows(problem, options)))
        logits_of = _half_projection(rows) if rows.project is None and rows.dtype.itemsize < 4 else project

        written = _versions(rows) if problem.differentiable else None

        def chunk(hidden: Tensor, labels: Tensor, row_scale: Tensor) -> tuple[Tensor, ...]:
            now = None if written is None else _versions(rows)
            if now is not None and now != written:
                raise RuntimeError(
                    "The hidden states, weight or bias of a chunked loss were written in place between its forward and "
                    "its backward, which computes the chunks again. Run the backward first, or write out of place."
                )
            loss, *fields = loss_from_logits(rows, logits_of(rows, hidden), labels, row_scale)
            return (loss.sum() if rows.reduce else loss, *fields)

        parts = []
        for start in range(0, problem.rows, step):
            piece = [t[start : start + step] for t in (rows.hidden, rows.labels, rows.row_scale)]
            if problem.differentiable:
                # a plain head draws no random numbers; a module's may (LoRA dropout), so its state is kept
                parts.append(
                    checkpoint(chunk, *piece, use_reentrant=False, preserve_rng_state=rows.project is not None)
                )
            else:
                parts.append(chunk(*piece))
        losses, *fields = zip(*parts, strict=True)
        loss = torch.stack(losses).sum() if rows.reduce else torch.cat(losses)
        return RowLoss(loss, *(torch.cat(f) for f in fields))


def _versions(rows: Rows) -> tuple[int, ...] | None:
    """How often what a chunk reads has been written in place; None in what is compiled, of which a part may run eagerly
    all the same. Autograd checks what it saves; a chunk saves nothing."""
    if torch.compiler.is_compiling():
        return None
    read = (rows.hidden, rows.weight, rows.bias)
    return tuple(tensor._version for tensor in read if tensor is not None and not tensor.is_inference())


def _half_projection(rows: Rows) -> Any:
    """`project` for half weights. The stand-in is made once, outside the chunks, so that their dW meet in float32."""
    assert rows.weight is not None
    weight = rows.weight.to(rows.dtype) if rows.weight.dtype != rows.dtype else rows.weight
    stand_in = _HalfWeight.apply(rows.weight)
    bias = None if rows.bias is None else rows.bias.float()

    def logits_of(rows: Rows, hidden: Tensor) -> Tensor:
        logits = _HalfLinear.apply(hidden.to(rows.dtype), stand_in, weight.detach())
        if bias is not None:
            logits = logits + bias
        return transform(rows, logits)

    return logits_of


STRATEGY = Chunked()
