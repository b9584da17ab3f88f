"""Class frequencies of other data: the correction by them, and their estimates from unlabelled rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from scipy.stats import beta, chi2

from hf_calib import InputError
from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import (
    MatrixScaling,
    PriorCorrection,
    TemperatureScaling,
    VectorScaling,
    estimate_prior,
)

EVEN = np.full(3, 1 / 3)
CENTRES = np.array([[0.0, 0.0], [2.5, 0.0], [1.0, 2.0]])
SHIFTED = np.array([0.7, 0.2, 0.1])


def draw(
    rng: np.random.Generator, n: int, prior: np.ndarray = EVEN
) -> tuple[np.ndarray, np.ndarray]:
    """Normal features of three classes: the logits of the exact posterior under even shares, and labels."""
    labels = rng.choice(3, size=n, p=prior)
    features = CENTRES[labels] + rng.normal(size=(n, 2))
    return features @ CENTRES.T - (CENTRES**2).sum(axis=1) / 2, labels


def posterior(rng: np.random.Generator, n: int, prior: np.ndarray = EVEN) -> np.ndarray:
    return softmax(draw(rng, n, prior)[0], axis=1)


class TestCorrection:
    def test_is_the_rule_of_bayes(self) -> None:
        logits, labels = draw(np.random.default_rng(0), 4000, SHIFTED)
        correction = PriorCorrection(EVEN, SHIFTED)
        wanted = softmax(logits, axis=1) * SHIFTED
        probs = correction.predict_proba(logits)
        np.testing.assert_allclose(
            probs, wanted / wanted.sum(axis=1, keepdims=True), rtol=1e-12
        )
        before = negative_log_likelihood(softmax(logits, axis=1), labels)
        assert negative_log_likelihood(probs, labels) < before - 0.1
        np.testing.assert_allclose(probs.mean(axis=0), SHIFTED, atol=0.02)
        back = PriorCorrection(SHIFTED, EVEN).transform(correction.transform(logits))
        np.testing.assert_allclose(back, logits, atol=1e-12)

    @pytest.mark.parametrize(
        "first", [TemperatureScaling(), VectorScaling(), MatrixScaling()]
    )
    def test_comes_after_the_map(self, first: Any) -> None:
        logits, labels = draw(np.random.default_rng(0), 500)
        first.fit(2 * logits, labels)
        correction = PriorCorrection(EVEN, SHIFTED, first)
        wanted = log_softmax(first.transform(2 * logits) + np.log(SHIFTED), axis=1)
        np.testing.assert_allclose(
            log_softmax(correction.transform(2 * logits), axis=1), wanted, atol=1e-9
        )
        np.testing.assert_allclose(
            correction.affine_map()(2 * logits), correction.transform(2 * logits)
        )

    def test_a_masked_class_stays_masked(self) -> None:
        probs = PriorCorrection(EVEN, SHIFTED).predict_proba([[1.0, -np.inf, 0.0]])
        assert probs[0, 1] == 0
        assert probs.sum() == pytest.approx(1)

    @pytest.mark.parametrize(
        ("prior", "message"),
        [
            ([0.5, 0.3, 0.1], "to sum to 1, got 0.9; divide it by its sum, or pass"),
            ([0.5, 0.5, 0.0], "to be above 0 for every class, got 0 for class 2; give"),
            ([0.5, 0.5, np.nan], "to be above 0 for every class, got nan for class 2"),
            ([0.5, 0.5], "to have the 3 classes of train_prior, got 2"),
        ],
    )
    def test_refused(self, prior: Any, message: str) -> None:
        with pytest.raises(InputError, match=f"^expected target_prior {message}"):
            PriorCorrection(EVEN, prior)
        with pytest.raises(InputError, match="to hold numbers, got dtype bool"):
            PriorCorrection(np.array([True, True, True]), SHIFTED)


class TestEstimates:
    def test_em_is_the_penalised_maximum_likelihood(self) -> None:
        rng = np.random.default_rng(1)
        probs = posterior(rng, 300, SHIFTED)
        train = np.array([0.2, 0.3, 0.5])
        found = estimate_prior(probs, train_prior=train, n_resamples=1).prior

        def loss(free: np.ndarray) -> float:
            log_share = log_softmax(np.append(free, 0.0))
            mixed = probs @ (np.exp(log_share) / train)
            return float(-np.log(mixed).sum() - 1.5 * train @ log_share)

        best = minimize(loss, np.zeros(2), tol=1e-12)
        np.testing.assert_allclose(found, softmax(np.append(best.x, 0.0)), atol=2e-5)

    def test_a_perfect_classifier_counts(self) -> None:
        """It gives the counts with the rows that are added, and the intervals of Jeffreys."""
        one_hot = np.repeat(np.eye(2), [30, 170], axis=0)
        source = np.repeat(np.eye(2), 30, axis=0)
        labels = source.argmax(axis=1)
        found = estimate_prior(
            one_hot, source_probs=source, source_labels=labels, n_resamples=400
        )
        more = found.pseudo_rows / 2
        assert more <= 2
        np.testing.assert_allclose(
            found.prior, (np.array([30, 170]) + more) / (200 + 2 * more), rtol=1e-9
        )
        wanted = beta.ppf([0.025, 0.975], 30.5, 170.5)
        np.testing.assert_allclose(found.interval[0], wanted, atol=0.012)
        assert found.shifted

    def test_the_test_without_source_rows_is_that_of_the_likelihood_ratio(self) -> None:
        probs = posterior(np.random.default_rng(2), 60, np.array([0.4, 0.35, 0.25]))
        found = estimate_prior(probs, train_prior=EVEN, n_resamples=1)
        ratio = 2 * np.log(probs @ (found.prior * 3)).sum()
        assert 0.01 < found.p_value < 0.99
        assert found.p_value == pytest.approx(chi2(df=2).sf(ratio))


@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize("n_draws", [12, pytest.param(120, marks=pytest.mark.deep)])
@pytest.mark.slow
def test_intervals_cover_and_noise_is_refused(with_source: bool, n_draws: int) -> None:
    """Over many draws: intervals cover, and what is no shift is not corrected."""
    rng = np.random.default_rng(4)
    covered, kept, found = [], [], []
    for _ in range(n_draws):
        logits, labels = draw(rng, 300)
        known: dict[str, Any] = {"train_prior": EVEN}
        if with_source:
            known = {"source_labels": labels, "source_probs": softmax(logits, axis=1)}
        estimate = estimate_prior(
            posterior(rng, 200, SHIFTED), **known, n_resamples=100
        )
        assert estimate.shifted
        low, high = estimate.interval.T
        covered.append((low <= SHIFTED) & (high >= SHIFTED))
        found.append(estimate.prior)
        kept.append(
            not estimate_prior(posterior(rng, 200), **known, n_resamples=100).shifted
        )
    # Three standard errors of what is promised; those of the coverage are of the draws, not of three shares each.
    lowest = 0.95 - 3 * np.sqrt(0.05 * 0.95 / n_draws)
    assert np.mean(covered) > lowest
    assert n_draws == 12 or np.mean(covered) < 0.99
    assert np.mean(kept) > lowest
    # EM's shares are shrunk by as many rows as held-out rows ask for, towards even shares here.
    wide = 0.02 * np.sqrt(120 / n_draws)
    np.testing.assert_allclose(np.mean(found, axis=0), SHIFTED, atol=wide)


def test_probabilities_that_are_not_calibrated_are_warned_of() -> None:
    rng = np.random.default_rng(0)
    logits, labels = draw(rng, 2000)
    target = softmax(2 * draw(rng, 300, SHIFTED)[0], axis=1)
    with pytest.warns(
        UserWarning,
        match=r"not calibrated on the source's rows: a temperature of 1.96.* Calibrate",
    ):
        found = estimate_prior(
            target,
            source_probs=softmax(2 * logits, axis=1),
            source_labels=labels,
            n_resamples=99,
        )
    assert found.shifted
    assert not found.corrects
    with pytest.warns(UserWarning, match="not calibrated, so they are not corrected"):
        correction = found.correction()
    np.testing.assert_array_equal(correction.affine_map().bias, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate_prior(
            target,
            source_probs=softmax(logits, axis=1),
            source_labels=labels,
            n_resamples=10,
        )


def test_noise_is_not_corrected() -> None:
    rng = np.random.default_rng(7)
    found = estimate_prior(posterior(rng, 100), source_probs=posterior(rng, 300))
    assert not found.shifted
    message = (
        "The class frequencies of the 100 target rows do not differ significantly from the source's "
        r"\(p = 0\.\d\d\), so"
    )
    with pytest.warns(UserWarning, match=message):
        correction = found.correction()
    np.testing.assert_array_equal(correction.affine_map().bias, 0)


def test_a_shift_is_corrected_after_the_first_map() -> None:
    rng = np.random.default_rng(7)
    source, source_labels = draw(rng, 500)
    target, target_labels = draw(rng, 2000, SHIFTED)
    first = TemperatureScaling().fit(3 * source, source_labels)
    found = estimate_prior(
        first.predict_proba(3 * target), source_probs=first.predict_proba(3 * source)
    )
    before, after, best = (
        negative_log_likelihood(scaler.predict_proba(3 * target), target_labels)
        for scaler in (
            first,
            found.correction(first),
            PriorCorrection(found.train_prior, SHIFTED, first),
        )
    )
    assert after < before - 0.1
    assert after == pytest.approx(best, abs=0.01)


GOOD = posterior(np.random.default_rng(0), 20)
NEVER_THE_LAST = np.eye(3)[[0, 1] * 10]
REFUSED: list[tuple[np.ndarray, dict[str, Any], str]] = [
    (
        GOOD[:1],
        {"train_prior": EVEN},
        "expected probs to hold rows that differ, got one row; pass",
    ),
    (
        GOOD[[3] * 9],
        {"train_prior": EVEN},
        "rows that differ, got 9 rows that are all alike; pass the",
    ),
    (GOOD, {}, "expected source_probs or train_prior to be given, got neither"),
    (
        GOOD,
        {"source_probs": GOOD, "train_prior": EVEN},
        "train_prior to be given, got both",
    ),
    (
        GOOD,
        {"train_prior": [0.5, 0.5]},
        "train_prior to have the 3 classes of probs, got 2",
    ),
    (
        GOOD,
        {"source_probs": NEVER_THE_LAST},
        "every class some probability, got 0 in all rows for class 2",
    ),
    (GOOD, {"train_prior": EVEN, "n_resamples": 0}, "n_resamples to be at least 1"),
]


@pytest.mark.parametrize(("probs", "options", "message"), REFUSED)
def test_refused_with_one_sentence(
    probs: np.ndarray, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        estimate_prior(probs, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n_classes", [2, 50])
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_extremes(n_classes: int, scale: float) -> None:
    """Hardly any information, or saturated rows: shares stay finite and above 0."""
    rng = np.random.default_rng(8)
    probs, source = (
        softmax(scale * rng.normal(size=(60, n_classes)), axis=1) for _ in range(2)
    )
    found = estimate_prior(probs, source_probs=source, n_resamples=20)
    assert found.prior.min() > 0
    assert found.prior.sum() == pytest.approx(1)
    assert (found.interval[:, 0] <= found.interval[:, 1]).all()
    assert np.isfinite(found.interval).all()
