"""Figures of what a threshold gives: risk and coverage, detection, and promised accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import check
from hf_calib.metrics import risk_coverage_curve
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.ranking import ACCEPTED, OodDetection
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_calib.decisions.promise import PromiseCurve

# Points of different models at one promise, so that their intervals do not hide each other.
_POINTS_APART = 3.0


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
    checked = style.check_panels(models)
    curves = {}
    for name, top in checked.items():
        coverage, risk = risk_coverage_curve(
            top.confidence.astype(np.float32), top.correct
        )  # As for the metric.
        few = style.some_points(len(risk), more_first=True)  # where the risk jumps
        curves[f"{style.shortened(name, 44)} (area {risk.mean():.4f})"] = coverage[few], risk[few]
    only = next(iter(checked.values())).correct if len(checked) == 1 else None
    return risk_coverage_of_curves(curves, bounds_of=only, title=title)


def risk_coverage_of_curves(
    curves: Mapping[str, tuple[FloatArray, FloatArray]],
    *,
    bounds_of: FloatArray | None = None,
    title: str | None = None,
) -> Figure:
    """The same from points of the curves, name -> (coverage, risk), with the bounds of what is correct (N,)."""
    with style.drawing(3.5, 3.1 + 0.16 * len(curves), title) as figure:
        axes = figure.subplots()
        for (name, (coverage, risk)), look in zip(curves.items(), style.line_looks(), strict=False):
            marker = "o" if len(risk) == 1 else None
            axes.plot(coverage, risk, linewidth=1.6, label=name, marker=marker, **look)
        if bounds_of is not None:
            _draw_bounds(axes, bounds_of)
        # The first few predictions may all be wrong, which says little and would flatten the rest.
        risks = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines]
        overall, largest = max(risk[-1] for risk in risks), max(risk.max() for risk in risks)
        top = min(largest, 2.5 * overall) * 1.08 if overall > 0 else 1
        axes.set(xlim=(0, 1.01), ylim=(-0.015 * top, top))  # a risk of 0 is to be seen
        axes.set(xlabel="coverage: share of predictions kept", ylabel="risk: error rate among them")
        style.unit_ticks(axes, "x")
        style.plain_axes(axes)
        style.add_legend(figure, axes)
    return figure


def _draw_bounds(axes: Axes, correct: FloatArray) -> None:
    kept = np.arange(1, len(correct) + 1)
    best = np.maximum(kept - correct.sum(), 0) / kept
    few = style.some_points(len(correct))
    axes.axhline(1 - correct.mean(), color=style.GREY, linestyle="--", linewidth=1, label="random order")
    look: Any = {"color": style.GREY, "linestyle": ":", "linewidth": 1.2}
    axes.plot(kept[few] / len(correct), best[few], label="best order", **look)


def roc_diagram(panels: Mapping[str, Mapping[str, OodDetection]], *, title: str | None = None) -> Figure:
    """Draw how many inputs from elsewhere are flagged against how many familiar ones are, for every threshold.

    For seeing at which cost in false alarms inputs from elsewhere are found; the upper left is best, the diagonal is
    chance. A dotted line marks where 95% of the familiar inputs are accepted.

    Args:
        panels: name of the inputs from elsewhere -> what is compared, such as scores or models -> what
            `hf_calib.metrics.ood_detection` found.

    Raises:
        ValueError: if there is nothing to draw.

    >>> from hf_calib.metrics import ood_detection
    >>> figure = roc_diagram({"noise": ood_detection([[4.0, 0.0], [0.0, 2.0]], [[0.5, 0.0], [0.0, 3.0]])})
    >>> figure.axes[0].get_ylabel()
    'from elsewhere: share flagged'
    """
    way_out = "pass what hf_calib.metrics.ood_detection returns, by the name of the data"
    drawable = bool(panels) and all(panels.values())
    check(drawable, "panels to have at least one curve each", "none", way_out)
    with style.drawing(0.7 + 2.8 * len(panels), 3.2 + 0.16 * max(map(len, panels.values())), title) as figure:
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (name, found) in zip(grid, panels.items(), strict=True):
            for (label, detection), look in zip(found.items(), style.line_looks(), strict=False):
                inside, outside = detection.curve
                few = style.some_points(len(inside))
                area = f"{style.shortened(label, 24)} (area {detection.auroc.value:.3f})"
                axes.plot(inside[few], outside[few], linewidth=1.6, label=area, **look)
            axes.plot([0, 1], [0, 1], color=style.GREY, linestyle="--", linewidth=1)
            axes.axvline(1 - ACCEPTED, color=style.GREY, linestyle=":", linewidth=1)
            axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), xlabel="familiar: share flagged")
            axes.set_title(style.shortened(name, 32))
            style.unit_ticks(axes)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        grid[0].set_ylabel("from elsewhere: share flagged")
        style.plain_axes(*grid)
    return figure


def promise_diagram(curves: Mapping[str, PromiseCurve], *, title: str | None = None) -> Figure:
    """Draw the share of inputs answered (left), and the accuracy of the answers (right), for promised accuracies.

    For choosing what to promise, and for comparing models or scalers: more answered is better. On the right
    all points should lie on the line or above it, but for a share delta of calibration sets; bars are exact
    95% intervals of the rows that were answered.

    Args:
        curves: name -> what `AbstainRule.curve` returns.

    Raises:
        ValueError: if there is no curve, or none of them has a point.

    >>> from hf_calib.decisions.promise import PromiseCurve
    >>> figure = promise_diagram({"model": PromiseCurve((0.9, 0.95), (0.8, 0.0), (None, None))})
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['inputs answered', 'accuracy of the answers']
    """
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import ScaledTranslation

    promised = [accuracy for curve in curves.values() for accuracy in curve.promised]
    way_out = "pass {name: rule.curve(...)}, with accuracies that the calibration rows can promise"
    check(bool(promised), "a diagram to have at least one promised accuracy", "none", way_out)
    small: Any = {"marker": "o", "markersize": 3}
    with style.drawing(6.2, 2.9 + 0.16 * len(curves), title) as figure:
        left, right = figure.subplots(1, 2)
        for number, ((name, curve), look) in enumerate(zip(curves.items(), style.line_looks(), strict=False)):
            left.plot(
                curve.promised,
                curve.answered,
                linewidth=1.6,
                label=style.shortened(name, 44),
                **small,
                **look,
            )
            kept = {at: found for at, found in zip(curve.promised, curve.kept, strict=True) if found}
            if kept:
                value, low, high = np.transpose(list(kept.values()))
                shift = ScaledTranslation(number * _POINTS_APART / 72, 0, figure.dpi_scale_trans)
                bars: Any = {"color": look["color"], "linestyle": "", "linewidth": 1.2, **small}
                ends = [value - low, high - value]
                right.errorbar(list(kept), value, ends, transform=right.transData + shift, **bars)
        first, last = min(promised), max(promised)
        room = 0.05 * (last - first) or 0.01
        right.plot([first, last], [first, last], ":", color=style.GREY, linewidth=1.2, zorder=0)
        place: Any = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        right.annotate("promised", (first, first), fontsize=7, color=style.GREY, **place)
        left.set(ylim=(-0.02, 1.02), ylabel="inputs answered")
        right.set_ylabel("accuracy of the answers")
        for axes in (left, right):
            axes.set(xlim=(first - room, last + room), xlabel="accuracy promised")
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")
        style.plain_axes(left, right)
        style.add_legend(figure, left)
    return figure
