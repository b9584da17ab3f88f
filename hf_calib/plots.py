"""Pictures of calibration.

matplotlib is imported when one is drawn, and pyplot never, so that no global state changes.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._checks import expected
from hf_calib.metrics._inputs import check_n_bins
from hf_calib.metrics.binning import BinMeans, FloatArray, mean_bins, sum_bins, uniform_bins, uniform_edges
from hf_calib.metrics.calibration import top_label_calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart in every kind of colour vision; hatching tells them apart in grey.
_BLUE, _SKY, _VERMILION = "#0072B2", "#A6D8F5", "#D55E00"
_PEACH, _GREY = "#F9C9A8", "#8C8C8C"

_PANEL_INCHES = (2.5, 3.1)
_COUNTS_BAND = 0.42  # the part of a histogram's height that belongs to its numbers
_FORMATS = (".pdf", ".png", ".svg")


def reliability_diagram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]], *, n_bins: int = 15, title: str | None = None
) -> Figure:
    """Draw accuracy against confidence, one panel for each name, side by side.

    For one model, or a few to compare, for example before and after temperature. For several models, each
    before and after, use `reliability_grid`.

    In each panel a bar is the accuracy of a confidence bin, and its hatched part the distance from there to
    the bin's mean confidence, in one colour where the model is over-confident and in another where it is
    under-confident. Below is the share of examples in each bin, with their number, and two lines, the mean
    confidence and the overall accuracy: the model is over-confident on the whole if the mean confidence is to
    the right.

    Args:
        panels: name -> (confidences, correct), each (N,): the top label's probability in [0, 1], and 1 where
            it is right, 0 where it is not.
        n_bins: M, the number of equal-width bins (lower, upper].
        title: a line above the whole figure.

    Returns:
        A figure to show or to `save_figure`; no pyplot figure, so nothing needs closing.

    Raises:
        ValueError: if there is no panel, or the arrays of one do not fit.

    References:
        Guo et al. 2017, Figure 1.

    >>> figure = reliability_diagram({"before": ([0.9, 0.8, 0.7], [1, 0, 1])})
    >>> len(figure.axes)
    2
    """
    return _draw_grid({"": panels}, n_bins, title)


def reliability_grid(
    rows: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    *,
    n_bins: int = 15,
    title: str | None = None,
) -> Figure:
    """Draw reliability diagrams in rows and columns, for example before and after temperature x losses.

    The panels are those of `reliability_diagram`.

    Args:
        rows: row name -> column name -> (confidences, correct); every row has the same columns.
        n_bins: M, the number of equal-width bins (lower, upper].
        title: a line above the whole figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no panel, rows have different columns, or arrays do not fit.

    >>> losses = {"cross_entropy": ([0.9, 0.8], [1, 0]), "focal": ([0.7, 0.6], [1, 1])}
    >>> figure = reliability_grid({"before temperature": losses, "after temperature": losses})
    >>> len(figure.axes)
    8
    """
    return _draw_grid(rows, n_bins, title)


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


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as .png, .pdf or .svg: the whole file or none, over whatever was there.

    Args:
        figure: from one of the functions here, or any matplotlib figure.
        path: where to; missing folders are made.

    Raises:
        ValueError: if the path ends in anything else.
    """
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        requirement = f"end in {', '.join(_FORMATS)}"
        raise ValueError(expected("path", requirement, repr(str(path)), "name the file reliability.png"))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(unfinished, dpi=200)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _draw_grid(
    rows: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]], n_bins: int, title: str | None
) -> Figure:
    from matplotlib.figure import Figure

    n_bins = check_n_bins(n_bins)
    columns = _columns(rows)
    panels = {
        (row, column): _check_panel(f"{row} {column}".strip(), *rows[row][column])
        for row in rows
        for column in columns
    }
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(0.7 + width * len(columns), 0.6 + height * len(rows)), layout="constrained")
    axes = figure.subplots(
        2 * len(rows), len(columns), sharex=True, squeeze=False, height_ratios=[2.6, 1] * len(rows)
    )
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            upper, lower = axes[2 * i, j], axes[2 * i + 1, j]
            _draw_panel(upper, lower, *panels[row, column], n_bins)
            _label_panel(upper, lower, first=j == 0, last_row=i == len(rows) - 1)
            if i == 0:
                _write_name(upper, column)
        _write_row_name(axes[2 * i, 0], row)
    _finish(figure, title, n_columns=len(columns))
    return figure


def _columns(rows: Mapping[str, Mapping[str, object]]) -> list[str]:
    columns = list(next(iter(rows.values()), {}))
    if not columns:
        way_out = "pass {name: (confidences, correct)}"
        raise ValueError(expected("a diagram", "have at least one panel", "none", way_out))
    for row, panels in rows.items():
        if set(panels) != set(columns):
            got = f"{sorted(panels)} in {row!r} and {sorted(columns)} above"
            raise ValueError(expected("every row", "have the same columns", got, "draw one diagram per row"))
    return columns


def _check_panel(name: str, confidences: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    confidence = np.asarray(confidences, dtype=np.float64)
    right = np.asarray(correct, dtype=np.float64)
    if confidence.ndim != 1 or confidence.shape != right.shape or not confidence.size:
        got = f"shapes {confidence.shape} and {right.shape}"
        way_out = "pass probs.max(axis=1) and probs.argmax(axis=1) == labels"
        raise ValueError(expected(f"panel {name!r}", "be two equally long arrays (N,)", got, way_out))
    if not ((confidence >= 0) & (confidence <= 1 + 1e-6)).all():
        got = f"values from {confidence.min():.6g} to {confidence.max():.6g}"
        way_out = "pass probabilities, not logits"
        raise ValueError(expected(f"confidences of panel {name!r}", "lie in [0, 1]", got, way_out))
    if not np.isin(right, (0, 1)).all():
        got = f"values from {right.min():.6g} to {right.max():.6g}"
        way_out = "pass probs.argmax(axis=1) == labels"
        raise ValueError(expected(f"correct of panel {name!r}", "be 0 or 1", got, way_out))
    return confidence, right


def _draw_panel(upper: Axes, lower: Axes, confidences: FloatArray, correct: FloatArray, n_bins: int) -> None:
    bins = mean_bins(sum_bins(confidences, correct, uniform_bins(confidences, n_bins), n_bins))
    edges = uniform_edges(n_bins)
    _draw_accuracy(upper, bins, edges)
    _draw_counts(lower, bins, edges)
    top = 1 - _COUNTS_BAND
    lower.axvline(correct.mean(), 0, top, color="black", linewidth=1.4, clip_on=False)
    lower.axvline(confidences.mean(), 0, top, color=_VERMILION, linestyle="--", linewidth=1.4, clip_on=False)
    ece = top_label_calibration_error(confidences, correct, n_bins=n_bins)
    summary = f"ECE {ece:.3f}   accuracy {correct.mean():.3f}   N {len(correct):,}"
    upper.set_title(summary, fontsize=7, loc="left", pad=4)


def _draw_accuracy(axes: Axes, bins: BinMeans, edges: FloatArray) -> None:
    """Bars up to the accuracy; the hatched part lies between accuracy and mean confidence."""
    from matplotlib.patheffects import withStroke

    shown = bins.counts > 0
    left, width = edges[:-1][shown], np.diff(edges)[shown]
    accuracy, confidence = bins.accuracy[shown], bins.confidence[shown]
    common = np.minimum(accuracy, confidence)

    def draw(height: FloatArray, bottom: FloatArray | float, label: str, **look: Any) -> None:
        axes.bar(left, height, width, bottom, align="edge", linewidth=0.4, label=label, **look)

    draw(common, 0, "accuracy of the bin", color=_BLUE, edgecolor="white")
    over = {"color": _PEACH, "edgecolor": _VERMILION, "hatch": "////"}
    draw(confidence - common, common, "gap: over-confident", **over)
    under = {"color": _SKY, "edgecolor": _BLUE, "hatch": "\\\\\\\\"}
    draw(accuracy - common, common, "gap: under-confident", **under)
    axes.hlines(accuracy, left, left + width, color="black", linewidth=1.2, clip_on=False)
    outline = [withStroke(linewidth=2, foreground="white")]
    axes.plot([0, 1], [0, 1], ":", color="#333333", linewidth=1.1, path_effects=outline, label="calibrated")
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _draw_counts(axes: Axes, bins: BinMeans, edges: FloatArray) -> None:
    share = bins.counts / bins.counts.sum()
    axes.bar(
        edges[:-1], share, np.diff(edges), align="edge", color="#BDBDBD", edgecolor="white", linewidth=0.4
    )
    axes.set_ylim(0, share.max() / (1 - _COUNTS_BAND) * 1.04)
    size = min(6.0, 100 / len(share))
    if size < 3.5:  # would be too small to read
        return
    for centre, count in zip((edges[:-1] + edges[1:]) / 2, bins.counts, strict=True):
        if count:
            text = axes.text(centre, 0.96, _short(count), fontsize=size, rotation=90, ha="center", va="top")
            text.set_transform(axes.get_xaxis_transform())


def _short(count: float) -> str:
    """A count in at most four or five characters."""
    if count < 10_000:
        return f"{count:.0f}"
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def _label_panel(upper: Axes, lower: Axes, *, first: bool, last_row: bool) -> None:
    ticks = [0, 0.25, 0.5, 0.75, 1]
    upper.set_yticks(ticks, ["0", "", "0.5", "", "1"])
    upper.set_xticks(ticks, ["0", "", "0.5", "", "1"])
    for axes in (upper, lower):
        axes.tick_params(labelsize=7, length=2.5)
        axes.spines[["top", "right"]].set_visible(False)
    top_share = lower.get_ylim()[1] * (1 - _COUNTS_BAND) / 1.04
    lower.set_yticks([0, top_share], ["0", f"{top_share:.0%}"])
    if first:
        upper.set_ylabel("accuracy", fontsize=8)
        lower.set_ylabel("share", fontsize=8)
    if last_row:
        lower.set_xlabel("confidence", fontsize=8)


def _write_name(axes: Axes, name: str) -> None:
    axes.annotate(
        textwrap.fill(name, 30),
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, 17),
        textcoords="offset points",
        fontsize=9,
        fontweight="bold",
        parse_math=False,
    )


def _write_row_name(axes: Axes, name: str) -> None:
    axes.annotate(
        textwrap.fill(name, 26),
        xy=(0, 0.3),
        xycoords="axes fraction",
        xytext=(-44, 0),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold",
        parse_math=False,
    )


def _finish(figure: Figure, title: str | None, n_columns: int) -> None:
    """Add the one legend and the title."""
    from matplotlib.lines import Line2D

    handles, _ = figure.axes[0].get_legend_handles_labels()
    handles += [
        Line2D([], [], color=_VERMILION, linestyle="--", linewidth=1.4, label="mean confidence"),
        Line2D([], [], color="black", linewidth=1.4, label="overall accuracy"),
    ]
    columns = 2 if n_columns == 1 else 3 if n_columns == 2 else 6
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)


def _gamma_history(
    log_history: Iterable[Mapping[str, Any]],
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Steps (T,), gammas (T, M) and gaps (T, M) of the entries that hold a whole table."""
    steps: list[float] = []
    gammas: list[list[float]] = []
    gaps: list[list[float]] = []
    for entry in log_history:
        bins = sorted(match[1] for match in map(re.compile(r"gamma_(\d+)$").match, entry) if match)
        gap_keys = [f"calibration_gap_{m}" for m in bins]
        if not bins or "step" not in entry or not all(key in entry for key in gap_keys):
            continue
        if gammas and len(bins) != len(gammas[0]):
            way_out = "pass the history of one training"
            raise ValueError(expected("log_history", f"keep {len(gammas[0])} bins", len(bins), way_out))
        steps.append(entry["step"])
        gammas.append([entry[f"gamma_{m}"] for m in bins])
        gaps.append([entry[key] for key in gap_keys])
    if not steps:
        way_out = "train with loss='adafocal' or another loss with a table of gammas"
        got = "no entry with step, gamma_00 and calibration_gap_00"
        raise ValueError(expected("log_history", "hold gammas", got, way_out))
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
        axes.axhline(0, color=_GREY, linestyle=":", linewidth=1.2, label=f"0: {neutral}")
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
