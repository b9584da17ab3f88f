"""Several labels a row, each with a probability of its own: measured by label, on average, and all together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

from hf_calib._errors import few
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.multi_label import Decisions, LabelMetrics, check_decisions, label_bins, macro
from hf_calib.metrics.sums import BinSums, Interval, uniform_bins
from hf_calib.report.coins import Coins
from hf_calib.report.measured import Measured, Settings
from hf_calib.report.rows import Cells, bin_rows, columns, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.report import CalibrationReport

#: The metrics of a label in a multi-label report; macro is their mean over the labels, micro is of all decisions
#: together.
LABEL_MEASURES = {
    "auroc": "AUROC",
    "average_precision": "Average precision",
    "ece": "ECE",
    "mce": "Maximum calibration error",
    "brier": "Brier score",
    "nll": "Negative log-likelihood (nats)",
}
TITLES = {
    f"{average}_{key}": f"{title}, {average}"
    for key, title in LABEL_MEASURES.items()
    for average in ("macro", "micro")
}
CAPTIONS = {
    "reliability": "All decisions: how often labels apply against their probability, with 95% Wilson intervals.",
    "classwise": "Single labels, those with the largest calibration error.",
    "label_errors": "The calibration error (ECE) of each label.",
}
FOOTNOTES = (
    "Macro: the mean over the labels for which a metric is defined. Micro: of all decisions together, one for each row "
    "and label.",
    "ECE and maximum calibration error compare the probability of a label with how often it applies, in bins of equal "
    "width over [0, 1]. Noise makes both larger, and a resample adds that noise again: they have no interval.",
    "The labels of a row stay together in a resample.",
)
_BIASED = ("ece", "mce")  # by noise, which a resample would add again: without interval
_BUDGET = 3e7  # decisions that all resamples read together: seconds, not minutes
_FEWEST_RESAMPLES = 100
_FEW_TRUE = 10  # rows, below which a label's numbers say little
_NAMED = 5


@dataclass(frozen=True)
class LabelMeasurements:
    """One label, measured.

    Args:
        name: of the label.
        n_known: rows where it is known.
        n_true: rows where it applies.
        mean_probability: over the rows where it is known; equals the prevalence if calibrated.
        p_value: of a difference of n_true from its mean, either way, if the probabilities are right.
        metrics: "prevalence" and the keys of `LABEL_MEASURES`, each with its interval; NaN where it is not defined.
    """

    name: str
    n_known: int
    n_true: int
    mean_probability: float
    p_value: float
    metrics: Mapping[str, Interval]

    @property
    def gap(self) -> float:
        """Mean probability minus how often it applies."""
        return self.mean_probability - self.n_true / self.n_known


def affordable_resamples(decisions: Decisions, n_resamples: int) -> int:
    """How many resamples of the rows take seconds, and no minutes; 100 at least."""
    return min(n_resamples, max(_FEWEST_RESAMPLES, int(_BUDGET // decisions.probs.size)))


def measure_labels(decisions: Decisions, names: tuple[str, ...], settings: Settings) -> Measured:
    """Every measure of one set of probabilities."""
    (probs, true, known), n_bins = decisions, settings.n_bins
    n_rows, of_rows = len(probs), LabelMetrics(decisions, n_bins)
    drawn = np.random.default_rng(settings.seed).integers(0, n_rows, (settings.n_resamples, n_rows))
    counts = np.stack([np.bincount(rows, minlength=n_rows) for rows in drawn])
    found, resampled = of_rows.evaluate(np.ones((1, n_rows), np.intp)), of_rows.evaluate(counts)

    def interval(value: float, draws: FloatArray, key: str = "") -> Interval:
        defined = draws[~np.isnan(draws)]
        if key in _BIASED or np.isnan(value) or not len(defined):
            return Interval(float(value))
        tail = (1 - settings.confidence_level) / 2
        return Interval(float(value), *np.quantile(defined, [tail, 1 - tail]).tolist())

    average, averages = macro(found), macro(resampled)
    metrics = {}
    for key in LABEL_MEASURES:
        metrics[f"macro_{key}"] = interval(average[key][0], averages[key], key)
        metrics[f"micro_{key}"] = interval(found[key][0, -1], resampled[key][:, -1], key)
    gaps, sizes = np.where(known, probs - true, 0).sum(axis=1), known.sum(axis=1)
    n_known, n_true = known.sum(axis=0), (known & true).sum(axis=0)
    stated = np.where(known, probs, 0)
    of_labels = Coins.of_columns(stated)
    labels = tuple(
        LabelMeasurements(
            name=name,
            n_known=int(n_known[c]),
            n_true=int(n_true[c]),
            mean_probability=float(stated[:, c].sum() / max(n_known[c], 1)),
            p_value=of_labels.group(c).p_value(float(n_true[c])),
            metrics={
                key: interval(found[key][0, c], resampled[key][:, c], key)
                for key in ("prevalence", *LABEL_MEASURES)
            },
        )
        for c, name in enumerate(names)
    )
    sums = BinSums(*(each.sum(axis=0) for each in label_bins(decisions, n_bins)))
    return Measured(
        metrics=metrics,
        n_resamples=dict.fromkeys(metrics, settings.n_resamples),
        bins=bin_rows(sums, Coins.of(probs[known], uniform_bins(probs[known], n_bins), n_bins)),
        probs=probs,
        confidences=probs[known],
        correct=true[known].astype(np.float64),
        gap=interval(gaps.sum() / sizes.sum(), (counts @ gaps) / np.maximum(counts @ sizes, 1)),
        labels=labels,
    )


def titles_of(report: CalibrationReport) -> dict[str, str]:
    """The metrics of a report by their keys; where all labels are known, two averages of the same are one."""
    titles = dict(TITLES)
    if report.n_decisions == report.n_examples * report.n_classes:
        for key in ("brier", "nll"):
            titles[f"macro_{key}"] += " and micro"
            del titles[f"micro_{key}"]
    return titles


def label_table(report: CalibrationReport) -> Cells:
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
        prevalence, *others = [with_interval(*label.metrics[key], form=".3f") for key in keys]
        cells = [label.name, prevalence, f"{label.mean_probability:.3f}", *others]
        rows.append(
            cells + [with_interval(*raw.metrics[key], form=".3f") for key in ("ece", "brier") if before]
        )
    return header + before, rows


def draw_labels(report: CalibrationReport) -> dict[str, Figure]:
    """The figures of a report by name."""
    from hf_calib.plots import label_reliability_grid
    from hf_calib.plots.classes import all_labels_reliability
    from hf_calib.plots.rows import label_errors_chart

    states, names, n_bins = report.panels, report.class_names, report.n_bins
    labels = report.before.labels
    known = (c for c, label in enumerate(labels) if label.n_known)
    order = sorted(known, key=lambda c: -labels[c].metrics["ece"].value)
    errors = {
        name: np.array([state.labels[c].metrics["ece"].value for c in order])
        for name, state in states.items()
    }
    bins = {
        name: label_bins(check_decisions(state.probs, report.labels), n_bins)  # type: ignore[arg-type]
        for name, state in states.items()
    }
    final, targets = report.final.probs, report.labels
    return {
        "reliability": all_labels_reliability(bins),
        "classwise": label_reliability_grid(final, targets, class_names=names, n_bins=n_bins),  # type: ignore[arg-type]
        "label_errors": label_errors_chart(errors, [names[c] for c in order]),
    }


def diagnose_labels(report: CalibrationReport) -> list[str]:
    """The sentences of a report: probabilities that are too high or too low, and for which labels."""
    states = columns(report.before, report.after)
    sentences = []
    for name, state in states.items():
        if name == "after":
            keys = ("macro_ece", "micro_nll")
            pairs = [(report.before.metrics[key].value, state.metrics[key].value) for key in keys]
            changes = [f"from {before:.4f} to {after:.4f}" for before, after in pairs]
            sentences.append(
                f"Calibration takes the macro ECE {changes[0]}, and the NLL of a decision {changes[1]}."
            )
        start = "" if name == "value" else f"{name} calibration: "
        found = [start + sentence for sentence in _of_state(state, report.confidence_level, len(states))]
        sentences += [sentence[0].upper() + sentence[1:] for sentence in found]
    return sentences


def _of_state(state: Measured, confidence_level: float, n_sets: int) -> list[str]:
    gap = state.gap
    assert gap is not None
    low, high = (gap.value if end is None else end for end in (gap.low, gap.high))
    # The decisions of a row depend on each other, as the interval of their mean knows.
    error = (high - low) / 2 / ndtri((1 + confidence_level) / 2)
    average = float(2 * ndtr(-abs(gap.value) / error)) if error > 0 else 1.0
    each = [label.p_value for label in state.labels]
    # Of so many claims some would be made by chance: see `hf_calib.report.diagnosis.claims`.
    level = (1 - confidence_level) / n_sets
    ordered = sorted((average, min(1.0, min(each) * len(each))))
    level = level if ordered[0] <= level / 2 or ordered[1] <= level else 0.0
    verdict = "neither too high nor too low"
    alone = ""
    if average < level:
        verdict = "too high" if gap.value > 0 else "too low"
    elif not low <= 0 <= high:
        corrected = f"not beyond chance once corrected for the {2 * n_sets} statements of this report"
        alone = f", which excludes 0 alone; {corrected}"
    sentences = [
        f"probabilities are on average {verdict} beyond chance (mean probability minus how often labels apply: "
        f"{gap.value:+.4f} [{low:+.4f}, {high:+.4f}]{alone})."
    ]
    misjudged = [label for label in state.labels if label.p_value < level / len(each)]
    for verdict, sign in (("too high", 1), ("too low", -1)):
        found = sorted(
            (label for label in misjudged if sign * label.gap > 0), key=lambda label: -abs(label.gap)
        )
        names = [
            f"{label.name} (said {label.mean_probability:.3f}, applies in {label.n_true / label.n_known:.3f})"
            for label in found[:_NAMED]
        ]
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        sentences += [f"beyond chance {verdict} for {', '.join(names)}{more}."] if found else []
    return sentences


def warn_of_labels(report: CalibrationReport) -> list[str]:
    """Caveats: labels with one value, and few true rows."""
    labels, found = report.before.labels, []
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
    return found
