"""The module gives the numbers of the functions, through `evaluate`'s own doors and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest

import hf_calib.metrics as metrics
from hf_calib.evaluate_modules import module_path

FUNCTIONS = {
    "ece": metrics.expected_calibration_error,
    "adaptive_ece": lambda p, y: metrics.expected_calibration_error(
        p, y, binning="quantile"
    ),
    "classwise_ece": metrics.classwise_calibration_error,
    "smooth_ece": metrics.smooth_calibration_error,
    "brier": metrics.brier_score,
}
RNG = np.random.default_rng(0)
PROBS, LABELS = RNG.dirichlet(np.ones(4), 60), RNG.integers(4, size=60)


def load(name: str | None, tmp_path: Path) -> Any:
    return evaluate.load(module_path(), name, cache_dir=str(tmp_path))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_configuration_gives_what_the_function_gives(
    name: str, tmp_path: Path
) -> None:
    metric = load(name, tmp_path)
    expected = {name: FUNCTIONS[name](PROBS, LABELS)}
    assert metric.compute(predictions=PROBS, references=LABELS) == expected
    for start in range(0, 60, 25):
        metric.add_batch(
            predictions=PROBS[start : start + 25], references=LABELS[start : start + 25]
        )
    assert metric.compute() == expected


def test_they_combine(tmp_path: Path) -> None:
    combined = evaluate.combine([load(name, tmp_path) for name in FUNCTIONS])
    expected = {name: function(PROBS, LABELS) for name, function in FUNCTIONS.items()}
    assert (
        combined.compute(predictions=PROBS.tolist(), references=LABELS.tolist())
        == expected
    )


def test_options_reach_the_function(tmp_path: Path) -> None:
    found = load("ece", tmp_path).compute(
        predictions=PROBS, references=LABELS, n_bins=5, norm="l2"
    )
    assert found == {
        "ece": metrics.expected_calibration_error(PROBS, LABELS, n_bins=5, norm="l2")
    }


def test_logits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="these look like logits"):
        load("ece", tmp_path).compute(predictions=[[3.0, -1.0]], references=[0])


@pytest.mark.parametrize(
    ("name", "message"), [("ecee", "did you mean 'ece'"), (None, "known: adaptive_ece")]
)
def test_an_unknown_configuration(
    name: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, tmp_path)
