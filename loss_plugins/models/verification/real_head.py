"""Stock's way through a patched model, looked at: where its head is called, with what, and in a wider type if asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...device import WITHOUT_FLOAT64
from ..frame import Frame, Scope, calling_for_real
from ..head import Head
from ..swap import JOB

if TYPE_CHECKING:
    from ..patch import PatchHandle

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


class HeadCall(NamedTuple):
    """One call of the head: sizes, the type of its logits, the device, and whether a plain weight makes them."""

    rows: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    device: torch.device
    is_plain: bool


class RealHead(Frame):
    """A forward of a patched model whose head returns real logits: put in force, then the model is called.

    Args:
        handle: Of the model.
        wide: The type in which the head's weight makes the logits; its own, if None.
        before: Called when the head is first called.
        after: Called when the gradient of a head's input is there.
    """

    def __init__(
        self,
        handle: PatchHandle,
        wide: torch.dtype | None = None,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        model: nn.Module = handle.model
        super().__init__(model, handle, handle.heads_now(model), Scope(), None)
        self.wide, self.before, self.after = wide, before, after
        self.calls: list[HeadCall] = []

    def defer(self, head: Head, hidden: Tensor) -> Any:
        """Not deferred at all."""
        dtype, width = hidden.dtype, head.width(hidden)
        if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(hidden.device.type)
        if self.before is not None and not self.calls:
            self.before()
        rows = hidden.numel() // max(1, hidden.shape[-1])
        self.calls.append(HeadCall(rows, hidden.shape[-1], width, dtype, hidden.device, head.way == "weight"))
        after = self.after
        if after is not None and hidden.requires_grad:
            hidden.register_hook(lambda gradient: after())
        with calling_for_real():
            if self.wide is None:
                return head.outer(hidden)
            return head.outer(hidden, **{JOB: WideLogits(head, self.wide)})


class WideLogits:
    """A head's logits in a wider type: by its own forward, with the weight that it has while it is called."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        self.head, self.core, self.dtype = head, head.core, dtype

    def run(self, hidden: Tensor) -> Tensor:
        found = self.head.weight_and_bias(self.head.width(hidden))
        assert not isinstance(found, str), found
        wide = {name: t.to(self.dtype) for name, t in zip(("weight", "bias"), found, strict=True) if t is not None}
        with torch.autocast(hidden.device.type, enabled=False), _in_place_of_its_own(self.core, wide):
            # not its __call__, whose hooks have run: it is being called already
            logits: Tensor = type(self.core).forward(self.core, hidden.to(self.dtype))
        return logits.as_subclass(StaysDouble) if self.dtype is torch.float64 else logits


@contextlib.contextmanager
def _in_place_of_its_own(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Inside, ``module`` has these parameters. FSDP1 keeps gathered ones as plain attributes."""
    places: dict[str, dict[str, Any]] = {
        name: module.__dict__ if name in module.__dict__ else module._parameters for name in tensors
    }
    before = {name: place[name] for name, place in places.items()}
    for name, place in places.items():
        place[name] = tensors[name]
    try:
        yield
    finally:
        for name, place in places.items():
            place[name] = before[name]


class StaysDouble(Tensor):
    """Logits that models cannot round to float32: their softmax over a large vocabulary is stock's largest error."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0]
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        result = super().__torch_function__(func, types, args, kwargs)
        # a loss leaves the model, and DDP and the Trainer write to it
        return result.as_subclass(Tensor) if isinstance(result, cls) and not result.dim() else result


def yardstick_of(calls: list[HeadCall], limit: int) -> torch.dtype | str:
    """The type in which the head can be run to see stock's own error, or why it cannot.

    Args:
        calls: Those of the forward in question.
        limit: Bytes that may be taken for it.
    """
    if not calls:
        return "its head was not called"
    if not all(call.is_plain for call in calls):
        return "its head is no plain linear layer"
    wide = WIDER.get(calls[0].dtype)
    if wide is None:
        return f"there is no type wider than {str(calls[0].dtype).removeprefix('torch.')}"
    if wide is torch.float64 and calls[0].device.type in WITHOUT_FLOAT64:
        return f"{calls[0].device.type} has no float64"
    needed = wide.itemsize * sum(2 * c.vocab * c.hidden + 4 * c.rows * c.vocab for c in calls)
    if needed > limit:
        return f"its head in {str(wide).removeprefix('torch.')} would take {needed >> 20} MiB"
    return wide
