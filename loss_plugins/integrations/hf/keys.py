"""Loss settings inside the configuration of a framework, which has keys of its own beside them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ...config import LossConfig
from ...errors import ConfigError, LossPluginError, nearest, unknown_name
from ...objectives import OBJECTIVES
from ...strategies import check_options
from .arguments import with_numbers
from .refusals import refuse_token_weight


def own_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those keys of a framework's configuration that are ours and say something."""
    names = [name for name in LossConfig.names() if values.get(name) is not None]
    return {name: with_numbers(name, _plain(values.get(name))) for name in names}


def checked_config(values: Mapping[str, Any]) -> LossConfig:
    """The config of `own_keys`, with the strategy's name and its options looked up, before any model is loaded.

    Raises:
        ConfigError: a value, the strategy's name or one of its options is wrong, or a key has no meaning there.
    """
    config = LossConfig.of(values)
    refuse_token_weight(config)
    if config.loss_objective is not None:
        OBJECTIVES.get(config.loss_objective)
    check_options(config.loss_strategy, config.loss_options)
    return config


def mistakes(values: Mapping[str, Any]) -> tuple[list[str], LossConfig]:
    """Everything for which `checked_config` refuses settings, and a config of those that are well.

    Each is looked at beside the strategy alone, each option too, and then every two of them together.
    """
    name, options = values.get("loss_strategy"), values.get("loss_options")
    strategy = {"loss_strategy": name} if isinstance(name, str) else {}
    parts = [{**strategy, key: value} for key, value in values.items() if key != "loss_options"]
    good = dict(values)
    if isinstance(options, Mapping) and not _refusal(strategy):
        each = {option: {**strategy, "loss_options": {option: value}} for option, value in options.items()}
        parts += each.values()
        good["loss_options"] = {option: options[option] for option, part in each.items() if not _refusal(part)}
    parts += [{**strategy, **dict(pair)} for pair in itertools.combinations(values.items(), 2)]
    said = dict.fromkeys(sentence for part in [*parts, values] if (sentence := _refusal(part)))
    well: dict[str, Any] = {}
    for key, value in good.items():
        try:
            LossConfig.of({**well, key: value})
        except ConfigError:
            continue
        well[key] = value
    return list(said), LossConfig.of(well)


def _refusal(values: Mapping[str, Any]) -> str | None:
    try:
        checked_config(values)
    except LossPluginError as error:
        return str(error)
    return None


def misspelled(keys: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """For frameworks that drop keys which nobody knows, without a word: what is wrong with each that is nobody's, and
    nearly one of ours, in any case of letters and with hyphens too."""
    for key in keys:
        if key not in known and nearest(str(key).replace("-", "_"), LossConfig.names(), cutoff=0.8):
            yield unknown_name("loss setting", str(key), LossConfig.names())


def switched_on(values: Mapping[str, Any], keys: Iterable[str], config: LossConfig, why: str) -> Iterator[str]:
    """For a framework's own switches that leave our loss nothing to do: what is wrong with each that is on."""
    for key in keys:
        if values.get(key):
            yield (
                f"{key} is on, and loss_strategy {config.loss_strategy!r} was asked for: {why} Delete the line "
                f"`{key}: true`, or our loss_ keys."
            )


def _plain(value: Any) -> Any:
    """Dictionaries of frameworks answer for keys that they do not have."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value
