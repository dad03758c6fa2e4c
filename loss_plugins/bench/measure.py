"""The protocol: all contenders interleaved in one process, medians with their spread, extra peak memory with the
gradients, gradient error against float32 products of the same inputs, and the same bits twice or not.

A contender whose loss or gradients are wrong gets no time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..diagnostics.memory import PeakMeter
from .contenders import Loss
from .inputs import Inputs

WRONG = 0.1
"""Relative gradient error from which a result is called wrong; a filter's is below 0.03, rounding's below 0.02."""


@dataclass
class Row:
    """One contender on one set of inputs. Times in milliseconds, memory in MiB."""

    name: str
    inputs: str
    mode: str
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    peak_mib: float | None = None
    error_hidden: float | None = None
    error_weight: float | None = None
    loss_difference: float | None = None
    deterministic: bool | None = None
    failed: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Truth:
    loss: float
    d_hidden: Tensor
    d_weight: Tensor


def truth(inputs: Inputs, rows: int = 256) -> Truth:
    """Loss and gradients with every product in float32, a few rows at a time."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, weight = inputs.hidden.float(), inputs.weight.float()
    valid = inputs.labels != -100
    count = int(valid.sum())
    total = 0.0
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for start in range(0, len(hidden), rows):
        part, ok = slice(start, start + rows), valid[start : start + rows]
        y = torch.where(ok, inputs.labels[part], 0)
        z = hidden[part] @ weight.T
        lse = z.logsumexp(1)
        total += float(((lse - z.gather(1, y[:, None])[:, 0]) * ok).double().sum())
        dz = (z - lse[:, None]).exp_()
        dz.scatter_add_(1, y[:, None], -torch.ones_like(lse)[:, None])
        dz *= (ok / count)[:, None]
        d_hidden[part] = dz @ weight
        d_weight.addmm_(dz.T, hidden[part])
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return Truth(total / count, d_hidden, d_weight)


def run(
    contenders: dict[str, Loss], inputs: Inputs, mode: str = "both", iterations: int = 7, warm: int = 2
) -> list[Row]:
    """Measure all contenders on one set of inputs.

    Args:
        mode: ``both`` gradients, ``frozen head``, or ``no gradient``.
    """
    device = inputs.hidden.device
    hidden = inputs.hidden.detach().requires_grad_(mode != "no gradient")
    weight = inputs.weight.detach().requires_grad_(mode == "both")
    expected = truth(inputs) if mode != "no gradient" else None
    rows: dict[str, Row] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, loss_of in contenders.items():
        row = rows[name] = Row(name, inputs.kind, mode)

        def step(loss_of: Loss = loss_of) -> Tensor:
            hidden.grad = weight.grad = None
            loss = loss_of(hidden, weight, inputs.labels)
            if loss.requires_grad:
                loss.backward()
            return loss.detach()

        try:
            _examine(row, step, hidden, weight, expected, device, warm)
        except Exception as error:  # a peer may fail in any way; the table says so
            row.failed = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        hidden.grad = weight.grad = None
        gc.collect()
        if row.failed is None:
            steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(iterations):
        for name in names[i % max(len(names), 1) :] + names[: i % max(len(names), 1)]:
            times[name].append(_timed(steps[name], device))
            hidden.grad = weight.grad = None
    for name, taken in times.items():
        taken.sort()
        rows[name].ms = taken[len(taken) // 2]
        rows[name].ms_low, rows[name].ms_high = taken[len(taken) // 5], taken[len(taken) - 1 - len(taken) // 5]
    return list(rows.values())


def _examine(
    row: Row, step: Callable[[], Tensor], hidden: Tensor, weight: Tensor, expected: Truth | None, device: torch.device,
    warm: int,
) -> None:  # fmt: skip
    """Peak memory, errors and determinism; raises nothing of its own but marks a wrong result as failed."""
    for _ in range(warm):
        loss = step()
    first = [t.grad.clone() for t in (hidden, weight) if t.grad is not None]
    hidden.grad = weight.grad = None
    del loss
    gc.collect()
    with PeakMeter(device) as meter:
        meter.mark()
        loss = step()
        row.peak_mib = meter.read() / 2**20
    second = [t.grad for t in (hidden, weight) if t.grad is not None]
    row.deterministic = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if expected is None:
        return
    row.loss_difference = float(loss) - expected.loss
    for tensor, want, name in (
        (hidden, expected.d_hidden, "error_hidden"),
        (weight, expected.d_weight, "error_weight"),
    ):
        if tensor.grad is not None:
            setattr(row, name, float((tensor.grad.float() - want).norm() / want.norm()))
    errors = [e for e in (row.error_hidden, row.error_weight) if e is not None]
    if not abs(row.loss_difference) <= 1e-2 * max(1.0, abs(expected.loss)) or not all(e <= WRONG for e in errors):
        row.failed = (
            f"wrong: loss off by {row.loss_difference:.1e}, gradients by {', '.join(f'{e:.1e}' for e in errors)}"
        )


def _timed(step: Callable[[], Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))
