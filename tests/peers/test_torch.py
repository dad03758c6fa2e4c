"""PyTorch's own: `F.cross_entropy` on logits, and `F.linear_cross_entropy` (torch >= 2.13) without and with chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

CASES = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"bias": True},
    {"class_weight": True},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "class_weight": True, "bias": True, "reduction": "sum"},
    {"label_smoothing": 0.2, "class_weight": True, "reduction": "none"},
]


def words(case: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in case.items()) or "plain"


def torch_arguments(x: Any, bias: bool = False, class_weight: bool = False, **arguments: Any) -> dict[str, Any]:
    if class_weight:
        arguments["weight"] = x.class_weight
    return arguments


@pytest.mark.parametrize("case", CASES, ids=words)
def test_cross_entropy_on_logits(compare: Callable[..., None], case: dict[str, Any]) -> None:
    def peer(x: Any) -> torch.Tensor:
        logits = F.linear(x.hidden, x.weight, x.bias if case.get("bias") else None)
        return F.cross_entropy(logits, x.labels, **torch_arguments(x, **case))

    compare(peer, **case)


linear = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"),
    reason=f"F.linear_cross_entropy needs torch 2.13, here is {torch.__version__}",
)


def linear_peer(case: dict[str, Any], options: Any = None) -> Callable[[Any], torch.Tensor]:
    def peer(x: Any) -> torch.Tensor:
        return F.linear_cross_entropy(
            x.hidden,
            x.weight,
            x.labels,
            linear_bias=x.bias if case.get("bias") else None,
            options=options,
            **torch_arguments(x, **case),
        )

    return peer


@linear
@pytest.mark.parametrize("case", CASES, ids=words)
def test_linear_cross_entropy(compare: Callable[..., None], case: dict[str, Any]) -> None:
    compare(linear_peer(case), **case)


# its chunks know no label smoothing: it warns and computes all logits
@linear
@pytest.mark.parametrize("case", [c for c in CASES if "label_smoothing" not in c], ids=words)
def test_linear_cross_entropy_in_chunks(compare: Callable[..., None], case: dict[str, Any]) -> None:
    compare(linear_peer(case, torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)), **case)
