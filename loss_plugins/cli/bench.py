"""``loss-plugins bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ._problem import problem_of
from ._show import explains_errors, show_json, show_table

COLUMNS = ("contender", "ms", "spread", "peak MiB", "error dX", "error dW", "same twice")


@explains_errors
def bench(
    shape: str = typer.Option("tiny", help="A model's head by name, several with commas: see loss_plugins/bench."),
    real_hidden: str = typer.Option(None, help="A trained model's {'X': hidden states, 'y': labels}, by torch.save."),
    real_head: str = typer.Option(None, help="That model's head (V, H), by torch.save."),
    masked: bool = typer.Option(False, help="Also with half of the labels ignored."),
    frozen: bool = typer.Option(False, help="Also with a frozen head."),
    dtype: str = typer.Option("bf16", help="fp32, bf16 or fp16."),
    device: str = typer.Option(None, help="cpu or cuda: default is this machine's accelerator, else its CPU."),
    iterations: int = typer.Option(7, min=1, help="Timed runs of each."),
    only: str = typer.Option(None, help="Contenders to measure, with commas; default all that can be imported."),
    output: str = typer.Option(None, help="Write the rows as JSON to this file too."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Time, peak memory and gradient error of every strategy beside other packages, on the same inputs."""
    import torch

    from ..bench.contenders import contenders
    from ..bench.inputs import SHAPES, flat, half_masked, lifted
    from ..bench.measure import run
    from ..diagnostics.environment import best_device, report
    from ..errors import ConfigError, unknown_name

    device = device or best_device()
    kind = problem_of(1, 1, 1, dtype).dtype
    found, missing = contenders()
    wanted = [name.strip() for name in only.split(",")] if only else list(found)
    for name in wanted:
        if name not in found:
            why = f" It is not here: {missing[name]}." if name in missing else ""
            raise ConfigError(unknown_name("contender", name, found) + why)
    names = [name.strip() for name in shape.split(",")]
    for name in names:
        if name not in SHAPES:
            raise ConfigError(unknown_name("shape", name, SHAPES))
    if (real_hidden is None) != (real_head is None):
        raise ConfigError("--real-hidden and --real-head belong together. Give both, or neither for flat inputs only.")
    for path in (real_hidden, real_head):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{str(path)!r} is not a file. Save the tensors there with torch.save first.")

    results: list[dict[str, Any]] = []
    document = {"environment": report(), "missing": missing, "results": results}
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        made = [flat(SHAPES[name], kind, device)]
        if real_hidden is not None:
            saved, head = torch.load(real_hidden, weights_only=True), torch.load(real_head, weights_only=True)
            made.append(lifted(SHAPES[name], saved["X"], head, saved["y"], kind, device))
        made += [half_masked(made[-1])] if masked else []
        for inputs in made:
            for mode in ("both", "frozen head") if frozen else ("both",):
                rows = run({c: found[c] for c in wanted}, inputs, mode, iterations)
                results += [{"shape": name, "device": device, "dtype": dtype, **row.as_dict()} for row in rows]
                if not as_json:
                    show_table(f"{name}, {inputs.kind} inputs, {mode}", COLUMNS, [_cells(row) for row in rows])
                if output is not None:  # after every table, so that an end that comes early loses nothing
                    Path(output).write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        show_json(document)
    elif missing:
        typer.echo("Not here: " + "; ".join(f"{name} ({why})" for name, why in missing.items()))


def _cells(row: Any) -> tuple[str, ...]:
    if row.failed:
        return (row.name, "-", row.failed, "-", "-", "-", "-")

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        row.name,
        number(row.ms, ".2f"),
        f"{number(row.ms_low, '.2f')} to {number(row.ms_high, '.2f')}",
        number(row.peak_mib, ".0f"),
        number(row.error_hidden, ".1e"),
        number(row.error_weight, ".1e"),
        "yes" if row.deterministic else "no",
    )
