"""``loss-plugins env``."""

from __future__ import annotations

import typer

from ._show import explains_errors, show_json, show_table


@explains_errors
def env(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Versions and the device, for a bug report."""
    from ..diagnostics.environment import report
    from ..diagnostics.plots import human_bytes

    found = report()
    if as_json:
        show_json(found)
        return
    device = dict(found["device"])
    npu = device.pop("npu", {})
    rows = [*found["versions"].items(), ("system", found["system"]), ("cpu", found["cpu"])]
    if "ram_bytes" in found:
        rows.append(("memory", human_bytes(found["ram_bytes"])))
    if "total_bytes" in device:
        device |= {"total_bytes": human_bytes(device["total_bytes"])}
    rows += [(f"device {key}", str(value)) for key, value in device.items()]
    rows += [(f"NPU {key}", ", ".join(value) if key == "operators" else str(value)) for key, value in npu.items()]
    rows.append(("Triton can launch", "yes" if found["triton_can_launch"] else "no"))
    show_table("Environment", ("what", "value"), rows)
