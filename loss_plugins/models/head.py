"""The head of a model: where it is, what has wrapped it, and how a loss can be computed with it.

Looked at again in every deferring forward, since PEFT, FSDP and users replace heads after a model was patched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import PatchError
from ..strategies import VocabParallel
from .adapters import lora_terms, no_terms
from .families import family_of
from .swap import base_class, is_swapped, swap
from .terms import Term, Terms
from .weights import (
    MAKERS,
    SHARDING,
    foreign_hook,
    is_adapter,
    is_from,
    is_named,
    not_linear,
    own_part,
    rows_of,
    weight_and_bias,
    whole_batch_hook,
)

Way = Literal["weight", "terms", "module", "call", "real"]
WIDTH = "_loss_plugin_width"
"""Key of a probed head's ``__dict__``, while it is patched."""


@dataclass(frozen=True)
class Head:
    """A model's head as it is now.

    Attributes:
        outer: What the model's forward calls.
        core: What does the work and is given the loss job: ``outer``, or what it hands its arguments on to.
        way: ``weight``: a plain linear layer, whose weight a strategy can take. ``terms``: a sum of products, see
            `Terms`. ``module``: its own forward is called on chunks. ``call``: ``outer`` is called on chunks, hooks and
            all. ``real``: only its real logits are right.
        why: Why neither ``weight`` nor ``terms``, for people; empty otherwise.
    """

    outer: nn.Module
    core: nn.Module
    way: Way
    why: str = ""

    @classmethod
    def of(cls, outer: nn.Module) -> Head:
        """Look at a head. Reads no tensor, since they may be sharded until the head is called."""
        core = _core(outer)
        way, why = _way(outer, core)
        return cls(outer, core, way, why)

    def put_in_place(self) -> list[tuple[nn.Module, type]]:
        """Make outer and core answer to deferral; (module, its class) for each that did not."""
        changed = []
        for module in (self.outer, self.core):
            if not is_swapped(module):
                changed.append((module, type(module)))
                swap(module, "head")
        return changed

    def width(self, hidden: Tensor) -> int:
        """Size of the vocabulary."""
        features = rows_of(self.core)
        known = self.way == "weight" or is_adapter(self.core) or is_from(base_class(self.core), "bitsandbytes")
        if features is not None and known:
            return features
        return self._probed_width(hidden)

    @torch.compiler.disable
    def _probed_width(self, hidden: Tensor) -> int:
        """What a head with a forward of its own returns for one row. Asked once, without touching the random state."""
        width: int | None = self.core.__dict__.get(WIDTH)
        if width is None:
            from .frame import calling_for_real

            devices = [hidden.device.index or 0] if hidden.device.type == "cuda" else []
            with torch.no_grad(), calling_for_real(), torch.random.fork_rng(devices):
                width = int(self.outer(hidden.detach().reshape(-1, hidden.shape[-1])[:1]).shape[-1])
            self.core.__dict__[WIDTH] = width
        return width

    def device(self, hidden: Tensor) -> torch.device:
        """Where its logits would be: accelerate's hooks move the hidden states first."""
        moved: Any = getattr(self.core.__dict__.get("_hf_hook"), "execution_device", None)
        if moved is None:
            return hidden.device
        return torch.device("cuda", moved) if isinstance(moved, int) else torch.device(moved)

    def terms(self, hidden: Tensor) -> Terms | str:
        """The products that make its logits of ``hidden``, shape ``[N, H]``, or why they cannot be had. Only valid
        while it is being called."""
        if self.way not in ("weight", "terms"):
            return self.why
        width = self.width(hidden)
        if self.way == "terms":
            return lora_terms(self.core, hidden, width)
        found = self.weight_and_bias(width, hidden)
        return found if isinstance(found, str) else Terms((Term(hidden, found[0]),), found[1])

    def own_part(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, VocabParallel] | None:
        """This process's rows of a head that tensor parallelism holds, see `weights.own_part`."""
        return own_part(self.core, self.width(hidden)) if self.way == "weight" else None

    def weight_and_bias(self, width: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor | None] | str:
        """What a head of the way ``weight`` multiplies with, see `weights.weight_and_bias`."""
        return weight_and_bias(self.core, width, hidden)

    def describe(self, needs_weight: bool = False) -> str:
        """One line for `explain`. ``needs_weight``: the strategy cannot take a head apart."""
        name = base_class(self.core).__name__
        features = rows_of(self.core) or "?"
        size = f"{features} x {getattr(self.core, 'in_features', '?')}"
        if self.way == "weight":
            how = "its weight is handed to the strategy"
            if _is_sharded(self.core):
                how += ", of a weight cut by rows each process's own"
        elif self.way == "terms":
            how = f"W and B of its adapters are {'one weight for the strategy' if needs_weight else 'taken in chunks'}"
        elif self.way == "real":
            how = f"its logits are made, since {self.why}"
        else:
            how = f"called on chunks, since {self.why}"
        return f"{name} ({size}{', bias' if getattr(self.core, 'bias', None) is not None else ''}): {how}"


def find_head(model: nn.Module) -> tuple[str, nn.Module]:
    """The path of the module that owns the head ("" for ``model``) or is it, and the head.

    Raises:
        PatchError: there is none, several, or one that is no single module with logits as its result.
    """
    name = base_class(model).__name__
    family = family_of(str(getattr(getattr(model, "config", None), "model_type", "")))
    path = (family.head if family is not None else None) or ""
    if path and path not in dict(model.named_modules()):
        path = ""
    head = head_of(model.get_submodule(path))
    if head is model:
        raise PatchError(
            f"{name} is a head itself, and no model with a forward that is given labels, so a patch would never see a "
            "loss. Patch the model that it belongs to, or call loss_plugins.linear_cross_entropy(hidden, head.weight, "
            "labels)."
        )
    if head is None:
        owners: dict[int, tuple[str, nn.Module]] = {}
        for path_, module in model.named_modules():
            found = head_of(module) if path_ and hasattr(module, "get_output_embeddings") else None
            if found is not None:
                owners.setdefault(id(found), (path_, found))
        if len(owners) > 1:
            listed = ", ".join(owner for owner, _ in owners.values())
            raise PatchError(
                f"{name} has several sub-models with a head of their own ({listed}), so it is not clear whose logits "
                "the loss takes. Patch the one that is trained: patch_model(model.<path>, ...)."
            )
        if not owners:
            raise PatchError(
                f"{name} has no language-model head: get_output_embeddings() returns None, and no sub-model has one. "
                "Patch a model for causal or conditional generation (AutoModelForCausalLM), or call "
                "loss_plugins.linear_cross_entropy with the hidden states and the weight."
            )
        path, head = next(iter(owners.values()))
    if isinstance(head, nn.ModuleDict | nn.Sequential | nn.Embedding):
        raise PatchError(
            f"The head of {name} is a {type(head).__name__}, and only a single module that maps hidden states to "
            "logits can be patched. Call loss_plugins.linear_cross_entropy in your own loss instead."
        )
    return path, head


def each_head(head: nn.Module) -> list[nn.Module]:
    """The heads in ``head``: several codebooks have one each, in a list."""
    return list(head) if isinstance(head, nn.ModuleList) else [head]


def head_of(model: nn.Module) -> nn.Module | None:
    """``model.get_output_embeddings()``, ``model`` itself if it is a linear layer, or None."""
    ask = getattr(model, "get_output_embeddings", None)
    if ask is None:
        return model if isinstance(model, nn.Linear) else None
    try:
        head = ask()
    except (NotImplementedError, AttributeError):
        return None
    return head if isinstance(head, nn.Module) else None


def _core(outer: nn.Module) -> nn.Module:
    """What ``outer`` hands its arguments on to, as far as that is certain."""
    core: Any = outer
    while True:
        inner = None
        if hasattr(core, "_fsdp_wrapped_module"):
            inner = core._fsdp_wrapped_module
        elif is_named(core, "ModulesToSaveWrapper"):
            idle = core.disable_adapters or not core.active_adapters
            inner = core.original_module if idle else core.modules_to_save[core.active_adapters[0]]
        elif is_adapter(core) and core.disable_adapters != core.merged:
            inner = core.base_layer  # idle, or one with it; a merged adapter that is off takes itself out when called
        if not isinstance(inner, nn.Module):
            return core
        core = inner


def _way(outer: nn.Module, core: Any) -> tuple[Way, str]:
    for module in {id(outer): outer, id(core): core}.values():
        if whole_batch_hook(module):
            return "real", "each sequence of the batch has an adapter of its own (adapter_names)"
        foreign = foreign_hook(module, SHARDING + MAKERS)
        if foreign:
            return "call", f"it has {foreign}"
        own = module.__dict__.get("forward")
        if own is not None and "_hf_hook" not in module.__dict__ and not _is_sharded(core):
            return "call", f"its forward was replaced by one from {getattr(own, '__module__', type(own).__module__)}"
    if is_adapter(core) and not is_named(core, "TrainableTokensWrapper"):
        why = no_terms(core)
        return ("module", why) if why else ("terms", "")
    why = not_linear(core)
    return ("module", why) if why else ("weight", "")


def _is_sharded(module: nn.Module) -> bool:
    """Whether tensor parallelism holds the weight: it replaces the head's forward, and the whole weight can be had."""
    # as it is kept: to read a parametrized weight is to compute it, and spectral norm's is another each time
    return hasattr(module._parameters.get("weight"), "full_tensor")
