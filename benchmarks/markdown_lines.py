"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return lines
