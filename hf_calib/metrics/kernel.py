"""Calibration error of the top label or of whole distributions, by kernel density estimation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
    check_choice,
    check_probs_and_any_labels,
    check_real,
    row_chunks,
)
from hf_calib.metrics.sums import Norm, TopLabel, top_label

# This is the authors' grid.
BANDWIDTHS = np.concatenate([np.logspace(-5, -1, 15), np.linspace(0.2, 1, 5)])
# The least distance to 0 and 1, where the logarithm of the kernel is infinite.
_MARGIN = 1e-6
# The most examples, because the choice needs 20 passes over all pairs.
_MOST_FOR_BANDWIDTH = 1000
# The pairs whose temporaries are in memory at the same time.
_BLOCK = 2**18


def kde_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    bandwidth: float | None = None,
    kind: Literal["top_label", "canonical"] = "top_label",
    norm: Literal["l1", "l2"] = "l1",
) -> float:
    r"""Calibration error by kernel density estimation (ECE-KDE), of the top label or all classes.

    Use it for the canonical error of the whole distribution; `classwise_calibration_error` treats
    each class alone. For the top label, `smooth_calibration_error` is much cheaper than its O(N^2)
    time.

    $$\left(\frac{1}{N} \sum_i \lVert \hat\eta(p_i) - p_i \rVert_q^q\right)^{1/q}, \qquad
    \hat\eta(p_i) = \frac{\sum_{j \ne i} k(p_i; p_j) \, y_j}{\sum_{j \ne i} k(p_i; p_j)}$$

    where $k(\cdot; p_j)$ is the Dirichlet density of parameters $p_j / h + 1$; a confidence c is
    the point (c, 1 - c).

    Args:
        probs: (N, C) float with at least two rows.
        bandwidth: h, at least 1e-8; None selects the most likely of 20 values from 1e-5 to 1 by
            leave-one-out, on at most 1,000 rows. With many classes the canonical error depends
            mainly on h.
        kind: "top_label", or "canonical", which sums over the classes, to at most 2 (l1) or 1.42
            (l2).
        norm: q, "l1" or "l2".

    References:
        Popordanoska et al. 2022, A consistent and differentiable Lp canonical calibration error
        estimator, Eq. 9. Unlike in the authors' code, the l2 error is a root, and no term log h
        favours the smallest h.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(kde_calibration_error(probs, [0, 1, 1], bandwidth=0.1), 4)
    0.41
    """
    checked, targets = check_probs_and_any_labels(probs, labels)
    check_choice("kind", kind, ("top_label", "canonical"))
    check_choice("norm", norm, ("l1", "l2"))
    way_out = "the density around an example is estimated from the others"
    shape = f"shape {checked.shape}"
    check(len(checked) >= 2, "probs to hold at least 2 examples", shape, way_out)
    if bandwidth is not None:
        way_out = "bandwidth=None chooses one"
        check_real("bandwidth", bandwidth, way_out)
        # Below 1e-8 log-kernels are inaccurate, because they are differences of very large numbers.
        fits = 1e-8 <= bandwidth < np.inf
        check(fits, "bandwidth to be finite and at least 1e-08", bandwidth, way_out)
    if kind == "top_label":
        return kde_error(top_label(checked, targets), bandwidth=bandwidth, norm=norm)
    predicted = checked.astype(np.float64)
    outcomes = targets if targets.ndim == 2 else np.eye(checked.shape[1])[targets]
    points = predicted.clip(_MARGIN, 1 - _MARGIN)
    return _error(points, predicted, outcomes, bandwidth, norm)


def kde_error(
    top: TopLabel, *, bandwidth: float | None = None, norm: Norm = "l1"
) -> float:
    """The error of at least two rows with a known top label."""
    predicted = top.confidence[:, None]
    clipped = predicted.clip(_MARGIN, 1 - _MARGIN)
    points = np.hstack([clipped, 1 - clipped])
    return _error(points, predicted, top.correct[:, None], bandwidth, norm)


def _error(
    points: FloatArray,
    predicted: FloatArray,
    outcomes: FloatArray,
    bandwidth: float | None,
    norm: Norm,
) -> float:
    """The error of predictions (N, K) for outcomes (N, K), smoothed over points of the simplex."""
    if bandwidth is None:
        bandwidth = _choose_bandwidth(points)
    # The means around each point exclude its own outcome.
    means = np.empty(outcomes.shape)
    for rows, kernel, _ in _kernel_blocks(points, bandwidth):
        means[rows] = kernel @ outcomes / kernel.sum(axis=1, keepdims=True)
    gaps = np.abs(means - predicted)
    if norm == "l1":
        return float(gaps.sum(axis=1).mean())
    return float(np.sqrt((gaps**2).sum(axis=1).mean()))


def _choose_bandwidth(points: FloatArray) -> float:
    """The bandwidth of the grid with the highest leave-one-out likelihood of the points (N, K)."""
    n_points = len(points)
    if n_points > _MOST_FOR_BANDWIDTH:
        rng = np.random.default_rng(0)
        chosen = rng.choice(n_points, _MOST_FOR_BANDWIDTH, replace=False)
        # The points are sorted so that the order of the rows does not matter.
        points = points[np.lexsort(points.T)[chosen]]
    likelihoods = []
    for bandwidth in BANDWIDTHS:
        likelihood = 0.0
        for _, kernel, peak in _kernel_blocks(points, bandwidth):
            likelihood += (np.log(kernel.sum(axis=1)) + peak).sum()
        likelihoods.append(likelihood)
    return float(BANDWIDTHS[np.argmax(likelihoods)])


def _kernel_blocks(
    points: FloatArray, bandwidth: float
) -> Iterator[tuple[slice, FloatArray, FloatArray]]:
    """Rows of the kernel matrix, 0 on the diagonal, by the largest of each, and its logarithm."""
    parameters = points / bandwidth
    of_points = gammaln(parameters + 1).sum(axis=1)
    normaliser = of_points - gammaln((parameters + 1).sum(axis=1))
    for rows in row_chunks(len(points), len(points), elements=_BLOCK):
        log_kernel = np.log(points[rows]) @ parameters.T - normaliser
        own = np.arange(rows.start, rows.stop)
        log_kernel[own - rows.start, own] = -np.inf
        peak = log_kernel.max(axis=1)
        log_kernel -= peak[:, None]
        yield rows, np.exp(log_kernel, out=log_kernel), peak
