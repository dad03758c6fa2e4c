"""Liger's kernels on a machine without a GPU, and what to compare there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {
    "rms_norm": ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
    "swiglu": ("_swiglu_forward_kernel", "_swiglu_backward_kernel"),
    "rope": ("_triton_rope",),
}


class _Number(float):
    """Liger's kernels call `.to()` on numbers, which Triton's compiler understands and its interpreter does not."""

    def to(self, dtype: Any) -> _Number:
        return self


class _Watched:
    """A kernel that says when it is launched."""

    def __init__(self, kernel: Any, launched: Callable[[], None]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        self.launched()

        def number(value: Any) -> Any:
            return _Number(value) if isinstance(value, float) and DEVICE == "cpu" else value

        return lambda *args, **kwargs: self.kernel[grid](
            *(number(value) for value in args), **{name: number(value) for name, value in kwargs.items()}
        )


def watch(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of Liger's kernels, as they are launched from now on. The row kernels of RMSNorm only."""
    launched: set[str] = set()
    for op, names in KERNELS.items():
        home = importlib.import_module(f"liger_kernel.ops.{op}")
        for name in names:
            watched = _Watched(getattr(home, name), lambda op=op: launched.add(op))  # type: ignore[misc]
            monkeypatch.setattr(home, name, watched)
        if hasattr(home, "rsqrt") and DEVICE == "cpu":
            import triton.language as tl

            # the device library is no Python; the interpreter replaces what `tl` holds while a kernel runs
            monkeypatch.setattr(home, "rsqrt", lambda x: tl.math.rsqrt(x))
    return launched


def state(model: nn.Module) -> list[tuple[Any, ...]]:
    """All that Liger could change in a model."""
    return [(module, type(module), dict(vars(module)), dict(module._modules)) for module in model.modules()]
