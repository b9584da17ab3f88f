"""The ways to a report: from arrays, and from predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib._text import counted
from hf_calib.metrics import brier_decomposition, checks
from hf_calib.metrics.checks import FloatArray, row_chunks
from hf_calib.metrics.multi_label import (
    UNKNOWN,
    Decisions,
    check_decisions,
    negative_logs_of_decisions,
)
from hf_calib.metrics.scores import SMALLEST_PROBABILITY
from hf_calib.metrics.state import GroupSums, score_top_labels
from hf_calib.plots.style import check_class_names
from hf_calib.predictions.predictions import Predictions, TopLabels
from hf_calib.predictions.slices import slices_of
from hf_calib.report.measured import Measured, Settings, mean_change
from hf_calib.report.multi_label import measure_labels
from hf_calib.report.report import CalibrationReport
from hf_calib.report.rows import Block, Rows, are_few
from hf_calib.report.sections import (
    SliceSection,
    slice_section,
    soft_label_section,
    with_entities,
)

# The most multi-label decisions that all resamples read together, so that they take seconds.
_DECISIONS_READ = 3e7
_FEWEST_RESAMPLES = 100
_MOST_NATS = -np.log(SMALLEST_PROBABILITY)
# The probabilities of many rows that exist at a time.
_BLOCK = 2**20
_TOP_ONLY = (
    "Only the confidence of the predicted class is known. What needs the probabilities of all "
    "classes is left out; the NLL and the Brier score of a slice are those of whether the "
    "prediction is correct."
)


def calibration_report(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    calibrated: ArrayLike | None = None,
    soft_labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    n_bins: int = 15,
    confidence_level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    name: str = "model",
) -> CalibrationReport:
    r"""Measure a classifier's calibration by every metric, and diagnose it in words.

    For a single metric, call its function, such as `expected_calibration_error`; in a loop over
    batches, use `CalibrationState`. Accuracy, proper scores and similar metrics have a percentile
    bootstrap interval over examples (Efron and Tibshirani 1993, 13.3), and each ECE has the
    interval of `calibration_error_interval`. Other measures of mis-calibration have no valid
    interval.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C); with several labels per row (N, C) of 1, 0, or -100 for an
            unknown label. The probabilities are then sigmoids, any values in [0, 1].
        calibrated: (N, C) float, the probabilities after calibration on *other* examples; or None.
        soft_labels: (N, C) float, rows that sum to 1: each class's share among the annotators of an
            example, such as those of CIFAR-10H; or None. The probabilities are then also measured
            against the shares.
        sample_weight: (N,) float, the weight of each row, for labels (N,); or None. The report then
            has the metrics that have a weighted form, with normal intervals, and no soft labels.
        n_bins: M, at least 1.
        confidence_level: level of the intervals, in (0, 1).
        n_resamples: number of resamples of the bootstrap and of the consistency test.
        seed: seed of the resamples.
        class_names: C names; default "0", "1", ...
        name: name of the model, for titles.

    Returns:
        A report with `to_dict()`, `to_markdown()`, `to_html()`, `save()` and `figures()`; its
        fields hold the numbers.

    Raises:
        ValueError: if probs are not probabilities, or labels, calibrated, soft_labels or
            class_names do not fit.

    Notes:
        With several labels per row, the ECE compares the probability of a label with its frequency.
        The trainer's `eval_ece` is another number, of the confidence $\max(p, 1 - p)$ of each
        decision; its `eval_classwise_ece` is the macro ECE. AUROC and average precision are
        undefined for a label that never applies, and AUROC for one that always applies: macro
        averages leave such labels out.

    >>> probs = np.tile([[0.9, 0.1], [0.2, 0.8]], (50, 1))
    >>> report = calibration_report(probs, np.tile([0, 0], 50), n_resamples=100)
    >>> report.before.metrics["accuracy"].value
    0.5
    >>> report.verdict
    'Over-confident by 35.0 points [25.4, 44.6] on average.'
    """
    name = str(name)
    n_bins = checks.check_n_bins(n_bins)
    checks.check_draws(n_resamples, seed, confidence_level)
    settings = Settings(n_bins, confidence_level, n_resamples, seed)
    several = np.ndim(labels) == 2
    n_given = [several, soft_labels is not None, sample_weight is not None].count(True)
    requirement = (
        "at most one of labels (N, C), soft_labels and sample_weight to be given"
    )
    way_out = "leave the others out, as they cannot be combined"
    check(n_given <= 1, requirement, n_given, way_out)
    given = {"probs": probs}
    if calibrated is not None:
        given["calibrated"] = calibrated
    if several:
        return _report_on_labels(given, labels, settings, class_names, name)
    way_out = "pass the calibrated probabilities of the same examples and classes"
    states: list[NDArray[Any]] = []
    for argument, each in given.items():
        # The shape comes first: other rows or classes would be refused for another reason.
        array = checks.as_array(argument, each)
        checks.check_shape(argument, array, np.shape(probs), way_out)
        checked, targets = checks.check_probs_and_labels(each, labels)
        states.append(checked)
    names = check_class_names(class_names, checked.shape[1])
    head = _Head(name, names, settings, targets)
    weights = _weights_that_differ(checks.check_weights(sample_weight, len(targets)))
    report = _report_on_rows(
        head, [_measure_arrays(head, state, weights) for state in states]
    )
    if soft_labels is None:
        return report
    soft = checks.check_soft_labels(soft_labels, checked.shape)
    section = soft_label_section(soft, targets, states, settings)
    return replace(report, soft_labels=section)


class _Head(NamedTuple):
    """What a report has that does not depend on the probabilities."""

    name: str
    class_names: tuple[str, ...]
    settings: Settings
    labels: Any = None

    def report(self, measured: Sequence[Measured], **fields: Any) -> CalibrationReport:
        """The report on probabilities before and perhaps after calibration."""
        before, *calibrated = measured
        after = calibrated[0] if calibrated else None
        own = self._asdict()
        return CalibrationReport(**own, before=before, after=after, **fields)


def _measure_arrays(
    head: _Head, probs: NDArray[Any], weights: FloatArray | None
) -> Measured:
    """Measure checked probabilities that are held whole."""
    labels = head.labels
    n_bins = head.settings.n_bins
    # The decomposition sorts the classes of each row, which takes long if they are many.
    parts = None
    if are_few(*probs.shape):
        parts = brier_decomposition(probs, labels, n_bins=n_bins, sample_weight=weights)
    rows = Rows.of_blocks([(probs, labels, weights)], probs.shape, n_bins, parts)
    # Without weights, entities can be found later.
    kept = probs if weights is None else None
    return Measured.of_rows(rows, head.class_names, head.settings, kept)


def _weights_that_differ(weights: FloatArray | None) -> FloatArray | None:
    """The weights, or None if all are 1, as without weights."""
    if weights is None or bool((weights == 1).all()):
        return None
    return weights


def _report_on_rows(head: _Head, measured: Sequence[Measured]) -> CalibrationReport:
    """The report on rows with one label each, whose probabilities are known."""
    rows: list[Any] = [each.rows for each in measured]
    nats = [each.scores.nll for each in rows]
    change = mean_change(nats, rows[0].weights, head.settings)
    return head.report(measured, nll_change=change, notes=_notes_on_zeros(nats))


def _report_on_labels(
    given: dict[str, ArrayLike],
    labels: ArrayLike,
    settings: Settings,
    class_names: Sequence[str] | None,
    name: str,
) -> CalibrationReport:
    """The report on several labels per row."""
    states = [
        check_decisions(each, labels, argument=argument)
        for argument, each in given.items()
    ]
    first = states[0]
    affordable = max(_FEWEST_RESAMPLES, int(_DECISIONS_READ // first.probs.size))
    settings = settings._replace(n_resamples=min(settings.n_resamples, affordable))
    names = check_class_names(class_names, first.probs.shape[1])
    measured = [measure_labels(each, names, settings) for each in states]
    nats = [negative_logs_of_decisions(each) for each in states]
    n_known = first.known.sum(axis=1).astype(np.float64)
    change = mean_change(nats, n_known, settings)
    head = _Head(name, names, settings, np.where(first.known, first.true, UNKNOWN))
    return head.report(measured, nll_change=change, notes=_notes_on_one_label(first))


def _notes_on_one_label(rows: Decisions) -> tuple[str, ...]:
    """A note on labels of several that may be one-hot."""
    is_one_each = rows.known.all() and (rows.true.sum(axis=1) == 1).all()
    if rows.probs.shape[1] == 1 or not is_one_each:
        return ()
    return (
        "Every row has exactly one label of 1, and each column was measured alone, by its sigmoid. "
        "For a softmax model pass labels.argmax(axis=1).",
    )


def _notes_on_zeros(nats: Sequence[FloatArray]) -> tuple[str, ...]:
    """A note on rows whose negative log-likelihood is the largest that float64 has."""
    n_zero = max(int(np.count_nonzero(each >= _MOST_NATS)) for each in nats)
    if n_zero == 0:
        return ()
    return (
        f"In {counted(n_zero, 'row')} of {len(nats[0]):,} the label has probability 0 in float64, "
        f"which counts as {_MOST_NATS:.0f} nats. The negative log-likelihood may be larger.",
    )


def report_on_predictions(
    predictions: Predictions | TopLabels,
    name: str,
    n_bins: int,
    scaler: Any = None,
    *,
    soft_labels: Any = None,
    class_names: Sequence[str] | None = None,
) -> CalibrationReport:
    """`calibration_report` on predictions, also after a scaler that was fitted on other rows.

    The report has a section for each of their columns `by`, and one on the entities of tokens. Soft
    labels (N, C) are of the same examples, and class names are those of the data, or None for those
    of the predictions.
    """
    check(
        not (predictions.by and predictions.kind.sigmoid),
        "slices to be of rows with one label each",
        "several labels per row",
        "leave by out, or select the rows of each value",
    )
    settings = Settings(n_bins)
    # Soft labels and entities need the probabilities of all rows as one array.
    are_whole = soft_labels is not None or predictions.sentences is not None
    if isinstance(predictions, TopLabels):
        report = _report_on_top_labels(predictions, name, settings, scaler)
    elif predictions.kind.sigmoid or are_whole or are_few(*predictions.scores.shape):
        calibrated = None
        if scaler is not None:
            calibrated = scaler.predict_proba(predictions.as_logits())
        report = calibration_report(
            predictions.probabilities(),
            predictions.labels,
            calibrated=calibrated,
            soft_labels=soft_labels,
            sample_weight=predictions.weights,
            n_bins=n_bins,
            class_names=class_names or predictions.class_names,
            name=name,
        )
    else:
        given = class_names or predictions.names
        names = check_class_names(given, predictions.n_classes)
        head = _Head(name, names, settings, predictions.labels)
        report = _report_on_many(head, predictions, scaler)
    # What is used is what comes last, so slices are measured after calibration.
    rows = report.final.rows
    sections = []
    for column, values in predictions.by.items():
        sections.append(_slices(rows, column, values, settings))
    report = replace(report, slices=tuple(sections))
    if predictions.sentences is None:
        return report
    return with_entities(report, predictions.sentences)


def _report_on_many(
    head: _Head, predictions: Predictions, scaler: Any
) -> CalibrationReport:
    """The report on rows whose probabilities, as float64, are not all held at once."""
    states = [_blocks(predictions, None)]
    if scaler is not None:
        states.append(_blocks(predictions, scaler))
    measured = []
    for blocks in states:
        shape = predictions.scores.shape
        rows = Rows.of_blocks(blocks, shape, head.settings.n_bins)
        measured.append(Measured.of_rows(rows, head.class_names, head.settings))
    return _report_on_rows(head, measured)


def _blocks(predictions: Predictions, scaler: Any) -> Iterator[Block]:
    """Blocks of rows, after a scaler if there is one."""
    weights = _weights_that_differ(predictions.weights)
    plain = replace(predictions, by={}, weights=weights, validate=False)
    for block in row_chunks(len(plain), plain.n_classes, elements=_BLOCK):
        rows = plain.select(block)
        if scaler is None:
            probs = rows.probabilities()
        else:
            probs = scaler.predict_proba(rows.as_logits())
            # A scaler of other classes, or one that overflows, would be measured without a word.
            checks.check_rows(probs, rows.labels, rows.weights, plain.n_classes)
        yield probs, rows.labels, rows.weights


def _report_on_top_labels(
    predictions: TopLabels, name: str, settings: Settings, scaler: Any
) -> CalibrationReport:
    """The report on rows whose other probabilities are unknown."""
    confidences = [predictions.confidence]
    if scaler is not None:
        confidences.append(scaler.predict_proba(predictions.as_logits())[:, 1])
    weights = _weights_that_differ(predictions.weights)
    measured = []
    for confidence in confidences:
        scores = score_top_labels(confidence, predictions.correct, weights)
        rows = Rows.of_top(scores, settings.n_bins)
        measured.append(Measured.of_rows(rows, (), settings))
    return _Head(name, (), settings).report(measured, notes=(_TOP_ONLY,))


def _slices(rows: Any, column: str, values: Any, settings: Settings) -> SliceSection:
    """The section on the rows with each value of a column or, of many numbers, in each fifth."""
    names, codes = slices_of(column, values)
    groups = GroupSums.empty(len(names), settings.n_bins)
    for part in row_chunks(len(rows), elements=_BLOCK):
        groups.add(rows.scores.part(part), codes[part])
    return slice_section(column, names, groups, settings)
