"""Loss settings inside the configuration of a framework, which has keys of its own beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from ...config import LossConfig
from ...errors import ConfigError, nearest, unknown_name
from ...objectives import OBJECTIVES
from ...strategies import check_options
from .arguments import as_number

_NUMBERS = [entry.name for entry in fields(LossConfig) if isinstance(entry.default, float)]


def own_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those keys of a framework's configuration that are ours and say something."""
    ours = {name: _plain(values.get(name)) for name in LossConfig.names() if values.get(name) is not None}
    for name, value in ours.items():
        if name in _NUMBERS and isinstance(value, str):  # YAML reads 1e-4 as text
            ours[name] = as_number(value)
    return ours


def checked_config(values: Mapping[str, Any]) -> LossConfig:
    """The config of `own_keys`, with the strategy's name and its options looked up, before any model is loaded.

    Raises:
        ConfigError: a value, the strategy's name or one of its options is wrong, or a key has no meaning there.
    """
    config = LossConfig.of(values)
    default = LossConfig().loss_token_weight_key
    if config.loss_token_weight_key != default:
        raise ConfigError(
            f"loss_token_weight_key {config.loss_token_weight_key!r} was given, but the trainers of frameworks hand "
            "every column of a batch to the model, which takes no weights. Leave it out, or train with "
            "LossPluginTrainer."
        )
    if config.loss_objective is not None:
        OBJECTIVES.get(config.loss_objective)
    check_options(config.loss_strategy, config.loss_options)
    return config


def refuse_misspelled(keys: Iterable[str], known: Collection[str]) -> None:
    """For frameworks that drop keys which nobody knows, without a word.

    Raises:
        ConfigError: a key is nobody's, and nearly one of ours, in any case of letters and with hyphens too.
    """
    for key in keys:
        if key not in known and nearest(str(key).replace("-", "_"), LossConfig.names(), cutoff=0.8):
            raise ConfigError(unknown_name("loss setting", str(key), LossConfig.names()))


def refuse_switched_on(values: Mapping[str, Any], keys: Iterable[str], config: LossConfig, why: str) -> None:
    """For a framework's own switches that leave our loss nothing to do.

    Raises:
        ConfigError: one of ``keys`` is on.
    """
    for key in keys:
        if values.get(key):
            raise ConfigError(
                f"{key} is on, and loss_strategy {config.loss_strategy!r} was asked for: {why} Delete the line "
                f"`{key}: true`, or our loss_ keys."
            )


def _plain(value: Any) -> Any:
    """Dictionaries of frameworks answer for keys that they do not have."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value
