"""`hf-calib calibrate` on models: what is saved is served, unfolded and calibrated again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers

import hf_calib
from hf_calib import fold
from hf_calib.cards import write_card
from hf_calib.export import folder as model_folder
from hf_calib.export.fold import fold_and_return_head
from hf_calib.metrics import negative_log_likelihood
from hf_calib.models.weights import fingerprint
from hf_calib.predictions import load_predictions
from hf_calib.scaling import (
    HistogramBinning,
    MatrixScaling,
    TemperatureScaling,
    VectorScaling,
    load_map,
)
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
from tests.helpers.tiny import assert_same, weights


class TestCalibrateModel:
    @pytest.mark.parametrize(
        ("method", "scaler"),
        [
            ("temperature", TemperatureScaling()),
            ("vector", VectorScaling()),
            ("matrix", MatrixScaling()),
        ],
    )
    def test_a_plain_pipeline_serves_the_scalers_probabilities(
        self, method: str, scaler: Any, workplace: Path, tmp_path: Path
    ) -> None:
        found = load_predictions(workplace / "data.npz")
        test = load_predictions(workplace / "test.npz")
        scaler.fit(found.as_logits(), found.labels)
        done = called_for_json(
            *(
                "calibrate",
                workplace / "model",
                "--data",
                workplace / "data.csv",
                "--method",
                method,
            ),
            *(
                "--test-data",
                workplace / "test.csv",
                "--output",
                tmp_path / "calibrated",
            ),
        )
        assert done["method"] == method
        assert (done["n_fitted"], done["held_out"]) == (
            240,
            "all 80 rows of the test data",
        )
        assert done["served_difference"] < 1e-5
        wanted = scaler.predict_proba(test.as_logits())
        after = done["report"]["after"]["metrics"]["nll"]["value"]
        assert after == pytest.approx(
            negative_log_likelihood(wanted, test.labels), rel=1e-3
        )

        classify = transformers.pipeline(
            "text-classification", str(tmp_path / "calibrated"), top_k=None
        )
        texts = list(pandas.read_csv(workplace / "test.csv")["text"])
        served = [
            {row["label"]: row["score"] for row in scores} for scores in classify(texts)
        ]
        np.testing.assert_allclose(
            [[row[name] for name in NAMES] for row in served], wanted, atol=1e-3
        )

        record = json.loads((tmp_path / "calibrated" / "config.json").read_text())[
            "calibration"
        ]
        assert record["method"] == method
        assert (record["folded"], record["split"], record["n_examples"]) == (
            True,
            "calibration",
            240,
        )
        saved = load_map(tmp_path / "calibrated")
        np.testing.assert_allclose(
            saved.scaler.predict_proba(test.as_logits()), wanted, atol=1e-3
        )
        assert saved.about["folded"] is True
        assert names_in(tmp_path / "calibrated" / "calibration") == {
            *REPORT,
            "head.safetensors",
        }

    def test_a_method_that_does_not_fold_is_saved_beside_the_model(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        words = (
            "calibrate",
            workplace / "model",
            "--data",
            workplace / "data.csv",
            "--method",
            "spline",
        )
        result = call(*words, "--output", tmp_path / "out")
        assert result.exit_code == 0, result.output
        said = one_line(result.stdout)
        assert (
            "Saved next to the model, as spline does not fold: hf_calib.pipeline"
            in said
        )
        assert "A plain pipeline is not calibrated by it." in said
        saved = load_map(tmp_path / "out")
        assert (saved.about["folded"], saved.about["n_examples"]) == (False, 120)

        texts = list(pandas.read_csv(workplace / "test.csv")["text"])
        scores = []
        for load, folder, settings in (
            (transformers.pipeline, workplace / "model", {"function_to_apply": "none"}),
            (transformers.pipeline, tmp_path / "out", {"function_to_apply": "none"}),
            (hf_calib.pipeline, tmp_path / "out", {}),
        ):
            classify = load("text-classification", str(folder), top_k=None, **settings)
            served = [
                {row["label"]: row["score"] for row in each} for each in classify(texts)
            ]
            scores.append(np.array([[row[name] for name in NAMES] for row in served]))
        np.testing.assert_array_equal(scores[1], scores[0])  # the model is as it was
        np.testing.assert_allclose(
            scores[2], saved.scaler.predict_proba(scores[0]), atol=1e-6
        )

    @pytest.mark.slow
    def test_a_calibrated_model_is_unfolded_and_calibrated_again(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        data = ("--data", workplace / "test.csv")
        done = called_for_json(
            "calibrate", workplace / "model", *data, "--output", tmp_path / "out"
        )
        assert done["output"] == str(tmp_path / "out")
        assert (done["method"], done["choice"]) == (
            "auto",
            load_map(tmp_path / "out").scaler.choice_,
        )

        # As if the first calibration had never been: the same weights, config, map and report.
        other = ("--data", workplace / "data.csv", "--method", "vector")
        again = call(
            "calibrate", tmp_path / "out", *other, "--output", tmp_path / "again"
        )
        assert again.exit_code == 0, again.output
        said = "had auto scaling in its head, which was undone first,"
        assert f"{said} bit for bit. The new calibrator replaces it." in one_line(
            again.stdout
        )
        wanted = called_for_json(
            "calibrate", workplace / "model", *other, "--output", tmp_path / "wanted"
        )
        for name in (
            "config.json",
            "calibration.json",
            "model.safetensors",
            "calibration/head.safetensors",
        ):
            assert (tmp_path / "again" / name).read_bytes() == (
                tmp_path / "wanted" / name
            ).read_bytes(), name
        found = called_for_json(
            "calibrate", tmp_path / "again", *other, "--output", tmp_path / "third"
        )
        assert found["report"]["after"] == wanted["report"]["after"]

    def test_a_map_that_was_fitted_after_the_fold_is_not_one_of_the_unfolded_model(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        data = ("--data", workplace / "data.csv")
        words = ("calibrate", workplace / "model", *data, *TEMPERATURE)
        call(*words, "--output", tmp_path / "folded")
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(200, 4))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        HistogramBinning().fit(logits, labels).save_pretrained(tmp_path / "folded")
        with pytest.warns(UserWarning, match="or another calibrator"):
            write_card(tmp_path / "folded", license="mit")
        card = (tmp_path / "folded" / "README.md").read_text()
        assert "The calibrator is not in the weights" in card
        assert "is folded into" not in card

        TemperatureScaling().fit(logits, labels).save_pretrained(tmp_path / "other")
        shutil.copytree(tmp_path / "folded", tmp_path / "two")
        shutil.copy(tmp_path / "other" / "calibration.json", tmp_path / "two")
        for name in ("folded", "two"):
            done = call("unfold", tmp_path / name, tmp_path / f"{name} before")
            said = "The calibrator in calibration.json is not the one of the fold"
            assert said in one_line(done.stdout)
            assert not (tmp_path / f"{name} before" / "calibration.json").exists()

    def test_weights_that_were_trained_since_the_fold_have_no_calibrator(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        """Their head is that of the fold, which is undone; the calibrator was fitted before."""
        words = ("calibrate", workplace / "model", "--data", workplace / "data.csv")
        call(*words, *TEMPERATURE, "--output", tmp_path / "folded")
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        model = load(tmp_path / "folded")
        with torch.no_grad():
            model.bert.pooler.dense.weight.add_(0.1)
        model.save_pretrained(tmp_path / "folded")
        done = call("evaluate", tmp_path / "folded", *words[2:])
        assert "is for other weights than the model has" in one_line(done.stdout)
        done = call("unfold", tmp_path / "folded", tmp_path / "plain")
        said = one_line(done.stdout)
        assert (
            "The head is that from before the fold, bit for bit. Other weights" in said
        )
        assert "The weights are those" not in said
        assert "calibration.json" not in names_in(tmp_path / "plain")
        head = load(workplace / "model").classifier.weight
        assert torch.equal(load(tmp_path / "plain").classifier.weight, head)

    def test_what_lies_beside_another_model_is_about_that_one(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        """The card's section is written anew, and a report on the replaced weights goes."""
        data = ("--data", workplace / "data.csv")
        words = ("calibrate", workplace / "model", *data)
        call(*words, "--method", "vector", "--output", tmp_path / "out")
        write_card(tmp_path / "out", license="mit")
        call("evaluate", tmp_path / "out", *data, "--output", tmp_path / "out")
        assert names_in(tmp_path / "out") >= REPORT
        shutil.copytree(tmp_path / "out", tmp_path / "plain")

        done = call(*words, *TEMPERATURE, "--output", tmp_path / "out")
        assert "out: report.json, for other probabilities" in one_line(done.stdout)
        card = (tmp_path / "out" / "README.md").read_text()
        section = card.partition("## Calibration")[2].lower()
        assert "temperature" in section
        assert "vector" not in section
        assert not {"report.md", "report.html"} & names_in(tmp_path / "out")

        call("unfold", tmp_path / "out", tmp_path / "plain")
        card = (tmp_path / "plain" / "README.md").read_text()
        assert "is folded into" not in card
        # It has no results, which are of the calibrated weights.
        assert "the numbers above" not in card
        assert "report.md" not in names_in(tmp_path / "plain")

        call("evaluate", tmp_path / "out", *data, "--output", tmp_path / "out")
        call("unfold", tmp_path / "out", tmp_path / "new")
        assert not {"report.md", "report.html", "report.json"} & names_in(
            tmp_path / "new"
        )

    def test_only_what_was_written_is_named(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        """Of a folder in which a file was only removed, nothing was written."""
        words = ("calibrate", workplace / "model", "--data", workplace / "data.csv")
        call(*words, *TEMPERATURE, "--output", tmp_path / "folded")
        shutil.copytree(tmp_path / "folded", tmp_path / "copy")
        said = one_line(call("unfold", tmp_path / "folded", tmp_path / "copy").stdout)
        names = said.partition("Written to ")[2].partition(": ")[2].split(", ")
        assert {"config.json", "model.safetensors"} <= set(names)
        assert "calibration" not in names

    def test_unfold_gives_the_model_back(self, workplace: Path, tmp_path: Path) -> None:
        data = ("--data", workplace / "data.csv", "--method", "matrix")
        called_for_json(
            "calibrate", workplace / "model", *data, "--output", tmp_path / "folded"
        )
        done = call("unfold", tmp_path / "folded", tmp_path / "plain")
        assert done.exit_code == 0, done.output
        assert "The weights are those from before the fold, bit for bit." in done.stdout
        for name in names_in(workplace / "model"):
            theirs = (
                workplace / "model"
                if name in ("config.json", "model.safetensors")
                else tmp_path / "folded"
            )
            assert (tmp_path / "plain" / name).read_bytes() == (
                theirs / name
            ).read_bytes(), name
        assert names_in(tmp_path / "plain") - names_in(workplace / "model") == {
            "calibration.json"
        }
        saved = load_map(tmp_path / "plain")
        assert saved.about["folded"] is False
        plain = tmp_path / "plain"
        model = transformers.AutoModelForSequenceClassification.from_pretrained(plain)
        assert saved.about["fingerprint"] == fingerprint(model)

        # The map that lies beside it gives the folded weights again.
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "plain"
        )
        folded = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "folded"
        )
        assert_same(weights(fold(model, saved.scaler)), weights(folded))

        for model, output, message in (
            (
                "plain",
                "again",
                "expected model to have a calibrator folded into its head",
            ),
            (
                "folded",
                "folded",
                "expected output to be another folder than the model's",
            ),
            ("none", "again", "expected the model to be loadable"),
        ):
            assert_refused(call("unfold", tmp_path / model, tmp_path / output), message)
        assert not (tmp_path / "again").exists()

        (tmp_path / "checkpoint-8").mkdir()
        (tmp_path / "checkpoint-8" / "trainer_state.json").write_text("{}")
        words = ("calibrate", workplace / "model", "--data", workplace / "data.csv")
        refused = call(*words, "--output", tmp_path / "checkpoint-8")
        assert_refused(refused, "expected --output to be no checkpoint of a training")

    def test_a_model_that_serves_something_else_is_not_saved(
        self, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(model: Any, scaler: Any, batch: Any) -> Any:
            other = TemperatureScaling(grid=[100.0]).fit([[1.0, 0.0]] * 3, [0, 0, 1])
            return fold_and_return_head(model, other, batch)

        monkeypatch.setattr(model_folder, "fold_and_return_head", wrong)
        words = (
            "calibrate",
            workplace / "model",
            "--data",
            workplace / "data.csv",
            *TEMPERATURE,
        )
        result = call(*words, "--output", tmp_path / "out")
        assert result.exit_code == 1
        assert "give the calibrated probabilities within 0.0001" in str(
            result.exception
        )
        assert names_in(tmp_path) == set()
