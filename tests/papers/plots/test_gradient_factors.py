"""Surfaces over the simplex, factors against the probability, regions: what they show, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_calib.losses import make_loss
from hf_calib.papers import confidence_regions, gradient_factors, simplex_grid, uncertainty_weights
from hf_calib.papers.plots import confidence_region_diagram, gradient_factor_diagram, simplex_surfaces
from tests.helpers.pictures import overlapping, written

P = np.linspace(0.01, 0.99, 99)
GRID = simplex_grid(15)


def test_a_triangle_for_each_surface_with_its_own_scale() -> None:
    labels = np.zeros(len(GRID), dtype=int)
    surfaces = {
        n: uncertainty_weights(make_loss(n), GRID, labels) for n in ("focal", "bsce", "dual_focal", "brier")
    }
    surfaces["$a_b$"] = GRID[:, 0] - 0.5  # changes its sign
    figure = simplex_surfaces(GRID, surfaces, class_names=["label", "second", "third"], title="weights")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == list(surfaces)
    for axes, values in zip(panels, surfaces.values(), strict=True):
        levels = axes.collections[0].levels
        if np.ptp(values):
            assert (levels[0], levels[-1]) == (values.min(), values.max())
        assert {"label", "second", "third"} <= {text.get_text() for text in axes.texts}
    # A flat surface has no lines; one of both signs is hatched, with a line at 0.
    assert [len(axes.collections) for axes in panels] == [2, 2, 2, 1, 4]
    assert not overlapping(figure)


def test_lines_where_the_numbers_are_and_hatching_below_0() -> None:
    two, ones = np.stack([1 - P, P], axis=1), np.ones(len(P), dtype=int)
    with pytest.warns(UserWarning, match="above 3.59"):
        inverse = make_loss("inverse_focal", gamma=6.0)
    lines = {"focal": make_loss("focal"), "inverse": inverse}
    factors = {name: gradient_factors(loss, two, ones) for name, loss in lines.items()}
    figure = gradient_factor_diagram(P, {"mild": {"focal": factors["focal"]}, "both": factors})
    mild, both = figure.axes
    np.testing.assert_array_equal(mild.lines[1].get_ydata(), factors["focal"])
    assert (mild.get_ylim()[0], len(mild.patches), mild.get_yscale()) == (0, 0, "linear")
    assert both.get_ylim()[0] < factors["inverse"].min() < 0
    assert both.patches[0].get_hatch()
    assert both.get_yscale() == "symlog"
    assert not overlapping(figure)


def test_regions_are_shaded_and_marked() -> None:
    two, ones = np.stack([1 - P, P], axis=1), np.ones(len(P), dtype=int)
    rivals = {"focal": 0.0, "dual focal": 0.3}
    phi = {
        n: gradient_factors(make_loss("dual_focal", gamma=1.0, rival=q), two, ones) for n, q in rivals.items()
    }
    regions = {name: confidence_regions(1.0, rival=q) for name, q in rivals.items()}
    figure = confidence_region_diagram(P, phi, regions)
    for axes, name in zip(figure.axes, rivals, strict=True):
        over, under = axes.patches
        assert (over.get_x(), over.get_width()) == (0, regions[name].over_until)
        assert (under.get_x(), under.get_x() + under.get_width()) == pytest.approx(
            (regions[name].under_from, 1)
        )
    assert {"0.14", "0.37", "0.60"} <= set(written(figure))
    assert not overlapping(figure)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: simplex_surfaces(GRID, {}), "a figure to have at least one surface"),
        (lambda: simplex_surfaces(GRID, {"a": P}), "surface 'a' to be 91 finite numbers"),
        (
            lambda: simplex_surfaces(GRID[:, :2] + GRID[:, 2:] / 2, {"a": P}),
            r"be a grid \(N, 3\).*shape \(91, 2\)",
        ),
        (lambda: simplex_surfaces(np.full((5, 3), 1 / 3), {"a": P[:5]}), "points on a line"),
        (lambda: gradient_factor_diagram(P, {}), "a diagram to have at least one line a panel"),
        (lambda: gradient_factor_diagram(P[::-1], {"a": {"b": P}}), "p to be rising numbers"),
        (lambda: gradient_factor_diagram(P, {"a": {"b": P[1:]}}), r"line 'b' to have shape \(99,\)"),
        (
            lambda: confidence_region_diagram(P, {"a": P}, {"b": (0.1, 0.2)}),
            "phi and regions to have the same names",
        ),
    ],
)
def test_what_is_refused(draw: Callable[[], Figure], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw()
