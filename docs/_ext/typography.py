"""Dashes, signs and powers, and the classes by which the style sheet knows columns of words, short code and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

_MINUS = re.compile(r"(?<![\w.\-])-(?=\.?\d|log\b)")
_TIMES = re.compile(r"(?<=\d) x (?=\d)")
_RANGE = re.compile(r"(?<=\d)-(?=\.?\d)(?!\d+-)(?<!-\d\d-)")  # not in 2026-11-24
_POWER = re.compile(r"(?<=\w)\^(\d+)")
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_TO = "\N{EN DASH}\N{WORD JOINER}"
_INTERVAL = re.compile(r"\[[^\[\]]{,24}\]")
_SIGNS = {
    "--": "\N{EN DASH}",
    "-": "\N{MINUS SIGN}",
    ">=": "\N{GREATER-THAN OR EQUAL TO}",
    "<=": "\N{LESS-THAN OR EQUAL TO}",
    "->": "\N{RIGHTWARDS ARROW}",
}
_CODE = (nodes.literal, nodes.FixedTextElement, nodes.math, addnodes.desc_signature)
_WORDS = 30  # characters of a cell, from which its column is read as text
_POINTS, _PIXELS = (
    450,
    800,
)  # widths of figures from which they scroll on a narrow screen
_MANY, _MANY_OF_WORDS = 8, 3  # columns of a table that is set smaller
_SHORT = 32  # characters of a word of code that fits on a line of a narrow screen


def with_dashes(app: Sphinx, tree: nodes.document) -> None:
    """Write the dash before a description, which Sphinx leaves to smart quotes, signs, powers, and ranges in tables."""
    for text in list(tree.findall(nodes.Text)):
        around = list(ancestors(text))
        if any(isinstance(node, _CODE) for node in around):
            continue
        written = _MINUS.sub("\N{MINUS SIGN}", text)
        written = _TIMES.sub(
            "\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}", written
        )
        written = _POWER.sub(lambda found: found[1].translate(_RAISED), written)
        for typed, sign in _SIGNS.items():
            written = written.replace(f" {typed} ", f" {sign} ")
        if any(isinstance(node, nodes.entry) for node in around):
            written = "\N{EN DASH}" if written == "-" else _RANGE.sub(_TO, written)
            written = _INTERVAL.sub(
                lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), written
            )
        if written != text:
            text.parent.replace(text, nodes.Text(written))


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    """What a node is in, from the inside."""
    while node.parent is not None:
        node = node.parent
        yield node


def with_classes(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Name the cells of columns of words, code that does not break, and the boxes in which figures scroll."""
    for code in tree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) <= _SHORT:
            code["classes"].append("whole")
    for group in tree.findall(nodes.tgroup):
        columns = list(
            zip(*(row.children for row in group.findall(nodes.row)), strict=False)
        )
        of_words = [
            column
            for column in columns
            if max(len(cell.astext()) for cell in column) >= _WORDS
        ]
        for cell in chain(*of_words):
            cell["classes"].append("words")
        if len(columns) >= _MANY or len(of_words) >= _MANY_OF_WORDS:
            group.parent["classes"].append("wide")
    for image in list(tree.findall(nodes.image)):
        if page != "index" and is_broad(Path(app.srcdir) / image["uri"]):
            box = nodes.inline(classes=["broad"])
            image.replace_self(box)
            box += image


def is_broad(file: Path) -> bool:
    """Whether a figure has panels next to each other, which a narrow screen would shrink too much."""
    if file.suffix != ".svg":
        return (
            file.suffix == ".png"
            and int.from_bytes(file.read_bytes()[16:20], "big") >= _PIXELS
        )
    width = re.search(r'<svg[^>]* width="([\d.]+)pt"', file.read_text(encoding="utf-8"))
    return width is not None and float(width[1]) >= _POINTS


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to the pages as they are read and as they are resolved; called by Sphinx."""
    app.connect("doctree-read", with_dashes)
    app.connect("doctree-resolved", with_classes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
