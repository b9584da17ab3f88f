"""Intervals and tests: bootstrap, consistency test, interval of the ECE by test inversion.

Named options, such as ``n_bins=10``, are passed to the metric; an option that has the name of an
argument here must be bound by ``functools.partial``. A new metric is a function of probs and labels
and a row of `METRICS`, whose name is then known here, in reports and in studies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check, did_you_mean
from hf_calib.metrics import checks, kernel, ranking, scores, smooth, sums
from hf_calib.metrics.checks import FloatArray, IntArray, check_type
from hf_calib.metrics.sums import (
    Binning,
    BinSums,
    Interval,
    SumMetric,
    TopLabel,
    mean_of,
)

MetricFunction = Callable[..., float]
# Metrics with their options.
Asked = Sequence[tuple[str | MetricFunction, dict[str, Any]]]
# A metric of a sample that contains each of the N rows counts (N,) times.
OfCounts = Callable[[FloatArray], float]
# It draws labels and returns their metric.
Simulation = Callable[[np.random.Generator], float]

# The range of shrinkages is wide if a bin is near 1.
_HALVINGS = 30
# The variance of a bin near 1, so that its gap can grow too.
_SMALLEST_VARIANCE = 1e-4


class Metric(NamedTuple):
    """A row of `METRICS`, or a function of the user."""

    # It has probs, labels and options as arguments.
    function: MetricFunction
    # With sums, a resample costs O(N) additions.
    sums: Callable[..., SumMetric] | None = None
    # The metric of a `TopLabel`, if it needs no more.
    of_top: MetricFunction | None = None


_ROWS = (
    Metric(scores.accuracy, partial(mean_of, scores.shares_right)),
    Metric(ranking.area_under_risk_coverage, of_top=ranking.mean_risk),
    Metric(scores.brier_score, partial(mean_of, scores.squared_distances)),
    Metric(scores.classwise_calibration_error, sums.classwise_sums),
    Metric(scores.expected_calibration_error, sums.top_label_sums),
    Metric(kernel.kde_calibration_error),
    Metric(scores.maximum_calibration_error, partial(sums.top_label_sums, norm="max")),
    Metric(scores.negative_log_likelihood, partial(mean_of, scores.negative_logs)),
    Metric(
        scores.root_brier_score, partial(mean_of, scores.squared_distances, root=True)
    ),
    Metric(smooth.smooth_calibration_error, of_top=smooth.smooth_error),
    Metric(smooth.smooth_calibration_error_dual, of_top=smooth.smooth_error_dual),
    Metric(scores.true_calibration_error, partial(mean_of, scores.distances)),
)
METRICS = {row.function.__name__: row for row in _ROWS}


def find_metric(metric: str | MetricFunction) -> Metric:
    """The row with this name, or a new one for a function."""
    if callable(metric):
        return Metric(metric)
    way_out = "for example 'expected_calibration_error'"
    requirement = "metric to be a name or a function of probs and labels"
    is_name = isinstance(metric, str)
    checks.check_type(is_name, requirement, type(metric).__name__, way_out)
    checks.check_choice("metric", metric, tuple(METRICS))
    return METRICS[metric]


def bootstrap_interval(
    metric: str | MetricFunction,
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    seed: int = 0,
    **options: Any,
) -> Interval:
    r"""Bootstrap confidence interval of a metric: the spread over resamples of the examples.

    It shows how uncertain a reported number is; `consistency_test` tests whether the number may be
    due to chance. For the ECE use `calibration_error_interval`: noise makes the ECE larger, and
    each resample adds noise again, so that the interval here may exclude the value. In that case a
    warning is given.

    Args:
        metric: the name of a metric of probs and labels, or a function ``metric(probs, labels,
            **options) -> float``. `kde_calibration_error` is not supported, because copies of an
            example would count as neighbours.

    Returns:
        ``Interval(value, low, high)``; the ends are quantiles of the resamples (Efron and
        Tibshirani 1993, 13.3), and None for one example.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
    >>> bootstrap_interval("accuracy", probs, [0, 1, 1, 0])
    Interval(value=0.75, low=0.25, high=1.0)
    """
    rows, targets = checks.check_probs_and_any_labels(probs, labels)
    found = find_metric(metric)
    is_kde = found.function is kernel.kde_calibration_error
    requirement = "metric to be one that may see an example twice"
    way_out = "it counts them as neighbours; use consistency_test, or smooth_calibration_error"
    check(not is_kde, requirement, "kde_calibration_error", way_out)
    checks.check_draws(n_resamples, seed, confidence_level)
    value = _finite_value(found, rows, targets, options)
    # Resamples of one row have no spread, which says nothing about other rows.
    if len(rows) == 1:
        return Interval(value)
    asked = [(metric, options)]
    (draws,) = resampled_metrics(
        asked, rows, targets, n_resamples=n_resamples, seed=seed
    )
    interval = sums.interval_of(value, draws, confidence_level)
    is_ece = found.function is scores.expected_calibration_error
    if is_ece and not interval.low <= value <= interval.high:
        warnings.warn(
            f"The interval {interval.low:.4g} to {interval.high:.4g} excludes the value, "
            f"{value:.4g}. Noise makes the ECE larger, and each resample adds noise again. "
            "Use calibration_error_interval.",
            stacklevel=2,
        )
    return interval


def resampled_metrics(
    asked: Asked,
    probs: NDArray[Any],
    labels: NDArray[Any],
    *,
    n_resamples: int,
    seed: int,
    groups: IntArray | None = None,
) -> list[FloatArray]:
    """Each metric (B,) for B resamples of the rows, the same for any N probs; see `draw_counts`."""
    evaluate = [
        _of_counts(find_metric(name), probs, labels, options) for name, options in asked
    ]
    drawing: Any = {"n_resamples": n_resamples, "seed": seed, "groups": groups}
    return resampled_values(evaluate, len(probs), **drawing)


def resampled_values(
    evaluate: Sequence[OfCounts],
    n_rows: int,
    *,
    n_resamples: int,
    seed: int,
    groups: IntArray | None = None,
) -> list[FloatArray]:
    """The values (B,) of each function for the counts (N,) of the rows in B resamples."""
    rng = checks.check_draws(n_resamples, seed)
    blocks = sums.draw_counts(n_rows, n_resamples, rng, groups)
    found = [
        [each(counts) for each in evaluate] for block in blocks for counts in block
    ]
    return [_check_resamples(np.array(values)) for values in zip(*found, strict=True)]


def _of_counts(
    metric: Metric, probs: NDArray[Any], labels: NDArray[Any], options: dict[str, Any]
) -> OfCounts:
    """The metric of a sample that contains each of the N rows counts (N,) times."""
    top = sums.top_label(probs, labels)
    if metric.sums is not None:
        # The function has accepted the options.
        of_sums = metric.sums(**options)
        columns = top if of_sums.of_top else (probs, labels)
        add = of_sums.rows(*columns)
        return lambda counts: float(of_sums.value(add(counts), counts.sum()))

    def of_rows(counts: FloatArray) -> float:
        # A metric without sums needs the rows of the sample themselves.
        drawn = np.repeat(np.arange(len(counts)), counts.astype(np.intp))
        if metric.of_top is not None:
            return float(metric.of_top(top.part(drawn), **options))
        return float(metric.function(probs[drawn], labels[drawn], **options))

    return of_rows


def _finite_value(
    metric: Metric, probs: Any, labels: Any, options: dict[str, Any]
) -> float:
    _check_options(metric.function, options)
    value = float(metric.function(probs, labels, **options))
    way_out = "it is undefined for these data"
    check(np.isfinite(value), "the metric to be finite", value, way_out)
    return value


def _check_options(function: MetricFunction, options: dict[str, Any]) -> None:
    """Raise for weights, which would not be drawn with their rows, and for unknown options."""
    requirement = "a metric of resamples to be without sample_weight"
    way_out = "calibration_report has intervals of weighted rows"
    check_type("sample_weight" not in options, requirement, "weights", way_out)
    if function not in [row.function for row in METRICS.values()]:
        return
    # The first two are probs and labels.
    known = [*signature(function).parameters][2:]
    unknown = next((name for name in options if name not in known), None)
    requirement = f"the options to be those of {function.__name__}"
    way_out = did_you_mean(unknown, {*known} - {"sample_weight"})
    check_type(unknown is None, requirement, repr(unknown), way_out)


def _check_resamples(draws: FloatArray) -> FloatArray:
    n_failed = np.count_nonzero(~np.isfinite(draws))
    got = f"NaN or infinity for {n_failed} of {len(draws)}"
    way_out = "this metric is undefined for some resamples; use more examples"
    check(n_failed == 0, "the metric of each resample to be finite", got, way_out)
    return draws


class ConsistencyTest(NamedTuple):
    """A metric's value, and its p-value and mean if the model is calibrated."""

    value: float
    p_value: float
    expected: float


def consistency_test(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    metric: str | MetricFunction = "expected_calibration_error",
    n_resamples: int = 1000,
    seed: int = 0,
    **options: Any,
) -> ConsistencyTest:
    r"""Test of the hypothesis that the model is calibrated and its error is due to chance.

    A calibrated model also has an error above 0; labels drawn from the probabilities show how large
    it is. A small p-value means that the model is not calibrated; a large p-value means that these
    rows do not show it.

    $$\tilde y_i^{(b)} \sim p_i, \qquad
    p = \frac{1 + \#\{b : \theta(P, \tilde y^{(b)}) \ge \theta(P, y)\}}{1 + B}$$

    Args:
        labels: (N,) int in [0, C).
        metric: as in `bootstrap_interval`; larger values must be worse.
        n_resamples: B, the number of draws of labels.

    Returns:
        ``ConsistencyTest(value, p_value, expected)``. (Bröcker and Smith 2007; as a test
        Vaicenavicius et al. 2019.)

    >>> top = np.random.default_rng(0).uniform(0.7, 1.0, 2000)
    >>> result = consistency_test(np.stack([top, 1 - top], axis=1), np.repeat([0, 0, 0, 1], 500))
    >>> round(result.value, 2), round(result.expected, 2), round(result.p_value, 4)
    (0.1, 0.01, 0.001)
    """
    rng = checks.check_draws(n_resamples, seed)
    rows, targets = checks.check_probs_and_labels(probs, labels)
    found = find_metric(metric)
    value = _finite_value(found, rows, targets, options)
    simulate = _simulation(found, rows, options)
    return _tested(value, _simulated(simulate, n_resamples, rng))


def consistency_of_top(
    top: TopLabel, *, n_bins: int, n_resamples: int, seed: int
) -> ConsistencyTest:
    """The test of the ECE of rows with a known top label."""
    metric = sums.top_label_sums(n_bins)
    simulate = _top_simulation(metric, top.confidence, n_bins, "uniform")
    errors = _simulated(simulate, n_resamples, np.random.default_rng(seed))
    return _tested(metric(*top), errors)


def _simulated(
    simulate: Simulation, n_resamples: int, rng: np.random.Generator
) -> FloatArray:
    errors = [simulate(rng) for _ in range(n_resamples)]
    return _check_resamples(np.array(errors))


def _simulation(
    metric: Metric, probs: NDArray[Any], options: dict[str, Any]
) -> Simulation:
    """The simulation of labels drawn from fixed probs (N, C)."""
    evaluate: MetricFunction | SumMetric = partial(metric.function, **options)
    if metric.sums is not None:
        of_sums = metric.sums(**options)
        if of_sums.of_top:
            # Of the top label, only the correctness has to be drawn.
            confidences, _ = sums.winners(probs)
            n_bins = options.get("n_bins", 15)
            binning = options.get("binning", "uniform")
            return _top_simulation(of_sums, confidences, n_bins, binning)
        evaluate = of_sums
    draw = _drawing(probs)
    return lambda rng: float(evaluate(probs, draw(rng)))


def _drawing(probs: NDArray[Any]) -> Callable[[np.random.Generator], IntArray]:
    """A function that draws a class of each row (N,) with its probabilities (N, C)."""
    n_rows, n_classes = probs.shape
    cumulated = np.cumsum(probs.clip(min=0), axis=1, dtype=np.float64)
    cumulated /= cumulated[:, -1:]
    flat = cumulated.ravel()
    first = np.arange(0, probs.size, n_classes)

    def draw(rng: np.random.Generator) -> IntArray:
        # All rows are searched together, by bisection.
        points = rng.random(n_rows)
        places = first.copy()
        width = n_classes
        while width > 1:
            half = width // 2
            is_after = flat[places + (half - 1)] <= points
            places += half * is_after
            width -= half
        return places - first

    return draw


def _top_simulation(
    metric: SumMetric, confidences: FloatArray, n_bins: int, binning: Binning
) -> Simulation:
    """The simulation for the top label, which draws its correctness, the last of the sums."""
    n_rows = len(confidences)
    bins = sums.assign_bins(confidences, n_bins, binning)
    # Narrow integers are sorted several times as fast.
    order = np.argsort(bins.astype(np.uint16), kind="stable")
    # The last entry is never correct and ends the last bin.
    chances = np.append(confidences[order], 0.0)
    cuts = np.searchsorted(bins[order], np.arange(n_bins + 1))
    is_filled = cuts[:-1] < cuts[1:]
    of_wrong = metric.sums(confidences, np.zeros(n_rows))

    def of_hits(rng: np.random.Generator) -> float:
        right = rng.random(n_rows + 1) < chances
        hits = np.add.reduceat(right, cuts, dtype=np.int64)[:-1]
        drawn = of_wrong.copy()
        drawn[-1] += np.where(is_filled, hits, 0)
        return float(metric.value(drawn, n_rows))

    return of_hits


def _tested(value: float, errors: FloatArray) -> ConsistencyTest:
    n_as_large = int(np.count_nonzero(errors >= value - sums.SAME))
    p_value = (1 + n_as_large) / (1 + len(errors))
    return ConsistencyTest(value, p_value, float(errors.mean()))


def consistency_of_bins(
    bins: BinSums, *, n_effective: float, n_resamples: int, seed: int
) -> ConsistencyTest:
    """The test from the sums (M,) of bins; n_effective rows get the mean confidence of theirs."""
    found = Populations(bins)
    sizes = np.maximum(1, np.rint(found.shares * n_effective)).astype(np.int64)
    rng = np.random.default_rng(seed)
    hits = rng.binomial(sizes, found.stated, size=(n_resamples, len(sizes)))
    errors = np.abs(found.stated - hits / sizes) @ found.shares
    return _tested(found.value, errors)


def calibration_error_interval(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    seed: int = 0,
) -> Interval:
    r"""Confidence interval of the expected calibration error of the top label, by test inversion.

    An error $\theta$ is in the interval if samples of the likeliest population with this error
    often have an ECE T that is as small, and as large, as the ECE t of the data:

    $$\{\theta : P_\theta(T \le t) > \tfrac{\alpha}{2}
    \text{ and } P_\theta(T \ge t) > \tfrac{\alpha}{2}\}$$

    Args:
        labels: (N,) int in [0, C).
        binning: as in `expected_calibration_error`.
        n_resamples: number of samples drawn at each error that is tried.

    Returns:
        ``Interval(value, low, high)``: the ECE of the data, which may be above the interval because
        of noise. ``low`` is 0 if chance alone explains the ECE. (Efron and Tibshirani 1993, 12.3;
        DiCiccio and Romano 1990.)

    >>> top = np.random.default_rng(0).uniform(0.5, 1.0, 2000)
    >>> labels = np.random.default_rng(1).random(2000) >= top
    >>> calibration_error_interval(np.stack([top, 1 - top], axis=1), labels.astype(int)).low
    0.0
    """
    checks.check_choice("binning", binning, sums.BINNINGS)
    checks.check_n_bins(n_bins)
    checks.check_draws(n_resamples, seed, confidence_level)
    top = sums.top_label(*checks.check_probs_and_labels(probs, labels))
    bins = sums.bin_sums(top, n_bins, binning)
    found = interval_of_bins(
        bins, n_resamples=n_resamples, confidence_level=confidence_level, seed=seed
    )
    # Quantile bins leave out the row with the smallest confidence.
    return found._replace(value=float(sums.binned_error(bins, len(top.confidence))))


class Populations:
    r"""The likeliest populations with a given error: all gaps of bins (M,) shrink or grow.

    $$|g_m(\lambda)| = \max(0, |g_m| - \lambda C_m (1 - C_m)), \qquad
    \theta(\lambda) = \sum_m \frac{|B_m|}{N} |g_m(\lambda)|$$
    """

    def __init__(self, bins: BinSums) -> None:
        filled = bins.counts > 0
        counts, confidence, correct = (part[filled] for part in bins)
        self.n_rows = counts.sum()
        self.shares = counts / self.n_rows
        self.stated = np.clip(confidence / counts, 0, 1)
        self.gaps = (confidence - correct) / counts
        self.value = float(self.shares @ np.abs(self.gaps))
        variances = self.stated * (1 - self.stated)
        self._variances = np.maximum(variances, _SMALLEST_VARIANCE)
        # Above it all gaps are 0.
        self.most = float((np.abs(self.gaps) / self._variances).max())
        self.least = -float((1 / self._variances).max())

    def accuracies(self, shrinkage: FloatArray | float) -> FloatArray:
        """The accuracies of the bins (..., M) for shrinkages (...)."""
        over = self.gaps >= 0
        smaller = np.asarray(shrinkage)[..., None] * self._variances
        sizes = np.maximum(0.0, np.abs(self.gaps) - smaller)
        # A gap that is too large for its own side changes its sign, where more is possible.
        room = np.where(over, self.stated, 1 - self.stated)
        turns = (sizes > room) & (over == (self.stated < 0.5))
        below = self.stated - sizes
        above = self.stated + sizes
        return np.clip(np.where(over != turns, below, above), 0.0, 1.0)

    def errors(self, shrinkage: FloatArray | float) -> FloatArray:
        """The calibration errors (...) for shrinkages (...)."""
        gaps = np.abs(self.stated - self.accuracies(shrinkage))
        return np.asarray(gaps @ self.shares)


def interval_of_bins(
    bins: BinSums, *, n_resamples: int, confidence_level: float, seed: int
) -> Interval:
    """The interval from the sums (M,) of the bins."""
    found = Populations(bins)
    rng = np.random.default_rng(seed)
    # In another sample, rows are in other bins.
    drawn = rng.multinomial(int(found.n_rows), found.shares, size=n_resamples)
    # One seed for all errors that are tried makes them comparable.
    seed_of_hits = int(rng.integers(2**63))
    tail = (1 - confidence_level) / 2
    near = 1e-12 + 1e-9 * found.value

    def errors(shrinkage: float) -> FloatArray:
        of_hits = np.random.default_rng(seed_of_hits)
        hits = of_hits.binomial(drawn, found.accuracies(shrinkage))
        return np.abs(drawn * found.stated - hits).sum(axis=1) / found.n_rows

    def are_as_large(shrinkage: float) -> bool:
        return bool((errors(shrinkage) >= found.value - near).mean() > tail)

    def are_rarely_as_small(shrinkage: float) -> bool:
        return bool((errors(shrinkage) <= found.value + near).mean() <= tail)

    low = _crossing(found, are_as_large)
    high = _crossing(found, are_rarely_as_small)
    ends = found.errors(np.array([low, high]))
    return Interval(found.value, float(ends[0]), float(ends.max()))


def _crossing(of: Populations, holds: Callable[[float], Any]) -> float:
    """The largest shrinkage at which the condition holds, as it does below; or the least."""
    most = of.most
    least = of.least
    if holds(most):
        return most
    for _ in range(_HALVINGS):
        middle = (most + least) / 2
        if holds(middle):
            least = middle
        else:
            most = middle
    return least


def holm(p_values: ArrayLike) -> FloatArray:
    """P-values (K,) corrected for their number by the step-down method of Holm 1979.

    >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    n_left = np.arange(len(p), 0, -1)
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(p[order] * n_left)
    return np.minimum(1, corrected)
