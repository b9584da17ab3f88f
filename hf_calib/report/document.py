"""Documents of text, tables and figures, rendered and escaped as Markdown, HTML and for the terminal; their cells."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from hf_calib._errors import visible
from hf_calib._text import markdown_table, safe
from hf_calib.metrics.sums import Interval
from hf_calib.plots.style import write_image

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure
    from rich.console import Console

# Letters in a line on a terminal: the fewest of the first column, and the most of the words in other headers.
_TITLE = 20
_WORD = 16
_LONG_WORD = 18
# The most things that a sentence names.
_NAMED = 5
# Letters of a figure's file name, of up to four bytes each: file systems take 255 bytes.
_LONGEST_STEM = 60

T = TypeVar("T")
Cells = tuple[list[str], list[list[str]]]  # a header, and rows


class Image(NamedTuple):
    """A drawn figure: the data of a PNG file, which are equal on every run, and its width on paper in CSS pixels."""

    data: bytes
    width: int


def draw(figure: Figure) -> Image:
    """Draw a figure, which takes longer than the rest of a document."""
    stream = io.BytesIO()
    write_image(figure, stream, format="png", dpi=180)
    return Image(stream.getvalue(), round(figure.get_figwidth() * 96))


class _OfTexts:
    """A block whose texts may quote the data: each line stays one, and without control characters, in every form."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, each.name, _shown(getattr(self, each.name)))


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    return list(map(_shown, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Lead(_OfTexts):
    """One line below the title about the content of the document."""

    text: str
    strong: bool = False  # the finding, which a screen shows first


@dataclass(frozen=True)
class Bullets(_OfTexts):
    """Sentences as a list."""

    sentences: Sequence[str]
    faint: bool = False  # notes, which are not shown on a screen
    label: str = ""  # precedes each sentence on a screen


@dataclass(frozen=True)
class Table(_OfTexts):
    """A table: its first column names the rows, the others hold numbers, perhaps as "value [low, high]"."""

    caption: str  # on a page
    header: Sequence[str]  # "\n" breaks a line
    rows: Sequence[Sequence[str]]
    title: str | None = None  # on a screen; None keeps the table off it
    links: Mapping[str, str] = field(
        default_factory=dict
    )  # name of a row -> address, or ""

    def rows_with(self, mark: str) -> list[list[str]]:
        """The rows with a mark in place of the space before an interval."""
        return [
            [row[0], *(cell.replace(" [", f"{mark}[") for cell in row[1:])]
            for row in self.rows
        ]

    def show(self, console: Console) -> None:
        """Print the table; if it is too wide, intervals are below their values, and more columns in another table."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        longest = [max(map(len, name.split()), default=0) for name in self.header]
        room = [min(max(n, _WORD), _LONG_WORD) for n in longest]
        header = [
            "\n".join(textwrap.wrap(name, n))
            for name, n in zip(self.header, room, strict=True)
        ]
        for mark in (" ", "\n"):
            rows = self.rows_with(mark)
            lines = [
                "\n".join(column).split("\n")
                for column in zip(header, *rows, strict=True)
            ]
            widths = [_TITLE, *(max(map(len, column)) for column in lines[1:])]
            if sum(widths) + 3 * len(widths) <= console.width:
                break
        groups = [[0]]
        for i in range(1, len(header)):
            shown = [widths[j] + 3 for j in (*groups[-1], i)]
            if sum(shown) > console.width and len(shown) > 2:
                groups.append([0])
            groups[-1].append(i)
        for group in groups:
            table = RichTable(
                title=Text(self.title or ""),
                box=SIMPLE_HEAD,
                title_justify="left",
                pad_edge=False,
            )
            for i in group:
                table.add_column(
                    Text(header[i]),
                    justify="right" if i else "left",
                    min_width=widths[i],
                )
            for row in rows:
                table.add_row(*(Text(row[i]) for i in group))
            console.print(table)


@dataclass(frozen=True)
class Figures:
    """Figures with captions by name, side by side if there is room; files next to a Markdown document."""

    images: Mapping[str, Image]
    captions: Mapping[str, str]

    @property
    def files(self) -> dict[str, str]:
        """The name of each figure's file: the figure's, which may be a column's, without what a path has a use for."""
        found: dict[str, str] = {}
        for name in self.images:
            stem = re.sub(r"[^\w-]+", "-", name)[:_LONGEST_STEM]
            while stem in found.values():
                stem += "-"
            found[name] = stem
        return found


@dataclass(frozen=True)
class Section(_OfTexts):
    """A heading with blocks below it, in their order."""

    title: str
    blocks: Sequence[Block]


Block = Lead | Bullets | Table | Figures | Section


@dataclass(frozen=True)
class Document(_OfTexts):
    """A title with blocks."""

    title: str
    blocks: Sequence[Block]

    @property
    def images(self) -> dict[str, Image]:
        """Name of the file -> image, of all figures."""
        figures = [block for block in _flat(self.blocks) if isinstance(block, Figures)]
        return {
            block.files[name]: image
            for block in figures
            for name, image in block.images.items()
        }

    def to_markdown(self) -> str:
        """The document as Markdown; its figures are in the folder `figures` next to it."""
        return "\n".join(_markdown(Section(self.title, self.blocks), 1)) + "\n"

    def to_html(self) -> str:
        """The document as one page that needs no other file: styles and figures are inside, without scripts."""
        return _template().render(document=self)

    def show(self, console: Console) -> None:
        """Print the parts for a screen: the finding, then tables with a title, then sentences."""
        plain: Any = {"markup": False, "emoji": False, "highlight": False}
        parts = _flat(self.blocks)
        sentences: list[str] = []
        for block in parts:
            if isinstance(block, Lead) and block.strong:
                console.print(f"{block.text}\n", **plain)
            elif isinstance(block, Lead):
                sentences.append(block.text)
            elif isinstance(block, Bullets) and not block.faint:
                sentences += [
                    f"{block.label}{sentence}" for sentence in block.sentences
                ]
        for block in parts:
            if isinstance(block, Table) and block.title is not None:
                block.show(console)
        for sentence in sentences:
            console.print(sentence, **plain)

    def write(self, folder: Path, record: Any, name: str = "report") -> None:
        """Write the document as .md and .html, its record as .json, and its figures, into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        forms = {"md": self.to_markdown(), "html": self.to_html(), "json": text}
        for suffix, content in forms.items():
            (folder / f"{name}.{suffix}").write_text(content, encoding="utf-8")
        for figure, image in self.images.items():
            (folder / "figures").mkdir(exist_ok=True)
            (folder / "figures" / f"{figure}.png").write_bytes(image.data)


def _flat(blocks: Iterable[Block]) -> list[Block]:
    """The blocks within sections, in their order."""
    found: list[Block] = []
    for block in blocks:
        found += _flat(block.blocks) if isinstance(block, Section) else [block]
    return found


def _markdown(block: Block, level: int) -> list[str]:
    """The lines of a block at a level of headings."""
    if isinstance(block, Lead):
        return [f"**{safe(block.text)}**" if block.strong else safe(block.text)]
    if isinstance(block, Bullets):
        return [f"- {safe(sentence)}" for sentence in block.sentences]
    if isinstance(block, Table):
        header = [safe(cell.replace("\n", " ")) for cell in block.header]
        rows = [[safe(cell) for cell in row] for row in block.rows]
        for row, (name, *_) in zip(rows, block.rows, strict=True):
            row[0] = (
                f"[{row[0]}]({block.links[name]})" if block.links.get(name) else row[0]
            )
        return markdown_table(header, rows)
    if isinstance(block, Figures):
        parts = [
            [f"![{safe(name)}](figures/{file}.png)", "", safe(block.captions[name])]
            for name, file in block.files.items()
        ]
    else:
        heading = f"{'#' * level} {safe(block.title)}"
        parts = [[heading], *(_markdown(each, level + 1) for each in block.blocks)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines).split("\n")


@cache
def _template() -> Template:
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=True)
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    text = files("hf_calib.report").joinpath("page.html.jinja").read_text("utf-8")
    return environment.from_string(text)


# ---- Cells of tables, and values of records ----


def p_cell(p_value: float) -> str:
    """A p-value as tables show it, not below the least value that 1,000 resamples can give, and not rounded to 0.05.

    >>> p_cell(0.6543), p_cell(0.0498), p_cell(1 / 1001)
    ('0.65', '0.0498', '< 0.001')
    """
    digits = next((n for n in range(2, 9) if f"{p_value:.{n}g}" != "0.05"), 2)
    return "< 0.001" if p_value < 0.001 else f"{p_value:.{digits}g}"


def p_in_words(p_value: float) -> str:
    """A p-value as sentences state it."""
    return f"p {'' if p_value < 0.001 else '= '}{p_cell(p_value)}"


def listed(words: Sequence[str]) -> str:
    """The first words, and the number of further words."""
    n_more = len(words) - _NAMED
    first = ", ".join(words[:_NAMED])
    return f"{first}, and {n_more} more" if n_more > 0 else first


def with_interval(
    value: float, low: float | None, high: float | None, form: str = ".4f"
) -> str:
    """A metric as the tables show it.

    >>> with_interval(0.05, 0.04, 0.061), with_interval(0.05, None, None), with_interval(np.nan, None, None)
    ('0.0500 [0.0400, 0.0610]', '0.0500', 'not defined')
    """
    if math.isnan(value):
        return "not defined"
    shown = format(value, form)
    return (
        shown
        if low is None or high is None
        else f"{shown} [{low:{form}}, {high:{form}}]"
    )


def cell(found: Interval, form: str = ".4f") -> str:
    """An interval as the tables show it."""
    return with_interval(found.value, found.low, found.high, form)


def columns(before: T, after: T | None) -> dict[str, T]:
    """Values before and after calibration, by the name of their table column."""
    return {"value": before} if after is None else {"before": before, "after": after}


def table_of(
    corner: str, titles: Mapping[str, str], states: Mapping[str, Mapping[str, Interval]]
) -> Cells:
    """A table with a row for each metric that any state has, by the titles of their keys."""
    rows = [
        [
            title,
            *(cell(found[key]) if key in found else "" for found in states.values()),
        ]
        for key, title in titles.items()
        if any(key in found for found in states.values())
    ]
    return [corner, *states], rows


def table_of_rows(
    rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]
) -> Cells:
    """A table with a cell for each row and column, the function of the column for the row."""
    return list(columns), [[shown(row) for shown in columns.values()] for row in rows]


def titled(
    metrics: Mapping[str, Interval], titles: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Metrics as in a record, each with its title."""
    return {
        key: {"title": titles[key], **found._asdict()} for key, found in metrics.items()
    }


def plain(value: Any) -> Any:
    """A value in JSON types, without fields that are not compared; non-finite numbers become None.

    >>> plain({"ece": Interval(0.5, float("nan")), "names": ("a", "b")})
    {'ece': {'value': 0.5, 'low': None, 'high': None}, 'names': ['a', 'b']}
    """
    if is_dataclass(value):
        value = {
            each.name: getattr(value, each.name)
            for each in fields(value)
            if each.compare
        }
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
