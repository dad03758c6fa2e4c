"""Rows in another order, and tensors times a number that the device knows.

Letters: N rows, H hidden width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import cdiv, on, processors, reused, row_tiles


def by_label(labels: Tensor, ignored: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(keys, order, place, count): the rows in the order of their labels, which are the first; those of rows that do
    not count are ``vocab``. How many count stays on the device, so that the host never waits to learn it."""
    # half as many bits are sorted in half as many passes
    keys, order = labels.masked_fill(ignored, vocab).to(torch.int32).sort(stable=True)
    rows = torch.arange(len(labels), device=labels.device)
    place = torch.empty_like(order).scatter_(0, order, rows)
    return keys.to(labels.dtype), order, place, (keys < vocab).sum()


@reused
@triton.jit(do_not_specialize=["N"])
def _rows_kernel(
    source,  # (N, H)
    index,  # (N,) int64
    count,  # () int64
    factor,  # () float32
    out,  # (N, H)
    N,
    source_row,
    source_col,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CLEAR: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_n, m_h = o_n < N, o_h < H
    o_from = tl.load(index + o_n, mask=m_n, other=0)
    m_from = m_n
    if CLEAR:
        m_from = o_n < tl.load(count)
    p_from = source + o_from[:, None] * source_row + o_h[None, :].to(tl.int64) * source_col
    b_rows = tl.load(p_from, mask=m_from[:, None] & m_h[None, :], other=0.0)
    if HAS_FACTOR:
        b_rows = b_rows.to(tl.float32) * tl.load(factor)
    p_out = out + o_n.to(tl.int64)[:, None] * H + o_h[None, :]
    tl.store(p_out, b_rows.to(out.dtype.element_ty), mask=m_n[:, None] & m_h[None, :])


def packed_rows(hidden: Tensor, order: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, H) of ``dtype``: ``hidden[order]``, zeros behind the rows that count: a sum over rows ends inside a block,
    and what lies there must be no NaN."""
    return _moved(hidden, order, count, None, dtype)


def unpacked_rows(total: Tensor, place: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, H) of ``dtype``: ``total[place] * factor``."""
    return _moved(total, place, place, factor, dtype)


def _moved(source: Tensor, index: Tensor, count: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, width = len(index), source.shape[1]
    out = torch.empty(rows, width, dtype=dtype, device=source.device)
    grid, tile = row_tiles(rows, width)
    with on(source.device):
        _rows_kernel[grid](
            source, index, count, count if factor is None else factor, out, rows, source.stride(0), source.stride(1),
            H=width, CLEAR=factor is None, HAS_FACTOR=factor is not None, **tile,
        )  # fmt: skip
    return out


@reused
@triton.jit(do_not_specialize=["N"])
def _scaled_rows_kernel(
    rows,  # (N, H)
    factor,  # (N,) float32
    out,  # (N, H)
    N,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o = o_n.to(tl.int64)[:, None] * H + o_h[None, :]
    m_in = (o_n < N)[:, None] & (o_h < H)[None, :]
    b_rows = tl.load(rows + o, mask=m_in, other=0.0).to(tl.float32)
    b_rows *= tl.load(factor + o_n, mask=o_n < N, other=0.0)[:, None]
    tl.store(out + o, b_rows.to(out.dtype.element_ty), mask=m_in)


def scaled_rows(rows: Tensor, factor: Tensor) -> Tensor:
    """``rows * factor[:, None]`` in the type of ``rows``, (N, H) without gaps; a library's takes five times as long."""
    (count, width), out = rows.shape, torch.empty_like(rows)
    grid, tile = row_tiles(count, width)
    with on(rows.device):
        _scaled_rows_kernel[grid](rows, factor, out, count, H=width, **tile)
    return out


@reused
@triton.jit(do_not_specialize=["programs"])
def _scale_kernel(
    source,
    factor,  # () float32
    out,  # may be the source
    size,
    programs,
    BLOCK: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    b_factor = tl.load(factor)
    if IN_PLACE and b_factor == 1:
        return
    for i_block in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), programs):
        o = tl.cast(i_block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_out = tl.load(source + o, mask=o < size).to(tl.float32) * b_factor
        tl.store(out + o, b_out.to(out.dtype.element_ty), mask=o < size)


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """``saved * factor`` in the type of ``saved``, rounded once."""
    saved = saved.contiguous()
    out = torch.empty_like(saved)
    _scale(saved, factor, out)
    return out


def scale_(saved: Tensor, factor: Tensor) -> None:
    """``saved *= factor``, rounded once; a factor of 1, which most are, touches nothing."""
    assert saved.is_contiguous()
    _scale(saved, factor, saved)


def _scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    size = source.numel()
    if size:
        # few programs, since most often they have nothing to do
        programs = min(cdiv(size, 4096), processors(source.device) * 16)
        with on(source.device):
            _scale_kernel[(programs,)](source, factor.float(), out, size, programs, BLOCK=4096, IN_PLACE=source is out)
