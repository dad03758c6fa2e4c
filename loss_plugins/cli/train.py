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


@explains_errors
def train(
    context: typer.Context,
    config: str = typer.Argument(..., metavar="CONFIG.yaml", help="The job: see configs/quickstart.yaml."),
) -> None:
    """Train a model as a YAML file says: loss keys beside those of transformers' TrainingArguments, flat.

    Any key can be overridden behind the file: --loss_strategy chunked --max_steps 20
    --loss_options '{"workspace_mb": 64}' --model_config.hidden_size 64.
    """
    if "--help" in context.args:
        typer.echo(context.get_help())
        return
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
        rows.append(
            (
                name,
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
