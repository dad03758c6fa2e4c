"""Figures are drawn without a display, and without touching a program's own matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loss_plugins.diagnostics.plots import human_bytes, plot_losses, plot_peaks
from loss_plugins.errors import MissingDependencyError

CURVES = {"naive": ([1, 2, 3], [3.0, 2.0, 1.5]), "cce": ([1, 2, 3], [3.0, 2.0, 1.5001]), "mine": ([1, 3], [3.0, 1.4])}


def test_figures_are_pictures_of_some_size(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")  # asking for the backend chooses one
    before = matplotlib.rcParams.copy()
    files = [
        plot_losses(CURVES, tmp_path / "all.png"),
        plot_losses({"cce": CURVES["cce"]}, tmp_path / "one.png"),
        plot_peaks({"naive": 4 << 20, "cce": 1 << 20}, tmp_path / "peaks.png", {"rows": 8, "vocab": 9}),
        plot_peaks({"mine": 20 << 30}, tmp_path / "large.png"),
    ]
    for file in files:
        with image.open(file) as picture:
            assert picture.width > 900
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50, "an empty figure has few colours"
    assert matplotlib.rcParams == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_without_matplotlib_the_message_has_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'loss-plugins\[quickstart\]'"):
        plot_losses(CURVES, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1 << 20, "1 MiB"), (400_000_000, "381 MiB"), (3 << 40, "3 TiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
