"""The forward says where the backward must look: which columns count for which block of rows.

A trained softmax gives a probability that matters to few classes: at 2**-13, two columns in a hundred count for some
row of a block of 128, and six of seven count for no row at all. The forward knows each logit, but not yet its row's
log-sum-exp. Any part of the sum is at most the whole, so comparing with a part never misses an entry. The part is what
the program has summed so far, the sum over the classes that are some row's label (`hot_reference`), or the largest
entry at hand, whichever is largest, and exponentials are taken as shares of it: at 2**-13 that marks 2.4 columns in a
hundred of Gemma-3-270M's, of which 1.9 count in the end.

`marks_of` bounds what a row loses: a block with a row that would lose more keeps every column. What the backward walks
is made of the marks in `lists.py`. Everything is counted on the device; the host never waits.

Letters: N rows, V vocabulary; a block is 128 rows, a pair a column that counts for a block.
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
    ``bound`` 1 only steps in where a row is no number. ``dropped`` is of no use unless it is wanted.
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
