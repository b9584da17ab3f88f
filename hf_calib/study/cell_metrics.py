"""The metrics of the trainings of a study, before and after each post-hoc map, on resampled test rows too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from hf_calib._errors import InputError
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.intervals import METRICS, resampled_metrics
from hf_calib.metrics.multi_label import UNKNOWN, LabelMetrics, check_decisions, macro
from hf_calib.metrics.sums import TopLabel, draw_counts, top_label
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.report.measures import Measure
from hf_calib.study.cells import fault
from hf_calib.study.kinds import (
    DECISION_METRICS,
    MACRO_METRICS,
    STUDY_METRICS,
    UNBIASED,
    WITHOUT_INTERVAL,
    make_scaler,
)
from hf_calib.study.results import UNSCALED, Panel
from hf_calib.study.unbiased import UnbiasedError, unbiased_error

N_BINS = 15
# Of a metric that is called with the drawn rows; its standard error is then within 14% for 19 of 20 draws.
_MOST_CALLS = 100
_FEWEST_RESAMPLES = 50
# What a study may cost, in test rows of a cell with a method: a minute or two.
_ROWS_RESAMPLED = 4e8
_ROWS_IN_CALLS = 2e8


class Resamples(NamedTuple):
    """How many resamples of the test rows, or of the sentences, the metrics take; 0 where too few are worth their time.

    Args:
        counted: of metrics that read how often each row was drawn.
        called: of the others.
    """

    counted: int
    called: int

    def of(self, metric: str) -> int:
        """Those of a key of `STUDY_METRICS`."""
        return self.counted if METRICS[STUDY_METRICS[metric].metric].sums else self.called


class Measured(NamedTuple):
    """One training, measured.

    Args:
        values: (method, metric) -> value.
        draws: (method, metric) -> values (R,) on resampled test rows, the same for all trainings.
        unbiased: (method, metric) -> a calibration error without what noise adds to it, for differences.
        panels: method -> predictions.
        remarks: what was left out, and warnings of the fits.
    """

    values: dict[tuple[str, str], float]
    draws: dict[tuple[str, str], FloatArray]
    unbiased: dict[tuple[str, str], UnbiasedError]
    panels: dict[str, Panel]
    remarks: list[str]


def affordable_resamples(n_test: int, n_classes: int, n_sets: int, most: int) -> Resamples:
    """The numbers of resamples for n_sets sets of probabilities."""
    if n_test < 2:  # no other choice of rows
        return Resamples(0, 0)
    counted = int(_ROWS_RESAMPLED / (n_sets * n_test * (1 + n_classes / 100)))
    called = int(_ROWS_IN_CALLS / (n_sets * n_test))
    return Resamples(
        min(most, max(counted, _FEWEST_RESAMPLES)),
        min(most, _MOST_CALLS, called) if called >= _FEWEST_RESAMPLES else 0,
    )


def measure_training(
    predictions: TrainingPredictions,
    methods: Sequence[str],
    resamples: Resamples,
    seed: int,
    criterion: str | None = None,
) -> Measured:
    """Fit each map on the calibration rows of a training, and measure its test rows.

    Args:
        predictions: test rows without a `fault`.
        methods: `UNSCALED`, or maps; one that the kind of task does not have is left out, with a remark.
        resamples: how many.
        seed: of their draw.
        criterion: of a temperature; None is the NLL.
    """
    found = Measured({}, {}, {}, {}, [])
    for method in methods:
        try:
            probs = _probabilities(predictions, method, criterion, found.remarks)
            _measure_method(predictions.test, probs, method, resamples, seed, found)
        except InputError as error:
            found.remarks.append(f"{method} was left out: {error}")
    return found


def _measure_method(
    test: Predictions,
    probs: NDArray[np.float64],
    method: str,
    resamples: Resamples,
    seed: int,
    found: Measured,
) -> None:
    labels = test.labels.astype(np.int64)
    if labels.ndim == 2:
        _measure_decisions(probs, labels, method, resamples.counted, seed, found)
        return
    groups = sentences_of(test)
    values = {key: _value(measure, probs, labels) for key, measure in STUDY_METRICS.items()}
    values = {key: value for key, value in values.items() if np.isfinite(value)}
    for n_resamples in set(resamples) - {0}:
        keys = [key for key in values if resamples.of(key) == n_resamples and key not in WITHOUT_INTERVAL]
        asked = [(STUDY_METRICS[key].metric, _options(STUDY_METRICS[key])) for key in keys]
        draws = resampled_metrics(asked, probs, labels, n_resamples=n_resamples, seed=seed, groups=groups)
        found.draws.update({(method, key): drawn for key, drawn in zip(keys, draws, strict=True)})
    found.values.update({(method, key): value for key, value in values.items()})
    found.panels[method] = Panel(*top_label(probs, labels))
    if resamples.counted:
        for key, binning in UNBIASED.items():
            found.unbiased[method, key] = unbiased_error(
                TopLabel(*found.panels[method]),
                n_bins=N_BINS,
                binning=binning,
                n_resamples=resamples.counted,
                seed=seed,
                groups=groups,
            )


def sentences_of(rows: Predictions) -> IntArray | None:
    """Of tokens, which sentence (N,) each is of, in 0..G-1: sentences are drawn, and never parts of them."""
    return None if rows.sentences is None else np.unique(rows.sentences, return_inverse=True)[1]


def _measure_decisions(
    probs: NDArray[np.float64],
    labels: NDArray[np.int64],
    method: str,
    n_resamples: int,
    seed: int,
    found: Measured,
) -> None:
    """Several labels (N, C) a row: over all decisions, and by label; the decisions of a row are drawn together."""
    some = (labels != UNKNOWN).any(axis=1)
    decisions = check_decisions(probs[some], labels[some])
    rows, columns = np.nonzero(decisions.known)
    applies = decisions.probs[rows, columns]
    outcomes = np.stack([1 - applies, applies], axis=1)
    true = decisions.true[rows, columns].astype(np.int64)
    by_label, n_rows = LabelMetrics(decisions, N_BINS), len(decisions.probs)
    means = macro(by_label.evaluate(np.ones((1, n_rows), np.intp)))
    values = {key: _value(STUDY_METRICS[key], outcomes, true) for key in DECISION_METRICS}
    values |= {key: float(means[name][0]) for key, name in MACRO_METRICS.items()}
    draws = {}
    if n_resamples:
        asked = [(STUDY_METRICS[key].metric, _options(STUDY_METRICS[key])) for key in DECISION_METRICS]
        drawn = resampled_metrics(asked, outcomes, true, n_resamples=n_resamples, seed=seed, groups=rows)
        draws = dict(zip(DECISION_METRICS, drawn, strict=True))
        # The same rows again.
        blocks = [
            macro(by_label.evaluate(counts))
            for counts in draw_counts(n_rows, n_resamples, np.random.default_rng(seed))
        ]
        draws |= {
            key: np.concatenate([block[name] for block in blocks]) for key, name in MACRO_METRICS.items()
        }
        draws["brier"] = draws["brier"] / 2
    values["brier"] /= 2
    for key, value in values.items():
        if np.isfinite(value):
            found.values[method, key] = value
            if key in draws and key not in WITHOUT_INTERVAL and np.isfinite(draws[key]).all():
                found.draws[method, key] = draws[key]
    found.panels[method] = Panel(*top_label(outcomes, true))
    if n_resamples:
        found.unbiased[method, "ece"] = unbiased_error(
            TopLabel(*found.panels[method]), n_bins=N_BINS, n_resamples=n_resamples, seed=seed, groups=rows
        )


def _probabilities(
    predictions: TrainingPredictions, method: str, criterion: str | None, remarks: list[str]
) -> NDArray[np.float64]:
    logits, kind = _logits(predictions.test), predictions.test.kind
    if method == UNSCALED:
        return np.asarray(expit(logits) if kind.sigmoid else softmax(logits, axis=1))
    scaler = make_scaler(kind, method, criterion)
    calibration = predictions.calibration
    wrong = "are none" if calibration is None else fault(calibration)
    if calibration is None or wrong is not None:
        raise InputError(f"the calibration rows {wrong}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(_logits(calibration), calibration.labels)
    remarks += [f"{method}: {warning.message}" for warning in caught]
    return np.asarray(scaler.predict_proba(logits), dtype=np.float64)


def _logits(rows: Predictions) -> NDArray[np.float64]:
    assert rows.logits is not None  # a training leaves these
    return rows.logits.astype(np.float64)


def _value(measure: Measure, probs: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    return float(METRICS[measure.metric].function(probs, labels, **_options(measure)))


def _options(measure: Measure) -> dict[str, Any]:
    options: Mapping[str, Any] = measure.options
    return dict(options) | ({"n_bins": N_BINS} if measure.binned else {})
