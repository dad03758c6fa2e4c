"""Models in float64 throughout, where differences of 1e-10 can be seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def all_double() -> Iterator[None]:
    """Inside, float32 means float64: models round to float32 in places (``.float()``, ``.to(torch.float32)``, softmax
    in float32), which would hide every difference below 1e-7."""
    to, float_, softmax, default = Tensor.to, Tensor.float, torch.nn.functional.softmax, torch.get_default_dtype()

    def to_double(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return to(self, *args, **kwargs)

    def softmax_double(input: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        kwargs["dtype"] = torch.float64 if dtype is torch.float32 else dtype
        return softmax(input, *args, **kwargs)

    Tensor.to, Tensor.float = to_double, Tensor.double  # type: ignore[method-assign, assignment]
    torch.nn.functional.softmax = softmax_double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        Tensor.to, Tensor.float = to, float_  # type: ignore[method-assign]
        torch.nn.functional.softmax = softmax
        torch.set_default_dtype(default)
