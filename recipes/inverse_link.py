"""The closed-form inverse link on trained models, beside the temperature.

    python recipes/inverse_link.py outputs/ag_news_minilm/focal-0 outputs/ag_news_minilm/bsce_gra-1 \
        --test_file test.csv --max_length 64

Each run is the output folder of `text_classification.py`: the loss stands in its results.json, and the logits that the
loss saw are those of calibrated/, times the temperature in it.
"""

import argparse
import json
from pathlib import Path

from scipy.special import softmax

import hf_calib.models  # noqa: F401  (so that the papers' networks can be loaded)
from hf_calib.losses import make_loss
from hf_calib.metrics import accuracy, bootstrap_interval, negative_log_likelihood
from hf_calib.predictions.texts import load_classifier, load_rows, predict
from hf_calib.scaling import InverseLink

parser = argparse.ArgumentParser()
parser.add_argument("runs", nargs="+", type=Path)
parser.add_argument("--test_file", required=True)
parser.add_argument("--text_column", default="text")
parser.add_argument("--max_length", type=int)
args = parser.parse_args()


def cell(probs, labels):
    value, low, high = bootstrap_interval("expected_calibration_error", probs, labels)
    return f"{value:.3f} [{low:.3f}, {high:.3f}] | {negative_log_likelihood(probs, labels):.3f}"


rows = load_rows(args.test_file)
print("| run | accuracy | ECE | NLL | ECE, inverse link | NLL | ECE, temperature | NLL |")
print("|---|---|---|---|---|---|---|---|")
for run in args.runs:
    results = json.loads((run / "results.json").read_text())
    loss = make_loss(results["loss"], **results["hyperparameters"])
    if hasattr(loss, "update"):
        parser.error(f"{run}: the table that {results['loss']} had at the end is not in results.json")
    classifier = load_classifier(run / "calibrated")
    found = predict(
        classifier, rows, text_column=args.text_column, max_length=args.max_length, batch_size=128
    )
    scaled, labels = found.logits, found.labels
    logits = scaled * results["metrics"]["temperature"]
    raw, with_temperature = softmax(logits, axis=1), softmax(scaled, axis=1)
    cells = [
        cell(probs, labels) for probs in (raw, InverseLink(loss).predict_proba(logits), with_temperature)
    ]
    print(f"| {run.parent.name}/{run.name} | {accuracy(raw, labels):.3f} | {' | '.join(cells)} |", flush=True)
