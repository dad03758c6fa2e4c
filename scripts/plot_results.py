"""Draw a table of dated measurements as time against memory, the README's figure:

python scripts/plot_results.py loss_plugins/bench/results/2026-11-30-h200.md "gemma2-2b, real inputs, both" OUT.png
"""

from __future__ import annotations

import sys
from pathlib import Path


def table(document: str, title: str) -> list[dict[str, str]]:
    """The rows under a heading."""
    lines = document.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def main(results: str, title: str, output: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    from loss_plugins.strategies import STRATEGIES

    ours = set(STRATEGIES.names())
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    for row in table(Path(results).read_text(encoding="utf-8"), title):
        x, y = float(row["peak MiB"]) / 1024, float(row["ms"])
        own = row["contender"] in ours
        axes.scatter(x, y, s=70 if own else 45, color="#1f6fb4" if own else "#9a9a9a", zorder=3)
        axes.annotate(
            row["contender"], (x, y), xytext=(8, 4), textcoords="offset points", fontsize=10,
            color="#1f6fb4" if own else "#555555", fontweight="bold" if own else "normal",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.FixedLocator([0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlim(right=axes.get_xlim()[1] * 1.5)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.set_xlabel("extra peak memory with gradients, GiB (log)")
    axes.set_ylabel("forward and backward, ms")
    axes.set_title(f"{title.removesuffix(', both')}, 8192 tokens, bfloat16 ({Path(results).stem})", fontsize=11)
    axes.grid(True, which="both", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
