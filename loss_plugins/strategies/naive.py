"""All logits at once, up-cast to float32: what Transformers does, and the yardstick for the others.

Peak memory, half inputs: logits in half and in float32, log-probabilities and their gradient in float32 and in half.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..device import DeviceProfile
from ..errors import ConfigError
from . import _native
from ._base import Problem, RowLoss, Rows
from ._logits import loss_from_logits, project
from ._options import check_kernels


@dataclass(frozen=True)
class NaiveOptions:
    compile: bool = field(default=False, metadata={"help": "Run projection and loss through torch.compile."})

    kernels: str = field(
        default="torch", metadata={"help": "torch, or native (torch_npu's npu_cross_entropy_loss; no memory is saved)."}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.compile, bool):
            raise ConfigError(f"compile must be true or false, got {self.compile!r}.")
        check_kernels(self.kernels, ("torch", "native"))
        if self.compile and self.kernels == "native":
            raise ConfigError("compile: true and kernels: native were both asked for. Leave one of them out.")


def _whole(rows: Rows) -> tuple[Tensor, ...]:
    return loss_from_logits(rows, project(rows, rows.hidden), rows.labels, rows.row_scale)


@cache
def _compiled() -> Any:
    return torch.compile(_whole, dynamic=True)


class Naive:
    name = "naive"
    summary = "all logits in memory, float32 (as Transformers does)"
    Options = NaiveOptions

    def check(self, problem: Problem, profile: DeviceProfile, options: NaiveOptions) -> str | None:
        if options.compile and problem.module:
            return "the head is a module that must be called, and options={'compile': True} needs its weight"
        return _native.cannot_run_on_logits(problem, profile) if options.kernels == "native" else None

    def peak_bytes(self, problem: Problem, options: NaiveOptions) -> int:
        size = problem.accumulator.itemsize
        half = problem.dtype.itemsize if problem.dtype.itemsize < size else 0
        entries = problem.rows * problem.vocab
        if not problem.differentiable:
            return entries * (size + max(half, size))
        # the half gradient is made after the log-probabilities are freed
        peak = entries * (size * 2 + max(size, half))
        return peak + problem.gradient_bytes

    def kernels(self, profile: DeviceProfile, options: NaiveOptions) -> str:
        return "torch.compile" if options.compile else options.kernels

    def __call__(self, rows: Rows, options: NaiveOptions, profile: DeviceProfile) -> RowLoss:
        run = _compiled() if options.compile else _whole
        loss, *fields = _native.row_loss_of_logits(rows) if options.kernels == "native" else run(rows)
        return RowLoss(loss.sum() if rows.reduce else loss, *fields)


STRATEGY = Naive()
