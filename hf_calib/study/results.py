"""The results of a study: a tidy table of numbers, and means, paired differences and the power that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas

from hf_calib.metrics.intervals import holm
from hf_calib.study.advice import MAIN_METRICS, UNSCALED, Pair, advise, notes_on_statistics
from hf_calib.study.statistics import (
    CONFIDENCE_LEVEL,
    LEVEL,
    Pooled,
    TwoLevel,
    detectable,
    pooled_variance,
    two_level,
    typical,
)

Variance = Literal["own", "pooled"]
KEY = ["loss", "method", "metric"]
# Of one training: a value and its resamples (R,), and what differences are taken of, the errors without what noise adds
# to each. Resamples that there are none of are NaN.
NUMBERS = ["loss", "seed", "method", "metric", "value", "draws", "compared", "compared_draws"]
_HIGHEST = {"nll": np.inf, "brier": 2.0}  # of the other metrics 1; the lowest is 0


@dataclass(frozen=True, eq=False)
class StudyResults:
    """Results of a study of losses x seeds; made by `measure_study`.

    A "none" among the methods is the network as trained; the others are post-hoc maps. A metric that is undefined for a
    training has no row in `results()`, and one without any value none in the other tables, which are pandas' too.

    Args:
        losses, seeds: in the study's order; those without a finished training too.
        methods: "none" first, then the maps.
        metrics: key -> title.
        counted: what n_test and n_classes count: test rows or tokens, classes or labels.
        n_test, n_classes: of all trainings; 0 where nothing is finished.
        n_calibration: rows that the maps were fitted on.
        n_resamples: of the bootstrap; of a metric that sorts the rows 100 at most.
        variance: over seeds, "own" or "pooled".
        numbers: a row for each number of each training, see `NUMBERS`.
        missing: (loss, seed) -> why the training has no numbers.
        remarks: sentences on how the trainings were measured.
    """

    losses: tuple[str, ...]
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    metrics: Mapping[str, str]
    counted: tuple[str, str]
    n_test: int
    n_classes: int
    n_calibration: int
    n_resamples: int
    variance: Variance
    numbers: pandas.DataFrame = field(repr=False)
    missing: Mapping[tuple[str, int], str]
    remarks: tuple[str, ...]

    def results(self) -> pandas.DataFrame:
        """The numbers as a tidy table with the columns loss, seed, method, metric and value, as in results.csv."""
        return self.numbers[NUMBERS[:5]]

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """Sentences that follow from the numbers."""
        return tuple(advise(self))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the numbers cannot tell, and on what was left out."""
        return (*notes_on_statistics(self), *self.remarks)

    @cached_property
    def means(self) -> pandas.DataFrame:
        """By loss, method and metric: the mean over seeds with its 95% interval, NaN where there is none, and n_seeds.

        With one seed, the interval covers the test rows only.
        """
        rows = []
        for key, own in self.numbers.groupby(KEY, sort=False):
            spread = two_level(own["value"], own["draws"])
            low, high = np.clip(spread.interval(), 0.0, _HIGHEST.get(key[2], 1.0))
            rows.append((*key, spread.value, low, high, spread.n_seeds))
        return _table(rows, ["value", "low", "high", "n_seeds"])

    @cached_property
    def baseline(self) -> Pair | None:
        """Cross entropy with a temperature, or what comes nearest to it among what was measured; None without any."""
        found = set(zip(self.numbers["loss"], self.numbers["method"], strict=True))
        losses = dict.fromkeys(["cross_entropy", *self.losses])
        methods = dict.fromkeys(["temperature", *self.methods[1:], UNSCALED])
        return next(
            ((loss, method) for loss in losses for method in methods if (loss, method) in found), None
        )

    @cached_property
    def differences(self) -> pandas.DataFrame:
        """By loss, method and metric: the paired difference to the baseline, over the seeds of both.

        The columns: the mean over seeds (value) with its 95% interval, which is not corrected for the number of
        comparisons, p (two-sided), p_corrected by Holm over all comparisons of the metric, and n_seeds. NaN where there
        is no interval. With one seed, interval and p cover the test rows only.
        """
        rows = []
        for metric in self.numbers["metric"].unique():
            spreads = self._comparisons(metric)
            p_values = np.array([spread.p_value() for spread in spreads.values()])
            corrected, defined = p_values.copy(), ~np.isnan(p_values)
            corrected[defined] = holm(p_values[defined])
            for (pair, spread), *p in zip(spreads.items(), p_values, corrected, strict=True):
                rows.append((*pair, metric, spread.value, *spread.interval(), *p, spread.n_seeds))
        return _table(rows, ["value", "low", "high", "p", "p_corrected", "n_seeds"])

    @cached_property
    def detectable(self) -> dict[str, float]:
        """The true difference in NLL and in ECE that the study would have found in 80% of cases.

        By the mean variances of its comparisons of other losses with the baseline, where there are any.
        """
        found = {}
        for metric in MAIN_METRICS:
            spreads = {
                pair: each for pair, each in self._comparisons(metric).items() if each.row_variance >= 0
            }
            others = {pair: each for pair, each in spreads.items() if pair[0] != self._baseline_loss}
            alike = others or spreads
            if alike:
                spread, known = typical(alike.values(), len({loss for loss, _ in alike}))
                found[metric] = detectable(spread, LEVEL / len(spreads), known)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types, as report.json holds it."""
        return {
            **{name: list(getattr(self, name)) for name in ("losses", "seeds", "methods", "advice", "notes")},
            **{name: getattr(self, name) for name in ("n_test", "n_classes", "n_calibration", "n_resamples")},
            "metrics": dict(self.metrics),
            "variance": self.variance,
            "confidence_level": CONFIDENCE_LEVEL,
            "baseline": None if self.baseline is None else dict(zip(KEY, self.baseline, strict=False)),
            "missing": [{"loss": loss, "seed": s, "reason": why} for (loss, s), why in self.missing.items()],
            "means": _records(self.means.reset_index()),
            "differences": _records(self.differences.reset_index()),
            "values": _records(self.results()),
            "detectable": [{"metric": metric, "value": size} for metric, size in self.detectable.items()],
        }

    @property
    def _baseline_loss(self) -> str | None:
        return None if self.baseline is None else self.baseline[0]

    def _comparisons(self, metric: str) -> dict[Pair, TwoLevel]:
        """The differences to the baseline of all pairs that share a seed with it."""
        rows = self.numbers[self.numbers["metric"] == metric]
        pooled = {method: self._pooled(rows, method) for method in self.methods}
        columns = rows.set_index("seed").groupby(KEY[:2], sort=False)[NUMBERS[-2:]]
        values = dict(iter(columns))
        base = values.pop(self.baseline, None)
        found = {}
        for (loss, method), own in values.items() if base is not None else ():
            difference = (own - base).dropna(subset="compared")
            # Another map of the baseline's own trainings does not vary as two trainings do.
            shared = None if loss == self._baseline_loss else pooled[method]
            if len(difference):
                found[loss, method] = two_level(difference["compared"], difference["compared_draws"], shared)
        return found

    def _pooled(self, rows: pandas.DataFrame, method: str) -> Pooled | None:
        """The variance over seeds of the other losses with a map, and of the baseline; None if each has its own."""
        if self.variance == "own" or self.baseline is None:
            return None
        loss, of_baseline = self.baseline
        shared = rows[rows["method"] == np.where(rows["loss"] == loss, of_baseline, method)]
        return pooled_variance(shared.pivot(index="seed", columns="loss", values="compared"))


def _table(rows: list[tuple[Any, ...]], columns: list[str]) -> pandas.DataFrame:
    return pandas.DataFrame(rows, columns=[*KEY, *columns]).set_index(KEY)


def _records(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """The rows, of JSON's own types: what is undefined or infinite is None."""
    return [
        {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        for row in table.to_dict("records")
    ]
