"""Text from data in Markdown: a renderer shows it as it is, wherever it stands."""

from __future__ import annotations

import html
import string

import pytest
from markdown_it import MarkdownIt

from hf_calib._text import escape, markdown_table

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "[x](javascript:x)",
    "![a](b)",
    "`code`",
    "*a* **b** _c_ __d__ ~~e~~",
    "a|b||c",
    "# title",
    "&lt; &amp; &copy; &#35;",
    "<https://example.org>",
    # A backslash of the data's own must not undo ours.
    "\\*a\\*",
    "\\\\*a\\\\*",
    "\\[x\\](y)",
    "\\|",
    "\\",
    "a\\",
    "C:\\new\\[1]",
    string.punctuation,
    "".join(f"\\{each}" for each in string.punctuation),
]


def in_html(text: str) -> str:
    return html.escape(text, quote=False).replace('"', "&quot;")


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)


@pytest.mark.parametrize("text", HOSTILE)
def test_in_a_sentence(text: str) -> None:
    assert rendered(f"The class {escape(text)} is rare.") == f"<p>The class {in_html(text)} is rare.</p>\n"


@pytest.mark.parametrize("text", HOSTILE)
def test_in_a_table(text: str) -> None:
    table = rendered("\n".join(markdown_table(["class", "n"], [[escape(text), "3"], ["b", "4"]])))
    assert f"<td>{in_html(text)}</td>" in table
    assert table.count("<td") == 4
    assert table.count("<tr>") == 3


@pytest.mark.parametrize("text", HOSTILE)
def test_as_an_item_and_a_title(text: str) -> None:
    assert rendered(f"- of {escape(text)}\n- b") == f"<ul>\n<li>of {in_html(text)}</li>\n<li>b</li>\n</ul>\n"
    assert rendered(f"# Of {escape(text)}") == f"<h1>Of {in_html(text)}</h1>\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\u2028", "\x0b"])
def test_ends_of_lines_become_spaces(end: str) -> None:
    assert rendered(f"a {escape(f'b{end}## Owned')}").startswith("<p>a b ")
    assert "\n" not in escape(f"b{end}c")
