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
        plot_peaks({"naive": 4 << 20, "cce": 1 << 20}, tmp_path / "peaks.png", {"rows": 8, "labels": 5, "vocab": 9}),
        plot_peaks({"mine": 20 << 30}, tmp_path / "large.png"),
    ]
    for file in files:
        with image.open(file) as picture:
            assert picture.width > 900
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50, "an empty figure has few colours"
    assert matplotlib.rcParams == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_equal_losses_are_said_to_be_drawn_at_the_foot() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from loss_plugins.diagnostics.plots import _draw_distances

    for last, said in ((1.5, True), (1.6, False)):
        axes = Figure().subplots()
        _draw_distances(axes, {"naive": ([1], [1.5]), "cce": ([1], [last])})
        assert any("equal" in text.get_text() for text in axes.texts) == said
        assert len(axes.lines) == 1
        assert axes.lines[0].get_marker() == "o", "a line through one point is not seen"


def test_the_axis_says_which_batch_was_measured() -> None:
    from loss_plugins.diagnostics.plots import _shape

    assert _shape({"rows": 8192, "labels": 8192, "vocab": 9}) == "  (batch of 8,192 tokens, vocabulary of 9)"
    assert "batch of 8,192 tokens, 4,000 with a label," in _shape({"rows": 8192, "labels": 4000, "vocab": 9})


def test_without_matplotlib_the_message_has_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'loss-plugins\[quickstart\]'"):
        plot_losses(CURVES, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (35 << 20, "35.0 MiB"),
        (400_000_000, "381.5 MiB"),
        (1023 << 20, "1.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
