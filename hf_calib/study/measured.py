"""The trainings of a study measured: a table of every metric of each training, before and after post-hoc maps."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas
from numpy.typing import NDArray
from scipy.special import expit, softmax

from hf_calib._errors import InputError, check, did_you_mean, few
from hf_calib.metrics.checks import FloatArray, IntArray, check_choice, check_draws
from hf_calib.metrics.intervals import METRICS, resampled_metrics
from hf_calib.metrics.multi_label import UNKNOWN, LabelMetrics, check_decisions, macro
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.sums import Binning, TopLabel, draw_counts, top_label
from hf_calib.predictions.kinds import MULTI_LABEL, SINGLE_LABEL, LabelKind
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.training import PREDICTIONS, TrainingPredictions
from hf_calib.report.measured import MEASURES, Measure
from hf_calib.report.multi_label import TITLES
from hf_calib.scaling import SCALERS
from hf_calib.scaling.temperature import Criterion
from hf_calib.study.advice import UNSCALED
from hf_calib.study.cells import CELLS, is_finished, problem
from hf_calib.study.plan import read_plan
from hf_calib.study.results import NUMBERS, StudyResults, Variance
from hf_calib.study.unbiased import unbiased_error

# Of one label per row, and of tokens.
STUDY_METRICS: dict[str, Measure] = {
    key: MEASURES[key]
    for key in ("nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece", "smooth_ece")
} | {"aurc": MEASURES["area_under_risk_coverage"]}
# Of several labels a row: over all decisions, each label of each row one, as the trainer logs them. Their Brier score
# is (p - y)^2, half of that of two classes.
DECISION_METRICS = ("nll", "accuracy", "brier", "ece")
# And means over the labels, with their names in `hf_calib.metrics.multi_label`; the first is the trainer's name.
MACRO_METRICS = {
    "classwise_ece": "ece",
    **{f"macro_{name}": name for name in ("nll", "brier", "auroc", "average_precision")},
}
# Errors that differences are of without what noise adds to each -> their bins.
UNBIASED: dict[str, Binning] = {"ece": "uniform", "adaptive_ece": "quantile"}
# Noise is added to each class's error, and a resample adds it again: an interval held the error in 0 to 80% of cases.
WITHOUT_INTERVAL = frozenset({"classwise_ece"})
# Temperatures by another criterion than the NLL, as the papers take them.
_BY_CRITERION = {"temperature_ece": "ece", "temperature_adaptive_ece": "adaptive_ece"}
MAPS = tuple(dict.fromkeys((*SINGLE_LABEL.maps, *_BY_CRITERION, *MULTI_LABEL.maps)))  # of any kind
METHODS = ("temperature", "auto")
N_BINS = 15
# Of a metric that is called with the drawn rows; its standard error is then within 14% for 19 of 20 draws.
_MOST_CALLS = 100
_FEWEST_RESAMPLES = 50
# What a study may cost, in test rows of a cell with a method: a minute or two.
_ROWS_RESAMPLED = 4e8
_ROWS_IN_CALLS = 2e8

Key = tuple[str, int]  # loss and seed


class Resamples(NamedTuple):
    """How many resamples of the test rows or sentences the metrics take; 0 where too few are worth their time.

    `counted` ones are of metrics that read how often each row was drawn, `called` ones of the others.
    """

    counted: int
    called: int

    def of(self, metric: str) -> int:
        """Those of a key of `STUDY_METRICS`."""
        return self.counted if METRICS[STUDY_METRICS[metric].metric].sums else self.called


def measure_study(
    folder: Path,
    *,
    methods: Sequence[str] = METHODS,
    n_resamples: int = 1000,
    seed: int = 0,
    variance: Variance = "own",
    stages: Callable[[str], None] = lambda stage: None,
) -> StudyResults:
    """Measure the finished trainings of a study, before and after post-hoc maps, and compare them.

    The maps are fitted on the calibration rows of each training, and cost no training. One that the kind of task does
    not have is left out, with a note. The resamples of the test rows, at least 50, go by the seed; a slow metric and a
    large study take fewer. Each stage is named as it begins.
    """
    plan = read_plan(folder)
    all_methods = check_methods(methods)
    check_draws(n_resamples, seed)
    check_choice("variance", variance, get_args(Variance))
    requirement = f"n_resamples to be at least {_FEWEST_RESAMPLES}"
    check(n_resamples >= _FEWEST_RESAMPLES, requirement, n_resamples, "leave it out, for 1000")
    stages("reading predictions")
    folders, missing = find_cells(folder, plan)
    criterion = (plan["base"] or {}).get("temperature_criterion")
    criterion = criterion if criterion in get_args(Criterion) else None
    numbers: list[tuple[Any, ...]] = []
    panels: dict[tuple[str, str], list[TopLabel]] = {}
    remarks: dict[str, tuple[str, list[str]]] = {}
    n_calibration: list[int] = []
    n_test, n_classes, n_drawn, kind, resamples = 0, 0, 0, SINGLE_LABEL, Resamples(0, 0)
    in_order = [key for key in product(plan["losses"], plan["seeds"]) if key in folders]
    for i, (loss, training_seed) in enumerate(in_order, 1):
        stages(f"measuring {loss}, seed {training_seed} ({i} of {len(folders)})")
        predictions = TrainingPredictions.load(folders[loss, training_seed] / PREDICTIONS)
        kind, sentences = predictions.test.kind, sentences_of(predictions.test)
        n_test, n_classes = predictions.test.as_logits().shape
        n_drawn = n_test if sentences is None else int(sentences.max()) + 1
        n_calibration.append(0 if predictions.calibration is None else len(predictions.calibration.labels))
        if n_drawn > 1:  # else there is no other choice of rows
            n_sets = len(folders) * len(all_methods)
            resamples = affordable_resamples(predictions.test.labels.size, n_classes, n_sets, n_resamples)
        for method in all_methods:
            said: list[str] = []
            try:
                probs = _probabilities(predictions, method, criterion, said)
                found, panel = _measure(predictions.test, probs, resamples, seed)
                numbers += [(loss, training_seed, method, *number) for number in found]
                panels.setdefault((loss, method), []).append(panel)
            except InputError as error:
                said.append(f"{method} was left out: {error}")
            for remark in said:  # those that differ by their numbers only are told once
                _, cells = remarks.setdefault(re.sub(r"[\d.]+", "", remark), (remark, []))
                cells.append(f"{loss} seed {training_seed}")
    notes = []
    if criterion not in (None, "nll") and "temperature" in all_methods:
        notes += [
            f"The temperature minimises {criterion}, as temperature_criterion of the trainings says, not the NLL."
        ]
    notes += _notes_on_rows(kind, n_test, n_drawn, n_calibration, resamples) if folders else ()
    for remark, of in remarks.values():
        notes.append(f"In {len(of)} of {len(folders)} trainings ({few(of)}): {remark}")
    return StudyResults(
        losses=tuple(plan["losses"]),
        seeds=tuple(plan["seeds"]),
        methods=all_methods,
        metrics=titles(kind),
        counted=(f"test {kind.rows}", kind.columns),
        n_test=n_test,
        n_classes=n_classes,
        n_calibration=min(n_calibration, default=0),
        n_resamples=resamples.counted,
        variance=variance,
        numbers=pandas.DataFrame(numbers, columns=NUMBERS),
        missing=missing,
        panels={key: TopLabel(*map(np.concatenate, zip(*each, strict=True))) for key, each in panels.items()},
        remarks=tuple(notes),
    )


def check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """`UNSCALED` first, then the maps in the order given; raises for one that there is not."""
    for method in methods:
        known, way_out = method in (*MAPS, UNSCALED), did_you_mean(method, MAPS)
        check(known, "methods to be post-hoc maps", repr(method), way_out)
    return tuple(dict.fromkeys([UNSCALED, *methods]))


def titles(kind: LabelKind) -> dict[str, str]:
    """The metrics of a kind of task: key -> title."""
    if not kind.sigmoid:
        return {key: measure.title for key, measure in STUDY_METRICS.items()}
    of_decisions = {key: f"{LOGGED_METRICS[key]}, of all decisions" for key in DECISION_METRICS}
    return of_decisions | {key: TITLES[f"macro_{name}"] for key, name in MACRO_METRICS.items()}


def affordable_resamples(n_test: int, n_classes: int, n_sets: int, most: int) -> Resamples:
    """The numbers of resamples for n_sets sets of probabilities."""
    if n_test < 2:  # no other choice of rows
        return Resamples(0, 0)
    counted = int(_ROWS_RESAMPLED / (n_sets * n_test * (1 + n_classes / 100)))
    called = min(_MOST_CALLS, int(_ROWS_IN_CALLS / (n_sets * n_test)))
    enough = called >= _FEWEST_RESAMPLES
    return Resamples(min(most, max(counted, _FEWEST_RESAMPLES)), min(most, called) if enough else 0)


def find_cells(study: Path, plan: Mapping[str, Any]) -> tuple[dict[Key, Path], dict[Key, str]]:
    """The folders of the trainings that study.json lists and can be compared, and why the others cannot be.

    A loss and seed that it lists twice is the later one. Raises ValueError if the trainings are of different kinds.
    """
    listed = {(entry["loss"], entry["seed"]): study / CELLS / name for name, entry in plan["cells"].items()}
    missing: dict[Key, str] = {}
    tested: dict[Key, str] = {}  # what the rows of a comparison share
    kinds: dict[str, str] = {}  # the first cell of each
    for key, folder in listed.items():
        if not is_finished(folder):
            missing[key] = problem(folder)
            continue
        try:
            predictions = TrainingPredictions.load(folder / PREDICTIONS)
        except InputError as error:
            missing[key] = str(error)
            continue
        test = predictions.test
        kinds.setdefault(test.kind.name, f"{test.kind.name} ones ({key[0]}, seed {key[1]})")
        wrong = fault(test)
        if wrong is not None:
            missing[key] = f"its test predictions {wrong}"
            continue
        labels = hashlib.sha256(test.labels.astype(np.int64).tobytes())
        labels.update(b"" if test.sentences is None else test.sentences.astype(np.int64).tobytes())
        tested[key] = f"{predictions.class_names} {labels.hexdigest()}"
    requirement, got = "a study's predictions to be of one kind", ", ".join(kinds.values())
    check(len(kinds) < 2, requirement, got, "compare each kind in a study of its own")
    ((most, n_cells),) = Counter(tested.values()).most_common(1) or [("", 0)]
    missing |= {
        key: f"its test labels or classes are not those that {n_cells} of the {len(tested)} finished cells share, and "
        "a paired comparison needs the same rows in the same order"
        for key, found in tested.items()
        if found != most
    }
    return {key: folder for key, folder in listed.items() if key not in missing}, missing


def fault(rows: Predictions) -> str | None:
    """The fault that keeps rows out of a comparison, to follow "its test predictions"; or None."""
    logits, labels = rows.as_logits(), rows.labels
    n_rows, n_classes = logits.shape
    if n_rows == 0:
        return "are none"
    several = labels.ndim == 2
    if not several and n_classes < 2:
        return "have one logit per row, and a study compares classifiers with at least 2 classes"
    # -inf masks a class, and NaN compares false.
    usable = np.isfinite(logits).all(axis=1) if several else np.isfinite(logits.max(axis=1))
    if not usable.all():
        n_bad = np.count_nonzero(~usable)
        return f"have NaN or infinite logits in {n_bad} of {n_rows} rows: the training diverged"
    if several and labels.shape != logits.shape:
        return f"have labels of shape {labels.shape} beside logits {logits.shape}"
    if several and not np.isin(labels, (0, 1, UNKNOWN)).all():
        return "have labels that are not 0 or 1, nor -100 for one that is not known"
    if several:
        return None if (labels != UNKNOWN).any() else "have no label that is known"
    inside = labels.dtype.kind in "iu" and labels.min() >= 0 and labels.max() < n_classes
    return None if inside else f"have labels outside 0..{n_classes - 1}"


def sentences_of(rows: Predictions) -> IntArray | None:
    """Of tokens, which sentence (N,) each is of, in 0..G-1: sentences are drawn, and never parts of them."""
    return None if rows.sentences is None else np.unique(rows.sentences, return_inverse=True)[1]


def _probabilities(
    predictions: TrainingPredictions, method: str, criterion: str | None, remarks: list[str]
) -> NDArray[np.float64]:
    """Of the test rows, after a map that is fitted on the calibration rows; with the warnings of the fit."""
    logits, kind = predictions.test.as_logits().astype(np.float64), predictions.test.kind
    if method == UNSCALED:
        return np.asarray(expit(logits) if kind.sigmoid else softmax(logits, axis=1))
    scaler = make_scaler(kind, method, criterion)
    calibration = predictions.calibration
    wrong = "are none" if calibration is None else fault(calibration)
    if calibration is None or wrong is not None:
        raise InputError(f"the calibration rows {wrong}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(calibration.as_logits().astype(np.float64), calibration.labels)
    remarks += [f"{method}: {warning.message}" for warning in caught]
    return np.asarray(scaler.predict_proba(logits), dtype=np.float64)


def make_scaler(kind: LabelKind, method: str, criterion: str | None = None) -> Any:
    """A map for this kind, to be fitted; a temperature by the criterion of the trainings."""
    maps = kind.maps if kind.sigmoid else (*kind.maps, *_BY_CRITERION)
    requirement = f"the method to be a map for {kind.name} predictions"
    check(method in maps, requirement, method, f"take {', '.join(maps)}")
    scaler = SCALERS["temperature" if method in _BY_CRITERION else method].load()()
    criterion = _BY_CRITERION.get(method, criterion if method == "temperature" else None)
    if criterion is not None and not kind.sigmoid:
        scaler.set_params(criterion=criterion)
    if kind.sigmoid and "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=True)
    return scaler


def _measure(
    test: Predictions, probs: NDArray[np.float64], resamples: Resamples, seed: int
) -> tuple[list[tuple[Any, ...]], TopLabel]:
    """The rows of a training with a map, from the metric on (see `NUMBERS`), and the predictions for a diagram."""
    labels, several = test.labels.astype(np.int64), test.labels.ndim == 2
    groups, unbiased = sentences_of(test), UNBIASED
    values: dict[str, float] = {}
    draws: dict[str, FloatArray] = {}
    if several:
        values, draws, probs, labels, groups = _by_label(probs, labels, resamples.counted, seed)
        unbiased = {"ece": UNBIASED["ece"]}
    asked = {}
    for key in DECISION_METRICS if several else STUDY_METRICS:
        measure = STUDY_METRICS[key]
        asked[key] = measure.metric, {**measure.options, **({"n_bins": N_BINS} if measure.binned else {})}
        values[key] = float(METRICS[measure.metric].function(probs, labels, **asked[key][1]))
    drawn: Any = {"seed": seed, "groups": groups}
    for n in set(resamples) - {0}:
        keys = [key for key in asked.keys() - WITHOUT_INTERVAL if resamples.of(key) == n]
        keys = [key for key in keys if np.isfinite(values[key])]
        found = resampled_metrics([asked[key] for key in keys], probs, labels, n_resamples=n, **drawn)
        draws |= dict(zip(keys, found, strict=True))
    if several:
        values["brier"] /= 2
        draws |= {"brier": draws["brier"] / 2} if "brier" in draws else {}
    panel = top_label(probs, labels)
    numbers = {key: (value, draws.get(key, np.nan)) for key, value in values.items() if np.isfinite(value)}
    compared: dict[str, Any] = dict(numbers)
    for key, binning in unbiased.items() if resamples.counted else ():
        n = resamples.counted
        compared[key] = unbiased_error(panel, n_bins=N_BINS, binning=binning, n_resamples=n, **drawn)
    return [(key, *numbers[key], *compared[key]) for key in numbers], panel


def _by_label(
    probs: NDArray[np.float64], labels: NDArray[np.int64], n_resamples: int, seed: int
) -> tuple[dict[str, float], dict[str, FloatArray], NDArray[np.float64], NDArray[np.int64], IntArray]:
    """Of several labels (N, C) a row: the macro metrics with their draws, then all decisions as rows of two classes.

    Each decision comes with the row that it is of, as those of a row are drawn together.
    """
    some = (labels != UNKNOWN).any(axis=1)
    decisions = check_decisions(probs[some], labels[some])
    rows, columns = np.nonzero(decisions.known)
    applies, n_rows = decisions.probs[rows, columns], len(decisions.probs)
    by_label = LabelMetrics(decisions, N_BINS)
    means = macro(by_label.evaluate(np.ones((1, n_rows), np.intp)))
    values = {key: float(means[name][0]) for key, name in MACRO_METRICS.items()}
    draws: dict[str, FloatArray] = {}
    if n_resamples:
        rng = np.random.default_rng(seed)  # the same rows as of the decisions
        blocks = [macro(by_label.evaluate(counts)) for counts in draw_counts(n_rows, n_resamples, rng)]
        draws = {key: np.concatenate([each[name] for each in blocks]) for key, name in MACRO_METRICS.items()}
        draws = {
            k: each for k, each in draws.items() if k not in WITHOUT_INTERVAL and np.isfinite(each).all()
        }
    outcomes = np.stack([1 - applies, applies], axis=1)
    return values, draws, outcomes, decisions.true[rows, columns].astype(np.int64), rows


def _notes_on_rows(
    kind: LabelKind, n_test: int, n_drawn: int, n_calibration: Sequence[int], resamples: Resamples
) -> Iterator[str]:
    fewest, most = min(n_calibration), max(n_calibration)
    if fewest != most:
        yield f"The trainings have different numbers of calibration rows, {fewest:,} to {most:,}."
    if not kind.independent:
        yield (
            f"The tokens of a sentence are no independent draws: resamples are of the {n_drawn:,} test sentences, each "
            "with all of its tokens."
        )
    slow = [each.title for key, each in STUDY_METRICS.items() if resamples.of(key) < resamples.counted]
    names = ", ".join(slow)
    if kind.sigmoid:
        yield (
            "Accuracy, NLL, Brier score and ECE are of all decisions, each label of each row one, with the confidence "
            "max(p, 1 - p); macro metrics are means over the labels. The labels of a row are resampled together."
        )
    elif slow and resamples.called:
        yield f"These take {resamples.called} resamples, not {resamples.counted:,}, as they are slow: {names}."
    elif slow:
        yield f"On {n_test:,} test {kind.rows} these have no intervals, as they are slow: {names}."
    if n_drawn == 1:
        yield f"One test {'row' if kind.independent else 'sentence'} has no intervals."
