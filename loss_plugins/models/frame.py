"""One forward of one patched model while its logits are deferred."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .deferred import DeferredLogits
from .stand_in import StandIn

if TYPE_CHECKING:
    from .head import Head
    from .patch import PatchHandle


class _Local(threading.local):
    """Set in each thread before anything reads it, so that a compiled graph finds the same shape of it every time."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.scopes: tuple[tuple[PatchHandle, Scope], ...] = ()


_LOCAL = _Local()


class Scope(NamedTuple):
    """What `PatchHandle.scope` puts in force."""

    token_weight: Tensor | None = None
    loss_only: bool | None = None
    label_smoothing: float | None = None
    leaving: bool | None = None


class _Forgotten(list[StandIn]):
    """Keeps nothing: what is derived from logits that have left would live as long as they."""

    def append(self, record: StandIn) -> None:
        pass


class Frame:
    """The state of one deferring forward. It belongs to the thread that runs it and dies with its outputs.

    Attributes:
        model: The module whose forward runs; under DataParallel a replica of ``handle.model``.
        heads: How its head is called, or each of them where there are several.
        labels: The labels given to the forward, kept only to align token weights with the loss's targets.
        entered: Whether the model's own forward has begun. False between an overriding ``__call__`` and it.
        losses: How many losses were computed from deferred logits.
        records: All stand-ins of this forward, for in-place writes, which must reach those they alias.
        left: Whether the forward is over and its deferred logits live on.
    """

    def __init__(
        self, model: nn.Module, handle: PatchHandle, heads: tuple[Head, ...], scope: Scope, labels: Tensor | None
    ) -> None:
        self.model, self.handle, self.heads, self.scope, self.labels = model, handle, heads, scope, labels
        self.entered = False
        self.left = False
        self.autocast: tuple[str, torch.dtype] | None = None
        self.losses = 0
        self.records: list[StandIn] = []

    def head_of(self, outer: nn.Module) -> Head | None:
        """The head that is called as ``outer``."""
        return next((head for head in self.heads if head.outer is outer), None)

    def defer(self, head: Head, hidden: Tensor) -> DeferredLogits:
        """Stand-in for ``head(hidden)``, shape ``[..., H]`` to ``[..., V]``."""
        if not torch.compiler.is_compiling():
            self.handle.counts.deferred += 1
        vocab = head.width(hidden)
        device, dtype = hidden.device.type, hidden.dtype
        if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            self.autocast = device, dtype
        logits = self._kind()(self, head, hidden, vocab, dtype)
        if head.way == "real":
            logits.materialise(head.why)
        return logits

    def real_logits(self, head: Head, hidden: Tensor, why: str) -> Tensor:
        """``head(hidden)`` by the head's own way, counted and said once for each reason."""
        self.handle.materialised(why)
        with calling_for_real():
            logits: Tensor = head.outer(hidden)
        return logits

    def as_it_was(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast of the forward, for what is computed of its logits after they have left it."""
        if not self.left or self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.autocast[0], dtype=self.autocast[1])

    def _kind(self) -> type[DeferredLogits]:
        if not self.scope.leaving:
            return DeferredLogits
        from .leaving import LeavingLogits

        return LeavingLogits

    def close(self, output: Any) -> Any:
        """The forward's output without deferred logits in it. Each is replaced by its real tensor where there is one,
        and by None where there is not: its place in the output stays. Without any loss nothing is taken away."""
        if self.scope.leaving:
            self.records.clear()
            self.records, self.left = _Forgotten(), True
            return output
        records, self.records = self.records, []
        if self.losses == 0 and _has_loss(output):
            asked = self.handle.extras(self.scope)
            if asked:
                raise ConfigError(
                    f"{', '.join(asked)} was asked for, but the forward of {type(self.model).__name__} computed its "
                    "loss without F.cross_entropy on its head's logits, where it could have been added. Leave it out "
                    "for this model."
                )
        if records:
            output = self._scrubbed(output)
        return output

    def _scrubbed(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            if self.losses == 0 and value.frame is self:
                return value.materialise("the forward computed no loss from its logits")
            return value.materialise("output") if value.is_real() else None
        if isinstance(value, dict):
            for key in list(value):
                item = value[key]
                if isinstance(item, StandIn | dict | list | tuple):
                    new = self._scrubbed(item)
                    if new is not item:
                        value[key] = new
            return value
        if isinstance(value, list | tuple):
            items = [self._scrubbed(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def _has_loss(output: Any) -> bool:
    loss = None
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, tuple) and output:
        loss = output[0]
    return isinstance(loss, Tensor) and loss.dim() == 0


def current() -> Frame | None:
    """The frame in force in this thread."""
    return _LOCAL.frame


class calling_for_real:  # noqa: N801
    """Inside, heads return real logits."""

    def __init__(self, frame: Frame | None = None) -> None:
        self.frame = frame

    def __enter__(self) -> None:
        self.before = current()
        _LOCAL.frame = self.frame

    def __exit__(self, kind: object, *exception: object) -> None:
        _LOCAL.frame = self.before
        if kind is not None and self.frame is not None:
            self.frame.records.clear()  # they refer to each other, and would keep hidden states until a collection


def in_force(frame: Frame) -> calling_for_real:
    """Inside, the head of ``frame`` returns deferred logits."""
    return calling_for_real(frame)


def scopes() -> tuple[tuple[PatchHandle, Scope], ...]:
    """The scopes in force in this thread, innermost last."""
    return _LOCAL.scopes


def set_scopes(value: tuple[tuple[PatchHandle, Scope], ...]) -> None:
    """Replace the scopes in force in this thread."""
    _LOCAL.scopes = value
