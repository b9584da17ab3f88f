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
from functools import partial
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
    table["length"] = rng.integers(1, 500, len(labels))
    table["w"] = rng.integers(1, 4, len(labels)) / 2
    table.to_csv(folder / "rows.csv", index=False)
    softer = softmax(logits / 3, axis=1)
    shares = rng.multinomial(20, softer) / 20
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
    evaluate = partial(hf_calib.evaluate, str(folder / "rows.csv"))
    yield "rows", evaluate()
    yield "slices", evaluate(by=["country", "length"], n_bins=10)
    yield "weights", evaluate(by=["country"], weight_column="w")
    yield "soft labels", evaluate(soft_labels=str(folder / "shares.npz"))
    yield "elsewhere", evaluate(ood_data=[str(folder / "elsewhere.npz")])
    yield "several labels", hf_calib.evaluate(str(folder / "several.npz"))
    report = partial(calibration_report, confidence_level=0.9, seed=3)
    resampled = partial(report, n_resamples=200)
    own = softmax(logits, axis=1), labels
    yield "calibrated", resampled(*own, calibrated=softer, soft_labels=shares)
    halved = expit(several / 2)
    of_several = resampled(expit(several), targets, calibrated=halved)
    yield "several calibrated", of_several
    tags = labels % 3
    tagged = softmax(logits[:, :3] + 2 * np.eye(3)[tags], axis=1)
    names_of_tags = ["O", "B-x", "I-x"]
    of_tags = resampled(tagged, tags, calibrated=tagged, class_names=names_of_tags)
    yield "entities", with_entities(of_tags, np.repeat(np.arange(100), 7))
    weights = rng.exponential(size=len(labels))
    weighted = report(*own, calibrated=softer, sample_weight=weights)
    yield "calibrated, weights", weighted
    source = str(folder / "rows.csv")
    yield "decisions", hf_calib.decide(source, accuracy=0.5)
    new = hf_calib.calibrate(source, str(folder / "new"), method="temperature")
    yield "calibration", new.report


def main(given: list[str]) -> None:
    if given:
        before, after = (json.loads(Path(path).read_text()) for path in given[:2])
        tolerance = float(given[2]) if len(given) > 2 else 1e-9
        compare(before, after, tolerance)
    warnings.simplefilter("ignore")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, report in reports(Path(folder)):
            for key, value in flat(report.to_dict(), name):
                if not isinstance(value, str):
                    found[key] = value
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
