"""Takes our keys out of LLaMA-Factory's arguments, and gives its training a callback in their place."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from ...config import LossConfig
from ...errors import MissingDependencyError, UnsupportedError, refuse
from ..hf.callback import LossPluginCallback
from ..hf.keys import checked_config, own_keys, switched_on
from ..hf.log_probs import additions, serve_loss_func, serve_trainer

Arguments = dict[str, Any] | list[str]

LOGIT_LOSSES = ("use_eaft_loss", "use_asft_loss")
OTHER_MODELS = ("use_unsloth", "use_mca", "use_hyper_parallel", "use_kt")
"""What replaces the model, its loss or the trainer by something of its own."""
STAGES = ("pt", "sft", "dpo", "kto")
LOG_PROBS = {"dpo": "dpo.trainer.CustomDPOTrainer", "kto": "kto.trainer.CustomKTOTrainer"}
"""Trainers that take log-probabilities from the model's logits, by stage."""
DFT = "sft.trainer.CustomSeq2SeqTrainer"


def train(config: str, overrides: Sequence[str] = ()) -> None:
    """What `llamafactory-cli train` does with a YAML file and `key=value` words behind it, in this process.

    Without a key of ours the strategy is `auto`.

    Raises:
        ConfigError: a loss setting is wrong, or the file asks for what a loss strategy cannot be combined with.
        MissingDependencyError: LLaMA-Factory is not installed.
        UnsupportedError: the environment asks for LLaMA-Factory's other trainers.
    """
    refuse_v1()
    try:
        from llamafactory.hparams import read_args
        from llamafactory.train.tuner import run_exp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "llamafactory":
            raise
        raise MissingDependencyError(
            "`loss-plugins llamafactory` was asked for, but LLaMA-Factory is not installed: pip install llamafactory."
        ) from error
    before, sys.argv = sys.argv, ["llamafactory-cli", config, *overrides]
    try:
        given = read_args()
        arguments, callback = with_callback(given, by_default=LossConfig())
        assert callback is not None
        with served(given, callback.loss_config):
            run_exp(arguments, [callback])  # where the hook is installed too, it finds no key of ours any more
    finally:
        sys.argv = before


def refuse_v1() -> None:
    """`llamafactory-cli` would run other trainers, which know other keys; the same file cannot be meant for both.

    Raises:
        UnsupportedError: `USE_V1` is on, in the words that LLaMA-Factory takes for it.
    """
    value = os.environ.get("USE_V1", "")
    if value.lower() in ("1", "true", "y"):
        raise UnsupportedError(
            f"USE_V1={value} is in the environment, which asks for LLaMA-Factory's v1 trainers, and `loss-plugins "
            "llamafactory train` runs those of v0: v1 has a loop of its own that takes no callbacks and computes its "
            "loss from whole logits, and it still changes between releases. Unset USE_V1 and give a file of v0's keys, "
            "or run `USE_V1=1 llamafactory-cli sft` without our loss_ keys."
        )


def wrapped(run_exp: Callable[..., Any], read_args: Callable[..., Arguments]) -> Callable[..., Any]:
    """LLaMA-Factory's `run_exp` with our keys understood; without one of them it is called just as it was."""

    @functools.wraps(run_exp)
    def run(args: Arguments | None = None, callbacks: list[Any] | None = None) -> Any:
        given = read_args(args)
        rest, callback = with_callback(given)
        if callback is None:
            return run_exp(args, callbacks)
        with served(given, callback.loss_config):
            return run_exp(rest, [*(callbacks or []), callback])

    return run


def with_callback(
    arguments: Arguments, by_default: LossConfig | None = None
) -> tuple[Arguments, LossPluginCallback | None]:
    """LLaMA-Factory's arguments without ours, and the callback that ours ask for.

    Args:
        arguments: The keys of a YAML file, or the words of a command line.
        by_default: What is meant where they have no key of ours.

    Raises:
        ConfigError: see `train`.
    """
    values, rest = (dict(arguments), {}) if isinstance(arguments, Mapping) else _from_words(arguments)
    ours = own_keys(values)
    config = checked_config(ours) if ours else by_default
    if config is None:
        return arguments, None
    refuse(conflicts(values, config))
    if isinstance(rest, dict):
        rest = {key: value for key, value in values.items() if key not in LossConfig.names()}
    return rest, LossPluginCallback(config)


@contextlib.contextmanager
def served(arguments: Arguments, config: LossConfig) -> Iterator[None]:
    """Inside, trainers of LLaMA-Factory whose loss is made of log-probabilities take them from the strategy."""
    values = arguments if isinstance(arguments, Mapping) else _from_words(arguments)[0]
    stage, by_dft = values.get("stage", "sft"), bool(values.get("use_dft_loss"))
    path = LOG_PROBS.get(stage, DFT if by_dft else None)
    if path is None:
        yield
        return
    module, _, name = path.rpartition(".")
    trainer_class: Any = getattr(importlib.import_module(f"llamafactory.train.{module}"), name)
    make = trainer_class.__init__

    @functools.wraps(make)
    def make_and_serve(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if stage in LOG_PROBS:
            serve_trainer(self, config)
        else:
            serve_loss_func(self, config)

    trainer_class.__init__ = make_and_serve
    try:
        yield
    finally:
        trainer_class.__init__ = make


def conflicts(values: Mapping[str, Any], config: LossConfig) -> Iterator[str]:
    """What is wrong with each key that asks LLaMA-Factory for a loss that is not the model's own."""
    stage = values.get("stage", "sft")
    if stage not in STAGES:
        yield (
            f"stage: {stage} and loss_strategy {config.loss_strategy!r} were both given, but that trainer of "
            f"LLaMA-Factory takes more from the model than its loss or log-probabilities. The stages that do not are "
            f"{', '.join(STAGES)}; delete our loss_ keys for another."
        )
    elif stage in LOG_PROBS:
        yield from additions(config, f"stage: {stage}")
    elif values.get("use_dft_loss"):
        yield from additions(config, "use_dft_loss")
    whole = "that loss is computed from whole logits, which no loss strategy makes."
    yield from switched_on(values, LOGIT_LOSSES, config, whole)
    past = "it brings a loss or a trainer of its own, past which loss_plugins is never called."
    yield from switched_on(values, OTHER_MODELS, config, past)
    if values.get("enable_liger_kernel"):
        yield (
            f"enable_liger_kernel is on, and loss_strategy {config.loss_strategy!r} was asked for: LLaMA-Factory turns "
            "on Liger's loss with its layers, two losses for one model. Replace the line `enable_liger_kernel: true` "
            "by `liger_ops: true`, which takes the layers only."
        )


def _from_words(words: Sequence[str]) -> tuple[dict[str, Any], Arguments]:
    """The values of `--key value` and `--key=value`, read as YAML reads them; and the words that are not ours."""
    values: dict[str, Any] = {}
    rest: list[str] = []
    place = 0
    while place < len(words):
        start, place = place, place + 1
        if not words[start].startswith("--"):
            rest.append(words[start])
            continue
        while place < len(words) and not words[place].startswith("--"):
            place += 1
        key, equals, first = words[start][2:].partition("=")
        texts = [first] * bool(equals) + list(words[start + 1 : place])
        loaded = [yaml.safe_load(text) for text in texts]
        several = key in ("loss_statistics", "loss_class_weight") and not (loaded and isinstance(loaded[0], list))
        values[key] = loaded if several else loaded[0] if loaded else True
        if key not in LossConfig.names():
            rest += words[start:place]
    return values, rest
