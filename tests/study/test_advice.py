"""Advice of studies: the sentences follow from the numbers, and go no further."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pandas
import pytest

from hf_calib.study.report import document_of
from hf_calib.study.results import KEY, NUMBERS, StudyResults
from tests.helpers.study_results import study_results

CE, FOCAL = ("cross_entropy", "temperature"), ("focal", "temperature")
CE_RAW, FOCAL_RAW, BRIER = (
    ("cross_entropy", "none"),
    ("focal", "none"),
    ("brier", "temperature"),
)
NLL = {CE_RAW: 0.41, CE: 0.347, FOCAL_RAW: 0.45, FOCAL: 0.341}
LOW = NLL | {FOCAL: 0.36}
ACCURACY = {(*pair, "accuracy"): 0.9 for pair in NLL}


def results(
    nll: dict[tuple[str, str], float],
    p: dict[tuple[str, str] | tuple[str, str, str], float] | None = None,
    *,
    accuracy: dict[tuple[str, str, str], float] | None = None,
    baseline: tuple[str, str] = CE,
    n_seeds: int = 3,
    **tables: object,
) -> StudyResults:
    """A study of these means; a difference whose corrected p is not given has 1."""
    values = {(*pair, "nll"): value for pair, value in nll.items()} | (accuracy or {})
    means = [
        (*key, value, value - 0.01, value + 0.01, n_seeds)
        for key, value in values.items()
    ]
    numbers = [
        (loss, seed, *rest, value, np.nan, value, np.nan)
        for seed, ((loss, *rest), value) in product(range(n_seeds), values.items())
    ]
    p = {(*key, "nll")[:3]: found for key, found in (p or {}).items()}
    differences = []
    for key, value in values.items():
        change = value - values[(*baseline, key[2])]
        if key[:2] != baseline:
            found = (change, change - 0.01, change + 0.01, 0.5, p.get(key, 1.0))
            differences.append((*key, *found, n_seeds))
    names = ["value", "low", "high", "p", "p_corrected", "n_seeds"]
    study = replace(
        study_results(tuple(dict.fromkeys(loss for loss, _ in nll)), range(n_seeds)),
        numbers=pandas.DataFrame(numbers, columns=NUMBERS),
        n_calibration=500,
    )
    given = {
        "means": pandas.DataFrame(
            means, columns=[*KEY, *names[:3], "n_seeds"]
        ).set_index(KEY),
        "differences": pandas.DataFrame(differences, columns=[*KEY, *names]).set_index(
            KEY
        ),
        "baseline": baseline,
    }
    study.__dict__.update(given | tables)
    return study


FINDS = "A true difference in NLL of 0.031 would be found in 80% of such studies"
CASES: dict[str, tuple[StudyResults, list[str], list[str]]] = {
    # the study, what it says, and what it does not
    "nothing beyond chance": (
        results(NLL),
        [
            "Lowest NLL: focal with temperature, 0.3410; cross_entropy with temperature has 0.3470 (difference "
            "-0.0060, 95% interval -0.0160 to +0.0040, corrected p = 1).",
            "Nothing is proven: that focal with temperature is lower than cross_entropy with temperature may be "
            "chance. Use more seeds.",
            "With 3 seeds, a difference between losses that is not beyond chance may still exist.",
        ],
        ["calibration rows", "Use focal", "Use cross", "accuracy"],
    ),
    "a loss that beats the baseline": (
        results(NLL, {FOCAL: 0.02, FOCAL_RAW: 0.0004}),
        [
            "corrected p = 0.02",
            "Use focal with temperature. Lower NLL than cross_entropy with temperature beyond chance: focal with "
            "temperature.",
            "Higher NLL than cross_entropy with the same calibrator beyond chance: focal without calibration.",
        ],
        ["Nothing"],
    ),
    "the baseline is the lowest": (
        results(LOW),
        [
            "Lowest NLL: cross_entropy with temperature, 0.3470, the baseline itself.",
            "Nothing is proven against cross_entropy without calibration, focal with temperature: that cross_entropy "
            "with temperature is lower may be chance.",
        ],
        [],
    ),
    "one seed, and the baseline is the lowest beyond chance": (
        results(LOW, dict.fromkeys((CE_RAW, FOCAL_RAW, FOCAL), 0.01), n_seeds=1),
        [
            "Use cross_entropy with temperature: all that are compared with it have a higher NLL beyond chance on "
            "these test rows.",
            "With one seed, intervals cover the test rows only, and another run may change",
            "With one seed, intervals and p-values cover the test rows only",
        ],
        [],
    ),
    "power": (
        results(NLL, detectable={"nll": 0.0312}),
        [f"{FINDS}; to find half of it takes up to"],
        [],
    ),
    "another baseline": (
        results({FOCAL_RAW: 0.45, ("brier", "none"): 0.40}, baseline=FOCAL_RAW),
        [
            "The baseline is focal without calibration, as cross_entropy with temperature was not measured."
        ],
        [],
    ),
    "lower accuracy": (
        results(
            NLL,
            {(*FOCAL, "accuracy"): 0.01},
            accuracy=ACCURACY | {(*FOCAL, "accuracy"): 0.88},
        ),
        [
            "Lower accuracy than cross_entropy with temperature beyond chance: focal with temperature."
        ],
        ["Higher accuracy"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sentences_follow_from_the_numbers(case: str) -> None:
    study, said, unsaid = CASES[case]
    found = " ".join((*study.advice, *study.notes))
    assert [words for words in said if words not in found] == []
    assert [words for words in unsaid if words in found] == []


def test_few_calibration_rows_a_pooled_variance_and_missing_trainings_are_said() -> (
    None
):
    study = study_results(missing={("focal", 1): "killed"})
    found = " ".join(
        (*replace(study, n_calibration=26, variance="pooled").advice, *study.notes)
    )
    assert "The calibrators were fitted on 26 calibration rows" in found
    assert "1 of 6 runs could not be measured; means are over the other runs." in found
    notes = " ".join(replace(study, variance="pooled").notes)
    assert (
        "up to 16% of such studies call equal losses different: compare their spread"
        in notes
    )


def two_seeds(accuracies: dict[str, tuple[float, float]]) -> StudyResults:
    """Two seeds apart from each other, on resamples of the rows that hardly differ."""
    draws = np.linspace(-1e-3, 1e-3, 50)
    rows = []
    for loss, values in accuracies.items():
        for seed, value in enumerate(values):
            for metric in ("nll", "accuracy", "ece"):
                number = 1 - value if metric == "ece" else value
                drawn = number + draws * (1 + seed)
                rows.append((loss, seed, "none", metric, number, drawn, number, drawn))
    study = study_results(tuple(accuracies), (0, 1), ("none",))
    return replace(study, numbers=pandas.DataFrame(rows, columns=NUMBERS))


def test_no_interval_and_no_power_is_beyond_what_is_possible() -> None:
    study = two_seeds({"cross_entropy": (0.1, 0.9), "focal": (0.9, 0.1)})
    row = study.differences.loc[("focal", "none", "accuracy")]
    assert (row["low"], row["high"]) == (-1, 1)
    assert study.differences.loc[("focal", "none", "nll")]["high"] > 5
    assert study.detectable["ece"] == np.inf
    said = " ".join(study.notes)
    assert "No true difference in ECE that is possible would be found in 80%" in said
    powers = {each["metric"]: each["value"] for each in study.to_dict()["detectable"]}
    assert powers["ece"] is None
    found = re.findall(r"A true difference in ECE of ([\d.]+)", said)
    assert found == []


AUTO_CE, AUTO_FOCAL = ("cross_entropy", "auto"), ("focal", "auto")


def three_methods(focal: float, spread: float = 1e-4) -> StudyResults:
    """`auto` is far better than a temperature for either loss; with it focal has this NLL, and cross entropy .4."""
    nll = {CE_RAW: 0.9, CE: 0.8, AUTO_CE: 0.4}
    nll |= {FOCAL_RAW: 0.9, FOCAL: 0.8, AUTO_FOCAL: focal}
    draws = np.random.default_rng(0).normal(0, spread, 50)
    rows = []
    for pair, value in nll.items():
        for seed in range(3):
            own = value + spread * np.random.default_rng([seed, len(rows)]).normal()
            for metric in ("nll", "accuracy"):
                drawn = own + draws
                rows.append((pair[0], seed, pair[1], metric, own, drawn, own, drawn))
    methods = ("none", "temperature", "auto")
    study = study_results(("cross_entropy", "focal"), range(3), methods)
    return replace(study, numbers=pandas.DataFrame(rows, columns=NUMBERS))


def test_a_loss_is_compared_with_the_same_calibrator() -> None:
    """A gain of the calibrator is not one of the loss."""
    study = three_methods(focal=0.396, spread=0.02)
    difference = study.differences.loc[("focal", "auto", "nll")]
    assert difference["value"] == pytest.approx(-0.004, abs=0.04)
    said = " ".join(study.advice)
    best = min(
        (AUTO_CE, AUTO_FOCAL), key=lambda pair: study.means["value"][(*pair, "nll")]
    )
    assert f"Lowest NLL: {best[0]} with auto" in said
    assert "Use focal" not in said
    better = " ".join(three_methods(focal=0.35).advice)
    assert "Use focal with auto." in better
    assert "cross_entropy with auto has 0.4" in better
    lower = "Lower NLL than cross_entropy with "
    assert f"{lower}the same calibrator beyond chance: focal with auto." in better
    assert f"{lower}temperature beyond chance: cross_entropy with auto." in better


def test_a_calibrator_that_changes_predictions_has_its_accuracy() -> None:
    study = three_methods(focal=0.4)
    table = document_of(study).to_markdown()
    header = next(line for line in table.splitlines() if line.startswith("| loss |"))
    assert "accuracy uncalibrated | accuracy temperature | accuracy auto" in header
    same = study_results()
    numbers = same.numbers.copy()
    numbers.loc[numbers["metric"] == "accuracy", "value"] = 0.5
    table = document_of(replace(same, numbers=numbers)).to_markdown()
    header = next(line for line in table.splitlines() if line.startswith("| loss |"))
    assert header.startswith("| loss | accuracy | NLL")
