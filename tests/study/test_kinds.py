"""Studies of tokens and of several labels per row: metrics, maps and resamples, by hand and as the trainer logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import softmax

from hf_calib.metrics import CalibrationState
from hf_calib.metrics.intervals import METRICS, resampled_metrics
from hf_calib.metrics.sums import draw_counts
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.scaling import PerLabelTemperatureScaling, TemperatureScaling
from hf_calib.study.report import headline
from tests.helpers.studies import Task, measured_quickly, write_study
from tests.helpers.study_results import rows, values
from tests.helpers.unchecked import unchecked

LENGTHS = np.array([1, 7, 2, 12, 3, 1, 9, 5, 4, 16] * 3)  # of the test sentences
TASK = Task(n_test=int(LENGTHS.sum()))


def of_tokens(predictions: TrainingPredictions) -> TrainingPredictions:
    """The rows as tokens of sentences, with numbers that the dataset may have skipped."""
    test = predictions.test
    return replace(
        predictions,
        test=unchecked(
            test.logits, test.labels, np.repeat(3 * np.arange(len(LENGTHS)), LENGTHS)
        ),
    )


def of_labels(seed: int, n_rows: int = 150) -> TrainingPredictions:
    """Three labels per row, over-confident logits; one label in ten is not known. The labels are of no seed."""
    rng = np.random.default_rng(9)
    true = rng.normal(size=(2 * n_rows, 3)) + np.array([0, -1, 1])
    labels = (true + rng.logistic(size=true.shape) > 0).astype(np.float32)
    labels[rng.random(true.shape) < 0.1] = -100
    noise = 0.3 * np.random.default_rng(seed).normal(size=true.shape)
    logits = ([3.0, 2.0, 0.7] * (true + noise)).astype(np.float32)
    names = ("Mass", "Nodule", "Hernia")
    test, calibration = (
        unchecked(logits[part], labels[part], class_names=names)
        for part in (slice(n_rows), slice(n_rows, None))
    )
    return TrainingPredictions(test, calibration)


@pytest.mark.parametrize(
    ("name", "options"),
    [("expected_calibration_error", {"n_bins": 5}), ("smooth_calibration_error", {})],
)
def test_resamples_of_groups_are_the_metric_of_the_drawn_groups(
    name: str, options: dict[str, object]
) -> None:
    test = TASK.train(0).test
    probs = softmax(test.logits.astype(np.float64), axis=1)
    groups = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    (draws,) = resampled_metrics(
        [(name, options)], probs, test.labels, n_resamples=20, seed=4, groups=groups
    )
    drawn = np.concatenate(
        list(draw_counts(len(LENGTHS), 20, np.random.default_rng(4)))
    )
    for value, counts in zip(draws, drawn, strict=True):
        rows = np.repeat(
            np.arange(len(groups)), counts[groups].astype(int)
        )  # of the data's order
        expected = METRICS[name].function(probs[rows], test.labels[rows], **options)
        assert value == pytest.approx(expected, abs=1e-12)


def test_tokens_are_rows_and_sentences_are_drawn(tmp_path: Path) -> None:
    trainings = {
        (loss, 0): of_tokens(TASK.train(i))
        for i, loss in enumerate(("cross_entropy", "focal"))
    }
    found = measured_quickly(
        write_study(tmp_path / "study", trainings), n_resamples=400, seed=3
    )
    sums: dict[str, NDArray[np.float64]] = {}
    for (loss, _), predictions in trainings.items():
        test = predictions.test
        log_probs = np.log(softmax(test.logits.astype(np.float64), axis=1))
        nats = -log_probs[np.arange(len(test.labels)), test.labels]
        sums[loss] = np.array(
            [part.sum() for part in np.split(nats, LENGTHS.cumsum()[:-1])]
        )
        assert values(found)[loss, 0, "none", "nll"] == pytest.approx(
            nats.mean(), abs=1e-9
        )
    drawn = np.random.default_rng(3).integers(0, len(LENGTHS), (400, len(LENGTHS)))
    gaps = (sums["focal"] - sums["cross_entropy"])[drawn].sum(axis=1) / LENGTHS[
        drawn
    ].sum(axis=1)
    difference = rows(found.differences)["focal", "none", "nll"]
    reach = stats.norm.isf(0.025) * gaps.std(ddof=1)
    assert difference.value - difference.low == pytest.approx(reach, abs=1e-9)
    assert (found.n_test, found.counted) == (
        len(TASK.labels[: TASK.n_test]),
        ("test tokens", "classes"),
    )


def test_several_labels_as_the_trainer_logs_them_with_maps(tmp_path: Path) -> None:
    trainings = {
        (loss, s): of_labels(10 * i + s)
        for i, loss in enumerate(("cross_entropy", "focal"))
        for s in (0, 1)
    }
    methods = ("temperature", "per_label_temperature", "vector")
    found = measured_quickly(
        write_study(tmp_path / "study", trainings), methods=methods
    )
    assert found.baseline == ("cross_entropy", "temperature")
    for (loss, seed), predictions in trainings.items():
        test, calibration = predictions.test, predictions.calibration
        assert calibration is not None
        scalers = {
            "temperature": TemperatureScaling(multi_label=True),
            "per_label_temperature": PerLabelTemperatureScaling(),
        }
        logits = {"none": test.logits.astype(np.float64)}
        for method, scaler in scalers.items():
            scaler.fit(
                calibration.logits.astype(np.float64),
                calibration.labels.astype(np.int64),
            )
            logits[method] = scaler.transform(logits["none"])
        for method, own in logits.items():
            state = CalibrationState(n_classes=own.shape[1])
            state.update_logits(
                torch.from_numpy(own), torch.from_numpy(test.labels), multi_label=True
            )
            logged = state.compute()
            for metric in ("nll", "accuracy", "brier", "ece"):
                value = values(found)[loss, seed, method, metric]
                assert value == pytest.approx(logged[metric], abs=1e-6), (
                    method,
                    metric,
                )
    nll = {
        method: found.means["value"]["focal", method, "nll"]
        for method in found.methods[:3]
    }
    assert nll["per_label_temperature"] < nll["temperature"] < nll["none"]
    assert found.differences["p"].notna().all()
    notes = " ".join(found.notes)
    assert (
        "vector was left out: expected the method to be a calibrator for multi-label predictions"
        in notes
    )
    assert "measured on 150 test rows with 3 labels" in headline(found)
