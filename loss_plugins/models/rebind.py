"""Functions with other globals, for what their code looks up by name at every call."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def innermost(function: Any) -> types.FunctionType | None:
    """``function`` without its decorators; None where that is no function of Python, or one of them hides it."""
    while isinstance(function, types.FunctionType) and _inner(function) is not None:
        function = _inner(function)
    return function if isinstance(function, types.FunctionType) else None


def rebound(function: Any, names: Mapping[str, Any]) -> Any:
    """A copy of ``function``, decorators and all, that finds other values under names of its module."""
    inner, scope, cells = _inner(function), function.__globals__, function.__closure__
    if inner is None:
        scope = {**scope, **names}
    else:
        copied_inner = rebound(inner, names)
        cells = tuple(types.CellType(copied_inner) if c.cell_contents is inner else c for c in cells)
    copied: Any = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(copied, function)
    copied.__kwdefaults__ = function.__kwdefaults__
    if inner is None:
        del copied.__wrapped__
    else:
        copied.__wrapped__ = copied_inner
    return copied


def _inner(function: Any) -> Any:
    """What a decorator was put on, where its wrapper holds that as a variable; else None."""
    wrapped = getattr(function, "__wrapped__", None)
    held = any(cell.cell_contents is wrapped for cell in getattr(function, "__closure__", None) or ())
    return wrapped if wrapped is not None and held else None


# for torch.compile


class CrossEntropyLoss:
    """torch's, in Python. Dynamo takes torch's own class for an operator on tensors, past what a stand-in answers."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        self.weight, self.size_average, self.ignore_index = weight, size_average, ignore_index
        self.reduce, self.reduction, self.label_smoothing = reduce, reduction, label_smoothing

    def __call__(self, input: Any, target: Any) -> Any:
        return F.cross_entropy(
            input,
            target,
            weight=self.weight,
            size_average=self.size_average,
            ignore_index=self.ignore_index,
            reduce=self.reduce,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


_NN = types.ModuleType("torch.nn")
vars(_NN).update({**vars(nn), "CrossEntropyLoss": CrossEntropyLoss})


def traceable(forward: Any) -> Any:
    """``forward`` for Dynamo: a copy with the class above if it uses torch's, else itself."""
    own = innermost(forward)
    if own is None or "CrossEntropyLoss" not in own.__code__.co_names:
        return forward
    others = {"CrossEntropyLoss": (nn.CrossEntropyLoss, CrossEntropyLoss), "nn": (nn, _NN)}
    names = {name: ours for name, (torchs, ours) in others.items() if own.__globals__.get(name) is torchs}
    return rebound(forward, names) if names else forward
