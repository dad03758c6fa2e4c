"""Figures of results: a table as bars and as time against memory, a grid as how far auto is from the best."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..diagnostics.plots import _figure
from .document import Document, regrets, tables

OURS, PEER = "#1f6fb4", "#9a9a9a"
_MODES = {"both": "forward and backward", "frozen head": "forward and backward of a frozen head"}
"""Modes in a title's words, where their own need the table's note."""
Row = Mapping[str, Any]


def draw(document: Document, folder: str) -> Iterator[Path]:
    """Draw every table of a document into ``folder``; gives the files' paths as they are written.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for run in document["runs"]:
        where = f"{run['device']}, {run['date'][:10]}"
        if run["grid"]:
            found = [entry for entry in regrets(run["results"]) if entry["mode"] == "both"]
            if found:
                yield draw_regret(found, f"auto beside the best strategy\n{where}", _free(target, "auto", taken))
            continue
        for title, rows in tables(run["results"]):
            timed = [row for row in rows if row["ms"]]
            if timed:
                stem = re.sub(r"[^\w.]+", "-", title)
                heading = f"{_titled(title, timed[0]['mode'])}\n{where}"
                yield draw_bars(timed, heading, _free(target, f"{stem}-bars", taken))
                yield draw_trade(timed, heading, _free(target, f"{stem}-time-memory", taken))


def _free(folder: Path, stem: str, taken: set[str]) -> Path:
    """A file that no other run of the document has been drawn into: two may have measured the same."""
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}-{count}"
    taken.add(name)
    return folder / f"{name}.png"


def draw_bars(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Three panels with a line a contender, the fastest on top."""
    rows = sorted(rows, key=lambda row: row["ms"], reverse=True)
    names = [_name(row) for row in rows]
    colours = [_colour(row) for row in rows]
    with _figure(11.0, 1.5 + 0.28 * len(rows), path) as figure:
        time, memory, error = figure.subplots(1, 3, sharey=True)
        figure.suptitle(title, fontsize=11)
        spread = [[row["ms"] - row["ms_low"] for row in rows], [row["ms_high"] - row["ms"] for row in rows]]
        time.barh(names, [row["ms"] for row in rows], xerr=spread, color=colours, ecolor="#333333")
        time.set_xlabel("ms")
        memory.barh(names, [max(row["peak_mib"], 0.1) for row in rows], color=colours)
        _decades(memory, [max(row["peak_mib"], 0.1) for row in rows])
        memory.set_xlabel("extra peak memory, MiB (log)")
        for key, marker, word in (("error_hidden", "o", "dX"), ("error_weight", "x", "dW")):
            known = [(row[key], name) for row, name in zip(rows, names, strict=True) if row[key]]
            if known:
                error.plot(*zip(*known, strict=True), marker, color="#333333", markersize=5, label=word)
        if error.lines:
            _decades(error, [row[key] for row in rows for key in ("error_hidden", "error_weight") if row[key]])
            error.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8)
        error.set_xlabel("relative gradient error (log)")
    return path


def draw_trade(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Time against memory: what is to the left and below is better at both."""
    from matplotlib.ticker import LogLocator, NullLocator

    with _figure(8.0, 4.6, path) as figure:
        axes = figure.subplots()
        points = [(max(row["peak_mib"], 0.1) / 1024, row["ms"]) for row in rows]
        top = 1.05 * max(y for _, y in points)
        for row, point, height in zip(rows, points, _heights(points, 0.035 * top), strict=True):
            axes.scatter(*point, s=60 if row["own"] else 40, color=_colour(row), zorder=3)
            axes.annotate(
                _name(row), (point[0], height), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8,
                color=_colour(row) if row["own"] else "#666666", fontweight="bold" if row["own"] else "normal",
            )  # fmt: skip
        axes.set_xscale("log")
        left, right = axes.get_xlim()
        axes.set_xlim(left / 1.3, right * 2.5)  # the names are written to the right
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, top)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("extra peak memory with the gradients, GiB (log)")
        axes.set_ylabel("ms")
        axes.set_title(title, fontsize=10)
    return path


def draw_regret(found: Sequence[Row], title: str, path: Path) -> Path:
    """A cell for each number of tokens and classes: what auto took, and how much slower it was than the best."""
    rows, sizes = (sorted({entry[key] for entry in found}) for key in ("rows", "vocab"))
    with _figure(2.0 + 1.6 * len(sizes), 1.6 + 0.6 * len(rows), path) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        values = [[float("nan")] * len(sizes) for _ in rows]
        for entry in found:
            i, j = rows.index(entry["rows"]), sizes.index(entry["vocab"])
            values[i][j] = entry["regret_percent"]
            axes.text(
                j, i, f"{entry['chosen']}\n{entry['regret_percent']:+.1f} %", ha="center", va="center", fontsize=9
            )
        axes.imshow(values, cmap="OrRd", vmin=0, vmax=40, aspect="auto")
        axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axes.set_yticks(range(len(rows)), [f"{size:,}" for size in rows])
        axes.set_xlabel("classes")
        axes.set_ylabel("tokens")
        axes.set_title(title, fontsize=10)
    return path


def _heights(points: Sequence[tuple[float, float]], gap: float) -> list[float]:
    """Where the names of points are written: beside them, or as much higher as lower neighbours' names need."""
    heights = [y for _, y in points]
    done: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i][1]):
        for j in done:
            near = max(points[i][0], points[j][0]) < 4 * min(points[i][0], points[j][0])
            if near and heights[i] < heights[j] + gap:
                heights[i] = heights[j] + gap
        done.append(i)
    return heights


def _decades(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic x axis over whole decades, whatever the values are."""
    from matplotlib.ticker import NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(10.0 ** math.floor(math.log10(min(values) / 1.05)), 10.0 ** math.ceil(math.log10(max(values) * 1.05)))


def _titled(title: str, mode: str) -> str:
    """A table's title, whose last word is its mode, for a figure that stands without the table's note."""
    return title.removesuffix(mode) + _MODES.get(mode, mode)


def _name(row: Row) -> str:
    return f"{row['name']} ({row['chosen']})" if row["chosen"] else str(row["name"])


def _colour(row: Row) -> str:
    return OURS if row["own"] else PEER
