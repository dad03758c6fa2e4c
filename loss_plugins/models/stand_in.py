"""What takes the place of a tensor that may never be needed.

Each kind records what it can. Anything else makes the real tensor, and goes on with that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .frame import Frame

RECORDED: dict[Any, Callable[..., Any]] = {}
"""Functions of torch that some stand-in records. They return NotImplemented where they cannot."""


class StandIn:
    """A tensor of known shape and type that does not exist yet. It is no Tensor subclass.

    Attributes:
        frame: The forward that it belongs to.
        dtype: Type that it would have.
        sources: The hidden states that it would be computed from.
        real: The real tensor, once something has needed it.
    """

    frame: Frame
    dtype: torch.dtype
    sources: tuple[Tensor, ...]
    real: Tensor | None = None

    # what a Tensor answers about itself

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    # the real tensor

    def made(self, why: str) -> Tensor:
        """The real tensor, made anew."""
        raise NotImplementedError

    def is_real(self) -> bool:
        """Whether the real tensor exists: this, or one that it is derived from."""
        return self.real is not None

    def materialise(self, why: str) -> Tensor:
        """The real tensor, made once. ``why`` is the operation that needs it."""
        if self.real is None:
            self.real = self.made(why)
        return self.real

    def write(self, why: str) -> Tensor:
        """The real tensor to be written to. All that may alias it become real first, as they were before."""
        for record in list(self.frame.records):
            if any(theirs is ours for theirs in record.sources for ours in self.sources):
                record.materialise(why)
        return self.materialise(why)

    # what is not recorded

    def __getitem__(self, index: Any) -> Any:
        return self._as_real("__getitem__")(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.write("__setitem__")[as_real(index, "__setitem__")] = as_real(value, "__setitem__")

    def _as_real(self, name: str) -> Callable[..., Any]:
        """The Tensor method ``name`` of the real tensor. In-place ones leave this stand-in real for good."""
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):

            def write(*args: Any, **kwargs: Any) -> StandIn:
                real = self.write(name)
                args, kwargs = as_real(args, name), as_real(kwargs, name)
                self.real = getattr(real, name)(*args, **kwargs)
                return self

            return write

        def read(*args: Any, **kwargs: Any) -> Any:
            real = self.materialise(name)
            return getattr(real, name)(*as_real(args, name), **as_real(kwargs, name))

        return read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"Deferred logits have no attribute {name!r}.")
        if callable(getattr(Tensor, name)):
            return self._as_real(name)
        return getattr(self.materialise(name), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        record = RECORDED.get(function)
        if record is not None:
            result = record(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = getattr(function, "__name__", str(function))
        if kwargs.get("inplace") or name.endswith("_") or isinstance(kwargs.get("out"), StandIn):
            return _written(function, name, args, kwargs)
        return function(*as_real(args, name), **as_real(kwargs, name))


def _special(name: str) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any) -> Any:
        return self._as_real(name)(*args)

    method.__name__ = name
    return method


# Python looks these up on the class, so that __getattr__ never sees them
_SPECIAL = (
    "abs add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod pow rpow neg matmul rmatmul eq ne lt le gt "
    "ge and or xor invert bool float int index contains array"
)
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_IN_PLACE = frozenset(f"__i{name}__" for name in _OPERATORS)
for _name in (*(f"__{word}__" for word in _SPECIAL.split()), *_IN_PLACE):
    setattr(StandIn, _name, _special(_name))
StandIn.__hash__ = object.__hash__  # type: ignore[method-assign]


def as_real(value: Any, why: str) -> Any:
    """``value`` with real tensors for stand-ins, inside tuples, lists and dicts too."""
    if isinstance(value, StandIn):
        return value.materialise(why)
    if type(value) in (tuple, list):
        return type(value)(as_real(item, why) for item in value)
    if type(value) is dict:
        return {key: as_real(item, why) for key, item in value.items()}
    return value


def by_method(name: str) -> Callable[..., Any]:
    """A recorded function that is the method ``name`` of its first argument."""

    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(input, name)(*args, **kwargs) if isinstance(input, StandIn) else NotImplemented

    return call


def _written(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that writes to one of its arguments; the stand-in it wrote to is returned in its place."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, StandIn):
            value.write(name)
    result = function(*as_real(args, name), **as_real(kwargs, name))
    for value in (*args, *kwargs.values()):
        if isinstance(value, StandIn) and value.real is result:
            return value
    return result
