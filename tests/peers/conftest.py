"""One way to compare with a peer: the same small problem, the float64 oracle between us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from loss_plugins import linear_cross_entropy
from loss_plugins.kernels import reference
from loss_plugins.strategies import STRATEGIES
from loss_plugins.testing import assert_within_reference_error, relative_error

N, H, V = 48, 32, 160
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Inputs:
    """Leaves of one computation. A third of the labels is ignored, the first and the last class occur."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor  # (V,)
    labels: Tensor  # (N,)
    class_weight: Tensor  # (V,)

    @classmethod
    def draw(cls) -> Inputs:
        labels = torch.randint(0, V, (N,))
        labels[:3] = torch.tensor([0, V - 1, -100])
        labels[torch.rand(N) < 0.3] = -100
        drawn = (torch.randn(N, H), torch.randn(V, H) * 0.3, torch.randn(V), labels, torch.rand(V) + 0.5)
        return cls(*(tensor.to(DEVICE) for tensor in drawn))

    def leaves(self, dtype: torch.dtype) -> Inputs:
        """Copies that gradients can be asked of."""
        copies = (t.to(dtype, copy=True).requires_grad_() for t in (self.hidden, self.weight, self.bias))
        return Inputs(*copies, self.labels, self.class_weight.to(dtype))


Loss = Callable[[Inputs], Tensor]


def results(loss: Loss, inputs: Inputs, upstream: Tensor | None) -> dict[str, Tensor]:
    """The loss and its gradients. What comes back to it is not 1, so that a loss that ignores it is found."""
    value = loss(inputs)
    value.backward(torch.full_like(value, 3.0) if upstream is None else upstream.to(value.dtype))
    named = {
        "loss": value.detach(),
        "hidden": inputs.hidden.grad,
        "weight": inputs.weight.grad,
        "bias": inputs.bias.grad,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


@pytest.fixture
def compare() -> Callable[..., None]:
    """``compare(peer, **arguments)``: the peer computes our function of those arguments, and we are no less exact.

    The peer is called with `Inputs`. ``bias`` and ``class_weight`` are given as True. The oracle says how exact each
    is: the peer's own error, and never a number typed in here, bounds that of every strategy.
    """

    def run(peer: Loss, *, bias: bool = False, class_weight: bool = False, **arguments: Any) -> None:
        inputs = Inputs.draw()
        upstream = torch.rand(N, device=DEVICE) if arguments.get("reduction") == "none" else None

        def ours(function: Callable[..., Tensor], **more: Any) -> Loss:
            return lambda x: function(
                x.hidden,
                x.weight,
                x.labels,
                bias=x.bias if bias else None,
                class_weight=x.class_weight if class_weight else None,
                **arguments,
                **more,
            )

        oracle = results(ours(reference.linear_cross_entropy), inputs.leaves(torch.float64), upstream)
        theirs = results(peer, inputs.leaves(torch.float32), upstream)
        assert oracle.keys() == theirs.keys()
        for name, exact in oracle.items():
            # a hundred times the rounding of one operation: the peer computes this function and no other
            assert relative_error(theirs[name], exact) < 100 * torch.finfo(torch.float32).eps, f"{name} of the peer"
        for strategy in STRATEGIES.builtin():
            actual = results(ours(linear_cross_entropy, strategy=strategy), inputs.leaves(torch.float32), upstream)
            assert oracle.keys() == actual.keys()
            for name, exact in oracle.items():
                assert_within_reference_error(f"{name} of {strategy}", actual[name], exact, theirs[name])

    return run
