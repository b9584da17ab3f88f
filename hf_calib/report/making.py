"""The ways to a report: from arrays, from predictions, and from sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import check
from hf_calib._text import counted
from hf_calib.metrics import CalibrationState, checks
from hf_calib.metrics.checks import FloatArray, row_chunks
from hf_calib.metrics.multi_label import (
    UNKNOWN,
    Decisions,
    check_decisions,
    negative_logs_of_decisions,
)
from hf_calib.metrics.scores import SMALLEST_PROBABILITY, negative_logs
from hf_calib.metrics.state import (
    GroupSums,
    RowScores,
    score_chunks,
    score_top_labels,
)
from hf_calib.metrics.sums import Interval, TopLabel
from hf_calib.plots.style import check_class_names
from hf_calib.predictions.predictions import Predictions, TopLabels
from hf_calib.predictions.slices import slices_of
from hf_calib.report.measured import MOST_SORTED, Measured, Settings, mean_change
from hf_calib.report.multi_label import measure_labels
from hf_calib.report.report import CalibrationReport
from hf_calib.report.sections import (
    SliceSection,
    slice_section,
    soft_label_section,
    with_entities,
)

# The most multi-label decisions that all resamples read together, so that they take seconds.
_DECISIONS_READ, _FEWEST_RESAMPLES = 3e7, 100
_MOST_NATS = -np.log(SMALLEST_PROBABILITY)
# More rows, or more probabilities, are summed: resamples would take minutes, or many times their memory.
MOST_RESAMPLED = 200_000
MOST_NUMBERS_RESAMPLED = 2**26  # 0.5 GB of float64.
_BLOCK = 2**20  # The probabilities of summed rows that exist at a time.
_TOP_ONLY = (
    "Only the confidence of the predicted class is known. What needs the probabilities of all classes is left out; the "
    "NLL and the Brier score of a slice are those of whether the prediction is correct."
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

    For a single metric, call its function, such as `expected_calibration_error`; in a loop over batches, use
    `CalibrationState`. Accuracy, proper scores and similar metrics have a percentile bootstrap interval over
    examples (Efron and Tibshirani 1993, 13.3), and each ECE has the interval of `calibration_error_interval`. Other
    measures of mis-calibration have no valid interval.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C); with several labels per row (N, C) of 1, 0, or -100 for an unknown label. The
            probabilities are then sigmoids, any values in [0, 1].
        calibrated: (N, C) float, the probabilities after calibration on *other* examples; or None.
        soft_labels: (N, C) float, rows that sum to 1: each class's share among the annotators of an example, such as
            those of CIFAR-10H; or None. The probabilities are then also measured against the shares.
        sample_weight: (N,) float, the weight of each row, for labels (N,); or None. The report then has the metrics
            that have a weighted form, with normal intervals, and no soft labels.
        n_bins: M, at least 1.
        confidence_level: level of the intervals, in (0, 1).
        n_resamples: number of resamples of the bootstrap and of the consistency test.
        seed: seed of the resamples.
        class_names: C names; default "0", "1", ...
        name: name of the model, for titles.

    Returns:
        A report with `to_dict()`, `to_markdown()`, `to_html()`, `save()` and `figures()`; its fields hold the numbers.

    Raises:
        ValueError: if probs are not probabilities, or labels, calibrated, soft_labels or class_names do not fit.

    Notes:
        With several labels per row, the ECE compares the probability of a label with its frequency. The trainer's
        `eval_ece` is another number, of the confidence $\max(p, 1 - p)$ of each decision; its `eval_classwise_ece` is
        the macro ECE. AUROC and average precision are undefined for a label that never applies, and AUROC for one that
        always applies: macro averages leave such labels out.

    >>> probs = np.tile([[0.9, 0.1], [0.2, 0.8]], (50, 1))
    >>> report = calibration_report(probs, np.tile([0, 0], 50), n_resamples=100)
    >>> report.before.metrics["accuracy"].value
    0.5
    >>> report.verdict
    'Over-confident by 35.0 points [25.4, 44.6] on average.'
    """
    settings = Settings(
        checks.check_n_bins(n_bins), confidence_level, n_resamples, seed
    )
    checks.check_draws(n_resamples, seed, confidence_level)
    several, shares = np.ndim(labels) == 2, None
    n_given = several + (soft_labels is not None) + (sample_weight is not None)
    requirement = (
        "at most one of labels (N, C), soft_labels and sample_weight to be given"
    )
    check(
        n_given <= 1,
        requirement,
        n_given,
        "leave the others out, as they cannot be combined",
    )
    given = (
        {"probs": probs}
        if calibrated is None
        else {"probs": probs, "calibrated": calibrated}
    )
    rows, states = list[Any](), list[Any]()
    if several:
        rows = [
            check_decisions(each, labels, argument=argument)
            for argument, each in given.items()
        ]
        targets: Any = np.where(rows[0].known, rows[0].true, UNKNOWN)
        affordable = max(_FEWEST_RESAMPLES, int(_DECISIONS_READ // rows[0].probs.size))
        settings = settings._replace(n_resamples=min(n_resamples, affordable))
        names = check_class_names(class_names, rows[0].probs.shape[1])
        states = [measure_labels(each, names, settings) for each in rows]
        shares_of_rows = rows[0].known.sum(axis=1).astype(np.float64)
        nats = [negative_logs_of_decisions(each) for each in rows]
        notes = _notes_on_one_label(rows[0])
    else:
        way_out = "pass the calibrated probabilities of the same examples and classes"
        for argument, each in given.items():
            checks.check_shape(
                argument, checks.as_array(argument, each), np.shape(probs), way_out
            )
            checked, targets = checks.check_probs_and_labels(each, labels)
            rows.append(checked)
        names = check_class_names(class_names, rows[0].shape[1])
        weights = checks.check_weights(sample_weight, len(targets))
        states = [
            Measured.of_rows(each, targets, names, settings, weights) for each in rows
        ]
        shares_of_rows = np.ones(len(targets)) if weights is None else weights
        nats = [negative_logs(each, targets) for each in rows]
        notes = _notes_on_zeros(nats)
    if soft_labels is not None:
        soft = checks.check_soft_labels(soft_labels, rows[0].shape)
        shares = soft_label_section(soft, targets, rows, settings)
    before, after = [*states, None][:2]
    change = None
    if after is not None:
        change = mean_change(nats[0], nats[1], shares_of_rows, settings)
    return CalibrationReport(
        name=str(name),
        class_names=names,
        before=before,
        after=after,
        nll_change=change,
        settings=settings,
        labels=targets,
        soft_labels=shares,
        notes=notes,
    )


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
        f"In {counted(n_zero, 'row')} of {len(nats[0]):,} the label has probability 0 in float64, which counts as "
        f"{_MOST_NATS:.0f} nats. The negative log-likelihood may be larger.",
    )


def report_on_states(
    state: CalibrationState,
    *,
    after: CalibrationState | None = None,
    class_names: tuple[str, ...] | None = None,
    name: str = "model",
    confidence_level: float = 0.95,
    seed: int = 0,
) -> CalibrationReport:
    """The report on summed rows, also after a calibrator that was fitted on other rows."""
    names = class_names or tuple(map(str, range(state.n_classes)))
    settings = Settings(state.n_bins, confidence_level, seed=seed)
    before = Measured.of_state(state, names, settings)
    final = None
    change = None
    if after is not None:
        final = Measured.of_state(after, names, settings)
        change = Interval(final.metrics["nll"].value - before.metrics["nll"].value)
    return CalibrationReport(
        name=name,
        class_names=names,
        before=before,
        after=final,
        nll_change=change,
        settings=settings,
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
    """`calibration_report` on predictions and their weights, also after a scaler that was fitted on other rows.

    The report has a section for each of their columns `by`, and one on the entities of tokens. Soft labels (N, C) are
    of the same examples, and class names are those of the data, or None for those of the predictions. More rows than
    can be resampled in seconds are summed.
    """
    if isinstance(predictions, TopLabels):
        report = _report_on_top_labels(predictions, name, Settings(n_bins), scaler)
    elif _are_many(predictions) and soft_labels is None:
        names = tuple(class_names or predictions.names)
        report = _report_on_many(predictions, name, names, Settings(n_bins), scaler)
    else:
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
    if predictions.by:
        sections = [
            _slices(predictions, column, Settings(n_bins), scaler)
            for column in predictions.by
        ]
        report = replace(report, slices=tuple(sections))
    if predictions.sentences is None:
        return report
    return with_entities(report, predictions.sentences)


def _are_many(predictions: Predictions) -> bool:
    """Whether rows with one label each are too many to resample."""
    if predictions.kind.sigmoid or predictions.sentences is not None:
        return False
    n_rows = len(predictions)
    return n_rows > MOST_RESAMPLED or predictions.scores.size > MOST_NUMBERS_RESAMPLED


def _report_on_many(
    predictions: Predictions,
    name: str,
    names: tuple[str, ...],
    settings: Settings,
    scaler: Any,
) -> CalibrationReport:
    """The report on rows that are summed."""
    before, nats = _summed(predictions, names, settings, None)
    all_nats = [nats]
    after = None
    change = None
    if scaler is not None:
        after, nats_after = _summed(predictions, names, settings, scaler)
        all_nats.append(nats_after)
        weights = predictions.weights
        shares = np.ones(len(nats)) if weights is None else weights
        change = mean_change(nats, nats_after, shares, settings)
    return CalibrationReport(
        name=str(name),
        class_names=check_class_names(names, predictions.n_classes),
        before=before,
        after=after,
        nll_change=change,
        settings=settings,
        notes=_notes_on_zeros(all_nats),
    )


def _summed(
    predictions: Predictions, names: tuple[str, ...], settings: Settings, scaler: Any
) -> tuple[Measured, FloatArray]:
    """The metrics of sums and of the top labels, and the negative log-likelihood (N,) of each row."""
    n_rows = len(predictions)
    state = CalibrationState(n_classes=predictions.n_classes, n_bins=settings.n_bins)
    top = TopLabel(np.empty(n_rows), np.empty(n_rows))
    nats = np.empty(n_rows)
    for block, rows, probs in _blocks(predictions, scaler):
        if scaler is not None:
            checks.check_rows(probs, rows.labels, rows.weights, state.n_classes)
        nats[block] = negative_logs(probs, rows.labels)
        for part, scores in score_chunks(probs, rows.labels, rows.weights):
            state.add_scores(scores)
            own = slice(block.start + part.start, block.start + part.stop)
            top.confidence[own] = scores.confidence
            top.correct[own] = scores.at_top == scores.at_label
    is_sorted = predictions.weights is None and n_rows <= MOST_SORTED
    return Measured.of_state(state, names, settings, top if is_sorted else None), nats


def _report_on_top_labels(
    rows: TopLabels, name: str, settings: Settings, scaler: Any
) -> CalibrationReport:
    """The report on rows whose other probabilities are unknown."""
    correct = rows.correct.astype(np.float64)
    before = Measured.of_top_labels(
        TopLabel(rows.confidence, correct), settings, rows.weights
    )
    after = None
    if scaler is not None:
        confidence = scaler.predict_proba(rows.as_logits())[:, 1]
        top = TopLabel(confidence, correct)
        after = Measured.of_top_labels(top, settings, rows.weights)
    return CalibrationReport(
        name=str(name),
        class_names=(),
        before=before,
        after=after,
        settings=settings,
        notes=(_TOP_ONLY,),
    )


def _blocks(
    predictions: Predictions | TopLabels, scaler: Any
) -> Iterator[tuple[slice, Any, Any]]:
    """The places, the rows and the probabilities of blocks, after a scaler if there is one."""
    plain = replace(predictions, by={}, validate=False)
    for block in row_chunks(len(plain), plain.n_classes, elements=_BLOCK):
        rows = plain.select(block)
        if scaler is None:
            probs = rows.probabilities()
        else:
            probs = scaler.predict_proba(rows.as_logits())
        yield block, rows, probs


def _slices(
    predictions: Predictions | TopLabels, column: str, settings: Settings, scaler: Any
) -> SliceSection:
    """The section on the rows with each value of a column or, of many numbers, in each fifth."""
    names, codes = slices_of(column, predictions.by[column])
    groups = GroupSums.empty(len(names), settings.n_bins)
    for block, rows, probs in _blocks(predictions, scaler):
        for part, scores in _scored(rows, probs):
            groups.add(scores, codes[block][part])
    return slice_section(column, names, groups, settings)


def _scored(
    rows: Predictions | TopLabels, probs: Any
) -> Iterator[tuple[slice, RowScores]]:
    """Chunks of scored rows."""
    if isinstance(rows, TopLabels):
        scores = score_top_labels(probs[:, 1], rows.correct, rows.weights)
        yield slice(None), scores
    else:
        yield from score_chunks(probs, rows.labels, rows.weights)
