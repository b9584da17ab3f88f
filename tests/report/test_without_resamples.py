"""Reports on weighted rows, and on more rows than are resampled: the numbers of other reports where both have them."""

from __future__ import annotations

import numpy as np
import pytest

from hf_calib import metrics
from hf_calib.report import CalibrationReport, calibration_report, rows
from tests.helpers.sampled import predictions


@pytest.fixture(scope="module")
def both() -> tuple[CalibrationReport, CalibrationReport]:
    probs, labels = predictions(6_000, temperature=0.7)
    milder = probs**0.6 / (probs**0.6).sum(axis=1, keepdims=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "MOST_RESAMPLED", 5_999)
        report = calibration_report(probs, labels, calibrated=milder, name="mine")
    return report, calibration_report(probs, labels, calibrated=milder, name="mine")


@pytest.mark.slow
def test_more_rows_than_are_resampled(both: tuple) -> None:  # type: ignore[type-arg]
    ours, theirs = both
    assert ours.n_examples == theirs.n_examples
    for state, held in ((ours.before, theirs.before), (ours.after, theirs.after)):
        assert {*held.metrics} - {*state.metrics} == {
            "brier_calibration",
            "brier_refinement",
        }
        for key, found in state.metrics.items():
            wanted = held.metrics[key]
            assert found.value == wanted.value, key
            if wanted.low is None or key == "area_under_risk_coverage":
                assert found.low is None, key
                continue
            # The ends are of resamples, and of normal errors.
            width = max(wanted.high - wanted.low, 1e-3)
            for end in ("low", "high"):
                assert getattr(found, end) == pytest.approx(
                    getattr(wanted, end), abs=0.25 * width
                ), key
        assert state.bins == held.bins
        assert state.classes == held.classes
        assert state.overall == held.overall
        assert (state.consistency.p_value < 0.01) == (held.consistency.p_value < 0.01)
        assert state.consistency.expected == pytest.approx(
            held.consistency.expected, rel=0.1
        )
    assert ours.verdict == theirs.verdict
    assert "NLL lower by" in ours.verdict
    assert ours.to_dict()["before"]["metrics"]["nll"]["n_resamples"] == 0
    assert ours.to_dict()["n_resamples"] == 0
    assert "other metrics normal ones" in ours.to_markdown()
    assert "normal" not in theirs.to_markdown()
    assert {*ours.figures()} == {*theirs.figures()}


@pytest.mark.slow
def test_weights() -> None:
    """A sample that has too many of one class, weighed back, tells of the whole."""
    probs, labels = predictions(15_000, seed=4)
    whole = calibration_report(probs, labels, n_resamples=200)
    rng = np.random.default_rng(0)
    kept = rng.random(len(labels)) < np.where(labels == 0, 0.8, 0.2)
    weights = np.where(labels[kept] == 0, 1 / 0.8, 1 / 0.2)
    milder = probs[kept] ** 0.6 / (probs[kept] ** 0.6).sum(axis=1, keepdims=True)
    report = calibration_report(
        probs[kept], labels[kept], calibrated=milder, sample_weight=weights
    )
    for key in ("accuracy", "nll", "brier", "ece"):
        found, wanted = report.before.metrics[key], whole.before.metrics[key]
        assert found.low <= wanted.value <= found.high, key
    assert report.before.classes[0].frequency == pytest.approx(
        whole.before.classes[0].frequency, abs=0.01
    )
    assert "area_under_risk_coverage" not in report.before.metrics
    assert "Kish" in report.to_markdown()
    effective = weights.sum() ** 2 / (weights**2).sum()
    assert f"worth {effective:,.0f} unweighted ones," in report.to_markdown()
    assert report.verdict.startswith(
        "Calibrated within chance before, under-confident by "
    )
    assert {*report.figures()} == {"reliability", "risk_coverage", "classwise"}
    parts = metrics.brier_decomposition(
        probs[kept], labels[kept], sample_weight=weights
    )
    assert report.before.metrics["brier_calibration"].value == parts.calibration
    state = metrics.CalibrationState(n_classes=probs.shape[1])
    state.update(probs[kept], labels[kept], weights)
    for key, value in state.compute().items():
        # A state counts confidences in cells.
        tolerance = 1e-3 if key == "adaptive_ece" else 1e-11
        assert report.before.metrics[key].value == pytest.approx(value, abs=tolerance)


def test_weights_of_1_are_no_weights() -> None:
    probs, labels = predictions(500, temperature=0.7)
    plain = calibration_report(probs, labels, n_resamples=50)
    same = calibration_report(probs, labels, n_resamples=50, sample_weight=np.ones(500))
    assert same == plain


def test_whole_weights_are_copies_of_rows() -> None:
    """Every value, and the weighted share of each class and bin, is that of the copied rows."""
    probs, labels = predictions(800, temperature=0.7)
    times = np.random.default_rng(0).integers(0, 4, 800)
    weighted = calibration_report(probs, labels, sample_weight=times).before
    copied = calibration_report(
        probs.repeat(times, axis=0), labels.repeat(times), n_resamples=20
    ).before
    for key, found in weighted.metrics.items():
        # Quantile bins of rows have edges between them, and leave the least out.
        tolerance = 2e-3 if key == "adaptive_ece" else 1e-12
        wanted = copied.metrics[key].value
        assert found.value == pytest.approx(wanted, abs=tolerance), key
    for mine, other in zip(weighted.bins, copied.bins, strict=True):
        assert mine.gap == pytest.approx(other.gap, abs=1e-12)
        assert mine.contribution == pytest.approx(other.contribution, abs=1e-12)
    for one, another in zip(weighted.classes, copied.classes, strict=True):
        assert one.precision == pytest.approx(another.precision, abs=1e-12)
        assert one.frequency == pytest.approx(another.frequency, abs=1e-12)


def test_the_scale_of_weights_changes_no_interval() -> None:
    """Weights say how many rows one stands for relative to others; they are no rows."""
    probs, labels = predictions(500, temperature=0.7)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, 500)
    one, hundred = (
        calibration_report(
            probs, labels, sample_weight=weights * factor, n_resamples=200
        ).before
        for factor in (1, 100)
    )
    for key, found in one.metrics.items():
        same = [each for each in hundred.metrics[key] if each is not None]
        ends = [each for each in found if each is not None]
        assert same == pytest.approx(ends, rel=1e-6), key
    plain = calibration_report(probs, labels, n_resamples=200).before.metrics["ece"]
    width = one.metrics["ece"].high - one.metrics["ece"].low
    assert width >= 0.9 * (plain.high - plain.low)  # 460 effective rows of 500
