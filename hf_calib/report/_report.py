"""The calibration report of one model on one labelled dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics import consistency_test
from hf_calib.metrics.checks import (
    as_array,
    check_draws,
    check_n_bins,
    check_probs_and_labels,
    check_soft_labels,
)
from hf_calib.metrics.multi_label import UNKNOWN, check_decisions
from hf_calib.metrics.sums import classwise_sums, gap_error, top_label
from hf_calib.plots.style import check_class_names
from hf_calib.report import content, text
from hf_calib.report.any_report import AnyReport
from hf_calib.report.assessment import Assessment, Overall
from hf_calib.report.decisions import DecisionSection
from hf_calib.report.diagnosis import diagnose, warnings_about_data
from hf_calib.report.entities import EntitySection
from hf_calib.report.labels import affordable_resamples, assess_labels
from hf_calib.report.measures import Settings, measure_all
from hf_calib.report.out_of_distribution import OodSection
from hf_calib.report.soft_labels import SoftLabelSection, soft_label_section
from hf_calib.report.tables import bin_rows, class_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.document import Block


@dataclass(frozen=True, kw_only=True)
class CalibrationReport(AnyReport):
    """Metrics with intervals, tables, figures and a diagnosis in words; made by `calibration_report`.

    Args:
        name: the model's.
        class_names: C of them.
        labels: (N,) int; or (N, C) of 1, 0 and -100 for several labels a row.
        before: the probabilities as the model gives them.
        after: the calibrated ones, or None.
        n_bins: M.
        confidence_level: of every interval.
        n_resamples: of the bootstrap; a slow metric has fewer, which its `Assessment` says.
        seed: of the bootstrap.
        notes: sentences on the data that whoever made the report adds to the warnings.
        decisions: what a rule does on these examples, or None.
        out_of_distribution: OOD detection against these examples; one for each dataset.
        soft_labels: the probabilities against soft labels of the same examples, or None.
        entities: of tokens whose tags are B-TYPE, I-TYPE and O: their entities, measured; or None.
        about: which rows these are and which weights gave the probabilities, for readers of report.json: text and
            numbers, see `hf_calib.cards.facts`.
    """

    before: Assessment
    after: Assessment | None
    labels: NDArray[Any] = field(repr=False, compare=False)
    decisions: DecisionSection | None = None
    out_of_distribution: tuple[OodSection, ...] = ()
    soft_labels: SoftLabelSection | None = None
    entities: EntitySection | None = None

    @property
    def n_examples(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        """Whether a row has several labels, each with a probability of its own."""
        return self.labels.ndim == 2

    @property
    def n_decisions(self) -> int:
        """Labels that are known, over all rows; N where a row has one class."""
        return len(self.before.correct)

    @property
    def final(self) -> Assessment:
        """After calibration, where there is that."""
        return self.after or self.before

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Sentences: over- or under-confident, where, and whether chance can explain it."""
        return (*diagnose(self), *(each.sentences()[0] for each in self.slices))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences: the caveats, what makes the numbers uncertain."""
        return warnings_about_data(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything but figures and arrays, of JSON's own types; None where there is no number."""
        from hf_calib.report.record import to_record

        return to_record(self)

    def summary(self) -> str:
        return text.summary(self)

    def metric_table(self) -> tuple[list[str], list[list[str]]]:
        return text.metric_table(self)

    def footnotes(self) -> list[str]:
        return text.footnotes(self)

    def captions(self) -> dict[str, str]:
        from hf_calib.report.figures import captions

        return captions(self)

    def alt_texts(self) -> dict[str, str]:
        from hf_calib.report.figures import alt_texts

        return alt_texts(self)

    def sections(self, level: str) -> list[Block]:
        return content.sections(self, level)

    def sections_after_the_metrics(self, level: str) -> list[Block]:
        return content.against_shares(self, level)

    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name, drawn when this is called; see `hf_calib.plots` for each."""
        from hf_calib.report.figures import draw_figures

        return draw_figures(self) | {f"slices_{each.column}": each.figure() for each in self.slices}


def calibration_report(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    calibrated: ArrayLike | None = None,
    soft_labels: ArrayLike | None = None,
    n_bins: int = 15,
    confidence_level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    name: str = "model",
) -> CalibrationReport:
    r"""Measure a classifier's calibration by every metric here, and say what the numbers mean.

    For a person who wants to know whether to trust the probabilities. For one number use its metric, such as
    `expected_calibration_error`; for numbers while training, `hf_calib.metrics.streaming`.

    Proper scores, accuracy and the like come with a percentile bootstrap interval over examples, the
    $(1 \pm \text{level}) / 2$ quantiles on resamples; each ECE with that of `calibration_error_interval`. Other
    measures of mis-calibration have none that holds.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C); or (N, C) of 0 and 1 for several labels a row, -100 where one is not known. The
            probabilities are then sigmoids, any in [0, 1].
        calibrated: (N, C) float, the probabilities after calibration on *other* examples; or None.
        soft_labels: (N, C) float, rows that sum to 1: each class's share among the annotators of an example, such as
            those of CIFAR-10H; or None. The probabilities are then measured against these as well.
        n_bins: M, at least 1.
        confidence_level: of the intervals, in (0, 1).
        n_resamples: of the bootstrap and the consistency test.
        seed: of both.
        class_names: C names; default "0", "1", ...
        name: of the model, for titles.

    Returns:
        A report with `to_dict()`, `to_markdown()`, `to_html()` and `figures()`; its fields hold the numbers.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels, calibrated, soft_labels or class_names do not
            fit.

    Notes:
        Of several labels a row, the probability of a label is compared with how often it applies, in bins over [0, 1];
        the trainer's `eval_ece` is of the confidence $\max(p, 1 - p)$ of each decision, another number, and its
        `eval_classwise_ece` is the macro ECE. Every interval is then from the same resamples of the rows, whose labels
        stay together: 100 at least, and fewer than asked for where they would take minutes. AUROC and average precision
        do not exist for a label that never applies, AUROC neither for one that always does: such labels are left out
        of the macro average, and such resamples of a rare label out of its interval.

        Metrics that resample slowly get as many resamples as take seconds, and none where those are too few;
        the tables say so. The kernel calibration error is left out above 2,000 examples. Noise makes calibration errors
        larger in small samples: for such data read the debiased error, the intervals, and the consistency test, which
        says what chance alone would show.

    References:
        Efron and Tibshirani 1993, 12.3 and 13.3 (test inversion, percentile interval); Bröcker and Smith
        2007 (consistency).

    >>> probs = np.tile([[0.9, 0.1], [0.2, 0.8]], (50, 1))
    >>> report = calibration_report(probs, np.tile([0, 0], 50), n_resamples=100)
    >>> report.before.metrics["accuracy"].value
    0.5
    >>> report.diagnosis[0]
    'Overall over-confident: mean confidence 0.850, accuracy 0.500 (difference +0.350, ...).'
    """
    if np.ndim(labels) == 2:
        if soft_labels is not None:
            got, way_out = "both", "leave soft_labels out: they are for one class a row"
            raise InputValueError(expected("labels", "be (N,) beside soft_labels", got, way_out))
        return _label_report(
            probs,
            labels,
            calibrated,
            class_names,
            str(name),
            Settings(n_bins, confidence_level, n_resamples, seed),
        )
    checked, targets = check_probs_and_labels(probs, labels)
    after = None if calibrated is None else _check_calibrated(calibrated, targets, checked.shape)
    shares = None if soft_labels is None else check_soft_labels(soft_labels, checked.shape)
    names = check_class_names(class_names, checked.shape[1])
    settings = Settings(check_n_bins(n_bins), confidence_level, n_resamples, seed)
    return CalibrationReport(
        name=str(name),
        class_names=names,
        labels=targets,
        before=_assess(checked, targets, names, settings),
        after=None if after is None else _assess(after, targets, names, settings),
        n_bins=settings.n_bins,
        confidence_level=settings.confidence_level,
        n_resamples=settings.n_resamples,
        seed=settings.seed,
        soft_labels=None if shares is None else soft_label_section(shares, targets, checked, after, settings),
    )


def _label_report(
    probs: ArrayLike,
    labels: ArrayLike,
    calibrated: ArrayLike | None,
    class_names: Sequence[str] | None,
    name: str,
    settings: Settings,
) -> CalibrationReport:
    """Of several labels a row."""
    decisions = check_decisions(probs, labels)
    after = None if calibrated is None else check_decisions(calibrated, labels, argument="calibrated")
    names = check_class_names(class_names, decisions.probs.shape[1])
    check_n_bins(settings.n_bins)
    check_draws(settings.n_resamples, settings.seed, settings.confidence_level)
    n_resamples = affordable_resamples(decisions, settings.n_resamples)
    settings = settings._replace(n_resamples=n_resamples)
    return CalibrationReport(
        name=name,
        class_names=names,
        labels=np.where(decisions.known, decisions.true, UNKNOWN),
        before=assess_labels(decisions, names, settings),
        after=None if after is None else assess_labels(after, names, settings),
        n_bins=settings.n_bins,
        confidence_level=settings.confidence_level,
        n_resamples=n_resamples,
        seed=settings.seed,
    )


def _check_calibrated(
    calibrated: ArrayLike, labels: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[Any]:
    array = as_array("calibrated", calibrated)
    if array.shape != shape:
        way_out = "pass the calibrated probabilities of the same examples and classes"
        raise InputValueError(expected("calibrated", f"have shape {shape}", f"shape {array.shape}", way_out))
    return check_probs_and_labels(array, labels)[0]


def _assess(
    probs: NDArray[Any], labels: NDArray[np.int64], names: tuple[str, ...], settings: Settings
) -> Assessment:
    confidences, correct = top_label(probs, labels)
    gaps = gap_error(classwise_sums(settings.n_bins).sums(probs, labels), len(probs))
    metrics, n_resamples = measure_all(probs, labels, settings)
    return Assessment(
        metrics=metrics,
        n_resamples=n_resamples,
        consistency=consistency_test(
            probs, labels, n_resamples=settings.n_resamples, seed=settings.seed, n_bins=settings.n_bins
        ),
        bins=bin_rows(confidences, correct, settings.n_bins),
        overall=Overall.of(confidences, correct, settings.confidence_level),
        classes=class_rows(probs, labels, gaps=gaps, names=names),
        probs=probs,
        confidences=confidences,
        correct=correct,
    )
