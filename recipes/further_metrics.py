"""Print further metrics and calibrators for the runs of `compare_losses.py`, which its table does not contain.

    python recipes/further_metrics.py OUTPUT/guard ... > tables.md

The tables have means over the seeds for each loss. Before and after the temperature: the ECE with
15 bins, the debiased L2 error, the ECE by sweep (as many equal-mass bins as stay monotonic), the
maximum calibration error (MCE) and the kernel ECE (KDE). The NLL after a temperature, after the
temperature with the lowest ECE, after ensemble temperature scaling (ETS), and after a spline.
"""

import argparse
import json
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from markdown_tables import table_lines
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
HEADER = ["loss"]
for error in ERRORS:
    HEADER += [error, f"{error}, after T"]
HEADER += [f"NLL after {name}" for name in MAPS]


def measured(path):
    """The numbers of one training, in the order of the header."""
    found = TrainingPredictions.load(path)
    labels = found.test.labels
    got = None
    if found.calibration is None:
        got = "no calibration rows"
    elif labels.ndim != 1:
        got = f"labels of the shape {labels.shape}"
    if got is not None:
        raise SystemExit(
            f"expected {path} to have one label per row, and calibration rows to fit the maps on, got {got}; "
            "its report has the metrics of such a training"
        )
    raw = softmax(found.test.logits.astype(float), axis=1)
    by_map = {}
    numbers = []
    with warnings.catch_warnings():
        # Of ties, and of bins without rows.
        warnings.simplefilter("ignore")
        for name, make in MAPS.items():
            scaler = make().fit(found.calibration.logits, found.calibration.labels)
            by_map[name] = scaler.predict_proba(found.test.logits)
        for error in ERRORS.values():
            numbers += [error(raw, labels), error(by_map["T"], labels)]
    for probs in by_map.values():
        numbers.append(negative_log_likelihood(probs, labels))
    return numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", type=Path)
    for study in parser.parse_args().studies:
        by_loss = {}
        for path in sorted(study.glob("runs/*/predictions.safetensors")):
            run = json.loads((path.parent / "run.json").read_text())
            by_loss.setdefault(run["loss"], []).append(measured(path))
        rows = []
        for loss, trainings in by_loss.items():
            means = np.mean(trainings, axis=0)
            rows.append([loss, *(f"{mean:.3f}" for mean in means)])
        print(f"## {study.name}\n", *table_lines(HEADER, rows), "", sep="\n")


if __name__ == "__main__":
    main()
