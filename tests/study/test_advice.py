"""Advice of studies: the sentences follow from the numbers, and go no further."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pandas
import pytest

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
            "Use focal with temperature. Lower NLL than the baseline beyond chance: focal with temperature.",
            "Higher NLL beyond chance: focal without calibration.",
        ],
        ["Nothing"],
    ),
    "the baseline is the lowest": (
        results(LOW),
        [
            "Lowest NLL: cross_entropy with temperature, 0.3470, the baseline itself.",
            "Nothing is proven against cross_entropy without calibration, focal without calibration, focal with "
            "temperature: that cross_entropy with temperature is lower may be chance.",
        ],
        [],
    ),
    "one seed, and the baseline is the lowest beyond chance": (
        results(LOW, dict.fromkeys((CE_RAW, FOCAL_RAW, FOCAL), 0.01), n_seeds=1),
        [
            "Use cross_entropy with temperature: all others have a higher NLL beyond chance on these test rows.",
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
