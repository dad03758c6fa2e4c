"""How much device memory the kernels of this folder take at their worst, forward and backward, gradients included.

``size`` is the bytes of an entry of the type that products are computed in, ``weight_size`` of one of the weight. The
hidden states are in the products' type already.
"""

from __future__ import annotations

from .blocks import WEIGHT_ROWS, aligned, tiles_of

ROW_BYTES = 128
"""Of each row's sums, coefficients and results."""


def flce_bytes(
    rows: int,
    hidden: int,
    vocab: int,
    size: int,
    weight_size: int,
    chunk_rows: int,
    need_hidden: bool = True,
    need_weight: bool = True,
) -> int:
    """Of `flce.py`."""
    step, piece = min(rows, max(1, chunk_rows)), min(vocab, WEIGHT_ROWS) * hidden
    casts, summed = weight_size != size, step < rows
    d_hidden = rows * hidden * size * need_hidden
    d_weight = vocab * hidden * (4 if summed or casts else weight_size) * need_weight
    working = step * aligned(vocab) * size
    # a piece of the weight in the products' type, or one of dW
    beside = piece * size * max(casts, need_weight and summed and size < 4)
    if casts and need_hidden:
        beside = max(beside, piece * size + step * hidden * (4 + size))
    rounded = vocab * hidden * weight_size if need_weight and d_weight != vocab * hidden * weight_size else 0
    return d_hidden + d_weight + max(working + beside, rounded) + rows * ROW_BYTES


def cce_bytes(
    rows: int,
    hidden: int,
    vocab: int,
    size: int,
    weight_size: int,
    tile_bytes: int,
    need_hidden: bool = True,
    need_weight: bool = True,
    filtered: bool = False,
) -> int:
    """Of `linear_ce.py`."""
    tiles = tiles_of(rows, vocab, tile_bytes, size, filtered)
    tile = tiles.rows * aligned(tiles.columns) * size
    share = tiles.columns * hidden
    casts = weight_size != size
    d_weight = vocab * hidden * weight_size * need_weight
    summed = rows * hidden * 4 * need_hidden
    beside = share * size * casts  # the tile of the weight in the products' type
    products = [0]
    if need_hidden and size < 4:
        products.append(tiles.rows * hidden * size)
    direct = tiles.row_tiles == 1 and not casts
    if need_weight and not direct:
        beside += share * 4
        products.append(share * size if size < 4 else 0)
    rounded = rows * hidden * size if need_hidden and size < 4 else 0
    peak = d_weight + summed + max(tile + beside + max(products), rounded)
    # of every row's share of a tile: two numbers, and as many while they are judged
    return peak + rows * (ROW_BYTES + 24 * tiles.vocab_tiles * filtered)
