"""The figures of a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hf_calib.metrics.multi_label import check_decisions, label_bins
from hf_calib.plots import (
    class_reliability_grid,
    confidence_histogram,
    corp_diagram,
    label_reliability_grid,
    promise_diagram,
    reliability_diagram,
    reliability_grid,
    risk_coverage_diagram,
    roc_diagram,
    smooth_reliability_diagram,
)
from hf_calib.plots.classes import all_labels_reliability
from hf_calib.plots.rows import label_errors_chart
from hf_calib.report.text import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.decisions.measured import PromiseCurve
    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.assessment import Assessment

CAPTIONS = {
    "reliability": "Reliability in bins: accuracy against confidence, and the share of examples in each bin.",
    "smooth_reliability": "Reliability without bins: smoothed accuracy, thick where confidences are frequent, "
    "with a bootstrap band.",
    "corp": "Reliability by isotonic regression (CORP): the recalibrated confidence, and a pointwise band, which the "
    "curve of a calibrated model, too, leaves somewhere in most diagrams.",
    "confidence_histogram": "Confidences of right predictions (up) and of wrong ones (down).",
    "risk_coverage": "Error rate among the most confident predictions, against the share of them that is kept.",
    "decisions": "Share of inputs answered for a promised accuracy (left), and the accuracy of the answers with 95% "
    "intervals (right).",
    "entities": "Reliability of predicted entities, by the product and by the smallest of their tokens' probabilities.",
    "out_of_distribution": "Inputs from elsewhere that are flagged, against familiar ones that are, for every "
    "threshold.",
    "classwise": "How often a class is true against its probability, in bins with 95% Wilson intervals.",
}

LABEL_CAPTIONS = {
    "reliability": "All decisions: how often labels apply against their probability, with 95% Wilson intervals.",
    "classwise": "Single labels, those with the largest calibration error.",
    "label_errors": "The calibration error (ECE) of each label.",
}


def captions(report: CalibrationReport) -> dict[str, str]:
    """The caption of each figure."""
    return dict(LABEL_CAPTIONS if report.multi_label else CAPTIONS)


def alt_texts(report: CalibrationReport) -> dict[str, str]:
    """Each figure in numbers, for readers who cannot see it."""
    if report.multi_label:
        return _label_alt_texts(report)
    curves = report.decisions.curves if report.decisions is not None else {}
    promises = [_of_promises(name, curve) for name, curve in curves.items()]
    worst = max((report.after or report.before).classes, key=lambda row: row.class_gap)
    return {
        "reliability": f"Reliability diagram. {_numbers(report, _of_bins)}",
        "smooth_reliability": f"Smooth reliability diagram. {_numbers(report, _of_smooth_curve)}",
        "corp": f"CORP reliability diagram. {_numbers(report, _of_isotonic_curve)}",
        "confidence_histogram": f"Histogram of confidences. {_numbers(report, _of_confidences)}",
        "risk_coverage": f"Risk-coverage curve. {_numbers(report, _of_ranking)}",
        "decisions": f"Share answered for promised accuracies. {'; '.join(promises)}.",
        "entities": f"Reliability diagrams of entities. {_of_entities(report)}.",
        "out_of_distribution": f"ROC curves, area by score. {_of_detection(report)}.",
        "classwise": f"Reliability of single classes. Largest class gap: {worst.name}, {worst.class_gap:.4f}.",
    }


def _numbers(report: CalibrationReport, describe: Callable[[Assessment], str]) -> str:
    if report.after is None:
        return f"{describe(report.before)}."
    return f"Before: {describe(report.before)}. After calibration: {describe(report.after)}."


def _of_bins(assessment: Assessment) -> str:
    ece = assessment.metrics["ece"].value
    confidence = assessment.confidences.mean()
    accuracy = assessment.correct.mean()
    return f"ECE {ece:.4f}, mean confidence {confidence:.3f}, accuracy {accuracy:.3f}"


def _of_smooth_curve(assessment: Assessment) -> str:
    return f"smooth ECE {assessment.metrics['smooth_ece'].value:.4f}"


def _of_isotonic_curve(assessment: Assessment) -> str:
    metrics = assessment.metrics
    parts = (metrics[f"corp_{name}"].value for name in ("miscalibration", "discrimination"))
    return "miscalibration {:.4f}, discrimination {:.4f}".format(*parts)


def _of_confidences(assessment: Assessment) -> str:
    right = assessment.correct == 1
    groups = {"right": assessment.confidences[right], "wrong": assessment.confidences[~right]}
    return ", ".join(
        f"{len(group):,} {name}" + (f" with mean confidence {group.mean():.3f}" if len(group) else "")
        for name, group in groups.items()
    )


def _of_ranking(assessment: Assessment) -> str:
    area = assessment.metrics["area_under_risk_coverage"].value
    return f"area under the curve {area:.4f}, error rate {1 - assessment.correct.mean():.3f}"


def _of_promises(name: str, curve: PromiseCurve) -> str:
    pairs = zip(curve.promised, curve.answered, strict=True)
    return f"{name}: {', '.join(f'{answered:.1%} at {promised:.1%}' for promised, answered in pairs)}"


def _of_entities(report: CalibrationReport) -> str:
    if report.entities is None:
        return ""
    header, rows = report.entities.table()
    return "; ".join(
        f"{title}: {', '.join(f'{state} {cell}' for state, cell in zip(header[1:], cells, strict=True))}"
        for title, *cells in rows
    )


def _of_detection(report: CalibrationReport) -> str:
    return "; ".join(
        f"{section.name}: "
        + ", ".join(f"{name} {detection.auroc.value:.4f}" for name, detection in section.curves().items())
        for section in report.out_of_distribution
    )


def draw_figures(report: CalibrationReport) -> dict[str, Figure]:
    """Result of `CalibrationReport.figures`."""
    if report.multi_label:
        return _draw_label_figures(report)
    states = {report.name: report.before}
    if report.after is not None:
        states = {"before": report.before, "after calibration": report.after}
    panels = {name: (column.confidences, column.correct) for name, column in states.items()}
    final = report.after or report.before
    decisions = report.decisions
    promises = {"decisions": promise_diagram(decisions.curves)} if decisions and decisions.curves else {}
    entities = report.entities.panels() if report.entities is not None else {}
    elsewhere = {section.name: section.curves() for section in report.out_of_distribution}
    return {
        "reliability": reliability_diagram(panels, n_bins=report.n_bins),
        "smooth_reliability": smooth_reliability_diagram(
            panels, confidence_level=report.confidence_level, seed=report.seed
        ),
        "corp": corp_diagram(panels, seed=report.seed),
        "confidence_histogram": confidence_histogram(panels),
        "risk_coverage": risk_coverage_diagram(panels),
        **promises,
        **({"entities": reliability_grid(entities, n_bins=report.n_bins)} if entities else {}),
        **({"out_of_distribution": roc_diagram(elsewhere)} if elsewhere else {}),
        "classwise": class_reliability_grid(
            final.probs, report.labels, class_names=report.class_names, n_bins=report.n_bins
        ),
    }


def _draw_label_figures(report: CalibrationReport) -> dict[str, Figure]:
    """Of several labels a row."""
    states = {"model": report.before}
    if report.after is not None:
        states = {"before": report.before, "after calibration": report.after}
    labels = report.before.labels
    known = (c for c, label in enumerate(labels) if label.n_known)
    order = sorted(known, key=lambda c: -labels[c].metrics["ece"].value)
    errors = {
        name: np.array([state.labels[c].metrics["ece"].value for c in order])
        for name, state in states.items()
    }
    return {
        "reliability": all_labels_reliability(
            {
                name: label_bins(check_decisions(state.probs, report.labels), report.n_bins)
                for name, state in states.items()
            }
        ),
        "classwise": label_reliability_grid(
            report.final.probs,
            report.labels,
            class_names=report.class_names,
            n_bins=report.n_bins,
        ),
        "label_errors": label_errors_chart(errors, [report.class_names[c] for c in order]),
    }


def _label_alt_texts(report: CalibrationReport) -> dict[str, str]:
    """Each figure in numbers, for readers who cannot see it."""
    errors = {
        key: ", ".join(
            f"{name} {state.metrics[f'{key}_ece'].value:.4f}"
            for name, state in columns(report.before, report.after).items()
        )
        for key in ("micro", "macro")
    }
    known = (label for label in report.final.labels if label.n_known)
    worst = max(known, key=lambda label: label.metrics["ece"].value)
    return {
        "reliability": f"Reliability diagram of all decisions. ECE: {errors['micro']}.",
        "classwise": f"Reliability of single labels. Largest error: {worst.name}, "
        f"{worst.metrics['ece'].value:.4f}.",
        "label_errors": f"Calibration error of each label; their mean: {errors['macro']}.",
    }
