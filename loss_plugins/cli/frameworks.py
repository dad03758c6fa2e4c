"""``loss-plugins llamafactory``, ``install-hook`` and ``remove-hook``."""

from __future__ import annotations

from typing import Literal

import typer

from ._show import explains_errors

llamafactory = typer.Typer(help="LLaMA-Factory, with our loss keys in its YAML.", no_args_is_help=True)


@llamafactory.callback()
def _only_one() -> None:
    """LLaMA-Factory, with our loss keys in its YAML."""


@llamafactory.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
@explains_errors
def train(
    context: typer.Context,
    config: str = typer.Argument(..., metavar="CONFIG.yaml", help="LLaMA-Factory's file, with loss_strategy in it."),
) -> None:
    """Train as `llamafactory-cli train` does; key=value words behind the file override it.

    \b
    On several GPUs, with the launcher that LLaMA-Factory uses:
      torchrun --nproc-per-node 8 -m loss_plugins llamafactory train CONFIG.yaml
    """
    from ..integrations.llamafactory.run import train as run

    run(config, context.args)


@explains_errors
def install_hook(
    framework: Literal["llamafactory"] = typer.Argument(..., help="What is to understand our keys."),
) -> None:
    """Let `llamafactory-cli train` itself understand our keys, in this Python environment."""
    from ..integrations.llamafactory.hook import install_hook as install

    typer.echo(f"Written: {install()}. `loss-plugins remove-hook {framework}` deletes it.")


@explains_errors
def remove_hook(framework: Literal["llamafactory"] = typer.Argument(..., help="What has a hook.")) -> None:
    """Take back what install-hook did."""
    from ..integrations.llamafactory.hook import remove_hook as remove

    path = remove()
    typer.echo(f"There is no hook for {framework} in this environment." if path is None else f"Deleted: {path}")
