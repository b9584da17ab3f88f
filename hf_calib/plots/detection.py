"""Figures of out-of-distribution detection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.ranking import ACCEPTED, OodDetection
from hf_calib.plots._common import GREY, add_title, line_looks, new_figure, plain_axes, shortened, unit_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
_POINTS = 1_000  # of a curve; more cannot be seen


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
    if not panels or not all(panels.values()):
        way_out = "pass what hf_calib.metrics.ood_detection returns, by the name of the data"
        raise InputValueError(expected("panels", "have at least one curve each", "none", way_out))
    most = max(map(len, panels.values()))
    figure = new_figure(0.7 + 2.8 * len(panels), 3.2 + 0.16 * most)
    for axes, (name, found) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        for (label, detection), look in zip(found.items(), line_looks(), strict=False):
            inside, outside = detection.curve
            few = np.unique(np.linspace(0, len(inside) - 1, _POINTS).round().astype(int))
            area = f"{shortened(label, 24)} (area {detection.auroc.value:.3f})"
            axes.plot(inside[few], outside[few], linewidth=1.6, label=area, **look)
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
        axes.axvline(1 - ACCEPTED, color=GREY, linestyle=":", linewidth=1)
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
        axes.set_title(shortened(name, 32), fontsize=9, parse_math=False)
        axes.set_xlabel("familiar: share flagged", fontsize=8)
        unit_ticks(axes)
        plain_axes(axes)
        legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=7, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    figure.axes[0].set_ylabel("from elsewhere: share flagged", fontsize=8)
    add_title(figure, title)
    return figure
