"""Figures of how well confidence separates right predictions from wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics import risk_coverage_curve
from hf_calib.metrics.checks import FloatArray, check_n_bins
from hf_calib.metrics.sums import uniform_bins, uniform_edges
from hf_calib.plots._common import (
    BLUE,
    GREY,
    PEACH,
    VERMILION,
    add_legend,
    add_title,
    check_panels,
    line_looks,
    new_figure,
    plain_axes,
    shortened,
    unit_ticks,
    write_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
_POINTS = 1_000  # of a curve; more cannot be seen


def confidence_histogram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]], *, n_bins: int = 20, title: str | None = None
) -> Figure:
    """Draw how confidences are spread where the prediction is right (up) and where it is wrong (down).

    For seeing whether confidence separates right from wrong, which a reliability diagram does not show: the two
    halves of a useful model have different shapes. Each half is in shares of its own examples.

    Args:
        panels: name -> (confidences, correct), each (N,), as for `reliability_diagram`.
        n_bins: M, the number of equal-width bins (lower, upper].

    >>> figure = confidence_histogram({"model": ([0.9, 0.8, 0.7], [1, 0, 1])})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['right: 2', 'wrong: 1', 'model']
    """
    checked = check_panels(panels)
    n_bins = check_n_bins(n_bins)
    figure = new_figure(0.9 + 2.5 * len(checked), 2.9)
    axes = figure.subplots(1, len(checked), sharex=True, sharey=True, squeeze=False)[0]
    for panel, (name, (confidences, correct)) in zip(axes, checked.items(), strict=True):
        _draw_halves(panel, confidences, correct == 1, n_bins)
        write_name(panel, name, points_above=5)
    _label_halves(axes)
    add_title(figure, title)
    return figure


def _draw_halves(axes: Axes, confidences: FloatArray, right: np.ndarray, n_bins: int) -> None:
    edges = uniform_edges(n_bins)
    looks: dict[str, dict[str, Any]] = {
        "right": {"color": BLUE, "edgecolor": "white"},
        "wrong": {"color": PEACH, "edgecolor": VERMILION, "hatch": "////"},
    }
    for members, (word, look), sign in zip((right, ~right), looks.items(), (1, -1), strict=True):
        counts = np.bincount(uniform_bins(confidences[members], n_bins), minlength=n_bins)
        share = sign * counts / max(members.sum(), 1)
        axes.bar(edges[:-1], share, np.diff(edges), align="edge", linewidth=0.4, **look)
        axes.text(
            0.03,
            0.96 if sign > 0 else 0.04,
            f"{word}: {members.sum():,}",
            transform=axes.transAxes,
            va="top" if sign > 0 else "bottom",
            fontsize=7.5,
            color=BLUE if sign > 0 else VERMILION,
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlim(0, 1)


def _label_halves(axes: np.ndarray) -> None:
    """The same height up and down and in every panel, with room for the words."""
    top = max(np.abs(panel.get_ylim()).max() for panel in axes) * 1.15
    step = 10.0 ** np.floor(np.log10(top))
    step *= 0.5 if top / step < 2.5 else 1 if top / step < 5 else 2
    ticks = np.arange(-np.floor(top / step), np.floor(top / step) + 1) * step
    for panel in axes:
        unit_ticks(panel, "x")
        plain_axes(panel)
        panel.set_ylim(-top, top)
        panel.set_yticks(ticks, [f"{abs(tick):.{0 if step >= 0.01 else 1}%}" for tick in ticks])
        panel.set_xlabel("confidence", fontsize=8)
    axes[0].set_ylabel("share of wrong | of right", fontsize=8)


def risk_coverage_diagram(
    models: Mapping[str, tuple[ArrayLike, ArrayLike]], *, title: str | None = None
) -> Figure:
    r"""Draw the error rate among the most confident predictions against how many of them are kept.

    For choosing a threshold below which to abstain, and for comparing several models: lower is better. Unlike
    a reliability diagram it looks at the order of the confidences only, so a temperature hardly moves it.

    The area under the curve is the mean risk over all coverages. For one model, grey lines bound it: above,
    confidences that say nothing; below, confidences that put every wrong prediction last.

    Args:
        models: name -> (confidences, correct), each (N,), as for `reliability_diagram`; N may differ.

    References:
        El-Yaniv and Wiener 2010; Geifman et al. 2019 (the area).

    >>> figure = risk_coverage_diagram({"model": ([0.9, 0.8, 0.7], [1, 0, 1])})
    >>> figure.axes[0].get_xlabel()
    'coverage: share of predictions kept'
    """
    checked = check_panels(models)
    curves = {}
    for name, panel in checked.items():
        confidences, correct = panel
        coverage, risk = risk_coverage_curve(confidences.astype(np.float32), correct)  # As for the metric.
        few = _thin(len(risk))
        curves[f"{shortened(name, 44)} (area {risk.mean():.4f})"] = (
            coverage[few],
            risk[few],
        )
    only = next(iter(checked.values()))[1] if len(checked) == 1 else None
    return risk_coverage_of_curves(curves, bounds_of=only, title=title)


def risk_coverage_of_curves(
    curves: Mapping[str, tuple[FloatArray, FloatArray]],
    *,
    bounds_of: FloatArray | None = None,
    title: str | None = None,
) -> Figure:
    """The same from points of the curves, name -> (coverage, risk), with the bounds of what is correct (N,)."""
    figure = new_figure(3.5, 3.1 + 0.16 * len(curves))
    axes = figure.subplots()
    for (name, (coverage, risk)), look in zip(curves.items(), line_looks(), strict=False):
        marker = "o" if len(risk) == 1 else None
        axes.plot(coverage, risk, linewidth=1.6, label=name, marker=marker, **look)
    if bounds_of is not None:
        _draw_bounds(axes, bounds_of)
    _label_risk(axes)
    add_legend(figure, axes)
    add_title(figure, title)
    return figure


def _thin(n_points: int) -> np.ndarray:
    """Indices of points enough for a curve: all of the first, where the risk jumps, and then ever fewer."""
    if n_points <= _POINTS:
        return np.arange(n_points)
    return np.unique(np.geomspace(1, n_points, _POINTS).round().astype(int)) - 1


def _draw_bounds(axes: Axes, correct: FloatArray) -> None:
    n_examples = len(correct)
    kept = np.arange(1, n_examples + 1)
    best = np.maximum(kept - correct.sum(), 0) / kept
    few = np.unique(np.linspace(0, n_examples - 1, _POINTS).round().astype(int))
    axes.axhline(1 - correct.mean(), color=GREY, linestyle="--", linewidth=1, label="random order")
    axes.plot(kept[few] / n_examples, best[few], color=GREY, linestyle=":", linewidth=1.2, label="best order")


def _label_risk(axes: Axes) -> None:
    axes.set_xlim(0, 1.01)
    unit_ticks(axes, "x")
    plain_axes(axes)
    # The first few predictions may all be wrong, which says little and would flatten the rest.
    curves = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines]
    overall, largest = max(curve[-1] for curve in curves), max(curve.max() for curve in curves)
    top = min(largest, 2.5 * overall) * 1.08 if overall > 0 else 1
    axes.set_ylim(-0.015 * top, top)  # a risk of 0 is to be seen
    axes.set_xlabel("coverage: share of predictions kept", fontsize=8)
    axes.set_ylabel("risk: error rate among them", fontsize=8)
