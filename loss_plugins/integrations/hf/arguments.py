"""The loss settings beside `TrainingArguments`' own, flat: one YAML, one command line."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_origin, get_type_hints

from transformers import TrainingArguments

from ...config import LossConfig
from ...errors import ConfigError

T = TypeVar("T")


def _with_loss_fields(cls: type[T]) -> type[T]:
    """Give a dataclass the fields of `LossConfig`, which stays the only place where they are written."""
    hints = get_type_hints(LossConfig)
    annotations = inspect.get_annotations(cls)
    for entry in fields(LossConfig):
        hint = hints[entry.name]
        # on the command line a mapping is JSON text until `TrainingArguments` has parsed it
        annotations[entry.name] = dict[str, Any] | str | None if _is_mapping(hint) else hint
        setattr(cls, entry.name, field(default=entry.default, metadata=dict(entry.metadata)))
    cls.__annotations__ = annotations
    return dataclass(cls)


def _is_mapping(hint: Any) -> bool:
    return any(get_origin(part) is dict for part in (hint, *getattr(hint, "__args__", ())))


_HINTS = get_type_hints(LossConfig)
_SWITCHES = [name for name, hint in _HINTS.items() if bool in getattr(hint, "__args__", ())]
_NUMBERS = [entry.name for entry in fields(LossConfig) if isinstance(entry.default, float)]
_MAPPINGS = [name for name, hint in _HINTS.items() if _is_mapping(hint)]


@_with_loss_fields
class LossPluginArguments(TrainingArguments):
    """[`~transformers.TrainingArguments`] with the settings of the loss.

    Works with [`~transformers.HfArgumentParser`] from YAML, a dict and the command line, where `loss_options` is JSON.
    `label_smoothing_factor` and `loss_label_smoothing` mean the same.

    Raises:
        ConfigError: a loss setting has a wrong value, or the two smoothing settings differ.
    """

    loss_self_check: bool = field(
        default=False,
        metadata={
            "help": "Compute the first training batch by stock too, and stop if the loss or the gradient of any "
            "parameter differs by more than rounding."
        },
    )

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, *_MAPPINGS]  # noqa: RUF012 - the parent's shape

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            if isinstance(value, str) and value.lower() in ("true", "false"):  # as a command line has it
                setattr(self, name, value.lower() == "true")
        check_switch("loss_self_check", self.loss_self_check)
        for name in _MAPPINGS:
            _check_json(name, getattr(self, name))
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str) and entry.type in (float, float | None, "float"):  # YAML reads 1e-4 as text
                setattr(self, entry.name, as_number(value))
        super().__post_init__()
        for name in LossConfig.names():
            setattr(self, name, with_numbers(name, getattr(self, name)))
        self.loss_config()

    def loss_config(self) -> LossConfig:
        """These arguments' loss settings.

        Raises:
            ConfigError: a value is wrong, or the two smoothing settings differ.
        """
        config = LossConfig(**{name: getattr(self, name) for name in LossConfig.names()})
        return with_smoothing(config, self.label_smoothing_factor)


def check_switch(name: str, value: Any) -> None:
    """Raises:
    ConfigError: ``value`` is neither true nor false; the text "false" would count as true.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}. Leave it out for false.")


def with_smoothing(config: LossConfig, factor: float) -> LossConfig:
    """`config` with the Trainer's `label_smoothing_factor` taken in.

    Raises:
        ConfigError: both are set and differ.
    """
    if factor and config.loss_label_smoothing and factor != config.loss_label_smoothing:
        raise ConfigError(
            f"label_smoothing_factor={factor:g} and loss_label_smoothing={config.loss_label_smoothing:g} were both "
            "given, but they mean the same. Leave one of them out."
        )
    return replace(config, loss_label_smoothing=config.loss_label_smoothing or factor)


def _check_json(name: str, value: Any) -> None:
    if not isinstance(value, str):
        return
    try:
        good = isinstance(json.loads(value), dict)
    except json.JSONDecodeError:
        good = False
    if not good:
        example = "true" if name in _SWITCHES else '{"workspace_mb": 256}'
        what = "true, false or a mapping" if name in _SWITCHES else "a mapping"
        raise ConfigError(
            f"{name} must be {what}, got the text {value!r}, which is no JSON object. On the command line write "
            f"--{name} '{example}'; in YAML write it without quotes around the whole."
        )


def with_numbers(name: str, value: Any) -> Any:
    """A loss setting from YAML, which reads 1e-4 as text."""
    if isinstance(value, str):
        return as_number(value) if name in _NUMBERS else value
    if name == "loss_class_weight" and isinstance(value, list):
        return [as_number(entry) if isinstance(entry, str) else entry for entry in value]
    if name == "loss_options" and isinstance(value, dict):
        return {key: as_number(entry) if isinstance(entry, str) else entry for key, entry in value.items()}
    return value


def as_number(text: str) -> float | str:
    """The number that a text is, else the text."""
    try:
        return float(text)
    except ValueError:
        return text  # the config says what is wrong with it
