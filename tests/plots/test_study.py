"""The figures of a study: what they show, and that it can be read for two losses and for fifteen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from hf_calib import plots
from tests.helpers.pictures import overlapping, written

LONG = r"adafocal, <script> $\frac{$ and a_word_longer_than_a_line"
MAPS = ("no map", "temperature", "auto")


def names(n_losses: int) -> list[str]:
    return [LONG, *(f"loss_number_{k}" for k in range(1, n_losses))]


def differences(n_losses: int) -> Figure:
    rng = np.random.default_rng(0)

    def row() -> dict[str, tuple[float, float, float, float]]:
        return {
            name: (value, value - 0.002, value + 0.002, rng.random() / 10)
            for name, scale in zip(MAPS, (0.2, 0.01, 0.01), strict=True)
            for value in [rng.normal(0, scale)]
        }

    metrics = {key: {loss: row() for loss in names(n_losses)} for key in ("NLL", "ECE")}
    return plots.difference_diagram(metrics, baseline=f"{LONG} with temperature")


ALL: dict[str, Callable[[int], Figure]] = {"differences": differences}


@pytest.mark.parametrize(
    "n_losses",
    [
        pytest.param(2, marks=pytest.mark.deep),
        pytest.param(5, marks=pytest.mark.deep),
        pytest.param(15, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ALL)
def test_no_text_covers_another_or_is_cut_and_names_are_no_formulas(kind: str, n_losses: int) -> None:
    figure = ALL[kind](n_losses)
    assert overlapping(figure) == []
    names_drawn = [text for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels())]
    for text in (*names_drawn, *figure.legends[0].get_texts()):
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
    texts = [" ".join(text.split()) for text in written(figure)]
    assert all(any(name.split()[0] in text for text in texts) for name in names(n_losses))


def drawn(axes: Axes) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The places (x, y) of the markers, and the ends in x of the intervals."""
    markers = [line for line in axes.lines if line.get_marker() != "None"]
    bars = [line for line in axes.lines if line.get_marker() == "None" and line.get_linewidth() > 1]
    places = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in markers]
    return places, [tuple(map(float, line.get_xdata())) for line in bars]


# Differences


def test_a_marker_is_filled_where_p_is_below_the_level() -> None:
    found = {
        "a": {"no map": (0.2, 0.1, 0.3, 0.049), "auto": (-0.01, -0.02, 0.001, 0.05)},
        "b": {"no map": (0.1, None, None, None), "auto": (float("nan"), None, None, None)},
    }
    figure = plots.difference_diagram({"NLL": found}, baseline="a with $T$")
    left, right = figure.axes
    assert [axes.get_title() for axes in (left, right)] == ["no map", "auto"]
    assert drawn(left)[0] == [(0.2, 0), (0.1, 1)]
    assert drawn(right)[0] == [(-0.01, 0)]
    assert drawn(left)[1] == [(0.1, 0.3)]
    filled = [
        to_hex(line.get_markerfacecolor()) != "#ffffff"
        for axes in (left, right)
        for line in axes.lines
        if line.get_marker() != "None"
    ]
    assert filled == [True, False, False]
    assert "distinguishable from a with $T$" in written(figure)


def test_zero_is_in_every_panel() -> None:
    figure = plots.difference_diagram({"NLL": {"a": {"auto": (0.5, 0.4, 0.6, 0.01)}}}, baseline="b")
    low, high = figure.axes[0].get_xlim()
    assert low <= 0 < 0.6 <= high


def test_losses_keep_their_order_and_each_panel_its_scale() -> None:
    figure = differences(3)
    assert [label.get_text().split("_")[-1] for label in figure.axes[0].get_yticklabels()][1:] == ["1", "2"]
    assert len({axes.get_xlim() for axes in figure.axes}) == len(figure.axes)


def test_no_differences_are_refused() -> None:
    with pytest.raises(ValueError, match="metrics to hold at least one difference, got none"):
        plots.difference_diagram({"NLL": {"a": {}}}, baseline="a")
