"""The modules give the numbers of the functions, through `evaluate`'s own doors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest

import hf_calib.metrics as metrics
from hf_calib.evaluate_modules import MODULES, module_path

FUNCTIONS = {
    "ece": metrics.expected_calibration_error,
    "adaptive_ece": lambda probs, labels: metrics.expected_calibration_error(
        probs, labels, binning="quantile"
    ),
    "classwise_ece": metrics.classwise_calibration_error,
    "smooth_ece": metrics.smooth_calibration_error,
    "brier": metrics.brier_score,
}


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.dirichlet(np.ones(4), 60), rng.integers(4, size=60)


def load(name: str, tmp_path: Path) -> Any:
    return evaluate.load(module_path(name), cache_dir=str(tmp_path))


def test_every_folder_is_a_module() -> None:
    home = Path(module_path("ece")).parents[1]
    assert (
        tuple(sorted(path.name for path in home.iterdir() if (path / f"{path.name}.py").exists())) == MODULES
    )
    assert set(FUNCTIONS) == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_gives_what_the_function_gives(
    name: str, rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    probs, labels = rows
    metric = load(name, tmp_path)
    expected = {name: FUNCTIONS[name](probs, labels)}
    assert metric.compute(predictions=probs, references=labels) == expected
    for start in range(0, 60, 25):
        metric.add_batch(predictions=probs[start : start + 25], references=labels[start : start + 25])
    assert metric.compute() == expected


def test_they_combine(rows: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    probs, labels = rows
    combined = evaluate.combine([load(name, tmp_path) for name in MODULES])
    expected = {name: FUNCTIONS[name](probs, labels) for name in MODULES}
    assert combined.compute(predictions=probs.tolist(), references=labels.tolist()) == expected


def test_options_reach_the_function(rows: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    probs, labels = rows
    found = load("ece", tmp_path).compute(predictions=probs, references=labels, n_bins=5, norm="l2")
    assert found == {"ece": metrics.expected_calibration_error(probs, labels, n_bins=5, norm="l2")}


def test_logits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="these look like logits"):
        load("ece", tmp_path).compute(predictions=[[3.0, -1.0]], references=[0])


def test_an_unknown_module() -> None:
    with pytest.raises(ValueError, match="did you mean 'ece'"):
        module_path("ecee")
