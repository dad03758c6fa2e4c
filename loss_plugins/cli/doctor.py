"""``loss-plugins doctor``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._show import ended, explains_errors, show_json, show_table

if TYPE_CHECKING:
    from ..diagnostics.machine import Finding, Machine


@explains_errors
def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.yaml]", help="A training file: ours, axolotl's, LLaMA-Factory's, ms-swift's or verl's."
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="Whose file it is, where that cannot be seen: ours, axolotl, llamafactory, swift or verl."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What will run on this machine, what is missing, and what to type; and whether a training file fits it.

    Exit codes: 0 if nothing stands in the way, 1 if something that is asked for cannot run, 2 if the file cannot be
    read or whose it is cannot be seen; with --json 1 for that too, and the error is in the JSON. For the facts alone,
    without a verdict: loss-plugins env.
    """
    from ..diagnostics.environment import versions
    from ..diagnostics.machine import by_gravity, look

    machine = look()
    examined: dict[str, Any] | None = None
    findings = list(machine.findings)
    if file is not None:
        examined, more = _examined(file, framework, machine, as_json)
        findings += more
    ordered = by_gravity(findings)
    runs = _runs(machine)
    is_well = all(finding.level != "error" for finding in ordered)
    if as_json:
        show_json({
            "ok": is_well, "versions": versions(), "device": _device(machine), **runs, "file": examined,
            "findings": [asdict(finding) for finding in ordered],
            "missing": [dict(zip(("package", "for", "do"), each, strict=True)) for each in machine.missing],
        })  # fmt: skip
    else:
        _show(machine, runs, examined, ordered, versions())
    if not is_well:
        raise typer.Exit(1)


def _examined(
    file: Path, framework: str | None, machine: Machine, as_json: bool
) -> tuple[dict[str, Any] | None, list[Finding]]:
    """What a file is, and what is wrong with it; for JSON also that it cannot be read.

    Raises:
        ConfigError: it cannot be read, or whose it is cannot be seen.
    """
    from ..diagnostics.machine import Finding
    from ..errors import ConfigError

    if machine.profile is None:
        return None, [Finding("error", f"{file} was not examined, since torch cannot be imported")]
    try:
        from ._training_file import examine

        return examine(file, framework, machine.profile)
    except ModuleNotFoundError as error:
        return None, [Finding("error", f"{file} was not examined: {error}", (f"pip install {error.name}",))]
    except ConfigError as error:
        if not as_json:
            raise
        return None, [Finding("error", str(error).rstrip("."))]


def _runs(machine: Machine) -> dict[str, Any]:
    """What each strategy would run here, for a head of usual size, and what `auto` would choose."""
    if machine.profile is None:
        return {"strategies": [], "auto": None}
    from ..strategies import select
    from ._problem import EXAMPLE, peaks, problem_of

    problem = problem_of(*EXAMPLE, "bf16")
    chosen = select("auto", None, problem, machine.profile)
    return {"strategies": peaks(problem, machine.profile), "auto": chosen.describe(machine.profile)}


def _device(machine: Machine) -> dict[str, Any] | None:
    """The facts that decide what runs."""
    profile = machine.profile
    if profile is None:
        return None
    found: dict[str, Any] = {"kind": profile.kind, "name": profile.name}
    if profile.npu is not None:
        facts = asdict(profile.npu)
        found |= {key: facts[key] for key in ("cube_cores", "vector_cores", "ub_bytes", "cann", "operators")}
    return found


def _show(
    machine: Machine,
    runs: dict[str, Any],
    examined: dict[str, Any] | None,
    findings: tuple[Finding, ...],
    found: dict[str, str],
) -> None:
    from ._problem import EXAMPLE, PEAK_COLUMNS, peak_rows

    typer.echo(_words(machine))
    typer.echo(", ".join(f"{name} {version}" for name, version in found.items()))
    if runs["strategies"]:
        rows, hidden, vocab = EXAMPLE
        title = f"What will run, for {rows} tokens, hidden {hidden}, vocabulary {vocab}, bfloat16"
        show_table(title, PEAK_COLUMNS, peak_rows(runs["strategies"]), right=PEAK_COLUMNS[1:3])
        typer.echo(f"auto: {runs['auto']}")
    if examined is not None:
        from ._training_file import NAMES

        typer.echo(f"\n{examined['path']}: a file {NAMES[examined['framework']]}; {examined['asks']}")
        if examined.get("start"):
            typer.echo(f"Start it with: {examined['start']}")
    for finding in findings:
        typer.echo(f"\n{finding.level.capitalize()}: {ended(finding.what)}")
        for line in finding.do:
            typer.echo(f"  {line}")
    if machine.missing:
        show_table("Not installed, and not needed without the feature", ("package", "for", "type"), machine.missing)
    if all(finding.level == "note" for finding in findings):
        absent = None if examined is None else examined["not_installed"]
        last = f"The file is well, but {absent} is not installed here: pip install {absent}"
        typer.echo(last if absent else "All is well.")


def _words(machine: Machine) -> str:
    """The device in a line."""
    profile = machine.profile
    if profile is None:
        return "Device: unknown, since torch cannot be imported"
    words = f"Device: {profile.kind}" + (f", {profile.name}" if profile.name not in ("", profile.kind) else "")
    if profile.npu is not None and profile.npu.vector_cores:
        found = profile.npu
        words += f", {found.cube_cores} cube and {found.vector_cores} vector cores, UB {found.ub_bytes >> 10} KiB"
        words += f", CANN {found.cann}" if found.cann else ""
    return words
