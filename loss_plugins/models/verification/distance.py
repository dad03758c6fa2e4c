"""How far two steps of a model are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...device import WITHOUT_FLOAT64

FLOOR = 1e-3
"""Part of the whole gradient's norm below which a parameter's own gradient is rounding, for its relative error."""
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative distance of sums of many products that differ only in their order."""
TIMES = 3.0
"""How many times stock's own error ours may be away from stock: that error itself, and twice it for ours."""
PLAUSIBLE = {torch.float64: 1e-8, torch.float32: 1e-3}
COARSE = 0.25
"""How far stock's gradients may be from those with a wider head: beyond, something else than rounding differs. The
latter is for 16-bit types and TF32."""
FILTERED = 2e-2
"""What cce's filter may leave out of a gradient, in 16-bit types, where it decides that itself."""


class Apart(NamedTuple):
    """Relative distances of a step from another.

    Attributes:
        loss: Of the loss.
        whole: Of all gradients together, as one vector.
        gradients: Of each parameter's gradient, the norm of which counts as at least a thousandth of all.
        missing: Parameters for which only one of the two has a gradient.
    """

    loss: float
    whole: float
    gradients: dict[str, float]
    missing: tuple[str, ...] = ()


class Taken(NamedTuple):
    """What a step gave: its loss, and the gradients of the parameters that got one."""

    loss: Tensor
    gradients: dict[str, Tensor]


def bad_gradients(taken: Taken) -> Tensor:
    """How many parameters have a gradient with an inf or a NaN, a 0-d float32 tensor on the loss's device."""
    finite = [gradient.isfinite().all().to(taken.loss.device) for gradient in taken.gradients.values()]
    return (~torch.stack(finite)).float().sum() if finite else torch.zeros((), device=taken.loss.device)


def apart(ours: Taken, stock: Taken, names: Iterable[str], reduce: Callable[[Tensor], Tensor] | None = None) -> Apart:
    """How far ``ours`` is from ``stock``. Waits for the device.

    Args:
        ours: A step.
        stock: The step that it is measured against.
        names: All parameters that are trained, the same in all processes.
        reduce: Sum of a tensor over all processes, where there are several; each brings its own losses and its part
            of the gradients.
    """
    names = list(names)
    is_narrow = ours.loss.device.type in WITHOUT_FLOAT64
    off = _off32(ours, stock) if is_narrow else (ours.loss.double() - stock.loss.double()).abs()
    device, wide = off.device, off.dtype
    rows = [torch.stack([off, stock.loss.to(wide).abs(), off.new_zeros(()), off.new_zeros(())])]
    rows += [_sums(ours.gradients.get(name), stock.gradients.get(name), device, wide) for name in names]
    table = torch.stack(rows)
    sums = (table if reduce is None else reduce(table)).tolist()
    (loss_off, loss_size, _, _), gradients = sums[0], sums[1:]
    whole = math.sqrt(sum(size for _, size, _, _ in gradients))
    whole_off = math.sqrt(sum(off for off, _, _, _ in gradients))
    return Apart(
        loss=_ratio(loss_off, loss_size),
        whole=_ratio(whole_off, whole),
        gradients={
            name: _ratio(math.sqrt(off), math.sqrt(size) + FLOOR * whole)
            for name, (off, size, _, _) in zip(names, gradients, strict=True)
        },
        missing=tuple(n for n, (_, _, ours_, theirs) in zip(names, gradients, strict=True) if ours_ != theirs),
    )


def _off32(ours: Taken, stock: Taken) -> Tensor:
    return (ours.loss.float() - stock.loss.float()).abs()


def _sums(ours: Tensor | None, stock: Tensor | None, device: torch.device, wide: torch.dtype) -> Tensor:
    """Squares of the difference and of stock's gradient, and who has one: shape ``[4]``."""
    squares = [0.0, 0.0, float(ours is not None), float(stock is not None)]
    if ours is None or stock is None:
        one = stock if ours is None else ours
        row = torch.tensor(squares, device=device, dtype=wide)
        if one is not None and one.numel():
            row[:2] = torch.linalg.vector_norm(one.float()).to(device, wide) ** 2
        return row
    stock = stock.to(ours.device)
    low = ours.dtype if ours.dtype.itemsize > 4 else torch.float32
    row = torch.tensor(squares, device=device, dtype=wide)
    row[0] = torch.linalg.vector_norm(ours.to(low) - stock.to(low)).to(device, wide) ** 2
    row[1] = torch.linalg.vector_norm(stock.to(low)).to(device, wide) ** 2
    return row


def _ratio(off: float, size: float) -> float:
    return off / size if size else off


class Tolerance(NamedTuple):
    """How far ours may be from stock's.

    Attributes:
        loss: For the loss.
        gradient: For a parameter's gradient.
        own: How far stock itself is from stock with its head in the next wider type; None where that was not run.
        words: Where that comes from.
    """

    loss: float
    gradient: float
    own: Apart | None
    words: str

    def for_loss(self) -> float:
        return self.loss + (TIMES * self.own.loss if self.own is not None else 0.0)

    def for_gradient(self, name: str) -> float:
        if self.own is None:
            return self.gradient
        return self.gradient + TIMES * max(self.own.gradients.get(name, 0.0), self.own.whole)

    def with_filter(self) -> Tolerance:
        """The same where a strategy leaves out of the gradients what is negligible."""
        return self._replace(gradient=self.gradient + FILTERED, words=f"{self.words}; {FILTERED:g} for cce's filter")

    def exceeded(self, found: Apart) -> list[tuple[str, float, float]]:
        """(what, distance, allowed) of all that is too far, the worst first. NaN is too far."""
        pairs = [("loss", found.loss, self.for_loss())]
        pairs += [(name, off, self.for_gradient(name)) for name, off in found.gradients.items()]
        pairs = [(name, off, allowed) for name, off, allowed in pairs if not off <= allowed]
        pairs += [(name, math.inf, 0.0) for name in found.missing if all(name != other for other, _, _ in pairs)]
        return sorted(pairs, key=_badness, reverse=True)

    def worst(self, found: Apart) -> tuple[str, float, float]:
        """The gradient that is nearest to what is allowed, or furthest beyond: (name, distance, allowed)."""
        pairs = [(name, off, self.for_gradient(name)) for name, off in found.gradients.items()]
        return max(pairs, key=_badness, default=("", 0.0, self.gradient))


def _badness(entry: tuple[str, float, float]) -> float:
    _, off, allowed = entry
    return math.inf if math.isnan(off) or not allowed else off / allowed


def tolerance(
    dtype: torch.dtype, own: Apart | None = None, yardstick: str = "", tensor_floats: bool = False
) -> Tolerance:
    """What rounding in ``dtype`` explains, and where it was measured, a multiple of stock's own error.

    Args:
        dtype: What the logits are computed in.
        own: Stock's distance from itself with its head in a wider type.
        yardstick: That type, or why there is none.
        tensor_floats: Whether products of float32 numbers are rounded to TF32 first.
    """
    name = str(dtype).removeprefix("torch.")
    exact = dtype in EXACT and not (tensor_floats and dtype is torch.float32)
    if own is not None and not own.whole <= (PLAUSIBLE[dtype] if exact else COARSE):
        yardstick = f"with head and loss in {yardstick} it differs by {own.whole:.0e}, which is no rounding"
        own = None
    if exact:
        loss = gradient = EXACT[dtype]
        if (
            own is None and dtype is torch.float32
        ):  # a softmax over a large vocabulary loses more, and layers amplify it
            loss, gradient = 10 * loss, 100 * gradient
    else:
        step = torch.finfo(dtype).eps if dtype not in EXACT else 2.0**-10
        loss, gradient = step / 2, 8 * step
        if own is None:
            loss, gradient = 2 * loss, 2 * gradient
        name += "" if dtype not in EXACT else " in TF32"
    floor = (
        f"{loss:.0e} for the loss and {gradient:.0e} for gradients ({name})"
        if loss != gradient
        else f"{loss:.0e} ({name})"
    )
    if own is None:
        return Tolerance(loss, gradient, None, f"{floor}; stock's own error was not measured: {yardstick}")
    words = f"{floor}, and {TIMES:g} times stock's own distance from itself with head and loss in {yardstick}"
    return Tolerance(loss, gradient, own, words)
