"""Same-named subclasses that a patched model and its head become instances of.

A module keeps its identity, parameters, hooks and ``__dict__``; only its class changes. Unlike a ``forward`` put on the
instance, that survives deepcopy, pickling, DataParallel replicas and wrappers, and others who set ``forward`` can be
seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["model", "head"]

BASE = "_loss_plugin_base"
JOB = "loss_plugin_job"
"""The keyword with which a head is called to compute a loss in place of logits."""


def is_swapped(module: nn.Module) -> bool:
    """Whether ``module`` answers to deferral; also where FSDP2 has put its own class on top."""
    return hasattr(type(module), BASE)


def base_class(module: nn.Module) -> Any:
    """The class that ``module`` has without us."""
    cls = type(module)
    if BASE in cls.__dict__:
        return cls.__dict__[BASE]
    # FSDP2's class on top of ours adds hooks, and no forward
    return getattr(cls, BASE) if hasattr(cls, BASE) else cls


def swap(module: nn.Module, kind: Kind) -> None:
    """Change the class of ``module``."""
    module.__class__ = subclass(kind, type(module))  # type: ignore[arg-type]  # asks for an instance's hash


def unswap(module: nn.Module) -> bool:
    """Give ``module`` its very class back. False where another class has been put on top since."""
    cls = type(module)
    if BASE in cls.__dict__:
        module.__class__ = cls.__dict__[BASE]
        return True
    return not is_swapped(module)


@functools.cache
def subclass(kind: Kind, base: type[nn.Module]) -> type[nn.Module]:
    """The one subclass of ``base`` of this kind."""
    members: dict[str, Any] = {
        BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce(kind, base),
        **(_model_members(base) if kind == "model" else _head_members(base)),
    }
    metaclass: type = type(base)
    return metaclass(base.__name__, (base,), members)


def rebuild(kind: Kind, base: type[nn.Module]) -> nn.Module:
    """An empty instance, for pickle and deepcopy."""
    cls = subclass(kind, base)  # type: ignore[arg-type]
    return cls.__new__(cls)


def _reduce(kind: Kind, base: type[nn.Module]) -> Callable[..., Any]:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = base.__reduce_ex__(self, protocol)
        ours = subclass(kind, base)  # type: ignore[arg-type]
        if type(self) is not ours or not isinstance(reduced, tuple):
            return reduced
        return (rebuild, (kind, base), *reduced[2:])

    return __reduce_ex__


def _model_members(base: type[nn.Module]) -> dict[str, Any]:
    from .forwarding import run_call, run_forward
    from .rebind import traceable

    traced = traceable(base.forward)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = traced if torch.compiler.is_compiling() else base.forward
        return run_forward(self, base, own, args, kwargs)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "forward" not in self.__dict__:
            return base.__call__(self, *args, **kwargs)
        return run_call(self, base, args, kwargs)

    return {"forward": forward, "__call__": __call__}


def _head_members(base: type[nn.Module]) -> dict[str, Any]:
    from .forwarding import run_head

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        job = kwargs.get(JOB)
        if job is None or job.core is not self:
            return base.forward(self, *args, **kwargs)
        return job.run(args[0])

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_head(self, base, args, kwargs)

    return {"forward": forward, "__call__": __call__}
