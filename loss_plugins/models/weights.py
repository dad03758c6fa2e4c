"""The weight of a linear layer as one ordinary tensor, however it is kept, and whose hooks stand in the way."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..strategies import VocabParallel
from .swap import base_class

SHARDING = ("torch.distributed", "torch._", "deepspeed", "accelerate")
"""Whose hooks on a layer gather or free its weight, and leave its result alone."""
MAKERS = ("torch.nn.utils.",)
"""Whose hooks make the weight from other parameters before the layer is called: weight norms, pruning."""


def not_linear(module: nn.Module) -> str:
    """Why ``module`` does not multiply by one weight, for people; empty if it does. Reads no tensor."""
    cls = base_class(module)
    if is_named(module, "TrainableTokensWrapper"):
        adapter: Any = module.token_adapter
        if base_class(adapter.base_layer).forward is not nn.Linear.forward:
            return "its trainable tokens lie on a layer that is no plain linear one"
        return "PEFT takes its trainable tokens out of the weight when it is called" if _idle(adapter) is None else ""
    if is_adapter(module):
        return f"a PEFT adapter ({cls.__name__}) is on it"
    if is_four_bit(module):
        return ""
    weight = module._parameters.get("weight")
    if cls.forward is nn.Linear.forward and not _is_known(weight) and not hasattr(weight, "full_tensor"):
        return f"its weight is a {type(weight).__module__.split('.')[0]} {type(weight).__name__}, no plain tensor"
    if cls.forward is nn.Linear.forward:
        return ""
    return f"{cls.__module__}.{cls.__qualname__} has a forward of its own"


def weight_and_bias(module: Any, rows: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor | None] | str:
    """Shapes ``[V, H]`` and ``[V]``, or why they cannot be used. Only valid while the layer is being called.

    Args:
        module: A layer of which `not_linear` says nothing.
        rows: V.
        hidden: What it will be multiplied with, if that is known.
    """
    if is_four_bit(module):
        return _dequantised(module, rows, hidden)
    plain = True
    if is_named(module, "TrainableTokensWrapper"):
        plain = bool(_idle(module.token_adapter))
        # PEFT's forward with active tokens has no bias
        module = module.token_adapter.base_layer if plain else module
    weight, bias = whole(getattr(module, "weight", None)), whole(module.bias) if plain else None
    known = weight is not None and _is_known(weight) and weight.is_floating_point() and weight.dim() == 2
    if not known or weight.dtype.itemsize < 2:  # of one byte: float8, which has a scale somewhere else
        return f"its weight is a {type(weight).__name__}" + (
            f" of type {weight.dtype} and shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else ""
        )
    if weight.is_meta and hidden is not None and not hidden.is_meta:
        return "its weight is on the meta device except while it is called itself"
    if weight.shape[0] != rows:
        return f"its weight has {weight.shape[0]} rows for {rows} logits"
    return weight, bias


def own_part(module: Any, rows: int) -> tuple[Tensor, Tensor | None, VocabParallel] | None:
    """This process's rows of a weight that tensor parallelism cuts by them, shapes ``[v, H]`` and ``[v]``,
    differentiably; None where it does not, or where a process would have none. Only valid while the layer is called."""
    # as it is kept: to read a parametrized weight is to compute it, and spectral norm's is another each time
    weight: Any = module._parameters.get("weight")
    bias = getattr(module, "bias", None)
    mesh = getattr(weight, "device_mesh", None)
    if not hasattr(weight, "full_tensor") or mesh is None or mesh.ndim != 1 or tuple(weight.shape[:1]) != (rows,):
        return None
    placed = [tensor for tensor in (weight, bias) if tensor is not None]
    if any(getattr(tensor, "device_mesh", None) != mesh or not _is_cut_by_rows(tensor) for tensor in placed):
        return None
    processes = mesh.size()
    if processes < 2 or (processes - 1) * -(-rows // processes) >= rows:
        return None
    parallel = VocabParallel.even(rows, mesh.get_group())
    return weight.to_local(), None if bias is None else bias.to_local(), parallel


def _is_cut_by_rows(tensor: Any) -> bool:
    (placement,) = tensor.placements
    return type(placement).__name__ == "Shard" and placement.dim == 0


def whole(tensor: Any) -> Any:
    """A DTensor as an ordinary tensor with all its entries, differentiably; anything else as it is."""
    return tensor.full_tensor() if type(tensor).__name__ == "DTensor" or hasattr(tensor, "full_tensor") else tensor


def rows_of(module: Any) -> int | None:
    """V of a linear layer: ``out_features``, which stays true where the weight is sharded, packed or resized.

    PEFT ties a saved head by a layer made with its two sizes in the wrong order; there the weight tells.
    """
    features = getattr(module, "out_features", None)
    weight = module._parameters.get("weight")
    sizes = (features, getattr(module, "in_features", None))
    if isinstance(weight, Tensor) and weight.dim() == 2 and tuple(weight.shape) == sizes[::-1]:
        return weight.shape[0]
    return features if isinstance(features, int) else None


def foreign_hook(module: nn.Module, harmless: tuple[str, ...] = SHARDING) -> str | None:
    """A hook that may look at the result or its gradient, or change them: its kind and package."""
    for kind in ("forward", "backward"):
        for name in (f"_{kind}_hooks", f"_{kind}_pre_hooks"):
            for hook in getattr(module, name, {}).values():
                function = getattr(hook, "func", hook)
                home = getattr(function, "__module__", None) or type(function).__module__
                if not home.startswith(harmless):
                    return f"a {kind} hook from {home}"
    return None


def whole_batch_hook(module: nn.Module) -> bool:
    """Whether PEFT hands the layer arguments that only fit the whole batch: an adapter for each of its sequences."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, functools.partial)]
    return any(name in ("adapter_names", "alora_offsets") for hook in hooks for name in hook.keywords)


def is_adapter(module: nn.Module) -> bool:
    return is_named(module, "BaseTunerLayer")


def is_named(module: nn.Module, name: str) -> bool:
    """Whether ``module`` is of PEFT's class ``name``, without importing PEFT."""
    return any(cls.__name__ == name and cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def is_from(cls: type, package: str) -> bool:
    return cls.__module__.split(".")[0] == package


def is_four_bit(module: nn.Module) -> bool:
    """Whether it is bitsandbytes' 4-bit layer, which multiplies by the weight that it unpacks."""
    cls = base_class(module)
    own = [each for each in cls.__mro__ if each.__name__ == "Linear4bit" and is_from(each, "bitsandbytes")]
    return bool(own) and cls.forward is own[0].forward


def _dequantised(module: Any, rows: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None] | str:
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False) or weight.is_meta:
        return "its 4-bit weight has no state to unpack it with" if state is None else "its 4-bit weight is packed anew"
    from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found,unused-ignore]

    dtype = module.compute_dtype or (state if hidden is None else hidden).dtype
    # constant: bitsandbytes trains none of it
    unpacked = dequantize_4bit(weight.data, state).to(dtype)
    if tuple(unpacked.shape) != (rows, module.in_features):
        return f"its 4-bit weight unpacks to shape {tuple(unpacked.shape)} for {rows} logits"
    return unpacked, None if module.bias is None else module.bias.to(dtype)


def _is_known(weight: Any) -> bool:
    """Whether its numbers are what it stands for: quantised tensors are classes of their own."""
    return weight is None or type(weight) in (Tensor, nn.Parameter) or type(weight).__name__ == "FakeTensor"


def _idle(adapter: Any) -> bool | None:
    """Whether trainable tokens leave the layer beneath as it is; None: they will when it is called, not before."""
    idle = adapter.disable_adapters or not adapter.active_adapters
    if adapter.merged:
        return None if idle else True
    return bool(idle)
