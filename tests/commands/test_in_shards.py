"""Commands on predictions of any size: shards, slices, weights, kills, and what is refused before and amid the work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax

from hf_calib.commands import in_shards, opening
from hf_calib.metrics import expected_calibration_error, negative_log_likelihood
from hf_calib.predictions import shard_formats, shards
from hf_calib.predictions.passes import TallyByFile
from hf_calib.scaling import Scaler, TemperatureScaling, VectorScaling
from tests.helpers.commands import assert_refused, call, called_for_json, names_in, run
from tests.helpers.reports import quick_reports  # noqa: F401

NAMES = ("art", "law", "film")
T = 1.8  # the true temperature


def rows_of(n: int, seed: int) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(n, 3))
    labels = (logits / T + rng.gumbel(size=logits.shape)).argmax(axis=1)
    table = pandas.DataFrame(logits.astype(np.float32), columns=[f"logit_{name}" for name in NAMES])
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
    for module in (shards, opening):
        monkeypatch.setattr(module, "MOST_ROWS_HELD", 1_000)
    monkeypatch.setattr(opening, "_SURELY_HELD", 1)
    monkeypatch.setattr(shard_formats, "PIECE_ROWS", 300)


def all_rows() -> pandas.DataFrame:
    return pandas.concat([rows_of(800, i) for i in range(5)])


def probabilities(table: pandas.DataFrame) -> np.ndarray:
    return softmax(table[[f"logit_{name}" for name in NAMES]].to_numpy(np.float64), axis=1)


def label_ids(table: pandas.DataFrame) -> np.ndarray:
    return np.array([NAMES.index(name) for name in table["label"]])


class TestEvaluate:
    def test_a_folder_that_fits_has_the_whole_report(self, folder: Path) -> None:
        found = called_for_json("evaluate", folder)
        assert found["n_examples"] == 4_000
        assert "smooth_ece" in found["before"]["metrics"]
        files = called_for_json("evaluate", *(folder / f"part-{i}.parquet" for i in range(5)))
        assert files["before"] == found["before"]
        assert called_for_json("evaluate", f"{folder}/*.parquet")["before"] == found["before"]

    @pytest.mark.usefixtures("few_are_held")
    def test_in_one_pass(self, folder: Path, tmp_path: Path) -> None:
        result = call("evaluate", folder, "--output", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert "4,000 examples in 5 files, 3 classes" in result.stdout
        assert names_in(tmp_path / "out") == {"report.md", "report.html", "report.json", "figures"}
        found = json.loads((tmp_path / "out" / "report.json").read_text())
        table = all_rows()
        metrics = found["before"]["metrics"]
        for key, metric in (("ece", expected_calibration_error), ("nll", negative_log_likelihood)):
            assert metrics[key]["value"] == pytest.approx(
                metric(probabilities(table), label_ids(table)), abs=1e-9
            )
        single = tmp_path / "one.csv"
        table.to_csv(single, index=False)
        again = called_for_json("evaluate", single)
        assert again["n_files"] == 1
        for key, metric in metrics.items():
            assert again["before"]["metrics"][key]["value"] == pytest.approx(metric["value"], abs=1e-7)

    @pytest.mark.slow
    @pytest.mark.usefixtures("few_are_held")
    def test_workers_and_order_change_nothing(self, folder: Path) -> None:
        found = called_for_json("evaluate", folder, "--by", "country", "--weight-column", "w", "--workers", 1)
        assert (
            called_for_json("evaluate", folder, "--by", "country", "--weight-column", "w", "--workers", 2)
            == found
        )

    def test_slices_and_weights(self, folder: Path) -> None:
        found = called_for_json("evaluate", folder, "--by", "country,length", "--weight-column", "w")
        table = all_rows()
        assert [each["column"] for each in found["slices"]] == ["country", "length"]
        assert len(found["slices"][1]["slices"]) == 5
        for each in found["slices"][0]["slices"]:
            rows = table[table["country"] == each["name"]]
            assert each["n_rows"] == len(rows)
            logs = -np.log(probabilities(rows)[np.arange(len(rows)), label_ids(rows)])
            assert each["nll"]["value"] == pytest.approx(np.average(logs, weights=rows["w"]), rel=1e-9)
            assert each["share"] == pytest.approx(rows["w"].sum() / table["w"].sum())
        assert found["weighted"]
        assert found["effective_rows"] == pytest.approx(table["w"].sum() ** 2 / (table["w"] ** 2).sum())

    def test_with_a_model(self, workplace: Path, tmp_path: Path) -> None:
        table = pandas.read_csv(workplace / "data.csv").assign(
            country=lambda t: np.where(t.index % 2, "de", "fr")
        )
        table.to_csv(tmp_path / "data.csv", index=False)
        found = called_for_json(
            "evaluate", workplace / "model", "--data", tmp_path / "data.csv", "--by", "country",
            "--predictions", tmp_path / "kept",
        )  # fmt: skip
        plain = called_for_json("evaluate", workplace / "model", "--data", workplace / "data.csv")
        for key in ("accuracy", "nll", "ece"):
            wanted = plain["before"]["metrics"][key]["value"]
            assert found["before"]["metrics"][key]["value"] == pytest.approx(wanted, abs=1e-7)
        assert [each["n_rows"] for each in found["slices"][0]["slices"]] == [120, 120]
        assert found["about"] == plain["about"] | {"options": found["about"]["options"], "name": "data.csv"}
        assert names_in(tmp_path / "kept") == {"_run.json", "part-00000-of-00001.parquet"}
        assert called_for_json("evaluate", tmp_path / "kept", "--by", "country")["slices"] == found["slices"]
        other = call(
            "evaluate",
            workplace / "model",
            "--data",
            workplace / "test.csv",
            "--predictions",
            tmp_path / "kept",
        )
        assert_refused(other, r"predictions to be of this model and these rows, got those of another run")


class TestRefused:
    def test_what_needs_the_rows(self, folder: Path) -> None:
        result = call("evaluate", folder, "--by", "country", "--ood-data", folder / "part-0.parquet")
        assert_refused(result, "--ood-data to go with one file of rows that are held")
        assert_refused(call("evaluate", folder, "--by", "contry"), "did you mean 'country'")
        assert_refused(call("evaluate", "a/model", "b/model"), "name existing files|readable")

    @pytest.mark.usefixtures("few_are_held")
    def test_too_many_rows_for_decide(self, folder: Path) -> None:
        result = call("decide", folder, "--accuracy", 0.9, "--method", "temperature")
        assert result.exit_code == 0, result.output
        assert "a sample of 1,000 of the 4,000 rows" in " ".join(result.stderr.split())

    @pytest.mark.deep
    @pytest.mark.usefixtures("few_are_held")
    def test_a_bad_row_keeps_what_was_done(self, folder: Path, tmp_path: Path) -> None:
        """Amid the work: one sentence with file and row; after the repair the same command goes on."""
        work = tmp_path / "work"
        work.mkdir()
        for i in range(5):
            table = rows_of(800, i)
            if i == 3:
                table.loc[700, "logit_law"] = np.nan
            table.to_parquet(work / f"part-{i}.parquet", row_group_size=300)
        options = ("evaluate", work, "--by", "country", "--output", tmp_path / "out")
        message = r"probs to be finite, got nan in row 700 of part-3.parquet; .*diverged"
        assert_refused(call(*options), message)
        assert names_in(tmp_path / "out") == {"unfinished.npz"}
        rows_of(800, 3).to_parquet(work / "part-3.parquet", row_group_size=300)
        seen: list[int] = []
        from hf_calib.commands.in_shards import Measuring

        def counting(self: Measuring, shards: object, number: int, piece: object) -> object:
            seen.append(number)
            return measure(self, shards, number, piece)  # type: ignore[arg-type]

        measure = Measuring.__call__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Measuring, "__call__", counting)
            result = call(*options, "--json")
        assert set(seen) == {3, 4}
        assert (
            json.loads(result.stdout)["slices"]
            == called_for_json("evaluate", folder, "--by", "country")["slices"]
        )
        assert "unfinished.npz" not in names_in(tmp_path / "out")

    @pytest.mark.usefixtures("few_are_held")
    def test_other_options_do_not_go_on(self, folder: Path, tmp_path: Path) -> None:
        found = shards.open_shards(str(folder))
        first = in_shards.Unfinished(tmp_path / "unfinished.npz", "options")
        begun = TallyByFile(found)
        for piece in found.pieces[:5]:  # a file, and a part of the next
            begun.merge(in_shards.Measuring(15)(found, *piece))
        first.write(begun)
        again = first.read(found)
        assert (again.done, again.n_rows) == (5, 1_400)
        for name in ("whole", "begun"):
            states = [getattr(each, name).states["before"].to_bytes() for each in (again, begun)]
            assert states[0] == states[1]
        assert in_shards.Unfinished(tmp_path / "unfinished.npz", "others").read(found).done == 0
        (tmp_path / "unfinished.npz").write_bytes(b"half of it")
        assert first.read(found).done == 0


class TestCalibrate:
    @pytest.mark.usefixtures("few_are_held")
    def test_a_sample_and_files_of_the_same_names(self, folder: Path, tmp_path: Path) -> None:
        result = call("calibrate", folder, "--method", "temperature", "--output", tmp_path)
        assert result.exit_code == 0, result.output
        assert "Reported on the other half of the rows." in result.stdout
        assert names_in(tmp_path / "predictions") == {f"part-{i}.parquet" for i in range(5)}
        scaler = Scaler.from_pretrained(tmp_path)
        assert scaler.temperature_ == pytest.approx(T, rel=0.1)
        for i in range(5):
            table, found = (
                rows_of(800, i),
                pq.read_table(tmp_path / "predictions" / f"part-{i}.parquet").to_pandas(),
            )
            assert list(found.columns) == [
                *(f"prob_{name}" for name in NAMES),
                "label",
                "country",
                "length",
                "w",
            ]
            pandas.testing.assert_frame_equal(found.iloc[:, 3:], table.iloc[:, 3:])
            wanted = scaler.predict_proba(table.iloc[:, :3].to_numpy(np.float64))
            np.testing.assert_allclose(found.iloc[:, :3], wanted, atol=1e-12)
        again = called_for_json("evaluate", tmp_path / "predictions")
        assert again["before"]["metrics"]["ece"]["value"] < 0.03

    @pytest.mark.usefixtures("few_are_held")
    @pytest.mark.parametrize("method", ["temperature", pytest.param("vector", marks=pytest.mark.deep)])
    def test_all_rows(self, method: str, folder: Path, tmp_path: Path) -> None:
        """Sums of gradients over files give the fit on all rows at once."""
        test = tmp_path / "test.parquet"
        rows_of(500, 9).to_parquet(test)
        words = ("--method", method, "--all-rows", "--test-data", test, "--output", tmp_path / "out")
        result = call("calibrate", folder, *words)
        assert result.exit_code == 0, result.output
        assert "fitted on 4,000 rows" in result.stdout
        table = all_rows()
        logits, labels = table.iloc[:, :3].to_numpy(np.float64), label_ids(table)
        found = Scaler.from_pretrained(tmp_path / "out")
        wanted = (TemperatureScaling() if method == "temperature" else VectorScaling()).fit(logits, labels)
        np.testing.assert_allclose(found.predict_proba(logits), wanted.predict_proba(logits), atol=2e-5)
        assert names_in(tmp_path / "out" / "predictions") == {"test.parquet"}
        better = negative_log_likelihood(found.predict_proba(logits), labels)
        assert better <= negative_log_likelihood(wanted.predict_proba(logits), labels) + 1e-12

    @pytest.mark.usefixtures("few_are_held")
    @pytest.mark.parametrize(
        "words",
        [
            (),
            pytest.param(("--method", "vector"), marks=pytest.mark.slow),
            pytest.param(("--method", "vector", "--all-rows"), marks=pytest.mark.deep),
        ],
    )
    def test_weights(self, words: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
        test = tmp_path / "test.parquet"
        rows_of(500, 9).to_parquet(test)
        rest = ("--weight-column", "w", "--test-data", test, "--output", tmp_path / "out")
        found = called_for_json("calibrate", folder, *words, *rest)
        assert found["method"] == (words[1] if words else "temperature")
        assert found["report"]["weighted"]
        table = all_rows()
        logits, labels = table.iloc[:, :3].to_numpy(np.float64), label_ids(table)
        wanted = VectorScaling() if words else TemperatureScaling()
        wanted.fit(logits, labels, sample_weight=table["w"])
        probs = Scaler.from_pretrained(tmp_path / "out").predict_proba(logits)
        np.testing.assert_allclose(probs, wanted.predict_proba(logits), atol=2e-4)

    @pytest.mark.deep
    @pytest.mark.usefixtures("few_are_held")
    def test_finished_files_are_not_done_again(self, folder: Path, tmp_path: Path) -> None:
        work = tmp_path / "work"
        work.mkdir()
        for i in range(5):
            rows_of(800, i).to_parquet(work / f"part-{i}.parquet")
        broken = rows_of(800, 4)
        broken.loc[3, "label"] = "sport"
        broken.to_parquet(tmp_path / "bad.parquet")
        (work / "part-4.parquet").write_bytes((tmp_path / "bad.parquet").read_bytes())
        test = ("--test-data", work, "--method", "temperature", "--output", tmp_path / "out")
        fit = folder / "part-0.parquet"
        assert_refused(call("calibrate", fit, *test), "in row 3 of part-4.parquet")
        written = {
            path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "predictions").glob("*.parquet")
        }
        assert {path.name for path in written} == {f"part-{i}.parquet" for i in range(4)}
        rows_of(800, 4).to_parquet(work / "part-4.parquet")
        result = call("calibrate", fit, *test, "--json")
        assert result.exit_code == 0, result.output
        assert {path: path.stat().st_mtime_ns for path in written} == written
        assert json.loads(result.stdout)["report"]["n_examples"] == 4_000
        assert names_in(tmp_path / "out" / "predictions") == {f"part-{i}.parquet" for i in range(5)}

    @pytest.mark.usefixtures("few_are_held")
    def test_refused(self, folder: Path, tmp_path: Path) -> None:
        at = ("--output", tmp_path / "out")
        result = call("calibrate", folder, "--method", "matrix", "--all-rows", *at)
        assert_refused(result, "--all-rows to go with temperature or vector, by nll, got matrix by nll")
        result = call("calibrate", folder, "--method", "spline", "--weight-column", "w", *at)
        assert_refused(
            result, "--weight-column to go with a method of temperature, .*got spline, which has no weighted"
        )
        result = call("calibrate", folder, "--target-data", folder / "part-0.parquet", *at)
        assert_refused(result, "--target-data to go with rows that are held")
        assert not (tmp_path / "out").exists()
        (tmp_path / "in" / "predictions").mkdir(parents=True)
        rows_of(2_000, 0).to_parquet(tmp_path / "in" / "predictions" / "a.parquet")
        result = call("calibrate", tmp_path / "in" / "predictions", "--output", tmp_path / "in")
        assert_refused(result, "output to be another folder than the predictions'")


def test_reports_of_many_rows_are_compared(folder: Path, tmp_path: Path, few_are_held: None) -> None:
    found = call("report", folder, folder / "part-0.parquet", "--output", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "not the same examples" in found.stdout
    assert names_in(tmp_path / "out") == {"comparison.md", "comparison.html", "comparison.json", "figures"}


@pytest.mark.deep
def test_killed_and_gone_on(tmp_path: Path) -> None:
    """SIGKILL to all processes amid a pass; the same command gives what an uninterrupted one does, bit for bit."""
    for i in range(24):
        pandas.concat([rows_of(60_000, i)] * 5).to_parquet(tmp_path / f"part-{i:02}.parquet")
    words = ["evaluate", f"{tmp_path}/*.parquet", "--by", "country,length", "--workers", "2", "--output"]
    often = "import hf_calib.predictions.passes as passes; passes._SECONDS_BETWEEN_SAVES = 0"
    program = f"{often}; from hf_calib.cli import app; app()"
    command = [sys.executable, "-c", program, *words, str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    kept = tmp_path / "out" / "unfinished.npz"
    deadline = time.monotonic() + 120
    while not kept.is_file():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = np.load(kept)["header"].tobytes()
    assert 0 < json.loads(done)["done"] < 24
    assert run(*words, str(tmp_path / "out")).returncode == 0
    assert run(*words, str(tmp_path / "whole")).returncode == 0
    records = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("out", "whole")]
    assert records[0] == records[1]
    assert records[0]["n_examples"] == 24 * 300_000


@pytest.mark.deep
def test_a_model_on_two_processes(workplace: Path, tmp_path: Path) -> None:
    """Equal to one process, bit for bit; a killed run keeps its files."""
    table = pandas.concat([pandas.read_csv(workplace / "data.csv")] * 40, ignore_index=True)  # three files
    table.to_csv(tmp_path / "data.csv", index=False)
    words = ["evaluate", str(workplace / "model"), "--data", str(tmp_path / "data.csv"), "--output"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    both = subprocess.run(
        [*launch, "hf_calib.cli", *words, str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert both.returncode == 0, both.stderr[-3000:]
    assert both.stdout.count("Calibration report: model") == 1
    one = run(*words, str(tmp_path / "one"), "--predictions", str(tmp_path / "kept"))
    assert one.returncode == 0, one.stderr
    records = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two")]
    assert records[0] == records[1]
    files = [sorted(path.glob("*.parquet")) for path in (tmp_path / "kept", tmp_path / "two" / "predictions")]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for first, second in zip(*files, strict=True):
        assert pq.read_table(first).equals(pq.read_table(second))
    files[0][1].unlink()
    stamps = {path: path.stat().st_mtime_ns for path in files[0] if path.is_file()}
    again = run(*words, str(tmp_path / "again"), "--predictions", str(tmp_path / "kept"))
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert json.loads((tmp_path / "again" / "report.json").read_text()) == records[0]
