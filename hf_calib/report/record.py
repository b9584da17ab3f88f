"""A report as plain data of JSON's own types, with None where there is no finite number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hf_calib.report.diagnosis import overall
from hf_calib.report.measures import MEASURES, Measurement
from hf_calib.report.saved import MULTI_LABEL
from hf_calib.report.tables import worst_bins

if TYPE_CHECKING:
    from hf_calib.report._report import Assessment, CalibrationReport
    from hf_calib.report.multi_label import MultiLabelAssessment, MultiLabelReport


def to_record(report: CalibrationReport) -> dict[str, Any]:
    """What `CalibrationReport.to_dict` returns."""
    return {
        "name": report.name,
        "n_examples": report.n_examples,
        "n_classes": report.n_classes,
        "n_bins": report.n_bins,
        "confidence_level": float(report.confidence_level),
        "n_resamples": int(report.n_resamples),
        "seed": int(report.seed),
        "before": _assessment(report.before, report.confidence_level),
        "after": None if report.after is None else _assessment(report.after, report.confidence_level),
        "diagnosis": list(report.diagnosis),
        "warnings": list(report.warnings),
        "decisions": None if report.decisions is None else report.decisions.to_dict(),
        "out_of_distribution": [section.to_dict() for section in report.out_of_distribution],
        "soft_labels": None if report.soft_labels is None else report.soft_labels.to_dict(),
        "entities": None if report.entities is None else report.entities.to_dict(),
        "about": dict(report.about),
    }


def multi_label_record(report: MultiLabelReport) -> dict[str, Any]:
    """What `MultiLabelReport.to_dict` returns."""
    return {
        "kind": MULTI_LABEL,
        "name": report.name,
        "n_examples": report.n_examples,
        "n_classes": len(report.class_names),
        "n_decisions": report.n_decisions,
        "n_bins": report.n_bins,
        "confidence_level": float(report.confidence_level),
        "n_resamples": int(report.n_resamples),
        "seed": int(report.seed),
        "before": _multi_label_assessment(report.before),
        "after": None if report.after is None else _multi_label_assessment(report.after),
        "diagnosis": list(report.diagnosis),
        "warnings": list(report.warnings),
        "about": dict(report.about),
    }


def _multi_label_assessment(assessment: MultiLabelAssessment) -> dict[str, Any]:
    from hf_calib.report.multi_label import LABEL_MEASURES, TITLES

    titles = {"prevalence": "Prevalence", **LABEL_MEASURES}
    return {
        "metrics": {
            key: {"title": TITLES[key], **_measurement(value)} for key, value in assessment.metrics.items()
        },
        "gap": _measurement(assessment.gap),
        "bins": [_plain(vars(row)) for row in assessment.bins],
        "labels": [
            {
                "name": label.name,
                "n_known": label.n_known,
                "n_true": label.n_true,
                "mean_probability": label.mean_probability,
                "metrics": {
                    key: {"title": titles[key], **_measurement(value)} for key, value in label.metrics.items()
                },
            }
            for label in assessment.labels
        ],
    }


def _assessment(assessment: Assessment, level: float) -> dict[str, Any]:
    found = overall(assessment, level)
    return {
        "metrics": {
            key: {"title": MEASURES[key].title, **_measurement(value)}
            for key, value in assessment.metrics.items()
        },
        "overall": {**_plain(found._asdict()), "verdict": found.verdict},
        "consistency_test": _plain(
            {key: getattr(assessment.consistency, key) for key in ("value", "p_value", "expected")}
        ),
        "bins": [_plain(vars(row)) for row in assessment.bins],
        "worst_bins": [_plain(vars(row)) for row in worst_bins(assessment.bins)],
        "classes": [_plain(vars(row)) for row in assessment.classes],
    }


def _measurement(measurement: Measurement) -> dict[str, Any]:
    return _plain(vars(measurement))


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain_value(value) for key, value in fields.items()}


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
