"""Cut cross-entropy: no more than one tile of logits exists at any time.

A tile is a product of torch's in the type of the operands. Forward: tiles of the vocabulary one after the other, each
merged into its rows' sums, eq. (2). Backward: the tiles are computed again, overwritten by their gradient, eq. (5),
and a tile of the vocabulary owns its rows of dW, which it writes once. Sums over tiles are float32.

With a filter the forward also keeps each row's share of every tile. A tile (rows by columns) in which no row has a
probability of at least the filter's, nor its label, is left out of the gradients, unless a row would then lose more
than the bound: its rows keep every tile. What a row loses is therefore known, and no more than the bound.

Letters: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._rows import row_coefficients
from . import vector
from ._slabs import Results, float16_unit, new_slab, results, view_of
from .blocks import Tiles, spans, tiles_of
from .vector import Sums, Transform


def marks_shape(rows: int, vocab: int, tile_bytes: int, itemsize: int) -> tuple[int, int]:
    """The shape of the marks that a forward with a filter hands to its backward: tiles of rows, tiles of columns."""
    tiles = tiles_of(rows, vocab, tile_bytes, itemsize, filtered=True)
    return tiles.row_tiles, tiles.vocab_tiles


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

    ``below`` above 0 marks the tiles that a backward must compute, int32 of `marks_shape`; else there are none.
    """
    rows, vocab, device = hidden.shape[0], weight.shape[0], hidden.device
    labels, transform = labels.contiguous(), Transform(scale, softcap)
    bias_row = None if bias is None else bias.contiguous()
    class_weight = None if class_weight is None else class_weight.contiguous()
    tiles = tiles_of(rows, vocab, tile_bytes, dtype.itemsize, below > 0)
    logits = _Logits(hidden, weight, dtype, tiles)
    old, new = (Sums.zeros(rows, device, want_predicted) for _ in range(2))
    # of each tile alone: the largest logit of a row, and its sum relative to that
    shares = torch.zeros(2, tiles.vocab_tiles if below else 0, rows, dtype=torch.float32, device=device)
    for i_tile, (v0, v1) in enumerate(spans(vocab, tiles.columns)):
        tile_weight = weight[v0:v1].to(dtype)
        for r0, r1 in spans(rows, tiles.rows):
            vector.row_sums(
                logits.tile(r0, r1, tile_weight), labels[r0:r1], _cut(bias_row, v0, v1), _cut(class_weight, v0, v1),
                old.of(r0, r1) if i_tile else None, new.of(r0, r1), v0, ignore_index, transform, label_smoothing > 0,
                want_entropy, want_predicted, (shares[0, i_tile, r0:r1], shares[1, i_tile, r0:r1]) if below else None,
            )  # fmt: skip
        old, new = new, old
    out = results(
        old, labels, bias_row, class_weight, ignore_index, transform, label_smoothing, z_loss, vocab, want_entropy
    )
    dropped, marks = out.lse.new_zeros(rows), torch.zeros(0, 0, dtype=torch.int32, device=device)
    if below:
        dropped, marks = _marked(shares, out, labels, labels != ignore_index, tiles, below, bound)
    return out.loss, out.nll, out.lse, out.entropy, out.predicted, dropped[: rows if want_dropped else 0], marks


def _marked(
    shares: Tensor, out: Results, labels: Tensor, valid: Tensor, tiles: Tiles, below: float, bound: float
) -> tuple[Tensor, Tensor]:
    """(dropped (N,), marks): what each row loses, and the tiles (row tiles, vocabulary tiles) that are computed."""
    largest, sum_ = shares
    top = torch.exp(largest - out.max_ - out.log_sum)  # (vocabulary tiles, N) the largest probability of a row
    mass = torch.where(valid, top * sum_, 0.0)
    owner = torch.arange(tiles.vocab_tiles, device=labels.device)[:, None]
    # a NaN is not below anything, so what it touches is computed
    counts = valid & (~(top < below) | (labels // tiles.columns == owner))
    marks = torch.empty(tiles.row_tiles, tiles.vocab_tiles, dtype=torch.bool, device=labels.device)
    dropped = torch.empty_like(out.lse)
    for i, (r0, r1) in enumerate(spans(labels.shape[0], tiles.rows)):
        live = counts[:, r0:r1].any(1)
        lost = (mass[:, r0:r1] * ~live[:, None]).sum(0)
        live = live | (lost > bound).any()
        marks[i], dropped[r0:r1] = live, torch.where(live.all(), 0.0, lost)
    return dropped, marks.to(torch.int32)


def linear_ce_backward(
    grad: Tensor,  # (N,) d total / d loss of the row
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (V,)
    lse: Tensor,  # (N,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    filter_hidden: float,
    filter_weight: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    tile_bytes: int,
    marks: Tensor | None = None,
    grad_nll: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dW, db) in the types of hidden, weight and bias; empty where not needed.

    With the forward's ``marks``, tiles that do not count are left out of dX where ``filter_hidden`` is above 0, and of
    dW where ``filter_weight`` is.
    """
    (rows, width), vocab, device = hidden.shape, weight.shape[0], hidden.device
    labels, transform = labels.contiguous(), Transform(scale, softcap)
    bias_row = None if bias is None else bias.contiguous()
    coefficients: tuple[Tensor, ...] = row_coefficients(
        grad.float(), lse, labels.long(), labels != ignore_index, class_weight, label_smoothing, z_loss, vocab,
        grad_nll, grad_lse,
    )  # fmt: skip
    class_weight = None if class_weight is None else class_weight.contiguous()
    unit = float16_unit(coefficients, dtype)
    if unit is not None:
        coefficients = tuple(c / unit for c in coefficients)
    live = _live(marks)
    tiles = tiles_of(rows, vocab, tile_bytes, dtype.itemsize, live is not None)
    logits = _Logits(hidden, weight, dtype, tiles)
    d_hidden = torch.zeros(rows if need_hidden else 0, width, dtype=torch.float32, device=device)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else weight.new_empty(0)
    d_bias = torch.zeros(vocab if need_bias else 0, dtype=torch.float32, device=device)
    for i_tile, (v0, v1) in enumerate(spans(vocab, tiles.columns)):
        tile_weight = weight[v0:v1].to(dtype)
        share = _WeightShare(d_weight[v0:v1], dtype, tiles.row_tiles == 1, unit) if need_weight else None
        for i_row, (r0, r1) in enumerate(spans(rows, tiles.rows)):
            counts = live is None or live[i_row][i_tile]
            to_hidden = need_hidden and (counts or not filter_hidden)
            to_weight = share is not None and (counts or not filter_weight)
            if not (to_hidden or to_weight or need_bias):
                continue
            z = logits.tile(r0, r1, tile_weight)
            vector.gradient(
                z, z, labels[r0:r1], _cut(bias_row, v0, v1), _cut(class_weight, v0, v1), lse[r0:r1], None,
                tuple(c[r0:r1] for c in coefficients), v0, ignore_index, transform, label_smoothing > 0,
            )  # fmt: skip
            if need_bias:
                d_bias[v0:v1] += z.sum(0, dtype=torch.float32)
            if to_hidden and dtype == torch.float32:
                d_hidden[r0:r1].addmm_(z, tile_weight)
            elif to_hidden:
                d_hidden[r0:r1] += torch.mm(z, tile_weight)
            if share is not None and to_weight:
                share.add(z, logits.hidden[r0:r1])
        if share is not None:
            share.write()
    del logits
    if unit is not None:
        d_hidden, d_bias = d_hidden.mul_(unit), d_bias.mul_(unit)
    return d_hidden.to(hidden.dtype), d_weight, d_bias if bias is None else d_bias.to(bias.dtype)


class _Logits:
    """The one tile of logits, computed where the last one was."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, tiles: Tiles) -> None:
        self.hidden = hidden.to(dtype)
        self.slab = new_slab(tiles.rows, tiles.columns, dtype, weight.device)

    def tile(self, r0: int, r1: int, tile_weight: Tensor) -> Tensor:
        """(r1 - r0, C) logits of some rows with a tile of the weight, before bias, scale and softcap."""
        return torch.mm(self.hidden[r0:r1], tile_weight.T, out=view_of(self.slab, r1 - r0, tile_weight.shape[0]))


class _WeightShare:
    """The rows of dW that a tile of the vocabulary owns."""

    def __init__(self, out: Tensor, dtype: torch.dtype, once: bool, unit: Tensor | None) -> None:
        self.out, self.unit, self.written = out, unit, False
        self.direct = once and out.dtype == dtype and unit is None
        self.total: Tensor | None = None

    def add(self, dz: Tensor, hidden: Tensor) -> None:
        if self.direct:
            torch.mm(dz.T, hidden, out=self.out)
            self.written = True
        elif self.total is None:
            self.total = torch.mm(dz.T, hidden).float()
        elif dz.dtype == torch.float32:
            self.total.addmm_(dz.T, hidden)
        else:
            self.total += torch.mm(dz.T, hidden)

    def write(self) -> None:
        if self.total is not None:
            self.out.copy_(self.total if self.unit is None else self.total.mul_(self.unit))
        elif not self.written:
            self.out.zero_()  # every tile of rows was left out


def _live(marks: Tensor | None) -> list[list[bool]] | None:
    """Which tiles count, on the host, which decides whether a product is launched. It waits for the device here, once a
    backward and only where a filter was asked for."""
    if marks is None or not marks.numel():
        return None
    return [[bool(count) for count in row] for row in marks.to("cpu")]


def _cut(vector_: Tensor | None, v0: int, v1: int) -> Tensor | None:
    return None if vector_ is None else vector_[v0:v1]
