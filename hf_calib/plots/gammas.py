"""Gammas of an adaptive loss over its training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.binning import FloatArray
from hf_calib.plots._common import GREY

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gamma_dynamics(log_history: Iterable[Mapping[str, Any]], *, title: str | None = None) -> Figure:
    """Draw how a table of gammas moved while it trained, above the calibration gaps that moved it.

    For AdaFocal and its relatives: one line for each confidence bin, from the lowest (dark) to the highest.

    Args:
        log_history: entries with "step", "gamma_00", "gamma_01", ... and "calibration_gap_00", ...; others,
            such as training losses, are skipped. `trainer.state.log_history` is such a list.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if no entry holds gammas.

    >>> entries = [{"step": s, "gamma_00": 1.0 + s, "calibration_gap_00": 0.1} for s in range(3)]
    >>> gamma_dynamics(entries, title="AdaFocal").get_suptitle()
    'AdaFocal'
    """
    steps, gammas, gaps = _gamma_history(log_history)
    return _draw_gammas(steps, gammas, gaps, title)


def _gamma_history(
    log_history: Iterable[Mapping[str, Any]],
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Steps (T,), gammas (T, M) and gaps (T, M) of the entries that hold a whole table."""
    steps: list[float] = []
    gammas: list[list[float]] = []
    gaps: list[list[float]] = []
    for entry in log_history:
        matches = map(re.compile(r"gamma_(\d+)$").match, entry)
        bins = sorted((match[1] for match in matches if match), key=int)
        gap_keys = [f"calibration_gap_{m}" for m in bins]
        if not bins or "step" not in entry or not all(key in entry for key in gap_keys):
            continue
        if gammas and len(bins) != len(gammas[0]):
            way_out = "pass the history of one training"
            raise InputValueError(expected("log_history", f"keep {len(gammas[0])} bins", len(bins), way_out))
        steps.append(entry["step"])
        gammas.append([entry[f"gamma_{m}"] for m in bins])
        gaps.append([entry[key] for key in gap_keys])
    if not steps:
        way_out = "train with loss='adafocal' or another loss with a table of gammas"
        got = "no entry with step, gamma_00 and calibration_gap_00"
        raise InputValueError(expected("log_history", "hold gammas", got, way_out))
    return np.array(steps, float), np.array(gammas, float), np.array(gaps, float)


def _draw_gammas(steps: FloatArray, gammas: FloatArray, gaps: FloatArray, title: str | None) -> Figure:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    n_bins = gammas.shape[1]
    # The map's last, yellow part is too light on white.
    colours = colormaps["viridis"](np.linspace(0, 0.92, n_bins))
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, values, neutral in ((upper, gammas, "cross entropy"), (lower, gaps, "calibrated")):
        axes.axhline(0, color=GREY, linestyle=":", linewidth=1.2, label=f"0: {neutral}")
        for m in range(n_bins):
            axes.plot(steps, values[:, m], color=colours[m], linewidth=1.3, marker="o", markersize=2)
        axes.legend(loc="best", fontsize=7, frameon=False)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    upper.set_ylabel("gamma", fontsize=9)
    lower.set_ylabel("calibration gap\n(confidence - accuracy)", fontsize=9)
    lower.set_xlabel("training step", fontsize=9)
    boundaries = BoundaryNorm(np.arange(n_bins + 1) - 0.5, n_bins)
    scale = ScalarMappable(boundaries, ListedColormap(colours))
    bar = figure.colorbar(scale, ax=[upper, lower], ticks=range(0, n_bins, -(-n_bins // 20)), aspect=30)
    bar.set_label("confidence bin, lowest first", fontsize=9)
    bar.ax.tick_params(labelsize=7, length=0)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure
