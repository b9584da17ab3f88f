"""Prior correction on real models, where test rows have other class frequencies than calibration rows.

    python benchmarks/prior_shift.py outputs/posthoc

The folder contains clinc150-0.npz and ag_news-0.npz from benchmarks/posthoc_training.py. Calibrators are fitted to
the pool of each, which has the class frequencies of the source. The test rows are those of clinc150 (18% out of
scope, 3% in the pool), those of AG News (no shift), and those of AG News sampled so that the classes have 60, 20, 15
and 5%. The estimates use no test label. "true" uses the true shares of the test rows; "covered" is the share of
classes whose true share is in the interval; s is the time of the fit or of the estimate with its 200 resamples.
"""

from __future__ import annotations

import argparse
import time
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
    estimate_prior,
)

MAPS = {"temperature": TemperatureScaling, "vector": VectorScaling, "auto": AutoScaling}
SHARES = (0.60, 0.20, 0.15, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--maps", nargs="+", default=list(MAPS), choices=list(MAPS))
    args = parser.parse_args()
    warnings.simplefilter(
        "ignore", UserWarning
    )  # separable data, and corrections that are refused, are in the table
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
    print(
        f"| calibrator | prior | share of class {shown} [95%] | sum of errors | covered | p | NLL | ECE "
        "| accuracy | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")

    def row(scaler: Any, *cells: str, seconds: float = 0) -> None:
        probs = scaler.predict_proba(test)
        measured = [
            negative_log_likelihood(probs, labels),
            expected_calibration_error(probs, labels),
        ]
        measured.append(np.mean(probs.argmax(axis=1) == labels))
        print(
            "|",
            " | ".join([*cells, *(f"{x:.4f}" for x in measured), f"{seconds:.1f}"]),
            "|",
            flush=True,
        )

    uniform = np.full(n_classes, 1)
    row(PriorCorrection(uniform, uniform), "none", "", "", "", "", "")
    for name in maps:
        start = time.perf_counter()
        scaler = MAPS[name]().fit(pool, pool_labels)
        row(scaler, name, "", "", "", "", "", seconds=time.perf_counter() - start)
        source = {
            "source_probs": scaler.predict_proba(pool),
            "source_labels": pool_labels,
        }
        assumed = source["source_probs"].mean(axis=0)
        row(
            PriorCorrection(assumed, true / len(labels), scaler),
            name,
            "true",
            f"{share:.3f}",
            "0",
            "",
            "",
        )
        start = time.perf_counter()
        found = estimate_prior(scaler.predict_proba(test), **source)
        low, high = found.interval.T
        covered = np.mean((low <= true / len(labels)) & (true / len(labels) <= high))
        cells = [
            f"{found.prior[shown]:.3f} [{low[shown]:.3f}, {high[shown]:.3f}]",
            f"{np.abs(found.prior - true / len(labels)).sum():.3f}",
            f"{covered:.2f}",
            f"{found.p_value:.3f}" + (", refused" if not found.shifted else ""),
        ]
        row(
            found.correction(scaler),
            name,
            "em",
            *cells,
            seconds=time.perf_counter() - start,
        )


if __name__ == "__main__":
    main()
