"""Cut cross-entropy, forward: one pass over the vocabulary, nothing of size ``N * V`` anywhere.

Each program owns a block of rows and a strip of the vocabulary. It keeps its rows' running maximum, sum and label logit in
registers, eq. (2), and writes them once; a few torch operations on ``strips * N`` numbers merge the strips. No atomics and
no locks, so the result is the same every time. Ignored rows are sorted to the end and their blocks return at once: the
host never learns how many there are.
Peak beside the results: up to six float32 arrays of ``strips * N``.

Letters: N rows, H hidden width, V vocabulary. In the kernel ``i_`` is an index, ``o_`` offsets, ``m_`` a mask, ``b_`` a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._rows import row_terms


@triton.jit
def _linear_ce_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    bias,  # (V,)
    labels,  # (N,) int64
    class_weight,  # (V,)
    order,  # (N,) int64, rows that count first
    count,  # () int64, how many count
    out_max,  # (strips, N) float32, as all outputs; indexed by position in ``order``
    out_sum,
    out_target,
    out_weighted,
    out_moment,
    out_best,  # (strips, N) int32
    N,
    V,
    strips,
    tiles_a_strip,
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
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_BEST: tl.constexpr,
):
    i_block = tl.program_id(0) // strips
    i_strip = tl.program_id(0) % strips
    n = tl.load(count)
    if i_block * BLOCK_N >= n:
        return
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    i_row = tl.load(order + o_n, mask=m_n, other=0)
    b_label = tl.load(labels + i_row, mask=m_n, other=-1)
    p_hidden = hidden + i_row[:, None] * hidden_row

    b_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    b_target = tl.zeros((BLOCK_N,), tl.float32)
    b_weighted = tl.zeros((BLOCK_N,), tl.float32)
    b_moment = tl.zeros((BLOCK_N,), tl.float32)
    b_top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_best = tl.zeros((BLOCK_N,), tl.int32)
    for i_tile in range(i_strip * tiles_a_strip, (i_strip + 1) * tiles_a_strip):
        o_v = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
        m_v = o_v < V
        p_weight = weight + o_v.to(tl.int64)[None, :] * weight_row
        b_z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for i_h in range(0, H, BLOCK_H):
            o_h = i_h + tl.arange(0, BLOCK_H)
            m_h = o_h < H
            b_h = tl.load(p_hidden + o_h[None, :] * hidden_col, mask=m_n[:, None] & m_h[None, :], other=0.0)
            b_w = tl.load(p_weight + o_h[:, None] * weight_col, mask=m_v[None, :] & m_h[:, None], other=0.0)
            b_z = tl.dot(b_h.to(DTYPE), b_w.to(DTYPE), b_z, input_precision=PRECISION)
        if HAS_BIAS:
            b_z += tl.load(bias + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
        if HAS_SCALE:
            b_z *= scale
        if HAS_SOFTCAP:
            b_z = softcap * (2 * tl.sigmoid(2 * b_z / softcap) - 1)
        if HAS_SMOOTHING:
            b_real = tl.where(m_v[None, :], b_z, 0.0)
            if HAS_CLASS_WEIGHT:
                b_real *= tl.load(class_weight + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
            b_weighted += tl.sum(b_real, 1)
        b_target += tl.sum(tl.where(o_v[None, :] == b_label[:, None], b_z, 0.0), 1)
        b_z = tl.where(m_v[None, :], b_z, float("-inf"))
        b_tile_max = tl.max(b_z, 1)
        if WANT_BEST:
            b_tile_best = tl.argmax(b_z, 1) + i_tile * BLOCK_V
            b_best = tl.where(b_tile_max > b_top, b_tile_best, b_best)
            b_top = tl.maximum(b_top, b_tile_max)
        b_new = tl.maximum(b_max, b_tile_max)
        # a row whose logits are all -inf so far keeps its zero sum: exp(-inf - -inf) would be NaN
        b_anchor = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_carry = tl.exp(b_max - b_anchor)
        b_z = b_z - b_anchor[:, None]
        b_share = tl.exp(b_z)
        if WANT_ENTROPY:
            # relative to the maximum, so that no two large numbers are subtracted in the end
            b_moved = tl.where(b_max == float("-inf"), 0.0, b_max - b_anchor) * b_sum
            b_moment = (b_moment + b_moved) * b_carry + tl.sum(b_share * tl.where(b_share > 0, b_z, 0.0), 1)
        b_sum = b_sum * b_carry + tl.sum(b_share, 1)
        b_max = b_new

    o_out = i_strip.to(tl.int64) * N + o_n
    tl.store(out_max + o_out, b_max, mask=m_n)
    tl.store(out_sum + o_out, b_sum, mask=m_n)
    tl.store(out_target + o_out, b_target, mask=m_n)
    if HAS_SMOOTHING:
        tl.store(out_weighted + o_out, b_weighted, mask=m_n)
    if WANT_ENTROPY:
        tl.store(out_moment + o_out, b_moment, mask=m_n)
    if WANT_BEST:
        tl.store(out_best + o_out, b_best, mask=m_n)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, lse, entropy, predicted) of each row; the last two are empty unless asked for."""
    (rows, width), vocab = hidden.shape, weight.shape[0]
    block_n, block_v, block_h, warps, stages = _blocks(rows, dtype)
    blocks, tiles = triton.cdiv(rows, block_n), triton.cdiv(vocab, block_v)
    strips = min(tiles, max(1, triton.cdiv(_programs(hidden.device), blocks)))
    tiles_a_strip = triton.cdiv(tiles, strips)
    strips = triton.cdiv(tiles, tiles_a_strip)

    valid = labels != ignore_index
    order = torch.argsort(valid, descending=True, stable=True)
    count = valid.sum()

    def partial(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(strips if wanted else 0, rows, dtype=dtype, device=hidden.device)

    max_ = partial().fill_(-torch.inf)
    sum_, target = partial(), partial()
    weighted, moment = partial(label_smoothing > 0), partial(want_entropy)
    best = partial(want_predicted, torch.int32)
    # the interpreter multiplies bfloat16 as raw integers, so its operands are float32
    compute = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    tf32 = dtype == torch.float32 and hidden.is_cuda and torch.backends.cuda.matmul.allow_tf32
    with _on(hidden.device):
        _linear_ce_kernel[(blocks * strips,)](
            hidden, weight, bias if bias is not None else weight, labels,
            class_weight if class_weight is not None else weight, order, count,
            max_, sum_, target, weighted, moment, best, rows, vocab, strips, tiles_a_strip,
            hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1), float(scale), float(softcap),
            H=width, BLOCK_N=block_n, BLOCK_V=block_v, BLOCK_H=block_h,
            DTYPE=_TRITON_DTYPES[compute], PRECISION="tf32" if tf32 else "ieee",
            HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0,
            HAS_SMOOTHING=label_smoothing > 0, HAS_CLASS_WEIGHT=class_weight is not None,
            WANT_ENTROPY=want_entropy, WANT_BEST=want_predicted, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    # merge the strips, eq. (2), and put the rows back where they came from
    place = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=order.device))
    top = max_.amax(0)
    anchor = torch.where(top == -torch.inf, 0.0, top)
    share = torch.exp(max_ - anchor)
    total = (sum_ * share).sum(0)[place]
    top = top[place]
    loss, nll, lse = row_terms(
        top, total, target.sum(0)[place], weighted.sum(0)[place] if label_smoothing else None, labels, valid,
        class_weight, label_smoothing, z_loss, vocab,
    )
    entropy = sum_.new_zeros(0)
    if want_entropy:
        moved = torch.where(max_ == -torch.inf, 0.0, max_ - anchor) * sum_
        entropy = torch.where(valid, total.log() - ((moment + moved) * share).sum(0)[place] / total, 0.0)
    predicted = labels.new_zeros(0)
    if want_predicted:
        # argmax takes the first strip of equals, and a strip its first column
        first = best.gather(0, max_.argmax(0, keepdim=True))[0].to(torch.int64)[place]
        predicted = torch.where(valid, first, ignore_index)
    return loss, nll, lse, entropy, predicted


INTERPRETED = not isinstance(_linear_ce_kernel, triton.JITFunction)

_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _blocks(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(rows, columns, depth, warps, stages) of a tile: for half types what fits every GPU since Ampere."""
    block_n = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    if dtype.itemsize >= 4:
        return min(block_n, 64), 64, 32, 4, 2
    return block_n, 128, 64, 8 if block_n == 128 else 4, 3


def _programs(device: torch.device) -> int:
    """How many programs keep the device busy; one under the interpreter, where each costs time."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return 1 if device.type == "cpu" else 128


def _on(device: torch.device) -> torch.device | torch.cuda.device:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.device(device)
