"""The sentences of a report: what they claim is so, at a level that holds for all of them together."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit, softmax
from scipy.stats import binom, binomtest

from hf_calib.metrics import ConsistencyTest
from hf_calib.report import CalibrationReport, calibration_report
from hf_calib.report.rows import Coins
from tests.helpers.sampled import labels_by

CLAIMS = re.compile(
    r"(After calibration: )?([Oo]verall (over|under)-confident|[Cc]onfidences from|[Pp]redictions of|"
    r"[Ss]ome (classes|labels)|[Tt]he top-label ECE is beyond|The negative log-likelihood got worse)|"
    r".*too (high|low) beyond"
)


def claimed(report: CalibrationReport) -> list[str]:
    return [sentence for sentence in report.diagnosis if CLAIMS.match(sentence) and "neither" not in sentence]


def exact(chances: np.ndarray) -> np.ndarray:
    """The probability of each number of heads, coin by coin."""
    found = np.ones(1)
    for chance in chances:
        found = np.convolve(found, [1 - chance, chance])
    return found


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "chances",
    [
        np.full(20, 0.9),
        np.full(7, 0.2),
        RNG.random(40),
        RNG.beta(0.2, 0.2, 300),
        RNG.uniform(0.96, 1, 60),
        np.repeat([0.001, 0.999], 500),
        np.array([0.99] * 10 + [0.6] * 10 + [0.2] * 10),
    ],
)
def test_the_p_value_of_unequal_coins(chances: np.ndarray) -> None:
    probabilities, coins = exact(chances), Coins.of(chances)
    for n_heads in range(len(chances) + 1):
        wanted = min(1, 2 * min(probabilities[: n_heads + 1].sum(), probabilities[n_heads:].sum()))
        if wanted > 1e-3:
            assert coins.p_value(n_heads) == pytest.approx(wanted, rel=0.15, abs=0.002)
        else:
            assert coins.p_value(n_heads) < 2e-3


def test_equal_coins_are_binomial_and_many_nearly_normal() -> None:
    few = [(10, 0.5, 5, 1e-6), (20, 0.9, 13, 1e-6), (50, 0.3, 28, 1e-6), (7, 0.2, 0, 1e-6)]
    for n, chance, heads, rel in (*few, *((60_000, 0.3, heads, 0.02) for heads in (17_700, 18_000, 18_200))):
        tails = [binomtest(heads, n, chance, alternative=side).pvalue for side in ("less", "greater")]
        assert Coins.of(np.full(n, chance)).p_value(heads) == pytest.approx(min(1, 2 * min(tails)), rel=rel)
    for chance, heads, p in ((1.0, 5, 1.0), (1.0, 4, 0.0), (0.0, 1, 0.0), (0.0, 0, 1.0)):
        assert Coins.of(np.full(5, chance)).p_value(heads) == pytest.approx(p, abs=1e-12)


def drawn(kind: str, n: int, c: int, rng: np.random.Generator) -> np.ndarray:
    """Probabilities (n, c): of middling confidence, or near 1."""
    if kind == "middling":
        return softmax(2 * rng.normal(size=(n, c)), axis=1)
    top = rng.uniform({"high": 0.96, "very high": 0.999}[kind], 1, n)
    probs = np.repeat(((1 - top) / (c - 1))[:, None], c, axis=1)
    probs[np.arange(n), rng.integers(c, size=n)] = top
    return probs


@pytest.mark.parametrize(
    ("kind", "n", "c", "n_draws"),
    [
        ("high", 60, 2, 60),
        pytest.param("middling", 300, 4, 60, marks=pytest.mark.slow),
        *(
            pytest.param(*case, 250, marks=pytest.mark.deep)
            for case in [
                ("middling", 60, 2),
                ("middling", 300, 4),
                ("middling", 3000, 10),
                ("middling", 2000, 50),
                ("high", 60, 2),
                ("high", 1000, 5),
                ("very high", 3000, 3),
                ("very high", 10_000, 2),
            ]
        ),
    ],
)
def test_calibrated_models_are_accused_of_nothing_in_95_of_100_reports(
    kind: str, n: int, c: int, n_draws: int
) -> None:
    """Of all sentences of a report together. One that is right at 5% has more than this once in 1,000 tests."""
    rng = np.random.default_rng(1)
    accused = 0
    for _ in range(n_draws):
        probs = drawn(kind, n, c, rng)
        accused += bool(claimed(calibration_report(probs, labels_by(probs, rng), n_resamples=1)))
    print(f"{kind}, {n} rows, {c} classes: {accused / n_draws:.1%} of calibrated models accused")
    assert accused <= binom.ppf(0.999, n_draws, 0.05)


@pytest.mark.deep
def test_the_level_holds_for_labels_of_their_own() -> None:
    rng, accused = np.random.default_rng(2), 0
    for _ in range(300):
        probs = expit(1.5 * rng.normal(size=(300, 5)) - 1)
        labels = (rng.random(probs.shape) < probs).astype(int)
        accused += bool(claimed(calibration_report(probs, labels, n_resamples=200)))
    print(f"several labels a row: {accused / 300:.1%} of calibrated models accused")
    assert accused <= binom.ppf(0.999, 300, 0.06)  # its interval is a bootstrap's


def test_worse_by_chance_is_not_said_to_be_worse() -> None:
    rng = np.random.default_rng(5)
    probs = softmax(2 * rng.normal(size=(400, 3)), axis=1)
    labels = labels_by(probs, rng)
    slightly = softmax(np.log(probs) * 1.01, axis=1)
    for calibrated in (slightly, softmax(np.log(probs) / 1.01, axis=1)):
        report = calibration_report(probs, labels, calibrated=calibrated, n_resamples=1)
        assert "got worse" not in " ".join(report.diagnosis)
    report = calibration_report(probs, labels, calibrated=softmax(np.log(probs) * 3, axis=1), n_resamples=1)
    assert "The negative log-likelihood got worse beyond chance" in " ".join(report.diagnosis)


@pytest.mark.parametrize(("ratio", "is_worse"), [(1.8, False), (2.1, True)])
def test_worse_is_judged_two_sided(ratio: float, is_worse: bool) -> None:
    """A mean change of so many standard errors, of which 1.98 are beyond chance at 95%."""
    change = np.tile([-0.1, 0.1], 50)
    change += ratio * change.std(ddof=1) / 10
    right = 0.6 * np.exp(-change)
    report = calibration_report(
        np.tile([0.6, 0.4], (100, 1)),
        np.zeros(100, int),
        calibrated=np.stack([right, 1 - right], axis=1),
        n_resamples=1,
    )
    assert ("got worse beyond chance" in " ".join(report.diagnosis)) == is_worse


def test_twenty_predictions_of_a_class_are_judged_and_nineteen_are_not() -> None:
    for n, is_judged in ((20, True), (19, False)):
        probs = np.tile([0.97, 0.02, 0.01], (n + 400, 1))
        probs[n:] = [0.01, 0.01, 0.98]
        labels = np.where(np.arange(n + 400) < n, 1, 2)
        said = " ".join(
            calibration_report(probs, labels, class_names=["a", "b", "c"], n_resamples=1).diagnosis
        )
        assert ('"a" (confidence 0.97, precision 0.00)' in said) == is_judged


def calibrated_by_hand() -> CalibrationReport:
    """Nothing in it is beyond chance, whatever else is put in."""
    probs = np.tile([0.7, 0.3], (200, 1))
    return calibration_report(probs, (np.arange(200) % 10 < 3).astype(int), n_resamples=1)


@pytest.mark.parametrize(("low", "alone"), [(0.01, True), (-0.01, False)])
def test_an_interval_without_0_beside_a_verdict_of_chance_is_explained(low: float, alone: bool) -> None:
    report = calibrated_by_hand()
    found = report.before.overall._replace(gap=0.05, low=low, high=0.09, p_value=0.04)
    sentence = replace(report, before=replace(report.before, overall=found)).diagnosis[0]
    assert sentence.startswith("Overall neither over- nor under-confident beyond chance")
    assert ("excludes 0 alone; not beyond chance once corrected for the 5 statements" in sentence) == alone


@pytest.mark.parametrize(
    ("p_value", "words"),
    [
        (
            0.9,
            r"The top-label ECE by itself is within chance: it is 0\.0700, .* by chance alone \(p = 0\.9\)\.",
        ),
        (
            0.04,
            r"The top-label ECE is 0\.0700, .* \(p = 0\.04 alone; not beyond chance once corrected for the 5 ",
        ),
        (1 / 1001, r"The top-label ECE is beyond chance: it is 0\.0700, .* by chance alone \(p < 0\.001\)\."),
    ],
)
def test_the_sentence_on_the_ece_agrees_with_its_p_value(p_value: float, words: str) -> None:
    """0.04 is below 5%, and no evidence beside four other tests."""
    report = calibrated_by_hand()
    test = ConsistencyTest(0.07, p_value, 0.03)
    report = replace(report, before=replace(report.before, consistency=test))
    (found,) = [sentence for sentence in report.diagnosis if "top-label ECE" in sentence]
    assert re.match(words, found), found


def test_two_sets_of_probabilities_share_the_level() -> None:
    """0.008 is beyond chance for one of five claims, and not for one of ten."""
    report = calibrated_by_hand()
    found = report.before.overall._replace(gap=0.05, p_value=0.008)
    measured = replace(report.before, overall=found)
    assert replace(report, before=measured).diagnosis[0].startswith("Overall over-confident")
    both = replace(report, before=measured, after=report.before)
    assert both.diagnosis[0].startswith("Overall neither over- nor under-confident")
