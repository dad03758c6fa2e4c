"""flce's dW for Hopper, where warps share the work: one loads, one keeps the sums, eight multiply.

In `flce_gradients.py` a program's warps all do the same, so the tensor cores wait while a tile's sums come and go. Here
a warp copies operands into a ring of shared memory, tile after tile, and another one brings a tile's sums while its
products are under way, and takes them away while the next tile's are: beside the products only the arithmetic at a
tile's end is left. On an H200, for 1408 rows of 2304 x 256000, a chunk in the middle takes 2.57 ms instead of 3.16, and
one chunk alone 2.21 instead of 2.37. The numbers are those of `flce_gradients.py`, which runs everywhere else.

What the logits' kernel would gain was measured too: nothing, neither from warps that load and store nor from two
groups of four that take turns at products and exponentials, since it waits for the head's rows.

The language is Triton's Gluon, which is experimental: see `has_warpgroups` for the versions.

Letters: n rows of the chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import _common
from ._common import on, processors
from .flce_gradients import HeadGradient
from .tuning import Blocks

# as later versions name them, or Triton 3.6
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

grouped_tile = gluon.jit(_common.grouped_tile.fn)

WARPS = gl.constexpr(8)  # that multiply
PART = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # of a tile, (128, 64)


@gluon.jit
def _barriers(SIZE: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def _wait_for_room(empty, i_step, SIZE: gl.constexpr):
    """Before a stage of the ring is loaded; the first time round each has room."""
    mbarrier.wait(empty.index(i_step % SIZE), (i_step // SIZE + 1) & 1)


@gluon.jit
def _products(acc, ring_a, ring_b, full, empty, i_step, steps, STAGES: gl.constexpr):
    """Add the products of the ring's next stages, of the transposed left side."""
    for i in range(steps):
        i_s = (i_step + i) % STAGES
        mbarrier.wait(full.index(i_s), ((i_step + i) // STAGES) & 1)
        acc = warpgroup_mma(ring_a.index(i_s).permute((1, 0)), ring_b.index(i_s), acc, is_async=True)
        # the one before is done, so its stage may be loaded again
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((i_step + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((i_step + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc


@gluon.jit
def _parts_of(acc, TALL: gl.constexpr, WIDE: gl.constexpr):
    """The four (128, 64) parts of a tile; no number leaves its register."""
    b_parts = acc.reshape((TALL, 128, WIDE, 64)).permute((1, 3, 0, 2)).reshape((128, 64, 2, 2))
    b_even, b_odd = gl.split(b_parts)
    b_0, b_2 = gl.split(b_even)
    b_1, b_3 = gl.split(b_odd)
    return b_0, b_1, b_2, b_3


@gluon.jit
def _added(b_sum, b_high, b_low, up):
    """``b_sum`` plus the number whose upper 16 bits are ``b_high`` and whose next four are those of ``b_low`` that lie
    ``up`` below the top: `sums.joined` of two numbers at a time, which is a third of the instructions."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 next, bits;
        .reg .f32 kept;
        shl.b32 next, $5, $6;
        and.b32 next, next, 0xf000f000;
        prmt.b32 bits, next, $4, 0x5410;
        mov.b32 kept, bits;
        add.f32 $0, $2, kept;
        prmt.b32 bits, next, $4, 0x7632;
        mov.b32 kept, bits;
        add.f32 $1, $3, kept;
        }
        """,
        "=&f,=&f,f,f,r,r,r,r",
        [b_sum, b_high, b_low, up],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _rounded(b_sum, b_low, up):
    """(upper 16 bits, ``b_low`` with the next four ``up`` below the top) of float32 numbers, rounded to the nearest.

    `sums.parted` of two numbers at a time. The NaN that the device makes is all ones but for the sign: it is kept from
    being carried into a number.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 one, two;
        min.s32 one, $2, 0x7ffff7ff;
        min.s32 two, $3, 0x7ffff7ff;
        add.s32 one, one, 0x800;
        add.s32 two, two, 0x800;
        prmt.b32 $0, one, two, 0x7632;
        prmt.b32 one, one, two, 0x5410;
        and.b32 one, one, 0xf000f000;
        shr.u32 one, one, $5;
        or.b32 $1, $4, one;
        }
        """,
        "=&r,=&r,r,r,r,r,r",
        [b_sum.to(gl.int32, bitcast=True), b_low, up],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _load(
    exps, scaled, rows, starts, last, ring_a, ring_b, full, empty, tiles, height, width, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy operands into the ring: those of a tile's products, then the rows whose labels it has."""
    i_step = 0
    for i_tile in range(gl.program_id(0), tiles, programs):
        i_t, i_strip = grouped_tile(i_tile, height, width, 8)
        first = gl.load(starts + i_t).to(gl.int32)
        end = gl.minimum(gl.load(starts + i_t + 1).to(gl.int32), last)
        for i_k in range(0, last, BLOCK_K):
            i_s = i_step % STAGES
            _wait_for_room(empty, i_step, STAGES)
            mbarrier.expect(full.index(i_s), (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            copy_in(exps, [i_k, i_t * BLOCK_M], full.index(i_s), ring_a.index(i_s))
            copy_in(scaled, [i_k, i_strip * BLOCK_N], full.index(i_s), ring_b.index(i_s))
            i_step += 1
        for i_k in range(first, end, BLOCK_K):
            i_s = i_step % STAGES
            _wait_for_room(empty, i_step, STAGES)
            mbarrier.expect(full.index(i_s), BLOCK_N * BLOCK_K * 2)
            copy_in(rows, [i_k, i_strip * BLOCK_N], full.index(i_s), ring_b.index(i_s))
            i_step += 1


@gluon.jit
def _keep(
    high, low, high_parts, low_part, ready, done, tiles, height, width, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Bring a tile's sums, and take them away when they have been added to."""
    WIDE: gl.constexpr = BLOCK_N // 64
    for i_tile in range(gl.program_id(0), tiles, programs):
        i_t, i_strip = grouped_tile(i_tile, height, width, 8)
        i_m, i_n = i_t * BLOCK_M, i_strip * BLOCK_N
        i_low = (i_t * width + i_strip) * 128
        if FIRST:
            mbarrier.arrive(ready, count=1)
        else:
            mbarrier.expect(ready, 5 * 128 * 64 * 2)
            for i in gl.static_range(4):
                copy_in(high, [i_m + i // WIDE * 128, i_n + i % WIDE * 64], ready, high_parts.index(i))
            copy_in(low, [i_low, 0], ready, low_part)
        mbarrier.wait(done, i_tile // programs & 1)
        for i in gl.static_range(4):
            copy_out(high, [i_m + i // WIDE * 128, i_n + i % WIDE * 64], high_parts.index(i))
        if not LAST:
            copy_out(low, [i_low, 0], low_part)
        tma.store_wait(0)


@gluon.jit
def _multiply(
    labels, entry, starts, last, ring_a, ring_b, full, empty, high_parts, low_part, ready, done, tiles, height, width,
    programs, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Multiply what the ring brings, and add it to the sums."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LEFT))
    o_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LEFT))
    b_zero = gl.zeros((BLOCK_M, BLOCK_K), gl.bfloat16, LEFT)
    i_step = 0
    for i_tile in range(gl.program_id(0), tiles, programs):
        i_t, _ = grouped_tile(i_tile, height, width, 8)
        first = gl.load(starts + i_t).to(gl.int32)
        end = gl.minimum(gl.load(starts + i_t + 1).to(gl.int32), last)
        steps = gl.cdiv(last, BLOCK_K)
        b_out = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, TILE)
        b_out = _products(b_out, ring_a, ring_b, full, empty, i_step, steps, STAGES)
        i_step += steps
        for i_k in range(first, end, BLOCK_K):
            m_k = i_k + o_k < end
            b_label = gl.load(labels + i_k + o_k, mask=m_k, other=-1).to(gl.int32)
            b_entry = gl.load(entry + i_k + o_k, mask=m_k, other=0.0)
            b_first = b_entry.to(gl.bfloat16)
            b_rest = (b_entry - b_first.to(gl.float32)).to(gl.bfloat16)
            m_label = (i_t * BLOCK_M + o_m)[:, None] == b_label[None, :]
            i_s = i_step % STAGES
            mbarrier.wait(full.index(i_s), (i_step // STAGES) & 1)
            b_out = warpgroup_mma(gl.where(m_label, b_first[None, :], b_zero), ring_b.index(i_s), b_out)
            b_out = warpgroup_mma(gl.where(m_label, b_rest[None, :], b_zero), ring_b.index(i_s), b_out)
            mbarrier.arrive(empty.index(i_s), count=1)
            i_step += 1
        parts = _parts_of(b_out, BLOCK_M // 128, BLOCK_N // 64)
        mbarrier.wait(ready, i_tile // programs & 1)
        if not FIRST:
            b_low = low_part.load(PART)
        b_kept = gl.zeros((128, 64), gl.int16, PART)
        for i in gl.static_range(4):
            b_sum = gl.convert_layout(parts[i], PART, assert_trivial=True)
            if not FIRST:
                b_sum = _added(b_sum, high_parts.index(i).load(PART), b_low, 12 - 4 * i)
            if LAST:
                high_parts.index(i).store(b_sum.to(gl.bfloat16).to(gl.int16, bitcast=True))
            else:
                b_high, b_kept = _rounded(b_sum, b_kept, 12 - 4 * i)
                high_parts.index(i).store(b_high)
        if not LAST:
            low_part.store(b_kept)
        fence_async_shared()
        mbarrier.arrive(done, count=1)


@gluon.jit(do_not_specialize=["n", "V", "programs"])
def _dw_kernel(
    exps,  # (n, V) descriptor, zero at the labels
    scaled,  # (n, H) descriptor, rows times what makes dZ of E
    rows,  # (n, H) descriptor
    labels,  # (n,) int64, ascending
    entry,  # (n,) float32, dZ at the label
    starts,  # (tiles + 1,) int64, the first row with a label in a tile or behind it
    count,  # () int64
    high,  # (V, H) int16 descriptor, the room of the result
    low,  # (128 * tiles, 64) int16 descriptor: four parts' bits in a number
    n,
    V,
    programs,
    H: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    FIRST: gl.constexpr,  # nothing has been summed yet
    LAST: gl.constexpr,
):
    width: gl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    height = gl.cdiv(V, BLOCK_M)
    last = gl.minimum(gl.load(count).to(gl.int32), n)
    tiles = height * width
    if not FIRST and not LAST:
        tiles = gl.where(last == 0, 0, tiles)
    ring_a = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_M], exps.layout)
    ring_b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], scaled.layout)
    high_parts = gl.allocate_shared_memory(gl.int16, [4, 128, 64], high.layout)
    low_part = gl.allocate_shared_memory(gl.int16, [128, 64], low.layout)
    full, empty, turns = _barriers(STAGES), _barriers(STAGES), _barriers(2)
    ready, done = turns.index(0), turns.index(1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (labels, entry, starts, last, ring_a, ring_b, full, empty, high_parts, low_part, ready, done, tiles,
                 height, width, programs, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FIRST, LAST),
            ),
            (
                _load,
                (exps, scaled, rows, starts, last, ring_a, ring_b, full, empty, tiles, height, width, programs, BLOCK_M,
                 BLOCK_N, BLOCK_K, STAGES),
            ),
            (
                _keep,
                (high, low, high_parts, low_part, ready, done, tiles, height, width, programs, BLOCK_M, BLOCK_N, FIRST,
                 LAST),
            ),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


def _descriptor(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    """Of a matrix of 16-bit numbers, in tiles whose rows are whole runs of 128 bytes."""
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout(128, 16, rank=2))


class HopperHeadGradient(HeadGradient):
    """dW, summed over up to `sums.MOST_OF_FOUR` chunks."""

    def __init__(self, weight: Tensor, chunks: int) -> None:
        (vocab, width), device = weight.shape, weight.device
        self.total = torch.empty(vocab, width, dtype=weight.dtype, device=device)
        # a wide tile is faster, unless half of the last one is empty; a seventh stage fits beside the sums of neither
        tall = triton.cdiv(width, 128) % 2 == 1
        self.blocks = Blocks(256, 128, 32, 8, 6, True) if tall else Blocks(128, 256, 32, 8, 6, True)
        height = triton.cdiv(vocab, self.blocks.n)
        self.tiles = height * triton.cdiv(width, self.blocks.v)
        self.first_columns = torch.arange(height + 1, device=device) * self.blocks.n
        self.high = self.low = _descriptor(self.total.view(torch.int16), [128, 64])
        if chunks > 1:
            self.low = _descriptor(torch.empty(self.tiles * 128, 64, dtype=torch.int16, device=device), [128, 64])
        self.chunks, self.done = chunks, 0

    def add(self, exps: Tensor, scaled: Tensor, rows: Tensor, labels: Tensor, entry: Tensor, count: Tensor) -> None:
        (vocab, width), b = self.total.shape, self.blocks
        programs = min(processors(exps.device), self.tiles)
        with on(exps.device):
            _dw_kernel[(programs,)](
                _descriptor(exps, [b.h, b.n]), _descriptor(scaled, [b.h, b.v]), _descriptor(rows, [b.h, b.v]), labels,
                entry, torch.searchsorted(labels, self.first_columns), count, self.high, self.low, len(rows), vocab,
                programs, H=width, BLOCK_M=b.n, BLOCK_N=b.v, BLOCK_K=b.h, STAGES=b.stages, FIRST=self.done == 0,
                LAST=self.done == self.chunks - 1, num_warps=b.warps,
            )  # fmt: skip
        self.done += 1
