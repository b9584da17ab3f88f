"""Metrics of rankings by confidence: selective prediction and out-of-distribution detection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import digamma, entr, log_softmax, logsumexp, softmax

from hf_calib._errors import check
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.sums import (
    Interval,
    TopLabel,
    interval_of,
    top_label,
    without_rounding,
)

OOD_SCORES = {
    "max_probability": "Maximum probability",
    "entropy": "Entropy",
    "max_logit": "Maximum logit",
    "energy": "Energy",
}
# The fraction of in-distribution inputs accepted, at which the false positive rate is read.
ACCEPTED = 0.95

Uncertainty = Callable[[FloatArray], FloatArray]


class RiskCoverage(NamedTuple):
    """The coverages (N,), and the error rates (N,) among so many of the most confident examples."""

    coverage: FloatArray
    risk: FloatArray


def area_under_risk_coverage(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Area under the risk-coverage curve (AURC): the error rate averaged over all coverages.

    Use it for a classifier that may abstain. A calibrator that keeps the order of the confidences
    does not change it. Confidences that are equal up to the rounding of float32, in p and in 1 - p,
    share their errors evenly.

    $$\frac{1}{N} \sum_{k=1}^{N} \frac{\text{errors among the } k \text{ most confident}}{k}$$

    (Geifman, Uziel and El-Yaniv 2019, Bias-reduced uncertainty estimation for deep neural
    classifiers.)

    >>> area_under_risk_coverage([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]], [0, 0, 0, 1])
    0.14583333333333331
    """
    return mean_risk(top_label(*checks.check_probs_and_any_labels(probs, labels)))


def mean_risk(top: TopLabel) -> float:
    """The AURC of rows with a known top label."""
    confidence = without_rounding(top.confidence)
    return float(risk_coverage_curve(confidence, top.correct).risk.mean())


def area_of(ranked: FloatArray) -> float:
    """The AURC of rows of which some count as tied.

    `ranked` (3, K) are the numbers of rows with each of K confidences, the least first, the sums of
    these confidences, and the numbers of correct rows.
    """
    falling = ranked[:, ::-1]
    counts, _, right = falling[:, falling[0] > 0]
    wrong = counts - right
    # After r rows with e errors come n tied rows, which share their w errors: among the first k
    # rows, up to k = r + n, there are e + (k - r) w / n errors. Their rates, divided by k, add up
    # to w + (e - r w / n) times the sum of 1 / k.
    rows = np.cumsum(counts) - counts
    errors = np.cumsum(wrong) - wrong
    rate = wrong / counts
    inverse_ranks = digamma(rows + counts + 1) - digamma(rows + 1)
    area = wrong + (errors - rate * rows) * inverse_ranks
    return float(area.sum() / counts.sum())


def risk_coverage_curve(confidences: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """The error rate among the k most confident predictions, for every k; the AURC is its mean.

    Args:
        confidences: (N,) float of any range; only the order counts. Equal confidences share their
            errors evenly.
        correct: (N,) of 0 and 1, or bool; fractions for soft labels.

    >>> risk_coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]).risk.round(3)
    array([0.   , 0.   , 0.333, 0.25 ])
    """
    confidence = checks.as_floats("confidences", confidences)
    right = checks.as_floats("correct", correct)
    are_rows = confidence.ndim == 1 and confidence.size > 0
    requirement = "confidences and correct to have one shape (N,), N >= 1"
    got = f"shapes {confidence.shape} and {right.shape}"
    fits = are_rows and confidence.shape == right.shape
    check(fits, requirement, got, "pass one of each per example")
    _check_finite("confidences", confidence)
    # Comparisons with NaN are False.
    inside = (right >= 0) & (right <= 1)
    way_out = "pass 1 for a correct prediction and 0 for a wrong one"
    checks.refuse(~inside, "correct", "lie in [0, 1]", right, way_out)
    order = np.argsort(-confidence, kind="stable")
    wrong = 1 - right[order]
    n_rows = len(wrong)
    # Rows of one confidence share their errors.
    starts = np.flatnonzero(np.diff(confidence[order], prepend=np.inf))
    sizes = np.diff(starts, append=n_rows)
    rates = np.add.reduceat(wrong, starts) / sizes
    errors = np.cumsum(np.repeat(rates, sizes))
    answered = np.arange(1, n_rows + 1)
    return RiskCoverage(answered / n_rows, errors / answered)


def _check_finite(argument: str, values: FloatArray) -> None:
    n_bad = np.count_nonzero(~np.isfinite(values))
    got = f"{n_bad} NaN or infinite values of {values.size}"
    way_out = "look for overflow in the model's logits"
    check(n_bad == 0, f"{argument} to be finite", got, way_out)


Tally = Callable[[NDArray[Any]], tuple[FloatArray, FloatArray]]


def tally(scores: FloatArray, true: NDArray[np.bool_]) -> Tally:
    """The numbers (K + 1,) of false and true rows of the 0 to K largest scores, by counts (N,)."""
    different, places = np.unique(-scores, return_inverse=True)
    # The first slot, of no row, is that of a threshold above all scores.
    n_slots = len(different) + 1
    slots = np.where(true, n_slots, 0) + 1 + places

    def tallied(counts: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
        by_score = np.bincount(slots, counts, 2 * n_slots).reshape(2, n_slots)
        n_false, n_true = by_score.cumsum(axis=1)
        return n_false, n_true

    return tallied


def area_under_roc(false: FloatArray, true: FloatArray) -> float:
    """The probability that a true row is before a false one, a tie counting half; or NaN."""
    n_pairs = false[-1] * true[-1]
    if n_pairs == 0:
        return np.nan
    # The true rows before each group of tied false rows, with half of those that tie with it.
    n_before = (true[1:] + true[:-1]) / 2
    return float(np.diff(false) @ n_before / n_pairs)


def average_precision(false: FloatArray, true: FloatArray) -> float:
    """The mean precision at the true rows; NaN if there is none."""
    n_true = true[-1]
    if n_true == 0:
        return np.nan
    n_flagged = (true + false)[1:]
    precision = true[1:] / np.maximum(n_flagged, 1)
    return float(np.diff(true) @ precision / n_true)


class OodDetection(NamedTuple):
    """The AUROC, and the fraction of OOD inputs accepted if 95% of in-distribution inputs are."""

    auroc: Interval
    fpr95: Interval


def ood_auroc(
    probs_in: ArrayLike, probs_out: ArrayLike, *, score: str = "entropy"
) -> float:
    r"""AUROC of out-of-distribution (OOD) detection: how well uncertainty separates OOD inputs.

    The value is $P(u_\text{out} > u_\text{in}) + \tfrac12 P(u_\text{out} = u_\text{in})$.
    `ood_detection` accepts logits and has intervals.

    Args:
        probs_in: (N, C) float, the model's test set; probs_out: (N', C) float, OOD inputs.
        score: the uncertainty u: "entropy" as in the papers, or "max_probability", which counts
            negatively.

    References:
        Hendrycks and Gimpel 2017 (max probability); Ghosh et al. 2022, "AdaFocal", appendix K
        (entropy).

    >>> ood_auroc([[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.6, 0.4]])
    0.875
    """
    checks.check_choice("score", score, tuple(_OF_PROBS))
    inside = checks.check_probs(probs_in, argument="probs_in")
    outside = checks.check_probs(probs_out, argument="probs_out")
    (tallied,) = _tallies("probs", inside, outside, [_OF_PROBS[score]])
    return area_under_roc(*tallied(np.ones(len(inside) + len(outside))))


def ood_detection(
    logits_in: ArrayLike,
    logits_out: ArrayLike,
    *,
    scores: Sequence[str] = tuple(OOD_SCORES),
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    seed: int = 0,
) -> dict[str, OodDetection]:
    r"""AUROC and false positive rate of out-of-distribution (OOD) detection, with intervals.

    An input is flagged if its score is above a threshold. "max_probability", "entropy", "max_logit"
    and "energy" are

    $$-\max_c p_c, \quad -\sum_c p_c \log p_c, \quad -\max_c z_c, \quad -\log \sum_c e^{z_c}$$

    Args:
        logits_in: (N, C) float, the model's test set; logits_out: (N', C) float, OOD inputs. Both
            are resampled.
        scores: names of scores; the first two are also valid for logarithms of probabilities.
            (Hendrycks and Gimpel 2017; Hendrycks et al. 2022, maximum logit; Liu et al. 2020,
            energy.)

    >>> found = ood_detection([[4.0, 0.0], [0.0, 2.0]], [[0.5, 0.0], [0.0, 3.0]], scores=["energy"])
    >>> found["energy"].auroc.value
    0.75
    """
    rng = checks.check_draws(n_resamples, seed, confidence_level)
    _check_scores(scores)
    inside = _check_logits("logits_in", logits_in)
    outside = _check_logits("logits_out", logits_out)
    sizes = [len(inside), len(outside)]
    uncertainties = [_OF_LOGITS[score] for score in scores]
    tallies = _tallies("logits", inside, outside, uncertainties)
    # Each set is resampled by itself, so that its size stays that of the study.
    rates = np.empty((n_resamples, len(scores), 2))
    for of_sample in rates:
        drawn = [rng.integers(0, size, size) for size in sizes]
        counts = [
            np.bincount(rows, minlength=size)
            for rows, size in zip(drawn, sizes, strict=True)
        ]
        of_sample[:] = _rates_of(tallies, np.concatenate(counts))
    found = {}
    values = _rates_of(tallies, np.ones(sum(sizes)))
    for score, value, draws in zip(scores, values, rates.swapaxes(0, 1), strict=True):
        auroc = interval_of(value[0], draws[:, 0], confidence_level)
        fpr95 = interval_of(value[1], draws[:, 1], confidence_level)
        found[score] = OodDetection(auroc, fpr95)
    return found


# Uncertainties (N,) of rows (N, C), which are sorted so that the order of the classes breaks no
# tie.


def _odds_against_top(logits: FloatArray) -> FloatArray:
    # Their logarithm, because probabilities near 1 hardly differ.
    return logsumexp(logits[:, :-1] - logits[:, -1:], axis=1)


def _entropy_of_logits(logits: FloatArray) -> FloatArray:
    nats = -log_softmax(logits, axis=1)
    return (softmax(logits, axis=1) * nats).sum(axis=1)


def _entropy_of_probs(probs: FloatArray) -> FloatArray:
    # Probabilities that are below 0 by rounding count as 0.
    return entr(np.maximum(probs, 0)).sum(axis=1)


def _negative_largest(rows: FloatArray) -> FloatArray:
    return -rows[:, -1]


def _energy(logits: FloatArray) -> FloatArray:
    return -logsumexp(logits, axis=1)


_OF_LOGITS: dict[str, Uncertainty] = {
    "max_probability": _odds_against_top,
    "entropy": _entropy_of_logits,
    "max_logit": _negative_largest,
    "energy": _energy,
}
_OF_PROBS: dict[str, Uncertainty] = {
    "entropy": _entropy_of_probs,
    "max_probability": _negative_largest,
}


def _check_scores(scores: Sequence[str]) -> None:
    """Raise unless there are scores, all of which are known."""
    are_names = isinstance(scores, Sequence) and not isinstance(scores, str)
    way_out = f"pass for example {list(OOD_SCORES)}"
    checks.check_type(are_names, "scores to be a list of names", repr(scores), way_out)
    check(len(scores) > 0, "scores to hold a name", "none", way_out)
    for score in scores:
        checks.check_choice("scores", score, tuple(OOD_SCORES))


def _check_logits(argument: str, logits: ArrayLike) -> FloatArray:
    rows = checks.as_floats(argument, logits)
    are_rows = rows.ndim == 2 and rows.shape[1] >= 2 and len(rows) > 0
    requirement = f"{argument} to have shape (N, C), N >= 1"
    way_out = "pass one row of at least two classes for each example"
    check(are_rows, requirement, f"shape {rows.shape}", way_out)
    _check_finite(argument, rows)
    return rows


def _tallies(
    kind: str,
    inside: NDArray[Any],
    outside: NDArray[Any],
    scores: list[Uncertainty],
) -> list[Tally]:
    """The tally of each uncertainty of rows (N, C) and (N', C), of which the second are true."""
    n_classes = inside.shape[1]
    n_others = outside.shape[1]
    requirement = f"{kind}_out to have {n_classes} columns"
    way_out = f"pass the {kind} of one model on both sets"
    check(n_others == n_classes, requirement, f"{n_others} columns", way_out)
    parts = []
    for rows in (inside, outside):
        for part in checks.row_chunks(*rows.shape):
            # Sorted, the same numbers in other classes have the same uncertainty, bit by bit.
            ordered = np.sort(rows[part].astype(np.float64), axis=1)
            parts.append([score(ordered) for score in scores])
    true = np.repeat([False, True], [len(inside), len(outside)])
    columns = zip(*parts, strict=True)
    return [tally(np.concatenate(column), true) for column in columns]


def _rates_of(tallies: list[Tally], counts: NDArray[Any]) -> list[tuple[float, float]]:
    """The AUROC of each score, and the OOD rows accepted if `ACCEPTED` of the others are."""
    found = []
    for tallied in tallies:
        false, true = tallied(counts)
        accepted = false[-1] - false
        # The lowest threshold, with the most rows flagged, that accepts enough.
        last = np.count_nonzero(accepted >= ACCEPTED * false[-1]) - 1
        fpr95 = float(1 - true[last] / true[-1])
        found.append((area_under_roc(false, true), fpr95))
    return found
