"""Reliability diagrams without bins: smooth curves with confidence bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, check_draws
from hf_calib.metrics.smooth import SmoothReliability, smooth_error, smooth_reliability
from hf_calib.metrics.sums import TopLabel
from hf_calib.plots._common import (
    BLUE,
    MEANS,
    SKY,
    VERMILION,
    add_legend,
    add_title,
    check_panels,
    draw_diagonal,
    name_sides,
    new_figure,
    plain_axes,
    unit_ticks,
    write_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
_PANEL_INCHES = (2.5, 3.1)
_THINNEST, _THICKEST = 0.7, 3.6  # points
_EXAMPLES_RESAMPLED = 2e7  # in all, per panel; where this leaves fewer resamples, the band is thin anyway
_FEWEST_RESAMPLES = 50
_NARROWEST = 0.01  # bandwidth, where all confidences are nearly equal
_DENSITY_BANDWIDTH = 0.02  # of the strip below: that of the curve may be far too wide to show the confidences


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
    checked = check_panels(panels)
    check_draws(n_resamples, seed, confidence_level)
    if n_resamples < 2:
        raise InputValueError(expected("n_resamples", "be at least 2", n_resamples, "200 make a steady band"))
    width, height = _PANEL_INCHES
    figure = new_figure(0.7 + width * len(checked), 0.6 + height)
    axes = figure.subplots(2, len(checked), sharex=True, squeeze=False, height_ratios=[2.6, 1])
    for j, (name, (confidences, correct)) in enumerate(checked.items()):
        upper, lower = axes[:, j]
        clipped = confidences.clip(0, 1)
        curve = _curve(clipped, correct)
        band = _band(clipped, correct, curve, confidence_level, n_resamples, seed)
        _draw_curve(upper, curve, band, clipped, label=f"{100 * confidence_level:g}% band")
        _draw_density(lower, clipped, correct)
        _label(upper, lower, first=j == 0)
        error = smooth_error(TopLabel(clipped, correct))
        summary = f"smECE {error:.3f}   accuracy {correct.mean():.3f}   N {len(correct):,}"
        upper.set_title(summary, fontsize=7, loc="left", pad=4)
        write_name(upper, name)
    smoothed = ("smoothed accuracy", {"color": BLUE, "linewidth": 2.4})
    add_legend(figure, axes[0, 0], smoothed, *MEANS, columns=min(len(checked) + 1, 5))
    add_title(figure, title)
    return figure


def _curve(confidences: FloatArray, correct: FloatArray) -> SmoothReliability:
    """The curve at the bandwidth of the smooth calibration error, or a narrower one where that hides its shape."""
    curve = smooth_reliability(confidences, correct)
    reference = max(1.06 * float(confidences.std()) * len(confidences) ** -0.2, _NARROWEST)
    if curve.bandwidth <= reference:
        return curve
    return smooth_reliability(confidences, correct, bandwidth=reference)


def _band(
    confidences: FloatArray,
    correct: FloatArray,
    curve: SmoothReliability,
    level: float,
    n_resamples: int,
    seed: int,
) -> FloatArray:
    """The pointwise limits (2, G) of the curves of resamples, at the bandwidth of the curve itself."""
    n_examples = len(correct)
    affordable = max(_FEWEST_RESAMPLES, int(_EXAMPLES_RESAMPLED // n_examples))
    rng = np.random.default_rng(seed)
    curves = np.empty((min(n_resamples, affordable), len(curve.grid)))
    for resampled in curves:
        rows = rng.integers(0, n_examples, n_examples)
        again = smooth_reliability(
            confidences[rows], correct[rows], bandwidth=curve.bandwidth, grid_size=len(curve.grid)
        )
        resampled[:] = again.accuracy
    # A resample with no example near a point says nothing there; the curve itself is always a possible one.
    curves = np.where(np.isnan(curves), curve.accuracy, curves)
    return np.quantile(curves, [(1 - level) / 2, (1 + level) / 2], axis=0)


def _seen(curve: SmoothReliability, confidences: FloatArray) -> np.ndarray:
    """Where (G,) the curve is drawn: from the smallest confidence to the largest, one point at the least."""
    inside = (curve.grid >= confidences.min()) & (curve.grid <= confidences.max())
    if not inside.any():
        inside[np.abs(curve.grid - confidences.mean()).argmin()] = True
    return inside & np.isfinite(curve.accuracy)


def _draw_curve(
    axes: Axes, curve: SmoothReliability, band: FloatArray, confidences: FloatArray, label: str
) -> None:
    from matplotlib.collections import LineCollection

    shown = _seen(curve, confidences)
    grid, accuracy = curve.grid[shown], curve.accuracy[shown]
    low, high = band[:, shown]
    draw_diagonal(axes)
    if len(grid) == 1:
        axes.errorbar(
            grid, accuracy, [accuracy - low, high - accuracy], color=BLUE, fmt="o", capsize=3, clip_on=False
        )
    axes.fill_between(grid, low, high, color=SKY, linewidth=0, label=label)
    points = np.stack([grid, accuracy], axis=1)
    thickness = curve.density[shown] / curve.density[shown].max()
    widths = _THINNEST + (_THICKEST - _THINNEST) * np.sqrt((thickness[1:] + thickness[:-1]) / 2)
    segments = np.stack([points[:-1], points[1:]], axis=1)
    axes.add_collection(
        LineCollection(
            list(segments), linewidths=widths.tolist(), colors=BLUE, capstyle="round", zorder=3, clip_on=False
        )
    )
    name_sides(axes)


def _draw_density(axes: Axes, confidences: FloatArray, correct: FloatArray) -> None:
    grid, density = _density(confidences)
    axes.fill_between(grid, density, color="#BDBDBD", linewidth=0)
    axes.set_ylim(0, density.max() * 1.1)
    axes.axvline(correct.mean(), color="black", linewidth=1.4, clip_on=False)
    axes.axvline(confidences.mean(), color=VERMILION, linestyle="--", linewidth=1.4, clip_on=False)
    axes.set_yticks([])


def _density(confidences: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Grid and density (G,) of the confidences."""
    curve = smooth_reliability(confidences, np.ones_like(confidences), bandwidth=_DENSITY_BANDWIDTH)
    return curve.grid, curve.density


def _label(upper: Axes, lower: Axes, *, first: bool) -> None:
    unit_ticks(upper)
    plain_axes(upper, lower)
    lower.set_xlabel("confidence", fontsize=8)
    if first:
        upper.set_ylabel("accuracy", fontsize=8)
        lower.set_ylabel("density", fontsize=8)
