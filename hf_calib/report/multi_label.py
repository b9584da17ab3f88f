"""Multi-label data: metrics of each label, their means, and metrics of all decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from hf_calib.metrics.sums import (
    SAME,
    BinSums,
    Interval,
    draw_counts,
    interval_of,
    uniform_bins,
)
from hf_calib.plots.binned import OF_LABELS, all_labels_reliability, classes_of_sums
from hf_calib.report.chance import coins_in_groups, coins_of_columns, p_value
from hf_calib.report.document import Cells, cell, titled
from hf_calib.report.measured import BinRow, Measured, Overall, Settings, bin_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.report import CalibrationReport

#: The metrics of a label in a multi-label report; macro is their mean, micro is of all decisions
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
    "reliability": "All decisions: frequency of labels against their probability, with 95% Wilson "
    "intervals.",
    "classwise": "The labels with the largest calibration errors.",
}
FOOTNOTES = (
    "Macro: the mean over the labels for which a metric is defined. Micro: the metric of all "
    "decisions together, one for each row and label. The labels of a row stay together in a "
    "resample.",
    "ECE and maximum calibration error compare the probability of a label with its frequency, in "
    "bins of equal width over [0, 1]. Noise makes both larger, and a resample adds that noise "
    "again, so they have no interval.",
)
# Noise biases them, and a resample would add it again, so they have no interval.
_BIASED = ("ece", "mce")


@dataclass(frozen=True)
class LabelMeasurements:
    """The measurements of one label."""

    name: str
    n_known: int  # rows where it is known
    n_true: int  # rows where it applies
    # Over the rows where it is known; equals the prevalence if calibrated.
    mean_probability: float
    frequency: float  # n_true / n_known
    # Two-sided, for a true difference of 0 between frequency and mean_probability.
    frequency_p_value: float
    # "prevalence" and those of `LABEL_MEASURES`; NaN if not defined.
    metrics: Mapping[str, Interval]


def measure_labels(
    decisions: Decisions, names: tuple[str, ...], settings: Settings
) -> Measured:
    """Compute every metric of one set of probabilities."""
    probs, true, known = decisions
    # The same resamples for all metrics and for the gap, so that they vary together.
    rng = np.random.default_rng(settings.seed)
    blocks = draw_counts(len(probs), settings.n_resamples, rng)
    counts = np.concatenate([*blocks])
    metrics, of_labels = _metrics(decisions, counts, settings)
    stated = np.where(known, probs, 0)
    # The decisions of a row depend on each other, so rows are resampled.
    gaps = np.where(known, probs - true, 0).sum(axis=1)
    sizes = known.sum(axis=1)
    n_decisions = int(sizes.sum())
    gap = float(gaps.sum()) / n_decisions
    if abs(gap) < SAME:
        # The resamples of a rounding error have one too, which would make it significant.
        gap = 0.0
    mean = float(stated.sum()) / n_decisions
    resampled = (counts @ gaps) / np.maximum(counts @ sizes, 1)
    error = float(np.std(resampled))
    # Without any spread, as of one row, nothing is known of other rows.
    p = float(2 * ndtr(-abs(gap) / error)) if error > 0 else 1.0
    reach = settings.z * error
    ends = (gap - reach, gap + reach)
    return Measured(
        metrics=metrics,
        n_resamples=dict.fromkeys(metrics, settings.n_resamples),
        bins=_bins(decisions, settings.n_bins),
        probs=probs,
        overall=Overall(gap, *ends, p, mean, mean - gap, n_decisions),
        labels=_labels(decisions, stated, names, of_labels),
    )


def _bins(decisions: Decisions, n_bins: int) -> tuple[BinRow, ...]:
    """The bins of all decisions."""
    probs = decisions.probs[decisions.known]
    coins = coins_in_groups(probs, uniform_bins(probs, n_bins), n_bins)
    sums = [each.sum(axis=0) for each in label_bins(decisions, n_bins)]
    return bin_rows(BinSums(*sums), coins, sums[0])


def _metrics(
    decisions: Decisions, counts: FloatArray, settings: Settings
) -> tuple[dict[str, Interval], list[dict[str, Interval]]]:
    """The averages of the metrics, and the metrics of each label, by key."""
    of_rows = LabelMetrics(decisions, settings.n_bins)
    found = of_rows.evaluate(np.ones((1, counts.shape[1])))
    resampled = of_rows.evaluate(counts)
    average = macro(found)
    averages = macro(resampled)

    def interval(key: str, values: FloatArray, draws: FloatArray) -> Interval:
        value = float(values[0])
        # A rare label may be absent from a resample, which then has no AUROC.
        defined = draws[~np.isnan(draws)]
        if key in _BIASED or np.isnan(value) or len(defined) == 0:
            return Interval(value)
        return interval_of(value, defined, settings.confidence_level)

    def of_column(key: str, c: int) -> Interval:
        return interval(key, found[key][:, c], resampled[key][:, c])

    metrics = {}
    for key in LABEL_MEASURES:
        metrics[f"macro_{key}"] = interval(key, average[key], averages[key])
        # The last column is that of all decisions.
        metrics[f"micro_{key}"] = of_column(key, -1)
    n_labels = decisions.probs.shape[1]
    keys = ("prevalence", *LABEL_MEASURES)
    of_labels = [{key: of_column(key, c) for key in keys} for c in range(n_labels)]
    return metrics, of_labels


def _labels(
    decisions: Decisions,
    stated: FloatArray,
    names: tuple[str, ...],
    metrics: list[dict[str, Interval]],
) -> tuple[LabelMeasurements, ...]:
    """The measurements of each label, from probabilities (N, C) that are 0 where it is unknown."""
    n_known = decisions.known.sum(axis=0).tolist()
    n_true = (decisions.known & decisions.true).sum(axis=0).tolist()
    totals = stated.sum(axis=0).tolist()
    # A coin of probability 0 changes no sum but the number of unlikely ones, which is not kept.
    coins = coins_of_columns(stated.T)
    labels = []
    for c, name in enumerate(names):
        # A label that is known in no row has a frequency of 0.
        n = max(n_known[c], 1)
        label = LabelMeasurements(
            name=name,
            n_known=n_known[c],
            n_true=n_true[c],
            mean_probability=totals[c] / n,
            frequency=n_true[c] / n,
            frequency_p_value=p_value(coins[:, c], n_true[c]),
            metrics=metrics[c],
        )
        labels.append(label)
    return tuple(labels)


def record(label: LabelMeasurements) -> dict[str, Any]:
    """A label as in a record, with the titles of its metrics."""
    titles = {"prevalence": "Prevalence", **LABEL_MEASURES}
    return {**vars(label), "metrics": titled(label.metrics, titles)}


def label_table(report: CalibrationReport) -> Cells:
    """A table of all labels with their metrics, and their errors before a calibration."""
    titles = {"prevalence": "prevalence", **LABEL_MEASURES, "mce": "maximum"}
    # A table as wide as this one has no room for it.
    del titles["nll"]
    earlier = {}
    if report.after is not None:
        earlier = {"ece": "ECE before", "brier": "Brier score before"}
    header = ["label", "mean probability", *titles.values(), *earlier.values()]
    rows = []
    for label, raw in zip(report.final.labels, report.before.labels, strict=True):
        found = [label.metrics[key] for key in titles]
        found += [raw.metrics[key] for key in earlier]
        numbers = [cell(each, ".3f") for each in found]
        rows.append([label.name, f"{label.mean_probability:.3f}", *numbers])
    return header, rows


def draw_labels(report: CalibrationReport) -> dict[str, Figure]:
    """The figures of a report by name."""
    n_bins = report.settings.n_bins
    bins = {}
    for name, state in report.panels.items():
        decisions = check_decisions(state.probs, report.labels)
        bins[name] = label_bins(decisions, n_bins)
    final = bins[name]
    return {
        "reliability": all_labels_reliability(bins),
        "classwise": classes_of_sums(final, report.class_names, words=OF_LABELS),
    }
