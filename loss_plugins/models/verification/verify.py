"""One model with a batch: stock, then patched with each strategy; loss, all gradients, time and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...config import LossConfig
from ...device import free_bytes
from ...diagnostics.memory import PeakMeter
from ...errors import ConfigError, LossPluginError, UnsupportedError, VerificationError
from ...strategies import STRATEGIES
from ..frame import in_force
from ..patch import PatchHandle, patch_model, unwrapped
from .distance import Apart, Taken, Tolerance, apart, bad_gradients, tolerance
from .moment import Moment, loss_of, taken_gradients
from .real_head import HeadCall, RealHead, yardstick_of
from .report import Report, Row

HALF = (torch.float16, torch.bfloat16)
FP16_SCALE = 1024.0
"""Keeps float16 gradients from vanishing; both sides are multiplied by it, and it rounds nothing."""
FP16_STEP = 32.0
"""By how much it is lowered where it makes stock's gradients infinite."""
HOST_LIMIT = 2 << 30
BRIEF = 1.0
"""Seconds in which a step is timed again."""


def verify_model(model: nn.Module, batch: dict[str, Any], strategies: Sequence[str] | None = None) -> Report:
    """Compare ``model``, patched with each of ``strategies`` (default: all there are), with itself unpatched.

    Parameters, gradients, buffers and random states are left as they were. Both train: dropout is drawn, the same.

    Args:
        model: In the type and on the device that is meant, not patched.
        batch: What its forward takes, with labels, on that device.
        strategies: Their names.

    Raises:
        ConfigError: an unknown strategy, or nothing of the model trains.
        VerificationError: the unpatched model fails on the batch.
    """
    names = list(strategies or STRATEGIES.names())
    for name in names:
        if name != "auto":
            STRATEGIES.get(name)
    report = Report(type(unwrapped(model)).__name__)
    refused = {name: why for name in names if (why := _refusal(model, name)) is not None}
    report.rows = [Row(name, "refused", reason=refused[name]) for name in names if name in refused]
    ready = [name for name in names if name not in refused]
    if not ready:
        report.reason = f"It cannot be patched: {next(iter(refused.values()))}"
        return report
    training = model.training
    model.train()
    try:
        with Moment(model) as moment:
            if not moment.parameters:
                raise ConfigError(f"No parameter of {report.model} trains, so there are no gradients to compare.")
            _Sides(model, batch, moment, report).run(ready)
    finally:
        model.train(training)
    order = {name: place for place, name in enumerate(names)}
    report.rows.sort(key=lambda row: order[row.name])
    _conclude(report)
    return report


def _refusal(model: nn.Module, strategy: str) -> str | None:
    try:
        patch_model(model, strategy).undo()
    except LossPluginError as error:
        return str(error)
    return None


def _conclude(report: Report) -> None:
    wrong = [row for row in report.rows if row.status == "differs"]
    bypassed = [row for row in report.rows if row.status == "bypassed"]
    report.equal = not wrong and not bypassed and any(row.status == "equal" for row in report.rows)
    if wrong:
        report.reason = f"{report.model} differs from stock with {', '.join(row.name for row in wrong)}."
    elif bypassed:
        report.reason = f"{report.model} computed its loss past the patch: no strategy is in force."
    elif not report.equal:
        report.reason = f"No strategy could compute the loss: {next(row.reason for row in report.rows)}"


class _Sides:
    """Both sides of the comparison, from the same moment."""

    def __init__(self, model: nn.Module, batch: dict[str, Any], moment: Moment, report: Report) -> None:
        self.model, self.batch, self.moment, self.report = model, batch, moment, report
        self.device = batch["labels"].device
        sizes = sum(p.numel() * p.element_size() for p in moment.parameters.values())
        self.limit = int(0.4 * (free_bytes(self.device) or HOST_LIMIT / 0.4))
        self.to_host = self.device.type != "cpu" and 3 * sizes > self.limit
        self.scale = FP16_SCALE if next(iter(moment.parameters.values())).dtype is torch.float16 else 1.0

    def run(self, strategies: Sequence[str]) -> None:
        stock = self._stock()
        self._look(strategies[0], stock)
        for name in strategies:
            self.report.rows.append(self._ours(name, stock))
        self.report.parameters = len(stock.gradients)

    def _step(self, around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> Tensor:
        """The loss after a forward and a backward; gradients lie on the parameters."""
        self.moment.rewind()
        self.moment.forget_gradients()
        with around():
            output = self.model(**self.batch)
        loss = loss_of(output).as_subclass(Tensor)
        if not loss.requires_grad:
            raise VerificationError("The loss depends on no parameter that trains.")
        (loss * self.scale).backward()
        return loss.detach()

    def _taken(self, loss: Tensor) -> Taken:
        return Taken(loss, taken_gradients(self.moment.parameters, self.to_host))

    def _stock(self) -> Taken:
        name = self.report.model
        try:
            with torch.no_grad():
                self.model(**self.batch)  # some change themselves when they first run
            stock = self._taken(self._step())
            while self.scale > 1 and float(bad_gradients(stock)):
                self.scale /= FP16_STEP
                stock = self._taken(self._step())
        except torch.OutOfMemoryError as error:
            raise VerificationError(
                f"The unpatched {name} does not fit into memory with a batch of {self.batch['labels'].numel()} tokens, "
                "so there is nothing to compare with. Take fewer (--batch, --tokens), or a smaller --dtype."
            ) from error
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            raise VerificationError(
                f"The unpatched {name} itself fails on this batch ({type(error).__name__}: {said}), so there is "
                "nothing to compare with. Choose another --dtype, --device or batch."
            ) from error
        if not stock.loss.isfinite():
            raise VerificationError(
                f"The loss of the unpatched {name} is {stock.loss.item()} on this batch, so there is nothing to "
                "compare with. Choose another --dtype or batch."
            )
        if float(bad_gradients(stock)):
            raise VerificationError(
                f"The unpatched {name} has gradients on this batch that are inf or NaN, so there is nothing to compare "
                "with. Choose another --dtype or batch."
            )
        self.report.stock.loss = float(stock.loss)
        return stock

    def _look(self, strategy: str, stock: Taken) -> None:
        """Stock's time, memory and own error, with its head looked at; how far ours may be."""
        row, report = self.report.stock, self.report
        with patch_model(self.model, strategy) as handle:
            with PeakMeter(self.device) as meter:
                peak = _Peak(meter)
                calls = RealHead(handle, before=peak.mark, after=peak.read)
                self._step(lambda: in_force(calls))
            row.peak_bytes = peak.bytes

            def timed(before: Callable[[], None], after: Callable[[], None]) -> Any:
                return in_force(RealHead(handle, before=before, after=after))

            row.seconds = self._seconds(timed)
            wide, own = self._own_error(handle, calls.calls, stock)
        dtype = calls.calls[0].dtype if calls.calls else next(iter(self.moment.parameters.values())).dtype
        self.dtype, report.dtype = dtype, str(dtype).removeprefix("torch.")
        self.tolerance = tolerance(dtype, own, wide, rounds_to_tf32(self.device))
        report.tolerance = self.tolerance.words
        report.own = None if own is None else (own.loss, own.whole)

    def _own_error(self, handle: PatchHandle, calls: list[HeadCall], stock: Taken) -> tuple[str, Apart | None]:
        """Stock's distance from itself with its head in a wider type, and in which, or why not."""
        wide = yardstick_of(calls, self.limit)
        if isinstance(wide, str):
            return wide, None
        name = str(wide).removeprefix("torch.")
        frame = RealHead(handle, wide)
        try:
            loss = self._step(lambda: in_force(frame))
        except (RuntimeError, TypeError, ValueError) as error:
            return f"it fails with its head in {name} ({' '.join(str(error).split())[:120]})", None
        return name, apart(self._taken(loss), stock, self.moment.parameters)

    def _ours(self, strategy: str, stock: Taken) -> Row:
        row = Row(strategy, "equal")
        with patch_model(self.model, strategy) as handle:
            try:
                with PeakMeter(self.device) as meter:
                    peak = _Peak(meter)
                    handle.before_loss.append(peak.mark)
                    handle.after_loss_backward.append(peak.read)
                    loss = self._step()
                handle.before_loss.clear()
                handle.after_loss_backward.clear()
                self._compared(row, apart(self._taken(loss), stock, self.moment.parameters), handle)
                row.loss, row.peak_bytes = float(loss), peak.bytes
                row.seconds = self._seconds(lambda before, after: _listening(handle, before, after))
            except UnsupportedError as error:
                return Row(strategy, "refused", reason=str(error))
            except (LossPluginError, RuntimeError, TypeError, ValueError, AssertionError) as error:
                said = " ".join(str(error).split())[:300]
                return Row(strategy, "differs", reason=f"stock runs and this fails: {type(error).__name__}: {said}")
            self.report.touched = handle.explain()
        return row

    def _compared(self, row: Row, found: Apart, handle: PatchHandle) -> None:
        allowed = filter_allowed(self.tolerance, handle.config, self.dtype)
        row.loss_off, row.loss_allowed = found.loss, allowed.for_loss()
        row.gradient, row.gradient_off, row.gradient_allowed = allowed.worst(found)
        row.beyond = allowed.exceeded(found)
        counts = handle.counts
        if counts.materialised:
            row.way = f"with logits ({'; '.join(handle.materialised_by)})"
        elif counts.fused:
            row.way = "without logits"
        row.status = "differs" if row.beyond else "equal" if row.way else "bypassed"

    def _seconds(self, around: Callable[..., contextlib.AbstractContextManager[Any]]) -> float | None:
        """The least of a few runs' time from the head's call to its input's gradient."""
        least: float | None = None
        began = time.perf_counter()
        for _ in range(3):
            clock = _Clock(self.device)
            self._step(lambda clock=clock: around(clock.start, clock.stop))  # type: ignore[misc]
            if clock.seconds is None:
                return None
            least = clock.seconds if least is None else min(least, clock.seconds)
            if time.perf_counter() - began > BRIEF:
                break
        return least


@contextlib.contextmanager
def _listening(handle: PatchHandle, before: Callable[[], None], after: Callable[[], None]) -> Any:
    """The listeners stay until the next run: the gradient comes after the forward."""
    handle.before_loss[:] = [before]
    handle.after_loss_backward[:] = [after]
    yield


class _Peak:
    """From the first head's call to the last gradient; None where there was none."""

    def __init__(self, meter: PeakMeter) -> None:
        self.meter, self.is_marked = meter, False
        self.bytes: int | None = None

    def mark(self) -> None:
        if not self.is_marked:
            self.is_marked = True
            self.meter.mark()

    def read(self) -> None:
        self.bytes = self.meter.read()


class _Clock:
    """The same for time, with the device's work waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: float | None = None
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._wait()
            self._since = time.perf_counter()

    def stop(self) -> None:
        self._wait()
        if self._since is not None:
            self.seconds = time.perf_counter() - self._since

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)


def rounds_to_tf32(device: torch.device) -> bool:
    """Whether products of float32 numbers are rounded there."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


def filter_allowed(allowed: Tolerance, config: LossConfig, dtype: torch.dtype) -> Tolerance:
    """More, for a strategy that may leave out of 16-bit gradients what is negligible beside their rounding."""
    if dtype not in HALF or config.loss_strategy == "auto":
        return allowed
    from ...strategies._options import parse_options

    options = parse_options(config.loss_strategy, STRATEGIES.get(config.loss_strategy).Options, config.loss_options)
    return allowed.with_filter() if any(getattr(options, "thresholds", ())) else allowed
