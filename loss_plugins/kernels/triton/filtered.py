"""Cut cross-entropy, backward, filtered: only the columns that the forward marked, a few in a hundred.

Rounds of as many pairs (a column that counts for a block of 128 rows) as fit the workspace, three products a round:
each pair's 128 entries of dZ, eq. (5) and (6), are one vector of the workspace; a block owns its rows of dX and adds
the product with its columns' rows of the head; a tile of 128 columns that count for about the same blocks owns its rows
of dW and sums over those blocks. No atomics, so the result is the same every time. `sampled.py` has stored in dW, and
added to dX, an estimate of what is left out.

What is left out of dX, and not in the sample, is known: a row's probabilities sum to 1. It is put on the mean of the
head's rows, eq. (11), which takes what they have in common out of the estimate's variance.

If too much would be lost, or too many columns count, nothing happens here, and `backward.py` computes everything: the
lists are empty or the rows that count there are zero, as the device decides.

Letters: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    INTERPRETED,
    Launches,
    before_transform,
    blocks_for,
    compute_dtype,
    descriptor,
    fast_exp,
    gathered,
    has_bulk_copies,
    is_bulk_readable,
    logits_tile,
    on,
    precision,
    processors,
    reused,
    softmax_gradient,
    transform,
)
from .lists import Lists, place_of, place_words
from .marks import MARKED_ROWS
from .sums import RowSums, add_tile


@reused
@triton.jit(do_not_specialize=["blocks", "i_round", "R"])
def _vectors_kernel(
    hidden,  # (N, H), rows that count first
    weight,  # (V, H)
    bias,  # (V,)
    labels,  # (N,) int64
    lse,  # (N,) float32
    coef_p,  # (N,) float32
    coef_label,
    count,  # () int64
    columns,  # (pairs,) int32
    lists,  # (B, R) int64
    vectors,  # (B, R) int64
    sizes,  # (B, R) int64
    chunks,  # (B + 1, R) int64
    out,  # (vectors, 128)
    sums,  # (chunks, 128) float32: sums over a chunk's columns of eq. (5)
    blocks,
    i_round,
    R,
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    scale,
    softcap,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
):
    i_chunk = tl.program_id(0)
    if i_chunk >= tl.load(chunks + blocks * R + i_round):
        return
    i_b = -1
    for i_first in range(0, blocks, 64):
        o_b = i_first + tl.arange(0, 64)
        b_chunks = tl.load(chunks + o_b * R + i_round, mask=o_b < blocks, other=1 << 60)
        i_b += tl.sum((b_chunks <= i_chunk).to(tl.int32))
    o_pair = (i_chunk - tl.load(chunks + i_b * R + i_round)) * 128 + tl.arange(0, 128)
    m_v = o_pair < tl.load(sizes + i_b * R + i_round)
    o_v = tl.load(columns + tl.load(lists + i_b * R + i_round) + o_pair, mask=m_v, other=0)
    o_r = tl.arange(0, 128)
    o_n = i_b * 128 + o_r
    m_n = o_n < tl.load(count)
    b_z = logits_tile(
        hidden + o_n.to(tl.int64)[:, None] * hidden_row, weight + o_v.to(tl.int64)[None, :] * weight_row, hidden_col,
        weight_col, 0, 0, m_n, m_v, H, 128, 128, BLOCK_H, DTYPE, PRECISION, False,
    )  # fmt: skip
    b_z = transform(b_z, bias, o_v, m_v, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    b_dz = softmax_gradient(b_z, lse, coef_p, coef_label, labels, o_n, m_n, o_v, FAST)
    tl.store(sums + i_chunk.to(tl.int64) * 128 + o_r, tl.sum(tl.where(m_v[None, :], b_dz, 0.0), 1))
    b_dz = before_transform(b_dz, b_z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    o_vector = tl.load(vectors + i_b * R + i_round) + o_pair
    tl.store(out + o_vector[None, :] * 128 + o_r[:, None], b_dz.to(out.dtype.element_ty), mask=m_v[None, :])


@reused
@triton.jit(do_not_specialize=["i_round", "R"])
def _dx_kernel(
    weight,  # (V, H)
    mean,  # (H,) float32, mean of the head's rows
    coef_p,  # (N,) float32
    coef_label,
    count,  # () int64
    everything,  # () int64
    taken,  # (N,) float32, what the sample has
    columns,  # (pairs,) int32
    lists,  # (B, R) int64
    vectors,  # (B, R) int64
    sizes,  # (B, R) int64
    chunks,  # (B + 1, R) int64
    dz,  # (vectors, 128) descriptor or pointer, numbers everywhere
    sums,  # (chunks, 128) float32
    total,  # (N, H) descriptor of half tiles, or pointer to float32
    low,  # see `RowSums`
    i_round,
    R,
    weight_row,
    weight_col,
    scale,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """``dZ @ W`` over a block's columns, and what is missing to the row's sum on the mean row of W."""
    i_b = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + i_b * R + i_round)
    if (i_round > 0) & (size == 0):
        return
    o_r = tl.arange(0, 128)
    o_n = i_b * 128 + o_r
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    m_n = o_n < tl.load(count)
    p_columns = columns + tl.load(lists + i_b * R + i_round)
    i_vector = tl.load(vectors + i_b * R + i_round)
    b_out = tl.zeros((128, BLOCK_H), tl.float32)
    for i_k in range(0, size, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < size
        o_v = tl.load(p_columns + o_k, mask=m_k, other=0).to(tl.int64)
        if TMA:
            # what is read past the block's own vectors meets zeros below
            b_dz = dz.load([(i_vector + i_k).to(tl.int32), 0])
        else:
            p_dz = dz + (i_vector + o_k[:, None]) * 128 + o_r[None, :]
            b_dz = tl.load(p_dz, mask=m_k[:, None], other=0.0)
        p_w = weight + o_v[:, None] * weight_row + o_h[None, :] * weight_col
        b_w = tl.load(p_w, mask=m_k[:, None] & m_h[None, :], other=0.0)
        b_out = tl.dot(b_dz.to(DTYPE).T, b_w.to(DTYPE), b_out, input_precision=PRECISION)
    b_missing = tl.zeros((128,), tl.float32)
    first = tl.load(chunks + i_b * R + i_round)
    for i_chunk in range(first, first + tl.cdiv(size, 128)):
        b_missing -= tl.load(sums + i_chunk * 128 + o_r)
    if i_round == 0:
        b_whole = tl.load(coef_p + o_n, mask=m_n, other=0.0) - tl.load(coef_label + o_n, mask=m_n, other=0.0)
        b_whole -= tl.load(taken + o_n, mask=m_n, other=0.0)
        b_missing += tl.where(tl.load(everything) != 0, 0.0, b_whole)
    b_out += (b_missing * scale)[:, None] * tl.load(mean + o_h, mask=m_h, other=0.0)[None, :]
    if TMA:
        i_row = (i_b * 128).to(tl.int32)
        add_tile(total, low, i_row, tl.program_id(1) * BLOCK_H, b_out, 128, BLOCK_H, DIGITS)
    else:
        p_out = total + o_n[:, None] * H + o_h[None, :]
        m_out = m_n[:, None] & m_h[None, :]
        tl.store(p_out, tl.load(p_out, mask=m_out, other=0.0) + b_out, mask=m_out)


@reused
@triton.jit(do_not_specialize=["blocks", "N", "i_round"])
def _dw_kernel(
    hidden,  # (N, H), rows that count first, zeros behind
    dz,  # (vectors, 128)
    order,  # (V,) int64
    bits,  # (tiles, B, 8) int32
    block_of,  # (tiles, B) int32
    live,  # (tiles,) int32
    base,  # (tiles, B) int32
    edges,  # (R + 1,) int64
    factor,  # () float32
    out,  # (V, H), a sample of what is left out
    blocks,
    V,
    N,
    i_round,
    programs,
    hidden_row,
    hidden_col,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """``dZ.T @ X`` of a tile of columns, over the blocks it counts for, added; one program owns a tile."""
    first = tl.load(edges + i_round).to(tl.int32)
    last = tl.load(edges + i_round + 1).to(tl.int32)
    strips: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    STEPS: tl.constexpr = 128 // BLOCK_K
    o_c = tl.arange(0, 128)
    b_factor = tl.load(factor)
    for i_item in range(first * strips + tl.program_id(0), last * strips, programs):
        i_t = i_item // strips
        o_h = i_item % strips * BLOCK_H + tl.arange(0, BLOCK_H)
        m_h = o_h < H
        slot = i_t.to(tl.int64) * blocks
        n_live = tl.load(live + i_t)
        b_out = tl.zeros((128, BLOCK_H), tl.float32)
        next_b, next_base = tl.load(block_of + slot), tl.load(base + slot)
        next_word, next_before = place_words(bits, slot, o_c)
        for i_step in range(n_live * STEPS):
            # where the next step reads is looked up now: the products would wait for an address that waits for loads
            i_b, i_base, b_word, b_before = next_b, next_base, next_word, next_before
            i_slot = slot + tl.minimum((i_step + 1) // STEPS, n_live - 1)
            next_b, next_base = tl.load(block_of + i_slot), tl.load(base + i_slot)
            next_word, next_before = place_words(bits, i_slot, o_c)
            m_c, b_place = place_of(b_word, b_before, o_c)
            o_k = i_step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
            o_vector = (i_base + b_place).to(tl.int64)
            b_dz = tl.load(dz + o_vector[:, None] * 128 + o_k[None, :], mask=m_c[:, None], other=0.0)
            if TMA:
                b_x = hidden.load([i_b * 128 + i_step % STEPS * BLOCK_K, i_item % strips * BLOCK_H])
            else:
                o_n = i_b * 128 + o_k
                p_x = hidden + o_n.to(tl.int64)[:, None] * hidden_row + o_h[None, :] * hidden_col
                b_x = tl.load(p_x, mask=(o_n < N)[:, None] & m_h[None, :], other=0.0)
            b_out = tl.dot(b_dz.to(DTYPE), b_x.to(DTYPE), b_out, input_precision=PRECISION)
        if n_live > 0:
            o_j = i_t * 128 + o_c
            m_j = o_j < V
            o_v = tl.load(order + o_j, mask=m_j, other=0)
            p_out = out + o_v[:, None] * H + o_h[None, :]
            m_out = m_j[:, None] & m_h[None, :]
            b_sample = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
            tl.store(p_out, (b_sample + b_out * b_factor).to(out.dtype.element_ty), mask=m_out)


def add_filtered(
    packed: Tensor,  # (N, H), rows that count first, zeros behind
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    row_data: list[Tensor],  # labels, lse, coefficients of p and of the label, (N,) each, in that order
    count: Tensor,  # () int64
    unit: Tensor,  # () float32, dZ's scale
    scale: float,
    softcap: float,
    lists: Lists,
    seen: Seen,
    capacity: int,  # vectors of a round
    taken: Tensor,  # (N,) float32, what a sample has of the sum over what is left out of each row
    d_hidden: RowSums | None,  # to which dX / unit is added
    d_weight: Tensor | None,  # (V, H), to which dW is added
) -> None:
    """The gradients from the pairs of ``lists``; nothing if ``lists.everything``."""
    labels, lse, coef_p, coef_label = row_data
    weight = gathered(weight, packed.dtype)
    (rows, width), blocks = packed.shape, lists.lists.shape[0]
    bulk = has_bulk_copies(packed.device) and is_bulk_readable(packed)
    few = d_hidden is not None and d_hidden.digits > 0
    add_bulk = bulk and (few or not INTERPRETED)  # the interpreter's copies cannot add
    assert add_bulk or not few
    dx = blocks_for(rows, packed.dtype, add_bulk, kernel="filtered_dx", device=packed.device)
    dw = blocks_for(rows, packed.dtype, bulk, kernel="filtered_dw", device=packed.device)
    # numbers everywhere: a bulk copy reads past the vectors of a block
    dz = torch.zeros(capacity, MARKED_ROWS, dtype=packed.dtype, device=packed.device)
    most_chunks = triton.cdiv(capacity, 128) + blocks
    sums = torch.empty(most_chunks, MARKED_ROWS, dtype=torch.float32, device=packed.device)
    mean = mean_row(weight) if d_hidden is not None else packed
    common = {"DTYPE": compute_dtype(packed.dtype), "PRECISION": precision(packed, packed.dtype)}
    programs = processors(packed.device) * 2
    launch_vectors, launch_dx, launch_dw = Launches(_vectors_kernel), Launches(_dx_kernel), Launches(_dw_kernel)
    dz_rows = descriptor(dz, [dx.h, MARKED_ROWS]) if add_bulk else dz
    if d_hidden is not None:
        totals = d_hidden.tiles(MARKED_ROWS, dx.v) if add_bulk else (d_hidden.total, d_hidden.total)
    readable_rows = descriptor(packed, [dw.h, dw.v]) if bulk else packed
    for i_round in range(lists.rounds):
        if i_round > 0 and seen.rounds() <= i_round:
            break
        with on(packed.device):
            launch_vectors(
                None, (most_chunks,), packed, weight, bias if bias is not None else packed, labels, lse, coef_p,
                coef_label, count, lists.columns, lists.lists, lists.vectors, lists.sizes, lists.chunks, dz, sums,
                blocks, i_round, lists.rounds, packed.stride(0), packed.stride(1), weight.stride(0), weight.stride(1),
                float(scale), float(softcap), H=width, BLOCK_H=64 if weight.dtype.itemsize == 2 else 32,
                HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0,
                FAST=fast_exp(packed.device, packed.dtype), num_warps=4, num_stages=3,
                **common,
            )  # fmt: skip
            if d_hidden is not None:
                launch_dx(
                    None, (blocks, triton.cdiv(width, dx.v)), weight, mean, coef_p, coef_label, count,
                    lists.everything, taken, lists.columns, lists.lists, lists.vectors, lists.sizes, lists.chunks,
                    dz_rows, sums, *totals, i_round, lists.rounds, weight.stride(0), weight.stride(1), float(scale),
                    H=width, TMA=add_bulk, DIGITS=d_hidden.digits, BLOCK_H=dx.v, BLOCK_K=dx.h, num_warps=dx.warps,
                    num_stages=dx.stages, **common,
                )  # fmt: skip
            if d_weight is not None:
                launch_dw(
                    None, (programs,), readable_rows, dz, lists.order,
                    lists.bits, lists.block_of, lists.live, lists.base, lists.edges, unit, d_weight, blocks,
                    weight.shape[0], rows, i_round, programs, packed.stride(0), packed.stride(1), H=width, TMA=bulk,
                    BLOCK_H=dw.v, BLOCK_K=dw.h, num_warps=dw.warps, num_stages=dw.stages, **common,
                )  # fmt: skip


class Seen:
    """What the host may know of the device's decision, once the device has come that far.

    The host never waits. It only stops launching what would find nothing to do; the result is the same either way.
    """

    def __init__(self, lists: Lists) -> None:
        self._most = lists.rounds
        self._told: Tensor | None = None
        device = lists.decided.device
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._told = torch.full((2,), -1, dtype=torch.int64, pin_memory=True)
            self._told.copy_(lists.decided, non_blocking=True)

    def rounds(self) -> int:
        """How many rounds have work, or all."""
        used = -1 if self._told is None else int(self._told[1])
        return self._most if used < 0 else used

    def nothing_else(self) -> bool:
        """Whether the device is known to leave nothing to the slices."""
        return self._told is not None and int(self._told[0]) == 0


def mean_row(weight: Tensor, most: int = 16384) -> Tensor:
    """(H,) mean of the head's rows, of evenly spaced ones where there are many."""
    some = weight[:: triton.cdiv(weight.shape[0], most)]
    return (weight.new_full((1, len(some)), 1 / len(some)) @ some)[0].float()
