"""`hf-calib evaluate`: models and files of predictions, before any calibration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import transformers

from hf_calib.metrics import (
    expected_calibration_error,
    negative_log_likelihood,
    ood_detection,
)
from hf_calib.predictions import load_predictions
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


class TestEvaluate:
    def test_a_model_and_a_file_of_its_predictions_agree(self, workplace: Path) -> None:
        model = called_for_json(
            "evaluate", workplace / "model", "--data", workplace / "data.csv"
        )
        file = called_for_json("evaluate", workplace / "data.npz")
        assert model["n_examples"] == file["n_examples"] == 240
        assert [row["name"] for row in model["before"]["classes"]] == list(NAMES)
        found = load_predictions(workplace / "data.npz")
        for key, metric in (
            ("ece", expected_calibration_error),
            ("nll", negative_log_likelihood),
        ):
            wanted = metric(found.probabilities(), found.labels)
            assert file["before"]["metrics"][key]["value"] == pytest.approx(
                wanted, rel=1e-9
            )
            assert model["before"]["metrics"][key]["value"] == pytest.approx(
                wanted, rel=1e-4
            )

    def test_people_get_a_table_and_files(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        result = call(
            "evaluate", workplace / "data.npz", "--output", tmp_path / "report"
        )
        assert result.exit_code == 0, result.output
        assert re.search(
            r"Expected calibration error \(ECE\) +0\.\d{4} \[0\.\d{4}, 0\.\d{4}\]",
            result.stdout,
        )
        assert result.stdout.startswith("Calibrated within chance.\n")
        assert "Smooth ECE" not in result.stdout
        assert "Smooth ECE" in call("evaluate", workplace / "data.npz", "--all").stdout
        assert "Calibration report: data" in result.stdout
        assert names_in(tmp_path / "report") == REPORT
        assert (
            (tmp_path / "report" / "figures" / "reliability.png")
            .read_bytes()
            .startswith(b"\x89PNG")
        )
        assert (
            json.loads((tmp_path / "report" / "report.json").read_text())["n_examples"]
            == 240
        )

    def test_the_datas_own_names(self, workplace: Path, tmp_path: Path) -> None:
        table = pandas.read_csv(workplace / "test.csv")
        table["label"] = table["label"].map(dict(zip(NAMES, "KRFS", strict=True)))
        table.to_csv(tmp_path / "data.csv", index=False)
        words = ("evaluate", workplace / "model", "--data", tmp_path / "data.csv")
        assert_refused(
            call(*words),
            r"hold the model's classes \(art, law, film, sport\), got 'K' in row 0",
        )
        theirs = called_for_json(*words, "--class-names", "K,R,F,S")
        ours = called_for_json(
            "evaluate", workplace / "model", "--data", workplace / "test.csv"
        )
        assert theirs["before"]["metrics"] == ours["before"]["metrics"]
        assert [row["name"] for row in theirs["before"]["classes"]] == list("KRFS")

    def test_two_files_of_predictions(self, workplace: Path, tmp_path: Path) -> None:
        inside = load_predictions(workplace / "data.npz")
        logits = np.random.default_rng(0).standard_normal((50, 4))
        np.savez(tmp_path / "logits.npz", logits=logits)
        np.savez(tmp_path / "three.npz", logits=logits[:, :3])
        words = ("evaluate", workplace / "data.npz", "--ood-data")
        found = called_for_json(*words, tmp_path / "logits.npz")
        wanted = ood_detection(inside.as_logits(), logits, n_resamples=20)
        for score, detection in wanted.items():
            interval = detection.auroc._asdict()
            assert found["out_of_distribution"][0]["before"][score][
                "auroc"
            ] == pytest.approx(interval)
        refused = call(*words, tmp_path / "three.npz")
        assert_refused(
            refused,
            "--ood-data to have the same classes, got 3 .0, 1, 2. for 4",
        )


class TestRowsOfAModel:
    @pytest.fixture
    def rows(self, workplace: Path) -> pandas.DataFrame:
        return pandas.read_csv(workplace / "test.csv").iloc[:20]

    @pytest.fixture
    def never_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fail if the model is run, which takes long, before the columns are checked."""

        def run(*_: Any) -> None:
            raise AssertionError("the model was run")

        monkeypatch.setattr("hf_calib.models.classifier.Classifier.run", run)

    @pytest.mark.usefixtures("never_run")
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--by", "x"), "expected --by to be one of text, label, .*, got 'x'"),
            (("--by", "lists"), "'lists' to hold texts or numbers, got"),
            (("--by", "struct"), "'struct' to hold texts or numbers, got"),
            (("--by", "label"), "weight-column and by to name different columns"),
            (
                ("--by", "negative", "--weight-column", "negative"),
                "and by to name different columns, got 'negative' twice",
            ),
            (("--weight-column", "x"), "expected --weight-column to be one of text"),
            (("--weight-column", "negative"), "finite and at least 0, got -1"),
            (("--weight-column", "text"), "'text' to hold numbers in every row"),
            (("--max-length", 17), "max-length to be at most 16, the positions"),
            (("--max-length", 0), "--max-length to be at least 1, got 0"),
        ],
    )
    def test_are_checked_before_it_runs(
        self,
        words: tuple[object, ...],
        message: str,
        rows: pandas.DataFrame,
        workplace: Path,
        tmp_path: Path,
    ) -> None:
        rows = rows.assign(lists=[["de"]] * 20, struct=[{"a": 1}] * 20, negative=-1.0)
        rows.to_parquet(tmp_path / "rows.parquet")
        data = ("--data", tmp_path / "rows.parquet")
        assert_refused(call("evaluate", workplace / "model", *data, *words), message)

    def test_nulls_in_a_slice_are_as_in_predictions(
        self, rows: pandas.DataFrame, workplace: Path, tmp_path: Path
    ) -> None:
        country = ["de", None, "fr", None] * 5
        rows.assign(country=country).to_parquet(tmp_path / "rows.parquet")
        found = load_predictions(workplace / "test.npz")
        table = pandas.DataFrame(
            found.as_logits()[:20], columns=[f"logit_{name}" for name in NAMES]
        )
        labels = [NAMES[label] for label in found.labels[:20]]
        table = table.assign(label=labels, country=country)
        table.to_parquet(tmp_path / "table.parquet")
        data = ("--data", tmp_path / "rows.parquet", "--by", "country")
        model = called_for_json("evaluate", workplace / "model", *data)
        file = called_for_json(
            "evaluate", tmp_path / "table.parquet", "--by", "country"
        )
        counts = [
            {row["name"]: row["n_rows"] for row in each["slices"][0]["slices"]}
            for each in (model, file)
        ]
        assert counts[0] == counts[1] == {"de": 5, "fr": 5, "(none)": 10}

    @pytest.mark.parametrize("limit", [7, None])
    def test_texts_that_are_cut_are_counted_and_served_so(
        self, limit: int | None, rows: pandas.DataFrame, workplace: Path, tmp_path: Path
    ) -> None:
        rows.to_csv(tmp_path / "rows.csv", index=False)
        given = () if limit is None else ("--max-length", limit)
        words = (workplace / "model", "--data", tmp_path / "rows.csv", *given)
        found = called_for_json("evaluate", *words)
        classify = transformers.pipeline(
            "text-classification", str(workplace / "model"), top_k=None
        )
        texts = list(rows["text"])
        lengths = [len(classify.tokenizer(text)["input_ids"]) for text in texts]
        assert max(lengths) > 7
        n_cut = sum(length > 7 for length in lengths)
        said = f"{n_cut} of 20 texts were cut at 7 tokens. A pipeline gives the same"
        is_told = any(each.startswith(said) for each in found["warnings"])
        assert is_told == (limit == 7)

        cut = {} if limit is None else {"truncation": True, "max_length": limit}
        scores = classify(texts, **cut)
        of_labels = [
            {row["label"]: row["score"] for row in answer}[label]
            for answer, label in zip(scores, rows["label"], strict=True)
        ]
        nll = found["before"]["metrics"]["nll"]["value"]
        assert nll == pytest.approx(-np.log(of_labels).mean(), rel=1e-4)

        to_folder = (*TEMPERATURE, "--output", tmp_path / "out")
        printed = one_line(call("calibrate", *words, *to_folder).stdout)
        assert ("of texts of up to 7 tokens." in printed) == (limit == 7)

    def test_empty_cells_of_texts_are_counted_or_refused(
        self, rows: pandas.DataFrame, workplace: Path, tmp_path: Path
    ) -> None:
        pairs = rows.assign(pair=[*["w1"] * 3, None, "w2", *[None] * 15])
        pairs.to_csv(tmp_path / "rows.csv", index=False)
        data = ("--data", tmp_path / "rows.csv")
        words = ("evaluate", workplace / "model", *data)
        found = called_for_json(*words, "--text-pair-column", "pair")
        assert "16 of 20 texts are empty, the first in row 3." in found["warnings"]
        refused = call(*words, "--text-column", "pair")
        message = r"at least one token, got none in 16 of 20 rows \(first in row 3\)"
        assert_refused(refused, message)
        pairs.to_parquet(tmp_path / "rows.parquet")
        words = ("evaluate", workplace / "model", "--data", tmp_path / "rows.parquet")
        message = (
            r"'pair' to have a value in every row, got 16 without \(first in row 3"
        )
        assert_refused(call(*words, "--text-pair-column", "pair"), message)

    def test_a_folder_of_files_with_other_columns(
        self, rows: pandas.DataFrame, workplace: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "rows").mkdir()
        rows.to_parquet(tmp_path / "rows" / "test-1.parquet")
        others = rows.rename(columns={"text": "sentence"})
        others.to_parquet(tmp_path / "rows" / "test-2.parquet")
        data = ("--data", tmp_path / "rows")
        refused = call("evaluate", workplace / "model", *data)
        assert_refused(
            refused,
            "expected --data to have a split 'test', got .*column names don't match",
        )


def test_a_folder_with_neither_predictions_nor_a_model(tmp_path: Path) -> None:
    message = f"expected {tmp_path} to hold predictions or a model, got neither; name"
    assert_refused(call("evaluate", tmp_path), message)


def test_one_row_has_no_interval_of_its_means(workplace: Path, tmp_path: Path) -> None:
    found = load_predictions(workplace / "data.npz")
    path = tmp_path / "one.npz"
    np.savez(path, logits=found.as_logits()[:1], labels=found.labels[:1])
    metrics = called_for_json("evaluate", path)["before"]["metrics"]
    for name in ("nll", "brier", "root_brier", "area_under_risk_coverage"):
        assert (metrics[name]["low"], metrics[name]["high"]) == (None, None)
    assert metrics["accuracy"]["low"] < metrics["accuracy"]["high"]
    assert re.search(
        r"log-likelihood \(nats\) +\d\.\d+ *\n", call("evaluate", path).stdout
    )
