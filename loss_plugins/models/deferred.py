"""Deferred logits: what a patched head returns while labels are given.

A stand-in remembers the hidden states and what the model does to "its logits": casts, scaling, tanh, slices, views.
``torch.nn.functional.cross_entropy`` meets it through ``__torch_function__`` and computes the loss without logits.
Anything else makes the real logits, replays what was recorded, and goes on with those.

It is no Tensor subclass, since torch.compile cannot trace one that refuses storage; so ``isinstance(x, Tensor)`` is
False.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError
from .record import Step, apply
from .stand_in import RECORDED, StandIn, by_method

if TYPE_CHECKING:
    from .frame import Frame
    from .head import Head


LOWEST = -1e30
"""Adding this or less to a logit leaves nothing of it, to the bit."""


class DeferredLogits(StandIn):
    """Logits of shape ``[..., vocab]`` that do not exist.

    Args:
        frame: The forward that they belong to.
        head: What would make them.
        hidden: What the head was given, shape ``[..., H]``, as the recorded views and slices leave it.
        vocab: Width that the logits would have now.
        dtype: Type that they would have now.
        steps: Operations on single logits, in order.
        parent: What these logits are derived from, with ``derive``, which makes them from the parent's real logits.
    """

    def __init__(
        self,
        frame: Frame,
        head: Head,
        hidden: Tensor,
        vocab: int,
        dtype: torch.dtype,
        steps: tuple[Step, ...] = (),
        parent: DeferredLogits | None = None,
        derive: Callable[[Tensor], Tensor] | None = None,
        detached: bool = False,
    ) -> None:
        self.frame, self.head, self.hidden, self.vocab = frame, head, hidden, vocab
        self.dtype, self.steps = dtype, steps
        self.parent, self.derive, self.detached = parent, derive, detached
        self.version: int | None = _version(hidden) if parent is None else parent.version
        self.sources: tuple[Tensor, ...] = (hidden,) if parent is None else parent.sources
        self.real: Tensor | None = None
        if parent is not None and parent.is_real():
            # aliasing as in torch: a copy made now must not see what is written later
            self.real = self.made("derived")
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
        return self.head.device(self.hidden)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def requires_grad(self) -> bool:
        if self.detached or not torch.is_grad_enabled():
            return False
        return self.hidden.requires_grad or any(p.requires_grad for p in self.head.core.parameters())

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
        return type(self)(
            self.frame,
            self.head,
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

    def transpose(self, dim0: int, dim1: int) -> Any:
        first, second, last = dim0 % self.ndim, dim1 % self.ndim, self.ndim - 1
        if last in (first, second):
            return self._as_real("transpose")(dim0, dim1)
        return self._with(lambda t: t.transpose(first, second), hidden=self.hidden.transpose(first, second))

    def is_contiguous(self) -> bool:
        return self.hidden.is_contiguous()

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        from .log_probs import DeferredLogProbs

        if dim % self.ndim != self.ndim - 1:
            return self._as_real("log_softmax")(dim, dtype=dtype)
        return DeferredLogProbs(self if dtype is None else self.to(dtype))

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

    # the real logits

    def is_real(self) -> bool:
        return self.real is not None or (self.parent is not None and self.parent.is_real())

    def made(self, why: str) -> Tensor:
        if self.parent is None:
            self.check_hidden()
            return self.frame.real_logits(self.head, self.hidden, why)
        assert self.derive is not None
        return self.derive(self.parent.materialise(why))

    def check_hidden(self) -> None:
        """Refuse to go on where the hidden states were written to after the head was called: the logits would
        differ."""
        if self.version is not None and _version(self.sources[0]) != self.version:
            raise UnsupportedError(
                "The model changed its hidden states in place between its head and its loss, and deferred logits would "
                "see the change. Train it unpatched, or change that line to an out-of-place operation."
            )

    def __setitem__(self, index: Any, value: Any) -> None:
        if not self._masked(index, value):
            super().__setitem__(index, value)

    def _masked(self, index: Any, value: Any) -> bool:
        """Record a mask over columns, which is adding the lowest number to them: nothing is left of the logits there.
        Only where nothing else can see it: no other stand-in was made of these logits."""
        others = [r for r in self.frame.records if r is not self and any(s is self.sources[0] for s in r.sources)]
        if others or self.is_real() or not isinstance(value, float) or not -math.inf < value <= LOWEST:
            return False
        items = index if isinstance(index, tuple) else (index,)
        if not items or len(items) > self.ndim or (items[0] is not Ellipsis and len(items) != self.ndim):
            return False
        if any(not (item is Ellipsis or (isinstance(item, slice) and item == slice(None))) for item in items[:-1]):
            return False
        mask = torch.zeros(self.vocab, dtype=self.dtype, device=self.device)
        mask[items[-1]] = value
        before = DeferredLogits(self.frame, self.head, self.hidden, self.vocab, self.dtype, self.steps)
        self.frame.records.pop()  # nobody else will ever see it
        before.parent, before.derive = self.parent, self.derive
        step = Step("add", mask)
        self.parent, self.derive, self.steps = before, lambda t: apply(t, step), (*self.steps, step)
        return True


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
    if others or not (isinstance(left, DeferredLogits) or isinstance(right, DeferredLogits)):
        return NotImplemented
    return left.mul(right) if isinstance(left, DeferredLogits) else right.mul(left)


def _sum(left: Any, right: Any, **others: Any) -> Any:
    if others or not (isinstance(left, DeferredLogits) or isinstance(right, DeferredLogits)):
        return NotImplemented
    return left.add(right) if isinstance(left, DeferredLogits) else right.add(left)


def _quotient(left: Any, right: Any, **others: Any) -> Any:
    return left.div(right, **others) if isinstance(left, DeferredLogits) and "out" not in others else NotImplemented


def _log_softmax(
    input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, **others: Any
) -> Any:
    if not isinstance(input, DeferredLogits) or dim is None or others:
        return NotImplemented
    return input.log_softmax(dim, dtype)


def _torch_log_softmax(input: Any, dim: int, dtype: torch.dtype | None = None, **others: Any) -> Any:
    return _log_softmax(input, dim, dtype=dtype, **others)


def _stack(tensors: Any, dim: int = 0, **others: Any) -> Any:
    from .stacked import StackedLogits

    parts = list(tensors)
    if others or not all(isinstance(part, DeferredLogits) and not part.is_real() for part in parts):
        return NotImplemented
    axis = dim % (parts[0].ndim + 1)
    if axis == parts[0].ndim or any(part.shape != parts[0].shape for part in parts):
        return NotImplemented
    return StackedLogits(parts, axis)


RECORDED.update(
    {
        F.cross_entropy: _cross_entropy,
        torch.stack: _stack,
        F.log_softmax: _log_softmax,
        torch.log_softmax: _torch_log_softmax,
        **{function: by_method("tanh") for function in (torch.tanh, F.tanh)},
        **{function: by_method("transpose") for function in (torch.transpose, torch.swapaxes)},
        **{
            getattr(torch, name): by_method(name)
            for name in ("reshape", "flatten", "clone", "detach", "numel", "is_floating_point")
        },
        **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _product),
        **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _sum),
        **dict.fromkeys((torch.div, torch.divide, torch.true_divide), _quotient),
    }
)
