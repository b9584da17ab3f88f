"""Figures of several labels a row: the reliability of all decisions and of single labels, and each label's error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics.checks import FloatArray, check_n_bins
from hf_calib.metrics.multi_label import check_decisions, label_bins
from hf_calib.metrics.sums import BinSums
from hf_calib.plots._common import (
    BLUE,
    VERMILION,
    add_title,
    check_class_names,
    new_figure,
    plain_axes,
    shortened,
)
from hf_calib.plots.classes import draw_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def label_reliability_grid(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    n_bins: int = 10,
    max_labels: int = 12,
    title: str | None = None,
) -> Figure:
    """Draw, for each of several labels a row, how often it applies against the probability that it was given.

    The panels are those of `class_reliability_grid`, whose rows have one class each; here the probabilities of a row
    need not sum to 1. The number is the label's calibration error, and the labels with the largest come first.

    Args:
        probs: (N, C) float in [0, 1].
        labels: (N, C) of 0 and 1, and -100 where a label is not known.
        class_names: C names; default "0", "1", ...
        n_bins: M, the number of equal-width bins (lower, upper].
        max_labels: panels at most.

    >>> probs = [[0.9, 0.7], [0.8, 0.2], [0.3, 0.1]]
    >>> figure = label_reliability_grid(probs, [[1, 1], [1, 0], [0, 0]], class_names=["Mass", "Nodule"])
    >>> [axes.texts[0].get_text() for axes in figure.axes]
    ['Nodule', 'Mass']
    """
    decisions = check_decisions(probs, labels)
    names = check_class_names(class_names, decisions.probs.shape[1])
    sums = label_bins(decisions, check_n_bins(n_bins))
    known = np.maximum(sums.counts.sum(axis=1), 1)
    errors = np.abs(sums.confidence - sums.correct).sum(axis=1) / known
    shown = np.argsort(-errors, kind="stable")[:max_labels]
    figure = draw_panels(
        [_panel(names[c], float(errors[c]), BinSums(*(total[c] for total in sums))) for c in shown],
        of="label",
    )
    few = f"{len(shown)} of {len(names)} labels: those with the largest error"
    add_title(figure, title, few if len(shown) < len(names) else None)
    return figure


def all_labels_reliability(sums: Mapping[str, BinSums]) -> Figure:
    """The same for the decisions on all labels together, one panel for each name, such as before and after.

    Args:
        sums: of each label's bins (C, M).
    """
    panels = []
    for name, by_label in sums.items():
        total = BinSums(*(each.sum(axis=0) for each in by_label))
        error = float(np.abs(total.confidence - total.correct).sum() / total.counts.sum())
        panels.append(_panel(name, error, total))
    return draw_panels(panels, of="label")


def label_errors_chart(errors: Mapping[str, FloatArray], names: Sequence[str]) -> Figure:
    """Each label's calibration error as a dot, before and after calibration on one line.

    Args:
        errors: name -> (C,), in the order in which the names are drawn.
        names: C labels.
    """
    figure = new_figure(5.5, 0.9 + 0.17 * len(names))
    axes = figure.subplots()
    places = np.arange(len(names))[::-1]
    values = np.stack(list(errors.values()))
    axes.hlines(places, values.min(axis=0), values.max(axis=0), color="#BBBBBB", linewidth=1.5, zorder=1)
    for (name, value), colour, marker in zip(errors.items(), (VERMILION, BLUE), "os", strict=False):
        axes.scatter(value, places, s=16, color=colour, marker=marker, label=name, zorder=2)
    axes.set_yticks(places, [shortened(name, 30) for name in names])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_xlim(left=0)
    axes.set_xlabel("calibration error of the label", fontsize=8)
    plain_axes(axes)
    if len(errors) > 1:
        axes.legend(frameon=False, fontsize=7)
    return figure


def _panel(name: str, error: float, sums: BinSums) -> tuple[str, str, BinSums]:
    return name, f"error {error:.3f}, {sums.correct.sum():,.0f} true", sums
