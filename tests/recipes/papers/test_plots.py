"""Figures of a training: what they draw, and that it can be read."""

from __future__ import annotations

import numpy as np
from papers.gradients import simplex_grid, uncertainty_weights
from papers.simplex import simplex_surfaces
from studies.panels import spread_by_epoch

from hf_calib.losses import make_loss
from tests.helpers.pictures import overlapping

EPOCHS = np.arange(1.0, 31.0)


def test_a_spread_is_the_quartiles() -> None:
    values = np.random.default_rng(0).normal(size=(30, 400))
    figure = spread_by_epoch({"validation": {"focal": (EPOCHS, values)}}, ylabel="maximum logit")
    middle, low, high = (line.get_ydata() for line in figure.axes[0].lines)
    np.testing.assert_allclose([low, middle, high], np.quantile(values, [0.25, 0.5, 0.75], axis=1))
    assert overlapping(figure) == []


def test_a_triangle_for_each_surface_with_its_own_scale() -> None:
    grid = simplex_grid(15)
    labels = np.zeros(len(grid), dtype=int)
    surfaces = {
        n: uncertainty_weights(make_loss(n), grid, labels) for n in ("focal", "bsce", "dual_focal", "brier")
    }
    surfaces["signed"] = grid[:, 0] - 0.5
    figure = simplex_surfaces(grid, surfaces, class_names=["label", "second", "third"], title="weights")
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
