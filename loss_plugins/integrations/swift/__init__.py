"""ms-swift: a file for `external_plugins` that calls `register`, and `callbacks: loss_plugins` in the YAML.

Not ms-swift's map of losses: what is in it takes labels away from the model and needs whole logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import LossConfig
from ...errors import ConfigError

NAME = "loss_plugins"
LOGIT_LOSSES = ("loss_type", "enable_dft_loss", "enable_channel_loss", "rlhf_type")


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

    config = LossConfig.of(loss_config)
    checked_config({name: getattr(config, name) for name in config.names()})

    def make(args: Any, trainer: Any) -> LossPluginCallback:
        refuse(args, trainer, config)
        return LossPluginCallback(config)

    callbacks_map[NAME] = make


def refuse(args: Any, trainer: Any, config: LossConfig) -> None:
    """Raises:
    ConfigError: ms-swift was asked for a loss that is not the model's own.
    """
    asked = {key: getattr(args, key, None) for key in LOGIT_LOSSES}
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
