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
from .flce_gradients import head_gradient, put_hidden_gradient
from .linear_ce import label_logits, linear_ce_forward, merge_strips, programs_for, strips_of
from .product import library_product
from .rows import by_label, packed_rows, scaled_rows

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


@reused
@triton.jit(do_not_specialize=["n", "V", "ends_row"])
def _ends_kernel(
    merged,  # (6, n) float32: offset, sum without the label, -, -, moment without the label, -
    labels,  # (n,) int64
    target,  # (n,) float32
    row_scale,  # (n,) float32
    class_weight,  # (V,)
    chunk,  # (n, V), in which the labels become zero
    ends,  # (6, n) float32: factor, entry, loss, nll, lse, entropy
    n,
    V,
    chunk_row,
    ends_row,
    scale,
    softcap,
    z_loss,
    BLOCK: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
):
    """Eq. (2) to (5) and (9), once a row's sum is known; all zero where no row counts."""
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < n
    b_label = tl.load(labels + o_n, mask=m_n, other=0)
    m_valid = m_n & (b_label < V)
    tl.store(chunk + o_n.to(tl.int64) * chunk_row + b_label, 0.0, mask=m_valid)
    b_offset = tl.load(merged + o_n, mask=m_valid, other=0.0)
    b_other = tl.load(merged + n + o_n, mask=m_valid, other=0.0)
    b_above = tl.load(target + o_n, mask=m_valid, other=0.0)
    b_cap = b_above / softcap if HAS_SOFTCAP else b_above
    b_above -= b_offset
    b_at_label = tl.exp(b_above)
    b_sum = tl.where(m_valid, b_other + b_at_label, 1.0)
    b_log = tl.log(b_sum)
    b_lse = b_offset + b_log
    b_nll = b_log - b_above
    b_row = tl.load(row_scale + o_n, mask=m_valid, other=0.0)
    b_loss, b_beta = b_nll, b_row
    if HAS_CLASS_WEIGHT:
        b_weight = tl.load(class_weight + b_label, mask=m_valid, other=0.0).to(tl.float32)
        b_loss *= b_weight
        b_beta *= b_weight
    b_a = b_beta
    if HAS_Z_LOSS:
        b_loss += z_loss * b_lse * b_lse
        b_a += b_row * (2 * z_loss) * b_lse
    b_factor = b_a * (scale / b_sum)
    # without a z-loss both coefficients are one, and p - 1 is minus the other columns' share, which does not cancel
    b_entry = b_factor * b_at_label - b_beta * scale if HAS_Z_LOSS else -b_factor * b_other
    if HAS_SOFTCAP:
        b_entry *= 1 - b_cap * b_cap
    p_ends = ends + o_n
    tl.store(p_ends, tl.where(m_valid, b_factor, 0.0), mask=m_n)
    tl.store(p_ends + ends_row, tl.where(m_valid, b_entry, 0.0), mask=m_n)
    tl.store(p_ends + 2 * ends_row, tl.where(m_valid, b_loss, 0.0), mask=m_n)
    tl.store(p_ends + 3 * ends_row, tl.where(m_valid, b_nll, 0.0), mask=m_n)
    tl.store(p_ends + 4 * ends_row, tl.where(m_valid, b_lse, 0.0), mask=m_n)
    if WANT_ENTROPY:
        b_moment = tl.load(merged + 4 * n + o_n, mask=m_valid, other=0.0) + b_at_label * b_above
        tl.store(p_ends + 5 * ends_row, tl.where(m_valid, b_log - b_moment / b_sum, 0.0), mask=m_n)


class _Rows(NamedTuple):
    """What is known of some rows before a logit is, those that count first, in the order of their labels."""

    labels: Tensor  # (n,) int64, the vocabulary's size where none counts
    target: Tensor  # (n,) float32, the label's logit
    offset: Tensor  # (n,) float32, what exponentials are taken above
    scale: Tensor  # (n,) float32, the loss's factor
    labelled: Tensor  # (blocks, tiles) int8, whether a tile has the label of one of the block's rows

    def part(self, first: int, last: int, block: int) -> _Rows:
        rows = (row[first:last] for row in self[:-1])
        return _Rows(*rows, self.labelled[first // block : -(-last // block)])

    @classmethod
    def known(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        keys: Tensor,
        order: Tensor,
        row_scale: Tensor,
        scale: float,
        softcap: float,
        blocks: Blocks,
    ) -> _Rows:
        (rows, vocab), device = (len(labels), weight.shape[0]), hidden.device
        everyone = labels.new_full((), rows)
        target = label_logits(hidden, weight, bias, labels, everyone, scale, softcap, torch.bfloat16)[order]
        # a label that is masked out has no finite logit to start from
        offset = torch.nan_to_num(target, nan=-1e30, neginf=-1e30, posinf=1e30).clamp(-1e30, 1e30)
        height, tiles = triton.cdiv(rows, blocks.n), triton.cdiv(vocab, blocks.v)
        labelled = torch.zeros(height, tiles, dtype=torch.int8, device=device)
        i_block = torch.arange(rows, device=device) // blocks.n
        labelled.view(-1).index_fill_(0, i_block * tiles + keys.clamp(max=vocab - 1) // blocks.v, 1)
        return cls(keys, target, offset, row_scale[order], labelled)


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
    ignored = labels == ignore_index
    row_scale = row_scale.to(torch.float32).masked_fill(ignored, 0.0)
    differentiable = need_hidden or need_weight or need_bias
    # the rows will be packed in the operands' type, so only their width can stand in the way of a bulk copy
    readable = has_bulk_copies(hidden.device) and width % 8 == 0 and weight.dtype == dtype and is_bulk_readable(weight)
    if not (differentiable and dtype == torch.bfloat16 and not label_smoothing and readable and chunk_rows >= 128):
        return _two_passes(
            hidden, weight, bias, labels, row_scale, class_weight, ignore_index, scale, softcap, label_smoothing,
            z_loss, dtype, want_entropy, want_predicted, need_hidden, need_weight, need_bias, chunk_rows,
        )  # fmt: skip
    keys, order, place, count = by_label(labels, ignored, vocab)
    blocks = blocks_for(min(rows, chunk_rows), dtype, True, kernel="exp", device=hidden.device)
    edges = _chunks(rows, chunk_rows, max(128, blocks.n))
    safe = labels.masked_fill(ignored, 0)
    known = _Rows.known(hidden, weight, bias, safe, keys, order, row_scale, scale, softcap, blocks)
    # whole tiles, so that every row of the chunk begins on 16 bytes and no store is cut
    step = triton.cdiv(max(r1 - r0 for r0, r1 in edges), blocks.n) * blocks.n
    size = step, triton.cdiv(vocab, blocks.v) * blocks.v
    # db is a library's product, which reads what lies behind the rows that count
    chunk = (torch.zeros if need_bias else torch.empty)(size, dtype=dtype, device=hidden.device)
    d_hidden = hidden.new_empty(rows if need_hidden else 0, width)
    head = head_gradient(weight, len(edges)) if need_weight else None
    d_bias = torch.zeros(vocab if need_bias else 0, dtype=torch.float32, device=hidden.device)
    # every row of it begins on 16 bytes, or another number of tokens would compile kernels again
    ends = torch.empty(6, triton.cdiv(rows, 128) * 128, dtype=torch.float32, device=hidden.device)[:, :rows]
    best = []
    for r0, r1 in edges:
        left = (count - r0).clamp(0, r1 - r0)
        packed = packed_rows(hidden, order[r0:r1], left, dtype)
        best.append(
            _exp_chunk(
                packed, weight, bias, known.part(r0, r1, blocks.n), class_weight, left, scale, softcap, z_loss,
                want_entropy, want_predicted, chunk, ends[:, r0:r1], blocks,
            )
        )  # fmt: skip
        exps, factor, entry = chunk[: r1 - r0, :vocab], ends[0, r0:r1], ends[1, r0:r1]
        if need_bias:
            _add_bias(d_bias, exps, factor, entry, keys[r0:r1])
        if need_hidden:
            # few rows make few tiles, which the library spreads over the device better than a tile a program does
            put_hidden_gradient(
                library_product(exps, weight, transposed=False), weight, keys[r0:r1], factor, entry, order[r0:r1],
                left, d_hidden,
            )  # fmt: skip
        if head is not None:
            scaled = scaled_rows(packed, factor)
            head.add(exps, scaled, packed, keys[r0:r1], entry, left)
            del scaled
    predicted = labels.new_empty(0)
    if want_predicted:
        predicted = torch.cat(best)[place].to(torch.int64).masked_fill(ignored, ignore_index)
    return (
        (ends[2] * known.scale).sum(),
        d_hidden,
        head.total if head is not None else weight.new_empty(0),
        d_bias if bias is None else d_bias.to(bias.dtype),
        ends[3, place],
        ends[4, place],
        ends[5, place] if want_entropy else ends.new_empty(0),
        predicted,
    )


def _chunks(rows: int, most: int, block: int) -> list[tuple[int, int]]:
    """(first row, end) of as few chunks of up to ``most`` rows as there can be, about as large, in whole blocks."""
    blocks = triton.cdiv(rows, block)
    number = 1 if most >= rows else triton.cdiv(blocks, max(most // block, 1))
    edges = [i * blocks // number * block for i in range(number)] + [rows]
    return list(itertools.pairwise(edges))


def _exp_chunk(
    hidden: Tensor,  # (n, H) rows that count first
    weight: Tensor,  # (V, H)
    bias: Tensor | None,
    known: _Rows,
    class_weight: Tensor | None,
    count: Tensor,  # () int64
    scale: float,
    softcap: float,
    z_loss: float,
    want_entropy: bool,
    want_predicted: bool,
    chunk: Tensor,  # (>= n, whole tiles) written
    ends: Tensor,  # (6, n) float32, rows apart, written: factor, entry, loss, nll, lse, entropy
    blocks: Blocks,
) -> Tensor:
    """Fill ``chunk`` with what is dZ but for a ``factor`` of each row and its label's ``entry``. Returns the (n,) best
    classes if they are wanted."""
    (rows, width), vocab, device = hidden.shape, weight.shape[0], hidden.device
    tiles = triton.cdiv(vocab, blocks.v)
    programs = programs_for(rows, width * hidden.element_size(), tiles, blocks, device)
    parts = torch.empty(5, 1, programs, blocks.n, dtype=torch.float32, device=device)
    best = torch.empty(programs if want_predicted else 0, blocks.n, dtype=torch.int32, device=device)
    tile_offset = torch.empty(tiles, rows, dtype=torch.float32, device=device)
    with on(device):
        _exp_kernel[(programs,)](
            descriptor(hidden, [blocks.n, blocks.h]), descriptor(weight, [blocks.v, blocks.h]),
            bias if bias is not None else hidden, known.labels, known.labelled, known.offset, count, parts, best,
            tile_offset, descriptor(chunk, [blocks.n, blocks.v]), rows, vocab, tiles, float(scale), float(softcap),
            LIMIT, H=width, BLOCK_N=blocks.n, BLOCK_V=blocks.v, BLOCK_H=blocks.h, DTYPE=compute_dtype(hidden.dtype),
            HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0,
            WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted, WHOLE=vocab % blocks.v == 0,
            FAST=fast_exp(device, hidden.dtype), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        merged, predicted = merge_strips(parts, best, count, rows, tiles, blocks, False, want_entropy, want_predicted)
        _raised_kernel[(triton.cdiv(rows, 32), triton.cdiv(tiles, 64))](
            chunk, tile_offset, merged, count, rows, tiles, chunk.stride(0), BLOCK_N=32, BLOCK_V=blocks.v, BLOCK_T=64,
            num_warps=4,
        )  # fmt: skip
        _ends_kernel[(triton.cdiv(rows, 128),)](
            merged, known.labels, known.target, known.scale, class_weight if class_weight is not None else merged,
            chunk, ends, rows, vocab, chunk.stride(0), ends.stride(0), float(scale), float(softcap), float(z_loss),
            BLOCK=128, HAS_CLASS_WEIGHT=class_weight is not None, HAS_SOFTCAP=softcap != 0.0, HAS_Z_LOSS=z_loss != 0.0,
            WANT_ENTROPY=want_entropy, num_warps=4,
        )  # fmt: skip
    return predicted


def _add_bias(total: Tensor, exps: Tensor, factor: Tensor, entry: Tensor, labels: Tensor) -> None:
    """Add a chunk's share of db, (V,) float32. The factor is taken in two numbers of the half type, so that it is
    rounded as little as a float32 one."""
    high = factor.to(exps.dtype)
    both = torch.stack([high, (factor - high).to(exps.dtype)], 1)
    total += library_product(exps, both, transposed=True).sum(1)
    # sorted inside, so the same every time
    total.index_put_((labels.clamp(max=len(total) - 1),), entry, accumulate=True)


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
