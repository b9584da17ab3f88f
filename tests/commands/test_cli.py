"""The command line as a user meets it: tables, files and exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
import typer
from scipy.special import softmax
from typer.testing import CliRunner

import hf_calib
from hf_calib import fold
from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.cli import app
from hf_calib.commands import console
from hf_calib.commands.fitting import METHODS
from hf_calib.export import saving
from hf_calib.export.fold import fold_and_return_head
from hf_calib.metrics import expected_calibration_error, negative_log_likelihood, ood_detection
from hf_calib.predictions.files import load_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling import MatrixScaling, TemperatureScaling, VectorScaling, load_map
from hf_calib.scaling.methods import SCALERS
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import (
    TRUE_TEMPERATURE,
    assert_same,
    sequences,
    text_of,
    tiny_bert,
    tokenizer,
    weights,
)

NAMES = ("art", "law", "film", "sport")
REPORT = {"report.md", "report.html", "report.json", "figures"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hf_calib.cli import app; app()", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def call(*words: object) -> Any:
    """Run a command in this process, on a screen wide enough for its tables."""
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(word) for word in words])


def called_for_json(*words: object) -> Any:
    """Run a command with --json; its stdout holds one object and nothing else."""
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_refused(result: Any, message: str) -> None:
    """Exit code 2 with one line on stderr, and nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("hf-calib: ")]
    assert len(lines) == 1, result.stderr
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in result.stderr


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four named classes, over-confident by TRUE_TEMPERATURE, labelled texts, and its predictions."""
    folder = tmp_path_factory.mktemp("work")
    names = dict(enumerate(NAMES))
    model = tiny_bert(id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    for name, n, seed in (("data", 240, 1), ("test", 80, 2)):
        rows = sequences(model, n, seed=seed)
        texts = [text_of(ids) for ids in rows["input_ids"]]
        labels = np.array(rows["label"])
        table = pandas.DataFrame({"text": texts, "label": [NAMES[label] for label in labels]})
        table.to_csv(folder / f"{name}.csv", index=False)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rows["input_ids"])).logits.numpy()
        save_predictions(Predictions(labels, logits=logits, class_names=NAMES), folder / f"{name}.npz")
    return folder


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
        assert "Calibration of data" in result.stdout
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
        assert_refused(
            call(*words), r"hold the model's classes \(art, law, film, sport\), got 'F', 'K', 'R', 'S'"
        )
        theirs = called_for_json(*words, "--class-names", "K,R,F,S")
        ours = called_for_json("evaluate", workplace / "model", "--data", workplace / "test.csv")
        assert theirs["before"]["metrics"] == ours["before"]["metrics"]

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
        wanted = ood_detection(inside.as_logits(), logits)
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

    def test_nothing_from_elsewhere_is_refused(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "none.csv").write_text("text,label\n")
        words = (
            "evaluate",
            workplace / "model",
            "--data",
            workplace / "test.csv",
            "--output",
            tmp_path / "report",
        )
        assert_refused(
            call(*words, "--ood-data", tmp_path / "none.csv"), "ood_data to have rows, got none in"
        )
        assert_refused(call(*words, "--ood-data", tmp_path / "missing.csv"), "missing.csv")
        assert not (tmp_path / "report").exists()

    def test_a_failure_leaves_no_files(
        self, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError("no space left on device")

        call("evaluate", workplace / "data.npz", "--output", tmp_path / "there")
        before = (tmp_path / "there" / "report.json").read_bytes()
        monkeypatch.setattr("hf_calib.report._report.CalibrationReport.figures", full)
        for target in ("there", "new"):
            result = call("evaluate", workplace / "test.npz", "--output", tmp_path / target)
            assert result.exit_code == 1
        assert (tmp_path / "there" / "report.json").read_bytes() == before
        assert names_in(tmp_path) == {"there"}
        assert names_in(tmp_path / "there") == REPORT

    def test_files_that_are_there_stay(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        assert call("evaluate", workplace / "data.npz", "--output", tmp_path).exit_code == 0
        assert call("evaluate", workplace / "test.npz", "--output", tmp_path).exit_code == 0
        assert names_in(tmp_path) == {*REPORT, "model.safetensors"}
        assert json.loads((tmp_path / "report.json").read_text())["n_examples"] == 80


class TestCalibrateModel:
    @pytest.mark.parametrize(
        ("method", "scaler"),
        [("temperature", TemperatureScaling()), ("vector", VectorScaling()), ("matrix", MatrixScaling())],
    )
    def test_a_plain_pipeline_serves_the_scalers_probabilities(
        self, method: str, scaler: Any, workplace: Path, tmp_path: Path
    ) -> None:
        found = load_predictions(workplace / "data.npz")
        test = load_predictions(workplace / "test.npz")
        scaler.fit(found.as_logits(), found.labels)
        done = called_for_json(
            *("calibrate", workplace / "model", "--data", workplace / "data.csv", "--method", method),
            *("--test-data", workplace / "test.csv", "--output", tmp_path / "calibrated"),
        )
        assert done["method"] == method
        assert (done["n_fitted"], done["held_out"]) == (240, "all 80 rows of the test data")
        assert done["served_difference"] < 1e-5
        wanted = scaler.predict_proba(test.as_logits())
        after = done["report"]["after"]["metrics"]["nll"]["value"]
        assert after == pytest.approx(negative_log_likelihood(wanted, test.labels), rel=1e-3)

        classify = transformers.pipeline("text-classification", str(tmp_path / "calibrated"), top_k=None)
        texts = list(pandas.read_csv(workplace / "test.csv")["text"])
        served = [{row["label"]: row["score"] for row in scores} for scores in classify(texts)]
        np.testing.assert_allclose([[row[name] for name in NAMES] for row in served], wanted, atol=1e-3)

        record = json.loads((tmp_path / "calibrated" / "config.json").read_text())["calibration"]
        assert record["method"] == method
        assert (record["folded"], record["split"], record["n_examples"]) == (True, "calibration", 240)
        saved = load_map(tmp_path / "calibrated")
        np.testing.assert_allclose(saved.scaler.predict_proba(test.as_logits()), wanted, atol=1e-3)
        assert saved.about["folded"] is True
        assert names_in(tmp_path / "calibrated" / "calibration") == {*REPORT, "head.safetensors"}

    @pytest.mark.parametrize("method", ["spline", "histogram"])
    def test_a_method_that_does_not_fold_is_saved_beside_the_model(
        self, method: str, workplace: Path, tmp_path: Path
    ) -> None:
        words = ("calibrate", workplace / "model", "--data", workplace / "data.csv", "--method", method)
        result = call(*words, "--output", tmp_path / "out")
        assert result.exit_code == 0, result.output
        said = " ".join(result.stdout.split())
        assert f"Saved beside the model, as {method} does not fold: hf_calib.pipeline" in said
        assert "A plain pipeline is not calibrated by it." in said
        saved = load_map(tmp_path / "out")
        assert (saved.about["folded"], saved.about["n_examples"]) == (False, 120)
        record = json.loads((tmp_path / "out" / "config.json").read_text())["calibration"]
        assert (record["method"], record["folded"]) == (method, False)

        texts = list(pandas.read_csv(workplace / "test.csv")["text"])
        scores = []
        for load, folder, settings in (
            (transformers.pipeline, workplace / "model", {"function_to_apply": "none"}),
            (transformers.pipeline, tmp_path / "out", {"function_to_apply": "none"}),
            (hf_calib.pipeline, tmp_path / "out", {}),
        ):
            classify = load("text-classification", str(folder), top_k=None, **settings)
            served = [{row["label"]: row["score"] for row in each} for each in classify(texts)]
            scores.append(np.array([[row[name] for name in NAMES] for row in served]))
        np.testing.assert_array_equal(scores[1], scores[0])  # the model is as it was
        np.testing.assert_allclose(scores[2], saved.scaler.predict_proba(scores[0]), atol=1e-6)

    def test_half_of_the_rows_are_held_out(self, workplace: Path, tmp_path: Path) -> None:
        words = (
            "calibrate",
            workplace / "model",
            "--data",
            workplace / "data.csv",
            "--output",
            tmp_path / "out",
        )
        result = call(*words, "--method", "temperature")
        assert result.exit_code == 0, result.output
        assert "fitted on 120 rows" in result.stdout
        assert "Reported on the other 120 of 240 rows, drawn with seed 0." in result.stdout
        assert "a plain pipeline with the saved model gives the calibrated probabilities" in " ".join(
            result.stdout.split()
        )
        temperature = json.loads((tmp_path / "out" / "config.json").read_text())["calibration"]["temperature"]
        assert abs(temperature - TRUE_TEMPERATURE) < 0.7
        other = called_for_json(*words, "--method", "temperature", "--seed", 1)
        assert other["numbers"]["temperature"] != temperature
        assert other["report"]["n_examples"] == 120

    def test_a_calibrated_model_is_unfolded_and_calibrated_again(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        data = ("--data", workplace / "test.csv")
        done = called_for_json("calibrate", workplace / "model", *data, "--output", tmp_path / "out")
        assert done["output"] == str(tmp_path / "out")
        after = called_for_json("evaluate", tmp_path / "out", *data)
        before = called_for_json("evaluate", workplace / "model", *data)
        assert after["before"]["metrics"]["nll"]["value"] < before["before"]["metrics"]["nll"]["value"]
        assert (done["method"], done["choice"]) == ("auto", load_map(tmp_path / "out").scaler.choice_)

        # As if the first calibration had never been: the same weights, config, map and report.
        other = ("--data", workplace / "data.csv", "--method", "vector")
        again = call("calibrate", tmp_path / "out", *other, "--output", tmp_path / "again")
        assert again.exit_code == 0, again.output
        said = "had auto scaling in its head, which was undone first. Its weights are those from before the fold,"
        assert f"{said} bit for bit. The new map replaces it." in one_line(again.stdout)
        wanted = called_for_json("calibrate", workplace / "model", *other, "--output", tmp_path / "wanted")
        for name in ("config.json", "calibration.json", "model.safetensors", "calibration/head.safetensors"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes(), name
        found = called_for_json("calibrate", tmp_path / "again", *other, "--output", tmp_path / "third")
        assert found["report"]["after"] == wanted["report"]["after"]
        assert_refused(
            call("calibrate", tmp_path / "out", *data, "--output", tmp_path / "out"),
            "expected output to be another folder than the model's",
        )

    def test_unfold_gives_the_model_back(self, workplace: Path, tmp_path: Path) -> None:
        data = ("--data", workplace / "data.csv", "--method", "matrix")
        called_for_json("calibrate", workplace / "model", *data, "--output", tmp_path / "folded")
        done = call("unfold", tmp_path / "folded", tmp_path / "plain")
        assert done.exit_code == 0, done.output
        assert "Its weights are those from before the fold, bit for bit." in done.stdout
        for name in names_in(workplace / "model"):
            theirs = (
                workplace / "model" if name in ("config.json", "model.safetensors") else tmp_path / "folded"
            )
            assert (tmp_path / "plain" / name).read_bytes() == (theirs / name).read_bytes(), name
        assert names_in(tmp_path / "plain") - names_in(workplace / "model") == {"calibration.json"}
        saved = load_map(tmp_path / "plain")
        assert saved.about["folded"] is False

        # The map that lies beside it gives the folded weights again.
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
        folded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "folded")
        assert_same(weights(fold(model, saved.scaler)), weights(folded))

        assert_refused(
            call("unfold", tmp_path / "plain", tmp_path / "again"),
            "expected model to have a map folded into its head, got none",
        )
        assert_refused(
            call("unfold", tmp_path / "folded", tmp_path / "folded"),
            "expected output to be another folder than the model's",
        )
        assert_refused(
            call("unfold", tmp_path / "none", tmp_path / "again"), "expected the model to be loadable"
        )
        assert not (tmp_path / "again").exists()

    def test_a_model_that_serves_something_else_is_not_saved(
        self, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(model: Any, scaler: Any, batch: Any) -> Any:
            other = TemperatureScaling(grid=[100.0]).fit([[1.0, 0.0]] * 3, [0, 0, 1])
            return fold_and_return_head(model, other, batch)

        monkeypatch.setattr(saving, "fold_and_return_head", wrong)
        result = call(
            *(
                "calibrate",
                workplace / "model",
                "--data",
                workplace / "data.csv",
                "--output",
                tmp_path / "out",
            )
        )
        assert result.exit_code == 1
        assert "give the calibrated probabilities within 0.0001" in str(result.exception)
        assert names_in(tmp_path) == set()

    def test_decoders_whose_head_has_no_bias(self, workplace: Path, tmp_path: Path) -> None:
        names = dict(enumerate(NAMES))
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16, id2label=names
        )
        transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "gpt")
        words = tokenizer()
        words.pad_token = None
        words.save_pretrained(tmp_path / "gpt")
        data = ("--data", workplace / "test.csv", "--output", tmp_path / "out")
        refused = call("calibrate", tmp_path / "gpt", *data, "--method", "vector")
        assert_refused(
            refused, "bias in its head for vector scaling, got score without .*fit TemperatureScaling"
        )
        assert names_in(tmp_path) == {"gpt"}
        done = called_for_json("calibrate", tmp_path / "gpt", *data)
        assert done["served_difference"] < 1e-5

    def test_wrong_test_data_are_found_before_the_model_runs(self, workplace: Path, tmp_path: Path) -> None:
        table = pandas.read_csv(workplace / "data.csv")
        table.assign(label="music").to_csv(tmp_path / "test.csv", index=False)
        words = (
            "--data",
            workplace / "data.csv",
            "--test-data",
            tmp_path / "test.csv",
            "--output",
            tmp_path / "out",
        )
        result = call("calibrate", workplace / "model", *words)
        assert_refused(result, "hold the model's classes")
        assert "predicting" not in result.stderr


@pytest.fixture(scope="module")
def shifted(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts as in the workplace, most of them of the first class: data (source), unlabelled, and labelled ones."""
    folder = tmp_path_factory.mktemp("shifted")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(workplace / "model")
    rows = sequences(model, 3600, seed=5)
    labels = np.array(rows["label"])
    first = np.flatnonzero(labels[600:] == 0) + 600
    rest = np.flatnonzero(labels[600:] != 0) + 600
    n = len(first) // 2
    roles = {
        "source": np.arange(600),
        "target": np.concatenate([first[:n], rest[: n // 3]]),
        "test": np.concatenate([first[n : 2 * n], rest[n // 3 : 2 * (n // 3)]]),
        "same": np.arange(600, 1000),
    }
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rows["input_ids"])).logits.numpy()
    for name, chosen in roles.items():
        table = pandas.DataFrame({"text": [text_of(rows["input_ids"][i]) for i in chosen]})
        if name in ("source", "test"):
            table["label"] = [NAMES[labels[i]] for i in chosen]
        table.to_csv(folder / f"{name}.csv", index=False)
        predictions = Predictions(labels[chosen], logits=logits[chosen], class_names=NAMES)
        if name in ("source", "test"):
            save_predictions(predictions, folder / f"{name}.npz")
        else:
            np.savez(folder / f"{name}.npz", logits=logits[chosen])
    return folder


class TestTargetData:
    @pytest.mark.slow
    def test_the_correction_is_folded_with_the_map(
        self, workplace: Path, shifted: Path, tmp_path: Path
    ) -> None:
        words = ("calibrate", workplace / "model", "--data", shifted / "source.csv")
        words = (*words, "--target-data", shifted / "target.csv", "--test-data", shifted / "test.csv")
        result = call(*words, "--output", tmp_path / "out")
        assert result.exit_code == 0, result.output
        printed = one_line(result.stdout)
        assert re.search(r"Class frequencies of \d,?\d+ target rows, corrected for \(p = 0.005\)", printed)
        assert re.search(r"art 0\.\d+ 0\.\d+ \[0\.\d+, 0\.\d+\]", printed)
        saved = json.loads((tmp_path / "out" / "config.json").read_text())["calibration"]
        assert (saved["method"], saved["scaler"], saved["folded"]) == (
            "prior_correction",
            "auto",
            True,
        )

        done = called_for_json(*words, "--output", tmp_path / "again")
        assert done["served_difference"] < 1e-5
        assert done["prior"]["prior"] == pytest.approx(saved["target_prior"], rel=1e-9)
        low, high = done["prior"]["interval"][0]
        assert saved["train_prior"][0] < low < 0.75 < high  # three in four are of the first class
        map_only = called_for_json(*words[:4], *words[6:], "--output", tmp_path / "map")
        ours, theirs = (each["report"]["after"]["metrics"]["nll"]["value"] for each in (done, map_only))
        assert ours < theirs - 0.05
        served = called_for_json("evaluate", tmp_path / "out", "--data", shifted / "test.csv")
        assert served["before"]["metrics"]["nll"]["value"] == pytest.approx(ours, abs=1e-5)

    def test_without_labelled_target_rows_the_report_is_on_the_map(
        self, shifted: Path, tmp_path: Path
    ) -> None:
        data = ("calibrate", shifted / "source.npz")
        done = called_for_json(
            *data, "--target-data", shifted / "target.npz", "--output", tmp_path / "corrected"
        )
        map_only = called_for_json(*data, "--output", tmp_path / "map")
        assert done["held_out"] == (
            "the other 300 of 600 rows, drawn with seed 0, before the correction of the class frequencies, "
            "as these rows have the source's"
        )
        for each in (done, map_only):
            each["nll"] = each["report"]["after"]["metrics"]["nll"]["value"]
        assert done["nll"] == map_only["nll"]
        assert done["prior"]["shifted"]

    def test_noise_is_not_corrected(self, workplace: Path, shifted: Path, tmp_path: Path) -> None:
        words = ("calibrate", workplace / "model", "--data", shifted / "source.csv", "--output")
        done = called_for_json(*words, tmp_path / "a", "--target-data", shifted / "same.csv")
        assert not done["prior"]["shifted"]
        assert any(
            "the 400 target rows do not differ significantly from the source's" in one_line(n)
            for n in done["notes"]
        )
        called_for_json(*words, tmp_path / "b")
        configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
        assert configs[0] == configs[1]

    def test_files_of_predictions(self, shifted: Path, tmp_path: Path) -> None:
        words = ("calibrate", shifted / "source.npz", "--target-data", shifted / "target.npz")
        done = called_for_json(*words, "--test-data", shifted / "test.npz", "--output", tmp_path / "out")
        assert names_in(tmp_path / "out") == {*REPORT, "predictions.npz", "target.npz"}
        with np.load(tmp_path / "out" / "target.npz") as written:
            assert written["class_names"].tolist() == list(NAMES)
            probs = written["probs"]
        np.testing.assert_allclose(probs.mean(axis=0), done["prior"]["prior"], atol=0.01)
        test = load_predictions(tmp_path / "out" / "predictions.npz")
        assert negative_log_likelihood(test.probabilities(), test.labels) == pytest.approx(
            done["report"]["after"]["metrics"]["nll"]["value"]
        )
        with np.load(shifted / "target.npz") as file:
            table = pandas.DataFrame(file["logits"], columns=[f"logit_{name}" for name in NAMES])
        table.to_csv(tmp_path / "target.csv", index=False)
        again = called_for_json(
            *words[:2], "--target-data", tmp_path / "target.csv", "--output", tmp_path / "out2"
        )
        low, high = np.transpose(done["prior"]["interval"])  # whose source rows are others
        assert ((low < again["prior"]["prior"]) & (again["prior"]["prior"] < high)).all()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--method", "isotonic"), "isotonic cannot be folded into a model's head"),
            (("--target-data", "three.npz"), "the target data to have the same classes, got 3 classes and 4"),
            (("--target-data", "one.npz"), "probs to hold rows that differ, got one row; pass"),
            (("--target-data", "none.npz"), "expected predictions to name an existing file, got .*none.npz"),
            (("--target-data", "nan.npz"), "expected probs to be finite"),
        ],
    )
    def test_refused(
        self,
        words: tuple[str, str],
        message: str,
        shifted: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        np.savez("three.npz", logits=np.random.default_rng(0).normal(size=(9, 3)))
        np.savez("one.npz", logits=np.zeros((1, 4)))
        np.savez("nan.npz", logits=np.full((5, 4), np.nan))
        given = ("calibrate", shifted / "source.npz", "--target-data", shifted / "target.npz", *words)
        assert_refused(call(*given, "--output", "out"), message)
        assert not Path("out").exists()


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
        assert "All 20 labels are ranked first" in called_for_json(*words)["notes"][0]
        assert "All 20 labels are ranked first" in " ".join(call(*words).stdout.split())

    def test_a_class_with_a_single_row(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        save_predictions(
            Predictions(np.array([0, 1, 2, 0]), logits=rng.normal(size=(4, 3))), tmp_path / "few.npz"
        )
        done = called_for_json("calibrate", tmp_path / "few.npz", "--output", tmp_path / "out")
        assert (done["n_fitted"], done["report"]["n_examples"]) == (2, 2)

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


def one_line(text: str) -> str:
    return " ".join(text.split())


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
        for test in (workplace / "test.npz", tmp_path / "copy.npz", tmp_path / "shuffled.csv"):
            words = ("calibrate", workplace / "test.npz", "--test-data", test, "--output", tmp_path / "out")
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
        words = ("calibrate", workplace / "data.npz", "--test-data", tmp_path / "mixed.npz")
        result = call(*words, "--output", tmp_path / "out")
        self.assert_said(
            result, tmp_path / "out", "The scaler was fitted on 7 of the 87 rows of this report."
        )

    def test_other_rows_are_not_taken_for_the_same(self, workplace: Path, tmp_path: Path) -> None:
        result = call(
            *("calibrate", workplace / "data.npz", "--test-data", workplace / "test.npz"),
            *("--output", tmp_path / "out"),
        )
        assert "was fitted on all" not in one_line(result.output)
        assert "rows of this report" not in one_line(result.output)

    def test_scores_that_were_rounded_coincide(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        for name, n in (("a", 500), ("b", 300)):
            confident = rng.integers(50, 100, n) / 100
            labels = (rng.random(n) > confident).astype(int)
            predictions = Predictions(labels, probs=np.stack([confident, 1 - confident], axis=1))
            save_predictions(predictions, tmp_path / f"{name}.npz")
        words = ("calibrate", tmp_path / "a.npz", "--output", tmp_path / "out", "--test-data")
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
        words = ("calibrate", tmp_path / "a.npz", "--method", "temperature", "--output", tmp_path / "out")
        assert "rows of this report" not in one_line(call(*words, "--test-data", tmp_path / "b.npz").output)
        seen = one_line(call(*words, "--test-data", tmp_path / "half.npz").output)
        assert "of the 2,000 rows of this report" in seen

    def test_a_label_that_differs_is_another_row(self, workplace: Path, tmp_path: Path) -> None:
        test = load_predictions(workplace / "test.npz")
        save_predictions(Predictions((test.labels + 1) % 4, test.logits, None, NAMES), tmp_path / "other.npz")
        words = ("calibrate", workplace / "test.npz", "--test-data", tmp_path / "other.npz")
        assert "rows of this report" not in one_line(call(*words, "--output", tmp_path / "out").output)

    def test_texts_in_two_roles(self, workplace: Path, tmp_path: Path) -> None:
        data = ("--data", workplace / "test.csv")
        words = ("calibrate", workplace / "model", *data, "--test-data", workplace / "test.csv")
        result = call(*words, "--output", tmp_path / "out")
        self.assert_said(result, tmp_path / "out" / "calibration", self.ALL.format(80))
        tables = [pandas.read_csv(workplace / f"{name}.csv") for name in ("test", "data")]
        pandas.concat([tables[0][:3], tables[1][:20]]).to_csv(tmp_path / "mixed.csv", index=False)
        words = ("calibrate", workplace / "model", *data, "--test-data", tmp_path / "mixed.csv")
        result = call(*words, "--output", tmp_path / "mixed")
        note = "The scaler was fitted on 3 of the 23 rows of this report."
        self.assert_said(result, tmp_path / "mixed" / "calibration", note)


class TestProgress:
    def test_stages_are_named_on_stderr(self, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console, "_PATIENCE", 0.0)
        result = call("evaluate", workplace / "data.npz", "--json")
        assert "measuring 240 rows ..." in result.stderr
        assert json.loads(result.stdout)["n_examples"] == 240

    def test_only_those_that_take_their_time(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert console._PATIENCE == 1.0
        monkeypatch.setattr(console, "_PATIENCE", 0.2)
        with console.stages() as begin:
            begin("reading a.csv")
            begin("measuring 3 rows")
            time.sleep(0.5)
            begin("saving to out")
        time.sleep(0.3)
        assert capsys.readouterr().err == "measuring 3 rows ...\n"


class TestOutput:
    def test_where_no_folder_can_be(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to("nothing")
        for folder, message in (
            (tmp_path / "file" / "sub", "got the file"),
            (tmp_path / "link", "got .*, a link to nothing"),
            (tmp_path / ("x" * 300), "File name too long"),
            (Path("/proc/none"), "be writable"),
        ):
            assert_refused(call("evaluate", workplace / "data.npz", "--output", folder), message)

    @pytest.mark.slow
    def test_a_full_disk(self, workplace: Path, tmp_path: Path) -> None:
        """The limit on a file's size stands for it."""
        call("evaluate", workplace / "data.npz", "--output", tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code = (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
            "from hf_calib.cli import app; app()"
        )
        words = ["evaluate", str(workplace / "test.npz"), "--output", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1] == (
            f"hf-calib: expected output to be writable, got {tmp_path} (File too large); "
            "make room there, or name another place"
        )
        assert "Traceback" not in done.stderr
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_adapters_stay(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        words = ("calibrate", workplace / "model", "--data", workplace / "test.csv", "--output", tmp_path)
        assert_refused(call(*words), "expected output to hold no adapters")
        assert names_in(tmp_path) == {"adapter_config.json"}

    def test_nothing_moves_where_something_is_in_the_way(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "report.md").mkdir()
        (tmp_path / "report.html").write_text("mine")
        result = call("evaluate", workplace / "data.npz", "--output", tmp_path)
        assert_refused(result, "report.md to be a file, got a folder")
        assert (tmp_path / "report.html").read_text() == "mine"
        assert names_in(tmp_path) == {"report.md", "report.html"}

    @pytest.mark.parametrize("command", ["evaluate", "calibrate", "report"])
    def test_an_earlier_report_is_replaced_and_nothing_else(
        self, command: str, workplace: Path, tmp_path: Path
    ) -> None:
        assert call("evaluate", workplace / "test.npz", "--output", tmp_path).exit_code == 0
        mine = ("mine.txt", "figures/mine.png", "figures/deep/mine.png", "calibration/mine.md")
        for name in mine:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")
        (tmp_path / "figures" / "reliability.png").write_text("an older one")
        assert call(command, workplace / "data.npz", "--output", tmp_path).exit_code == 0
        assert [(tmp_path / name).read_text() for name in mine] == ["mine"] * 4
        assert not list(tmp_path.rglob("_saving*"))
        if command != "report":
            assert (tmp_path / "figures" / "reliability.png").read_bytes().startswith(b"\x89PNG")


class TestReport:
    def test_files_and_reports_side_by_side(self, workplace: Path, tmp_path: Path) -> None:
        call("calibrate", workplace / "data.npz", "--output", tmp_path / "scaled")
        words = ("report", workplace / "data.npz", workplace / "test.npz", tmp_path / "scaled")
        result = call(*words, "--output", tmp_path / "compared")
        assert result.exit_code == 0, result.output
        assert names_in(tmp_path / "compared") == {
            *("comparison.md", "comparison.html", "comparison.json", "figures")
        }
        assert "These are not the same examples" in result.stdout
        assert re.search(r"Accuracy( +0\.\d{4}){4}", result.stdout)  # the scaled one before and after
        found = called_for_json(*words)
        assert found == json.loads((tmp_path / "compared" / "comparison.json").read_text())
        alone = called_for_json("evaluate", workplace / "test.npz")
        assert found["reports"][str(workplace / "test.npz")] == alone  # two are named "data"
        assert [report["n_examples"] for report in found["reports"].values()] == [240, 80, 120]

    def test_columns_that_do_not_fit_follow_below(self, workplace: Path, tmp_path: Path) -> None:
        predictions = load_predictions(workplace / "test.npz")
        files = [tmp_path / f"predictions_{i}.npz" for i in range(7)]
        for path in files:
            save_predictions(predictions, path)
        shown = call("report", *files).stdout
        assert shown.count("Calibration compared") == 2
        assert re.findall(r"predictions_\d", shown) == [path.stem for path in files]
        assert sum(line.count("0.") for line in shown.splitlines() if "Accuracy" in line) == 7

    def test_a_saved_report_draws_what_its_predictions_draw(self, workplace: Path, tmp_path: Path) -> None:
        from hf_calib.commands.report import compare_reports

        call("evaluate", workplace / "data.npz", "--output", tmp_path / "saved")
        titles = [
            [axes.get_title(loc="left") for axes in compare_reports([str(source)]).figure().axes]
            for source in (workplace / "data.npz", tmp_path / "saved" / "report.json")
        ]
        assert titles[0] == titles[1]
        assert any("ECE" in title for title in titles[0])

    def test_refused(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "broken.json").write_text("{")
        assert_refused(call("report", tmp_path / "broken.json"), "be readable as JSON, got .*broken.json")
        twice = call("report", workplace / "data.npz", workplace / "data.npz")
        assert_refused(twice, "expected the sources to be different")
        assert_refused(call("report", tmp_path), "expected predictions to name an existing file")
        call("evaluate", workplace / "data.npz", "--output", tmp_path / "a", "--n-bins", 10)
        mixed = call("report", tmp_path / "a", workplace / "test.npz", "--output", tmp_path / "b")
        assert_refused(mixed, "the same number of bins, got 10 and 15; make the reports again")
        assert not (tmp_path / "b").exists()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda r: r.pop("name"), "the report's name to be there, got nothing in .*; pass a report.json"),
            (lambda r: r.update(name=3), "the report's name to be a text, got 3 in "),
            (
                lambda r: r.update(n_examples=80.5),
                "the report's n_examples to be an integer of at least 1, got 80.5",
            ),
            (lambda r: r.update(n_bins=True), "the report's n_bins to be an integer of at least 1, got True"),
            (lambda r: r.pop("after"), "the report's after to be there"),
            (lambda r: r.update(after={}), "the report's after.metrics to be there"),
            (lambda r: r.update(before=None), "the report's before to be an object, got None"),
            (lambda r: r["before"].update(metrics=[]), r"before.metrics to be an object, got \[\]"),
            (lambda r: r["before"]["metrics"].update(ece=0.1), "before.metrics.ece to be an object, got 0.1"),
            (lambda r: r["before"]["metrics"]["ece"].pop("title"), "before.metrics.ece.title to be there"),
            (
                lambda r: r["before"]["metrics"]["ece"].update(value="low"),
                "ece.value to be a number, got low",
            ),
            (
                lambda r: r["before"]["metrics"]["ece"].update(low=[]),
                r"metrics.ece.low to be a number, got \[\]",
            ),
            (lambda r: r["before"].pop("consistency_test"), "before.consistency_test to be there"),
            (
                lambda r: r["before"]["consistency_test"].update(p_value=None),
                "p_value to be a number from 0 to 1",
            ),
            (
                lambda r: r["before"]["consistency_test"].update(p_value=2),
                "p_value to be a number from 0 to 1, got 2",
            ),
            (lambda r: r["before"].update(bins={}), "before.bins to be a list"),
            (lambda r: r["before"]["bins"].append(1), r"before.bins\[\d+\] to be an object, got 1"),
            (
                lambda r: r["before"]["bins"][0].update(count=-1),
                r"before.bins\[0\].count to be an integer of at lea",
            ),
            (
                lambda r: r["before"]["bins"][0].update(accuracy=1.5),
                r"bins\[0\].accuracy to be a number from 0 to 1",
            ),
            (
                lambda r: r["before"]["bins"][0].update(confidence=None),
                r"bins\[0\].confidence to be a number from 0",
            ),
            (lambda r: r["before"]["bins"].pop(), "before.bins to count the 80 examples of n_examples, got"),
            (lambda r: r.update(n_bins=1), "before.bins to be at most n_bins = 1, got"),
            (
                lambda r: r["before"]["bins"][0].update(gap=float("nan")),
                "readable as JSON, got .*NaN is not a finite",
            ),
            (lambda r: r.update(note="1e999 "), "readable as JSON, got .*1e999 is not a finite number"),
        ],
    )
    @pytest.mark.slow
    def test_an_edited_report(self, change: Any, message: str, workplace: Path, tmp_path: Path) -> None:
        assert call("evaluate", workplace / "test.npz", "--output", tmp_path).exit_code == 0
        path = tmp_path / "report.json"
        record = json.loads(path.read_text())
        assert called_for_json("report", path)["reports"] == {"test": record}
        change(record)
        path.write_text(json.dumps(record).replace('"1e999 "', "1e999"))
        assert_refused(call("report", path), message)

    @pytest.mark.parametrize("text", ["[]", "3", "null", '"report"', "[" * 100_000])
    def test_json_that_is_no_report(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "report.json").write_text(text)
        assert_refused(
            call("report", tmp_path), "expected the report to be (an object, got|readable as JSON, got)"
        )


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("evaluate", "model"), "expected data to be given with a model, got none; name labelled texts"),
            (("evaluate", "data.npz", "--data", "data.csv"), "data to be given with a model only, got"),
            (("evaluate", "a" * 5000), "data to be given with a model, got none"),
            (("evaluate", "a" * 5000 + ".csv"), "expected predictions to name an existing file, got aaa"),
            (("evaluate", "model", "--data", "a" * 5000), "data to have a split 'test', got aaa"),
            (("evaluate", "a" * 5000, "--data", "data.csv"), "the model to be loadable, got aaa"),
            (("report", "a" * 5000), "expected predictions to name an existing file, got aaa"),
            (("evaluate", "data.npz", "--output", "a" * 5000), "output to be writable, got aaa"),
            (("calibrate", "data.npz", "--output", "a" * 300), "output to be writable, got aaa"),
            (
                ("calibrate", "data.npz", "--output", "new", "--test-data", "a" * 5000 + ".npz"),
                "expected predictions to name an existing file, got aaa",
            ),
            (("evaluate", "nothing.npz"), "expected predictions to name an existing file, got nothing.npz"),
            (("evaluate", "model", "--data", "nothing.csv"), "expected data to name an existing file"),
            (
                ("evaluate", "nobody/none", "--data", "data.csv"),
                "expected the model to be loadable, got nobody/none",
            ),
            (
                ("evaluate", "model", "--data", "data.csv", "--text-column", "txt"),
                "text_column .* did you mean 'text'",
            ),
            (("evaluate", "data.npz", "--output", "data.csv"), "output to be a folder, got the file"),
            (
                ("calibrate", "model", "--data", "data.csv", "--output", "model"),
                "another folder than the model's",
            ),
            (
                (
                    *("calibrate", "model", "--data", "data.csv", "--output", "new", "--method", "spline"),
                    *("--target-data", "data.csv"),
                ),
                "method to be one of temperature, vector, matrix, structured_vector, structured_matrix, auto, "
                "got 'spline'; spline cannot be folded",
            ),
            (
                ("calibrate", "data.npz", "--output", "new", "--method", "vector", "--criterion", "ece"),
                "criterion to be given for a temperature only, got 'ece'",
            ),
        ],
    )
    def test_one_line_and_exit_code_2(
        self, words: tuple[str, ...], message: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(workplace)
        before = names_in(workplace)
        assert_refused(call(*words), message)
        assert names_in(workplace) == before

    def test_other_classes_in_the_test_data(self, workplace: Path, tmp_path: Path) -> None:
        test = load_predictions(workplace / "test.npz")
        renamed = Predictions(test.labels, logits=test.logits, class_names=NAMES[::-1])
        save_predictions(renamed, tmp_path / "renamed.npz")
        words = ("calibrate", workplace / "data.npz", "--test-data", tmp_path / "renamed.npz")
        assert_refused(call(*words, "--output", tmp_path / "out"), "the test data to have the same classes")

    def test_one_row_cannot_be_halved(self, tmp_path: Path) -> None:
        save_predictions(Predictions(np.array([0]), logits=np.array([[1.0, 2.0]])), tmp_path / "one.npz")
        words = ("calibrate", tmp_path / "one.npz", "--output", tmp_path / "out")
        assert_refused(call(*words), "the rows to be at least 2, to be split in half, got 1")

    def test_a_bug_is_no_refusal(self, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise ValueError("operands could not be broadcast together")

        monkeypatch.setattr("hf_calib.report.of_predictions.calibration_report", broken)
        assert call("evaluate", workplace / "data.npz").exit_code == 1


def test_only_errors_in_the_input_end_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (InputValueError("wrong:\n value"), InputTypeError("wrong: type")):
        with pytest.raises(typer.Exit) as end, console.exit_codes():
            raise error
        assert end.value.exit_code == 2
    assert capsys.readouterr().err == "hf-calib: wrong: value\nhf-calib: wrong: type\n"
    with pytest.raises(ValueError, match="expected a bug"), console.exit_codes():
        raise ValueError("expected a bug to be reported as one")


@pytest.mark.slow
def test_as_a_program(workplace: Path, tmp_path: Path) -> None:
    done = run("evaluate", str(workplace / "test.npz"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_examples"] == 80
    failed = run("evaluate", str(tmp_path / "nothing.npz"))
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.startswith("hf-calib: expected predictions to name an existing file, got ")
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.slow
def test_commands_on_files_start_without_torch(workplace: Path, tmp_path: Path) -> None:
    file = str(workplace / "test.npz")
    commands = [["evaluate", file], ["calibrate", file, "--output", str(tmp_path / "out")], ["report", file]]
    code = (
        f"import sys; from hf_calib.cli import app\n"
        f"for words in {commands!r}:\n"
        "    app([*words, '--json'], standalone_mode=False)\n"
        "    print(words[0], sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = [line for line in done.stderr.splitlines() if line.endswith("]")]
    assert loaded == ["evaluate []", "calibrate []", "report []"]
    assert len(names_in(tmp_path / "out" / "figures")) == 5
    assert "data:image/" in (tmp_path / "out" / "report.html").read_text()


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "evaluate", "calibrate", "unfold", "report"):
        assert command in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--epochs", "0"),
        ("demo", "--max-per-class", "1"),
        ("demo", "--nonsense", "1"),
        ("demo", "--seed", "-1"),
        ("demo", "--seed", str(2**32)),
        ("evaluate", "data.npz", "--n-bins", "0"),
        ("evaluate", "data.npz", "--n-bins", "1" + 20 * "0"),
        ("evaluate", "model", "--data", "data.csv", "--max-length", "1" + 20 * "0"),
        ("evaluate", "model", "--data", "data.csv", "--batch-size", "1" + 20 * "0"),
        ("calibrate", "data.npz", "--output", "out", "--seed", str(2**32)),
        ("calibrate", "data.npz", "--output", "out", "--method", "platt"),
        ("calibrate", "data.npz"),
        ("report",),
    ],
)
def test_bad_options_are_refused_with_exit_code_2(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, list(words)).exit_code == 2


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

    def test_rows_that_are_tested_too_are_counted(self, path: Path, tmp_path: Path) -> None:
        arrays = dict(np.load(path))
        for name in ("logits", "labels"):
            arrays[name] = arrays[name][:40]
        np.savez(tmp_path / "some.npz", **arrays)
        words = ("calibrate", path, "--test-data", tmp_path / "some.npz", "--output", tmp_path / "out")
        done = called_for_json(*words)
        assert any("fitted on all 40 rows of this report" in one_line(note) for note in done["notes"])
        arrays["labels"] = 1 - arrays["labels"].clip(0)
        np.savez(tmp_path / "others.npz", **arrays)
        words = ("calibrate", path, "--test-data", tmp_path / "others.npz", "--output", tmp_path / "out2")
        assert not any("in-sample" in note for note in called_for_json(*words)["notes"])

    def test_what_is_for_one_class_is_refused(self, path: Path, tmp_path: Path) -> None:
        output = ("--output", tmp_path / "out")
        for words, message in (
            (("decide", path), "the predictions to have one class a row, got several in"),
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
