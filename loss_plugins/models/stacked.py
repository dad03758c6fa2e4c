"""The logits of several heads, stacked: one of them is a stand-in of its own again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .deferred import DeferredLogits
from .stand_in import StandIn


class StackedLogits(StandIn):
    """``torch.stack`` of deferred logits of one shape, at an axis that is not the last.

    Args:
        parts: The logits of each head.
        axis: Where they are stacked.
    """

    def __init__(self, parts: list[DeferredLogits], axis: int) -> None:
        self.parts, self.axis, self.frame, self.dtype = parts, axis, parts[0].frame, parts[0].dtype
        self.sources = tuple(source for part in parts for source in part.sources)
        self.real: Tensor | None = None
        self.frame.records.append(self)

    @property
    def shape(self) -> torch.Size:
        shape = list(self.parts[0].shape)
        return torch.Size((*shape[: self.axis], len(self.parts), *shape[self.axis :]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def made(self, why: str) -> Tensor:
        return torch.stack([part.materialise(why) for part in self.parts], self.axis)

    def is_real(self) -> bool:
        return self.real is not None

    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(item, int | slice) and not isinstance(item, bool) for item in items)
        if self.real is not None or not plain or not self.axis < len(items) <= self.ndim:
            return self._viewed(lambda t: t[index])
        own, others = items[self.axis], (*items[: self.axis], *items[self.axis + 1 :])
        if isinstance(own, int):
            return self.parts[own][others] if others else self.parts[own]
        if any(isinstance(item, int) for item in others):
            return self._viewed(lambda t: t[index])
        parts = [part[others] for part in self.parts[own]]
        return StackedLogits(parts, self.axis) if parts else self._viewed(lambda t: t[index])

    def reshape(self, *shape: Any) -> Any:
        return self._viewed(lambda t: t.reshape(*shape))

    def view(self, *shape: Any) -> Any:
        return self._viewed(lambda t: t.view(*shape))

    def _viewed(self, derive: Callable[[Tensor], Tensor]) -> Any:
        return derive(self.real) if self.real is not None else Viewed(self, derive)


class Viewed(StandIn):
    """A view of stacked logits from which no loss can be computed without them."""

    def __init__(self, parent: StackedLogits, derive: Callable[[Tensor], Tensor]) -> None:
        self.parent, self.derive = parent, derive
        self.frame, self.dtype, self.sources = parent.frame, parent.dtype, parent.sources
        self.real: Tensor | None = None
        self._shape = derive(torch.empty(parent.shape, device="meta")).shape
        self.frame.records.append(self)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self.parent.device

    def made(self, why: str) -> Tensor:
        return self.derive(self.parent.materialise(why))

    def is_real(self) -> bool:
        return self.real is not None or self.parent.is_real()
