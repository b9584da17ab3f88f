"""Measurement of the runs of a study: every metric of each run, before and after post-hoc calibration."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas
from numpy.typing import NDArray

from hf_calib._errors import InputError, check, did_you_mean, few
from hf_calib._text import counted
from hf_calib.metrics.checks import check_choice
from hf_calib.metrics.intervals import METRICS, resampled_metrics
from hf_calib.metrics.multi_label import UNKNOWN
from hf_calib.metrics.sums import Binning, top_label
from hf_calib.predictions.predictions import (
    MULTI_LABEL,
    SINGLE_LABEL,
    LabelKind,
    Predictions,
)
from hf_calib.predictions.training import PREDICTIONS, TrainingPredictions
from hf_calib.report.measured import MEASURES, Measure
from hf_calib.scaling import SCALERS
from hf_calib.study.advice import UNSCALED
from hf_calib.study.plan import CELLS, FAILED, is_finished, read_plan, recorded
from hf_calib.study.results import NUMBERS, StudyResults, Variance
from hf_calib.study.statistics import unbiased_error

# For one label per row, and for tokens.
STUDY_METRICS: dict[str, Measure] = {
    key: MEASURES[key]
    for key in (
        "nll",
        "accuracy",
        "brier",
        "ece",
        "adaptive_ece",
        "classwise_ece",
        "smooth_ece",
    )
} | {"aurc": MEASURES["area_under_risk_coverage"]}
# For several labels per row, metrics are over all decisions, one per label and row, as the trainer logs them. Their
# Brier score is (p - y)^2, half of that of two classes.
DECISION_METRICS = ("nll", "accuracy", "brier", "ece")
# Errors whose differences are computed without the noise in each -> their bins.
UNBIASED: dict[str, Binning] = {"ece": "uniform", "adaptive_ece": "quantile"}
# A resample adds the noise of each class's error again, so intervals contained the error in only 0 to 80% of cases.
# Reports have no interval of the smooth error either.
WITHOUT_INTERVAL = frozenset({"classwise_ece", "smooth_ece"})
# Temperatures by other criteria than the NLL, as in the papers.
_BY_CRITERION = {"temperature_ece": "ece", "temperature_adaptive_ece": "adaptive_ece"}
MAPS = tuple(
    dict.fromkeys((*SINGLE_LABEL.maps, *_BY_CRITERION, *MULTI_LABEL.maps))
)  # For any kind of task.
METHODS = ("temperature", "auto")
N_BINS = 15
_FEWEST_RESAMPLES = 50
# For a metric that sorts the rows; the standard error is then within 14% for 19 of 20 draws.
_MOST_ORDERED = 100
_ROWS_RESAMPLED = 4e8  # Test rows of all cells and methods: a minute or two.

Key = tuple[str, int]  # Loss and seed.


def measure_study(
    folder: Path,
    *,
    methods: Sequence[str] = METHODS,
    n_resamples: int = 1000,
    seed: int = 0,
    variance: Variance = "own",
    stages: Callable[[str], None] = lambda stage: None,
) -> StudyResults:
    """Measure the finished runs of a study, before and after post-hoc calibration, and compare them.

    The calibrators are fitted to the calibration rows of each run and need no training. A calibrator that does not
    exist for the kind of task is left out, with a note. A large study has fewer resamples. Each stage is announced.
    """
    plan = read_plan(folder)
    all_methods = check_methods(methods)
    check_choice("variance", variance, get_args(Variance))
    stages("reading predictions")
    folders, missing = find_cells(folder, plan)
    numbers: list[tuple[Any, ...]] = []
    remarks: dict[
        str, list[str]
    ] = {}  # By cell; remarks that differ only in numbers are given once.
    n_test, n_classes, n_calibration, kind = 0, 0, 0, SINGLE_LABEL
    for i, key in enumerate(
        filter(folders.get, product(plan["losses"], plan["seeds"])), 1
    ):
        stages(f"measuring {key[0]}, seed {key[1]} ({i} of {len(folders)})")
        predictions = TrainingPredictions.load(folders[key] / PREDICTIONS)
        kind, (n_test, n_classes) = (
            predictions.test.kind,
            predictions.test.as_logits().shape,
        )
        n_calibration = (
            0 if predictions.calibration is None else len(predictions.calibration)
        )
        cost = (
            len(folders)
            * len(all_methods)
            * predictions.test.labels.size
            * (1 + n_classes / 100)
        )
        n_resamples = min(
            n_resamples, max(int(_ROWS_RESAMPLED / cost), _FEWEST_RESAMPLES)
        )
        for method in all_methods:
            said: list[str] = []
            try:
                probs = _probabilities(predictions, method, said)
                found = _measure(predictions.test, probs, n_resamples, seed)
                numbers += [(*key, method, *number) for number in found]
            except InputError as error:
                said.append(f"{method} was left out: {error}")
            for remark in said:
                words = remarks.setdefault(re.sub(r"[\d.]+", "", remark), [remark])
                words.append(f"{key[0]} seed {key[1]}")
    notes = [
        f"In {len(cells)} of {counted(len(folders), 'run')} ({few(cells)}): {remark}"
        + " Numbers are those of the first run."
        * (len(cells) > 1 and any(map(str.isdigit, remark)))
        for remark, *cells in remarks.values()
    ]
    if kind.sigmoid:
        notes.append(
            "The metrics are of all decisions, one for each row and label, with the confidence max(p, 1 - p); the "
            "decisions of a row are resampled together. The report of each run has the means over the labels."
        )
    return StudyResults(
        losses=tuple(plan["losses"]),
        seeds=tuple(plan["seeds"]),
        methods=all_methods,
        metrics={key: STUDY_METRICS[key].title for key in metrics_of(kind)},
        counted=(f"test {kind.rows}", kind.columns),
        n_test=n_test,
        n_classes=n_classes,
        n_calibration=n_calibration,
        n_resamples=n_resamples,
        variance=variance,
        numbers=pandas.DataFrame(numbers, columns=NUMBERS),
        missing=missing,
        remarks=tuple(notes),
    )


def check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """Return `UNSCALED`, then the calibrators in the given order; raise for an unknown one."""
    for method in methods:
        known, way_out = method in (*MAPS, UNSCALED), did_you_mean(method, MAPS)
        check(known, "methods to be post-hoc calibrators", repr(method), way_out)
    return tuple(dict.fromkeys([UNSCALED, *methods]))


def metrics_of(kind: LabelKind) -> tuple[str, ...]:
    """Return the keys of the metrics of a kind of task."""
    return DECISION_METRICS if kind.sigmoid else tuple(STUDY_METRICS)


def find_cells(
    study: Path, plan: Mapping[str, Any]
) -> tuple[dict[Key, Path], dict[Key, str]]:
    """Return the folders of the runs in study.json that can be compared, and the reasons why others cannot be.

    If a loss and seed is listed twice, the later run counts.
    """
    listed = {key: study / CELLS / name for name, key in plan["cells"].items()}
    missing: dict[Key, str] = {}
    tested: dict[Key, str] = {}  # The rows of a comparison must be the same.
    for key, folder in listed.items():
        if not is_finished(folder):
            missing[key] = str(recorded(folder / FAILED, "reason") or "not finished")
            continue
        try:
            test = TrainingPredictions.load(folder / PREDICTIONS).test
            replace(test)  # This checks the rows; those of a diverged run are NaN.
        except InputError as error:
            missing[key] = f"its predictions cannot be measured: {error}"
            continue
        arrays = (
            (test.labels,) if test.sentences is None else (test.labels, test.sentences)
        )
        rows = [array.astype(np.int64).tobytes() for array in arrays]
        tested[key] = hashlib.sha256(
            b"".join([str(test.names).encode(), *rows])
        ).hexdigest()
    ((most, n_cells),) = Counter(tested.values()).most_common(1) or [("", 0)]
    missing |= {
        key: f"its test labels or classes are not those that {n_cells} of the {len(tested)} finished cells share, and "
        "a paired comparison needs the same rows in the same order"
        for key, found in tested.items()
        if found != most
    }
    return {
        key: folder for key, folder in listed.items() if key not in missing
    }, missing


def _probabilities(
    predictions: TrainingPredictions, method: str, remarks: list[str]
) -> NDArray[np.float64]:
    """The probabilities of the test rows after a calibrator fitted to the calibration rows, and the fit's warnings."""
    test, calibration = predictions.test, predictions.calibration
    if method == UNSCALED:
        return test.probabilities()
    maps = test.kind.maps if test.kind.sigmoid else (*test.kind.maps, *_BY_CRITERION)
    requirement = f"the method to be a calibrator for {test.kind.name} predictions"
    check(method in maps, requirement, method, f"use one of {', '.join(maps)}")
    criterion = {"criterion": _BY_CRITERION[method]} if method in _BY_CRITERION else {}
    scaler = SCALERS["temperature" if criterion else method].load()(**criterion)
    if calibration is None:
        raise InputError("the run had no calibration rows")
    checked = replace(calibration, logits=calibration.as_logits().astype(np.float64))
    remarks += [f"{method}: {warning}" for warning in checked.fit_calibrator(scaler)]
    return np.asarray(
        scaler.predict_proba(test.as_logits().astype(np.float64)), dtype=np.float64
    )


def _measure(
    test: Predictions, probs: NDArray[np.float64], n_resamples: int, seed: int
) -> list[tuple[Any, ...]]:
    """The table rows of a run with a calibrator, from the metric on (see `NUMBERS`)."""
    labels, groups = test.labels.astype(np.int64), None
    if test.sentences is not None:  # Whole sentences are drawn.
        groups = np.unique(test.sentences, return_inverse=True)[1]
    if (
        test.kind.sigmoid
    ):  # Decisions are rows of two classes; those of a row are drawn together.
        known = labels != UNKNOWN
        applies, labels = probs[known], labels[known]
        probs = np.stack([1 - applies, applies], axis=1)
        groups = np.unique(np.nonzero(known)[0], return_inverse=True)[1]
    numbers: dict[str, tuple[float, Any]] = {}  # A value, and resamples (R,) or NaN.
    drawn: Any = {"seed": seed, "groups": groups}
    counted: dict[str, tuple[str, dict[str, Any]]] = {}
    ordered: dict[str, tuple[str, dict[str, Any]]] = {}
    for key in metrics_of(test.kind):
        measure = STUDY_METRICS[key]
        metric = METRICS[measure.metric]
        options = {**measure.options, **({"n_bins": N_BINS} if measure.binned else {})}
        numbers[key] = float(metric.function(probs, labels, **options)), np.nan
        if key not in WITHOUT_INTERVAL and np.isfinite(numbers[key][0]):
            (counted if metric.sums else ordered)[key] = measure.metric, options
    for asked, n in (
        (counted, n_resamples),
        (ordered, min(n_resamples, _MOST_ORDERED)),
    ):
        draws = resampled_metrics(
            [*asked.values()], probs, labels, n_resamples=n, **drawn
        )
        numbers |= {
            key: (numbers[key][0], each) for key, each in zip(asked, draws, strict=True)
        }
    if test.kind.sigmoid:
        numbers["brier"] = numbers["brier"][0] / 2, numbers["brier"][1] / 2
    compared = dict(numbers)
    for key in UNBIASED.keys() & numbers.keys():
        options = {"n_bins": N_BINS, "n_resamples": n_resamples, **drawn}
        compared[key] = unbiased_error(
            top_label(probs, labels), UNBIASED[key], **options
        )
    return [
        (key, *number, *compared[key])
        for key, number in numbers.items()
        if np.isfinite(number[0])
    ]
