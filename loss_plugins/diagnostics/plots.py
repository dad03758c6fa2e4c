"""Figures of a job: loss curves and peak memory. Matplotlib is loaded when a figure is drawn, without a display."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import MissingDependencyError

# told apart with any colour vision (Okabe and Ito); naive is grey, being what the others are measured against
_COLOURS = {"naive": "#7f7f7f", "chunked": "#E69F00", "flce": "#0072B2", "cce": "#009E73"}
_SPARE = ("#CC79A7", "#56B4E9", "#D55E00", "#000000")
FOOT = 1e-8
"""Smaller distances between losses are drawn here."""
_STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555", "axes.labelcolor": "#333333",
    "axes.titlelocation": "left", "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlepad": 10,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e6e6", "font.size": 10, "text.color": "#222222",
    "xtick.color": "#555555", "ytick.color": "#555555", "legend.frameon": False, "figure.facecolor": "white",
}  # fmt: skip


def human_bytes(count: float) -> str:
    """``412.0 MiB``: one decimal, and the unit."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def plot_losses(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], path: Path) -> Path:
    """Each strategy's loss by step; below, its distance from the first strategy's. Returns ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    several = len(curves) > 1
    with _figure(6.4, 5.2 if several else 3.6, path) as figure:
        if several:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
            _draw_distances(bottom, curves)
            bottom.set_xlabel("step")
        else:
            top = figure.subplots()
            top.set_xlabel("step")
        colours = _colours(list(curves))
        for place, (name, (steps, losses)) in enumerate(curves.items()):
            # equal curves lie on each other: later ones are thinner, so that the earlier ones stay visible
            width = 1.5 + 1.9 * (len(curves) - 1 - place)
            marker = "o" if len(steps) < 3 else None  # a line needs two points
            top.plot(steps, losses, color=colours[name], linewidth=width, label=name, marker=marker)
        top.set_title("Training loss")
        top.set_ylabel("nats per token")
        top.legend(loc="upper right")
    return path


def _draw_distances(axes: Any, curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
    colours = _colours(list(curves))
    first, *others = curves
    equal = False
    reference = dict(zip(*curves[first], strict=True))
    for name in others:
        far = {s: abs(loss - reference[s]) for s, loss in zip(*curves[name], strict=True) if s in reference}
        equal |= any(distance < FOOT for distance in far.values())
        drawn = [max(distance, FOOT) for distance in far.values()]  # equal numbers have no logarithm
        axes.plot(list(far), drawn, color=colours[name], linewidth=1.4, marker="o" if len(far) < 3 else None)
    if equal:
        axes.set_ylim(bottom=FOOT / 10)
        where = {"xy": (0.99, 0.05), "xycoords": "axes fraction", "ha": "right", "va": "bottom", "fontsize": 8}
        axes.annotate(f"drawn at {FOOT:.0e}: equal, or closer than that", **where)
    axes.set_yscale("log")
    axes.set_ylabel(f"distance\nfrom {first}")


def plot_peaks(peaks: Mapping[str, int], path: Path, problem: Mapping[str, int] | None = None) -> Path:
    """A bar a strategy: bytes that the loss step adds at its worst, gradients included. Returns ``path``.

    Args:
        problem: ``rows`` of the batch, ``labels`` among them, and ``vocab``, for the axis.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    names = list(peaks)
    unit, word = (1 << 30, "GiB") if max(peaks.values()) >= 8 << 30 else (1 << 20, "MiB")
    sizes = [peaks[name] / unit for name in names]
    with _figure(6.4, 1.3 + 0.5 * len(peaks), path) as figure:
        axes = figure.subplots()
        colours = _colours(names)
        axes.barh(names, sizes, color=[colours[name] for name in names], height=0.62)
        most = peaks.get("naive")
        for name, size in zip(names, sizes, strict=True):
            less = f"  ({most / peaks[name]:.1f}x less)" if most and peaks[name] and name != "naive" else ""
            words = f"{human_bytes(peaks[name])}{less}"
            axes.annotate(words, (size, name), xytext=(6, 0), textcoords="offset points", va="center")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, max(sizes) * 1.18)
        shape = _shape(problem) if problem else ""
        axes.set_xlabel(word + shape)
        axes.set_title("Peak memory of the loss step")
    return path


def _shape(problem: Mapping[str, int]) -> str:
    labels = f", {problem['labels']:,} with a label" if problem["labels"] < problem["rows"] else ""
    return f"  (batch of {problem['rows']:,} tokens{labels}, vocabulary of {problem['vocab']:,})"


@contextmanager
def _figure(width: float, height: float, path: Path) -> Iterator[Any]:
    """A figure that belongs to no window, so that a program's own matplotlib state is left alone; saved at the end."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "A figure was asked for, and matplotlib is not installed. Run: pip install 'loss-plugins[quickstart]'"
        ) from error
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=160)


def _colours(names: Sequence[str]) -> dict[str, str]:
    spare = iter(_SPARE * math.ceil(max(len(names), 1) / len(_SPARE)))
    return {name: _COLOURS.get(name) or next(spare) for name in names}
