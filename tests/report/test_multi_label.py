"""The report on several labels per row: numbers against scikit-learn and plain loops, words, documents, figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from hf_calib.metrics.multi_label import LabelMetrics, check_decisions
from hf_calib.predictions import Predictions
from hf_calib.report import (
    LABEL_MEASURES,
    CalibrationReport,
    calibration_report,
    report_on_predictions,
)

EVIL = ["a|b", "<script>alert(1)</script>", "$\\frac{$", "[x](javascript:y) `c`\n# d"]


def drawn(
    n: int = 500, *, temperature: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (n, 4), calibrated at a temperature of 1, with the labels that were drawn by them; ties, too."""
    rng = np.random.default_rng(seed)
    logits = rng.normal([-3, -1, 0, 1], 1.5, (n, 4)).round(1)
    return expit(logits / temperature), (rng.random((n, 4)) < expit(logits)).astype(
        np.int64
    )


def quick(probs: np.ndarray, labels: np.ndarray, **options: Any) -> CalibrationReport:
    return calibration_report(probs, labels, **{"n_resamples": 50, **options})


def plain_metrics(
    probs: np.ndarray, labels: np.ndarray, n_bins: int
) -> dict[str, float]:
    """Of one label, by scikit-learn and a loop over the bins (lower, upper]."""
    errors, worst = 0.0, 0.0
    for m in range(n_bins):
        inside = (probs > m / n_bins) & (probs <= (m + 1) / n_bins)
        if inside.any():
            gap = abs(probs[inside].mean() - labels[inside].mean())
            errors, worst = errors + gap * inside.sum() / len(probs), max(worst, gap)
    return {
        "prevalence": labels.mean(),
        "auroc": roc_auc_score(labels, probs),
        "average_precision": average_precision_score(labels, probs),
        "ece": errors,
        "mce": worst,
        "brier": ((probs - labels) ** 2).mean(),
        "nll": log_loss(labels, probs),
    }


def test_each_number_is_that_of_scikit_learn_and_of_a_loop() -> None:
    probs, labels = drawn()
    masked = np.where(np.random.default_rng(1).random(labels.shape) < 0.1, -100, labels)
    report = quick(probs, masked, n_bins=10)
    by_label = []
    for c, label in enumerate(report.before.labels):
        known = masked[:, c] >= 0
        wanted = plain_metrics(probs[known, c], masked[known, c], 10)
        assert {
            key: value.value for key, value in label.metrics.items()
        } == pytest.approx(wanted, rel=1e-12)
        assert (label.n_known, label.n_true) == (known.sum(), masked[known, c].sum())
        assert label.mean_probability == pytest.approx(probs[known, c].mean())
        by_label.append(wanted)
    assert report.before.overall.gap == pytest.approx(
        (probs - masked)[masked >= 0].mean()
    )
    micro = plain_metrics(probs[masked >= 0], masked[masked >= 0], 10)
    for key in LABEL_MEASURES:
        macro = np.mean([each[key] for each in by_label])
        assert report.before.metrics[f"macro_{key}"].value == pytest.approx(
            macro, rel=1e-12
        )
        assert report.before.metrics[f"micro_{key}"].value == pytest.approx(
            micro[key], rel=1e-12
        )
    assert (
        sum(row.count for row in report.before.bins)
        == report.before.overall.n_examples
        == (masked >= 0).sum()
    )


@pytest.mark.parametrize(
    ("p_value", "verdict"),
    [
        (0.04, "Mean probabilities not clearly different from the frequencies."),
        (0.02, "Mean probability too high by 10.0 points ["),
    ],
)
def test_the_average_and_the_labels_share_the_level(
    p_value: float, verdict: str
) -> None:
    """Two kinds of claims: one alone has to be below 2.5%."""
    report = quick(*drawn(100))
    ends = 0.1 + 0.1 / norm.isf(p_value / 2) * norm.isf([0.975, 0.025])
    labels = tuple(
        replace(label, frequency_p_value=0.9) for label in report.before.labels
    )
    overall = report.before.overall._replace(
        gap=0.1, low=ends[0], high=ends[1], p_value=p_value
    )
    judged = replace(
        report, before=replace(report.before, overall=overall, labels=labels)
    )
    assert judged.verdict.startswith(verdict)
    corrected = "not beyond chance once corrected for the 2 tests of this report"
    assert (corrected in judged.diagnosis[1]) == (p_value == 0.04)


def test_a_resample_is_measured_as_its_rows_are() -> None:
    """With rows that are drawn twice or not at all, and ties: no approximation."""
    probs, labels = drawn(60)
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 60, (5, 60))
    counts = np.stack([np.bincount(each, minlength=60) for each in rows])
    found = LabelMetrics(check_decisions(probs, labels), 15).evaluate(counts)
    for r, chosen in enumerate(rows):
        direct = LabelMetrics(check_decisions(probs[chosen], labels[chosen]), 15)
        wanted = direct.evaluate(np.ones((1, 60), np.intp))
        for key, values in wanted.items():
            np.testing.assert_allclose(
                found[key][r], values[0], rtol=1e-12, err_msg=key
            )


def test_a_label_without_both_values_is_left_out_and_said_so() -> None:
    probs, labels = drawn()
    probs, labels = (
        np.hstack([probs, probs[:, :1]]),
        np.hstack([labels, np.full((500, 1), -100)]),
    )
    labels[:, 0], labels[:, 1] = 0, 1
    labels[:, 2] = np.arange(500) < 3
    report = quick(probs, labels, class_names=["never", "always", "c", "d", "unknown"])
    never, always, _, _, unknown = report.before.labels
    assert all(np.isnan(value.value) for value in unknown.metrics.values())
    assert np.isnan(never.metrics["average_precision"].value)
    assert np.isnan([never.metrics["auroc"].value, always.metrics["auroc"].value]).all()
    assert never.metrics["auroc"].low is None
    others = [roc_auc_score(labels[:, c], probs[:, c]) for c in (2, 3)]
    assert report.before.metrics["macro_auroc"].value == pytest.approx(np.mean(others))
    assert report.warnings[0].startswith(
        '"never", "always", "unknown" have one value in all rows'
    )
    assert report.warnings[1].startswith('"c" has fewer than 10 examples')
    assert report.to_dict()["before"]["labels"][0]["metrics"]["auroc"]["value"] is None
    assert "not defined" in report.to_markdown()


@pytest.mark.parametrize(("mean", "word"), [(0.9, "high"), (0.1, "low")])
def test_the_verdict_says_on_which_side_a_label_is(mean: float, word: str) -> None:
    labels = np.arange(400).reshape(-1, 1) % 2
    report = quick(np.full((400, 1), mean), labels, class_names=["law"])
    assert report.verdict == (
        f"Mean probabilities too {word} for 1 of 1 labels, "
        f'"law" (0.500 of the examples, mean probability {mean:.3f}).'
    )


def test_the_diagnosis_names_what_is_too_high_and_too_low() -> None:
    probs, labels = drawn(3000)
    probs = probs.copy()
    probs[:, 3] = 0.5 * probs[:, 3]
    probs[:, 0] = np.minimum(probs[:, 0] + 0.2, 1)
    report = quick(
        probs,
        labels,
        calibrated=drawn(3000)[0],
        class_names=["rare", "b", "c", "often"],
    )
    named = re.findall(
        r'"(\w+)" \((0.\d+) of the examples, mean probability (0.\d+)\)',
        " ".join(report.diagnosis),
    )
    assert {name: frequency < mean for name, frequency, mean in named} == {
        "rare": True,
        "often": False,
    }
    name, frequency, mean = named[0]
    words = (
        f'most of all "{name}" ({frequency} of the examples, mean probability {mean})'
    )
    before = f"Mean probabilities too high for 1 and too low for 1 of 4 labels, {words}"
    after = "mean probabilities within chance of the frequencies after"
    start = f"{before} before, {after}; NLL of all decisions lower by 0."
    assert report.verdict.startswith(start)


def test_a_difference_by_rounding_is_none() -> None:
    labels = np.eye(3, dtype=int)[[0, 1, 2] * 3]
    report = quick(np.full((9, 3), 1 / 3), labels)
    within = "Mean probabilities within chance of the frequencies."
    assert report.verdict == within
    assert "a difference of 0.0 points [0.0, 0.0]" in report.diagnosis[1]


def test_documents_are_safe_whole_and_read_back(tmp_path: Path) -> None:
    probs, labels = drawn(temperature=0.5)
    report = quick(
        probs, labels, calibrated=drawn()[0], class_names=EVIL, name="m<i>| *x*"
    )
    report.save(tmp_path)
    record = json.loads((tmp_path / "report.json").read_text())
    assert record == json.loads(json.dumps(report.to_dict()))
    assert record["kind"] == "multi_label"
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert "<i>" not in html
    assert all(escape(name) in html or name in unescape(html) for name in EVIL)
    markdown = (tmp_path / "report.md").read_text()
    assert "<script" not in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    # Three headers with their rules, 4 metrics first, all 12, and 4 labels.
    assert len(lines) == 3 * 2 + 4 + 12 + 4
    figures = sorted(path.stem for path in (tmp_path / "figures").iterdir())
    assert figures == ["classwise", "reliability"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"probs": [[0.5, 1.2]]},
            r"expected probs to lie in \[0, 1\], got 1.2 in row 0; pass sigmoid",
        ),
        ({"probs": [0.5, 0.5]}, r"probs to have shape \(N, C\)"),
        (
            {"labels": [[0, 2]]},
            r"labels to be 0 or 1, got 2 in row 0; leave a decision out with -100",
        ),
        ({"labels": [[-100, -100]]}, "labels to be known somewhere"),
        ({"calibrated": [[0.5]]}, r"labels to have shape \(1, 1\)"),
        ({"soft_labels": [[0.5, 0.5]]}, r"at most one of labels \(N, C\), soft_labels"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"probs": [[0.5, 0.5]], "labels": [[0, 1]], **change}
    with pytest.raises(ValueError, match=message):
        calibration_report(given.pop("probs"), given.pop("labels"), **given)


def test_slices_of_several_labels_are_refused() -> None:
    probs = np.full((4, 2), 0.5)
    found = Predictions(
        labels=np.eye(2, dtype=int)[[0, 1, 0, 1]],
        probs=probs,
        by={"site": list("abab")},
    )
    with pytest.raises(ValueError, match="slices to be of rows with one label each"):
        report_on_predictions(found, "model", 15)
