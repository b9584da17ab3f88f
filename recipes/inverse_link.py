"""Compare the closed-form inverse link with the temperature on trained models.

    python recipes/inverse_link.py study/runs/focal-seed0 study/runs/bsce_gra-seed0

Each run is the output folder of a recipe, or of a run of `compare_losses.py`: the loss is in
results.json, the logits are in predictions.safetensors.
"""

import argparse
import json
from pathlib import Path

from markdown_tables import table_lines, with_interval
from papers.inverse_link import InverseLink
from scipy.special import softmax

from hf_calib.losses import make_loss
from hf_calib.metrics import (
    accuracy,
    calibration_error_interval,
    negative_log_likelihood,
)
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.scaling import TemperatureScaling

parser = argparse.ArgumentParser()
parser.add_argument("runs", nargs="+", type=Path)
args = parser.parse_args()


def cells(probs, labels):
    found = calibration_error_interval(probs, labels)
    return [with_interval(*found), f"{negative_log_likelihood(probs, labels):.3f}"]


rows = []
for run in args.runs:
    results = json.loads((run / "results.json").read_text())
    loss = make_loss(results["loss"], **results["hyperparameters"])
    if hasattr(loss, "update"):
        parser.error(
            f"{run}: the table that {results['loss']} had at the end is not in results.json"
        )
    found = TrainingPredictions.load(run / "predictions.safetensors")
    logits = found.test.logits
    labels = found.test.labels
    raw = softmax(logits.astype(float), axis=1)
    temperature = TemperatureScaling()
    temperature.fit(found.calibration.logits, found.calibration.labels)
    row = [run.name, f"{accuracy(raw, labels):.3f}", *cells(raw, labels)]
    row += cells(InverseLink(loss).predict_proba(logits), labels)
    row += cells(temperature.predict_proba(logits), labels)
    rows.append(row)
header = ["run", "accuracy", "ECE", "NLL", "ECE, inverse link", "NLL"]
print(*table_lines([*header, "ECE, temperature", "NLL"], rows), sep="\n")
