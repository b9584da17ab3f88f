"""A calibration report: metrics with intervals, tables, figures, and a diagnosis in words."""

from hf_calib.metrics.sums import Interval
from hf_calib.report.document import Document
from hf_calib.report.making import calibration_report, report_on_predictions
from hf_calib.report.measured import MEASURES, BinRow, ClassRow, Measure, Measured
from hf_calib.report.multi_label import LABEL_MEASURES
from hf_calib.report.report import CalibrationReport
from hf_calib.report.sections import (
    SOFT_MEASURES,
    DecisionSection,
    EntitySection,
    OodSection,
    SliceSection,
    SoftLabelSection,
    ood_section,
    with_entities,
)

__all__ = [
    "LABEL_MEASURES",
    "MEASURES",
    "SOFT_MEASURES",
    "BinRow",
    "CalibrationReport",
    "ClassRow",
    "DecisionSection",
    "Document",
    "EntitySection",
    "Interval",
    "Measure",
    "Measured",
    "OodSection",
    "SliceSection",
    "SoftLabelSection",
    "calibration_report",
    "ood_section",
    "report_on_predictions",
    "with_entities",
]
