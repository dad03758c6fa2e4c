"""Fused linear cross-entropy: a chunk of rows at a time, gradients in the forward.

For each chunk: its logits by torch's product into a slab, in the type of the operands; their sums, eq. (2); over them
their gradient, eq. (5); of that dX, eq. (7), and a share of dW, eq. (8), which is summed in float32.
Peak beside the results: the slab, and with several chunks dW in float32.

Letters: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._rows import row_coefficients
from . import vector
from ._slabs import Results, float16_unit, new_slab, project, results, view_of
from .blocks import WEIGHT_ROWS, spans
from .vector import Sums, Transform


def flce_forward(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    row_scale: Tensor,  # (N,) what each row's loss is multiplied by in the total
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(total, dX, dW, db, nll, lse, entropy, predicted); gradients are those of the total, empty where not needed."""
    (rows, width), vocab, device = hidden.shape, weight.shape[0], hidden.device
    labels, transform, smoothing = labels.contiguous(), Transform(scale, softcap), label_smoothing > 0
    bias_row = None if bias is None else bias.contiguous()
    class_weight = None if class_weight is None else class_weight.contiguous()
    row_scale = torch.where(labels != ignore_index, row_scale.float(), 0.0)
    unit = _unit(row_scale, class_weight, labels, dtype)
    step = min(rows, max(1, chunk_rows))
    slab = new_slab(step, vocab, dtype, device)
    sums = Sums.zeros(rows, device, want_predicted)
    d_hidden = hidden.new_empty(rows if need_hidden else 0, width)
    d_weight = _WeightGradient(weight, dtype, need_weight, step < rows or unit is not None)
    d_bias = torch.zeros(vocab if need_bias else 0, dtype=torch.float32, device=device)
    parts: list[Results] = []
    for r0, r1 in spans(rows, step):
        h, y, z = hidden[r0:r1].to(dtype), labels[r0:r1], view_of(slab, r1 - r0, vocab)
        project(h, weight, z)
        vector.row_sums(
            z, y, bias_row, class_weight, None, sums.of(r0, r1), 0, ignore_index, transform, smoothing, want_entropy,
            want_predicted,
        )  # fmt: skip
        part = results(
            sums.of(r0, r1), y, bias_row, class_weight, ignore_index, transform, label_smoothing, z_loss, vocab,
            want_entropy,
        )  # fmt: skip
        parts.append(part)
        if not (need_hidden or need_weight or need_bias):
            continue
        coefficients: tuple[Tensor, ...] = row_coefficients(
            row_scale[r0:r1], part.lse, y, y != ignore_index, class_weight, label_smoothing, z_loss, vocab
        )
        if unit is not None:
            coefficients = tuple(c / unit for c in coefficients)
        vector.gradient(
            z, z, y, bias_row, class_weight, part.max_, part.log_sum, coefficients, 0, ignore_index, transform,
            smoothing,
        )  # fmt: skip
        if need_bias:
            for v0, v1 in spans(vocab, WEIGHT_ROWS):
                d_bias[v0:v1] += z[:, v0:v1].sum(0, dtype=torch.float32)
        if need_hidden:
            _project_back(z, weight, d_hidden[r0:r1], unit)
        if need_weight:
            d_weight.add(z, h, r0 == 0)
    del slab, z
    if unit is not None:
        d_bias = d_bias * unit
    loss, nll, lse, _, _, entropy, predicted = (torch.cat(column) for column in zip(*parts, strict=True))
    return (
        (loss * row_scale).sum(),
        d_hidden,
        d_weight.done(unit),
        d_bias if bias is None else d_bias.to(bias.dtype),
        nll,
        lse,
        entropy,
        predicted,
    )


def _unit(row_scale: Tensor, class_weight: Tensor | None, labels: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`float16_unit` of all rows, before the first chunk is known."""
    if dtype != torch.float16:
        return None
    share = row_scale.abs()
    if class_weight is not None:
        share = share * class_weight.float()[labels.long().clamp(0, class_weight.shape[0] - 1)]
    return float16_unit((share,), dtype)


def _project_back(dz: Tensor, weight: Tensor, out: Tensor, unit: Tensor | None) -> None:
    """``out = dz @ weight``, in one product where the types allow, else summed in float32."""
    if weight.dtype == dz.dtype == out.dtype and unit is None:
        torch.mm(dz, weight, out=out)
        return
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    pieces = spans(weight.shape[0], weight.shape[0] if weight.dtype == dz.dtype else WEIGHT_ROWS)
    for v0, v1 in pieces:
        total += torch.mm(dz[:, v0:v1], weight[v0:v1].to(dz.dtype))
    out.copy_(total if unit is None else total * unit)


class _WeightGradient:
    """dW over several chunks: in float32, a few rows of it at a time; the only chunk writes it at once."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, needed: bool, summed: bool) -> None:
        self.weight, self.needed = weight, needed
        self.direct = not summed and weight.dtype == dtype
        kind = weight.dtype if self.direct or not needed else torch.float32
        self.total = torch.empty(weight.shape if needed else (0,), dtype=kind, device=weight.device)

    def add(self, dz: Tensor, hidden: Tensor, first: bool) -> None:
        if self.direct:
            torch.mm(dz.T, hidden, out=self.total)
        elif dz.dtype == torch.float32:
            self.total.addmm_(dz.T, hidden, beta=0 if first else 1)
        else:
            for v0, v1 in spans(dz.shape[1], WEIGHT_ROWS):
                if first:
                    self.total[v0:v1] = torch.mm(dz[:, v0:v1].T, hidden)
                else:
                    self.total[v0:v1] += torch.mm(dz[:, v0:v1].T, hidden)

    def done(self, unit: Tensor | None) -> Tensor:
        if not self.needed:
            return self.weight.new_empty(0)
        return (self.total if unit is None else self.total.mul_(unit)).to(self.weight.dtype)


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """``saved * factor`` in the type of ``saved``, rounded once."""
    saved = saved.contiguous()
    out = torch.empty_like(saved)
    _scale(saved, factor, out)
    return out


def scale_(saved: Tensor, factor: Tensor) -> None:
    """``saved *= factor``, rounded once."""
    assert saved.is_contiguous()
    _scale(saved, factor, saved)


def _scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    if source.numel():
        vector.scale(source, factor.reshape(1).float(), out)
