"""What a study says while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_calib.study.grid import Cell

Say = Callable[[str], None]


def name_of(cell: Cell) -> str:
    return f"{cell.variant.label}, seed {cell.seed}"


def progress(n_cells: int, n_open: int, n_failed: int, took: Sequence[float], jobs: int) -> str:
    """How far the study is, and about how long the rest takes, by the trainings of this run."""
    words = f"{n_cells - n_open - n_failed} of {n_cells}" + (f", {n_failed} failed" if n_failed else "")
    if took and n_open:
        words += f", about {in_words(sum(took) / len(took) * n_open / jobs)} left"
    return words


def in_words(seconds: float) -> str:
    """A duration.

    >>> in_words(42.0), in_words(600.0), in_words(9000.0)
    ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
