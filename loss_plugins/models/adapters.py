"""LoRA and DoRA on a head, as the products that PEFT's layers compute.

The part before B is computed once a step, for all rows: its dropout is drawn as the unpatched model draws it, hooks on
``lora_A`` run, and what is left of an adapter is a term of width r.

Letters: N rows, H hidden width, V vocabulary, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .swap import base_class
from .terms import Term, Terms
from .weights import foreign_hook, is_adapter, not_linear, weight_and_bias

LORA = (("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit"))
"""The layers whose forward this file knows."""
NORM_ROWS = 1024
"""Rows of the head whose norm DoRA takes at once; PEFT makes the whole ``W + s B A``."""


def no_terms(core: Any) -> str:
    """Why an adapted head is not known as products, for people; empty if it is. Reads no tensor."""
    cls = base_class(core)
    adapter = f"a PEFT adapter ({cls.__name__}) is on it"
    # a sharded one has a class of FSDP2's on top
    owner = next(each for each in cls.__mro__ if "forward" in each.__dict__)
    if (owner.__module__, owner.__name__) not in LORA or core.merged:
        return adapter
    names = _active(core)
    variants = [_variant(core, name) for name in names]
    for variant in variants:
        if variant not in ("", "DoraLinearVariant"):
            return f"{adapter}, of the kind {variant.removesuffix('LinearVariant')}"
    if any(variants) and len(names) > 1:
        return f"{adapter}, DoRA among several"
    factors = [core.lora_B[name] for name in names]
    if any(variants) and any(factor.bias is not None for factor in factors):
        return f"{adapter}, DoRA with a bias"
    base = core.base_layer
    why = f"a PEFT adapter is on {base_class(base).__name__}" if is_adapter(base) else not_linear(base)
    return why or next(filter(None, (_must_be_called(layer, adapter) for layer in (base, *factors))), "")


def lora_terms(core: Any, hidden: Tensor, width: int) -> Terms | str:
    """The products of a head of which `no_terms` says nothing, for hidden states of shape ``[N, H]``; or why its weight
    cannot be read now."""
    names = _active(core)
    if any(hasattr(parameter, "full_tensor") for parameter in core.parameters()):
        # gathering one here would leave its gradient out of what the ranks average
        return "the parts of its PEFT adapter are sharded, each on its own"
    found = weight_and_bias(core.base_layer, width, hidden)
    if isinstance(found, str):
        return found
    weight, bias = found
    if weight.device != hidden.device:
        return f"its weight is on {weight.device} and its hidden states on {hidden.device}"
    terms = [Term(hidden, weight)]
    for name in names:
        factor = core.lora_B[name].weight
        if factor.shape[0] != width or factor.is_meta:
            return f"its adapter {name!r} is sharded: {factor.shape[0]} rows for {width} logits"
        if _variant(core, name):
            return Terms(_dora(core, name, hidden, weight, factor), bias)
        dropped = core.lora_dropout[name](hidden.to(core.lora_A[name].weight.dtype))
        terms.append(Term(core.lora_A[name](dropped) * core.scaling[name], factor))
        extra = core.lora_B[name].bias
        if extra is not None:
            extra = extra * core.scaling[name]
            bias = extra if bias is None else bias + extra
    return Terms(tuple(terms), bias)


def _dora(core: Any, name: str, hidden: Tensor, weight: Tensor, factor: Tensor) -> tuple[Term, ...]:
    """``m / |W + s B A|`` times what LoRA gives, the norm a constant. Dropout meets only what DoRA adds: with it, the
    head's own part stays as it is."""
    magnitude, scaling = core.lora_magnitude_vector[name].weight, core.scaling[name]
    first = core.lora_A[name]
    inputs = hidden.to(first.weight.dtype)
    ratio = magnitude / _row_norms(weight, factor, first.weight, scaling).to(magnitude.device)
    dropout = core.lora_dropout[name]
    adapted = (ratio[:, None] * factor).to(factor.dtype)
    if isinstance(dropout, nn.Identity) or not core.training:
        return Term(hidden, weight, ratio), Term(first(inputs) * scaling, adapted)
    dropped = dropout(inputs)
    return Term(hidden, weight), Term(dropped, weight, ratio - 1), Term(first(dropped) * scaling, adapted)


@torch.no_grad()
def _row_norms(weight: Tensor, factor: Tensor, first: Tensor, scaling: float) -> Tensor:
    """``|W + s B A|`` of each row, shape ``[V]``, in the adapter's type."""
    parts = zip(weight.split(NORM_ROWS), factor.split(NORM_ROWS), strict=True)
    return torch.cat([torch.linalg.norm(w.to(b.dtype) + scaling * (b @ first), dim=1) for w, b in parts])


def _active(core: Any) -> list[str]:
    return [name for name in core.active_adapters if name in core.lora_A]


def _variant(core: Any, name: str) -> str:
    """The class of what PEFT adds to plain LoRA, or an empty string."""
    variant = getattr(core, "lora_variant", {}).get(name)
    if variant is not None:
        return type(variant).__name__
    return "DoraLinearVariant" if getattr(core, "use_dora", {}).get(name) else ""


def _must_be_called(layer: Any, adapter: str) -> str:
    """Why a layer inside the adapter cannot be replaced by its weight."""
    foreign = foreign_hook(layer)
    if foreign:
        return f"{adapter}, with {foreign} inside"
    hook = layer.__dict__.get("_hf_hook")
    if "forward" in layer.__dict__ and (type(hook).__name__ != "AlignDevicesHook" or hook.offload):
        return f"{adapter}, whose parts accelerate loads only while each is called"
    if not is_adapter(layer) and not_linear(layer):
        return f"{adapter}, where {not_linear(layer)}"
    return ""
