"""Results of a study, as `measure_study` would make them, from drawn numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from hf_calib.study.measured import STUDY_METRICS
from hf_calib.study.results import NUMBERS, StudyResults

TITLES = {key: measure.title for key, measure in STUDY_METRICS.items()}


def values(results: StudyResults) -> dict[tuple[Any, ...], float]:
    """(loss, seed, method, metric) -> value."""
    return {
        tuple(key): value for *key, value in results.results().itertuples(index=False)
    }


def rows(table: pandas.DataFrame) -> dict[Any, Any]:
    """What a row of a table is of -> the row."""
    return {row.Index: row for row in table.itertuples()}


def study_results(
    losses: Sequence[str] = ("cross_entropy", "focal"),
    seeds: Sequence[int] = (0, 1, 2),
    methods: Sequence[str] = ("none", "temperature"),
    missing: Mapping[tuple[str, int], str] | None = None,
    n_test: int = 300,
) -> StudyResults:
    """Every number drawn; resamples only where a loss has several seeds."""
    missing = dict(missing or {})
    rng = np.random.default_rng(len(losses))
    numbers = []
    for number, loss in enumerate(losses):
        for method in methods:
            done = [seed for seed in seeds if (loss, seed) not in missing]
            error = (
                rng.uniform(0.03, 0.25) if method == "none" else rng.uniform(0.01, 0.03)
            )
            for seed in done:
                for key in TITLES:
                    level = {"accuracy": 0.85 - 0.002 * number, "nll": 0.3 + error}.get(
                        key, error
                    )
                    value = float(level + rng.normal(0, 0.004))
                    drawn = (
                        value + rng.normal(0, 0.002, 50) if len(seeds) > 1 else np.nan
                    )
                    numbers.append(
                        (loss, seed, method, key, value, drawn, value, drawn)
                    )
    return StudyResults(
        losses=tuple(losses),
        seeds=tuple(seeds),
        methods=tuple(methods),
        metrics=TITLES,
        counted=("test rows", "classes"),
        n_test=n_test if numbers else 0,
        n_classes=4 if numbers else 0,
        n_calibration=200 if numbers else 0,
        n_resamples=1_000,
        variance="own",
        numbers=pandas.DataFrame(numbers, columns=NUMBERS),
        missing=missing,
        remarks=("Of drawn numbers.",),
    )
