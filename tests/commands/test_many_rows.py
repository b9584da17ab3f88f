"""Commands on predictions of any size: many files, slices, weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax

from hf_calib.commands import source
from hf_calib.commands.options import evaluate
from hf_calib.metrics import expected_calibration_error, negative_log_likelihood
from hf_calib.predictions import table as tables
from hf_calib.scaling import Scaler, TemperatureScaling
from tests.helpers.commands import assert_refused, call, called_for_json, names_in
from tests.helpers.reports import quick_reports  # noqa: F401

NAMES = ("art", "law", "film")
T = 1.8  # the true temperature


def rows_of(n: int, seed: int) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(n, 3))
    labels = (logits / T + rng.gumbel(size=logits.shape)).argmax(axis=1)
    table = pandas.DataFrame(
        logits.astype(np.float32), columns=[f"logit_{name}" for name in NAMES]
    )
    table["label"] = [NAMES[label] for label in labels]
    table["country"] = np.array(["de", "fr", "it"])[rng.integers(0, 3, n)]
    table["length"] = rng.integers(1, 500, n)
    table["w"] = rng.integers(0, 3, n) / 2
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of 800 rows."""
    home = tmp_path_factory.mktemp("shards")
    for i in range(5):
        rows_of(800, i).to_parquet(home / f"part-{i}.parquet", row_group_size=300)
    return home


@pytest.fixture
def few_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these were more rows than are held at once."""
    for module in (tables, source):
        monkeypatch.setattr(module, "MOST_ROWS_HELD", 1_000)
    monkeypatch.setattr(tables, "_BYTES_OF_A_ROW", 1)
    monkeypatch.setattr(tables, "PIECE_ROWS", 300)


def all_rows() -> pandas.DataFrame:
    return pandas.concat([rows_of(800, i) for i in range(5)])


def probabilities(table: pandas.DataFrame) -> np.ndarray:
    return softmax(
        table[[f"logit_{name}" for name in NAMES]].to_numpy(np.float64), axis=1
    )


def label_ids(table: pandas.DataFrame) -> np.ndarray:
    return np.array([NAMES.index(name) for name in table["label"]])


class TestEvaluate:
    @pytest.mark.usefixtures("few_are_held")
    def test_in_one_pass(self, folder: Path, tmp_path: Path) -> None:
        result = call("evaluate", folder, "--output", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert "4,000 examples in 5 files, 3 classes" in result.stdout
        assert names_in(tmp_path / "out") == {
            "report.md",
            "report.html",
            "report.json",
            "figures",
        }
        found = json.loads((tmp_path / "out" / "report.json").read_text())
        table = all_rows()
        metrics = found["before"]["metrics"]
        for key, metric in (
            ("ece", expected_calibration_error),
            ("nll", negative_log_likelihood),
        ):
            assert metrics[key]["value"] == pytest.approx(
                metric(probabilities(table), label_ids(table)), abs=1e-9
            )
        single = tmp_path / "one.csv"
        table.to_csv(single, index=False)
        again = called_for_json("evaluate", single)
        assert again["n_files"] == 1
        for key, metric in metrics.items():
            assert again["before"]["metrics"][key]["value"] == pytest.approx(
                metric["value"], abs=1e-7
            )

    def test_slices_and_weights(self, folder: Path) -> None:
        found = called_for_json(
            "evaluate", folder, "--by", "country,length", "--weight-column", "w"
        )
        table = all_rows()
        assert [each["column"] for each in found["slices"]] == ["country", "length"]
        assert len(found["slices"][1]["slices"]) == 5
        for each in found["slices"][0]["slices"]:
            rows = table[table["country"] == each["name"]]
            assert each["n_rows"] == len(rows)
            logs = -np.log(probabilities(rows)[np.arange(len(rows)), label_ids(rows)])
            assert each["nll"]["value"] == pytest.approx(
                np.average(logs, weights=rows["w"]), rel=1e-9
            )
            assert each["share"] == pytest.approx(rows["w"].sum() / table["w"].sum())
        assert found["weighted"]
        assert found["effective_rows"] == pytest.approx(
            table["w"].sum() ** 2 / (table["w"] ** 2).sum()
        )


class TestCalibrate:
    @pytest.mark.usefixtures("few_are_held")
    def test_a_sample_and_files_of_the_same_names(
        self, folder: Path, tmp_path: Path
    ) -> None:
        result = call(
            "calibrate", folder, "--method", "temperature", "--output", tmp_path
        )
        assert result.exit_code == 0, result.output
        assert "Reported on the other half of the rows." in result.stdout
        assert names_in(tmp_path / "predictions") == {
            f"part-{i}.parquet" for i in range(5)
        }
        scaler = Scaler.from_pretrained(tmp_path)
        assert scaler.temperature_ == pytest.approx(T, rel=0.1)
        for i in range(5):
            table = rows_of(800, i)
            found = pq.read_table(
                tmp_path / "predictions" / f"part-{i}.parquet"
            ).to_pandas()
            pandas.testing.assert_frame_equal(found.iloc[:, 3:], table.iloc[:, 3:])
            wanted = scaler.predict_proba(table.iloc[:, :3].to_numpy(np.float64))
            np.testing.assert_allclose(found.iloc[:, :3], wanted, atol=1e-12)
        again = called_for_json("evaluate", tmp_path / "predictions")["before"][
            "metrics"
        ]
        calibrated = scaler.predict_proba(all_rows().iloc[:, :3].to_numpy(np.float64))
        wanted = expected_calibration_error(calibrated, label_ids(all_rows()))
        assert again["ece"]["value"] == pytest.approx(wanted, abs=1e-9)
        before = called_for_json("evaluate", folder)["before"]["metrics"]
        assert again["ece"]["value"] < 0.3 * before["ece"]["value"]

    @pytest.mark.usefixtures("few_are_held")
    def test_weights(self, folder: Path, tmp_path: Path) -> None:
        test = tmp_path / "test.parquet"
        rows_of(500, 9).to_parquet(test)
        words = (
            "--weight-column",
            "w",
            "--test-data",
            test,
            "--output",
            tmp_path / "out",
        )
        found = called_for_json("calibrate", folder, *words)
        assert (found["method"], found["report"]["weighted"]) == ("temperature", True)
        table = all_rows()
        logits, labels = table.iloc[:, :3].to_numpy(np.float64), label_ids(table)
        wanted = TemperatureScaling().fit(logits, labels, sample_weight=table["w"])
        probs = Scaler.from_pretrained(tmp_path / "out").predict_proba(logits)
        np.testing.assert_allclose(probs, wanted.predict_proba(logits), atol=2e-4)

    @pytest.mark.usefixtures("few_are_held")
    def test_refused(self, folder: Path, tmp_path: Path) -> None:
        at = ("--output", tmp_path / "out")
        result = call(
            "calibrate", folder, "--method", "spline", "--weight-column", "w", *at
        )
        assert_refused(
            result,
            "--weight-column to go with a method of temperature, .*got spline, which",
        )
        assert not (tmp_path / "out").exists()
        (tmp_path / "in" / "predictions").mkdir(parents=True)
        rows_of(2_000, 0).to_parquet(tmp_path / "in" / "predictions" / "a.parquet")
        result = call(
            "calibrate", tmp_path / "in" / "predictions", "--output", tmp_path / "in"
        )
        assert_refused(result, "output to be another folder than the predictions'")


def test_soft_labels_go_with_one_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "soft.npz"
    np.savez(path, soft_labels=np.full((4000, 3), 1 / 3))
    refused = "expected --soft-labels to go with one file of predictions, got 5 files"
    assert_refused(call("evaluate", folder, "--soft-labels", path), refused)


@pytest.mark.parametrize("command", ["evaluate", "calibrate", "decide"])
@pytest.mark.parametrize("source", ["", "*/*.parquet", "**/*.parquet"])
def test_outputs_lie_outside_of_folders_that_are_read(
    command: str, source: str, tmp_path: Path
) -> None:
    home = tmp_path / "runs"
    (home / "a").mkdir(parents=True)
    rows_of(50, 0).to_parquet(home / "a" / "a.parquet")
    words = (command, home / source, "--output", home / "a" / "out")
    assert_refused(call(*words), "expected output to be outside the folders of pred")
    assert not (home / "a" / "out").exists()


def test_outputs_may_lie_in_folders_that_are_not_read(tmp_path: Path) -> None:
    rows_of(50, 0).to_parquet(tmp_path / "a.parquet")
    called_for_json("evaluate", tmp_path, "--output", tmp_path / "_out")
    pattern = tmp_path / "*.parquet"
    called_for_json("evaluate", pattern, "--output", tmp_path / "out")


def test_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows_of(300, 0).to_parquet(path)
    out = tmp_path / "out"
    words = ("calibrate", path, "--output", out)
    called_for_json(*words, "--weight-column", "w")
    (out / "mine.txt").touch()
    of_files = {each.name for each in out.iterdir()}
    called_for_json(*words)
    of_held = {each.name for each in out.iterdir()}
    assert of_files - of_held == {"calibration.json", "predictions"}
    assert of_held - of_files == {"predictions.npz"}
    called_for_json(*words, "--weight-column", "w")
    assert {each.name for each in out.iterdir()} == of_files


def test_a_few_weighted_rows_have_wide_intervals_within_the_range(
    tmp_path: Path,
) -> None:
    """Five rows have nearly all the weight; and of one row nothing is known."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet([1, 1, 1], 600)
    columns = {f"prob_{j}": probs[:, j] for j in range(3)}
    for n_heavy in (5, 1):
        weights = np.where(np.arange(600) < n_heavy, 1e3, 1e-3 if n_heavy > 1 else 0.0)
        table = {"label": probs.argmax(axis=1), "w": weights, **columns}
        pandas.DataFrame(table).to_csv(tmp_path / "rows.csv", index=False)
        report = evaluate(tmp_path / "rows.csv", weight_column="w").to_dict()
        metrics = report["before"]["metrics"]
        assert metrics["accuracy"]["high"] == 1
        assert metrics["accuracy"]["low"] < 0.6
        nll = metrics["nll"]
        assert nll["low"] is None if n_heavy == 1 else 0 <= nll["low"] < nll["value"]
        assert any(f"worth only {n_heavy} " in each for each in report["warnings"])
