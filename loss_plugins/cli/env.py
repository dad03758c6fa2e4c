"""``loss-plugins env``."""

from __future__ import annotations

import typer

from ._show import explains_errors, show_json, show_table


@explains_errors
def env(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Versions and the device, for a bug report."""
    from ..diagnostics.environment import report

    found = report()
    if as_json:
        show_json(found)
        return
    device = found["device"]
    rows = [*found["versions"].items(), ("system", found["system"])]
    rows += [(f"device {key}", str(value)) for key, value in device.items()]
    rows.append(("Triton can launch", "yes" if found["triton_can_launch"] else "no"))
    show_table("Environment", ("what", "value"), rows)
