"""One loss and its gradients, as a user asks for them, beside the float64 oracle; for the files of this folder."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from loss_plugins import linear_cross_entropy
from loss_plugins.kernels import reference
from loss_plugins.testing import assert_within_reference_error

VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "naive": ("naive", None),
    "chunked": ("chunked", None),
    "chunked, chunks": ("chunked", {"rows": 65}),
    "flce": ("flce", None),
    "flce, chunks": ("flce", {"rows": 130}),
    "cce": ("cce", None),
    "cce, no filter": ("cce", {"filter": "off"}),
    "cce, few bits": ("cce", {"filter": "off", "workspace_mb": 2**-10}),  # of dX's sums
}
"""Name: strategy and options; ``rows`` of half logits are what the workspace then holds, so that a small loss has
several chunks too. flce's kernel takes multiples of 128."""

OWN = [name for name in VARIANTS if name.startswith(("flce", "cce"))]
"""Those with kernels of their own."""


class Inputs(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    labels: Tensor  # (N,)


class Step(NamedTuple):
    loss: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def inputs(
    rows: int,
    width: int,
    vocab: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    ignored: int = 4,
    seed: int = 0,
) -> Inputs:
    """Logits with a standard deviation of 2; every ``ignored``-th label but the first is ignored."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, device=device)
    weight = torch.randn(vocab, width, generator=generator, device=device) * (2 / width**0.5)
    labels = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    if ignored:
        labels[1::ignored] = -100
    return Inputs(hidden.to(dtype), weight.to(weight_dtype or dtype), labels)


def loss_of(variant: str, hidden: Tensor, weight: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    """The loss as a variant computes it, by the Triton kernels where it has some; ``auto`` is one too."""
    strategy, given = VARIANTS.get(variant, (variant, None))
    options = dict(given or {})
    if strategy in ("flce", "cce"):
        options["kernels"] = "triton"
    if "rows" in options:
        options["workspace_mb"] = options.pop("rows") * weight.shape[0] * 2 / (1 << 20)
    return linear_cross_entropy(hidden, weight, labels, strategy=strategy, options=options, **settings)


def step(variant: str, given: Inputs, upstream: float | Tensor = 1.0, **settings: Any) -> Step:
    """Forward and backward on fresh leaves."""
    hidden, weight = given.hidden.detach().requires_grad_(), given.weight.detach().requires_grad_()
    loss = loss_of(variant, hidden, weight, given.labels, **settings)
    # an expanded gradient without strides is what .sum() sends back
    incoming = torch.as_tensor(upstream, dtype=loss.dtype, device=loss.device).expand(loss.shape)
    return Step(loss.detach(), *torch.autograd.grad(loss, (hidden, weight), incoming))


def oracle(given: Inputs, upstream: float | Tensor = 1.0, **settings: Any) -> Step:
    """The same in float64, from the formula."""
    hidden, weight = given.hidden.double().requires_grad_(), given.weight.double().requires_grad_()
    loss = reference.linear_cross_entropy(hidden, weight, given.labels, **settings)
    incoming = torch.as_tensor(upstream, dtype=loss.dtype, device=loss.device).expand(loss.shape)
    return Step(loss.detach(), *torch.autograd.grad(loss, (hidden, weight), incoming))


def assert_right(variant: str, given: Inputs, got: Step | None = None, **settings: Any) -> None:
    """A step is as near to the oracle as all logits in plain torch are, and the gradients have their tensors' types."""
    got = step(variant, given, **settings) if got is None else got
    want, same = oracle(given, **settings), step("naive", given, **settings)
    assert (got.d_hidden.dtype, got.d_weight.dtype) == (given.hidden.dtype, given.weight.dtype)
    assert_within_reference_error("loss", got.loss, want.loss, same.loss)
    for name, actual, expected, plain in zip(("dX", "dW"), got[1:], want[1:], same[1:], strict=True):
        # exp(z - lse) inherits the rounding of the log-sum-exp, which float32 does not hide
        rounded = 8 * expected if actual.dtype == torch.float32 else None
        assert_within_reference_error(name, actual, expected, plain, rounded)
    assert (got.d_hidden[given.labels == -100] == 0).all()


def same_bits(a: Step, b: Step) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
