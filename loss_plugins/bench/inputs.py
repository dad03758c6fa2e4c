"""Inputs of a loss: hidden states (N, H), a head (V, H), labels (N,).

Random hidden states make any kernel that skips small gradients look perfect, so two kinds are measured: a trained
model's logits, lifted to another width, and a flat softmax as at the start of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError

KINDS = ("flat", "real", "masked")


@dataclass(frozen=True)
class Shape:
    rows: int
    hidden: int
    vocab: int
    name: str = ""

    def __str__(self) -> str:
        sizes = f"{self.rows} x {self.hidden} x {self.vocab}"
        return f"{self.name} ({sizes})" if self.name else sizes


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(8192, 2304, 256_000, "gemma2-2b"),
        Shape(8192, 4096, 128_256, "llama3-8b"),
        Shape(8192, 640, 262_144, "gemma3-270m"),
        Shape(8192, 3584, 152_064, "qwen2.5-7b"),
        Shape(16_384, 1024, 151_936, "qwen3-0.6b"),
        Shape(256, 64, 4096, "tiny"),
    )
}


@dataclass(frozen=True)
class Inputs:
    kind: str
    hidden: Tensor
    weight: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Trained:
    """A trained model's hidden states (n, h), head (v, h) and labels (n,)."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @classmethod
    def load(cls, states: str, head: str, device: str) -> Trained:
        """Read ``{"X": hidden states, "y": labels}`` and a head, as torch.save wrote them.

        Raises:
            ConfigError: a file is not there, or holds something else.
        """
        for path in (states, head):
            if not Path(path).is_file():
                raise ConfigError(f"{str(path)!r} is not a file. Save the tensors there with torch.save first.")
        saved, weight = (torch.load(path, weights_only=True, map_location=device) for path in (states, head))
        if not isinstance(saved, dict) or not {"X", "y"} <= saved.keys() or not isinstance(weight, Tensor):
            raise ConfigError(
                f"{states!r} must hold {{'X': hidden states (n, h), 'y': labels (n,)}} and {head!r} a tensor (v, h)."
            )
        return cls(saved["X"], weight, saved["y"])


def flat(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """An untrained head: every class about equally likely."""
    g = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(shape.vocab, shape.hidden, device=device, generator=g) / math.sqrt(shape.hidden)
    hidden = torch.randn(shape.rows, shape.hidden, device=device, generator=g)
    labels = torch.randint(0, shape.vocab, (shape.rows,), device=device, generator=g)
    return Inputs("flat", hidden.to(dtype), weight.to(dtype), labels)


def lifted(shape: Shape, trained: Trained, dtype: torch.dtype, device: str) -> Inputs:
    """A trained model's hidden states and head, brought to another width by one isometry.

    The logits are the model's own, only H is another. A smaller vocabulary keeps the head's first rows and the tokens
    whose labels are among them; tokens repeat until there are N.

    Raises:
        ConfigError: the shape is narrower, or has more classes, than the model.
    """
    width, classes = trained.hidden.shape[1], trained.weight.shape[0]
    if shape.hidden < width or shape.vocab > classes:
        raise ConfigError(
            f"The real inputs have hidden width {width} and {classes} classes, and cannot be brought "
            f"to {shape.hidden} and {shape.vocab}. Choose a shape at least as wide, with no more classes."
        )
    hidden, weight, labels = (t.to(device) for t in (trained.hidden, trained.weight[: shape.vocab], trained.labels))
    kept = (labels < shape.vocab).nonzero()[:, 0]
    if not len(kept):
        raise ConfigError(f"No label of the real inputs is below {shape.vocab}. Choose a larger vocabulary.")
    index = kept.repeat(math.ceil(shape.rows / len(kept)))[: shape.rows]
    rotation = torch.eye(shape.hidden, width, device=device)
    if shape.hidden != width:
        g = torch.Generator(device).manual_seed(0)
        rotation = torch.linalg.qr(torch.randn(shape.hidden, width, device=device, generator=g))[0]
    return Inputs(
        "real", (hidden[index].float() @ rotation.T).to(dtype), (weight.float() @ rotation.T).to(dtype), labels[index]
    )


def half_masked(inputs: Inputs, seed: int = 0) -> Inputs:
    """The same with a random half of the labels ignored, as in instruction data."""
    g = torch.Generator(inputs.labels.device).manual_seed(seed)
    drop = torch.rand(inputs.labels.shape, device=inputs.labels.device, generator=g) < 0.5
    return Inputs(f"{inputs.kind}, half masked", inputs.hidden, inputs.weight, torch.where(drop, -100, inputs.labels))


def each_kind(
    kinds: Iterable[str], shape: Shape, trained: Trained | None, dtype: torch.dtype, device: str
) -> Iterator[Inputs]:
    """The inputs of these `KINDS`, one after the other; ``masked`` shares the tensors of ``real``, else of ``flat``."""
    kinds = set(kinds)
    base = "flat" if trained is None else "real"
    if "flat" in kinds or (base == "flat" and "masked" in kinds):
        made = flat(shape, dtype, device)
        if "flat" in kinds:
            yield made
        if base == "flat" and "masked" in kinds:
            yield half_masked(made)
        del made
    if trained is not None and kinds & {"real", "masked"}:
        made = lifted(shape, trained, dtype, device)
        if "real" in kinds:
            yield made
        if "masked" in kinds:
            yield half_masked(made)
