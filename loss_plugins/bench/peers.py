"""Other packages' losses as functions of (hidden, weight, labels). Nothing is imported before a peer is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedError


@dataclass(frozen=True)
class Peer:
    package: str
    """Its name for pip."""
    load: Callable[[], Callable[[Tensor, Tensor, Tensor], Tensor]]


def package_versions(names: list[str]) -> dict[str, str]:
    """Installed versions of the packages behind these peers."""
    found = {}
    for package in sorted({PEERS[name].package for name in names if name in PEERS}):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def _compiled() -> Any:
    # sizes are compiled in: a graph for any size is slower, and one run measures several
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return torch.compile(_eager, dynamic=False)


def _torch_fused() -> Any:
    options = torch.nn.LinearCrossEntropyOptions()  # torch >= 2.13
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=options)


def _liger() -> Any:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    return lambda hidden, weight, labels: _first(Function.apply(hidden, weight, labels))


def _liger_cute() -> Any:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function as Function,
    )

    return lambda hidden, weight, labels: _first(Function.apply(hidden, weight, labels))


def _liger_scaled() -> Any:
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function as Function,
    )

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        each = _first(Function.apply(hidden, weight, labels))
        return each.sum() / (labels != -100).sum()

    return loss


def _apple(preset: str) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    if preset == "filter=off":
        return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, filter_eps=None)
    if preset != "cce":
        try:
            from cut_cross_entropy.cce_utils import CCEPresets
        except ImportError as error:
            raise UnsupportedError(f"the installed release has no preset {preset}; newer ones do") from error
        if preset not in CCEPresets.names:
            raise UnsupportedError(f"the installed release has no preset {preset}")
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, impl=preset)


class _Trunk(nn.Module):
    """The least that TRL's `add_fused_lm_head` needs of a model: hidden states that are given, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=SimpleNamespace)
        self.head = SimpleNamespace(weight=None, bias=None)

    def base_model(self, hidden: Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    def get_output_embeddings(self) -> Any:
        return self.head


def _trl() -> Any:
    from trl.trainer.utils import add_fused_lm_head  # TRL >= 1.14

    model: Any = _Trunk()
    add_fused_lm_head(model)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        model.head.weight = weight
        result = model(hidden[None], shift_labels=labels[None], fused_lm_head=True).loss
        model.head.weight = None
        return result

    return loss


def _quack(scaled: bool) -> Any:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy  # type: ignore[import-not-found]

    return lambda hidden, weight, labels: chunked_linear_cross_entropy(hidden, weight, labels, use_scaled_exp=scaled)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


_PRESETS = ("cce", "cce_kahan", "cce_kahan_full_c", "cce_kahan_full_e", "cce_kahan_full_c_full_e", "cce_exact")

PEERS = {
    "torch eager": Peer("torch", lambda: _eager),
    "torch.compile": Peer("torch", _compiled),
    "torch F.linear_cross_entropy": Peer("torch", _torch_fused),
    "Liger FLCE": Peer("liger-kernel", _liger),
    "Liger FLCE CuTe-DSL": Peer("liger-kernel", _liger_cute),
    "Liger scaled CuTe-DSL": Peer("liger-kernel", _liger_scaled),
    **{
        f"Apple {name}": Peer("cut-cross-entropy", lambda name=name: _apple(name))  # type: ignore[misc]
        for name in _PRESETS
    },
    "Apple cce filter=off": Peer("cut-cross-entropy", lambda: _apple("filter=off")),
    "TRL fused head": Peer("trl", _trl),
    "quack chunked": Peer("quack-kernels", lambda: _quack(False)),
    "quack scaled-exp": Peer("quack-kernels", lambda: _quack(True)),
}
