"""What commands share: errors as one sentence, tables, JSON."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from ..errors import LossPluginError, VerificationError

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 120


def explains_errors(command: F) -> F:
    """Turn this package's own errors into one sentence on stderr and exit code 2, or 1 where a comparison with stock
    failed; others keep their traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except LossPluginError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, VerificationError) else 2) from error

    return wrapped  # type: ignore[return-value]


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2))


def ended(text: str) -> str:
    """A sentence with its full stop, unless it ends otherwise."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def shortened(text: str, limit: int) -> str:
    """One line of at most ``limit`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3].rstrip() + "..."


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), note: str = ""
) -> None:
    """A table on stdout; columns named in ``right`` are numbers, and ``note`` stands under the title."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if sys.stdout.isatty() else WIDTH  # a pipe has no width
    console.print(f"\n{title}", style="bold")
    if note:
        console.print(note)
    console.print(table)
