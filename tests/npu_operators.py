"""A stand-in for torch_npu's fused operators: the documented contract in torch, and a refusal of what they refuse.

    offer()      # torch.ops.npu has them from then on, in this process

Of the three, two have neither a fake nor autograd, as in torch_npu.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# as torch_npu 2.13.0 declares them
SCHEMAS = (
    "npu_cross_entropy_loss(Tensor input, Tensor target, Tensor? weight=None, str reduction='mean', int ignore_index=-100, "
    "float label_smoothing=0., float lse_square_scale_for_zloss=0., bool return_zloss=False) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    "npu_fused_linear_online_max_sum(Tensor input, Tensor weight, Tensor target, int vocab_start_index, "
    "int vocab_end_index, bool return_logits=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward(Tensor grad, Tensor input, Tensor weight, Tensor target_mask, "
    "Tensor masked_target, float label_smoothing=0., Tensor? logits_max=None, Tensor? sum_exp_logits=None, "
    "Tensor? softmax=None) -> (Tensor, Tensor)",
)
HALF = (torch.bfloat16, torch.float16)
_library: list[Any] = []


def offer() -> Any:
    """The namespace `torch.ops.npu` with the three operators in it."""
    if not _library:
        library = torch.library.Library("npu", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        library.impl("npu_cross_entropy_loss", cross_entropy_loss, "CompositeImplicitAutograd")
        library.impl("npu_fused_linear_online_max_sum", online_max_sum, "CPU")
        library.impl("npu_fused_linear_cross_entropy_loss_with_max_sum_backward", max_sum_backward, "CPU")
        _library.append(library)  # it takes its operators with it
    return torch.ops.npu


def refuse(condition: bool, why: str) -> None:
    if condition:
        raise RuntimeError(f"the operator refuses this: {why}")


def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, vocab = input.shape
    refuse(target.dtype != torch.int64, "target must be int64")
    refuse(rows > 200_000, "more than 200000 rows")
    refuse(
        bool(((target < 0) | (target >= vocab)).any()), "a target outside [0, C); ignore_index below 0 ignores nothing"
    )
    refuse(lse_square_scale_for_zloss != 0 or return_zloss, "the z-loss is not enabled")
    if input.requires_grad:
        plain = weight is None and ignore_index == -100 and label_smoothing == 0
        refuse(reduction == "mean" and not plain, "with a gradient the mean takes no other argument")
        refuse(reduction != "mean" and label_smoothing != 0, "with a gradient sums and rows take no label smoothing")
    log_prob = torch.log_softmax(input.float(), 1).to(input.dtype)
    loss = torch.nn.functional.nll_loss(log_prob, target, weight, reduction=reduction)
    empty = input.new_empty(0)
    return loss, log_prob, empty, empty


def pack(mask: Tensor) -> Tensor:
    """A bit a row, those behind the last row set."""
    padded = torch.ones(-(-mask.numel() // 8) * 8, dtype=torch.uint8)
    padded[: mask.numel()] = mask.to(torch.uint8)
    return (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def unpack(packed: Tensor, rows: int) -> Tensor:
    return ((packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:rows].bool()


def _check_linear(input: Tensor, weight: Tensor) -> None:
    refuse(input.dtype not in HALF or weight.dtype != input.dtype, "only bfloat16 and float16, both the same")
    refuse(weight.shape[0] < 128, "fewer than 128 rows in weight")
    refuse(not (input.is_contiguous() and weight.is_contiguous()), "strides")


def online_max_sum(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_linear(input, weight)
    refuse(vocab_end_index - vocab_start_index + 1 != weight.shape[0], "the last index counts as inside")
    refuse(bool((target < 0).any()), "a label below 0 (masked there, with a loss and a gradient that nobody wants)")
    logits = input.float() @ weight.float().T
    mask = (target < vocab_start_index) | (target > vocab_end_index)
    local = torch.where(mask, 0, target - vocab_start_index)
    max_ = logits.amax(1)
    predicted = torch.where(mask, 0.0, logits.gather(1, local[:, None])[:, 0] - max_)
    sum_ = (logits - max_[:, None]).exp().sum(1)
    return max_, sum_, predicted, pack(mask), local, logits if return_logits else logits.new_empty(0)


def max_sum_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    target_mask: Tensor,
    masked_target: Tensor,
    label_smoothing: float = 0.0,
    logits_max: Tensor | None = None,
    sum_exp_logits: Tensor | None = None,
    softmax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_linear(input, weight)
    rows = input.shape[0]
    refuse(grad.dtype != torch.float32 or grad.shape != (rows,) or not grad.is_contiguous(), "grad must be float32 [N]")
    refuse(label_smoothing != 0, "label_smoothing")
    refuse(target_mask.dtype != torch.uint8 or target_mask.numel() != -(-rows // 8), "target_mask has a bit a row")
    refuse((softmax is None) == (logits_max is None or sum_exp_logits is None), "softmax, or both of the others")
    logits = input.float() @ weight.float().T
    p = softmax if softmax is not None else (logits - logits_max[:, None]).exp() / sum_exp_logits[:, None]
    keep = (~unpack(target_mask, rows)).float()
    p.scatter_add_(1, masked_target[:, None], -keep[:, None])
    dz = p * grad[:, None]
    return (dz @ weight.float()).to(input.dtype), (dz.T @ input.float()).to(weight.dtype)
