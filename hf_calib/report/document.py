"""Documents of text, tables and figures, as Markdown, HTML and on the terminal; their cells."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from hf_calib._errors import visible
from hf_calib._files import REPORT
from hf_calib._text import markdown_table, safe
from hf_calib.metrics.sums import Interval
from hf_calib.plots.style import write_image

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure
    from rich.console import Console

# Letters in a line on a terminal: the fewest of the first column, and the most of the words in
# other headers.
_TITLE = 20
_WORD = 16
_LONG_WORD = 18
# Letters between two columns.
_BETWEEN = 3
# The most things that a sentence names.
_NAMED = 5
# Letters of a figure's file name, of up to four bytes each: file systems take 255 bytes.
_LONGEST_STEM = 60

T = TypeVar("T")
Cells = tuple[list[str], list[list[str]]]  # a header, and rows


class Image(NamedTuple):
    """A drawn figure: a PNG file, equal on every run, and its width on paper in CSS pixels."""

    data: bytes
    width: int


def draw(figure: Figure) -> Image:
    """Draw a figure, which takes longer than the rest of a document."""
    stream = io.BytesIO()
    write_image(figure, stream, format="png", dpi=180)
    return Image(stream.getvalue(), round(figure.get_figwidth() * 96))


class _OfTexts:
    """A block whose texts may quote the data: each stays one line, without control characters."""

    def __post_init__(self) -> None:
        # The fields of a frozen dataclass are set by object, as dataclasses do it themselves.
        for each in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, each.name, _shown(getattr(self, each.name)))


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    return list(map(_shown, value)) if isinstance(value, list | tuple) else value


class Block:
    """A part of a document. Its HTML is in `page.html.jinja`."""

    def markdown(self, level: int) -> str:
        """The block as Markdown, with headings of this level; "" if it is empty."""
        raise NotImplementedError

    def said(self) -> list[str]:
        """The sentences that a screen shows."""
        return []

    def parts(self) -> Iterator[Block]:
        """The block, or the blocks within a section, in their order."""
        yield self


@dataclass(frozen=True)
class Lead(_OfTexts, Block):
    """One line below the title about the content of the document."""

    text: str
    strong: bool = False  # the finding, which a screen shows first

    def markdown(self, level: int) -> str:
        text = safe(self.text)
        return f"**{text}**" if self.strong else text

    def said(self) -> list[str]:
        return [] if self.strong else [self.text]


@dataclass(frozen=True)
class Bullets(_OfTexts, Block):
    """Sentences as a list."""

    sentences: Sequence[str]
    faint: bool = False  # notes, which are not shown on a screen
    label: str = ""  # precedes each sentence on a screen

    def markdown(self, level: int) -> str:
        return "\n".join(f"- {safe(sentence)}" for sentence in self.sentences)

    def said(self) -> list[str]:
        if self.faint:
            return []
        return [f"{self.label}{sentence}" for sentence in self.sentences]


@dataclass(frozen=True)
class Table(_OfTexts, Block):
    """A table: a column that names the rows, and columns of numbers, as "value [low, high]"."""

    caption: str  # on a page
    header: Sequence[str]  # "\n" breaks a line
    rows: Sequence[Sequence[str]]
    title: str | None = None  # on a screen; None keeps the table off it

    def markdown(self, level: int) -> str:
        header = [safe(name.replace("\n", " ")) for name in self.header]
        rows = [[safe(cell) for cell in row] for row in self.rows]
        return "\n".join(markdown_table(header, rows))

    def show(self, console: Console) -> None:
        """Print the table; if it is too wide, with intervals below values, or in parts."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        header = [_wrapped(name) for name in self.header]
        # One line for each value is easier to read, if the screen is wide enough.
        for mark in (" [", "\n["):
            rows = [
                [name, *(cell.replace(" [", mark) for cell in cells)]
                for name, *cells in self.rows
            ]
            columns = zip(header, *rows, strict=True)
            widths = [max(map(len, "\n".join(each).split("\n"))) for each in columns]
            widths[0] = _TITLE
            if sum(widths) + _BETWEEN * len(widths) <= console.width:
                break
        for group in _groups(widths, console.width):
            table = RichTable(
                title=Text(self.title or ""),
                box=SIMPLE_HEAD,
                title_justify="left",
                pad_edge=False,
            )
            for i in group:
                table.add_column(
                    # A text, in contrast to a string, is never read as markup.
                    Text(header[i]),
                    justify="right" if i else "left",
                    min_width=widths[i],
                )
            for row in rows:
                table.add_row(*(Text(row[i]) for i in group))
            console.print(table)


def _wrapped(name: str) -> str:
    """The name of a column in lines as short as its longest word, if that is not too long."""
    longest = max(map(len, name.split()), default=0)
    return "\n".join(textwrap.wrap(name, min(max(longest, _WORD), _LONG_WORD)))


def _groups(widths: Sequence[int], width: int) -> list[list[int]]:
    """The numbers of the columns of each part: the first, one more, and what else fits."""
    groups = [[0]]
    for i in range(1, len(widths)):
        shown = [widths[j] + _BETWEEN for j in (*groups[-1], i)]
        if sum(shown) > width and len(shown) > 2:
            groups.append([0])
        groups[-1].append(i)
    return groups


@dataclass(frozen=True)
class Figures(Block):
    """Figures with captions by name, side by side; files next to a Markdown document."""

    images: Mapping[str, Image]
    captions: Mapping[str, str]

    @property
    def files(self) -> dict[str, str]:
        """The name of each figure's file: the figure's, without what a path has a use for."""
        found: dict[str, str] = {}
        for name in self.images:
            # Two columns of the data may differ only in letters that a file's name cannot have.
            stem = re.sub(r"[^\w-]+", "-", name)[:_LONGEST_STEM]
            while stem in found.values():
                stem += "-"
            found[name] = stem
        return found

    def markdown(self, level: int) -> str:
        parts = []
        for name, file in self.files.items():
            parts.append(f"![{safe(name)}](figures/{file}.png)")
            parts.append(safe(self.captions[name]))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Section(_OfTexts, Block):
    """A heading with blocks below it, in their order."""

    title: str
    blocks: Sequence[Block]
    # Whether a page shows the title only, until a reader asks for the rest.
    folded: bool = False

    def markdown(self, level: int) -> str:
        parts = [f"{'#' * level} {safe(self.title)}"]
        parts += [block.markdown(level + 1) for block in self.blocks]
        # An empty block would leave two blank lines.
        return "\n\n".join(filter(None, parts))

    def parts(self) -> Iterator[Block]:
        for block in self.blocks:
            yield from block.parts()


class Document(Section):
    """A title with blocks."""

    @property
    def images(self) -> dict[str, Image]:
        """Name of the file -> image, of all figures."""
        found: dict[str, Image] = {}
        for block in self.parts():
            if isinstance(block, Figures):
                found |= {block.files[name]: block.images[name] for name in block.files}
        return found

    def to_markdown(self) -> str:
        """The document as Markdown; its figures are in the folder `figures` next to it."""
        return self.markdown(1) + "\n"

    def to_html(self) -> str:
        """The document as one page without scripts, with styles and figures inside."""
        return _template().render(document=self)

    def show(self, console: Console) -> None:
        """Print the parts for a screen: the finding, then tables with a title, then sentences."""
        # Texts may quote data, in which rich would find markup and emoji.
        plain: Any = {"markup": False, "emoji": False, "highlight": False}
        parts = list(self.parts())
        for block in parts:
            if isinstance(block, Lead) and block.strong:
                console.print(f"{block.text}\n", **plain)
        for block in parts:
            if isinstance(block, Table) and block.title is not None:
                block.show(console)
        for block in parts:
            for sentence in block.said():
                console.print(sentence, **plain)

    def write(self, folder: Path, record: Any) -> None:
        """Write the document as .md and .html, its record as .json, and its figures."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8")
        (folder / "report.md").write_text(self.to_markdown(), encoding="utf-8")
        (folder / "report.html").write_text(self.to_html(), encoding="utf-8")
        figures = folder / "figures"
        for figure, image in self.images.items():
            figures.mkdir(exist_ok=True)
            (figures / f"{figure}.png").write_bytes(image.data)


@cache
def _template() -> Template:
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=True)
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    text = files("hf_calib.report").joinpath("page.html.jinja").read_text("utf-8")
    return environment.from_string(text)


# ---- Cells of tables, and values of records ----


def p_cell(p_value: float) -> str:
    """A p-value as tables show it: not below what 1,000 resamples can give, nor rounded to 0.05.

    >>> p_cell(0.6543), p_cell(0.0498), p_cell(1 / 1001)
    ('0.65', '0.0498', '< 0.001')
    """
    if p_value < 0.001:
        return "< 0.001"
    # A rounded 0.05 would not tell on which side of the usual level it is.
    shown = [f"{p_value:.{digits}g}" for digits in range(2, 9)]
    return next((each for each in shown if each != "0.05"), "0.05")


def p_in_words(p_value: float) -> str:
    """A p-value as sentences state it."""
    shown = p_cell(p_value)
    return f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def listed(words: Sequence[str]) -> str:
    """The first words, and the number of further words."""
    n_more = len(words) - _NAMED
    first = ", ".join(words[:_NAMED])
    return f"{first}, and {n_more} more" if n_more > 0 else first


def cell(value: Any, form: str = ".4f") -> str:
    """A number or an `Interval` in a form of `format`, or a p-value in the form "p".

    >>> cell(Interval(0.05, 0.04, 0.061)), cell(Interval(0.05)), cell(Interval(np.nan))
    ('0.0500 [0.0400, 0.0610]', '0.0500', 'not defined')
    >>> cell(1234, ","), cell(0.5, "p"), cell(None)
    ('1,234', '0.5', '')
    """
    if value is None:
        return ""
    if form == "p":
        return p_cell(value)
    if not isinstance(value, Interval):
        return format(value, form)
    if math.isnan(value.value):
        return "not defined"
    shown, *ends = [format(each, form) for each in value if each is not None]
    return f"{shown} [{', '.join(ends)}]" if ends else shown


def columns(before: T, after: T | None) -> dict[str, T]:
    """Values before and after calibration, by the name of their table column."""
    return {"value": before} if after is None else {"before": before, "after": after}


def table_of(
    corner: str, titles: Mapping[str, str], states: Mapping[str, Mapping[str, Interval]]
) -> Cells:
    """A table with a row for each metric that any state has, by the titles of their keys."""
    rows = []
    for key, title in titles.items():
        cells = [cell(found[key]) if key in found else "" for found in states.values()]
        if any(cells):
            rows.append([title, *cells])
    return [corner, *states], rows


def table_of_rows(rows: Iterable[Any], columns: Mapping[str, tuple[str, str]]) -> Cells:
    """A table with a line for each row; a column has an attribute of the rows and its form."""
    cells = []
    for row in rows:
        cells.append(
            [cell(attrgetter(name)(row), form) for name, form in columns.values()]
        )
    return list(columns), cells


def titled(
    metrics: Mapping[str, Interval], titles: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Metrics as in a record, each with its title."""
    return {
        key: {"title": titles[key], **found._asdict()} for key, found in metrics.items()
    }


def compared(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are compared, which arrays are not."""
    names = [each.name for each in fields(record) if each.compare]
    return {name: getattr(record, name) for name in names}


def plain(value: Any) -> Any:
    """A value in JSON types, without fields that are not compared; non-finite numbers become None.

    >>> plain({"ece": Interval(0.5, float("nan")), "names": ("a", "b")})
    {'ece': {'value': 0.5, 'low': None, 'high': None}, 'names': ['a', 'b']}
    """
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        value = compared(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    # JSON knows neither numpy's numbers nor NaN and infinity.
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
