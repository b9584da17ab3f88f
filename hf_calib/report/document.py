"""Documents: headings, sentences, tables and figures, rendered to Markdown, to one HTML page, and to the terminal.

Whoever makes a document passes text as it is; what is markup in Markdown or HTML is escaped where it is rendered.
"""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_calib._text import markdown_table, safe
from hf_calib.plots.style import write_image
from hf_calib.report.page import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_DPI = 180
# Of tables in a terminal.
_TITLE = 20  # the least width of the first column
_WORD = 16  # the longest word of a header that is not broken
_GAP = 3  # between columns


class Image(NamedTuple):
    """A figure as drawn: data of a PNG file, the same on every run, and its width in CSS pixels, that on paper."""

    data: bytes
    width: int


def draw(figure: Figure) -> Image:
    """Draw a figure, which takes longer than all the rest of a document."""
    stream = io.BytesIO()
    write_image(figure, stream, format="png", dpi=_DPI)
    return Image(stream.getvalue(), round(figure.get_figwidth() * 96))


class Block(ABC):
    """A part of a document."""

    @abstractmethod
    def markdown(self) -> list[str]:
        """Its lines."""

    @abstractmethod
    def html(self) -> str:
        """Its HTML."""

    def show(self, console: Console) -> None:  # noqa: B027  # most have no place on a screen
        """Print it, where it has a place on a screen."""


@dataclass(frozen=True)
class Lead(Block):
    """One line below the title, on what the document is about."""

    text: str

    def markdown(self) -> list[str]:
        return [safe(self.text)]

    def html(self) -> str:
        return f'<p class="summary">{escape_html(self.text)}</p>'

    def show(self, console: Console) -> None:
        console.print(self.text, markup=False, highlight=False)


@dataclass(frozen=True)
class Bullets(Block):
    """Sentences as a list; notes are faint on a page, and not shown on a screen.

    Args:
        sentences: of the list.
        faint: whether they are notes.
        label: what stands before each of them on a screen.
    """

    sentences: Sequence[str]
    faint: bool = False
    label: str = ""

    def markdown(self) -> list[str]:
        return [f"- {safe(sentence)}" for sentence in self.sentences]

    def html(self) -> str:
        items = "\n".join(f"<li>{escape_html(sentence)}</li>" for sentence in self.sentences)
        return f'<ul class="notes">\n{items}\n</ul>' if self.faint else f"<ul>\n{items}\n</ul>"

    def show(self, console: Console) -> None:
        for sentence in () if self.faint else self.sentences:
            console.print(f"{self.label}{sentence}", markup=False, highlight=False)


@dataclass(frozen=True)
class Table(Block):
    """A table: its first column names the rows, the others hold numbers, perhaps as "value [low, high]".

    Args:
        caption: on a page.
        header: of the columns; "\\n" breaks a line.
        rows: as many cells each.
        title: on a screen; None keeps the table off it.
        stacked: whether a page shows intervals below their values.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    stacked: bool = False

    def markdown(self) -> list[str]:
        header = [safe(cell.replace("\n", " ")) for cell in self.header]
        return markdown_table(header, [[safe(cell) for cell in row] for row in self.rows])

    def html(self) -> str:
        rows = _per_line(self.rows, "\n[") if self.stacked else self.rows
        head = "".join(f'<th scope="col">{escape_html(cell)}</th>' for cell in self.header)
        body = "\n".join(map(_html_row, rows))
        caption = escape_html(self.caption)
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}"><table>\n'
            f"<caption>{caption}</caption>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
        )

    def show(self, console: Console) -> None:
        """Where there is no room, cells lose their intervals; columns that still do not fit follow below."""
        if self.title is None:
            return
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        forms = (self.rows, _per_line(self.rows, "\n["), _per_line(self.rows, ""))
        shown = next((f for f in forms if sum(_widths(self.header, f)) <= console.width), forms[-1])
        widths = _widths(self.header, shown)
        at_once = len(self.header)
        if sum(widths) > console.width:
            at_once = max(1, (console.width - widths[0]) // max(widths[1:]))
        for start in range(1, len(self.header), at_once):
            columns = [0, *range(start, min(start + at_once, len(self.header)))]
            table = RichTable(title=Text(self.title), box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
            for i in columns:
                look: dict[str, Any] = (
                    {"width": widths[i] - _GAP, "justify": "right"} if i else {"min_width": _TITLE}
                )
                table.add_column(Text(self.header[i], overflow="fold"), **look)
            for row in shown:
                table.add_row(*(Text(row[i]) for i in columns))
            console.print(table)


@dataclass(frozen=True)
class Figures(Block):
    """Figures side by side, where there is room; they are drawn once, and lie as files beside a Markdown document.

    Args:
        images: name -> image.
        captions: by name.
        alt_texts: by name, for readers who see none.
    """

    images: Mapping[str, Image]
    captions: Mapping[str, str]
    alt_texts: Mapping[str, str]

    def markdown(self) -> list[str]:
        lines: list[str] = []
        for name in self.images:
            lines += [f"![{safe(self.alt_texts[name])}](figures/{name}.png)", "", self.captions[name], ""]
        return lines[:-1]

    def html(self) -> str:
        parts = [
            f'<figure><img style="width: {image.width}px" alt="{escape_html(self.alt_texts[name])}" '
            f'src="data:image/png;base64,{base64.b64encode(image.data).decode("ascii")}">'
            f"<figcaption>{escape_html(self.captions[name])}</figcaption></figure>"
            for name, image in self.images.items()
        ]
        return f'<div class="figures">\n{chr(10).join(parts)}\n</div>'


@dataclass(frozen=True)
class Folded(Block):
    """Blocks that a page shows once their title is opened; Markdown shows them always."""

    title: str
    block: Block

    def markdown(self) -> list[str]:
        return self.block.markdown()

    def html(self) -> str:
        summary = escape_html(self.title)
        return f"<details>\n<summary>{summary}</summary>\n{self.block.html()}\n</details>"


@dataclass(frozen=True)
class Section(Block):
    """A heading with blocks below it.

    Args:
        title: of the heading.
        blocks: in their order.
        level: 2, or 3 for a part of a section.
    """

    title: str
    blocks: Sequence[Block]
    level: int = 2

    def markdown(self) -> list[str]:
        lines = [f"{'#' * self.level} {safe(self.title)}"]
        for block in self.blocks:
            lines += ["", *block.markdown()]
        return lines

    def html(self) -> str:
        inner = [block.html() for block in self.blocks]
        if self.level > 2:
            return "\n".join(inner)  # tables have their captions
        return "\n".join([f"<section>\n<h2>{escape_html(self.title)}</h2>", *inner, "</section>"])

    def show(self, console: Console) -> None:
        for block in self.blocks:
            block.show(console)


@dataclass(frozen=True)
class Document:
    """A title with blocks.

    Args:
        title: of the whole.
        blocks: in their order; a screen shows `Lead` and sentences behind the tables.
    """

    title: str
    blocks: Sequence[Block]

    @property
    def images(self) -> dict[str, Image]:
        """Name -> image, of all figures."""
        figures = [block for block in _flat(self.blocks) if isinstance(block, Figures)]
        return {name: image for block in figures for name, image in block.images.items()}

    def to_markdown(self) -> str:
        """The document as Markdown; figures lie in the folder `figures` beside it."""
        lines = [f"# {safe(self.title)}"]
        for block in self.blocks:
            part = block.markdown()
            if part:
                lines += ["", *part]
        return "\n".join(lines) + "\n"

    def to_html(self) -> str:
        """The document as one page that needs no other file: styles and figures are inside."""
        return page(self.title, [block.html() for block in self.blocks])

    def show(self, console: Console) -> None:
        """Print what has a place on a screen: tables first, then sentences, which are read last."""
        parts = _flat(self.blocks)
        for block in parts:
            if isinstance(block, Table):
                block.show(console)
        for block in parts:
            if not isinstance(block, Table):
                block.show(console)


def _flat(blocks: Iterable[Block]) -> list[Block]:
    """The blocks within sections, in their order."""
    found: list[Block] = []
    for block in blocks:
        found += _flat(block.blocks) if isinstance(block, Section) else [block]
    return found


def _html_row(cells: Sequence[str]) -> str:
    name, *values = map(escape_html, cells)
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in values)}</tr>'


def _per_line(rows: Sequence[Sequence[str]], mark: str) -> list[list[str]]:
    """Put "[low, high]" on a line of its own, or leave it out."""

    def shorten(cell: str) -> str:
        value, interval, rest = cell.partition(" [")
        return f"{value}{mark}{rest}" if interval and mark else value

    return [[row[0], *map(shorten, row[1:])] for row in rows]


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The widths of the columns: their longest line or, up to a limit, word of the header; the first one wraps."""
    words = [min(_WORD, max(map(len, name.split()), default=0)) for name in header[1:]]
    lines = [[max(map(len, cell.split("\n"))) for cell in row[1:]] for row in rows]
    return [width + _GAP for width in (_TITLE, *map(max, zip(words, *lines, strict=True)))]
