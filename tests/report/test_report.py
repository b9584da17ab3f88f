"""The report: its numbers are those of the metrics, its sentences true, and its documents safe and whole."""

from __future__ import annotations

import io
import json
import math
import re
from functools import cache
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from scipy.stats import binomtest

import hf_calib.metrics as metrics
from hf_calib.report import MEASURES, CalibrationReport, calibration_report
from hf_calib.report.diagnosis import claims
from hf_calib.report.document import Table
from tests.helpers.reports import cells
from tests.helpers.sampled import predictions

EVIL = ["a|b", "<script>alert(1)</script>", "$\\frac{$", "[x](javascript:y) `c`\n# d"]


def quick(
    probs: np.ndarray, labels: np.ndarray, **options: object
) -> CalibrationReport:
    return calibration_report(probs, labels, **{"n_resamples": 20, **options})


@cache
def overconfident() -> CalibrationReport:
    probs, labels = predictions(temperature=0.4)
    return quick(
        probs, labels, calibrated=predictions()[0], class_names=EVIL, name="m<i>| *x*"
    )


@cache
def overconfident_page() -> str:
    """As HTML: drawing its figures takes longer than all else."""
    return overconfident().to_html()


@cache
def overconfident_figures() -> dict[str, Figure]:
    return overconfident().figures()


def words(report: CalibrationReport) -> str:
    return " ".join(report.diagnosis)


# Numbers


def test_every_number_is_that_of_its_metric() -> None:
    probs, labels = predictions()
    report = quick(probs, labels, n_bins=10)
    expected = {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.negative_log_likelihood(probs, labels),
        "brier": metrics.brier_score(probs, labels),
        "root_brier": metrics.root_brier_score(probs, labels),
        "brier_calibration": metrics.brier_decomposition(
            probs, labels, n_bins=10
        ).calibration,
        "brier_refinement": metrics.brier_decomposition(
            probs, labels, n_bins=10
        ).refinement,
        "corp_miscalibration": metrics.corp_decomposition(probs, labels).miscalibration,
        "corp_discrimination": metrics.corp_decomposition(probs, labels).discrimination,
        "over_confidence": max(metrics.confidence_errors(probs, labels).over, 0),
        "under_confidence": max(metrics.confidence_errors(probs, labels).under, 0),
        "ece": metrics.expected_calibration_error(probs, labels, n_bins=10),
        "adaptive_ece": metrics.expected_calibration_error(
            probs, labels, n_bins=10, binning="quantile"
        ),
        "ece_debiased": metrics.expected_calibration_error(
            probs, labels, n_bins=10, binning="equal_mass", debias=True
        ),
        "smooth_ece": metrics.smooth_calibration_error(probs, labels),
        "kde_ece": metrics.kde_calibration_error(probs, labels),
        "classwise_ece": metrics.classwise_calibration_error(probs, labels, n_bins=10),
        "mce": metrics.maximum_calibration_error(probs, labels, n_bins=10),
        "area_under_risk_coverage": metrics.area_under_risk_coverage(probs, labels),
    }
    assert set(expected) == set(MEASURES)
    assert (
        metrics.confidence_errors(probs, labels).under < 0
    )  # An unbiased estimate, of what is at least 0.
    for key, value in expected.items():
        assert report.before.metrics[key].value == pytest.approx(value, rel=1e-12), key


def test_intervals_are_those_of_the_metrics_or_there_are_none() -> None:
    probs, labels = predictions()
    before = quick(probs, labels, confidence_level=0.8, seed=3).before
    options = {"n_resamples": 20, "confidence_level": 0.8, "seed": 3}
    for key in ("nll", "brier", "area_under_risk_coverage"):
        interval = metrics.bootstrap_interval(
            MEASURES[key].metric, probs, labels, **options
        )
        assert before.metrics[key][1:] == pytest.approx(interval[1:], rel=1e-12), key
        assert before.n_resamples[key] == 20
    n_right = int((probs.argmax(axis=1) == labels).sum())
    wilsons = binomtest(n_right, len(labels)).proportion_ci(0.8, method="wilson")
    assert before.metrics["accuracy"][1:] == pytest.approx((wilsons.low, wilsons.high))
    for key, binning in (
        ("ece", "uniform"),
        ("adaptive_ece", "quantile"),
        ("ece_debiased", "equal_mass"),
    ):
        interval = metrics.calibration_error_interval(
            probs, labels, binning=binning, **options
        )
        assert before.metrics[key][1:] == pytest.approx(interval[1:], rel=1e-12), key
    for key in (
        "classwise_ece",
        "smooth_ece",
        "mce",
        "kde_ece",
        "brier_calibration",
    ):
        assert (*before.metrics[key][1:], before.n_resamples[key]) == (None, None, 0), (
            key
        )
    assert before.consistency == metrics.consistency_test(
        probs, labels, n_resamples=20, seed=3
    )


def test_a_metric_that_sorts_each_resample_has_fewer() -> None:
    found = quick(*predictions(60), n_resamples=300).before.n_resamples
    assert (found["area_under_risk_coverage"], found["nll"]) == (200, 300)


def test_accuracy_without_an_error_has_an_interval() -> None:
    probs = np.tile([0.98, 0.02], (100, 1))
    accuracy = quick(probs, np.zeros(100, int)).before.metrics["accuracy"]
    assert accuracy.high == 1
    assert accuracy.low == pytest.approx(100 / (100 + 1.96**2), abs=1e-4)


def test_the_gaps_interval_allows_for_rows_that_are_off_by_other_amounts() -> None:
    """The sure ones are too sure and the others not enough: correct rows vary more than the confidences say."""
    rng = np.random.default_rng(77)
    is_sure = rng.random(2000) < 0.7
    top = np.where(is_sure, 0.999, 0.55)
    is_wrong = rng.random(2000) > np.where(is_sure, 0.9, 0.781)
    report = quick(np.stack([top, 1 - top], axis=1), is_wrong.astype(int))
    gaps = top - ~is_wrong
    reach = 1.96 * gaps.std() / np.sqrt(2000)
    overall = report.before.overall
    assert overall.high - overall.low == pytest.approx(2 * reach, rel=0.02)


# Tables


def test_bins_and_classes_add_up_to_the_errors() -> None:
    probs, labels = predictions(n_classes=5)
    state = quick(probs, labels).before
    assert sum(row.contribution for row in state.bins) == pytest.approx(
        state.metrics["ece"].value
    )
    assert sum(row.count for row in state.bins) == len(labels)
    assert max(abs(row.gap) for row in state.bins) == pytest.approx(
        state.metrics["mce"].value
    )
    gaps = [row.class_gap for row in state.classes]
    assert np.mean(gaps) == pytest.approx(
        metrics.classwise_calibration_error(probs, labels)
    )
    for c, row in enumerate(state.classes):
        said = probs.argmax(axis=1) == c
        assert (row.index, row.support, row.predicted) == (
            c,
            (labels == c).sum(),
            said.sum(),
        )
        assert row.mean_probability == pytest.approx(probs[:, c].mean())
        assert row.frequency == (labels == c).mean()
        assert row.precision == pytest.approx((labels[said] == c).mean())
        assert row.confidence == pytest.approx(probs[said, c].mean())


# Sentences


@pytest.mark.parametrize(
    ("temperature", "verdict"),
    [(0.4, "Over-confident by"), (1, "Calibrated within"), (2.5, "Under-confident by")],
)
def test_the_verdict_on_known_predictions(temperature: float, verdict: str) -> None:
    report = quick(*predictions(3_000, temperature=temperature))
    assert report.diagnosis[0] == report.verdict
    assert report.verdict.startswith(verdict)


def test_it_says_where_the_error_is() -> None:
    rng = np.random.default_rng(0)
    confidences = np.repeat([0.45, 0.55, 0.65, 0.95], 1_000)
    right = rng.random(4_000) < confidences + np.repeat([0.2, 0.2, 0, -0.2], 1_000)
    rest = (1 - confidences)[:, np.newaxis] / 3
    probs = np.hstack([confidences[:, np.newaxis], rest, rest, rest])
    report = quick(probs, np.where(right, 0, 1), n_bins=10)
    first, second = claims(report, report.before).runs
    assert re.fullmatch(
        r"Under-confident by .* points \[.*\] on average.", report.verdict
    )
    assert (first.lower, first.upper, first.count) == (
        pytest.approx(0.4),
        pytest.approx(0.6),
        2_000,
    )
    assert first.gap == pytest.approx(0.5 - right[:2_000].mean())
    assert first.contribution == pytest.approx(abs(first.gap) / 2)
    assert (second.lower, second.upper) == (pytest.approx(0.9), 1)
    assert second.gap > 0 > first.gap
    assert (
        "Confidences from 0.40 to 0.60 (2,000 examples) are too low: 0.500 on average"
        in words(report)
    )
    assert (
        "Confidences from 0.90 to 1.00 (1,000 examples) are too high: 0.950 on average"
        in words(report)
    )


def test_it_names_classes_of_another_frequency() -> None:
    probs, labels = predictions(2_000, 4)
    keep = (labels != 2) | (np.arange(2_000) % 4 == 0)
    report = quick(probs[keep], labels[keep], class_names=["a", "b", "rare", "d"])
    assert claims(report, report.before).frequencies[0].name == "rare"
    assert 'occur more or less often than their mean probability: "rare" (0.0' in words(
        report
    )


def test_it_warns_of_little_data() -> None:
    report = quick(*predictions(30, 3), class_names=["x", "y", "z"])
    assert any(w.startswith("With only 30 examples") for w in report.warnings)
    probs, _ = predictions(1_000, 3)
    labels = np.zeros(1_000, int)
    labels[:3] = 1
    found = " ".join(quick(probs, labels, class_names=["x", "y", "z"]).warnings)
    assert '"z" has no examples' in found
    assert '"y" has fewer than 10 examples' in found
    assert "Only" not in found
    assert any(
        "With two classes, the confidence" in w
        for w in quick(*predictions(50, 2)).warnings
    )


# Documents


def test_markdown_has_whole_tables_and_no_live_markup() -> None:
    text = overconfident().to_markdown()
    assert text.startswith("# Calibration report: m&lt;i&gt;\\| \\*x\\*\n")
    assert "<script>" not in text
    assert "[x](" not in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        lines = block.splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
        assert set(lines[1]) <= set("| -:")
    for measure in MEASURES.values():
        assert f"| {measure.title} |" in text


class Tags(HTMLParser):
    """Checks that tags nest, and that none runs anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_html_is_one_safe_file_that_can_be_heard_and_used_without_a_mouse() -> None:
    text, page = overconfident_page(), Tags()
    page.feed(text)
    page.close()
    assert page.open == []
    assert not {"script", "link", "iframe", "object", "svg"} & set(page.seen)
    assert page.seen.index("main") < page.seen.index("h1")
    sources = re.findall(r'(?:src|href|srcset)="([^"]*)"', text)
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
    assert re.findall(r'alt="([^"]*)"', text) == [
        name.replace("_", " ") for name in overconfident_figures()
    ]
    assert not re.search(r"url\(|@import", text)
    assert "m&lt;i&gt;| *x*" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    captions = re.findall(r"<caption>(.+?)</caption>", text)
    regions = re.findall(
        r'<div class="scroll" role="region" tabindex="0" aria-label="([^"]+)">', text
    )
    assert regions == captions
    tables = re.findall(r"<table>.*?</table>", text, flags=re.DOTALL)
    body = [
        row
        for table in tables
        for row in re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)[1:]
    ]
    assert all(
        re.match(r'<th scope="row">', row) and row.count("<th") == 1 for row in body
    )


def test_a_page_begins_with_what_people_read_and_folds_the_rest() -> None:
    page = overconfident_page()
    open_part, *folded = page.split("<details>")
    shown = re.findall("<h2>(.*?)</h2>", open_part)
    assert shown[0] == "In short"
    assert "Expected calibration error (ECE): how far confidence is from" in open_part
    titles = [re.findall("<summary><h2>(.*?)</h2>", part)[0] for part in folded]
    assert titles[:2] == ["Diagnosis", "Metrics"]
    assert page.count("<details>") == page.count("</details>")


def test_before_stands_under_before_and_after_under_after() -> None:
    report, record = overconfident(), overconfident().to_dict()
    assert report.after is not None
    tables = re.findall(r"<table>.*?</table>", overconfident_page(), flags=re.DOTALL)
    first_rows, metric_rows, bin_rows, class_rows = map(cells, tables)
    assert [row[0] for row in first_rows[1:]] == [
        MEASURES[key].title for key in ("accuracy", "nll", "brier", "ece")
    ]
    assert metric_rows[0] == ["metric", "before", "after"]
    for row, key in zip(metric_rows[1:-1], MEASURES, strict=True):
        for cell, state in zip(row[1:], report.states.values(), strict=True):
            assert cell.startswith(f"{state.metrics[key].value:.4f}"), key
    assert [row[5] for row in bin_rows[1:]] == [
        f"{value:.4f}"
        for value in sorted(
            (row.contribution for row in report.after.bins), reverse=True
        )[:5]
    ]
    classes = sorted(report.after.classes, key=lambda row: -row.class_gap)
    assert [row[4] for row in class_rows[1:]] == [
        f"{row.class_gap:.4f}" for row in classes
    ]
    text = report.to_markdown()
    assert all(
        f"| {' | '.join(row[1:])} |" in text
        for table in (metric_rows, bin_rows, class_rows)
        for row in table[1:]
    )
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    change = report.nll_change
    assert record["nll_change"] == change._asdict()
    assert record["verdict"].endswith(
        " before, calibrated within chance after; NLL lower by "
        f"{-change.value:.3f} [{-change.high:.3f}, {-change.low:.3f}]."
    )
    for name, state in report.states.items():
        found = state.metrics["ece"]._asdict()
        title = "Expected calibration error (ECE)"
        assert record[name]["metrics"]["ece"] == {
            "title": title,
            **found,
            "n_resamples": 20,
        }
        assert record[name]["consistency_test"]["value"] == state.consistency.value  # type: ignore[union-attr]
        assert [row["class_gap"] for row in record[name]["classes"]] == [
            r.class_gap for r in state.classes
        ]
        assert [row["name"] for row in record[name]["classes"]] == EVIL
    axes = overconfident_figures()["reliability"].axes[:2]
    for panel, state in zip(axes, report.states.values(), strict=True):
        assert panel.get_title(loc="left").startswith(
            f"ECE {state.metrics['ece'].value:.3f}"
        )


@pytest.mark.parametrize(("width", "n_parts"), [(200, 1), (65, 1), (45, 2), (10, 2)])
def test_a_table_that_is_too_wide_for_a_screen(width: int, n_parts: int) -> None:
    """Intervals move below values, then columns to further tables with the same first column."""
    ends = "[0.1000, 0.2000]"
    row = ["ECE", f"0.1500 {ends}", f"0.1600 {ends}"]
    table = Table("", ["metric", "before", "after"], [row], title="Numbers")
    screen = Console(file=io.StringIO(), width=width)
    table.show(screen)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum("metric" in line for line in lines) == n_parts
    is_on_one_line = any(f"0.1500 {ends}" in line for line in lines)
    assert is_on_one_line == (width == 200)
    if width > 10:
        assert sum(line.count(ends) for line in lines) == 2


# Edges


@pytest.mark.parametrize(
    ("probs", "labels"),
    [
        ([[0.6, 0.4]], [0]),
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [0, 1, 0]),
        ([[0.25] * 4] * 9, [0, 1, 2, 3, 0, 1, 2, 3, 0]),
        ([[1.0]] * 3, [0, 0, 0]),
        (np.float16(predictions(20, 3)[0]), predictions(20, 3)[1]),
    ],
)
def test_extreme_predictions_are_reported(
    probs: np.ndarray, labels: np.ndarray
) -> None:
    report = quick(probs, labels)
    record = report.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["after"] is None
    for key, value in report.before.metrics.items():
        assert math.isfinite(value.value)
        assert value.low is None or value.low <= value.high
        assert report.before.n_resamples[key] == 0 or value.low is not None
    assert "nan" not in report.to_markdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"calibrated": np.full((20, 2), 0.5)},
            r"calibrated to have shape \(20, 3\), got shape \(20, 2\)",
        ),
        ({"class_names": ["a", "b"]}, r"class_names to be 3 names, got 2"),
        ({"n_bins": 0}, r"n_bins to be at least 1, got 0"),
        ({"confidence_level": 1.0}, r"confidence_level to lie in \(0, 1\), got 1.0"),
        (
            {"soft_labels": np.full((20, 3), 0.5)},
            "each row of soft_labels to sum to 1, got 1.5 in row 0",
        ),
        (
            {"sample_weight": np.ones(20), "soft_labels": np.full((20, 3), 1 / 3)},
            "at most one of labels .*, got 2; leave",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibration_report(*predictions(20, 3), **options)


@pytest.mark.parametrize("state", ["before", "after"])
def test_labels_of_probability_0_are_counted(state: str) -> None:
    probs = np.tile([[1.0, 0.0], [0.6, 0.4]], (10, 1))
    others = np.full((20, 2), 0.5)
    pair = (probs, others) if state == "before" else (others, probs)
    report = calibration_report(
        pair[0], np.tile([1, 0], 10), calibrated=pair[1], n_resamples=10
    )
    (note,) = report.notes
    assert note.startswith("In 10 rows of 20 the label has probability 0 in float64, ")
    assert "708 nats" in note


def test_one_hot_labels_are_pointed_out() -> None:
    probs = np.full((9, 3), 1 / 3)
    labels = np.eye(3, dtype=int)[[0, 1, 2] * 3]
    report = calibration_report(probs, labels, n_resamples=10)
    assert "pass labels.argmax(axis=1)" in " ".join(report.notes)
    labels[0] = 1
    assert not calibration_report(probs, labels, n_resamples=10).notes
