"""Fused linear cross-entropy: three products a chunk of rows, none computed twice.

For each chunk of rows one kernel computes the logits, eq. (1), and stores ``E = exp(z - R)`` in bfloat16, where the
offset R of a row is its label's logit, known beforehand; the row's sum comes out at its end. What makes dZ of E, eq.
(9), is one number a row: it scales the rows of X for dW, and those of the product for dX, and no pass over the chunk is
needed. The label's entry, by far the largest, is kept in float32 beside E, which has zero there. An E that would
overflow raises its row's R on the way (a logit more than 60 above the label's); then a second kernel brings what was
stored before to the last R. `flce_gradients.py` has the products. Peak beside the results: the chunk, ``chunk * V * 2``
bytes, ``chunk * H * 6`` for its rows and their product, and where there are several chunks ``V * H / 2`` for dW.

Half types other than bfloat16, label smoothing (which needs S inside the chunk) and devices without bulk tensor copies
take the two passes of `linear_ce_forward` and `linear_ce_backward`.

Letters: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._rows import row_coefficients, row_terms
from ._common import (
    Blocks,
    blocks_for,
    compute_dtype,
    descriptor,
    exp_difference,
    fast_exp,
    has_bulk_copies,
    is_bulk_readable,
    logits_tile,
    on,
    reused,
    transform,
)
from .backward import linear_ce_backward
from .flce_gradients import HeadGradient, put_hidden_gradient
from .linear_ce import label_logits, linear_ce_forward, merge_strips, programs_for, strips_of
from .product import library_product
from .rows import by_label, packed_rows

LIMIT = 60.0  # exp(60) * 2**20 columns is far below bfloat16's largest number


@reused
@triton.jit(do_not_specialize=["N", "tiles"])
def _exp_kernel(
    hidden,  # (N, H) descriptor
    weight,  # (V, H) descriptor
    bias,  # (V,)
    labels,  # (N,) int64
    labelled,  # (blocks, tiles) bytes, whether a tile has the label of one of the block's rows
    offset,  # (N,) float32
    count,  # () int64
    parts,  # (5, programs, BLOCK_N) float32: offset, sum without the label, largest, -, moment without the label
    best,  # (programs, BLOCK_N) int32
    tile_offset,  # (tiles, N) float32
    out,  # (N, V) descriptor
    N,
    V,
    tiles,
    scale,
    softcap,
    limit,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_BEST: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile reaches past the end
    FAST: tl.constexpr,
):
    n = tl.load(count).to(tl.int32)
    programs = tl.num_programs(0)
    strips = strips_of(n, programs, tiles, BLOCK_N)
    i_block = tl.program_id(0) // strips
    i_n = i_block * BLOCK_N
    i_strip = tl.program_id(0) % strips
    if i_n >= n:
        return
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    b_label = tl.load(labels + o_n, mask=m_n, other=-1)
    b_offset = tl.load(offset + o_n, mask=m_n, other=0.0)
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    b_moment = tl.zeros((BLOCK_N,), tl.float32)
    b_top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_best = tl.zeros((BLOCK_N,), tl.int32)
    for i_tile in tl.range((tiles * i_strip) // strips, (tiles * (i_strip + 1)) // strips, flatten=True):
        i_v = i_tile * BLOCK_V
        o_v = i_v + tl.arange(0, BLOCK_V)
        m_v = o_v < V
        b_z = logits_tile(hidden, weight, 1, 1, i_n, i_v, m_n, m_v, H, BLOCK_N, BLOCK_V, BLOCK_H, DTYPE, "ieee", True)
        b_z = transform(b_z, bias, o_v, m_v, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        if not WHOLE:
            b_z = tl.where(m_v[None, :], b_z, float("-inf"))
        b_max = tl.max(b_z, 1)
        if WANT_BEST:
            b_best = tl.where(b_max > b_top, tl.argmax(b_z, 1) + i_v, b_best)
            b_top = tl.maximum(b_top, b_max)
        b_new = tl.where(b_max - b_offset > limit, b_max, b_offset)
        b_carry = tl.exp(b_offset - b_new)
        b_exp = exp_difference(b_z, b_new[:, None], FAST)
        b_others = tl.sum(b_exp, 1)
        if WANT_ENTROPY:
            b_other = tl.where(o_v[None, :] == b_label[:, None], 0.0, b_exp)
            b_moment = (b_moment + (b_offset - b_new) * b_sum) * b_carry
            b_moment += tl.sum(b_other * tl.where(b_other > 0, b_z - b_new[:, None], 0.0), 1)
        # few tiles have a label, and looking for it takes as long as the sum
        if tl.load(labelled + i_block * tiles + i_tile) > 0:
            b_others = tl.sum(tl.where(o_v[None, :] == b_label[:, None], 0.0, b_exp), 1)
        b_sum = b_sum * b_carry + b_others
        b_offset = b_new
        tl.store(tile_offset + i_tile * N + o_n, b_new, mask=o_n < N)
        if HAS_SOFTCAP:
            b_z = b_z / softcap
            if not WHOLE:
                b_z = tl.where(m_v[None, :], b_z, 0.0)
            b_exp *= 1 - b_z * b_z
        out.store([i_n, i_v], b_exp.to(out.dtype))

    o_part = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    size = programs * BLOCK_N
    tl.store(parts + o_part, b_offset)
    tl.store(parts + size + o_part, b_sum)
    if WANT_ENTROPY:
        tl.store(parts + 4 * size + o_part, b_moment)
    if WANT_BEST:
        tl.store(best + o_part, b_best)
        tl.store(parts + 2 * size + o_part, b_top)


@reused
@triton.jit(do_not_specialize=["N", "tiles"])
def _raised_kernel(
    out,  # (N, columns) bfloat16
    tile_offset,  # (tiles, N) float32
    offset,  # (N,) float32, the last one
    count,  # () int64
    N,
    tiles,
    out_row,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """What was stored under an earlier offset is brought to the last one. Hardly a row has two."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < tl.load(count)
    b_is = tl.load(offset + o_n, mask=m_n, other=0.0)
    i_first = tl.program_id(1) * BLOCK_T
    o_t = i_first + tl.arange(0, BLOCK_T)
    p_were = tile_offset + o_t[:, None] * N + o_n[None, :]
    b_were = tl.load(p_were, mask=(o_t < tiles)[:, None] & m_n[None, :], other=0.0)
    b_raised = (b_were != b_is[None, :]) & (o_t < tiles)[:, None] & m_n[None, :]
    if tl.max(tl.max(b_raised.to(tl.int32), 1), 0) == 0:
        return
    for i_tile in range(i_first, tl.minimum(i_first + BLOCK_T, tiles)):
        b_was = tl.load(tile_offset + i_tile * N + o_n, mask=m_n, other=0.0)
        m_raised = m_n & (b_was != b_is)
        o_v = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
        p_out = out + o_n.to(tl.int64)[:, None] * out_row + o_v[None, :]
        b_exp = tl.load(p_out, mask=m_raised[:, None], other=0.0).to(tl.float32) * tl.exp(b_was - b_is)[:, None]
        tl.store(p_out, b_exp.to(out.dtype.element_ty), mask=m_raised[:, None])


class _Chunk(NamedTuple):
    """A chunk's results, rows in packed order. dZ is ``factor`` times what the chunk holds, and at the label
    ``entry``; both are 0 where no row counts."""

    factor: Tensor
    entry: Tensor
    loss: Tensor
    nll: Tensor
    lse: Tensor
    entropy: Tensor
    predicted: Tensor


class _Rows(NamedTuple):
    """What is known of the rows before a logit is, those that count first, in the order of their labels."""

    labels: Tensor  # (n,) int64, the vocabulary's size where none counts
    target: Tensor  # (n,) float32, the label's logit
    scale: Tensor  # (n,) float32, the loss's factor

    def part(self, first: int, last: int) -> _Rows:
        return _Rows(*(row[first:last] for row in self))


def flce_forward(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    row_scale: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(total, dX, dW, db, nll, lse, entropy, predicted); gradients are those of the total, empty where not needed."""
    (rows, width), vocab = hidden.shape, weight.shape[0]
    valid = labels != ignore_index
    row_scale = torch.where(valid, row_scale.to(torch.float32), 0.0)
    differentiable = need_hidden or need_weight or need_bias
    # the rows will be packed in the operands' type, so only their width can stand in the way of a bulk copy
    readable = has_bulk_copies(hidden.device) and width % 8 == 0 and weight.dtype == dtype and is_bulk_readable(weight)
    if not (differentiable and dtype == torch.bfloat16 and not label_smoothing and readable and chunk_rows >= 128):
        return _two_passes(
            hidden, weight, bias, labels, row_scale, class_weight, ignore_index, scale, softcap, label_smoothing,
            z_loss, dtype, want_entropy, want_predicted, need_hidden, need_weight, need_bias, chunk_rows,
        )  # fmt: skip
    keys, order, place, count = by_label(labels, valid, vocab)
    everyone = labels.new_full((), rows)
    target = label_logits(hidden, weight, bias, labels * valid, everyone, scale, softcap, dtype)
    known = _Rows(keys, target[order], row_scale[order])
    edges = _chunks(rows, chunk_rows)
    step = triton.cdiv(max(r1 - r0 for r0, r1 in edges), 128) * 128
    blocks = blocks_for(step, dtype, True, kernel="exp", device=hidden.device)
    # whole tiles, so that every row of the chunk begins on 16 bytes and no store is cut
    size = step, triton.cdiv(vocab, blocks.v) * blocks.v
    # db is a library's product, which reads what lies behind the rows that count
    chunk = (torch.zeros if need_bias else torch.empty)(size, dtype=dtype, device=hidden.device)
    d_hidden = hidden.new_empty(rows if need_hidden else 0, width)
    head = HeadGradient(weight, len(edges)) if need_weight else None
    d_bias = torch.zeros(vocab if need_bias else 0, dtype=torch.float32, device=hidden.device)
    results = []
    for r0, r1 in edges:
        left = (count - r0).clamp(0, r1 - r0)
        packed = packed_rows(hidden, order[r0:r1], left, dtype)
        part = _exp_chunk(
            packed, weight, bias, known.part(r0, r1), class_weight, left, scale, softcap, z_loss, want_entropy,
            want_predicted, chunk, blocks,
        )  # fmt: skip
        results.append(part)
        exps = chunk[: r1 - r0, :vocab]
        if need_bias:
            _add_bias(d_bias, exps, part, keys[r0:r1])
        if need_hidden:
            # few rows make few tiles, which the library spreads over the device better than a tile a program does
            put_hidden_gradient(
                library_product(exps, weight, transposed=False), weight, keys[r0:r1], part.factor, part.entry,
                order[r0:r1], left, d_hidden,
            )  # fmt: skip
        if head is not None:
            scaled = torch.empty_like(packed)
            torch.mul(packed, part.factor[:, None], out=scaled)
            head.add(exps, scaled, packed, keys[r0:r1], part.entry, left)
            del scaled
    loss, nll, lse, entropy, predicted = (
        torch.cat([getattr(p, name) for p in results]) for name in ("loss", "nll", "lse", "entropy", "predicted")
    )
    if want_predicted:
        predicted = torch.where(valid, predicted[place].to(torch.int64), ignore_index)
    return (
        (loss * known.scale).sum(),
        d_hidden,
        head.total if head is not None else weight.new_empty(0),
        d_bias if bias is None else d_bias.to(bias.dtype),
        nll[place],
        lse[place],
        entropy[place] if want_entropy else entropy,
        predicted if want_predicted else labels.new_empty(0),
    )


def _chunks(rows: int, most: int) -> list[tuple[int, int]]:
    """(first row, end) of as few chunks of up to ``most`` rows as there can be, about as large, in blocks of 128."""
    blocks = triton.cdiv(rows, 128)
    number = 1 if most >= rows else triton.cdiv(blocks, most // 128)
    edges = [i * blocks // number * 128 for i in range(number)] + [rows]
    return list(itertools.pairwise(edges))


def _exp_chunk(
    hidden: Tensor,  # (n, H) rows that count first
    weight: Tensor,  # (V, H)
    bias: Tensor | None,
    known: _Rows,  # (n,) each
    class_weight: Tensor | None,
    count: Tensor,  # () int64
    scale: float,
    softcap: float,
    z_loss: float,
    want_entropy: bool,
    want_predicted: bool,
    chunk: Tensor,  # (>= n, whole tiles) written
    blocks: Blocks,
) -> _Chunk:
    """Fill ``chunk`` with what is dZ but for a factor of each row and its label's entry."""
    (rows, width), vocab, device = hidden.shape, weight.shape[0], hidden.device
    labels, target, row_scale = known
    valid = labels < vocab
    safe = labels.clamp(max=vocab - 1)
    # a label that is masked out has no finite logit to start from
    offset = torch.nan_to_num(target, nan=-1e30, neginf=-1e30, posinf=1e30).clamp(-1e30, 1e30)
    tiles = triton.cdiv(vocab, blocks.v)
    height = triton.cdiv(rows, blocks.n)
    labelled = torch.zeros(height * tiles, dtype=torch.int8, device=device)
    labelled.index_fill_(0, torch.arange(rows, device=device) // blocks.n * tiles + safe // blocks.v, 1)
    programs = programs_for(rows, width * hidden.element_size(), tiles, blocks, device)
    parts = torch.empty(5, 1, programs, blocks.n, dtype=torch.float32, device=device)
    best = torch.empty(programs if want_predicted else 0, blocks.n, dtype=torch.int32, device=device)
    tile_offset = torch.empty(tiles, rows, dtype=torch.float32, device=device)
    with on(device):
        _exp_kernel[(programs,)](
            descriptor(hidden, [blocks.n, blocks.h]), descriptor(weight, [blocks.v, blocks.h]),
            bias if bias is not None else hidden, labels, labelled, offset, count, parts, best, tile_offset,
            descriptor(chunk, [blocks.n, blocks.v]), rows, vocab, tiles, float(scale), float(softcap), LIMIT,
            H=width, BLOCK_N=blocks.n, BLOCK_V=blocks.v, BLOCK_H=blocks.h, DTYPE=compute_dtype(hidden.dtype),
            HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0,
            WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted, WHOLE=vocab % blocks.v == 0,
            FAST=fast_exp(device, hidden.dtype), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        (offset, other, _, _, moment, _), predicted = merge_strips(
            parts, best, count, rows, tiles, blocks, False, want_entropy, want_predicted
        )
        _raised_kernel[(triton.cdiv(rows, 32), triton.cdiv(tiles, 64))](
            chunk, tile_offset, offset, count, rows, tiles, chunk.stride(0), BLOCK_N=32, BLOCK_V=blocks.v, BLOCK_T=64,
            num_warps=4,
        )  # fmt: skip
    chunk[:rows].scatter_(1, safe[:, None], 0.0)
    at_label = torch.exp(target - offset)
    sum_ = torch.where(valid, other + at_label, 1.0)
    loss, nll, lse = row_terms(offset, sum_, target, None, safe, valid, class_weight, 0.0, z_loss, vocab)
    coef_p, coef_label, _ = row_coefficients(row_scale, lse, safe, valid, class_weight, 0.0, z_loss, vocab)
    factor = coef_p * (scale / sum_)
    # without a z-loss both coefficients are one, and p - 1 is minus the other columns' share, which does not cancel
    entry = -factor * other
    if z_loss:
        entry = factor * at_label - coef_label * scale
    if softcap:
        entry = entry * (1 - (target / softcap).square())
    entropy = other.new_zeros(0)
    if want_entropy:
        whole = moment + at_label * (target - offset)
        entropy = torch.where(valid, sum_.log() - whole / sum_, 0.0)
    entry = torch.where(valid, entry, 0.0)
    return _Chunk(factor, entry, loss, nll, lse, entropy, predicted)


def _add_bias(total: Tensor, exps: Tensor, part: _Chunk, labels: Tensor) -> None:
    """Add a chunk's share of db, (V,) float32. The factor is taken in two numbers of the half type, so that it is
    rounded as little as a float32 one."""
    high = part.factor.to(exps.dtype)
    both = torch.stack([high, (part.factor - high).to(exps.dtype)], 1)
    total += library_product(exps, both, transposed=True).sum(1)
    # sorted inside, so the same every time
    total.index_put_((labels.clamp(max=len(total) - 1),), part.entry, accumulate=True)


def _two_passes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_scale: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same results with the logits computed twice."""
    workspace = chunk_rows * weight.shape[0] * dtype.itemsize
    loss, nll, lse, entropy, predicted, _, _ = linear_ce_forward(
        hidden, weight, bias, labels, class_weight, ignore_index, scale, softcap, label_smoothing, z_loss, dtype,
        want_entropy, want_predicted, workspace,
    )  # fmt: skip
    d_hidden = hidden.new_empty(0, hidden.shape[1])
    d_weight, d_bias = weight.new_empty(0), (lse if bias is None else bias).new_empty(0)
    if need_hidden or need_weight or need_bias:
        d_hidden, d_weight, d_bias = linear_ce_backward(
            row_scale, hidden, weight, bias, labels, class_weight, lse, ignore_index, scale, softcap, label_smoothing,
            z_loss, dtype, 0.0, 0.0, need_hidden, need_weight, need_bias, workspace,
        )  # fmt: skip
    return (loss * row_scale).sum(), d_hidden, d_weight, d_bias, nll, lse, entropy, predicted
