"""Cross-entropy of logits that exist: each is read once in the forward, and read once and written once in the backward.

Forward: a program owns a row and reads it a block at a time. A block is (lanes, width), and every lane keeps its own
maximum and sum, eq. (2): a rescaling costs one exponential a lane and not one an entry, and no thread waits for another
until the row is done. Backward, eq. (5) and (6): a program owns a strip of a row; an entry is read before it is written
by the same program, so the gradient may lie over the logits. An ignored row is not read, in the backward only zeroed.
No atomics, so the result is the same every time. Peak beside the gradient: a few numbers a row.

Letters: N = B * T rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._rows import row_coefficients, row_terms
from ._common import INTERPRETED, before_transform, on, processors, reused, transform

BLOCK = 8192  # entries of a row at a time: 16 KiB of half logits in flight a program


@reused
@triton.jit
def _cross_entropy_kernel(
    logits,  # (B, T, V)
    labels,  # (N,)
    class_weight,  # (V,)
    out,  # (5, N) float32: maximum, sum, label logit, weighted sum, moment
    best,  # (N,) int32
    N,
    T,
    V,
    logits_batch,
    logits_row,
    logits_col,
    ignore_index,
    scale,
    softcap,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,  # a lane's entries of a block are neighbours, and one load
    LONG: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_BEST: tl.constexpr,
):
    i_n = tl.program_id(0)
    b_label = tl.load(labels + i_n).to(tl.int64)
    if b_label == ignore_index:
        return
    p_row = row_of(logits, i_n, T, logits_batch, logits_row)
    # where a load takes one entry only, neighbours belong to different lanes, so that a warp reads whole lines
    LANE: tl.constexpr = WIDTH if VECTORS else 1
    STEP: tl.constexpr = 1 if VECTORS else LANES
    o_lane = tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, WIDTH)[None, :] * STEP
    b_max = tl.full((LANES,), float("-inf"), tl.float32)
    b_sum = tl.zeros((LANES,), tl.float32)
    b_weighted = tl.zeros((LANES,), tl.float32)
    b_moment = tl.zeros((LANES,), tl.float32)
    b_best = tl.zeros((LANES,), tl.int32)
    for i_v in range(0, V, LANES * WIDTH):
        o_v = i_v + o_lane
        m_v = o_v < V
        b_z = tl.load(p_row + columns_of(o_v, logits_col, LONG), mask=m_v, other=0.0).to(tl.float32)
        b_z = transform(b_z, logits, o_v, m_v, scale, softcap, False, HAS_SCALE, HAS_SOFTCAP)
        if HAS_SMOOTHING:
            b_real = tl.where(m_v, b_z, 0.0)
            if HAS_CLASS_WEIGHT:
                b_real *= tl.load(class_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_weighted += tl.sum(b_real, 1)
        b_z = tl.where(m_v, b_z, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_z, 1))
        if WANT_BEST:
            b_here = i_v + tl.arange(0, LANES) * LANE + tl.argmax(b_z, 1) * STEP
            # only a larger one, so that the first of equals stays
            b_best = tl.where(b_new > b_max, b_here, b_best)
        # a lane that has seen only -inf keeps its zero sum: exp(-inf - -inf) would be NaN
        b_anchor = anchor_of(b_new)
        b_carry = tl.exp(b_max - b_anchor)
        b_z -= b_anchor[:, None]
        b_share = tl.exp(b_z)
        if WANT_ENTROPY:
            b_moment = moved(b_moment, b_max, b_sum, b_anchor) * b_carry
            b_moment += tl.sum(b_share * tl.where(b_share > 0, b_z, 0.0), 1)
        b_sum = b_sum * b_carry + tl.sum(b_share, 1)
        b_max = b_new

    b_top = tl.max(b_max, 0)
    b_anchor = anchor_of(b_top)
    b_carry = tl.exp(b_max - b_anchor)
    b_target = tl.load(p_row + columns_of(b_label, logits_col, LONG)).to(tl.float32)
    b_target = transform(b_target, logits, b_label, True, scale, softcap, False, HAS_SCALE, HAS_SOFTCAP)
    tl.store(out + i_n, b_top)
    tl.store(out + N + i_n, tl.sum(b_sum * b_carry, 0))
    tl.store(out + 2 * N + i_n, b_target)
    if HAS_SMOOTHING:
        tl.store(out + 3 * N + i_n, tl.sum(b_weighted, 0))
    if WANT_ENTROPY:
        tl.store(out + 4 * N + i_n, tl.sum(moved(b_moment, b_max, b_sum, b_anchor) * b_carry, 0))
    if WANT_BEST:
        tl.store(best + i_n, tl.min(tl.where(b_max == b_top, b_best, V - 1), 0))


@reused
@triton.jit
def _cross_entropy_backward_kernel(
    logits,  # (B, T, V)
    out,  # (B, T, V), may be the logits
    labels,  # (N,)
    class_weight,  # (V,)
    max_,  # (N,) float32
    log_sum,  # (N,) float32
    coef_p,  # (N,) float32
    coef_label,
    coef_weight,
    T,
    V,
    logits_batch,
    logits_row,
    logits_col,
    out_batch,
    out_row,
    out_col,
    ignore_index,
    scale,
    softcap,
    strips,
    BLOCK_V: tl.constexpr,
    LONG: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    i_n = tl.program_id(0) // strips
    i_strip = tl.program_id(0) % strips
    p_row = row_of(logits, i_n, T, logits_batch, logits_row)
    p_out = row_of(out, i_n, T, out_batch, out_row)
    b_label = tl.load(labels + i_n).to(tl.int64)
    if b_label == ignore_index:
        for i_v in range(i_strip * BLOCK_V, V, strips * BLOCK_V):
            o_v = i_v + tl.arange(0, BLOCK_V)
            b_zero = tl.zeros((BLOCK_V,), out.dtype.element_ty)
            tl.store(p_out + columns_of(o_v, out_col, LONG), b_zero, mask=o_v < V)
    else:
        b_max = tl.load(max_ + i_n)
        b_log_sum = tl.load(log_sum + i_n)
        b_p = tl.load(coef_p + i_n)
        b_at_label = tl.load(coef_label + i_n)
        b_spread = tl.load(coef_weight + i_n)
        for i_v in range(i_strip * BLOCK_V, V, strips * BLOCK_V):
            o_v = i_v + tl.arange(0, BLOCK_V)
            m_v = o_v < V
            b_z = tl.load(p_row + columns_of(o_v, logits_col, LONG), mask=m_v, other=0.0).to(tl.float32)
            b_z = transform(b_z, logits, o_v, m_v, scale, softcap, False, HAS_SCALE, HAS_SOFTCAP)
            # not z - lse: a rounded log-sum-exp would give probabilities that do not sum to 1
            b_dz = tl.exp((b_z - b_max) - b_log_sum) * b_p
            b_dz -= tl.where(o_v == b_label, b_at_label, 0.0)
            if HAS_SMOOTHING:
                if HAS_CLASS_WEIGHT:
                    b_dz -= b_spread * tl.load(class_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
                else:
                    b_dz -= b_spread
            b_dz = before_transform(b_dz, b_z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
            tl.store(p_out + columns_of(o_v, out_col, LONG), b_dz.to(out.dtype.element_ty), mask=m_v)


@triton.jit
def row_of(matrix, i_n, T, batch, row):
    """Where row ``i_n`` of a (B, T, V) tensor begins."""
    return matrix + (i_n // T).to(tl.int64) * batch + (i_n % T).to(tl.int64) * row


@triton.jit
def columns_of(o_v, col, LONG: tl.constexpr):
    """Offsets of columns; LONG where the last of a row does not fit 32 bits."""
    if LONG:
        o_v = o_v.to(tl.int64)
    return o_v * col


@triton.jit
def anchor_of(b_max):
    """What is subtracted before an exponential: the maximum, 0 where there is none yet."""
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def moved(b_moment, b_max, b_sum, b_anchor):
    """The moment about another anchor, before its rescaling; about the maximum, so that no two large numbers are
    subtracted in the end."""
    return b_moment + tl.where(b_max == float("-inf"), 0.0, b_max - b_anchor) * b_sum


def cross_entropy_forward(
    logits: Tensor,  # (B, T, V)
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    want_entropy: bool,
    want_predicted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, maximum, log of the sum, entropy, predicted) of each row; the last two empty unless asked for."""
    rows, (_, length, vocab) = labels.shape[0], logits.shape
    valid = labels != ignore_index
    # zeros: the rows that do not count are never written
    sums = torch.zeros(5, rows, dtype=torch.float32, device=logits.device)
    best = torch.zeros(rows if want_predicted else 0, dtype=torch.int32, device=logits.device)
    block, warps = block_for(vocab)
    width = 16 // logits.dtype.itemsize
    with on(logits.device):
        _cross_entropy_kernel[(rows,)](
            logits, labels.contiguous(), sums if class_weight is None else class_weight.contiguous(), sums, best, rows,
            length, vocab, *logits.stride(), ignore_index, float(scale), float(softcap), LANES=block // width,
            WIDTH=width, VECTORS=has_vectors(logits), LONG=is_long(logits), HAS_SCALE=scale != 1.0,
            HAS_SOFTCAP=softcap != 0.0, HAS_SMOOTHING=label_smoothing > 0, HAS_CLASS_WEIGHT=class_weight is not None,
            WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted, num_warps=warps,
        )  # fmt: skip
    max_, sum_, target, weighted, moment = sums
    # ones: an ignored row's logarithms are 0, as its maximum is
    sum_ = torch.where(valid, sum_, 1.0)
    loss, nll, _ = row_terms(
        max_, sum_, target, weighted if label_smoothing else None, labels, valid, class_weight, label_smoothing, z_loss,
        vocab,
    )  # fmt: skip
    log_sum = sum_.log()
    entropy = torch.where(valid, log_sum - moment / sum_, 0.0) if want_entropy else sum_.new_zeros(0)
    predicted = best.to(torch.int64)
    if want_predicted:
        predicted = torch.where(valid, predicted, ignore_index)
    # copies of their own: a view would keep all five alive until the backward
    return loss, nll, max_.clone(), log_sum, entropy, predicted


def cross_entropy_backward(
    grad: Tensor,  # (N,) d total / d loss of the row
    logits: Tensor,  # (B, T, V)
    out: Tensor,  # (B, T, V) written; may be the logits
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    max_: Tensor,  # (N,)
    log_sum: Tensor,  # (N,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write the gradient of the logits to ``out``, zeros where a row is ignored."""
    rows, (_, length, vocab) = labels.shape[0], logits.shape
    coefficients = row_coefficients(
        grad, max_ + log_sum, labels, labels != ignore_index, class_weight, label_smoothing, z_loss, vocab
    )
    block, warps = block_for(vocab)
    # few rows are cut in strips, so that the device has something for every processor
    strips = min(triton.cdiv(vocab, block), triton.cdiv(8 * processors(logits.device), rows))
    with on(logits.device):
        _cross_entropy_backward_kernel[(rows * strips,)](
            logits, out, labels.contiguous(), max_ if class_weight is None else class_weight.contiguous(), max_,
            log_sum, *(c.contiguous() for c in coefficients), length, vocab, *logits.stride(), *out.stride(),
            ignore_index, float(scale), float(softcap), strips, BLOCK_V=block, LONG=is_long(logits) or is_long(out),
            HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0, HAS_SMOOTHING=label_smoothing > 0,
            HAS_CLASS_WEIGHT=class_weight is not None, num_warps=warps,
        )  # fmt: skip


def block_for(vocab: int) -> tuple[int, int]:
    """(entries of a row at a time, warps)."""
    # few under the interpreter, so that small tests have several blocks
    block = max(min(128 if INTERPRETED else BLOCK, triton.next_power_of_2(vocab)), 128)
    return block, 8 if block > 2048 else 4


def has_vectors(logits: Tensor) -> bool:
    """Whether Triton can load 16 bytes at once: it asks for multiples of 16, of a row's end too, for the mask."""
    batch, row, col = logits.stride()
    multiples = (batch, row, logits.shape[2], logits.data_ptr())
    return col == 1 and all(number % 16 == 0 for number in multiples)


def is_long(logits: Tensor) -> bool:
    """Whether a column's offset, that of a block's last one included, needs 64 bits."""
    return (logits.shape[2] + BLOCK) * logits.stride(2) >= 1 << 31
