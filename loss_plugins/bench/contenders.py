"""Every way to compute the loss that can be imported here: ours, torch's own, and other packages'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..strategies import STRATEGIES, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def contenders() -> tuple[dict[str, Loss], dict[str, str]]:
    """(name -> loss of (hidden, weight, labels), name -> why it is not here)."""
    found: dict[str, Loss] = {name: _ours(name) for name in STRATEGIES.names()}
    missing: dict[str, str] = {}
    for name, make in (
        ("torch.compile", _compiled),
        ("torch F.linear_cross_entropy", _torch_fused),
        ("Liger FLCE", _liger),
        ("Liger FLCE CuTe-DSL", _liger_cute),
        ("Apple cce", lambda: _apple("cce")),
        ("Apple cce_exact", lambda: _apple("cce_exact")),
        ("Apple cce_kahan_full_c", lambda: _apple("cce_kahan_full_c")),
    ):
        try:
            found[name] = make()
        except Exception as error:  # a peer that cannot be imported is reported, whatever it raises
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return found, missing


def _ours(strategy: str) -> Loss:
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, strategy=strategy)


def _naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def _compiled() -> Loss:
    return torch.compile(_naive)


def _torch_fused() -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=options)


def _liger() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    return lambda hidden, weight, labels: _first(Function.apply(hidden, weight, labels))


def _liger_cute() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function as Function,
    )

    return lambda hidden, weight, labels: _first(Function.apply(hidden, weight, labels))


def _apple(impl: str) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as apple

    return lambda hidden, weight, labels: apple(hidden, weight, labels, impl=impl)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
