"""Text from data, made safe to stand in Markdown."""

from __future__ import annotations

import re


def escape(text: str) -> str:
    r"""Neutralise Markdown and HTML in text that came from data.

    >>> print(escape("a|b <script> [x](y)"))
    a\|b &lt;script&gt; \[x\]\(y\)
    """
    text = " ".join(text.splitlines()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#+!|])", r"\\\1", text)
