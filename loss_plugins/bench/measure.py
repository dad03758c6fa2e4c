"""The protocol: all contenders interleaved in one process, medians with their spread, extra peak memory with the
gradients, gradient error against the truth and beside the naive way's, and the same bits twice or not.

A contender whose loss or gradients are wrong gets no time. On a GPU a step is timed while the device still has earlier
work to do, as in training, so that what the host takes to issue it shows only where it is the longer part.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import DeviceProfile, free_bytes
from ..diagnostics.memory import PeakMeter
from ..strategies import Problem, chosen_by_auto, forget_choices
from .contenders import Contender
from .inputs import Inputs
from .truth import Truth, relative

MODES = {"both": (True, True), "frozen head": (True, False), "forward only": (False, False)}
"""Mode -> whether the hidden states and the head have gradients."""
WRONG = 0.1
"""Relative gradient error from which a result is called wrong; a filter's is below 0.04, rounding's below 0.03."""
WRONG_LOSS = 1e-2
"""Relative error from which a loss is wrong; or four roundings, where a package hands back a half type's loss."""
MARGIN = 1.1
"""Times the naive way's error that still counts as no worse."""
HEAD_START = 20_000_000
"""Cycles (10 ms at 2 GHz) that a GPU spins before each timed step, while the host issues it."""

Say = Callable[[str], None]


class DeviceLostError(RuntimeError):
    """A contender left the device unusable; ``rows`` are those measured until then."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass
class Row:
    """One contender on one set of inputs. Times in milliseconds, memory in MiB."""

    name: str
    inputs: str
    mode: str
    rows: int
    labels: int
    """Rows that are not ignored."""
    hidden: int
    vocab: int
    chosen: str = ""
    """What ``auto`` took."""
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    host_ms: float | None = None
    """What the host took to issue the step."""
    timed: int = 0
    first_s: float | None = None
    """The first step, with whatever was compiled or tuned in it."""
    peak_mib: float | None = None
    gradients_mib: float | None = None
    error_hidden: float | None = None
    error_weight: float | None = None
    times_naive: float | None = None
    """The worse of the two errors, each as a multiple of the naive way's."""
    loss_difference: float | None = None
    deterministic: bool | None = None
    broken_promise: str | None = None
    skipped: str | None = None
    failed: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Step:
    """One computation of the loss, with its gradients where the mode has any."""

    def __init__(self, contender: Contender, inputs: Inputs, mode: str) -> None:
        self.contender = contender
        self.labels = inputs.labels
        needs_hidden, needs_weight = MODES[mode]
        self.hidden = inputs.hidden.detach().requires_grad_(needs_hidden)
        self.weight = inputs.weight.detach().requires_grad_(needs_weight)

    def __call__(self) -> Tensor:
        self.clear()
        if not (self.hidden.requires_grad or self.weight.requires_grad):
            with torch.no_grad():
                return self.contender.loss(self.hidden, self.weight, self.labels)
        loss = self.contender.loss(self.hidden, self.weight, self.labels)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        return [t.grad for t in (self.hidden, self.weight) if t.grad is not None]

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def problem(self) -> Problem:
        """The loss as numbers; rows that carry no label count too."""
        problem = Problem(
            len(self.hidden), self.hidden.shape[1], len(self.weight), self.hidden.dtype,
            needs_hidden=self.hidden.requires_grad, needs_weight=self.weight.requires_grad,
        )  # fmt: skip
        return problem.on(DeviceProfile.probe(self.hidden.device))


def run(
    contenders: Mapping[str, Contender],
    inputs: Inputs,
    expected: Truth,
    mode: str = "both",
    *,
    iterations: int = 7,
    warm: int = 2,
    seconds: float | None = None,
    say: Say = lambda line: None,
) -> list[Row]:
    """Measure all contenders on one set of inputs.

    Args:
        mode: One of `MODES`.
        iterations: Timed steps of each; up to five times as many where all are over in half a second.
        warm: Steps of each before anything is measured.
        seconds: When this much was spent on timing, the round that runs is the last.
        say: Told what is going on, a line at a time.

    Raises:
        DeviceLostError: a contender left the device unusable.
    """
    device = inputs.hidden.device
    gc.collect()
    gc.freeze()  # what lives now need not be looked at each time that a contender's leavings are collected
    rows: list[Row] = []
    steps: dict[str, Step] = {}
    try:
        for name, contender in contenders.items():
            row = Row(name, inputs.kind, mode, *_sizes(inputs))
            rows.append(row)
            step = Step(contender, inputs, mode)
            _prepare(row, step, expected, device, warm)
            say(f"  {name}: {_outcome(row)}")
            if _is_lost(device):
                raise DeviceLostError(f"After {name} ({row.failed}) the device computes nothing any more.", rows)
            if row.failed is None and row.skipped is None:
                steps[name] = step
        _judge(rows, contenders, expected, inputs.kind)
        times = _interleaved(steps, device, iterations, seconds)
    finally:
        gc.unfreeze()
    for row in rows:
        if row.name in times:
            _summarise(row, times[row.name])
    return rows


def _sizes(inputs: Inputs) -> tuple[int, int, int, int]:
    rows, hidden = inputs.hidden.shape
    return rows, int((inputs.labels != -100).sum()), hidden, len(inputs.weight)


def _prepare(row: Row, step: Step, expected: Truth, device: torch.device, warm: int) -> None:
    """Everything but the time. Whatever the contender raises becomes the row's ``failed``."""
    free = free_bytes(device)
    needed = step.contender.peak_bytes(step.problem())
    if free is not None and needed > 0.95 * free:
        row.skipped = f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        return
    try:
        _examine(row, step, expected, device, warm)
    except torch.OutOfMemoryError:
        row.failed = "out of memory"
    except Exception as error:  # a peer may fail in any way; the table says so
        row.failed = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    with contextlib.suppress(RuntimeError):  # a device that is lost frees nothing
        step.clear()
        gc.collect()
        if row.failed == "out of memory" and device.type == "cuda":
            torch.cuda.empty_cache()


def _examine(row: Row, step: Step, expected: Truth, device: torch.device, warm: int) -> None:
    """Peak memory, errors and determinism; a wrong result is marked as failed."""
    forget_choices()
    begin = time.perf_counter()
    first_loss = step()
    _wait(device)
    row.first_s = time.perf_counter() - begin
    if step.contender.strategy == "auto":
        row.chosen = ", ".join(chosen_by_auto())
    for _ in range(warm - 1):
        first_loss = step()
    first = [gradient.clone() for gradient in step.gradients()]
    step.clear()
    gc.collect()
    with PeakMeter(device) as meter:
        meter.mark()
        loss = step()
        row.peak_mib = meter.read() / 2**20
    second = step.gradients()
    row.gradients_mib = sum(g.numel() * g.element_size() for g in second) / 2**20
    row.deterministic = torch.equal(first_loss, loss) and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )
    del first
    row.loss_difference = float(loss) - expected.loss
    if step.hidden.grad is not None:
        row.error_hidden = relative(step.hidden.grad, expected.d_hidden)
    if step.weight.grad is not None:
        row.error_weight = relative(step.weight.grad, expected.d_weight)
    missing = step.hidden.requires_grad != (row.error_hidden is not None)
    missing |= step.weight.requires_grad != (row.error_weight is not None)
    errors = [e for e in (row.error_hidden, row.error_weight) if e is not None]
    bound = max(WRONG_LOSS, 4 * torch.finfo(loss.dtype).eps)
    right_loss = abs(row.loss_difference) <= bound * max(1.0, abs(expected.loss))
    if missing or not right_loss or not all(e <= WRONG for e in errors):  # a comparison with NaN is false
        off = ", ".join(f"{e:.1e}" for e in errors)
        row.failed = f"wrong: loss off by {row.loss_difference:.1e}" + (f", gradients by {off}" if off else "")
        row.failed += ", and a gradient is missing" if missing else ""


def _judge(rows: Sequence[Row], contenders: Mapping[str, Contender], expected: Truth, kind: str) -> None:
    """Errors as multiples of the naive way's, and promises held against them.

    Exact ways promise the naive way's error, or what rounding the exact gradient once makes. A filter promises it on
    flat inputs, where everything matters, and Apple's error on a trained model's.
    """
    eps = torch.finfo(expected.d_hidden.dtype).eps
    naive, rounded = expected.naive, expected.rounded
    inexact: dict[str, float] = {}
    for row in rows:
        found = ((row.error_hidden, naive.hidden, rounded.hidden), (row.error_weight, naive.weight, rounded.weight))
        own = [(error, max(by or 0.0, eps), once or 0.0) for error, by, once in found if error is not None]
        row.times_naive = max((error / by for error, by, _ in own), default=None)
        inexact[row.name] = max((error / max(by, once) for error, by, once in own), default=0.0)
    apple = next((row.times_naive for row in rows if row.name == "Apple cce"), None)
    for row in rows:
        promise = contenders[row.name].promise
        if not promise or row.times_naive is None or row.failed:
            continue
        if promise == "exact" or kind.startswith("flat"):
            times, whose = inexact[row.name], "naive's and what one rounding makes"
        elif apple is not None:
            times, whose = row.times_naive / apple, "Apple cce's"
        else:
            continue
        if times > MARGIN:
            row.broken_promise = f"its gradient error is {times:.1f} times {whose}"


def _interleaved(
    steps: Mapping[str, Step], device: torch.device, iterations: int, seconds: float | None
) -> dict[str, list[tuple[float, float]]]:
    """(milliseconds, host's milliseconds) of each step in turn, each round beginning with another."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    begin = time.perf_counter()
    for turn in range(5 * iterations if names else 0):
        spent = time.perf_counter() - begin
        if turn and ((seconds is not None and spent > seconds) or (turn >= iterations and spent > 0.5)):
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_undisturbed(steps[name], device))
            steps[name].clear()
    return times


def _undisturbed(step: Step, device: torch.device) -> tuple[float, float]:
    """A step's time, taken again where the allocator had to ask the driver for memory: that is paid once in training,
    and here whenever another contender has left its own pieces."""
    for _ in range(2):
        before = _driver_calls(device)
        taken = _timed(step, device)
        if _driver_calls(device) == before:
            break
    return taken


def _driver_calls(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    counts = torch.cuda.memory_stats(device)
    return int(counts.get("num_device_alloc", 0) + counts.get("num_alloc_retries", 0))


def _timed(step: Step, device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        _wait(device)
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        _wait(device)
        return (time.perf_counter() - start) * 1e3, host * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    start = time.perf_counter()
    begin.record()
    step()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)), host * 1e3


def _summarise(row: Row, taken: list[tuple[float, float]]) -> None:
    """The median, and the 20th and 80th percentile."""
    times, host = sorted(ms for ms, _ in taken), sorted(ms for _, ms in taken)
    row.timed = len(times)
    row.ms, row.host_ms = times[len(times) // 2], host[len(host) // 2]
    row.ms_low, row.ms_high = times[len(times) // 5], times[len(times) - 1 - len(times) // 5]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _is_lost(device: torch.device) -> bool:
    """Whether the device no longer computes, as after an illegal access on CUDA."""
    try:
        return float(torch.ones(1, device=device).sum()) != 1.0
    except RuntimeError:
        return True


def _outcome(row: Row) -> str:
    if row.skipped:
        return f"skipped, {row.skipped}"
    if row.failed:
        return row.failed
    words = f"first step {row.first_s:.2f} s, peak {row.peak_mib:.0f} MiB"
    return f"{words}, took {row.chosen}" if row.chosen else words


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float | None:
    """The rate of a large product, in TFLOP/s, beside which the times can be read; None off CUDA."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        a @ b
    end.record()
    torch.cuda.synchronize(device)
    return 10 * 2 * size**3 / float(begin.elapsed_time(end)) / 1e9
