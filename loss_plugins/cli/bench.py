"""``loss-plugins bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ._problem import problem_of, profile_of
from ._show import WIDTH, explains_errors, shortened, show_json, show_table

COLUMNS = ("contender", "ms", "spread", "peak MiB", "error dX", "error dW", "same twice")
MEANINGS = {
    "flat": "flat: every token about equally likely, as at the start of training",
    "real": "real: a trained model's",
    "half masked": "half masked: every second label ignored",
    "both": "both: gradients of hidden states (dX) and head (dW)",
    "frozen head": "frozen head: gradients of hidden states (dX) only",
}


@explains_errors
def bench(
    shape: str = typer.Option(
        "tiny",
        help="A model's head by name, several with commas: tiny, gemma2-2b, gemma3-270m, llama3-8b, qwen2.5-7b, "
        "qwen3-0.6b.",
    ),
    real_hidden: str = typer.Option(None, help="A trained model's {'X': hidden states, 'y': labels}, by torch.save."),
    real_head: str = typer.Option(None, help="That model's head (V, H), by torch.save."),
    masked: bool = typer.Option(False, help="Also with half of the labels ignored."),
    frozen: bool = typer.Option(False, help="Also with a frozen head."),
    dtype: str = typer.Option("bf16", help="fp32, bf16 or fp16."),
    device: str = typer.Option(None, help="cpu or cuda: default is this machine's accelerator, else its CPU."),
    iterations: int = typer.Option(7, min=1, help="Timed runs of each."),
    only: str = typer.Option(
        None,
        help="Contenders to measure, with commas; default all that can be imported of naive, chunked, flce, cce, "
        "torch.compile, torch F.linear_cross_entropy, Liger FLCE, Liger FLCE CuTe-DSL, Apple cce, Apple cce_exact, "
        "Apple cce_kahan_full_c.",
    ),
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
    profile_of(device)  # refuses one that is not here
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
                    _show(name, inputs.kind, mode, rows)
                if output is not None:  # after every table, so that an end that comes early loses nothing
                    Path(output).write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        show_json(document)
        return
    for name, why in missing.items():
        typer.echo(shortened(f"Not here: {name} ({why}", WIDTH - 1) + ")")


def _show(shape: str, kind: str, mode: str, rows: list[Any]) -> None:
    note = "; ".join(MEANINGS[word] for word in (*kind.split(", "), mode))
    cells = [_cells(row) for row in rows]
    show_table(f"{shape}, {kind} inputs, {mode}", COLUMNS, cells, right=COLUMNS[1:6], note=note)
    for row in rows:
        if row.failed:
            typer.echo(shortened(f"{row.name} failed: {row.failed}", WIDTH))


def _cells(row: Any) -> tuple[str, ...]:
    if row.failed:
        return (row.name, "-", "failed", "-", "-", "-", "-")

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
