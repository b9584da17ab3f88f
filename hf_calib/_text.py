"""Text from data, made safe for Markdown, names of models and data in reports and cards,
and options with help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from hf_calib._errors import check, few, visible, without_secrets

_EVERY_MARK = r"[\\`*_{}\[\]()#+!|~]"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.I)
# An underscore within a word, a sign before a number and brackets without an address are no markup.
_WHAT_MARKS = r"[\\`*|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=\])[(\[:]|^#+|!(?=\[)"


def escape(text: str, marks: str = _EVERY_MARK) -> str:
    r"""Neutralise Markdown and HTML in text that came from data.

    >>> print(escape("a|b <script> [x](y)"))
    a\|b &lt;script&gt; \[x\]\(y\)
    """
    text = (
        visible(" ".join(text.splitlines()))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    return re.sub(
        marks, lambda found: "".join(f"\\{letter}" for letter in found[0]), text
    )


def safe(text: str) -> str:
    r"""Neutralise markup in whole sentences: other marks are not escaped,
    so that the source stays readable.

    >>> print(safe("difference +0.35 [0.2, 0.4] (p = 1e-05) of __x__ & 20_newsgroups [x](y) | <b>"))
    difference +0.35 [0.2, 0.4] (p = 1e-05) of \_\_x\_\_ &amp; 20_newsgroups [x]\(y) \| &lt;b&gt;
    """
    return escape(text, _WHAT_MARKS)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; all columns but the first hold numbers, and are aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def counted(n: int, noun: str) -> str:
    """A number with its noun, such as "1 row" or "2,000 classes"."""
    return f"{n:,} {noun}{('es' if noun.endswith('s') else 's') * (n != 1)}"


def is_hub_name(name: object) -> bool:
    """Whether a value can be the name of a model or dataset on the Hub, and is not a local path.

    >>> [is_hub_name(name) for name in ("bert-base-uncased", "me/x", "/home/me/x", "../x", "a/b/c", "me/x.csv")]
    [True, True, False, False, False, False]
    """
    if not isinstance(name, str) or not re.fullmatch(
        r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", name, re.ASCII
    ):
        return False
    # A name with one of these endings is that of a file, even if it is missing.
    ends = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".gz", ".txt", ".npz")
    return (
        not name.endswith(ends)
        # The Hub refuses two dots or two dashes in a row.
        and ".." not in name
        and "--" not in name
        and not os.path.exists(name)
    )


def plain_name(name: str) -> str:
    r"""A dataset's or a model's name without the folders of this machine.

    >>> plain_name("/home/me/data/test.csv"), plain_name("fancyzhx/ag_news"), plain_name("C:\\data\\test.csv")
    ('test.csv', 'fancyzhx/ag_news', 'test.csv')
    """
    if is_hub_name(name):
        return name
    name = without_secrets(name)
    parts = [part for part in re.split(r"[\\/]+", name) if part not in ("", ".", "..")]
    return parts[-1] if parts else ""


def short_names(sources: Sequence[str]) -> list[str]:
    """Names of several datasets: the last two parts of paths, or as many as make them differ;
    others are unchanged.
    """
    parts = [
        Path(source).parts if os.path.exists(source) else (source,)
        for source in sources
    ]
    twice = ["/".join(own) for own in parts if parts.count(own) > 1]
    check(
        not twice,
        "ood_data to be different data",
        f"{few(twice[:1])} twice",
        "leave one of them out",
    )
    n_parts = 2
    while len({own[-n_parts:] for own in parts}) < len(parts):
        n_parts += 1
    return ["/".join(own[-n_parts:]) for own in parts]


def option(help: str, default: Any = None, **metadata: str) -> Any:
    """A field of a dataclass of options, with its help; the default `...` marks a required option."""
    return field(
        default=MISSING if default is ... else default,
        metadata={"help": help, **metadata},
    )


def as_number(text: str) -> Decimal | None:
    """Return the number that a text writes, exactly, or None.

    >>> as_number("1e0") == as_number("+1") == as_number("1.0") == 1, as_number("NaN")
    (True, None)
    """
    stripped = text.strip()
    return Decimal(stripped) if _NUMBER.fullmatch(stripped) else None
