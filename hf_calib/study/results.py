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
from hf_calib.metrics.sums import TopLabel, bin_sums
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
BASELINE_LOSS = "cross_entropy"
KEY = ["loss", "method", "metric"]
# Of one training: a value and its resamples (R,), and what differences are taken of, the errors without what noise adds
# to each. Resamples that there are none of are NaN.
NUMBERS = ["loss", "seed", "method", "metric", "value", "draws", "compared", "compared_draws"]
_HIGHEST = {"nll": np.inf, "brier": 2.0}  # of the other metrics 1; the lowest is 0
_NO_INTERVAL = (math.nan, math.nan)
_N_BINS = 15


@dataclass(frozen=True, eq=False)
class StudyResults:
    """Results of a study of losses x seeds; made by `measure_study`.

    A "none" among the methods is the network as trained; the others are post-hoc maps. A metric that is undefined for a
    training has no row in `results()`, and one without any value none in the other tables, which are pandas' too.

    Args:
        losses: labels, in the study's order; those without a finished training too.
        seeds: in the study's order.
        methods: "none" first, then the maps.
        metrics: key -> title.
        counted: what n_test and n_classes count: test rows or tokens, classes or labels.
        n_test: test rows N, or tokens, shared by all trainings; 0 where nothing is finished.
        n_classes: C.
        n_calibration: rows that the maps were fitted on.
        n_resamples: of the bootstrap; a slow metric has fewer, which a note says.
        variance: over seeds, of each pair of losses its "own", or "pooled".
        numbers: a row for each number of each training, see `NUMBERS`.
        missing: (loss, seed) -> why the training has no numbers.
        panels: (loss, method) -> test predictions of all seeds, for a reliability diagram.
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
    panels: Mapping[Pair, TopLabel] = field(repr=False)
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
        for key, column in self.numbers.groupby(KEY, sort=False):
            spread = _spread(column["value"], column["draws"])
            interval = _NO_INTERVAL if spread is None else spread.interval()
            low, high = np.clip(interval, 0.0, _HIGHEST.get(key[2], 1.0))
            rows.append((*key, column["value"].mean(), low, high, len(column)))
        return _table(rows, ["value", "low", "high", "n_seeds"])

    @cached_property
    def baseline(self) -> Pair | None:
        """Cross entropy with a temperature, or what comes nearest to it among what was measured; None without any."""
        found = set(zip(self.numbers["loss"], self.numbers["method"], strict=True))
        losses = dict.fromkeys([BASELINE_LOSS, *self.losses])
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
            columns, spreads = self._comparisons(metric)
            p_values = {pair: spread.p_value() for pair, spread in spreads.items()}
            corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
            for pair, column in columns.items():
                interval = spreads[pair].interval() if pair in spreads else _NO_INTERVAL
                p = p_values.get(pair, math.nan), corrected.get(pair, math.nan)
                rows.append((*pair, metric, column["compared"].mean(), *interval, *p, len(column)))
        return _table(rows, ["value", "low", "high", "p", "p_corrected", "n_seeds"])

    @cached_property
    def detectable(self) -> dict[str, float]:
        """The true difference in NLL and in ECE that the study would have found in 80% of cases.

        By the mean variances of its comparisons of other losses with the baseline, where there are any.
        """
        found = {}
        for metric in MAIN_METRICS:
            _, spreads = self._comparisons(metric)
            others = {pair: spread for pair, spread in spreads.items() if pair[0] != self._baseline_loss}
            alike = others or spreads
            if alike:
                spread, known = typical(alike.values(), len({loss for loss, _ in alike}))
                found[metric] = detectable(spread, LEVEL / len(spreads), known)
        return found

    @cached_property
    def equal_variances(self) -> pandas.DataFrame:
        """Bartlett's p that the losses vary alike over the seeds, by method and metric; empty unless pooled."""
        pooled = {metric: self._pooled(metric) for metric in MAIN_METRICS}
        rows = [
            (method, metric, each.p_equal)
            for metric, found in pooled.items()
            for method, each in found.items()
            if each.p_equal is not None
        ]
        return pandas.DataFrame(rows, columns=["method", "metric", "p"])

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types, as report.json holds it; predictions are summed in bins."""
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
            "detectable": [{"metric": metric, "value": size} for metric, size in self.detectable.items()],
            "equal_variances": _records(self.equal_variances),
            "reliability": [
                {"loss": loss, "method": method, "bins": _bins(panel)}
                for (loss, method), panel in self.panels.items()
            ],
            "values": _records(self.results()),
        }

    @property
    def _baseline_loss(self) -> str | None:
        return None if self.baseline is None else self.baseline[0]

    def _comparisons(self, metric: str) -> tuple[dict[Pair, pandas.DataFrame], dict[Pair, TwoLevel]]:
        """Of all pairs that share a seed with the baseline: the differences to it by seed, and their spreads if any."""
        rows = self.numbers[self.numbers["metric"] == metric].set_index("seed")
        values = {pair: own[NUMBERS[-2:]] for pair, own in rows.groupby(KEY[:2], sort=False)}
        base = values.pop(self.baseline, rows[:0][NUMBERS[-2:]])
        columns = {pair: (own - base).dropna(subset="compared") for pair, own in values.items()}
        columns = {pair: column for pair, column in columns.items() if len(column)}
        # Another map of the baseline's own trainings does not vary as two trainings do.
        pooled = self._pooled(metric)
        spreads = {}
        for (loss, method), column in columns.items():
            own = None if loss == self._baseline_loss else pooled.get(method)
            spread = _spread(column["compared"], column["compared_draws"], own)
            if spread is not None:
                spreads[loss, method] = spread
        return columns, spreads

    def _pooled(self, metric: str) -> dict[str, Pooled]:
        """For each map the variance over seeds of the other losses with this map, and of the baseline, if pooled."""
        if self.variance == "own" or self.baseline is None:
            return {}
        rows = self.numbers[self.numbers["metric"] == metric]
        its_own = rows["loss"] == self._baseline_loss
        base = rows[its_own & (rows["method"] == self.baseline[1])]
        found = {}
        for method in self.methods:
            own = pandas.concat([rows[~its_own & (rows["method"] == method)], base])
            pooled = pooled_variance(own.pivot(index="seed", columns="loss", values="compared"))
            if pooled is not None:
                found[method] = pooled
        return found


def _spread(values: pandas.Series, draws: pandas.Series, pooled: Pooled | None = None) -> TwoLevel | None:
    """None where any training has no resamples."""
    drawn = [np.atleast_1d(each) for each in draws]
    if any(np.isnan(each).any() for each in drawn):
        return None
    return two_level(values.to_numpy(np.float64), np.stack(drawn, axis=1), pooled)


def _table(rows: list[tuple[Any, ...]], columns: list[str]) -> pandas.DataFrame:
    return pandas.DataFrame(rows, columns=[*KEY, *columns]).set_index(KEY)


def _records(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """The rows, of JSON's own types: what is undefined or infinite is None."""
    return [
        {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        for row in table.to_dict("records")
    ]


def _bins(panel: TopLabel) -> list[dict[str, float]]:
    """The bins (lower, upper] of a reliability diagram that hold predictions."""
    bins = bin_sums(panel, _N_BINS)
    confidence, accuracy = bins.means()
    edges = np.arange(_N_BINS + 1) / _N_BINS
    columns = {"lower": edges[:-1], "upper": edges[1:], "count": bins.counts.astype(int)}
    table = pandas.DataFrame({**columns, "confidence": confidence, "accuracy": accuracy})
    return _records(table[bins.counts > 0])
