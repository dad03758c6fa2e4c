"""Counts of what happened, and sums of per-token statistics that stay on their device until someone reads them."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..device import WITHOUT_FLOAT64

SUMS = ("valid", "total", "accuracy", "entropy", "dropped")

_keys = itertools.count()
_counted: weakref.WeakValueDictionary[int, Counts] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Counts:
    """What a patched model did so far.

    Attributes:
        deferred: Calls of the head that returned deferred logits.
        fused: Losses that were computed by the strategy.
        materialised: Deferred logits that had to become real.
    """

    deferred: int = 0
    fused: int = 0
    materialised: int = 0
    key: int = field(default_factory=lambda: next(_keys), repr=False)

    def __post_init__(self) -> None:
        _counted[self.key] = self

    def add_loss(self, target: Tensor) -> Tensor:
        """Count a loss and return its targets. In a compiled graph an opaque operator counts, at each run: an integer
        that changes would have the graph compiled anew each time."""
        if torch.compiler.is_compiling():
            return _count_loss(target, self.key)
        self.fused += 1
        return target


@torch.library.custom_op("loss_plugins::count_loss", mutates_args=())
def _count_loss(target: Tensor, key: int) -> Tensor:
    counts = _counted.get(key)
    if counts is not None:
        counts.deferred += 1
        counts.fused += 1
    return target.clone()


@_count_loss.register_fake
def _(target: Tensor, key: int) -> Tensor:
    return torch.empty_like(target)


class StatisticsBuffer:
    """Sums over tokens since the last `pop`, one small vector a device, float64 where the device has that. Adding never
    waits for it."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self._sums: dict[torch.device, Tensor] = {}

    def add(self, valid: Tensor, **fields: Tensor | None) -> None:
        """Add one loss.

        Args:
            valid: Which tokens count, bool, shape ``[N]``.
            fields: Per-token values that are 0 where a token does not count, shape ``[N]``, by name.
        """
        wide = torch.float32 if valid.device.type in WITHOUT_FLOAT64 else torch.float64
        zero = torch.zeros((), dtype=wide, device=valid.device)
        sums = [valid.sum(dtype=wide), zero + valid.numel()]
        for name in SUMS[2:]:
            value = fields.get(name)
            sums.append(zero if value is None else value.detach().sum(dtype=wide))
        vector = torch.stack(sums)
        old = self._sums.get(valid.device)
        self._sums[valid.device] = vector if old is None else old + vector

    def pop(self) -> dict[str, float]:
        """Means over the valid tokens since the last call, and ``valid_fraction``; empty if there was no loss. The only
        place that waits for the device."""
        if not self._sums:
            return {}
        rows = [vector.tolist() for vector in self._sums.values()]
        # zeros stay, and not nothing, so that a compiled graph goes on finding what it found
        self._sums = {device: torch.zeros_like(vector) for device, vector in self._sums.items()}
        total = dict(zip(SUMS, (sum(column) for column in zip(*rows, strict=True)), strict=True))
        if not total.get("total"):
            return {}
        read = {"valid_fraction": total["valid"] / total["total"]}
        for name in self.names:
            read[name] = total[name] / total["valid"] if total["valid"] else float("nan")
        return read
