"""Out-of-distribution detection: how well a classifier's uncertainty separates unfamiliar inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr, log_softmax, logsumexp
from scipy.stats import rankdata

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.metrics.bootstrap import Interval
from hf_calib.metrics.checks import (
    FloatArray,
    as_array,
    check_choice,
    check_confidence_level,
    check_n_resamples,
    check_probs,
    check_seed,
    row_chunks,
)

UncertaintyScore = Literal["entropy", "max_probability"]
OOD_SCORES = {
    "max_probability": "Maximum probability",
    "entropy": "Entropy",
    "max_logit": "Maximum logit",
    "energy": "Energy",
}
ACCEPTED = 0.95  # of the familiar inputs, where the false positive rate is taken


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

    For robustness: calibration errors look at one dataset, this compares two. It is the probability that a
    random input from outside looks more uncertain than a random one from inside; a tie counts half. For logits,
    with intervals and other scores, see `ood_detection`.

    $$P(u_\text{out} > u_\text{in}) + \tfrac12 P(u_\text{out} = u_\text{in}), \qquad
    u = -\sum_c p_c \log p_c \ \text{ or } \ u = -\max_c p_c$$

    Args:
        probs_in: (N, C) float, rows that sum to 1: the model's test set.
        probs_out: (N', C) float, rows that sum to 1: inputs from elsewhere.
        score: "entropy" of the row, as in the papers; or "max_probability", its confidence.

    Returns:
        A fraction: 1 if every input from outside is more uncertain, 0.5 if uncertainty says nothing.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if either are not probabilities, or their numbers of classes differ.

    Notes:
        It asks for no labels. A temperature cannot change it for two classes; for more it can, because it does
        not keep the order of the scores.

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
        confidence_level: of the percentile intervals, in (0, 1).
        seed: of the bootstrap.

    Returns:
        Score -> `OodDetection`.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if logits are not finite, empty, of different numbers of classes, or a score is unknown.

    Notes:
        A temperature T changes the first two, of more than two classes, and the energy; it leaves the order of the
        maximum logits as it is. Of the energy, which Liu et al. take at T = 1, only the order counts here.

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
    levels = np.array([(1 - confidence_level) / 2, (1 + confidence_level) / 2])
    return {
        score: _detection(_of_logits(inside, score), _of_logits(outside, score), n_resamples, levels, seed)
        for score in scores
    }


def _detection(
    inside: FloatArray, outside: FloatArray, n_resamples: int, levels: FloatArray, seed: int
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
    draws = np.array(
        [
            measured(rng.choice(at_inside, len(at_inside)), rng.choice(at_outside, len(at_outside)))
            for _ in range(n_resamples)
        ]
    )
    auroc, fpr95 = (
        Interval(value, *map(float, np.quantile(column, levels)))
        for value, column in zip(measured(at_inside, at_outside), draws.T, strict=True)
    )
    # From the most uncertain value on.
    flagged_inside, flagged_outside = (
        np.pad(np.bincount(rows, minlength=len(values))[::-1].cumsum() / len(rows), (1, 0))
        for rows in (at_inside, at_outside)
    )
    return OodDetection(auroc, fpr95, RocCurve(flagged_inside, flagged_outside))


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
    if array.ndim != 2 or array.shape[1] < 2 or not len(array):
        way_out = "pass one row of at least two classes for each example"
        raise InputValueError(
            expected(argument, "have shape (N, C), N >= 1", f"shape {array.shape}", way_out)
        )
    bad = ~np.isfinite(array).all(axis=1)
    if bad.any():
        got = f"NaN or infinity in {bad.sum()} of {len(array)} rows (first in row {bad.argmax()})"
        raise InputValueError(expected(argument, "be finite", got, "look for overflow in the model"))
    return array


def _check_same_classes(kind: str, inside: NDArray[Any], outside: NDArray[Any]) -> None:
    if inside.shape[1] != outside.shape[1]:
        got = f"{outside.shape[1]} columns"
        way_out = f"pass the {kind} of one model on both sets"
        raise InputValueError(expected(f"{kind}_out", f"have {inside.shape[1]} columns", got, way_out))
