"""A loss described by numbers, for the commands that compute nothing: each strategy's peak, and auto's choice."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, UnsupportedError, unknown_name

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
EXAMPLE = (8192, 4096, 128_256)
"""Rows, hidden width and vocabulary of a usual step: Llama-3-8B's head."""
DEVICES = ("cpu", "cuda", "mps", "xpu", "npu")


def problem_of(rows: int, hidden: int, vocab: int, dtype: str) -> Any:
    """A `Problem` with all gradients.

    Raises:
        ConfigError: an unknown dtype.
    """
    import torch

    from ..strategies import Problem

    name = DTYPES.get(dtype, dtype)
    if name not in DTYPES.values():
        raise ConfigError(unknown_name("dtype", dtype, [*DTYPES, *DTYPES.values()]))
    return Problem(rows, hidden, vocab, dtype=getattr(torch, name))


def profile_of(device: str | None) -> tuple[Any, int | None]:
    """The facts of a device of this machine, and its free bytes where they can be had.

    Raises:
        ConfigError: no such device.
    """
    from ..device import DeviceProfile, free_bytes
    from ..diagnostics.environment import best_device

    here = best_device()
    device = device or here
    kind = device.split(":")[0]
    if kind not in DEVICES:
        raise ConfigError(unknown_name("device", device, DEVICES))
    if kind not in ("cpu", here):
        raise ConfigError(
            f"device {device!r} was asked for, but this machine has only {here!r}. Leave --device out for that."
        )
    try:
        return DeviceProfile.probe(device), free_bytes(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} could not be asked for its facts: {error}. Check its number.") from error


def peaks(problem: Any, profile: Any) -> list[dict[str, Any]]:
    """Each strategy with its default options: ``peak_bytes`` and ``kernels``, or ``cannot`` and why."""
    from ..strategies import STRATEGIES, select

    found: list[dict[str, Any]] = []
    for name in STRATEGIES.names():
        try:
            plan = select(name, None, problem, profile)
        except UnsupportedError as error:
            found.append({"strategy": name, "cannot": str(error)})
            continue
        found.append(
            {
                "strategy": name,
                "peak_bytes": plan.strategy.peak_bytes(problem.on(profile), plan.options),
                "kernels": plan.strategy.kernels(profile, plan.options),
            }
        )
    return found


def peak_rows(found: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Table rows: strategy, peak, share of naive's, kernels."""
    from ..diagnostics.plots import human_bytes

    most = next((f["peak_bytes"] for f in found if f["strategy"] == "naive" and "peak_bytes" in f), None)
    rows = []
    for entry in found:
        if "cannot" in entry:
            rows.append((entry["strategy"], "-", "-", entry["cannot"]))
            continue
        share = f"{entry['peak_bytes'] / most:.0%}" if most else "-"
        rows.append((entry["strategy"], human_bytes(entry["peak_bytes"]), share, entry["kernels"]))
    return rows


PEAK_COLUMNS = ("strategy", "peak", "of naive", "kernels")
