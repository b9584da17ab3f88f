"""Rankings by confidence: selective prediction, which answers where it is high, and out-of-distribution detection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr, log_softmax, logsumexp, softmax

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
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

OOD_SCORES = {
    "max_probability": "Maximum probability",
    "entropy": "Entropy",
    "max_logit": "Maximum logit",
    "energy": "Energy",
}
ACCEPTED = 0.95  # of the familiar inputs, where the false positive rate is taken

# Of rows (N, C) that are sorted, so that the order of the classes breaks no tie.
Uncertainty = Callable[[FloatArray], FloatArray]
_OF_LOGITS: dict[str, Uncertainty] = {
    # The logarithm of the odds against the top class: near 1, probabilities themselves are all alike.
    "max_probability": lambda rows: logsumexp(rows[:, :-1] - rows[:, -1:], axis=1),
    "entropy": lambda rows: -(softmax(rows, axis=1) * log_softmax(rows, axis=1)).sum(axis=1),
    "max_logit": lambda rows: -rows[:, -1],
    "energy": lambda rows: -logsumexp(rows, axis=1),
}
_OF_PROBS: dict[str, Uncertainty] = {
    # Probabilities that rounding put just below 0 count as 0.
    "entropy": lambda rows: entr(np.maximum(rows, 0)).sum(axis=1),
    "max_probability": lambda rows: -rows[:, -1],
}


# Selective prediction


class RiskCoverage(NamedTuple):
    """The error rate (N,) among the most confident share (N,) of the examples."""

    coverage: FloatArray
    risk: FloatArray


def area_under_risk_coverage(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Area under the risk-coverage curve (AURC): the error rate, averaged over how much is answered.

    For a classifier that may abstain. It judges ranking and accuracy together, and is blind to a recalibration that
    keeps the order; `expected_calibration_error` is the opposite.

    $$\frac{1}{N} \sum_{k=1}^{N} \frac{\text{errors among the } k \text{ most confident}}{k}$$

    Returns:
        A fraction in [0, 1], smaller is better. Confidences that are equal in float32 share their errors evenly.

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
    """The error rate among the k most confident predictions, for every k; `area_under_risk_coverage` is its mean.

    Args:
        confidences: (N,) float, of any range: only their order counts. Equal ones share their errors evenly.
        correct: (N,) of 0 and 1, or bool; fractions for soft labels.

    Returns:
        coverage (N,), k / N, and risk (N,), both fractions.

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
        n_bad = np.count_nonzero(~np.isfinite(values))
        got = f"{n_bad} NaN or infinite values of {len(values)}"
        check(not n_bad, f"{name} to be finite", got, "look for overflow in the model's logits")
    order = np.argsort(-confidence, kind="stable")
    confidence, wrong = confidence[order], 1 - right[order]
    starts = np.flatnonzero(np.diff(confidence, prepend=np.inf))
    sizes = np.diff(starts, append=len(wrong))
    evenly_spread = np.repeat(np.add.reduceat(wrong, starts) / sizes, sizes)
    answered = np.arange(1, len(wrong) + 1)
    return RiskCoverage(answered / len(wrong), np.cumsum(evenly_spread) / answered)


# Rankings of false and true rows

Tally = Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]


def tally(scores: FloatArray, true: NDArray[np.bool_]) -> Tally:
    """Of counts (N,) of the rows: how many false and true ones (K + 1,) have the 0 to K largest different scores."""
    order = np.argsort(-scores, kind="stable")
    _, starts = np.unique(-scores[order], return_index=True)
    cuts = np.append(starts, len(scores))
    ranked_true = true[order]

    def tallied(counts: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        ranked = counts[order]
        n_all, n_true = (np.append(0, each.cumsum())[cuts] for each in (ranked, ranked * ranked_true))
        return n_all - n_true, n_true

    return tallied


def area_under_roc(false: NDArray[Any], true: NDArray[Any]) -> float:
    """The probability that a true row is before a false one, a tie counting half; NaN where one is missing."""
    n_pairs = false[-1] * true[-1]
    return float(np.diff(false) @ (true[1:] + true[:-1]) / 2 / n_pairs) if n_pairs else np.nan


def average_precision(false: NDArray[Any], true: NDArray[Any]) -> float:
    """The mean precision at the true rows; NaN without one."""
    precision = true[1:] / np.maximum((true + false)[1:], 1)
    return float(np.diff(true) @ precision / true[-1]) if true[-1] else np.nan


# Out-of-distribution detection


class OodDetection(NamedTuple):
    """The area under the ROC curve, the share from elsewhere accepted where 95% of the familiar are, and the curve.

    The curve is the shares of familiar inputs and of those from elsewhere that are flagged, as the threshold falls.
    """

    auroc: Interval
    fpr95: Interval
    curve: tuple[FloatArray, FloatArray]


def ood_auroc(probs_in: ArrayLike, probs_out: ArrayLike, *, score: str = "entropy") -> float:
    r"""AUROC of out-of-distribution detection: how well uncertainty separates unfamiliar inputs from familiar ones.

    For probabilities; of logits, with intervals and other scores, see `ood_detection`.

    $$P(u_\text{out} > u_\text{in}) + \tfrac12 P(u_\text{out} = u_\text{in}), \qquad
    u = -\sum_c p_c \log p_c \ \text{ or } \ u = -\max_c p_c$$

    Args:
        probs_in: (N, C) float, rows that sum to 1: the model's test set; probs_out: (N', C), inputs from elsewhere.
        score: "entropy" of the row, as in the papers; or "max_probability", its confidence.

    Returns:
        A fraction: 1 if every input from outside is more uncertain, 0.5 if uncertainty says nothing.

    References:
        Hendrycks and Gimpel 2017 (max probability); Ghosh et al. 2022, "AdaFocal", appendix K (entropy).

    >>> ood_auroc([[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.6, 0.4]])
    0.875
    """
    check_choice("score", score, tuple(_OF_PROBS))
    inside, outside = check_probs(probs_in, argument="probs_in"), check_probs(probs_out, argument="probs_out")
    _check_sets("probs", inside, outside)
    tallied = _tally_of(inside, outside, _OF_PROBS[score])
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
    r"""AUROC and false positive rate of out-of-distribution detection by several scores of the logits, with intervals.

    An input is flagged where its uncertainty $u$ is above a threshold:

    $$u = -\max_c p_c, \quad -\sum_c p_c \log p_c, \quad -\max_c z_c, \quad -\log \sum_c e^{z_c}$$

    Args:
        logits_in: (N, C) float: the model's test set; logits_out: (N', C), inputs from elsewhere. Both are resampled.
        scores: of "max_probability", "entropy", "max_logit" and "energy". Where only probabilities are known,
            pass their logarithms, and the first two.

    Returns:
        Score -> `OodDetection`. A temperature never changes that of the maximum logit.

    References:
        Those of `ood_auroc`; Hendrycks et al. 2022 (maximum logit); Liu et al. 2020 (energy); Liang et al. 2018 (95%).

    >>> found = ood_detection([[4.0, 0.0], [0.0, 2.0]], [[0.5, 0.0], [0.0, 3.0]], scores=["energy"])
    >>> found["energy"].auroc.value
    0.75
    """
    inside, outside = _check_logits("logits_in", logits_in), _check_logits("logits_out", logits_out)
    _check_sets("logits", inside, outside)
    for score in scores:
        check_choice("scores", score, tuple(OOD_SCORES))
    rng = np.random.default_rng(check_seed(seed))
    check_confidence_level(confidence_level)
    sizes = len(inside), len(outside)
    tallies = [_tally_of(inside, outside, _OF_LOGITS[score]) for score in scores]
    draws = []
    for _ in range(check_n_resamples(n_resamples)):
        counts = np.concatenate([np.bincount(rng.integers(0, size, size), minlength=size) for size in sizes])
        draws.append([_rates(*tallied(counts)) for tallied in tallies])
    found = {}
    for score, tallied, drawn in zip(scores, tallies, np.transpose(draws, (1, 2, 0)), strict=True):
        false, true = tallied(np.ones(sum(sizes)))
        rates = zip(_rates(false, true), drawn, strict=True)
        auroc, fpr95 = (interval_of(value, column, confidence_level) for value, column in rates)
        found[score] = OodDetection(auroc, fpr95, (false / false[-1], true / true[-1]))
    return found


def _tally_of(inside: NDArray[Any], outside: NDArray[Any], uncertainty: Uncertainty) -> Tally:
    """By an uncertainty of rows (N, C) and (N', C); those from elsewhere are the true ones."""
    parts = [rows[part] for rows in (inside, outside) for part in row_chunks(*rows.shape)]
    scores = [uncertainty(np.sort(part.astype(np.float64), axis=1)) for part in parts]
    return tally(np.concatenate(scores), np.repeat([False, True], [len(inside), len(outside)]))


def _rates(false: NDArray[Any], true: NDArray[Any]) -> tuple[float, float]:
    """The area under the curve, and the share of true rows not flagged where `ACCEPTED` of the false ones are not."""
    accepted = false[-1] - false
    last = np.count_nonzero(accepted >= ACCEPTED * false[-1]) - 1
    return area_under_roc(false, true), float(1 - true[last] / true[-1])


def _check_logits(argument: str, logits: ArrayLike) -> FloatArray:
    array = as_floats(argument, logits)
    fits = array.ndim == 2 and array.shape[1] >= 2 and len(array) > 0
    way_out = "pass one row of at least two classes for each example"
    check(fits, f"{argument} to have shape (N, C), N >= 1", f"shape {array.shape}", way_out)
    bad = ~np.isfinite(array).all(axis=1)
    got = f"NaN or infinity in {bad.sum()} of {len(array)} rows (first in row {bad.argmax()})"
    check(not bad.any(), f"{argument} to be finite", got, "look for overflow in the model")
    return array


def _check_sets(kind: str, inside: NDArray[Any], outside: NDArray[Any]) -> None:
    n_classes, got = inside.shape[1], f"{outside.shape[1]} columns"
    way_out = f"pass the {kind} of one model on both sets"
    check(outside.shape[1] == n_classes, f"{kind}_out to have {n_classes} columns", got, way_out)
