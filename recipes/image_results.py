"""Print what RESULTS.md says of the image study beside `results_tables.py`: annotators, and inputs from elsewhere.

    python recipes/image_results.py OUTPUT/cifar10_resnet20 CIFAR10H.npz > tables.md

Each training has left its logits in predictions.safetensors, and the detection of --ood_data in results.json.
The .npz file has the array probs, a row of annotators' shares for each test image, in the order of the data.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.special import softmax

from hf_calib.metrics import expected_calibration_error, negative_log_likelihood, true_calibration_error
from hf_calib.predictions.of_training import TrainingPredictions
from hf_calib.scaling import TemperatureScaling

parser = argparse.ArgumentParser()
parser.add_argument("study", type=Path)
parser.add_argument("soft_labels", type=Path)
args = parser.parse_args()

soft = np.load(args.soft_labels)["probs"]
runs = sorted(path.parent for path in args.study.glob("cells/*/results.json"))
results = {run: json.loads((run / "results.json").read_text()) for run in runs}


def table(header, rows):
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def against_annotators(run):
    found = TrainingPredictions.load(run / "predictions.safetensors")
    agreement = np.mean(soft.argmax(axis=1) == found.test.labels)
    if agreement < 0.9:
        parser.error(
            f"{args.soft_labels} agrees with {agreement:.0%} of the labels of {run}: other rows, or another order"
        )
    temperature = TemperatureScaling().fit(found.calibration.logits, found.calibration.labels)
    before = softmax(found.test.logits.astype(float), axis=1)
    after = temperature.predict_proba(found.test.logits)
    for metric in (true_calibration_error, expected_calibration_error, negative_log_likelihood):
        yield from (f"{metric(probs, soft):.3f}" for probs in (before, after))


def detection(result):
    for elsewhere in result["out_of_distribution"]:
        for score in ("max_probability", "energy"):
            yield from (f"{elsewhere[when][score]['auroc']['value']:.3f}" for when in ("before", "after"))


def widest(result):
    return max(
        (score["auroc"]["high"] - score["auroc"]["low"]) / 2
        for elsewhere in result["out_of_distribution"]
        for when in ("before", "after")
        for score in elsewhere[when].values()
    )


names = [(result["loss"], str(result["seed"])) for result in results.values()]
metrics = ("true calibration error", "ECE", "NLL")
header = ["loss", "seed", *(f"{metric}{when}" for metric in metrics for when in ("", " after T"))]
table(header, [[*name, *against_annotators(run)] for name, run in zip(names, runs, strict=True)])

elsewhere = [each["name"] for each in next(iter(results.values()))["out_of_distribution"]]
scores = [
    f"{name}, {score}{when}" for name in elsewhere for score in ("p", "energy") for when in ("", " after T")
]
table(
    ["loss", "seed", *scores],
    [[*name, *detection(result)] for name, result in zip(names, results.values(), strict=True)],
)
print(f"Intervals of the AUROC reach {max(map(widest, results.values())):.3f} to either side at most.")
