"""A calibration report: every metric with its interval, tables, figures, and what they mean in words."""

from hf_calib.metrics.sums import Interval
from hf_calib.report._report import CalibrationReport, calibration_report
from hf_calib.report.assessment import Assessment
from hf_calib.report.decisions import DecisionSection
from hf_calib.report.document import Document
from hf_calib.report.entities import EntitySection, with_entities
from hf_calib.report.labels import LABEL_MEASURES
from hf_calib.report.measures import MEASURES, Measure
from hf_calib.report.of_predictions import report_on_predictions
from hf_calib.report.one_pass import OnePassReport, report_on_states
from hf_calib.report.out_of_distribution import OodSection, ood_section
from hf_calib.report.slices import SliceSection
from hf_calib.report.soft_labels import SOFT_MEASURES, SoftLabelSection
from hf_calib.report.tables import BinRow, ClassRow

__all__ = [
    "LABEL_MEASURES",
    "MEASURES",
    "SOFT_MEASURES",
    "Assessment",
    "BinRow",
    "CalibrationReport",
    "ClassRow",
    "DecisionSection",
    "Document",
    "EntitySection",
    "Interval",
    "Measure",
    "OnePassReport",
    "OodSection",
    "SliceSection",
    "SoftLabelSection",
    "calibration_report",
    "ood_section",
    "report_on_predictions",
    "report_on_states",
    "with_entities",
]
