"""A tiny batch for any model: what its forward takes by name, and what `exceptions.yaml` says it also needs."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from .shrink import VOCAB, exceptions

ROWS, LENGTH = 2, 12
FIRST, LAST = 5, VOCAB - 35
"""Tokens with no meaning of their own lie between these."""


def tiny_inputs(model: Any, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> dict[str, Any]:
    """Inputs with labels, some of them masked, each row in another place.

    Text alone where the class can do without images or sound.
    """
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(type(model).forward).parameters
    sizes = {"B": rows, "T": length}
    inputs: dict[str, Any] = {}
    if "input_ids" in accepted and (type(model).main_input_name == "input_ids" or accepted.get("pixel_values")):
        inputs["input_ids"] = torch.randint(FIRST, LAST, (rows, length), generator=generator)
        if "attention_mask" in accepted:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in accepted:
                inputs[name] = torch.zeros_like(inputs["input_ids"])
    if "labels" in accepted:
        labels = torch.randint(FIRST, LAST, (rows, length), generator=generator)
        labels[0, :4] = -100
        labels[-1, -2:] = -100
        inputs["labels"] = labels
    for name, rule in exceptions().get(type(model).__name__, {}).get("inputs", {}).items():
        if rule == "$delete":
            inputs.pop(name, None)
        elif isinstance(rule, dict) and "put" in rule:
            inputs[name][:, : rule["count"]] = rule["put"]
        else:
            inputs[name] = made(rule, sizes, generator)
        if isinstance(rule, dict) and "put" in rule and "labels" in inputs:
            inputs["labels"][:, : rule["count"]] = -100
    return inputs


def made(rule: Any, sizes: dict[str, int], generator: torch.Generator) -> Any:
    """A tensor by its rule, of a shape in which B and T stand for rows and length, I for the number of images.

    ``floats``, ``ints`` or ``labels`` (from ``from``, below ``below``), ``ones``, ``zeros``, a ``mask`` of True, or
    ones in the ``first`` ``count`` columns; ``each``: the same for each image; anything else is taken as it is.
    """
    if not isinstance(rule, dict):
        return rule
    if "each" in rule:
        return torch.tensor([rule["each"]] * sizes["I"])
    kind = next(k for k in ("floats", "ints", "ones", "zeros", "mask", "first", "labels") if k in rule)
    shape = [math.prod(sizes.get(part) or int(part) for part in str(n).split("*")) for n in rule[kind]]
    if kind == "floats":
        return torch.randn(shape, generator=generator)
    if kind == "mask":
        return torch.ones(shape, dtype=torch.bool)
    if kind in ("ones", "zeros"):
        return torch.full(shape, int(kind == "ones"))
    if kind == "first":
        return (torch.arange(shape[-1]) < rule["count"]).long().expand(shape).clone()
    ids = torch.randint(rule.get("from", 0), rule.get("below", LAST), shape, generator=generator)
    if kind == "labels":
        ids[torch.rand(shape, generator=generator) < 0.2] = -100
    return ids.float() if rule.get("float") else ids


def floating(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``inputs`` with their floating-point tensors in ``dtype``."""
    return {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
