"""Others who replace a model's forward to compute its loss: their patch and ours cannot both be in force."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from ..errors import PatchError

OFF = {
    "liger_kernel": "Liger",
    "cut_cross_entropy": "Apple's cut-cross-entropy",
    "trl": "TRL",
}

ADVICE = {
    "liger_kernel": "Load the model anew with use_liger_kernel=False, or with "
    "liger_kernel_config={'fused_linear_cross_entropy': False}; its other kernels may stay.",
    "cut_cross_entropy": "Load the model anew without cce_patch.",
    "trl": "Patch a model that has not been given to an SFT, DPO or GRPO trainer of TRL, which computes its loss "
    "without logits itself, or train with LossPluginTrainer.",
}


def refuse_foreign_cross_entropy(name: str) -> None:
    """A model's loss meets ours in `torch.nn.functional.cross_entropy`.

    Raises:
        PatchError: a package of `OFF` has replaced it.
    """
    for place, function in (
        ("torch.nn.functional.cross_entropy", F.cross_entropy),
        ("torch.nn.CrossEntropyLoss", nn.CrossEntropyLoss.forward),
    ):
        package = foreign_forward(function)
        if package is not None:
            raise PatchError(
                f"{OFF[package]} has replaced {place} for this whole process, so a patch of {name} would never see "
                "its loss. Start a process in which it does not: for Liger with cross_entropy=False, or "
                "liger_kernel_config={'cross_entropy': False}."
            )


def foreign_forward(forward: Any) -> str | None:
    """The package, one of `OFF`, that ``forward`` or anything it wraps comes from."""
    for function in _layers(forward):
        package = function.__globals__.get("__name__", "").split(".")[0]
        if package in OFF:
            return str(package)
        if "fused_lm_head" in function.__code__.co_varnames:
            return "trl"
    return None


def _layers(forward: Any) -> Iterator[types.FunctionType]:
    """The functions inside bound methods, partials and decorators."""
    seen: set[int] = set()
    waiting = [forward]
    while waiting:
        value = waiting.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            yield value
        waiting += [getattr(value, name, None) for name in ("__wrapped__", "__func__", "model_forward")]
        if isinstance(value, functools.partial):
            waiting.append(value.func)
