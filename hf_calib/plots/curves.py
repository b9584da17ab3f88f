"""Figures of curves: reliability without bins, and the risk at each coverage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import check
from hf_calib.metrics import risk_coverage_curve
from hf_calib.metrics.checks import FloatArray, check_draws
from hf_calib.metrics.corp import CorpCurve, curve_of, decompose
from hf_calib.metrics.smooth import SmoothReliability, smooth_error, smooth_reliability
from hf_calib.metrics.sums import TopLabel
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The widths of a curve, in points.
_THINNEST = 0.7
_THICKEST = 3.6
# The bandwidth if all confidences are nearly equal.
_NARROWEST = 0.01
# For the strip below, for which the curve's own may be too wide.
_DENSITY_BANDWIDTH = 0.02
# For the strip below a CORP diagram.
_N_BARS = 50


def smooth_reliability_diagram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    confidence_level: float = 0.95,
    n_resamples: int = 200,
    seed: int = 0,
    title: str | None = None,
) -> Figure:
    r"""Draw a smooth curve of accuracy against confidence, with its confidence band,
    one panel for each name.

    It does not depend on a number of bins; `reliability_diagram` is the form that readers know.

    The curve is the kernel regression $\hat a(t)$ of `hf_calib.metrics.smooth.smooth_reliability`.
    It is thick where confidences are frequent, and is drawn only between the smallest and the
    largest confidence. The band is pointwise and contains the middle of the curves of bootstrap
    resamples. Where the dotted diagonal is outside the band, the model is over-confident (curve
    below) or under-confident (above) beyond chance. Below is the density of the confidences, with
    lines at the mean confidence and the overall accuracy.

    Args:
        panels: name -> (confidences, correct), each (N,): confidences in [0, 1], and correct 1 or
            0.
        confidence_level: level of the band, in (0, 1).
        n_resamples: number of bootstrap resamples, at least 2; fewer are drawn above 100,000
            examples.
        seed: seed of the bootstrap.

    Notes:
        The bandwidth is that of the smooth calibration error, as in the paper, but at most that of
        the normal reference rule, 1.06 times the standard deviation of the confidences over
        $N^{1/5}$. The paper's bandwidth grows with the error and would flatten the curve of a badly
        calibrated model.

        If all resamples agree, for example because every prediction is correct, the band has no
        width. The band shows only the uncertainty that this sample contains.

    References:
        Blasiok and Nakkiran 2023, section 2; Silverman 1986, section 3.4.2 (reference rule).

    >>> figure = smooth_reliability_diagram({"before": ([0.9, 0.8, 0.7], [1, 0, 1])}, n_resamples=20)
    >>> len(figure.axes)
    2
    """
    checked = style.check_panels(panels)
    check_draws(n_resamples, seed, confidence_level)
    check(
        n_resamples >= 2,
        "n_resamples to be at least 2",
        n_resamples,
        "200 make a steady band",
    )
    labels = ("accuracy", "density")
    with style.paired_panels([""], list(checked), labels, title) as (figure, axes):
        for top, (upper, lower) in zip(checked.values(), axes.values(), strict=True):
            n_rows = len(top.correct)
            curve = _curve(top)
            n_drawn = style.affordable_resamples(n_resamples, n_rows)
            # The draws of a panel do not depend on the panels before it.
            rng = np.random.default_rng(seed)
            band = _band(top, curve, confidence_level, rng, n_drawn)
            _draw_curve(upper, top, curve, band, f"{100 * confidence_level:g}% band")
            accuracy = top.correct.mean()
            _draw_density(lower, top)
            style.draw_means(lower, accuracy, top.confidence.mean())
            error = smooth_error(top)
            summary = f"smECE {error:.3f}   accuracy {accuracy:.3f}   N {n_rows:,}"
            upper.set_title(summary, fontsize=7, loc="left", pad=4)
        # The curve itself is of pieces, which have no name.
        smoothed: Any = {"color": style.BLUE, "linewidth": 2.4}
        first, below = next(iter(axes.values()))
        first.plot([], [], label="smoothed accuracy", **smoothed)
        n_columns = min(len(checked) + 1, 5)
        style.add_legend(figure, first, below, columns=n_columns)
    return figure


def _draw_density(axes: Axes, top: TopLabel) -> None:
    found = smooth_reliability(*top, bandwidth=_DENSITY_BANDWIDTH)
    look: Any = {"color": style.LIGHT, "linewidth": 0, "label": "density of the rows"}
    axes.fill_between(found.grid, found.density, **look)
    axes.set_ylim(0, found.density.max() * 1.1)
    axes.set_yticks([])


def _curve(top: TopLabel) -> SmoothReliability:
    """The curve at the bandwidth of the smooth calibration error,
    or a narrower one if that hides its shape.
    """
    curve = smooth_reliability(*top)
    spread = float(top.confidence.std())
    # This is the normal reference rule, Silverman 1986, section 3.4.2.
    reference = 1.06 * spread * len(top.confidence) ** -0.2
    narrower = max(reference, _NARROWEST)
    if curve.bandwidth <= narrower:
        return curve
    return smooth_reliability(*top, bandwidth=narrower)


def _band(
    top: TopLabel,
    curve: SmoothReliability,
    level: float,
    rng: np.random.Generator,
    n_resamples: int,
) -> FloatArray:
    """The pointwise limits (2, G) of the curves of resamples, at the bandwidth of the curve."""
    n_rows = len(top.correct)
    n_points = len(curve.grid)
    curves = np.empty((n_resamples, n_points))
    for k in range(n_resamples):
        drawn = top.part(rng.integers(0, n_rows, n_rows))
        resampled = smooth_reliability(
            *drawn, bandwidth=curve.bandwidth, grid_size=n_points
        )
        curves[k] = resampled.accuracy
    # A resample without an example near a point has no value there;
    # the curve itself is used instead.
    curves = np.where(np.isnan(curves), curve.accuracy, curves)
    return np.quantile(curves, [(1 - level) / 2, (1 + level) / 2], axis=0)


def _draw_curve(
    axes: Axes, top: TopLabel, curve: SmoothReliability, band: FloatArray, label: str
) -> None:
    """Draw the curve from the smallest to the largest confidence, with at least one point."""
    from matplotlib.collections import LineCollection

    shown = (curve.grid >= top.confidence.min()) & (curve.grid <= top.confidence.max())
    # All confidences may lie between two points of the grid.
    if not shown.any():
        shown[np.abs(curve.grid - top.confidence.mean()).argmin()] = True
    shown &= np.isfinite(curve.accuracy)
    grid = curve.grid[shown]
    accuracy = curve.accuracy[shown]
    low, high = band[:, shown]
    axes.fill_between(grid, low, high, color=style.SKY, linewidth=0, label=label)
    # Neither an area nor a line of one point is visible.
    if len(grid) == 1:
        ends = [accuracy - low, high - accuracy]
        point: dict[str, Any] = {"fmt": "o", "capsize": 3, "clip_on": False}
        axes.errorbar(grid, accuracy, ends, color=style.BLUE, **point)
    # A line has one width, so the curve is drawn in pieces.
    points = np.stack([grid, accuracy], axis=1)
    segments = np.stack([points[:-1], points[1:]], axis=1)
    density = curve.density[shown]
    between = (density[1:] + density[:-1]) / 2
    # The square root keeps the curve visible where confidences are rare.
    widths = _THINNEST + (_THICKEST - _THINNEST) * np.sqrt(between / density.max())
    lines = LineCollection(
        list(segments),
        linewidths=widths.tolist(),
        colors=style.BLUE,
        capstyle="round",
        zorder=3,
        clip_on=False,
    )
    axes.add_collection(lines)
    style.name_sides(axes)


def corp_diagram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    confidence_level: float = 0.9,
    n_resamples: int = 500,
    seed: int = 0,
    title: str | None = None,
) -> Figure:
    r"""Draw the recalibrated confidence against the confidence, one panel for each name.

    It depends neither on a number of bins nor on a bandwidth, because the steps are those of an
    isotonic regression. The band is the range of a calibrated model's curve at each of these
    confidences. It is pointwise: in most diagrams a calibrated model's curve also leaves it
    somewhere, so leaving it in a few places shows nothing. `hf_calib.metrics.consistency_test`
    tests all confidences together. Above each panel are the parts of the top label's Brier score
    (miscalibration, discrimination, uncertainty), and below it a histogram of the confidences.

    Args:
        panels: name -> (confidences, correct), each (N,): confidences in [0, 1], and correct 1 or
            0.
        confidence_level: level of the band at each point, in (0, 1).
        n_resamples: number of draws of the labels, at least 1; fewer are drawn above 40,000
            different confidences.
        seed: seed of the draws.

    References:
        Dimitriadis, Gneiting and Jordan 2021, "Stable reliability diagrams for probabilistic
        classifiers".

    >>> figure = corp_diagram({"before": ([0.9, 0.8, 0.7], [1, 0, 1])}, n_resamples=20)
    >>> len(figure.axes)
    2
    """
    checked = style.check_panels(panels)
    check_draws(n_resamples, seed, confidence_level)
    labels = ("recalibrated confidence", "examples")
    with style.paired_panels([""], list(checked), labels, title) as (figure, axes):
        for top, (upper, lower) in zip(checked.values(), axes.values(), strict=True):
            n_different = len(np.unique(top.confidence))
            curve = curve_of(
                top,
                n_resamples=style.affordable_resamples(n_resamples, n_different),
                confidence_level=confidence_level,
                seed=seed,
            )
            band = f"{100 * confidence_level:g}% pointwise band if calibrated"
            _draw_isotonic(upper, curve, band)
            bars = np.linspace(0, 1, _N_BARS + 1)
            look: Any = {"color": style.LIGHT, "label": "number of rows"}
            lower.hist(top.confidence, bins=bars, **look)
            lower.set_yticks([])
            parts = decompose(top)
            summary = (
                f"MCB {parts.miscalibration:.4f}   DSC {parts.discrimination:.4f}   "
                f"UNC {parts.uncertainty:.4f}"
            )
            upper.set_title(summary, fontsize=7, loc="left", pad=4)
        style.add_legend(figure, *next(iter(axes.values())), columns=2)
    return figure


def _draw_isotonic(axes: Axes, curve: CorpCurve, label: str) -> None:
    line: dict[str, Any] = {"color": style.BLUE, "clip_on": False, "zorder": 3}
    band: dict[str, Any] = {"color": style.SKY, "label": label}
    at = curve.confidences
    if len(at) == 1:
        ends = [at - curve.low, curve.high - at]
        axes.errorbar(at, at, ends, fmt="none", capsize=4, **band)
        line |= {"marker": "o", "linestyle": "none"}
    else:
        axes.fill_between(at, curve.low, curve.high, linewidth=0, **band)
        line |= {"linewidth": 1.8}
    axes.plot(at, curve.recalibrated, label="recalibrated", **line)
    style.name_sides(axes)


def risk_coverage_diagram(
    models: Mapping[str, tuple[ArrayLike, ArrayLike]], *, title: str | None = None
) -> Figure:
    r"""Draw the error rate among the most confident predictions against the fraction of predictions
    kept.

    Use it to choose a threshold for abstention, or to compare models; lower is better. Unlike a
    reliability diagram it depends only on the order of the confidences, so a temperature hardly
    changes it.

    The area under the curve is the mean risk over all coverages. With one model, grey lines bound
    it: the upper line is for uninformative confidences, the lower line for confidences that rank
    every wrong prediction last.

    Args:
        models: name -> (confidences, correct), each (N,), as in `reliability_diagram`; N may
            differ.

    References:
        El-Yaniv and Wiener 2010; Geifman et al. 2019 (the area).

    >>> figure = risk_coverage_diagram({"model": ([0.9, 0.8, 0.7], [1, 0, 1])})
    >>> figure.axes[0].get_xlabel()
    'coverage: share of predictions kept'
    """
    checked = style.check_panels(models)
    curves = {}
    for name, top in checked.items():
        # The order is that of the metric, in which equal float32 numbers are ties.
        narrow = top.confidence.astype(np.float32)
        coverage, risk = risk_coverage_curve(narrow, top.correct)
        # The risk jumps at the start, which therefore has more of the points.
        few = style.some_points(len(risk), more_first=True)
        label = f"{style.shortened(name, 44)} (area {risk.mean():.4f})"
        curves[label] = (coverage[few], risk[few])
    bounds_of = None
    if len(checked) == 1:
        (only,) = checked.values()
        bounds_of = only.correct
    return risk_coverage_of_curves(curves, bounds_of=bounds_of, title=title)


def risk_coverage_of_curves(
    curves: Mapping[str, tuple[FloatArray, FloatArray]],
    *,
    bounds_of: FloatArray | None = None,
    title: str | None = None,
) -> Figure:
    """Draw `risk_coverage_diagram` from curves, name -> (coverage, risk),
    with the bounds of `correct` (N,).
    """
    with style.drawing(3.5, 3.1 + 0.16 * len(curves), title) as figure:
        axes = figure.subplots()
        for name, look in zip(curves, style.line_looks(), strict=False):
            coverage, risk = curves[name]
            # A line of one point is not visible.
            marker = "o" if len(risk) == 1 else None
            axes.plot(coverage, risk, linewidth=1.6, label=name, marker=marker, **look)
        overall = max(risk[-1] for _, risk in curves.values())
        largest = max(risk.max() for _, risk in curves.values())
        if bounds_of is not None:
            _draw_bounds(axes, bounds_of)
        top = 1.0
        if overall > 0:
            # The first few predictions may all be wrong, which would flatten the rest of the curve.
            top = min(largest, 2.5 * overall) * 1.08
        # A risk of 0 must be visible.
        axes.set(xlim=(0, 1.01), ylim=(-0.015 * top, top))
        axes.set_xlabel("coverage: share of predictions kept")
        axes.set_ylabel("risk: error rate among them")
        style.unit_ticks(axes, "x")
        style.plain_axes(axes)
        style.add_legend(figure, axes)
    return figure


def _draw_bounds(axes: Axes, correct: FloatArray) -> None:
    n_rows = len(correct)
    kept = np.arange(1, n_rows + 1)
    # The best order keeps all right predictions before the first wrong one; in a random
    # order, the risk is the same at each coverage.
    best = np.maximum(kept - correct.sum(), 0) / kept
    few = style.some_points(n_rows)
    grey: dict[str, Any] = {"color": style.GREY, "linewidth": 1}
    error = 1 - correct.mean()
    axes.axhline(error, linestyle="--", label="random order", **grey)
    axes.plot(kept[few] / n_rows, best[few], linestyle=":", label="best order", **grey)
