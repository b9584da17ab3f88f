"""The report of a study: it says what the results say, whatever the labels hold, and is written as a whole."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pandas
import pytest

from hf_calib._text import safe
from hf_calib.study.report import (
    difference_table,
    document_of,
    write_study_report,
)
from hf_calib.study.results import KEY, StudyResults
from tests.helpers.study_results import TITLES, study_results

EVIL = (
    "cross_entropy",
    "a|b <script>alert(1)</script> & $\\frac{$ [x](javascript:y)",
    "=1+1\n# x " + "long " * 30,
)
REASON = "exit code 1\r\x1b[31m50%|#####|\n<b>ValueError</b>: loss is nan | at *step* 3"
SHOWN = "seed 1, is missing: exit code 1 [31m50%|#####| <b>ValueError</b>: loss is nan | at *step* 3"


@cache
def evil() -> StudyResults:
    return replace(
        study_results(EVIL, missing={(EVIL[1], 1): REASON}), remarks=(EVIL[2],)
    )


def nothing_finished() -> StudyResults:
    return study_results(
        missing=dict.fromkeys(product(("cross_entropy", "focal"), range(3)), "killed")
    )


@pytest.mark.parametrize(
    ("metric", "value", "p", "word"),
    [
        ("nll", -0.1, 0.049, "0.049 better"),
        ("nll", 0.1, 0.0001, "< 0.001 worse"),
        ("accuracy", 0.1, 0.01, "0.01 better"),
        ("ece", -0.1, 0.05, "0.05"),
        ("ece", -0.1, math.nan, "-"),
    ],
)
def test_a_word_only_where_the_difference_is_beyond_chance(
    metric: str, value: float, p: float, word: str
) -> None:
    results = study_results()
    row = [("focal", "none", metric, value, value - 1, value + 1, p)]
    table = pandas.DataFrame(
        row, columns=[*KEY, "value", "low", "high", "p_corrected"]
    ).set_index(KEY)
    results.__dict__["differences"] = table
    ((_, *found),) = difference_table(results, [metric])[1]
    assert found == [f"{value:+.4f} [{value - 1:+.4f}, {value + 1:+.4f}]", word]


@pytest.mark.parametrize(
    ("make", "n_tables"),
    [
        (evil, 14),
        (nothing_finished, 0),
        (lambda: study_results(seeds=(7,)), 14),
        (lambda: study_results(("focal",), methods=("none",), seeds=(0,)), 7),
    ],
)
def test_every_case_has_its_text(
    make: Callable[[], StudyResults], n_tables: int
) -> None:
    results = make()
    page = _Page(document_of(results).to_html())
    markdown = document_of(results).to_markdown()
    tables = re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE)
    assert page.tags.count("table") == len(tables) == n_tables
    for table in tables:
        assert (
            len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()})
            == 1
        ), table


class _Page(HTMLParser):
    """The elements of a page, its text, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attributes if name in ("src", "href")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_files_hold_every_number_load_nothing_and_run_nothing(tmp_path: Path) -> None:
    results = evil()
    write_study_report(results, tmp_path / "study")
    names = {path.name for path in (tmp_path / "study").rglob("*") if path.is_file()}
    assert names == {
        "report.md",
        "report.html",
        "report.json",
        "results.csv",
    }
    record = json.loads(
        (tmp_path / "study/report.json").read_text("utf-8"), parse_constant=pytest.fail
    )
    assert record == results.to_dict()
    for name in ("means", "differences"):
        table = getattr(results, name).reset_index()
        read = pandas.DataFrame(record[name]).astype(table.dtypes)
        pandas.testing.assert_frame_equal(read, table, check_exact=True)
    assert record["baseline"] == {"loss": "cross_entropy", "method": "temperature"}
    assert record["missing"] == [{"loss": EVIL[1], "seed": 1, "reason": REASON}]
    read = pandas.read_csv(tmp_path / "study/results.csv", keep_default_na=False)
    pandas.testing.assert_frame_equal(
        read, results.results(), check_exact=True, check_dtype=False
    )
    page = _Page((tmp_path / "study/report.html").read_text(encoding="utf-8"))
    assert not {"script", "b", "link", "iframe"} & set(page.tags)
    assert page.links == []
    for words in (EVIL[1], *results.advice, *TITLES.values(), SHOWN):
        assert words in page.text
    markdown = (tmp_path / "study/report.md").read_text(encoding="utf-8")
    assert safe(EVIL[1]) in markdown
    assert not re.search(r"<script|<b>|\x1b|(?<!\\)\]\(javascript|(?m:^# x)", markdown)
