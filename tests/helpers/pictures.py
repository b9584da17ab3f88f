"""Readings of a figure for tests."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other once the figure is drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    # Labels of ticks outside the limits are never drawn, and neither are those of inner shared axes.
    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label, shown in (
            (tick.label1, tick.label1.get_visible()),
            (tick.label2, tick.label2.get_visible()),
        )
        if not shown or not is_inside(tick.get_loc(), axis.get_view_interval())
    }
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t not in hidden]
    return [(a, b) for (a, box), (b, other) in combinations(boxes, 2) if box.overlaps(other)]


def is_inside(location: float, interval: np.ndarray) -> bool:
    return interval.min() - 1e-9 <= location <= interval.max() + 1e-9
