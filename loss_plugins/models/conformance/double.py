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
    functional = torch.nn.functional
    to, float_, new_zeros, default = Tensor.to, Tensor.float, Tensor.new_zeros, torch.get_default_dtype()
    softmax, log_softmax, zeros = functional.softmax, functional.log_softmax, torch.zeros

    def to_double(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return to(self, *args, **_double(kwargs))

    def softmax_double(*args: Any, **kwargs: Any) -> Tensor:
        return softmax(*args, **_double(kwargs))

    def zeros_double(*args: Any, **kwargs: Any) -> Tensor:
        return zeros(*args, **_double(kwargs))

    def new_zeros_double(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return new_zeros(self, *args, **_double(kwargs))

    def log_softmax_double(input: Any, *args: Any, **kwargs: Any) -> Any:
        # torch's own would hand a stand-in this function, which it does not know
        log = log_softmax if isinstance(input, Tensor) else type(input).log_softmax
        return log(input, *args, **_double(kwargs))

    Tensor.to, Tensor.float = to_double, Tensor.double  # type: ignore[method-assign, assignment]
    functional.softmax, functional.log_softmax = softmax_double, log_softmax_double
    torch.zeros, Tensor.new_zeros = zeros_double, new_zeros_double  # type: ignore[assignment, method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        Tensor.to, Tensor.float, Tensor.new_zeros = to, float_, new_zeros  # type: ignore[method-assign]
        functional.softmax, functional.log_softmax, torch.zeros = softmax, log_softmax, zeros
        torch.set_default_dtype(default)


def _double(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"dtype": torch.float64} if arguments.get("dtype") is torch.float32 else arguments
