"""Tables in Markdown, and how their numbers are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table.

    >>> table_lines(["loss", "ECE"], [["focal", "0.012"]])
    ['| loss | ECE |', '|---|---|', '| focal | 0.012 |']
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return lines


def with_interval(
    value: float, low: float | None, high: float | None, form: str = ".3f"
) -> str:
    """A number and the interval that it has; the bias of a calibration error leaves it without."""
    if low is None:
        return f"{value:{form}}"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def shown_p(p: float) -> str:
    return "< .001" if p < 0.001 else f"{p:.3f}"
