"""The sections of a report: their numbers are those of the metrics, in every form of the report."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.special import softmax
from scipy.stats import norm

from hf_calib.decisions import AbstainRule
from hf_calib.metrics import (
    bootstrap_interval,
    entity_scores,
    find_entities,
    negative_log_likelihood,
    ood_detection,
)
from hf_calib.metrics.state import GroupSums, score_chunks
from hf_calib.predictions import Predictions
from hf_calib.report import (
    SOFT_MEASURES,
    CalibrationReport,
    DecisionSection,
    OodSection,
    calibration_report,
    ood_section,
    report_on_predictions,
    with_entities,
)
from hf_calib.report.measured import Settings
from hf_calib.report.sections import (
    ReportSection,
    SliceSection,
    slice_p_values,
    slice_section,
)
from hf_calib.scaling import TemperatureScaling
from tests.helpers.pictures import overlapping
from tests.helpers.reports import cells
from tests.helpers.sampled import predictions, sampled

EVIL = "<b>a|b</b>"
TAGS = ["O", "B-<i>x</i>", "I-<i>x</i>"]


@cache
def plain() -> CalibrationReport:
    probs, labels = predictions(temperature=0.4)
    return calibration_report(
        probs, labels, calibrated=predictions()[0], n_resamples=20
    )


def decisions() -> CalibrationReport:
    """A rule at 80%, which the rows are easy enough for."""
    report = plain()
    rule = AbstainRule(accuracy=0.8).fit(report.before.probs, report.labels)
    rows = (report.before.probs, report.labels)
    section = DecisionSection(rule.promise(), 400, rule.measure(*rows))
    return replace(report, decisions=section)


def entities(
    *, found: bool = True, names: list[str] | None = None
) -> CalibrationReport:
    rng = np.random.default_rng(0)
    labels = rng.choice(3, 300, p=[0.6, 0.25, 0.15])
    logits = rng.normal(size=(300, 3))
    logits[np.arange(300), labels] += 2
    if not found:
        logits[:, 0] += 20
    probs, softer = softmax(2 * logits, axis=1), softmax(logits, axis=1)
    options: Any = {"class_names": names or TAGS, "n_resamples": 50, "seed": 4}
    report = calibration_report(probs, labels, calibrated=softer, **options)
    return with_entities(report, np.repeat(np.arange(60), 5))


def elsewhere() -> CalibrationReport:
    report, outside = plain(), np.random.default_rng(1).standard_normal((50, 4))
    states = ((report.before, 0.4), (report.after, 1.0))
    found = [
        ood_detection(np.log(each.probs), outside / t, n_resamples=20)
        for each, t in states
    ]  # type: ignore[union-attr]
    return replace(report, out_of_distribution=(OodSection(EVIL, 50, *found),))


def annotated(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities, shares of a few annotators, and labels drawn from the truth that both stand for."""
    rng = np.random.default_rng(seed)
    truth = softmax(2 * rng.standard_normal((120, 4)), axis=1)
    shares = np.array([rng.multinomial(20, row) for row in truth]) / 20
    return softmax(1.5 * np.log(truth), axis=1), shares, shares.argmax(axis=1)


def against_shares() -> CalibrationReport:
    probs, shares, labels = annotated()
    softer = softmax(np.log(probs) / 1.5, axis=1)
    return calibration_report(
        probs, labels, calibrated=softer, soft_labels=shares, n_resamples=50
    )


def sums_of(
    groups: np.ndarray, labels: np.ndarray, probs: np.ndarray, weights: Any = None
) -> GroupSums:
    sums = GroupSums.empty(int(groups.max()) + 1, 15)
    for chunk in score_chunks(probs, labels, weights):
        sums.add(chunk.rows, groups[chunk.place])
    return sums


def slices_of(
    groups: np.ndarray, labels: np.ndarray, probs: np.ndarray, column: str = "country"
) -> SliceSection:
    sums = sums_of(groups, labels, probs)
    names = [f"c{place}" for place in range(len(sums.n_rows()))]
    if column == EVIL:
        names[0] = "<script>"
    return slice_section(column, names, sums, Settings(15))


def sliced() -> CalibrationReport:
    report = plain()
    groups = np.arange(len(report.labels)) % 30
    section = slices_of(groups, report.labels, report.before.probs, column=EVIL)
    return replace(report, slices=(section,))


@pytest.mark.parametrize(
    "make", [decisions, entities, elsewhere, against_shares, sliced]
)
def test_every_section_is_in_every_form(make: Callable[[], CalibrationReport]) -> None:
    report = make()
    (section,) = report.parts
    assert isinstance(section, ReportSection)
    header, rows = section.table()
    markdown, page = report.to_markdown(), report.document().to_html()
    tables = [
        cells(table)
        for table in re.findall(r"<table>.*?</table>", page, flags=re.DOTALL)
    ]
    assert [header, *rows] in tables
    assert all(" | ".join(row[1:]) in markdown for row in rows)
    assert all(sentence in unescape(page) for sentence in section.sentences())
    for text in (markdown, page):
        assert not re.search("<b>|<i>|<script>", text)
    record = report.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    figures = section.figures(15)
    assert len(figures) == (make in (entities, sliced))
    for figure in figures.values():
        assert not overlapping(figure)
    own = plain().to_dict()
    names = ("decisions", "entities", "out_of_distribution", "soft_labels", "slices")
    assert sum(record[name] != own[name] for name in names) == 1


# Entities


def test_entities_are_those_of_the_metric() -> None:
    report = entities()
    assert report.entities is not None
    states = (
        (report.before, report.entities.before),
        (report.after, report.entities.after),
    )
    for state, found in states:
        rows = (state.probs, report.labels, np.repeat(np.arange(60), 5))  # type: ignore[union-attr]
        wanted = entity_scores(
            find_entities(*rows, tag_names=TAGS), n_resamples=50, seed=4
        )
        assert found == wanted
    record = report.to_dict()["entities"]
    assert record["after"]["f1"]["value"] == report.entities.after["f1"].value  # type: ignore[index]
    assert (record["n_sentences"], record["before"]["n_predicted"]) == (
        60,
        len(report.entities.found[0].correct),
    )
    assert any("not independent" in warning for warning in report.warnings)


def test_without_a_predicted_entity_and_without_tags() -> None:
    none = entities(found=False)
    assert none.entities is not None
    assert none.entities.table()[1][3][1:] == ["not defined", "not defined"]
    assert none.to_dict()["entities"]["before"]["ece_product"] == {
        "value": None,
        "low": None,
        "high": None,
    }
    assert none.entities.figures(15) == {}
    of_words = entities(names=["NOUN", "VERB", "OTHER"])
    assert of_words.entities is None
    assert any("tokens" in warning for warning in of_words.warnings)


# Out of distribution


def test_the_seed_of_ood_detection_before_and_after_calibration() -> None:
    rng = np.random.default_rng(0)
    before = 3 * rng.normal(size=(80, 3)), rng.normal(size=(60, 3))
    after = before[0] / 2, before[1] / 2
    section = ood_section("noise", before, after, seed=5, probabilities=True)
    for found, logits in ((section.before, before), (section.after, after)):
        wanted = ood_detection(*logits, scores=["max_probability", "entropy"], seed=5)
        assert {score: found[score].auroc for score in found} == {
            s: wanted[s].auroc for s in wanted
        }  # type: ignore[index,union-attr]
    assert replace(section, after=None).table()[0] == ["score", "value"]


# Soft labels


def test_probabilities_equal_to_the_shares_are_perfect() -> None:
    _, shares, labels = annotated()
    found = calibration_report(
        shares, labels, soft_labels=shares, n_resamples=50
    ).soft_labels
    assert found is not None
    assert set(found.before) == set(SOFT_MEASURES)
    for key in (
        "ece",
        "adaptive_ece",
        "classwise_ece",
        "true_calibration_error",
        "brier",
    ):
        assert found.before[key].value == pytest.approx(0, abs=1e-12)
    assert found.before["nll"].value == pytest.approx(found.entropy)
    assert found.agreement == 1


def test_the_error_against_shares_is_that_of_the_metric() -> None:
    probs, shares, _ = annotated()
    wanted = bootstrap_interval("true_calibration_error", probs, shares, n_resamples=50)
    assert against_shares().soft_labels.before[
        "true_calibration_error"
    ] == pytest.approx(wanted)  # type: ignore[union-attr]


def test_rows_or_classes_in_another_order_are_pointed_out() -> None:
    probs, shares, labels = annotated()
    for given, is_warned in ((shares, False), (np.roll(shares, 1, axis=1), True)):
        report = calibration_report(probs, labels, soft_labels=given, n_resamples=1)
        assert (
            any("Check that they are in the order" in each for each in report.warnings)
            == is_warned
        )


# Slices


def test_the_slice_that_differs_is_found() -> None:
    probs, labels = predictions(30_000)
    groups = np.random.default_rng(1).integers(0, 10, len(labels))
    wrong = (groups == 7) & (np.random.default_rng(2).random(len(labels)) < 0.15)
    labels = np.where(wrong, (labels + 1) % 4, labels)
    section = slices_of(groups, labels, probs)
    assert [each.name for each in section.slices if each.differs] == ["c7"]
    assert section.slices[0].name == "c7"
    assert section.finding.startswith("1 of 10 values of country differ")
    for each in section.slices:
        rows = groups == int(each.name[1:])
        confidences, right = (
            probs[rows].max(axis=1),
            probs[rows].argmax(axis=1) == labels[rows],
        )
        assert each.n_rows == rows.sum()
        assert each.accuracy == pytest.approx(right.mean())
        assert each.gap.value == pytest.approx(
            confidences.mean() - right.mean(), abs=1e-9
        )
        assert each.gap.low < each.gap.value < each.gap.high


@pytest.mark.slow
def test_names_from_data_are_harmless_in_every_form(tmp_path: Path) -> None:
    """Of columns, slices and classes, which the verdict may quote."""
    logits, labels = sampled(300, 3, 1.0)
    names = ("<b>a|b</b>", "\x1b[31mred\u202e", "`x` [y](javascript:z)")
    rows = Predictions(
        logits=logits + 2 * np.eye(3)[2],
        labels=labels,
        class_names=names,
        by={"<img src=x onerror=alert(1)>/..": ["\x1b[2J<script>", "ok\u202e"] * 150},
    )
    report = report_on_predictions(rows, "m\x1b[1m<i>", 15)
    assert "red" in " ".join(report.diagnosis)
    report.save(tmp_path / "out")
    assert len({path.parent for path in tmp_path.rglob("*.png")}) == 1
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, color_system=None)
    report.short().show(console)
    report.document().show(console)
    written = [stream.getvalue()]
    for suffix in ("md", "html"):
        text = (tmp_path / f"out/report.{suffix}").read_text(encoding="utf-8")
        assert not re.search("<img src=x|<script|<b>|<i>", text)
        written.append(text)
    assert "](javascript" not in written[1]
    for text in written:
        assert not re.search("[\x1b\u202e]", text)
        assert "red" in text


def test_a_slice_is_compared_with_the_rows_that_are_not_in_it() -> None:
    """Half of the rows: against all rows, its own among them, the difference would be half as large."""
    probs, labels = predictions(400)
    groups = np.arange(400) % 2
    rng = np.random.default_rng(2)
    wrong = (groups == 1) & (rng.random(400) < 0.1)
    labels = np.where(wrong, (labels + 1) % 4, labels)
    confidence = probs.max(axis=1)
    correct = probs.argmax(axis=1) == labels
    sums = sums_of(groups, labels, probs)
    found = slice_p_values(sums, np.array([0, 1]))
    # By a loop: the number right, if each row were as far off as the others, and the error of the others' gap.
    both = []
    for group in (0, 1):
        own, others = groups == group, groups != group
        chances = confidence[own] - (confidence - correct)[others].mean()
        accuracy = correct[others].mean()
        variance = (chances * (1 - chances)).sum() + 200 * accuracy * (1 - accuracy)
        z = (abs(correct[own].sum() - chances.sum()) - 0.5) / np.sqrt(variance)
        both.append(2 * norm.sf(z))
    # Two tests, of the same difference.
    assert found == pytest.approx([2 * max(both)] * 2, rel=0.05)


def test_a_slice_of_all_rows_has_the_numbers_of_the_report() -> None:
    probs, labels = predictions(300)
    before = calibration_report(probs, labels, n_resamples=1).before
    (found,) = slices_of(np.zeros(300, int), labels, probs).slices
    assert [*found.gap] == pytest.approx([*before.overall[:3]], rel=1e-9)
    assert found.nll.value == pytest.approx(before.metrics["nll"].value)
    assert found.mce == pytest.approx(before.metrics["mce"].value)
    assert (found.share, found.p_value) == (1, None)


@pytest.mark.parametrize("n_few", [1, 2, 3])
def test_a_few_rows_do_not_make_the_others_differ(n_few: int) -> None:
    """All of them right, or wrong: whether the many rows differ, they cannot tell."""
    confidence = np.linspace(0.5, 0.99, 400)
    probs = np.stack([confidence, 1 - confidence], axis=1)
    wrong = np.random.default_rng(0).random(400) > confidence
    groups = (np.arange(400) >= n_few).astype(int)
    for first in (0, 1):
        labels = np.where(groups == 1, wrong, first)
        section = slices_of(groups, labels, probs)
        assert not section.differing
        (few,) = (each for each in section.slices if each.n_rows == n_few)
        assert few.gap.high - few.gap.low > 0.3
        # The largest stand first.
        assert section.slices[-1] == few


def test_slices_of_a_calibrated_report_are_measured_after_it() -> None:
    logits, labels = sampled(300, 3, 3.0)
    rows = Predictions(
        logits=logits, labels=labels, by={"half": (np.arange(300) % 2).tolist()}
    )
    scaler = TemperatureScaling().fit(logits, labels)
    report = report_on_predictions(rows, "mine", 15, scaler)
    (section,) = report.slices
    for each in section.slices:
        of_half = np.arange(300) % 2 == int(each.name)
        nll = negative_log_likelihood(
            scaler.predict_proba(logits[of_half]), labels[of_half]
        )
        assert each.nll.value == pytest.approx(nll, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "equal",
        *(
            pytest.param(k, marks=pytest.mark.deep)
            for k in ("few rows each", "one large", "weights")
        ),
    ],
)
def test_false_alarms_of_slices(kind: str) -> None:
    """Slices drawn at random: at most one run in twenty has one that differs, however many and small they are."""
    alarms = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        probs, labels = predictions(3_000, temperature=1.0, seed=seed)
        groups = rng.integers(0, 300 if kind == "few rows each" else 12, len(labels))
        if kind == "one large":
            groups = np.where(rng.random(len(labels)) < 0.9, 0, groups)
        weights = rng.exponential(size=len(labels)) if kind == "weights" else None
        sums = sums_of(groups, labels, probs, weights)
        alarms += min(slice_p_values(sums, np.flatnonzero(sums.n_rows()))) < 0.05
    assert alarms <= 10
