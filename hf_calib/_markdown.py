"""Markdown: text from data, made safe to stand in it, and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence


def escape(text: str) -> str:
    r"""Neutralise Markdown and HTML in text that came from data.

    >>> print(escape("a|b <script> [x](y)"))
    a\|b &lt;script&gt; \[x\]\(y\)
    """
    text = " ".join(text.splitlines()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", text)


def safe(text: str) -> str:
    r"""The same for whole sentences: only what would be markup is escaped, so that the source stays readable.

    >>> print(safe("difference +0.35 [0.2, 0.4] (p = 1e-05) of __x__ & 20_newsgroups [x](y) | <b>"))
    difference +0.35 [0.2, 0.4] (p = 1e-05) of \_\_x\_\_ &amp; 20_newsgroups [x]\(y) \| &lt;b&gt;
    """
    text = " ".join(text.splitlines()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    markup = r"[\\`*|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=\])[(\[:]|^#+|!(?=\[)"
    return re.sub(markup, lambda found: "".join(f"\\{letter}" for letter in found[0]), text)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; all columns but the first hold numbers, and are aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
