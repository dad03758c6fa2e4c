"""What a user wishes for, in the user's words: strings and numbers, no torch.

`LossConfig` is the only schema. Its field names are the YAML keys, the command line flags, the attributes of
`LossPluginArguments` and the keys that the framework plugins accept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError, unknown_name

STATISTICS = ("accuracy", "entropy", "dropped")
LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Switches of liger-kernel that replace the loss, which is ours here."""
WITHOUT_FILTER = ("naive", "chunked", "flce")
"""Strategies that never leave anything out."""


@dataclass(frozen=True)
class LossConfig:
    """How the language-model loss is computed.

    Only ``loss_strategy`` is needed: ``LossConfig("cce")``.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range. Names of strategies and of their options are
            checked where they are resolved, since third parties can add some.
    """

    loss_strategy: str = field(
        default="auto",
        metadata={
            "help": "How the loss is computed: auto, naive, chunked, flce, cce, the name of an installed strategy, or "
            "package.module:ATTRIBUTE."
        },
    )
    loss_options: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Options of that strategy, for example {workspace_mb: 256} or {filter: off, preset: cce_exact}."
        },
    )
    loss_label_smoothing: float = field(
        default=0.0,
        metadata={
            "help": "Share of each target spread evenly over the vocabulary, in [0, 1]; the Trainer's "
            "label_smoothing_factor is taken too."
        },
    )
    loss_z_loss: float = field(
        default=0.0, metadata={"help": "Weight of the squared log-sum-exp of the logits, added to each token's loss."}
    )
    loss_objective: str | None = field(
        default=None,
        metadata={
            "help": "What is computed from each label's log-probability in place of its negative: dft (dynamic "
            "fine-tuning), the name of an installed objective, or package.module:ATTRIBUTE."
        },
    )
    loss_class_weight: list[float] | None = field(
        default=None,
        metadata={
            "help": "One weight a vocabulary entry, 0 or more, as in torch.nn.functional.cross_entropy; not all 0."
        },
    )
    loss_token_weight_key: str = field(
        default="token_weight",
        metadata={
            "help": "Column of the batch with one weight a token, aligned with labels. token_weight is used when it is "
            "there; one of another name has to be, in training."
        },
    )
    loss_statistics: list[str] | None = field(
        default=None,
        metadata={
            "help": "Extra numbers to log from the same pass, without logits: accuracy, entropy, and dropped, the "
            "share of probability that cce's filter left out, which other strategies do not have."
        },
    )
    liger_ops: dict[str, bool] | bool | None = field(
        default=None,
        metadata={
            "help": "liger-kernel's kernels for other layers, beside any loss: true for all that it turns on for the "
            "model, or some by name, {rms_norm: true, rope: false}, where the others stay as Liger has them."
        },
    )

    def __post_init__(self) -> None:
        if not isinstance(self.loss_strategy, str) or not self.loss_strategy:
            raise ConfigError(
                f"loss_strategy must be a name such as 'cce', got {self.loss_strategy!r}. Leave it out for 'auto'."
            )
        if self.loss_options is not None and not isinstance(self.loss_options, Mapping):
            raise ConfigError(
                f"loss_options must be a mapping such as {{workspace_mb: 256}}, got {self.loss_options!r}. "
                "Write it as a YAML mapping or as JSON on the command line."
            )
        for name in self.loss_options or ():
            if not isinstance(name, str):
                raise ConfigError(f"loss_options must have names as keys, got {name!r}.{_unquoted(name)}")
        self._number("loss_label_smoothing", 0.0, 1.0)
        self._number("loss_z_loss", 0.0, math.inf)
        self._check_objective()
        self._list("loss_class_weight", "numbers of 0 or more, one a vocabulary entry", _is_weight)
        weights = self.loss_class_weight
        if weights and not any(weights):
            raise ConfigError(
                f"loss_class_weight must not be 0 for all {len(weights)} classes: no token would count, and their mean "
                "would be 0 / 0. Give the classes that count a weight above 0, or leave it out."
            )
        self._list("loss_statistics", f"names: {', '.join(STATISTICS)}", lambda value: isinstance(value, str))
        key = self.loss_token_weight_key
        if not isinstance(key, str) or key in ("", "labels", "input_ids"):
            raise ConfigError(
                f"loss_token_weight_key must be the name of a column that holds weights, got {key!r}. Leave it out for "
                "'token_weight'."
            )
        for name in self.loss_statistics or ():
            if name not in STATISTICS:
                raise ConfigError(unknown_name("entry of loss_statistics", str(name), STATISTICS))
        if "dropped" in (self.loss_statistics or ()) and self.loss_strategy in WITHOUT_FILTER:
            raise ConfigError(
                f"loss_statistics asks for dropped, what cce's filter left out, and loss_strategy "
                f"{self.loss_strategy!r} has no filter. Leave dropped out, or set loss_strategy: cce."
            )
        check_filter((self.loss_options or {}).get("filter"), self.loss_label_smoothing)
        self._check_liger_ops()

    def _check_objective(self) -> None:
        value = self.loss_objective
        if value is None:
            return
        if not isinstance(value, str) or not value:
            raise ConfigError(
                f"loss_objective must be a name such as 'dft', got {value!r}. Leave it out for cross-entropy."
            )
        for name in ("loss_label_smoothing", "loss_z_loss", "loss_class_weight"):
            if getattr(self, name):
                raise ConfigError(
                    f"loss_objective {value!r} and {name}={getattr(self, name)!r} were both given, but an objective is "
                    "computed from plain log-probabilities, to which nothing can be added. Leave one of them out."
                )

    def _check_liger_ops(self) -> None:
        value = self.liger_ops
        if value is None or isinstance(value, bool):
            return
        if not isinstance(value, Mapping) or not all(isinstance(entry, bool) for entry in value.values()):
            raise ConfigError(
                f"liger_ops must be true, or a mapping of names to true or false such as {{rms_norm: true}}, got "
                f"{value!r}. Leave it out for none."
            )
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(f"liger_ops must have names as keys, got {name!r}.{_unquoted(name)}")
        losses = [name for name in LIGER_LOSSES if value.get(name)]
        if losses:
            raise ConfigError(
                f"liger_ops turns on {' and '.join(losses)}, and loss_strategy {self.loss_strategy!r} was asked for: "
                f"two losses for one model. Take {' and '.join(losses)} out of liger_ops, or set use_liger_kernel in "
                "place of loss_plugins."
            )

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not is_number(value) or not low <= value <= high or math.isinf(value):
            raise ConfigError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}. Leave it out for 0.")

    def _list(self, name: str, of: str, good: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{name} must be a list of {of}; got {value!r}. Leave it out for none.")
        for place, entry in enumerate(value):
            if not good(entry):
                raise ConfigError(f"{name} must be a list of {of}; entry {place} is {entry!r}. Leave it out for none.")

    def __str__(self) -> str:
        """What differs from the defaults: ``'cce' with loss_options={'filter': 'off'}``."""
        extra = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name != "loss_strategy" and getattr(self, f.name) != f.default
        ]
        return f"{self.loss_strategy!r}" + (f" with {', '.join(extra)}" if extra else "")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The keys of this schema."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def of(cls, value: LossConfig | str | Mapping[str, Any] | None) -> LossConfig:
        """A config from any form that the public functions take: itself, a strategy's name, a mapping, or nothing.

        Raises:
            ConfigError: a mapping has a key that is no field, or a value is wrong.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(loss_strategy=value)
        if isinstance(value, Mapping):
            for key in value:
                if key not in cls.names():
                    raise ConfigError(unknown_name("loss setting", str(key), cls.names()))
            return cls(**value)
        own = " Pass what its loss_config() returns." if callable(getattr(value, "loss_config", None)) else ""
        raise ConfigError(
            f"A loss config must be a strategy's name, a mapping or a LossConfig, got {type(value).__name__}."
            f"{own or ' Write for example cce, or LossConfig(loss_strategy=...).'}"
        )


def _unquoted(name: Any) -> str:
    """Why a key that was meant as a name is none."""
    if isinstance(name, bool):
        return " YAML reads on, off, yes and no as true and false: put quotes around that name, or correct it."
    return " Put the name of what is meant there."


def check_filter(value: Any, label_smoothing: float) -> None:
    """Refuse a probability below which columns are left out, where labels are smoothed."""
    if label_smoothing and is_number(value) and value > 0:
        raise ConfigError(
            f"filter={value!r} and label_smoothing={label_smoothing:g} were both asked for, but smoothing pulls on "
            "every column, so none is negligible. Use filter: auto or off, or no smoothing."
        )


def is_number(value: Any) -> bool:
    """Whether it is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_weight(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf
