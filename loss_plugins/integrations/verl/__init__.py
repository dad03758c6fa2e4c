"""verl: a module for `external_lib` that calls `register`, and `use_fused_kernels: true` in its configuration.

verl's switch puts a forward on the model that hands hidden states and the head's weight to one class, which returns the
log-probability and the entropy of each token. That class's work is done by a loss strategy then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...config import LossConfig
from ...errors import UnsupportedError

ORIGINAL = "_loss_plugin_original"


def register(loss_config: LossConfig | Mapping[str, Any] | str | None = None) -> None:
    """Let verl's fused head (`fused_kernel_options: {impl_backend: torch}`) compute with a strategy in this process.

    Doing it again with another config replaces the first; `unregister` takes it back.

    Args:
        loss_config: A strategy's name, a `LossConfig` or a mapping of its fields. Default: `auto`.

    Raises:
        ConfigError: a setting is wrong, or adds something to a loss that verl computes itself.
    """
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from ..hf.keys import checked_config
    from ..hf.log_probs import refuse_additions

    config = LossConfig.of(loss_config)
    checked_config({name: getattr(config, name) for name in config.names()})
    refuse_additions(config, "verl")
    original = FusedLinearForPPO.__dict__.get(ORIGINAL, FusedLinearForPPO.forward)
    setattr(FusedLinearForPPO, ORIGINAL, original)
    FusedLinearForPPO.forward = _forward(original, config)


def unregister() -> None:
    """Give verl its own function back. Doing it again does nothing."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    if ORIGINAL in FusedLinearForPPO.__dict__:
        FusedLinearForPPO.forward = FusedLinearForPPO.__dict__[ORIGINAL]
        delattr(FusedLinearForPPO, ORIGINAL)


def _forward(original: Callable[..., Any], config: LossConfig) -> Callable[..., tuple[Tensor, Tensor]]:
    from ...strategies import linear_cross_entropy_stats

    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        output = linear_cross_entropy_stats(
            hidden_states,
            vocab_weights,
            input_ids.to(torch.int64),
            fields=("entropy",),
            strategy=config.loss_strategy,
            options=config.loss_options,
            reduction="none",
            logit_scale=1.0 / temperature,
        )
        assert output.entropy is not None
        entropy: Tensor = _WithoutGradient.apply(output.entropy.to(hidden_states.dtype), hidden_states)
        return -output.loss, entropy

    return forward


class _WithoutGradient(torch.autograd.Function):
    """A value whose gradient would be a wrong zero, if it were let through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        if grad is None:
            return None, None
        raise UnsupportedError(
            "entropy_coeff is not 0, and no loss strategy computes the gradient of an entropy. Set entropy_coeff: 0, "
            "or leave loss_plugins out of external_lib."
        )
