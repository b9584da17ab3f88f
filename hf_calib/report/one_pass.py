"""The report of one pass over rows that are not held, or that have weights: from sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from hf_calib.metrics import CalibrationState
from hf_calib.metrics.intervals import consistency_of_bins, interval_of_bins
from hf_calib.metrics.sums import BinSums, Interval, binned_error, class_gaps, uniform_edges
from hf_calib.report.any_report import AnyReport
from hf_calib.report.assessment import Measurements, Overall
from hf_calib.report.coins import Coins
from hf_calib.report.diagnosis import of_states, warnings_about_sums
from hf_calib.report.measures import MEASURES, Settings
from hf_calib.report.record import measurements_record
from hf_calib.report.slices import SliceSection
from hf_calib.report.tables import BinRow, ClassRow, p_cell
from hf_calib.report.text import (
    columns,
    with_interval,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_PASS = "one_pass"  # the kind of a record
_MOST_CLASSES_DRAWN = 10_000
CAPTIONS = {
    "reliability": "Reliability in bins: accuracy against confidence, and the share of examples in each bin.",
    "risk_coverage": "Error rate among the most confident predictions, against the share of them that is kept.",
    "classwise": "How often a class is true against its probability, in bins with 95% Wilson intervals.",
}


class FromSums(NamedTuple):
    """The measurements of a state, and the confidence below which half of its rows lie."""

    measured: Measurements
    median: float


@dataclass(frozen=True, kw_only=True)
class OnePassReport(AnyReport):
    """The calibration of rows that were read once, from `CalibrationState`s; made by `report_on_states`.

    Args:
        state: of the probabilities as the model gives them.
        state_after: of the calibrated ones, or None.
        medians: the median confidences, before and after.
        n_files: that were read; None where it was no file.
    """

    state: CalibrationState = field(repr=False, compare=False)
    state_after: CalibrationState | None = field(default=None, repr=False, compare=False)
    medians: tuple[float, ...] = ()
    n_files: int | None = None

    @property
    def n_examples(self) -> int:
        """N."""
        return self.state.n_rows

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Sentences: over- or under-confident, where, whether chance can explain it, and which slices differ."""
        return (*of_states(self), *(each.sentences()[0] for each in self.slices))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences: the caveats, what makes the numbers uncertain."""
        return (*self.notes, *warnings_about_sums(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything but figures, of JSON's own types; None where there is no number."""
        states = (self.before, self.after)
        measured = {
            name: None if state is None else measurements_record(state, self)
            for name, state in zip(("before", "after"), states, strict=True)
        }
        return {
            "kind": ONE_PASS,
            "name": self.name,
            "n_examples": self.n_examples,
            "n_classes": self.n_classes,
            "n_bins": self.n_bins,
            "n_files": self.n_files,
            "weighted": self.state.weighted,
            "effective_rows": float(self.state.top_label.effective_rows()[0]),
            "median_confidence": list(self.medians),
            "confidence_level": float(self.confidence_level),
            "n_resamples": int(self.n_resamples),
            "seed": int(self.seed),
            **measured,
            "diagnosis": list(self.diagnosis),
            "warnings": list(self.warnings),
            "slices": [section.to_dict() for section in self.slices],
            "about": dict(self.about),
        }

    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name, drawn when this is called; see `hf_calib.plots` for each."""
        from hf_calib.plots.binned import reliability_of_sums
        from hf_calib.plots.classes import classes_of_sums
        from hf_calib.plots.curves import risk_coverage_of_curves

        states = columns(self.state, self.state_after)
        if self.state_after is None:
            states = {self.name: self.state}
        final = self.state_after or self.state
        rows = {name: state.n_rows for name, state in states.items()}
        found = {
            "reliability": reliability_of_sums(
                {"": {name: state.bins for name, state in states.items()}}, n_rows=rows
            ),
            "risk_coverage": risk_coverage_of_curves(
                {name: state.risk_coverage() for name, state in states.items()}
            ),
        }
        if self.n_classes <= _MOST_CLASSES_DRAWN:
            found["classwise"] = classes_of_sums(final.class_bins(), self.class_names)
        return found | {f"slices_{each.column}": each.figure() for each in self.slices}

    def summary(self) -> str:
        files = "" if self.n_files is None else f" in {self.n_files:,} file{'s' * (self.n_files != 1)}"
        weights = ""
        if self.state.weighted:
            effective = float(self.state.top_label.effective_rows()[0])
            weights = f", weighted: they tell as much as {effective:,.0f} without weights"
        return (
            f"{self.n_examples:,} examples{files}{weights}, {self.n_classes:,} classes, {self.n_bins} bins; intervals "
            f"of {100 * self.confidence_level:g}%, seed {self.seed}. In one pass."
        )

    def metric_table(self) -> tuple[list[str], list[list[str]]]:
        states = columns(self.before, self.after)
        rows = [
            [
                MEASURES[key].title,
                *(with_interval(*state.metrics[key]) for state in states.values()),
                self._how(key),
            ]
            for key in self.before.metrics
        ]
        tests = [state.consistency.p_value for state in states.values() if state.consistency is not None]
        rows.append(["Consistency test of the ECE (p)", *map(p_cell, tests), "from the sums of the bins"])
        return ["metric", *states, "how"], rows

    @staticmethod
    def _how(key: str) -> str:
        return "from cells" if key in ("adaptive_ece", "area_under_risk_coverage") else "exact"

    def footnotes(self) -> list[str]:
        medians = " and ".join(f"{median:.4f}" for median in self.medians)
        notes = [
            "Exact: from sums over all rows. From cells: confidences are counted in 98,304 cells, and those of one "
            f"cell are not told apart. Median confidence: {medians}.",
            "The interval of an ECE is of the error without noise, in the same bins, by test inversion; those of "
            "accuracy, NLL and Brier score are normal. The other errors have no interval.",
            "Not here, as they need the rows at once: the smooth and the kernel ECE, that of bins by sweep, debiased "
            "errors, and the post-processing gap.",
            "A gap is confidence minus accuracy: above 0 is over-confident. p is the chance of a gap at least as large "
            "if the confidences were right.",
        ]
        if self.state.weighted:
            notes.append(
                "With weights, intervals and tests are for (sum of weights)^2 / (sum of squared weights) rows (Kish "
                "1965). The area under the risk-coverage curve has no weighted form. Examples of a bin are rows; those "
                "of a class are weights, scaled to the number of rows."
            )
        return notes

    def alt_texts(self) -> dict[str, str]:
        worst = max(self.final.classes, key=lambda row: row.class_gap)
        errors = ", ".join(
            f"{state.metrics['ece'].value:.4f}" for state in (self.before, self.after) if state
        )
        return {
            "reliability": f"Reliability diagram. ECE {errors}.",
            "risk_coverage": f"Risk-coverage curve. Error rate {1 - self.final.metrics['accuracy'].value:.3f}.",
            "classwise": f"Reliability of single classes. Largest class gap: {worst.name}, {worst.class_gap:.4f}.",
        }

    def captions(self) -> dict[str, str]:
        return dict(CAPTIONS)


def report_on_states(
    state: CalibrationState,
    *,
    after: CalibrationState | None = None,
    class_names: tuple[str, ...] | None = None,
    name: str = "model",
    slices: tuple[SliceSection, ...] = (),
    n_files: int | None = None,
    notes: tuple[str, ...] = (),
    confidence_level: float = 0.95,
    seed: int = 0,
) -> OnePassReport:
    """The report on rows that were summed, also after a calibration.

    Args:
        state: with rows.
        after: of the same rows, calibrated by a map that was fitted on others; or None.
        class_names: C names; default "0", "1", ...
        name: of the model, for titles.
        slices: see `slice_section`.
        n_files: that the rows are from.
        notes: for the caveats.
        confidence_level: of the intervals.
        seed: of those by test inversion.

    Raises:
        ValueError: if a state has no rows.

    >>> state = CalibrationState(n_classes=2)
    >>> state.update(np.tile([[0.9, 0.1], [0.2, 0.8]], (50, 1)), np.tile([0, 0], 50))
    >>> report_on_states(state).diagnosis[0]
    'Overall over-confident: mean confidence 0.850, accuracy 0.500 (difference +0.350, ...).'
    """
    names = class_names or tuple(map(str, range(state.n_classes)))
    settings = Settings(state.n_bins, confidence_level, 1000, seed)
    found = [measure_state(each, names, settings) for each in (state, after) if each is not None]
    return OnePassReport(
        name=name,
        class_names=names,
        before=found[0].measured,
        after=None if after is None else found[1].measured,
        n_bins=state.n_bins,
        confidence_level=confidence_level,
        n_resamples=settings.n_resamples,
        seed=seed,
        notes=notes,
        state=state,
        state_after=after,
        medians=tuple(each.median for each in found),
        slices=slices,
        n_files=n_files,
    )


def measure_state(state: CalibrationState, names: tuple[str, ...], settings: Settings) -> FromSums:
    """Every metric that sums tell, with its interval."""
    top, bins = state.top_label, state.bins
    total, effective = float(bins.counts.sum()), float(top.effective_rows()[0])
    scale = effective / total
    z = float(ndtri((1 + settings.confidence_level) / 2))

    def normal(value: float, error: float) -> Interval:
        return Interval(value, value - z * error, value + z * error)

    def inverted(sums: BinSums) -> Interval:
        return interval_of_bins(
            BinSums(*(part * scale for part in sums)),
            n_resamples=settings.n_resamples,
            confidence_level=settings.confidence_level,
            seed=settings.seed,
        )

    means = {
        name: [float(part[0]) for part in top.mean(name)] for name in ("accuracy", "nll", "brier", "gap")
    }
    metrics = {
        **{name: normal(*means[name]) for name in ("accuracy", "nll", "brier")},
        "ece": inverted(bins),
        "adaptive_ece": inverted(state.equal_mass_bins()),
        "classwise_ece": Interval(float(np.mean(class_gaps(state.class_bins())))),
        "mce": Interval(float(binned_error(bins, total, "max"))),
    }
    if not state.weighted:
        metrics["area_under_risk_coverage"] = Interval(state.area_under_risk_coverage())
    gap, error = means["gap"]
    squares = top.bins[3, 0]
    right, stated = float(bins.correct.sum()), float(bins.confidence.sum())
    coins = Coins.of_sums(effective, stated * scale, float(squares.sum()) * scale)
    measured = Measurements(
        metrics=metrics,
        n_resamples=dict.fromkeys(metrics, 0) | dict.fromkeys(("ece", "adaptive_ece"), settings.n_resamples),
        bins=_bin_rows(state, squares, scale),
        overall=Overall(
            *(gap, gap - z * error, gap + z * error),
            p_value=coins.p_value(right * scale),
            confidence=stated / total,
            accuracy=right / total,
            n_examples=state.n_rows,
        ),
        consistency=consistency_of_bins(
            bins, n_effective=effective, n_resamples=settings.n_resamples, seed=settings.seed
        ),
        classes=_class_rows(state, names, scale),
    )
    return FromSums(measured, state.confidence_quantile(0.5))


def _bin_rows(state: CalibrationState, squares: Any, scale: float) -> tuple[BinRow, ...]:
    bins, rows = state.bins, state.top_label.bins[0, 0]
    edges, total = uniform_edges(state.n_bins), float(bins.counts.sum())
    found = []
    for m in np.flatnonzero(bins.counts > 0):
        mass, confidence, right = (float(part[m]) for part in bins)
        coins = Coins.of_sums(mass * scale, confidence * scale, float(squares[m]) * scale)
        found.append(
            BinRow(
                lower=float(edges[m]),
                upper=float(edges[m + 1]),
                count=int(rows[m]),
                confidence=min(confidence / mass, 1.0),
                accuracy=right / mass,
                gap=(confidence - right) / mass,
                contribution=abs(confidence - right) / total,
                p_value=coins.p_value(right * scale),
            )
        )
    return tuple(found)


def _class_rows(state: CalibrationState, names: tuple[str, ...], scale: float) -> tuple[ClassRow, ...]:
    sums, total = state.classes(), float(state.bins.counts.sum())
    gaps, to_rows = class_gaps(state.class_bins()), state.n_rows / total
    rows = []
    for c, name in enumerate(names):
        true, probability, squares, predicted, right, confidence, confidence_squares = (
            float(part[c]) for part in sums
        )
        of_predictions = Coins.of_sums(
            *(part * scale for part in (predicted, confidence, confidence_squares))
        )
        of_class = Coins.of_sums(*(part * scale for part in (total, probability, squares)))
        rows.append(
            ClassRow(
                index=c,
                name=name,
                support=round(true * to_rows),
                frequency=true / total,
                mean_probability=probability / total,
                class_gap=float(gaps[c]),
                predicted=round(predicted * to_rows),
                precision=right / predicted if predicted else None,
                confidence=confidence / predicted if predicted else None,
                p_value=of_predictions.p_value(right * scale) if predicted else 1.0,
                frequency_p_value=of_class.p_value(true * scale),
            )
        )
    return tuple(rows)
