"""All that is wrong with a file of `loss-plugins train`, where `train` itself stops at the first mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import LossConfig
from ..errors import ConfigError, LossPluginError, nearest
from ..integrations.hf.arguments import LossPluginArguments, with_smoothing
from ..integrations.hf.job import SETTINGS, settings_of
from ..integrations.hf.keys import mistakes, own_keys
from ..integrations.hf.loading import ModelArguments, check_place, load_config
from ._settings import both_set, built, sorted_values


def examine_job(path: Path) -> tuple[list[LossConfig], list[str]]:
    """The loss of each run, as far as it can be read, and everything that is wrong: with each key by itself, with the
    loss settings together, and with each dataclass none of whose keys is wrong.

    Raises:
        ConfigError: the file cannot be read.
    """
    values, wrong = sorted_values(path, SETTINGS)
    losses, more = _losses(values)
    said = [*wrong.values(), *more]
    if values.get("strategies") is not None and "loss_strategy" in values:
        said.append(both_set(values))
    names = {cls: {entry.name for entry in fields(cls) if entry.init} - {*LossConfig.names()} for cls in SETTINGS}
    known = {name for each in names.values() for name in each}
    meant = {nearest(key, {*known, *LossConfig.names()}) for key in wrong}
    for cls, own in names.items():
        if meant & own:
            continue  # it would miss what is there under another name
        try:
            (made,) = built(path, [cls], {key: value for key, value in values.items() if key in own})
            if isinstance(made, LossPluginArguments):
                losses = [with_smoothing(loss, made.label_smoothing_factor) for loss in losses]
        except LossPluginError as error:
            said += _all(error)
    said += _model(values)
    return losses, list(dict.fromkeys(said))


def _losses(values: Mapping[str, Any]) -> tuple[list[LossConfig], list[str]]:
    """The loss of each run, and what is wrong with it."""
    ours = own_keys(values)
    runs, said = _runs(values["strategies"], ours) if values.get("strategies") else ([{}], [])
    found = [mistakes({key: value for key, value in {**ours, **run}.items() if value is not None}) for run in runs]
    return [loss for _, loss in found], [*said, *(each for wrong, _ in found for each in wrong)]


def _runs(names: Sequence[str], ours: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """What each run of a comparison has for itself, without those shared settings of which that cannot be said."""
    shared = {key: ours[key] for key in ("loss_options", "loss_statistics") if key in ours}
    said: list[str] = []
    while True:
        try:
            return list(settings_of(names, LossConfig(**shared)).values()), said
        except LossPluginError as error:
            said += _all(error)
            shared.pop(next(iter(shared)))


def _model(values: Mapping[str, Any]) -> list[str]:
    """What `train` refuses of a model before it asks the Hub."""
    said: list[str] = []
    for key in ("model_name_or_path", "tokenizer_name_or_path", "model_config"):
        try:
            if values.get(key) is not None and key == "model_config":
                load_config(ModelArguments(model_config=values[key]))
            elif values.get(key) is not None:
                check_place(key, values[key])
        except LossPluginError as error:
            said += _all(error)
    return said


def _all(error: LossPluginError) -> list[str]:
    return [str(error), *(error.others if isinstance(error, ConfigError) else ())]
