"""A report against soft labels: those of CIFAR-10H, and what must hold of any."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib.metrics import bootstrap_interval, true_calibration_error
from hf_calib.report import SOFT_MEASURES, CalibrationReport, calibration_report

N, C = 120, 4


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities, shares of a few annotators, and labels drawn from the truth that both stand for."""
    rng = np.random.default_rng(seed)
    truth = softmax(2 * rng.standard_normal((N, C)), axis=1)
    probs = softmax(1.5 * np.log(truth), axis=1)
    shares = np.array([rng.multinomial(20, row) for row in truth]) / 20
    return probs, shares, shares.argmax(axis=1)


def quick(*arrays: np.ndarray, **options: object) -> CalibrationReport:
    return calibration_report(*arrays, n_resamples=50, **options)  # type: ignore[arg-type]


def test_probabilities_equal_to_the_shares_are_perfect() -> None:
    _, shares, labels = drawn()
    found = quick(shares, labels, soft_labels=shares).soft_labels
    assert found is not None
    assert set(found.before) == set(SOFT_MEASURES)
    for key in ("ece", "adaptive_ece", "classwise_ece", "true_calibration_error", "brier"):
        assert found.before[key].value == pytest.approx(0, abs=1e-12)
    assert found.before["nll"].value == pytest.approx(found.entropy)
    assert found.agreement == 1


def test_before_and_after_are_in_every_form_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CalibrationReport, "figures", lambda self: {}
    )  # which take seconds, and show none of this
    probs, shares, labels = drawn()
    report = quick(probs, labels, calibrated=softmax(np.log(probs) / 1.5, axis=1), soft_labels=shares)
    assert report.soft_labels is not None
    assert report.soft_labels.after is not None
    assert report.soft_labels.after["nll"].value < report.soft_labels.before["nll"].value
    record = json.loads(json.dumps(report.to_dict(), allow_nan=False))["soft_labels"]
    assert record["before"]["ece"]["value"] == report.soft_labels.before["ece"].value
    header, rows = report.soft_labels.table()
    assert header == ["against soft labels", "before", "after"]
    assert [row[0] for row in rows] == [measure.title for measure in SOFT_MEASURES.values()]
    assert "## Against soft labels" in report.to_markdown()
    assert "<h2>Against soft labels</h2>" in report.to_html()
    assert quick(probs, labels).to_dict()["soft_labels"] is None
    assert "soft labels" not in quick(probs, labels).to_markdown()


def test_rows_or_classes_in_another_order_are_pointed_out() -> None:
    probs, shares, labels = drawn()
    right = quick(probs, labels, soft_labels=shares).soft_labels
    wrong = quick(probs, labels, soft_labels=np.roll(shares, 1, axis=1)).soft_labels
    assert right is not None
    assert wrong is not None
    assert "Check that rows and classes" in wrong.sentences()[-1]
    assert "Check that rows and classes" not in " ".join(right.sentences())


def test_the_interval_of_the_true_calibration_error_is_that_of_its_function() -> None:
    """Which is faster by the distances of the rows: their mean is the metric."""
    probs, shares, _ = drawn()
    by_name = bootstrap_interval("true_calibration_error", probs, shares, n_resamples=200)
    assert by_name == pytest.approx(
        bootstrap_interval(lambda p, y: true_calibration_error(p, y), probs, shares, n_resamples=200)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda s: (20 * s).astype(int),
            TypeError,
            "soft_labels to be a float array, got dtype int64; divide",
        ),
        (lambda s: s[:-1], ValueError, r"soft_labels to have shape \(120, 4\), got shape \(119, 4\)"),
        (
            lambda s: s / 2,
            ValueError,
            "each row of soft_labels to sum to 1, got 0.5 in row 0; divide each row",
        ),
        (lambda s: s * np.nan, ValueError, r"soft_labels to be finite, got nan"),
        (lambda s: s.argmax(axis=1).astype(float), ValueError, r"got shape \(120,\)"),
    ],
)
def test_other_arrays_are_refused(change: object, error: type[Exception], message: str) -> None:
    probs, shares, labels = drawn()
    with pytest.raises(error, match=message):
        quick(probs, labels, soft_labels=change(shares))  # type: ignore[operator]


def test_on_cifar_10h_hard_labels_look_worse_than_the_annotators(shared_data: Path) -> None:
    """A model that says what people say is calibrated, but not by the one label that each image has."""
    with np.load(shared_data / "cifar10h" / "cifar10h.npz", allow_pickle=False) as file:
        shares, labels = file["probs"][:2000], file["labels"][:2000]
    report = quick(shares, labels, soft_labels=shares)
    assert report.soft_labels is not None
    assert report.soft_labels.agreement == pytest.approx(0.992, abs=0.004)
    assert report.soft_labels.before["ece"].value == pytest.approx(0, abs=1e-12)
    assert report.before.metrics["ece"].value > 0.02  # people are under-confident of the label that was kept
