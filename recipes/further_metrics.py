"""Print further metrics and calibrators for the runs of `compare_losses.py`, which its table does not contain.

    python recipes/further_metrics.py OUTPUT/guard ... > tables.md

The tables have means over the seeds for each loss. Before and after the temperature: the ECE with 15 bins, the debiased
L2 error, the ECE by sweep (as many equal-mass bins as stay monotonic), the maximum calibration error (MCE) and the
kernel ECE (KDE). The NLL after a temperature, after the temperature with the lowest ECE, after ensemble temperature
scaling (ETS), and after a spline.
"""

import argparse
import json
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from papers.sweep import ece_sweep
from scipy.special import softmax

from hf_calib.metrics import (
    expected_calibration_error,
    kde_calibration_error,
    maximum_calibration_error,
    negative_log_likelihood,
)
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.scaling import (
    EnsembleTemperatureScaling,
    SplineScaling,
    TemperatureScaling,
)

ERRORS = {
    "ECE": expected_calibration_error,
    "ECE (L2), debiased": partial(expected_calibration_error, norm="l2", debias=True),
    "ECE, sweep": ece_sweep,
    "MCE": maximum_calibration_error,
    "ECE, KDE": kde_calibration_error,
}
MAPS = {
    "T": TemperatureScaling,
    "T by ECE": partial(TemperatureScaling, criterion="ece"),
    "ETS": EnsembleTemperatureScaling,
    "spline": SplineScaling,
}
HEADER = [
    "loss",
    *(f"{error}{words}" for error in ERRORS for words in ("", ", after T")),
    *(f"NLL after {name}" for name in MAPS),
]


def measured(path):
    """The numbers of one training, in the order of the header."""
    found = TrainingPredictions.load(path)
    labels = found.test.labels
    if found.calibration is None or labels.ndim != 1:
        got = (
            "no calibration rows"
            if found.calibration is None
            else f"labels of the shape {labels.shape}"
        )
        raise SystemExit(
            f"expected {path} to have one label per row, and calibration rows to fit the maps on, got {got}; "
            "its report has the metrics of such a training"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, and of bins without rows
        by_map = {
            name: make()
            .fit(found.calibration.logits, found.calibration.labels)
            .predict_proba(found.test.logits)
            for name, make in MAPS.items()
        }
        before = softmax(found.test.logits.astype(float), axis=1)
        errors = [
            metric(probs, labels)
            for metric in ERRORS.values()
            for probs in (before, by_map["T"])
        ]
    return [
        *errors,
        *(negative_log_likelihood(probs, labels) for probs in by_map.values()),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", type=Path)
    for study in parser.parse_args().studies:
        by_loss = {}
        for path in sorted(study.glob("runs/*/predictions.safetensors")):
            run = json.loads((path.parent / "run.json").read_text())
            by_loss.setdefault(run["loss"], []).append(measured(path))
        print(f"## {study.name}\n\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
        for loss, trainings in by_loss.items():
            means = np.mean(trainings, axis=0)
            print(f"| {' | '.join([loss, *(f'{mean:.3f}' for mean in means)])} |")
        print()


if __name__ == "__main__":
    main()
