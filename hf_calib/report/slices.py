"""The section of a report on slices: groups of rows that a column names, and which differ from the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr, ndtri

from hf_calib.metrics.checks import IntArray
from hf_calib.metrics.intervals import holm, interval_of_bins
from hf_calib.metrics.state import GroupSums, SliceSums
from hf_calib.metrics.sums import BinSums, Interval, binned_error
from hf_calib.report.coins import Coins
from hf_calib.report.measured import Settings
from hf_calib.report.rows import Cells, p_cell, table_of_fields
from hf_calib.report.sections import ReportSection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 20
_COLUMNS = {
    "rows": ("n_rows", ","),
    "accuracy": ("accuracy", ".3f"),
    "confidence": ("confidence", ".3f"),
    "gap": ("gap", "+.3f"),
    "ECE": ("ece", ".4f"),
    "maximum": ("mce", ".3f"),
    "NLL": ("nll.value", ".4f"),
    "Brier": ("brier.value", ".4f"),
    "p": ("p_in_table", ""),
}
_LEAST_CHANCE = 1e-6  # of a row to be right, once it is moved by the gap of the others
_RESAMPLES = 200  # of each slice's interval: there may be 1,000 slices


@dataclass(frozen=True)
class Slice:
    """One group of rows, those with one value of the column.

    Its p-value is of such a difference from the gap of all other rows, either way, if there is none; corrected for the
    number of slices (Holm). It is None where there are no other rows.
    """

    name: str
    n_rows: int
    share: float  # of all rows, or of their weight
    accuracy: float
    confidence: float
    gap: Interval  # confidence - accuracy
    ece: Interval
    mce: float
    nll: Interval
    brier: Interval
    p_value: float | None
    differs: bool = False  # beyond chance

    @property
    def p_in_table(self) -> str:
        """The p-value, with a mark where it differs."""
        return "" if self.p_value is None else f"{p_cell(self.p_value)}{' *' * self.differs}"


@dataclass(frozen=True)
class SliceSection(ReportSection):
    """The slices of one column, those that differ first."""

    caption = "Slices, with {level} intervals"

    column: str
    slices: tuple[Slice, ...]

    @property
    def title(self) -> str:
        return f"By {self.column}"

    @property
    def finding(self) -> str:
        """Which slices differ, in a sentence."""
        differing = [each for each in self.slices if each.differs]
        named = ", ".join(f"{each.name} ({each.gap.value:+.3f})" for each in differing[:5])
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        if not differing:
            return f"No value of {self.column} differs from the other rows beyond chance in confidence minus accuracy."
        return (
            f"{len(differing)} of {len(self.slices)} values of {self.column} differ from the other rows beyond chance "
            f"in confidence minus accuracy: {named}{more}."
        )

    def sentences(self) -> list[str]:
        notes = [
            "p is the chance of such a difference between a slice's gap and that of all other rows if there is none, "
            f"corrected for {len(self.slices)} slices (Holm)."
        ]
        if len(self.slices) > _SHOWN:
            notes.append(f"{_SHOWN} of {len(self.slices)} slices; report.json has all.")
        return notes

    def table(self) -> Cells:
        return table_of_fields(self.slices[:_SHOWN], {self.column: ("name", ""), **_COLUMNS})

    def figures(self, n_bins: int) -> dict[str, Figure]:
        """Each slice's gap with its interval."""
        from hf_calib.plots.rows import slice_diagram

        shown = self.slices[:_SHOWN]
        gaps, differ = np.array([each.gap for each in shown]), np.array([each.differs for each in shown])
        figure = slice_diagram([each.name for each in shown], gaps, differ, column=self.column)
        return {f"slices_{self.column}": figure}


def slice_section(sums: SliceSums, settings: Settings) -> SliceSection:
    """Measure each slice, and compare it with all other rows."""
    groups = sums.groups
    bins, effective, n_rows = groups.bin_sums(), groups.effective_rows(), groups.n_rows()
    masses = bins.counts.sum(axis=1)
    used = np.flatnonzero(masses > 0)
    z = float(ndtri((1 + settings.confidence_level) / 2))
    p_values: list[Any] = slice_p_values(groups, used) if len(used) > 1 else [None]
    means = {name: groups.mean(name) for name in ("gap", "nll", "brier")}
    accuracies, _ = groups.mean("accuracy")
    level, slices = 1 - settings.confidence_level, []
    for group, p_value in zip(used, p_values, strict=True):
        own = BinSums(*(part[group] * (effective[group] / masses[group]) for part in bins))
        normal: Any = {
            name: Interval(*(float(mean[group] + step * error[group]) for step in (0, -z, z)))
            for name, (mean, error) in means.items()
        }
        found = Slice(
            name=sums.names[int(group)],
            n_rows=int(n_rows[group]),
            share=float(masses[group] / masses.sum()),
            accuracy=float(accuracies[group]),
            confidence=float(normal["gap"].value + accuracies[group]),
            ece=interval_of_bins(own, **settings._replace(n_resamples=_RESAMPLES).drawing),
            mce=float(binned_error(own, own.counts.sum(), "max")),
            p_value=p_value,
            differs=p_value is not None and p_value < level,
            **normal,
        )
        slices.append(found)
    slices.sort(key=lambda each: (not each.differs, -abs(each.gap.value) if each.differs else -each.share))
    return SliceSection(sums.column, tuple(slices))


def slice_p_values(groups: GroupSums, used: IntArray) -> list[float]:
    """Of each slice that has rows: how likely such a number of right rows is if its gap is that of all others.

    The larger of two p-values: one counts right rows as they are, which few rows need, and the other one allows for the
    error of the others' gap, which a slice of many rows needs. They are corrected for the number of slices.
    """
    bins, effective = groups.bin_sums(), groups.effective_rows()
    totals = BinSums(*(part.sum(axis=0) for part in bins))
    found = []
    for group in used:
        own = BinSums(*(part[group] for part in bins))
        scale = effective[group] / own.counts.sum()
        others = BinSums(*(total - part for total, part in zip(totals, own, strict=True)))
        mass = float(others.counts.sum())
        gap = float((others.confidence - others.correct).sum()) / mass
        filled = own.counts > 0
        counts = own.counts[filled] * scale
        stated = own.confidence[filled] / own.counts[filled]
        chances = np.clip(stated - gap, _LEAST_CHANCE, 1 - _LEAST_CHANCE)
        expected, variance = float(counts @ chances), float(counts @ (chances * (1 - chances)))
        right = float(own.correct.sum()) * scale
        n_own, n_others = float(counts.sum()), float(effective.sum() - effective[group])
        accuracy = float(others.correct.sum()) / mass
        of_others = n_own**2 * accuracy * (1 - accuracy) / max(n_others, 1.0)
        z = max(abs(right - expected) - 0.5, 0.0) / math.sqrt(variance + of_others)
        exact = Coins.of_sums(n_own, expected, expected - variance).p_value(right)
        found.append(max(exact, 2 * float(ndtr(-z))))
    return holm(found).tolist()
