"""``loss-plugins estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ..errors import ConfigError
from ._problem import PEAK_COLUMNS, peak_rows, peaks, problem_of, profile_of
from ._show import explains_errors, show_json, show_table


@explains_errors
def estimate(
    model: str = typer.Argument(
        ..., metavar="CONFIG_OR_MODEL", help="A job's YAML, or a model's folder, hub id or GGUF file."
    ),
    batch: int = typer.Option(..., min=1, help="Sequences in a step on one device."),
    seq: int = typer.Option(..., min=1, help="Tokens in a sequence."),
    dtype: str = typer.Option("bf16", help="fp32, bf16, fp16 or fp64."),
    device: str = typer.Option(None, help="cpu, cuda, ...: default is this machine's accelerator, else its CPU."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Peak memory of each strategy for a model, from its configuration alone."""
    hidden, vocab = _sizes(model)
    profile, _ = profile_of(device)
    found = peaks(problem_of(batch * seq, hidden, vocab, dtype), profile)
    if as_json:
        show_json({"rows": batch * seq, "hidden": hidden, "vocab": vocab, "dtype": dtype, "strategies": found})
        return
    shape = f"{batch} x {seq} tokens, hidden {hidden}, vocabulary {vocab}"
    title = f"Peak memory of the loss step, gradients included: {shape}"
    show_table(title, PEAK_COLUMNS, peak_rows(found), right=PEAK_COLUMNS[1:3])


def _sizes(name: str) -> tuple[int, int]:
    """(hidden, vocabulary) of a model. Only its configuration is read."""
    from ..integrations.hf.loading import ModelArguments, load_config

    if Path(name).suffix in (".yaml", ".yml"):
        from ._settings import read_yaml

        values = read_yaml(Path(name))
        arguments = ModelArguments(values.get("model_name_or_path"), values.get("model_config"))
    else:
        arguments = ModelArguments(model_name_or_path=name)
    config: Any = load_config(arguments).get_text_config()
    hidden, vocab = getattr(config, "hidden_size", None), getattr(config, "vocab_size", None)
    if not hidden or not vocab:
        raise ConfigError(
            f"The configuration of {name!r} names no hidden_size or vocab_size, so nothing can be estimated from it. "
            "Use loss-plugins plan with the numbers."
        )
    return hidden, vocab
