"""Style of all figures, checks of their arguments, and writing to files."""

from __future__ import annotations

import os
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib._files import whole_file
from hf_calib.metrics.checks import as_floats, check_names
from hf_calib.metrics.sums import TopLabel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours are distinguishable in every kind of colour vision;
# hatching helps in grey.
BLUE, SKY, VERMILION = "#0072B2", "#A6D8F5", "#D55E00"
PEACH, GREY, LIGHT = "#F9C9A8", "#8C8C8C", "#BDBDBD"
MIDDLE = "#6FB1DC"

_MANY = (BLUE, VERMILION, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))

_FORMATS = (".pdf", ".png", ".svg")
# The most points of a curve; more are not visible.
_MOST_POINTS = 1_000
# In total per panel; with few resamples the band is thin anyway.
_VALUES_RESAMPLED = 2e7
_FEWEST_RESAMPLES = 50
_STYLE: Any = {
    # Names are text, not formulas.
    "text.parse_math": False,
    "axes.labelsize": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.labelsize": 8,
    "figure.titlesize": 10,
    "legend.fontsize": 7,
    "legend.frameon": False,
}

#: The lines at the mean confidence and at the overall accuracy.
MEANS: dict[str, dict[str, Any]] = {
    "mean confidence": {"color": VERMILION, "linestyle": "--", "linewidth": 1.4},
    "overall accuracy": {"color": "black", "linewidth": 1.4},
}

# Checks


def check_panels(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]],
) -> dict[str, TopLabel]:
    """Return name -> confidences and correct as float64; raise if they are invalid."""
    way_out = "pass {name: (confidences, correct)}"
    check(bool(panels), "a diagram to have at least one panel", "none", way_out)
    checked = {}
    for name, (confidences, correct) in panels.items():
        confidence = as_floats(f"confidences of panel {name!r}", confidences)
        right = as_floats(f"correct of panel {name!r}", correct)
        are_equally_long = confidence.ndim == 1 and confidence.shape == right.shape
        check(
            are_equally_long and confidence.size > 0,
            f"panel {name!r} to be two equally long arrays (N,)",
            f"shapes {confidence.shape} and {right.shape}",
            "pass probs.max(axis=1) and probs.argmax(axis=1) == labels",
        )
        check(
            # Rounding may lead a little beyond 1; such confidences count as 1.
            bool(((confidence >= 0) & (confidence <= 1 + 1e-6)).all()),
            f"confidences of panel {name!r} to lie in [0, 1]",
            _range_of(confidence),
            "pass probabilities, not logits",
        )
        check(
            bool(np.isin(right, (0, 1)).all()),
            f"correct of panel {name!r} to be 0 or 1",
            _range_of(right),
            "pass probs.argmax(axis=1) == labels",
        )
        checked[name] = TopLabel(confidence.clip(0, 1), right)
    return checked


def _range_of(values: NDArray[np.float64]) -> str:
    return f"values from {values.min():.6g} to {values.max():.6g}"


def check_class_names(
    class_names: Sequence[str] | None, n_classes: int
) -> tuple[str, ...]:
    """Return a name for each class, by default its index."""
    check_names("class_names", class_names)
    if class_names is None:
        return tuple(map(str, range(n_classes)))
    check(
        len(class_names) == n_classes,
        f"class_names to be {n_classes} names",
        len(class_names),
        "name the columns of probs in their order",
    )
    return tuple(map(str, class_names))


def affordable_resamples(n_resamples: int, n_values: int) -> int:
    """Return the affordable number of resamples for this number of values."""
    affordable = int(_VALUES_RESAMPLED // n_values)
    return min(n_resamples, max(_FEWEST_RESAMPLES, affordable))


# Figures and axes


@contextmanager
def drawing(width: float, height: float, *titles: str | None) -> Iterator[Figure]:
    """Yield a figure of this size in inches, without pyplot;
    the block draws in the style of this package.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        if any(titles):
            figure.suptitle("\n".join(filter(None, titles)))


@contextmanager
def paired_panels(
    rows: Sequence[str],
    columns: Sequence[str],
    ylabels: tuple[str, str],
    title: str | None,
) -> Iterator[tuple[Figure, dict[tuple[str, str], NDArray[Any]]]]:
    """Yield a figure with two axes per row and column: one with the diagonal,
    and one for the confidences.
    """
    n_rows = len(rows)
    n_columns = len(columns)
    with drawing(0.7 + 2.5 * n_columns, 0.6 + 3.1 * n_rows, title) as figure:
        shape: dict[str, Any] = {"sharex": True, "squeeze": False}
        shape["height_ratios"] = [2.6, 1] * n_rows
        grid = figure.subplots(2 * n_rows, n_columns, **shape)
        plain_axes(*grid.flat)
        pairs = {}
        for i, row in enumerate(rows):
            pair = grid[2 * i : 2 * i + 2]
            for axes, label in zip(pair[:, 0], ylabels, strict=True):
                axes.set_ylabel(label)
            for upper in pair[0]:
                draw_diagonal(upper)
                unit_ticks(upper)
            for j, column in enumerate(columns):
                pairs[row, column] = pair[:, j]
        for axes, name in zip(grid[0], columns, strict=True):
            write_above(axes, name, 17, fontsize=9, fontweight="bold")
        for axes in grid[-1]:
            axes.set_xlabel("confidence")
        yield figure, pairs


def plain_axes(*several: Axes) -> None:
    """Set small ticks, and remove the frame on sides without numbers."""
    for axes in several:
        axes.tick_params(labelsize=7, length=2.5)
        axes.spines[["top", "right"]].set_visible(False)


def unit_ticks(axes: Axes, which: str = "xy") -> None:
    """Set ticks at the quarters of [0, 1], with numbers at every other tick."""
    places = [0, 0.25, 0.5, 0.75, 1]
    words = ["0", "", "0.5", "", "1"]
    if "x" in which:
        axes.set_xticks(places, words)
    if "y" in which:
        axes.set_yticks(places, words)


def draw_diagonal(axes: Axes) -> None:
    """Draw the diagonal, the line of a calibrated model."""
    from matplotlib.patheffects import withStroke

    # Without an outline, the dots are lost on a bar.
    outline = [withStroke(linewidth=2, foreground="white")]
    look: dict[str, Any] = {"color": "#333333", "linewidth": 1.1}
    axes.plot([0, 1], [0, 1], ":", label="calibrated", path_effects=outline, **look)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def draw_means(axes: Axes, accuracy: float, confidence: float, top: float = 1) -> None:
    """Draw lines at both means, up to a fraction of the height."""
    means = {"overall accuracy": accuracy, "mean confidence": confidence}
    for name, mean in means.items():
        # A line at 1 would be cut in half by the frame.
        axes.axvline(mean, 0, top, clip_on=False, label=name, **MEANS[name])


def name_sides(axes: Axes) -> None:
    """Write "over-confident" and "under-confident" on the sides of the diagonal."""
    look: Any = {"fontsize": 6.5, "fontstyle": "italic", "color": "#555555"}
    look["transform"] = axes.transAxes
    axes.text(0.03, 0.97, "under-confident", ha="left", va="top", **look)
    axes.text(0.97, 0.03, "over-confident", ha="right", va="bottom", **look)


def add_legend(figure: Figure, *several: Axes, columns: int = 1) -> None:
    """Add a legend below the figure, with each name in some axes once."""
    named: dict[str, Any] = {}
    for axes in several:
        handles, names = axes.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=columns,
    )


def line_looks() -> Iterator[dict[str, Any]]:
    """Return a colour and a dash for each line, from seven colours and five kinds of dash."""
    # Seven and five have no common factor, so that 35 lines differ.
    for colour, dash in zip(cycle(_MANY), cycle(_DASHES), strict=False):
        yield {"color": colour, "linestyle": dash}


def some_points(n_points: int, *, more_first: bool = False) -> NDArray[np.intp]:
    """Return indices of the visible number of points of a curve, at equal or growing distances."""
    if n_points <= _MOST_POINTS:
        return np.arange(n_points)
    if more_first:
        # A logarithmic scale has no 0, so the positions are counted from 1.
        positions = np.geomspace(1, n_points, _MOST_POINTS) - 1
    else:
        positions = np.linspace(0, n_points - 1, _MOST_POINTS)
    # Where positions are close to each other, several round to one.
    return np.unique(positions.round().astype(int))


# Names


def write_above(axes: Axes, text: str, points: float, **look: Any) -> None:
    """Write a text this many points above the left corner of a panel, in as many lines as needed."""
    lines = "\n".join(name_lines(text, 30))
    look |= {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(lines, (0, 1), (0, points), **look)


def name_lines(name: str, width: int) -> list[str]:
    """Return lines of at most `width` characters, broken at spaces, or after underscores,
    slashes and hyphens.

    >>> name_lines("focal_calibration_cifar10", 24), name_lines("focal, gamma -3.59", 15)
    (['focal_calibration_', 'cifar10'], ['focal, gamma', '-3.59'])
    """
    wrapper = textwrap.TextWrapper(width)
    # A hyphen before a digit is a minus sign, which stays with its number.
    wrapper.wordsep_re = re.compile(
        r"(\s+)|(?<=[_/])(?=[^\s_/])|(?<=[a-zA-Z]-)(?=[a-zA-Z])"
    )
    return wrapper.wrap(name)


def shortened(name: str, most: int) -> str:
    """Return a name with at most this many characters.

    >>> shortened("a long name", 6)
    'a lon…'
    """
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[: most - 1]}…"


# Files


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as .png, .pdf or .svg, completely or not at all, over an existing file.

    Args:
        figure: a figure of these functions, or any other matplotlib figure.
        path: the file; missing folders are created.

    Raises:
        ValueError: if the path has another suffix.
    """
    path = Path(path)
    known = path.suffix.lower() in _FORMATS
    check(
        known,
        f"path to end in {', '.join(_FORMATS)}",
        repr(str(path)),
        "name the file reliability.png",
    )
    with whole_file(path) as unfinished:
        write_image(figure, unfinished, dpi=200)


def write_image(figure: Figure, target: Any, **options: Any) -> None:
    """Draw to a file or stream. Characters missing from the font become boxes,
    without matplotlib's warnings.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(target, **options)
