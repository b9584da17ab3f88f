"""The words, tables and pages of a multi-label report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_calib._errors import few
from hf_calib._markdown import escape, markdown_table
from hf_calib.report.multi_label import TITLES, LabelMeasurements, MultiLabelAssessment
from hf_calib.report.page import bullets, draw, figures, lead, page, section, table
from hf_calib.report.tables import gap_p_value
from hf_calib.report.text import Table, with_interval

if TYPE_CHECKING:
    from hf_calib.report.measures import Measurement
    from hf_calib.report.multi_label import MultiLabelReport

_FEW_TRUE = 10  # rows, below which a label's numbers say little
_NAMED = 5
_FOOTNOTES = (
    "Macro: the mean over the labels for which a metric is defined. Micro: of all decisions together, one for each row "
    "and label.",
    "ECE and maximum calibration error compare the probability of a label with how often it applies, in bins of equal "
    "width over [0, 1]. They are biased upwards in small samples, and so are their intervals.",
    "The labels of a row stay together in a resample.",
)
_CAPTIONS = {
    "reliability": "All decisions: how often labels apply against their probability, with 95% Wilson intervals.",
    "classwise": "Single labels, those with the largest calibration error.",
    "label_errors": "The calibration error (ECE) of each label.",
}


def summary(report: MultiLabelReport) -> str:
    """One line on what was measured."""
    return (
        f"{report.n_examples:,} examples, {len(report.class_names):,} labels, {report.n_decisions:,} decisions, "
        f"{report.n_bins} bins; intervals of {100 * report.confidence_level:g}% from {report.n_resamples:,} bootstrap "
        f"resamples, seed {report.seed}."
    )


def diagnose(report: MultiLabelReport, quote: Callable[[str], str] = str) -> tuple[str, ...]:
    """The sentences of a report; `quote` makes a name from the data safe for where they go."""
    sentences = _of_state(
        report, report.before, "" if report.after is None else "Before calibration: ", quote
    )
    if report.after is not None:
        pairs = [
            (report.before.metrics[key], report.after.metrics[key]) for key in ("macro_ece", "micro_nll")
        ]
        said = [f"from {before.value:.4f} to {after.value:.4f}" for before, after in pairs]
        sentences.append(f"Calibration takes the macro ECE {said[0]}, and the NLL of a decision {said[1]}.")
        sentences += _of_state(report, report.after, "After calibration: ", quote)
    return tuple(sentences)


def _of_state(
    report: MultiLabelReport, state: MultiLabelAssessment, start: str, quote: Callable[[str], str]
) -> list[str]:
    gap = state.gap
    low, high = (gap.value if end is None else end for end in (gap.low, gap.high))
    verdict = "too high" if low > 0 else "too low" if high < 0 else "neither too high nor too low"
    said = [
        f"{start}probabilities are on average {verdict} (mean probability minus how often labels apply: "
        f"{gap.value:+.4f} [{low:+.4f}, {high:+.4f}])."
    ]
    # Of so many labels some would differ by chance.
    level = (1 - report.confidence_level) / len(state.labels)
    misjudged = [label for label in state.labels if _p_value(label) < level]
    for verdict, sign in (("too high", 1), ("too low", -1)):
        found = sorted(
            (label for label in misjudged if sign * _gap(label) > 0), key=lambda label: -sign * _gap(label)
        )
        if found:
            names = [
                f"{quote(label.name)} (said {label.mean_probability:.3f}, applies in "
                f"{label.n_true / label.n_known:.3f})"
                for label in found[:_NAMED]
            ]
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            said.append(f"{start}beyond chance {verdict} for {', '.join(names)}{more}.")
    return [sentence[0].upper() + sentence[1:] for sentence in said]


def _gap(label: LabelMeasurements) -> float:
    return label.mean_probability - label.n_true / label.n_known


def _p_value(label: LabelMeasurements) -> float:
    if not label.n_known:
        return 1.0
    return gap_p_value(label.n_known, label.mean_probability * label.n_known, label.n_true)


def warnings_about_data(report: MultiLabelReport, quote: Callable[[str], str] = str) -> tuple[str, ...]:
    """What makes the numbers uncertain."""
    found = [quote(note) for note in report.notes]
    labels = report.before.labels
    one_value = [quote(label.name) for label in labels if label.n_true in (0, label.n_known)]
    rare = [quote(label.name) for label in labels if 0 < label.n_true < min(_FEW_TRUE, label.n_known)]
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


def states(report: MultiLabelReport) -> dict[str, MultiLabelAssessment]:
    """The sets of probabilities by the name that tables give them."""
    if report.after is None:
        return {"value": report.before}
    return {"before": report.before, "after": report.after}


def metric_table(report: MultiLabelReport) -> Table:
    """Macro and micro metrics, before and after."""
    columns = states(report)
    titles = dict(TITLES)
    if report.n_decisions == report.n_examples * len(report.class_names):
        for key in ("brier", "nll"):  # means of decisions: where all are known, the two averages are the same
            titles[f"macro_{key}"] += " and micro"
            del titles[f"micro_{key}"]
    rows = [
        [title, *(_cell(state.metrics[key]) for state in columns.values())] for key, title in titles.items()
    ]
    return ["metric", *columns], rows


def label_table(report: MultiLabelReport, quote: Callable[[str], str] = str) -> Table:
    """Every label with its metrics, and where there is a calibration its errors before it, too."""
    header = [
        "label",
        "prevalence",
        "mean probability",
        "AUROC",
        "average precision",
        "ECE",
        "maximum",
        "Brier",
    ]
    before = [] if report.after is None else ["ECE before", "Brier before"]
    rows = []
    for label, raw in zip(report.final.labels, report.before.labels, strict=True):
        keys = ("prevalence", "auroc", "average_precision", "ece", "mce", "brier")
        prevalence, *others = [_cell(label.metrics[key], ".3f") for key in keys]
        cells = [quote(label.name), prevalence, f"{label.mean_probability:.3f}", *others]
        rows.append(cells + [_cell(raw.metrics[key], ".3f") for key in ("ece", "brier") if before])
    return header + before, rows


def _cell(measured: Measurement, form: str = ".4f") -> str:
    if measured.value != measured.value:
        return "not defined"
    return with_interval(measured.value, measured.low, measured.high, form)


def _labels_title(report: MultiLabelReport) -> str:
    return "Labels" if report.after is None else "Labels, after calibration"


def to_markdown(report: MultiLabelReport) -> str:
    """What `MultiLabelReport.to_markdown` returns."""
    lines = [f"# Calibration of {escape(report.name)}", "", summary(report), "", "## Diagnosis", ""]
    lines += [f"- {sentence}" for sentence in diagnose(report, escape)]
    caveats = warnings_about_data(report, escape)
    if caveats:
        lines += ["", "## Caveats", "", *(f"- {sentence}" for sentence in caveats)]
    lines += ["", "## Metrics", "", *markdown_table(*metric_table(report)), ""]
    lines += [f"- {note}" for note in _FOOTNOTES]
    lines += ["", f"## {_labels_title(report)}", "", *markdown_table(*label_table(report, escape))]
    return "\n".join(lines) + "\n"


def to_html(report: MultiLabelReport) -> str:
    """What `MultiLabelReport.to_html` returns."""
    level = f"{100 * report.confidence_level:g}%"
    images = {name: draw(figure) for name, figure in report.figures().items()}
    metrics = table(f"Metrics with their {level} bootstrap intervals", *metric_table(report))
    labels = table(f"Labels with their {level} bootstrap intervals", *label_table(report))
    parts = [
        lead(summary(report)),
        section("Diagnosis", bullets(report.diagnosis)),
        section("Caveats", bullets(report.warnings)) if report.warnings else "",
        section("Metrics", metrics, bullets(_FOOTNOTES, "notes")),
        section(_labels_title(report), labels),
        section("Figures", figures(images, _CAPTIONS, _alt_texts(report))),
    ]
    return page(f"Calibration of {report.name}", parts)


def _alt_texts(report: MultiLabelReport) -> dict[str, str]:
    """What each figure shows, in numbers, for readers who cannot see it."""
    errors = {
        key: ", ".join(
            f"{name} {state.metrics[f'{key}_ece'].value:.4f}" for name, state in states(report).items()
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
