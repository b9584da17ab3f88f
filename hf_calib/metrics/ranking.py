"""Rankings by confidence: selective prediction, which answers where it is high, and out-of-distribution detection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr, log_softmax, logsumexp
from scipy.stats import rankdata

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.metrics.checks import (
    FloatArray,
    as_array,
    as_floats,
    check_choice,
    check_confidence_level,
    check_n_resamples,
    check_probs,
    check_probs_and_any_labels,
    check_seed,
    row_chunks,
)
from hf_calib.metrics.resamples import Interval, interval_of
from hf_calib.metrics.sums import TopLabel, top_label

UncertaintyScore = Literal["entropy", "max_probability"]
OOD_SCORES = {
    "max_probability": "Maximum probability",
    "entropy": "Entropy",
    "max_logit": "Maximum logit",
    "energy": "Energy",
}
ACCEPTED = 0.95  # of the familiar inputs, where the false positive rate is taken


class RiskCoverage(NamedTuple):
    """The error rate (N,) among the most confident share (N,) of the examples."""

    coverage: FloatArray
    risk: FloatArray


def area_under_risk_coverage(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Area under the risk-coverage curve (AURC): the error rate, averaged over how much is answered.

    For a classifier that may abstain. It judges the ranking by confidence and the accuracy together, and does
    not change when confidences are recalibrated without changing their order; `expected_calibration_error`
    is the opposite.

    $$\frac{1}{N} \sum_{k=1}^{N} \frac{\text{errors among the } k \text{ most confident}}{k}$$

    Returns:
        A fraction in [0, 1], smaller is better; 0 only without any error.

    Notes:
        Among confidences that are equal in float32, as `AbstainRule` decides on them, errors count as evenly spread,
        so that the order of the examples never matters.

    References:
        Geifman and El-Yaniv 2017; Geifman, Uziel and El-Yaniv 2019.

    >>> area_under_risk_coverage([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]], [0, 0, 0, 1])
    0.14583333333333331
    """
    return mean_risk(top_label(*check_probs_and_any_labels(probs, labels)))


def mean_risk(top: TopLabel) -> float:
    """The AURC of rows whose top label is known."""
    return float(risk_coverage_curve(top.confidence.astype(np.float32), top.correct).risk.mean())


def risk_coverage_curve(confidences: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    r"""The error rate among the k most confident predictions, for every k.

    To draw, and to choose the confidence below which to abstain; `area_under_risk_coverage` is its mean.

    Args:
        confidences: (N,) float, of any range: only their order counts.
        correct: (N,) of 0 and 1, or bool; fractions for soft labels.

    Returns:
        coverage (N,), k / N, and risk (N,), both fractions. Equal confidences share their errors evenly.

    >>> curve = risk_coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1])
    >>> curve.risk.round(3)
    array([0.   , 0.   , 0.333, 0.25 ])
    """
    confidence, right = as_floats("confidences", confidences), as_floats("correct", correct)
    got = f"shapes {confidence.shape} and {right.shape}"
    fits = confidence.ndim == 1 and confidence.shape == right.shape and len(confidence) > 0
    way_out = "pass one confidence and one 0 or 1 per example"
    check(fits, "confidences and correct to have one shape (N,), N >= 1", got, way_out)
    for name, values in (("confidences", confidence), ("correct", right)):
        n_bad = int((~np.isfinite(values)).sum())
        got = f"{n_bad} NaN or infinite values of {len(values)}"
        check(not n_bad, f"{name} to be finite", got, "look for overflow in the model's logits")
    order = np.argsort(-confidence, kind="stable")
    confidence, wrong = confidence[order], 1 - right[order]
    starts = np.flatnonzero(np.diff(confidence, prepend=np.inf))
    sizes = np.diff(starts, append=len(wrong))
    evenly_spread = np.repeat(np.add.reduceat(wrong, starts) / sizes, sizes)
    answered = np.arange(1, len(wrong) + 1)
    return RiskCoverage(answered / len(wrong), np.cumsum(evenly_spread) / answered)


# Out-of-distribution detection


class RocCurve(NamedTuple):
    """True and false positive rates as the threshold falls, the out-of-distribution inputs as positives."""

    inside: FloatArray
    outside: FloatArray


class OodDetection(NamedTuple):
    """How well one score separates inputs from elsewhere.

    Args:
        auroc: the probability that a random input from elsewhere looks more uncertain than a random familiar one.
        fpr95: the share of the inputs from elsewhere that is accepted where 95% of the familiar ones are.
        curve: the ROC curve.
    """

    auroc: Interval
    fpr95: Interval
    curve: RocCurve


def ood_auroc(probs_in: ArrayLike, probs_out: ArrayLike, *, score: UncertaintyScore = "entropy") -> float:
    r"""AUROC of out-of-distribution detection: how well uncertainty separates unfamiliar inputs from familiar ones.

    For robustness: calibration errors look at one dataset, this compares two. For logits, with intervals and other
    scores, see `ood_detection`.

    $$P(u_\text{out} > u_\text{in}) + \tfrac12 P(u_\text{out} = u_\text{in}), \qquad
    u = -\sum_c p_c \log p_c \ \text{ or } \ u = -\max_c p_c$$

    Args:
        probs_in: (N, C) float, rows that sum to 1: the model's test set.
        probs_out: (N', C) float, rows that sum to 1: inputs from elsewhere.
        score: "entropy" of the row, as in the papers; or "max_probability", its confidence.

    Returns:
        A fraction: 1 if every input from outside is more uncertain, 0.5 if uncertainty says nothing.

    Notes:
        A temperature cannot change it for two classes; for more it can, as it does not keep the order of the scores.

    References:
        Hendrycks and Gimpel 2017 (max probability); Ghosh et al. 2022, "AdaFocal", appendix K (entropy).

    >>> ood_auroc([[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.6, 0.4]])
    0.875
    """
    check_choice("score", score, ("entropy", "max_probability"))
    inside, outside = check_probs(probs_in, argument="probs_in"), check_probs(probs_out, argument="probs_out")
    _check_same_classes("probs", inside, outside)
    ranks = rankdata(np.concatenate([_of_probs(inside, score), _of_probs(outside, score)]))
    n_in, n_out = len(inside), len(outside)
    return float((ranks[n_in:].mean() - (n_out + 1) / 2) / n_in)


def ood_detection(
    logits_in: ArrayLike,
    logits_out: ArrayLike,
    *,
    scores: Sequence[str] = tuple(OOD_SCORES),
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    seed: int = 0,
) -> dict[str, OodDetection]:
    r"""AUROC and false positive rate of out-of-distribution detection by several scores of the logits, with intervals.

    An input is flagged where its uncertainty $u$ is above a threshold:

    $$u = -\max_c p_c, \quad -\sum_c p_c \log p_c, \quad -\max_c z_c, \quad -\log \sum_c e^{z_c}$$

    Args:
        logits_in: (N, C) float: the model's test set.
        logits_out: (N', C) float: inputs from elsewhere.
        scores: of "max_probability", "entropy", "max_logit" and "energy". Where only probabilities are known,
            pass their logarithms, and the first two.
        n_resamples: of the bootstrap, which resamples both sets.

    Returns:
        Score -> `OodDetection`.

    Notes:
        A temperature changes the first two, of more than two classes, and the energy; never the maximum logits' order.

    References:
        Hendrycks and Gimpel 2017 (maximum probability); Ghosh et al. 2022, "AdaFocal", appendix K (entropy);
        Hendrycks et al. 2022 (maximum logit); Liu et al. 2020 (energy); Liang et al. 2018 (the rate at 95%).

    >>> found = ood_detection([[4.0, 0.0], [0.0, 2.0]], [[0.5, 0.0], [0.0, 3.0]], scores=["energy"])
    >>> found["energy"].auroc.value
    0.75
    """
    inside, outside = _check_logits("logits_in", logits_in), _check_logits("logits_out", logits_out)
    _check_same_classes("logits", inside, outside)
    for score in scores:
        check_choice("scores", score, tuple(OOD_SCORES))
    n_resamples, seed = check_n_resamples(n_resamples), check_seed(seed)
    check_confidence_level(confidence_level)
    found = {}
    for score in scores:
        uncertainties = _of_logits(inside, score), _of_logits(outside, score)
        found[score] = _detection(*uncertainties, n_resamples, confidence_level, seed)
    return found


def _detection(
    inside: FloatArray, outside: FloatArray, n_resamples: int, confidence_level: float, seed: int
) -> OodDetection:
    """Of uncertainties (N,) and (N',)."""
    values, place = np.unique(np.concatenate([inside, outside]), return_inverse=True)
    at_inside, at_outside = place[: len(inside)], place[len(inside) :]

    def measured(rows_in: NDArray[Any], rows_out: NDArray[Any]) -> tuple[float, float]:
        # How many rows lie at each value, from the most certain one on.
        n_in = np.bincount(rows_in, minlength=len(values))
        n_out = np.bincount(rows_out, minlength=len(values))
        below = n_in.cumsum()
        auroc = n_out @ (below - n_in / 2) / (len(rows_in) * len(rows_out))
        last_accepted = np.searchsorted(below, ACCEPTED * len(rows_in))
        return float(auroc), float(n_out[: last_accepted + 1].sum() / len(rows_out))

    rng = np.random.default_rng(seed)
    draws = [
        measured(rng.choice(at_inside, len(at_inside)), rng.choice(at_outside, len(at_outside)))
        for _ in range(n_resamples)
    ]
    whole = zip(measured(at_inside, at_outside), np.array(draws).T, strict=True)
    auroc, fpr95 = (interval_of(value, column, confidence_level) for value, column in whole)
    # From the most uncertain value on.
    counts = (np.bincount(rows, minlength=len(values))[::-1].cumsum() for rows in (at_inside, at_outside))
    return OodDetection(auroc, fpr95, RocCurve(*(np.pad(each / each[-1], (1, 0)) for each in counts)))


def _of_logits(logits: NDArray[Any], score: str) -> FloatArray:
    """The uncertainty (N,)."""
    if score == "max_logit":
        return -logits.max(axis=1).astype(np.float64)
    uncertainty = np.empty(len(logits))
    for part in row_chunks(*logits.shape):
        rows = logits[part].astype(np.float64)
        if score == "energy":
            uncertainty[part] = -logsumexp(rows, axis=1)
        elif score == "max_probability":
            # The logarithm of the odds against it: near 1, probabilities themselves are all alike.
            top = rows.max(axis=1, keepdims=True)
            others = np.sort(rows, axis=1)[:, :-1]
            uncertainty[part] = logsumexp(others - top, axis=1)
        else:
            log_probs = log_softmax(np.sort(rows, axis=1), axis=1)
            uncertainty[part] = -(np.exp(log_probs) * log_probs).sum(axis=1)
    return uncertainty


def _of_probs(probs: NDArray[Any], score: UncertaintyScore) -> FloatArray:
    if score == "max_probability":
        return -probs.max(axis=1).astype(np.float64)
    entropy = np.empty(len(probs))
    for part in row_chunks(*probs.shape):
        # Probabilities that rounding put just below 0 count as 0.
        rows = np.maximum(probs[part].astype(np.float64, copy=False), 0)
        # Sorted, so that rows which differ in the order of the classes only are tied to the last bit.
        entropy[part] = entr(np.sort(rows, axis=1)).sum(axis=1)
    return entropy


def _check_logits(argument: str, logits: ArrayLike) -> NDArray[Any]:
    array = as_array(argument, logits)
    if array.dtype.kind not in "iuf":
        way_out = "pass an array of floats"
        raise InputTypeError(expected(argument, "hold real numbers", f"dtype {array.dtype}", way_out))
    fits = array.ndim == 2 and array.shape[1] >= 2 and len(array) > 0
    way_out = "pass one row of at least two classes for each example"
    check(fits, f"{argument} to have shape (N, C), N >= 1", f"shape {array.shape}", way_out)
    bad = ~np.isfinite(array).all(axis=1)
    got = f"NaN or infinity in {bad.sum()} of {len(array)} rows (first in row {bad.argmax()})"
    check(not bad.any(), f"{argument} to be finite", got, "look for overflow in the model")
    return array


def _check_same_classes(kind: str, inside: NDArray[Any], outside: NDArray[Any]) -> None:
    n_classes, got = inside.shape[1], f"{outside.shape[1]} columns"
    way_out = f"pass the {kind} of one model on both sets"
    check(outside.shape[1] == n_classes, f"{kind}_out to have {n_classes} columns", got, way_out)
