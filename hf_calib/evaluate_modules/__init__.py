"""Calibration metrics for code that uses the `evaluate` library:
`evaluate.load(module_path(), "ece")`.
"""

from __future__ import annotations

from pathlib import Path


def module_path() -> str:
    """Return the path of the module for `evaluate.load`.

    Its configurations are "ece", "adaptive_ece", "classwise_ece", "smooth_ece" and "brier", which
    are also the keys of the results. Predictions are probabilities (N, C), references are class
    indices (N,), and further arguments are those of the function in `hf_calib.metrics`, such as
    n_bins.

    >>> import evaluate
    >>> metric = evaluate.load(module_path(), "brier")
    >>> metric.compute(predictions=[[0.5, 0.5], [1.0, 0.0]], references=[1, 0])
    {'brier': 0.25}
    """
    return str(Path(__file__).parent / "calibration.py")
