"""What to say when a training step runs out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...device import DeviceProfile
from ...diagnostics.memory import MIB
from ...errors import LossPluginError
from ...strategies import STRATEGIES, Problem


def memory_hint(model: Any, inputs: Mapping[str, Any], strategy: str) -> str:
    """What each strategy's loss takes for this batch, as a note for an out-of-memory error.

    Args:
        model: The model that was trained; its config tells the sizes.
        inputs: The batch, with labels.
        strategy: The strategy that was used.
    """
    labels = inputs.get("labels")
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    vocab, hidden = getattr(text, "vocab_size", None), getattr(text, "hidden_size", None)
    if not isinstance(labels, Tensor) or not isinstance(vocab, int) or not isinstance(hidden, int):
        return f"loss_plugins: the loss was computed with loss_strategy {strategy!r}; 'cce' needs the least memory."
    dtype = getattr(model, "dtype", None)
    problem = Problem(labels.numel(), hidden, vocab, **({} if dtype is None else {"dtype": dtype}))
    problem = problem.on(DeviceProfile.probe(labels.device))
    peaks = {}
    for name in STRATEGIES.builtin():
        entry = STRATEGIES.get(name)
        try:
            peaks[name] = entry.peak_bytes(problem, entry.Options())
        except LossPluginError:  # a strategy that cannot say
            continue
    table = ", ".join(f"{name} {peak / MIB:.0f} MiB" for name, peak in sorted(peaks.items(), key=lambda item: -item[1]))
    least = min(peaks, key=lambda name: peaks[name])
    advice = (
        f"loss_strategy {least!r} takes the least"
        if strategy != least
        else "the loss is at its smallest; look at the batch, at activation checkpointing and at the optimizer"
    )
    return (
        f"loss_plugins: the loss of this batch ({labels.numel()} tokens, vocabulary {vocab}) ran with loss_strategy "
        f"{strategy!r}. With default options and gradients it takes: {table}; {advice}."
    )
