"""`hf-calib report`: files and reports side by side."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_calib.commands.report import compare_reports
from hf_calib.plots.binned import reliability_of_sums
from tests.helpers.commands import assert_refused, call, called_for_json, names_in
from tests.helpers.reports import few_resamples, no_figures, quick_reports  # noqa: F401


@pytest.fixture(scope="module")
def saved(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on 80 rows."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        few_resamples(patch)
        no_figures(patch)
        report = called_for_json("evaluate", workplace / "test.npz", "--output", folder)
        assert called_for_json("report", folder / "report.json")["reports"] == {"test": report}
    return folder


class TestReport:
    def test_files_and_reports_side_by_side(self, workplace: Path, tmp_path: Path) -> None:
        scaled = ("calibrate", workplace / "data.npz", "--method", "temperature")
        assert call(*scaled, "--output", tmp_path / "scaled").exit_code == 0
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

    def test_names_and_notes_are_no_markup(self, workplace: Path, saved: Path, tmp_path: Path) -> None:
        """Of files, and of a report.json that somebody else has written."""
        hostile = "<script>alert(1)<script> a|b"
        shutil.copy(workplace / "test.npz", tmp_path / f"{hostile}.npz")
        (tmp_path / "made").mkdir()
        record = json.loads((saved / "report.json").read_text())
        record |= {"name": hostile, "warnings": [hostile], "diagnosis": [hostile]}
        (tmp_path / "made" / "report.json").write_text(json.dumps(record))
        words = (tmp_path / f"{hostile}.npz", tmp_path / "made")
        result = call("report", *words, "--output", tmp_path / "compared")
        assert result.exit_code == 0, result.output
        written = (tmp_path / "compared" / "comparison.md").read_text()
        assert "<script" not in written
        assert "&lt;script&gt;alert(1)" in written
        rows = [
            line
            for line in (tmp_path / "compared" / "comparison.md").read_text().splitlines()
            if line[:1] == "|"
        ]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}

    def test_columns_that_do_not_fit_follow_below(self, saved: Path, tmp_path: Path) -> None:
        record = (saved / "report.json").read_text()
        files = [tmp_path / f"predictions_{i}.json" for i in range(7)]
        for path in files:
            path.write_text(record.replace('"name": "test"', f'"name": "{path.stem}"'))
        shown = call("report", *files).stdout
        assert shown.count("Calibration compared") == 2
        assert re.findall(r"predictions_\d", shown) == [path.stem for path in files]
        assert sum(line.count("0.") for line in shown.splitlines() if "Accuracy" in line) == 7

    def test_a_saved_report_draws_what_its_predictions_draw(
        self, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hf_calib.report.comparison.reliability_of_sums", reliability_of_sums)
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
        assert_refused(call("report", tmp_path), "expected predictions to name existing files")
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
    def test_an_edited_report(self, change: Any, message: str, saved: Path, tmp_path: Path) -> None:
        record = json.loads((saved / "report.json").read_text())
        change(record)
        (tmp_path / "report.json").write_text(json.dumps(record).replace('"1e999 "', "1e999"))
        assert_refused(call("report", tmp_path), message)

    @pytest.mark.parametrize("text", ["[]", "3", "null", '"report"', "[" * 100_000])
    def test_json_that_is_no_report(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "report.json").write_text(text)
        assert_refused(
            call("report", tmp_path), "expected the report to be (an object, got|readable as JSON, got)"
        )
