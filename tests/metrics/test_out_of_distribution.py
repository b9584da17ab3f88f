"""Detection by scores of the logits: against scikit-learn, definitions, and how often intervals hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve

from hf_calib.metrics import ood_auroc, ood_detection

SCORES = ("max_probability", "entropy", "max_logit", "energy")


def two_sets(
    n: int = 300, n_classes: int = 5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return 2.5 * rng.standard_normal((n, n_classes)), 1.5 * rng.standard_normal(
        (n // 2, n_classes)
    )


def uncertainty(logits: np.ndarray, score: str) -> np.ndarray:
    probs = softmax(logits.astype(np.float64), axis=1)
    return {
        "max_probability": -probs.max(axis=1),
        "entropy": -(probs * log_softmax(logits, axis=1)).sum(axis=1),
        "max_logit": -logits.max(axis=1),
        "energy": -np.log(np.exp(logits.astype(np.float64)).sum(axis=1)),
    }[score]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("ties", [False, True])
def test_values_are_those_of_scikit_learn(score: str, ties: bool) -> None:
    inside, outside = two_sets()
    if ties:  # rows that stand several times, on both sides
        inside, outside = (
            np.repeat(inside[:40], 5, axis=0),
            np.repeat(inside[20:50], 3, axis=0),
        )
    found = ood_detection(inside, outside, n_resamples=2)[score]
    flagged = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    # Rounded: sums of a row in another order would break ties.
    values = np.round(
        np.r_[uncertainty(inside, score), uncertainty(outside, score)], 10
    )
    assert found.auroc.value == pytest.approx(roc_auc_score(flagged, values), abs=1e-12)
    # Familiar rows are the positives: accepted where the uncertainty is at most the threshold.
    fpr, tpr, _ = roc_curve(1 - flagged, -values, drop_intermediate=False)
    assert found.fpr95.value == pytest.approx(
        fpr[np.argmax(tpr >= 0.95 - 1e-12)], abs=1e-12
    )


def test_the_area_is_that_of_probabilities() -> None:
    inside, outside = two_sets()
    found = ood_detection(
        inside, outside, scores=["entropy", "max_probability"], n_resamples=2
    )
    for score in ("entropy", "max_probability"):
        expected = ood_auroc(
            softmax(inside, axis=1), softmax(outside, axis=1), score=score
        )
        assert found[score].auroc.value == pytest.approx(expected, abs=1e-12)


def test_confidences_that_round_to_one_keep_their_order() -> None:
    # exp(-60) is lost beside 1: as probabilities these are all equal.
    inside, outside = [[80.0, 0.0], [70.0, 0.0]], [[60.0, 0.0]]
    assert (
        ood_detection(inside, outside, n_resamples=2)["max_probability"].auroc.value
        == 1
    )
    assert (
        ood_auroc(
            softmax(inside, axis=1), softmax(outside, axis=1), score="max_probability"
        )
        == 0.5
    )


@pytest.mark.slow
def test_intervals_hold_the_truth() -> None:
    """Energy of one large logit is that logit, so that both rates are known: of Gaussians a shift apart."""
    truth = {"auroc": norm.cdf(1 / np.sqrt(2)), "fpr95": norm.cdf(norm.ppf(0.95) - 1.0)}
    held = dict.fromkeys(truth, 0)
    for trial in range(60):
        rng = np.random.default_rng(trial)
        inside, outside = rng.standard_normal(300) + 1, rng.standard_normal(200)
        logits = [
            np.stack([values, np.full_like(values, -1e3)], axis=1)
            for values in (inside, outside)
        ]
        found = ood_detection(*logits, scores=["energy"], n_resamples=200, seed=trial)[
            "energy"
        ]
        for name, value in truth.items():
            interval = getattr(found, name)
            held[name] += interval.low <= value <= interval.high
    assert (
        min(held.values()) >= 0.85 * 60
    )  # 95% nominal; the binomial's standard deviation is 2.8%


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [
        (
            np.zeros((2, 3)),
            np.zeros((2, 4)),
            "logits_out to have 3 columns, got 4 columns; pass the logits",
        ),
        (
            np.full((2, 3), np.nan),
            np.zeros((2, 3)),
            "logits_in to be finite, got 6 NaN or infinite values of 6",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    inside: np.ndarray, outside: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ood_detection(inside, outside)
