"""`hf-calib evaluate`: models and files of predictions, before any calibration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from scipy.special import softmax

from hf_calib.metrics import expected_calibration_error, negative_log_likelihood, ood_detection
from hf_calib.predictions import load_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from tests.helpers.commands import NAMES, REPORT, assert_refused, call, called_for_json, names_in
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import text_of


class TestEvaluate:
    def test_a_model_and_a_file_of_its_predictions_agree(self, workplace: Path) -> None:
        model = called_for_json("evaluate", workplace / "model", "--data", workplace / "data.csv")
        file = called_for_json("evaluate", workplace / "data.npz")
        assert model["n_examples"] == file["n_examples"] == 240
        assert [row["name"] for row in model["before"]["classes"]] == list(NAMES)
        found = load_predictions(workplace / "data.npz")
        for key, metric in (("ece", expected_calibration_error), ("nll", negative_log_likelihood)):
            wanted = metric(found.probabilities(), found.labels)
            assert file["before"]["metrics"][key]["value"] == pytest.approx(wanted, rel=1e-9)
            assert model["before"]["metrics"][key]["value"] == pytest.approx(wanted, rel=1e-4)

    @pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
    def test_tables(self, name: str, workplace: Path, tmp_path: Path) -> None:
        found = load_predictions(workplace / "data.npz")
        table = pandas.DataFrame(found.as_logits(), columns=[f"logit_{name}" for name in NAMES])
        table["topic"] = [NAMES[label] for label in found.labels]
        path = tmp_path / name
        table.to_parquet(path) if name.endswith("parquet") else table.to_csv(path, index=False)
        ours = called_for_json("evaluate", path, "--label-column", "topic", "--n-bins", 10)
        assert ours["n_bins"] == 10
        wanted = negative_log_likelihood(found.probabilities(), found.labels)
        assert ours["before"]["metrics"]["nll"]["value"] == pytest.approx(wanted, rel=1e-6)

    def test_people_get_a_table_and_files(self, workplace: Path, tmp_path: Path) -> None:
        result = call("evaluate", workplace / "data.npz", "--output", tmp_path / "report")
        assert result.exit_code == 0, result.output
        assert re.search(
            r"Expected calibration error \(ECE\) +0\.\d{4} \[0\.\d{4}, 0\.\d{4}\]", result.stdout
        )
        assert "Overall " in result.stdout
        assert "Calibration report: data" in result.stdout
        assert names_in(tmp_path / "report") == REPORT
        assert names_in(tmp_path) == {"report"}
        assert (tmp_path / "report" / "figures" / "reliability.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((tmp_path / "report" / "report.json").read_text())["n_examples"] == 240

    def test_progress_is_on_stderr(self, workplace: Path) -> None:
        result = call("evaluate", workplace / "model", "--data", workplace / "test.csv", "--batch-size", 7)
        assert "80/80" in result.stderr
        assert "80/80" not in result.stdout

    def test_the_datas_own_names(self, workplace: Path, tmp_path: Path) -> None:
        table = pandas.read_csv(workplace / "test.csv")
        table["label"] = table["label"].map(dict(zip(NAMES, "KRFS", strict=True)))
        table.to_csv(tmp_path / "data.csv", index=False)
        words = ("evaluate", workplace / "model", "--data", tmp_path / "data.csv")
        assert_refused(call(*words), r"hold the model's classes \(art, law, film, sport\), got 'K' in row 0")
        theirs = called_for_json(*words, "--class-names", "K,R,F,S")
        ours = called_for_json("evaluate", workplace / "model", "--data", workplace / "test.csv")
        assert theirs["before"]["metrics"] == ours["before"]["metrics"]
        assert [row["name"] for row in theirs["before"]["classes"]] == list("KRFS")

    def test_inputs_from_elsewhere_before_and_after_the_map(self, workplace: Path, tmp_path: Path) -> None:
        calibrate = (
            "calibrate",
            workplace / "model",
            "--data",
            workplace / "data.csv",
            "--method",
            "temperature",
        )
        assert call(*calibrate, "--output", tmp_path / "calibrated").exit_code == 0
        elsewhere = pandas.DataFrame({"text": [text_of([i, i, 7]) for i in range(5, 60)]})  # without labels
        elsewhere.to_csv(tmp_path / "other.csv", index=False)
        words = ("--data", workplace / "test.csv", "--ood-data", tmp_path / "other.csv")
        found = called_for_json("evaluate", tmp_path / "calibrated", *words)["out_of_distribution"][0]
        raw = called_for_json("evaluate", workplace / "model", *words)["out_of_distribution"][0]
        assert (found["name"], found["n_examples"]) == (f"{tmp_path.name}/other.csv", 55)
        assert raw["after"] is None
        for score, rates in raw["before"].items():
            for rate, interval in rates.items():
                assert found["before"][score][rate] == pytest.approx(interval, abs=1e-6), (score, rate)
        # A temperature does not change the order of maximum logits.
        areas = {
            state: {score: rates["auroc"]["value"] for score, rates in found[state].items()}
            for state in ("before", "after")
        }
        assert areas["after"]["max_logit"] == pytest.approx(areas["before"]["max_logit"])
        assert areas["after"]["entropy"] != pytest.approx(areas["before"]["entropy"])
        shown = call("evaluate", tmp_path / "calibrated", *words).stdout
        assert re.search(r"AUROC, maximum logit( +0\.\d{4} \[0\.\d{4}, [01]\.\d{4}\]){2}", shown)

    def test_two_files_of_predictions(self, workplace: Path, tmp_path: Path) -> None:
        inside = load_predictions(workplace / "data.npz")
        logits = np.random.default_rng(0).standard_normal((50, 4))
        np.savez(tmp_path / "logits.npz", logits=logits)
        np.savez(tmp_path / "probs.npz", probs=softmax(logits, axis=1))
        np.savez(tmp_path / "three.npz", logits=logits[:, :3])
        save_predictions(Predictions(inside.labels, logits=inside.as_logits()), tmp_path / "same.npz")
        words = ("--ood-data", tmp_path / "logits.npz", "--ood-data", tmp_path / "same.npz")
        found = called_for_json("evaluate", workplace / "data.npz", *words)
        same = found["out_of_distribution"][1]
        assert (same["name"], same["before"]["energy"]["auroc"]["value"]) == (
            f"{tmp_path.name}/same.npz",
            0.5,
        )
        wanted = ood_detection(inside.as_logits(), logits, n_resamples=20)
        for score, detection in wanted.items():
            interval = detection.auroc._asdict()
            assert found["out_of_distribution"][0]["before"][score]["auroc"] == pytest.approx(interval)
        save_predictions(
            Predictions(inside.labels, probs=inside.probabilities(), class_names=NAMES),
            tmp_path / "inside.npz",
        )
        of_probabilities = called_for_json(
            "evaluate", tmp_path / "inside.npz", "--ood-data", tmp_path / "probs.npz"
        )
        assert set(of_probabilities["out_of_distribution"][0]["before"]) == {"max_probability", "entropy"}
        assert_refused(
            call("evaluate", workplace / "data.npz", "--ood-data", tmp_path / "three.npz"),
            "expected the data from elsewhere to have the same classes, got 3 classes and 4",
        )
        assert_refused(
            call("evaluate", workplace / "data.npz", "--ood-data", tmp_path / "probs.npz"),
            "expected the data from elsewhere to hold logits, as data.npz does, got probabilities",
        )

    def test_a_failure_leaves_no_files(
        self, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError("no space left on device")

        call("evaluate", workplace / "data.npz", "--output", tmp_path / "there")
        before = (tmp_path / "there" / "report.json").read_bytes()
        monkeypatch.setattr("hf_calib.report.CalibrationReport.figures", full)
        for target in ("there", "new"):
            result = call("evaluate", workplace / "test.npz", "--output", tmp_path / target)
            assert result.exit_code == 1
        assert (tmp_path / "there" / "report.json").read_bytes() == before
        assert names_in(tmp_path) == {"there"}
        assert names_in(tmp_path / "there") == REPORT
