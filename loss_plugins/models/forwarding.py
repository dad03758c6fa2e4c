"""What a patched model and a patched head do when they are called."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .frame import Frame, Scope, calling_for_real, current, in_force, scopes
from .swap import JOB, base_class

if TYPE_CHECKING:
    from .patch import PatchHandle

HANDLE = "_loss_plugin_handle"
"""Key of a patched model's ``__dict__``."""


def run_forward(model: nn.Module, base: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's ``own`` forward, with its logits deferred where they are not wanted."""
    frame = current()
    if frame is not None and frame.model is model and not frame.entered:
        frame.entered = True
        return own(model, *args, **kwargs)
    return _run(model, base, own, args, kwargs)


def run_call(model: nn.Module, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's ``__call__`` where somebody has put a ``forward`` on the instance, which then runs in place of
    ours."""
    handle = model.__dict__.get(HANDLE)
    if handle is not None:
        handle.notice_forward(model)
    frame = current()
    if frame is not None and frame.model is model and not frame.entered:  # put in force from outside
        return base.__call__(model, *args, **kwargs)
    return _run(model, base, base.__call__, args, kwargs, entered=False)


def run_around(model: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``call``, in which somebody else calls the model's own forward, with its logits deferred."""
    return _run(model, base_class(model), call, args, kwargs, entered=False)


def _run(
    model: nn.Module, base: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], entered: bool = True
) -> Any:
    handle: PatchHandle | None = model.__dict__.get(HANDLE)
    scope = Scope() if handle is None else _scope_of(handle, model)
    if handle is not None and handle.active:
        _refuse_token_weight(handle, base, kwargs)
    if handle is not None and handle.liger is not None and not torch.compiler.is_compiling():
        handle.liger.check(model)
    if handle is None or not handle.active or not _is_wanted(base, args, kwargs, scope) or not _defers(model, scope):
        frame = current()
        if frame is None or frame.model is not model:
            return call(model, *args, **kwargs)
        with calling_for_real():
            return call(model, *args, **kwargs)
    labels = None if scope.token_weight is None else _labels(base, args, kwargs)
    frame = Frame(model, handle, handle.heads_now(model), scope, labels)
    frame.entered = entered
    with in_force(frame):
        output = call(model, *args, **kwargs)
    return frame.close(output)


def run_head(head: nn.Module, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The head's ``__call__``: deferred logits, a loss, or what it always did."""
    job = kwargs.get(JOB)
    if job is not None:
        if job.core is head and "forward" in head.__dict__:
            return _job_past_instance_forward(head, job, args[0])
        return base.__call__(head, *args, **kwargs)
    frame = current()
    found = None if frame is None else frame.head_of(head)
    if frame is not None and found is not None and len(args) == 1 and not kwargs:
        hidden = args[0]
        if isinstance(hidden, Tensor) and hidden.is_floating_point():
            if not hasattr(hidden, "full_tensor"):
                return frame.defer(found, hidden)
            frame.handle.materialised("hidden states that are a DTensor")
    return base.__call__(head, *args, **kwargs)


def _job_past_instance_forward(head: nn.Module, job: Any, hidden: Tensor) -> Any:
    """A forward on the instance would hand the job to the plain layer. accelerate's moves tensors and weights first,
    and does so here too; tensor parallelism's splits the work over ranks, as the loss does by itself."""
    hook = head.__dict__.get("_hf_hook")
    if hook is None:
        return job.run(hidden)
    args, _ = hook.pre_forward(head, hidden)
    return hook.post_forward(head, job.run(args[0]))


def _defers(model: nn.Module, scope: Scope) -> bool:
    if scope.leaving:
        return True
    return model.training if scope.loss_only is None else scope.loss_only


def _scope_of(handle: PatchHandle, model: nn.Module) -> Scope:
    """The scope in force for this model here. DataParallel runs replicas in threads of its own, which have none."""
    if handle.shared_scopes and model is not handle.model:
        return handle.shared_scopes[-1]
    for owner, scope in reversed(scopes()):
        if owner is handle:
            return scope
    return Scope()


def _is_wanted(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope) -> bool:
    """Whether the forward is given something to compute a loss with, or its logits are for somebody who will. Returns
    no tensor: where Dynamo breaks the model's graph it traces this by itself, and would make a graph that does nothing
    but return it."""
    return bool(scope.leaving) or _labels(base, args, kwargs) is not None or kwargs.get("shift_labels") is not None


def _refuse_token_weight(handle: PatchHandle, base: Any, kwargs: dict[str, Any]) -> None:
    """Models take any keyword, and pass over those that they do not know.

    Raises:
        ConfigError: the forward was given token weights.
    """
    key = handle.config.loss_token_weight_key
    if kwargs.get(key) is not None and key not in _names(base):
        raise ConfigError(
            f"{base.__name__} was called with {key}, which its forward does not know, so that no token would be "
            f"weighted. Train with LossPluginTrainer, or call the model without it inside "
            f"`with handle.scope(token_weight=...)` (find_handle(model) returns the handle)."
        )


def _labels(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "labels" in kwargs:
        return kwargs["labels"]
    position = _labels_position(base)
    return args[position] if position is not None and position < len(args) else None


@functools.cache
def _labels_position(base: Any) -> int | None:
    """Where ``labels`` stands among the positional arguments of a class's forward."""
    names = _names(base)
    return names.index("labels") if "labels" in names else None


@functools.cache
def _names(base: Any) -> tuple[str, ...]:
    """The arguments of a class's forward, after ``self``."""
    return tuple(inspect.signature(base.forward).parameters)[1:]
