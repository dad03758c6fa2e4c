"""Our keys for axolotl's schema, which is made of pydantic's classes: the fields of `LossConfig`, all optional.

The class is made when axolotl asks for it, so that this file can be imported without pydantic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from ...config import LossConfig
from ...errors import refuse
from ..hf.keys import misspelled, switched_on
from ..hf.log_probs import additions
from .plugin import config_of, plugins_of

LOSSES = ("cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy")
"""axolotl's own switches for a loss without logits, or with fewer."""
LOGIT_LOSSES = ("use_eaft",)
OTHER_TRAINERS = ("reward_model", "process_reward_model")
RL = ("dpo", "ipo", "kto", "orpo", "simpo", "grpo", "gdpo")
"""Whose objective is made of log-probabilities of single tokens."""
OTHER_SCORES = ("dpo_use_weighting", "dpo_use_liger_kernel")
"""What has DPO take more from logits, or its log-probabilities from elsewhere."""
NEVER_RUN = ("dpo_padding_free",)
NEVER_RUN_IN_TRL = ("async_prefetch", "use_data_producer")
LIGER_LAYERS = (
    "liger_rope", "liger_rms_norm", "liger_rms_norm_gated", "liger_layer_norm", "liger_swiglu", "liger_glu_activation",
)  # fmt: skip


def check(values: Mapping[str, Any], known: Any) -> LossConfig | None:
    """Everything that can be said about a configuration before a model is loaded.

    Args:
        values: The YAML, with axolotl's keys and ours.
        known: All keys of the schema; axolotl drops others without a word.

    Raises:
        ConfigError: a value of ours is wrong, or a key of axolotl's computes the loss in another way.
    """
    refuse(unknown(values, known))
    config = config_of(values)
    if config is not None:
        refuse(conflicts(values, config))
    return config


def unknown(values: Mapping[str, Any], known: Any) -> Iterator[str]:
    """What is wrong with keys of which ours were meant."""
    return misspelled(values, {*known, *LIGER_LAYERS})  # liger_rope is in the schema with Liger's plugin alone


def conflicts(values: Mapping[str, Any], config: LossConfig) -> Iterator[str]:
    """What is wrong with each key of axolotl's that computes the loss in another way."""
    for key in LOSSES:
        if values.get(key):
            yield _two_losses(config, f"{key}: {_yaml(values[key])}")
    for name in plugins_of(values):  # its switch is on unless it is turned off
        if name.endswith("CutCrossEntropyPlugin") and values.get("cut_cross_entropy") is None:
            yield _two_losses(config, f"- {name}")
    whole = "that loss is computed from whole logits, and the model is given no labels."
    yield from switched_on(values, LOGIT_LOSSES, config, whole)
    for key in OTHER_TRAINERS:
        if values.get(key):
            yield _no_effect(config, f"{key}: {_yaml(values[key])}")
    if values.get("rl"):
        yield from _rl_conflicts(values, config)
    elif values.get("use_dft"):
        yield from additions(config, "use_dft")
    layers = [key for key in LIGER_LAYERS if values.get(key)]
    if config.liger_ops not in (None, False) and layers:
        yield (
            f"liger_ops is {config.liger_ops!r} and {' and '.join(layers)} on: both put Liger's kernels into the "
            f"model. Delete the lines {', '.join(f'`{key}: true`' for key in layers)}, or liger_ops."
        )


def _rl_conflicts(values: Mapping[str, Any], config: LossConfig) -> Iterator[str]:
    kind = _yaml(values["rl"])
    if kind not in RL:
        yield f"{_no_effect(config, f'rl: {kind}')} Those that can be served: {', '.join(RL)}."
        return
    yield from additions(config, f"rl: {kind}")
    why = "with it DPO takes more than log-probabilities from logits, or takes them from elsewhere."
    yield from switched_on(values, OTHER_SCORES, config, why)
    why = "a loss strategy was never run with it."
    yield from switched_on(values, NEVER_RUN, config, why)
    trl = values.get("trl")
    yield from switched_on(trl if isinstance(trl, Mapping) else {}, NEVER_RUN_IN_TRL, config, why)


def _no_effect(config: LossConfig, line: str) -> str:
    return (
        f"{line} and loss_strategy {config.loss_strategy!r} were both given, but the trainer that this chooses "
        "computes its own loss, from more than log-probabilities, so the strategy would have no effect. Delete our "
        "loss_ keys from this file."
    )


def _two_losses(config: LossConfig, line: str) -> str:
    return (
        f"loss_strategy {config.loss_strategy!r} was asked for, and the line `{line}` asks for another loss: two for "
        "one model. Delete that line, or our loss_ keys."
    )


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))


def _make_schema() -> Any:
    from pydantic import BaseModel, Field, create_model, model_validator

    class Checked(BaseModel):
        """The check, for any set of fields."""

        @model_validator(mode="before")
        @classmethod
        def check_loss_plugins(cls, data: Any) -> Any:
            if isinstance(data, Mapping):
                check(data, cls.model_fields)
            return data

    hints = get_type_hints(LossConfig)
    entries: dict[str, Any] = {
        entry.name: (hints[entry.name] | None, Field(default=None, description=entry.metadata["help"]))
        for entry in fields(LossConfig)
    }
    made = create_model("LossPluginArgs", __base__=Checked, __module__=__name__, **entries)
    made.__doc__ = "The settings of loss_plugins, as `LossConfig` has them."
    return made


def __getattr__(name: str) -> Any:
    if name != "LossPluginArgs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _make_schema()
    return made
