"""`hf-calib` on files of predictions with several labels per row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hf_calib.predictions import load_predictions
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.reports import quick_reports  # noqa: F401


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(300, 3))
    labels = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits / 3))).astype(int)
    labels[:5, 0] = -100
    names = np.array(["Mass", "Nodule", "Hernia"])
    np.savez(tmp_path / "several.npz", logits=logits, labels=labels, class_names=names)
    return tmp_path / "several.npz"


def test_they_are_evaluated_and_calibrated(path: Path, tmp_path: Path) -> None:
    found = called_for_json("evaluate", path)
    assert found["kind"] == "multi_label"
    assert [label["name"] for label in found["before"]["labels"]] == [
        "Mass",
        "Nodule",
        "Hernia",
    ]
    assert found["n_decisions"] == 895
    report = called_for_json("calibrate", path, "--output", tmp_path / "out")["report"]
    before, after = (
        report[state]["metrics"]["micro_nll"]["value"] for state in ("before", "after")
    )
    assert after < before
    calibrated = load_predictions(tmp_path / "out" / "predictions.npz")
    assert calibrated.probs is not None
    assert calibrated.labels.shape == calibrated.probs.shape == (150, 3)
    refused = call("decide", path)
    assert_refused(
        refused,
        "the predictions to have one class per row, got a sigmoid for each label in",
    )


def test_one_label_is_a_column_as_well(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(60, 1))
    labels = (logits > 0.2).astype(int)
    np.savez(tmp_path / "one.npz", logits=logits, labels=labels)
    np.testing.assert_array_equal(load_predictions(tmp_path / "one.npz").labels, labels)
    found = called_for_json("evaluate", tmp_path / "one.npz")
    assert found["kind"] == "multi_label"
    assert found["n_decisions"] == 60
    words = ("--output", tmp_path / "out", "--method", "temperature")
    called_for_json("calibrate", tmp_path / "one.npz", *words)
