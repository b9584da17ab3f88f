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
from hf_calib.export import saving
from hf_calib.export.fold import fold_and_return_head
from hf_calib.metrics import negative_log_likelihood
from hf_calib.predictions import load_predictions
from hf_calib.scaling import MatrixScaling, TemperatureScaling, VectorScaling, load_map
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
from tests.helpers.tiny import assert_same, tokenizer, weights


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
        said = "had auto scaling in its head, which was undone first,"
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
        assert "The weights are those from before the fold, bit for bit." in done.stdout
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
                *TEMPERATURE,
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
        done = called_for_json("calibrate", tmp_path / "gpt", *data)
        assert (done["method"], done["folded"]) == ("temperature", True)
        assert done["served_difference"] < 1e-5
        done = call("calibrate", tmp_path / "gpt", *data, "--method", "vector")
        assert done.exit_code == 0, done.output
        said = " ".join(done.output.split())
        assert (
            "Saved beside the model, as its head keeps no bias, which the map has: hf_calib.pipeline" in said
        )
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["calibration"]["folded"] is False
        scaler = load_map(tmp_path / "out").scaler
        assert scaler.bias_.any()
        model = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "gpt").eval()
        text = pandas.read_csv(workplace / "test.csv")["text"][0]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([words(text)["input_ids"]])).logits.numpy()
        scores = hf_calib.pipeline("text-classification", str(tmp_path / "out"), top_k=None)([text])[0]
        wanted = dict(zip(NAMES, scaler.predict_proba(logits)[0].tolist(), strict=True))
        assert {each["label"]: each["score"] for each in scores} == pytest.approx(wanted, abs=1e-5)

    def test_a_model_without_names_takes_those_that_are_given(self, workplace: Path, tmp_path: Path) -> None:
        shutil.copytree(workplace / "model", tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        names = [f"LABEL_{i}" for i in range(4)]
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        data = ("--data", workplace / "data.csv")
        words = ("--class-names", ",".join(NAMES), *TEMPERATURE, "--output", tmp_path / "out")
        done = called_for_json("calibrate", tmp_path / "model", *data, *words)
        assert [row["name"] for row in done["report"]["after"]["classes"]] == list(NAMES)
        served = transformers.pipeline("text-classification", str(tmp_path / "out"), top_k=None)(["w1 w2"])[0]
        assert {each["label"] for each in served} == set(NAMES)
        again = called_for_json("evaluate", tmp_path / "out", *data)
        table = pandas.read_csv(workplace / "data.csv")
        table.assign(label=table["label"].map(NAMES.index)).to_csv(tmp_path / "ids.csv", index=False)
        by_ids = called_for_json("evaluate", tmp_path / "model", "--data", tmp_path / "ids.csv", *words[:2])
        assert [row["name"] for row in by_ids["before"]["classes"]] == list(NAMES)
        assert by_ids["before"]["metrics"]["accuracy"] == again["before"]["metrics"]["accuracy"]
        few = call("evaluate", tmp_path / "model", *data, "--class-names", "art,law")
        assert_refused(few, "class_names to name the model's 4 classes")
