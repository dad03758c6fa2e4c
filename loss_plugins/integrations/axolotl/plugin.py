"""What axolotl's plugin manager calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...config import LossConfig
from ..hf.callback import LossPluginCallback
from ..hf.keys import checked_config, own_keys
from ..hf.log_probs import serve_loss_func, serve_trainer

if TYPE_CHECKING:
    BasePlugin = object
else:
    try:
        from axolotl.integrations.base import BasePlugin
    except ModuleNotFoundError:  # only axolotl loads the plugin, but this file is read and checked without it too
        BasePlugin = object


class LossPlugin(BasePlugin):
    """Computes the loss of axolotl's trainer without logits.

    axolotl finds it by itself where both are installed (entry points `axolotl.plugins`). It does nothing until a loss
    setting is in the YAML, or until it is named in `plugins`, which alone means `loss_strategy: auto`.
    """

    def get_input_args(self) -> str:
        """Where axolotl finds the schema of our keys."""
        return f"{__package__}.arguments.LossPluginArgs"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The callback patches the model when the trainer is built, in its final form with adapters."""
        config = config_of(cfg)
        return [] if config is None else [LossPluginCallback(config)]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Trainers whose loss is made of log-probabilities take them from the strategy."""
        config = config_of(cfg)
        if config is not None and cfg.get("rl"):
            serve_trainer(trainer, config)
        elif config is not None and cfg.get("use_dft"):
            serve_loss_func(trainer, config)


def config_of(values: Mapping[str, Any]) -> LossConfig | None:
    """What a configuration of axolotl asks of us; None if it does not.

    Raises:
        ConfigError: see `checked_config`.
    """
    ours = settings_of(values)
    return None if ours is None else checked_config(ours)


def settings_of(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys of a configuration that are ours; None where it asks nothing of us."""
    ours = own_keys(values)
    named = any(name.replace(":", ".").endswith("axolotl.LossPlugin") for name in plugins_of(values))
    return ours if ours or named else None


def plugins_of(values: Mapping[str, Any]) -> list[str]:
    """The names in ``plugins``; axolotl itself refuses what is no list."""
    plugins = values.get("plugins")
    return [str(name) for name in plugins] if isinstance(plugins, list | tuple) else []
