"""The pairs that the forward has marked, as the kernels of the filtered backward walk them.

Columns are ordered by the blocks they count for, so that columns beside each other count for the same blocks, and the
pairs are cut into rounds that fit the workspace. Everything is counted on the device; the host never waits.

Letters: N rows, V vocabulary; a block is 128 rows, a tile 128 columns in that order, a pair a column that counts for a
block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import cdiv, on, reused
from .marks import bits_in, most_pairs


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
