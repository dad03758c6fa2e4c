"""torch_npu's own fused operators, where somebody asks for them: their contract is narrow, and it is kept here.

`linear_nll` is the pair that was made for vocabulary-parallel training: the maximum and the sum of exponentials of each
row come out of one operator without logits, and the gradients of both inputs out of another. Its fake and its autograd
are ours, since torch_npu has neither. `row_nll` is the cross-entropy of logits that exist, which saves no memory: it
keeps the log-probabilities of all of them.

Labels below 0 lie outside the contract of both, so neither is ever shown one: an ignored row is given label 0, and its
loss, hence its gradient, is zero. Not run on hardware; the tests hold a stand-in that refuses what these refuse.

Letters: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._ops import NAMESPACE
from .ops import record

LINEAR = ("npu_fused_linear_online_max_sum", "npu_fused_linear_cross_entropy_loss_with_max_sum_backward")
CROSS_ENTROPY = ("npu_cross_entropy_loss",)
LEAST_VOCAB = 128
MOST_ROWS = 200_000
"""Of `row_nll`."""


def linear_nll(hidden: Tensor, weight: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(nll, lse) of each row of ``hidden @ weight.T``, 0 where not ``valid``; nll is differentiable, lse is not.

    Args:
        hidden: Shape ``[N, H]``, bfloat16 or float16.
        weight: Shape ``[V, H]``, of the same type, V at least `LEAST_VOCAB`.
        labels: Shape ``[N]``, int64, anything where not ``valid``.
        valid: Shape ``[N]``, bool.
    """
    record("native.linear_ce_forward")
    nll, max_, sum_, *_ = _linear(hidden.contiguous(), weight.contiguous(), torch.where(valid, labels, 0))
    lse = max_ + sum_.log()
    return torch.where(valid, nll, 0.0), torch.where(valid, lse, 0.0).detach()


def row_nll(logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """(N,) nll of each row of ``logits``, 0 where not ``valid``.

    Args:
        logits: Shape ``[N, V]``, float32: the operator's loss has the type of its input, and bfloat16 is no loss.
        labels: Shape ``[N]``, int64, anything where not ``valid``.
        valid: Shape ``[N]``, bool.
    """
    record("native.cross_entropy_forward")
    # with a gradient it allows no reduction but these, nor any other argument
    nll = torch.ops.npu.npu_cross_entropy_loss(logits, torch.where(valid, labels, 0), reduction="none")[0]
    return torch.where(valid, nll.to(logits.dtype), 0.0)


@torch.library.custom_op(f"{NAMESPACE}::native_linear_nll", mutates_args=())
def _linear(
    hidden: Tensor,  # (N, H) half
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,) int64 in [0, V)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(nll, maximum, sum of exp(z - maximum), mask, label within the part) of each row, as its gradient wants them."""
    vocab = weight.shape[0]
    # the last index counts as inside
    with torch.autocast(hidden.device.type, enabled=False):
        max_, sum_, predicted, mask, local, _ = torch.ops.npu.npu_fused_linear_online_max_sum(
            hidden, weight, labels, 0, vocab - 1, False
        )
    return sum_.log() - predicted, max_, sum_, mask, local


@_linear.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = hidden.shape[0]
    nll, max_, sum_ = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(3))
    mask = hidden.new_empty((rows + 7) // 8, dtype=torch.uint8)  # a bit a row
    return nll, max_, sum_, mask, torch.empty_like(labels)


@torch.library.custom_op(f"{NAMESPACE}::native_linear_nll_backward", mutates_args=())
def _linear_backward(
    grad: Tensor,  # (N,) float32, 0 where a row is ignored
    hidden: Tensor,
    weight: Tensor,
    max_: Tensor,
    sum_: Tensor,
    mask: Tensor,
    local: Tensor,
) -> tuple[Tensor, Tensor]:
    """(dX, dW), both, in the types of the inputs."""
    record("native.linear_ce_backward")
    gradient = torch.ops.npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward
    with torch.autocast(hidden.device.type, enabled=False):
        d_hidden, d_weight = gradient(
            grad.contiguous(), hidden, weight, mask, local, logits_max=max_, sum_exp_logits=sum_, softmax=None
        )
    return d_hidden, d_weight


@_linear_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, max_: Tensor, sum_: Tensor, mask: Tensor, local: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _ = inputs
    ctx.save_for_backward(hidden, weight, *output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    if grad is None:
        return None, None, None
    d_hidden, d_weight = _linear_backward(grad, *ctx.saved_tensors)
    need_hidden, need_weight, _ = ctx.needs_input_grad
    return d_hidden if need_hidden else None, d_weight if need_weight else None, None


_linear.register_autograd(_gradient, setup_context=_setup)
