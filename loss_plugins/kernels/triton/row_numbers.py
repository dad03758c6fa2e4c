"""What is computed once a row, each in one launch: these take microseconds, and the host's time for a dozen small
operators before the first product is time in which a device has nothing to do. The formulas are those of `_rows.py`.

Letters: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import cdiv, on, reused, row_tiles


class Packed(NamedTuple):
    """The rows that carry a label first, all on the device, so that the host never waits to learn how many."""

    rows: Tensor  # (N, H) in the operands' type, zeros behind the rows that count: what lies there must be no NaN
    labels: Tensor  # (N,) int64, in that order
    order: Tensor  # (N,) int64, which row stands there
    place: Tensor  # (N,) int64, the inverse
    count: Tensor  # () int64


@reused
@triton.jit(
    do_not_specialize=["N", "V", "ignore_index"], do_not_specialize_on_alignment=["labels", "classes", "before"]
)
def _pack_kernel(
    source,  # (N, H)
    labels,  # (N,) int64
    before,  # (N,) int64, how many rows count up to this one
    count,  # () int64
    grad,  # (N,) each
    grad_nll,
    grad_lse,
    out,  # (N, H)
    out_labels,  # (N,) int64
    order,  # (N,) int64
    place,  # (N,) int64
    classes,  # (ceil(V / 32),) int32, zeros: bit v % 32 of word v // 32 says whether v is a label
    largest,  # () int32, zero: bits of the largest sum of a row's |grad|
    N,
    V,
    ignore_index,
    source_row,
    source_col,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CLASSES: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_NLL: tl.constexpr,
    GRAD_LSE: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_n = o_n < N
    b_label = tl.load(labels + o_n, mask=m_n, other=0)
    m_count = (b_label != ignore_index) & m_n
    b_before = tl.load(before + o_n, mask=m_n, other=0)
    b_place = tl.where(m_count, b_before - 1, tl.load(count) + o_n - b_before)
    p_from = source + o_n.to(tl.int64)[:, None] * source_row + o_h[None, :].to(tl.int64) * source_col
    b_rows = tl.load(p_from, mask=m_count[:, None] & (o_h < H)[None, :], other=0.0)
    p_out = out + b_place[:, None] * H + o_h[None, :]
    tl.store(p_out, b_rows.to(out.dtype.element_ty), mask=m_n[:, None] & (o_h < H)[None, :])
    if tl.program_id(1) == 0:
        tl.store(out_labels + b_place, b_label, mask=m_n)
        tl.store(order + b_place, o_n, mask=m_n)
        tl.store(place + o_n, b_place, mask=m_n)
        if CLASSES:
            m_class = m_n & (b_label >= 0) & (b_label < V)
            b_class = tl.where(m_class, b_label, 0).to(tl.int32)
            # rows may share a word, and bits come out the same in any order, as does the largest number
            tl.atomic_or(classes + b_class // 32, 1 << (b_class % 32), mask=m_class)
        if GRAD:
            b_size = tl.abs(tl.load(grad + o_n, mask=m_count, other=0.0).to(tl.float32))
            if GRAD_NLL:
                b_size += tl.abs(tl.load(grad_nll + o_n, mask=m_count, other=0.0).to(tl.float32))
            if GRAD_LSE:
                b_size += tl.abs(tl.load(grad_lse + o_n, mask=m_count, other=0.0).to(tl.float32))
            # bits of numbers that are not negative compare as these do; NaN's, which may have a sign, are the largest
            tl.atomic_max(largest, tl.max(b_size.to(tl.int32, bitcast=True) & 0x7FFFFFFF))


def pack(
    hidden: Tensor,  # (N, H)
    labels: Tensor,  # (N,) int64
    ignore_index: int,
    dtype: torch.dtype,
    vocab: int,
    classes: Tensor | None = None,  # (ceil(V / 32),) int32, zeros, in which the bits of all labels are set
    largest: Tensor | None = None,  # () int32, zero, for the bits of the largest sum of a row's |gradients|
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),  # (N,) of loss, nll, lse
) -> Packed:
    """The rows in the operands' type, those that count first."""
    (rows, width), device = hidden.shape, hidden.device
    # so that the last entry, the count, begins on 16 bytes: an odd number of rows would compile every kernel again
    shift = (rows - 1) % 2
    before = torch.empty(rows + 1, dtype=torch.int64, device=device)[shift : shift + rows]
    torch.cumsum(labels != ignore_index, 0, out=before)
    count = before[-1]
    out = torch.empty(rows, width, dtype=dtype, device=device)
    packed_labels, order, place = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
    grid, tile = row_tiles(rows, width)
    with on(device):
        _pack_kernel[grid](
            hidden, labels.contiguous(), before, count, *(_given(g, count) for g in gradients), out, packed_labels,
            order, place, _given(classes, count), _given(largest, count), rows, vocab, ignore_index, hidden.stride(0),
            hidden.stride(1), H=width, CLASSES=classes is not None,
            GRAD=largest is not None, GRAD_NLL=gradients[1] is not None, GRAD_LSE=gradients[2] is not None, **tile,
        )  # fmt: skip
    return Packed(out, packed_labels, order, place, count)


def _given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor that a kernel reads one entry after the other, or one that it does not touch."""
    return other if tensor is None else tensor.contiguous()


@reused
@triton.jit(do_not_specialize=["N", "S", "ignore_index"], do_not_specialize_on_alignment=["labels"])
def _losses_kernel(
    sums,  # (6, S) float32: maximum, sum, -, weighted sum, moment, -, of the rows that count first
    target,  # (N,) float32, likewise
    best,  # (N,) int32, likewise
    lost,  # (N,) float32, likewise
    labels,  # (N,) int64
    place,  # (N,) int64
    class_weight,  # (V,)
    total_weight,  # () float32, or V
    loss,  # (N,) float32 each
    nll,
    lse,
    entropy,
    predicted,  # (N,) int64
    dropped,  # (N,) float32
    N,
    S,
    ignore_index,
    own,  # 1 - label_smoothing
    spread,  # label_smoothing / V
    z_loss,
    BLOCK: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_BEST: tl.constexpr,
    WANT_DROPPED: tl.constexpr,
):
    """Eq. (2) and (3) of each row where it stood; zero where it is ignored."""
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_label = tl.load(labels + o_n, mask=m_n, other=0)
    m_count = m_n & (b_label != ignore_index)
    o_place = tl.load(place + o_n, mask=m_n, other=0)
    b_max = tl.load(sums + o_place, mask=m_count, other=0.0)
    b_sum = tl.load(sums + S + o_place, mask=m_count, other=1.0)
    b_log_sum = tl.log(b_sum)
    b_lse = b_max + b_log_sum
    # not lse - target: the difference of two large numbers would lose the small one
    b_nll = b_log_sum - (tl.load(target + o_place, mask=m_count, other=0.0) - b_max)
    b_loss = b_nll
    if HAS_CLASS_WEIGHT:
        b_loss *= tl.load(class_weight + b_label, mask=m_count, other=0.0).to(tl.float32)
        b_total = tl.load(total_weight)
    else:
        b_total = total_weight
    if HAS_SMOOTHING:
        b_weighted = tl.load(sums + 3 * S + o_place, mask=m_count, other=0.0)
        b_loss = own * b_loss + spread * (b_total * b_lse - b_weighted)
    if HAS_Z_LOSS:
        b_loss += z_loss * (b_lse * b_lse)
    tl.store(loss + o_n, tl.where(m_count, b_loss, 0.0), mask=m_n)
    tl.store(nll + o_n, tl.where(m_count, b_nll, 0.0), mask=m_n)
    tl.store(lse + o_n, tl.where(m_count, b_lse, 0.0), mask=m_n)
    if WANT_ENTROPY:
        b_moment = tl.load(sums + 4 * S + o_place, mask=m_count, other=0.0)
        tl.store(entropy + o_n, tl.where(m_count, b_log_sum - tl.div_rn(b_moment, b_sum), 0.0), mask=m_n)
    if WANT_BEST:
        b_best = tl.load(best + o_place, mask=m_count, other=0).to(tl.int64)
        tl.store(predicted + o_n, tl.where(m_count, b_best, ignore_index), mask=m_n)
    if WANT_DROPPED:
        tl.store(dropped + o_n, tl.load(lost + o_place, mask=m_count, other=0.0), mask=m_n)


def losses(
    sums: Tensor,  # (6, N), what `merge_strips` returns, of the rows that count
    target: Tensor,  # (N,) float32, likewise
    best: Tensor,  # (N,) int32, likewise
    lost: Tensor,  # (N,) float32, likewise
    labels: Tensor,  # (N,) int64
    place: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    vocab: int,
    want_entropy: bool,
    want_predicted: bool,
    want_dropped: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, lse, entropy, predicted, dropped), (N,) each where its row stood, the last three (0,) unless asked
    for."""
    rows = len(labels)
    sizes = (rows, rows, rows, rows if want_entropy else 0, rows if want_dropped else 0)
    loss, nll, lse, entropy, dropped = (torch.empty(size, dtype=torch.float32, device=sums.device) for size in sizes)
    predicted = torch.empty(rows if want_predicted else 0, dtype=torch.int64, device=sums.device)
    with on(sums.device):
        _losses_kernel[(cdiv(rows, 512),)](
            sums, target, best, lost, labels.contiguous(), place, *_weights(class_weight, vocab, sums), loss, nll, lse,
            entropy, predicted, dropped, rows, sums.stride(0), ignore_index, 1.0 - label_smoothing,
            label_smoothing / vocab, float(z_loss), BLOCK=512, HAS_SMOOTHING=label_smoothing > 0, HAS_Z_LOSS=z_loss > 0,
            HAS_CLASS_WEIGHT=class_weight is not None, WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted,
            WANT_DROPPED=want_dropped,
        )  # fmt: skip
    return loss, nll, lse, entropy, predicted, dropped


def _weights(class_weight: Tensor | None, vocab: int, other: Tensor) -> tuple[Tensor, Tensor | float]:
    """The weight of each class, and of all."""
    return (other, float(vocab)) if class_weight is None else (class_weight, class_weight.float().sum())


@reused
@triton.jit(do_not_specialize=["N"])
def _coefficients_kernel(
    grad,  # (N,) each
    grad_nll,
    grad_lse,
    lse,  # (N,) float32
    labels,  # (N,) int64, of the rows that count first
    order,  # (N,) int64
    count,  # () int64
    class_weight,  # (V,)
    total_weight,  # () float32, or V
    largest,  # () int32, bits of a float32
    out,  # (4, S) float32: lse and the coefficients of p, of the label, and of what smoothing spreads
    unit,  # () float32
    N,
    S,
    own,  # 1 - label_smoothing
    spread,  # label_smoothing / V
    z_loss,
    BLOCK: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    GRAD_NLL: tl.constexpr,
    GRAD_LSE: tl.constexpr,
):
    """Eq. (5) over the unit, and the unit."""
    b_bits = tl.load(largest)
    # the exponent alone is a power of two; that of zero or NaN is taken as 1's, a subnormal's as the least other
    b_exponent = tl.where(b_bits > 0x7F800000, 0x3F800000, tl.maximum(b_bits & 0x7F800000, 0x00800000))
    b_exponent = tl.where(b_bits == 0, 0x3F800000, b_exponent)
    b_unit = b_exponent.to(tl.float32, bitcast=True)
    if tl.program_id(0) == 0:
        tl.store(unit, b_unit)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < tl.load(count)
    o_from = tl.load(order + o_n, mask=m_n, other=0)
    b_lse = tl.load(lse + o_from, mask=m_n, other=0.0)
    b_grad = tl.div_rn(tl.load(grad + o_from, mask=m_n, other=0.0).to(tl.float32), b_unit)
    b_label = b_grad * own
    if HAS_CLASS_WEIGHT:
        o_v = tl.load(labels + o_n, mask=m_n, other=0)
        b_label *= tl.load(class_weight + o_v, mask=m_n, other=0.0).to(tl.float32)
        b_total = tl.load(total_weight)
    else:
        b_total = total_weight
    b_weight = b_grad * spread
    if GRAD_NLL:
        b_label += tl.div_rn(tl.load(grad_nll + o_from, mask=m_n, other=0.0).to(tl.float32), b_unit)
    b_p = b_label + b_weight * b_total + b_grad * (2 * z_loss) * b_lse
    if GRAD_LSE:
        b_p += tl.div_rn(tl.load(grad_lse + o_from, mask=m_n, other=0.0).to(tl.float32), b_unit)
    tl.store(out + o_n, b_lse, mask=o_n < N)
    tl.store(out + S + o_n, tl.where(m_n, b_p, 0.0), mask=o_n < N)
    tl.store(out + 2 * S + o_n, tl.where(m_n, b_label, 0.0), mask=o_n < N)
    tl.store(out + 3 * S + o_n, tl.where(m_n, b_weight, 0.0), mask=o_n < N)


def coefficients(
    gradients: tuple[Tensor, Tensor | None, Tensor | None],  # (N,) of loss, nll, lse
    lse: Tensor,  # (N,) float32
    labels: Tensor,  # (N,) int64, of the rows that count first
    order: Tensor,  # (N,) int64, which rows these are
    count: Tensor,  # () int64
    largest: Tensor,  # () int32, from `pack`
    class_weight: Tensor | None,  # (V,)
    label_smoothing: float,
    z_loss: float,
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(lse, coefficients of p, of the label, of what smoothing spreads, unit). The first four, (>= N,) float32, are of
    the rows that count first; the coefficients are those of eq. (5) over the unit, () float32, the power of two at or
    below the largest gradient of a row, so that float16 does not lose small ones."""
    rows, device = len(lse), lse.device
    # every one begins on 16 bytes, for any number of rows
    out = torch.empty(4, cdiv(rows, 64) * 64, dtype=torch.float32, device=device)
    unit = torch.empty((), dtype=torch.float32, device=device)
    with on(device):
        _coefficients_kernel[(cdiv(rows, 512),)](
            *(_given(g, lse) for g in gradients), lse, labels, order, count, *_weights(class_weight, vocab, lse),
            largest, out, unit, rows, out.stride(0), 1.0 - label_smoothing, label_smoothing / vocab, float(z_loss),
            BLOCK=512, HAS_CLASS_WEIGHT=class_weight is not None, GRAD_NLL=gradients[1] is not None,
            GRAD_LSE=gradients[2] is not None,
        )  # fmt: skip
    lse, p, label, weight = out.unbind()
    return lse, p, label, weight, unit
