"""The report on predictions, of whatever kind their labels are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_calib.predictions.predictions import Predictions
from hf_calib.report._report import CalibrationReport, calibration_report
from hf_calib.report.entities import with_entities


def report_on_predictions(
    predictions: Predictions,
    name: str,
    n_bins: int,
    scaler: Any = None,
    *,
    soft_labels: Any = None,
    class_names: Sequence[str] | None = None,
) -> CalibrationReport:
    """The report on predictions, also after a fitted scaler where there is one.

    Args:
        predictions: of N examples.
        name: of the model, for titles.
        n_bins: M, at least 1.
        scaler: fitted on other examples; or None.
        soft_labels: (N, C) of the same examples; or None.
        class_names: the data's names of the C classes; None for those of the predictions.
    """
    report = calibration_report(
        predictions.probabilities(),
        predictions.labels,
        calibrated=None if scaler is None else scaler.predict_proba(predictions.as_logits()),
        soft_labels=soft_labels,
        n_bins=n_bins,
        class_names=class_names or predictions.class_names,
        name=name,
    )
    return with_entities(report, predictions.sentences)
