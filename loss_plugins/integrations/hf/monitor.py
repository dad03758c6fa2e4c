"""What a training run is told about its loss: hits, memory, speed, statistics.

Nothing here waits for the device but `read_statistics`, and that is called when something is logged.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...diagnostics.memory import MIB, PeakMeter, has_counters
from ...kernels import ops
from ...strategies import chosen_by_auto, forget_choices

if TYPE_CHECKING:
    from ...models.patch import PatchHandle
    from ...models.statistics import StatisticsBuffer

logger = logging.getLogger(__name__)

PREFIX = "loss_plugins/"
_LOGGED = {"accuracy": "token_accuracy"}


def renewed(statistics: StatisticsBuffer) -> StatisticsBuffer:
    """An empty buffer for the same names."""
    return type(statistics)(statistics.names)


@contextlib.contextmanager
def apart(handle: PatchHandle, statistics: StatisticsBuffer) -> Iterator[None]:
    """Inside, the handle fills ``statistics``; afterwards it goes on filling its own."""
    outer, handle.statistics = handle.statistics, statistics
    try:
        yield
    finally:
        handle.statistics = outer


def read_statistics(statistics: StatisticsBuffer, positions: int = 0, accelerator: Any = None) -> dict[str, float]:
    """Means over tokens since the last time, by their logged names. Waits for the device.

    Args:
        statistics: Of this process.
        positions: Tokens of this process's batches, ignored ones too: its weight among the processes.
        accelerator: With it, the means are over the tokens of all processes, which must all call this.
    """
    values, names = statistics.pop(), statistics.names
    if accelerator is not None and accelerator.num_processes > 1:
        valid = positions * values.get("valid_fraction", 0.0)
        sums = [float(positions), valid, *(valid * values[name] if valid else 0.0 for name in names)]
        mine = torch.tensor(sums, device=accelerator.device, dtype=torch.float32)
        positions, valid, *rest = accelerator.reduce(mine, "sum").tolist()
        values = {"valid_fraction": valid / positions} if positions else {}
        if valid:
            values |= {name: total / valid for name, total in zip(names, rest, strict=True)}
    return {_LOGGED.get(name, name): value for name, value in values.items()}


class LossMonitor:
    """One training run's losses: since it began, and since the last log.

    Args:
        handle: The model's.
        device: Where the loss is computed. With an allocator that counts, every step's peak is read; elsewhere only
            that of the first step inside `watched`, since watching is slow.
        measure: Whether memory is measured at all.
    """

    def __init__(self, handle: PatchHandle, device: torch.device, measure: bool = True) -> None:
        self.handle = handle
        self.loss_peak_bytes = 0
        self._device = device
        self._meter = PeakMeter(device) if measure and has_counters(device) else None
        self._to_watch = measure and self._meter is None
        self._marked = False
        self._fused_before, self._materialised_before = handle.counts.fused, handle.counts.materialised
        self._checked = False
        self._since: float | None = None
        self._tokens, self._seconds = 0, 0.0
        self._new_tokens, self._new_seconds, self._new_peak = 0, 0.0, 0
        self._ended: tuple[int, int] | None = None
        if measure:  # a compiled graph would break at listeners
            handle.before_loss.append(self._before_loss)
            handle.after_loss_backward.append(self._after_loss_backward)
        ops.forget_launches()
        forget_choices()

    def end(self) -> None:
        """Training is over: nothing of this object stays with the model, and its numbers stay as they are."""
        self.pause()
        self._ended = self.hits, self.materialised
        for hooks, mine in (
            (self.handle.before_loss, self._before_loss),
            (self.handle.after_loss_backward, self._after_loss_backward),
        ):
            if mine in hooks:
                hooks.remove(mine)

    # Hits

    @property
    def hits(self) -> int:
        """Losses computed without logits."""
        if self._ended is not None:
            return self._ended[0]
        return self.handle.counts.fused - self._fused_before

    @property
    def materialised(self) -> int:
        """Times that logits were made after all."""
        if self._ended is not None:
            return self._ended[1]
        return self.handle.counts.materialised - self._materialised_before

    def check(self, causes: str) -> None:
        """After the first optimizer step: say loudly that no loss went through the patch. (That logits were made after
        all is said by the patch itself.)"""
        if not self._checked and not self.hits and not self.materialised:
            logger.warning(
                "NO LOSS WENT THROUGH loss_plugins in the first optimizer step: loss_strategy %r has no effect on this "
                "run. Likely causes: %s",
                self.handle.config.loss_strategy,
                causes,
            )
        self._checked = True

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Around an evaluation: its time and its losses are not training's."""
        self.pause()
        fused, materialised = self.handle.counts.fused, self.handle.counts.materialised
        try:
            yield
        finally:
            self._fused_before += self.handle.counts.fused - fused
            self._materialised_before += self.handle.counts.materialised - materialised

    # Memory

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around a training step: on a device whose allocator does not count, the first is watched, and not timed."""
        if not self._to_watch:
            yield
            return
        self._to_watch, timed = False, self._since is not None
        self.pause()
        try:
            with PeakMeter(self._device) as self._meter:
                yield
        finally:
            self._meter = None
        if timed:
            self.resume()

    def _before_loss(self) -> None:
        self._marked = torch.is_grad_enabled()  # an evaluation's loss is another, smaller one
        if self._marked and self._meter is not None:
            self._meter.mark()

    def _after_loss_backward(self) -> None:
        if self._marked and self._meter is not None:
            self._new_peak = max(self._new_peak, self._meter.read())
            self.loss_peak_bytes = max(self.loss_peak_bytes, self._new_peak)

    # Speed

    def resume(self) -> None:
        """Training time runs."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Training time stands still: something else runs."""
        if self._since is not None:
            self._new_seconds += time.perf_counter() - self._since
            self._since = None

    def count(self, positions: int) -> None:
        """``positions`` of a training batch go through the model, ignored ones too."""
        if self._since is not None:
            self._new_tokens += positions

    # Reading

    def take(self, processes: int = 1) -> dict[str, float]:
        """The numbers since the last time by their logged names. Training time stands still until `resume`.

        Args:
            processes: How many processes train, each with as many tokens as this one.
        """
        self.pause()
        numbers: dict[str, float] = {}
        if self._new_peak:
            numbers["peak_loss_mib"] = self._new_peak / MIB
        if self._new_seconds and self._new_tokens:
            numbers["tokens_per_s"] = processes * self._new_tokens / self._new_seconds
        self._tokens, self._seconds = self._tokens + self._new_tokens, self._seconds + self._new_seconds
        self._new_tokens, self._new_seconds, self._new_peak = 0, 0.0, 0
        return numbers

    def report(self, processes: int = 1) -> dict[str, Any]:
        """The whole run in one mapping."""
        strategy = self.handle.config.loss_strategy
        tokens, seconds = self._tokens + self._new_tokens, self._seconds + self._new_seconds
        if self._since is not None:
            seconds += time.perf_counter() - self._since
        return {
            "strategy": strategy,
            "chosen": list(chosen_by_auto()) if strategy == "auto" else [strategy],
            "kernels": sorted(ops.launched()),
            "loss_peak_bytes": self.loss_peak_bytes,
            "tokens_per_s": processes * tokens / seconds if tokens and seconds else 0.0,
            "hits": self.hits,
            "materialised": self.materialised,
        }
