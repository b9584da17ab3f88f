"""Readings of a figure for tests."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other once the figure is drawn."""
    FigureCanvasAgg(figure).draw()
    # Labels of ticks outside the limits are never drawn, and neither are those of inner shared axes.
    hidden = {
        label
        for axis in (each for axes in figure.axes for each in (axes.xaxis, axes.yaxis))
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not axis.get_view_interval().min() - 1e-9
        <= tick.get_loc()
        <= axis.get_view_interval().max() + 1e-9
    }
    texts = [
        t
        for t in figure.findobj(Text)
        if t.get_text() and t.get_visible() and t not in hidden
    ]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    return [
        (a, b) for (a, box), (b, other) in combinations(boxes, 2) if box.overlaps(other)
    ]
