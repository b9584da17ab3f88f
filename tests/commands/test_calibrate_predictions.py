"""`hf-calib calibrate` on files of predictions, and rows that are in two roles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from scipy.special import softmax

from hf_calib.commands.fitting import METHODS
from hf_calib.metrics import negative_log_likelihood
from hf_calib.predictions import load_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling import SCALERS, TemperatureScaling
from tests.helpers.commands import (
    NAMES,
    REPORT,
    TEMPERATURE,
    assert_refused,
    call,
    called_for_json,
    names_in,
    one_line,
)
from tests.helpers.reports import quick_reports  # noqa: F401


class TestCalibratePredictions:
    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_every_method(self, method: str, workplace: Path, tmp_path: Path) -> None:
        done = called_for_json(
            *("calibrate", workplace / "data.npz", "--test-data", workplace / "test.npz"),
            *("--method", method, "--output", tmp_path / "out"),
        )
        assert names_in(tmp_path / "out") == {*REPORT, "predictions.npz"}
        written = load_predictions(tmp_path / "out" / "predictions.npz")
        test = load_predictions(workplace / "test.npz")
        np.testing.assert_array_equal(written.labels, test.labels)
        assert written.class_names == NAMES
        found = negative_log_likelihood(written.probabilities(), written.labels)
        assert done["report"]["after"]["metrics"]["nll"]["value"] == pytest.approx(found)
        fitted_on = load_predictions(workplace / "data.npz")
        scaler = SCALERS[method].load()().fit(fitted_on.as_logits(), fitted_on.labels)
        np.testing.assert_allclose(written.probs, scaler.predict_proba(test.as_logits()), rtol=1e-12)

    def test_rows_are_held_out_and_probabilities_are_read_as_logits(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        found = load_predictions(workplace / "data.npz")
        probs = softmax(found.as_logits().astype(float), axis=1)
        save_predictions(Predictions(found.labels, probs=probs), tmp_path / "probs.npz")
        out = [tmp_path / name for name in ("a", "b")]
        theirs = called_for_json("calibrate", workplace / "data.npz", "--output", out[0])
        ours = called_for_json("calibrate", tmp_path / "probs.npz", "--output", out[1])
        assert ours["n_fitted"] == 120
        assert ours["held_out"] == "the other 120 of 240 rows, drawn with seed 0"
        assert ours["choice"] == theirs["choice"]
        written = [load_predictions(folder / "predictions.npz").probabilities() for folder in out]
        np.testing.assert_allclose(*written, atol=1e-5)
        assert len(written[0]) == 120

    @pytest.mark.parametrize("criterion", ["ece", "adaptive_ece"])
    def test_criteria(self, criterion: str, workplace: Path, tmp_path: Path) -> None:
        done = called_for_json(
            *("calibrate", workplace / "data.npz", "--test-data", workplace / "test.npz"),
            *("--criterion", criterion, "--output", tmp_path / "out"),
        )
        found = load_predictions(workplace / "data.npz")
        wanted = TemperatureScaling(criterion).fit(found.as_logits(), found.labels).temperature_
        assert (done["criterion"], done["numbers"]) == (criterion, {"temperature": wanted})

    def test_warnings_of_the_fit_are_shown(self, tmp_path: Path) -> None:
        logits = np.tile([[4.0, 0.0], [0.0, 4.0]], (20, 1))
        save_predictions(Predictions(np.tile([0, 1], 20), logits=logits), tmp_path / "right.npz")
        words = ("calibrate", tmp_path / "right.npz", "--method", "temperature", "--output", tmp_path / "out")
        assert "all 20 labels are ranked first" in called_for_json(*words)["notes"][0]
        assert "all 20 labels are ranked first" in " ".join(call(*words).stdout.split())

    def test_predictions_are_not_overwritten(self, workplace: Path, tmp_path: Path) -> None:
        before = (workplace / "data.npz").read_bytes()
        (tmp_path / "predictions.npz").write_bytes(before)
        for words in (
            (tmp_path / "predictions.npz", "--output", tmp_path),
            (workplace / "data.npz", "--test-data", tmp_path / "predictions.npz", "--output", tmp_path),
        ):
            assert_refused(call("calibrate", *words), "be another folder than the predictions'")
        assert (tmp_path / "predictions.npz").read_bytes() == before
        assert names_in(tmp_path) == {"predictions.npz"}


class TestInSample:
    """Rows that the scaler was fitted on are no test data, and everything that shows the table says so."""

    ALL = "The scaler was fitted on all {} rows of this report. The errors after calibration are in-sample"

    def assert_said(self, result: Any, folder: Path, note: str) -> None:
        assert result.exit_code == 0, result.output
        assert f"hf-calib: warning: {note}" in one_line(result.stderr)
        record = json.loads((folder / "report.json").read_text())
        assert [warning for warning in record["warnings"] if warning.startswith(note)]
        assert note in one_line((folder / "report.md").read_text().replace("\\", ""))

    def test_one_file_of_predictions_in_two_roles(self, workplace: Path, tmp_path: Path) -> None:
        shutil.copy(workplace / "test.npz", tmp_path / "copy.npz")
        found = load_predictions(workplace / "test.npz")
        table = pandas.DataFrame(found.probabilities(), columns=[f"prob_{name}" for name in NAMES])
        table["label"] = found.labels
        table.sample(frac=1, random_state=0).to_csv(tmp_path / "shuffled.csv", index=False)
        for test in (tmp_path / "copy.npz", tmp_path / "shuffled.csv"):
            words = (
                "calibrate",
                *TEMPERATURE,
                workplace / "test.npz",
                "--test-data",
                test,
                "--output",
                tmp_path / "out",
            )
            result = call(*words)
            self.assert_said(result, tmp_path / "out", self.ALL.format(80))
            assert one_line(result.stdout).count(f"Note: {self.ALL.format(80)}") == 1
        as_json = call(*words, "--json")
        assert json.loads(as_json.stdout)["notes"][0].startswith(self.ALL.format(80))
        assert self.ALL.format(80) in one_line(as_json.stderr)

    def test_some_rows_in_two_roles(self, workplace: Path, tmp_path: Path) -> None:
        found, test = (load_predictions(workplace / f"{name}.npz") for name in ("data", "test"))
        rows = {
            name: np.concatenate([getattr(found, name)[:7], getattr(test, name)])
            for name in ("logits", "labels")
        }
        save_predictions(Predictions(**rows, class_names=NAMES), tmp_path / "mixed.npz")
        words = ("calibrate", *TEMPERATURE, workplace / "data.npz", "--test-data", tmp_path / "mixed.npz")
        result = call(*words, "--output", tmp_path / "out")
        self.assert_said(
            result, tmp_path / "out", "The scaler was fitted on 7 of the 87 rows of this report."
        )

    def test_scores_that_were_rounded_coincide(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        for name, n in (("a", 500), ("b", 300)):
            confident = rng.integers(50, 100, n) / 100
            labels = (rng.random(n) > confident).astype(int)
            predictions = Predictions(labels, probs=np.stack([confident, 1 - confident], axis=1))
            save_predictions(predictions, tmp_path / f"{name}.npz")
        words = ("calibrate", *TEMPERATURE, tmp_path / "a.npz", "--output", tmp_path / "out", "--test-data")
        assert "rows of this report" not in one_line(call(*words, tmp_path / "b.npz").output)
        assert self.ALL.format(500) in one_line(call(*words, tmp_path / "a.npz").output)

    def test_logits_of_16_bits_coincide(self, tmp_path: Path) -> None:
        """Some rows of different examples are equal, as many in both files as within them; half a file is more."""
        logits = torch.randn(6000, 4, generator=torch.Generator().manual_seed(0)) * 0.15
        logits += torch.tensor([6.0, -3, -3, -3])
        values = logits.bfloat16().float().numpy()
        labels = np.zeros(6000, dtype=np.int64)
        others = Predictions(labels[4000:], values[4000:])
        save_predictions(Predictions(labels[:4000], values[:4000]), tmp_path / "a.npz")
        save_predictions(others, tmp_path / "b.npz")
        save_predictions(Predictions(labels[3000:5000], values[3000:5000]), tmp_path / "half.npz")
        assert len(np.unique(values[:4000], axis=0)) < 4000
        words = ("calibrate", *TEMPERATURE, tmp_path / "a.npz", "--output", tmp_path / "out")
        assert "rows of this report" not in one_line(call(*words, "--test-data", tmp_path / "b.npz").output)
        seen = one_line(call(*words, "--test-data", tmp_path / "half.npz").output)
        assert "of the 2,000 rows of this report" in seen

    def test_a_label_that_differs_is_another_row(self, workplace: Path, tmp_path: Path) -> None:
        test = load_predictions(workplace / "test.npz")
        save_predictions(Predictions((test.labels + 1) % 4, test.logits, None, NAMES), tmp_path / "other.npz")
        words = ("calibrate", *TEMPERATURE, workplace / "test.npz", "--test-data", tmp_path / "other.npz")
        assert "rows of this report" not in one_line(call(*words, "--output", tmp_path / "out").output)

    def test_texts_in_two_roles(self, workplace: Path, tmp_path: Path) -> None:
        data = ("--data", workplace / "test.csv")
        words = ("calibrate", *TEMPERATURE, workplace / "model", *data, "--test-data", workplace / "test.csv")
        result = call(*words, "--output", tmp_path / "out")
        self.assert_said(result, tmp_path / "out" / "calibration", self.ALL.format(80))
        tables = [pandas.read_csv(workplace / f"{name}.csv") for name in ("test", "data")]
        pandas.concat([tables[0][:3], tables[1][:20]]).to_csv(tmp_path / "mixed.csv", index=False)
        words = ("calibrate", *TEMPERATURE, workplace / "model", *data, "--test-data", tmp_path / "mixed.csv")
        result = call(*words, "--output", tmp_path / "mixed")
        note = "The scaler was fitted on 3 of the 23 rows of this report."
        self.assert_said(result, tmp_path / "mixed" / "calibration", note)
