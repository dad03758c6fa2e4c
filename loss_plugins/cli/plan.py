"""``loss-plugins plan``."""

from __future__ import annotations

import typer

from ._problem import EXAMPLE, PEAK_COLUMNS, peak_rows, peaks, problem_of, profile_of
from ._show import explains_errors, show_json, show_table


@explains_errors
def plan(
    rows: int = typer.Option(EXAMPLE[0], min=1, help="Tokens in a step: batch times sequence length."),
    hidden: int = typer.Option(EXAMPLE[1], min=1, help="Hidden width of the model."),
    vocab: int = typer.Option(EXAMPLE[2], min=1, help="Vocabulary of the model."),
    dtype: str = typer.Option("bf16", help="fp32, bf16, fp16 or fp64."),
    device: str = typer.Option(None, help="cpu, cuda, ...: default is this machine's accelerator, else its CPU."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """What loss_strategy auto would choose here, and what each strategy would take, for a head of any size."""
    from ..strategies import select

    problem = problem_of(rows, hidden, vocab, dtype)
    profile, free = profile_of(device)
    chosen = select("auto", None, problem, profile, free)
    found = peaks(problem, profile)
    if as_json:
        passed_over = [{"strategy": name, "why": why} for name, why in chosen.passed_over]
        show_json({
            "chosen": chosen.strategy.name, "reason": chosen.reason, "passed_over": passed_over, "device": profile.kind,
            "rows": rows, "hidden": hidden, "vocab": vocab, "dtype": dtype, "strategies": found,
        })  # fmt: skip
        return
    typer.echo(f"auto on {profile.name}: {chosen.describe(profile)}")
    shape = f"{rows} tokens, hidden {hidden}, vocabulary {vocab}, {dtype}"
    title = f"Peak memory of the loss step, gradients included: {shape}"
    show_table(title, PEAK_COLUMNS, peak_rows(found), right=PEAK_COLUMNS[1:3])
    typer.echo(
        "Sizes of your own: --rows, --hidden, --vocab, --dtype. From a job's YAML or a model: loss-plugins estimate."
    )
    typer.echo("In a YAML: loss_strategy: auto, or a name. The options of each: loss-plugins strategies.")
