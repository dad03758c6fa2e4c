"""Liger Kernel's fused linear cross-entropy, on a GPU or under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="liger-kernel needs Triton, which is not installed")
fused = pytest.importorskip(
    "liger_kernel.ops.fused_linear_cross_entropy", reason="liger-kernel is not installed (extra: peers)"
)

CASES = [
    {},
    {"reduction": "sum"},
    {"bias": True},
    {"class_weight": True},
    {"label_smoothing": 0.2},
    {"softcap": 3.0},
    {"z_loss": 1e-2},
    {"z_loss": 1e-2, "label_smoothing": 0.2, "bias": True},
    {"softcap": 3.0, "z_loss": 1e-2, "label_smoothing": 0.2, "bias": True},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
def test_fused_linear_cross_entropy(compare: Callable[..., None], case: dict[str, Any]) -> None:
    if not torch.cuda.is_available() and {"softcap", "class_weight"} & case.keys():
        pytest.skip("Liger's kernel calls .to() on a number there, which only Triton's compiler understands")

    def peer(x: Any) -> torch.Tensor:
        result = fused.LigerFusedLinearCrossEntropyFunction.apply(
            x.hidden,
            x.weight,
            x.labels,
            x.bias if case.get("bias") else None,
            x.class_weight if case.get("class_weight") else None,
            -100,
            case.get("z_loss", 0.0),
            case.get("label_smoothing", 0.0),
            case.get("reduction", "mean"),
            case.get("softcap"),
        )
        return result[0] if isinstance(result, tuple) else result

    compare(peer, **case)
