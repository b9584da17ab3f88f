"""`hf-calib calibrate` on files of predictions, and rows that are in two roles."""

from __future__ import annotations

import json
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from scipy.special import softmax

import hf_calib
from hf_calib.commands.calibrate import METHODS
from hf_calib.metrics import negative_log_likelihood
from hf_calib.predictions import load_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling import SCALERS, Scaler
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
    @pytest.mark.parametrize(
        "method",
        [
            method
            if method in ("temperature", "isotonic")
            else pytest.param(method, marks=pytest.mark.slow)
            for method in sorted(METHODS)
        ],
    )
    def test_every_method(self, method: str, workplace: Path, tmp_path: Path) -> None:
        done = called_for_json(
            *(
                "calibrate",
                workplace / "data.npz",
                "--test-data",
                workplace / "test.npz",
            ),
            *("--method", method, "--output", tmp_path / "out"),
        )
        files = {*REPORT, "predictions.npz", "calibration.json"}
        assert names_in(tmp_path / "out") == files
        written = load_predictions(tmp_path / "out" / "predictions.npz")
        test = load_predictions(workplace / "test.npz")
        np.testing.assert_array_equal(written.labels, test.labels)
        assert written.class_names == NAMES
        found = negative_log_likelihood(written.probabilities(), written.labels)
        assert done["report"]["after"]["metrics"]["nll"]["value"] == pytest.approx(
            found
        )
        fitted_on = load_predictions(workplace / "data.npz")
        scaler = SCALERS[method].load()().fit(fitted_on.as_logits(), fitted_on.labels)
        np.testing.assert_allclose(
            written.probs, scaler.predict_proba(test.as_logits()), rtol=1e-12
        )

    def test_rows_are_held_out_and_probabilities_are_read_as_logits(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        found = load_predictions(workplace / "data.npz")
        probs = softmax(found.as_logits().astype(float), axis=1)
        save_predictions(Predictions(found.labels, probs=probs), tmp_path / "probs.npz")
        theirs = called_for_json(
            "calibrate", workplace / "data.npz", "--output", tmp_path / "a"
        )
        ours = called_for_json(
            "calibrate", tmp_path / "probs.npz", "--output", tmp_path / "b"
        )
        assert ours["n_fitted"] == 120
        assert ours["held_out"] == "the other 120 of 240 rows, drawn with seed 0"
        assert ours["choice"] == theirs["choice"]
        written = [
            load_predictions(tmp_path / name / "predictions.npz").probabilities()
            for name in "ab"
        ]
        np.testing.assert_allclose(*written, atol=1e-5)

    def test_a_criterion_is_of_the_bins_that_are_given(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        words = ("--criterion", "ece", "--n-bins", 3, "--output", tmp_path / "out")
        called_for_json("calibrate", workplace / "data.npz", *words)
        scaler = Scaler.from_pretrained(tmp_path / "out")
        assert (scaler.criterion, scaler.n_bins) == ("ece", 3)

    def test_predictions_are_not_overwritten(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        before = (workplace / "data.npz").read_bytes()
        (tmp_path / "predictions.npz").write_bytes(before)
        for words in (
            (tmp_path / "predictions.npz", "--output", tmp_path),
            (
                workplace / "data.npz",
                "--test-data",
                tmp_path / "predictions.npz",
                "--output",
                tmp_path,
            ),
        ):
            assert_refused(
                call("calibrate", *words), "be another folder than the predictions'"
            )
        assert (tmp_path / "predictions.npz").read_bytes() == before
        assert names_in(tmp_path) == {"predictions.npz"}

    def test_predictions_of_others_stay_next_to_a_report(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        """A report alone does not say that the predictions beside it are calibrate's."""
        own = tmp_path / "predictions.npz"
        shutil.copy(workplace / "test.npz", own)
        assert call("evaluate", own, "--output", tmp_path).exit_code == 0
        before = own.read_bytes()
        result = call("calibrate", workplace / "data.npz", "--output", tmp_path)
        assert_refused(result, "output to hold no predictions but those of an earlier")
        assert own.read_bytes() == before

    def test_predictions_of_others_stay_next_to_those_of_an_earlier_calibration(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        words = ("calibrate", workplace / "data.npz", *TEMPERATURE)
        assert call(*words, "--output", tmp_path).exit_code == 0
        own = tmp_path / "predictions.parquet"
        own.write_bytes(b"mine")
        result = call(*words, "--output", tmp_path)
        assert_refused(result, "output to hold no predictions but those of an earlier")
        assert own.read_bytes() == b"mine"


class TestInSample:
    """Rows that the scaler was fitted on are no test data, and everything that shows the table says so."""

    SAID = "The calibrator was fitted on {} of the {} rows of this report. For these, the errors after"

    def assert_said(self, result: Any, folder: Path, note: str) -> None:
        assert result.exit_code == 0, result.output
        assert f"hf-calib: warning: {note}" in one_line(result.stderr)
        record = json.loads((folder / "report.json").read_text())
        assert [warning for warning in record["warnings"] if warning.startswith(note)]
        assert note in one_line((folder / "report.md").read_text().replace("\\", ""))

    def test_one_file_of_predictions_in_two_roles(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        shutil.copy(workplace / "test.npz", tmp_path / "copy.npz")
        found = load_predictions(workplace / "test.npz")
        table = pandas.DataFrame(
            found.as_logits(), columns=[f"logit_{name}" for name in NAMES]
        )
        table["label"] = found.labels
        table.sample(frac=1, random_state=0).to_csv(
            tmp_path / "shuffled.csv", index=False
        )
        for test in (tmp_path / "copy.npz", tmp_path / "shuffled.csv"):
            words = (
                "calibrate",
                *TEMPERATURE,
                workplace / "test.npz",
                "--test-data",
                test,
            )
            result = call(*words, "--output", tmp_path / "out")
            self.assert_said(result, tmp_path / "out", self.SAID.format(80, 80))

    def test_rows_of_the_fit_that_are_there_twice(self, tmp_path: Path) -> None:
        """Twins among the test rows would tell nothing, as rounded scores coincide."""
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(70, 4))
        labels = rng.integers(4, size=70)
        sets = {"data": [*range(70), *range(50, 70)], "test": range(50)}
        for name, rows in sets.items():
            found = Predictions(labels[rows], logits=logits[rows])
            save_predictions(found, tmp_path / f"{name}.npz")
        words = ("--test-data", tmp_path / "test.npz", "--output", tmp_path / "out")
        result = call("calibrate", *TEMPERATURE, tmp_path / "data.npz", *words)
        self.assert_said(result, tmp_path / "out", self.SAID.format(50, 50))

    def test_of_rows_that_were_drawn_no_number_is_claimed(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        words = ("calibrate", *TEMPERATURE, workplace / "test.npz", "--fit-on", "40")
        other = ("--test-data", shutil.copy(workplace / "test.npz", tmp_path / "b.npz"))
        result = call(*words, *other, "--output", tmp_path / "out")
        note = "The rows of the fit were drawn from data with 80 of the 80 rows of this report. For these"
        self.assert_said(result, tmp_path / "out", note)

    def test_texts_in_two_roles(self, workplace: Path, tmp_path: Path) -> None:
        data = ("--data", workplace / "test.csv")
        tables = [
            pandas.read_csv(workplace / f"{name}.csv") for name in ("test", "data")
        ]
        pandas.concat([tables[0][:3], tables[1][:20]]).to_csv(
            tmp_path / "mixed.csv", index=False
        )
        words = (
            "calibrate",
            *TEMPERATURE,
            workplace / "model",
            *data,
            "--test-data",
            tmp_path / "mixed.csv",
        )
        result = call(*words, "--output", tmp_path / "mixed")
        note = self.SAID.format(3, 23)
        self.assert_said(result, tmp_path / "mixed" / "calibration", note)


@pytest.mark.parametrize("sources", ["run", "run/data.npz", "run/*.npz"])
@pytest.mark.parametrize(
    "output", ["run", pytest.param("run/calibrated", marks=pytest.mark.slow), "."]
)
def test_no_calibrated_rows_beside_those_that_are_read(
    sources: str, output: str, workplace: Path, tmp_path: Path
) -> None:
    """A later reading of the folder would have both, as if they were further rows."""
    (tmp_path / "run").mkdir()
    shutil.copy(workplace / "data.npz", tmp_path / "run")
    words = ("calibrate", *TEMPERATURE, tmp_path / sources)
    found = call(*words, "--output", tmp_path / output)
    if sources != "run" and output == "run/calibrated":
        assert found.exit_code == 0  # The folder itself was not named.
        return
    assert_refused(found, "expected --output to be")
    assert call(*words, "--output", tmp_path / "run" / "_calibrated").exit_code == 0


TWO_CLASSES = {
    "single-label logits": {"logits": 2 * np.eye(2), "labels": np.arange(2)},
    "single-label probs": {"probs": np.eye(2), "labels": np.arange(2)},
    "multi-label probs": {"probs": np.eye(2), "labels": np.eye(2, dtype=int)},
    "top-label probs": {"confidence": np.array([0.9, 0.2]), "correct": np.arange(2)},
}


@pytest.mark.parametrize(("fitted", "tested"), list(permutations(TWO_CLASSES, 2)))
def test_test_data_of_another_kind_are_refused(
    fitted: str, tested: str, tmp_path: Path
) -> None:
    """Their two columns are other classes, or the numbers of the fit have another meaning."""
    for name, kind in (("data", fitted), ("test", tested)):
        np.savez(tmp_path / f"{name}.npz", **TWO_CLASSES[kind])
    words = ("--test-data", tmp_path / "test.npz", "--output", tmp_path / "out")
    refused = call("calibrate", *TEMPERATURE, tmp_path / "data.npz", *words)
    assert_refused(
        refused, f"--test-data to hold {fitted}, as the data do, got {tested}"
    )
    assert not (tmp_path / "out").exists()


def test_the_seed_draws_the_half(workplace: Path, tmp_path: Path) -> None:
    """Two seeds fit on different halves, one seed on the same."""
    found = [
        called_for_json(
            *("calibrate", workplace / "data.npz", *TEMPERATURE, "--seed", seed),
            *("--output", tmp_path / str(place)),
        )
        for place, seed in enumerate((1, 2, 1))
    ]
    temperatures = [each["numbers"]["temperature"] for each in found]
    assert temperatures[0] == temperatures[2] != temperatures[1]
    assert "drawn with seed 2" in found[1]["held_out"]


def test_a_seed_that_draws_nothing_is_refused(workplace: Path, tmp_path: Path) -> None:
    test = ("--test-data", workplace / "test.npz", "--output", tmp_path / "out")
    words = ("calibrate", workplace / "data.npz", *TEMPERATURE, *test, "--seed", 1)
    message = "expected --seed to be given with rows that are drawn only, got 1; leave"
    assert_refused(call(*words), message)
    model = ("--data", workplace / "data.csv", *TEMPERATURE, "--seed", 1)
    other = ("--test-data", workplace / "test.csv", "--output", tmp_path / "out")
    assert_refused(call("calibrate", workplace / "model", *model, *other), message)
    found = called_for_json(*words, "--fit-on", 100)
    assert "100 of 240 rows, drawn with seed 1" in " ".join(found["notes"])


def test_several_files_are_one_set_of_rows(workplace: Path, tmp_path: Path) -> None:
    files = [workplace / "data.npz", workplace / "test.npz"]
    both = tmp_path / "both"
    both.mkdir()
    for file in files:
        shutil.copy(file, both)
    words = (*TEMPERATURE, "--output")
    found = called_for_json("calibrate", *files, *words, tmp_path / "a")
    wanted = called_for_json("calibrate", both, *words, tmp_path / "b")
    assert (found["n_fitted"], found["numbers"]) == (160, wanted["numbers"])
    assert len(load_predictions(tmp_path / "a" / "predictions.npz")) == 160
    rule = ("--accuracy", 0.2)
    assert called_for_json("decide", *files, *rule)["n_fitted"] == 320


@pytest.mark.parametrize("command", ["calibrate", "decide"])
def test_no_report_on_other_rows_next_to_a_calibrator_or_a_rule(
    command: str, workplace: Path, tmp_path: Path
) -> None:
    words = {"calibrate": TEMPERATURE, "decide": ("--accuracy", 0.2)}[command]
    done = call(command, workplace / "data.npz", *words, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    report = ("evaluate", workplace / "test.npz", "--output", tmp_path)
    name = {"calibrate": "calibration.json", "decide": "decisions.json"}[command]
    message = f"output to hold no results of calibrate or decide, got .* with {name}, "
    assert_refused(call(*report), f"{message}.*; name another folder")
    assert before == {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }


def test_a_report_next_to_a_model_with_a_rule(workplace: Path, tmp_path: Path) -> None:
    """The rule is for the weights, on whatever rows these are measured."""
    folder = tmp_path / "model"
    shutil.copytree(workplace / "model", folder)
    data = ("--data", workplace / "data.csv", "--output", folder)
    for words in (("decide", "--accuracy", 0.3), ("evaluate",)):
        done = call(words[0], folder, *data, *words[1:])
        assert done.exit_code == 0, done.output
    assert {"decisions.json", "decisions", *REPORT} <= names_in(folder)


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        (0.2, ": decisions.json, decisions/report.json, for other probabilities"),
        # This rule answers nothing, and only the report on it was written.
        (0.98, ": decisions/report.json, for other probabilities"),
    ],
)
def test_an_earlier_rule_is_removed(
    accuracy: float, said: str, workplace: Path, tmp_path: Path
) -> None:
    data = workplace / "data.npz"
    hf_calib.decide(data, accuracy=accuracy, output=tmp_path)
    (tmp_path / "decisions" / "mine.md").write_text("mine")
    found = call("calibrate", data, *TEMPERATURE, "--output", tmp_path)
    assert found.exit_code == 0, found.output
    assert said in one_line(found.stdout)
    assert "Run hf-calib decide or evaluate again." in one_line(found.stdout)
    files = {*REPORT, "predictions.npz", "calibration.json", "decisions"}
    assert names_in(tmp_path) == files
    assert names_in(tmp_path / "decisions") == {"mine.md"}
    again = call("calibrate", data, *TEMPERATURE, "--output", tmp_path)
    assert "decisions.json" not in again.stdout


def test_given_class_names_are_in_the_report_and_in_the_predictions(
    workplace: Path, tmp_path: Path
) -> None:
    found = load_predictions(workplace / "data.npz")
    np.savez(tmp_path / "a.npz", logits=found.logits, labels=found.labels)
    words = ("calibrate", tmp_path / "a.npz", "--output", tmp_path / "out")
    called_for_json(*words, *TEMPERATURE, "--class-names", ",".join(NAMES))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    classes = report["before"]["classes"]
    assert {each["name"] for each in classes} == {*NAMES}
    written = load_predictions(tmp_path / "out" / "predictions.npz")
    assert written.class_names == NAMES
