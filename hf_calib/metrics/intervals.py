"""Intervals and tests: the bootstrap, the consistency test, the ECE by test inversion.

Named options, such as ``n_bins=10``, go to the metric; one with the name of an argument here is bound by
``functools.partial``. A new metric is a function of probs and labels and a row in `METRICS`, which names it here, in
reports and in studies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.metrics import checks, kernel, ranking, scores, smooth, sums
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import Binning, BinSums, Interval, SumMetric, mean_of

MetricFunction = Callable[..., float]
Asked = Sequence[tuple[str | MetricFunction, dict[str, Any]]]  # metrics with their options
Simulation = Callable[[np.random.Generator], float]  # the metric of labels that it draws

_HALVINGS = 30  # of the range of shrinkages, which is wide where a bin is near 1
_SMALLEST_VARIANCE = 1e-4  # of a bin's label, so that the gap of a bin near 1 can grow too


class Metric(NamedTuple):
    """A row of `METRICS`, or a user's own function."""

    function: MetricFunction  # of probs and labels, and the metric's options
    sums: Callable[..., SumMetric] | None = None  # of the options: resamples then cost O(N) additions
    of_top: MetricFunction | None = None  # of a `TopLabel`, where the metric reads no more


METRICS = {
    row.function.__name__: row
    for row in (
        Metric(scores.accuracy, partial(mean_of, scores.shares_right)),
        Metric(ranking.area_under_risk_coverage, of_top=ranking.mean_risk),
        Metric(scores.brier_score, partial(mean_of, scores.squared_distances)),
        Metric(scores.classwise_calibration_error, sums.classwise_sums),
        Metric(sums.ece_sweep, of_top=sums.sweep_error),
        Metric(scores.expected_calibration_error, sums.top_label_sums),
        Metric(kernel.kde_calibration_error),
        Metric(scores.maximum_calibration_error, partial(sums.top_label_sums, norm="max")),
        Metric(scores.negative_log_likelihood, partial(mean_of, scores.negative_logs)),
        Metric(scores.root_brier_score, partial(mean_of, scores.squared_distances, root=True)),
        Metric(smooth.smooth_calibration_error, of_top=smooth.smooth_error),
        Metric(smooth.smooth_calibration_error_dual, of_top=smooth.smooth_error_dual),
        Metric(scores.true_calibration_error, partial(mean_of, scores.distances)),
    )
}


def find_metric(metric: str | MetricFunction) -> Metric:
    """The row of a name, or one for a function."""
    if callable(metric):
        return Metric(metric)
    way_out = "for example 'expected_calibration_error'"
    named, requirement = isinstance(metric, str), "metric to be a name or a function of probs and labels"
    checks.check_type(named, requirement, type(metric).__name__, way_out)
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

    To say how certain a reported number is; `consistency_test` asks whether it may be chance alone. For the ECE use
    `calibration_error_interval`: noise makes it larger, and each resample adds noise again, so that the interval here
    may exclude the value, which comes with a warning.

    Args:
        metric: the name of a metric of probs and labels, or a function ``metric(probs, labels, **options) -> float``;
            not `kde_calibration_error`, which would count copies of an example as neighbours.

    Returns:
        ``Interval(value, low, high)``; the ends are quantiles over the resamples (Efron and Tibshirani 1993, 13.3).

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
    >>> bootstrap_interval("accuracy", probs, [0, 1, 1, 0])
    Interval(value=0.75, low=0.25, high=1.0)
    """
    rows, targets = checks.check_probs_and_any_labels(probs, labels)
    function = find_metric(metric).function
    is_kde = function is kernel.kde_calibration_error
    requirement = "metric to be one that may see an example twice"
    way_out = "it counts them as neighbours; use consistency_test, or smooth_calibration_error"
    check(not is_kde, requirement, "kde_calibration_error", way_out)
    drawing: Any = {"n_resamples": n_resamples, "confidence_level": confidence_level, "seed": seed}
    (interval,) = percentile_intervals([(metric, options)], rows, targets, **drawing)
    value, low, high = interval
    if function is scores.expected_calibration_error and not low <= value <= high:
        warnings.warn(
            f"The interval {low:.4g} to {high:.4g} excludes the value, {value:.4g}. Noise makes the ECE larger, and "
            "each resample adds noise again. Use calibration_error_interval.",
            stacklevel=2,
        )
    return interval


def percentile_intervals(
    asked: Asked, probs: NDArray[Any], labels: NDArray[Any], *, confidence_level: float, **drawing: Any
) -> list[Interval]:
    """`bootstrap_interval` of several metrics, from `resampled_metrics` that are drawn once for all."""
    checks.check_draws(**drawing, confidence_level=confidence_level)
    values = [_finite_value(find_metric(name), probs, labels, options) for name, options in asked]
    draws = resampled_metrics(asked, probs, labels, **drawing)
    return [
        sums.interval_of(value, drawn, confidence_level) for value, drawn in zip(values, draws, strict=True)
    ]


def resampled_metrics(
    asked: Asked,
    probs: NDArray[Any],
    labels: NDArray[Any],
    *,
    n_resamples: int,
    seed: int,
    groups: IntArray | None = None,
) -> list[FloatArray]:
    """Each metric (B,) of B resamples of the rows, the same ones for any other N probs; see `draw_counts`."""
    evaluate = [_of_counts(find_metric(name), probs, labels, options) for name, options in asked]
    blocks = sums.draw_counts(len(probs), n_resamples, checks.check_draws(n_resamples, seed), groups)
    found = [[each(counts) for each in evaluate] for block in blocks for counts in block]
    return [_check_resamples(np.array(values)) for values in zip(*found, strict=True)]


def _of_counts(
    metric: Metric, probs: NDArray[Any], labels: NDArray[Any], options: dict[str, Any]
) -> Callable[[FloatArray], float]:
    """The metric of a sample that holds each of the N rows counts (N,) times."""
    top = sums.top_label(probs, labels)
    if metric.sums is not None:  # the function has accepted the options
        of_sums = metric.sums(**options)
        add = of_sums.rows(*(top if of_sums.of_top else (probs, labels)))
        return lambda counts: float(of_sums.value(add(counts), counts.sum()))

    def of_rows(counts: FloatArray) -> float:
        drawn = np.repeat(np.arange(len(counts)), counts.astype(np.intp))
        if metric.of_top is not None:
            return float(metric.of_top(top.part(drawn), **options))
        return float(metric.function(probs[drawn], labels[drawn], **options))

    return of_rows


def _finite_value(metric: Metric, probs: Any, labels: Any, options: dict[str, Any]) -> float:
    value = float(metric.function(probs, labels, **options))
    check(np.isfinite(value), "the metric to be finite", value, "it is undefined for these data")
    return value


def _check_resamples(draws: FloatArray) -> FloatArray:
    failed = np.count_nonzero(~np.isfinite(draws))
    got = f"NaN or infinity for {failed} of {len(draws)}"
    way_out = "this metric is undefined for some resamples; use more examples"
    check(not failed, "the metric of each resample to be finite", got, way_out)
    return draws


class ConsistencyTest(NamedTuple):
    """A metric's value, how often chance alone makes it as large, and its mean if calibrated."""

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
    r"""Test of the hypothesis that the model is calibrated and the error is chance.

    A calibrated model has an error above 0 too; labels drawn from the probabilities show how large. A small p-value
    says that the model is not calibrated; a large one, that these rows do not show it.

    $$\tilde y_i^{(b)} \sim p_i, \qquad
    p = \frac{1 + \#\{b : \theta(P, \tilde y^{(b)}) \ge \theta(P, y)\}}{1 + B}$$

    Args:
        labels: (N,) int in [0, C).
        metric: as for `bootstrap_interval`; larger must mean worse.
        n_resamples: B, draws of labels.

    Returns:
        ``ConsistencyTest(value, p_value, expected)``. (Bröcker and Smith 2007; as a test Vaicenavicius et al. 2019.)

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
    return _tested(value, _check_resamples(np.array([simulate(rng) for _ in range(n_resamples)])))


def _simulation(metric: Metric, probs: NDArray[Any], options: dict[str, Any]) -> Simulation:
    """Of labels drawn from probs (N, C), which stay, as do their bins: only hits are drawn where sums allow it."""
    (n_rows, n_classes), n_bins = probs.shape, options.get("n_bins", 15)
    of_sums = None if metric.sums is None else metric.sums(**options)
    if of_sums is not None and of_sums.of_top:
        return _top_simulation(of_sums, sums.winners(probs)[0], n_bins, options.get("binning", "uniform"))
    cumulated = np.cumsum(probs.clip(min=0), axis=1, dtype=np.float64)
    cumulated /= cumulated[:, -1:]
    flat, first = cumulated.ravel(), np.arange(0, probs.size, n_classes)

    def draw(rng: np.random.Generator) -> IntArray:
        """The place (N,) of the drawn class of each row, row after row, by halving."""
        points, places, width = rng.random(n_rows), first.copy(), n_classes
        while width > 1:
            half = width // 2
            places += half * (flat[places + (half - 1)] <= points)
            width -= half
        return places

    if metric.function is not scores.classwise_calibration_error:
        evaluate = partial(metric.function, **options) if of_sums is None else of_sums
        return lambda rng: float(evaluate(probs, draw(rng) - first))
    slots = (sums.uniform_bins(probs, n_bins) + n_bins * np.arange(n_classes)).ravel()
    stated = np.asarray(np.bincount(slots, probs.ravel(), n_bins * n_classes), np.float64)

    def of_hits(rng: np.random.Generator) -> float:
        hits = np.bincount(slots[draw(rng)], minlength=len(stated))
        return float(sums.gap_error(stated - hits, n_rows * n_classes))

    return of_hits


def _top_simulation(metric: SumMetric, confidences: FloatArray, n_bins: int, binning: Binning) -> Simulation:
    """The same of the top label, of which is drawn whether it is right: the last of the sums."""
    bins, n_rows = sums.assign_bins(confidences, n_bins, binning), len(confidences)
    # Narrow integers are sorted several times as fast.
    order = np.argsort(bins.astype(np.uint16), kind="stable")
    chances = np.append(confidences[order], 0.0)  # the last one, never right, ends the last bin
    cuts = np.searchsorted(bins[order], np.arange(n_bins + 1))
    occupied = cuts[:-1] < cuts[1:]
    stated = metric.sums(confidences, np.zeros(n_rows))
    last = np.eye(len(stated))[:, -1:]

    def of_hits(rng: np.random.Generator) -> float:
        right = rng.random(n_rows + 1) < chances
        hits = occupied * np.add.reduceat(right, cuts, dtype=np.int64)[:-1]
        return float(metric.value(stated + last * hits, n_rows))

    return of_hits


def _tested(value: float, errors: FloatArray) -> ConsistencyTest:
    as_large = int(np.count_nonzero(errors >= value - sums.SAME))
    return ConsistencyTest(value, (1 + as_large) / (1 + len(errors)), float(errors.mean()))


def consistency_of_bins(bins: BinSums, *, n_effective: float, n_resamples: int, seed: int) -> ConsistencyTest:
    """The same for the ECE from the sums (M,) of bins, whose n_effective rows are taken to have its mean confidence."""
    found = Populations(bins)
    sizes = np.maximum(1, np.rint(found.shares * n_effective)).astype(np.int64)
    hits = np.random.default_rng(seed).binomial(sizes, found.stated, size=(n_resamples, len(sizes)))
    return _tested(found.value, np.abs(found.stated - hits / sizes) @ found.shares)


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

    An error $\theta$ is in the interval if a sample of the likeliest population with this error often has an ECE T as
    small, and as large, as the data's, t:

    $$\{\theta : P_\theta(T \le t) > \tfrac{\alpha}{2} \text{ and } P_\theta(T \ge t) > \tfrac{\alpha}{2}\}$$

    Args:
        labels: (N,) int in [0, C).
        binning: as for `expected_calibration_error`.
        n_resamples: samples drawn at each error that is tried.

    Returns:
        ``Interval(value, low, high)``: the ECE of the data, whose noise may put it above the interval; ``low`` is 0
        where chance alone explains it. (Efron and Tibshirani 1993, 12.3; DiCiccio and Romano 1990.)

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
    found = interval_of_bins(bins, n_resamples=n_resamples, confidence_level=confidence_level, seed=seed)
    # Quantile bins leave out the row of the smallest confidence.
    return found._replace(value=float(sums.binned_error(bins, len(top.confidence))))


class Populations:
    r"""The likeliest populations with an error: each gap of the data's bins (M,) is made smaller, or larger.

    $$|g_m(\lambda)| = \max(0, |g_m| - \lambda C_m (1 - C_m)), \qquad
    \theta(\lambda) = \sum_m \frac{|B_m|}{N} |g_m(\lambda)|$$
    """

    def __init__(self, bins: BinSums) -> None:
        self.occupied = bins.counts > 0
        self.counts, confidence, correct = (part[self.occupied] for part in bins)
        self.n_rows = self.counts.sum()
        self.shares, self.stated = self.counts / self.n_rows, np.clip(confidence / self.counts, 0, 1)
        self.gaps = (confidence - correct) / self.counts
        self.value = float(self.shares @ np.abs(self.gaps))
        self._variances = np.maximum(self.stated * (1 - self.stated), _SMALLEST_VARIANCE)
        self.most = float((np.abs(self.gaps) / self._variances).max())  # no gap is left
        self.least = -float((1 / self._variances).max())

    def accuracies(self, shrinkage: FloatArray | float) -> FloatArray:
        """Of the bins (..., M), by the shrinkage (...)."""
        over = self.gaps >= 0
        sizes = np.maximum(0.0, np.abs(self.gaps) - np.asarray(shrinkage)[..., None] * self._variances)
        # A gap that is too large for its own side turns to the other, where there is more room.
        turns = (sizes > np.where(over, self.stated, 1 - self.stated)) & (over == (self.stated < 0.5))
        return np.clip(np.where(over != turns, self.stated - sizes, self.stated + sizes), 0.0, 1.0)

    def errors(self, shrinkage: FloatArray | float) -> FloatArray:
        """Their calibration errors (...)."""
        return np.asarray(np.abs(self.stated - self.accuracies(shrinkage)) @ self.shares)


def interval_of_bins(bins: BinSums, *, n_resamples: int, confidence_level: float, seed: int) -> Interval:
    """The same from the sums (M,) of the bins."""
    found, rng = Populations(bins), np.random.default_rng(seed)
    # Rows fall into other bins in another sample.
    drawn = rng.multinomial(int(found.n_rows), found.shares, size=n_resamples)
    of_hits = int(rng.integers(2**63))  # the same at each error that is tried, so that they are told apart
    tail, near = (1 - confidence_level) / 2, 1e-12 + 1e-9 * found.value

    def errors(shrinkage: float) -> FloatArray:
        hits = np.random.default_rng(of_hits).binomial(drawn, found.accuracies(shrinkage))
        return np.abs(drawn * found.stated - hits).sum(axis=1) / found.n_rows

    low = _crossing(found, lambda s: (errors(s) >= found.value - near).mean() > tail)
    high = _crossing(found, lambda s: (errors(s) <= found.value + near).mean() <= tail)
    ends = found.errors(np.array([low, high]))
    return Interval(found.value, float(ends[0]), float(ends.max()))


def _crossing(of: Populations, holds: Callable[[float], Any]) -> float:
    """The largest shrinkage at which this holds, as it does from there on downwards; the least if nowhere."""
    most, least = of.most, of.least
    if holds(most):
        return most
    for _ in range(_HALVINGS):
        middle = (most + least) / 2
        most, least = (most, middle) if holds(middle) else (middle, least)
    return least


def holm(p_values: ArrayLike) -> FloatArray:
    """P-values (K,) corrected for their number by the step-down method of Holm 1979.

    >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected
