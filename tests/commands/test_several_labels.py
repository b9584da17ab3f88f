"""`hf-calib` on files of predictions with several labels a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hf_calib.predictions import load_predictions
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.reports import quick_reports  # noqa: F401


class TestSeveralLabels:
    """Files of predictions with several labels a row."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        rng = np.random.default_rng(0)
        logits = 3 * rng.normal(size=(300, 3))
        labels = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits / 3))).astype(int)
        labels[:5, 0] = -100
        names = np.array(["Mass", "Nodule", "Hernia"])
        np.savez(tmp_path / "several.npz", logits=logits, labels=labels, class_names=names)
        return tmp_path / "several.npz"

    def test_they_are_evaluated_by_label(self, path: Path, tmp_path: Path) -> None:
        found = called_for_json("evaluate", path, "--output", tmp_path / "out")
        assert found["kind"] == "multi_label"
        assert [label["name"] for label in found["before"]["labels"]] == ["Mass", "Nodule", "Hernia"]
        assert found["n_decisions"] == 895
        assert "## Labels" in (tmp_path / "out" / "report.md").read_text()

    @pytest.mark.parametrize("method", [None, "temperature", "per_label_temperature"])
    def test_they_are_calibrated(self, method: str | None, path: Path, tmp_path: Path) -> None:
        words = () if method is None else ("--method", method)
        done = called_for_json("calibrate", path, "--output", tmp_path / "out", *words)
        states = (done["report"][state]["metrics"]["micro_nll"]["value"] for state in ("before", "after"))
        before, after = states
        assert after < before
        calibrated = load_predictions(tmp_path / "out" / "predictions.npz")
        assert calibrated.probs is not None
        assert calibrated.labels.shape == calibrated.probs.shape == (150, 3)

    def test_what_is_for_one_class_is_refused(self, path: Path, tmp_path: Path) -> None:
        output = ("--output", tmp_path / "out")
        for words, message in (
            (("decide", path), "the predictions to have one class a row, got a sigmoid for each label in"),
            (
                ("calibrate", path, *output, "--method", "vector"),
                "method to be one of auto, temperature, per_l",
            ),
            (
                ("calibrate", path, *output, "--criterion", "ece"),
                "--criterion to go with a model with one class",
            ),
            (("evaluate", path, "--ood-data", path), "--ood-data to go with a model with one class a row"),
        ):
            assert_refused(call(*words), message)
