"""The products of the gradients, eq. (7) and (8), for a number of rows that only the device knows.

A library's product has its shape fixed by the host. Here the rows, or the sum over rows, end where the rows that count
end, so ignored tokens cost nothing. One program owns a tile of the result: no atomics between programs, always the
same sum. Where there are no bulk tensor copies the library's product is taken, over all rows; those that do not count
are zero.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._matmul import matmul
from ._common import (
    INTERPRETED,
    Blocks,
    Launches,
    blocks_for,
    compute_dtype,
    descriptor,
    grouped_tile,
    halves_of,
    has_bulk_copies,
    is_bulk_readable,
    on,
    processors,
    reused,
)
from .sums import RowSums, add_tile


@reused
@triton.jit(do_not_specialize=["M", "N", "K", "programs"])
def _product_kernel(
    left,  # (M, K) descriptor with ADD, else (K, M)
    right,  # (K, N) descriptor
    out,  # (M, N) descriptor, with ADD or float32 of half tiles: (BLOCK_M, BLOCK_N / 2)
    low,  # with ADD, see `RowSums`
    count,  # () int64
    factor,  # () float32
    M,
    N,
    K,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    ADD: tl.constexpr,  # then the rows M, else the sum over K, end at count
    HALVES: tl.constexpr,
    IF_ANY: tl.constexpr,  # leave the result as it is if there are no rows
    DIGITS: tl.constexpr,  # of the sums
):
    """``left @ right`` added to ``out``, or ``left.T @ right * factor`` stored there; one program owns a tile."""
    n = tl.load(count).to(tl.int32)
    if IF_ANY and n == 0:
        return
    last = K
    tiles_m = tl.cdiv(M, BLOCK_M)
    if ADD:
        tiles_m = tl.cdiv(tl.minimum(n, M), BLOCK_M)
    else:
        last = tl.minimum(n, K)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for i_tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs):
        i_row, i_column = grouped_tile(i_tile, tiles_m, tiles_n, 8)
        i_m, i_n = i_row * BLOCK_M, i_column * BLOCK_N
        b_out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i_k in range(0, last, BLOCK_K):
            b_right = right.load([i_k, i_n]).to(DTYPE)
            if ADD:
                b_out = tl.dot(left.load([i_m, i_k]).to(DTYPE), b_right, b_out)
            else:
                b_out = tl.dot(left.load([i_k, i_m]).to(DTYPE).T, b_right, b_out)
        if ADD:
            add_tile(out, low, i_m, i_n, b_out, BLOCK_M, BLOCK_N, DIGITS)
        else:
            b_out *= tl.load(factor)
            if HALVES:
                b_left, b_right = halves_of(b_out, BLOCK_M, BLOCK_N)
                out.store([i_m, i_n], b_left)
                out.store([i_m, i_n + BLOCK_N // 2], b_right)
            else:
                out.store([i_m, i_n], b_out.to(out.dtype))


def products() -> Launches:
    """For products one after the other of slices of the same matrices."""
    return Launches(_product_kernel)


def add_product(left: Tensor, right: Tensor, sums: RowSums, count: Tensor, if_any: bool, launches: Launches) -> None:
    """``sums += left @ right``; rows of ``left`` end at ``count``.

    ``if_any`` adds nothing where there are none, though ``left`` has numbers in them.
    """
    # the interpreter's copies cannot add
    if sums.digits or (not INTERPRETED and _bulk(left, right, sums.total)):
        assert _bulk(left, right, sums.total)
        _launch(left, right, sums.total, count, count, False, launches, sums)
        return
    product = library_product(left, right, transposed=False)
    sums.total += torch.where(count > 0, product, 0.0) if if_any else product


def store_product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    count: Tensor,
    factor: Tensor,  # () float32
    if_any: bool,
    launches: Launches,
) -> None:
    """``out = left.T @ right * factor``; rows of ``left`` end at ``count``.

    ``if_any`` leaves ``out`` as it is where there are none, instead of zeros.
    """
    if _bulk(left, right, out):
        _launch(left, right, out, count, factor, if_any, launches, None)
        return
    product = library_product(left, right, transposed=True) * factor
    out.copy_(torch.where(count > 0, product, out) if if_any else product)


def _bulk(left: Tensor, right: Tensor, out: Tensor) -> bool:
    return has_bulk_copies(out.device) and left.dtype.itemsize == 2 and all(map(is_bulk_readable, (left, right, out)))


def _launch(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    count: Tensor,
    factor: Tensor,
    if_any: bool,
    launches: Launches,
    sums: RowSums | None,  # of which ``out`` is; then it is added to
) -> None:
    (rows, width), depth, add = out.shape, right.shape[0], sums is not None
    slots = processors(out.device)
    whole = blocks_for(rows, left.dtype, True, kernel="product_add" if add else "product_store", device=out.device)
    half = replace(whole, v=whole.v // 2, warps=max(whole.warps // 2, 4), stages=whole.stages + 1)
    blocks = fitting(whole, half, rows, width, slots)
    m, n, k = blocks.n, blocks.v, blocks.h
    grid = min(slots, -(-rows // m) * -(-width // n))
    halves, digits = out.dtype.itemsize == 4, 0 if sums is None else sums.digits
    total = low = descriptor(out, [m, n // 2 if halves else n])
    if sums is not None:
        total, low = sums.tiles(m, n)
    with on(out.device):
        launches(
            (blocks, add, halves, if_any, digits), (grid,), descriptor(left, [m, k] if add else [k, m]),
            descriptor(right, [k, n]), total, low, count, factor, rows, width, depth, grid, BLOCK_M=m, BLOCK_N=n,
            BLOCK_K=k, DTYPE=compute_dtype(left.dtype), ADD=add, HALVES=halves, IF_ANY=if_any, DIGITS=digits,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)  # asked twice a slice
def fitting(whole: Blocks, half: Blocks, rows: int, width: int, slots: int) -> Blocks:
    """``whole``, or ``half`` of it where that leaves so much less of the device and of the last tile idle that its own
    slower rate is made up for."""

    def use(blocks: Blocks) -> float:
        strips = -(-width // blocks.v)
        tiles = -(-rows // blocks.n) * strips
        return tiles / (-(-tiles // slots) * slots) * width / (strips * blocks.v)

    return half if whole.v > 128 and use(half) > 1.08 * use(whole) else whole


def library_product(left: Tensor, right: Tensor, transposed: bool) -> Tensor:
    """``left @ right`` (or ``left.T @ right``) by torch, float32, over all rows."""
    return matmul(left.T if transposed else left, right.to(left.dtype))
