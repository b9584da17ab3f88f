"""Abstention: the promise is kept by simulation, and what can be answered is."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom

from hf_calib._errors import InputError, InputValueError
from hf_calib.decisions import AbstainRule, PredictionSets

SIZE = 200_000  # of finite populations: how often a rule is right in them is known, not estimated


def population(
    accuracy_at: Callable[[np.ndarray], np.ndarray], *, decimals: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """probs (SIZE, 4) and labels: the top class is right with probability accuracy_at(its confidence)."""
    rng = np.random.default_rng(0)
    confidences = 1 - 0.6 * rng.beta(0.6, 1.5, SIZE)
    if decimals is not None:
        confidences = confidences.round(decimals)
    predicted = rng.integers(4, size=SIZE)
    right = rng.random(SIZE) < accuracy_at(confidences)
    probs = np.repeat(((1 - confidences) / 3)[:, None], 4, axis=1)
    probs[np.arange(SIZE), predicted] = confidences
    labels = np.where(right, predicted, (predicted + rng.integers(1, 4, SIZE)) % 4)
    return probs, labels


POPULATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "calibrated": lambda c: c,
    "over-confident": lambda c: 0.55 + 0.45 * c**4,
    "under-confident": lambda c: 1 - (1 - c) ** 2,
    "always at the promise": lambda c: np.full(len(c), 0.8999),
    # The most confident rows are wrong more often than the others.
    "not monotone": lambda c: np.where(c > 0.97, 0.85, np.where(c > 0.8, 0.97, 0.6)),
    "waves": lambda c: np.where((c * 50).astype(int) % 2 == 0, 0.8, 0.995),
}

N_DRAWS, FEW_DRAWS, DELTA = 1000, 300, 0.05


def most_broken(n_draws: int) -> int:
    """A promise that is broken with probability delta exactly is broken more often than this once in 1,000 tests."""
    return int(binom.ppf(0.999, n_draws, DELTA))


def broken_promises(
    probs,
    labels,
    *,
    n_rows: int,
    accuracy: float,
    by_class: bool = False,
    n_draws: int = N_DRAWS,
) -> tuple[int, float]:
    """In how many draws a rule answers less accurately than it promised; and the mean share it answers."""
    rng = np.random.default_rng(1)
    confidences, predicted = probs.max(axis=1).astype(np.float32), probs.argmax(axis=1)
    groups = (
        [predicted == c for c in range(probs.shape[1])]
        if by_class
        else [np.full(len(probs), True)]
    )
    # Confidences and the number of right rows above each of them, of the whole population.
    known = []
    for group in groups:
        order = np.argsort(confidences[group])
        right = np.cumsum((predicted == labels)[group][order][::-1])[::-1]
        known.append((confidences[group][order], np.append(right, 0)))
    broken, answered = 0, 0
    for _ in range(n_draws):
        rows = rng.integers(len(probs), size=n_rows)
        rule = AbstainRule(accuracy=accuracy, delta=DELTA, by_class=by_class)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rule.fit(probs[rows], labels[rows])
        kept = []
        for (ordered, right), threshold in zip(known, rule.thresholds_, strict=False):
            start = np.searchsorted(ordered, threshold, side="right")
            kept.append(right[start] >= accuracy * (len(ordered) - start))
            answered += len(ordered) - start
        broken += not all(kept)
    return broken, answered / (n_draws * len(probs))


def deep(*case: object) -> object:
    return pytest.param(*case, N_DRAWS, marks=pytest.mark.deep)


@pytest.mark.parametrize(
    ("name", "decimals", "n_rows", "n_draws"),
    [
        ("over-confident", None, 400, FEW_DRAWS),
        ("calibrated", 1, 400, FEW_DRAWS),
        ("not monotone", None, 400, FEW_DRAWS),
        *(
            deep(name, decimals, 400)
            for name in POPULATIONS
            for decimals in (None, 2, 1)
        ),
        # Wherever the tests start.
        *(
            deep(name, None, n)
            for name in ("calibrated", "not monotone")
            for n in (30, 90, 220, 700)
        ),
    ],
)
def test_the_promise_is_broken_in_at_most_delta_of_the_draws(
    name: str, decimals: int | None, n_rows: int, n_draws: int
) -> None:
    probs, labels = population(POPULATIONS[name], decimals=decimals)
    broken, _ = broken_promises(
        probs, labels, n_rows=n_rows, accuracy=0.9, n_draws=n_draws
    )
    assert broken <= most_broken(n_draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decimals", "n_draws"),
    [
        ("calibrated", 2, FEW_DRAWS),
        *(deep(name, decimals) for name in POPULATIONS for decimals in (None, 1)),
    ],
)
def test_the_promises_of_all_classes_hold_together(
    name: str, decimals: int | None, n_draws: int
) -> None:
    probs, labels = population(POPULATIONS[name], decimals=decimals)
    broken, _ = broken_promises(
        probs, labels, n_rows=600, accuracy=0.9, by_class=True, n_draws=n_draws
    )
    assert broken <= most_broken(n_draws)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["calibrated", "over-confident", "under-confident"])
def test_more_rows_answer_more(name: str) -> None:
    """From 60 to 3,000 rows there is no collapse, as there was where one row more moved the starts of the tests."""
    probs, labels = population(POPULATIONS[name])
    sizes = (
        60,
        85,
        86,
        100,
        150,
        185,
        190,
        250,
        350,
        435,
        445,
        700,
        1000,
        1400,
        1420,
        3000,
    )
    shares = [
        broken_promises(probs, labels, n_rows=n, accuracy=0.9, n_draws=200)[1]
        for n in sizes
    ]
    for i, share in enumerate(shares):
        assert share >= max(shares[: i + 1]) - 0.06


@pytest.mark.parametrize(
    ("name", "least"), [("calibrated", 0.9), ("under-confident", 0.95)]
)
def test_it_answers_nearly_as_much_as_can_be_promised(name: str, least: float) -> None:
    """Of the largest share that keeps the accuracy in the population."""
    probs, labels = population(POPULATIONS[name])
    order = np.argsort(-probs.max(axis=1))
    right = (probs.argmax(axis=1) == labels)[order]
    possible = np.flatnonzero(
        np.cumsum(right) / np.arange(1, len(right) + 1) >= 0.9
    ).max() / len(right)
    _, answered = broken_promises(probs, labels, n_rows=2000, accuracy=0.9, n_draws=50)
    assert answered >= least * possible


def test_confidences_that_only_float64_tells_apart_are_one() -> None:
    """A pipeline serves both as 1.0, so a threshold between them would let wrong answers pass."""
    sure = np.where(np.arange(400) % 2 == 0, 1e-12, 1e-9)
    probs = np.stack([1 - sure, sure], axis=1)
    labels = (np.arange(400) % 2).astype(int)  # right where 1e-12
    message = (
        "An accuracy of 0.9 cannot be promised from these 400 rows, of which 50.0%"
    )
    with pytest.warns(UserWarning, match=message):
        rule = AbstainRule(accuracy=0.9).fit(probs, labels)
    assert (rule.predict(probs) == -1).all()


@pytest.mark.parametrize("by_class", [False, True])
def test_the_promise_says_whether_it_is_of_each_class(by_class: bool) -> None:
    said = AbstainRule(accuracy=0.9, by_class=by_class).promise()
    assert ("of each class" in said) == by_class


def test_a_class_that_is_seldom_predicted_is_handed_over() -> None:
    rng = np.random.default_rng(0)
    predicted = np.append(rng.integers(2, size=400), [2] * 20)
    probs = np.eye(3)[predicted] * 0.9 + 0.1 / 3
    message = r"An accuracy of 0.9 cannot be promised for predictions of class 2\."
    with pytest.warns(UserWarning, match=message):
        rule = AbstainRule(accuracy=0.9, by_class=True).fit(probs, predicted)
    np.testing.assert_array_equal(rule.predict(np.eye(3) * 0.9 + 0.1 / 3), [0, 1, -1])
    assert rule.thresholds_[2] == 1


@pytest.mark.slow
def test_classes_beyond_those_that_share_delta_are_handed_over() -> None:
    """Each has rows enough for all of delta, none for half of it: tested each at delta, 36% of draws broke it."""
    rng = np.random.default_rng(7)
    predicted = np.arange(320) % 10
    probs = np.eye(10)[predicted] * 0.8 + 0.02
    n_broken = 0
    for _ in range(80):
        labels = np.where(rng.random(320) < 0.895, predicted, (predicted + 1) % 10)
        with pytest.warns(UserWarning, match="abstain"):
            rule = AbstainRule(accuracy=0.9, by_class=True).fit(probs, labels)
        n_broken += (rule.thresholds_ < 1).any()
    assert n_broken <= most_broken(80)


def test_what_is_measured() -> None:
    probs, labels = population(POPULATIONS["calibrated"])
    rule = AbstainRule(accuracy=0.9).fit(probs[:2000], labels[:2000])
    found = rule.measure(probs[2000:6000], labels[2000:6000])
    decided = rule.predict(probs[2000:6000])
    answered = decided >= 0
    assert found["answered"].value == answered.mean()
    assert found["accuracy"].value == (decided == labels[2000:6000])[answered].mean()
    assert found["accuracy"].low < found["accuracy"].value < found["accuracy"].high
    less = AbstainRule(accuracy=0.8).fit(probs[:2000], labels[:2000])
    more = less.measure(probs[2000:6000], labels[2000:6000])
    assert more["answered"].value > found["answered"].value


ROWS = np.full((100, 2), 0.5)
ZEROS = np.zeros(100, dtype=int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"accuracy": 1.0},
            "accuracy to be below 1, got 1.0; no number of rows .*; 0.99 needs 299",
        ),
        ({"accuracy": 1.5}, r"accuracy to lie in \(0, 1\), got 1.5"),
        ({"delta": 0.0}, r"delta to lie in \(0, 1\), got 0.0"),
    ],
)
def test_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AbstainRule(**options)


@pytest.mark.parametrize("rule", [AbstainRule(accuracy=0.9), PredictionSets()])
def test_probabilities_of_one_class(rule: AbstainRule | PredictionSets) -> None:
    with pytest.raises(InputValueError, match="probs to have at least 2 classes, got"):
        rule.fit(np.ones((100, 1)), ZEROS)


def test_an_extreme_promise_takes_no_more_than_its_rows() -> None:
    probs = np.tile([[0.2, 0.8], [0.6, 0.4]], (1000, 1))
    rule = AbstainRule(accuracy=1 - 1e-9, delta=1 - 1e-9)
    assert rule.fit(probs, np.tile([1, 0], 1000)).predict(probs[:2]).tolist() == [1, 0]


def test_an_accuracy_that_so_few_rows_cannot_promise() -> None:
    message = (
        "expected the calibration rows to be at least 2,995 to promise accuracy=0.999 with delta=0.05, got 100; "
        "pass more rows, or promise at most 0.97"
    )
    with pytest.raises(InputValueError, match=re.escape(message)):
        AbstainRule(accuracy=0.999).fit(ROWS, ZEROS)
    with pytest.warns(UserWarning, match="An accuracy of 0.97 cannot be promised from"):
        AbstainRule(accuracy=0.97).fit(ROWS, ZEROS + 1)


@pytest.mark.parametrize("by_class", [False, True])
def test_the_fewest_rows_that_a_promise_needs_are_enough(by_class: bool) -> None:
    """29 rows for .9, and 36 for each of two classes, which share delta: all are right."""
    predicted = np.repeat([0, 1], 36) if by_class else np.zeros(29, dtype=int)
    probs = np.array([[0.9, 0.1], [0.1, 0.9]])[predicted]
    rule = AbstainRule(accuracy=0.9, by_class=by_class).fit(probs, predicted)
    np.testing.assert_array_equal(rule.predict(probs), predicted)


def test_rows_before_fit_and_of_other_classes() -> None:
    with pytest.raises(
        InputValueError, match=r"expected AbstainRule to be fitted, .* call fit"
    ):
        AbstainRule().predict(ROWS)
    with pytest.warns(UserWarning, match="cannot be promised"):
        rule = AbstainRule(accuracy=0.9).fit(ROWS, ZEROS + np.arange(100) % 2)
    with pytest.raises(
        InputValueError, match="expected probs to have the 2 columns of fit"
    ):
        rule.predict(np.full((3, 3), 1 / 3))


def sampled(
    n_rows: int, seed: int, decimals: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """probs (N, 2) and labels; with decimals, of two digits, many confidences are equal."""
    rng = np.random.default_rng(seed)
    confidences = 0.5 + 0.5 * rng.beta(3, 1.3, n_rows)
    if decimals is not None:
        confidences = confidences.round(decimals)
    right = rng.random(n_rows) < confidences
    predicted = rng.integers(2, size=n_rows)
    probs = np.stack([confidences, 1 - confidences], axis=1)
    probs[predicted == 1] = probs[predicted == 1][:, ::-1]
    return probs, np.where(right, predicted, 1 - predicted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:An accuracy")
@pytest.mark.parametrize("decimals", [None, 2])
@pytest.mark.parametrize("by_class", [False, True])
def test_the_rows_of_the_fit_tell_the_share_of_new_inputs_that_is_answered(
    by_class: bool, decimals: int | None
) -> None:
    """At most 5% of the intervals may miss; one by cross-fitting misses every second share."""
    new, _ = sampled(50_000, 10_000, decimals)
    n_missed, n_answering = 0, 0
    for seed in range(150):
        rows = sampled(600, seed, decimals)
        rule = AbstainRule(accuracy=0.85, by_class=by_class).fit(*rows)
        found = rule.measure_fit(*rows)
        answered = rule.predict(new) >= 0
        low, high = found["answered"][1:]
        n_missed += not low <= answered.mean() <= high
        n_answering += not rule.answers_nothing
        assert rule.answers_nothing == ("accuracy" not in found)
    assert n_answering > 30
    assert n_missed <= 7


def test_the_interval_of_any_threshold_and_the_promise_as_the_lower_end() -> None:
    rows = sampled(600, 3)
    rule = AbstainRule(accuracy=0.88).fit(*rows)
    found = rule.measure_fit(*rows)
    predicted = rule.predict(rows[0])
    answered = predicted >= 0
    distance = np.sqrt(np.log(2 / 0.05) / 1200)
    assert 0.1 < answered.mean() < 0.9
    assert tuple(found["answered"]) == pytest.approx(
        (
            answered.mean(),
            answered.mean() - distance,
            min(answered.mean() + distance, 1),
        )
    )
    right = (predicted == rows[1])[answered].mean()
    assert tuple(found["accuracy"]) == pytest.approx((right, 0.88, 1.0))
    with pytest.warns(UserWarning, match="cannot be promised"):
        never = AbstainRule(accuracy=0.99).fit(*rows)
    assert never.measure_fit(*rows) == {"answered": (0, 0, 0)}
    always = AbstainRule(accuracy=0.6).fit(*rows)
    assert always.measure_fit(*rows)["answered"] == (1, 1, 1)


@pytest.mark.filterwarnings("ignore:An accuracy")
def test_a_threshold_stands_below_tied_scores_that_passed_together() -> None:
    """The rows that are answered are a set that passed a test, not a part of one with equal scores."""
    confidences = np.repeat([0.95, 0.9], [12, 300]).astype(np.float32).astype(float)
    probs = np.stack([confidences, 1 - confidences], axis=1)
    n_answering = 0
    for seed in range(200):
        accuracy = np.where(confidences > 0.92, 0.5, 0.84)
        labels = (np.random.default_rng(seed).random(312) > accuracy).astype(int)
        answered = (
            AbstainRule(accuracy=0.8, delta=0.4).fit(probs, labels).predict(probs) >= 0
        )
        if answered.any():
            n_answering += 1
            n_wrong = int(labels[answered].sum())
            assert binom.cdf(n_wrong, answered.sum(), 0.2) <= 0.4
    assert 5 < n_answering < 200


def test_classes_share_delta() -> None:
    probs, labels = sampled(1_000, 0)
    rule = AbstainRule(accuracy=0.85, by_class=True).fit(probs, labels)
    for c in range(2):
        own = probs.argmax(axis=1) == c
        alone = AbstainRule(accuracy=0.85, delta=0.025).fit(probs[own], labels[own])
        assert 0 < rule.thresholds_[c] == alone.thresholds_[c] < 1


def test_what_cannot_be_promised_on_tied_scores() -> None:
    """All 400 rows together would pass, but rows are tested one by one, and stop at an early failure."""
    rng = np.random.default_rng(1)
    probs = np.tile([0.05, 0.95], (400, 1))
    labels = (rng.random(400) < 0.935).astype(int)
    message = "cannot be promised from these 400 rows, .* Rows with equal confidences"
    with pytest.warns(UserWarning, match=message):
        AbstainRule(accuracy=0.9).fit(probs, labels)
