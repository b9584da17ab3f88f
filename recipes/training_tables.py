"""Print tables of docs/results with one row per run: metrics that results_tables.py does not print.

    python recipes/training_tables.py OUTPUT/cifar10_resnet20 [--soft_labels CIFAR10H.npz] > tables.md

The metrics are the classwise ECE, OOD detection with --ood_data, F1 and ECE of entities, ranking and ECE of multi-label
models, and the errors against annotators. For the latter, the .npz file has the array probs: for each test row, in the
order of the data, the share of annotators that chose each class.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.special import softmax

from hf_calib.metrics import (
    expected_calibration_error,
    negative_log_likelihood,
    true_calibration_error,
)
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.scaling import TemperatureScaling

parser = argparse.ArgumentParser()
parser.add_argument("study", type=Path)
parser.add_argument("--soft_labels", type=Path)
args = parser.parse_args()

folders = sorted(path.parent for path in args.study.glob("runs/*/results.json"))
runs = [json.loads((folder / "results.json").read_text()) for folder in folders]


def with_interval(row):
    found = f"{row['value']:.3f}"
    if row["low"] is None:  # Noise biases a calibration error, so it has no interval.
        return found
    return f"{found} [{row['low']:.3f}, {row['high']:.3f}]"


def against_annotators(folder, soft):
    found = TrainingPredictions.load(folder / "predictions.safetensors")
    agreement = np.mean(soft.argmax(axis=1) == found.test.labels)
    if agreement < 0.9:
        parser.error(
            f"{args.soft_labels} agrees with {agreement:.0%} of the labels of {folder}: not its rows"
        )
    temperature = TemperatureScaling().fit(
        found.calibration.logits, found.calibration.labels
    )
    before = softmax(found.test.logits.astype(float), axis=1)
    after = temperature.predict_proba(found.test.logits)
    columns = {}
    for title, metric in (
        ("true calibration error", true_calibration_error),
        ("ECE, annotators", expected_calibration_error),
        ("NLL, annotators", negative_log_likelihood),
    ):
        columns |= {
            title: f"{metric(before, soft):.3f}",
            f"{title}, after T": f"{metric(after, soft):.3f}",
        }
    return columns


def classwise(run):
    metrics = run["metrics"]
    keys = {
        "classwise ECE": "test_classwise_ece",
        "classwise ECE, after T": "test_classwise_ece_calibrated",
    }
    return {
        title: f"{metrics[key]:.4f}" for title, key in keys.items() if key in metrics
    }


STATES = (
    ("before", ""),
    ("after", ", after T"),
)  # Without a calibrator only the first.
# The papers' score is the entropy.
SCORES = {
    "max_probability": "maximum probability",
    "entropy": "entropy",
    "energy": "energy",
}


def detection(run):
    return {
        f"{elsewhere['name']}, {title}{words}": with_interval(
            elsewhere[when][score]["auroc"]
        )
        for elsewhere in run.get("out_of_distribution", [])
        for score, title in SCORES.items()
        for when, words in STATES
        if elsewhere[when]
    }


def entities(run):
    found = run.get("entities")
    if found is None:
        return {}
    return {"F1": with_interval(found["before"]["f1"])} | {
        f"ECE, {title}{words}": with_interval(found[when][key])
        for key, title in (("ece_product", "product"), ("ece_minimum", "minimum"))
        for when, words in STATES
        if found[when]
    }


def several_labels(folder):
    path = folder / "report" / "report.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    if report.get("kind") != "multi_label":
        return {}
    columns = {
        title: with_interval(report["before"]["metrics"][key])
        for key, title in (
            ("macro_auroc", "AUROC, macro"),
            ("macro_average_precision", "average precision, macro"),
            ("micro_average_precision", "average precision, micro"),
        )
    }
    return columns | {
        f"ECE, macro{words}": with_interval(report[when]["metrics"]["macro_ece"])
        for when, words in STATES
        if report[when]
    }


def print_table(title, rows):
    """With the columns of the first row; nothing where there are none."""
    if not rows[0]:
        return
    print(
        f"{title}\n\n| {' | '.join(['loss', 'seed', *rows[0]])} |\n|{'---|' * (len(rows[0]) + 2)}"
    )
    for folder, run, row in zip(folders, runs, rows, strict=True):
        loss = folder.name.partition("-seed")[
            0
        ]  # as in the comparison: adafocal_every_10_steps is the same loss
        print(f"| {' | '.join([loss, str(run['seed']), *row.values()])} |")
    print()


print_table("Over the classes:", [classwise(run) for run in runs])
print_table("AUROC of OOD detection:", [detection(run) for run in runs])
print_table("Entities:", [entities(run) for run in runs])
print_table("Labels:", [several_labels(folder) for folder in folders])
if args.soft_labels is not None:
    shares = np.load(args.soft_labels)["probs"]
    print_table(
        "Against annotators:",
        [against_annotators(folder, shares) for folder in folders],
    )
