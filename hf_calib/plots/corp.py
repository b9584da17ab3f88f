"""Reliability diagrams by isotonic regression (CORP), with the band of a calibrated model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics.checks import FloatArray, check_draws
from hf_calib.metrics.corp import curve_of, decompose
from hf_calib.metrics.sums import TopLabel
from hf_calib.plots._common import (
    BLUE,
    SKY,
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
_VALUES_RESAMPLED = 2e7  # in all, per panel; where this leaves fewer resamples, the band is thin anyway
_FEWEST_RESAMPLES = 50
_N_BARS = 50  # of the histogram below


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
    checked = check_panels(panels)
    check_draws(n_resamples, seed, confidence_level)
    width, height = _PANEL_INCHES
    figure = new_figure(0.7 + width * len(checked), 0.6 + height)
    axes = figure.subplots(2, len(checked), sharex=True, squeeze=False, height_ratios=[2.6, 1])
    for j, (name, (confidences, correct)) in enumerate(checked.items()):
        upper, lower = axes[:, j]
        clipped = confidences.clip(0, 1)
        _draw_panel(upper, clipped, correct, confidence_level, n_resamples, seed)
        lower.hist(clipped, bins=np.linspace(0, 1, _N_BARS + 1), color="#BDBDBD")
        lower.set_yticks([])
        unit_ticks(upper)
        plain_axes(upper, lower)
        lower.set_xlabel("confidence", fontsize=8)
        parts = decompose(TopLabel(clipped, correct), "brier")
        summary = (
            f"MCB {parts.miscalibration:.4f}   DSC {parts.discrimination:.4f}   UNC {parts.uncertainty:.4f}"
        )
        upper.set_title(summary, fontsize=7, loc="left", pad=4)
        write_name(upper, name)
    axes[0, 0].set_ylabel("recalibrated confidence", fontsize=8)
    axes[1, 0].set_ylabel("examples", fontsize=8)
    add_legend(figure, axes[0, 0], columns=2)
    add_title(figure, title)
    return figure


def _draw_panel(
    axes: Axes, confidences: FloatArray, correct: FloatArray, level: float, n_resamples: int, seed: int
) -> None:
    affordable = max(_FEWEST_RESAMPLES, int(_VALUES_RESAMPLED // len(np.unique(confidences))))
    top = TopLabel(confidences, correct)
    n_resamples = min(n_resamples, affordable)
    curve = curve_of(top, n_resamples=n_resamples, confidence_level=level, seed=seed)
    draw_diagonal(axes)
    band: dict[str, Any] = {"color": SKY, "label": f"{100 * level:g}% pointwise band if calibrated"}
    line: dict[str, Any] = {"color": BLUE, "label": "recalibrated", "clip_on": False, "zorder": 3}
    if len(curve.confidences) == 1:
        low, high = curve.confidences - curve.low, curve.high - curve.confidences
        axes.errorbar(curve.confidences, curve.confidences, [low, high], fmt="none", capsize=4, **band)
        axes.plot(curve.confidences, curve.recalibrated, marker="o", linestyle="none", **line)
    else:
        axes.fill_between(curve.confidences, curve.low, curve.high, linewidth=0, **band)
        axes.plot(curve.confidences, curve.recalibrated, linewidth=1.8, **line)
    name_sides(axes)
