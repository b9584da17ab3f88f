"""Colours, checks of what is drawn, and writing to a file, for all figures."""

from __future__ import annotations

import os
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, expected
from hf_calib._files import whole_file
from hf_calib.metrics.checks import FloatArray, as_floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[FloatArray, FloatArray]

# Okabe and Ito's colours, told apart in every kind of colour vision; hatching tells them apart in grey.
BLUE, SKY, VERMILION = "#0072B2", "#A6D8F5", "#D55E00"
PEACH, GREY = "#F9C9A8", "#8C8C8C"

_MANY = (BLUE, VERMILION, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))

_FORMATS = (".pdf", ".png", ".svg")


def check_panels(panels: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> dict[str, Panel]:
    """Return name -> (confidences, correct) as float64, or say what is wrong."""
    if not panels:
        raise InputValueError(no_panel())
    return {name: check_panel(name, *panel) for name, panel in panels.items()}


def no_panel() -> str:
    """The message for a figure without a panel."""
    return expected("a diagram", "have at least one panel", "none", "pass {name: (confidences, correct)}")


def check_class_names(class_names: Sequence[str] | None, n_classes: int) -> tuple[str, ...]:
    """Return a name for each class: its number where none are given."""
    names = tuple(map(str, range(n_classes) if class_names is None else class_names))
    if len(names) != n_classes:
        way_out = "name the columns of probs in their order"
        raise InputValueError(expected("class_names", f"be {n_classes} names", len(names), way_out))
    return names


def check_panel(name: str, confidences: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return both as float64 (N,), or say what is wrong with the panel."""
    confidence = as_floats(f"confidences of panel {name!r}", confidences)
    right = as_floats(f"correct of panel {name!r}", correct)
    if confidence.ndim != 1 or confidence.shape != right.shape or not confidence.size:
        got = f"shapes {confidence.shape} and {right.shape}"
        way_out = "pass probs.max(axis=1) and probs.argmax(axis=1) == labels"
        raise InputValueError(expected(f"panel {name!r}", "be two equally long arrays (N,)", got, way_out))
    if not ((confidence >= 0) & (confidence <= 1 + 1e-6)).all():
        got = f"values from {confidence.min():.6g} to {confidence.max():.6g}"
        way_out = "pass probabilities, not logits"
        raise InputValueError(expected(f"confidences of panel {name!r}", "lie in [0, 1]", got, way_out))
    if not np.isin(right, (0, 1)).all():
        got = f"values from {right.min():.6g} to {right.max():.6g}"
        way_out = "pass probs.argmax(axis=1) == labels"
        raise InputValueError(expected(f"correct of panel {name!r}", "be 0 or 1", got, way_out))
    return confidence, right


def write_name(axes: Axes, name: str, *, points_above: float = 17, width: int = 30) -> None:
    """Write a panel's name above it, as text and not as a formula, in as many lines as it needs."""
    axes.annotate(
        "\n".join(name_lines(name, width)),
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, points_above),
        textcoords="offset points",
        fontsize=9,
        fontweight="bold",
        parse_math=False,
    )


def line_looks() -> Iterator[dict[str, Any]]:
    """A colour and a dash for each of any number of lines; seven colours, and five kinds of dash besides."""
    return ({"color": c, "linestyle": d} for c, d in zip(cycle(_MANY), cycle(_DASHES), strict=False))


def plain_axes(*several: Axes) -> None:
    """Small ticks, and no frame where there are no numbers."""
    for axes in several:
        axes.tick_params(labelsize=7, length=2.5)
        axes.spines[["top", "right"]].set_visible(False)


def unit_ticks(axes: Axes, which: str = "xy") -> None:
    """Ticks at the quarters of [0, 1], with numbers at every other one."""
    for letter in which:
        getattr(axes, f"set_{letter}ticks")([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches, without pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def add_title(figure: Figure, *lines: str | None) -> None:
    """Above the whole figure, if there is one."""
    if any(lines):
        figure.suptitle("\n".join(filter(None, lines)), fontsize=10, parse_math=False)


def add_legend(figure: Figure, axes: Axes, *more: tuple[str, dict[str, Any]], columns: int = 1) -> None:
    """Name what an axes shows below the figure, and more lines by their looks; names are text, not formulas."""
    from matplotlib.lines import Line2D

    handles = axes.get_legend_handles_labels()[0] + [
        Line2D([], [], label=name, **look) for name, look in more
    ]
    where: Any = {"loc": "outside lower center", "fontsize": 7, "frameon": False, "ncols": columns}
    for text in figure.legend(handles=handles, **where).get_texts():
        text.set_parse_math(False)


#: Lines at the mean confidence and at the overall accuracy.
MEANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mean confidence", {"color": VERMILION, "linestyle": "--", "linewidth": 1.4}),
    ("overall accuracy", {"color": "black", "linewidth": 1.4}),
)


def name_sides(axes: Axes) -> None:
    """Which side of the diagonal is which."""
    look: Any = {"fontsize": 6.5, "fontstyle": "italic", "color": "#555555", "transform": axes.transAxes}
    axes.text(0.03, 0.97, "under-confident", ha="left", va="top", **look)
    axes.text(0.97, 0.03, "over-confident", ha="right", va="bottom", **look)


def shortened(name: str, most: int) -> str:
    """A name in at most so many letters.

    >>> shortened("a long name", 6)
    'a lon…'
    """
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[: most - 1]}…"


def draw_diagonal(axes: Axes) -> None:
    """The line on which a calibrated model lies."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=2, foreground="white")]
    axes.plot([0, 1], [0, 1], ":", color="#333333", linewidth=1.1, path_effects=outline, label="calibrated")
    axes.set(xlim=(0, 1), ylim=(0, 1))


def name_lines(name: str, width: int) -> list[str]:
    """Lines of at most `width` letters, broken at spaces and after underscores, slashes and hyphens within words.

    >>> name_lines("focal_calibration_cifar10", 24), name_lines("focal, gamma -3.59", 15)
    (['focal_calibration_', 'cifar10'], ['focal, gamma', '-3.59'])
    """
    wrapper = textwrap.TextWrapper(width)
    wrapper.wordsep_re = re.compile(r"(\s+)|(?<=[_/])(?=[^\s_/])|(?<=[a-zA-Z]-)(?=[a-zA-Z])")
    return wrapper.wrap(name)


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
        raise InputValueError(expected("path", requirement, repr(str(path)), "name the file reliability.png"))
    with whole_file(path) as unfinished:
        write_image(figure, unfinished, dpi=200)


def write_image(figure: Figure, target: Any, **options: Any) -> None:
    """Draw to a file or stream. Letters that the font lacks become boxes; matplotlib would warn of each one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(target, **options)
