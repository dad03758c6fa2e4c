"""Inputs of a loss: hidden states (N, H), a head (V, H), labels (N,).

Random hidden states make any kernel that skips small gradients look perfect, so two kinds are measured: a trained
model's logits, lifted to another width, and a flat softmax as at the start of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True)
class Shape:
    rows: int
    hidden: int
    vocab: int


SHAPES = {
    "gemma2-2b": Shape(8192, 2304, 256_000),
    "llama3-8b": Shape(8192, 4096, 128_256),
    "gemma3-270m": Shape(8192, 640, 262_144),
    "qwen2.5-7b": Shape(8192, 3584, 152_064),
    "qwen3-0.6b": Shape(16_384, 1024, 151_936),
    "tiny": Shape(256, 64, 4096),
}


@dataclass(frozen=True)
class Inputs:
    kind: str
    hidden: Tensor
    weight: Tensor
    labels: Tensor


def flat(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """An untrained head: every class about equally likely."""
    g = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(shape.vocab, shape.hidden, device=device, generator=g) / math.sqrt(shape.hidden)
    hidden = torch.randn(shape.rows, shape.hidden, device=device, generator=g)
    labels = torch.randint(0, shape.vocab, (shape.rows,), device=device, generator=g)
    return Inputs("flat", hidden.to(dtype), weight.to(dtype), labels)


def lifted(shape: Shape, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, device: str) -> Inputs:
    """A trained model's hidden states (n, h) and head (v, h), brought to another width by one isometry.

    The logits are the model's own, only H is another. A smaller vocabulary keeps the head's first rows and the tokens
    whose labels are among them; tokens repeat until there are N.

    Raises:
        ConfigError: the shape is narrower, or has more classes, than the model.
    """
    if shape.hidden < hidden.shape[1] or shape.vocab > weight.shape[0]:
        raise ConfigError(
            f"The real inputs have hidden width {hidden.shape[1]} and {weight.shape[0]} classes, and cannot be brought "
            f"to {shape.hidden} and {shape.vocab}. Choose a shape at least as wide, with no more classes."
        )
    hidden, weight, labels = hidden.to(device), weight[: shape.vocab].to(device), labels.to(device)
    kept = (labels < shape.vocab).nonzero()[:, 0]
    index = kept.repeat(math.ceil(shape.rows / len(kept)))[: shape.rows]
    rotation = torch.eye(shape.hidden, hidden.shape[1], device=device)
    if shape.hidden != hidden.shape[1]:
        g = torch.Generator(device).manual_seed(0)
        rotation = torch.linalg.qr(torch.randn(shape.hidden, hidden.shape[1], device=device, generator=g))[0]
    return Inputs(
        "real", (hidden[index].float() @ rotation.T).to(dtype), (weight.float() @ rotation.T).to(dtype), labels[index]
    )


def half_masked(inputs: Inputs, seed: int = 0) -> Inputs:
    """The same with a random half of the labels ignored, as in instruction data."""
    g = torch.Generator(inputs.labels.device).manual_seed(seed)
    drop = torch.rand(inputs.labels.shape, device=inputs.labels.device, generator=g) < 0.5
    return Inputs(f"{inputs.kind}, half masked", inputs.hidden, inputs.weight, torch.where(drop, -100, inputs.labels))
