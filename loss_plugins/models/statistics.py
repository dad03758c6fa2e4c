"""Counts of what happened, and sums of per-token statistics that stay on their device until someone reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUMS = ("valid", "total", "accuracy", "entropy", "dropped")


@dataclass
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


class StatisticsBuffer:
    """Sums over tokens since the last `pop`, one small float64 vector a device. Adding never waits for a device."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self._sums: dict[torch.device, Tensor] = {}

    def add(self, valid: Tensor, **fields: Tensor | None) -> None:
        """Add one loss.

        Args:
            valid: Which tokens count, bool, shape ``[N]``.
            fields: Per-token values that are 0 where a token does not count, shape ``[N]``, by name.
        """
        wide = torch.float32 if valid.device.type == "mps" else torch.float64
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
        sums, self._sums = self._sums, {}
        if not sums:
            return {}
        rows = [vector.tolist() for vector in sums.values()]
        total = dict(zip(SUMS, (sum(column) for column in zip(*rows, strict=True)), strict=True))
        read = {"valid_fraction": total["valid"] / total["total"] if total["total"] else 0.0}
        for name in self.names:
            read[name] = total[name] / total["valid"] if total["valid"] else float("nan")
        return read
