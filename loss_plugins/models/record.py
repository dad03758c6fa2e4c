"""What a model does to its logits between head and loss, as data, and how much of it a strategy can take over."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One recorded operation.

    ``mul`` or ``div`` by a number or 0-d tensor, ``add`` of a vector over the vocabulary, ``tanh``, ``cast`` to a type,
    or ``columns`` (start, stop) of the vocabulary.
    """

    name: str
    value: Any = None


@dataclass(frozen=True)
class Normal:
    """Recorded steps as a strategy takes them: ``softcap * tanh(scale * z / softcap)``, where ``z`` are the logits of a
    linear layer that differs from the head by ``linear`` steps: ``columns``, ``mul`` and ``div`` by tensors,
    ``add``."""

    scale: float = 1.0
    softcap: float | None = None
    linear: tuple[Step, ...] = ()

    def layer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias of that layer, shapes ``[N, H]``, ``[V, H]`` and ``[V]``, differentiably."""
        for name, value in self.linear:
            if name == "columns":
                weight = weight[slice(*value)]
                bias = None if bias is None else bias[slice(*value)]
            elif name == "add":
                bias = value if bias is None else bias + value
            else:
                hidden = hidden * value if name == "mul" else hidden / value
                if bias is not None:
                    bias = bias * value if name == "mul" else bias / value
        return hidden, weight, bias

    def of_part(self, rows: slice) -> Normal | None:
        """The same for some rows of the head, or None where the steps are about other ones."""
        if any(step.name == "columns" for step in self.linear):
            return None
        linear = (Step(name, value[rows]) if name == "add" else Step(name, value) for name, value in self.linear)
        return replace(self, linear=tuple(linear))


def normalise(steps: tuple[Step, ...]) -> Normal | None:
    """The normal form of ``steps``, or None where only replaying them one by one is exact.

    tanh is odd, so ``m * tanh(s * z)`` has a normal form for every m but 0. Casts are left out: strategies compute in
    float32 or wider.
    """
    up, down, cap = 1.0, 1.0, None
    linear: list[Step] = []
    for name, value in steps:
        if name == "columns":
            linear.append(Step(name, value))
        elif name == "tanh":
            if cap is not None:
                return None
            cap = 1.0
        elif isinstance(value, Tensor):
            if cap is not None or not up:
                return None
            # what is added after a number was multiplied is added before, divided by it
            linear.append(Step(name, value.reshape(-1) * (down / up)) if name == "add" else Step(name, value))
        elif name == "div" and not value:
            return None
        elif cap is not None and name != "cast":
            cap = cap * value if name == "mul" else cap / value
        elif name == "mul":
            up *= value
        elif name == "div":
            down *= value
    # cap before down: a softcap written as z / c, tanh, * c then has a scale of exactly 1
    scale = up / down if cap is None else up * cap / down
    if not math.isfinite(scale) or (cap is not None and (not math.isfinite(cap) or cap == 0)):
        return None
    return Normal(scale, None if cap is None else abs(cap), tuple(linear))


def replay(logits: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """``steps`` on real logits, in float32 or wider: casts to a narrower type are left out."""
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    for step in steps:
        if step.name == "add":
            logits = logits + step.value.reshape(-1)
        elif step.name != "cast" or step.value.itemsize > logits.dtype.itemsize:
            logits = apply(logits, step)
    return logits


def apply(tensor: Tensor, step: Step) -> Tensor:
    """One step, exactly as the model wrote it."""
    if step.name == "mul":
        return tensor * step.value
    if step.name == "div":
        return tensor / step.value
    if step.name == "add":
        return tensor + step.value
    if step.name == "tanh":
        return torch.tanh(tensor)
    if step.name == "cast":
        return tensor.to(step.value)
    assert step.name == "columns", step.name
    return tensor[..., step.value[0] : step.value[1]]
