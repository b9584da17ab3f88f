"""Commands on predictions of any size: many files, slices, weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy.special import softmax

from hf_calib import InputError, metrics
from hf_calib.commands.options import calibrate, evaluate
from hf_calib.metrics import expected_calibration_error, negative_log_likelihood
from hf_calib.predictions import load_predictions
from hf_calib.report import making, rows
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
def few_are_resampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these were more rows than are resampled."""
    monkeypatch.setattr(rows, "MOST_RESAMPLED", 1_000)
    monkeypatch.setattr(making, "_BLOCK", 3_000)


def all_rows() -> pandas.DataFrame:
    return pandas.concat([rows_of(800, i) for i in range(5)])


def probabilities(table: pandas.DataFrame) -> np.ndarray:
    return softmax(
        table[[f"logit_{name}" for name in NAMES]].to_numpy(np.float64), axis=1
    )


def label_ids(table: pandas.DataFrame) -> np.ndarray:
    return np.array([NAMES.index(name) for name in table["label"]])


class TestEvaluate:
    @pytest.mark.usefixtures("few_are_resampled")
    def test_rows_that_are_not_resampled(self, folder: Path, tmp_path: Path) -> None:
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
        ours = found["before"]["metrics"]
        for key, metric in (
            ("ece", expected_calibration_error),
            ("nll", negative_log_likelihood),
            ("smooth_ece", metrics.smooth_calibration_error),
            ("area_under_risk_coverage", metrics.area_under_risk_coverage),
        ):
            assert ours[key]["value"] == pytest.approx(
                metric(probabilities(table), label_ids(table)), abs=1e-9
            )
        single = tmp_path / "one.csv"
        table.to_csv(single, index=False)
        again = called_for_json("evaluate", single)
        assert again["before"]["metrics"]["nll"]["n_resamples"] == 0
        for key, metric in ours.items():
            assert again["before"]["metrics"][key]["value"] == pytest.approx(
                metric["value"], abs=1e-7
            )

    @pytest.mark.slow
    def test_the_report_without_resamples_is_that_with_them(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where both have a number; also of slices, after a calibrator, and of the change."""
        found = load_predictions(folder)
        scaler = TemperatureScaling().fit(found.as_logits(), found.labels)
        whole = making.report_on_predictions(found, "a", 15, scaler)
        monkeypatch.setattr(rows, "MOST_NUMBERS_RESAMPLED", 11_999)
        monkeypatch.setattr(making, "_BLOCK", 5_000)
        summed = making.report_on_predictions(found, "a", 15, scaler)
        assert not summed.before.are_resampled
        words = "Over-confident by"
        assert summed.verdict.startswith(words) == whole.verdict.startswith(words)
        assert summed.nll_change == pytest.approx(whole.nll_change, rel=1e-9)
        for ours, theirs in (
            (summed.before, whole.before),
            (summed.after, whole.after),
        ):
            assert ours is not None
            assert theirs is not None
            assert len(ours.metrics) > 12
            for key, value in ours.metrics.items():
                assert value.value == pytest.approx(theirs.metrics[key].value, abs=1e-9)
        assert "more than 200,000 or have more than 67,108,864" in summed.to_markdown()

    def test_slices_and_weights(self, folder: Path) -> None:
        found = called_for_json(
            "evaluate", folder, "--by", "country,length", "--weight-column", "w"
        )
        table = all_rows()
        assert [each["column"] for each in found["slices"]] == ["country", "length"]
        assert len(found["slices"][1]["slices"]) == 5
        for each in found["slices"][0]["slices"]:
            own = table[table["country"] == each["name"]]
            assert each["n_rows"] == len(own)
            logs = -np.log(probabilities(own)[np.arange(len(own)), label_ids(own)])
            assert each["nll"]["value"] == pytest.approx(
                np.average(logs, weights=own["w"]), rel=1e-9
            )
            assert each["share"] == pytest.approx(own["w"].sum() / table["w"].sum())
        assert found["weighted"]
        assert found["effective_rows"] == pytest.approx(
            table["w"].sum() ** 2 / (table["w"] ** 2).sum()
        )


class TestCalibrate:
    def test_one_table_with_the_other_columns(
        self, folder: Path, tmp_path: Path
    ) -> None:
        words = ("calibrate", folder, "--method", "temperature", "--output", tmp_path)
        result = call(*words)
        assert result.exit_code == 0, result.output
        held_out = "Reported on the other 2,000 of 4,000 rows, drawn with seed 0."
        assert held_out in result.stdout
        scaler = Scaler.from_pretrained(tmp_path)
        assert scaler.temperature_ == pytest.approx(T, rel=0.1)
        written = pandas.read_parquet(tmp_path / "predictions.parquet")
        assert len(written) == 2_000
        table = all_rows().reset_index(drop=True)
        probs = scaler.predict_proba(table.iloc[:, :3].to_numpy(np.float64))
        table[[f"prob_{name}" for name in NAMES]] = probs
        both = written.merge(table, on=["country", "length", "w", "label"])
        same = np.isclose(both["prob_art_x"], both["prob_art_y"], atol=1e-12)
        assert same.sum() == 2_000
        again = called_for_json("evaluate", tmp_path / "predictions.parquet")
        report = json.loads((tmp_path / "report.json").read_text())
        for key, metric in report["after"]["metrics"].items():
            value = again["before"]["metrics"][key]["value"]
            assert value == pytest.approx(metric["value"], abs=1e-12)
        assert report["n_files"] == 5

    def test_partitions_with_files_of_one_name(self, tmp_path: Path) -> None:
        """Each has rows of one class only, and both are in both halves."""
        table = rows_of(600, 0)
        for day, name in enumerate(NAMES):
            home = tmp_path / "in" / f"day={day}"
            home.mkdir(parents=True)
            table[table["label"] == name].to_parquet(home / "part-0.parquet")
        done = calibrate(tmp_path / "in", tmp_path / "out", method="temperature")
        written = pandas.read_parquet(tmp_path / "out" / "predictions.parquet")
        counts = table["label"].value_counts()
        for day, name in enumerate(NAMES):
            own = written[written["day"] == str(day)]
            assert {*own["label"]} == {name}
            assert abs(len(own) - counts[name] / 2) <= 1
        assert done.n_fitted == 300

    def test_other_columns_are_unchanged(self, tmp_path: Path) -> None:
        """Identifiers, dates and truth values as they were written."""
        table = rows_of(300, 0).assign(zip="00501", day="2024-01-02", seen="true")
        table.to_csv(tmp_path / "a.csv", index=False)
        done = calibrate(tmp_path / "a.csv", tmp_path / "out", method="temperature")
        written = pandas.read_parquet(tmp_path / "out" / "predictions.parquet")
        assert len(written) == done.report.n_examples == 150
        for name, text in (("zip", "00501"), ("day", "2024-01-02"), ("seen", "true")):
            assert {*written[name]} == {text}

    @pytest.mark.parametrize(
        "fit_on", [pytest.param(None, marks=pytest.mark.slow), 200]
    )
    def test_many_rows_are_drawn_to_fit_on(
        self, fit_on: int | None, folder: Path, tmp_path: Path
    ) -> None:
        words = ("calibrate", folder, "--method", "temperature", "--output", tmp_path)
        more = () if fit_on is None else ("--fit-on", fit_on)
        found = [
            called_for_json(*words, *more, "--seed", seed)["numbers"]["temperature"]
            for seed in (1, 2, 1)
        ]
        assert found[0] == found[2] != found[1]
        report = json.loads((tmp_path / "report.json").read_text())
        said = "The calibrator was fitted on 200 of 2,000 rows, drawn with seed 1"
        drawn = [each for each in report["warnings"] if each.startswith(said)]
        assert len(drawn) == (fit_on is not None)

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

    def test_refused(self, folder: Path, tmp_path: Path) -> None:
        at = ("--output", tmp_path / "out")
        result = call(
            "calibrate", folder, "--method", "spline", "--weight-column", "w", *at
        )
        assert_refused(
            result,
            "--weight-column to go with a method that has a weighted form, got spline",
        )
        assert not (tmp_path / "out").exists()
        home = tmp_path / "in"
        home.mkdir()
        rows_of(2_000, 0).to_parquet(home / "predictions.parquet")
        result = call("calibrate", home / "predictions.parquet", "--output", home)
        assert_refused(result, "output to be another folder than the predictions'")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        result = call("calibrate", folder, "--output", tmp_path / "model")
        assert_refused(result, "output to be another folder than a model's")

    @pytest.mark.slow
    def test_a_failure_leaves_an_earlier_run(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calibrate(folder, tmp_path / "out", method="temperature")
        before = {
            path: path.read_bytes()
            for path in (tmp_path / "out").rglob("*")
            if path.is_file()
        }

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("hf_calib.predictions.formats._columns_of", fail)
        with pytest.raises(KeyboardInterrupt):
            calibrate(folder, tmp_path / "out", method="vector")
        after = {
            path: path.read_bytes()
            for path in (tmp_path / "out").rglob("*")
            if path.is_file()
        }
        assert after == before

    def test_two_columns_of_one_name(self, tmp_path: Path) -> None:
        """Only one of them could be written."""
        text = "prob_a,prob_b,label,note,note\n" + ".5,.5,a,x,y\n.1,.9,b,x,y\n" * 50
        (tmp_path / "a.csv").write_text(text)
        assert evaluate(tmp_path / "a.csv").n_examples == 100
        with pytest.raises(InputError, match="contained multiple columns named note"):
            calibrate(tmp_path / "a.csv", tmp_path / "out")


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
    assert_refused(call(*words), "expected --output to be outside the folders of pred")
    assert not (home / "a" / "out").exists()


def test_outputs_may_lie_in_folders_that_are_not_read(tmp_path: Path) -> None:
    rows_of(50, 0).to_parquet(tmp_path / "a.parquet")
    called_for_json("evaluate", tmp_path, "--output", tmp_path / "_out")
    pattern = tmp_path / "*.parquet"
    called_for_json("evaluate", pattern, "--output", tmp_path / "out")


def test_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    rows_of(300, 0).to_parquet(table)
    arrays = tmp_path / "a.npz"
    found = load_predictions(table)
    np.savez(arrays, logits=found.logits, labels=found.labels)
    out = tmp_path / "out"
    kept: dict[str, set[str]] = {}
    for path in (table, arrays, table):
        called_for_json("calibrate", path, "--output", out, "--method", "temperature")
        (out / "mine.txt").touch()
        kept[path.suffix] = {each.name for each in out.iterdir()}
    assert kept[".parquet"] - kept[".npz"] == {"predictions.parquet"}
    assert kept[".npz"] - kept[".parquet"] == {"predictions.npz"}
    assert "calibration.json" in kept[".npz"]


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
