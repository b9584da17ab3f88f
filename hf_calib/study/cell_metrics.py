"""The metrics of the trainings of a study, before and after each post-hoc map, on resampled test rows too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from hf_calib._errors import InputError
from hf_calib.metrics.binning import FloatArray
from hf_calib.metrics.bootstrap import resampled_metrics
from hf_calib.metrics.by_name import METRICS
from hf_calib.metrics.calibration import top_label
from hf_calib.predictions.of_training import TrainingPredictions
from hf_calib.report.measures import MEASURES, Measure
from hf_calib.scaling.methods import SINGLE_LABEL_SCALERS
from hf_calib.study.cells import fault
from hf_calib.study.results import UNSCALED, Panel

N_BINS = 15
STUDY_METRICS: dict[str, Measure] = {
    **{
        key: MEASURES[key]
        for key in ("nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece", "smooth_ece")
    },
    "aurc": MEASURES["area_under_risk_coverage"],
}
# Of a metric that is called with the drawn rows; its standard error is then within 14% for 19 of 20 draws.
_MOST_CALLS = 100
_FEWEST_RESAMPLES = 50
# What a study may cost, in test rows of a cell with a method: a minute or two.
_ROWS_RESAMPLED = 4e8
_ROWS_IN_CALLS = 2e8


class Resamples(NamedTuple):
    """How many resamples of the test rows the metrics take; 0 where too few are worth their time.

    Args:
        counted: of metrics that read how often each row was drawn.
        called: of the others.
    """

    counted: int
    called: int

    def of(self, metric: str) -> int:
        """Those of a key of `STUDY_METRICS`."""
        return self.counted if STUDY_METRICS[metric].resampling == "counts" else self.called


class Measured(NamedTuple):
    """One training, measured.

    Args:
        values: (method, metric) -> value.
        draws: (method, metric) -> values (R,) on resampled test rows, the same for all trainings.
        panels: method -> predictions.
        remarks: what was left out, and warnings of the fits.
    """

    values: dict[tuple[str, str], float]
    draws: dict[tuple[str, str], FloatArray]
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
    predictions: TrainingPredictions, methods: Sequence[str], resamples: Resamples, seed: int
) -> Measured:
    """Fit each map on the calibration rows of a training, and measure its test rows.

    Args:
        predictions: test rows without a `fault`.
        methods: `UNSCALED`, or keys of `SINGLE_LABEL_SCALERS`.
        resamples: how many.
        seed: of their draw.
    """
    found = Measured({}, {}, {}, [])
    for method in methods:
        try:
            _measure_method(predictions, method, resamples, seed, found)
        except InputError as error:
            found.remarks.append(f"{method} was left out: {error}")
    return found


def _measure_method(
    predictions: TrainingPredictions, method: str, resamples: Resamples, seed: int, found: Measured
) -> None:
    labels = predictions.test.labels.astype(np.int64)
    probs = _probabilities(predictions, method, found.remarks)
    values = {key: _value(measure, probs, labels) for key, measure in STUDY_METRICS.items()}
    values = {key: value for key, value in values.items() if np.isfinite(value)}
    for n_resamples in set(resamples) - {0}:
        keys = [key for key in values if resamples.of(key) == n_resamples]
        asked = [(STUDY_METRICS[key].metric, _options(STUDY_METRICS[key])) for key in keys]
        draws = resampled_metrics(asked, probs, labels, n_resamples=n_resamples, seed=seed)
        found.draws.update({(method, key): drawn for key, drawn in zip(keys, draws, strict=True)})
    found.values.update({(method, key): value for key, value in values.items()})
    found.panels[method] = Panel(*top_label(probs, labels))


def _probabilities(predictions: TrainingPredictions, method: str, remarks: list[str]) -> NDArray[np.float64]:
    logits = predictions.test.logits.astype(np.float64)
    if method == UNSCALED:
        return np.asarray(softmax(logits, axis=1))
    calibration = predictions.calibration
    wrong = "are none" if calibration is None else fault(calibration)
    if calibration is None or wrong is not None:
        raise InputError(f"the calibration rows {wrong}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = SINGLE_LABEL_SCALERS[method].load()()
        scaler.fit(calibration.logits.astype(np.float64), calibration.labels)
    remarks += [f"{method}: {warning.message}" for warning in caught]
    return np.asarray(scaler.predict_proba(logits), dtype=np.float64)


def _value(measure: Measure, probs: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    return float(METRICS[measure.metric].function(probs, labels, **_options(measure)))


def _options(measure: Measure) -> dict[str, Any]:
    options: Mapping[str, Any] = measure.options
    return dict(options) | ({"n_bins": N_BINS} if measure.binned else {})
