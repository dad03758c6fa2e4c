"""Liger's kernels for everything but the loss (RMSNorm, RoPE, SwiGLU, ...), put into one model and taken out again.

Liger replaces classes and functions of transformers for the whole process, even where it is given an instance. Here all
of that is put back at once. What it bound to single modules becomes their class, as with a patched head, and a function
that it replaced, such as RoPE's, is handed to the forwards of this model's modules only. So copies and pickles of the
model have the kernels, no other model has, and `LigerOps.undo` leaves nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config import LIGER_LOSSES
from ..device import DeviceProfile
from ..errors import ConfigError, MissingDependencyError, UnsupportedError, unknown_name
from .rebind import innermost, rebound

BASE = "_loss_plugin_liger_base"

Named = tuple[tuple[str, Callable[..., Any]], ...]
"""Functions with the names that they replace, in a form that can be a key."""


class Change(NamedTuple):
    """What was done to one module beside its class: attributes that are new, those replaced, and replaced children."""

    added: tuple[str, ...]
    replaced: dict[str, Any]
    children: dict[str, nn.Module]


class LigerOps:
    """Liger's kernels in one model.

    Attributes:
        names: The kernels that are on.
    """

    def __init__(self, names: tuple[str, ...], changes: Mapping[nn.Module, Change]) -> None:
        self.names = names
        # weakly, as the handle that owns this holds its model
        self._changes = weakref.WeakKeyDictionary(changes)
        self._device: torch.device | None = None

    def undo(self) -> list[nn.Module]:
        """Give every module its class and attributes back. Returns those on whose class another has been put since."""
        left = []
        for module, change in self._changes.items():
            cls = type(module)
            if BASE in cls.__dict__:
                module.__class__ = cls.__dict__[BASE]
            elif hasattr(cls, BASE):
                left.append(module)
            _put_back(module, change)
        self._changes.clear()
        return left

    def describe(self) -> str:
        """One line: which kernels, in how many modules."""
        names = ", ".join(self.names) or "none"
        return f"liger_ops (liger-kernel {_version()}): {names}, in {len(self._changes)} modules"

    def check(self, model: nn.Module) -> None:
        """Refuse a forward on a device where the kernels cannot be launched.

        Raises:
            UnsupportedError: it is one.
        """
        parameter = next(model.parameters(), None)
        if parameter is None or parameter.device == self._device:
            return
        refuse_device(parameter.device)
        self._device = parameter.device

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names, "changes": list(self._changes.items())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["names"], dict(state["changes"]))  # type: ignore[misc]


def apply_liger_ops(model: nn.Module, asked: Mapping[str, bool] | bool) -> LigerOps:
    """Put Liger's kernels into ``model``, a transformers model without wrappers.

    Args:
        model: Its submodules' classes and a few of their attributes change; no parameter or state_dict key does.
        asked: True for those that Liger itself turns on for this type of model, its losses excepted; or some of them
            by name, on or off, where the others stay as Liger has them.

    Raises:
        MissingDependencyError: liger-kernel or Triton is not installed.
        ConfigError: a name that Liger's function for this type does not take.
        UnsupportedError: Liger knows no such model, cannot do it, or this machine has no device for it.
    """
    parameter = next((p for p in model.parameters() if p.device.type != "meta"), None)
    if parameter is not None and parameter.device.type == "npu":  # without its compiler Liger's import fails obscurely
        _refuse(parameter.device, DeviceProfile.probe(parameter.device).ascend_obstacle)
    known = known_types(f"liger_ops {_shown(asked)}")
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    if model_type not in known:
        raise UnsupportedError(
            f"liger_ops was asked for, but liger-kernel {_version()} has no kernels for {type(model).__name__}. "
            f"{unknown_name('model type', model_type, known)} Leave liger_ops out for this model."
        )
    function = known[model_type]
    flags, names = _flags(function, model, {} if isinstance(asked, bool) else asked)
    if parameter is not None and not (parameter.device.type == "cpu" and torch.accelerator.is_available()):
        refuse_device(parameter.device)  # a model that lies on a CPU may yet be moved: each forward looks again
    _refuse_own_forwards(model)
    before = {module: (dict(vars(module)), dict(module._modules)) for module in model.modules()}
    try:
        function(**dict.fromkeys(_named(function), False))  # imports all that it replaces something in
        with _keeping_transformers() as replaced:
            function(model=model, **flags)
        users = _users(model, replaced)
    except Exception as error:
        for module, (attributes, children) in before.items():
            _put_back(module, _change(module, attributes, children))
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(
            f"liger_ops {', '.join(names)} was asked for, but liger-kernel {_version()} cannot put it into "
            f"{type(model).__name__} of transformers {_version('transformers')}: {type(error).__name__}: {error}. "
            "Turn off what it names, leave liger_ops out, or install another version of one of the two."
        ) from error
    changes = {}
    for module, (attributes, children) in before.items():
        methods = _take_methods(module)
        change = _change(module, attributes, children)
        if methods or module in users:
            module.__class__ = subclass(type(module), methods, users.get(module, ()))  # type: ignore[arg-type]
        if methods or module in users or any(change):
            changes[module] = change
    return LigerOps(names, changes)


def known_types(what: str) -> dict[str, Callable[..., None]]:
    """Liger's function for each type of model.

    Raises:
        MissingDependencyError: it cannot be imported, for ``what``.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} was asked for, and liger-kernel cannot be imported: {error}. Run: pip install "
            "'loss-plugins[liger]' (it needs Triton, which comes with torch on Linux), or leave it out."
        ) from error
    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def own_losses(model: nn.Module, settings: Mapping[str, Any]) -> list[str]:
    """Which of its losses Liger puts into ``model`` with ``settings``, its defaults where they say nothing."""
    function = known_types("use_liger_kernel").get(str(getattr(getattr(model, "config", None), "model_type", "")))
    if function is None:
        return []  # Liger leaves such a model alone
    defaults = _named(function)
    return [name for name in reversed(LIGER_LOSSES) if name in defaults and settings.get(name, defaults[name])]


def refuse_device(device: torch.device, profile: DeviceProfile | None = None) -> None:
    """Raises:
    UnsupportedError: Liger's kernels cannot be launched on ``device``, of which ``profile`` has the facts.
    """
    profile = profile or DeviceProfile.probe(device)
    _refuse(device, _npu_obstacle(profile) if device.type == "npu" else profile.triton_obstacle)


def _refuse(device: torch.device, obstacle: str | None) -> None:
    if obstacle is not None:
        raise UnsupportedError(
            f"liger_ops was asked for, and the model is on {device}, where Liger's kernels cannot run: {obstacle}. "
            "Move the model to a GPU, or leave liger_ops out."
        )


def _npu_obstacle(profile: DeviceProfile) -> str | None:
    """Why Liger's kernels for an NPU cannot be launched. Where they cannot even be imported, Liger takes those for a
    GPU without a word."""
    if profile.ascend_obstacle is not None:
        return profile.ascend_obstacle
    home = "liger_kernel.ops.backends._ascend"
    try:
        importlib.import_module(f"{home}.ops")
        from liger_kernel.ops import LigerRMSNormFunction
    except ImportError as error:
        return f"those of liger-kernel {_version()} for an NPU cannot be imported ({error})"
    if not str(LigerRMSNormFunction.__module__).startswith(home):
        return f"liger-kernel {_version()} was imported before the NPU was there, and took its kernels for a GPU"
    return None


def _flags(function: Any, model: nn.Module, asked: Mapping[str, bool]) -> tuple[dict[str, bool], tuple[str, ...]]:
    """What to call Liger's function with, and the names of the kernels that it then turns on."""
    own = _named(function)
    known = dict(own)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        # handed on to the functions of the models inside, which have their own defaults
        for part in ("text_config", "vision_config"):
            inner = getattr(getattr(model, "config", None), part, None)
            known = _named(known_types("liger_ops").get(str(getattr(inner, "model_type", "")))) | known
    for name in asked:
        if name not in known:
            ops = [op for op in known if op not in LIGER_LOSSES]
            raise ConfigError(
                f"{unknown_name('entry of liger_ops', name, ops)} That is what liger-kernel {_version()} has for "
                f"{type(model).__name__}."
            )
    off = {name: False for name in known if name in LIGER_LOSSES}
    flags = own | dict(asked) | off
    names = tuple(name for name, value in (known | dict(asked) | off).items() if value)
    return flags, names


def _named(function: Any) -> dict[str, bool]:
    """The switches of one of Liger's functions, with their defaults."""
    parameters = {} if function is None else inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if isinstance(p.default, bool)}


def _shown(asked: Mapping[str, bool] | bool) -> str:
    return str(asked).lower() if isinstance(asked, bool) else str(dict(asked))


@functools.cache
def _version(package: str = "liger-kernel") -> str:
    return importlib.metadata.version(package)


def _refuse_own_forwards(model: nn.Module) -> None:
    """Liger writes over a forward that accelerate or a user has put on a module."""
    own = [path for path, module in model.named_modules() if path and "forward" in vars(module)]
    own = [path for path in own if model.get_submodule(path) is not _head(model)]
    if own:
        raise UnsupportedError(
            f"liger_ops was asked for, but {own[0]} of {type(model).__name__} has a forward of its own (accelerate's "
            "device_map over several devices gives each module one), which Liger would remove. Load the model on one "
            "device, patch it before anything else does, or leave liger_ops out."
        )


def _head(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


# what Liger leaves in transformers


@contextmanager
def _keeping_transformers() -> Iterator[dict[str, dict[str, Any]]]:
    """At the end all modules of transformers and torch.nn are as they were. What was put into them is in the yielded
    mapping then, by module and name."""
    from transformers.activations import ACT2FN

    places = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and name.startswith(("transformers.models.", "transformers.loss."))
    ]
    places += [nn, nn.functional]
    before = [dict(vars(module)) for module in places]
    activations = dict(dict.items(ACT2FN))  # its own `[]` makes instances
    replaced: dict[str, dict[str, Any]] = {}
    try:
        yield replaced
    finally:
        for module, old in zip(places, before, strict=True):
            new = {key: value for key, value in vars(module).items() if old.get(key) is not value and _is_ligers(value)}
            for key in new:
                if key in old:
                    setattr(module, key, old[key])
                else:
                    delattr(module, key)
            replaced[module.__name__] = new
        for name, value in dict(dict.items(ACT2FN)).items():
            if name in activations and activations[name] is not value:
                ACT2FN[name] = activations[name]


def _users(model: nn.Module, replaced: Mapping[str, Mapping[str, Any]]) -> dict[nn.Module, Named]:
    """The modules of ``model`` whose forward calls a function that Liger has replaced, with Liger's functions.

    Raises:
        UnsupportedError: functions were replaced and no module calls one, so this could not be done for one model.
    """
    functions = {
        home: {name: new for name, new in names.items() if isinstance(new, types.FunctionType)}
        for home, names in replaced.items()
    }
    users: dict[nn.Module, Named] = {}
    for module in model.modules():
        forward = innermost(type(module).forward)
        if forward is None:
            continue
        here = functions.get(str(forward.__globals__.get("__name__")), {})
        used = tuple((name, new) for name, new in here.items() if name in forward.__code__.co_names)
        if used:
            users[module] = used
    if any(functions.values()) and not users:
        names = ", ".join(name for there in functions.values() for name in there)
        raise UnsupportedError(
            f"Liger replaces {names} in transformers for {type(model).__name__}, but none of its modules calls it in "
            "its own forward, so it could only be done for all models at once. Set liger_ops: {rope: false}."
        )
    return users


# what Liger leaves in the model


def _take_methods(module: nn.Module) -> Named:
    """Liger's methods out of the module's own ``__dict__``."""
    bound = {
        name: value.__func__
        for name, value in vars(module).items()
        if isinstance(value, types.MethodType) and value.__self__ is module and _is_ligers(value.__func__)
    }
    for name in bound:
        del vars(module)[name]
    return tuple((name, function) for name, function in bound.items() if name != "_get_name")


def _is_ligers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("liger_kernel.")


def _change(module: nn.Module, attributes: dict[str, Any], children: Mapping[str, Any]) -> Change:
    now = vars(module)
    return Change(
        tuple(name for name in now if name not in attributes),
        {name: value for name, value in attributes.items() if name not in now or now[name] is not value},
        {name: child for name, child in children.items() if module._modules.get(name) is not child},
    )


def _put_back(module: nn.Module, change: Change) -> None:
    for name in change.added:
        vars(module).pop(name, None)
    vars(module).update(change.replaced)
    module._modules.update(change.children)


@functools.cache
def subclass(base: type[nn.Module], methods: Named, functions: Named) -> type[nn.Module]:
    """``base`` with Liger's methods, and with Liger's functions in place of those that its forward calls by name."""
    members: dict[str, Any] = {
        BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        **dict(methods),
    }
    if functions:
        members["forward"] = rebound(base.forward, dict(functions))
    owner = dict(methods)["forward"].__qualname__.split(".")[0] if "forward" in dict(methods) else base.__name__

    def _get_name(self: nn.Module) -> str:
        return owner

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        reduced = base.__reduce_ex__(self, protocol)
        ours = subclass(base, methods, functions)  # type: ignore[arg-type]  # asks for an instance's hash
        if type(self) is not ours or not isinstance(reduced, tuple):
            return reduced
        return (rebuild, (base, methods, functions), *reduced[2:])

    members |= {"_get_name": _get_name, "__reduce_ex__": __reduce_ex__}
    metaclass: type = type(base)
    return metaclass(base.__name__, (base,), members)


def rebuild(base: type[nn.Module], methods: Named, functions: Named) -> nn.Module:
    """An empty instance, for pickle and deepcopy."""
    cls = subclass(base, methods, functions)  # type: ignore[arg-type]
    return cls.__new__(cls)
