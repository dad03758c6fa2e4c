"""The job behind ``loss-plugins train``: data, model and Trainer run, once a strategy, and what is reported of it.

Everything that can be refused is refused before the first file is written.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import ProgressCallback

from ...config import WITHOUT_FILTER, LossConfig
from ...device import DeviceProfile
from ...diagnostics.environment import versions
from ...diagnostics.memory import has_counters
from ...errors import ConfigError, MissingDependencyError, unknown_name
from ...objectives import OBJECTIVES
from ...strategies import STRATEGIES, Problem, select
from .arguments import LossPluginArguments
from .corpus import read_corpus
from .data import IGNORED, Collator, DataArguments, Row, encode_all, read_rows, text_of
from .launch import launch_line, refuse_what_a_cpu_leaves_out
from .loading import DTYPES, ModelArguments, fit_config, keep_tokenizer, load_config, load_model, load_tokenizer
from .refusals import refuse_token_weight
from .trainer import LossPluginTrainer

logger = logging.getLogger(__name__)


@dataclass
class JobArguments:
    """How often the job runs."""

    strategies: list[str] | None = field(
        default=None,
        metadata={
            "help": "Run the whole job once with each of these, from the same seed, and compare. Default: once, with "
            "loss_strategy."
        },
    )

    def __post_init__(self) -> None:
        if self.strategies is not None and (not self.strategies or len(set(self.strategies)) < len(self.strategies)):
            raise ConfigError(
                f"strategies must name each strategy once, got {self.strategies!r}. For example: [naive, cce]. For a "
                "single run set loss_strategy."
            )


SETTINGS = (LossPluginArguments, ModelArguments, DataArguments, JobArguments)


class Outcome(NamedTuple):
    """What a job left: the summary as in ``summary.json``, and the files written beside it."""

    summary: dict[str, Any]
    files: list[Path]


class _Material(NamedTuple):
    """What every run of a job shares."""

    config: Any
    tokenizer: Any
    fingerprint: str | None  # of a tokenizer trained here
    train: list[dict[str, Tensor]]
    evaluation: list[dict[str, Tensor]] | None
    kernels: dict[str, str]  # strategy -> which would run, for those that launch none of the package's own


def run(args: LossPluginArguments, model: ModelArguments, data: DataArguments, job: JobArguments) -> Outcome:
    """Train, once a strategy, then write ``summary.json``, ``loss.png`` and ``memory.png`` to ``args.output_dir``.

    Raises:
        ConfigError: something asked for is unknown, missing or contradictory. Nothing was written then.
    """
    names = job.strategies or [args.loss_config().loss_strategy]
    if job.strategies and args.resume_from_checkpoint:
        raise ConfigError(
            f"resume_from_checkpoint is {args.resume_from_checkpoint!r}, but a checkpoint belongs to one run and "
            f"strategies asks for {len(names)}. Set loss_strategy in place of strategies."
        )
    refuse_token_weight(args.loss_config())
    refuse_what_a_cpu_leaves_out(args.device)
    settings = settings_of(names, args.loss_config())
    material = _prepare(args, model, data, {name: own["loss_options"] for name, own in settings.items()})
    results, batches = {}, []
    for name in names:
        own = args
        if job.strategies:
            folder = Path(str(args.output_dir)) / re.sub(r"[^\w.-]", "_", name)
            own = replace(args, output_dir=str(folder), **settings[name])
        label = name if job.strategies else None
        try:
            results[name], batch = _train(own, model, data, material, cache=_cache(args), label=label)
        finally:
            if job.strategies and args.process_index == 0:
                _remove_empty(Path(str(own.output_dir)))  # the Trainer makes it even where nothing is saved
        batches.append(batch)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    summary = {
        "strategies": results,
        "device": DeviceProfile.probe(args.device).name,
        "date": _now(),
        "versions": versions(),
        "problem": batches[0] | _widths(material.config),  # of every run: all see the same batches
    }
    files = _write(Path(str(args.output_dir)), summary) if args.process_index == 0 else []
    return Outcome(summary, files)


def _cache(args: LossPluginArguments) -> Path:
    return Path(str(args.output_dir)) / "tokenizer"


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")


def _widths(config: Any) -> dict[str, int]:
    text = config.get_text_config()
    return {"hidden": text.hidden_size, "vocab": text.vocab_size}


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def settings_of(names: Sequence[str], config: LossConfig) -> dict[str, dict[str, Any]]:
    """For each strategy the settings that are not all's.

    Raises:
        ConfigError: see `_options_of`.
    """
    options = _options_of(names, config.loss_options)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        statistics = config.loss_statistics
        if name in WITHOUT_FILTER and statistics:
            statistics = [each for each in statistics if each != "dropped"] or None
        found[name] = {"loss_strategy": name, "loss_options": options[name], "loss_statistics": statistics}
    return found


def _options_of(names: Sequence[str], asked: Mapping[str, Any] | None) -> dict[str, dict[str, Any] | None]:
    """Each strategy's share of ``loss_options``. In a comparison each gets those that it has, which is said.

    Raises:
        ConfigError: none of several strategies has an option. (A single one's are checked where it is chosen.)
    """
    if asked is None or len(names) == 1:
        return {name: None if asked is None else dict(asked) for name in names}
    known = {name: {f.name for f in fields(STRATEGIES.get(name).Options)} for name in names if name != "auto"}
    everything = {option for options in known.values() for option in options}
    for option in asked:
        if option not in everything and "auto" not in names:
            raise ConfigError(unknown_name(f"entry of loss_options for {', '.join(names)}:", option, everything))
    shares: dict[str, dict[str, Any] | None] = {}
    for name in names:
        shares[name] = {k: v for k, v in asked.items() if k in known.get(name, asked)}
        left = [option for option in asked if option not in known.get(name, asked)]
        if left:
            logger.info("%s has no option %s and runs without.", name, ", ".join(left))
    return shares


def _prepare(
    args: LossPluginArguments, model: ModelArguments, data: DataArguments, options: Mapping[str, dict[str, Any] | None]
) -> _Material:
    config = load_config(model)
    rows = args.per_device_train_batch_size * data.max_length  # at most
    widths = _widths(config)
    problem = Problem(rows, widths["hidden"], widths["vocab"], dtype=getattr(torch, DTYPES[model.dtype]))
    profile = DeviceProfile.probe(args.device)
    # misspelt names and options are refused here, before the data is read
    plans = {name: select(name, own, problem, profile) for name, own in options.items()}
    objective = args.loss_config().loss_objective
    if objective is not None:
        OBJECTIVES.get(objective)
    if data.embedded_corpus is not None:
        read = [Row(file, {"text": text}) for file, text in read_corpus(data.embedded_corpus, data.corpus_mb)]
    else:
        read = list(read_rows(str(data.train_file)))
    logger.info("Read %d documents.", len(read))
    texts = [] if model.tokenizer_name_or_path or model.model_name_or_path else [text_of(row) for row in read]
    tokenizer, fingerprint = load_tokenizer(model, texts, _cache(args))
    if model.model_config is not None:
        fit_config(config, tokenizer)
    train = encode_all(read, tokenizer, data)
    logger.info("Training on %d sequences of at most %d tokens.", len(train), data.max_length)
    evaluation = None if data.eval_file is None else encode_all(read_rows(data.eval_file), tokenizer, data)
    kernels = {name: plan.strategy.kernels(profile, plan.options) for name, plan in plans.items()}
    return _Material(config, tokenizer, fingerprint, train, evaluation, kernels)


def _train(
    args: LossPluginArguments,
    model_args: ModelArguments,
    data: DataArguments,
    material: _Material,
    cache: Path,
    label: str | None,
) -> tuple[dict[str, Any], dict[str, int]]:
    """One run of the Trainer: its share of the summary, and the size of the batch whose memory was measured."""
    _use_one_gpu(args)
    if args.device.type == "cpu":
        args.dataloader_pin_memory = False  # there is nothing to copy to, and torch warns
    set_seed(args.seed)
    model = load_model(model_args, material.config)
    if data.packing:
        _check_packing(args, model)
    if material.fingerprint is not None and args.process_index == 0:
        keep_tokenizer(material.tokenizer, material.fingerprint, cache)
    trainer = JobTrainer(
        model=model,
        args=args,
        train_dataset=material.train,
        eval_dataset=material.evaluation,
        data_collator=Collator(material.tokenizer.pad_token_id),
        processing_class=material.tokenizer,
    )
    trainer.add_callback(_LogLast())
    if label is not None and not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(_Bar(label))
    resume = args.resume_from_checkpoint
    done = trainer.train(resume_from_checkpoint=True if resume in ("true", "True") else resume)
    if args.save_strategy != "no":
        trainer.save_model()
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    report = trainer.loss_report
    result = {
        "final_loss": trainer.last_loss(default=logged[-1][1] if logged else done.training_loss),
        "losses": [loss for _, loss in logged],
        "steps": [step for step, _ in logged],
        "tokens_per_s": report["tokens_per_s"],
        "loss_peak_bytes": report["loss_peak_bytes"],
        "chosen": list(report["chosen"]),
        "kernels": list(report["kernels"]) or [material.kernels[str(report["strategy"])]],
    }
    if material.evaluation is not None:
        result["eval_loss"] = trainer.evaluate()["eval_loss"]
    return result, trainer.batch_size()


class JobTrainer(LossPluginTrainer):
    """Keeps what the report needs of the training steps: the last one's loss, and the batch that memory was of."""

    _step = -1
    _step_loss: Tensor | None = None
    _rows = 0
    _labels: Tensor | None = None

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        labels = inputs.get("labels")
        # where memory is watched, that is in the first step; where it is counted, the largest batch has the peak
        measured = not self._rows or has_counters(self.args.device)
        if measured and isinstance(labels, Tensor) and labels.numel() > self._rows:
            self._rows, self._labels = labels.numel(), (labels != IGNORED).sum()
        loss = super().training_step(model, inputs, *args, **kwargs)
        same = self._step == self.state.global_step and self._step_loss is not None
        self._step_loss = self._step_loss + loss if same else loss  # type: ignore[operator] # it is not None
        self._step = self.state.global_step
        return loss

    def last_loss(self, default: float) -> float:
        """The loss of the last step, which the log may have only within a mean; ``default`` where there was none."""
        if self._step_loss is None:
            return default
        loss: Any = self._step_loss
        return float(self.accelerator.reduce(loss, "mean") if self.args.world_size > 1 else loss)

    def batch_size(self) -> dict[str, int]:
        """Tokens of the batch whose memory was measured, padding included, and how many of them have a label."""
        return {"rows": self._rows, "labels": 0 if self._labels is None else int(self._labels)}


class _LogLast(TrainerCallback):
    """Logs the last step too, so that there is a curve and its end is the end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True


def _use_one_gpu(args: LossPluginArguments) -> None:
    """Keep the Trainer from torch's DataParallel, which copies the model to every GPU at every step."""
    if args.n_gpu > 1:
        logger.warning(
            "This process uses one of %d GPUs. For all of them: %s (a copy of the model on each; for parts of it see "
            "configs/accelerate/)",
            args.n_gpu,
            launch_line(args.n_gpu),
        )
        args._n_gpu = 1


def _check_packing(args: LossPluginArguments, model: Any) -> None:
    """Refuse packing where attention would not see the documents' boundaries."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(type(inner).forward).parameters:
        raise ConfigError(
            f"packing was asked for, but {type(inner).__name__} takes no position_ids, so documents would see each "
            "other. Set packing: false."
        )
    attention = str(inner.config._attn_implementation)
    largest = max(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    if "flash" in attention and largest > 1:
        raise ConfigError(
            f"packing was asked for, but {attention} sees boundaries only in batches of one sequence, and the batch "
            f"size is {largest}. Set per_device_train_batch_size and per_device_eval_batch_size to 1 with a larger "
            "max_length, or attn_implementation: sdpa."
        )


class _Bar(ProgressCallback):
    """The Trainer's progress bar with the strategy's name and the loss in it, in place of a line for each log."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        bar: Any = self.training_bar
        if bar is not None:
            bar.set_description(f"{self.label:>8}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        bar: Any = self.training_bar
        if bar is not None and logs and "loss" in logs:
            bar.set_postfix_str(f"loss {logs['loss']:.4f}")


def _write(folder: Path, summary: dict[str, Any]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "summary.json"]
    files[0].write_text(json.dumps(summary, indent=2) + "\n")
    results = summary["strategies"]
    curves = {name: (r["steps"], r["losses"]) for name, r in results.items() if r["losses"]}
    peaks = {name: r["loss_peak_bytes"] for name, r in results.items() if r["loss_peak_bytes"]}
    try:
        from ...diagnostics.plots import plot_losses, plot_peaks

        if curves:
            files.append(plot_losses(curves, folder / "loss.png"))
        if peaks:
            files.append(plot_peaks(peaks, folder / "memory.png", summary["problem"]))
    except MissingDependencyError as error:
        logger.warning("No plots were drawn. %s", error)
    return files
