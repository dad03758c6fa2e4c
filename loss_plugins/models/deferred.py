"""Deferred logits: what a patched head returns while labels are given.

A stand-in remembers the hidden states and what the model does to "its logits": casts, scaling, tanh, slices, views.
``torch.nn.functional.cross_entropy`` meets it through ``__torch_function__`` and computes the loss without logits.
Anything else makes the real logits, replays what was recorded, and goes on with those.

It is no Tensor subclass, since torch.compile cannot trace one that refuses storage; so ``isinstance(x, Tensor)`` is
False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError
from .record import Step, apply

if TYPE_CHECKING:
    from .frame import Frame


class DeferredLogits:
    """Logits of shape ``[..., vocab]`` that do not exist.

    Args:
        frame: The forward that they belong to.
        hidden: What the head was given, shape ``[..., H]``, as the recorded views and slices leave it.
        vocab: Width that the logits would have now.
        dtype: Type that they would have now.
        steps: Operations on single logits, in order.
        parent: What these logits are derived from, with ``derive``, which makes them from the parent's real logits.
    """

    def __init__(
        self,
        frame: Frame,
        hidden: Tensor,
        vocab: int,
        dtype: torch.dtype,
        steps: tuple[Step, ...] = (),
        parent: DeferredLogits | None = None,
        derive: Callable[[Tensor], Tensor] | None = None,
        detached: bool = False,
    ) -> None:
        self.frame, self.hidden, self.vocab, self.dtype, self.steps = frame, hidden, vocab, dtype, steps
        self.parent, self.derive, self.detached = parent, derive, detached
        self.version: int | None = _version(hidden) if parent is None else parent.version
        self.source: Tensor = hidden if parent is None else parent.source
        self.real: Tensor | None = None
        if parent is not None and parent.is_real():
            # aliasing as in torch: a copy made now must not see what is written later
            self.real = self._derived("derived")
        frame.records.append(self)

    # what a Tensor answers about itself

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocab))

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def device(self) -> torch.device:
        return self.frame.head.device(self.hidden)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def requires_grad(self) -> bool:
        if self.detached or not torch.is_grad_enabled():
            return False
        return self.hidden.requires_grad or any(p.requires_grad for p in self.frame.head.core.parameters())

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[DeferredLogits]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, steps={[s.name for s in self.steps]})"

    # what is recorded

    def _with(
        self,
        derive: Callable[[Tensor], Tensor],
        *,
        hidden: Tensor | None = None,
        step: Step | None = None,
        vocab: int | None = None,
        dtype: torch.dtype | None = None,
        detached: bool = False,
    ) -> DeferredLogits:
        return DeferredLogits(
            self.frame,
            self.hidden if hidden is None else hidden,
            self.vocab if vocab is None else vocab,
            self.dtype if dtype is None else dtype,
            self.steps if step is None else (*self.steps, step),
            self,
            derive,
            self.detached or detached,
        )

    def _step(self, step: Step) -> DeferredLogits:
        return self._with(lambda t: apply(t, step), step=step)

    def mul(self, other: Any) -> Any:
        return self._step(Step("mul", other)) if _is_scalar(other) else self._as_real("mul")(other)

    multiply = __mul__ = __rmul__ = mul

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        if rounding_mode is None and _is_scalar(other):
            return self._step(Step("div", other))
        return self._as_real("div")(other, rounding_mode=rounding_mode)

    divide = true_divide = div

    def __truediv__(self, other: Any) -> Any:
        return self.div(other)

    def add(self, other: Any, *, alpha: Any = 1) -> Any:
        if alpha == 1 and self._is_column_vector(other):
            dtype = torch.promote_types(self.dtype, other.dtype)
            step = Step("add", other)
            return self._with(lambda t: apply(t, step), step=step, dtype=dtype)
        return self._as_real("add")(other, alpha=alpha)

    __add__ = __radd__ = add

    def _is_column_vector(self, value: Any) -> bool:
        """Whether adding ``value`` is adding a bias: one entry a column of the vocabulary."""
        return (
            isinstance(value, Tensor) and value.is_floating_point() and 1 <= value.dim() <= self.ndim
            and value.shape[-1] == self.vocab and value.numel() == self.vocab and value.device == self.device
        )  # fmt: skip

    def tanh(self) -> DeferredLogits:
        return self._step(Step("tanh"))

    def float(self) -> DeferredLogits:
        return self.to(torch.float32)

    def double(self) -> DeferredLogits:
        return self.to(torch.float64)

    def half(self) -> DeferredLogits:
        return self.to(torch.float16)

    def bfloat16(self) -> DeferredLogits:
        return self.to(torch.bfloat16)

    def type_as(self, other: Tensor) -> Any:
        return self.to(other)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype, moved = None, False
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor | DeferredLogits):
                dtype, moved = value.dtype, moved or value.device != self.device
            elif isinstance(value, str | torch.device):
                moved = moved or not _same_device(torch.device(value), self.device)
        if moved or (dtype is not None and not dtype.is_floating_point) or kwargs.get("copy"):
            return self._as_real("to")(*args, **kwargs)
        if dtype is None or dtype == self.dtype:
            return self
        step = Step("cast", dtype)
        return self._with(lambda t: apply(t, step), step=step, dtype=dtype)

    def contiguous(self) -> DeferredLogits:
        return self._with(lambda t: t.contiguous())

    def clone(self) -> DeferredLogits:
        return self._with(lambda t: t.clone())

    def detach(self) -> DeferredLogits:
        return self._with(lambda t: t.detach(), hidden=self.hidden.detach(), detached=True)

    def view(self, *shape: Any) -> Any:
        return self._reshaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._reshaped("reshape", shape)

    def _reshaped(self, name: str, shape: tuple[Any, ...]) -> Any:
        if len(shape) == 1 and isinstance(shape[0], tuple | list):
            shape = tuple(shape[0])
        if not shape or not all(isinstance(n, int | torch.SymInt) for n in shape):
            return self._as_real(name)(*shape)
        last = shape[-1]
        if last == -1:
            rest = 1
            for n in shape[:-1]:
                rest = rest * n
            last = self.numel() // rest if rest else -1
        if last != self.vocab:
            return self._as_real(name)(*shape)
        hidden = self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
        return self._with(lambda t: getattr(t, name)(*shape), hidden=hidden)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = self.ndim - 1
        if end_dim % max(self.ndim, 1) == last and start_dim % max(self.ndim, 1) != last:
            return self._as_real("flatten")(start_dim, end_dim)
        hidden = self.hidden.flatten(start_dim, end_dim)
        return self._with(lambda t: t.flatten(start_dim, end_dim), hidden=hidden)

    def __getitem__(self, index: Any) -> Any:
        found = _token_index(index, self.ndim, self.vocab)
        if found is None:
            return self._as_real("__getitem__")(index)
        on_hidden, columns = found
        hidden = self.hidden[on_hidden]
        if columns == (0, self.vocab):
            return self._with(lambda t: t[index], hidden=hidden)
        step = Step("columns", columns)
        return self._with(lambda t: t[index], hidden=hidden, step=step, vocab=columns[1] - columns[0])

    # what is not

    def is_real(self) -> bool:
        """Whether the real logits exist: these, or some that these are derived from."""
        return self.real is not None or (self.parent is not None and self.parent.is_real())

    def materialise(self, why: str) -> Tensor:
        """The real logits, made once. ``why`` is the operation that needs them."""
        if self.real is None:
            self.real = self._derived(why)
        return self.real

    def _derived(self, why: str) -> Tensor:
        if self.parent is None:
            self.check_hidden()
            return self.frame.real_logits(self.hidden, why)
        assert self.derive is not None
        return self.derive(self.parent.materialise(why))

    def check_hidden(self) -> None:
        """Refuse to go on where the hidden states were written to after the head was called: the logits would
        differ."""
        if self.version is not None and _version(self.source) != self.version:
            raise UnsupportedError(
                "The model changed its hidden states in place between its head and its loss, and deferred logits would "
                "see the change. Train it unpatched, or change that line to an out-of-place operation."
            )

    def write(self, why: str) -> Tensor:
        """The real logits to be written to. All that may alias them become real first, as they were before."""
        for record in list(self.frame.records):
            if record.source is self.source:
                record.materialise(why)
        return self.materialise(why)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.write("__setitem__")[_real(index, "__setitem__")] = _real(value, "__setitem__")

    def _as_real(self, name: str) -> Callable[..., Any]:
        """The Tensor method ``name`` of the real logits. In-place ones leave these deferred logits poisoned: real for
        good."""
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):

            def write(*args: Any, **kwargs: Any) -> DeferredLogits:
                real = self.write(name)
                args, kwargs = _real(args, name), _real(kwargs, name)
                self.real = getattr(real, name)(*args, **kwargs)
                return self

            return write

        def read(*args: Any, **kwargs: Any) -> Any:
            real = self.materialise(name)
            return getattr(real, name)(*_real(args, name), **_real(kwargs, name))

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
        record = _RECORDED.get(function)
        if record is not None:
            result = record(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = getattr(function, "__name__", str(function))
        if kwargs.get("inplace") or name.endswith("_") or isinstance(kwargs.get("out"), DeferredLogits):
            return _written(function, name, args, kwargs)
        return function(*_real(args, name), **_real(kwargs, name))


def _special(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return self._as_real(name)(*args)

    method.__name__ = name
    return method


# Python looks these up on the class, so that __getattr__ never sees them
_READING = (
    "abs sub rsub rtruediv floordiv rfloordiv mod pow rpow neg matmul rmatmul eq ne lt le gt ge and or xor invert "
    "bool float int index contains array"
)
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_IN_PLACE = frozenset(f"__i{name}__" for name in _OPERATORS)
for _name in (*(f"__{word}__" for word in _READING.split()), *_IN_PLACE):
    setattr(DeferredLogits, _name, _special(_name))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _version(tensor: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same_device(asked: torch.device, own: torch.device) -> bool:
    return asked.type == own.type and (asked.index is None or asked.index == own.index)


def _token_index(index: Any, ndim: int, vocab: int) -> tuple[Any, tuple[int, int]] | None:
    """``index`` as one of the hidden states and the columns of the vocabulary it keeps; None where it is no such
    thing."""
    items = index if isinstance(index, tuple) else (index,)
    taken, ellipsis = 0, None
    for position, item in enumerate(items):
        if item is None or isinstance(item, bool | DeferredLogits):
            return None
        if item is Ellipsis:
            if ellipsis is not None:
                return None
            ellipsis = position
        else:
            taken += item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1
    if taken > ndim:
        return None
    whole = slice(None)
    missing = (whole,) * (ndim - taken)
    items = (*items, *missing) if ellipsis is None else (*items[:ellipsis], *missing, *items[ellipsis + 1 :])
    last = items[-1] if items else None
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if not all(bound is None or isinstance(bound, int | torch.SymInt) for bound in (last.start, last.stop)):
        return None
    start, stop, _ = last.indices(vocab)
    return (*items[:-1], whole), (start, max(start, stop))


def _real(value: Any, why: str) -> Any:
    """``value`` with real logits for deferred ones, inside tuples, lists and dicts too."""
    if isinstance(value, DeferredLogits):
        return value.materialise(why)
    if type(value) in (tuple, list):
        return type(value)(_real(item, why) for item in value)
    if type(value) is dict:
        return {key: _real(item, why) for key, item in value.items()}
    return value


def _written(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that writes to one of its arguments; the deferred logits it wrote to are returned in its place."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, DeferredLogits):
            value.write(name)
    result = function(*_real(args, name), **_real(kwargs, name))
    for value in (*args, *kwargs.values()):
        if isinstance(value, DeferredLogits) and value.real is result:
            return value
    return result


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None or not isinstance(logits, DeferredLogits):
        return NotImplemented
    from .loss import CrossEntropyCall, consume

    return consume(logits, CrossEntropyCall(target, weight, ignore_index, reduction, label_smoothing))


def _product(left: Any, right: Any, **others: Any) -> Any:
    if others:
        return NotImplemented
    return left.mul(right) if isinstance(left, DeferredLogits) else right.mul(left)


def _sum(left: Any, right: Any, **others: Any) -> Any:
    if others:
        return NotImplemented
    return left.add(right) if isinstance(left, DeferredLogits) else right.add(left)


def _quotient(left: Any, right: Any, **others: Any) -> Any:
    return left.div(right, **others) if isinstance(left, DeferredLogits) and "out" not in others else NotImplemented


def _method(name: str) -> Callable[..., Any]:
    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(input, name)(*args, **kwargs)

    return call


_RECORDED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    torch.tanh: _method("tanh"),
    F.tanh: _method("tanh"),
    torch.reshape: _method("reshape"),
    torch.flatten: _method("flatten"),
    torch.clone: _method("clone"),
    torch.detach: _method("detach"),
    torch.numel: _method("numel"),
    torch.is_floating_point: _method("is_floating_point"),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _product),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _sum),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide), _quotient),
}
