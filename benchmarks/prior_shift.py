"""Prior correction on real models, where test rows have other class frequencies than calibration rows.

    python benchmarks/prior_shift.py outputs/posthoc

The folder contains clinc150-0.npz and ag_news-0.npz from benchmarks/posthoc_training.py.
Calibrators are fitted to the pool of each, which has the class frequencies of the source. The test
rows are those of clinc150 (18% out of scope, 3% in the pool), those of AG News (no shift), and
those of AG News sampled so that the classes have 60, 20, 15 and 5%. "true" corrects to the test
rows' shares.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hf_calib.metrics import expected_calibration_error, negative_log_likelihood
from hf_calib.scaling import (
    AutoScaling,
    PriorCorrection,
    TemperatureScaling,
    VectorScaling,
)

MAPS = {"temperature": TemperatureScaling, "vector": VectorScaling, "auto": AutoScaling}
SHARES = (0.60, 0.20, 0.15, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--maps", nargs="+", default=list(MAPS), choices=list(MAPS))
    args = parser.parse_args()
    # Separable data are in the table.
    warnings.simplefilter("ignore", UserWarning)
    clinc150, ag_news = (
        np.load(args.folder / f"{name}-0.npz") for name in ("clinc150", "ag_news")
    )
    compare(
        "clinc150, all test rows; class 150 is out of scope",
        clinc150,
        args.maps,
        shown=150,
    )
    compare("AG News, all test rows", ag_news, args.maps, shown=0)
    labels = ag_news["test_labels"]
    rng = np.random.default_rng(0)
    n_rows = int(min(np.bincount(labels) / SHARES))
    drawn = [
        rng.permutation(np.flatnonzero(labels == k))[: int(n_rows * share)]
        for k, share in enumerate(SHARES)
    ]
    compare(
        "AG News, test rows of 60, 20, 15 and 5%",
        ag_news,
        args.maps,
        shown=0,
        rows=np.concatenate(drawn),
    )


def compare(
    title: str, arrays: Any, maps: list[str], *, shown: int, rows: Any = slice(None)
) -> None:
    """Print one table: each map, and each prior that corrects it."""
    pool, pool_labels = arrays["pool_logits"], arrays["pool_labels"]
    test, labels = arrays["test_logits"][rows], arrays["test_labels"][rows]
    n_classes = test.shape[1]
    true = np.bincount(labels, minlength=n_classes)
    print(f"\n{title}: {len(pool_labels):,} pool rows, {len(labels):,} test rows")
    share, source_share = true[shown] / len(labels), np.mean(pool_labels == shown)
    print(
        f"share of class {shown}: {source_share:.3f} in the pool, {share:.3f} in the test\n"
    )
    print("| calibrator | prior | NLL | ECE | accuracy |")
    print("|---|---|---|---|---|")

    def row(scaler: Any, name: str, prior: str) -> None:
        probs = scaler.predict_proba(test)
        measured = [
            negative_log_likelihood(probs, labels),
            expected_calibration_error(probs, labels),
            np.mean(probs.argmax(axis=1) == labels),
        ]
        cells = [name, prior, *(f"{value:.4f}" for value in measured)]
        print("|", " | ".join(cells), "|", flush=True)

    uniform = np.full(n_classes, 1)
    row(PriorCorrection(uniform, uniform), "none", "")
    for name in maps:
        scaler = MAPS[name]().fit(pool, pool_labels)
        assumed = scaler.predict_proba(pool).mean(axis=0)
        row(scaler, name, "")
        row(PriorCorrection(assumed, true / len(labels), scaler), name, "true")


if __name__ == "__main__":
    main()
