"""The oracle: the loss as its formula reads, in float64, with every logit in memory. What every test compares with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,  # (V,)
    token_weight: Tensor | None = None,  # (N,)
    reduction: str = "mean",
    num_items_in_batch: float | None = None,
) -> Tensor:
    """Differentiable, float64: eq. (1) to (4) of README.md read from left to right."""
    z = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    class_weight = None if class_weight is None else class_weight.double()
    loss = F.cross_entropy(
        z, labels.long(), class_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    valid = labels != ignore_index
    loss = loss + z_loss * torch.where(valid, z.logsumexp(1), 0.0).square()
    each = valid.double() if token_weight is None else token_weight.double() * valid
    loss = loss * each
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if num_items_in_batch is not None:
        return loss.sum() / num_items_in_batch
    if class_weight is not None:
        each = each * class_weight[torch.where(valid, labels.long(), 0)]
    return loss.sum() / each.sum()
