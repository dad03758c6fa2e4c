"""One step of a model, and how far two of them are apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tiny import seed_everything
from ..verification.distance import FLOOR
from ..verification.moment import loss_of

LOSS_BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}
GRADIENT_BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}


class Step(NamedTuple):
    """What one forward and backward gave: the output, its loss, and the gradient of each parameter that has one."""

    output: Any
    loss: Tensor
    gradients: dict[str, Tensor]


class Distance(NamedTuple):
    """``loss``: the absolute difference; ``gradient``: the largest relative one of any parameter's."""

    loss: float
    gradient: float


def step(model: nn.Module, inputs: dict[str, Any], backward: bool = True) -> Step:
    """One step from a fixed random state."""
    model.zero_grad(set_to_none=True)
    seed_everything(3)
    with torch.set_grad_enabled(backward):
        output = model(**inputs)
    loss = loss_of(output)
    if backward:
        loss.backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Step(output, loss.detach(), found)


def distance(ours: Step, stock: Step) -> Distance:
    """How far apart two steps are.

    Raises:
        AssertionError: one has a gradient where the other has none, or of another type.
    """
    assert ours.loss.shape == stock.loss.shape, f"the loss has shape {tuple(ours.loss.shape)}"
    missing = ours.gradients.keys() ^ stock.gradients.keys()
    assert not missing, f"only one of the two has a gradient for {sorted(missing)[:3]}"
    whole = sum(float(g.double().square().sum()) for g in stock.gradients.values()) ** 0.5
    worst = 0.0
    for key, gradient in stock.gradients.items():
        assert ours.gradients[key].dtype == gradient.dtype, f"the gradient of {key} is of another type"
        off = float((ours.gradients[key].double() - gradient.double()).norm())
        worst = max(worst, off / (float(gradient.double().norm()) + FLOOR * whole or 1.0))
    return Distance(float((ours.loss.double() - stock.loss.double()).abs()), worst)


def same(left: Any, right: Any, missing: list[tuple[int, ...]] | None = None, loss_bound: float = 0.0) -> bool:
    """Whether two outputs are the same to the bit: tensors in whatever holds them, also in a cache's layers.

    Args:
        left: Ours.
        right: Stock's.
        missing: Where it is given, None on the left is as good as any tensor on the right, whose shape is appended.
        loss_bound: How far 0-d tensors may differ, which are losses of sub-models.
    """
    if isinstance(right, Tensor):
        if left is None and missing is not None:
            missing.append(tuple(right.shape))
            return True
        if not isinstance(left, Tensor) or left.shape != right.shape:
            return False
        if right.dim() == 0 and loss_bound:
            return float((left.double() - right.double()).abs()) <= loss_bound
        return torch.equal(left.nan_to_num(), right.nan_to_num())
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k], missing, loss_bound) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(
            same(a, b, missing, loss_bound) for a, b in zip(left, right, strict=True)
        )
    for name in ("layers", "keys", "values", "self_attention_cache", "cross_attention_cache"):
        if not callable(getattr(left, name, len)) and not same(getattr(left, name), getattr(right, name, None)):
            return False
    return True
