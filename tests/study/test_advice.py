"""Advice of studies: the sentences follow from the numbers, and go no further."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas
import pytest

from hf_calib.study.results import KEY, NUMBERS, StudyResults

METHODS = ("none", "temperature")


def results(
    nll: dict[tuple[str, str], float],
    *,
    p_corrected: dict[tuple[str, str, str], float] | None = None,
    ece: dict[tuple[str, str], float] | None = None,
    accuracy: dict[tuple[str, str], float] | None = None,
    baseline: tuple[str, str] = ("cross_entropy", "temperature"),
    n_seeds: int = 3,
    missing: dict[tuple[str, int], str] | None = None,
) -> StudyResults:
    """A study's results of given means; a difference whose corrected p is not given has 1."""
    means, differences, numbers = [], [], []
    for metric, table in {"nll": nll, "ece": ece or {}, "accuracy": accuracy or {}}.items():
        for pair, value in table.items():
            means.append((*pair, metric, value, value - 0.01, value + 0.01, n_seeds))
            for seed in range(n_seeds):
                numbers.append((pair[0], seed, pair[1], metric, value, np.nan, value, np.nan))
            if pair != baseline:
                change = value - table[baseline]
                p = (p_corrected or {}).get((*pair, metric), 1.0)
                found = (change, change - 0.01, change + 0.01, p / 2, p, n_seeds)
                differences.append((*pair, metric, *found))
    study = StudyResults(
        losses=tuple(dict.fromkeys(loss for loss, _ in nll)),
        seeds=tuple(range(n_seeds)),
        methods=METHODS,
        metrics={"nll": "NLL", "accuracy": "Accuracy", "ece": "ECE"},
        counted=("test rows", "classes"),
        n_test=1000,
        n_classes=4,
        n_calibration=500,
        n_resamples=1000,
        variance="own",
        numbers=pandas.DataFrame(numbers, columns=NUMBERS),
        missing=missing or {},
        remarks=(),
    )
    names = ["value", "low", "high", "p", "p_corrected", "n_seeds"]
    tables = {
        "means": pandas.DataFrame(means, columns=[*KEY, *names[:3], "n_seeds"]).set_index(KEY),
        "differences": pandas.DataFrame(differences, columns=[*KEY, *names]).set_index(KEY),
        "baseline": baseline,
    }
    return given(study, **tables)


def given(study: StudyResults, **tables: object) -> StudyResults:
    """With these tables in place of those that follow from the numbers."""
    study.__dict__.update(tables)
    return study


CE, FOCAL = ("cross_entropy", "temperature"), ("focal", "temperature")
CE_RAW, FOCAL_RAW, BRIER = ("cross_entropy", "none"), ("focal", "none"), ("brier", "temperature")
NLL = {CE_RAW: 0.41, CE: 0.347, FOCAL_RAW: 0.45, FOCAL: 0.341}
LOW = NLL | {FOCAL: 0.36}
BEST = (*FOCAL, "nll")
ACCURACY = dict.fromkeys(NLL, 0.90) | {FOCAL: 0.88}
FINDS = "A true difference in NLL of 0.031 would be found in 80% of such studies"


def shared(n_seeds: int | None) -> StudyResults:
    """A study where the best loss shares so many seeds with the baseline; none for None."""
    study = results(NLL, p_corrected={BEST: 0.001})
    if n_seeds is None:
        return given(study, differences=study.differences.drop([BEST]))
    study.differences.loc[study.differences.index.isin([BEST]), "n_seeds"] = n_seeds
    return study


CASES: dict[str, tuple[StudyResults, list[str], list[str]]] = {
    # the study, what it says, and what it does not
    "nothing beyond chance": (
        results(NLL),
        [
            "Lowest NLL: focal with temperature, 0.3410; cross_entropy with temperature has 0.3470 (difference "
            "-0.0060, 95% interval -0.0160 to +0.0040, corrected p = 1).",
            "Nothing is proven: that focal with temperature is lower than cross_entropy with temperature may be "
            "chance. More seeds could tell.",
            "3 seeds: a difference between losses that is not beyond chance here may still exist.",
        ],
        ["calibration rows", "Take "],
    ),
    "a loss that beats the baseline": (
        results(NLL, p_corrected={BEST: 0.02, (*FOCAL_RAW, "nll"): 0.0004}),
        [
            "corrected p = 0.02",
            "Take focal with temperature. Lower NLL than the baseline beyond chance: focal with temperature.",
            "Higher NLL beyond chance: focal without a map.",
        ],
        ["Nothing"],
    ),
    "beyond chance alone, but not corrected": (
        results(NLL, p_corrected={BEST: 0.06}),
        ["Nothing is proven: "],
        [],
    ),
    "the lowest mean is not what is beyond chance": (
        results(NLL | {BRIER: 0.338}, p_corrected={BEST: 0.02}),
        ["Lowest NLL: brier with temperature", "Take focal with temperature. "],
        [],
    ),
    "the baseline is the lowest": (
        results(LOW),
        [
            "Lowest NLL: cross_entropy with temperature, 0.3470, the baseline itself.",
            "Nothing is proven against cross_entropy without a map, focal without a map, focal with temperature: that "
            "cross_entropy with temperature is lower may be chance.",
        ],
        [],
    ),
    "the baseline is the lowest beyond chance": (
        results(LOW, p_corrected={(*pair, "nll"): 0.01 for pair in (CE_RAW, FOCAL_RAW, FOCAL)}, n_seeds=1),
        [
            "Take cross_entropy with temperature: all others have a higher NLL beyond chance on these test rows."
        ],
        [],
    ),
    "few calibration rows": (
        replace(results(NLL), n_calibration=26),
        ["The maps were fitted on 26 calibration rows: other rows would give other maps"],
        [],
    ),
    "no seed in common": (
        shared(None),
        ["cross_entropy with temperature has 0.3470 (no seed in common).", "Nothing is proven: "],
        [],
    ),
    "one seed": (
        results(NLL, n_seeds=1, p_corrected={BEST: 0.001}),
        [
            "beyond chance on these test rows: focal with temperature",
            "One seed: intervals cover the test rows only, and another training may change",
            "With one seed, intervals and p-values cover the test rows only",
        ],
        [],
    ),
    "one seed in common among several": (
        shared(1),
        ["Nothing is proven: that focal with temperature is lower"],
        ["Take "],
    ),
    "power": (
        given(results(NLL), detectable={"nll": 0.0312}),
        [f"{FINDS}; half of it takes up to four times as many seeds and test rows."],
        [],
    ),
    "pooled": (
        replace(results(NLL), variance="pooled"),
        ["up to 16% of such studies call equal losses different: compare their spread over the seeds"],
        [],
    ),
    "power of one seed": (
        given(results(NLL, n_seeds=1), detectable={"nll": 0.0312}),
        [f"{FINDS}; on these models only."],
        [],
    ),
    "a loss with a map alone": (
        results({CE: 0.347}),
        ["Only cross_entropy with temperature was measured (NLL 0.3470)"],
        [],
    ),
    "one loss": (results({CE_RAW: 0.41, CE: 0.347}), ["the baseline itself."], ["accuracy"]),
    "another baseline": (
        results({FOCAL_RAW: 0.45, ("brier", "none"): 0.40}, baseline=FOCAL_RAW),
        [
            "Nothing is proven: that brier without a map is lower than focal without",
            "The baseline is focal without a map, as cross_entropy with temperature was not measured.",
        ],
        [],
    ),
    "lower accuracy": (
        results(NLL, accuracy=ACCURACY, p_corrected={(*FOCAL, "accuracy"): 0.01}),
        ["Lower accuracy than cross_entropy with temperature beyond chance: focal with temperature."],
        ["No accuracy differs"],
    ),
    "missing trainings": (
        results(NLL, missing={("focal", 3): "not finished", ("focal", 4): "not finished"}),
        ["2 of 8 trainings have no numbers; means are over the others."],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sentences_follow_from_the_numbers(case: str) -> None:
    study, said, unsaid = CASES[case]
    found = " ".join((*study.advice, *study.notes))
    assert [words for words in said if words not in found] == []
    assert [words for words in unsaid if words in found] == []
