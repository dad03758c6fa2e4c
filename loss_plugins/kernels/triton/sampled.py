"""Cut cross-entropy, backward, filtered: an unbiased estimate of what the filter leaves out, eq. (12).

What is left out is small, but it is not noise: it is nearly the same for token after token, so it adds up where a
batch's own noise does not, and a fine-tuned model ends measurably worse without it (`bench/results`). So each block of
128 rows takes every ``apart``-th column, the next block the columns beside those, and counts what is left out there
``apart`` times: among ``apart`` blocks every column is taken once. Where that begins is read from the labels, so that
no place in a batch goes with a column, and two runs still give the same bits.

Column ``32 c + o`` is bit ``o`` of a word of the marks, and lies in row ``c`` of the head seen as (V / 32, 32 H): the
tiles here are of one ``o``, which bulk copies read as they are. The last V % 32 columns are always marked.

Letters: N rows, H hidden width, V vocabulary, W whole words, O columns of a word that a block takes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    INTERPRETED,
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
    transform,
    weighted_probabilities,
)
from .marks import MARKED_ROWS
from .sums import RowSums, add_tile

APART, LEAST_APART = 32, 8
"""Of how many columns a block takes one; fewer where there are so few blocks that a column would often have none."""
SAMPLE_BYTES = 32 << 20  # of dZ at a time


@reused
@triton.jit(do_not_specialize=["N", "first", "C", "tiles", "programs"])
def _sample_dz_kernel(
    hidden,  # (N, H) descriptor or pointer, rows that count first
    weight,  # (W, 32 H) descriptor, or pointer to (V, H)
    bias,  # (V,)
    lse,  # (N,) float32
    coef_p,  # (N,) float32
    words,  # (blocks, >= W) int32
    shift,  # () int64, any number
    count,  # () int64
    out,  # (N, O * tiles * BLOCK_V) descriptor or pointer
    sums,  # (O * tiles, N) float32: sums over a tile's columns of eq. (5), zeros where no row counts
    N,
    first,  # first word of the slice
    C,  # words of the slice
    tiles,
    programs,
    words_row,
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    scale,
    softcap,
    H: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
):
    """dZ of what the marks leave out of a block's share of the columns, ``APART`` times."""
    OWN: tl.constexpr = 32 // APART
    n = tl.load(count).to(tl.int32)
    height = tl.cdiv(n, 128)
    shares = OWN * tiles
    i_shift = (tl.load(shift) & (APART - 1)).to(tl.int32)
    for i_item in tl.range(tl.program_id(0), height * shares, programs, flatten=TMA):
        i_b, i_tile = _block_and_tile(i_item, height, shares, APART)
        i_o = (i_b + i_shift) % APART + i_tile // tiles * APART
        o_n = i_b * 128 + tl.arange(0, 128)
        m_n = o_n < n
        o_c = i_tile % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
        m_v = o_c < C
        o_v = (first + o_c) * 32 + i_o
        if TMA:
            b_z = tl.zeros((128, BLOCK_V), tl.float32)
            for i_h in range(0, H, BLOCK_H):
                # past the end of a hidden state are zeros, so what is read of the next column does not matter
                b_w = weight.load([first + i_tile % tiles * BLOCK_V, i_o * H + i_h])
                b_z = tl.dot(hidden.load([i_b * 128, i_h]).to(DTYPE), b_w.to(DTYPE).T, b_z)
        else:
            b_z = logits_tile(
                hidden + o_n.to(tl.int64)[:, None] * hidden_row, weight + o_v.to(tl.int64)[None, :] * weight_row,
                hidden_col, weight_col, 0, 0, m_n, m_v, H, 128, BLOCK_V, BLOCK_H, DTYPE, PRECISION, False,
            )  # fmt: skip
        b_z = transform(b_z, bias, o_v, m_v, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        # labels are marked, so they are not among what is left out
        b_coef = tl.load(coef_p + o_n, mask=m_n, other=0.0) * APART
        b_dz = weighted_probabilities(b_z, lse, b_coef, o_n, m_n, FAST)
        b_word = tl.load(words + i_b.to(tl.int64) * words_row + first + o_c, mask=m_v, other=-1)
        b_dz = tl.where(((b_word >> i_o) & 1)[None, :] == 1, 0.0, b_dz)
        tl.store(sums + i_tile.to(tl.int64) * N + o_n, tl.sum(b_dz, 1), mask=m_n)
        b_dz = before_transform(b_dz, b_z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        if TMA:
            out.store([i_b * 128, i_tile * BLOCK_V], b_dz.to(out.dtype))
        else:
            p_out = out + o_n.to(tl.int64)[:, None] * (shares * BLOCK_V) + i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
            tl.store(p_out, b_dz.to(out.dtype.element_ty), mask=(o_n < N)[:, None])


@triton.jit
def _block_and_tile(i_item, height, shares, APART: tl.constexpr):
    """Blocks that take the same columns do so one after the other, while these are in the cache."""
    full = height // APART
    more = height % APART  # places with a block more than `full`
    i_less = i_item - more * (full + 1) * shares
    turns = tl.where(i_less < 0, full + 1, tl.maximum(full, 1))
    i_place = tl.where(i_less < 0, i_item, i_less)
    i_first = i_place // (turns * shares) + tl.where(i_less < 0, 0, more)
    return i_first + i_place % turns * APART, i_place % (turns * shares) // turns


@reused
@triton.jit(do_not_specialize=["N", "first", "C", "tiles"])
def _sample_dx_kernel(
    weight,  # (W, 32 H) descriptor, or pointer to (V, H)
    dz,  # (N, O * tiles * BLOCK_V) descriptor or pointer
    shift,  # () int64, any number
    count,  # () int64
    total,  # (N, H) descriptor of half tiles, or pointer to float32
    low,  # see `RowSums`
    N,
    first,
    C,
    tiles,
    weight_row,
    weight_col,
    H: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """``dZ @ W`` over a block's share of the columns, added; nobody else adds to this tile meanwhile."""
    OWN: tl.constexpr = 32 // APART
    i_b = tl.program_id(0)
    n = tl.load(count).to(tl.int32)
    if i_b * 128 >= n:
        return
    i_first = ((i_b + tl.load(shift)) & (APART - 1)).to(tl.int32)
    o_n = i_b * 128 + tl.arange(0, 128)
    m_n = o_n < n
    i_h = tl.program_id(1) * BLOCK_H
    o_h = i_h + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    steps = tiles * (BLOCK_V // BLOCK_K)
    b_out = tl.zeros((128, BLOCK_H), tl.float32)
    for i_step in range(OWN * steps):
        i_o = i_first + i_step // steps * APART
        i_c = i_step % steps * BLOCK_K
        if TMA:
            b_dz = dz.load([i_b * 128, i_step * BLOCK_K])
            b_w = weight.load([first + i_c, i_o * H + i_h])
        else:
            o_k = tl.arange(0, BLOCK_K)
            p_dz = dz + o_n.to(tl.int64)[:, None] * (OWN * tiles * BLOCK_V) + (i_step * BLOCK_K + o_k)[None, :]
            b_dz = tl.load(p_dz, mask=m_n[:, None], other=0.0)
            o_v = ((first + i_c + o_k) * 32 + i_o).to(tl.int64)
            p_w = weight + o_v[:, None] * weight_row + o_h[None, :] * weight_col
            b_w = tl.load(p_w, mask=(i_c + o_k < C)[:, None] & m_h[None, :], other=0.0)
        b_out = tl.dot(b_dz.to(DTYPE), b_w.to(DTYPE), b_out, input_precision=PRECISION)
    if TMA or DIGITS > 0:
        add_tile(total, low, i_b * 128, i_h, b_out, 128, BLOCK_H, DIGITS)
    else:
        p_out = total + o_n.to(tl.int64)[:, None] * H + o_h[None, :]
        m_out = m_n[:, None] & m_h[None, :]
        tl.store(p_out, tl.load(p_out, mask=m_out, other=0.0) + b_out, mask=m_out)


@reused
@triton.jit(do_not_specialize=["N", "first", "C", "tiles"])
def _sample_dw_kernel(
    hidden,  # (N, H) descriptor or pointer, rows that count first, zeros behind
    dz,  # (N, O * tiles * BLOCK_V) descriptor or pointer
    shift,  # () int64, any number
    count,  # () int64
    factor,  # () float32
    out,  # (V, H), or descriptor of (W, 32 H)
    N,
    first,
    C,
    tiles,
    hidden_row,
    hidden_col,
    H: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    """``dZ.T @ X`` of a tile of columns, over the blocks that take it, stored; one program owns a tile."""
    OWN: tl.constexpr = 32 // APART
    STEPS: tl.constexpr = 128 // BLOCK_K
    n = tl.load(count).to(tl.int32)
    strips: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    i_h = tl.program_id(0) % strips * BLOCK_H
    i_tile = tl.program_id(0) // strips
    pieces = tiles * (BLOCK_V // BLOCK_C)
    i_o = i_tile // pieces
    i_c = i_tile % pieces * BLOCK_C
    o_h = i_h + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    o_c = i_c + tl.arange(0, BLOCK_C)
    i_begin = ((i_o - tl.load(shift)) & (APART - 1)).to(tl.int32)
    turns = tl.maximum(tl.cdiv(tl.cdiv(n, 128) - i_begin, APART), 0)
    i_column = i_o // APART * (tiles * BLOCK_V) + i_c
    b_out = tl.zeros((BLOCK_C, BLOCK_H), tl.float32)
    for i_step in range(turns * STEPS):
        i_n = (i_begin + i_step // STEPS * APART) * 128 + i_step % STEPS * BLOCK_K
        if TMA:
            b_dz = dz.load([i_n, i_column])
            b_x = hidden.load([i_n, i_h])
        else:
            o_n = i_n + tl.arange(0, BLOCK_K)
            m_n = o_n < N
            p_dz = dz + o_n.to(tl.int64)[:, None] * (OWN * tiles * BLOCK_V) + i_column + tl.arange(0, BLOCK_C)[None, :]
            b_dz = tl.load(p_dz, mask=m_n[:, None], other=0.0)
            p_x = hidden + o_n.to(tl.int64)[:, None] * hidden_row + o_h[None, :] * hidden_col
            b_x = tl.load(p_x, mask=m_n[:, None] & m_h[None, :], other=0.0)
        b_out = tl.dot(b_dz.to(DTYPE).T, b_x.to(DTYPE), b_out, input_precision=PRECISION)
    b_out *= tl.load(factor)
    if TMA_OUT:
        # only the last slice has a tile that reaches past its end, and there the descriptor ends too
        out.store([first + i_c, i_o * H + i_h], b_out.to(out.dtype))
    else:
        o_v = ((first + o_c) * 32 + i_o).to(tl.int64)
        p_out = out + o_v[:, None] * H + o_h[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_c < C)[:, None] & m_h[None, :])


def add_sample(
    packed: Tensor,  # (N, H), rows that count first, zeros behind
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    row_data: list[Tensor],  # labels, lse, coefficient of p, (N,) each, in that order
    count: Tensor,  # () int64, rows that count, 0 if everything is computed elsewhere
    unit: Tensor,  # () float32, dZ's scale
    scale: float,
    softcap: float,
    words: Tensor,  # (blocks, ceil(V / 32)) int32, the marks
    d_hidden: RowSums | None,  # to which dX / unit is added
    d_weight: Tensor | None,  # (V, H), where dW is stored, zeros if no row counts
) -> Tensor:
    """Estimate what the marks leave out. Returns (N,) float32, how much of each row's sum over eq. (5) that is."""
    (rows, width), height, whole = packed.shape, len(words), weight.shape[0] // 32
    apart = columns_apart(height)
    own = 32 // apart
    labels, lse, coef_p = row_data
    shift = labels.sum()
    weight = gathered(weight, packed.dtype)
    bulk = _is_bulk(packed, weight)
    sizes = max(rows, 2 * MARKED_ROWS), packed.dtype, bulk
    blocks = blocks_for(*sizes, kernel="dz", device=packed.device)
    # dW: few products and much to store, so that two programs share a processor
    small = blocks_for(*sizes, kernel="filtered_dx", device=packed.device)
    block, depth = blocks.v, min(blocks.h, small.h, 128 // weight.dtype.itemsize)
    common: dict[str, Any] = {
        "H": width, "APART": apart, "BLOCK_V": block, "DTYPE": compute_dtype(packed.dtype),
        "PRECISION": precision(packed, packed.dtype),
    }  # fmt: skip
    launch = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    most = _slice_words(rows, own, whole, packed.element_size(), block)
    dz = packed.new_empty(rows, own * most)
    taken = torch.zeros(0 if whole else rows, dtype=torch.float32, device=packed.device)
    as_words = weight[: whole * 32].view(whole, 32 * width) if bulk else weight
    strips = triton.cdiv(width, block)
    store_bulk = bulk and width % small.v == 0 and d_weight is not None and d_weight.dtype == packed.dtype
    d_words = d_weight[: whole * 32].view(whole, 32 * width) if store_bulk else d_weight
    for first in range(0, whole, most):
        wide = min(most, whole - first)
        tiles = triton.cdiv(wide, block)
        part = dz.view(-1)[: rows * own * tiles * block].view(rows, -1)
        sums = torch.zeros(own * tiles, rows, dtype=torch.float32, device=packed.device)
        with on(packed.device):
            programs = min(height * own * tiles, processors(packed.device) if bulk else 1 << 20)
            _sample_dz_kernel[(programs,)](
                descriptor(packed, [MARKED_ROWS, depth]) if bulk else packed,
                descriptor(as_words, [block, depth]) if bulk else weight,
                bias if bias is not None else packed, lse, coef_p, words, shift, count,
                descriptor(part, [MARKED_ROWS, block]) if bulk else part, sums, rows, first, wide, tiles, programs,
                words.stride(0), packed.stride(0), packed.stride(1), weight.stride(0), weight.stride(1),
                float(scale), float(softcap), BLOCK_H=depth, TMA=bulk, HAS_BIAS=bias is not None,
                HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0, FAST=fast_exp(packed.device, packed.dtype),
                **common, **launch,
            )  # fmt: skip
            if d_hidden is not None:
                few = d_hidden.digits > 0
                add_bulk = bulk and (few or not INTERPRETED)  # the interpreter's copies cannot add
                total = d_hidden.tiles(MARKED_ROWS, block) if add_bulk or few else (d_hidden.total, d_hidden.total)
                _sample_dx_kernel[(height, strips)](
                    descriptor(as_words, [depth, block]) if add_bulk else weight,
                    descriptor(part, [MARKED_ROWS, depth]) if add_bulk else part, shift, count, *total, rows, first,
                    wide, tiles, weight.stride(0), weight.stride(1), BLOCK_H=block, BLOCK_K=depth, TMA=add_bulk,
                    DIGITS=d_hidden.digits, **common, **launch,
                )  # fmt: skip
            if d_weight is not None:
                _sample_dw_kernel[(32 * tiles * (block // 128) * triton.cdiv(width, small.v),)](
                    descriptor(packed, [depth, small.v]) if bulk else packed,
                    descriptor(part, [depth, 128]) if bulk else part, shift, count, unit,
                    descriptor(d_words, [128, small.v]) if store_bulk else d_weight, rows, first, wide, tiles,
                    packed.stride(0), packed.stride(1), BLOCK_C=128, BLOCK_H=small.v, BLOCK_K=depth, TMA=bulk,
                    TMA_OUT=store_bulk, **common, num_warps=small.warps, num_stages=3,
                )  # fmt: skip
        taken = taken + sums.sum(0) if first else sums.sum(0)
    if d_weight is not None:
        d_weight[whole * 32 :].zero_()
    return taken


def sample_slices(packed: Tensor, weight: Tensor) -> int:
    """How many slices a sample has, each of which adds to dX."""
    rows, whole = len(packed), weight.shape[0] // 32
    sizes = max(rows, 2 * MARKED_ROWS), packed.dtype, _is_bulk(packed, weight)
    own = 32 // columns_apart(triton.cdiv(rows, MARKED_ROWS))
    block = blocks_for(*sizes, kernel="dz", device=packed.device).v
    return triton.cdiv(whole, _slice_words(rows, own, whole, packed.element_size(), block))


def _is_bulk(packed: Tensor, weight: Tensor) -> bool:
    same = weight.dtype == packed.dtype and weight.is_contiguous()
    return has_bulk_copies(packed.device) and same and is_bulk_readable(packed) and is_bulk_readable(weight)


def _slice_words(rows: int, own: int, whole: int, itemsize: int, block: int) -> int:
    """Words of a slice whose dZ takes `SAMPLE_BYTES`, in tiles of ``block``."""
    most = max(SAMPLE_BYTES // (rows * own * itemsize * block), 1) * block
    return min(most, max(triton.cdiv(whole, block), 1) * block)


def columns_apart(blocks: int) -> int:
    """Of how many columns each of so many blocks takes one."""
    return max(LEAST_APART, min(APART, 1 << max(blocks.bit_length() - 1, 0)))
