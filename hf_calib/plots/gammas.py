"""Gammas of an adaptive loss over its training."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray
from hf_calib.plots._common import BLUE, GREY, PEACH, VERMILION, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
_COLUMNS = 5  # bins side by side
_MOST_BINS = 20  # beyond it some are drawn, at equal distances
_LINEAR_UP_TO = 100.0  # gammas beyond it get a logarithmic axis


def gamma_dynamics(log_history: Iterable[Mapping[str, Any]], *, title: str | None = None) -> Figure:
    """Draw how the gamma of each confidence bin moved while it trained, below the calibration gap that moved it.

    For AdaFocal and its relatives. Each bin has, from the top: its calibration gap on the held-out predictions
    (confidence minus accuracy), its gamma, and where it lies among the confidences, with the number of held-out
    predictions in it. All bins have the same axes. Of more than 20 bins 20 are drawn.

    Args:
        log_history: entries with "step", "gamma_00", "gamma_01", ... and "calibration_gap_00", ...; others,
            such as training losses, are skipped. `trainer.state.log_history` is such a list. Histories of
            earlier versions, without "edge_00", ... and "count_00", ..., are drawn without the third panels.

    Raises:
        ValueError: if no entry holds gammas.

    References:
        Ghosh et al. 2022, "AdaFocal: calibration-aware adaptive focal loss", figures 5 and 7.

    >>> entries = [{"step": s, "gamma_00": 1.0 + s, "calibration_gap_00": 0.1} for s in range(3)]
    >>> gamma_dynamics(entries, title="AdaFocal").get_suptitle()
    'AdaFocal'
    """
    return _draw(_History.of(log_history), title)


@dataclass(frozen=True)
class _History:
    """T updates of a table of M bins; NaN where an entry does not say."""

    steps: FloatArray  # (T,)
    gammas: FloatArray  # (T, M)
    gaps: FloatArray  # (T, M)
    edges: FloatArray  # (T, M + 1)
    counts: FloatArray  # (T, M)

    @classmethod
    def of(cls, log_history: Iterable[Mapping[str, Any]]) -> _History:
        """Of the entries that hold a whole table."""
        rows: list[tuple[list[float | None], ...]] = []
        for entry in log_history:
            matches = map(re.compile(r"gamma_(\d+)$").match, entry)
            bins = sorted((match[1] for match in matches if match), key=int)
            if not bins or "step" not in entry or not all(f"calibration_gap_{m}" in entry for m in bins):
                continue
            if rows and len(bins) != len(rows[0][1]):
                requirement, way_out = f"keep {len(rows[0][1])} bins", "pass the history of one training"
                raise InputValueError(expected("log_history", requirement, len(bins), way_out))
            rows.append(
                (
                    [entry["step"]],
                    [entry[f"gamma_{m}"] for m in bins],
                    [entry[f"calibration_gap_{m}"] for m in bins],
                    [entry.get(f"edge_{i:02d}") for i in range(len(bins) + 1)],
                    [entry.get(f"count_{m}") for m in bins],
                )
            )
        if not rows:
            way_out = "train with loss='adafocal' or another loss with a table of gammas"
            got = "no entry with step, gamma_00 and calibration_gap_00"
            raise InputValueError(expected("log_history", "hold gammas", got, way_out))
        steps, *tables = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        return cls(steps[:, 0], *tables)


def _draw(history: _History, title: str | None) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    n_bins = history.gammas.shape[1]
    drawn = np.linspace(0, n_bins - 1, min(n_bins, _MOST_BINS)).round().astype(int)
    n_panels = 2 if np.isnan(history.edges).all() else 3
    columns = min(_COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    width, height = 0.9 + 1.75 * columns, 0.85 + rows * (0.45 + 0.75 * n_panels)
    figure = Figure(figsize=(width, height))
    cells = figure.add_gridspec(
        rows,
        columns,
        left=0.75 / width,
        right=1 - 0.15 / width,
        bottom=(0.5 if columns > 2 else 0.8) / height,
        top=1 - 0.55 / height,
        hspace=0.5 / (0.75 * n_panels),
        wspace=0.12,
    )
    # The same limits for all, which is several times faster than axes that are shared.
    logarithmic = bool(np.nanmax(np.abs(history.gammas)) > _LINEAR_UP_TO)
    of_gammas = _padded(history.gammas, 0.0)
    if logarithmic:  # a tenth of that axis, which is nearly the arcsinh
        low, high = np.sinh(_padded(np.arcsinh(history.gammas), 0.0))
        of_gammas = float(low), float(high)
    limits = _padded(history.steps), (_padded(history.gaps, 0.0), of_gammas, (0, 1))
    for place, m in enumerate(drawn):
        panels = cells[divmod(place, columns)].subgridspec(n_panels, 1, hspace=0.12)
        axes = [figure.add_subplot(panels[i]) for i in range(n_panels)]
        _draw_bin(axes, history, m)
        axes[0].set_title(f"bin {m}", fontsize=7, pad=3)
        if logarithmic:
            axes[1].set_yscale("symlog", linthresh=1.0)
            axes[1].set_yticks(_powers_of_ten(*of_gammas))
            axes[1].minorticks_off()
        for i, (panel, name) in enumerate(zip(axes, ("gap", "gamma", "edges"), strict=False)):
            panel.set(xlim=limits[0], ylim=limits[1][i])
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
            panel.tick_params(labelsize=6, labelleft=place % columns == 0, labelbottom=i == n_panels - 1)
            if place % columns == 0:
                panel.set_ylabel(name, fontsize=7)
    figure.align_ylabels()
    legend = "gap: confidence - accuracy, 0 is calibrated; gamma: 0 is cross entropy; n: held-out examples of the bin"
    said = legend if n_panels == 3 else legend.rpartition(";")[0]
    figure.supxlabel(textwrap.fill(f"training step ({said})", int(15 * width)), fontsize=7, y=0.1 / height)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False, y=1 - 0.1 / height)
    return figure


def _draw_bin(panels: list[Axes], history: _History, m: int) -> None:
    """The panels of one bin: gap, gamma and, where there is a third, the bin's edges and counts."""
    for axes, values, colour in zip(panels, (history.gaps, history.gammas), (BLUE, VERMILION), strict=False):
        axes.axhline(0, color=GREY, linestyle=":", linewidth=1)
        axes.plot(history.steps, values[:, m], color=colour, linewidth=1.1, marker="o", markersize=1.5)
    plain_axes(*panels)
    if len(panels) == 3:
        low, high = history.edges[:, m], history.edges[:, m + 1]
        panels[2].fill_between(history.steps, low, high, color=PEACH, linewidth=0)
        for edge in (low, high):
            panels[2].plot(history.steps, edge, color=GREY, linewidth=0.9, marker="o", markersize=1)
        panels[2].set_yticks([0, 0.5, 1])
        inside = 0.06 if np.nanmean(low + high) > 1 else 0.94
        panels[2].text(
            0.96,
            inside,
            _range(history.counts[:, m]),
            transform=panels[2].transAxes,
            fontsize=6,
            ha="right",
            va="bottom" if inside < 0.5 else "top",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _padded(values: FloatArray, *also: float) -> tuple[float, float]:
    """Limits of an axis, a tenth beyond the values."""
    low, high = np.nanmin([np.nanmin(values), *also]), np.nanmax([np.nanmax(values), *also])
    margin = 0.1 * (high - low) or 0.5
    return float(low - margin), float(high + margin)


def _powers_of_ten(low: float, high: float) -> list[float]:
    """0 and, on either side, up to three powers of ten within the limits."""
    decades = int(np.log10(max(-low, high)))
    powers = [10.0**k for k in range(-(-decades // 3), decades + 1, -(-decades // 3))]
    return [tick for tick in (*(-power for power in powers), 0.0, *powers) if low <= tick <= high]


def _range(counts: FloatArray) -> str:
    """`n 66`, or `n 60 to 67`."""
    low, high = np.nanmin(counts), np.nanmax(counts)
    return f"n {low:g}" if low == high else f"n {low:g} to {high:g}"
