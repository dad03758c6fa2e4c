"""ms-swift: a file for `external_plugins` that calls `register`, and `callbacks: loss_plugins` in the YAML.

Not ms-swift's map of losses: what is in it takes labels away from the model and needs whole logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import LossConfig
from ...errors import ConfigError

NAME = "loss_plugins"
LOGIT_LOSSES = ("loss_type", "enable_dft_loss", "enable_channel_loss")
RLHF = ("dpo", "kto", "orpo", "cpo", "simpo")
"""Whose objective is made of log-probabilities of single tokens."""


def register(loss_config: LossConfig | Mapping[str, Any] | str | None = None) -> None:
    """Let `callbacks: loss_plugins` compute the loss.

    Args:
        loss_config: A strategy's name, a `LossConfig` or a mapping of its fields. Default: `auto`.

    Raises:
        ConfigError: a setting is wrong.
    """
    from swift.callbacks import callbacks_map

    from ..hf.callback import LossPluginCallback
    from ..hf.keys import checked_config
    from ..hf.log_probs import serve_trainer

    config = LossConfig.of(loss_config)
    checked_config({name: getattr(config, name) for name in config.names()})

    class Serving(LossPluginCallback):
        """For trainers whose loss is made of log-probabilities, the reference's too."""

        trainer: Any = None

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.trainer is not None:
                serve_trainer(self.trainer, config)
                self.trainer = None
            super().on_train_begin(*args, **kwargs)

    def make(args: Any, trainer: Any) -> LossPluginCallback:
        refuse(args, trainer, config)
        callback = Serving(config)
        if _preference(trainer) is not None:
            callback.trainer = trainer
        return callback

    callbacks_map[NAME] = make


def refuse(args: Any, trainer: Any, config: LossConfig) -> None:
    """Raises:
    ConfigError: ms-swift was asked for a loss that is neither the model's own nor made of log-probabilities.
    """
    from ..hf.log_probs import refuse_additions

    kind = _preference(trainer)
    asked = whole_logits({**{key: getattr(args, key, None) for key in LOGIT_LOSSES}, "rlhf_type": kind})
    template = getattr(trainer, "template", None)
    scale = getattr(template, "loss_scale", None)
    if getattr(scale, "is_binary_loss_scale", True) is False:
        asked["loss_scale"] = getattr(args, "loss_scale", True)
    if getattr(template, "sequence_parallel_size", 1) > 1:
        asked["sequence_parallel_size"] = template.sequence_parallel_size  # type: ignore[union-attr]
    for key, value in asked.items():
        if value:
            raise ConfigError(
                f"{key} {value!r} and loss_strategy {config.loss_strategy!r} were both given, but for that ms-swift "
                f"takes whole logits from the model and computes the loss itself. Delete {key}, or {NAME} from "
                "callbacks."
            )
    if kind is not None:
        refuse_additions(config, f"rlhf_type {kind}")


def whole_logits(values: Mapping[str, Any]) -> dict[str, Any]:
    """What in a configuration of ms-swift has it take whole logits from the model."""
    kind = values.get("rlhf_type")
    # a preference's loss_type is a kind of objective
    keys = [key for key in LOGIT_LOSSES if key != "loss_type" or not kind]
    asked = {key: values[key] for key in keys if values.get(key)}
    return asked if not kind or kind in RLHF else {**asked, "rlhf_type": kind}


def _preference(trainer: Any) -> str | None:
    """The kind of RLHF that a trainer is for, by its class: its arguments do not say."""
    for cls in type(trainer).__mro__:
        if cls.__module__.startswith("swift.rlhf_trainers") and cls.__name__.endswith("Trainer"):
            return cls.__name__.removesuffix("Trainer").lower()
    return None
