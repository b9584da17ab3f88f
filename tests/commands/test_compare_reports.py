"""`hf-calib compare-reports`: files and reports side by side."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

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
        assert called_for_json("compare-reports", folder / "report.json")[
            "reports"
        ] == {"test": report}
    return folder


class TestReport:
    def test_files_and_reports_side_by_side(
        self, workplace: Path, tmp_path: Path
    ) -> None:
        scaled = ("calibrate", workplace / "data.npz", "--method", "temperature")
        assert call(*scaled, "--output", tmp_path / "scaled").exit_code == 0
        words = (
            "compare-reports",
            workplace / "data.npz",
            workplace / "test.npz",
            tmp_path / "scaled",
        )
        result = call(*words, "--output", tmp_path / "compared")
        assert result.exit_code == 0, result.output
        files = {"comparison.md", "comparison.html", "comparison.json", "figures"}
        assert names_in(tmp_path / "compared") == files
        assert "The examples are not the same" in result.stdout
        assert re.search(
            r"Accuracy( +0\.\d{4}){4}", result.stdout
        )  # the scaled one before and after
        found = called_for_json(*words)
        assert found == json.loads(
            (tmp_path / "compared" / "comparison.json").read_text()
        )
        alone = called_for_json("evaluate", workplace / "test.npz")
        assert (
            found["reports"][str(workplace / "test.npz")] == alone
        )  # two are named "data"
        assert [report["n_examples"] for report in found["reports"].values()] == [
            240,
            80,
            120,
        ]

    def test_names_and_notes_are_no_markup(
        self, workplace: Path, saved: Path, tmp_path: Path
    ) -> None:
        """Of files, and of a report.json that somebody else has written."""
        hostile = "<script>alert(1)<script> a|b"
        shutil.copy(workplace / "test.npz", tmp_path / f"{hostile}.npz")
        (tmp_path / "made").mkdir()
        record = json.loads((saved / "report.json").read_text())
        record |= {"name": hostile, "warnings": [hostile], "diagnosis": [hostile]}
        (tmp_path / "made" / "report.json").write_text(json.dumps(record))
        words = ("compare-reports", tmp_path / f"{hostile}.npz", tmp_path / "made")
        result = call(*words, "--output", tmp_path / "compared")
        assert result.exit_code == 0, result.output
        written = (tmp_path / "compared" / "comparison.md").read_text()
        assert "<script" not in written
        assert "&lt;script&gt;alert(1)" in written
        rows = [line for line in written.splitlines() if line[:1] == "|"]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}

    def test_refused(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "broken.json").write_text("{")
        refused = call("compare-reports", tmp_path / "broken.json")
        assert_refused(refused, "be readable as JSON, got .*broken.json")
        twice = call("compare-reports", workplace / "data.npz", workplace / "data.npz")
        assert_refused(twice, "expected the sources to differ")
        assert_refused(
            call("compare-reports", tmp_path),
            "expected predictions to name existing files",
        )
        call(
            "evaluate",
            workplace / "data.npz",
            "--output",
            tmp_path / "a",
            "--n-bins",
            10,
        )
        mixed = call(
            "compare-reports",
            tmp_path / "a",
            workplace / "test.npz",
            "--output",
            tmp_path / "b",
        )
        assert_refused(
            mixed, "the same number of bins, got 10 and 15; make the reports again"
        )
        assert not (tmp_path / "b").exists()
