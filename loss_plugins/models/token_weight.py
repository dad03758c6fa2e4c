"""Weights a token follow the model's own shift: they are given beside the labels, and must meet the loss's targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError


def aligned_token_weight(weight: Tensor, labels: Tensor | None, target: Tensor, ignore_index: int) -> Tensor:
    """``weight`` as the model shifted its labels.

    Args:
        weight: Shape of ``labels``.
        labels: What the forward was given.
        target: What the model's loss was given, shape ``[N]``.

    Returns:
        Shape ``[N]``. On an accelerator, where looking would make the host wait, NaN if no shift that is known turns
        the labels into these targets: never a loss with weights on the wrong tokens.

    Raises:
        ConfigError: shapes that do not belong together; on a CPU also targets that are no known shift of the labels.
    """
    if labels is None or weight.shape != labels.shape:
        given = "none were given" if labels is None else f"they have shape {tuple(labels.shape)}"
        raise ConfigError(
            f"token_weight of shape {tuple(weight.shape)} needs labels of the same shape, and {given}. "
            "Give one weight a label; under DataParallel weights are not split over devices, so use "
            "DistributedDataParallel."
        )
    labels, weight = labels.to(target.device), weight.to(target.device)
    candidates = [
        (F.pad(labels, (0, 1), value=ignore_index)[..., 1:], F.pad(weight, (0, 1))[..., 1:]),
        (labels[..., 1:], weight[..., 1:]),
        (labels, weight),
    ]
    fitting = [(a.reshape(-1), w.reshape(-1)) for a, w in candidates if a.numel() == target.numel()]
    on_cpu = target.device.type == "cpu"
    if on_cpu and not torch.compiler.is_compiling():
        for shifted, moved in fitting:
            if torch.equal(shifted, target):
                return moved
        fitting = []
    if not fitting:
        raise ConfigError(
            f"token_weight was given for labels of shape {tuple(labels.shape)}, but the model computed its loss on "
            f"{target.numel()} targets that are neither these labels nor these shifted by one, so it is not known "
            "which weight belongs to which. Leave token_weight out, or set the labels of unwanted tokens to "
            "ignore_index."
        )
    result = torch.full_like(fitting[0][1], torch.nan, dtype=torch.promote_types(weight.dtype, torch.float32))
    for shifted, moved in reversed(fitting):
        result = torch.where((shifted == target).all(), moved.to(result.dtype), result)
    return result
