"""The forest plot of differences: what it shows, and that it can be read."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from studies.forest import difference_diagram

from tests.helpers.pictures import overlapping, written

LONG = "a fine-tuned checkpoint with_a_name_that_nobody_would_choose <script> $\\frac{$"


def differences(n_losses: int) -> Figure:
    rng = np.random.default_rng(0)

    def row() -> dict[str, tuple[float, float, float, float]]:
        values = {
            name: rng.normal(0, scale)
            for name, scale in (("no map", 0.2), ("auto", 0.01))
        }
        return {
            name: (value, value - 0.002, value + 0.002, rng.random() / 10)
            for name, value in values.items()
        }

    losses = [LONG, *(f"loss_number_{k}" for k in range(1, n_losses))]
    metrics = {key: {loss: row() for loss in losses} for key in ("NLL", "ECE")}
    return difference_diagram(metrics, baseline=f"{LONG} with temperature")


def test_differences_can_be_read_and_are_not_cut() -> None:
    figure = differences(4)
    assert overlapping(figure) == []
    names = [
        text for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels())
    ]
    for text in (*names, *figure.legends[0].get_texts()):
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[1:] == [f"loss_number_{k}" for k in range(1, 4)]
    assert " ".join(labels[0].split()).startswith("a fine-tuned checkpoint with_a")
    assert len({axes.get_xlim() for axes in figure.axes}) == len(
        figure.axes
    )  # each its own scale


def test_a_marker_is_filled_where_p_is_below_the_level() -> None:
    found = {
        "a": {"no map": (0.2, 0.1, 0.3, 0.049), "auto": (-0.01, -0.02, 0.001, 0.05)},
        "b": {
            "no map": (0.1, None, None, None),
            "auto": (float("nan"), None, None, None),
        },
    }
    figure = difference_diagram({"NLL": found}, baseline="a with $T$")
    assert [axes.get_title() for axes in figure.axes] == ["no map", "auto"]
    markers = [
        [line for line in axes.lines if line.get_marker() != "None"]
        for axes in figure.axes
    ]
    places = [[tuple(line.get_xydata()[0]) for line in lines] for lines in markers]
    assert places == [[(0.2, 0), (0.1, 1)], [(-0.01, 0)]]
    (bar,) = (
        line
        for line in figure.axes[0].lines
        if line.get_marker() == "None" and line.get_linewidth() > 1
    )
    assert list(bar.get_xdata()) == [0.1, 0.3]
    filled = [
        to_hex(line.get_markerfacecolor()) != "#ffffff"
        for lines in markers
        for line in lines
    ]
    assert filled == [True, False, False]
    assert "distinguishable from a with $T$" in written(figure)
    low, high = figure.axes[0].get_xlim()
    assert low <= 0 < 0.3 <= high


def test_no_difference_is_refused() -> None:
    with pytest.raises(ValueError, match="metrics to hold at least one difference"):
        difference_diagram({"NLL": {"a": {}}}, baseline="a")
