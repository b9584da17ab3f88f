"""How hard losses pull, against the probability of the label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, as_floats
from hf_calib.plots._common import BLUE, GREY, PEACH, SKY, VERMILION, line_looks, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINEAR_UP_TO = 10.0  # factors beyond it get a logarithmic axis
_ROUNDING = 1e-9  # a factor as little below 0 is 0


def gradient_factor_diagram(
    p: ArrayLike, panels: Mapping[str, Mapping[str, ArrayLike]], *, title: str | None = None
) -> Figure:
    """Draw factors of the gradient against the probability of the label, a line for each loss or gamma.

    For seeing which examples a loss learns from: where a line is above 1 it pulls harder than cross entropy, below 0
    it pushes the label down, which is hatched.

    Args:
        p: (N,) the probabilities of the label, rising, in [0, 1].
        panels: title -> {name: (N,) factors}, as of `hf_calib.papers.gradient_factors`; NaN is left out.
        title: a line above the whole figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is nothing to draw, or the arrays do not fit.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Fig. 1.

    >>> figure = gradient_factor_diagram([0.1, 0.9], {"focal": {"gamma 1": [1.1, 0.2], "gamma 2": [1.2, 0.03]}})
    >>> [line.get_label() for line in figure.axes[0].lines[1:]]  # the first one is that of cross entropy
    ['gamma 1', 'gamma 2']
    """
    from matplotlib.figure import Figure

    across = _check_p(p)
    if not panels or not all(panels.values()):
        way_out = "pass {title: {name: factors}}"
        raise InputValueError(expected("a diagram", "have at least one line a panel", "none", way_out))
    figure = Figure(figsize=(0.3 + 2.25 * len(panels), 3.3), layout="constrained")
    for axes, (name, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        for (label, factors), look in zip(lines.items(), line_looks(), strict=False):
            axes.plot(across, _check_line(label, factors, across), linewidth=1.3, label=label, **look)
        values = np.concatenate([line.get_ydata() for line in axes.lines[1:]])
        if np.nanmax(values) > _LINEAR_UP_TO:
            axes.set_yscale("symlog", linthresh=1, linscale=2)
        low, high = axes.get_ylim()
        if np.nanmin(values) < -_ROUNDING:
            axes.axhspan(low, 0, facecolor="none", edgecolor="#BBBBBB", hatch="////", linewidth=0)
            axes.axhline(0, color="black", linewidth=0.8)
        else:
            low = 0
        axes.set(xlim=(0, 1), ylim=(low, high))
        axes.set_xlabel("probability of the label", fontsize=8)
        axes.set_title(name, fontsize=9, parse_math=False)
        _add_legend(axes)
        plain_axes(axes)
    figure.axes[0].set_ylabel("gradient over cross entropy's", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def confidence_region_diagram(
    p: ArrayLike,
    phi: Mapping[str, ArrayLike],
    regions: Mapping[str, tuple[float, float]],
    *,
    title: str | None = None,
) -> Figure:
    """Draw phi of the dual focal paper for each loss, and where its minimiser is over- and under-confident.

    Args:
        p: (N,) the probabilities of the top class, rising, in [0, 1].
        phi: name -> (N,) values, as `hf_calib.papers.gradient_factors` of `dual_focal` with a constant rival.
        regions: the same names -> (end of the over-confident, start of the under-confident region), as of
            `hf_calib.papers.confidence_regions`.
        title: a line above the whole figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is nothing to draw, names differ, or the arrays do not fit.

    References:
        Tao et al. 2023, "Dual focal loss for calibration", Fig. 1.

    >>> figure = confidence_region_diagram([0.1, 0.9], {"focal": [1.1, 0.2]}, {"focal": (0.14, 0.37)})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['over', 'under']
    """
    from matplotlib.figure import Figure

    across = _check_p(p)
    if not phi or set(phi) != set(regions):
        got = f"{sorted(phi)} and {sorted(regions)}"
        raise InputValueError(
            expected("phi and regions", "have the same names", got, "pass both for each loss")
        )
    figure = Figure(figsize=(0.3 + 2.5 * len(phi), 2.6), layout="constrained")
    panels = figure.subplots(1, len(phi), sharey=True, squeeze=False)[0]
    for axes, (name, values) in zip(panels, phi.items(), strict=True):
        over, under = regions[name]
        axes.axvspan(0, over, facecolor=PEACH, edgecolor=VERMILION, hatch="////", linewidth=0, alpha=0.6)
        axes.axvspan(under, 1, facecolor=SKY, edgecolor=BLUE, hatch="....", linewidth=0, alpha=0.6)
        axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        axes.plot(across, _check_line(name, values, across), color="black", linewidth=1.4)
        for word, place in (("over", over / 2), ("under", (under + 1) / 2)):
            axes.text(
                place,
                0.06,
                word,
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize=7.5,
                rotation=90 if word == "over" else 0,
                va="bottom",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )
        axes.set_xlim(0, 1)
        axes.set_xticks([0, over, under, 1], ["0", f"{over:.2f}", f"{under:.2f}", "1"])
        axes.set_xlabel("probability of the top class", fontsize=8)
        axes.set_title(name, fontsize=9, parse_math=False)
        plain_axes(axes)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("phi", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def _check_p(p: ArrayLike) -> FloatArray:
    across = as_floats("p", p)
    if (
        across.ndim != 1
        or len(across) < 2
        or not ((across >= 0) & (across <= 1)).all()
        or (np.diff(across) <= 0).any()
    ):
        way_out = "pass np.linspace(0.001, 0.999, 500)"
        raise InputValueError(
            expected("p", "be rising numbers (N,) in [0, 1]", f"shape {across.shape}", way_out)
        )
    return across


def _check_line(name: str, values: ArrayLike, across: FloatArray) -> FloatArray:
    line = as_floats(f"line {name!r}", values)
    if line.shape != across.shape:
        way_out = "pass a value for each p"
        raise InputValueError(
            expected(f"line {name!r}", f"have shape {across.shape}", f"shape {line.shape}", way_out)
        )
    return line


def _add_legend(axes: Axes) -> None:
    legend = axes.legend(
        fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, handlelength=2.6
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
