"""The measures of several labels a row, each with a probability of its own: by label, on average, and all together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.multi_label import Decisions, LabelMetrics, label_bins, macro
from hf_calib.metrics.sums import Interval, uniform_bins, uniform_edges
from hf_calib.report.assessment import Assessment
from hf_calib.report.coins import Coins
from hf_calib.report.measures import Settings
from hf_calib.report.tables import row_of_sums

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
_BUDGET = 3e7  # decisions that all resamples read together: seconds, not minutes
_FEWEST_RESAMPLES = 100


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


# Noise makes these larger, and a resample would add it again: without interval.
_BIASED = ("ece", "mce")


def affordable_resamples(decisions: Decisions, n_resamples: int) -> int:
    """How many resamples of the rows take seconds, and no minutes; 100 at least."""
    return min(n_resamples, max(_FEWEST_RESAMPLES, int(_BUDGET // decisions.probs.size)))


def assess_labels(decisions: Decisions, names: tuple[str, ...], settings: Settings) -> Assessment:
    """Every measure of one set of probabilities."""
    n_rows = len(decisions.probs)
    measured = LabelMetrics(decisions, settings.n_bins)
    found = measured.evaluate(np.ones((1, n_rows), np.intp))
    rng = np.random.default_rng(settings.seed)
    drawn = rng.integers(0, n_rows, (settings.n_resamples, n_rows))
    counts = np.stack([np.bincount(rows, minlength=n_rows) for rows in drawn])
    resampled = measured.evaluate(counts)

    def interval(value: float, draws: FloatArray, key: str = "") -> Interval:
        if key in _BIASED:
            return Interval(value)
        defined = draws[~np.isnan(draws)]
        if np.isnan(value) or not len(defined):
            return Interval(value)
        tail = (1 - settings.confidence_level) / 2
        low, high = np.quantile(defined, [tail, 1 - tail])
        return Interval(value, float(low), float(high))

    average, averages = macro(found), macro(resampled)
    metrics = {}
    for key in LABEL_MEASURES:
        metrics[f"macro_{key}"] = interval(float(average[key][0]), averages[key], key)
        metrics[f"micro_{key}"] = interval(float(found[key][0, -1]), resampled[key][:, -1], key)

    probs, true, known = decisions
    gaps, sizes = np.where(known, probs - true, 0).sum(axis=1), known.sum(axis=1)
    gap = interval(float(gaps.sum() / sizes.sum()), (counts @ gaps) / np.maximum(counts @ sizes, 1))
    n_known, n_true = known.sum(axis=0), (known & true).sum(axis=0)
    means = np.where(known, probs, 0).sum(axis=0) / np.maximum(n_known, 1)
    of_labels = Coins.of_columns(np.where(known, probs, 0))
    labels = tuple(
        LabelMeasurements(
            name=name,
            n_known=int(n_known[c]),
            n_true=int(n_true[c]),
            mean_probability=float(means[c]),
            p_value=of_labels.group(c).p_value(float(n_true[c])),
            metrics={
                key: interval(float(found[key][0, c]), resampled[key][:, c], key)
                for key in ("prevalence", *LABEL_MEASURES)
            },
        )
        for c, name in enumerate(names)
    )
    edges = uniform_edges(settings.n_bins)
    sums = [each.sum(axis=0) for each in label_bins(decisions, settings.n_bins)]
    numbers = uniform_bins(probs[known], settings.n_bins)
    coins = Coins.of(probs[known], numbers, settings.n_bins)
    bins = tuple(
        row_of_sums(
            float(edges[m]),
            float(edges[m + 1]),
            count=int(sums[0][m]),
            confidence=float(sums[1][m]),
            right=float(sums[2][m]),
            p_value=coins.group(m).p_value(float(sums[2][m])),
            n_examples=int(known.sum()),
        )
        for m in range(settings.n_bins)
        if sums[0][m]
    )
    return Assessment(
        metrics=metrics,
        n_resamples=dict.fromkeys(metrics, settings.n_resamples),
        bins=bins,
        probs=probs,
        confidences=probs[known],
        correct=true[known].astype(np.float64),
        gap=gap,
        labels=labels,
    )
