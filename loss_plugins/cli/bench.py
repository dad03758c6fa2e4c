"""``loss-plugins bench``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ..errors import ConfigError, LossPluginError
from ._problem import problem_of, profile_of
from ._show import WIDTH, explains_errors, shortened, show_json, show_table


@explains_errors
def bench(
    context: typer.Context,
    shape: str = typer.Option(
        None,
        help="A model's head by name, several with commas: tiny (default), gemma2-2b, gemma3-270m, llama3-8b, "
        "qwen2.5-7b, qwen3-0.6b.",
    ),
    rows: str = typer.Option(None, help="Tokens in place of the shape's own, several with commas."),
    hidden: int = typer.Option(None, min=1, help="With --vocab, a shape of your own; with --grid, its hidden width."),
    vocab: str = typer.Option(None, help="Classes of a shape of your own or of the grid, several with commas."),
    grid: bool = typer.Option(
        False, help="Measure auto beside each strategy over tokens and classes, and tell how much slower it is."
    ),
    inputs: str = typer.Option(
        None, help="flat, real and masked (half of the labels ignored), with commas; default flat and, if given, real."
    ),
    modes: str = typer.Option("both", help="both (gradients), frozen (head) and forward (only), with commas."),
    real_hidden: str = typer.Option(None, help="A trained model's {'X': hidden states, 'y': labels}, by torch.save."),
    real_head: str = typer.Option(None, help="That model's head (V, H), by torch.save."),
    dtype: str = typer.Option("bf16", help="fp32, bf16 or fp16."),
    device: str = typer.Option(None, help="cpu or cuda: default is this machine's accelerator, else its CPU."),
    iterations: int = typer.Option(None, min=1, help="Timed steps of each, at least; default 7, in a grid 3."),
    seconds: float = typer.Option(None, min=0, help="Limit of a table's timing; default none, in a grid 10."),
    only: str = typer.Option(
        None,
        help="Contenders to measure, with commas: names or patterns (cce*), or a strategy with any options "
        "(cce filter=off workspace_mb=64). --list has all.",
    ),
    skip: str = typer.Option(None, help="Contenders to leave out: names or patterns, with commas."),
    names: bool = typer.Option(False, "--list", help="List the contenders, and why one is not here; measure nothing."),
    output: Annotated[
        list[str] | None, typer.Option(help="Write results to this .json, .csv or .md file; may be repeated.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="Measure nothing: show this JSON file's results, of the shapes, inputs, modes and contenders "
            "that are named; may be repeated.",
        ),
    ] = None,
    plot: str = typer.Option(None, help="Draw figures of the results into this folder."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Time, peak memory and gradient error of every strategy beside other packages, on the same inputs."""
    from ..bench import document

    output = output or []
    for path in output:
        document.check_output(path)
    if names:
        _list(_words(only), _words(skip))
        return
    if source:
        found = document.read(source)
        chosen = _words(modes) if _is_given(context, "modes") else []
        _keep(found, _words(shape), _words(inputs), chosen, _words(only), _words(skip))
    else:
        kept = (shape, rows, hidden, vocab, grid)
        session, missing = _session(
            kept, inputs, modes, real_hidden, real_head, dtype, device, iterations, seconds, only, skip
        )
        facts = document.new_run(_command(context), session.device, list(session.contenders), missing, grid)
        found = {"runs": [facts]}
        _measure(session, found, output, quiet=as_json)
    if as_json:
        show_json(found)
    for run in found["runs"]:
        if not as_json and source:
            _show_run(run)
        if not as_json:
            _show_end(run)
    for path in output:
        document.write(found, path)
    if plot is not None:
        from ..bench.plots import draw

        for figure in draw(found, plot):
            typer.echo(f"Drawn: {figure}", err=True)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _numbers(option: str, text: str | None) -> list[int]:
    words = _words(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} must be whole numbers above 0, with commas, got {text!r}.")
    return [int(word) for word in words]


def _session(
    sizes: tuple[Any, ...], inputs: str | None, modes: str, real_hidden: str | None, real_head: str | None, dtype: str,
    device: str | None, iterations: int | None, seconds: float | None, only: str | None, skip: str | None,
) -> tuple[Any, dict[str, str]]:  # fmt: skip
    """What the options ask for, and which contenders are not here."""
    from ..bench.contenders import choose
    from ..bench.inputs import Trained
    from ..bench.session import Session, grid_of, shapes_of
    from ..diagnostics.environment import best_device
    from ..strategies import STRATEGIES

    shape, rows, hidden, vocab, grid = sizes
    device = device or best_device()
    profile_of(device)  # refuses one that is not here
    rows, vocab = _numbers("--rows", rows), _numbers("--vocab", vocab)
    if grid and shape:
        raise ConfigError("--grid has sizes of its own. Leave --shape out; --rows, --hidden and --vocab change them.")
    shapes = grid_of(rows, hidden, vocab) if grid else shapes_of(_words(shape), rows, hidden, vocab)
    if (real_hidden is None) != (real_head is None):
        raise ConfigError("--real-hidden and --real-head belong together. Give both, or neither for flat inputs only.")
    wanted = _words(only) or ([*STRATEGIES.names(), "auto"] if grid else [])
    found, missing = choose(wanted, _words(skip))
    if not found:
        raise ConfigError("No contender is left to measure. Change --only or --skip.")
    trained = Trained.load(real_hidden, real_head, device) if real_hidden and real_head else None
    if grid:
        kinds, iterations, seconds = ["real" if trained else "flat"], iterations or 3, seconds or 10.0
    else:
        kinds = ["flat", "real"] if trained else ["flat"]
    session = Session(
        shapes, found, problem_of(1, 1, 1, dtype).dtype, device, _words(inputs) or kinds, _words(modes), trained,
        iterations or 7, seconds,
    )  # fmt: skip
    return session, missing


def _measure(session: Any, found: dict[str, Any], output: Sequence[str], quiet: bool) -> None:
    """Measure, show each table, and write what there is after each, so that an end that comes early loses nothing."""
    import torch

    from ..bench import document
    from ..bench.measure import DeviceLostError, matmul_tflops

    begin = time.perf_counter()
    say: Callable[[str], None] = lambda line: typer.echo(  # noqa: E731
        shortened(f"[{time.perf_counter() - begin:6.1f} s] {line}", 200), err=True
    )
    (run,) = found["runs"]
    device = torch.device(session.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events, and some packages' kernels, go to the current one
    run["tflops"] = matmul_tflops(device, session.dtype)
    try:
        for rows in session.measure(say):
            run["results"] += rows
            for path in output:
                document.write(found, path)
            if not quiet:
                _show(run, rows)
    except DeviceLostError as error:
        raise _LostError(str(error)) from error


class _LostError(LossPluginError):
    """The device was lost; what was measured is written."""


def _show_run(run: dict[str, Any]) -> None:
    from ..bench.document import tables

    typer.echo(f"\n{run['device']}, {run['date']}: {run['command']}")
    for _, rows in tables(run["results"]):
        _show(run, rows)


def _show(run: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from ..bench.document import COLUMNS, cells, note, remarks, title

    columns = [column.replace(" ", "\n", 1) for column in COLUMNS]  # narrow ones, so that the names have room
    below = note(rows, run["tflops"])
    show_table(title(rows[0]), columns, [cells(row) for row in rows], right=columns[1:8], note=below)
    for line in remarks(rows):
        typer.echo(shortened(line, WIDTH))


def _show_end(run: dict[str, Any]) -> None:
    """What stands under the tables: how far auto is from the best, and who is not here."""
    from ..bench.document import regrets

    found = [entry for entry in regrets(run["results"]) if entry["mode"] == "both"]
    if found and run["grid"]:
        _show_grid(found)
    if found:
        worst = max(found, key=lambda entry: entry["regret_percent"])
        typer.echo(
            f"auto at its worst is {worst['regret_percent']:+.1f} % at {worst['rows']} x {worst['hidden']} x "
            f"{worst['vocab']}: it took {worst['chosen']}, {worst['auto_ms']:.2f} ms, and {worst['best']} takes "
            f"{worst['best_ms']:.2f} ms."
        )
    for name, why in run["missing"].items():
        typer.echo(shortened(f"Not here: {name} ({why}", WIDTH - 1) + ")")


def _show_grid(found: list[dict[str, Any]]) -> None:
    columns = sorted({entry["vocab"] for entry in found})
    lines = sorted({(entry["rows"], entry["hidden"], entry["inputs"]) for entry in found})
    cell = {}
    for entry in found:
        words = f"{entry['chosen']} {entry['auto_ms']:.2f} ({entry['regret_percent']:+.1f} %)"
        cell[entry["rows"], entry["hidden"], entry["inputs"], entry["vocab"]] = words
    show_table(
        "What auto took",
        ("tokens x hidden", *(f"{vocab} classes" for vocab in columns)),
        [(f"{key[0]} x {key[1]}, {key[2]}", *(cell.get((*key, vocab), "-") for vocab in columns)) for key in lines],
        right=[f"{vocab} classes" for vocab in columns],
        note="its ms, and how much slower it is than the best strategy asked for by name",
    )


def _keep(
    found: dict[str, Any], shapes: list[str], inputs: list[str], modes: list[str], only: list[str], skip: list[str]
) -> None:
    """Leave only these shapes', inputs', modes' and contenders' rows; an empty list keeps all."""
    from fnmatch import fnmatchcase

    def fits(name: str, words: list[str]) -> bool:
        return any(fnmatchcase(name.lower(), word.lower()) for word in words)

    def kept(row: dict[str, Any]) -> bool:
        kind = "masked" if "masked" in row["inputs"] else row["inputs"]
        return (
            (not shapes or row["shape"] in shapes)
            and (not inputs or kind in inputs)
            and (not modes or row["mode"].split(" ")[0] in modes)
            and (not only or fits(row["name"], only))
            and not fits(row["name"], skip)
        )

    for run in found["runs"]:
        run["results"] = [row for row in run["results"] if kept(row)]


def _list(only: list[str], skip: list[str]) -> None:
    from ..bench.contenders import choose
    from ..bench.peers import PEERS

    found, missing = choose(only, skip)
    lines = [(name, PEERS[name].package if name in PEERS else "ours", "") for name in found]
    lines += [(name, PEERS[name].package, why) for name, why in missing.items()]
    show_table("Contenders", ("name", "package", "why it is not here"), lines)


def _command(context: typer.Context) -> str:
    """The command line as it was given, so that a run can be repeated."""
    words = ["loss-plugins", "bench"]
    for parameter in context.command.params:
        name = parameter.name or ""
        if not _is_given(context, name):
            continue
        value = context.params[name]
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [parameter.opts[0]] if each is True else [parameter.opts[0], str(each)]
    return shlex.join(words)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
