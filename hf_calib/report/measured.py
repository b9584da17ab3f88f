"""One set of probabilities, measured: metrics, bins and classes of a report, before or after calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import metadata
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, ndtr, ndtri, stdtrit

import hf_calib.metrics as metrics
from hf_calib.metrics import CalibrationState, ConsistencyTest
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.corp import cross_fitted_errors, decompose
from hf_calib.metrics.intervals import (
    METRICS,
    calibration_error_interval,
    consistency_of_bins,
    interval_of_bins,
    percentile_intervals,
)
from hf_calib.metrics.ranking import mean_risk
from hf_calib.metrics.smooth import smooth_error
from hf_calib.metrics.state import (
    LOGGED_METRICS,
    GroupSums,
    score_chunks,
    score_top_labels,
)
from hf_calib.metrics.sums import (
    BinSums,
    Interval,
    TopLabel,
    bin_sums,
    binned_error,
    class_gaps,
    top_label_error,
    uniform_bins,
    uniform_edges,
    wilson_interval,
    winners,
)

MAX_EXAMPLES_FOR_KDE = (
    2_000  # the kernel calibration error compares every pair of examples
)
# The most rows that all calls of a metric read which is called for each resample, so that it takes seconds.
_BUDGET = 1e7
_MOST_CALLS, _FEWEST_CALLS = 200, 50
_AS_GOOD_AS_0 = 1e-9
_AS_GOOD_AS_NORMAL = 10_000.0  # a variance
_REACH = 10  # In standard deviations; probabilities beyond are negligible.
# Below them a t interval is wider than anything that it could say.
_FEWEST_DEGREES = 0.5
_MOST = {"nll": math.inf, "brier": 2.0}  # of a mean


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
        found = self.t_interval(mean, error, float(groups.effective_rows()[group]))
        if found.low is None:
            return found
        return Interval(mean, max(found.low, 0.0), min(found.high, _MOST[name]))

    def of_frequency(self, frequency: float, n: float) -> Interval:
        """A frequency among n rows, with Wilson's interval."""
        return Interval(frequency, *wilson_interval(frequency, n, self.z).tolist())

    def t_interval(self, mean: float, error: float, effective: float) -> Interval:
        """A mean of effective rows (Kish 1965) with a standard error; without ends if they are hardly one."""
        degrees = effective - 1
        if degrees < _FEWEST_DEGREES:
            return Interval(mean)
        reach = float(stdtrit(degrees, (1 + self.confidence_level) / 2)) * error
        return Interval(mean, mean - reach, mean + reach)

    @property
    def level(self) -> str:
        """The confidence level in words."""
        return f"{100 * self.confidence_level:g}%"


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`: a metric with its title and the kind of its interval.

    An interval has the quantiles of resamples ("bootstrap"), is Wilson's ("frequency") or has, for a binned ECE, the
    errors of populations that are consistent with the sample ("inversion"). Other calibration errors have none: a
    resample adds the noise again.
    """

    title: str
    metric: str  # its name in `hf_calib.metrics`
    options: Mapping[str, Any] = field(default_factory=dict)
    binned: bool = False  # takes the report's number of bins
    part: str | None = None  # the field of the metric's result
    interval: Literal["bootstrap", "inversion", "frequency", "none"] = "none"
    n_examples: tuple[float, float] = (
        1,
        np.inf,
    )  # Reports on fewer or more leave the metric out.

    @property
    def page(self) -> str:
        """The address of the metric's entry in the documentation; "" if the package names no such site."""
        site = dict(
            each.split(", ")
            for each in metadata("hf_calib").get_all("Project-URL") or []
        )
        page = (
            "errors"
            if "error" in self.metric or self.metric.startswith("ece")
            else "scores"
        )
        place = f"reference/metrics/{page}.html#hf_calib.metrics.{self.metric}"
        return (
            f"{site['Documentation'].rstrip('/')}/{place}"
            if "Documentation" in site
            else ""
        )

    def value(
        self, probs: NDArray[Any], labels: NDArray[Any], n_bins: int, **weights: Any
    ) -> float:
        """The metric of rows; a negative value of an unbiased estimate becomes 0."""
        own = {"n_bins": n_bins} if self.binned else {}
        result = getattr(metrics, self.metric)(
            probs, labels, **self.options, **own, **weights
        )
        return max(
            0.0, float(result if self.part is None else getattr(result, self.part))
        )

    def n_resamples(self, n_examples: int, asked: int) -> int:
        """The number of resamples that takes seconds; 0 if it is too small, or the metric has no interval."""
        if self.interval in ("frequency", "none"):
            return 0
        if self.interval == "inversion" or METRICS[self.metric].sums is not None:
            return asked
        calls = min(_MOST_CALLS, int(_BUDGET // n_examples))
        return min(asked, calls) if calls >= _FEWEST_CALLS else 0


_ECE, _BRIER, _CORP = (
    "expected_calibration_error",
    "brier_decomposition",
    "corp_decomposition",
)
_SIDES, _AURC = "confidence_errors", "area_under_risk_coverage"
_TOP = "Top label's Brier score"
_DEBIASED = {"binning": "equal_mass", "debias": True}
_SPLIT = (50, np.inf)  # in folds of 10 and more

ECE_INTERVALS = (
    "The interval of an ECE is for the error without noise, so the ECE may be above it."
)
#: The metrics of a report: key -> `Measure`. Keys and titles are those of the trainer's log where it has them.
MEASURES: dict[str, Measure] = {
    "accuracy": Measure(LOGGED_METRICS["accuracy"], "accuracy", interval="frequency"),
    "nll": Measure(
        LOGGED_METRICS["nll"], "negative_log_likelihood", interval="bootstrap"
    ),
    "brier": Measure(LOGGED_METRICS["brier"], "brier_score", interval="bootstrap"),
    "root_brier": Measure("Root Brier score", "root_brier_score", interval="bootstrap"),
    "brier_calibration": Measure(
        "Brier score, calibration part", _BRIER, binned=True, part="calibration"
    ),
    "brier_refinement": Measure(
        "Brier score, refinement part", _BRIER, binned=True, part="refinement"
    ),
    "corp_miscalibration": Measure(
        f"{_TOP}, miscalibration (CORP)", _CORP, part="miscalibration"
    ),
    "corp_discrimination": Measure(
        f"{_TOP}, discrimination (CORP)", _CORP, part="discrimination"
    ),
    "ece": Measure(LOGGED_METRICS["ece"], _ECE, binned=True, interval="inversion"),
    "adaptive_ece": Measure(
        LOGGED_METRICS["adaptive_ece"],
        _ECE,
        {"binning": "quantile"},
        binned=True,
        interval="inversion",
    ),
    "ece_debiased": Measure(
        "ECE, equal mass, debiased", _ECE, _DEBIASED, binned=True, interval="inversion"
    ),
    "smooth_ece": Measure("Smooth ECE", "smooth_calibration_error"),
    "kde_ece": Measure(
        "Kernel ECE", "kde_calibration_error", n_examples=(2, MAX_EXAMPLES_FOR_KDE)
    ),
    "classwise_ece": Measure(
        LOGGED_METRICS["classwise_ece"], "classwise_calibration_error", binned=True
    ),
    "over_confidence": Measure(
        "Over-confidence, at least", _SIDES, part="over", n_examples=_SPLIT
    ),
    "under_confidence": Measure(
        "Under-confidence, at least", _SIDES, part="under", n_examples=_SPLIT
    ),
    "mce": Measure(LOGGED_METRICS["mce"], "maximum_calibration_error", binned=True),
    _AURC: Measure("Area under the risk-coverage curve", _AURC, interval="bootstrap"),
}


# The metrics of `MEASURES` that read no more than the top label, as functions of a `TopLabel`.
_OF_TOP_LABELS: dict[str, Callable[..., Any]] = {
    _CORP: decompose,
    _ECE: top_label_error,
    "smooth_calibration_error": smooth_error,
    _SIDES: cross_fitted_errors,
    "maximum_calibration_error": partial(top_label_error, norm="max"),
    _AURC: mean_risk,
}
#: The most rows for metrics of the top label that sort all of them, several times.
MOST_SORTED = 1_000_000


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
    precision: (
        float | None
    )  # the fraction of these that are correct; None if the class is never predicted
    confidence: float | None  # the mean confidence of these
    p_value: (
        float  # two-sided, for a true difference of 0 between confidence and precision
    )
    frequency_p_value: float  # two-sided, for a true difference of 0 between frequency and mean_probability

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
    """A set of probabilities, measured from its rows or from sums of them.

    Metrics are those of `MEASURES`, or for multi-label data of `LABEL_MEASURES`, averaged as "macro_..." and
    "micro_...". Unweighted rows that are resampled are kept in `probs`, or in `top` if only the top label is known;
    otherwise `state` has the sums.
    """

    metrics: Mapping[str, Interval]
    n_resamples: Mapping[
        str, int
    ]  # The resamples of each interval; slow metrics have fewer than asked for.
    bins: tuple[BinRow, ...]  # The non-empty bins, from the lowest.
    overall: Any  # an `Overall`
    consistency: ConsistencyTest | None = (
        None  # The test of the ECE; None for multi-label data.
    )
    classes: tuple[ClassRow, ...] = ()  # Empty for multi-label data.
    labels: tuple[Any, ...] = ()  # The `LabelMeasurements` of multi-label data.
    state: CalibrationState | None = field(default=None, repr=False, compare=False)
    probs: Any = field(default=None, repr=False, compare=False)  # (N, C)
    top: TopLabel | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_rows(
        cls,
        probs: NDArray[Any],
        labels: NDArray[np.int64],
        names: tuple[str, ...],
        settings: Settings,
        weights: FloatArray | None = None,
    ) -> Measured:
        """Compute every metric of rows; with weights, those that have a weighted form."""
        n_bins, _, n, seed = settings
        state = CalibrationState(n_classes=len(names), n_bins=n_bins)
        for _, scores in score_chunks(probs, labels, weights):
            state.add_scores(scores)
        if weights is not None:
            found = cls.of_state(state, names, settings)
            values = dict(found.metrics)
            for key in (
                "brier_calibration",
                "brier_refinement",
            ):  # The sums do not contain these.
                values[key] = Interval(
                    MEASURES[key].value(probs, labels, n_bins, sample_weight=weights)
                )
            return replace(found, metrics=values)
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
            consistency=metrics.consistency_test(
                probs, labels, n_resamples=n, seed=seed, n_bins=n_bins
            ),
            probs=probs,
            **_tables(state, names, coins, settings),
        )

    @classmethod
    def of_top_labels(
        cls, top: TopLabel, settings: Settings, weights: FloatArray | None = None
    ) -> Measured:
        """Compute every metric of the top label, the only one that is known."""
        state = CalibrationState(n_classes=1, n_bins=settings.n_bins, by_class=False)
        state.add_scores(score_top_labels(top.confidence, top.correct, weights))
        is_sorted = weights is None and len(top.confidence) <= MOST_SORTED
        found = cls.of_state(state, (), settings, top if is_sorted else None)
        # The sums are those of two classes, "correct" and "wrong".
        values = {
            key: value
            for key, value in found.metrics.items()
            if key == "accuracy" or MEASURES[key].metric in _OF_TOP_LABELS
        }
        if not is_sorted:
            return replace(found, metrics=values)
        return replace(found, metrics=values, state=None, top=top)

    @classmethod
    def of_state(
        cls,
        state: CalibrationState,
        names: tuple[str, ...],
        settings: Settings,
        top_labels: TopLabel | None = None,
    ) -> Measured:
        """Compute every metric that follows from sums, which may be weighted, and from top labels if they are given."""
        top = state.top_label
        bins = state.bins
        total = float(bins.counts.sum())
        effective = float(top.effective_rows()[0])
        scale = effective / total
        n = settings.n_resamples
        found = {name: settings.of_mean(top, name) for name in ("nll", "brier")}
        brier, *ends = found["brier"]
        roots = [None if end is None else math.sqrt(end) for end in ends]
        found["root_brier"] = Interval(math.sqrt(brier), *roots)
        right = float(bins.correct.sum()) / total
        found["accuracy"] = settings.of_frequency(right, effective)
        for name, sums in (("ece", bins), ("adaptive_ece", state.equal_mass_bins())):
            found[name] = interval_of_bins(
                BinSums(*(part * scale for part in sums)), **settings.drawing
            )
        if state.by_class:
            gaps = class_gaps(state.class_bins())
            found["classwise_ece"] = Interval(float(np.mean(gaps)))
        found["mce"] = Interval(float(binned_error(bins, total, "max")))
        if not state.weighted:
            found["area_under_risk_coverage"] = Interval(
                state.area_under_risk_coverage()
            )
        if top_labels is not None:
            found |= _of_top_labels(top_labels, settings)
        stated = np.stack([bins.counts, bins.confidence, top.bins[3, 0]]) * scale
        coins = {
            "overall": Coins.of_sums(*stated.sum(axis=1).tolist()),
            "bins": Coins.of_sums(*stated),
        }
        if state.by_class:
            by_class = state.classes() * scale
            coins["predicted"] = Coins.of_sums(*by_class[[3, 5, 6]])
            coins["classes"] = Coins.of_sums(effective, *by_class[[1, 2]])
        return cls(
            metrics=found,
            n_resamples=dict.fromkeys(("ece", "adaptive_ece"), n),
            consistency=consistency_of_bins(
                bins, n_effective=effective, n_resamples=n, seed=settings.seed
            ),
            state=state,
            **_tables(state, names, coins, settings),
        )


def mean_change(
    before: FloatArray, after: FloatArray, weights: FloatArray, settings: Settings
) -> Interval:
    """The mean of after - before over rows (N,) with weights (N,), with its paired t interval; none for one row."""
    change = after - before
    total = float(weights.sum())
    mean = float(weights @ change) / total
    effective = total**2 / float(weights @ weights)
    variance = float(weights @ (change - mean) ** 2) / total
    error = math.sqrt(variance / max(effective - 1, _FEWEST_DEGREES))
    return settings.t_interval(mean, error, effective)


def _tables(
    state: CalibrationState,
    names: tuple[str, ...],
    coins: Mapping[str, Coins],
    settings: Settings,
) -> dict[str, Any]:
    """The overall gap, the bins and the classes of a state, from the coins of each."""
    top, bins = state.top_label, state.bins
    scale = float(top.effective_rows()[0]) / float(bins.counts.sum())
    found: dict[str, Any] = {
        "overall": _overall(state, coins["overall"], settings.z),
        "bins": bin_rows(bins, coins["bins"], counts=top.bins[0, 0], scale=scale),
    }
    if state.by_class:
        of_classes = (coins["predicted"], coins["classes"])
        found["classes"] = class_rows(state, names, *of_classes, scale)
    return found


def _of_top_labels(top: TopLabel, settings: Settings) -> dict[str, Interval]:
    """The metrics that read the top label only; an error in bins has its interval."""
    found = {}
    n_bins = settings.n_bins
    for key, measure in MEASURES.items():
        of_top = _OF_TOP_LABELS.get(measure.metric)
        fewest, most = measure.n_examples
        if of_top is None or not fewest <= len(top.confidence) <= most:
            continue
        own = {"n_bins": n_bins} if measure.binned else {}
        result = of_top(top, **measure.options, **own)
        value = float(result if measure.part is None else getattr(result, measure.part))
        found[key] = Interval(max(value, 0.0))
        if measure.interval == "inversion":
            bins = bin_sums(top, n_bins, measure.options.get("binning", "uniform"))
            interval = interval_of_bins(bins, **settings.drawing)
            found[key] = interval._replace(value=value)
    return found


def _overall(state: CalibrationState, coins: Coins, z: float) -> Overall:
    """The gap with its score interval.

    The p-value is the larger one of an exact test and of the test that the interval inverts, so that test and interval
    agree.
    """
    top = state.top_label
    total, stated, right = (float(part.sum()) for part in state.bins)
    confidence = stated / total
    accuracy = right / total
    effective = float(top.effective_rows()[0])
    _, errors = top.mean("gap")
    stated_variance = (coins.heads_variance + coins.tails_variance) / effective
    observed = float(errors[0]) ** 2 * effective
    variance = variance_of_gaps(confidence, accuracy, stated_variance, observed)
    low, high = score_interval(confidence, accuracy, variance, z**2 / effective)
    gap = confidence - accuracy
    p_value = coins.p_value(accuracy * effective)
    if variance > 0:
        of_normal = 2 * float(ndtr(-abs(gap) / math.sqrt(variance / effective)))
        p_value = max(p_value, of_normal)
    return Overall(gap, low, high, p_value, confidence, accuracy, state.n_rows)


def variance_of_gaps(
    confidence: float, accuracy: float, stated: float, observed: float
) -> float:
    """The variance of confidence minus correct of a row at a mean gap of 0, from the stated and the observed one.

    The observed variance is larger than what the confidences state if rows are not all off by the same amount. That of
    a small sample may be far too small.
    """
    gap = confidence - accuracy
    if_all_are_off_alike = stated + gap * (2 * confidence - 1) - gap**2
    return stated + max(observed - if_all_are_off_alike, 0.0)


def score_interval(
    confidence: float, accuracy: float, variance: float, weight: float
) -> tuple[float, float]:
    """The score interval of the mean confidence minus the accuracy, which generalises Wilson's of one frequency.

    If the gap is g, each row is correct with the probability of its confidence minus g. The variance is that of a row
    at a gap of 0, and the weight z^2 / N.
    """
    gap = confidence - accuracy
    middle = gap + weight * (confidence - 0.5)
    reach = math.sqrt(max(middle**2 - (1 + weight) * (gap**2 - weight * variance), 0.0))
    low = (middle - reach) / (1 + weight)
    high = (middle + reach) / (1 + weight)
    return min(low, gap), max(high, gap)


def measure_all(
    probs: NDArray[Any],
    labels: NDArray[Any],
    settings: Settings,
    measures: Mapping[str, Measure] = MEASURES,
) -> tuple[dict[str, Interval], dict[str, int]]:
    """The metrics that the number of examples allows, with intervals, by key; and their numbers of resamples."""
    n_rows, n_bins = len(probs), settings.n_bins
    asked = {
        k: each
        for k, each in measures.items()
        if each.n_examples[0] <= n_rows <= each.n_examples[1]
    }
    n_resamples = {
        key: each.n_resamples(n_rows, settings.n_resamples)
        for key, each in asked.items()
    }
    found: dict[str, Interval] = {}
    for n in set(n_resamples.values()) - {0}:
        keys = [
            key
            for key in asked
            if asked[key].interval == "bootstrap" and n_resamples[key] == n
        ]
        options = [(asked[key].metric, dict(asked[key].options)) for key in keys]
        intervals = percentile_intervals(
            options, probs, labels, **settings._replace(n_resamples=n).drawing
        )
        found |= dict(zip(keys, intervals, strict=True))
    for key in asked.keys() - found.keys():
        found[key] = Interval(asked[key].value(probs, labels, n_bins))
        if asked[key].interval == "frequency":
            found[key] = settings.of_frequency(found[key].value, n_rows)
        if asked[key].interval == "inversion":
            # With or without debiasing, the error of the population is the same.
            bins: Any = {
                "n_bins": n_bins,
                "binning": asked[key].options.get("binning", "uniform"),
            }
            interval = calibration_error_interval(
                probs, labels, **bins, **settings.drawing
            )
            found[key] = interval._replace(value=found[key].value)
    return {key: found[key] for key in asked}, n_resamples


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
    edges, total = uniform_edges(len(sums.counts)), float(sums.counts.sum())
    rows = []
    for m in np.flatnonzero(sums.counts).tolist():
        mass, confidence, right = (float(part[m]) for part in sums)
        count = int(mass if counts is None else counts[m])
        gap, p_value = (
            (confidence - right) / mass,
            coins.group(m).p_value(right * scale),
        )
        stated, accuracy, part = (
            min(confidence / mass, 1.0),
            right / mass,
            abs(gap) * mass / total,
        )
        lower, upper = edges[m : m + 2].tolist()
        rows.append(BinRow(lower, upper, count, stated, accuracy, gap, part, p_value))
    return tuple(rows)


def class_rows(
    state: CalibrationState,
    names: tuple[str, ...],
    predicted: Coins,
    classes: Coins,
    scale: float,
) -> tuple[ClassRow, ...]:
    """One row per class, from the coins of its predictions and the coins of its probabilities in all rows."""
    total, gaps = float(state.bins.counts.sum()), class_gaps(state.class_bins())
    to_rows, rows = state.n_rows / total, []
    for c, (name, sums) in enumerate(
        zip(names, state.classes().T.tolist(), strict=True)
    ):
        true, probability, _, mass, right, confidence, _ = sums
        found = ClassRow(
            index=c,
            name=name,
            support=round(true * to_rows),
            frequency=true / total,
            mean_probability=probability / total,
            class_gap=float(gaps[c]),
            predicted=round(mass * to_rows),
            precision=right / mass if mass else None,
            confidence=confidence / mass if mass else None,
            p_value=predicted.group(c).p_value(right * scale) if mass else 1.0,
            frequency_p_value=classes.group(c).p_value(true * scale),
        )
        rows.append(found)
    return tuple(rows)


class Coins(NamedTuple):
    """Sums over independent coins (Bernoulli variables); each field may be an array of sums.

    Likely coins, with p of at least 1/2, are summed separately, because the sum of both kinds can be far from normal
    on either side: a thousand coins at .999 and a thousand at .001.
    """

    likely: Any  # the number of likely coins
    heads: Any  # the sum of p over the unlikely coins
    heads_variance: Any  # the sum of p (1 - p) over the unlikely coins
    tails: Any  # the sum of 1 - p over the likely coins
    tails_variance: Any  # the sum of p (1 - p) over the likely coins

    @classmethod
    def of(
        cls,
        chances: NDArray[Any],
        groups: NDArray[np.intp] | None = None,
        n_groups: int = 1,
    ) -> Coins:
        """Coins with these probabilities, (N,) summed within groups (N,), or (N, C) summed within columns."""
        wide = np.clip(np.ravel(chances).astype(np.float64), 0, 1)
        if chances.ndim == 2:
            n_groups = chances.shape[1]
            groups = np.tile(np.arange(n_groups), len(chances))
        slots = np.zeros(len(wide), np.intp) if groups is None else groups
        likely = wide >= 0.5
        rarer = np.where(likely, 1 - wide, wide)
        variances = rarer * (1 - rarer)
        parts = (
            likely,
            rarer * ~likely,
            variances * ~likely,
            rarer * likely,
            variances * likely,
        )
        found = cls(
            *(np.bincount(slots, part, n_groups).astype(np.float64) for part in parts)
        )
        return found if groups is not None else found.group(0)

    @classmethod
    def of_sums(cls, count: Any, chances: Any, squares: Any) -> Coins:
        """Coins from their number, the sum of their probabilities and the sum of the squared probabilities.

        They count as all likely or all unlikely, as the coins of a bin are.

        >>> [round(coins.p_value(7), 6) for coins in (Coins.of_sums(10, 9.0, 8.1), Coins.of(np.full(10, 0.9)))]
        [0.140382, 0.140382]
        """
        variance = np.maximum(chances - squares, 0.0)
        likely = np.greater_equal(chances, count / 2)
        tails = np.maximum(count - chances, 0.0) * likely
        return cls(
            count * likely,
            chances * ~likely,
            variance * ~likely,
            tails,
            variance * likely,
        )

    def group(self, number: int) -> Coins:
        """One of the sums."""
        return Coins(*(float(field[number]) for field in self))

    def p_value(self, n_heads: float) -> float:
        """The two-sided p-value of a number of heads: twice the smaller tail, at most 1.

        Heads of unlikely coins and tails of likely coins are each approximated by a binomial distribution with their
        mean and variance, whose number of coins need not be an integer; it is close in the normal and in the Poisson
        limit (Ehm 1991, "Binomial approximation to the Poisson binomial distribution"; Choi and Xia 2002).
        """
        excess = (
            n_heads - self.likely
        )  # Heads of unlikely coins minus tails of likely coins.
        variance = self.heads_variance + self.tails_variance
        if variance > _AS_GOOD_AS_NORMAL:
            z = (excess - self.heads + self.tails) / np.sqrt(variance)
            half = 0.5 / np.sqrt(variance)
            return float(min(1.0, 2 * min(ndtr(z + half), ndtr(half - z))))
        heads, first_heads = _distribution(self.heads, self.heads_variance)
        tails, first_tails = _distribution(self.tails, self.tails_variance)
        together = np.convolve(heads, tails[::-1])
        place = round(excess - first_heads + first_tails + len(tails) - 1)
        at_most = together[: max(0, place + 1)].sum()
        at_least = together[max(0, place) :].sum()
        return float(min(1.0, 2 * min(at_most, at_least)))


def _distribution(mean: float, variance: float) -> tuple[FloatArray, int]:
    """The probabilities of consecutive numbers of heads, and the first number; all others are negligible."""
    if mean <= 0:
        return np.ones(1), 0
    reach = _REACH * np.sqrt(variance) + _REACH
    first = max(0, int(mean - reach))
    counts = np.arange(first, int(mean + reach) + 2, dtype=np.float64)
    share = max(
        1 - variance / mean, _AS_GOOD_AS_0
    )  # The probability of a coin, 0 in the Poisson limit.
    coins = mean / share
    inside = counts < coins
    at_most = np.ones(len(counts))
    at_most[inside] = betainc(coins - counts[inside], counts[inside] + 1, 1 - share)
    return np.diff(at_most, prepend=0.0), first
