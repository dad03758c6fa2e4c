"""What commands share: errors as one sentence, tables, JSON."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from ..errors import LossPluginError

F = TypeVar("F", bound=Callable[..., Any])


def explains_errors(command: F) -> F:
    """Turn this package's own errors into one sentence on stderr and exit code 2; others keep their traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except LossPluginError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error

    return wrapped  # type: ignore[return-value]


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table on stdout; columns named in ``right`` are numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # a pipe has no width: leave lines whole for whoever reads them
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"\n{title}", style="bold", markup=False)
    console.print(table)
