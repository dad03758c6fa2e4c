"""``loss-plugins families``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ._show import explains_errors, shortened, show_json, show_table


@explains_errors
def families(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CLASS|MODEL_TYPE]...", help="Only these.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Compare now, with the transformers that is installed.")] = False,
    write: Annotated[Path | None, typer.Option(help="With --run: also write the results here.", dir_okay=False)] = None,
) -> None:
    """Every language model class of transformers: how its loss is computed, and what was compared with stock.

    Without --run, what the run that is dated in the output found, and the statuses under other releases of
    transformers. Exit code 1 if a class differs from stock.
    """
    from ..models.conformance import read_results
    from ..models.conformance.releases import read_records, statuses_of

    found = _run(names or [], write) if run else read_results()
    classes = {name: entry for name, entry in found["classes"].items() if not names or _is_asked(name, entry, names)}
    if names and not classes:
        raise ConfigError(
            f"No class or model type of transformers is called {', '.join(names)}. Leave the name out to see all."
        )
    found = found | {"summary": _summary(classes)}
    if not run:
        records = read_records()
        classes = {name: entry | {"releases": statuses_of(name, records)} for name, entry in classes.items()}
        found |= {"releases": {name: _without_classes(record) for name, record in records.items()}}
    found |= {"classes": classes}
    if as_json:
        show_json(found)
    else:
        _show(found)
    if any(entry["status"] == "wrong" for entry in classes.values()):
        raise typer.Exit(1)


def _run(names: list[str], write: Path | None) -> dict[str, Any]:
    import sys

    from ..models.conformance import check_class, results_of, write_results
    from ..models.tiny import model_classes

    asked = [n for n, types in model_classes().items() if not names or _is_asked(n, {"model_types": types}, names)]
    found = []
    # some models print while they generate
    bar = typer.progressbar(asked, label="Comparing", file=sys.stderr)
    with bar, contextlib.redirect_stdout(sys.stderr), _silence():
        for name in bar:
            found.append(check_class(name))
    if write is not None:
        write_results(found, write)
    return results_of(found)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without what transformers and we say about models that nobody would train."""
    loggers = {"transformers": logging.CRITICAL, "loss_plugins": logging.ERROR}
    before = {name: logging.getLogger(name).level for name in loggers}
    for name, level in loggers.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _is_asked(name: str, entry: dict[str, Any], names: list[str]) -> bool:
    return name in names or bool(set(entry.get("model_types", ())) & set(names))


def _summary(classes: dict[str, Any]) -> dict[str, int]:
    counts = dict.fromkeys(("fused", "materialised", "unsupported", "not run", "wrong"), 0)
    for entry in classes.values():
        counts[entry["status"]] += 1
    return counts


def _show(found: dict[str, Any]) -> None:
    rows = []
    for name, entry in found["classes"].items():
        checks = entry.get("checks", ())
        off = f"{entry['loss_error']:.0e} / {entry['gradient_error']:.0e}" if checks else ""
        said = [*entry.get("problems", ()), *([entry["reason"]] if "reason" in entry else ())]
        compared = [f"{len(checks)} checks in {entry['precision']}"] if checks else []
        compared += [f"batches: {', '.join(entry['batches'])}"] if "batches" in entry else []
        rows.append((name, entry["status"], off, _releases(entry), shortened("; ".join([*compared, *said]), 100)))
    counts = ", ".join(f"{count} {status}" for status, count in found["summary"].items() if count)
    show_table(
        f"Language model classes: {counts}",
        ("class", "status", "loss / gradient off by", "also with", "compared"),
        rows,
        note=f"transformers {found.get('transformers')}, torch {found.get('torch')}, {found.get('date')}",
    )


def _releases(entry: dict[str, Any]) -> str:
    """Minor releases with the same status, and those with another one."""
    return ", ".join(
        ".".join(release.split(".")[:2]) + ("" if status == entry["status"] else f": {status}")
        for release, status in entry.get("releases", {}).items()
    )


def _without_classes(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "classes"}
