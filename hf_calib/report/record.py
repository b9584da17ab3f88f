"""A report as plain data of JSON's own types, with None where there is no finite number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_calib.report.diagnosis import claims
from hf_calib.report.labels import LABEL_MEASURES, TITLES
from hf_calib.report.measures import MEASURES
from hf_calib.report.saved import MULTI_LABEL
from hf_calib.report.tables import worst_bins

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.any_report import AnyReport
    from hf_calib.report.assessment import Assessment, Measurements
    from hf_calib.report.labels import LabelMeasurements


def to_record(report: CalibrationReport) -> dict[str, Any]:
    """Result of `CalibrationReport.to_dict`."""
    measured = {
        state: None if each is None else _assessment(each, report)
        for state, each in (("before", report.before), ("after", report.after))
    }
    kind = {"kind": MULTI_LABEL, "n_decisions": report.n_decisions} if report.multi_label else {}
    return {
        **kind,
        "name": report.name,
        "n_examples": report.n_examples,
        "n_classes": report.n_classes,
        "n_bins": report.n_bins,
        "confidence_level": float(report.confidence_level),
        "n_resamples": int(report.n_resamples),
        "seed": int(report.seed),
        **measured,
        "diagnosis": list(report.diagnosis),
        "warnings": list(report.warnings),
        "decisions": None if report.decisions is None else report.decisions.to_dict(),
        "out_of_distribution": [section.to_dict() for section in report.out_of_distribution],
        "soft_labels": None if report.soft_labels is None else report.soft_labels.to_dict(),
        "entities": None if report.entities is None else report.entities.to_dict(),
        "slices": [section.to_dict() for section in report.slices],
        "about": dict(report.about),
    }


def _assessment(assessment: Assessment, report: CalibrationReport) -> dict[str, Any]:
    if assessment.gap is None:
        return measurements_record(assessment, report)
    return _metrics_and_bins(assessment, TITLES) | {
        "gap": _plain(assessment.gap._asdict()),
        "labels": [_label(label) for label in assessment.labels],
    }


def measurements_record(measured: Measurements, report: AnyReport) -> dict[str, Any]:
    """One set of probabilities of one class a row."""
    may, test = claims(report, measured), measured.consistency
    return _metrics_and_bins(measured, {key: measure.title for key, measure in MEASURES.items()}) | {
        "overall": {**_plain(may.overall._asdict()), "verdict": may.verdict},
        "consistency_test": _plain({key: getattr(test, key) for key in ("value", "p_value", "expected")}),
        "worst_bins": [_plain(vars(row)) for row in worst_bins(measured.bins)],
        "classes": [_plain(vars(row)) for row in measured.classes],
    }


def _metrics_and_bins(measured: Measurements, titles: Mapping[str, str]) -> dict[str, Any]:
    return {
        "metrics": {
            key: {
                "title": titles[key],
                **_plain(found._asdict()),
                "n_resamples": measured.n_resamples[key],
            }
            for key, found in measured.metrics.items()
        },
        "bins": [_plain(vars(row)) for row in measured.bins],
    }


def _label(label: LabelMeasurements) -> dict[str, Any]:
    titles = {"prevalence": "Prevalence", **LABEL_MEASURES}
    return {
        "name": label.name,
        "n_known": label.n_known,
        "n_true": label.n_true,
        "mean_probability": label.mean_probability,
        "metrics": {
            key: {"title": titles[key], **_plain(found._asdict())} for key, found in label.metrics.items()
        },
    }


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain_value(value) for key, value in fields.items()}


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
