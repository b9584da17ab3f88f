"""The section of a report on slices: groups of rows that a column names, and which differ from the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr, ndtri

from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.intervals import holm, interval_of_bins
from hf_calib.metrics.state import SliceSums
from hf_calib.metrics.sums import BinSums, Interval, binned_error
from hf_calib.report.coins import Coins
from hf_calib.report.measures import Settings
from hf_calib.report.tables import p_cell
from hf_calib.report.text import Table, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 20
_LEAST_CHANCE = 1e-6  # of a row to be right, once it is moved by the gap of the others
_RESAMPLES = 200  # of each slice's interval: there may be 1,000 slices


@dataclass(frozen=True)
class Slice:
    """One group of rows.

    Args:
        name: its value of the column.
        n_rows: of it.
        share: of all rows, or of their weight.
        accuracy: of it.
        confidence: the mean.
        gap: confidence - accuracy, with its interval.
        ece: with its interval.
        mce: the maximum calibration error.
        nll: with its interval.
        brier: with its interval.
        p_value: of such a difference from the gap of all other rows, either way, if there is none; corrected for the
            number of slices (Holm). None where there are no other rows.
    """

    name: str
    n_rows: int
    share: float
    accuracy: float
    confidence: float
    gap: Interval
    ece: Interval
    mce: float
    nll: Interval
    brier: Interval
    p_value: float | None


@dataclass(frozen=True)
class SliceSection:
    """The slices of one column, those that differ first.

    Args:
        column: that names them.
        slices: in order.
        level: below which a p-value counts as a difference.
    """

    column: str
    slices: tuple[Slice, ...]
    level: float

    def differs(self, each: Slice) -> bool:
        """Whether a slice's confidence is off by more, or less, than that of the other rows, beyond chance."""
        return each.p_value is not None and each.p_value < self.level

    def sentences(self) -> list[str]:
        """Which differ, and how to read the table."""
        differing = [each for each in self.slices if self.differs(each)]
        named = ", ".join(f"{each.name} ({each.gap.value:+.3f})" for each in differing[:5])
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        found = (
            f"{len(differing)} of {len(self.slices)} values of {self.column} differ from the other rows beyond chance "
            f"in confidence minus accuracy: {named}{more}."
            if differing
            else f"No value of {self.column} differs from the other rows beyond chance in confidence minus accuracy."
        )
        return [found]

    def footnotes(self) -> list[str]:
        """How to read the table, and what it leaves out."""
        notes = [
            "p is the chance of such a difference between a slice's gap and that of all other rows if there is none, "
            f"corrected for {len(self.slices)} slices (Holm)."
        ]
        if len(self.slices) > SHOWN:
            notes.append(f"{SHOWN} of {len(self.slices)} slices; report.json has all.")
        return notes

    def table(self) -> Table:
        """The first slices, with their metrics."""
        header = [self.column, "rows", "accuracy", "confidence", "gap", "ECE", "maximum", "NLL", "Brier", "p"]
        return header, [self._cells(each) for each in self.slices[:SHOWN]]

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {
            "column": self.column,
            "slices": [
                {
                    **{
                        name: value._asdict() if isinstance(value, Interval) else value
                        for name, value in vars(each).items()
                    },
                    "differs": self.differs(each),
                }
                for each in self.slices
            ],
        }

    def figure(self) -> Figure:
        """Each slice's gap with its interval."""
        from hf_calib.plots.rows import slice_diagram

        shown = self.slices[:SHOWN]
        return slice_diagram(
            [each.name for each in shown],
            np.array([[each.gap.value, each.gap.low, each.gap.high] for each in shown]),
            np.array([self.differs(each) for each in shown]),
            column=self.column,
        )

    def alt_text(self) -> str:
        """The figure in numbers."""
        named = ", ".join(f"{each.name} {each.gap.value:+.3f}" for each in self.slices[:SHOWN])
        return f"Confidence minus accuracy by {self.column}: {named}."

    def _cells(self, each: Slice) -> list[str]:
        mark = " *" if self.differs(each) else ""
        return [
            each.name,
            f"{each.n_rows:,}",
            f"{each.accuracy:.3f}",
            f"{each.confidence:.3f}",
            with_interval(*each.gap, "+.3f"),
            with_interval(*each.ece),
            f"{each.mce:.3f}",
            f"{each.nll.value:.4f}",
            f"{each.brier.value:.4f}",
            "" if each.p_value is None else f"{p_cell(each.p_value)}{mark}",
        ]


def slice_section(sums: SliceSums, settings: Settings) -> SliceSection:
    """Measure each slice, and compare it with all other rows.

    Args:
        sums: of the slices.
        settings: of the report.
    """
    found = sums.groups
    bins, effective, n_rows = found.bin_sums(), found.effective_rows(), found.n_rows()
    masses = bins.counts.sum(axis=1)
    used = np.flatnonzero(masses > 0)
    z = float(ndtri((1 + settings.confidence_level) / 2))
    (gaps, gap_errors), (accuracies, _) = found.mean("gap"), found.mean("accuracy")
    p_values = holm(_p_values(bins, effective, used)) if len(used) > 1 else None
    means = {name: found.mean(name) for name in ("nll", "brier")}
    slices = []
    for place, group in enumerate(used):
        own = BinSums(*(part[group] * (effective[group] / masses[group]) for part in bins))
        total = float(own.counts.sum())
        proper = {
            name: Interval(*(float(mean[group] + step * error[group]) for step in (0, -z, z)))
            for name, (mean, error) in means.items()
        }
        slices.append(
            Slice(
                name=sums.names[int(group)],
                n_rows=int(n_rows[group]),
                share=float(masses[group] / masses.sum()),
                accuracy=float(accuracies[group]),
                confidence=float(gaps[group] + accuracies[group]),
                gap=Interval(*(float(gaps[group] + step * gap_errors[group]) for step in (0, -z, z))),
                ece=interval_of_bins(
                    own,
                    n_resamples=_RESAMPLES,
                    confidence_level=settings.confidence_level,
                    seed=settings.seed,
                ),
                mce=float(binned_error(own, total, "max")),
                p_value=None if p_values is None else float(p_values[place]),
                **proper,
            )
        )
    level = 1 - settings.confidence_level

    def order(each: Slice) -> tuple[bool, float]:
        differs = each.p_value is not None and each.p_value < level
        return not differs, -abs(each.gap.value) if differs else -each.share

    return SliceSection(sums.column, tuple(sorted(slices, key=order)), level)


def _p_values(bins: BinSums, effective: FloatArray, used: np.ndarray) -> FloatArray:
    """Of each slice: how likely such a number of right rows is if its gap is that of all others.

    The larger of two p-values: one counts right rows as they are, which few rows need, and the other one allows for the
    error of the others' gap, which a slice of many rows needs.
    """
    totals = BinSums(*(part.sum(axis=0) for part in bins))
    n_all = float(effective.sum())
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
        n_own, n_others = float(counts.sum()), n_all - float(effective[group])
        accuracy = float(others.correct.sum()) / mass
        of_others = n_own**2 * accuracy * (1 - accuracy) / max(n_others, 1.0)
        z = max(abs(right - expected) - 0.5, 0.0) / math.sqrt(variance + of_others)
        exact = Coins.of_sums(n_own, expected, expected - variance).p_value(right)
        found.append(max(exact, 2 * float(ndtr(-z))))
    return np.array(found)
