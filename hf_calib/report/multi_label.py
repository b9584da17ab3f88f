"""Multi-label data in a report: metrics of each label, their means, and metrics of all decisions together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.multi_label import (
    Decisions,
    LabelMetrics,
    check_decisions,
    label_bins,
    macro,
)
from hf_calib.metrics.sums import BinSums, Interval, interval_of, uniform_bins
from hf_calib.plots.binned import OF_LABELS, all_labels_reliability, classes_of_sums
from hf_calib.report.chance import Coins
from hf_calib.report.document import Cells, cell
from hf_calib.report.measured import Measured, Overall, Settings, bin_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.report import CalibrationReport

#: The metrics of a label in a multi-label report; macro is their mean, micro is of all decisions together.
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
    "reliability": "All decisions: frequency of labels against their probability, with 95% Wilson intervals.",
    "classwise": "The labels with the largest calibration errors.",
}
FOOTNOTES = (
    "Macro: the mean over the labels for which a metric is defined. Micro: the metric of all decisions together, one "
    "for each row and label. The labels of a row stay together in a resample.",
    "ECE and maximum calibration error compare the probability of a label with its frequency, in bins of equal width "
    "over [0, 1]. Noise makes both larger, and a resample adds that noise again, so they have no interval.",
)
_BIASED = (
    "ece",
    "mce",
)  # Noise biases them, and a resample would add it again, so they have no interval.


@dataclass(frozen=True)
class LabelMeasurements:
    """The measurements of one label."""

    name: str
    n_known: int  # rows where it is known
    n_true: int  # rows where it applies
    mean_probability: (
        float  # over the rows where it is known; equals the prevalence if calibrated
    )
    frequency: float  # n_true / n_known
    frequency_p_value: float  # two-sided, for a true difference of 0 between frequency and mean_probability
    metrics: Mapping[
        str, Interval
    ]  # "prevalence" and those of `LABEL_MEASURES`; NaN if not defined


def measure_labels(
    decisions: Decisions, names: tuple[str, ...], settings: Settings
) -> Measured:
    """Compute every metric of one set of probabilities."""
    (probs, true, known), n_bins = decisions, settings.n_bins
    n_rows, of_rows = len(probs), LabelMetrics(decisions, n_bins)
    drawn = np.random.default_rng(settings.seed).integers(
        0, n_rows, (settings.n_resamples, n_rows)
    )
    counts = np.stack([np.bincount(rows, minlength=n_rows) for rows in drawn])
    found, resampled = (
        of_rows.evaluate(np.ones((1, n_rows), np.intp)),
        of_rows.evaluate(counts),
    )

    def interval(value: float, draws: FloatArray, key: str = "") -> Interval:
        defined = draws[~np.isnan(draws)]
        if key in _BIASED or np.isnan(value) or not len(defined):
            return Interval(float(value))
        return interval_of(float(value), defined, settings.confidence_level)

    average, averages = macro(found), macro(resampled)
    metrics = {}
    for key in LABEL_MEASURES:
        metrics[f"macro_{key}"] = interval(average[key][0], averages[key], key)
        metrics[f"micro_{key}"] = interval(
            found[key][0, -1], resampled[key][:, -1], key
        )
    gaps, sizes = np.where(known, probs - true, 0).sum(axis=1), known.sum(axis=1)
    n_known, n_true = known.sum(axis=0), (known & true).sum(axis=0)
    stated = np.where(known, probs, 0)
    of_labels = Coins.of_columns(stated.T)
    labels = tuple(
        LabelMeasurements(
            name=name,
            n_known=int(n_known[c]),
            n_true=int(n_true[c]),
            mean_probability=float(stated[:, c].sum() / max(n_known[c], 1)),
            frequency=float(n_true[c] / max(n_known[c], 1)),
            frequency_p_value=of_labels.group(c).p_value(float(n_true[c])),
            metrics={
                key: interval(found[key][0, c], resampled[key][:, c], key)
                for key in ("prevalence", *LABEL_MEASURES)
            },
        )
        for c, name in enumerate(names)
    )
    sums = BinSums(*(each.sum(axis=0) for each in label_bins(decisions, n_bins)))
    # The decisions of a row depend on each other, so rows are resampled.
    gap, mean = (float(each.sum() / sizes.sum()) for each in (gaps, stated))
    error = float(np.std((counts @ gaps) / np.maximum(counts @ sizes, 1)))
    p_value = float(2 * ndtr(-abs(gap) / error)) if error > 0 else 1.0
    low, high = gap - settings.z * error, gap + settings.z * error
    return Measured(
        metrics=metrics,
        n_resamples=dict.fromkeys(metrics, settings.n_resamples),
        bins=bin_rows(
            sums, Coins.of(probs[known], uniform_bins(probs[known], n_bins), n_bins)
        ),
        probs=probs,
        overall=Overall(gap, low, high, p_value, mean, mean - gap, int(sizes.sum())),
        labels=labels,
    )


def label_table(report: CalibrationReport) -> Cells:
    """A table of all labels with their metrics and, if there is a calibration, also their errors before it."""
    keys = {"prevalence": "prevalence", **LABEL_MEASURES, "mce": "maximum"}
    del keys["nll"]
    earlier = (
        {}
        if report.after is None
        else {"ece": "ECE before", "brier": "Brier score before"}
    )
    header = ["label", "mean probability", *keys.values(), *earlier.values()]
    rows = []
    for label, raw in zip(report.final.labels, report.before.labels, strict=True):
        found = [
            *(label.metrics[key] for key in keys),
            *(raw.metrics[key] for key in earlier),
        ]
        rows.append(
            [
                label.name,
                f"{label.mean_probability:.3f}",
                *(cell(each, ".3f") for each in found),
            ]
        )
    return header, rows


def draw_labels(report: CalibrationReport) -> dict[str, Figure]:
    """The figures of a report by name."""
    n_bins = report.settings.n_bins
    bins = {
        name: label_bins(check_decisions(state.probs, report.labels), n_bins)
        for name, state in report.panels.items()
    }
    final = list(bins.values())[-1]
    return {
        "reliability": all_labels_reliability(bins),
        "classwise": classes_of_sums(final, report.class_names, words=OF_LABELS),
    }
