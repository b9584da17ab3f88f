"""Numbers of reports on fixed predictions: did a refactoring change any?

python benchmarks/reports.py > before.json                       # in a checkout of the old code
python benchmarks/reports.py > after.json
python benchmarks/reports.py before.json after.json [tolerance]  # what differs by more than 1e-9, and by how much
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from scipy.special import expit, softmax
from values import compare, flat, labels_per_row, rows

import hf_calib
from hf_calib.report import calibration_report, with_entities


def reports(folder: Path) -> Iterator[tuple[str, Any]]:
    """Reports by name; evaluated from files of every kind that is read, or made in Python."""
    logits, labels = rows("ten")
    names = [f"c{i}" for i in range(10)]
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(logits, columns=[f"logit_{name}" for name in names])
    table["label"] = [names[label] for label in labels]
    table["country"] = np.array(["de", "fr", "it"])[rng.integers(0, 3, len(labels))]
    table["length"], table["w"] = (
        rng.integers(1, 500, len(labels)),
        rng.integers(1, 4, len(labels)) / 2,
    )
    table.to_csv(folder / "rows.csv", index=False)
    shares = (rng.multinomial(20, softmax(logits / 3, axis=1)) / 20).astype(np.float64)
    several, targets = labels_per_row()
    np.savez(folder / "shares.npz", probs=shares)
    np.savez(
        folder / "elsewhere.npz",
        logits=logits[:200] / 4,
        labels=labels[:200],
        class_names=names,
    )
    np.savez(
        folder / "several.npz",
        logits=several,
        labels=targets,
        class_names=list("abcdef"),
    )
    source = str(folder / "rows.csv")
    yield "rows", hf_calib.evaluate(source)
    yield "slices", hf_calib.evaluate(source, by=["country", "length"], n_bins=10)
    yield "weights", hf_calib.evaluate(source, by=["country"], weight_column="w")
    yield (
        "soft labels",
        hf_calib.evaluate(source, soft_labels=str(folder / "shares.npz")),
    )
    yield (
        "elsewhere",
        hf_calib.evaluate(source, ood_data=[str(folder / "elsewhere.npz")]),
    )
    yield "several labels", hf_calib.evaluate(str(folder / "several.npz"))
    probs, softer = softmax(logits, axis=1), softmax(logits / 3, axis=1)
    options = {"n_resamples": 200, "confidence_level": 0.9, "seed": 3}
    yield (
        "calibrated",
        calibration_report(
            probs, labels, calibrated=softer, soft_labels=shares, **options
        ),
    )
    several, halved = expit(several), expit(several / 2)
    yield (
        "several calibrated",
        calibration_report(several, targets, calibrated=halved, **options),
    )
    tagged = softmax(logits[:, :3] + 2 * np.eye(3)[labels % 3], axis=1)
    options["class_names"] = ["O", "B-x", "I-x"]
    report = calibration_report(tagged, labels % 3, calibrated=tagged, **options)
    yield "entities", with_entities(report, np.repeat(np.arange(100), 7))
    weights = rng.exponential(size=len(labels))
    options = {"confidence_level": 0.9, "seed": 3}
    yield (
        "calibrated, weights",
        calibration_report(
            probs, labels, calibrated=softer, sample_weight=weights, **options
        ),
    )
    yield "decisions", hf_calib.decide(source, accuracy=0.5)
    yield (
        "calibration",
        hf_calib.calibrate(source, str(folder / "new"), method="temperature").report,
    )


def main(given: list[str]) -> None:
    if given:
        before, after = (json.loads(Path(path).read_text()) for path in given[:2])
        compare(before, after, float(given[2]) if len(given) > 2 else 1e-9)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = [
            pair
            for name, report in reports(Path(folder))
            for pair in flat(report.to_dict(), name)
        ]
    print(
        json.dumps({key: value for key, value in found if not isinstance(value, str)})
    )


if __name__ == "__main__":
    main(sys.argv[1:])
