"""Figure of a promised accuracy: how much is answered for it, and whether it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hf_calib._errors import InputValueError, expected
from hf_calib.plots._common import GREY, add_legend, add_title, line_looks, new_figure, plain_axes, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.decisions.measured import PromiseCurve

_POINTS_APART = (
    3.0  # points of different models at one promise, so that their intervals do not hide each other
)


def promise_diagram(curves: Mapping[str, PromiseCurve], *, title: str | None = None) -> Figure:
    """Draw the share of inputs answered (left), and the accuracy of the answers (right), for promised accuracies.

    For choosing what to promise, and for comparing models or scalers: more answered is better. On the right
    all points should lie on the line or above it, but for a share delta of calibration sets; bars are exact
    95% intervals of the rows that were answered.

    Args:
        curves: name -> what `AbstainRule.curve` returns.

    Raises:
        ValueError: if there is no curve, or none of them has a point.

    >>> from hf_calib.decisions.measured import PromiseCurve
    >>> figure = promise_diagram({"model": PromiseCurve((0.9, 0.95), (0.8, 0.0), (None, None))})
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['inputs answered', 'accuracy of the answers']
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator
    from matplotlib.transforms import ScaledTranslation

    promised = [accuracy for curve in curves.values() for accuracy in curve.promised]
    if not promised:
        way_out = "pass {name: rule.curve(...)}, with accuracies that the calibration rows can promise"
        raise InputValueError(expected("a diagram", "have at least one promised accuracy", "none", way_out))
    figure = new_figure(6.2, 2.9 + 0.16 * len(curves))
    left, right = figure.subplots(1, 2)
    for number, ((name, curve), look) in enumerate(zip(curves.items(), line_looks(), strict=False)):
        label = shortened(name, 44)
        left.plot(
            curve.promised, curve.answered, marker="o", markersize=3, linewidth=1.6, label=label, **look
        )
        kept = [(at, found) for at, found in zip(curve.promised, curve.kept, strict=True) if found]
        if kept:
            values = np.array([found for _, found in kept])
            shift = ScaledTranslation(number * _POINTS_APART / 72, 0, figure.dpi_scale_trans)
            right.errorbar(
                [at for at, _ in kept],
                values[:, 0],
                np.abs(values[:, 1:] - values[:, :1]).T,
                fmt="o",
                markersize=3,
                linewidth=1.2,
                color=look["color"],
                transform=right.transData + shift,
            )
    ends = (min(promised), max(promised))
    room = 0.05 * (ends[1] - ends[0]) or 0.01
    right.plot(ends, ends, ":", color=GREY, linewidth=1.2, zorder=0)
    right.annotate(
        "promised",
        (ends[0], ends[0]),
        xytext=(8, 0),
        textcoords="offset points",
        fontsize=7,
        color=GREY,
        va="center",
    )
    left.set_ylim(-0.02, 1.02)
    left.set_ylabel("inputs answered", fontsize=8)
    right.set_ylabel("accuracy of the answers", fontsize=8)
    for axes in (left, right):
        axes.set_xlim(ends[0] - room, ends[1] + room)
        axes.set_xlabel("accuracy promised", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
    plain_axes(left, right)
    add_legend(figure, left)
    add_title(figure, title)
    return figure
