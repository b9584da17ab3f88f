"""Figures of out-of-distribution detection."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.out_of_distribution import ACCEPTED, OodDetection
from hf_calib.plots._common import GREY, add_legend_of_models, line_looks, plain_axes, unit_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 1_000  # of a curve; more cannot be seen


def roc_diagram(found: Mapping[str, OodDetection], *, title: str | None = None) -> Figure:
    """Draw how many inputs from elsewhere are flagged against how many familiar ones are, for every threshold.

    For seeing at which cost in false alarms inputs from elsewhere are found; the upper left is best, the diagonal is
    chance. A dotted line marks where 95% of the familiar inputs are accepted.

    Args:
        found: name, such as that of a score or a model -> what `hf_calib.metrics.ood_detection` found.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is nothing to draw.

    >>> from hf_calib.metrics import ood_detection
    >>> figure = roc_diagram(ood_detection([[4.0, 0.0], [0.0, 2.0]], [[0.5, 0.0], [0.0, 3.0]]))
    >>> figure.axes[0].get_ylabel()
    'from elsewhere: share flagged'
    """
    from matplotlib.figure import Figure

    if not found:
        way_out = "pass what hf_calib.metrics.ood_detection returns"
        raise InputValueError(expected("found", "have at least one entry", "none", way_out))
    figure = Figure(figsize=(3.5, 3.3 + 0.16 * len(found)), layout="constrained")
    axes = figure.subplots()
    for (name, detection), look in zip(found.items(), line_looks(), strict=False):
        label = f"{textwrap.shorten(name, 44, placeholder='…')} (area {detection.auroc.value:.4f})"
        inside, outside = detection.curve
        few = np.unique(np.linspace(0, len(inside) - 1, _POINTS).round().astype(int))
        axes.plot(inside[few], outside[few], linewidth=1.6, label=label, **look)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    axes.axvline(1 - ACCEPTED, color=GREY, linestyle=":", linewidth=1)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axes.set_xlabel("familiar: share flagged", fontsize=8)
    axes.set_ylabel("from elsewhere: share flagged", fontsize=8)
    unit_ticks(axes)
    plain_axes(axes)
    add_legend_of_models(figure, axes)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure
