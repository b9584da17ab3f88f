"""The report of a study: it says what the results say, whatever the labels hold, and is written as a whole."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pandas
import pytest
from rich.console import Console

from hf_calib._text import safe
from hf_calib.report.document import Image
from hf_calib.study.report import (
    difference_table,
    document_of,
    draw_figure,
    mean_table,
    what_was_trained,
    write_study_report,
)
from hf_calib.study.results import KEY, StudyResults
from tests.helpers.study_results import TITLES, rows, study_results

EVIL = (
    "cross_entropy",
    "a|b <script>alert(1)</script> & $\\frac{$ [x](javascript:y)",
    "=1+1\n# x " + "long " * 30,
)
REASON = "exit code 1\r\x1b[31m50%|#####|\n<b>ValueError</b>: loss is nan | at *step* 3"
MAIN = {
    (method, metric): f"{metric} {method}" for metric in ("nll", "ece") for method in ("none", "temperature")
}


@cache
def plain() -> StudyResults:
    return study_results(("cross_entropy", "focal", "brier"), methods=("none", "auto", "temperature"))


@cache
def evil() -> StudyResults:
    return replace(study_results(EVIL, missing={(EVIL[1], 1): REASON}), remarks=(EVIL[2],))


def nothing_finished() -> StudyResults:
    return study_results(missing=dict.fromkeys(product(("cross_entropy", "focal"), range(3)), "killed"))


CASES = {
    "plain": plain,
    "evil": evil,
    "nothing": nothing_finished,
    "one_loss": lambda: study_results(("focal",)),
    "one_seed": lambda: study_results(seeds=(7,)),
    "no_map": lambda: study_results(methods=("none",)),
    "baseline_only": lambda: study_results(("focal",), methods=("none",), seeds=(0,)),
    "first_loss_failed": lambda: study_results(
        missing={("cross_entropy", seed): "killed" for seed in range(3)}
    ),
}


def test_a_table_shows_the_means_in_the_order_of_the_lowest_nll() -> None:
    results, means = plain(), rows(plain().means)
    header, table = mean_table(results, MAIN)
    assert header == ["loss", "nll none", "nll temperature", "ece none", "ece temperature"]
    best = {loss: min(means[loss, m, "nll"].value for m in results.methods) for loss in results.losses}
    assert [row[0] for row in table] == sorted(best, key=best.__getitem__)
    for loss, *cells in table:
        for cell, (method, metric) in zip(cells, MAIN, strict=True):
            _, value, low, high, _ = means[loss, method, metric]
            assert cell == f"{value:.4f} [{low:.4f}, {high:.4f}]"


def test_a_word_only_where_the_difference_is_beyond_chance() -> None:
    def verdict(metric: str, value: float, p: float) -> str:
        results = replace(plain())
        names = ["value", "low", "high", "p_corrected"]
        row = ("focal", "none", metric, value, value - 1, value + 1, p)
        results.__dict__["differences"] = pandas.DataFrame([row], columns=[*KEY, *names]).set_index(KEY)
        ((_, difference, word),) = difference_table(results, [metric])[1]
        assert difference == f"{value:+.4f} [{value - 1:+.4f}, {value + 1:+.4f}]"
        return word

    assert verdict("nll", -0.1, 0.049) == "0.049 better"
    assert verdict("nll", 0.1, 0.0001) == "< 0.001 worse"
    assert verdict("accuracy", 0.1, 0.01) == "0.01 better"
    assert verdict("accuracy", -0.1, 0.01) == "0.01 worse"
    assert verdict("ece", -0.1, 0.05) == "0.05"
    assert verdict("ece", -0.1, math.nan) == "-"


def test_one_seed_without_resamples_has_values_without_intervals() -> None:
    results = study_results(seeds=(7,))
    cells = [cell for row in mean_table(results, MAIN)[1] for cell in row[1:]]
    assert all(re.fullmatch(r"\d\.\d{4}", cell) for cell in cells)
    assert {row[2] for row in difference_table(results, ["nll"])[1]} == {"-"}


def test_a_missing_training_is_named_with_its_reason_in_one_line() -> None:
    lines = what_was_trained(evil())
    (line,) = [line for line in lines if "is missing:" in line]
    assert line == (
        f"{EVIL[1]}, seed 1, is missing: exit code 1 [31m50%|#####| <b>ValueError</b>: loss is nan | at *step* 3"
    )


@pytest.fixture(scope="module")
def written_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report of `evil`; drawing takes its time."""
    folder = tmp_path_factory.mktemp("report") / "study"
    write_study_report(evil(), folder)
    return folder


def test_the_files_of_a_report(written_report: Path) -> None:
    names = {str(path.relative_to(written_report)) for path in written_report.rglob("*") if path.is_file()}
    figures = {"figures/differences.png"}
    assert names == {"report.md", "report.html", "report.json", "results.csv", *figures}
    markdown = (written_report / "report.md").read_text(encoding="utf-8")
    assert {f"figures/{name}.png" for name in re.findall(r"\]\(figures/(\w+)\.png\)", markdown)} == figures
    text = (written_report / "report.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == evil().to_dict()
    read = pandas.read_csv(written_report / "results.csv", keep_default_na=False)
    pandas.testing.assert_frame_equal(read, evil().results(), check_exact=True, check_dtype=False)


FIRST = ("evil", "baseline_only", "nothing")


@pytest.mark.parametrize(
    "case", [*FIRST, *(pytest.param(case, marks=pytest.mark.deep) for case in CASES if case not in FIRST)]
)
@pytest.mark.slow
def test_every_case_has_its_text_and_figures(case: str) -> None:
    n_tables = {"nothing": 0, "baseline_only": 7}.get(case, 14)
    results = CASES[case]()
    figure = draw_figure(results)
    assert (figure is None) == (n_tables < 14)
    page = _Page(document_of(results).to_html())
    markdown = document_of(results, None if figure is None else Image(b"", 1)).to_markdown()
    assert ("figures/differences.png" in markdown) == (figure is not None)
    tables = re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE)
    assert page.tags.count("table") == len(tables) == n_tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    json.dumps(results.to_dict(), allow_nan=False)


def test_what_comes_from_data_is_escaped_in_markdown() -> None:
    text = document_of(evil(), Image(b"", 1)).to_markdown()
    assert "<script" not in text
    assert "<b>" not in text
    assert safe(EVIL[1]) in text
    assert "\x1b" not in text
    assert not re.search(r"^# x", text, re.MULTILINE)
    assert not re.search(r"(?<!\\)\]\(javascript", text)


class _Page(HTMLParser):
    """The elements of a page, its text, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_holds_everything_loads_nothing_and_runs_nothing(written_report: Path) -> None:
    page = _Page((written_report / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "b", "link", "iframe"} & set(page.tags)
    assert len(page.links) == 1
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert page.tags.count("h1") == 1
    _, table = mean_table(evil(), MAIN)
    for words in (
        EVIL[1],
        *evil().advice,
        *TITLES.values(),
        "nan | at *step* 3",
        table[0][1].replace(" [", "\n["),
    ):
        assert words in page.text


def test_the_record_holds_every_number_and_no_nan() -> None:
    results = evil()
    record = results.to_dict()
    json.dumps(record, allow_nan=False)
    for name in ("means", "differences"):
        table = getattr(results, name).reset_index()
        read = pandas.DataFrame(record[name]).astype(table.dtypes)
        pandas.testing.assert_frame_equal(read, table, check_exact=True)
    assert record["baseline"] == {"loss": "cross_entropy", "method": "temperature"}
    assert record["missing"] == [{"loss": EVIL[1], "seed": 1, "reason": REASON}]


@pytest.mark.parametrize("width", [60, 200])
def test_a_terminal_shows_the_table_and_the_advice(width: int) -> None:
    console = Console(width=width, record=True, quiet=False, force_terminal=False)
    document_of(evil()).show(console)
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert f"{rows(evil().means)['cross_entropy', 'none', 'nll'].value:.4f}" in text
    words = " ".join(text.split())
    assert all(" ".join(sentence.split()) in words for sentence in evil().advice if EVIL[2] not in sentence)
    assert "\x1b" not in text


def test_an_old_report_is_replaced_with_its_figures_and_others_files_stay(
    written_report: Path, tmp_path: Path
) -> None:
    shutil.copytree(written_report, tmp_path, dirs_exist_ok=True)
    (tmp_path / "study.json").write_text("{}")
    (tmp_path / "figures" / "mine.png").write_bytes(b"mine")
    write_study_report(nothing_finished(), tmp_path)
    assert (tmp_path / "figures" / "mine.png").read_bytes() == b"mine"
    assert (tmp_path / "study.json").read_text() == "{}"
    assert json.loads((tmp_path / "report.json").read_text())["means"] == []
    assert "no training is finished" in (tmp_path / "report.md").read_text()
    names = ["figures", "report.html", "report.json", "report.md", "results.csv", "study.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_folder_in_the_way_is_refused_and_nothing_is_moved(tmp_path: Path) -> None:
    write_study_report(nothing_finished(), tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    (tmp_path / "results.csv").unlink()
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(ValueError, match=r"results.csv to be a file, got a folder"):
        write_study_report(study_results((), methods=("none",)), tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before
    names = ["report.html", "report.json", "report.md", "results.csv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
