"""nll and lse of the operator are differentiable beside its loss, together and each alone: parts of a head need that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loss_plugins.kernels import ops
from loss_plugins.kernels._rows import row_terms
from loss_plugins.testing import assert_within_reference_error, relative_error

# Triton's kernels take no float64
KINDS = [(name, dtype) for name in ops.backends() if name != "ascend" for dtype in (torch.float32, torch.bfloat16)]
KINDS.append(("torch", torch.float64))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, WIDTH, VOCAB = 33, 24, 131


def from_logits(leaves: list[Tensor], labels: Tensor, smoothing: float, softcap: float) -> tuple[Tensor, ...]:
    hidden, weight, bias = leaves
    z = hidden @ weight.T + bias
    z = softcap * torch.tanh(z / softcap) if softcap else z
    valid = labels != -100
    top = z.amax(1)
    picked = z.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return row_terms(
        top, (z - top[:, None]).exp().sum(1), picked, z.sum(1), labels, valid, None, smoothing, 1e-2, VOCAB
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backend", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("used", [(0, 1, 2), (1, 2), (1,), (2,)], ids=str)
@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, 0.0), (1.0, 3.0)])
def test_gradients(
    backend: str, device: str, used: tuple[int, ...], smoothing: float, softcap: float, dtype: Any
) -> None:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g).to(device, dtype) for shape in ((ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,))]
    labels = torch.randint(0, VOCAB, (ROWS,), generator=g).to(device)
    labels[::4] = -100
    # an upstream of 0 for the label's own part is what a label that lies elsewhere has
    upstream = [
        torch.randn(ROWS, generator=g).to(device) * (torch.arange(ROWS, device=device) % 3 > 0) for _ in range(3)
    ]

    def gradients(function: Any, kind: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(kind).requires_grad_() for t in tensors]
        out = function(leaves)
        sum((out[i] * upstream[i].to(out[i].dtype)).sum() for i in used).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def ours(leaves: list[Tensor]) -> Any:
        return ops.linear_ce(
            *leaves, labels, None, -100, 1.0, softcap, smoothing, 1e-2, dtype, False, False, 0.0, 0.0, False, 4096,
            backend, backend,
        )  # fmt: skip

    got = gradients(ours, dtype)
    oracle = gradients(lambda leaves: from_logits(leaves, labels, smoothing, softcap), torch.float64)
    if dtype != torch.bfloat16:
        for mine, wanted in zip(got, oracle, strict=True):
            assert relative_error(mine, wanted) < (1e-12 if dtype == torch.float64 else 1e-5)
        return
    same = gradients(lambda leaves: from_logits(leaves, labels, smoothing, softcap), dtype)
    for name, mine, wanted, like in zip(("dX", "dW", "db"), got, oracle, same, strict=True):
        assert_within_reference_error(name, mine, wanted, like)
