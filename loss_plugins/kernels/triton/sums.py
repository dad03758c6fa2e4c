"""Sums over many launches in fewer bits than float32: a number's upper 16 bits in one matrix, its next 4 or 8, rounded
to the nearest, in another.

A float32 sum takes twice the room of the bfloat16 result, and nearly all of what it holds is thrown away at the end.
A tile is added to by one program of a launch, and launches follow each other, so reading, adding and writing is safe
and always gives the same bits. `flce_gradients.py` sums dW so in the room of the result; here is dX of cce.

Letters: N rows, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import blocks_for, can_cast, can_tma, descriptor, halves_of, is_bulk_readable, on, reused, row_tiles
from .rows import unpacked_rows

MOST_OF_FOUR = 64
"""Additions up to which four more bits are enough. A sum is off by a 16th of what its last rounding to bfloat16 costs,
and the errors of many grow with the root of a third to a half of them, since the first sums are small: at 64, about a
third."""


@triton.jit
def joined(b_high, b_low, DIGITS: tl.constexpr):
    """The float32 number of its upper 16 bits and the next few."""
    b_bits = (b_high.to(tl.int32) << 16) | (b_low << (16 - DIGITS))
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def parted(b_number, DIGITS: tl.constexpr):
    """(upper 16 bits, the next few) of a float32 number, rounded to the nearest."""
    b_bits = b_number.to(tl.int32, bitcast=True)
    m_finite = (b_bits & 0x7F800000) != 0x7F800000  # rounding would carry a NaN into a number
    b_bits = tl.where(m_finite, b_bits + (1 << (15 - DIGITS)), b_bits)
    return (b_bits >> 16).to(tl.int16), (b_bits >> (16 - DIGITS)) & ((1 << DIGITS) - 1)


@triton.jit
def add_tile(total, low, i_row, i_column, b_tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIGITS: tl.constexpr):
    """Add a float32 tile to the sums of `RowSums`, descriptors of half tiles; nobody else adds to it meanwhile."""
    b_left, b_right = halves_of(b_tile, ROWS, COLUMNS)
    if DIGITS == 0:
        total.atomic_add([i_row, i_column], b_left)
        total.atomic_add([i_row, i_column + COLUMNS // 2], b_right)
    else:
        _add_half(total, low, i_row, i_column, b_left, ROWS, COLUMNS // 2, DIGITS)
        _add_half(total, low, i_row, i_column + COLUMNS // 2, b_right, ROWS, COLUMNS // 2, DIGITS)


@triton.jit
def _add_half(high, low, i_row, i_column, b_half, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIGITS: tl.constexpr):
    b_low = low.load([i_row, i_column * DIGITS // 8]).to(tl.int32)
    if DIGITS == 4:
        # a byte holds two neighbours, so that its place depends on no kernel's tile, and one thread has both
        b_low = tl.reshape(tl.join(b_low & 15, b_low >> 4), (ROWS, COLUMNS))
    b_high, b_low = parted(b_half + joined(high.load([i_row, i_column]), b_low, DIGITS), DIGITS)
    high.store([i_row, i_column], b_high)
    if DIGITS == 4:
        b_even, b_odd = tl.split(tl.reshape(b_low, (ROWS, COLUMNS // 2, 2)))
        b_low = b_even | (b_odd << 4)
    low.store([i_row, i_column * DIGITS // 8], b_low.to(tl.uint8))


@reused
@triton.jit(do_not_specialize=["N"])
def _rounded_kernel(
    high,  # (N, H) int16
    low,  # (N, low_row) bytes
    place,  # (N,) int64
    factor,  # () float32
    out,  # (N, H)
    N,
    low_row,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIGITS: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_n = o_n < N
    m_in = m_n[:, None] & (o_h < H)[None, :]
    o_from = tl.load(place + o_n, mask=m_n, other=0)
    b_high = tl.load(high + o_from[:, None] * H + o_h[None, :], mask=m_in, other=0)
    b_low = tl.load(low + o_from[:, None] * low_row + (o_h * DIGITS // 8)[None, :], mask=m_in, other=0).to(tl.int32)
    if DIGITS == 4:
        b_low = (b_low >> (o_h % 2 * 4)[None, :]) & 15
    b_out = joined(b_high, b_low, DIGITS) * tl.load(factor)
    tl.store(out + o_n.to(tl.int64)[:, None] * H + o_h[None, :], b_out.to(out.dtype.element_ty), mask=m_in)


class RowSums:
    """dX / unit, (N, H), zeros at first: float32 with ``digits`` 0, else the upper 16 bits, int16, and ``digits`` more
    of each number in ``low``."""

    def __init__(self, rows: int, width: int, digits: int, device: torch.device) -> None:
        self.digits = digits
        self.total = torch.zeros(rows, width, dtype=torch.int16 if digits else torch.float32, device=device)
        self.low = self.total
        if digits:
            self.low = torch.zeros(rows, _low_row(width, digits), dtype=torch.uint8, device=device)

    def tiles(self, height: int, columns: int) -> tuple[Any, Any]:
        """Both as `add_tile` takes them, for tiles of ``height`` and ``columns``."""
        total = descriptor(self.total, [height, columns // 2])
        return total, descriptor(self.low, [height, columns * self.digits // 16]) if self.digits else total

    def rounded(self, place: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
        """(N, H) of ``dtype``: the sums in the order of ``place``, times ``unit``, rounded once from all their bits."""
        if not self.digits:
            return unpacked_rows(self.total, place, unit, dtype)
        rows, width = self.total.shape
        out = torch.empty(rows, width, dtype=dtype, device=place.device)
        grid, tile = row_tiles(rows, width)
        with on(place.device):
            _rounded_kernel[grid](
                self.total, self.low, place, unit, out, rows, self.low.stride(0), H=width,
                DIGITS=self.digits, **tile,
            )  # fmt: skip
        return out


def sum_bytes(rows: int, width: int, digits: int) -> int:
    """What `RowSums` takes."""
    return rows * (width * 2 + _low_row(width, digits) if digits else width * 4)


def _low_row(width: int, digits: int) -> int:
    """Bytes of a row of ``low``, which begins on 16."""
    return triton.cdiv(width * digits, 128) * 16


def digits_for(additions: int) -> int:
    """Bits that a sum of so many keeps behind bfloat16's."""
    return 4 if additions <= MOST_OF_FOUR else 8


def row_digits(
    packed: Tensor, weight: Tensor, dtype: torch.dtype, workspace: int, additions: Callable[[int], int]
) -> int:
    """The ``digits`` of dX that is handed back in ``dtype``: few where float32 sums would leave less than three eighths
    of the workspace.

    Float32 is better where there is room, since the copy engine adds to it while the products go on. ``additions`` says
    how many launches add to a number if what is left of the workspace beside so many digits is used.
    """
    (rows, width), half = packed.shape, packed.dtype
    readable = can_tma(packed, weight, half) or (can_cast(packed, weight, half) and is_bulk_readable(weight))
    if not readable or dtype != half or sum_bytes(rows, width, 0) <= workspace * 5 // 8:
        return 0
    kernels = ("product_add", "filtered_dx", "dz")
    if any(blocks_for(rows, half, True, kernel=name, device=packed.device).v < 64 for name in kernels):
        return 0  # half a tile has less than 16 bytes of `low`, which no bulk copy reads
    # float16 itself has three bits more; four times as many additions for each bit that is left
    more = 3 if dtype == torch.float16 else 0
    for digits in (4, 8):
        if additions(digits) <= MOST_OF_FOUR * 4 ** (digits - 4) // 4**more:
            return digits
    return 0
