"""The forward says where the backward must look: which columns count for which block of rows.

A trained softmax gives a probability that matters to few classes: at 2**-13, two columns in a hundred count for some
row of a block of 128, and six of seven count for no row at all. The forward knows each logit, but not yet its row's
log-sum-exp. Any part of the sum is at most the whole, so comparing with a part never misses an entry. The part is what
the program has summed so far, the sum over the classes that are some row's label (`hot_reference`), or the largest
entry at hand, whichever is largest, and exponentials are taken as shares of it: at 2**-13 that marks 2.4 columns in a
hundred of Gemma-3-270M's, of which 1.9 count in the end.

`marks_of` bounds what a row loses: a block with a row that would lose more keeps every column.
`listed` orders the columns by the blocks they count for, so that columns beside each other count for the same blocks,
and lists them for the kernels of the backward, cut into rounds that fit the workspace. Everything is counted on the
device; the host never waits.

Letters: N rows, V vocabulary; a block is 128 rows, a tile 128 columns in that order, a pair a column that counts for a
block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import cdiv, compute_dtype, gathered, logits_tile, on, precision, processors, reused, transform

MARKED_ROWS = 128
MOST_HOT = 4096
MOST_PAIRS = 1 / 12
"""From this share of all pairs on everything is computed, since the lists cost more than they save."""


@dataclass(frozen=True)
class Marks:
    """``words`` (blocks, ceil(V / 32)) int32: bit ``v % 32`` of word ``v // 32`` says that column v counts for a block;
    ``dropped`` (N,) float32: at most the probability that each row loses."""

    words: Tensor
    dropped: Tensor

    @classmethod
    def none(cls, hidden: Tensor, vocab: int, below: float) -> Marks:
        """Where nothing is left out: no words, or all columns count if a filter was asked for."""
        blocks = cdiv(hidden.shape[0], MARKED_ROWS) if below > 0 else 0
        words = torch.full((blocks, cdiv(vocab, 32)), -1, dtype=torch.int32, device=hidden.device)
        return cls(words, torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device))


def is_markable(rows: int, block: int, dtype: torch.dtype) -> bool:
    """Whether a filter pays: half types, whose products are large, and enough rows for the lists to cost little."""
    return dtype.itemsize == 2 and block % MARKED_ROWS == 0 and rows >= 2 * MARKED_ROWS


@reused
@triton.jit(do_not_specialize=["N"])
def _hot_kernel(
    hidden,  # (N, H), rows that count first
    weight,  # (V, H)
    bias,
    columns,  # (K,) int64
    count,  # () int64, rows that count
    hot_count,  # () int64, columns that are given
    out,  # (STRIPS, N) float32
    N,
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    scale,
    softcap,
    H: tl.constexpr,
    STRIPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Log-sum-exp over some columns, each strip of them for itself."""
    n = tl.load(count).to(tl.int32)
    k = tl.load(hot_count).to(tl.int32)
    i_n = tl.program_id(0) // STRIPS * BLOCK_N
    i_strip = tl.program_id(0) % STRIPS
    if i_n >= n:
        return
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    rows = hidden + o_n.to(tl.int64)[:, None] * hidden_row
    b_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    tiles = tl.cdiv(k, BLOCK_V)
    for i_tile in range((tiles * i_strip) // STRIPS, (tiles * (i_strip + 1)) // STRIPS):
        o_k = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
        m_k = o_k < k
        o_v = tl.load(columns + o_k, mask=m_k, other=0)
        b_z = logits_tile(
            rows, weight + o_v[None, :] * weight_row, hidden_col, weight_col, 0, 0, m_n, m_k, H, BLOCK_N, BLOCK_V,
            BLOCK_H, DTYPE, PRECISION, False,
        )  # fmt: skip
        b_z = transform(b_z, bias, o_v, m_k, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        b_z = tl.where(m_k[None, :], b_z, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_z, 1))
        b_anchor = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_max - b_anchor) + tl.sum(tl.exp(b_z - b_anchor[:, None]), 1)
        b_max = b_new
    # a strip without columns: -inf, but finite, so that sums of strips stay numbers
    b_lse = tl.where(b_sum > 0, b_max + tl.log(b_sum), -1e30)
    tl.store(out + i_strip * N + o_n, b_lse, mask=m_n)


def hot_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Tensor,  # (ceil(V / 32),) int32: bit v % 32 of word v // 32 says whether v is some row's label
    count: Tensor,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
) -> Tensor:
    """(strips, N) log-sum-exp over the classes that are some row's label, the first `MOST_HOT` of them."""
    (rows, width), vocab = hidden.shape, weight.shape[0]
    weight = gathered(weight, dtype)
    columns, hot_count = set_bits(classes, min(MOST_HOT, rows, vocab))
    height = cdiv(rows, 128)
    strips = max(1, min(8, processors(hidden.device) // height))
    out = torch.empty(strips, rows, dtype=torch.float32, device=hidden.device)
    with on(hidden.device):
        _hot_kernel[(height * strips,)](
            hidden, weight, bias if bias is not None else hidden, columns, count, hot_count, out, rows,
            hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1), float(scale), float(softcap),
            H=width, STRIPS=strips, BLOCK_N=128, BLOCK_V=128, BLOCK_H=64 if weight.dtype.itemsize == 2 else 32,
            DTYPE=compute_dtype(dtype), PRECISION=precision(hidden, dtype), HAS_BIAS=bias is not None,
            HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def set_bits(words: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """((most,) int64 the first bits of ``words`` that are set, what is behind them undefined; () how many)."""
    found, count = words.new_empty(most, dtype=torch.int64), words.new_empty((), dtype=torch.int64)
    with on(words.device):
        _set_bits_kernel[(cdiv(len(words), 64),)](words, found, count, len(words), most, BLOCK=64)
    return found, count


@reused
@triton.jit(do_not_specialize=["W", "most"], do_not_specialize_on_alignment=["words"])
def _set_bits_kernel(
    words,  # (W,) int32
    found,  # (most,) int64
    count,  # () int64
    W,
    most,
    BLOCK: tl.constexpr,
):
    i_first = tl.program_id(0) * BLOCK
    before = 0
    for i in range(0, i_first, 1024):
        o = i + tl.arange(0, 1024)
        before += tl.sum(bits_in(tl.load(words + o, mask=o < i_first, other=0)))
    o_w = i_first + tl.arange(0, BLOCK)
    b_word = tl.load(words + o_w, mask=o_w < W, other=0)
    b_count = bits_in(b_word)
    b_place = before + tl.cumsum(b_count) - b_count
    o_bit = tl.arange(0, 32)[None, :]
    b_place = b_place[:, None] + bits_in(b_word[:, None] & ((1 << o_bit) - 1))
    m_set = ((b_word[:, None] >> o_bit) & 1) == 1
    tl.store(found + b_place, o_w[:, None] * 32 + o_bit, mask=m_set & (b_place < most))
    if i_first + BLOCK >= W:
        tl.store(count, tl.minimum(before + tl.sum(b_count), most))


# rows of one matrix: whether they begin on 16 bytes depends on the number of rows
@reused
@triton.jit(do_not_specialize=["N", "V", "W"], do_not_specialize_on_alignment=["maximum", "sums", "kept", "target"])
def _lost_kernel(
    labels,  # (N,) int64, rows that count first
    count,  # () int64
    maximum,  # (N,) float32
    sums,  # (N,) float32
    kept,  # (N,) float32
    target,  # (N,) float32
    words,  # (blocks, W) int32
    lost,  # (blocks, 128) float32
    totals,  # (3, blocks) float32: most lost, lost, not the label's
    N,
    V,
    W,
):
    """What a block's rows lose; and every row's label counts, since its gradient is large where it is improbable."""
    i_b = tl.program_id(0)
    o_r = tl.arange(0, 128)
    o_n = i_b * 128 + o_r
    m_n = (o_n < N) & (o_n < tl.load(count))
    b_sum = tl.load(sums + o_n, mask=m_n, other=1.0)
    b_lost = 1 - tl.load(kept + o_n, mask=m_n, other=1.0) / b_sum
    b_at_label = tl.exp(tl.load(target + o_n, mask=m_n, other=0.0) - tl.load(maximum + o_n, mask=m_n, other=0.0))
    b_wrong = tl.where(m_n, 1 - b_at_label / b_sum, 0.0)
    # NaN (a poisoned row) must not pass for a small loss
    b_lost = tl.where(b_lost <= 2, b_lost, float("inf"))
    tl.store(lost + i_b * 128 + o_r, b_lost)
    blocks = tl.num_programs(0)
    tl.store(totals + i_b, tl.max(b_lost))
    tl.store(totals + blocks + i_b, tl.sum(b_lost))
    tl.store(totals + 2 * blocks + i_b, tl.sum(b_wrong))
    b_label = tl.load(labels + o_n, mask=m_n, other=-1)
    m_label = (b_label >= 0) & (b_label < V)
    b_label = tl.where(m_label, b_label, 0).to(tl.int32)
    # rows may share a word, and bits come out the same in any order
    tl.atomic_or(words + i_b.to(tl.int64) * W + b_label // 32, 1 << (b_label % 32), mask=m_label)


@reused
@triton.jit(do_not_specialize=["blocks", "V", "W"])
def _whole_kernel(
    words,  # (blocks, W) int32
    count,  # () int64
    totals,  # (3, blocks) float32
    pairs,  # (blocks, tiles) int32
    whole,  # (blocks,) bytes, blocks that keep every column
    blocks,
    V,
    W,
    bound,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Every column counts for a block that would lose too much; the last ``V % 32`` always do, since no sample has
    them."""
    i_b = tl.program_id(0).to(tl.int64)
    lost, wrong = 0.0, 0.0
    for i_first in range(0, blocks, 64):
        o_b = i_first + tl.arange(0, 64)
        lost += tl.sum(tl.load(totals + blocks + o_b, mask=o_b < blocks, other=0.0))
        wrong += tl.sum(tl.load(totals + 2 * blocks + o_b, mask=o_b < blocks, other=0.0))
    keep = tl.where(lost == float("inf"), 1, 0)
    if BOUNDED:
        keep = tl.maximum(keep, tl.where(tl.load(totals + i_b) > bound, 1, 0))
        keep = tl.maximum(keep, tl.where(lost > wrong * (bound / 4), 1, 0))
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_word = tl.load(words + i_b * W + o_w, mask=o_w < W, other=0)
    b_word = tl.where(((o_w >= V // 32) & (i_b * 128 < tl.load(count))) | (keep == 1), -1, b_word)
    b_word = tl.where(o_w * 32 + 32 > V, b_word & ((1 << (V % 32)) - 1), b_word)
    b_word = tl.where(o_w < W, b_word, 0)
    tl.store(words + i_b * W + o_w, b_word, mask=o_w < W)
    tl.store(pairs + i_b * tl.num_programs(1) + tl.program_id(1), tl.sum(bits_in(b_word)))
    tl.store(whole + i_b, keep.to(tl.int8))


@triton.jit
def bits_in(b_word):
    """How many bits of int32 words are set."""
    b_bits = b_word - ((b_word >> 1) & 0x55555555)
    b_bits = (b_bits & 0x33333333) + ((b_bits >> 2) & 0x33333333)
    b_bits = (b_bits + (b_bits >> 4)) & 0x0F0F0F0F
    return (b_bits * 0x01010101) >> 24


def marks_of(
    words: Tensor,  # (blocks, ceil(V / 32)) int32, the forward's, to which is added what else counts
    vocab: int,
    labels: Tensor,  # (N,) int64, rows that count first
    count: Tensor,  # () int64
    maximum: Tensor,  # (N,) float32
    sums: Tensor,  # (N,) float32, of exp(z - maximum)
    kept: Tensor,  # (N,) float32, what of that counts
    target: Tensor,  # (N,) float32
    bound: float,
    want_dropped: bool,
) -> Marks:
    """The marks. A block keeps every column if one of its rows would lose more than ``bound``.

    All blocks do if the rows together would lose more than a quarter of ``bound`` times the probability that is not
    their labels': the gradient is as large as that, so a model that is nearly certain is computed exactly too.
    ``bound`` 1 only steps in where a row is no number. ``dropped`` is zeros unless it is wanted.
    """
    (blocks, width), rows, device = words.shape, len(sums), words.device
    tiles = cdiv(width, 128)
    pairs = torch.empty(blocks, tiles, dtype=torch.int32, device=device)
    lost = torch.empty(blocks, MARKED_ROWS, dtype=torch.float32, device=device)
    totals = torch.empty(3, blocks, dtype=torch.float32, device=device)
    whole = torch.empty(blocks, dtype=torch.int8, device=device)
    with on(device):
        _lost_kernel[(blocks,)](labels, count, maximum, sums, kept, target, words, lost, totals, rows, vocab, width)
        _whole_kernel[(blocks, tiles)](
            words, count, totals, pairs, whole, blocks, vocab, width, bound, BLOCK=128, BOUNDED=bound < 1
        )
    if want_dropped:
        everything = (whole > 0) | (pairs.sum() > most_pairs(blocks, vocab))
        lost = torch.where(everything[:, None], 0.0, lost)
    return Marks(words, lost.view(-1)[:rows])


def most_pairs(blocks: int, vocab: int) -> int:
    """How many pairs are listed; beyond that everything is computed."""
    return int(blocks * vocab * MOST_PAIRS)


def rounds_for(blocks: int, vocab: int, capacity: int) -> int:
    """How many rounds of at most ``capacity`` pairs all that are listed take, at least one."""
    return max(cdiv(most_pairs(blocks, vocab), _share(blocks, capacity)), 1)


def _share(blocks: int, capacity: int) -> int:
    """A round takes the tiles that begin inside its share, so the last one may exceed it by its own pairs."""
    return max(capacity - 128 * blocks, 128)


def listed_bytes(blocks: int, vocab: int) -> int:
    """What the marks and `Lists` take: a bit and, for all that may be listed, about three quarters of a byte for each
    column and block, and the order of the columns."""
    tiles = cdiv(vocab, 128)
    return blocks * cdiv(vocab, 32) * 4 + tiles * blocks * 40 + 4 * most_pairs(blocks, vocab) + 8 * vocab


@reused
@triton.jit(do_not_specialize=["blocks"])
def _order_kernel(
    words,  # (blocks, W) int32
    keys,  # (V,) int16 or int32
    blocks,
    V,
    W,
    BLOCK: tl.constexpr,
):
    """Sort keys of columns: the larger, the more blocks they count for; few blocks sort by the first and last."""
    o_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < V
    b_count = tl.zeros((BLOCK,), tl.int32)
    b_first = tl.zeros((BLOCK,), tl.int32)
    b_last = tl.zeros((BLOCK,), tl.int32)
    for i_b in range(blocks):
        b_bit = (tl.load(words + i_b * W + o_v // 32, mask=m_v, other=0) >> (o_v % 32)) & 1
        b_first = tl.where((b_bit == 1) & (b_count == 0), i_b, b_first)
        b_last = tl.where(b_bit == 1, i_b, b_last)
        b_count += b_bit
    b_near = (blocks - 1 - b_first) * blocks + blocks - b_last
    b_often = blocks * blocks + b_count * blocks + blocks - 1 - b_first
    b_key = tl.where(b_count * 8 >= blocks, b_often, b_near)
    tl.store(keys + o_v, tl.where(b_count > 0, b_key, 0), mask=m_v)


@reused
@triton.jit(do_not_specialize=["blocks"])
def _tile_kernel(
    words,  # (blocks, W) int32
    order,  # (V,) int64
    keys,  # (V,), in that order
    bits,  # (tiles, blocks, 8) int32
    block_of,  # (tiles, blocks) int32
    live,  # (tiles,) int32
    counts,  # (blocks, tiles) int32
    blocks,
    V,
    W,
    tiles,
):
    """For each tile: the blocks it counts for, and of each the columns that do: four words, and the columns before
    each word."""
    i_t = tl.program_id(0)
    o_c = tl.arange(0, 128)
    o_word = tl.arange(0, 4)
    o_j = i_t * 128 + o_c
    m_j = o_j < V
    i_live = 0
    if tl.max(tl.load(keys + o_j, mask=m_j, other=0)) > 0:
        o_v = tl.load(order + o_j, mask=m_j, other=0).to(tl.int32)
        for i_b in range(blocks):
            b_bit = (tl.load(words + i_b * W + o_v // 32, mask=m_j, other=0) >> (o_v % 32)) & 1
            here = tl.sum(b_bit)
            b_bit = tl.reshape(b_bit, (4, 32))
            b_count = tl.sum(b_bit, 1)
            p_bits = bits + (i_t.to(tl.int64) * blocks + i_live) * 8 + o_word
            tl.store(p_bits, tl.sum(b_bit << tl.arange(0, 32)[None, :], 1))
            tl.store(p_bits + 4, tl.cumsum(b_count) - b_count)
            tl.store(block_of + i_t.to(tl.int64) * blocks + i_live, i_b)
            tl.store(counts + i_b * tiles + i_t, here)
            i_live += tl.where(here > 0, 1, 0)
    else:
        for i_first in range(0, blocks, 128):
            tl.store(counts + (i_first + o_c) * tiles + i_t, 0, mask=i_first + o_c < blocks)
    tl.store(live + i_t, i_live)


@triton.jit
def place_in_tile(bits, slot, o_c):
    """(whether a column of a tile counts for a block, its place among those that do), from `_tile_kernel`'s words."""
    b_word, b_before = place_words(bits, slot, o_c)
    return place_of(b_word, b_before, o_c)


@triton.jit
def place_words(bits, slot, o_c):
    """What `place_of` needs, for who reads it earlier."""
    return tl.load(bits + slot * 8 + o_c // 32), tl.load(bits + slot * 8 + 4 + o_c // 32)


@triton.jit
def place_of(b_word, b_before, o_c):
    b_below = b_word & ((1 << (o_c % 32)) - 1)
    return ((b_word >> (o_c % 32)) & 1) == 1, b_before + bits_in(b_below)


@reused
@triton.jit(do_not_specialize=["blocks", "tiles", "R", "share", "most"])
def _rounds_kernel(
    before,  # (blocks, tiles + 1) int64, pairs of a block in the tiles before
    total,  # (tiles + 1,) int64, of all blocks
    count,  # () int64, rows that count
    decided,  # (6,) int64, see `listed`
    edges,  # (R + 1,) int64
    starts,  # (blocks, R) int64, ``before`` where a round begins
    lists,  # (blocks, R) int64
    vectors,  # (blocks, R) int64
    sizes,  # (blocks, R) int64
    chunks,  # (blocks + 1, R) int64
    blocks,
    tiles,
    R,
    share,
    most,
):
    """What `Lists` says of a round: the tiles whose pairs begin inside its share, none if everything is computed."""
    i_r = tl.program_id(0)
    pairs = tl.load(total + tiles)
    rest = tl.where(pairs > most, 0, pairs)
    first, last = 0, 0
    for i_t in range(0, tiles, 1024):
        o_t = i_t + tl.arange(0, 1024)
        b_total = tl.load(total + o_t, mask=o_t < tiles, other=1 << 62)
        first += tl.sum((b_total < i_r.to(tl.int64) * share).to(tl.int32))
        last += tl.sum((b_total < (i_r.to(tl.int64) + 1) * share).to(tl.int32))
    first = tl.where(pairs > most, 0, first)
    last = tl.where(pairs > most, 0, tl.where(i_r == R - 1, tiles, last))
    begin, vector, chunk = pairs * 0, pairs * 0, pairs * 0
    for i_first in range(0, blocks, 64):
        o_b = i_first + tl.arange(0, 64)
        m_b = o_b < blocks
        p_before = before + o_b.to(tl.int64) * (tiles + 1)
        b_all = tl.load(p_before + tiles, mask=m_b, other=0)
        b_start = tl.load(p_before + first, mask=m_b, other=0)
        b_size = tl.load(p_before + last, mask=m_b, other=0) - b_start
        b_chunks = (b_size + 127) // 128
        o_out = o_b * R + i_r
        tl.store(starts + o_out, b_start, mask=m_b)
        tl.store(lists + o_out, begin + tl.cumsum(b_all) - b_all + b_start, mask=m_b)
        tl.store(vectors + o_out, vector + tl.cumsum(b_size) - b_size, mask=m_b)
        tl.store(sizes + o_out, b_size, mask=m_b)
        tl.store(chunks + o_out, chunk + tl.cumsum(b_chunks) - b_chunks, mask=m_b)
        begin += tl.sum(b_all)
        vector += tl.sum(b_size)
        chunk += tl.sum(b_chunks)
    tl.store(chunks + blocks * R + i_r, chunk)
    tl.store(edges + i_r + 1, last)
    if i_r == 0:
        tl.store(edges, first)
        n = tl.load(count)
        tl.store(decided, tl.where(pairs > most, 1, 0))
        tl.store(decided + 1, (rest + share - 1) // share)
        tl.store(decided + 2, tl.where(pairs > most, 0, n))
        tl.store(decided + 4, tl.where(pairs > most, n, 0))


@reused
@triton.jit(do_not_specialize=["blocks", "R", "share"])
def _list_kernel(
    order,  # (V,) int64
    bits,  # (tiles, blocks, 8) int32
    block_of,  # (tiles, blocks) int32
    live,  # (tiles,) int32
    before,  # (blocks, tiles + 1) int64, pairs of a block in the tiles before
    total,  # (tiles + 1,) int64, of all blocks
    starts,  # (blocks, R) int64, ``before`` where a round begins
    lists,  # (blocks, R) int64, where a block's columns of a round begin
    vectors,  # (blocks, R) int64, where its vectors begin in the round's workspace
    everything,  # () int64
    columns,  # (pairs,) int32
    base,  # (tiles, blocks) int32, where the vectors of a tile and block begin in the workspace
    blocks,
    V,
    tiles,
    R,
    share,
):
    i_t = tl.program_id(0)
    if tl.load(everything) != 0:
        return
    o_c = tl.arange(0, 128)
    o_j = i_t * 128 + o_c
    o_v = tl.load(order + o_j, mask=o_j < V, other=0).to(tl.int32)
    i_round = tl.load(total + i_t) // share
    for i_live in range(tl.load(live + i_t)):
        slot = i_t.to(tl.int64) * blocks + i_live
        i_b = tl.load(block_of + slot).to(tl.int64)
        m_c, b_place = place_in_tile(bits, slot, o_c)
        i_of = i_b * R + i_round
        i_inside = tl.load(before + i_b * (tiles + 1) + i_t) - tl.load(starts + i_of)
        tl.store(columns + tl.load(lists + i_of) + i_inside + b_place, o_v, mask=m_c)
        tl.store(base + slot, (tl.load(vectors + i_of) + i_inside).to(tl.int32))


@dataclass(frozen=True)
class Lists:
    """What the kernels of the filtered backward walk. T tiles, B blocks, R rounds.

    Attributes:
        decided: (2,) int64: whether all is to be computed, since too many count, and then no round has any work; how
            many rounds have any.
        some: () int64, how many rows count, 0 if all is to be computed; ``whole``: 0 if not.
        order: (V,) int64, the columns, those of most blocks first.
        columns: (pairs,) int32, each block's columns.
        bits: (T, B, 8) int32, which columns of a tile count for a block, see `place_in_tile`.
        block_of: (T, B) int32, the blocks a tile counts for; ``live``: (T,) int32, how many.
        base: (T, B) int32, where their vectors begin in the workspace.
        edges: (R + 1,) int64, the first tile of each round.
        lists: (B, R) int64, where a block's columns of a round begin in ``columns``.
        vectors: (B, R) int64, where their vectors begin in the workspace.
        sizes: (B, R) int64, how many.
        chunks: (B + 1, R) int64, chunks of 128 of them, in the blocks before.
    """

    decided: Tensor
    some: Tensor
    whole: Tensor
    order: Tensor
    columns: Tensor
    bits: Tensor
    block_of: Tensor
    live: Tensor
    base: Tensor
    edges: Tensor
    lists: Tensor
    vectors: Tensor
    sizes: Tensor
    chunks: Tensor

    @property
    def everything(self) -> Tensor:
        """() int64, whether all is to be computed."""
        return self.decided[0]

    @property
    def rounds(self) -> int:
        return self.lists.shape[1]


def listed(words: Tensor, count: Tensor, vocab: int, capacity: int, ordered: bool) -> Lists:
    """The lists of the marks ``words`` for ``count`` rows, in rounds of at most ``capacity`` pairs.

    ``ordered`` sorts the columns; what only walks a block's columns (dX) does not need it.
    """
    blocks, device = words.shape[0], words.device
    tiles, most = cdiv(vocab, 128), most_pairs(blocks, vocab)
    share = _share(blocks, capacity)
    rounds = rounds_for(blocks, vocab, capacity)
    # half as many bits are sorted in half as many passes
    short = 2 * blocks * blocks + blocks < 1 << 15
    keys = torch.empty(vocab, dtype=torch.int16 if short else torch.int32, device=device)
    with on(device):
        _order_kernel[(cdiv(vocab, 256),)](words, keys, blocks, vocab, words.shape[1], BLOCK=256, num_warps=4)
    keys, order = keys.sort(descending=True, stable=True) if ordered else (keys, torch.arange(vocab, device=device))
    bits = torch.empty(tiles, blocks, 8, dtype=torch.int32, device=device)
    block_of = torch.empty(tiles, blocks, dtype=torch.int32, device=device)
    live = torch.empty(tiles, dtype=torch.int32, device=device)
    counts = torch.empty(blocks, tiles, dtype=torch.int32, device=device)
    with on(device):
        _tile_kernel[(tiles,)](
            words, order, keys, bits, block_of, live, counts, blocks, vocab, words.shape[1], tiles, num_warps=1
        )
    before = torch.zeros(blocks, tiles + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 1, out=before[:, 1:])
    del counts
    total = before.sum(0)
    # decided, some and whole, of which kernels read those that begin on 16 bytes
    numbers = torch.empty(6, dtype=torch.int64, device=device)
    edges = torch.empty(rounds + 1, dtype=torch.int64, device=device)
    starts, lists, vectors, sizes = (torch.empty(blocks, rounds, dtype=torch.int64, device=device) for _ in range(4))
    chunks = torch.empty(blocks + 1, rounds, dtype=torch.int64, device=device)
    columns = torch.empty(most, dtype=torch.int32, device=device)
    base = torch.empty(tiles, blocks, dtype=torch.int32, device=device)
    with on(device):
        _rounds_kernel[(rounds,)](
            before, total, count, numbers, edges, starts, lists, vectors, sizes, chunks, blocks, tiles, rounds, share,
            most,
        )  # fmt: skip
        _list_kernel[(tiles,)](
            order, bits, block_of, live, before, total, starts, lists, vectors, numbers, columns, base, blocks, vocab,
            tiles, rounds, share, num_warps=1,
        )  # fmt: skip
    return Lists(
        numbers[:2], numbers[2], numbers[4], order, columns, bits, block_of, live, base, edges, lists, vectors, sizes,
        chunks,
    )  # fmt: skip
