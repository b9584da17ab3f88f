"""One set of probabilities, measured: what a report has of the state before and after calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

import hf_calib.metrics as metrics
from hf_calib.metrics import CalibrationState, ConsistencyTest
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.intervals import (
    METRICS,
    calibration_error_interval,
    consistency_of_bins,
    interval_of_bins,
    percentile_intervals,
)
from hf_calib.metrics.state import LOGGED_METRICS, GroupSums, score_chunks
from hf_calib.metrics.sums import BinSums, Interval, binned_error, class_gaps, uniform_bins, winners
from hf_calib.report.rows import BinRow, ClassRow, Coins, bin_rows, class_rows

MAX_EXAMPLES_FOR_KDE = 2_000  # the kernel calibration error compares every pair of examples
# Rows that a metric which is called for each resample may read in all of them: seconds, not minutes.
_BUDGET = 1e7
_MOST_CALLS, _FEWEST_CALLS = 200, 50


class Settings(NamedTuple):
    """Settings that every number of a report is computed with."""

    n_bins: int
    confidence_level: float = 0.95
    n_resamples: int = 1000
    seed: int = 0

    @property
    def drawing(self) -> dict[str, Any]:
        """The options of what resamples."""
        return {name: value for name, value in self._asdict().items() if name != "n_bins"}

    def normal(self, groups: GroupSums, name: str, group: int = 0) -> Interval:
        """The mean of one of the scores of a group, with its normal interval."""
        mean, error = (float(part[group]) for part in groups.mean(name))
        reach = float(ndtri((1 + self.confidence_level) / 2)) * error
        return Interval(mean, mean - reach, mean + reach)

    @property
    def level(self) -> str:
        """The confidence level in words."""
        return f"{100 * self.confidence_level:g}%"


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`: what is computed, what it is called, and how it gets its interval.

    An interval is the quantiles of resamples ("bootstrap"), or of a binned ECE the errors of the population that go
    with the sample ("inversion"). The other measures of mis-calibration have none: a resample adds the noise again.
    """

    title: str
    metric: str  # its name in `hf_calib.metrics`
    options: Mapping[str, Any] = field(default_factory=dict)
    binned: bool = False  # takes the report's number of bins
    part: str | None = None  # the field of what the metric returns
    interval: Literal["bootstrap", "inversion", "none"] = "none"
    n_examples: tuple[float, float] = (1, np.inf)  # left out of reports on fewer or more

    def value(self, probs: NDArray[Any], labels: NDArray[Any], n_bins: int, **weights: Any) -> float:
        """The metric of rows, at least 0, as an unbiased estimate need not be."""
        own = {"n_bins": n_bins} if self.binned else {}
        result = getattr(metrics, self.metric)(probs, labels, **self.options, **own, **weights)
        return max(0.0, float(result if self.part is None else getattr(result, self.part)))

    def n_resamples(self, n_examples: int, asked: int) -> int:
        """How many resamples are worth their time; 0 where too few are, or the metric has no interval."""
        if self.interval == "none":
            return 0
        if self.interval == "inversion" or METRICS[self.metric].sums is not None:
            return asked
        calls = min(_MOST_CALLS, int(_BUDGET // n_examples))
        return min(asked, calls) if calls >= _FEWEST_CALLS else 0


_ECE, _BRIER, _CORP = "expected_calibration_error", "brier_decomposition", "corp_decomposition"
_SIDES, _AURC = "confidence_errors", "area_under_risk_coverage"
_TOP = "Top label's Brier score"
_DEBIASED = {"binning": "equal_mass", "debias": True}
_SPLIT = (50, np.inf)  # in folds of 10 and more

#: The metrics of a report: key -> `Measure`. Keys and titles are those of the trainer's log where it has them.
MEASURES: dict[str, Measure] = {
    "accuracy": Measure(LOGGED_METRICS["accuracy"], "accuracy", interval="bootstrap"),
    "nll": Measure(LOGGED_METRICS["nll"], "negative_log_likelihood", interval="bootstrap"),
    "brier": Measure(LOGGED_METRICS["brier"], "brier_score", interval="bootstrap"),
    "root_brier": Measure("Root Brier score", "root_brier_score", interval="bootstrap"),
    "brier_calibration": Measure("Brier score, calibration part", _BRIER, binned=True, part="calibration"),
    "brier_refinement": Measure("Brier score, refinement part", _BRIER, binned=True, part="refinement"),
    "corp_miscalibration": Measure(f"{_TOP}, miscalibration (CORP)", _CORP, part="miscalibration"),
    "corp_discrimination": Measure(f"{_TOP}, discrimination (CORP)", _CORP, part="discrimination"),
    "ece": Measure(LOGGED_METRICS["ece"], _ECE, binned=True, interval="inversion"),
    "adaptive_ece": Measure(
        LOGGED_METRICS["adaptive_ece"], _ECE, {"binning": "quantile"}, binned=True, interval="inversion"
    ),
    "ece_debiased": Measure("ECE, equal mass, debiased", _ECE, _DEBIASED, binned=True, interval="inversion"),
    "ece_sweep": Measure("ECE, bins by sweep", "ece_sweep"),
    "smooth_ece": Measure("Smooth ECE", "smooth_calibration_error"),
    "kde_ece": Measure("Kernel ECE", "kde_calibration_error", n_examples=(2, MAX_EXAMPLES_FOR_KDE)),
    "classwise_ece": Measure(LOGGED_METRICS["classwise_ece"], "classwise_calibration_error", binned=True),
    "over_confidence": Measure("Over-confidence, at least", _SIDES, part="over", n_examples=_SPLIT),
    "under_confidence": Measure("Under-confidence, at least", _SIDES, part="under", n_examples=_SPLIT),
    "mce": Measure(LOGGED_METRICS["mce"], "maximum_calibration_error", binned=True),
    _AURC: Measure("Area under the risk-coverage curve", _AURC, interval="bootstrap"),
}
# Of rows with weights, what has a weighted form beside what their sums tell.
_OF_WEIGHTS = ("brier_calibration", "brier_refinement")


class Overall(NamedTuple):
    """Mean confidence minus accuracy, with its interval; of several labels mean probability minus prevalence."""

    gap: float
    low: float
    high: float
    p_value: float  # of such a gap, either way, if every confidence is the chance to be right
    confidence: float
    accuracy: float
    n_examples: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A set of probabilities, measured from its rows or from sums of them.

    Metrics are those of `MEASURES`, or for several labels a row of `LABEL_MEASURES`, averaged as "macro_..." and
    "micro_...". Rows without weights that are held come with it, else the sums.
    """

    metrics: Mapping[str, Interval]
    n_resamples: Mapping[str, int]  # that an interval is from; fewer than asked for where that is slow
    bins: tuple[BinRow, ...]  # those that hold examples, from the lowest
    overall: Any  # an `Overall`
    consistency: ConsistencyTest | None = None  # of the ECE; None for several labels
    classes: tuple[ClassRow, ...] = ()  # none for several labels
    labels: tuple[Any, ...] = ()  # of several labels a row, a `LabelMeasurements` each
    state: CalibrationState | None = field(default=None, repr=False, compare=False)
    probs: Any = field(default=None, repr=False, compare=False)  # (N, C)

    @classmethod
    def of_rows(
        cls,
        probs: NDArray[Any],
        labels: NDArray[np.int64],
        names: tuple[str, ...],
        settings: Settings,
        weights: FloatArray | None = None,
    ) -> Measured:
        """Every metric of rows; with weights those that have a weighted form."""
        n_bins, _, n, seed = settings
        state = CalibrationState(n_classes=len(names), n_bins=n_bins)
        for _, scores in score_chunks(probs, labels, weights):
            state.add_scores(scores)
        if weights is not None:
            found = cls.of_state(state, names, settings)
            parts = [MEASURES[key].value(probs, labels, n_bins, sample_weight=weights) for key in _OF_WEIGHTS]
            more = dict(zip(_OF_WEIGHTS, map(Interval, parts), strict=True))
            return replace(found, metrics={**found.metrics, **more})
        confidences, predicted = winners(probs)
        coins = {
            "overall": Coins.of(confidences),
            "bins": Coins.of(confidences, uniform_bins(confidences, n_bins), n_bins),
            "predicted": Coins.of(confidences, predicted, len(names)),
            "classes": Coins.of(probs),
        }
        values, n_resamples = measure_all(probs, labels, settings)
        return cls(
            metrics=values,
            n_resamples=n_resamples,
            consistency=metrics.consistency_test(probs, labels, n_resamples=n, seed=seed, n_bins=n_bins),
            probs=probs,
            **_tables(state, names, coins, settings),
        )

    @classmethod
    def of_state(cls, state: CalibrationState, names: tuple[str, ...], settings: Settings) -> Measured:
        """Every metric that sums tell, also those of weights."""
        top, bins, by_class = state.top_label, state.bins, state.classes()
        total, effective = float(bins.counts.sum()), float(top.effective_rows()[0])
        scale, (_, _, n, seed) = effective / total, settings
        found = {name: settings.normal(top, name) for name in ("accuracy", "nll", "brier")}
        found["root_brier"] = Interval(*np.sqrt(np.maximum(found["brier"], 0)).tolist())
        for name, sums in (("ece", bins), ("adaptive_ece", state.equal_mass_bins())):
            found[name] = interval_of_bins(BinSums(*(part * scale for part in sums)), **settings.drawing)
        found["classwise_ece"] = Interval(float(np.mean(class_gaps(state.class_bins()))))
        found["mce"] = Interval(float(binned_error(bins, total, "max")))
        if not state.weighted:
            found["area_under_risk_coverage"] = Interval(state.area_under_risk_coverage())
        stated = np.stack([bins.counts, bins.confidence, top.bins[3, 0]]) * scale
        coins = {
            "overall": Coins.of_sums(*stated.sum(axis=1).tolist()),
            "bins": Coins.of_sums(*stated),
            "predicted": Coins.of_sums(*(by_class[[3, 5, 6]] * scale)),
            "classes": Coins.of_sums(effective, *(by_class[[1, 2]] * scale)),
        }
        return cls(
            metrics=found,
            n_resamples=dict.fromkeys(("ece", "adaptive_ece"), n),
            consistency=consistency_of_bins(bins, n_effective=effective, n_resamples=n, seed=seed),
            state=state,
            **_tables(state, names, coins, settings),
        )


def _tables(
    state: CalibrationState, names: tuple[str, ...], coins: Mapping[str, Coins], settings: Settings
) -> dict[str, Any]:
    """The whole, the bins and the classes of a state, with the coins of each.

    The interval of the whole is of the paired difference, so that what both share cancels. The test is of the variance
    under calibration: where all confidences are high and few errors were drawn, that of the sample is far too small.
    """
    top, bins = state.top_label, state.bins
    total, stated, right = (float(part.sum()) for part in bins)
    scale = float(top.effective_rows()[0]) / total
    gap, low, high = settings.normal(top, "gap")
    if state.n_rows == 1:
        low, high = gap - 1, gap + 1
    p_value = coins["overall"].p_value(right * scale)
    return {
        "overall": Overall(gap, low, high, p_value, stated / total, right / total, state.n_rows),
        "bins": bin_rows(bins, coins["bins"], counts=top.bins[0, 0], scale=scale),
        "classes": class_rows(state, names, coins["predicted"], coins["classes"], scale),
    }


def measure_all(
    probs: NDArray[Any], labels: NDArray[Any], settings: Settings, measures: Mapping[str, Measure] = MEASURES
) -> tuple[dict[str, Interval], dict[str, int]]:
    """Every metric that the number of examples allows, with its interval, by key; and its number of resamples."""
    n_rows, n_bins = len(probs), settings.n_bins
    asked = {k: each for k, each in measures.items() if each.n_examples[0] <= n_rows <= each.n_examples[1]}
    n_resamples = {key: each.n_resamples(n_rows, settings.n_resamples) for key, each in asked.items()}
    found: dict[str, Interval] = {}
    for n in set(n_resamples.values()) - {0}:
        keys = [key for key in asked if asked[key].interval == "bootstrap" and n_resamples[key] == n]
        options = [(asked[key].metric, dict(asked[key].options)) for key in keys]
        intervals = percentile_intervals(options, probs, labels, **settings._replace(n_resamples=n).drawing)
        found |= dict(zip(keys, intervals, strict=True))
    for key in asked.keys() - found.keys():
        found[key] = Interval(asked[key].value(probs, labels, n_bins))
        if asked[key].interval == "inversion":
            # With or without debiasing, the error of the population is the same.
            bins: Any = {"n_bins": n_bins, "binning": asked[key].options.get("binning", "uniform")}
            interval = calibration_error_interval(probs, labels, **bins, **settings.drawing)
            found[key] = interval._replace(value=found[key].value)
    return {key: found[key] for key in asked}, n_resamples
