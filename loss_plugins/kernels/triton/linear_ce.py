"""Cut cross-entropy, forward: one pass over the vocabulary, nothing of size ``N * V`` anywhere.

Each program owns a block of rows and a strip of the vocabulary. It keeps its rows' running maximum, sum and label logit
in registers, eq. (2), and writes them once; a second, tiny kernel merges the strips. No atomics and no locks, so the
result is the same every time. How many rows count is known on the device only, so there the programs divide the work
among themselves: with half of the rows ignored there are twice as many strips.
Peak beside the results: a copy of the rows, ``N * H``, with those that count first; six numbers a program and row; and
64 MiB of the weight in the operands' type where it has another (a float32 head under autocast).
For a filtered backward it also marks the columns in which some row of a block has a probability that counts, and sums
each row's probability in entries that do (`marks.py`).

Letters: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    Blocks,
    blocks_for,
    cached_rows,
    can_cast,
    can_tma,
    cdiv,
    compute_dtype,
    descriptor,
    exp_difference,
    fast_exp,
    gathered,
    log_of,
    logits_tile,
    on,
    precision,
    processors,
    reused,
    transform,
)
from .marks import MARKED_ROWS, Marks, hot_reference, is_markable, marks_of
from .row_numbers import losses, pack

CAST_BYTES = 64 << 20
"""What a part of the weight that is cast takes: room beside the results, and still many tiles."""


@reused
@triton.jit(do_not_specialize=["first", "V", "i_slice", "slices", "tiles", "N"])
def _linear_ce_kernel(
    hidden,  # (N, H) descriptor or pointer, rows that count first
    weight,  # (V, H) descriptor or pointer, the slice
    bias,  # of the whole vocabulary
    class_weight,  # of the whole vocabulary
    count,  # () int64, how many rows count
    parts,  # (6, slices, programs, BLOCK_N) float32: anchor, sum, largest, weighted sum, moment, kept
    best,  # (slices, programs, BLOCK_N) int32
    words,  # (blocks of 128 rows, words_row) int32: bit v % 32 of word v // 32 says whether column v counts
    hot,  # (HOT, N) float32, log-sum-exp over some columns that are likely large
    first,  # first column of this slice of the vocabulary
    V,  # columns of this slice
    i_slice,
    slices,
    tiles,  # of a whole slice
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    words_row,
    below,  # the share of a row's sum from which an entry counts
    N,
    scale,
    softcap,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_BEST: tl.constexpr,
    HOT: tl.constexpr,  # 0: no marks
    WHOLE: tl.constexpr,  # no tile reaches past the end of this slice
    FAST: tl.constexpr,
):
    n = tl.load(count).to(tl.int32)
    programs = tl.num_programs(0)
    strips = strips_of(n, programs, tiles, BLOCK_N)
    i_block = tl.program_id(0) // strips
    i_strip = tl.program_id(0) % strips
    if i_block * BLOCK_N >= n:
        return
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    if TMA:
        rows = hidden
    else:
        rows = hidden + o_n.to(tl.int64)[:, None] * hidden_row

    b_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    b_weighted = tl.zeros((BLOCK_N,), tl.float32)
    b_moment = tl.zeros((BLOCK_N,), tl.float32)
    b_top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_best = tl.zeros((BLOCK_N,), tl.int32)
    b_kept = tl.zeros((BLOCK_N,), tl.float32)
    if HOT:
        b_max = hot_of(hot, o_n, m_n, N, HOT)
    for i_tile in tl.range((tiles * i_strip) // strips, (tiles * (i_strip + 1)) // strips, flatten=TMA):
        o_v = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
        m_v = o_v < V
        if TMA:
            columns = weight
        else:
            columns = weight + o_v.to(tl.int64)[None, :] * weight_row
        b_z = logits_tile(
            rows, columns, hidden_col, weight_col, i_block * BLOCK_N, i_tile * BLOCK_V, m_n, m_v, H, BLOCK_N, BLOCK_V,
            BLOCK_H, DTYPE, PRECISION, TMA,
        )  # fmt: skip
        b_z = transform(b_z, bias + first, o_v, m_v, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        if HAS_SMOOTHING:
            b_real = tl.where(m_v[None, :], b_z, 0.0)
            if HAS_CLASS_WEIGHT:
                b_real *= tl.load(class_weight + first + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
            b_weighted += tl.sum(b_real, 1)
        if not WHOLE:
            b_z = tl.where(m_v[None, :], b_z, float("-inf"))
        b_tile_max = tl.max(b_z, 1)
        if WANT_BEST:
            b_tile_best = tl.argmax(b_z, 1) + first + i_tile * BLOCK_V
            b_best = tl.where(b_tile_max > b_top, b_tile_best, b_best)
            b_top = tl.maximum(b_top, b_tile_max)
        if HOT:
            # the exponentials are shares of what a row's whole sum is at least: what is summed so far, the sum over the
            # hot columns, or the largest entry. So no entry that counts is missed, and a few too many are marked.
            b_new = tl.maximum(b_max + log_of(tl.maximum(b_sum, 1.0), FAST), b_tile_max)
        else:
            b_new = tl.maximum(b_max, b_tile_max)
        # a row whose logits are all -inf so far keeps its zero sum: exp(-inf - -inf) would be NaN
        b_anchor = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_carry = tl.exp(b_max - b_anchor)
        b_share = exp_difference(b_z, b_anchor[:, None], FAST)
        if WANT_ENTROPY:
            # relative to the anchor, so that no two large numbers are subtracted in the end
            b_moved = tl.where(b_max == float("-inf"), 0.0, b_max - b_anchor) * b_sum
            b_moment = (b_moment + b_moved) * b_carry + tl.sum(
                b_share * tl.where(b_share > 0, b_z - b_anchor[:, None], 0.0), 1
            )
        b_sum = b_sum * b_carry + tl.sum(b_share, 1)
        if HOT:
            b_kept = b_kept * b_carry + tl.sum(tl.where(b_share >= below, b_share, 0.0), 1)
            b_word = marked_words(b_share, below, BLOCK_N, BLOCK_V, FAST)
            store_words(words, words_row, b_word, i_block, first + i_tile * BLOCK_V, n, BLOCK_N, BLOCK_V)
        b_max = b_new

    o_part = (i_slice * programs + tl.program_id(0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_part = parts + o_part
    size = slices * programs * BLOCK_N
    tl.store(p_part, b_max)
    tl.store(p_part + size, b_sum)
    if HAS_SMOOTHING:
        tl.store(p_part + 3 * size, b_weighted)
    if WANT_ENTROPY:
        tl.store(p_part + 4 * size, b_moment)
    if WANT_BEST:
        tl.store(best + o_part, b_best)
        tl.store(p_part + 2 * size, b_top)
    if HOT:
        tl.store(p_part + 5 * size, b_kept)


@triton.jit
def marked_words(b_share, below, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, FAST: tl.constexpr):
    """(BLOCK_N / 128, BLOCK_V / 32) int32: bit v % 32 of word v // 32 says whether column v has a share of ``below``.

    ``FAST``: in the order in which a GPU's products lie in its registers, what a thread has before what a warp has, so
    that little is exchanged.
    """
    if FAST:
        b_most = tl.max(tl.reshape(b_share, (BLOCK_N // 128, 8, 2, 8, BLOCK_V)), 2)
        b_word = tl.sum(tl.reshape(column_bits(b_most, below, BLOCK_V), (BLOCK_N // 128, 8, 8, BLOCK_V // 32, 32)), 4)
        b_word = tl.reduce(tl.reduce(b_word, 2, _either), 1, _either)
    else:
        b_most = tl.max(tl.reshape(b_share, (BLOCK_N // 128, 128, BLOCK_V)), 1)
        b_word = tl.sum(tl.reshape(column_bits(b_most, below, BLOCK_V), (BLOCK_N // 128, BLOCK_V // 32, 32)), 2)
    return b_word


@triton.jit
def store_words(words, words_row, b_word, i_block, i_v, n, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    o_block = i_block * (BLOCK_N // 128) + tl.arange(0, BLOCK_N // 128)
    o_word = i_v // 32 + tl.arange(0, BLOCK_V // 32)
    p_word = words + o_block.to(tl.int64)[:, None] * words_row + o_word[None, :]
    tl.store(p_word, b_word, mask=(o_block * 128 < n)[:, None] & (o_word < words_row)[None, :])


@triton.jit
def column_bits(b_most, below, BLOCK_V: tl.constexpr):
    # shares are not negative, so they compare as integers do, whose sign needs no register of truth values
    b_less = b_most.to(tl.int32, bitcast=True) - tl.full((1,), below, tl.float32).to(tl.int32, bitcast=True)
    return ~(b_less >> 31) & (1 << (tl.arange(0, BLOCK_V) % 32))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def hot_of(hot, o_n, m_n, N, HOT: tl.constexpr):
    """Log-sum-exp over the hot columns, from that of each strip of them. Rows that do not count have one out of reach,
    so they mark nothing."""
    b_hot = tl.load(hot + o_n, mask=m_n, other=1e30)
    for i_hot in tl.static_range(1, HOT):
        b_more = tl.load(hot + i_hot * N + o_n, mask=m_n, other=0.0)
        b_high = tl.maximum(b_hot, b_more)
        b_hot = b_high + tl.log(1 + tl.exp(tl.minimum(b_hot, b_more) - b_high))
        b_hot = tl.where(m_n, b_hot, 1e30)
    return b_hot


@reused
@triton.jit
def _label_logits_kernel(
    hidden,  # (N, H), rows that count first
    weight,  # (V, H)
    bias,  # (V,)
    labels,  # (N,) int64
    count,  # () int64
    out,  # (N,) float32
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    scale,
    softcap,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The diagonal of a block's rows times their labels' columns: the same sums as in the forward, whose tiles need
    not compare every column with every label then."""
    n = tl.load(count).to(tl.int32)
    if tl.program_id(0) * BLOCK_N >= n:
        return
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    o_v = tl.load(labels + o_n, mask=m_n, other=0)
    rows = hidden + o_n.to(tl.int64)[:, None] * hidden_row
    columns = weight + o_v[None, :] * weight_row
    b_z = logits_tile(
        rows, columns, hidden_col, weight_col, 0, 0, m_n, m_n, H, BLOCK_N, BLOCK_N, BLOCK_H, DTYPE, PRECISION, False
    )
    b_z = transform(b_z, bias, o_v, m_n, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    b_own = tl.arange(0, BLOCK_N)[:, None] == tl.arange(0, BLOCK_N)[None, :]
    tl.store(out + o_n, tl.sum(tl.where(b_own, b_z, 0.0), 1), mask=m_n)


def label_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    count: Tensor,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
) -> Tensor:
    """(N,) float32 logit of the label of each row that counts."""
    rows, width = hidden.shape
    weight = gathered(weight, dtype)
    out = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    block = 64 if dtype.itemsize == 2 else 32
    with on(hidden.device):
        _label_logits_kernel[(cdiv(rows, block),)](
            hidden, weight, bias if bias is not None else hidden, labels, count, out,
            hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1), float(scale), float(softcap),
            H=width, BLOCK_N=block, BLOCK_H=64 if weight.dtype.itemsize == 2 else 32, DTYPE=compute_dtype(dtype),
            PRECISION=precision(hidden, dtype), HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0,
            HAS_SOFTCAP=softcap != 0.0, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def strips_of(n, programs, tiles, BLOCK_N: tl.constexpr):
    """Into how many strips the programs cut the vocabulary when ``n`` rows count."""
    return tl.maximum(tl.minimum(programs // tl.maximum(tl.cdiv(n, BLOCK_N), 1), tiles), 1)


@reused
@triton.jit(do_not_specialize=["N", "slices", "programs", "tiles"])
def _merge_kernel(
    parts,  # (6, slices, programs, BLOCK_N) float32
    best,  # (slices, programs, BLOCK_N) int32
    count,  # () int64
    out,  # (6, N) float32
    out_best,  # (N,) int32
    N,
    slices,
    programs,
    tiles,
    BLOCK_N: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_BEST: tl.constexpr,
    MARKED: tl.constexpr,
):
    i_block = tl.program_id(0)
    n = tl.load(count).to(tl.int32)
    if i_block * BLOCK_N >= n:
        return
    strips = strips_of(n, programs, tiles, BLOCK_N)
    size = slices * programs * BLOCK_N
    b_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    b_weighted = tl.zeros((BLOCK_N,), tl.float32)
    b_moment = tl.zeros((BLOCK_N,), tl.float32)
    b_top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_best = tl.zeros((BLOCK_N,), tl.int32)
    b_kept = tl.zeros((BLOCK_N,), tl.float32)
    for i_part in range(slices * strips):
        i_program = i_part // strips * programs + i_block * strips + i_part % strips
        o_part = i_program * BLOCK_N + tl.arange(0, BLOCK_N)
        b_max_s = tl.load(parts + o_part)
        b_sum_s = tl.load(parts + size + o_part)
        b_new = tl.maximum(b_max, b_max_s)
        b_anchor = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_carry = tl.exp(b_max - b_anchor)
        b_carry_s = tl.exp(b_max_s - b_anchor)
        if HAS_SMOOTHING:
            b_weighted += tl.load(parts + 3 * size + o_part)
        if WANT_ENTROPY:
            b_moved = tl.where(b_max == float("-inf"), 0.0, b_max - b_anchor) * b_sum
            b_moved_s = tl.where(b_max_s == float("-inf"), 0.0, b_max_s - b_anchor) * b_sum_s
            b_moment_s = tl.load(parts + 4 * size + o_part)
            b_moment = (b_moment + b_moved) * b_carry + (b_moment_s + b_moved_s) * b_carry_s
        if WANT_BEST:
            # only a larger one, so that the first of equals stays
            b_top_s = tl.load(parts + 2 * size + o_part)
            b_best = tl.where(b_top_s > b_top, tl.load(best + o_part), b_best)
            b_top = tl.maximum(b_top, b_top_s)
        if MARKED:
            b_kept = b_kept * b_carry + tl.load(parts + 5 * size + o_part) * b_carry_s
        b_sum = b_sum * b_carry + b_sum_s * b_carry_s
        b_max = b_new
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    tl.store(out + o_n, b_max, mask=m_n)
    tl.store(out + N + o_n, b_sum, mask=m_n)
    tl.store(out + 3 * N + o_n, b_weighted, mask=m_n)
    tl.store(out + 4 * N + o_n, b_moment, mask=m_n)
    if WANT_BEST:
        tl.store(out_best + o_n, b_best, mask=m_n)
    if MARKED:
        tl.store(out + 5 * N + o_n, b_kept, mask=m_n)


def linear_ce_forward(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    tile_bytes: int,
    below: float = 0.0,
    bound: float = 1.0,
    want_dropped: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, lse, entropy, predicted, dropped, marks) of each row; entropy to dropped are empty unless asked for.

    With ``below`` above 0 the backward leaves out columns in which no row of a block reaches that probability, unless
    a row of the block would lose more than ``bound``. ``dropped`` is at most what a row loses; marks: see `marks_of`.
    """
    rows, vocab, device = hidden.shape[0], weight.shape[0], hidden.device
    # marks, and behind them which classes are some row's label
    words = torch.zeros(
        cdiv(rows, MARKED_ROWS) + 1 if below > 0 else 0, cdiv(vocab, 32), dtype=torch.int32, device=device
    )
    packed = pack(hidden, labels, ignore_index, dtype, vocab, words[-1] if below > 0 else None)
    readable = can_cast(packed.rows, weight, dtype) or can_tma(packed.rows, weight, dtype)
    blocks = blocks_for(rows, dtype, readable, tall=True, device=device)
    mark = below > 0 and is_markable(rows, blocks.n, dtype)
    hot = packed.rows.new_empty(0)
    if mark:
        hot = hot_reference(packed.rows, weight, bias, words[-1], packed.count, scale, softcap, dtype)
    merged, top = _row_sums(
        packed.rows, weight, bias, class_weight, packed.count, blocks, scale, softcap, label_smoothing > 0,
        want_entropy, want_predicted, words, hot, below,
    )  # fmt: skip
    target = label_logits(packed.rows, weight, bias, packed.labels, packed.count, scale, softcap, dtype)
    if mark:
        marks = marks_of(
            words[:-1], vocab, packed.labels, packed.count, merged[0], merged[1], merged[5], target, bound, want_dropped
        )
    else:
        marks = Marks.none(hidden, vocab, below)
    results = losses(
        merged, target, top, marks.dropped, labels, packed.place, class_weight, ignore_index, label_smoothing, z_loss,
        vocab, want_entropy, want_predicted, want_dropped,
    )  # fmt: skip
    return (*results, marks.words)


def _row_sums(
    packed: Tensor,  # (N, H), rows that count first
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    class_weight: Tensor | None,  # (V,)
    count: Tensor,  # () int64
    blocks: Blocks,
    scale: float,
    softcap: float,
    smoothing: bool,
    want_entropy: bool,
    want_predicted: bool,
    words: Tensor,  # (blocks of 128 rows, ceil(V / 32)) int32, zeros, where marks are stored
    hot: Tensor,  # (strips, N) float32, see `hot_reference`; (0,): no marks
    below: float,
) -> tuple[Tensor, Tensor]:
    """The pass over the vocabulary: what `merge_strips` returns."""
    (rows, width), vocab, dtype, device = packed.shape, weight.shape[0], packed.dtype, packed.device
    mark = len(hot) > 0
    cast = can_cast(packed, weight, dtype)
    columns = cast_columns(width, dtype, blocks) if cast and blocks.tma else vocab
    slices, tiles = cdiv(vocab, columns), cdiv(min(columns, vocab), blocks.v)
    programs = programs_for(rows, packed.stride(0) * packed.element_size(), tiles, blocks, device)
    parts = torch.empty(6, slices, programs, blocks.n, dtype=torch.float32, device=device)
    best = torch.empty(slices if want_predicted else 0, programs, blocks.n, dtype=torch.int32, device=device)
    with on(device):
        for i_slice in range(slices):
            first = i_slice * columns
            part = weight[first : first + columns]
            part = part.to(dtype) if blocks.tma else part
            _linear_ce_kernel[(programs,)](
                descriptor(packed, [blocks.n, blocks.h]) if blocks.tma else packed,
                descriptor(part, [blocks.v, blocks.h]) if blocks.tma else part,
                bias if bias is not None else packed,
                class_weight if class_weight is not None else packed,
                count, parts, best, words, hot, first, part.shape[0], i_slice, slices, tiles,
                packed.stride(0), packed.stride(1), part.stride(0), part.stride(1), words.stride(0), float(below), rows,
                float(scale), float(softcap),
                H=width, BLOCK_N=blocks.n, BLOCK_V=blocks.v, BLOCK_H=blocks.h,
                DTYPE=compute_dtype(dtype), PRECISION=precision(packed, dtype), TMA=blocks.tma,
                HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0,
                HAS_SMOOTHING=smoothing, HAS_CLASS_WEIGHT=class_weight is not None,
                WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted, HOT=len(hot),
                WHOLE=part.shape[0] == tiles * blocks.v, FAST=fast_exp(device, dtype),
                num_warps=blocks.warps, num_stages=blocks.stages,
            )  # fmt: skip
        return merge_strips(
            parts, best, count, rows, tiles, blocks, smoothing, want_entropy, want_predicted, marked=mark
        )  # fmt: skip


def merge_strips(
    parts: Tensor,
    best: Tensor,
    count: Tensor,
    rows: int,
    tiles: int,
    blocks: Blocks,
    smoothing: bool,
    want_entropy: bool,
    want_predicted: bool,
    marked: bool = False,
) -> tuple[Tensor, Tensor]:
    """((6, N) anchor, sum, -, weighted sum, moment, kept; (N,) best) of the rows that count, else 0."""
    merged = torch.zeros(6, rows, dtype=torch.float32, device=parts.device)
    top = torch.zeros(rows if want_predicted else 0, dtype=torch.int32, device=parts.device)
    _merge_kernel[(cdiv(rows, blocks.n),)](
        parts, best, count, merged, top, rows, parts.shape[1], parts.shape[2], tiles, BLOCK_N=blocks.n,
        HAS_SMOOTHING=smoothing, WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted,
        MARKED=marked,
    )  # fmt: skip
    return merged, top


def cast_columns(width: int, dtype: torch.dtype, blocks: Blocks) -> int:
    """Columns of a slice whose cast weight takes `CAST_BYTES`."""
    return max(blocks.v, CAST_BYTES // (width * dtype.itemsize) // blocks.v * blocks.v)


def programs_for(rows: int, row_bytes: int, tiles: int, blocks: Blocks, device: torch.device) -> int:
    """How many programs to launch: a strip of the vocabulary each, the fewest that leave little of the device idle.

    Programs of a block of rows follow each other, so more strips also mean fewer rows at a time. Every program reads
    its rows again for each tile of the vocabulary: where all rows are much more than the cache holds, no more than stay
    there.
    """
    height, slots = cdiv(rows, blocks.n), processors(device)
    cached = max(1, cached_rows(device, row_bytes) // blocks.n)
    # an H200's forward of 38 and of 67 MB of rows is as fast as its cache of 60 MB lets it be already
    least = -(-slots // cached) if height > cached * 8 // 3 else 1
    best, best_use = 1, 0.0
    for strips in range(min(least, tiles), min(tiles, 4 * slots) + 1):
        # a turn takes as long as its program with the most tiles, and half a tile to begin and to end
        use = height * tiles / (cdiv(height * strips, slots) * slots * (cdiv(tiles, strips) + 0.5))
        if use > best_use:
            best, best_use = strips, use
        if best_use >= 0.96:
            break
    return height * best
