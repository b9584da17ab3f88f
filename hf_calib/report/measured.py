"""One set of probabilities, measured: metrics, bins and classes of a report, before or after calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import metadata
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
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
from hf_calib.metrics.state import LOGGED_METRICS, GroupSums
from hf_calib.metrics.sums import (
    Binning,
    BinSums,
    Interval,
    TopLabel,
    binned_error,
    class_gaps,
    interval_of,
    uniform_edges,
    wilson_interval,
)
from hf_calib.report.chance import Coins, gap_interval
from hf_calib.report.rows import MOST_SORTED, Rows

# The kernel calibration error compares every pair of examples.
MAX_EXAMPLES_FOR_KDE = 2_000
# The most rows that all calls of a metric read which is called for each resample, so that it takes seconds.
_BUDGET = 1e7
_MOST_CALLS = 200
_FEWEST_CALLS = 50
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
    def z(self) -> float:
        """The standard errors to either end of a normal interval."""
        return float(ndtri((1 + self.confidence_level) / 2))

    @property
    def drawing(self) -> dict[str, Any]:
        """The options of functions that resample."""
        return {
            name: value for name, value in self._asdict().items() if name != "n_bins"
        }

    def of_mean(self, groups: GroupSums, name: str, group: int = 0) -> Interval:
        """The mean NLL or Brier score of a group, with its t interval; of one row it has none."""
        mean, error = (float(part[group]) for part in groups.mean(name))
        effective = float(groups.effective_rows()[group])
        return self.t_interval(mean, error, effective, most=_MOST.get(name, math.inf))

    def of_frequency(self, frequency: float, n: float) -> Interval:
        """A frequency among n rows, with Wilson's interval."""
        return Interval(frequency, *wilson_interval(frequency, n, self.z).tolist())

    def t_interval(
        self,
        mean: float,
        error: float,
        effective: float,
        *,
        least: float = 0.0,
        most: float = math.inf,
    ) -> Interval:
        """A mean of effective rows (Kish 1965) with a standard error; without ends if they are hardly one."""
        degrees = effective - 1
        if degrees < _FEWEST_DEGREES:
            return Interval(mean)
        reach = float(stdtrit(degrees, (1 + self.confidence_level) / 2)) * error
        return Interval(mean, max(mean - reach, least), min(mean + reach, most))

    @property
    def level(self) -> str:
        """The confidence level in words."""
        return f"{100 * self.confidence_level:g}%"


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`: a metric with its title, its value and the kind of its interval.

    A mean has the quantiles of resamples or, of many or weighted rows, a normal interval. A frequency has Wilson's, and
    a "bootstrap" the quantiles of resamples, of few rows. A binned ECE ("inversion") has the errors of populations that
    are consistent with the sample. Other calibration errors have none: a resample adds the noise again.
    """

    title: str
    metric: str  # its name in `hf_calib.metrics`
    value: Callable[[Rows], float]
    interval: Literal["mean", "bootstrap", "inversion", "frequency", "none"] = "none"
    binning: Binning = "uniform"  # of a binned ECE
    weighted: bool = False  # has a form for rows with weights
    of_top: bool = True  # reads no more than the top label
    # Reports on fewer or more examples leave the metric out.
    n_examples: tuple[float, float] = (1, np.inf)

    @property
    def page(self) -> str:
        """The address of the metric's entry in the documentation; "" if the package names no such site."""
        urls = metadata("hf_calib").get_all("Project-URL") or []
        site = dict(each.split(", ") for each in urls)
        if "Documentation" not in site:
            return ""
        is_error = "error" in self.metric or self.metric.startswith("ece")
        page = "errors" if is_error else "scores"
        home = site["Documentation"].rstrip("/")
        return f"{home}/reference/metrics/{page}.html#hf_calib.metrics.{self.metric}"

    def applies_to(self, rows: Rows) -> bool:
        """Whether rows have the metric."""
        fewest, most = self.n_examples
        if not fewest <= len(rows) <= most:
            return False
        if self.metric == _BRIER_PARTS and rows.brier_parts is None:
            return False
        has_form = self.weighted or rows.weights is None
        return has_form and (self.of_top or rows.classes is not None)


_ECE = "expected_calibration_error"
_BRIER_PARTS = "brier_decomposition"
_CORP = "corp_decomposition"
_SIDES = "confidence_errors"
_AURC = "area_under_risk_coverage"
_TOP = "Top label's Brier score"
_FEW = (1, MOST_SORTED)
# Cross-fitting needs folds of 10 and more.
_SPLIT = (50, MOST_SORTED)

ECE_INTERVALS = (
    "The interval of an ECE is for the error without noise, so the ECE may be above it."
)


def _root_brier(rows: Rows) -> float:
    return math.sqrt(rows.mean("brier"))


def _ece(rows: Rows, binning: Binning = "uniform", **options: Any) -> float:
    # Quantile bins leave out the row with the smallest confidence, which counts in the total.
    return float(binned_error(rows.bins(binning), rows.total, **options))


def _area(rows: Rows) -> float:
    return mean_risk(rows.top) if rows.are_sorted else area_of(rows.by_confidence())


def _brier_part(rows: Rows, part: str) -> float:
    return float(getattr(rows.brier_parts, part))


def _classwise(rows: Rows) -> float:
    classes: Any = rows.classes
    return float(np.mean(class_gaps(classes.bins)))


#: The metrics of a report: key -> `Measure`. Keys and titles are those of the trainer's log where it has them.
MEASURES: dict[str, Measure] = {
    "accuracy": Measure(
        LOGGED_METRICS["accuracy"],
        "accuracy",
        lambda rows: rows.mean("accuracy"),
        interval="frequency",
        weighted=True,
    ),
    "nll": Measure(
        LOGGED_METRICS["nll"],
        "negative_log_likelihood",
        lambda rows: rows.mean("nll"),
        interval="mean",
        weighted=True,
        of_top=False,
    ),
    "brier": Measure(
        LOGGED_METRICS["brier"],
        "brier_score",
        lambda rows: rows.mean("brier"),
        interval="mean",
        weighted=True,
        of_top=False,
    ),
    "root_brier": Measure(
        "Root Brier score",
        "root_brier_score",
        _root_brier,
        interval="mean",
        weighted=True,
        of_top=False,
    ),
    "brier_calibration": Measure(
        "Brier score, calibration part",
        _BRIER_PARTS,
        lambda rows: _brier_part(rows, "calibration"),
        weighted=True,
        of_top=False,
    ),
    "brier_refinement": Measure(
        "Brier score, refinement part",
        _BRIER_PARTS,
        lambda rows: _brier_part(rows, "refinement"),
        weighted=True,
        of_top=False,
    ),
    "corp_miscalibration": Measure(
        f"{_TOP}, miscalibration (CORP)",
        _CORP,
        lambda rows: decompose(rows.top).miscalibration,
        n_examples=_FEW,
    ),
    "corp_discrimination": Measure(
        f"{_TOP}, discrimination (CORP)",
        _CORP,
        lambda rows: decompose(rows.top).discrimination,
        n_examples=_FEW,
    ),
    "ece": Measure(
        LOGGED_METRICS["ece"], _ECE, _ece, interval="inversion", weighted=True
    ),
    "adaptive_ece": Measure(
        LOGGED_METRICS["adaptive_ece"],
        _ECE,
        lambda rows: _ece(rows, "quantile"),
        interval="inversion",
        binning="quantile",
        weighted=True,
    ),
    "ece_debiased": Measure(
        "ECE, equal mass, debiased",
        _ECE,
        lambda rows: _ece(rows, "equal_mass", debias=True),
        # With or without debiasing, the error of the population is the same.
        interval="inversion",
        binning="equal_mass",
        n_examples=_FEW,
    ),
    "smooth_ece": Measure(
        "Smooth ECE", "smooth_calibration_error", lambda rows: smooth_error(rows.top)
    ),
    "kde_ece": Measure(
        "Kernel ECE",
        "kde_calibration_error",
        lambda rows: kde_error(rows.top),
        n_examples=(2, MAX_EXAMPLES_FOR_KDE),
    ),
    "classwise_ece": Measure(
        LOGGED_METRICS["classwise_ece"],
        "classwise_calibration_error",
        _classwise,
        weighted=True,
        of_top=False,
    ),
    "over_confidence": Measure(
        "Over-confidence, at least",
        _SIDES,
        lambda rows: cross_fitted_errors(rows.top).over,
        n_examples=_SPLIT,
    ),
    "under_confidence": Measure(
        "Under-confidence, at least",
        _SIDES,
        lambda rows: cross_fitted_errors(rows.top).under,
        n_examples=_SPLIT,
    ),
    "mce": Measure(
        LOGGED_METRICS["mce"],
        "maximum_calibration_error",
        lambda rows: _ece(rows, norm="max"),
        weighted=True,
    ),
    _AURC: Measure(
        "Area under the risk-coverage curve",
        _AURC,
        _area,
        interval="bootstrap",
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


@dataclass(frozen=True)
class ClassRow:
    """One class: its frequency, its mean probability, and the confidence and precision of its predictions."""

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
        """Confidence minus precision of the predictions, above 0 if over-confident; 0 if there are none."""
        return (self.confidence or 0.0) - (self.precision or 0.0)


class Overall(NamedTuple):
    """Mean confidence minus accuracy (multi-label: mean probability minus prevalence), with its interval."""

    gap: float
    low: float
    high: float
    p_value: float  # two-sided, if every confidence is the probability that the prediction is correct
    confidence: float
    accuracy: float
    n_examples: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A set of probabilities, measured from its rows.

    Metrics are those of `MEASURES`, or for multi-label data of `LABEL_MEASURES`, averaged as "macro_..." and
    "micro_...".
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
        found, n_resamples = measure_all(rows, settings)
        coins = rows.coins.times(rows.scale)
        bins = bin_rows(
            rows.bins("uniform"),
            coins,
            counts=rows.together.bins[0, 0],
            scale=rows.scale,
        )
        return cls(
            metrics=found,
            n_resamples=n_resamples,
            bins=bins,
            overall=_overall(rows, coins.total(), settings.z),
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
        return self.rows.effective

    @property
    def are_resampled(self) -> bool:
        """Whether intervals of means are from resamples."""
        return self.rows is None or self.rows.are_resampled


def mean_change(
    before: FloatArray,
    after: FloatArray,
    weights: FloatArray | None,
    settings: Settings,
) -> Interval:
    """The mean of after - before over rows (N,) with weights (N,), with its paired t interval; none for one row."""
    change = after - before
    mean = float(np.average(change, weights=weights))
    variance = float(np.average((change - mean) ** 2, weights=weights))
    effective = float(len(change))
    if weights is not None:
        effective = float(weights.sum() ** 2 / (weights @ weights))
    error = math.sqrt(variance / max(effective - 1, _FEWEST_DEGREES))
    return settings.t_interval(mean, error, effective, least=-math.inf)


def _overall(rows: Rows, coins: Coins, z: float) -> Overall:
    """The gap with its score interval.

    The p-value is the larger one of an exact test and of the test that the interval inverts, so that test and interval
    agree.
    """
    _, stated, right = rows.bins("uniform")
    confidence = float(stated.sum()) / rows.total
    accuracy = float(right.sum()) / rows.total
    effective = rows.effective
    _, errors = rows.together.mean("gap")
    found, variance = gap_interval(
        confidence,
        accuracy,
        stated=coins.variance / effective,
        error=float(errors[0]),
        effective=effective,
        z=z,
    )
    p_value = coins.p_value(accuracy * effective)
    if variance > 0:
        error_at_0 = math.sqrt(variance / effective)
        of_normal = 2 * float(ndtr(-abs(found.value) / error_at_0))
        p_value = max(p_value, of_normal)
    return Overall(*found, p_value, confidence, accuracy, len(rows))


def _consistency(rows: Rows, settings: Settings) -> ConsistencyTest:
    """The test of the ECE, which draws the correctness of each row or, of many or weighted rows, of each bin."""
    n = settings.n_resamples
    seed = settings.seed
    if rows.are_resampled:
        return consistency_of_top(
            rows.top, n_bins=rows.n_bins, n_resamples=n, seed=seed
        )
    bins = rows.bins("uniform")
    return consistency_of_bins(
        bins, n_effective=rows.effective, n_resamples=n, seed=seed
    )


def measure_all(
    rows: Rows, settings: Settings
) -> tuple[dict[str, Interval], dict[str, int]]:
    """The metrics that rows have, with intervals, by key; and the numbers of resamples of the intervals."""
    found: dict[str, Interval] = {}
    n_resamples: dict[str, int] = {}
    for key, measure in MEASURES.items():
        if not measure.applies_to(rows):
            continue
        # An unbiased estimate of what is at least 0 may be below.
        value = max(0.0, float(measure.value(rows)))
        found[key] = Interval(value)
        n_resamples[key] = 0
        if measure.interval == "frequency":
            found[key] = settings.of_frequency(value, rows.effective)
        if measure.interval == "inversion":
            sums = rows.bins(measure.binning)
            scaled = BinSums(*(part * rows.scale for part in sums))
            interval = interval_of_bins(scaled, **settings.drawing)
            found[key] = interval._replace(value=value)
            n_resamples[key] = settings.n_resamples
    means = _means_of_counts(rows)
    means = {key: means[key] for key in found if key in means}
    if not rows.are_resampled:
        normal = _normal_intervals(rows, settings)
        found |= {key: normal[key] for key in means}
        return found, n_resamples
    found |= bootstrapped(means, found, len(rows), settings)
    n_resamples |= dict.fromkeys(means, settings.n_resamples)
    n_calls = n_affordable(len(rows), settings.n_resamples)
    if n_calls > 0:
        slow = {_AURC: lambda counts: mean_risk(_drawn(rows, counts))}
        fewer = settings._replace(n_resamples=n_calls)
        found |= bootstrapped(slow, found, len(rows), fewer)
        n_resamples[_AURC] = n_calls
    return found, n_resamples


def _means_of_counts(rows: Rows) -> dict[str, OfCounts]:
    """The means of resamples, by key."""
    brier = mean_of_counts(rows.scores.brier)
    return {
        "nll": mean_of_counts(rows.scores.nll),
        "brier": brier,
        "root_brier": lambda counts: math.sqrt(brier(counts)),
    }


def _normal_intervals(rows: Rows, settings: Settings) -> dict[str, Interval]:
    """The means with t intervals, by key."""
    nll = settings.of_mean(rows.together, "nll")
    brier = settings.of_mean(rows.together, "brier")
    ends = [None if end is None else math.sqrt(end) for end in brier[1:]]
    root = Interval(math.sqrt(brier.value), *ends)
    return {"nll": nll, "brier": brier, "root_brier": root}


def mean_of_counts(values: FloatArray) -> OfCounts:
    """The mean of a sample that contains each of the values (N,) counts (N,) times."""
    return lambda counts: float(counts @ values / counts.sum())


def _drawn(rows: Rows, counts: FloatArray) -> TopLabel:
    """The rows, each counts (N,) times."""
    places = np.repeat(np.arange(len(rows)), counts.astype(np.intp))
    return rows.top.part(places)


def n_affordable(n_rows: int, asked: int) -> int:
    """The number of resamples, at most so many, of a metric that sorts the rows of each; 0 if it is too small."""
    calls = min(_MOST_CALLS, int(_BUDGET // n_rows))
    return min(asked, calls) if calls >= _FEWEST_CALLS else 0


def bootstrapped(
    evaluate: Mapping[str, OfCounts],
    found: Mapping[str, Interval],
    n_rows: int,
    settings: Settings,
) -> dict[str, Interval]:
    """The percentile intervals of the found values, by key."""
    # Resamples of one row have no spread, which says nothing about other rows.
    if n_rows == 1:
        return {key: found[key] for key in evaluate}
    draws = resampled_values(
        list(evaluate.values()),
        n_rows,
        n_resamples=settings.n_resamples,
        seed=settings.seed,
    )
    level = settings.confidence_level
    return {
        key: interval_of(found[key].value, values, level)
        for key, values in zip(evaluate, draws, strict=True)
    }


def bin_rows(
    sums: BinSums,
    coins: Coins,
    *,
    counts: NDArray[Any] | None = None,
    scale: float = 1.0,
) -> tuple[BinRow, ...]:
    """The non-empty equal-width bins, from the lowest.

    Sums and coins are of M bins. If they are weighted, counts (M,) are rows, and scale the effective rows per weight.
    """
    edges = uniform_edges(len(sums.counts))
    total = float(sums.counts.sum())
    rows = []
    for m in np.flatnonzero(sums.counts).tolist():
        mass, confidence, right = (float(part[m]) for part in sums)
        gap = (confidence - right) / mass
        row = BinRow(
            lower=float(edges[m]),
            upper=float(edges[m + 1]),
            count=int(mass if counts is None else counts[m]),
            confidence=min(confidence / mass, 1.0),
            accuracy=right / mass,
            gap=gap,
            contribution=abs(gap) * mass / total,
            p_value=coins.group(m).p_value(right * scale),
        )
        rows.append(row)
    return tuple(rows)


def class_rows(rows: Rows, names: tuple[str, ...]) -> tuple[ClassRow, ...]:
    """One row per class; none if only the top label is known."""
    if rows.classes is None:
        return ()
    bins = rows.classes.bins
    _, mass, confidences, _, right = rows.groups.bins.sum(axis=2).tolist()
    true = bins.correct.sum(axis=1).tolist()
    probabilities = bins.confidence.sum(axis=1).tolist()
    gaps = class_gaps(bins).tolist()
    of_predicted = rows.classes.predicted.times(rows.scale)
    of_all = rows.classes.coins.times(rows.scale)
    to_rows = len(rows) / rows.total
    found = []
    for c, name in enumerate(names):
        precision = None
        own_confidence = None
        p_value = 1.0
        if mass[c] > 0:
            precision = right[c] / mass[c]
            own_confidence = confidences[c] / mass[c]
            p_value = of_predicted.group(c).p_value(right[c] * rows.scale)
        row = ClassRow(
            index=c,
            name=name,
            support=round(true[c] * to_rows),
            frequency=true[c] / rows.total,
            mean_probability=probabilities[c] / rows.total,
            class_gap=gaps[c],
            predicted=round(mass[c] * to_rows),
            precision=precision,
            confidence=own_confidence,
            p_value=p_value,
            frequency_p_value=of_all.group(c).p_value(true[c] * rows.scale),
        )
        found.append(row)
    return tuple(found)
