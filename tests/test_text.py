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


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)


@pytest.mark.parametrize("text", HOSTILE)
def test_it_is_shown_as_it_is(text: str) -> None:
    shown, escaped = html.escape(text, quote=False).replace('"', "&quot;"), escape(text)
    assert (
        rendered(f"The class {escaped} is rare.")
        == f"<p>The class {shown} is rare.</p>\n"
    )
    assert (
        rendered(f"- of {escaped}\n- b")
        == f"<ul>\n<li>of {shown}</li>\n<li>b</li>\n</ul>\n"
    )
    assert rendered(f"# Of {escaped}") == f"<h1>Of {shown}</h1>\n"
    table = rendered(
        "\n".join(markdown_table(["class", "n"], [[escaped, "3"], ["b", "4"]]))
    )
    assert f"<td>{shown}</td>" in table
    assert (table.count("<td"), table.count("<tr>")) == (4, 3)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\u2028", "\x0b"])
def test_ends_of_lines_become_spaces(end: str) -> None:
    assert rendered(f"a {escape(f'b{end}## Owned')}").startswith("<p>a b ")
    assert "\n" not in escape(f"b{end}c")
