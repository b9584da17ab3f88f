"""Results of a study: a tidy table of numbers, with means, paired differences and power."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas

from hf_calib.metrics.intervals import holm
from hf_calib.study.advice import (
    MAIN_METRICS,
    UNSCALED,
    Pair,
    advise,
    notes_on_statistics,
)
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
# The numbers of a run: a value and its resamples (R,), and the errors without noise, which are compared. Resamples that
# do not exist are NaN.
NUMBERS = [
    "loss",
    "seed",
    "method",
    "metric",
    "value",
    "draws",
    "compared",
    "compared_draws",
]
_HIGHEST = {
    "nll": np.inf,
    "brier": 2.0,
}  # The highest of other metrics is 1; the lowest is 0.


@dataclass(frozen=True, eq=False)
class StudyResults:
    """Results of a study of losses x seeds, returned by `measure_study`.

    The method "none" is the model as trained; the others are post-hoc calibrators. A metric that is undefined for a run
    has no row in `results()`; a metric without any value has no row in the other tables. All tables are pandas tables.

    Args:
        losses, seeds: in the order of the study, also those without a finished run.
        methods: "none" first, then the calibrators.
        metrics: key -> title.
        counted: names of the units of n_test and n_classes: test rows or tokens, classes or labels.
        n_test, n_classes: numbers of all runs; 0 if nothing is finished.
        n_calibration: number of rows to which the calibrators were fitted.
        n_resamples: number of bootstrap resamples; at most 100 for a metric that sorts the rows.
        variance: variance over seeds, "own" or "pooled".
        numbers: a row for each number of each run, see `NUMBERS`.
        missing: (loss, seed) -> the reason why the run has no numbers.
        remarks: sentences on how the runs were measured.
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
        """Return a tidy table with the columns loss, seed, method, metric and value, as in results.csv."""
        return self.numbers[NUMBERS[:5]]

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """The conclusions from the numbers, as sentences."""
        return tuple(advise(self))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """The limits of the numbers, and what was left out, as sentences."""
        return (*notes_on_statistics(self), *self.remarks)

    @cached_property
    def means(self) -> pandas.DataFrame:
        """Return by loss, method and metric the mean over seeds with its 95% interval (NaN without one) and n_seeds.

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
        """Cross entropy with a temperature, or the nearest measured pair of loss and method; None if there is none."""
        found = set(zip(self.numbers["loss"], self.numbers["method"], strict=True))
        losses = dict.fromkeys(["cross_entropy", *self.losses])
        methods = dict.fromkeys(["temperature", *self.methods[1:], UNSCALED])
        return next(
            (
                (loss, method)
                for loss in losses
                for method in methods
                if (loss, method) in found
            ),
            None,
        )

    def reference(self, pair: Pair) -> Pair | None:
        """Return the pair that a pair is compared with; None for the baseline itself.

        It is the loss of the baseline with the same method, so that a gain of a calibrator does not count as one of a
        loss. Other methods of the baseline's loss are compared with the baseline.
        """
        if self.baseline is None or pair == self.baseline:
            return None
        loss = self.baseline[0]
        return self.baseline if pair[0] == loss else (loss, pair[1])

    @cached_property
    def differences(self) -> pandas.DataFrame:
        """Return by loss, method and metric the paired difference to its `reference` over the seeds of both.

        The columns are the mean over seeds (value) with its 95% interval, which is not corrected for the number of
        comparisons; p (two-sided); p_corrected by Holm over all comparisons of the metric; and n_seeds. They are NaN if
        there is no interval. With one seed, interval and p cover the test rows only.
        """
        rows = []
        for metric in self.numbers["metric"].unique():
            spreads = self._comparisons(metric)
            p_values = np.array([spread.p_value() for spread in spreads.values()])
            corrected, defined = p_values.copy(), ~np.isnan(p_values)
            corrected[defined] = holm(p_values[defined])
            most = _HIGHEST.get(metric, 1.0)
            for (pair, spread), *p in zip(
                spreads.items(), p_values, corrected, strict=True
            ):
                ends = np.clip(spread.interval(), -most, most)
                rows.append((*pair, metric, spread.value, *ends, *p, spread.n_seeds))
        return _table(rows, ["value", "low", "high", "p", "p_corrected", "n_seeds"])

    @cached_property
    def detectable(self) -> dict[str, float]:
        """Return the true differences in NLL and in ECE that the study would have found in 80% of cases.

        It is infinite if no difference that is possible would have been found. They use the mean variances of the
        comparisons of other losses with the baseline, if there are any.
        """
        found = {}
        for metric in MAIN_METRICS:
            spreads = {
                pair: each
                for pair, each in self._comparisons(metric).items()
                if each.row_variance >= 0
            }
            others = {
                pair: each
                for pair, each in spreads.items()
                if pair[0] != self._baseline_loss
            }
            alike = others or spreads
            if alike:
                spread, known = typical(
                    alike.values(), len({loss for loss, _ in alike})
                )
                size = detectable(spread, LEVEL / len(spreads), known)
                found[metric] = size if size <= _HIGHEST.get(metric, 1.0) else math.inf
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all results in JSON types, as in report.json."""
        return {
            **{
                name: list(getattr(self, name))
                for name in ("losses", "seeds", "methods", "advice", "notes")
            },
            **{
                name: getattr(self, name)
                for name in ("n_test", "n_classes", "n_calibration", "n_resamples")
            },
            "metrics": dict(self.metrics),
            "variance": self.variance,
            "confidence_level": CONFIDENCE_LEVEL,
            "baseline": None
            if self.baseline is None
            else dict(zip(KEY, self.baseline, strict=False)),
            "missing": [
                {"loss": loss, "seed": s, "reason": why}
                for (loss, s), why in self.missing.items()
            ],
            "means": _records(self.means.reset_index()),
            "differences": _records(self.differences.reset_index()),
            "values": _records(self.results()),
            "detectable": [
                {"metric": metric, "value": size if math.isfinite(size) else None}
                for metric, size in self.detectable.items()
            ],
        }

    @property
    def _baseline_loss(self) -> str | None:
        return None if self.baseline is None else self.baseline[0]

    def _comparisons(self, metric: str) -> dict[Pair, TwoLevel]:
        """The differences of all pairs to their references, if they have a common seed."""
        rows = self.numbers[self.numbers["metric"] == metric]
        pooled = {method: self._pooled(rows, method) for method in self.methods}
        columns = rows.set_index("seed").groupby(KEY[:2], sort=False)[NUMBERS[-2:]]
        values = dict(iter(columns))
        found = {}
        for pair, own in values.items():
            reference = self.reference(pair)
            if reference not in values:
                continue
            difference = (own - values[reference]).dropna(subset="compared")
            # Another calibrator of the baseline's runs varies less than another run.
            shared = None if pair[0] == self._baseline_loss else pooled[pair[1]]
            if len(difference):
                found[pair] = two_level(
                    difference["compared"], difference["compared_draws"], shared
                )
        return found

    def _pooled(self, rows: pandas.DataFrame, method: str) -> Pooled | None:
        """The pooled variance over seeds of all losses with a method; None if not pooled."""
        if self.variance == "own" or self.baseline is None:
            return None
        shared = rows[rows["method"] == method]
        return pooled_variance(
            shared.pivot(index="seed", columns="loss", values="compared")
        )


def _table(rows: list[tuple[Any, ...]], columns: list[str]) -> pandas.DataFrame:
    return pandas.DataFrame(rows, columns=[*KEY, *columns]).set_index(KEY)


def _records(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """The rows in JSON types; undefined and infinite values are None."""
    return [
        {
            name: None if isinstance(x, float) and not math.isfinite(x) else x
            for name, x in row.items()
        }
        for row in table.to_dict("records")
    ]
