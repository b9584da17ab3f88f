"""Is a calibration error more than chance? A test by labels drawn from the probabilities themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib.metrics._inputs import check_probs_and_labels
from hf_calib.metrics.binning import Binning, FloatArray, IntArray, assign_bins, sum_bins, uniform_bins
from hf_calib.metrics.bootstrap import Metric, check_n_resamples, check_resamples, find_metric, finite_value
from hf_calib.metrics.calibration import Norm, binned_error, top_label

_SAME = 1e-12  # errors this near to each other differ by rounding only

Simulation = Callable[[np.random.Generator], float]


class ConsistencyTest(NamedTuple):
    """A metric's value, how often chance alone makes it as large, and its mean if calibrated."""

    value: float
    p_value: float
    expected: float


def consistency_test(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    metric: str | Metric = "expected_calibration_error",
    n_resamples: int = 1000,
    seed: int = 0,
    **options: Any,
) -> ConsistencyTest:
    r"""Test of the hypothesis that the model is calibrated and the error is chance.

    A finite sample of a perfectly calibrated model has an error above 0. Consistency resampling shows how
    large: it keeps the probabilities, draws labels from them, and computes the metric again. A small p-value
    says that the model is not calibrated; a large one says only that this sample does not show it. For the
    spread of a number that is known not to be 0, take `bootstrap_interval`.

    $$\tilde y_i^{(b)} \sim p_i, \qquad
    p = \frac{1 + \#\{b : \theta(P, \tilde y^{(b)}) \ge \theta(P, y)\}}{1 + B}$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        metric: the name of a metric of `hf_calib.metrics` that takes probs and labels, or a function
            ``metric(probs, labels, **options) -> float``. Larger must mean worse.
        n_resamples: B, how many times to draw labels, at least 1.
        seed: of the random draws; the same seed gives the same p-value.
        options: go to the metric, such as ``n_bins=10``. One that has the name of an argument here, as the
            ``metric`` of `post_processing_gap`, goes in with the function: ``functools.partial``.

    Returns:
        ``ConsistencyTest(value, p_value, expected)``: the metric, in its unit; a fraction in (0, 1], at least
        1 / (B + 1); and the mean of the metric over the drawn labels, which is what a calibrated model with
        these probabilities would show.

    Raises:
        TypeError: if a dtype is wrong, or metric is neither a name nor a function.
        ValueError: if probs are no probabilities, labels do not fit or are soft, an option is out of range,
            or the metric is not finite.

    Notes:
        What is tested depends on the metric: the expected and maximum calibration error look at the top label,
        whose correctness is drawn with the probability that its confidence states, and cannot see an error in
        the other classes; `classwise_calibration_error` looks at each class. Under the hypothesis the
        p-value is u or less with probability u at most, for any number of examples and of resamples. Rows that
        sum to 1 only nearly are divided by their sum before classes are drawn from them.

    References:
        Bröcker and Smith 2007, "Increasing the reliability of reliability diagrams" (consistency resampling);
        Vaicenavicius et al. 2019, "Evaluating model calibration in classification" (as a test).

    >>> rng = np.random.default_rng(0)
    >>> top = rng.uniform(0.5, 1.0, 2000)
    >>> right = rng.random(2000) < top - 0.1
    >>> overconfident = np.stack([top, 1 - top], axis=1)
    >>> result = consistency_test(overconfident, np.where(right, 0, 1))
    >>> round(result.value, 2), round(result.expected, 2), round(result.p_value, 4)
    (0.09, 0.02, 0.001)
    """
    check_n_resamples(n_resamples)
    rows, targets = check_probs_and_labels(probs, labels)
    function = find_metric(metric)
    value = finite_value(function, rows, targets, options)
    simulate = _simulation(metric, function, rows, targets, options)
    rng = np.random.default_rng(seed)
    errors = check_resamples(np.array([simulate(rng) for _ in range(n_resamples)]))
    as_large = int(np.count_nonzero(errors >= value - _SAME))
    return ConsistencyTest(value, (1 + as_large) / (1 + n_resamples), float(errors.mean()))


def _simulation(
    metric: str | Metric,
    function: Metric,
    probs: NDArray[Any],
    labels: NDArray[np.int64],
    options: dict[str, Any],
) -> Simulation:
    """The metric of drawn labels, in its cheapest form; the function has accepted the options before."""
    if metric == "expected_calibration_error":
        return _top_label_simulation(top_label(probs, labels)[0], **options)
    if metric == "maximum_calibration_error":
        return _top_label_simulation(top_label(probs, labels)[0], norm="max", **options)
    if metric == "classwise_calibration_error":
        return _classwise_simulation(probs, **options)
    draw = _label_sampler(probs)
    return lambda rng: float(function(probs, draw(rng), **options))


def _top_label_simulation(
    confidences: FloatArray,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
    debias: bool = False,
) -> Simulation:
    """Confidences stay, so their bins and sums do; only the number of right ones in each bin is drawn."""
    bins = assign_bins(confidences, n_bins, binning)
    order = np.argsort(bins, kind="stable")
    # Correctness (N + 1,) in the order of the bins; the last one, never right, ends the last bin.
    chances = np.append(confidences[order], 0.0)
    cuts = np.searchsorted(bins[order], np.arange(n_bins + 1))
    empty = cuts[:-1] == cuts[1:]  # of which reduceat would give the first row of the next
    stated = sum_bins(confidences, np.zeros_like(confidences), bins, n_bins)

    def simulate(rng: np.random.Generator) -> float:
        right = rng.random(len(chances)) < chances
        hits = np.where(empty, 0.0, np.add.reduceat(right, cuts, dtype=np.int64)[:-1])
        sums = stated._replace(correct=hits)
        return binned_error(sums, n_examples=len(confidences), norm=norm, debias=debias)

    return simulate


def _classwise_simulation(probs: NDArray[Any], *, n_bins: int = 15) -> Simulation:
    """Only the hits of each class's bins are drawn."""
    n_examples, n_classes = probs.shape
    size = n_classes * n_bins
    slots = uniform_bins(probs, n_bins).astype(np.int32)
    slots += np.arange(n_classes, dtype=np.int32) * n_bins
    stated = np.bincount(slots.ravel(), probs.ravel(), minlength=size)
    rows = np.arange(n_examples)
    draw = _label_sampler(probs)

    def simulate(rng: np.random.Generator) -> float:
        hits = np.bincount(slots[rows, draw(rng)], minlength=size)
        return float(np.abs(stated - hits).sum() / (n_examples * n_classes))

    return simulate


def _label_sampler(probs: NDArray[Any]) -> Callable[[np.random.Generator], IntArray]:
    """Draw one class per row of probs (N, C): halve the cumulated row log C times."""
    n_examples, n_classes = probs.shape
    cumulated = probs.astype(np.float64).clip(min=0).cumsum(axis=1)
    cumulated /= cumulated[:, -1:]
    first = np.arange(n_examples) * n_classes
    flat = cumulated.ravel()
    steps = [2**k for k in reversed(range((n_classes - 1).bit_length()))]

    def draw(rng: np.random.Generator) -> IntArray:
        points = rng.random(n_examples)
        classes = np.zeros(n_examples, dtype=np.intp)
        for step in steps:
            ahead = np.minimum(classes + step, n_classes)
            # Everything up to class `ahead - 1` lies at or below the point: the class is not among them.
            classes = np.where(flat[first + ahead - 1] <= points, ahead, classes)
        return classes

    return draw
