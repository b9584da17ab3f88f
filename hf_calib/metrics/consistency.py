"""Test of whether a calibration error is more than chance, by labels drawn from the probabilities themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics._simulated import label_sampler
from hf_calib.metrics.bootstrap import check_resamples, finite_value
from hf_calib.metrics.by_name import MetricFunction, find_metric
from hf_calib.metrics.checks import check_n_resamples, check_probs_and_labels, check_seed
from hf_calib.metrics.sums import BinSums

_SAME = 1e-12  # errors this near to each other differ by rounding only


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
        ValueError: if probs are not probabilities, labels do not fit or are soft, an option is out of range,
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
    n_resamples = check_n_resamples(n_resamples)
    rng = np.random.default_rng(check_seed(seed))
    rows, targets = check_probs_and_labels(probs, labels)
    found = find_metric(metric)
    value = finite_value(found.function, rows, targets, options)
    if found.simulated is not None:  # the function has accepted the options
        simulate = found.simulated(rows, **options)
    else:
        draw = label_sampler(rows)

        def simulate(rng: np.random.Generator) -> float:
            return float(found.function(rows, draw(rng), **options))

    errors = check_resamples(np.array([simulate(rng) for _ in range(n_resamples)]))
    as_large = int(np.count_nonzero(errors >= value - _SAME))
    return ConsistencyTest(value, (1 + as_large) / (1 + n_resamples), float(errors.mean()))


def consistency_of_bins(sums: BinSums, *, n_effective: float, n_resamples: int, seed: int) -> ConsistencyTest:
    """The same for the ECE from the sums (M,) of its bins: the rows of a bin are taken to have its mean confidence.

    Args:
        sums: of the bins, or of weights.
        n_effective: rows; of weights, as many as would tell as much.
        n_resamples: of the labels.
        seed: of the draws.
    """
    counts, confidence, correct = (part[sums.counts > 0] for part in sums)
    shares, stated = counts / counts.sum(), np.clip(confidence / counts, 0, 1)
    value = float(shares @ np.abs(stated - correct / counts))
    sizes = np.maximum(1, np.rint(shares * n_effective)).astype(np.int64)
    hits = np.random.default_rng(seed).binomial(sizes, stated, size=(n_resamples, len(sizes)))
    errors = np.abs(stated - hits / sizes) @ shares
    as_large = int(np.count_nonzero(errors >= value - _SAME))
    return ConsistencyTest(value, (1 + as_large) / (1 + n_resamples), float(errors.mean()))
