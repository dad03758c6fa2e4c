"""``loss-plugins strategies``."""

from __future__ import annotations

from typing import Any

import typer

from ._show import explains_errors, show_json, show_table


@explains_errors
def strategies(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """The loss strategies and their options."""
    from ..strategies import STRATEGIES

    found = [_describe(STRATEGIES.get(name)) for name in STRATEGIES.names()]
    if as_json:
        show_json(found)
        return
    show_table("Strategies (loss_strategy)", ("name", "what"), [(s["name"], s["summary"]) for s in found])
    options = [(s["name"], o["name"], str(o["default"]), o["help"]) for s in found for o in s["options"]]
    show_table("Their options (loss_options)", ("strategy", "option", "default", "what"), options)


def _describe(strategy: Any) -> dict[str, Any]:
    from dataclasses import fields

    options = [
        {"name": f.name, "default": f.default, "help": f.metadata.get("help", "")} for f in fields(strategy.Options)
    ]
    return {"name": strategy.name, "summary": strategy.summary, "options": options}
