"""The app behind ``loss-plugins``. Exit codes: 0 done, 1 the work failed, 2 what was asked for is wrong."""

from __future__ import annotations

import typer

from .bench import bench
from .doctor import doctor
from .env import env
from .estimate import estimate
from .families import families
from .frameworks import install_hook, llamafactory, remove_hook
from .plan import plan
from .strategies import strategies
from .train import train
from .verify import verify

app = typer.Typer(
    name="loss-plugins",
    help="Language-model losses without logits in memory.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
# everything behind CONFIG belongs to the job's own keys
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)(train)
app.command()(strategies)
app.command()(plan)
app.command()(estimate)
app.command()(families)
app.command()(verify)
app.command()(bench)
app.command()(env)
app.command()(doctor)
app.add_typer(llamafactory, name="llamafactory")
app.command()(install_hook)
app.command()(remove_hook)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Language-model losses without logits in memory."""
    if version:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit
