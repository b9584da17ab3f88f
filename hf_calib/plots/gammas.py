"""Figures of the gammas of an adaptive loss during training."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 5  # The number of bins in a row.
_MOST_BINS = 20  # With more bins, some are drawn, at equal distances.
_LINEAR_UP_TO = 100.0  # Larger gammas need a logarithmic axis.


def gamma_dynamics(
    log_history: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> Figure:
    """Draw the gamma of each confidence bin during training, below the calibration gap that changes it.

    Use it for AdaFocal and similar losses. Each bin has three panels from the top: its calibration gap on the
    held-out predictions (confidence minus accuracy), its gamma, and its range of confidences with the number of
    held-out predictions in it. All bins have the same axes. If there are more than 20 bins, 20 are drawn.

    Args:
        log_history: entries with "step", "gamma_00", "gamma_01", ... and "calibration_gap_00", ..., such as
            `trainer.state.log_history`. Other entries, such as training losses, are skipped. Histories of earlier
            versions, without "edge_00", ... and "count_00", ..., are drawn without the third panels.

    Raises:
        ValueError: if no entry has gammas.

    References:
        Ghosh et al. 2022, "AdaFocal: calibration-aware adaptive focal loss", figures 5 and 7.

    >>> entries = [{"step": s, "gamma_00": 1.0 + s, "calibration_gap_00": 0.1} for s in range(3)]
    >>> gamma_dynamics(entries, title="AdaFocal").get_suptitle()
    'AdaFocal'
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    history = _read(log_history)
    n_bins = history.gammas.shape[1]
    drawn = np.linspace(0, n_bins - 1, min(n_bins, _MOST_BINS)).round().astype(int)
    kinds = ("gap", "gamma", "edges")[: 2 if np.isnan(history.edges).all() else 3]
    columns = min(_COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    width, height = 0.9 + 1.75 * columns, 0.85 + rows * (0.45 + 0.75 * len(kinds))
    figure = Figure(figsize=(width, height))
    sides: Any = {
        "left": 0.75 / width,
        "right": 1 - 0.15 / width,
        "top": 1 - 0.55 / height,
    }
    bottom = (0.5 if columns > 2 else 0.8) / height
    cells = figure.add_gridspec(
        rows,
        columns,
        bottom=bottom,
        hspace=0.5 / (0.75 * len(kinds)),
        wspace=0.12,
        **sides,
    )
    # Equal limits are several times faster than shared axes.
    gammas = _padded(history.gammas, 0.0)
    logarithmic = bool(np.nanmax(np.abs(history.gammas)) > _LINEAR_UP_TO)
    if logarithmic:  # A tenth of that axis, which is nearly the arcsinh.
        low, high = np.sinh(_padded(np.arcsinh(history.gammas), 0.0))
        gammas = float(low), float(high)
    steps, limits = _padded(history.steps), (_padded(history.gaps, 0.0), gammas, (0, 1))
    colours = (style.BLUE, style.VERMILION)
    for place, m in enumerate(drawn):
        panels: Any = (
            cells[divmod(place, columns)]
            .subgridspec(len(kinds), 1, hspace=0.12)
            .subplots()
        )
        style.plain_axes(*panels)
        for axes, values, colour in zip(
            panels, (history.gaps, history.gammas), colours, strict=False
        ):
            axes.axhline(0, color=style.GREY, linestyle=":", linewidth=1)
            axes.plot(
                history.steps,
                values[:, m],
                color=colour,
                linewidth=1.1,
                marker="o",
                markersize=1.5,
            )
        if len(kinds) == 3:
            _draw_edges(panels[2], history, m)
        panels[0].set_title(f"bin {m}", fontsize=7, pad=3)
        if logarithmic:
            panels[1].set_yscale("symlog", linthresh=1.0)
            panels[1].set_yticks(_powers_of_ten(*gammas))
            panels[1].minorticks_off()
        for axes, kind, ylim in zip(panels, kinds, limits, strict=False):
            axes.set(xlim=steps, ylim=ylim)
            axes.xaxis.set_major_locator(
                MaxNLocator(4, integer=True, steps=[1, 2, 5, 10])
            )
            axes.tick_params(
                labelsize=6,
                labelleft=place % columns == 0,
                labelbottom=kind == kinds[-1],
            )
            if place % columns == 0:
                axes.set_ylabel(kind, fontsize=7)
    figure.align_ylabels()
    legend = "training step (gap: confidence - accuracy, 0 is calibrated; gamma: 0 is cross entropy"
    legend += "; n: held-out examples of the bin)" if len(kinds) == 3 else ")"
    text = textwrap.fill(legend, int(15 * width))
    figure.supxlabel(text, fontsize=7, y=0.1 / height)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False, y=1 - 0.1 / height)
    return figure


class _History(NamedTuple):
    """T updates of a table of M bins; NaN for missing entries."""

    steps: FloatArray  # (T,)
    gammas: FloatArray  # (T, M)
    gaps: FloatArray  # (T, M)
    edges: FloatArray  # (T, M + 1)
    counts: FloatArray  # (T, M)


def _read(log_history: Iterable[Mapping[str, Any]]) -> _History:
    """The entries with a complete table."""
    entries: list[tuple[Any, ...]] = []
    n_bins = 0
    for entry in log_history:
        bins = sorted(
            (name[6:] for name in entry if re.fullmatch(r"gamma_\d+", name)), key=int
        )
        if (
            bins
            and "step" in entry
            and all(f"calibration_gap_{m}" in entry for m in bins)
        ):
            n_bins = n_bins or len(bins)
            way_out = "pass the history of one run"
            check(
                len(bins) == n_bins,
                f"log_history to keep {n_bins} bins",
                len(bins),
                way_out,
            )
            edges = [entry.get(f"edge_{i:02d}") for i in range(n_bins + 1)]
            of_bins = (
                [entry.get(f"{kind}_{m}") for m in bins]
                for kind in ("gamma", "calibration_gap", "count")
            )
            gammas, gaps, counts = of_bins
            entries.append((entry["step"], gammas, gaps, edges, counts))
    got = "no entry with step, gamma_00 and calibration_gap_00"
    way_out = "train with loss='adafocal' or another loss with a table of gammas"
    check(bool(entries), "log_history to hold gammas", got, way_out)
    return _History(
        *(np.array(column, dtype=float) for column in zip(*entries, strict=True))
    )


def _draw_edges(axes: Axes, history: _History, m: int) -> None:
    low, high = history.edges[:, m], history.edges[:, m + 1]
    axes.fill_between(history.steps, low, high, color=style.PEACH, linewidth=0)
    axes.plot(
        history.steps,
        np.stack([low, high], 1),
        color=style.GREY,
        linewidth=0.9,
        marker="o",
        markersize=1,
    )
    axes.set_yticks([0, 0.5, 1])
    fewest, most = np.nanmin(history.counts[:, m]), np.nanmax(history.counts[:, m])
    count = f"n {fewest:g}" if fewest == most else f"n {fewest:g} to {most:g}"
    y, va = (0.06, "bottom") if np.nanmean(low + high) > 1 else (0.94, "top")
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.text(
        0.96,
        y,
        count,
        transform=axes.transAxes,
        fontsize=6,
        ha="right",
        va=va,
        bbox=ground,
    )


def _padded(values: FloatArray, *also: float) -> tuple[float, float]:
    """Limits of an axis, a tenth of the range beyond the values."""
    low, high = (
        np.nanmin([np.nanmin(values), *also]),
        np.nanmax([np.nanmax(values), *also]),
    )
    margin = 0.1 * (high - low) or 0.5
    return float(low - margin), float(high + margin)


def _powers_of_ten(low: float, high: float) -> FloatArray:
    """Ticks at 0 and, on either side, at up to three powers of ten within the limits."""
    decades = int(np.log10(max(-low, high)))
    powers = 10.0 ** np.arange(-(-decades // 3), decades + 1, -(-decades // 3))
    ticks = np.concatenate([-powers[::-1], [0], powers])
    return ticks[(low <= ticks) & (ticks <= high)]
