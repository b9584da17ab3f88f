"""Differences at matched accuracy: against statsmodels' way by hand, and where accuracy is all that differs."""

from __future__ import annotations

import numpy as np
import pytest

from hf_calib.study.matched import at_matched_accuracy, slope_of
from hf_calib.study.results import Estimate


def test_the_slope_is_that_of_least_squares_with_a_constant_for_each_loss() -> None:
    rng = np.random.default_rng(0)
    accuracy = rng.normal(0.8, 0.02, (3, 5))
    metric = np.array([0.1, 0.5, 0.9])[:, None] - 1.7 * accuracy + 0.01 * rng.normal(size=(3, 5))
    cells = {str(i): {s: (float(accuracy[i, s]), float(metric[i, s])) for s in range(5)} for i in range(3)}
    design = np.column_stack([np.repeat(np.eye(3), 5, axis=0), accuracy.ravel()])
    coefficients, residual, *_ = np.linalg.lstsq(design, metric.ravel(), rcond=None)
    variance = residual[0] / 11 * np.linalg.inv(design.T @ design)[3, 3]
    found = slope_of(cells)
    assert found is not None
    assert found.value == pytest.approx(coefficients[3])
    assert found.error == pytest.approx(np.sqrt(variance))
    assert found.degrees == 11


def test_a_difference_that_accuracy_explains_is_gone_at_matched_accuracy() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        accuracy = np.array([[0.80], [0.83]]) + rng.normal(0, 0.01, (2, 6))
        metric = 1.5 - 1.2 * accuracy + rng.normal(0, 0.004, (2, 6))
        cells = {
            str(i): {s: (float(accuracy[i, s]), float(metric[i, s])) for s in range(6)} for i in range(2)
        }
        slope = slope_of(cells)
        assert slope is not None
        rest = (metric[1] - metric[0]) - slope.value * (accuracy[1] - accuracy[0])
        reach = 2.57 * rest.std(ddof=1) / 6**0.5
        value = float((metric[1] - metric[0]).mean())
        found = at_matched_accuracy(
            Estimate(value, value - reach, value + reach, 6), float((accuracy[1] - accuracy[0]).mean()), slope
        )
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0 <= found.high
    assert held / 300 > 0.92


@pytest.mark.parametrize(
    "cells",
    [{}, {"a": {0: (0.8, 0.5)}, "b": {0: (0.9, 0.4)}}, {"a": {0: (0.8, 0.5), 1: (0.8, 0.4), 2: (0.8, 0.3)}}],
)
def test_without_trainings_of_different_accuracy_there_is_no_slope(
    cells: dict[str, dict[int, tuple[float, float]]],
) -> None:
    assert slope_of(cells) is None
