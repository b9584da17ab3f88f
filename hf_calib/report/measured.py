"""One set of probabilities, measured: metrics, bins and classes, before or after calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from hf_calib.metrics import ConsistencyTest
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.corp import cross_fitted_errors, decompose
from hf_calib.metrics.intervals import (
    OfCounts,
    consistency_of_bins,
    consistency_of_top,
    interval_of_bins,
    resampled_values,
)
from hf_calib.metrics.kernel import kde_error
from hf_calib.metrics.ranking import area_of, mean_risk
from hf_calib.metrics.smooth import smooth_error
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.sums import (
    Binning,
    BinSums,
    Interval,
    binned_error,
    class_gaps,
    interval_of,
    uniform_edges,
    wilson_interval,
)
from hf_calib.report.chance import gap_interval, p_value
from hf_calib.report.rows import Group, Rows

# The kernel calibration error compares every pair of examples.
MAX_EXAMPLES_FOR_KDE = 2_000
# The most rows that all calls of a metric read which is called for each resample, so that it takes
# seconds.
_BUDGET = 1e7
_MOST_CALLS = 200
_FEWEST_CALLS = 50
# The fewest rows that are cross-fitted, in folds of 10 and more.
_FEWEST_SPLIT = 50
# Below them a t interval is wider than anything that it could say.
_FEWEST_DEGREES = 0.5
# The largest mean.
_MOST = {"brier": 2.0}


class Settings(NamedTuple):
    """Settings of all numbers in a report."""

    n_bins: int
    confidence_level: float = 0.95
    n_resamples: int = 1000
    seed: int = 0

    @property
    def upper(self) -> float:
        """The share of a two-sided interval's distribution that is below its upper end."""
        return (1 + self.confidence_level) / 2

    @property
    def z(self) -> float:
        """The standard errors to either end of a normal interval."""
        return float(ndtri(self.upper))

    @property
    def level(self) -> str:
        """The confidence level in words."""
        return f"{100 * self.confidence_level:g}%"

    @property
    def drawing(self) -> dict[str, Any]:
        """The options of functions that resample."""
        # Functions of bins know their number from the sums.
        options = self._asdict()
        del options["n_bins"]
        return options

    def of_mean(self, group: Group, name: str) -> Interval:
        """The mean NLL or Brier score of a group, with its t interval; of one row it has none."""
        found = self.t_interval(*group.mean_and_error(name), group.effective)
        if found.low is None:
            return found
        # A t interval is symmetric and knows no bounds.
        most = _MOST.get(name, math.inf)
        return found._replace(low=max(found.low, 0.0), high=min(found.high, most))

    def of_frequency(self, frequency: float, n: float) -> Interval:
        """A frequency among n rows, with Wilson's interval."""
        return Interval(frequency, *wilson_interval(frequency, n, self.z).tolist())

    def t_interval(self, mean: float, error: float, effective: float) -> Interval:
        """A mean of effective rows (Kish 1965); without ends if they are hardly one."""
        degrees = effective - 1
        if degrees < _FEWEST_DEGREES:
            return Interval(mean)
        reach = float(stdtrit(degrees, self.upper)) * error
        return Interval(mean, mean - reach, mean + reach)


# Whether rows have a metric


def _always(rows: Rows) -> bool:
    return True


def _with_classes(rows: Rows) -> bool:
    return rows.classes is not None


def _with_brier_parts(rows: Rows) -> bool:
    return rows.brier_parts is not None


def _without_weights(rows: Rows) -> bool:
    return rows.weights is None


def _if_sorted(rows: Rows) -> bool:
    return rows.are_sorted


def _if_split(rows: Rows) -> bool:
    return rows.are_sorted and len(rows) >= _FEWEST_SPLIT


def _if_paired(rows: Rows) -> bool:
    return rows.weights is None and 2 <= len(rows) <= MAX_EXAMPLES_FOR_KDE


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`: a metric with its title, its value and the kind of its interval.

    A mean has the quantiles of resamples or, of many or weighted rows, a normal interval. A
    frequency has Wilson's, and a "bootstrap" the quantiles of resamples, of few rows. A binned ECE
    ("inversion") has the errors of populations that are consistent with the sample. Other
    calibration errors have none: a resample adds the noise again.
    """

    title: str
    metric: str  # its name in `hf_calib.metrics`
    value: Callable[[Rows], float]
    applies_to: Callable[[Rows], bool] = _always  # whether rows have the metric
    interval: Literal["mean", "bootstrap", "inversion", "frequency", "none"] = "none"
    binning: Binning = "uniform"  # of a binned ECE


_ECE = "expected_calibration_error"
_BRIER_PARTS = "brier_decomposition"
_CORP = "corp_decomposition"
_SIDES = "confidence_errors"
_AURC = "area_under_risk_coverage"
_TOP = "Top label's Brier score"

ECE_INTERVALS = (
    "The interval of an ECE is for the error without noise, so the ECE may be above it."
)


def _mean(rows: Rows, name: str) -> float:
    mean, _ = rows.together.mean_and_error(name)
    return mean


def _ece(rows: Rows, binning: Binning = "uniform", **options: Any) -> float:
    # Quantile bins leave out the row with the smallest confidence, which counts in the total.
    found = binned_error(rows.bins(binning), rows.together.total, **options)
    return float(found)


def _area(rows: Rows) -> float:
    return mean_risk(rows.top) if rows.are_sorted else area_of(rows.by_confidence())


#: The metrics of a report: key -> `Measure`. Keys and titles are those of the trainer's log where
#: it has them.
MEASURES: dict[str, Measure] = {
    "accuracy": Measure(
        LOGGED_METRICS["accuracy"],
        "accuracy",
        lambda rows: _mean(rows, "accuracy"),
        interval="frequency",
    ),
    "nll": Measure(
        LOGGED_METRICS["nll"],
        "negative_log_likelihood",
        lambda rows: _mean(rows, "nll"),
        _with_classes,
        "mean",
    ),
    "brier": Measure(
        LOGGED_METRICS["brier"],
        "brier_score",
        lambda rows: _mean(rows, "brier"),
        _with_classes,
        "mean",
    ),
    "root_brier": Measure(
        "Root Brier score",
        "root_brier_score",
        lambda rows: math.sqrt(_mean(rows, "brier")),
        _with_classes,
        "mean",
    ),
    "brier_calibration": Measure(
        "Brier score, calibration part",
        _BRIER_PARTS,
        lambda rows: rows.brier_parts.calibration,
        _with_brier_parts,
    ),
    "brier_refinement": Measure(
        "Brier score, refinement part",
        _BRIER_PARTS,
        lambda rows: rows.brier_parts.refinement,
        _with_brier_parts,
    ),
    "corp_miscalibration": Measure(
        f"{_TOP}, miscalibration (CORP)",
        _CORP,
        lambda rows: decompose(rows.top).miscalibration,
        _if_sorted,
    ),
    "corp_discrimination": Measure(
        f"{_TOP}, discrimination (CORP)",
        _CORP,
        lambda rows: decompose(rows.top).discrimination,
        _if_sorted,
    ),
    "ece": Measure(LOGGED_METRICS["ece"], _ECE, _ece, interval="inversion"),
    "adaptive_ece": Measure(
        LOGGED_METRICS["adaptive_ece"],
        _ECE,
        lambda rows: _ece(rows, "quantile"),
        interval="inversion",
        binning="quantile",
    ),
    "ece_debiased": Measure(
        "ECE, equal mass, debiased",
        _ECE,
        lambda rows: _ece(rows, "equal_mass", debias=True),
        _if_sorted,
        # With or without debiasing, the error of the population is the same.
        "inversion",
        "equal_mass",
    ),
    "smooth_ece": Measure(
        "Smooth ECE",
        "smooth_calibration_error",
        lambda rows: smooth_error(rows.top),
        _without_weights,
    ),
    "kde_ece": Measure(
        "Kernel ECE",
        "kde_calibration_error",
        lambda rows: kde_error(rows.top),
        _if_paired,
    ),
    "classwise_ece": Measure(
        LOGGED_METRICS["classwise_ece"],
        "classwise_calibration_error",
        lambda rows: class_gaps(rows.classes.bins).mean(),
        _with_classes,
    ),
    "over_confidence": Measure(
        "Over-confidence, at least",
        _SIDES,
        lambda rows: cross_fitted_errors(rows.top).over,
        _if_split,
    ),
    "under_confidence": Measure(
        "Under-confidence, at least",
        _SIDES,
        lambda rows: cross_fitted_errors(rows.top).under,
        _if_split,
    ),
    "mce": Measure(
        LOGGED_METRICS["mce"],
        "maximum_calibration_error",
        lambda rows: _ece(rows, norm="max"),
    ),
    _AURC: Measure(
        "Area under the risk-coverage curve",
        _AURC,
        _area,
        _without_weights,
        "bootstrap",
    ),
}


@dataclass(frozen=True)
class BinRow:
    """The examples of one confidence bin, or of neighbouring bins."""

    lower: float
    upper: float
    count: int
    confidence: float  # mean confidence
    accuracy: float
    gap: float  # confidence - accuracy: above 0 is over-confident
    contribution: float  # |gap| count / N: these add up to the ECE
    p_value: float  # two-sided, for a true gap of 0

    @property
    def range(self) -> str:
        """The confidences of the bin in words."""
        return f"{self.lower:.3f} to {self.upper:.3f}"


@dataclass(frozen=True)
class ClassRow:
    """One class: its frequency and mean probability, and its predictions."""

    index: int
    name: str
    support: int  # examples of the class
    frequency: float  # support / N
    mean_probability: float  # over all N examples; equals the frequency if calibrated
    class_gap: float  # the class's term of the classwise calibration error
    predicted: int  # examples for which it is the most probable class
    # The fraction of these that are correct, and their mean confidence; None if there are none.
    precision: float | None
    confidence: float | None
    # Two-sided, for a true difference of 0 between confidence and precision.
    p_value: float
    # Two-sided, for a true difference of 0 between frequency and mean_probability.
    frequency_p_value: float

    @property
    def gap(self) -> float:
        """Confidence minus precision, above 0 if over-confident; 0 without predictions."""
        return (self.confidence or 0.0) - (self.precision or 0.0)


class Overall(NamedTuple):
    """Mean confidence minus accuracy, or mean probability minus prevalence, with its interval."""

    gap: float
    low: float
    high: float
    # Two-sided, if every confidence is the probability that the prediction is correct.
    p_value: float
    confidence: float
    accuracy: float
    n_examples: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A set of probabilities, measured from its rows.

    Metrics are those of `MEASURES`, or for multi-label data of `LABEL_MEASURES`, averaged as
    "macro_..." and "micro_...".
    """

    metrics: Mapping[str, Interval]
    # The resamples of each interval; slow metrics have fewer than asked for.
    n_resamples: Mapping[str, int]
    # The non-empty bins, from the lowest.
    bins: tuple[BinRow, ...]
    overall: Any  # an `Overall`
    # The test of the ECE; None for multi-label data.
    consistency: ConsistencyTest | None = None
    classes: tuple[ClassRow, ...] = ()  # Empty for multi-label data.
    labels: tuple[Any, ...] = ()  # The `LabelMeasurements` of multi-label data.
    rows: Rows | None = field(default=None, repr=False, compare=False)
    # (N, C), of multi-label data and of unweighted rows whose arrays are held anyway.
    probs: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def of_rows(
        cls, rows: Rows, names: tuple[str, ...], settings: Settings, probs: Any = None
    ) -> Measured:
        """Compute every metric that rows have."""
        metrics, n_resamples = measure_all(rows, settings)
        group = rows.together
        coins = group.scale * rows.coins
        counts = group.bins[0, 0]
        return cls(
            metrics=metrics,
            n_resamples=n_resamples,
            bins=bin_rows(group.uniform, coins, counts, group.scale),
            overall=_overall(group, coins.sum(axis=1), settings.z),
            consistency=_consistency(rows, settings),
            classes=class_rows(rows, names),
            rows=rows,
            probs=probs,
        )

    @property
    def effective(self) -> float | None:
        """The number of unweighted rows that weighted ones are worth; None without weights."""
        if self.rows is None or self.rows.weights is None:
            return None
        return self.rows.together.effective

    @property
    def are_resampled(self) -> bool:
        """Whether intervals of means are from resamples."""
        return self.rows is None or self.rows.are_resampled


def mean_change(
    values: Sequence[FloatArray], weights: FloatArray | None, settings: Settings
) -> Interval | None:
    """The mean of after - before over rows with weights (N,), or None without an after.

    Values are (N,) of each state; one row has no interval.
    """
    if len(values) == 1:
        return None
    before, after = values
    # Paired, because the rows are the same: what makes both large does not count as an error.
    change = after - before
    mean = float(np.average(change, weights=weights))
    variance = float(np.average((change - mean) ** 2, weights=weights))
    effective = float(len(change))
    if weights is not None:
        effective = float(weights.sum() ** 2 / (weights @ weights))
    # The mean of squares is divided by n - 1, as for an unbiased variance.
    error = math.sqrt(variance / max(effective - 1, _FEWEST_DEGREES))
    return settings.t_interval(mean, error, effective)


def _overall(group: Group, coins: FloatArray, z: float) -> Overall:
    """The gap of all rows with its score interval, from their coins (5,).

    The p-value is the larger one of an exact test and of the test that the interval inverts, so
    that test and interval agree.
    """
    _, stated, right = group.uniform
    confidence = float(stated.sum()) / group.total
    accuracy = float(right.sum()) / group.total
    effective = group.effective
    _, error = group.mean_and_error("gap")
    stated_variance = float(coins[2] + coins[4]) / effective
    found, variance = gap_interval(
        confidence,
        accuracy,
        stated=stated_variance,
        error=error,
        effective=effective,
        z=z,
    )
    # Coins are scaled as rows are, so that weights count as effective rows.
    p = p_value(coins, accuracy * effective)
    if variance > 0:
        error_at_0 = math.sqrt(variance / effective)
        p = max(p, 2 * float(ndtr(-abs(found.value) / error_at_0)))
    n_examples = int(group.n_rows()[0])
    return Overall(*found, p, confidence, accuracy, n_examples)


def _consistency(rows: Rows, settings: Settings) -> ConsistencyTest:
    """The test of the ECE, which draws correct rows or, of many or weighted rows, whole bins."""
    n = settings.n_resamples
    seed = settings.seed
    if rows.are_resampled:
        n_bins = settings.n_bins
        return consistency_of_top(rows.top, n_bins=n_bins, n_resamples=n, seed=seed)
    # Drawing every row would take minutes, and rows with weights are no draws.
    group = rows.together
    return consistency_of_bins(
        group.uniform, n_effective=group.effective, n_resamples=n, seed=seed
    )


def measure_all(
    rows: Rows, settings: Settings
) -> tuple[dict[str, Interval], dict[str, int]]:
    """The metrics that rows have, by key, and the numbers of resamples of their intervals."""
    found: dict[str, Interval] = {}
    n_resamples: dict[str, int] = {}
    group = rows.together
    draws = _draws(rows, settings) if rows.are_resampled else {}
    for key, measure in MEASURES.items():
        if not measure.applies_to(rows):
            continue
        # An unbiased estimate of what is at least 0 may be below.
        value = max(0.0, float(measure.value(rows)))
        interval = Interval(value)
        n_drawn = 0
        if measure.interval == "frequency":
            interval = settings.of_frequency(value, group.effective)
        elif measure.interval == "inversion":
            sums = group.scaled(rows.bins(measure.binning))
            interval = interval_of_bins(sums, **settings.drawing)._replace(value=value)
            n_drawn = settings.n_resamples
        elif key in draws:
            interval = interval_of(value, draws[key], settings.confidence_level)
            n_drawn = len(draws[key])
        elif measure.interval == "mean" and not rows.are_resampled:
            interval = _normal_mean(group, key, settings)
        found[key] = interval
        n_resamples[key] = n_drawn
    return found, n_resamples


def _draws(rows: Rows, settings: Settings) -> dict[str, FloatArray]:
    """The values of metrics in resamples, by key."""
    means = {"nll": rows.scores.nll, "brier": rows.scores.brier}
    # All means are of the same resamples, which take longer to draw than to read.
    draws = resampled_means(means, settings)
    if draws:
        draws["root_brier"] = np.sqrt(draws["brier"])
    # Each resample is sorted for the area, so it has fewer, and none if they are too few.
    n_rows = len(rows)
    n_calls = min(_MOST_CALLS, int(_BUDGET // n_rows))
    if n_rows == 1 or n_calls < _FEWEST_CALLS:
        return draws

    def area(counts: FloatArray) -> float:
        places = np.repeat(np.arange(n_rows), counts.astype(np.intp))
        return mean_risk(rows.top.part(places))

    n_resamples = min(settings.n_resamples, n_calls)
    (draws[_AURC],) = resampled_values(
        [area], n_rows, n_resamples=n_resamples, seed=settings.seed
    )
    return draws


def resampled_means(
    values: Mapping[str, FloatArray], settings: Settings
) -> dict[str, FloatArray]:
    """The means (B,) of the values (N,) of each key in B resamples of the rows."""
    n_rows = len(next(iter(values.values())))
    # Resamples of one row have no spread, which says nothing about other rows.
    if n_rows == 1:
        return {}
    draws = resampled_values(
        [_mean_of_counts(each) for each in values.values()],
        n_rows,
        n_resamples=settings.n_resamples,
        seed=settings.seed,
    )
    return dict(zip(values, draws, strict=True))


def _mean_of_counts(values: FloatArray) -> OfCounts:
    """The mean of a sample that contains each of the values (N,) counts (N,) times."""
    return lambda counts: float(counts @ values / counts.sum())


def _normal_mean(group: Group, key: str, settings: Settings) -> Interval:
    """A mean, or the root of one, with its t interval."""
    if key != "root_brier":
        return settings.of_mean(group, key)
    brier = settings.of_mean(group, "brier")
    roots: Any = [None if each is None else math.sqrt(each) for each in brier]
    return Interval(*roots)


def bin_rows(
    sums: BinSums, coins: FloatArray, n_rows: FloatArray, scale: float = 1.0
) -> tuple[BinRow, ...]:
    """The non-empty equal-width bins, from the lowest.

    Sums and coins (5, M) are of M bins with n_rows (M,). If the sums are weighted, scale is the
    effective rows per weight, which the coins have.
    """
    edges = uniform_edges(len(n_rows)).tolist()
    total = float(sums.counts.sum())
    rows = []
    for m in np.flatnonzero(sums.counts).tolist():
        mass, confidence, right = (float(part[m]) for part in sums)
        gap = (confidence - right) / mass
        row = BinRow(
            lower=edges[m],
            upper=edges[m + 1],
            count=int(n_rows[m]),
            # A sum of many confidences of 1 may be above their number by rounding.
            confidence=min(confidence / mass, 1.0),
            accuracy=right / mass,
            gap=gap,
            contribution=abs(gap) * mass / total,
            p_value=p_value(coins[:, m], right * scale),
        )
        rows.append(row)
    return tuple(rows)


def class_rows(rows: Rows, names: tuple[str, ...]) -> tuple[ClassRow, ...]:
    """One row per class; none if only the top label is known."""
    if rows.classes is None:
        return ()
    bins = rows.classes.bins
    total = rows.together.total
    scale = rows.together.scale
    # Weights of a class are shown as rows, of which the report has as many as there are.
    to_rows = len(rows) / total
    coins = scale * rows.classes.coins
    of_predicted = scale * rows.classes.predicted
    _, mass, stated, _, right = rows.groups.bins.sum(axis=2).tolist()
    true = bins.correct.sum(axis=1).tolist()
    probabilities = bins.confidence.sum(axis=1).tolist()
    gaps = class_gaps(bins).tolist()
    found = []
    for c, name in enumerate(names):
        # A class that is never predicted has neither, and 0 would look like an error.
        precision = None
        confidence = None
        if mass[c] > 0:
            precision = right[c] / mass[c]
            confidence = stated[c] / mass[c]
        row = ClassRow(
            index=c,
            name=name,
            support=round(true[c] * to_rows),
            frequency=true[c] / total,
            mean_probability=probabilities[c] / total,
            class_gap=gaps[c],
            predicted=round(mass[c] * to_rows),
            precision=precision,
            confidence=confidence,
            p_value=p_value(of_predicted[:, c], right[c] * scale),
            frequency_p_value=p_value(coins[:, c], true[c] * scale),
        )
        found.append(row)
    return tuple(found)
