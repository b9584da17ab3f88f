"""The verdict and the sentences: they agree with the numbers next to them, and seldom claim what is chance."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, softmax
from scipy.stats import binom, ttest_1samp

from hf_calib.report import CalibrationReport, calibration_report
from hf_calib.report.chance import coins_of_columns
from hf_calib.report.chance import p_value as p_of
from tests.helpers.places import ROOT
from tests.helpers.sampled import labels_by, predictions

MEANS = re.compile(r"ean (?:confidence|probability) is ([\d.]+), \w+ ([\d.]+)")
POINTS = re.compile(r"(-?[\d.]+) points \[(-?[\d.]+), (-?[\d.]+)\]")
ECE = re.compile(r"he ECE is ([\d.]+); .* is ([\d.]+) on average")
P = re.compile(r"\(p (?:= |< )([\d.e-]+), ((?:not )?beyond|within) chance")
PAIR = re.compile(
    r"(?:confidence |: )([\d.]+)(?:, precision| on average, with an accuracy of) ([\d.]+)"
)
CLASS = re.compile(r'"([^"]*)" \(confidence ([\d.]+), precision ([\d.]+)\)')
FREQUENCY = re.compile(
    r'"([^"]*)" \(([\d.]+) of the examples, mean probability ([\d.]+)\)'
)
GUIDES = ROOT / "docs" / "guides"
NLL = re.compile(
    r"; NLL(?: of all decisions)? (unchanged|lower|higher)"
    r"(?: by (\d+\.\d{3,})(?: \[(-?[\d.]+), (-?[\d.]+)\])?)?$"
)


def is_accused(report: CalibrationReport) -> bool:
    return not re.search("within chance|not clearly", report.verdict)


def verdicts(report: CalibrationReport) -> list[str]:
    """The verdict on each set of probabilities."""
    told = NLL.sub("", report.verdict[:-1])
    told = told[0].lower() + told[1:]
    if report.after is None:
        return [told]
    found = told.removesuffix(" after").removesuffix(" before and").split(" before, ")
    return found * (2 // len(found))


def starting(report: CalibrationReport, state: str) -> list[str]:
    start = "" if report.after is None else f"{state.capitalize()} calibration: "
    found = [each for each in report.diagnosis[1:] if each.startswith(start)]
    return [each for each in found if "got worse" not in each]


def check_change(report: CalibrationReport) -> None:
    """The words on the NLL, which agree with the table and with the sentence on a worse one."""
    found = NLL.search(report.verdict[:-1])
    assert (found is None) == (report.after is None)
    if found is None or report.after is None:
        return
    change, got_worse = report.nll_change, "got worse" in " ".join(report.diagnosis)
    key = "micro_nll" if report.multi_label else "nll"
    difference = report.after.metrics[key].value - report.before.metrics[key].value
    assert change.value == pytest.approx(difference, abs=1e-9)
    word, *numbers = found.groups()
    if word == "unchanged":
        assert abs(difference) < 1e-6
        return
    sign = {"lower": -1, "higher": 1}[word]
    value, *ends = (float(each) for each in numbers if each is not None)
    assert value == pytest.approx(sign * difference, abs=6e-4)
    assert ends or report.n_examples == 1
    low, high = ends or (-np.inf, np.inf)
    assert low <= value <= high
    assert got_worse == (word == "higher" and low > 0)


def check_classes(report: CalibrationReport) -> None:
    """The class that a verdict names is the worst of those that the diagnosis names, with the numbers of its row."""
    for verdict, (state, measured) in zip(
        verdicts(report), report.states.items(), strict=True
    ):
        said = " ".join(starting(report, state))
        rows = {row.name: row for row in measured.labels or measured.classes}
        for pattern, names in (
            (CLASS, ("confidence", "precision")),
            (FREQUENCY, ("frequency", "mean_probability")),
        ):
            all_named = pattern.findall(said)
            for name, *numbers in all_named + pattern.findall(verdict):
                wanted = [getattr(rows[name], each) for each in names]
                digits = len(numbers[0]) - 2
                assert [*map(float, numbers)] == pytest.approx(
                    wanted, abs=0.51 * 10**-digits
                )
                assert numbers[0] != numbers[1]
            for _, *numbers in pattern.findall(verdict):
                apart = [abs(float(one) - float(two)) for _, one, two in all_named]
                first, second = map(float, numbers)
                assert abs(first - second) == pytest.approx(max(apart), abs=0.011)
                assert ("most of all" in verdict) == (len(all_named) > 1)
        assert ("occur" in verdict) <= bool(FREQUENCY.findall(verdict))
        assert ("some classes" in verdict) <= ('"' in verdict)


def check_guide(report: CalibrationReport) -> None:
    """The verdict's words are explained in a guide, on one side or the other."""
    guide = " ".join((GUIDES / "measure.md").read_text().split())
    if report.multi_label:
        guide = " ".join((GUIDES / "many_labels.md").read_text().split())
    for verdict in verdicts(report):
        words = re.split(r" and |, | by |\d", verdict)[0].strip()
        words = words.replace("under-confident", "over-confident")
        words = words.replace("too low", "too high")
        assert words.lower() in guide.lower(), words


def check_words(report: CalibrationReport) -> None:
    """Read the verdict, the diagnosis and the table of metrics as they are printed, and compare them."""
    check_change(report)
    check_classes(report)
    check_guide(report)
    if report.multi_label:
        return
    table = {row[0]: row[1:] for row in report.metric_table()[1]}
    for column, (verdict, state) in enumerate(
        zip(verdicts(report), report.states, strict=True)
    ):
        means, *places, errors = starting(report, state)
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
        assert len(sides) == 2 or " for others" not in verdict


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


def odd_report(kind: str, seed: int) -> CalibrationReport:
    """A report on few or strange rows, or with what few reports have."""
    rng = np.random.default_rng([seed, 7])
    n, c = int(np.exp(rng.uniform(3.5, 7))), int(rng.integers(2, 7))
    n = int(rng.integers(1, 30)) if kind == "few" else n
    logits = rng.normal(scale=2, size=(n, c))
    right = softmax(logits, axis=1)
    labels = labels_by(right, rng)
    probs = softmax(logits * np.exp(rng.uniform(-1, 1)), axis=1)
    calibrated, options = None if rng.random() < 0.3 else right, dict[str, Any]()
    if kind == "weights":
        options["sample_weight"] = rng.gamma(0.5, size=n)
    elif kind == "soft labels":
        options["soft_labels"] = right
    elif kind == "a missing class":
        labels[labels == c - 1] = 0
    elif kind == "a swapped class":
        probs = right[:, [1, 0, *range(2, c)]]
    elif kind == "ties":
        probs = np.full((n, c), 1 / c)
    elif kind == "of 0 and 1":
        probs = np.eye(c)[probs.argmax(axis=1)]
    elif kind == "nearly 1":
        probs = softmax(60 * logits, axis=1).astype(np.float32)
    elif kind == "unchanged":
        calibrated = probs.copy()
    elif kind == "worse":
        probs, calibrated = right, softmax(rng.uniform(2, 6) * logits, axis=1)
    elif kind == "all right":
        labels = probs.argmax(axis=1)
    elif kind == "several labels":
        right = expit(logits)
        labels = (rng.random((n, c)) < right).astype(int)
        labels[rng.random((n, c)) < 0.2] = -100
        labels[0] = 1
        probs = expit(logits + rng.normal(size=c))
        calibrated = None if calibrated is None else right
    return calibration_report(
        probs, labels, calibrated=calibrated, n_resamples=100, **options
    )


ODD = ["weights", "soft labels", "few", "a missing class", "a swapped class", "ties"]
ODD += ["of 0 and 1", "nearly 1", "unchanged", "worse", "all right", "several labels"]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)]
)
def test_the_words_agree_with_the_numbers_of_odd_reports(
    kind: str, seeds: range
) -> None:
    for seed in seeds:
        check_words(odd_report(kind, seed))


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
    probabilities, coins = exact(chances), coins_of_columns(chances[None])[:, 0]
    for n_heads in range(len(chances) + 1):
        wanted = min(
            1,
            2 * min(probabilities[: n_heads + 1].sum(), probabilities[n_heads:].sum()),
        )
        if wanted > 1e-3:
            assert p_of(coins, n_heads) == pytest.approx(wanted, rel=0.15, abs=0.002)
        else:
            assert p_of(coins, n_heads) < 2e-3


def drawn(kind: str, n: int, c: int, rng: np.random.Generator) -> np.ndarray:
    """Probabilities (n, c): of middling confidence, or near 1."""
    if kind == "middling":
        return softmax(2 * rng.normal(size=(n, c)), axis=1)
    top = rng.uniform({"high": 0.96, "very high": 0.999}[kind], 1, n)
    probs = np.repeat(((1 - top) / (c - 1))[:, None], c, axis=1)
    probs[np.arange(n), rng.integers(c, size=n)] = top
    return probs


@pytest.mark.slow
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


def test_the_change_of_the_nll_is_paired() -> None:
    """Its interval is that of a t test of the rows' differences, weighted or over the labels of a row."""
    probs, labels = predictions(200, 3, temperature=0.5)
    softer = predictions(200, 3)[0]
    rows = np.arange(200)
    change = -np.log(softer[rows, labels] / probs[rows, labels])
    report = calibration_report(probs, labels, calibrated=softer, n_resamples=1)
    wanted = ttest_1samp(change, 0).confidence_interval()
    assert [*report.nll_change] == pytest.approx([change.mean(), *wanted], rel=1e-9)
    value, high, low = (f"{-each:.3f}" for each in (change.mean(), *wanted))
    assert report.verdict.endswith(f"; NLL lower by {value} [{low}, {high}].")
    # A weight of 2 counts a row twice, and an unknown label counts as none.
    weights = np.where(rows < 100, 2.0, 0.0)
    report = calibration_report(
        probs, labels, calibrated=softer, sample_weight=weights, n_resamples=1
    )
    wanted = ttest_1samp(change[:100], 0).confidence_interval()
    assert [*report.nll_change] == pytest.approx(
        [change[:100].mean(), *wanted], rel=1e-9
    )
    known = np.eye(3, dtype=int)[labels]
    known[:, 1:] = -100
    report = calibration_report(probs, known, calibrated=softer, n_resamples=1)
    is_first = labels == 0
    change = -np.log(
        np.where(
            is_first, softer[:, 0] / probs[:, 0], (1 - softer[:, 0]) / (1 - probs[:, 0])
        )
    )
    wanted = ttest_1samp(change, 0).confidence_interval()
    assert [*report.nll_change] == pytest.approx([change.mean(), *wanted], rel=1e-9)


def test_one_row_and_the_same_probabilities_have_words_of_their_own() -> None:
    probs = np.array([[0.6, 0.4]])
    better = calibration_report(probs, [0], calibrated=probs[:, ::-1], n_resamples=1)
    assert better.verdict.endswith("; NLL higher by 0.405.")
    same = calibration_report(probs, [0], calibrated=probs, n_resamples=1)
    assert same.verdict.endswith("; NLL unchanged.")


def named_report(p_value: float, **fields: float) -> CalibrationReport:
    """Three classes, of which two have this p-value; the other tests agree with a calibrated model."""
    probs, labels = predictions(300, 3)
    report = calibration_report(
        probs, labels, n_resamples=1, class_names=["law", "art", "film"]
    )
    numbers = fields or {"frequency": 0.12, "mean_probability": 0.183}
    which = "p_value" if "precision" in fields else "frequency_p_value"
    harmless: Any = {"p_value": 1.0, "frequency_p_value": 1.0}
    rows = [replace(row, **harmless) for row in report.before.classes]
    rows[0] = replace(rows[0], **{which: p_value}, **numbers)
    overall = report.before.overall._replace(p_value=1.0, low=-0.1, high=0.1)
    bins = tuple(replace(row, p_value=1.0) for row in report.before.bins)
    test = report.before.consistency._replace(p_value=1.0)
    before = replace(
        report.before, classes=tuple(rows), overall=overall, bins=bins, consistency=test
    )
    return replace(report, before=before)


def test_a_verdict_names_the_class_and_both_numbers() -> None:
    assert named_report(1e-6).verdict == (
        "Wrong about how often some classes occur, "
        '"law" (0.120 of the examples, mean probability 0.183).'
    )
    one = named_report(1e-6, confidence=0.81, precision=0.72)
    words = 'Over-confident for some classes, "law" (confidence 0.81, precision 0.72).'
    assert one.verdict == words


@pytest.mark.parametrize("fields", [{}, {"confidence": 0.81, "precision": 0.72}])
def test_classes_are_judged_together(fields: dict[str, float]) -> None:
    """Of three classes, one with a p-value between a third of the level and the level is not named."""
    # Simes' rule lets the kinds of tests through at .01; then a class needs .05 / 3.
    others = named_report(1e-6, **fields)
    second = replace(
        others.before.classes[2], frequency_p_value=0.03, p_value=0.03, predicted=50
    )
    second = replace(second, confidence=0.9, precision=0.5)
    both = replace(others.before, classes=(*others.before.classes[:2], second))
    said = " ".join(replace(others, before=both).diagnosis)
    assert '"law"' in said
    assert '"film"' not in said


def test_confidences_in_one_bin_are_pointed_out() -> None:
    words = "All confidences lie in one bin"
    assert words in " ".join(calibrated_by_hand().warnings)
    probs, labels = predictions(200, 3)
    report = calibration_report(probs, labels, n_resamples=1)
    assert words not in " ".join(report.warnings)


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
