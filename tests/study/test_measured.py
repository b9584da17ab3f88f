"""Measured studies: their numbers against references, and what cannot be measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import softmax

from hf_calib.metrics.intervals import holm
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.scaling import TemperatureScaling
from hf_calib.study.measured import WITHOUT_INTERVAL
from hf_calib.study.results import StudyResults
from tests.helpers.studies import Task, measured_quickly, write_study
from tests.helpers.study_results import rows, values
from tests.helpers.unchecked import unchecked

TASK = Task()
LOSSES = {"cross_entropy": 2.0, "focal": 0.6}
TRAININGS = {
    (loss, seed): TASK.train(100 * i + seed, sharpness=sharpness)
    for i, (loss, sharpness) in enumerate(LOSSES.items())
    for seed in (0, 1, 2)
}
BASELINE = ("cross_entropy", "temperature")


def measured(
    folder: Path,
    trainings: dict[tuple[str, int], TrainingPredictions | None],
    **options: object,
) -> StudyResults:
    return measured_quickly(write_study(folder / "study", trainings), **options)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    study = write_study(tmp_path_factory.mktemp("whole"), TRAININGS)
    return measured_quickly(study, methods=("temperature", "vector"), seed=5)


def probabilities(loss: str, seed: int, method: str) -> NDArray[np.float64]:
    test, rows = TRAININGS[loss, seed].test, TRAININGS[loss, seed].calibration
    assert rows is not None
    logits = test.logits.astype(np.float64)
    if method == "temperature":
        return TemperatureScaling().fit(rows.logits, rows.labels).predict_proba(logits)
    return softmax(logits, axis=1)


def ece_by_hand(probs: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    gaps = np.zeros(16)
    for row, label in zip(probs, labels, strict=True):
        gaps[int(np.ceil(row.max() * 15))] += row.max() - (row.argmax() == label)
    return np.abs(gaps).sum() / len(labels)


@pytest.mark.parametrize("method", ["none", "temperature"])
def test_values_are_the_metrics_of_each_training(
    results: StudyResults, method: str
) -> None:
    for (loss, seed), predictions in TRAININGS.items():
        probs, labels = probabilities(loss, seed, method), predictions.test.labels
        expected = {
            "nll": -np.mean(
                [np.log(row[label]) for row, label in zip(probs, labels, strict=True)]
            ),
            "accuracy": np.mean(probs.argmax(axis=1) == labels),
            "brier": np.mean(((probs - np.eye(3)[labels]) ** 2).sum(axis=1)),
            "ece": ece_by_hand(probs, labels),
        }
        for metric, value in expected.items():
            assert values(results)[loss, seed, method, metric] == pytest.approx(
                value, abs=1e-9
            ), metric
    assert set(results.metrics) == {metric for _, _, _, metric in values(results)}


def test_means_and_paired_differences_are_those_of_a_bootstrap_by_hand(
    results: StudyResults,
) -> None:
    def of_rows(loss: str, method: str) -> NDArray[np.float64]:
        each = [
            probabilities(loss, seed, method)[np.arange(300), TASK.labels[:300]]
            for seed in (0, 1, 2)
        ]
        return -np.log(np.stack(each, axis=1))

    drawn = np.random.default_rng(5).integers(
        0, 300, (50, 300)
    )  # the same rows for all trainings

    def interval(losses: NDArray[np.float64]) -> tuple[float, float, float]:
        values = losses.mean(axis=0)
        noise = losses[drawn].mean(axis=1) - losses[drawn].mean(axis=1).mean(axis=0)
        rows, within = noise.mean(axis=1).var(ddof=1), noise.var(axis=1, ddof=1).mean()
        z, t = stats.norm.isf(0.025), stats.t.isf(0.025, 2)
        of_both = z**2 * max(0, rows - within / 3) + t**2 * values.var(ddof=1) / 3
        reach = np.sqrt(max(of_both, z**2 * rows))
        return values.mean(), values.mean() - reach, values.mean() + reach

    for loss, method in product(LOSSES, ("none", "temperature")):
        mean = rows(results.means)[loss, method, "nll"]
        assert mean[1:] == pytest.approx(
            (*interval(of_rows(loss, method)), 3), abs=1e-8
        )
        if (loss, method) != BASELINE:
            # A loss is compared with the baseline's under the same calibrator.
            alike = BASELINE if loss == BASELINE[0] else (BASELINE[0], method)
            apart = of_rows(loss, method) - of_rows(*alike)
            difference = rows(results.differences)[loss, method, "nll"]
            assert difference[1:4] == pytest.approx(interval(apart), abs=1e-8)
    assert results.baseline == BASELINE
    assert not any(
        (loss, method) == BASELINE for loss, method, _ in results.differences.index
    )


def test_intervals_stay_where_the_metrics_can_be_and_p_is_corrected(
    results: StudyResults,
) -> None:
    for (_, _, metric), mean in rows(results.means).items():
        if metric in WITHOUT_INTERVAL:
            assert np.isnan((mean.low, mean.high)).all()
        else:
            assert 0 <= mean.low <= mean.value <= mean.high
            assert metric in ("nll", "brier") or mean.high <= 1
    for metric, found in results.differences.groupby("metric"):
        if metric not in ("nll", "brier", *WITHOUT_INTERVAL):
            assert found["low"].min() >= -1
            assert found["high"].max() <= 1
        if metric not in WITHOUT_INTERVAL:
            assert found["p_corrected"].tolist() == pytest.approx(
                holm(found["p"]).tolist()
            )
    # A temperature does not change the accuracy.
    found = rows(results.differences)["cross_entropy", "none", "accuracy"]
    assert found[1:6] == (0, 0, 0, 1, 1)


def with_test(
    logits: NDArray[np.float32], labels: NDArray[np.int64] | None = None
) -> TrainingPredictions:
    one = TRAININGS["focal", 1]
    names = tuple(f"class {c}" for c in range(logits.shape[1]))
    rows = unchecked(
        logits, one.test.labels if labels is None else labels, class_names=names
    )
    return TrainingPredictions(rows, None)


def test_trainings_that_cannot_be_compared_are_missing(tmp_path: Path) -> None:
    test = TRAININGS["focal", 1].test
    nan = test.logits.copy()
    nan[3, 1] = np.nan
    others = "not those that 3 of the 5 finished cells share"
    bad = {
        1: (
            with_test(nan),
            "predictions cannot be measured: expected logits to have a finite largest value "
            "in each row, got nan in row 3",
        ),
        2: (with_test(test.logits, test.labels[::-1]), others),
        3: (with_test(test.logits[:-1], test.labels[:-1]), others),
        4: (None, "not finished"),
    }
    trainings = {
        ("cross_entropy", seed): TRAININGS["cross_entropy", seed] for seed in (0, 1)
    }
    trainings |= {("focal", 0): TRAININGS["focal", 0]}
    found = measured(
        tmp_path,
        trainings | {("focal", seed): training for seed, (training, _) in bad.items()},
    )
    assert set(found.missing) == {("focal", seed) for seed in bad}
    assert [
        why for seed, (_, why) in bad.items() if why not in found.missing["focal", seed]
    ] == []
    assert found.means["n_seeds"]["focal", "none", "nll"] == 1
    assert found.means["n_seeds"]["cross_entropy", "none", "nll"] == 2
    assert found.differences["n_seeds"]["focal", "none", "nll"] == 1
    notes = " ".join(found.notes)
    assert "4 of 7 runs could not be measured" in notes
    assert "passes over losses that share one seed" in notes
    assert "from one seed only" in found.advice[0], found.advice


def test_without_trainings_the_tables_are_empty_and_wrong_words_are_refused(
    tmp_path: Path,
) -> None:
    study = write_study(
        tmp_path, {("focal", 1): None, ("focal", 2): TRAININGS["focal", 0]}
    )
    # A file that cannot be read is missing, too.
    (cut,) = study.glob("cells/focal-seed2-*/predictions.safetensors")
    cut.write_bytes(b"cut short")
    found = measured_quickly(study)
    assert found.baseline is None
    assert "a file that cannot be read" in found.missing["focal", 2]
    tables = (found.results(), found.means, found.differences, found.detectable)
    assert not any([*map(len, tables), found.n_test])
    assert "nothing to compare" in found.advice[0]
    with pytest.raises(
        ValueError, match="calibrators, got 'temprature'; did you mean 'temperature'"
    ):
        measured_quickly(study, methods=("temprature",))
    with pytest.raises(
        ValueError, match="expected variance to be one of 'own', 'pooled', got 'pool'"
    ):
        measured_quickly(study, variance="pool")


def test_without_calibration_rows_the_trained_networks_are_compared(
    tmp_path: Path,
) -> None:
    trainings = {
        (loss, 0): replace(TRAININGS[loss, 0], calibration=None) for loss in LOSSES
    }
    found = measured(tmp_path, trainings, methods=("temperature",))
    assert found.baseline == ("cross_entropy", "none")
    assert {method for _, _, method, _ in values(found)} == {"none"}
    assert "In 2 of 2 runs" in " ".join(found.notes)
    assert "temperature was left out: the run had no calibration rows" in " ".join(
        found.notes
    )
    assert "The baseline is cross_entropy without calibration" in " ".join(found.notes)
    rows = TRAININGS["focal", 0].calibration
    assert rows is not None
    right = replace(
        TRAININGS["focal", 0],
        calibration=replace(rows, labels=rows.as_logits().argmax(axis=1)),
    )
    found = measured(
        tmp_path / "right", dict.fromkeys(trainings, right), methods=("temperature",)
    )
    assert "Numbers are those of the first run." in " ".join(found.notes)


def test_seeds_are_paired_where_both_losses_have_them(tmp_path: Path) -> None:
    trainings = {("focal", seed): TASK.train(seed, sharpness=0.6) for seed in (1, 2, 3)}
    trainings |= {("cross_entropy", seed): TASK.train(100 + seed) for seed in (0, 1, 2)}
    found = measured(tmp_path, trainings)
    nll = {key[:3]: value for key, value in values(found).items() if key[3] == "nll"}
    by_hand = np.mean(
        [nll["focal", s, "none"] - nll["cross_entropy", s, "none"] for s in (1, 2)]
    )
    assert found.differences["value"]["focal", "none", "nll"] == pytest.approx(by_hand)
    assert found.differences["n_seeds"]["focal", "none", "nll"] == 2
