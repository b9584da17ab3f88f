"""`hf-calib calibrate --target-data`: other class frequencies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import transformers

from hf_calib.metrics import negative_log_likelihood
from hf_calib.predictions import load_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from tests.helpers.commands import (
    NAMES,
    REPORT,
    TEMPERATURE,
    call,
    called_for_json,
    names_in,
    one_line,
)
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import sequences, text_of


@pytest.fixture(scope="module")
def shifted(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts as in the workplace, most of them of the first class: data (source), unlabelled, and labelled ones."""
    folder = tmp_path_factory.mktemp("shifted")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        workplace / "model"
    )
    rows = sequences(model, 3600, seed=5)
    labels = np.array(rows["label"])
    first = np.flatnonzero(labels[600:] == 0) + 600
    rest = np.flatnonzero(labels[600:] != 0) + 600
    n = len(first) // 2
    roles = {
        "source": np.arange(600),
        "target": np.concatenate([first[:n], rest[: n // 3]]),
        "test": np.concatenate([first[n : 2 * n], rest[n // 3 : 2 * (n // 3)]]),
    }
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rows["input_ids"])).logits.numpy()
    for name, chosen in roles.items():
        table = pandas.DataFrame(
            {"text": [text_of(rows["input_ids"][i]) for i in chosen]}
        )
        if name in ("source", "test"):
            table["label"] = [NAMES[labels[i]] for i in chosen]
        table.to_csv(folder / f"{name}.csv", index=False)
        predictions = Predictions(
            labels[chosen], logits=logits[chosen], class_names=NAMES
        )
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
        words = (
            *words,
            "--target-data",
            shifted / "target.csv",
            "--test-data",
            shifted / "test.csv",
        )
        result = call(*words, "--output", tmp_path / "out")
        assert result.exit_code == 0, result.output
        printed = one_line(result.stdout)
        assert re.search(
            r"Class frequencies of \d,?\d+ target rows, corrected for \(p = 0.005\)",
            printed,
        )
        assert re.search(r"art 0\.\d+ to 0\.\d+ \[0\.\d+, 0\.\d+\]", printed)
        saved = json.loads((tmp_path / "out" / "config.json").read_text())[
            "calibration"
        ]
        assert (saved["method"], saved["scaler"], saved["folded"]) == (
            "prior_correction",
            "auto",
            True,
        )

        done = called_for_json(*words, "--output", tmp_path / "again")
        assert done["served_difference"] < 1e-5
        assert done["prior"]["corrected_to"] == pytest.approx(
            saved["target_prior"], rel=1e-9
        )
        low, high = done["prior"]["interval"][0]
        assert (
            saved["train_prior"][0] < low < 0.75 < high
        )  # three in four are of the first class
        map_only = called_for_json(*words[:4], *words[6:], "--output", tmp_path / "map")
        ours, theirs = (
            each["report"]["after"]["metrics"]["nll"]["value"]
            for each in (done, map_only)
        )
        assert ours < theirs - 0.05
        served = called_for_json(
            "evaluate", tmp_path / "out", "--data", shifted / "test.csv"
        )
        assert served["before"]["metrics"]["nll"]["value"] == pytest.approx(
            ours, abs=1e-5
        )

    def test_files_of_predictions(self, shifted: Path, tmp_path: Path) -> None:
        words = (
            "calibrate",
            shifted / "source.npz",
            *TEMPERATURE,
            "--target-data",
            shifted / "target.npz",
        )
        done = called_for_json(
            *words, "--test-data", shifted / "test.npz", "--output", tmp_path / "out"
        )
        assert names_in(tmp_path / "out") == {*REPORT, "predictions.npz", "target.npz"}
        with np.load(tmp_path / "out" / "target.npz") as written:
            assert written["class_names"].tolist() == list(NAMES)
            probs = written["probs"]
        prior = done["prior"]
        assert prior["train_prior"][0] + 0.1 < probs[:, 0].mean() < prior["prior"][0]
        test = load_predictions(tmp_path / "out" / "predictions.npz")
        assert negative_log_likelihood(
            test.probabilities(), test.labels
        ) == pytest.approx(done["report"]["after"]["metrics"]["nll"]["value"])
