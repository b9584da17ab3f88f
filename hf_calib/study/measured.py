"""A finished study in numbers: means over seeds, and paired differences to a baseline."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from hf_calib._errors import InputValueError, did_you_mean, expected, few
from hf_calib.metrics.checks import FloatArray, check_choice, check_n_resamples, check_seed
from hf_calib.predictions.training import PREDICTIONS, TrainingPredictions
from hf_calib.scaling.temperature import Criterion
from hf_calib.study.advice import advise, notes_on_statistics
from hf_calib.study.cell_metrics import Resamples, affordable_resamples, measure_training, sentences_of
from hf_calib.study.cells import find_cells
from hf_calib.study.folder import read_plan
from hf_calib.study.kinds import MAPS, METRIC_TITLES, STUDY_METRICS
from hf_calib.study.paired import TwoLevel, holm, two_level
from hf_calib.study.pooled import Pooled, pooled_variance
from hf_calib.study.power import detectable, range_of_seeds, typical
from hf_calib.study.results import (
    LEVEL,
    UNSCALED,
    Detectable,
    Difference,
    Estimate,
    Panel,
    StudyResults,
)
from hf_calib.study.unbiased import UnbiasedError
from hf_calib.tasks import SINGLE_LABEL, LabelKind

BASELINE_LOSS = "cross_entropy"
RANKED_METRICS = ("nll", "ece")
_HIGHEST = {"nll": np.inf, "brier": 2.0}  # of the other metrics 1; the lowest is 0
_FEWEST_RESAMPLES = 50

Variance = Literal["own", "pooled"]

Pair = tuple[str, str]  # loss and method
Column = dict[int, tuple[float, FloatArray | None]]  # seed -> value, and the value on resampled rows


class Numbers(NamedTuple):
    """The study's numbers, by (loss, seed, method, metric)."""

    losses: tuple[str, ...]
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    values: dict[tuple[str, int, str, str], float]
    draws: dict[tuple[str, int, str, str], FloatArray]
    unbiased: dict[tuple[str, int, str, str], UnbiasedError]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(loss, method) with any value, in the study's order."""
        measured = {(loss, method) for loss, _, method, _ in self.values}
        return [pair for pair in product(self.losses, self.methods) if pair in measured]

    @property
    def metrics(self) -> list[str]:
        """Those with any value."""
        return list(dict.fromkeys(metric for _, _, _, metric in self.values))

    def column(self, pair: tuple[str, str], metric: str) -> Column:
        """The values themselves."""
        return {seed: (self.values[key], self.draws.get(key)) for seed, key in self._keys(pair, metric)}

    def column_of_differences(self, pair: tuple[str, str], metric: str) -> Column:
        """What differences are taken of: the values, or the errors without what noise adds to each."""
        return {
            seed: self.unbiased.get(key, (self.values[key], self.draws.get(key)))
            for seed, key in self._keys(pair, metric)
        }

    def _keys(self, pair: tuple[str, str], metric: str) -> list[tuple[int, tuple[str, int, str, str]]]:
        loss, method = pair
        keys = ((seed, (loss, seed, method, metric)) for seed in self.seeds)
        return [(seed, key) for seed, key in keys if key in self.values]


def measure_study(
    folder: Path,
    *,
    methods: Sequence[str] = ("temperature", "auto"),
    n_resamples: int = 1000,
    seed: int = 0,
    variance: Variance = "own",
    stages: Callable[[str], None] = lambda stage: None,
) -> StudyResults:
    """Measure the finished trainings of a study, before and after post-hoc maps, and compare them.

    The maps are fitted on the calibration rows of each training, and cost no training. What cannot be compared is
    named in `missing` and `notes`. How intervals and p-values are made: `hf_calib.study.paired.two_level`.

    Args:
        folder: of the study.
        methods: post-hoc maps, of `hf_calib.study.kinds.MAPS`; those that the kind of task does not have are left out,
            with a note. The network as trained is measured in any case.
        n_resamples: of the bootstrap over test rows, at least 50; a slow metric and a large study take fewer.
        seed: of the bootstrap.
        variance: over seeds, of differences to the baseline: of each pair of losses its "own", or "pooled" over all
            losses, see `hf_calib.study.pooled.pooled_variance`.
        stages: called with the name of each stage.

    Returns:
        `StudyResults`; without any finished training its tables are empty.

    Raises:
        ValueError: if the folder is of no study, or of trainings of different kinds, or an argument is out of range.
    """
    plan = read_plan(folder)
    all_methods = check_methods(methods)
    check_seed(seed)
    check_choice("variance", variance, get_args(Variance))
    if check_n_resamples(n_resamples) < _FEWEST_RESAMPLES:
        way_out = "leave it out, for 1000"
        raise InputValueError(
            expected("n_resamples", f"be at least {_FEWEST_RESAMPLES}", n_resamples, way_out)
        )
    stages("reading predictions")
    folders, missing = find_cells(folder, plan)
    numbers = Numbers(tuple(plan["losses"]), tuple(plan["seeds"]), all_methods, {}, {}, {})
    named = (plan["base"] or {}).get("temperature_criterion")
    criterion = named if named in get_args(Criterion) else None
    panels: dict[tuple[str, str], list[Panel]] = {}
    remarks: dict[str, list[str]] = {}
    n_calibration: list[int] = []
    n_test, n_classes, n_drawn, kind, resamples = 0, 0, 0, SINGLE_LABEL, Resamples(0, 0)
    for i, ((loss, training_seed), cell) in enumerate(folders.items(), 1):
        stages(f"measuring {loss}, seed {training_seed} ({i} of {len(folders)})")
        predictions = TrainingPredictions.load(cell / PREDICTIONS)
        kind, sentences = predictions.test.kind, sentences_of(predictions.test)
        n_test, n_classes = predictions.test.as_logits().shape
        n_drawn = n_test if sentences is None else int(sentences.max()) + 1
        n_calibration.append(0 if predictions.calibration is None else len(predictions.calibration.labels))
        if n_drawn > 1:  # else there is no other choice of rows
            n_sets = len(folders) * len(all_methods)
            resamples = affordable_resamples(predictions.test.labels.size, n_classes, n_sets, n_resamples)
        found = measure_training(predictions, all_methods, resamples, seed, criterion)
        numbers.values.update({(loss, training_seed, *key): value for key, value in found.values.items()})
        numbers.draws.update({(loss, training_seed, *key): drawn for key, drawn in found.draws.items()})
        numbers.unbiased.update({(loss, training_seed, *key): error for key, error in found.unbiased.items()})
        for method, panel in found.panels.items():
            panels.setdefault((loss, method), []).append(panel)
        for remark in found.remarks:
            remarks.setdefault(remark, []).append(f"{loss} seed {training_seed}")
    stages("comparing")
    baseline = _baseline(numbers)
    differences = {} if baseline is None else differences_to(numbers, baseline, variance)
    results = StudyResults(
        losses=numbers.losses,
        seeds=numbers.seeds,
        methods=all_methods,
        metrics=METRIC_TITLES[kind.name],
        values=numbers.values,
        means=_means(numbers),
        baseline=baseline,
        differences=differences,
        detectable={} if baseline is None else detectable_differences(numbers, baseline, variance),
        variance=variance,
        equal_variances={} if baseline is None or variance == "own" else equal_variances(numbers, baseline),
        missing=missing,
        panels={key: Panel(*map(np.concatenate, zip(*each, strict=True))) for key, each in panels.items()},
        n_test=n_test,
        n_calibration=min(n_calibration, default=0),
        n_classes=n_classes,
        counted=(f"test {kind.rows}", kind.columns),
        n_resamples=resamples.counted,
        advice=(),
        notes=(),
    )
    notes = (
        *_notes_on_rows(results, kind, n_drawn, n_calibration, resamples),
        *_as_notes(remarks, len(folders)),
    )
    if criterion not in (None, "nll") and "temperature" in all_methods:
        notes = (
            f"The temperature minimises {criterion}, as temperature_criterion of the trainings says, not the NLL.",
            *notes,
        )
    return replace(results, advice=advise(results), notes=(*notes_on_statistics(results), *notes))


def check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """`UNSCALED` first, then the maps in the order given; raises for one that there is not."""
    for method in methods:
        if method not in MAPS and method != UNSCALED:
            way_out = did_you_mean(method, MAPS)
            raise InputValueError(expected("methods", "be post-hoc maps", repr(method), way_out))
    return tuple(dict.fromkeys([UNSCALED, *methods]))


def _baseline(numbers: Numbers) -> tuple[str, str] | None:
    """Cross entropy with a temperature, or what comes nearest to it among what was measured."""
    methods = dict.fromkeys(["temperature", *numbers.methods[1:], UNSCALED])
    measured = set(numbers.pairs)
    return next(
        (pair for pair in product([BASELINE_LOSS, *numbers.losses], methods) if pair in measured), None
    )


def _means(numbers: Numbers) -> dict[tuple[str, str, str], Estimate]:
    found = {}
    for pair, metric in product(numbers.pairs, numbers.metrics):
        column = numbers.column(pair, metric)
        if column:
            found[(*pair, metric)] = _estimate(column, 0.0, _HIGHEST.get(metric, 1.0))
    return found


def _estimate(column: Column, lowest: float, highest: float) -> Estimate:
    spread = _spread(column)
    low, high = (None, None) if spread is None else np.clip(spread.interval(), lowest, highest).tolist()
    return Estimate(_mean(column), low, high, len(column))


def differences_to(
    numbers: Numbers, baseline: Pair, variance: Variance = "own"
) -> dict[tuple[str, str, str], Difference]:
    """Paired differences to a (loss, method) by seed; p-values are corrected within each metric."""
    found = {}
    for metric in numbers.metrics:
        columns = _differences(numbers, baseline, metric)
        spreads = _spreads(columns, numbers, baseline, metric, variance)
        level = LEVEL / max(1, len(spreads))
        p_values = {pair: spread.p_value() for pair, spread in spreads.items()}
        corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
        for pair, column in columns.items():
            value, low, high = _mean(column), None, None
            needed: tuple[int | None, int | None] = (None, None)
            if pair in spreads:
                low, high = spreads[pair].interval()
                spread, known = _typical(spreads, baseline[0], pair[0] == baseline[0])
                needed = range_of_seeds(spread, abs(value), level, known)
            p, p_corrected = p_values.get(pair), corrected.get(pair)
            found[(*pair, metric)] = Difference(value, low, high, p, p_corrected, len(column), *needed)
    return found


def _differences(numbers: Numbers, baseline: Pair, metric: str) -> dict[Pair, Column]:
    """By seed, of all pairs that share one with the baseline."""
    its = numbers.column_of_differences(baseline, metric)
    columns = {
        pair: numbers.column_of_differences(pair, metric) for pair in numbers.pairs if pair != baseline
    }
    return {
        pair: {seed: _minus(own[seed], its[seed]) for seed in own if seed in its}
        for pair, own in columns.items()
        if own.keys() & its.keys()
    }


def _spreads(
    columns: Mapping[Pair, Column], numbers: Numbers, baseline: Pair, metric: str, variance: Variance
) -> dict[Pair, TwoLevel]:
    """Those of the paired differences that have resamples."""
    pooled = {} if variance == "own" else pooled_by_method(numbers, baseline, metric)
    return {
        (loss, method): spread
        for (loss, method), column in columns.items()
        # Another map of the baseline's own trainings does not vary as two trainings do.
        if (spread := _spread(column, None if loss == baseline[0] else pooled.get(method))) is not None
    }


def _typical(
    spreads: Mapping[Pair, TwoLevel], baseline_loss: str, is_its_own: bool
) -> tuple[TwoLevel, float]:
    """By the comparisons of other losses with the baseline, or by those of other maps of the baseline's trainings."""
    alike = {pair: spread for pair, spread in spreads.items() if (pair[0] == baseline_loss) == is_its_own}
    return typical(alike.values(), len({loss for loss, _ in alike}))


def detectable_differences(numbers: Numbers, baseline: Pair, variance: Variance) -> dict[str, Detectable]:
    """What the study could have found: by metric, of another loss than the baseline's where there is one."""
    found = {}
    for metric in RANKED_METRICS:
        columns = _differences(numbers, baseline, metric)
        spreads = _spreads(columns, numbers, baseline, metric, variance)
        if not spreads:
            continue
        level = LEVEL / len(spreads)
        is_its_own = all(loss == baseline[0] for loss, _ in spreads)
        spread, known = _typical(spreads, baseline[0], is_its_own)
        size = detectable(spread, level, known)
        found[metric] = Detectable(
            size, *(range_of_seeds(spread, size / 2, level, known) if size else (None, None))
        )
    return found


def pooled_by_method(numbers: Numbers, baseline: Pair, metric: str) -> dict[str, Pooled]:
    """For each map the variance over seeds of the other losses with this map, and of the baseline."""
    found = {}
    for method in numbers.methods:
        pairs = [(loss, method) for loss in numbers.losses if loss != baseline[0]] + [baseline]
        columns = {pair[0]: numbers.column_of_differences(pair, metric) for pair in pairs}
        values = {
            loss: {seed: value for seed, (value, _) in own.items()} for loss, own in columns.items() if own
        }
        pooled = pooled_variance(values)
        if pooled is not None:
            found[method] = pooled
    return found


def equal_variances(numbers: Numbers, baseline: Pair) -> dict[tuple[str, str], float]:
    """Bartlett's p that the losses vary alike over the seeds: (method, metric) -> p, where it can be tested."""
    return {
        (method, metric): pooled.p_equal
        for metric in RANKED_METRICS
        for method, pooled in pooled_by_method(numbers, baseline, metric).items()
        if pooled.p_equal is not None
    }


def _minus(
    own: tuple[float, FloatArray | None], its: tuple[float, FloatArray | None]
) -> tuple[float, FloatArray | None]:
    draws = None if own[1] is None or its[1] is None else own[1] - its[1]
    return own[0] - its[0], draws


def _spread(column: Column, pooled: Pooled | None = None) -> TwoLevel | None:
    """None without resamples."""
    draws = [drawn for _, drawn in column.values() if drawn is not None]
    if len(draws) < len(column):
        return None
    return two_level(np.array([value for value, _ in column.values()]), np.stack(draws, axis=1), pooled)


def _mean(column: Column) -> float:
    return float(np.mean([value for value, _ in column.values()]))


def _notes_on_rows(
    results: StudyResults, kind: LabelKind, n_drawn: int, n_calibration: Sequence[int], resamples: Resamples
) -> list[str]:
    notes: list[str] = []
    if not results.n_test:
        return notes
    if min(n_calibration) != max(n_calibration):
        between = f"{min(n_calibration):,} to {max(n_calibration):,}"
        notes.append(f"The trainings have different numbers of calibration rows, {between}.")
    if not kind.independent:
        notes.append(
            f"The tokens of a sentence are no independent draws: resamples are of the {n_drawn:,} test sentences, each "
            "with all of its tokens."
        )
    slow = []
    if kind.sigmoid:
        notes.append(
            "Accuracy, NLL, Brier score and ECE are of all decisions, each label of each row one, with the confidence "
            "max(p, 1 - p); macro metrics are means over the labels. The labels of a row are resampled together."
        )
    else:
        slow = [metric for metric in STUDY_METRICS if resamples.of(metric) < resamples.counted]
    if slow and resamples.called:
        names = ", ".join(results.metrics[metric] for metric in slow)
        notes.append(
            f"These take {resamples.called} resamples, not {resamples.counted:,}, as they are slow: {names}."
        )
    elif slow:
        names = ", ".join(results.metrics[metric] for metric in slow)
        notes.append(
            f"On {results.n_test:,} test {kind.rows} these have no intervals, as they are slow: {names}."
        )
    if n_drawn == 1:
        notes.append(f"One test {'row' if kind.independent else 'sentence'} has no intervals.")
    return notes


def _as_notes(remarks: Mapping[str, Sequence[str]], n_cells: int) -> list[str]:
    """Remarks that differ by their numbers only are told once, with the trainings that they are of."""
    cells: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for remark, of in remarks.items():
        kind = re.sub(r"[\d.]+", "", remark)
        first.setdefault(kind, remark)
        cells.setdefault(kind, []).extend(of)
    return [f"In {len(of)} of {n_cells} trainings ({few(of)}): {first[kind]}" for kind, of in cells.items()]
