"""Cut cross-entropy, backward, exact: a slice of the vocabulary at a time, three products a slice.

For each slice of columns: its logits are computed again and turned into their gradient dZ, eq. (5) and (6), which is
stored in the half type, ``N * slice * 2`` bytes; dX gets ``dZ @ W`` added in float32, eq. (7); the slice owns its rows
of dW and writes ``dZ.T @ X`` once, eq. (8). No atomics, so the result is the same every time. Ignored rows are sorted
to the end: their blocks return at once, and the sum over rows of eq. (8) stops before them. dZ is scaled by a power of
two that brings the largest coefficient near 1, so that float16 does not lose small ones. Peak beside the results: the
slice, dX in float32, and two copies of rows, ``N * H`` each.

Letters: N rows, H hidden width, V vocabulary, C columns of a slice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._rows import row_coefficients
from ._common import (
    Blocks,
    blocks_for,
    can_cast,
    can_tma,
    compute_dtype,
    counted_first,
    descriptor,
    logits_tile,
    on,
    precision,
    processors,
    transform,
)
from .product import add_product, store_product


@triton.jit(do_not_specialize=["N", "first", "programs"])
def _dz_kernel(
    hidden,  # (N, H) descriptor or pointer, rows that count first
    weight,  # (C, H) descriptor or pointer, the slice
    bias,  # (V,)
    labels,  # (N,) int64
    class_weight,  # (V,)
    lse,  # (N,) float32
    coef_p,  # (N,) float32
    coef_label,
    coef_weight,
    count,  # () int64
    out,  # (N, C) descriptor or pointer
    out_bias,  # (blocks, C) float32
    N,
    V,
    first,  # first column of the slice
    C,
    programs,
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    scale,
    softcap,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):
    n = tl.load(count).to(tl.int32)
    height = tl.cdiv(n, BLOCK_N)
    # tiles beside each other share their columns, so that a tile of the weight is read once
    for i_tile in tl.range(tl.program_id(0), height * tl.cdiv(C, BLOCK_V), programs, flatten=TMA):
        i_n = i_tile % height * BLOCK_N
        i_c = i_tile // height * BLOCK_V
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < n
        o_c = i_c + tl.arange(0, BLOCK_V)
        o_v = first + o_c
        m_v = (o_v < V) & (o_c < C)
        if TMA:
            rows = hidden
            columns = weight
        else:
            rows = hidden + o_n.to(tl.int64)[:, None] * hidden_row
            columns = weight + o_c.to(tl.int64)[None, :] * weight_row
        b_z = logits_tile(
            rows, columns, hidden_col, weight_col, i_n, i_c, m_n, m_v, H, BLOCK_N, BLOCK_V, BLOCK_H, DTYPE,
            PRECISION, TMA,
        )  # fmt: skip
        b_z = transform(b_z, bias, o_v, m_v, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        # rows past the end have an infinite log-sum-exp, so their probabilities are zero
        b_lse = tl.load(lse + o_n, mask=m_n, other=float("inf"))
        b_dz = tl.exp(b_z - b_lse[:, None]) * tl.load(coef_p + o_n, mask=m_n, other=0.0)[:, None]
        b_label = tl.load(labels + o_n, mask=m_n, other=-1)
        b_at_label = tl.load(coef_label + o_n, mask=m_n, other=0.0)
        b_dz -= tl.where(o_v[None, :] == b_label[:, None], b_at_label[:, None], 0.0)
        if HAS_SMOOTHING:
            b_spread = tl.load(coef_weight + o_n, mask=m_n, other=0.0)[:, None]
            if HAS_CLASS_WEIGHT:
                b_spread = b_spread * tl.load(class_weight + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
            b_dz -= b_spread
        if HAS_SOFTCAP:
            b_z = b_z / softcap
            b_dz *= 1 - b_z * b_z
        if HAS_SCALE:
            b_dz *= scale
        if NEED_BIAS:
            tl.store(out_bias + (i_n // BLOCK_N).to(tl.int64) * C + o_c, tl.sum(b_dz, 0), mask=m_v)
        if TMA:
            out.store([i_n, i_c], b_dz.to(out.dtype))
        else:
            p_out = out + o_n.to(tl.int64)[:, None] * C + o_c[None, :]
            tl.store(p_out, b_dz.to(out.dtype.element_ty), mask=(o_n < N)[:, None] & m_v[None, :])


def linear_ce_backward(
    grad: Tensor,  # (N,)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dW, db) in the types of hidden, weight and bias; empty where not needed. Exact: torch's backward filters."""
    assert not filter_hidden and not filter_weight
    (rows, width), vocab = hidden.shape, weight.shape[0]
    order, place, count = counted_first(labels, ignore_index)
    valid = labels != ignore_index
    unit = _power_of_two(torch.where(valid, grad.abs().to(torch.float32), 0.0).amax())
    coefficients = row_coefficients(grad / unit, lse, labels, valid, class_weight, label_smoothing, z_loss, vocab)
    packed = hidden.index_select(0, order).to(dtype)
    # the sum over rows of eq. (8) ends inside a block: what lies behind the rows that count must be zero, not undefined
    packed.mul_((torch.arange(rows, device=hidden.device) < count)[:, None])
    readable = can_cast(packed, weight, dtype) or can_tma(packed, weight, dtype)
    blocks = blocks_for(rows, dtype, readable, device=hidden.device)
    columns = _slice_columns(rows, width, vocab, need_hidden, dtype, blocks, tile_bytes)
    height = triton.cdiv(rows, blocks.n)

    d_hidden = torch.zeros(rows if need_hidden else 0, width, dtype=torch.float32, device=hidden.device)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else weight.new_empty(0)
    d_bias = torch.zeros(vocab if need_bias else 0, dtype=torch.float32, device=hidden.device)
    bias_parts = torch.zeros(height if need_bias else 0, columns, dtype=torch.float32, device=hidden.device)
    # zeros: rows that do not count are never written
    dz = torch.zeros(rows, columns, dtype=dtype, device=hidden.device)
    row_data = [labels[order], lse[order], *(c[order] for c in coefficients)]
    labels_, lse_, coef_p, coef_label, coef_weight = row_data
    programs = processors(hidden.device) * (1 if blocks.tma else 1 << 20)
    for first in range(0, vocab, columns):
        wide = min(columns, vocab - first)
        grid = min(programs, height * triton.cdiv(wide, blocks.v))
        part = weight[first : first + wide]
        part = part.to(dtype) if blocks.tma else part
        with on(hidden.device):
            _dz_kernel[(grid,)](
                descriptor(packed, [blocks.n, blocks.h]) if blocks.tma else packed,
                descriptor(part, [blocks.v, blocks.h]) if blocks.tma else part,
                bias if bias is not None else packed,
                labels_,
                class_weight if class_weight is not None else packed,
                lse_, coef_p, coef_label, coef_weight, count,
                descriptor(dz, [blocks.n, blocks.v]) if blocks.tma else dz,
                bias_parts, rows, vocab, first, columns, grid,
                packed.stride(0), packed.stride(1), part.stride(0), part.stride(1), float(scale), float(softcap),
                H=width, BLOCK_N=blocks.n, BLOCK_V=blocks.v, BLOCK_H=blocks.h,
                DTYPE=compute_dtype(dtype), PRECISION=precision(packed, dtype), TMA=blocks.tma,
                HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0,
                HAS_SMOOTHING=label_smoothing > 0, HAS_CLASS_WEIGHT=class_weight is not None, NEED_BIAS=need_bias,
                num_warps=blocks.warps, num_stages=blocks.stages,
            )  # fmt: skip
        if need_bias:
            d_bias[first : first + wide] = bias_parts[:, :wide].sum(0) * unit
        if need_hidden:
            add_product(dz[:, :wide], part, d_hidden, count)
        if need_weight:
            store_product(dz[:, :wide], packed, d_weight[first : first + wide], count, unit, transposed=True)
    del packed, dz  # before dX is rounded, which takes room of its own
    if need_hidden:
        d_hidden *= unit
    d_hidden = d_hidden.to(hidden.dtype)
    if need_hidden:
        d_hidden = d_hidden.index_select(0, place)
    return d_hidden, d_weight, d_bias if bias is None else d_bias.to(bias.dtype)


def _slice_columns(
    rows: int, width: int, vocab: int, need_hidden: bool, dtype: torch.dtype, blocks: Blocks, workspace: int
) -> int:
    """Columns of a slice: what the workspace leaves beside dX in float32, but no fewer than keep the products large."""
    left = workspace - (rows * width * 4 if need_hidden else 0)
    columns = max(left // (rows * dtype.itemsize), 2048) // blocks.v * blocks.v
    return min(max(columns, blocks.v), triton.cdiv(vocab, blocks.v) * blocks.v)


def _power_of_two(largest: Tensor) -> Tensor:
    """The power of two at or below a positive number, 1 for 0, without the host looking at it."""
    return torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest))), 1.0)
