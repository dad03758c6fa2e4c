"""``loss-plugins estimate``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from ..errors import ConfigError
from ._problem import DTYPES, PEAK_COLUMNS, peak_rows, peaks, problem_of, profile_of
from ._show import explains_errors, show_json, show_table

_STEP = ("per_device_train_batch_size", "max_length", "dtype")


@explains_errors
def estimate(
    model: str = typer.Argument(
        ..., metavar="CONFIG_OR_MODEL", help="A job's YAML, or a model's folder, hub id or GGUF file."
    ),
    batch: int | None = typer.Option(
        None, min=1, help="Sequences in a step on one device; default a job's per_device_train_batch_size."
    ),
    seq: int | None = typer.Option(None, min=1, help="Tokens in a sequence; default a job's max_length."),
    dtype: str = typer.Option(None, help="fp32, bf16, fp16 or fp64; default a job's bf16, fp16 or dtype, else bf16."),
    device: str = typer.Option(None, help="cpu, cuda, ...: default is this machine's accelerator, else its CPU."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Peak memory of each strategy for a model, from its configuration alone."""
    is_job = Path(model).suffix in (".yaml", ".yml")
    job: dict[str, Any] = _values(Path(model)) if is_job else {"model_name_or_path": model}
    batch = batch or job.get("per_device_train_batch_size")
    seq = seq or job.get("max_length")
    if not batch or not seq:
        missing = " and ".join(name for name, value in (("--batch", batch), ("--seq", seq)) if not value)
        raise ConfigError(f"{missing} must be given for a model: only a job's YAML says how long its batches are.")
    dtype = dtype or _dtype(job)
    hidden, vocab = _sizes(model, job)
    profile, _ = profile_of(device)
    found = peaks(problem_of(batch * seq, hidden, vocab, dtype), profile)
    if as_json:
        show_json({"rows": batch * seq, "hidden": hidden, "vocab": vocab, "dtype": dtype, "strategies": found})
        return
    shape = f"{batch} x {seq} tokens, hidden {hidden}, vocabulary {vocab}, {dtype}"
    title = f"Peak memory of the loss step, gradients included: {shape}"
    show_table(title, PEAK_COLUMNS, peak_rows(found), right=PEAK_COLUMNS[1:3])


def _values(path: Path) -> dict[str, Any]:
    """A job's values, with the defaults of those that say how large a step is."""
    from ..integrations.hf.job import SETTINGS
    from ._settings import read_values

    defaults = {f.name: f.default for cls in SETTINGS for f in fields(cls) if f.name in _STEP}
    return defaults | read_values(path, SETTINGS)


def _dtype(job: dict[str, Any]) -> str:
    """The type of the hidden states in a job's training."""
    if job.get("bf16") or job.get("fp16"):  # autocast stands over the weights' type
        return "bf16" if job.get("bf16") else "fp16"
    name = job.get("dtype", "bf16")
    return {long: short for short, long in DTYPES.items()}.get(name, name)


def _sizes(name: str, job: dict[str, Any]) -> tuple[int, int]:
    """(hidden, vocabulary) of a model. Only its configuration is read."""
    from ..integrations.hf.loading import ModelArguments, load_config

    arguments = ModelArguments(job.get("model_name_or_path"), job.get("model_config"))
    config: Any = load_config(arguments).get_text_config()
    hidden, vocab = getattr(config, "hidden_size", None), getattr(config, "vocab_size", None)
    if not hidden or not vocab:
        raise ConfigError(
            f"The configuration of {name!r} names no hidden_size or vocab_size, so nothing can be estimated from it. "
            "Use loss-plugins plan with the numbers."
        )
    return hidden, vocab
