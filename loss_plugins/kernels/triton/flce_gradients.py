"""The gradients of one chunk of flce, eq. (9): products of what `flce.py` stored, and the labels' entries beside them.

The label's entry of dZ is by far the largest of its row: in the half type its rounding would be most of the gradient's
error. So the chunk has zero there, and the entry is added from float32 numbers: to dX as ``entry * W[label]``, and to
dW as a second product, whose operand is the entry in two numbers of the half type. Rows come in the order of their
labels, so that those of a tile of columns lie side by side.

dW is summed over the chunks in the room of the result: a number's upper 16 bits lie where it will be, and its next 4
or 8, rounded, in a matrix of their own, so that float32 sums would take four or two times as much.

Letters: n rows of the chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    blocks_for,
    compute_dtype,
    descriptor,
    grouped_tile,
    halves_of,
    has_warpgroups,
    on,
    processors,
    reused,
    row_tiles,
)
from .product import fitting
from .sums import digits_for, joined, parted


@reused
@triton.jit(do_not_specialize=["n", "V", "programs"])
def _dw_kernel(
    exps,  # (n, V) descriptor, zero at the labels
    scaled,  # (n, H) descriptor, rows times what makes dZ of E
    rows,  # (n, H) descriptor of a few rows
    labels,  # (n,) int64, ascending
    entry,  # (n,) float32, dZ at the label
    starts,  # (tiles + 1,) int64, the first row with a label in a tile or behind it
    count,  # () int64
    out,  # (V, H) descriptor of half tiles
    high,  # (V, H) int16 descriptor of half tiles: the room of `out`
    low,  # (V, >= H * DIGITS / 8) bytes, descriptor of half tiles
    n,
    V,
    programs,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    DTYPE: tl.constexpr,
    DIGITS: tl.constexpr,  # bits of `low`, 4 of both halves of a tile side by side
    FIRST: tl.constexpr,  # nothing has been summed yet
    LAST: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    tiles_n: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.cdiv(V, BLOCK_M)
    last = tl.minimum(tl.load(count).to(tl.int32), n)
    if not FIRST and not LAST and last == 0:
        return
    for i_tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs):
        i_t, i_strip = grouped_tile(i_tile, tiles_m, tiles_n, 8)
        i_m, i_n = i_t * BLOCK_M, i_strip * BLOCK_N
        b_out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i_k in range(0, last, BLOCK_K):
            b_out = tl.dot(exps.load([i_k, i_m]).to(DTYPE).T, scaled.load([i_k, i_n]).to(DTYPE), b_out)
        o_v = i_m + tl.arange(0, BLOCK_M)
        end = tl.minimum(tl.load(starts + i_t + 1).to(tl.int32), last)
        for i_k in range(tl.load(starts + i_t).to(tl.int32), end, BLOCK_L):
            o_k = i_k + tl.arange(0, BLOCK_L)
            b_entry = tl.load(entry + o_k, mask=o_k < end, other=0.0)
            b_first = b_entry.to(rows.dtype)
            b_rest = (b_entry - b_first.to(tl.float32)).to(rows.dtype)
            m_label = o_v[:, None] == tl.load(labels + o_k, mask=o_k < end, other=-1)[None, :]
            b_rows = rows.load([i_k, i_n]).to(DTYPE)
            b_out = tl.dot(tl.where(m_label, b_first[None, :], 0.0).to(DTYPE), b_rows, b_out)
            b_out = tl.dot(tl.where(m_label, b_rest[None, :], 0.0).to(DTYPE), b_rows, b_out)
        b_left, b_right = halves_of(b_out, BLOCK_M, BLOCK_N)
        if not FIRST:
            if DIGITS == 8:
                b_low_left = low.load([i_m, i_n]).to(tl.int32)
                b_low_right = low.load([i_m, i_n + HALF]).to(tl.int32)
            else:
                b_low = low.load([i_m, i_n // 2]).to(tl.int32)
                b_low_left, b_low_right = b_low & 15, b_low >> 4
            b_left += joined(high.load([i_m, i_n]), b_low_left, DIGITS)
            b_right += joined(high.load([i_m, i_n + HALF]), b_low_right, DIGITS)
        if LAST:
            out.store([i_m, i_n], b_left.to(out.dtype))
            out.store([i_m, i_n + HALF], b_right.to(out.dtype))
        else:
            b_high_left, b_low_left = parted(b_left, DIGITS)
            b_high_right, b_low_right = parted(b_right, DIGITS)
            high.store([i_m, i_n], b_high_left)
            high.store([i_m, i_n + HALF], b_high_right)
            if DIGITS == 8:
                low.store([i_m, i_n], b_low_left.to(tl.uint8))
                low.store([i_m, i_n + HALF], b_low_right.to(tl.uint8))
            else:
                low.store([i_m, i_n // 2], (b_low_left | (b_low_right << 4)).to(tl.uint8))


def head_gradient(weight: Tensor, chunks: int) -> HeadGradient:
    """dW's sum, by the kernel that the device is fastest with."""
    if has_warpgroups(weight.device) and digits_for(chunks) == 4:
        from .flce_hopper import HopperHeadGradient

        return HopperHeadGradient(weight, chunks)
    return HeadGradient(weight, chunks)


class HeadGradient:
    """dW, summed over chunks. Beside the result, `total`, there is `low`, where there are several."""

    def __init__(self, weight: Tensor, chunks: int) -> None:
        (vocab, width), device = weight.shape, weight.device
        self.total = torch.empty(vocab, width, dtype=weight.dtype, device=device)
        whole = blocks_for(vocab, weight.dtype, True, kernel="exp_dw", device=device)
        # a small tile's epilogue is as long as a large one's, so two programs share a processor
        small = replace(whole, v=whole.v // 2, h=whole.h // 2, warps=max(whole.warps // 2, 4), stages=whole.stages + 2)
        self.blocks = fitting(whole, small, vocab, width, processors(device))
        self.programs = processors(device) * (1 if self.blocks == whole else 2)
        self.digits = digits_for(chunks)
        b, half = self.blocks, [self.blocks.n, self.blocks.v // 2]
        self.first_columns = torch.arange(triton.cdiv(vocab, b.n) + 1, device=device) * b.n
        self.sums = self.high = self.low = descriptor(self.total, half)
        if chunks > 1:
            size = vocab, triton.cdiv(width, b.v) * b.v * self.digits // 8
            self.high = descriptor(self.total.view(torch.int16), half)
            self.low = descriptor(torch.empty(size, dtype=torch.uint8, device=device), half)
        self.chunks, self.done = chunks, 0

    def add(self, exps: Tensor, scaled: Tensor, rows: Tensor, labels: Tensor, entry: Tensor, count: Tensor) -> None:
        """Add a chunk: ``exps`` (n, V) zero at the labels, ``scaled`` and ``rows`` (n, H), ``labels`` (n,) int64
        ascending, ``entry`` (n,) float32, ``count`` () int64."""
        (vocab, width), b = self.total.shape, self.blocks
        programs = min(self.programs, (len(self.first_columns) - 1) * triton.cdiv(width, b.v))
        least = 16  # rows of a product
        with on(exps.device):
            _dw_kernel[(programs,)](
                descriptor(exps, [b.h, b.n]), descriptor(scaled, [b.h, b.v]), descriptor(rows, [least, b.v]), labels,
                entry, torch.searchsorted(labels, self.first_columns), count, self.sums, self.high, self.low,
                len(rows), vocab, programs, H=width, BLOCK_M=b.n, BLOCK_N=b.v, BLOCK_K=b.h, BLOCK_L=least,
                DTYPE=compute_dtype(rows.dtype), DIGITS=self.digits, FIRST=self.done == 0,
                LAST=self.done == self.chunks - 1, num_warps=b.warps, num_stages=b.stages,
            )  # fmt: skip
        self.done += 1


@reused
@triton.jit(do_not_specialize=["n"])
def _dx_kernel(
    product,  # (n, H) float32, E @ W
    weight,  # (V, H)
    labels,  # (n,) int64
    factor,  # (n,) float32
    entry,  # (n,) float32
    order,  # (n,) int64, where each row belongs
    count,  # () int64
    out,  # (N, H)
    n,
    weight_row,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_n, m_h = o_n < n, o_h < H
    # rows that do not count have had no logits
    m_counts = m_n & (o_n < tl.load(count))
    m_in = m_counts[:, None] & m_h[None, :]
    b_out = tl.load(product + o_n.to(tl.int64)[:, None] * H + o_h[None, :], mask=m_in, other=0.0)
    o_v = tl.load(labels + o_n, mask=m_counts, other=0)
    b_w = tl.load(weight + o_v[:, None] * weight_row + o_h[None, :], mask=m_in, other=0.0).to(tl.float32)
    b_out = b_out * tl.load(factor + o_n, mask=m_n, other=0.0)[:, None]
    b_out += b_w * tl.load(entry + o_n, mask=m_n, other=0.0)[:, None]
    o_out = tl.load(order + o_n, mask=m_n, other=0)
    tl.store(out + o_out[:, None] * H + o_h[None, :], b_out.to(out.dtype.element_ty), mask=m_n[:, None] & m_h[None, :])


def put_hidden_gradient(
    product: Tensor,  # (n, H) float32
    weight: Tensor,  # (V, H), whole rows
    labels: Tensor,  # (n,) int64
    factor: Tensor,  # (n,) float32
    entry: Tensor,  # (n,) float32
    order: Tensor,  # (n,) int64
    count: Tensor,  # () int64
    out: Tensor,  # (N, H), in whose rows ``order`` dX is put
) -> None:
    """``product * factor + entry * W[label]``, zero in rows that do not count."""
    rows, width = product.shape
    grid, tile = row_tiles(rows, width)
    with on(product.device):
        _dx_kernel[grid](
            product, weight, labels, factor, entry, order, count, out, rows, weight.stride(0), H=width,
            **tile,
        )  # fmt: skip
