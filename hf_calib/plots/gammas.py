"""The figure of the gammas of an adaptive loss during training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The number of bins in a row.
_COLUMNS = 5
# With more bins, some are drawn, at equal distances.
_MOST_BINS = 20
# Larger gammas need a logarithmic axis.
_LINEAR_UP_TO = 100.0
_GAMMA = re.compile(r"gamma_(\d+)")


def gamma_dynamics(
    log_history: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> Figure:
    """Draw the gamma of each confidence bin during training,
    below the calibration gap that changes it.

    Use it for AdaFocal and similar losses. Each bin has three panels from the top: its calibration
    gap on the held-out predictions (confidence minus accuracy), its gamma, and its range of
    confidences. All bins have the same axes. If there are more than 20 bins, 20 are drawn.

    Args:
        log_history: entries with "step", "gamma_00", "gamma_01", ..., "calibration_gap_00", ... and
            "edge_00", ..., such as `trainer.state.log_history`. Other entries, such as training
            losses, are skipped.

    Raises:
        ValueError: if no entry has gammas.

    References:
        Ghosh et al. 2022, "AdaFocal: calibration-aware adaptive focal loss", figures 5 and 7.

    >>> table = {"gamma_00": 1.0, "calibration_gap_00": 0.1, "edge_00": 0.0, "edge_01": 1.0}
    >>> gamma_dynamics([{"step": step, **table} for step in range(3)], title="AdaFocal").get_suptitle()
    'AdaFocal'
    """
    history = _read(log_history)
    n_bins = history.gammas.shape[1]
    drawn = np.linspace(0, n_bins - 1, min(n_bins, _MOST_BINS)).round().astype(int)
    columns = min(_COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    with style.drawing(0.9 + 1.75 * columns, 0.85 + 2.7 * rows, title) as figure:
        cells = figure.add_gridspec(rows, columns)
        for place, m in enumerate(drawn):
            panels: Any = cells[divmod(place, columns)].subgridspec(3, 1).subplots()
            _draw_bin(panels, history, m)
            # All bins have the same axes, so that only the first of a row has numbers.
            if place % columns > 0:
                for axes in panels:
                    axes.tick_params(labelleft=False)
                    axes.set_ylabel(None)
        figure.supxlabel("training step")
    return figure


class _History(NamedTuple):
    """T updates of a table of M bins."""

    # The steps (T,) of the updates.
    steps: FloatArray
    # The gammas (T, M).
    gammas: FloatArray
    # The calibration gaps (T, M).
    gaps: FloatArray
    # The edges (T, M + 1).
    edges: FloatArray


def _read(log_history: Iterable[Mapping[str, Any]]) -> _History:
    """The entries with a complete table."""
    steps = []
    tables = []
    for entry in log_history:
        # As a text, gamma_100 would come before gamma_11.
        numbers = sorted(filter(None, map(_GAMMA.fullmatch, entry)), key=_number)
        bins = [match[1] for match in numbers]
        names = [
            *(f"gamma_{m}" for m in bins),
            *(f"calibration_gap_{m}" for m in bins),
            *(f"edge_{m:02d}" for m in range(len(bins) + 1)),
        ]
        if bins and "step" in entry and entry.keys() >= set(names):
            steps.append(entry["step"])
            tables.append([entry[name] for name in names])
    check(
        bool(tables),
        "log_history to hold gammas",
        "no entry with step, gamma_00, calibration_gap_00 and edge_00",
        "train with loss='adafocal' or another loss with a table of gammas",
    )
    # A table has M gammas, M gaps and M + 1 edges.
    sizes = [len(table) // 3 for table in tables]
    other = next((size for size in sizes if size != sizes[0]), None)
    check(
        other is None,
        f"log_history to keep {sizes[0]} bins",
        other,
        "pass the history of one run",
    )
    values = np.array(tables, dtype=float)
    gammas, gaps, edges = np.split(values, [sizes[0], 2 * sizes[0]], axis=1)
    return _History(np.array(steps, dtype=float), gammas, gaps, edges)


def _number(match: re.Match[str]) -> int:
    return int(match[1])


def _draw_bin(panels: Any, history: _History, m: int) -> None:
    """Draw the gap, the gamma and the edges of bin m."""
    from matplotlib.ticker import MaxNLocator

    of_gap, of_gamma, of_edges = panels
    of_gap.set_title(f"bin {m}", fontsize=7, pad=3)
    of_gap.set_ylabel("gap")
    of_gap.set_ylim(_limits(history.gaps))
    _draw_line(of_gap, history.steps, history.gaps[:, m], style.BLUE)
    of_gamma.set_ylabel("gamma")
    _scale_gammas(of_gamma, history.gammas)
    _draw_line(of_gamma, history.steps, history.gammas[:, m], style.VERMILION)
    of_edges.set_ylabel("edges")
    of_edges.set_ylim(0, 1)
    low = history.edges[:, m]
    high = history.edges[:, m + 1]
    of_edges.fill_between(history.steps, low, high, color=style.PEACH, linewidth=0)
    for edge in (low, high):
        _draw_line(of_edges, history.steps, edge, style.GREY)
    style.plain_axes(*panels)
    for axes in panels:
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.tick_params(labelsize=6, labelbottom=axes is of_edges)


def _draw_line(axes: Axes, steps: FloatArray, values: FloatArray, colour: str) -> None:
    axes.axhline(0, color=style.GREY, linestyle=":", linewidth=1)
    axes.plot(steps, values, color=colour, linewidth=1.1, marker="o", markersize=1.5)


def _scale_gammas(axes: Axes, gammas: FloatArray) -> None:
    """Set the axis of the gammas, which is logarithmic on either side of [-1, 1] for large ones."""
    if np.abs(gammas).max() <= _LINEAR_UP_TO:
        axes.set_ylim(_limits(gammas))
        return
    axes.set_yscale("symlog", linthresh=1.0)
    # The hyperbolic arcsine of a value is nearly its place on this axis.
    low, high = np.sinh(_limits(np.arcsinh(gammas)))
    decades = math.floor(math.log10(np.abs(gammas).max()))
    axes.set_yticks([0.0, 10.0 ** math.ceil(decades / 2), 10.0**decades])
    axes.minorticks_off()
    axes.set_ylim(low, high)


def _limits(values: FloatArray) -> tuple[float, float]:
    """The limits of an axis with 0 and the values, and a tenth of their range on either side."""
    low = min(0.0, float(values.min()))
    high = max(0.0, float(values.max()))
    # All values may be 0.
    margin = 0.1 * (high - low) or 0.5
    return low - margin, high + margin
