"""The section on entities in each form of a report."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from hf_calib.metrics import entity_scores, find_entities
from hf_calib.report import CalibrationReport, calibration_report, with_entities

TAGS = ["O", "B-<i>x</i>", "I-<i>x</i>"]


def made(
    tag_names: Sequence[str] = TAGS, *, calibrated: bool = True, found: bool = True
) -> CalibrationReport:
    rng = np.random.default_rng(0)
    sentences = np.repeat(np.arange(60), 5)
    labels = rng.choice(3, 300, p=[0.6, 0.25, 0.15])
    logits = rng.normal(size=(300, 3))
    logits[np.arange(300), labels] += 2
    if not found:
        logits[:, 0] += 20
    probs, softer = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in (2 * logits, logits))
    report = calibration_report(
        probs,
        labels,
        calibrated=softer if calibrated else None,
        class_names=tag_names,
        n_resamples=50,
        seed=4,
    )
    return with_entities(report, sentences)


def test_numbers_are_those_of_the_metric() -> None:
    report = made()
    assert report.entities is not None
    assert report.after is not None
    for state, found in ((report.before, report.entities.before), (report.after, report.entities.after)):
        expected = entity_scores(
            find_entities(state.probs, report.labels, np.repeat(np.arange(60), 5), tag_names=TAGS),
            n_resamples=50,
            seed=4,
        )
        assert found == expected
    record = json.loads(json.dumps(report.to_dict(), allow_nan=False))["entities"]
    assert record["after"]["f1"]["value"] == report.entities.after["f1"].value  # type: ignore[index]
    assert record["n_sentences"] == 60


@pytest.mark.slow
def test_each_form_has_the_section() -> None:
    report = made()
    assert report.entities is not None
    cell = report.entities.table()[1][3][1]
    markdown, page = report.to_markdown(), report.to_html()
    for text in (markdown, page):
        assert "Entities" in text
        assert cell in text
        assert "not independent" in text
    assert "<i>x</i>" not in page
    figure = report.figures()["entities"]
    assert [axes.get_title(loc="left") for axes in figure.axes]
    assert len(figure.axes) == 8  # product and minimum, before and after, each over its histogram
    alone = made(calibrated=False).entities
    assert alone is not None
    assert len(alone.figures(15)["entities"].axes) == 4


def test_without_a_predicted_entity() -> None:
    report = made(found=False)
    assert report.entities is not None
    assert report.entities.table()[1][3] == [
        "ECE, product of the tokens' probabilities",
        "not defined",
        "not defined",
    ]
    assert report.to_dict()["entities"]["before"]["ece_product"] == {"value": None, "low": None, "high": None}
    assert report.entities.figures(15) == {}
    assert "## Entities" in report.to_markdown()
    assert "<h2>Entities</h2>" in report.document().to_html()


def test_other_tags_and_other_rows_have_no_section() -> None:
    of_words = made(["NOUN", "VERB", "OTHER"])
    assert of_words.entities is None
    assert any("tokens" in warning for warning in of_words.warnings)
    probs = of_words.before.probs
    plain = calibration_report(probs, of_words.labels, n_resamples=10)
    assert with_entities(plain, None) is plain
    assert plain.to_dict()["entities"] is None
