"""A calibration report: every metric with its interval, tables, figures, and what they mean in words."""

from hf_calib.report._report import Assessment, CalibrationReport, calibration_report
from hf_calib.report.decisions import DecisionSection
from hf_calib.report.entities import EntitySection, with_entities
from hf_calib.report.measures import MEASURES, Measure, Measurement
from hf_calib.report.multi_label import MultiLabelReport, multi_label_report
from hf_calib.report.of_predictions import report_on_predictions
from hf_calib.report.out_of_distribution import OodSection, ood_section
from hf_calib.report.soft_labels import SOFT_MEASURES, SoftLabelSection
from hf_calib.report.tables import BinRow, ClassRow

__all__ = [
    "MEASURES",
    "SOFT_MEASURES",
    "Assessment",
    "BinRow",
    "CalibrationReport",
    "ClassRow",
    "DecisionSection",
    "EntitySection",
    "Measure",
    "Measurement",
    "MultiLabelReport",
    "OodSection",
    "SoftLabelSection",
    "calibration_report",
    "multi_label_report",
    "ood_section",
    "report_on_predictions",
    "with_entities",
]
