"""``loss-plugins train``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from ._show import explains_errors, show_table


def _keys(asked: bool) -> None:
    if asked:
        from ._keys import show_keys

        show_keys()
        raise typer.Exit


@explains_errors
def train(
    context: typer.Context,
    config: str = typer.Argument(..., metavar="CONFIG.yaml", help="The job: key: value lines."),
    keys: bool = typer.Option(False, "--keys", is_eager=True, callback=_keys, help="All keys, their defaults, help."),
) -> None:
    """Train a model as a YAML file says: loss keys beside those of transformers' TrainingArguments, flat.

    \b
    The main keys; --keys lists all, with their defaults:
      loss_strategy       auto, naive, chunked, flce or cce
      loss_options        options of that strategy: {workspace_mb: 64}
      strategies          in place of loss_strategy, several to compare
      model_name_or_path  a folder, an id of the Hugging Face Hub, or a .gguf
      model_config        in its place, a new model: {model_type: llama, ...}
      train_file          .jsonl, .parquet or .txt
      embedded_corpus     in its place: python_stdlib, which is always there
      max_length          longest sequence in tokens
      packing             true: documents one after another, no padding
      lora_r              rank of LoRA adapters, to train only these
      output_dir          where the summary, the plots and the model go
      max_steps, learning_rate, per_device_train_batch_size, ...

    \b
    Any key can be overridden behind the file:
      loss-plugins train job.yaml --loss_strategy chunked --max_steps 20
      loss-plugins train job.yaml --strategies naive cce
      loss-plugins train job.yaml --loss_options '{"workspace_mb": 64}'
      loss-plugins train job.yaml --model_config.hidden_size 64

    Files are looked for, and written, from the current folder, wherever the YAML lies.
    """
    if "--help" in context.args:
        typer.echo(context.get_help())
        return
    if "--keys" in context.args:
        _keys(True)
    if config.startswith("-"):
        raise typer.BadParameter(f"The job's YAML file comes first, before {config}.")
    from ..integrations.hf.job import SETTINGS, run
    from ._settings import read_job

    with _said_aloud():
        outcome = run(*read_job(Path(config), context.args, SETTINGS))
    if outcome.files:
        _show(outcome.summary["strategies"])
        typer.echo("Written: " + ", ".join(str(file) for file in outcome.files))


@contextmanager
def _said_aloud() -> Iterator[None]:
    """This package's messages on stderr while the job runs: what was read, what auto chose, what was left out.

    What was patched is not among them: the table says it shorter.
    """
    logger, handler = logging.getLogger("loss_plugins"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or ".models." not in record.name)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _show(results: dict[str, dict[str, Any]]) -> None:
    from ..diagnostics.plots import human_bytes

    columns = ("strategy", "final loss", "tokens/s", "peak of the loss step", "kernels")
    rows = []
    for name, result in results.items():
        peak, speed = result["loss_peak_bytes"], result["tokens_per_s"]
        ran = ", ".join(result["chosen"])
        rows.append(
            (
                name if ran == name else f"{name} ({ran})",
                f"{result['final_loss']:.4f}",
                "-" if not speed else f"{speed:,.0f}",
                "-" if not peak else human_bytes(peak),
                _kernels(result["kernels"]),
            )
        )
    show_table("Result", columns, rows, right=columns[1:4])
    first, *others = results.values()
    far = [abs(a - b) for other in others for a, b in zip(first["losses"], other["losses"], strict=False)]
    if far:
        typer.echo(f"Largest distance between the loss curves at any step: {max(far):.1e}")


def _kernels(names: Iterable[str]) -> str:
    """What they are written in: ``triton + torch``."""
    words = {word for name in names for word in ("triton", "torch") if word in name}
    return " + ".join(sorted(words, reverse=True)) or ", ".join(names)
