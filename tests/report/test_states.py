"""The report from sums, with weights or without: the numbers of the report on held rows where both have them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hf_calib import metrics
from hf_calib.metrics import CalibrationState
from hf_calib.report import CalibrationReport, calibration_report, report_on_states
from tests.helpers.sampled import predictions


def state_of(
    probs: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> CalibrationState:
    state = CalibrationState(n_classes=probs.shape[1])
    state.update(probs, labels, weights)
    return state


@pytest.fixture(scope="module")
def both() -> tuple[CalibrationReport, CalibrationReport]:
    probs, labels = predictions(6_000, temperature=0.7)
    milder = probs**0.6 / (probs**0.6).sum(axis=1, keepdims=True)
    report = report_on_states(
        state_of(probs, labels), after=state_of(milder, labels), name="mine"
    )
    return report, calibration_report(probs, labels, calibrated=milder, name="mine")


def test_it_is_the_report_on_held_rows(both: tuple) -> None:  # type: ignore[type-arg]
    ours, theirs = both
    assert ours.n_examples == theirs.n_examples
    for state, held in ((ours.before, theirs.before), (ours.after, theirs.after)):
        for key, found in state.metrics.items():
            wanted, tolerance = held.metrics[key], 1e-11
            if key in ("adaptive_ece", "area_under_risk_coverage"):
                tolerance = 1e-3
            assert found.value == pytest.approx(wanted.value, abs=tolerance), key
            if (
                wanted.low is not None and found.low is not None
            ):  # of resamples, and of normal errors
                for end in ("low", "high"):
                    width = max(wanted.high - wanted.low, 1e-3)
                    assert getattr(found, end) == pytest.approx(
                        getattr(wanted, end), abs=0.25 * width
                    ), key
        for mine, other in zip(
            (*state.bins, *state.classes), (*held.bins, *held.classes), strict=True
        ):
            for name, value in vars(mine).items():
                if "p_value" not in name:
                    assert value == pytest.approx(getattr(other, name), abs=1e-9), name
        assert state.overall[:3] == pytest.approx(held.overall[:3], abs=1e-6)
        assert (state.consistency.p_value < 0.01) == (held.consistency.p_value < 0.01)
        assert state.consistency.expected == pytest.approx(
            held.consistency.expected, rel=0.1
        )
    # Sums have no paired interval of the change.
    assert ours.verdict == re.sub(r" \[[^]]*\]\.$", ".", theirs.verdict)
    assert "NLL lower by" in ours.verdict


def test_weights() -> None:
    """A sample that has too many of one class, weighed back, tells of the whole."""
    probs, labels = predictions(15_000, seed=4)
    whole = report_on_states(state_of(probs, labels))
    rng = np.random.default_rng(0)
    kept = rng.random(len(labels)) < np.where(labels == 0, 0.8, 0.2)
    weights = np.where(labels[kept] == 0, 1 / 0.8, 1 / 0.2)
    report = report_on_states(state_of(probs[kept], labels[kept], weights))
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
    milder = probs[kept] ** 0.6 / (probs[kept] ** 0.6).sum(axis=1, keepdims=True)
    held = calibration_report(
        probs[kept], labels[kept], calibrated=milder, sample_weight=weights
    )
    assert held.verdict.startswith(
        "Calibrated within chance before, under-confident by "
    )
    assert {
        key: held.before.metrics[key] for key in report.before.metrics
    } == report.before.metrics
    parts = metrics.brier_decomposition(
        probs[kept], labels[kept], sample_weight=weights
    )
    assert held.before.metrics["brier_calibration"].value == parts.calibration


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
