"""Figures of a training: what they draw, and that it can be read."""

from __future__ import annotations

import numpy as np
import pytest
from papers.gradients import simplex_grid, uncertainty_weights
from papers.simplex import simplex_surfaces
from studies.panels import group_boxes, small_multiples, spread_by_epoch

from hf_calib.losses import make_loss
from tests.helpers.pictures import overlapping, written

EPOCHS = np.arange(1.0, 31.0)


def test_a_line_looks_the_same_in_all_panels_and_is_told_apart_in_grey() -> None:
    lines = {f"focal {k}": (EPOCHS, np.sin(EPOCHS + k)) for k in range(7)}
    figure = small_multiples(
        {"bin 0": lines, "bin 7": dict(reversed(lines.items()))}, xlabel="e", ylabel="gap"
    )
    first, second = ({line.get_label(): line for line in axes.lines} for axes in figure.axes)
    for name, (x, y) in lines.items():
        for line in (first[name], second[name]):
            np.testing.assert_array_equal(line.get_xydata(), np.c_[x, y])
        assert first[name].get_color() == second[name].get_color()
        assert first[name].get_marker() == second[name].get_marker()
    assert len({(line.get_marker(), line.get_linestyle()) for line in first.values()}) == 7
    assert len({line.get_marker() for line in first.values()}) == 7


@pytest.mark.slow
def test_fifteen_bins_can_be_read() -> None:
    lines = {name: (EPOCHS, np.cos(EPOCHS)) for name in ("cross entropy", "focal 3", "focal 4", "focal 5")}
    panels = {f"bin {m}": lines for m in range(15)}
    figure = small_multiples(panels, xlabel="epoch", ylabel="gap", level=0, faint=panels)
    assert len(figure.axes) == 15
    assert overlapping(figure) == []
    assert {"bin 0", "bin 14", "focal 5", "epoch", "gap"} <= set(written(figure))
    assert figure.axes[3].lines[0].get_ydata() == [0, 0]


def test_a_spread_is_the_quartiles() -> None:
    values = np.random.default_rng(0).normal(size=(30, 400))
    figure = spread_by_epoch({"validation": {"focal": (EPOCHS, values)}}, ylabel="maximum logit")
    middle, low, high = (line.get_ydata() for line in figure.axes[0].lines)
    np.testing.assert_allclose([low, middle, high], np.quantile(values, [0.25, 0.5, 0.75], axis=1))
    assert overlapping(figure) == []


def test_boxes_of_groups() -> None:
    groups = {"to 3": [1.0, 2.0, 3.0, 4.0, 100.0], "never": []}
    figure = group_boxes({"focal": groups, "AdaFocal": groups}, xlabel="logit", ylabel="learned at epoch")
    assert overlapping(figure) == []
    assert [text.get_text() for text in figure.axes[1].texts] == ["n 5", "n 0"]
    assert figure.axes[0].get_xlim()[1] < 10  # no outliers
    with pytest.raises(ValueError, match=r"AdaFocal to have the groups \['to 3', 'never'\], got \['to 3'\]"):
        group_boxes({"focal": groups, "AdaFocal": {"to 3": [1.0]}}, xlabel="logit", ylabel="learned")


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
