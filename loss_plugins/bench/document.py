"""Results as data: one document holds runs, a run says when, where and how it was measured, and has rows.

Written by the file's suffix as JSON, which `read` reads again, CSV (a line a row, with the run's facts) or Markdown.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..diagnostics.environment import report
from ..errors import ConfigError
from .peers import package_versions

Document = dict[str, list[dict[str, Any]]]
Rows = list[dict[str, Any]]

COLUMNS = ("contender", "ms", "spread", "peak MiB", "beside dX, dW", "error dX", "error dW", "x naive", "same twice")
SUFFIXES = (".json", ".csv", ".md")
_RUN = ("date", "command", "device", "environment", "missing", "grid", "tflops", "results")
_TABLE = ("shape", "rows", "hidden", "vocab", "dtype", "inputs", "mode")
_MEANINGS = {
    "flat": "flat: every token about equally likely, as at the start of training",
    "real": "real: a trained model's",
    "half masked": "half masked: every second label ignored",
    "both": "both: gradients of hidden states (dX) and head (dW)",
    "frozen head": "frozen head: gradients of hidden states (dX) only",
    "forward only": "forward only: no gradients",
}


def new_run(
    command: str, device: str, contenders: list[str], missing: Mapping[str, str], grid: bool = False
) -> dict[str, Any]:
    """A run without rows: date, command line, versions, device."""
    facts = report()
    facts["versions"] |= package_versions(contenders)
    name = facts["device"].get("name") if device != "cpu" else facts["cpu"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": name or device,
        "environment": facts,
        "missing": dict(missing),
        "grid": grid,
        "tflops": None,
        "results": [],
    }


def read(paths: Iterable[str]) -> Document:
    """The runs of several files as one document.

    Raises:
        ConfigError: a file is not there, or no such document.
    """
    runs: list[dict[str, Any]] = []
    for path in paths:
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            runs += [{key: run[key] for key in _RUN} for run in found["runs"]]
        except OSError as error:
            raise ConfigError(
                f"{path!r} cannot be read: {error.strerror}. Give a JSON file of an earlier run."
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path!r} holds no results of loss-plugins bench. Give what --output wrote.") from error
    return {"runs": runs}


def check_output(path: str) -> None:
    """Refuse a file that `write` could not write, before anything is measured.

    Raises:
        ConfigError: an unknown suffix.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(f"Results cannot be written to {path!r}. End it with one of {', '.join(SUFFIXES)}.")


def write(document: Document, path: str) -> None:
    """Write a document in the format of the file's suffix; folders are made."""
    check_output(path)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = {".json": _as_json, ".csv": _as_csv, ".md": _as_markdown}[target.suffix](document)
    target.write_text(text, encoding="utf-8")


def tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Rows]]:
    """(title, rows) of what was measured together, in the order of measuring."""
    found: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in _TABLE), []).append(dict(row))
    for key, members in found.items():
        yield title(dict(zip(_TABLE, key, strict=True))), members


def title(row: Mapping[str, Any]) -> str:
    sizes = f"{row['rows']} x {row['hidden']} x {row['vocab']}"
    where = f"{row['shape']}, {sizes}" if row["shape"] else sizes
    return f"{where}, {row['dtype']}, {row['inputs']} inputs, {row['mode']}"


def note(rows: Sequence[Mapping[str, Any]], tflops: float | None) -> str:
    """What the words of a title mean, and what the products alone would take."""
    row = rows[0]
    words = "; ".join(_MEANINGS[word] for word in (*row["inputs"].split(", "), row["mode"]))
    if not tflops:
        return words
    product = 2 * row["labels"] * row["hidden"] * row["vocab"] / tflops / 1e9
    floors = ", ".join(f"{2 * times}NHV {product * times:.2f} ms" for times in (1, 2, 3, 4))
    return f"{words}. Products alone at {tflops:.0f} TFLOP/s: {floors}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row under `COLUMNS`. What failed has no time."""
    name = f"{row['name']} ({row['chosen']})" if row["chosen"] else row["name"]
    if row["failed"] or row["skipped"]:
        return (name, "-", "failed" if row["failed"] else "skipped", *["-"] * (len(COLUMNS) - 3))

    def number(key: str, form: str) -> str:
        return "-" if row[key] is None else format(row[key], form)

    return (
        name,
        number("ms", ".2f"),
        f"{number('ms_low', '.2f')}-{number('ms_high', '.2f')}",
        number("peak_mib", ".0f"),
        f"{row['peak_mib'] - row['gradients_mib']:.0f}",
        number("error_hidden", ".1e"),
        number("error_weight", ".1e"),
        number("times_naive", ".1f"),
        "yes" if row["deterministic"] else "no",
    )


def remarks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What a table's cells do not say: why there is no time, which promises do not hold, and who does better."""
    for row in rows:
        for word, key in (("failed", "failed"), ("skipped", "skipped"), ("breaks its promise", "broken_promise")):
            if row[key]:
                yield f"{row['name']} {word}: {row[key]}"
    timed = [row for row in rows if row["ms"]]
    for row in timed:
        better = [peer for peer in timed if not peer["own"] and peer["peak_mib"] <= row["peak_mib"]]
        fastest = min(better, key=lambda peer: peer["ms"], default=None)
        if row["own"] and fastest is not None and fastest["ms"] < row["ms"]:
            yield (
                f"{fastest['name']} is faster than {row['name']} and takes no more memory: {fastest['ms']:.2f} ms "
                f"for {row['ms']:.2f}, {fastest['peak_mib']:.0f} MiB for {row['peak_mib']:.0f}"
            )


def regrets(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each table that has ``auto``: the fastest of our strategies asked for by name, and how much slower auto is.

    By name means with its defaults, as auto itself would. A table whose ``auto`` has no time is left out.
    """
    found = []
    for _, members in tables(rows):
        timed = {row["name"]: row for row in members if row["own"] and row["ms"] and " " not in row["name"]}
        auto = timed.pop("auto", None)
        if auto is None or not timed:
            continue
        best = min(timed.values(), key=lambda row: row["ms"])
        found.append(
            {key: auto[key] for key in _TABLE}
            | {"chosen": auto["chosen"], "auto_ms": auto["ms"], "best": best["name"], "best_ms": best["ms"]}
            | {"regret_percent": 100 * (auto["ms"] / best["ms"] - 1)}
        )
    return found


def _as_json(document: Document) -> str:
    return json.dumps(document, indent=1) + "\n"


def _as_csv(document: Document) -> str:
    lines = []
    for run in document["runs"]:
        versions = run["environment"]["versions"]
        facts = {"date": run["date"], "where": run["device"]}
        facts |= {name: versions[name] for name in ("loss-plugins", "torch", "triton") if name in versions}
        lines += [facts | row for row in run["results"]]
    text = io.StringIO()
    names = list(dict.fromkeys(key for line in lines for key in line))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _as_markdown(document: Document) -> str:
    parts = []
    for run in document["runs"]:
        versions = ", ".join(f"{name} {number}" for name, number in run["environment"]["versions"].items())
        parts.append(f"# {run['device']}, {run['date'][:10]}\n\n`{run['command']}`\n\n{versions}.\n")
        for heading, rows in tables(run["results"]):
            body = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in rows)]
            table = "\n".join("| " + " | ".join(line) + " |" for line in body)
            said = "".join(f"- {line}\n" for line in remarks(rows))
            parts.append(f"## {heading}\n\n{note(rows, run['tflops'])}.\n\n{table}\n" + (f"\n{said}" if said else ""))
        if run["missing"]:
            lines = "\n".join(f"- {name}: {why}" for name, why in run["missing"].items())
            parts.append(f"## Not here\n\n{lines}\n")
    return "\n".join(parts)
