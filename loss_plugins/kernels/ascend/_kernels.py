"""The vector kernels. What triton-ascend rejects, or compiles into something else, shapes them:

- a mask is ``offset < end`` and nothing else: with any other one a store becomes a read and write of the whole block,
  and a load reads past the end;
- an address is valid whether its lane is masked or not, so a label's logit is read by a scalar behind a branch;
- no atomics and no locks, and nothing is read that the same program has written: every number has one writer.

A program takes groups of `GROUP` rows, so that the numbers which two programs write never lie in one cache line.
Products are not made here: torch's own library has the cube units.

In kernels ``i_`` is an index, ``o_`` offsets, ``m_`` a mask, ``b_`` a block, ``p_`` a pointer; capitals are sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._math import tanh


@triton.jit
def transformed(b_z, p_bias, o_v, m_v, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):  # fmt: skip  # noqa: E501
    """Eq. (1), but with a softcap still the hyperbolic tangent, which the gradient needs too."""
    if HAS_BIAS:
        b_z += tl.load(p_bias + o_v, mask=m_v, other=0.0).to(tl.float32)
    if HAS_SCALE:
        b_z *= scale
    if HAS_SOFTCAP:
        b_z = tanh(b_z / softcap)
    return b_z


@triton.jit(do_not_specialize=["N", "columns", "first_column", "sums_row", "logits_row", "ignore_index"])
def row_sums_kernel(
    logits,  # (N, columns)
    labels,  # (N,) int32 or int64
    bias,  # (columns,)
    class_weight,  # (columns,)
    before,  # (5, N) float32: maximum, sum, label logit, weighted sum, moment; of the columns before these
    before_best,  # (N,) int32
    after,  # (5, N) float32, these columns included
    after_best,  # (N,) int32
    tile_max,  # (N,) float32, of these columns alone
    tile_sum,  # (N,) float32
    N,
    columns,
    first_column,
    sums_row,
    logits_row,
    ignore_index,
    scale,
    softcap,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_BEST: tl.constexpr,
    WANT_TILE: tl.constexpr,
):
    """Eq. (2) over a tile of the vocabulary, merged with what came before; a row without a label is not read."""
    # -inf behind a row's end stays -inf through a bias, which spares a buffer of a block's size
    PADDED: tl.constexpr = not ((HAS_SCALE or HAS_SOFTCAP) or HAS_SMOOTHING)
    for i_group in range(tl.program_id(0), (N + GROUP - 1) // GROUP, tl.num_programs(0)):
        for i in range(GROUP):
            i_n = tl.cast(i_group * GROUP + i, tl.int32)
            if i_n < N:
                b_label = tl.load(labels + i_n)
                if b_label != ignore_index:
                    p_row = logits + tl.cast(i_n, tl.int64) * logits_row
                    b_max = float("-inf")
                    b_sum = 0.0
                    b_weighted = 0.0
                    b_moment = 0.0
                    b_best = 0
                    for i_v in range(0, columns, BLOCK):
                        o_v = i_v + tl.arange(0, BLOCK)
                        m_v = o_v < columns
                        if PADDED:
                            b_z = tl.load(p_row + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
                        else:
                            b_z = tl.load(p_row + o_v, mask=m_v, other=0.0).to(tl.float32)
                        b_z = transformed(b_z, bias, o_v, m_v, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
                        if HAS_SOFTCAP:
                            b_z *= softcap
                        if HAS_SMOOTHING:
                            b_real = tl.where(m_v, b_z, 0.0)
                            if HAS_CLASS_WEIGHT:
                                b_real *= tl.load(class_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
                            b_weighted += tl.sum(b_real, 0)
                        if not PADDED:
                            b_z = tl.where(m_v, b_z, float("-inf"))
                        b_new = tl.maximum(b_max, tl.max(b_z, 0))
                        if WANT_BEST:
                            # tl.argmax has no form for a 950; only a larger one, so that the first of equals stays
                            b_here = tl.min(tl.where(b_z == b_new, o_v, columns - 1), 0)
                            b_best = tl.where(b_new > b_max, b_here + first_column, b_best)
                        # nothing but -inf so far keeps a zero sum: exp(-inf - -inf) would be NaN
                        b_anchor = tl.where(b_new == float("-inf"), 0.0, b_new)
                        b_carry = tl.exp(b_max - b_anchor)
                        b_z -= b_anchor
                        b_share = tl.exp(b_z)
                        if WANT_ENTROPY:
                            b_moved = tl.where(b_max == float("-inf"), 0.0, b_max - b_anchor) * b_sum
                            b_moment = (b_moment + b_moved) * b_carry
                            b_moment += tl.sum(b_share * tl.where(b_share > 0, b_z, 0.0), 0)
                        b_sum = b_sum * b_carry + tl.sum(b_share, 0)
                        b_max = b_new
                    if WANT_TILE:
                        tl.store(tile_max + i_n, b_max)
                        tl.store(tile_sum + i_n, b_sum)
                    b_target = 0.0
                    if not FIRST:
                        b_target = tl.load(before + 2 * sums_row + i_n)
                    b_local = tl.cast(b_label - first_column, tl.int32)
                    if (b_local >= 0) & (b_local < columns):
                        b_target = tl.load(p_row + b_local).to(tl.float32)
                    tl.store(after + 2 * sums_row + i_n, b_target)
                    if not FIRST:
                        b_old = tl.load(before + i_n)
                        b_old_sum = tl.load(before + sums_row + i_n)
                        b_new = tl.maximum(b_max, b_old)
                        b_anchor = tl.where(b_new == float("-inf"), 0.0, b_new)
                        b_here = tl.exp(b_max - b_anchor)
                        b_there = tl.exp(b_old - b_anchor)
                        if HAS_SMOOTHING:
                            b_weighted += tl.load(before + 3 * sums_row + i_n)
                        if WANT_ENTROPY:
                            b_moved = tl.where(b_max == float("-inf"), 0.0, b_max - b_anchor) * b_sum
                            b_old_moved = tl.where(b_old == float("-inf"), 0.0, b_old - b_anchor) * b_old_sum
                            b_old_moment = tl.load(before + 4 * sums_row + i_n)
                            b_moment = (b_moment + b_moved) * b_here + (b_old_moment + b_old_moved) * b_there
                        if WANT_BEST:
                            b_best = tl.where(b_max > b_old, b_best, tl.load(before_best + i_n))
                        b_sum = b_sum * b_here + b_old_sum * b_there
                        b_max = b_new
                    tl.store(after + i_n, b_max)
                    tl.store(after + sums_row + i_n, b_sum)
                    if HAS_SMOOTHING:
                        tl.store(after + 3 * sums_row + i_n, b_weighted)
                    if WANT_ENTROPY:
                        tl.store(after + 4 * sums_row + i_n, b_moment)
                    if WANT_BEST:
                        tl.store(after_best + i_n, b_best)


@triton.jit(do_not_specialize=["N", "columns", "first_column", "logits_row", "out_row", "ignore_index"])
def gradient_kernel(
    logits,  # (N, columns)
    out,  # (N, columns), may be the logits: an entry is read before it is written, and never again
    labels,  # (N,) int32 or int64
    bias,  # (columns,)
    class_weight,  # (columns,)
    max_,  # (N,) float32, or the log-sum-exp
    log_sum,  # (N,) float32
    coef_p,  # (N,) float32
    coef_label,
    coef_weight,
    N,
    columns,
    first_column,
    logits_row,
    out_row,
    ignore_index,
    scale,
    softcap,
    BLOCK: tl.constexpr,
    HAS_LOG_SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """Eq. (5), (6) and (10) of a tile of the vocabulary; zeros where a row has no label."""
    for i in range(tl.program_id(0), N, tl.num_programs(0)):
        i_n = tl.cast(i, tl.int32)
        p_row = logits + tl.cast(i_n, tl.int64) * logits_row
        p_out = out + tl.cast(i_n, tl.int64) * out_row
        b_label = tl.load(labels + i_n)
        if b_label == ignore_index:
            for i_v in range(0, columns, BLOCK):
                o_v = i_v + tl.arange(0, BLOCK)
                tl.store(p_out + o_v, tl.zeros((BLOCK,), out.dtype.element_ty), mask=o_v < columns)
        else:
            b_local = tl.cast(b_label - first_column, tl.int32)
            b_max = tl.load(max_ + i_n)
            b_p = tl.load(coef_p + i_n)
            b_at_label = tl.load(coef_label + i_n)
            for i_v in range(0, columns, BLOCK):
                o_v = i_v + tl.arange(0, BLOCK)
                m_v = o_v < columns
                b_z = tl.load(p_row + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_z = transformed(b_z, bias, o_v, m_v, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
                b_low = b_z
                if HAS_SOFTCAP:
                    b_low = b_z * softcap
                b_low -= b_max
                if HAS_LOG_SUM:
                    b_low -= tl.load(log_sum + i_n)
                b_dz = tl.exp(b_low) * b_p
                b_dz = tl.where(o_v == b_local, b_dz - b_at_label, b_dz)
                if HAS_SMOOTHING:
                    b_spread = tl.load(coef_weight + i_n)
                    if HAS_CLASS_WEIGHT:
                        b_dz -= tl.load(class_weight + o_v, mask=m_v, other=0.0).to(tl.float32) * b_spread
                    else:
                        b_dz -= b_spread
                if HAS_SOFTCAP:
                    b_dz *= 1 - b_z * b_z
                if HAS_SCALE:
                    b_dz *= scale
                tl.store(p_out + o_v, b_dz.to(out.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["size"])
def scale_kernel(
    source,
    factor,  # (1,) float32
    out,
    size,
    BLOCK: tl.constexpr,
):
    """``source * factor`` of flat tensors, rounded once."""
    b_factor = tl.load(factor)
    for i in range(tl.program_id(0), (size + BLOCK - 1) // BLOCK, tl.num_programs(0)):
        i_first = tl.cast(i, tl.int64) * BLOCK
        o = tl.arange(0, BLOCK)
        m = o < size - i_first
        b_out = tl.load(source + i_first + o, mask=m, other=0.0).to(tl.float32) * b_factor
        tl.store(out + i_first + o, b_out.to(out.dtype.element_ty), mask=m)
