"""How launches are shaped: programs, entries of a block, rows and columns of a tile.

All of it is arithmetic on sizes, so that the launch table can be checked for every vocabulary without a chip.
"""

from __future__ import annotations

from typing import NamedTuple

from .soc import ROW_ALIGNMENT, Soc

GROUP = 16  # rows: 64 bytes of each per-row number, so that no two programs write one cache line
LEAST_BLOCK = 128
SCALE_BLOCK = 8192
FORWARD_BLOCK, FORWARD_BLOCK_WITH_ONE, FORWARD_BLOCK_WITH_MORE = 16384, 8192, 4096
GRADIENT_BLOCK = 4096
"""Powers of two whose buffers fit 192 KiB, whatever else is asked of them, by the compilers of three CANN releases."""

LEAST_COLUMNS = 512  # of a tile, where its bytes allow: narrower products leave the cube units idle
FILTER_SIDE = 1024  # of a filter's tiles: so small that some hold nothing that counts
WEIGHT_ROWS = 4096  # of a weight that is cast or summed piece by piece


def grid_for(rows: int, soc: Soc, group: int = 1) -> tuple[int]:
    """One program a vector core, or fewer where there are fewer groups of rows."""
    return (max(1, min(soc.vector_cores, -(-rows // group))),)


def forward_block(
    columns: int, rewritten: bool = False, bias: bool = False, entropy: bool = False, predicted: bool = False
) -> int:
    """Entries of a row at a time in the kernel of the running sums.

    Args:
        columns: Of a row.
        rewritten: A scale, a softcap or smoothing: what lies behind a row's end then takes a buffer of its own.
        bias: Whether there is one.
        entropy: Whether it is wanted.
        predicted: Whether the largest logit's index is wanted, for which indices are compared too.
    """
    most = FORWARD_BLOCK_WITH_MORE
    if not rewritten and not (bias and entropy):
        most = FORWARD_BLOCK_WITH_ONE if bias or entropy else FORWARD_BLOCK
    return _power_of_two(columns, min(most // 2, FORWARD_BLOCK_WITH_MORE) if predicted else most)


def gradient_block(columns: int) -> int:
    """Entries of a row at a time in the kernel of the gradient."""
    return _power_of_two(columns, GRADIENT_BLOCK)


def _power_of_two(columns: int, most: int) -> int:
    block = LEAST_BLOCK
    while block < min(columns, most):
        block *= 2
    return block


class Tiles(NamedTuple):
    """The logits cut into tiles: rows and columns of one, and how many there are along each axis."""

    rows: int
    columns: int
    row_tiles: int
    vocab_tiles: int


def tiles_of(rows: int, vocab: int, tile_bytes: int, itemsize: int, filtered: bool = False) -> Tiles:
    """Tiles of at most ``tile_bytes``, and of 16 by 16 at least.

    All rows in one tile where that leaves it wide enough: a tile of columns then makes its rows of dW in one product.
    A filter wants small ones.
    """
    entries = max(tile_bytes // itemsize, ROW_ALIGNMENT * ROW_ALIGNMENT)
    columns = min(vocab, FILTER_SIDE if filtered else vocab, max(entries // rows, LEAST_COLUMNS))
    columns = min(columns, entries // ROW_ALIGNMENT)
    if columns < vocab:
        columns = columns // ROW_ALIGNMENT * ROW_ALIGNMENT
    tile_rows = min(rows, FILTER_SIDE if filtered else rows, entries // aligned(columns))
    if tile_rows < rows:
        tile_rows = tile_rows // GROUP * GROUP
    return Tiles(tile_rows, columns, -(-rows // tile_rows), -(-vocab // columns))


def aligned(columns: int) -> int:
    """The length of a row of logits in memory."""
    return -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT


def spans(length: int, step: int) -> list[tuple[int, int]]:
    """``[0, length)`` cut into half-open pieces of at most ``step``."""
    return [(start, min(start + step, length)) for start in range(0, length, max(step, 1))]
