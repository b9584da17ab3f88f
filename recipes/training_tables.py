"""Print tables of docs/results with one row per run: metrics that results_tables.py does not print.

    python recipes/training_tables.py OUTPUT/cifar10_resnet20 [--soft_labels CIFAR10H.npz] > tables.md

The metrics are the classwise ECE, OOD detection with --ood_data, F1 and ECE of entities, ranking
and ECE of multi-label models, and the errors against annotators. For the latter, the .npz file has
the array probs: for each test row, in the order of the data, the share of annotators that chose
each class.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from markdown_tables import table_lines, with_interval
from scipy.special import softmax

from hf_calib.metrics import (
    expected_calibration_error,
    negative_log_likelihood,
    true_calibration_error,
)
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.scaling import TemperatureScaling

# Before calibration and after it; without a calibrator there is only the first.
STATES = {"before": "", "after": ", after T"}
# The papers' score is the entropy.
SCORES = {
    "max_probability": "maximum probability",
    "entropy": "entropy",
    "energy": "energy",
}
ANNOTATED = {
    "true calibration error": true_calibration_error,
    "ECE, annotators": expected_calibration_error,
    "NLL, annotators": negative_log_likelihood,
}

parser = argparse.ArgumentParser()
parser.add_argument("study", type=Path)
parser.add_argument("--soft_labels", type=Path)
args = parser.parse_args()

# Each function returns the cells of a run by the titles of their columns, or none.


def interval_cell(row):
    return with_interval(row["value"], row["low"], row["high"])


def against_annotators(folder):
    shares = np.load(args.soft_labels)["probs"]
    found = TrainingPredictions.load(folder / "predictions.safetensors")
    agreement = np.mean(shares.argmax(axis=1) == found.test.labels)
    if agreement < 0.9:
        parser.error(
            f"{args.soft_labels} agrees with {agreement:.0%} of the labels of {folder}: not its rows"
        )
    temperature = TemperatureScaling()
    temperature.fit(found.calibration.logits, found.calibration.labels)
    before = softmax(found.test.logits.astype(float), axis=1)
    after = temperature.predict_proba(found.test.logits)
    cells = {}
    for title, metric in ANNOTATED.items():
        cells[title] = f"{metric(before, shares):.3f}"
        cells[f"{title}, after T"] = f"{metric(after, shares):.3f}"
    return cells


def classwise(folder):
    metrics = results_of(folder)["metrics"]
    cells = {}
    for title, key in (
        ("classwise ECE", "test_classwise_ece"),
        ("classwise ECE, after T", "test_classwise_ece_calibrated"),
    ):
        if key in metrics:
            cells[title] = f"{metrics[key]:.4f}"
    return cells


def detection(folder):
    cells = {}
    for elsewhere in results_of(folder).get("out_of_distribution", []):
        for score, title in SCORES.items():
            for when, words in STATES.items():
                if elsewhere[when]:
                    auroc = interval_cell(elsewhere[when][score]["auroc"])
                    cells[f"{elsewhere['name']}, {title}{words}"] = auroc
    return cells


def entities(folder):
    found = results_of(folder).get("entities")
    if found is None:
        return {}
    cells = {"F1": interval_cell(found["before"]["f1"])}
    for key, title in (("ece_product", "product"), ("ece_minimum", "minimum")):
        for when, words in STATES.items():
            if found[when]:
                cells[f"ECE, {title}{words}"] = interval_cell(found[when][key])
    return cells


def several_labels(folder):
    path = folder / "report" / "report.json"
    if not path.is_file():
        return {}
    report = json.loads(path.read_text())
    if report.get("kind") != "multi_label":
        return {}
    cells = {}
    for key, title in (
        ("macro_auroc", "AUROC, macro"),
        ("macro_average_precision", "average precision, macro"),
        ("micro_average_precision", "average precision, micro"),
    ):
        cells[title] = interval_cell(report["before"]["metrics"][key])
    for when, words in STATES.items():
        if report[when]:
            error = report[when]["metrics"]["macro_ece"]
            cells[f"ECE, macro{words}"] = interval_cell(error)
    return cells


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def print_table(title, cells_of):
    """With the columns of the first run; nothing where it has none."""
    rows = []
    for path in sorted(args.study.glob("runs/*/results.json")):
        cells = cells_of(path.parent)
        # As in the comparison: adafocal_every_10_steps is the same loss.
        loss = path.parent.name.partition("-seed")[0]
        seed = str(results_of(path.parent)["seed"])
        rows.append({"loss": loss, "seed": seed} | cells)
    if len(rows[0]) > 2:
        print(
            f"{title}\n",
            *table_lines(rows[0], [row.values() for row in rows]),
            "",
            sep="\n",
        )


print_table("Over the classes:", classwise)
print_table("AUROC of OOD detection:", detection)
print_table("Entities:", entities)
print_table("Labels:", several_labels)
if args.soft_labels is not None:
    print_table("Against annotators:", against_annotators)
