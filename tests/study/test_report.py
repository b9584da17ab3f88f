"""The report of a study: it says what the results say, whatever the labels hold, and is written as a whole."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_calib._text import safe
from hf_calib.report.document import Image
from hf_calib.study.content import document_of
from hf_calib.study.figures import alt_texts, best_map, draw_figures
from hf_calib.study.report import write_study_report
from hf_calib.study.results import Difference, Estimate, StudyResults
from hf_calib.study.text import best_first, difference_table, main_table, summary, what_was_trained
from tests.helpers.pictures import written
from tests.helpers.study_results import TITLES, study_results

EVIL = (
    "cross_entropy",
    "a|b <script>alert(1)</script> & $\\frac{$ [x](javascript:y)",
    "=1+1\n# x " + "long " * 30,
)
REASON = "exit code 1\r\x1b[31m50%|#####|\n<b>ValueError</b>: loss is nan | at *step* 3"


@cache
def plain() -> StudyResults:
    return study_results(("cross_entropy", "focal", "brier"), methods=("none", "auto", "temperature"))


@cache
def evil() -> StudyResults:
    results = study_results(EVIL, missing={(EVIL[1], 1): REASON})
    undefined = {(EVIL[1], 0, "none", "nll"): math.nan, (EVIL[1], 0, "none", "ece"): math.inf}
    means = dict(results.means) | {(EVIL[1], "none", "nll"): Estimate(math.nan, math.nan, math.nan, 2)}
    return replace(
        results,
        values={**results.values, **undefined},
        means=means,
        advice=(f"Take {EVIL[1]}.",),
        notes=(EVIL[2],),
    )


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


# Tables


def test_the_main_table_shows_the_means() -> None:
    results = plain()
    header, rows = main_table(results)
    assert [" ".join(title.split()) for title in header] == [
        "loss",
        "accuracy",
        "accuracy auto",
        "accuracy temperature",
        *(f"{metric} {method}" for metric in ("NLL", "ECE") for method in ("no map", "auto", "temperature")),
    ]
    for name, *cells in rows:
        keys = [*product(("none", "auto", "temperature"), ["accuracy"])]
        keys += [*product(("none", "auto", "temperature"), ["nll"])]
        keys += product(("none", "auto", "temperature"), ["ece"])
        for cell, (method, metric) in zip(cells, keys, strict=True):
            value, low, high, _ = results.means[name, method, metric]
            assert cell == f"{value:.4f} [{low:.4f}, {high:.4f}]"


def test_losses_come_in_the_order_of_their_lowest_nll() -> None:
    results = plain()
    best = {
        loss: min(results.means[loss, method, "nll"].value for method in results.methods)
        for loss in results.losses
    }
    assert best_first(results) == sorted(best, key=best.__getitem__)
    assert best_first(replace(results, means={})) == list(results.losses)


def test_a_word_only_where_the_difference_is_beyond_chance() -> None:
    def verdict(metric: str, value: float, p: float | None) -> str:
        found = {("focal", "none", metric): Difference(value, value - 1, value + 1, p, p, 3)}
        ((_, difference, word),) = difference_table(replace(plain(), differences=found), [metric])[1]
        assert difference == f"{value:+.4f} [{value - 1:+.4f}, {value + 1:+.4f}]"
        return word

    assert verdict("nll", -0.1, 0.049) == "0.049 better"
    assert verdict("nll", 0.1, 0.0001) == "< 0.001 worse"
    assert verdict("accuracy", 0.1, 0.01) == "0.01 better"
    assert verdict("accuracy", -0.1, 0.01) == "0.01 worse"
    assert verdict("ece", -0.1, 0.05) == "0.05"
    assert verdict("ece", -0.1, None) == "-"


def test_the_baseline_is_not_compared_with_itself() -> None:
    names = [row[0] for row in difference_table(plain(), ["nll", "ece"])[1]]
    assert len(names) == 3 * 3 - 1
    assert "cross_entropy with temperature" not in names


def test_one_seed_has_values_without_intervals() -> None:
    results = study_results(seeds=(7,))
    cells = [cell for row in main_table(results)[1] for cell in row[1:]]
    assert all(re.fullmatch(r"\d\.\d{4}", cell) for cell in cells)
    assert {row[2] for row in difference_table(results, ["nll"])[1]} == {"-"}


def test_a_missing_training_is_named_with_its_reason_in_one_line() -> None:
    lines = what_was_trained(evil())
    assert "1 of 9 trainings are missing." in lines
    (line,) = [line for line in lines if "is missing:" in line]
    assert line == (
        f"{EVIL[1]}, seed 1, is missing: exit code 1 [31m50%|#####| <b>ValueError</b>: loss is nan | at *step* 3"
    )
    header, rows = main_table(evil())
    assert header[1] == "seeds"
    assert {row[0]: row[1] for row in rows} == {EVIL[0]: "3 of 3", EVIL[1]: "2 of 3", EVIL[2]: "3 of 3"}


# Every form, in every case


@pytest.fixture(scope="module")
def written_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report of `evil`; drawing takes its time."""
    folder = tmp_path_factory.mktemp("report") / "study"
    write_study_report(evil(), folder)
    return folder


def test_the_files_of_a_report(written_report: Path) -> None:
    names = {str(path.relative_to(written_report)) for path in written_report.rglob("*") if path.is_file()}
    figures = {f"figures/{name}.png" for name in ("differences", "reliability")}
    assert names == {"report.md", "report.html", "report.json", "results.csv", *figures}
    markdown = (written_report / "report.md").read_text(encoding="utf-8")
    assert {f"figures/{name}.png" for name in re.findall(r"\]\(figures/(\w+)\.png\)", markdown)} == figures
    text = (written_report / "report.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == json.loads(json.dumps(evil().to_dict()))


FIRST = ("evil", "baseline_only", "nothing")


@pytest.mark.parametrize(
    "case", [*FIRST, *(pytest.param(case, marks=pytest.mark.deep) for case in CASES if case not in FIRST)]
)
@pytest.mark.slow
def test_every_case_has_its_text_and_figures(case: str) -> None:
    figures, n_tables = {
        "nothing": (set(), 0),
        "baseline_only": ({"reliability"}, 7),
    }.get(case, ({"differences", "reliability"}, 14))
    results = CASES[case]()
    assert set(draw_figures(results)) == figures
    page = _Page(document_of(results, {}).to_html())
    markdown = document_of(results, dict.fromkeys(sorted(figures), Image(b"", 1))).to_markdown()
    tables = re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE)
    assert page.tags.count("table") == len(tables) == n_tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    json.dumps(results.to_dict(), allow_nan=False)
    assert all(len(line) <= 110 for line in summary(results).splitlines())


def test_what_comes_from_data_is_escaped_in_markdown() -> None:
    text = document_of(evil(), dict.fromkeys(("differences",), Image(b"", 1))).to_markdown()
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
    results = evil()
    page = _Page((written_report / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "b", "link", "iframe"} & set(page.tags)
    assert len(page.links) == 2
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert page.tags.count("h1") == 1
    for words in (EVIL[1], *results.advice, *TITLES.values(), "nan | at *step* 3"):
        assert words in page.text
    _, rows = main_table(results)
    assert rows[0][2].replace(" [", "\n[") in page.text


# Numbers for other programs


def test_the_record_holds_every_number_and_no_nan() -> None:
    results = evil()
    record = results.to_dict()
    json.dumps(record, allow_nan=False)

    def is_same(number: float | None, recorded: float | None) -> bool:
        return recorded == (number if number is None or math.isfinite(number) else None)

    tables: dict[str, tuple[Any, ...]] = {
        "means": ("loss", "method", "metric"),
        "differences": ("loss", "method", "metric"),
    }
    for name, key in tables.items():
        table = getattr(results, name)
        assert len(record[name]) == len(table)
        for row in record[name]:
            for field, number in table[tuple(row[part] for part in key)]._asdict().items():
                assert is_same(number, row[field])
    assert [row["value"] for row in record["values"]].count(None) == 2
    assert record["baseline"] == {"loss": "cross_entropy", "method": "temperature"}
    assert record["missing"] == [{"loss": EVIL[1], "seed": 1, "reason": REASON}]
    for row in record["reliability"]:
        confidences, correct = results.panels[row["loss"], row["method"]]
        counts = [each["count"] for each in row["bins"]]
        assert sum(counts) == len(confidences)
        assert np.dot(counts, [each["accuracy"] for each in row["bins"]]) == pytest.approx(correct.sum())


def test_the_tidy_table_reads_back_as_the_values(written_report: Path) -> None:
    results = evil()
    with (written_report / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["loss", "seed", "method", "metric", "value"]
    found = {
        (row["loss"], int(row["seed"]), row["method"], row["metric"]): float(row["value"] or "nan")
        for row in rows
    }
    assert found.keys() == results.values.keys()
    for key, value in results.values.items():
        assert found[key] == value or not math.isfinite(value)


# Figures


def test_the_map_of_the_reliability_diagrams_is_the_best_by_nll() -> None:
    results = plain()
    means = dict(results.means)
    for loss in results.losses:
        means[loss, "auto", "nll"] = Estimate(0.1, None, None, 3)
    assert best_map(replace(results, means=means)) == "auto"
    means[results.losses[0], "auto", "nll"] = Estimate(9.0, None, None, 3)
    assert best_map(replace(results, means=means)) == "temperature"
    assert best_map(study_results(methods=("none",))) is None


@pytest.mark.slow
def test_reliability_diagrams_are_of_the_losses_with_the_lowest_nll() -> None:
    results = study_results([f"loss {k}" for k in range(4)], seeds=(0,))
    texts = written(draw_figures(results)["reliability"])
    assert any("accuracy of the bin" in text for text in texts)
    assert [f"loss {k}" for k in range(4) if f"loss {k}" in texts] == sorted(best_first(results)[:3])


def test_figures_are_described_in_numbers() -> None:
    results = plain()
    texts = alt_texts(results)
    count = sum(
        found.p_corrected is not None and found.p_corrected < 0.05
        for key, found in results.differences.items()
        if key[2] == "ece"
    )
    assert f"ECE: {count} of 8" in texts["differences"]


# The terminal


def test_the_summary_is_the_table_and_the_advice() -> None:
    results = plain()
    lines = summary(results).splitlines()
    assert lines[0].startswith("3 losses x 3 seeds, measured on 300 test rows with 4 classes")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(results.losses)}
    for loss in results.losses:
        keys = [("none", "accuracy"), *((m, key) for key in ("nll", "ece") for m in results.methods)]
        assert rows[loss] == [f"{results.means[(loss, *key)].value:.4f}" for key in keys]
    assert all(sentence in "\n".join(lines) for sentence in results.advice)


def test_maps_without_room_are_left_out_of_the_summary_and_named() -> None:
    methods = ("none", "temperature", "vector", "isotonic", "per_label_temperature", "dirichlet")
    text = summary(study_results([f"a_loss_with_a_long_name_{k}" * 3 for k in range(3)], methods=methods))
    assert all(len(line) <= 110 for line in text.splitlines())
    assert re.search(r"Also measured, and in report.md: .*dirichlet\.", text)
    assert "a_loss_with_a_long" in text


# Files


def test_an_old_report_is_replaced_with_its_figures_and_others_files_stay(
    written_report: Path, tmp_path: Path
) -> None:
    shutil.copytree(written_report, tmp_path, dirs_exist_ok=True)
    (tmp_path / "study.json").write_text("{}")
    (tmp_path / "figures" / "mine.png").write_bytes(b"mine")
    write_study_report(nothing_finished(), tmp_path)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["mine.png"]
    assert (tmp_path / "study.json").read_text() == "{}"
    assert json.loads((tmp_path / "report.json").read_text())["means"] == []
    assert "no training is finished" in (tmp_path / "report.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "figures",
        "report.html",
        "report.json",
        "report.md",
        "results.csv",
        "study.json",
    ]


def test_a_folder_in_the_way_is_refused_and_nothing_is_moved(tmp_path: Path) -> None:
    write_study_report(nothing_finished(), tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    (tmp_path / "results.csv").unlink()
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(ValueError, match=r"results.csv to be a file, got a folder"):
        write_study_report(study_results((), methods=("none",)), tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "results.csv",
    ]
