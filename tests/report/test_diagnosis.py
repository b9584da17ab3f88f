"""The verdict and the sentences: they agree with the numbers next to them, and seldom claim what is chance."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit, softmax
from scipy.stats import binom

from hf_calib.report import CalibrationReport, calibration_report
from hf_calib.report.measured import Coins
from tests.helpers.sampled import labels_by, predictions

MEANS = re.compile(r"ean confidence is ([\d.]+), accuracy ([\d.]+)")
POINTS = re.compile(r"(-?[\d.]+) points \[(-?[\d.]+), (-?[\d.]+)\]")
ECE = re.compile(r"he ECE is ([\d.]+); .* is ([\d.]+) on average")
P = re.compile(r"\(p (?:= |< )([\d.e-]+), ((?:not )?beyond|within) chance")
PAIR = re.compile(
    r"(?:confidence |: )([\d.]+)(?:, precision| on average, right) ([\d.]+)"
)


def is_accused(report: CalibrationReport) -> bool:
    return not re.search("within chance|not clearly", report.verdict)


def check_words(report: CalibrationReport) -> None:
    """Read the verdict, the diagnosis and the table of metrics as they are printed, and compare them."""
    told = (
        report.verdict[:-1]
        .lower()
        .removesuffix(" after")
        .removesuffix(" before and")
        .split(" before, ")
    )
    told *= len(report.states) // len(told)
    table = {row[0]: row[1:] for row in report.metric_table()[1]}
    for column, (verdict, state) in enumerate(zip(told, report.states, strict=True)):
        start = "" if report.after is None else f"{state.capitalize()} calibration: "
        means, *places, errors = (
            each for each in report.diagnosis[1:] if each.startswith(start)
        )
        (confidence, accuracy), (ece, by_chance) = (
            MEANS.findall(means)[0],
            ECE.findall(errors)[0],
        )
        assert table["Accuracy"][column].startswith(accuracy)
        assert table["Expected calibration error (ECE)"][column].startswith(ece)
        gap, low, high = map(
            float, (POINTS.findall(verdict) or POINTS.findall(means))[0]
        )
        side = -1 if "under-confident by" in verdict else 1
        assert gap == pytest.approx(
            side * 100 * (float(confidence) - float(accuracy)), abs=0.07
        )
        assert low <= gap <= high
        assert abs(gap) <= 100 * float(ece) + 0.06
        judged = P.findall(means + errors)
        for p_value, words in judged:
            assert (words == "within") == (float(p_value) > 0.05) or float(
                p_value
            ) == 0.05
        assert (
            table["Consistency test of the ECE (p)"][column].removeprefix("< ")
            == judged[1][0]
        )
        assert judged[1][1] != "beyond" or ece > by_chance
        assert (
            (judged[0][1] == "beyond")
            == ("confident by" in verdict)
            == ("confident by" in verdict and low > 0)
        )
        assert not places or not verdict.endswith(
            ("within chance", "clearly miscalibrated")
        )
        if verdict == "calibrated within chance":
            assert low <= 0 <= high
            assert judged[0][1] == judged[1][1] == "within"
        sides = set()
        for sentence in places:
            for said, came in PAIR.findall(sentence):
                sides.add(said > came)
                assert (said > came) == bool(
                    re.search("too high|over-confident", sentence)
                ), sentence
        assert len(sides) == 2 or not verdict.endswith("others")


@pytest.mark.parametrize(
    "seeds",
    [
        range(8),
        *(
            pytest.param(range(n, n + 48), marks=pytest.mark.slow)
            for n in range(8, 200, 48)
        ),
    ],
)
def test_the_words_agree_with_the_numbers(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        n = int(np.exp(rng.uniform(np.log(30), np.log(5000))))
        c = int(rng.integers(2, 11))
        temperature = np.exp(rng.uniform(*np.log([0.3, 3] if seed % 3 else [0.8, 1.2])))
        probs, labels = predictions(n, c, temperature=temperature, seed=seed)
        calibrated = None if seed % 4 else predictions(n, c, seed=seed)[0]
        check_words(
            calibration_report(probs, labels, calibrated=calibrated, n_resamples=100)
        )


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
        wanted = min(
            1,
            2 * min(probabilities[: n_heads + 1].sum(), probabilities[n_heads:].sum()),
        )
        if wanted > 1e-3:
            assert coins.p_value(n_heads) == pytest.approx(wanted, rel=0.15, abs=0.002)
        else:
            assert coins.p_value(n_heads) < 2e-3


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
                ("middling", 2000, 50),
                ("high", 1000, 5),
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
        accused += is_accused(
            calibration_report(probs, labels_by(probs, rng), n_resamples=1)
        )
    print(
        f"{kind}, {n} rows, {c} classes: {accused / n_draws:.1%} of calibrated models accused"
    )
    assert accused <= binom.ppf(0.999, n_draws, 0.05)


@pytest.mark.deep
def test_the_level_holds_for_labels_of_their_own() -> None:
    rng, accused = np.random.default_rng(2), 0
    for _ in range(300):
        probs = expit(1.5 * rng.normal(size=(300, 5)) - 1)
        labels = (rng.random(probs.shape) < probs).astype(int)
        accused += is_accused(calibration_report(probs, labels, n_resamples=200))
    print(f"several labels per row: {accused / 300:.1%} of calibrated models accused")
    assert accused <= binom.ppf(0.999, 300, 0.06)  # its interval is a bootstrap's


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


def calibrated_by_hand() -> CalibrationReport:
    """Nothing in it is beyond chance, whatever else is put in."""
    probs = np.tile([0.7, 0.3], (200, 1))
    return calibration_report(
        probs, (np.arange(200) % 10 < 3).astype(int), n_resamples=1
    )


def test_two_sets_of_probabilities_share_the_level() -> None:
    """0.008 is beyond chance for one of five claims, and not for one of ten."""
    report = calibrated_by_hand()
    found = report.before.overall._replace(gap=0.05, low=0.01, high=0.09, p_value=0.008)
    measured = replace(report.before, overall=found)
    assert (
        replace(report, before=measured).verdict
        == "Over-confident by 5.0 points [1.0, 9.0]."
    )
    both = replace(report, before=measured, after=report.before)
    assert (
        both.verdict
        == "Not clearly miscalibrated before, calibrated within chance after."
    )
    assert (
        "(p = 0.008, not beyond chance once corrected for the 10 tests of this report)"
        in both.diagnosis[1]
    )
