"""The report on several labels a row: numbers against scikit-learn and plain loops, words, documents, figures."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from hf_calib.commands.options import Report
from hf_calib.metrics.multi_label import LabelMetrics, check_decisions
from hf_calib.metrics.sums import Interval
from hf_calib.plots import label_reliability_grid
from hf_calib.report import LABEL_MEASURES, CalibrationReport, calibration_report, read_report
from tests.helpers.pictures import overlapping, written

EVIL = ["a|b", "<script>alert(1)</script>", "$\\frac{$", "[x](javascript:y) `c`\n# d"]


def drawn(n: int = 500, *, temperature: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (n, 4), calibrated at a temperature of 1, with the labels that were drawn by them; ties, too."""
    rng = np.random.default_rng(seed)
    logits = rng.normal([-3, -1, 0, 1], 1.5, (n, 4)).round(1)
    return expit(logits / temperature), (rng.random((n, 4)) < expit(logits)).astype(np.int64)


def quick(probs: np.ndarray, labels: np.ndarray, **options: Any) -> CalibrationReport:
    return calibration_report(probs, labels, **{"n_resamples": 50, **options})


def plain_metrics(probs: np.ndarray, labels: np.ndarray, n_bins: int) -> dict[str, float]:
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


def test_a_label_that_is_not_known_is_not_drawn_as_false() -> None:
    probs, labels = drawn()
    masked = labels.copy()
    masked[::2] = -100
    report = quick(probs, masked, n_bins=5)
    np.testing.assert_array_equal(report.labels, masked)
    known = quick(probs[1::2], labels[1::2], n_bins=5)
    found = []
    for each in (report, known):
        panel = each.figures()["classwise"].axes[0]
        found.append(
            [line.get_xydata() for line in panel.lines]
            + [collection.get_offsets() for collection in panel.collections]
            + [[patch.get_height() for patch in panel.patches]]
        )
    assert any(len(points) > 2 for points in found[0])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other)


def test_each_number_is_that_of_scikit_learn_and_of_a_loop() -> None:
    probs, labels = drawn()
    masked = np.where(np.random.default_rng(1).random(labels.shape) < 0.1, -100, labels)
    report = quick(probs, masked, n_bins=10)
    by_label = []
    for c, label in enumerate(report.before.labels):
        known = masked[:, c] >= 0
        wanted = plain_metrics(probs[known, c], masked[known, c], 10)
        assert {key: value.value for key, value in label.metrics.items()} == pytest.approx(wanted, rel=1e-12)
        assert (label.n_known, label.n_true) == (known.sum(), masked[known, c].sum())
        assert label.mean_probability == pytest.approx(probs[known, c].mean())
        by_label.append(wanted)
    micro = plain_metrics(probs[masked >= 0], masked[masked >= 0], 10)
    for key in LABEL_MEASURES:
        macro = np.mean([each[key] for each in by_label])
        assert report.before.metrics[f"macro_{key}"].value == pytest.approx(macro, rel=1e-12)
        assert report.before.metrics[f"micro_{key}"].value == pytest.approx(micro[key], rel=1e-12)
    assert sum(row.count for row in report.before.bins) == report.n_decisions == (masked >= 0).sum()


def test_a_label_that_is_known_nowhere_has_no_metric() -> None:
    probs, labels = drawn(60)
    labels[:, 1] = -100
    label = quick(probs, labels).before.labels[1]
    assert {key for key, found in label.metrics.items() if not np.isnan(found.value)} == set()


def test_the_mean_difference_is_of_known_labels() -> None:
    probs, labels = drawn(60)
    labels[:40, 1:] = -100
    known = labels >= 0
    wanted = (probs - labels)[known].mean()
    report = quick(probs, labels)
    assert report.before.gap is not None
    assert report.before.gap.value == pytest.approx(wanted)
    assert report.before.gap.low < wanted < report.before.gap.high
    assert f"{wanted:+.4f} [" in report.diagnosis[0]


@pytest.mark.parametrize(("p_value", "verdict"), [(0.04, "neither too high nor too low"), (0.02, "too high")])
def test_the_average_and_the_labels_share_the_level(p_value: float, verdict: str) -> None:
    """Two kinds of claims: one alone has to be below 2.5%."""
    report = quick(*drawn(100))
    error = 0.01 / norm.isf(p_value / 2)
    ends = 0.01 + error * norm.isf([0.975, 0.025])
    labels = tuple(replace(label, p_value=0.9) for label in report.before.labels)
    before = replace(report.before, gap=Interval(0.01, *ends), labels=labels)
    sentence = replace(report, before=before).diagnosis[0]
    assert f"on average {verdict} beyond chance" in sentence
    corrected = "which excludes 0 alone; not beyond chance once corrected for the 2 statements"
    assert (corrected in sentence) == (p_value == 0.04)


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
            np.testing.assert_allclose(found[key][r], values[0], rtol=1e-12, err_msg=key)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """The AUROC of 20,000 rows is the population's; 80% intervals of 40 samples of 300."""
    truth = quick(*drawn(20_000), n_resamples=1).before.metrics["macro_auroc"].value
    held = 0
    for seed in range(40):
        report = quick(*drawn(300, seed=seed + 1), n_resamples=100, confidence_level=0.8)
        found = report.before.metrics["macro_auroc"]
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert 24 <= held <= 39  # of 40: 32 expected, a standard deviation is 2.5


def test_a_label_without_both_values_is_left_out_and_said_so() -> None:
    probs, labels = drawn()
    labels[:, 0], labels[:, 1] = 0, 1
    report = quick(probs, labels, class_names=["never", "always", "c", "d"])
    never, always = report.before.labels[:2]
    assert np.isnan(never.metrics["auroc"].value)
    assert np.isnan(never.metrics["average_precision"].value)
    assert np.isnan(always.metrics["auroc"].value)
    assert never.metrics["auroc"].low is None
    others = [roc_auc_score(labels[:, c], probs[:, c]) for c in (2, 3)]
    assert report.before.metrics["macro_auroc"].value == pytest.approx(np.mean(others))
    assert "The value is the same in all rows for never, always." in report.warnings[0]
    assert report.to_dict()["before"]["labels"][0]["metrics"]["auroc"]["value"] is None
    assert "not defined" in report.to_markdown()


def test_the_diagnosis_names_what_is_too_high_and_too_low() -> None:
    probs, labels = drawn(3000)
    probs = probs.copy()
    probs[:, 3] = 0.5 * probs[:, 3]
    probs[:, 0] = np.minimum(probs[:, 0] + 0.2, 1)
    report = quick(probs, labels, calibrated=drawn(3000)[0], class_names=["rare", "b", "c", "often"])
    before = " ".join(report.diagnosis[:3])
    assert "too high for rare (said" in before
    assert "too low for often (said" in before
    assert "b (said" not in before
    after = " ".join(report.diagnosis[3:])
    assert "Calibration takes the macro ECE from" in after
    assert "neither too high nor too low" in after
    assert "(said" not in after


def test_a_probability_of_one_for_a_label_that_does_not_apply_has_a_number() -> None:
    probs, labels = drawn()
    probs[0], labels[0] = 1.0, 0
    found = quick(probs, labels).before.metrics["micro_nll"]
    others = log_loss(labels[1:].ravel(), probs[1:].ravel())
    assert found.value == pytest.approx((others * 499 + 708.4) / 500, abs=1e-3)
    assert found.high is not None
    assert found.high > found.value


def test_few_rows_of_a_label_are_warned_of() -> None:
    probs, labels = drawn()
    labels[:, 0] = 0
    labels[:3, 0] = 1
    assert "Fewer than 10 rows have 0." in quick(probs, labels).warnings[0]


def test_documents_are_safe_whole_and_read_back(tmp_path: Path) -> None:
    probs, labels = drawn(temperature=0.5)
    report = quick(probs, labels, calibrated=drawn()[0], class_names=EVIL, name="m<i>| *x*")
    report.save(tmp_path)
    record = read_report(tmp_path / "report.json")
    assert record == json.loads(json.dumps(report.to_dict()))
    assert record["kind"] == "multi_label"
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert "<i>" not in html
    assert all(escape(name) in html or name in unescape(html) for name in EVIL)
    markdown = (tmp_path / "report.md").read_text()
    assert "<script" not in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len(lines) == 12 + 6  # two headers with their rules, 10 metrics, 4 labels
    assert "| Brier score, macro and micro |" in markdown  # all labels are known
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        "reliability",
        "classwise",
        "label_errors",
    }
    record["n_decisions"] += 1
    (tmp_path / "report.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"before.bins to count the 2001 decisions of n_decisions, got 2000"):
        read_report(tmp_path / "report.json")


@pytest.mark.slow
def test_saved_reports_are_compared(tmp_path: Path) -> None:
    for name, temperature in (("one", 0.5), ("two", 1.0)):
        quick(*drawn(temperature=temperature), name=name).save(tmp_path / name)
    sources = [str(tmp_path / "one"), str(tmp_path / "two")]
    comparison = Report(sources=sources, output=tmp_path / "out")()
    header, rows = comparison.table()
    assert header == ["metric", "one", "two"]
    assert "ECE, macro" in [row[0] for row in rows]
    assert "Consistency test of the ECE (p)" not in [row[0] for row in rows]
    assert (tmp_path / "out" / "figures" / "reliability.png").is_file()


def test_figures_show_every_name_and_nothing_overlaps() -> None:
    probs, labels = drawn(temperature=0.5)
    names = ["Pleural thickening", "Mass", "Nodule", "Hernia"]
    figures = quick(probs, labels, calibrated=drawn()[0], class_names=names).figures()
    for name in ("classwise", "label_errors"):
        assert all(label in written(figures[name]) for label in names)
    assert "after calibration" in written(figures["reliability"])
    assert "probability of the label" in written(figures["reliability"])
    for name, figure in figures.items():
        assert overlapping(figure) == [], name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probs": [[0.5, 1.2]]}, r"expected probs to lie in \[0, 1\], got 1.2 in row 0; pass sigmoid"),
        ({"probs": [[0.5, np.nan]]}, r"lie in \[0, 1\], got nan in row 0"),
        ({"probs": [0.5, 0.5]}, r"probs to have shape \(N, C\)"),
        ({"labels": [[0, 2]]}, r"labels to be 0 or 1, got 2 in row 0; leave a decision out with -100"),
        ({"labels": [[-100, -100]]}, "labels to be known somewhere"),
        ({"calibrated": [[0.5]]}, r"labels to have shape \(1, 1\)"),
        ({"class_names": ["a"]}, "class_names to be 2 names, got 1"),
        ({"n_bins": 0}, "n_bins to be at least 1"),
        ({"confidence_level": 1.0}, r"confidence_level to lie in \(0, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"probs": [[0.5, 0.5]], "labels": [[0, 1]], **change}
    with pytest.raises(ValueError, match=message):
        calibration_report(given.pop("probs"), given.pop("labels"), **given)


def test_integer_probabilities_are_refused() -> None:
    with pytest.raises(TypeError, match="expected probs to be a float array, got dtype int64"):
        calibration_report([[0, 1]], [[0, 1]])


def test_the_panels_are_the_bins_of_the_label() -> None:
    probs = np.array([[0.05], [0.15], [0.95], [0.85]])
    axes = label_reliability_grid(probs, [[0], [0], [1], [1]], n_bins=2).axes[0]
    points = axes.collections[-1].get_offsets()
    np.testing.assert_allclose(points, [[0.1, 0.0], [0.9, 1.0]])
    assert "error 0.100, 2 true" in [text.get_text() for text in axes.texts]
