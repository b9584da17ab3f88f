"""The calibration report of a model with several labels a row, each with a probability of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics._inputs import check_confidence_level, check_n_bins, check_n_resamples, check_seed
from hf_calib.metrics._multi_label import Decisions, LabelMetrics, check_decisions, label_bins, macro
from hf_calib.metrics.binning import FloatArray, uniform_edges
from hf_calib.plots._common import check_class_names
from hf_calib.report.measures import Measurement, Settings
from hf_calib.report.tables import BinRow, row_of_sums

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.text import Table

# Of a label; macro is their mean over the labels, micro is of all decisions together.
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
        metrics: "prevalence" and the keys of `LABEL_MEASURES`, each with its interval; NaN where it is not defined.
    """

    name: str
    n_known: int
    n_true: int
    mean_probability: float
    metrics: Mapping[str, Measurement]


@dataclass(frozen=True)
class MultiLabelAssessment:
    """One set of probabilities, measured.

    Args:
        metrics: "macro_..." and "micro_..." of the keys of `LABEL_MEASURES`, each with its interval.
        gap: mean probability minus how often labels apply, over all decisions.
        labels: one entry a label, in their order.
        bins: of the probabilities of all decisions, those that hold any.
        decisions: the probabilities (N, C) with their labels.
    """

    metrics: Mapping[str, Measurement]
    gap: Measurement
    labels: tuple[LabelMeasurements, ...]
    bins: tuple[BinRow, ...]
    decisions: Decisions = field(repr=False, compare=False)


@dataclass(frozen=True)
class MultiLabelReport:
    """Metrics by label with intervals, tables, figures and a diagnosis in words; made by `multi_label_report`.

    Args:
        name: the model's.
        class_names: C labels.
        before: the probabilities as the model gives them.
        after: the calibrated ones, or None.
        n_bins: M.
        confidence_level: of every interval.
        n_resamples: of the bootstrap over rows.
        seed: of the bootstrap.
        notes: sentences on the data that whoever made the report adds to the warnings.
        about: which rows these are and which weights gave the probabilities, for readers of report.json.
    """

    name: str
    class_names: tuple[str, ...]
    before: MultiLabelAssessment
    after: MultiLabelAssessment | None
    n_bins: int
    confidence_level: float
    n_resamples: int
    seed: int
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_examples(self) -> int:
        """N rows."""
        return len(self.before.decisions.probs)

    @property
    def n_decisions(self) -> int:
        """Labels that are known, over all rows."""
        return int(self.before.decisions.known.sum())

    @property
    def final(self) -> MultiLabelAssessment:
        """After calibration, where there is that."""
        return self.after or self.before

    @property
    def summary(self) -> str:
        """One line on what was measured."""
        from hf_calib.report.multi_label_text import summary

        return summary(self)

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Sentences: whether probabilities are too high or too low, for which labels, and what calibration did."""
        from hf_calib.report.multi_label_text import diagnose

        return diagnose(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences: the caveats."""
        from hf_calib.report.multi_label_text import warnings_about_data

        return warnings_about_data(self)

    def metric_table(self) -> Table:
        """Macro and micro metrics with their intervals, before and after."""
        from hf_calib.report.multi_label_text import metric_table

        return metric_table(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything but figures and arrays, of JSON's own types; None where there is no number."""
        from hf_calib.report.record import multi_label_record

        return multi_label_record(self)

    def to_markdown(self) -> str:
        """The report as a Markdown document, without figures."""
        from hf_calib.report.multi_label_text import to_markdown

        return to_markdown(self)

    def to_html(self) -> str:
        """The report as one HTML document that needs no other file."""
        from hf_calib.report.multi_label_text import to_html

        return to_html(self)

    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name, drawn when this is called."""
        from hf_calib.plots.labels import all_labels_reliability, label_errors_chart, label_reliability_grid

        states = {"model": self.before}
        if self.after is not None:
            states = {"before": self.before, "after calibration": self.after}
        labels = self.before.labels
        known = (c for c, label in enumerate(labels) if label.n_known)
        order = sorted(known, key=lambda c: -labels[c].metrics["ece"].value)
        errors = {
            name: np.array([state.labels[c].metrics["ece"].value for c in order])
            for name, state in states.items()
        }
        final = self.final.decisions
        return {
            "reliability": all_labels_reliability(
                {name: label_bins(state.decisions, self.n_bins) for name, state in states.items()}
            ),
            "classwise": label_reliability_grid(
                final.probs,
                np.where(final.known, final.true, -100),
                class_names=self.class_names,
                n_bins=self.n_bins,
            ),
            "label_errors": label_errors_chart(errors, [self.class_names[c] for c in order]),
        }


def multi_label_report(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    calibrated: ArrayLike | None = None,
    n_bins: int = 15,
    confidence_level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    name: str = "model",
) -> MultiLabelReport:
    r"""Measure the probabilities of several labels a row: by label, on average, and of all decisions together.

    For sigmoid outputs. Where each row has one class, take `calibration_report`. The probability of a label is
    compared with how often it applies, in bins over [0, 1]; the trainer's `eval_ece` is of the confidence
    $\max(p, 1 - p)$ of each decision, another number. Its `eval_classwise_ece` is the macro ECE.

    Every interval is a percentile bootstrap interval over rows, from the same resamples: the labels of a row stay
    together.

    Args:
        probs: (N, C) float in [0, 1], a sigmoid for each label.
        labels: (N, C) of 0 and 1, and -100 where a label is not known.
        calibrated: (N, C) float, the probabilities after calibration on *other* examples; or None.
        n_bins: M, at least 1.
        confidence_level: of the intervals, in (0, 1).
        n_resamples: of the bootstrap. There are fewer, 100 at least, where they would take minutes; the report says how
            many.
        seed: of the bootstrap.
        class_names: C names; default "0", "1", ...
        name: of the model, for titles.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are no probabilities, or labels, calibrated or class_names do not fit.

    Notes:
        AUROC and average precision do not exist for a label that never applies; AUROC neither for one that always does.
        Such labels are left out of the macro average, and such resamples of a rare label out of its interval.

    >>> probs = np.tile([[0.9, 0.3], [0.2, 0.6], [0.4, 0.1]], (50, 1))
    >>> labels = np.tile([[1, 0], [0, 1], [1, 0]], (50, 1))
    >>> report = multi_label_report(probs, labels, class_names=["Mass", "Nodule"], n_resamples=100)
    >>> report.before.metrics["macro_auroc"].value, round(report.before.metrics["macro_ece"].value, 3)
    (1.0, 0.283)
    """
    decisions = check_decisions(probs, labels)
    after = None
    if calibrated is not None:
        after = check_decisions(calibrated, labels, argument="calibrated")
    names = check_class_names(class_names, decisions.probs.shape[1])
    check_confidence_level(confidence_level)
    affordable = max(_FEWEST_RESAMPLES, int(_BUDGET // decisions.probs.size))
    settings = Settings(
        check_n_bins(n_bins),
        confidence_level,
        min(check_n_resamples(n_resamples), affordable),
        check_seed(seed),
    )
    return MultiLabelReport(
        name=str(name),
        class_names=names,
        before=_assess(decisions, names, settings),
        after=None if after is None else _assess(after, names, settings),
        n_bins=settings.n_bins,
        confidence_level=settings.confidence_level,
        n_resamples=settings.n_resamples,
        seed=settings.seed,
    )


def _assess(decisions: Decisions, names: tuple[str, ...], settings: Settings) -> MultiLabelAssessment:
    n_rows = len(decisions.probs)
    measured = LabelMetrics(decisions, settings.n_bins)
    found = measured.evaluate(np.ones((1, n_rows), np.intp))
    rng = np.random.default_rng(settings.seed)
    drawn = rng.integers(0, n_rows, (settings.n_resamples, n_rows))
    counts = np.stack([np.bincount(rows, minlength=n_rows) for rows in drawn])
    resampled = measured.evaluate(counts)

    def interval(value: float, draws: FloatArray) -> Measurement:
        defined = draws[~np.isnan(draws)]
        if np.isnan(value) or not len(defined):
            return Measurement(value)
        tail = (1 - settings.confidence_level) / 2
        low, high = np.quantile(defined, [tail, 1 - tail])
        return Measurement(value, float(low), float(high), settings.n_resamples)

    average, averages = macro(found), macro(resampled)
    metrics = {}
    for key in LABEL_MEASURES:
        metrics[f"macro_{key}"] = interval(float(average[key][0]), averages[key])
        metrics[f"micro_{key}"] = interval(float(found[key][0, -1]), resampled[key][:, -1])

    probs, true, known = decisions
    gaps, sizes = np.where(known, probs - true, 0).sum(axis=1), known.sum(axis=1)
    gap = interval(float(gaps.sum() / sizes.sum()), (counts @ gaps) / np.maximum(counts @ sizes, 1))
    n_known, n_true = known.sum(axis=0), (known & true).sum(axis=0)
    means = np.where(known, probs, 0).sum(axis=0) / np.maximum(n_known, 1)
    labels = tuple(
        LabelMeasurements(
            name=name,
            n_known=int(n_known[c]),
            n_true=int(n_true[c]),
            mean_probability=float(means[c]),
            metrics={
                key: interval(float(found[key][0, c]), resampled[key][:, c])
                for key in ("prevalence", *LABEL_MEASURES)
            },
        )
        for c, name in enumerate(names)
    )
    edges = uniform_edges(settings.n_bins)
    sums = [each.sum(axis=0) for each in label_bins(decisions, settings.n_bins)]
    bins = tuple(
        row_of_sums(
            float(edges[m]),
            float(edges[m + 1]),
            count=int(sums[0][m]),
            confidence=float(sums[1][m]),
            right=float(sums[2][m]),
            n_examples=int(known.sum()),
        )
        for m in range(settings.n_bins)
        if sums[0][m]
    )
    return MultiLabelAssessment(metrics, gap, labels, bins, decisions)
