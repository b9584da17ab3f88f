"""Reliability diagrams without bins: smooth curves, and isotonic regression (CORP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, check_draws
from hf_calib.metrics.corp import CorpCurve, curve_of, decompose
from hf_calib.metrics.smooth import SmoothReliability, smooth_error, smooth_reliability
from hf_calib.metrics.sums import TopLabel
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_THINNEST, _THICKEST = 0.7, 3.6  # points
_NARROWEST = 0.01  # bandwidth, where all confidences are nearly equal
_DENSITY_BANDWIDTH = 0.02  # of the strip below: that of the curve may be far too wide to show the confidences
_N_BARS = 50  # of the strip below a CORP diagram


def smooth_reliability_diagram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    confidence_level: float = 0.95,
    n_resamples: int = 200,
    seed: int = 0,
    title: str | None = None,
) -> Figure:
    r"""Draw a smooth curve of accuracy against confidence, with its confidence band, one panel for each name.

    For a diagram that does not depend on a number of bins; `reliability_diagram` is the one that readers know.

    The curve is the kernel regression $\hat a(t)$ of `hf_calib.metrics.smooth.smooth_reliability`, thick where
    confidences are frequent, and drawn only between the smallest and the largest confidence. The band holds
    the middle of the curves of bootstrap resamples, pointwise: where the dotted diagonal leaves it, the model
    is over-confident (curve below) or under-confident (above) beyond chance. Below is the density of the
    confidences, with lines at the mean confidence and the overall accuracy.

    Args:
        panels: name -> (confidences, correct), each (N,): of the top label in [0, 1], and 1 or 0.
        confidence_level: of the band, in (0, 1).
        n_resamples: of the bootstrap, at least 2; fewer are drawn above 100,000 examples.
        seed: of the bootstrap.

    Notes:
        The bandwidth is that of the smooth calibration error, as the paper has it, but not above the normal
        reference rule, 1.06 times the standard deviation of the confidences over $N^{1/5}$: the paper's choice
        grows with the error, so that for a badly calibrated model it would flatten the curve.

        Where all resamples agree, as where every prediction is right, the band has no width: it shows what
        this sample can tell, not what it has not met.

    References:
        Blasiok and Nakkiran 2023, section 2; Silverman 1986, section 3.4.2 (reference rule).

    >>> figure = smooth_reliability_diagram({"before": ([0.9, 0.8, 0.7], [1, 0, 1])}, n_resamples=20)
    >>> len(figure.axes)
    2
    """
    checked = style.check_panels(panels)
    check_draws(n_resamples, seed, confidence_level)
    check(n_resamples >= 2, "n_resamples to be at least 2", n_resamples, "200 make a steady band")
    with style.paired_panels([""], list(checked), ("accuracy", "density"), title) as (figure, axes):
        for top, (upper, lower) in zip(checked.values(), axes.values(), strict=True):
            curve = _curve(top)
            n_drawn = style.affordable_resamples(n_resamples, len(top.correct))
            band = _band(top, curve, confidence_level, np.random.default_rng(seed), n_drawn)
            _draw_curve(upper, top, curve, band, f"{100 * confidence_level:g}% band")
            density = smooth_reliability(*top, bandwidth=_DENSITY_BANDWIDTH)
            lower.fill_between(density.grid, density.density, color="#BDBDBD", linewidth=0)
            lower.set_ylim(0, density.density.max() * 1.1)
            lower.set_yticks([])
            style.draw_means(lower, top.correct.mean(), top.confidence.mean())
            n, accuracy = len(top.correct), top.correct.mean()
            summary = f"smECE {smooth_error(top):.3f}   accuracy {accuracy:.3f}   N {n:,}"
            upper.set_title(summary, fontsize=7, loc="left", pad=4)
        lines = {"smoothed accuracy": {"color": style.BLUE, "linewidth": 2.4}, **style.MEANS}
        style.add_legend(figure, figure.axes[0], lines, columns=min(len(checked) + 1, 5))
    return figure


def _curve(top: TopLabel) -> SmoothReliability:
    """The curve at the bandwidth of the smooth calibration error, or a narrower one where that hides its shape."""
    curve = smooth_reliability(*top)
    reference = max(1.06 * float(top.confidence.std()) * len(top.confidence) ** -0.2, _NARROWEST)
    return curve if curve.bandwidth <= reference else smooth_reliability(*top, bandwidth=reference)


def _band(
    top: TopLabel, curve: SmoothReliability, level: float, rng: np.random.Generator, n_resamples: int
) -> FloatArray:
    """The pointwise limits (2, G) of the curves of resamples, at the bandwidth of the curve itself."""
    n_rows = len(top.correct)
    same: dict[str, Any] = {"bandwidth": curve.bandwidth, "grid_size": len(curve.grid)}
    curves = np.empty((n_resamples, len(curve.grid)))
    for resampled in curves:
        resampled[:] = smooth_reliability(*top.part(rng.integers(0, n_rows, n_rows)), **same).accuracy
    # A resample with no example near a point says nothing there; the curve itself is always a possible one.
    curves = np.where(np.isnan(curves), curve.accuracy, curves)
    return np.quantile(curves, [(1 - level) / 2, (1 + level) / 2], axis=0)


def _draw_curve(axes: Axes, top: TopLabel, curve: SmoothReliability, band: FloatArray, label: str) -> None:
    """The curve from the smallest confidence to the largest, one point at the least."""
    from matplotlib.collections import LineCollection

    shown = (curve.grid >= top.confidence.min()) & (curve.grid <= top.confidence.max())
    if not shown.any():
        shown[np.abs(curve.grid - top.confidence.mean()).argmin()] = True
    shown &= np.isfinite(curve.accuracy)
    grid, accuracy, density = curve.grid[shown], curve.accuracy[shown], curve.density[shown]
    low, high = band[:, shown]
    axes.fill_between(grid, low, high, color=style.SKY, linewidth=0, label=label)
    if len(grid) == 1:
        ends = [accuracy - low, high - accuracy]
        axes.errorbar(grid, accuracy, ends, color=style.BLUE, fmt="o", capsize=3, clip_on=False)
    points = np.stack([grid, accuracy], axis=1)
    segments = np.stack([points[:-1], points[1:]], axis=1)
    frequent = np.sqrt((density[1:] + density[:-1]) / 2 / density.max())
    look: Any = {"colors": style.BLUE, "capstyle": "round", "zorder": 3, "clip_on": False}
    widths = (_THINNEST + (_THICKEST - _THINNEST) * frequent).tolist()
    axes.add_collection(LineCollection(list(segments), linewidths=widths, **look))
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

    For a diagram that neither a number of bins nor a bandwidth decides: the steps are those of an isotonic regression.
    The band is where the curve of a calibrated model with these confidences would be at each of them. It is pointwise:
    the curve of a calibrated model, too, leaves it somewhere in most diagrams, so that leaving it in a few places shows
    nothing; `hf_calib.metrics.consistency_test` tests all confidences together. Above each panel stand the parts of the
    top label's Brier score, miscalibration, discrimination and uncertainty; below it is a histogram of the confidences.

    Args:
        panels: name -> (confidences, correct), each (N,): of the top label in [0, 1], and 1 or 0.
        confidence_level: of the band at each point, in (0, 1).
        n_resamples: of the labels, at least 1; fewer are drawn above 40,000 different confidences.
        seed: of the draws.

    References:
        Dimitriadis, Gneiting and Jordan 2021, "Stable reliability diagrams for probabilistic classifiers".

    >>> figure = corp_diagram({"before": ([0.9, 0.8, 0.7], [1, 0, 1])}, n_resamples=20)
    >>> len(figure.axes)
    2
    """
    checked = style.check_panels(panels)
    check_draws(n_resamples, seed, confidence_level)
    labels = ("recalibrated confidence", "examples")
    with style.paired_panels([""], list(checked), labels, title) as (figure, axes):
        for top, (upper, lower) in zip(checked.values(), axes.values(), strict=True):
            n_drawn = style.affordable_resamples(n_resamples, len(np.unique(top.confidence)))
            curve = curve_of(top, n_resamples=n_drawn, confidence_level=confidence_level, seed=seed)
            _draw_isotonic(upper, curve, f"{100 * confidence_level:g}% pointwise band if calibrated")
            lower.hist(top.confidence, bins=np.linspace(0, 1, _N_BARS + 1), color="#BDBDBD")
            lower.set_yticks([])
            parts = decompose(top, "brier")
            summary = f"MCB {parts.miscalibration:.4f}   DSC {parts.discrimination:.4f}"
            summary += f"   UNC {parts.uncertainty:.4f}"
            upper.set_title(summary, fontsize=7, loc="left", pad=4)
        style.add_legend(figure, figure.axes[0], columns=2)
    return figure


def _draw_isotonic(axes: Axes, curve: CorpCurve, label: str) -> None:
    line: dict[str, Any] = {"color": style.BLUE, "label": "recalibrated", "clip_on": False, "zorder": 3}
    at, low, high = curve.confidences, curve.low, curve.high
    if len(at) == 1:
        axes.errorbar(at, at, [at - low, high - at], fmt="none", capsize=4, color=style.SKY, label=label)
        axes.plot(at, curve.recalibrated, marker="o", linestyle="none", **line)
    else:
        axes.fill_between(at, low, high, linewidth=0, color=style.SKY, label=label)
        axes.plot(at, curve.recalibrated, linewidth=1.8, **line)
    style.name_sides(axes)
