"""The figures of a study: what they show, and that it can be read for two losses and for fifteen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from hf_calib import plots
from hf_calib.metrics.sums import TopLabel, bin_sums, top_label_error
from tests.helpers.pictures import overlapping, written

LONG = r"adafocal, <script> $\frac{$ and a_word_longer_than_a_line"
MAPS = ("no map", "temperature", "auto")


def names(n_losses: int) -> list[str]:
    return [LONG, *(f"loss_number_{k}" for k in range(1, n_losses))]


def ranks(n_losses: int) -> Figure:
    rng = np.random.default_rng(0)

    def row() -> dict[str, tuple[float, float, float]]:
        return {name: (rank, max(1, rank - 2), rank + 2) for name in MAPS for rank in [rng.uniform(1, 45)]}

    return plots.rank_diagram({key: {loss: row() for loss in names(n_losses)} for key in ("NLL", "ECE")})


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


def panels(n_losses: int) -> Figure:
    rng = np.random.default_rng(0)

    def panel(power: float) -> tuple[np.ndarray, np.ndarray]:
        confidences = rng.uniform(0.3, 1, 500)
        return confidences, rng.random(500) < confidences**power

    return plots.reliability_panels(
        {loss: {"no map": panel(3), "temperature": panel(1)} for loss in names(n_losses)}
    )


ALL: dict[str, Callable[[int], Figure]] = {"ranks": ranks, "differences": differences, "panels": panels}


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


# Ranks


def test_ranks_stand_in_the_row_of_their_loss_the_best_on_top() -> None:
    of_nll = {
        "a": {"no map": (3.5, 3.0, 4.0), "auto": (3.0, 2.5, 3.5)},
        "b": {"no map": (4.5, None, None), "auto": (1.0, 1.0, 1.5)},
        "c": {"auto": (2.0, None, None), "no map": (float("nan"), None, None)},
        "d": {"no map": (float("nan"), None, None)},
    }
    (axes,) = plots.rank_diagram({"NLL": of_nll}, title="t").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "c", "a"]
    places, bars = drawn(axes)
    assert [(rank, round(row)) for rank, row in places] == [(4.5, 0), (3.5, 2), (1.0, 0), (2.0, 1), (3.0, 2)]
    assert bars == [(3.0, 4.0), (1.0, 1.5), (2.5, 3.5)]
    low, high = axes.get_ylim()
    assert low > high  # the first row is the upper one


def test_maps_differ_in_colour_and_in_marker() -> None:
    markers = [line for line in ranks(1).axes[0].lines if line.get_marker() != "None"]
    assert len({line.get_marker() for line in markers}) == len(MAPS)
    assert len({to_hex(line.get_color()) for line in markers}) == len(MAPS)


@pytest.mark.parametrize("metrics", [{}, {"NLL": {}}, {"NLL": {"a": {"auto": (float("nan"), None, None)}}}])
def test_no_ranks_are_refused(metrics: dict[str, dict[str, dict[str, tuple[float, None, None]]]]) -> None:
    with pytest.raises(ValueError, match="metrics to hold a mean rank each, got none"):
        plots.rank_diagram(metrics)


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


# Small reliability diagrams


def test_points_are_bins_and_the_line_leaves_out_rare_ones() -> None:
    rng = np.random.default_rng(0)
    confidences = np.concatenate([rng.uniform(0.6, 1, 995), np.full(5, 0.05)])
    correct = (rng.random(1_000) < confidences).astype(float)
    figure = plots.reliability_panels({"a": {"before": (confidences, correct)}}, n_bins=10)
    (axes,) = figure.axes
    bins = bin_sums(TopLabel(confidences, correct), 10)
    shown = bins.counts > 0
    expected = np.stack(bins.means(), axis=1)
    np.testing.assert_allclose(axes.collections[0].get_offsets(), expected[shown])
    np.testing.assert_allclose(axes.lines[1].get_xydata(), expected[bins.counts >= 10])
    sizes = axes.collections[0].get_sizes()
    assert np.argmax(sizes) == np.argmax(bins.counts[shown])
    assert sizes[0] == sizes.min()
    ece = top_label_error(TopLabel(confidences, correct), n_bins=10)
    assert axes.get_title(loc="left") == f"ECE {ece:.3f}"


def test_errors_stand_in_the_order_of_the_states_and_the_first_is_hollow() -> None:
    states = {"before": ([0.9, 0.9], [1, 0]), "after": ([0.5, 0.5], [1, 0])}
    (axes,) = plots.reliability_panels({"a": states}).axes
    assert axes.get_title(loc="left") == "ECE 0.400 → 0.000"
    grounds = [to_hex(points.get_facecolor()[0]) for points in axes.collections]
    assert grounds[0] == "#ffffff" != grounds[1]


def test_places_without_a_model_are_empty() -> None:
    figure = panels(7)
    assert [axes.axison for axes in figure.axes] == [True] * 7 + [False] * 3
    assert [bool(axes.get_xlabel()) for axes in figure.axes[:7]] == [False] * 2 + [True] * 5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a diagram to have at least one panel, got none"):
        plots.reliability_panels({})
    with pytest.raises(ValueError, match="a diagram to have at least one panel, got none"):
        plots.reliability_panels({"a": {}})
    with pytest.raises(ValueError, match=r"confidences of panel 'before' to lie in \[0, 1\], got .* to 4.2"):
        plots.reliability_panels({"a": {"before": ([0.5, 4.2], [1, 0])}})
