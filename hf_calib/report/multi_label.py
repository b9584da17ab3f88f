"""Multi-label data in a report: metrics of each label, their means, and metrics of all decisions together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from hf_calib.metrics.checks import FloatArray, IntArray
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
# Noise biases them, and a resample would add it again, so they have no interval.
_BIASED = ("ece", "mce")


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
    n_bins = settings.n_bins
    probs, true, known = decisions
    counts = _resampled_counts(len(probs), settings)
    metrics, of_labels = _metrics(decisions, counts, settings)
    stated = np.where(known, probs, 0)
    all_known = probs[known]
    coins = Coins.of(all_known, uniform_bins(all_known, n_bins), n_bins)
    sums = [each.sum(axis=0) for each in label_bins(decisions, n_bins)]
    # The decisions of a row depend on each other, so rows are resampled.
    gaps = np.where(known, probs - true, 0).sum(axis=1)
    sizes = known.sum(axis=1)
    n_decisions = int(sizes.sum())
    gap = float(gaps.sum()) / n_decisions
    mean = float(stated.sum()) / n_decisions
    resampled = (counts @ gaps) / np.maximum(counts @ sizes, 1)
    error = float(np.std(resampled))
    p_value = float(2 * ndtr(-abs(gap) / error)) if error > 0 else 1.0
    reach = settings.z * error
    ends = (gap - reach, gap + reach)
    return Measured(
        metrics=metrics,
        n_resamples=dict.fromkeys(metrics, settings.n_resamples),
        bins=bin_rows(BinSums(*sums), coins),
        probs=probs,
        overall=Overall(gap, *ends, p_value, mean, mean - gap, n_decisions),
        labels=_labels(decisions, stated, names, of_labels),
    )


def _resampled_counts(n_rows: int, settings: Settings) -> IntArray:
    """How often each row is in each resample (B, N)."""
    rng = np.random.default_rng(settings.seed)
    drawn = rng.integers(0, n_rows, (settings.n_resamples, n_rows))
    return np.stack([np.bincount(rows, minlength=n_rows) for rows in drawn])


def _metrics(
    decisions: Decisions, counts: IntArray, settings: Settings
) -> tuple[dict[str, Interval], list[dict[str, Interval]]]:
    """The averages of the metrics, and the metrics of each label, by key."""
    n_rows, n_labels = decisions.probs.shape
    of_rows = LabelMetrics(decisions, settings.n_bins)
    found = of_rows.evaluate(np.ones((1, n_rows), np.intp))
    resampled = of_rows.evaluate(counts)

    def interval(value: float, draws: FloatArray, key: str) -> Interval:
        defined = draws[~np.isnan(draws)]
        if key in _BIASED or np.isnan(value) or not len(defined):
            return Interval(float(value))
        return interval_of(float(value), defined, settings.confidence_level)

    average = macro(found)
    averages = macro(resampled)
    metrics = {}
    for key in LABEL_MEASURES:
        metrics[f"macro_{key}"] = interval(average[key][0], averages[key], key)
        of_all = interval(found[key][0, -1], resampled[key][:, -1], key)
        metrics[f"micro_{key}"] = of_all
    of_labels = []
    for c in range(n_labels):
        own = {}
        for key in ("prevalence", *LABEL_MEASURES):
            own[key] = interval(found[key][0, c], resampled[key][:, c], key)
        of_labels.append(own)
    return metrics, of_labels


def _labels(
    decisions: Decisions,
    stated: FloatArray,
    names: tuple[str, ...],
    metrics: list[dict[str, Interval]],
) -> tuple[LabelMeasurements, ...]:
    """The measurements of each label, from its metrics and its probabilities (N, C), 0 where it is unknown."""
    n_known = decisions.known.sum(axis=0)
    n_true = (decisions.known & decisions.true).sum(axis=0)
    totals = stated.sum(axis=0)
    coins = Coins.of_columns(stated.T)
    labels = []
    for c, name in enumerate(names):
        # A label that is known in no row has a frequency of 0.
        n = max(int(n_known[c]), 1)
        label = LabelMeasurements(
            name=name,
            n_known=int(n_known[c]),
            n_true=int(n_true[c]),
            mean_probability=float(totals[c]) / n,
            frequency=int(n_true[c]) / n,
            frequency_p_value=coins.group(c).p_value(float(n_true[c])),
            metrics=metrics[c],
        )
        labels.append(label)
    return tuple(labels)


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
