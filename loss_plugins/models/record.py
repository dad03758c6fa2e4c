"""What a model does to its logits between head and loss, as data, and how much of it a strategy can take over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One recorded operation: ``mul`` or ``div`` by a number or 0-d tensor, ``tanh``, ``cast`` to a type, or ``columns``
    (start, stop) of the vocabulary."""

    name: str
    value: Any = None


@dataclass(frozen=True)
class Normal:
    """Recorded steps as a strategy takes them: ``softcap * tanh(scale * z / softcap)`` on some columns, with tensor factors
    moved into the hidden states."""

    scale: float = 1.0
    softcap: float | None = None
    factors: tuple[Step, ...] = ()
    columns: tuple[int, int] | None = None


def normalise(steps: tuple[Step, ...], vocab: int) -> Normal | None:
    """The normal form of ``steps`` over ``vocab`` columns, or None where only replaying them one by one is exact.

    tanh is odd, so ``m * tanh(s * z)`` has a normal form for every m but 0. Casts are left out: strategies compute in
    float32 or wider.
    """
    up, down, cap = 1.0, 1.0, None
    factors: list[Step] = []
    start, stop = 0, vocab
    for step in steps:
        if step.name == "cast":
            continue
        if step.name == "columns":
            start, stop = start + step.value[0], start + step.value[1]
        elif step.name == "tanh":
            if cap is not None:
                return None
            cap = 1.0
        elif isinstance(step.value, Tensor):
            if cap is not None:
                return None
            factors.append(step)
        elif cap is not None:
            cap = cap * step.value if step.name == "mul" else (cap / step.value if step.value else math.nan)
        elif step.name == "mul":
            up *= step.value
        else:
            down *= step.value
    columns = None if (start, stop) == (0, vocab) else (start, stop)
    if cap is None:
        scale = up / down if down else math.nan
    else:
        # tanh(up/down * z) * cap, written as the strategies write it; cap first, so that a cap's own division cancels
        scale = up * cap / down if down else math.nan
    if not math.isfinite(scale) or (cap is not None and (not math.isfinite(cap) or cap == 0)):
        return None
    if cap is not None and cap < 0:
        cap = -cap
    return Normal(scale, cap, tuple(factors), columns)


def replay(logits: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """``steps`` on real logits, in float32 or wider: casts to a narrower type are left out."""
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    for step in steps:
        if step.name == "cast":
            if step.value.itemsize > logits.dtype.itemsize:
                logits = logits.to(step.value)
        else:
            logits = apply(logits, step)
    return logits


def apply(tensor: Tensor, step: Step) -> Tensor:
    """One step, exactly as the model wrote it."""
    if step.name == "mul":
        return tensor * step.value
    if step.name == "div":
        return tensor / step.value
    if step.name == "tanh":
        return torch.tanh(tensor)
    if step.name == "cast":
        return tensor.to(step.value)
    assert step.name == "columns", step.name
    return tensor[..., step.value[0] : step.value[1]]
