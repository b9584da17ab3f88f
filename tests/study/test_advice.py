"""Advice of studies: the sentences follow from the numbers, and go no further."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_calib.study.advice import advise, notes_on_statistics
from hf_calib.study.results import Detectable, Difference, Estimate, StudyResults

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
    tables = {"nll": nll, "ece": ece or {}, "accuracy": accuracy or {}}
    means = {
        (*pair, metric): Estimate(value, value - 0.01, value + 0.01, n_seeds)
        for metric, table in tables.items()
        for pair, value in table.items()
    }
    differences = {}
    for metric, table in tables.items():
        for pair, value in table.items():
            if pair != baseline:
                change = value - table[baseline]
                p = (p_corrected or {}).get((*pair, metric), 1.0)
                differences[(*pair, metric)] = Difference(
                    change, change - 0.01, change + 0.01, p / 2, p, n_seeds, 4, 15
                )
    return StudyResults(
        losses=tuple(dict.fromkeys(loss for loss, _ in nll)),
        seeds=tuple(range(n_seeds)),
        methods=METHODS,
        metrics={"nll": "NLL", "accuracy": "Accuracy", "ece": "ECE"},
        values={
            (loss, seed, method, "nll"): value
            for (loss, method), value in nll.items()
            for seed in range(n_seeds)
        },
        means=means,
        baseline=baseline,
        differences=differences,
        missing=missing or {},
        panels={},
        n_test=1000,
        n_calibration=500,
        n_classes=4,
        n_resamples=1000,
        advice=(),
        notes=(),
    )


NLL = {
    ("cross_entropy", "none"): 0.41,
    ("cross_entropy", "temperature"): 0.347,
    ("focal", "none"): 0.45,
    ("focal", "temperature"): 0.341,
}


def test_nothing_that_can_be_told_from_the_baseline() -> None:
    first, second, *_, last = advise(results(NLL))
    assert first == (
        "Lowest NLL: focal with temperature, 0.3410; cross_entropy with temperature has 0.3470 (difference -0.0060, "
        "95% interval -0.0160 to +0.0040, corrected p = 1)."
    )
    assert second == (
        "Nothing is proven: that focal with temperature is lower than cross_entropy with temperature may be chance. To "
        "find a true difference of this size in 80% of studies takes 4 to 15 seeds."
    )
    study = results(NLL)
    found = study.differences["focal", "temperature", "nll"]
    hopeless = replace(
        study,
        differences={
            **study.differences,
            ("focal", "temperature", "nll"): found._replace(fewest_seeds=None),
        },
    )
    assert advise(hopeless)[1].endswith("takes more than 100 seeds, or more test rows.")
    assert last.startswith(
        "3 seeds: a difference between losses that is not beyond chance here may still exist."
    )


def test_a_loss_that_beats_the_baseline() -> None:
    found = advise(
        results(NLL, p_corrected={("focal", "temperature", "nll"): 0.02, ("focal", "none", "nll"): 0.0004})
    )
    assert "corrected p = 0.02" in found[0]
    assert found[1] == (
        "Take focal with temperature. Lower NLL than the baseline beyond chance: focal with temperature."
    )
    assert found[2] == "Higher NLL beyond chance: focal without a map."
    assert not any("nothing here" in sentence for sentence in found)


def test_what_is_beyond_chance_alone_but_not_corrected_proves_nothing() -> None:
    study = results(NLL, p_corrected={("focal", "temperature", "nll"): 0.06})
    assert study.differences["focal", "temperature", "nll"].p == 0.03
    assert advise(study)[1].startswith("Nothing is proven: ")


def test_the_lowest_mean_need_not_be_what_is_beyond_chance() -> None:
    nll = NLL | {("brier", "temperature"): 0.338}
    found = advise(results(nll, p_corrected={("focal", "temperature", "nll"): 0.02}))
    assert found[0].startswith("Lowest NLL: brier with temperature")
    assert found[1].startswith("Take focal with temperature. ")


def test_the_baseline_itself_is_the_lowest() -> None:
    found = advise(results(NLL | {("focal", "temperature"): 0.36}))
    assert found[0] == "Lowest NLL: cross_entropy with temperature, 0.3470, the baseline itself."
    assert found[1] == (
        "Nothing is proven against cross_entropy without a map, focal without a map, focal with temperature: that "
        "cross_entropy with temperature is lower may be chance."
    )
    others = [("cross_entropy", "none"), ("focal", "none"), ("focal", "temperature")]
    p_corrected = dict.fromkeys([(*pair, "nll") for pair in others], 0.01)
    sure = results(NLL | {("focal", "temperature"): 0.36}, p_corrected=p_corrected, n_seeds=1)
    assert advise(sure)[1] == (
        "Take cross_entropy with temperature: all others have a higher NLL beyond chance on these test rows."
    )


def test_few_calibration_rows_are_said() -> None:
    said = "The maps were fitted on 26 calibration rows: other rows would give other maps"
    assert said in " ".join(advise(replace(results(NLL), n_calibration=26)))
    assert "calibration rows" not in " ".join(advise(results(NLL)))


def test_a_best_loss_that_shares_no_seed_with_the_baseline() -> None:
    """Cells that failed, or losses that were added with other seeds."""
    study = results(NLL)
    del study.differences["focal", "temperature", "nll"]  # type: ignore[attr-defined]
    first, second, *_ = advise(study)
    assert first.endswith("cross_entropy with temperature has 0.3470 (no seed in common).")
    assert second.startswith("Nothing is proven: ")


def test_one_seed_says_nothing_of_another_training() -> None:
    study = results(NLL, n_seeds=1, p_corrected={("focal", "temperature", "nll"): 0.001})
    found = " ".join(advise(study))
    assert "beyond chance on these test rows: focal with temperature" in found
    assert "One seed: intervals cover the test rows only, and another training may change" in found
    notes = " ".join(notes_on_statistics(study))
    assert "With one seed, intervals and p-values cover the test rows only" in notes
    assert "its smallest p is 2/2^1 = 1." in notes


def test_a_difference_of_one_seed_among_several_is_passed_over() -> None:
    study = results(NLL, p_corrected={("focal", "temperature", "nll"): 0.001})
    alone = study.differences["focal", "temperature", "nll"]._replace(n_seeds=1)
    study.differences["focal", "temperature", "nll"] = alone  # type: ignore[index]
    assert advise(study)[1].startswith(
        "Nothing is proven: that focal with temperature is lower than cross_en"
    )
    assert "One seed in common with the baseline" in " ".join(notes_on_statistics(study))


@pytest.mark.parametrize(("n_seeds", "smallest"), [(2, "0.5"), (3, "0.25"), (5, "0.0625"), (6, None)])
def test_rank_tests_need_six_seeds(n_seeds: int, smallest: str | None) -> None:
    notes = " ".join(notes_on_statistics(results(NLL, n_seeds=n_seeds)))
    if smallest is None:
        assert "rank test" not in notes
    else:
        assert f"its smallest p is 2/2^{n_seeds} = {smallest}." in notes


def test_what_the_study_could_have_found() -> None:
    found = {"nll": Detectable(0.0312, 9, None), "ece": Detectable(0.02, None, None)}
    notes = " ".join(notes_on_statistics(replace(results(NLL), detectable=found)))
    assert (
        "A true difference in NLL of 0.031 would be found in 80% of such studies, half of it with 9 to more than 100 "
        "seeds." in notes
    )
    assert "half of it not with 100 seeds: the test rows, too, are a sample." in notes
    one = replace(results(NLL, n_seeds=1), detectable={"nll": Detectable(0.0312, None, None)})
    assert "in 80% of such studies, on these models only." in " ".join(notes_on_statistics(one))


def test_a_pooled_variance_says_what_it_rests_on() -> None:
    study = replace(results(NLL), variance="pooled", equal_variances={("temperature", "nll"): 0.5})
    assert "Bartlett's test does not find that the losses vary differently" in " ".join(
        notes_on_statistics(study)
    )
    unequal = replace(study, equal_variances={("temperature", "nll"): 0.5, ("none", "ece"): 0.003})
    notes = " ".join(notes_on_statistics(unequal))
    assert "do not vary alike over the seeds, by Bartlett's test: ECE with no map (p = 0.003)." in notes
    assert "take --variance own." in notes


def test_a_study_of_one_loss() -> None:
    only = results({("cross_entropy", "temperature"): 0.347})
    assert advise(only)[0].startswith("Only cross_entropy with temperature was measured (NLL 0.3470)")
    maps = advise(results({pair: value for pair, value in NLL.items() if pair[0] == "cross_entropy"}))
    assert maps[0].endswith("the baseline itself.")
    assert not any("accuracy" in sentence.lower() for sentence in maps)


def test_another_baseline_is_named() -> None:
    study = results({("focal", "none"): 0.45, ("brier", "none"): 0.40}, baseline=("focal", "none"))
    assert advise(study)[1].startswith(
        "Nothing is proven: that brier without a map is lower than focal without"
    )
    assert notes_on_statistics(study)[0] == (
        "The baseline is focal without a map, as cross_entropy with temperature was not measured."
    )


def test_accuracy_is_named_where_it_differs() -> None:
    accuracy = dict.fromkeys(NLL, 0.90) | {("focal", "temperature"): 0.88}
    same = advise(results(NLL, accuracy=accuracy))
    assert "No accuracy differs from that of the baseline beyond chance." in same
    lower = advise(results(NLL, accuracy=accuracy, p_corrected={("focal", "temperature", "accuracy"): 0.01}))
    assert (
        "Lower accuracy than cross_entropy with temperature beyond chance: focal with temperature." in lower
    )


def test_comparisons_that_were_not_made_are_no_evidence() -> None:
    study = results(NLL, accuracy=dict.fromkeys(NLL, 0.9))
    key = ("focal", "none", "accuracy")
    study.differences[key] = study.differences[key]._replace(p=None, p_corrected=None)  # type: ignore[index]
    found = advise(study)
    assert "No accuracy differs from that of the baseline beyond chance." in found
    assert any(each.startswith("1 of 3 accuracies were not compared with that of the") for each in found)
    for other in [key for key in study.differences if key[2] == "accuracy"]:
        study.differences[other] = study.differences[other]._replace(n_seeds=1)  # type: ignore[index]
    found = advise(study)
    assert not any(each.startswith("No accuracy differs") for each in found)
    assert any(each.startswith("3 of 3 accuracies were not compared") for each in found)


def test_what_the_map_does_to_the_ece() -> None:
    ece = {
        ("cross_entropy", "none"): 0.032,
        ("cross_entropy", "temperature"): 0.041,
        ("focal", "none"): 0.176,
        ("focal", "temperature"): 0.015,
    }
    found = advise(results(NLL, ece=ece))
    assert "ECE that is large without a map, and that temperature repairs: focal 0.176 to 0.015." in found
    assert (
        "ECE that is larger after temperature, in the mean over seeds: cross_entropy 0.032 to 0.041." in found
    )


def test_a_map_that_leaves_most_of_the_ece_has_not_repaired_it() -> None:
    ece = {
        ("cross_entropy", "none"): 0.1,
        ("cross_entropy", "temperature"): 0.08,
        ("focal", "none"): 0.04,  # nothing to repair, and hardly any harm
        ("focal", "temperature"): 0.01,
        ("brier", "none"): 0.02,
        ("brier", "temperature"): 0.024,
    }
    found = advise(results(NLL | {("brier", "none"): 0.4, ("brier", "temperature"): 0.4}, ece=ece))
    assert not [each for each in found if "repairs" in each or "larger after" in each]


def test_missing_trainings_are_counted() -> None:
    notes = notes_on_statistics(
        results(NLL, missing={("focal", 3): "not finished", ("focal", 4): "not finished"})
    )
    assert notes[0] == "2 of 8 trainings have no numbers; means are over the others."
