"""Diagnosis of a report on several labels a row: probabilities that are too high or too low, and for which labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scipy.special import ndtr, ndtri

from hf_calib._errors import few
from hf_calib.metrics.sums import Interval

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.assessment import Assessment
    from hf_calib.report.labels import LabelMeasurements

_FEW_TRUE = 10  # rows, below which a label's numbers say little
_NAMED = 5


def diagnose_labels(report: CalibrationReport) -> tuple[str, ...]:
    """The sentences of a report."""
    sentences = _of_state(report, report.before, "" if report.after is None else "Before calibration: ")
    if report.after is not None:
        pairs = [
            (report.before.metrics[key], report.after.metrics[key]) for key in ("macro_ece", "micro_nll")
        ]
        said = [f"from {before.value:.4f} to {after.value:.4f}" for before, after in pairs]
        sentences.append(f"Calibration takes the macro ECE {said[0]}, and the NLL of a decision {said[1]}.")
        sentences += _of_state(report, report.after, "After calibration: ")
    return tuple(sentences)


def _of_state(report: CalibrationReport, state: Assessment, start: str) -> list[str]:
    gap = state.gap
    assert gap is not None
    low, high = (gap.value if end is None else end for end in (gap.low, gap.high))
    average, each = _p_value_of_average(report, gap), [label.p_value for label in state.labels]
    # Of so many claims some would be made by chance: see `hf_calib.report.diagnosis.claims`.
    n_sets = 1 if report.after is None else 2
    level = (1 - report.confidence_level) / n_sets
    ordered = sorted((average, min(1.0, min(each) * len(each))))
    level = level if ordered[0] <= level / 2 or ordered[1] <= level else 0.0
    verdict, alone = "neither too high nor too low", ""
    if average < level:
        verdict = "too high" if gap.value > 0 else "too low"
    elif not low <= 0 <= high:
        corrected = f"not beyond chance once corrected for the {2 * n_sets} statements of this report"
        alone = f", which excludes 0 alone; {corrected}"
    said = [
        f"{start}probabilities are on average {verdict} beyond chance (mean probability minus how often labels apply: "
        f"{gap.value:+.4f} [{low:+.4f}, {high:+.4f}]{alone})."
    ]
    misjudged = [label for label, p in zip(state.labels, each, strict=True) if p < level / len(each)]
    for verdict, sign in (("too high", 1), ("too low", -1)):
        found = sorted(
            (label for label in misjudged if sign * _gap(label) > 0), key=lambda label: -sign * _gap(label)
        )
        if found:
            names = [
                f"{label.name} (said {label.mean_probability:.3f}, applies in "
                f"{label.n_true / label.n_known:.3f})"
                for label in found[:_NAMED]
            ]
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            said.append(f"{start}beyond chance {verdict} for {', '.join(names)}{more}.")
    return [sentence[0].upper() + sentence[1:] for sentence in said]


def _p_value_of_average(report: CalibrationReport, gap: Interval) -> float:
    """Of the mean difference over all decisions; those of a row depend on each other, as its interval knows."""
    if gap.low is None or gap.high <= gap.low:
        return 1.0
    error = (gap.high - gap.low) / 2 / ndtri((1 + report.confidence_level) / 2)
    return float(2 * ndtr(-abs(gap.value) / error))


def _gap(label: LabelMeasurements) -> float:
    return label.mean_probability - label.n_true / label.n_known


def warnings_about_labels(report: CalibrationReport) -> tuple[str, ...]:
    """The report's notes, and warnings about labels with one value, or few true rows."""
    found = list(report.notes)
    labels = report.before.labels
    one_value = [label.name for label in labels if label.n_true in (0, label.n_known)]
    rare = [label.name for label in labels if 0 < label.n_true < min(_FEW_TRUE, label.n_known)]
    if one_value:
        found.append(
            f"The value is the same in all rows for {few(one_value)}. There is no AUROC of such a label, and the "
            "macro averages of what is not defined leave it out."
        )
    if rare:
        found.append(
            f"Fewer than {_FEW_TRUE} rows have {few(rare)}. The numbers of such a label, and its part of the macro "
            "averages, are uncertain. Test on more rows."
        )
    return tuple(found)
