"""Post-hoc calibrators on fine-tuned text classifiers, by the number of calibration rows.

    OMP_NUM_THREADS=1 python benchmarks/posthoc.py outputs/posthoc/*.npz --results benchmarks/results/posthoc.csv

The files are those of benchmarks/posthoc_training.py. From the pool of each, calibration sets of 100, 300 and 1,000
rows are drawn --draws times without replacement, and all rows are used once. Every method is fitted to each set and
measured on all test rows. A fit is a line of the results file. An interrupted run resumes.

It prints one table for no calibrator, the temperature and auto; with --all one for each model and size. They give
means over the draws, and the range of 95% of them. The last two columns compare with the temperature on the same draw
and the same test rows: the mean difference of the NLL, with a 95% interval that resamples the draws and the test
rows. For multi-label models, each label of each row is a decision between two classes, over which everything is
averaged; the classwise ECE is the mean over the labels.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from hf_calib.metrics import (
    accuracy,
    brier_score,
    classwise_calibration_error,
    expected_calibration_error,
    smooth_calibration_error,
)
from hf_calib.scaling import SCALERS

SINGLE_LABEL = [
    "temperature",
    "structured_vector",
    "vector",
    "structured_matrix",
    "matrix",
    "auto",
]
MULTI_LABEL = ["temperature", "per_label_temperature", "structured_vector", "auto"]
SIZES = [100, 300, 1000, None]  # None: the whole pool
METRICS = {
    "accuracy": 3,
    "nll": 4,
    "brier": 4,
    "ece": 4,
    "classwise_ece": 5,
    "smooth_ece": 4,
}  # digits
COLUMNS = (
    "model",
    "n",
    "size",
    "draw",
    "method",
    "choice",
    "seconds",
    *METRICS,
    "blocks",
)
_BLOCKS = 50  # of test rows, for the interval; their mean losses are kept of each fit


def main() -> None:
    args = parse_args()
    done = read(args.results) if args.results.exists() else []
    known = {(r["model"], r["n"], r["draw"], r["method"]) for r in done}
    if args.models:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with args.results.open("a", newline="") as file:
            lines = csv.writer(file)
            if not done:
                lines.writerow(COLUMNS)
            for result in measured(args.models, args.draws, known):
                lines.writerow([as_text(result[name]) for name in COLUMNS])
                file.flush()
                done.append(result)
    print("\n\n".join([summary(done), *(tables(done) if args.all else [])]))


def as_text(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(f"{each:.5f}" for each in value)
    return f"{value:.6g}" if isinstance(value, float) else value


def read(path: Path) -> list[dict[str, Any]]:
    """The results that are there; numbers as numbers."""
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: float(row[name]) for name in ("seconds", *METRICS)}
        row |= {
            "n": int(row["n"]) if row["n"] else None,
            "size": int(row["size"]),
            "draw": int(row["draw"]),
        }
        row |= {
            "choice": row["choice"] or None,
            "blocks": [float(each) for each in row["blocks"].split()],
        }
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models",
        nargs="*",
        type=Path,
        help="files of posthoc_training.py; none: only print",
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument(
        "--draws", type=int, default=10, help="calibration sets of each size"
    )
    parser.add_argument(
        "--all", action="store_true", help="print a table for each model and size, too"
    )
    return parser.parse_args()


def measured(
    paths: list[Path], draws: int, known: set[tuple[Any, ...]]
) -> Iterator[dict[str, Any]]:
    """A result for each model, size, draw and method that is not known yet."""
    for path in paths:
        with np.load(path) as saved:
            pool, pool_labels, test, labels = (
                saved[name]
                for name in ("pool_logits", "pool_labels", "test_logits", "test_labels")
            )
        multi_label = labels.ndim == 2
        for n in SIZES:
            size = len(pool) if n is None else n
            if n is not None and n >= len(pool):
                continue
            for draw in range(1 if n is None else draws):
                rows = np.random.default_rng([draw, size]).permutation(len(pool))[:size]
                for method in ["none", *(MULTI_LABEL if multi_label else SINGLE_LABEL)]:
                    if (path.stem, n, draw, method) in known:
                        continue
                    start = time.perf_counter()
                    probs, choice = probabilities(
                        method, pool[rows], pool_labels[rows], test
                    )
                    result = {
                        "model": path.stem,
                        "n": n,
                        "size": size,
                        "draw": draw,
                        "method": method,
                    }
                    result |= {"seconds": time.perf_counter() - start, "choice": choice}
                    yield result | measures(probs, labels)


def probabilities(
    method: str, logits: NDArray[Any], labels: NDArray[Any], test: NDArray[Any]
) -> tuple[NDArray[np.float64], str | None]:
    """Probabilities of the test rows, and what "auto" has chosen."""
    multi_label = labels.ndim == 2
    if method == "none":
        test = test.astype(np.float64)
        return expit(test) if multi_label else softmax(test, axis=1), None
    scaler = SCALERS[method].load()
    takes = "multi_label" in scaler().get_params()
    scaler = scaler(multi_label=multi_label) if takes else scaler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes without an example
        scaler.fit(logits, labels)
    return scaler.predict_proba(test), getattr(scaler, "choice_", None)


def measures(probs: NDArray[np.float64], labels: NDArray[Any]) -> dict[str, Any]:
    """The metrics, and the mean negative log-likelihoods of `_BLOCKS` blocks of the test rows."""
    if labels.ndim == 2:
        own = np.where(labels == 1, probs, 1 - probs)
        per_row = -np.log(np.maximum(own, 1e-12)).mean(axis=1)
        columns = [np.stack([1 - column, column], axis=1) for column in probs.T]
        whole = labels.astype(np.int64)
        classwise = np.mean(
            [
                classwise_calibration_error(p, y)
                for p, y in zip(columns, whole.T, strict=True)
            ]
        )
        probs, labels = np.concatenate(columns), whole.T.ravel()
    else:
        per_row = -np.log(np.maximum(probs[np.arange(len(labels)), labels], 1e-12))
        classwise = classwise_calibration_error(probs, labels)
    return {
        "accuracy": accuracy(probs, labels),
        "nll": float(per_row.mean()),
        "brier": brier_score(probs, labels),
        "ece": expected_calibration_error(probs, labels),
        "classwise_ece": float(classwise),
        "smooth_ece": smooth_calibration_error(probs, labels),
        "blocks": [
            round(float(block.mean()), 5) for block in np.array_split(per_row, _BLOCKS)
        ],
    }


def summary(results: list[dict[str, Any]]) -> str:
    """One Markdown table: nothing, the temperature and auto, for each model and size."""
    head = [
        "model, rows",
        *(f"{metric}: none, T, auto" for metric in ("NLL", "ECE", "classwise ECE")),
    ]
    head += ["NLL, auto less T", "auto chose"]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for model, n, size in dict.fromkeys(
        (r["model"], r["n"], r["size"]) for r in results
    ):
        here = [
            result for result in results if (result["model"], result["n"]) == (model, n)
        ]
        by_method = {
            method: [result for result in here if result["method"] == method]
            for method in ("none", "temperature", "auto")
        }
        cells = [f"{model}, {size:,}"]
        for metric in ("nll", "ece", "classwise_ece"):
            means = [
                np.mean([result[metric] for result in own])
                for own in by_method.values()
            ]
            cells.append(", ".join(f"{mean:.{METRICS[metric]}f}" for mean in means))
        cells += [
            difference(by_method["auto"], by_method["temperature"]),
            chosen(by_method["auto"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def chosen(results: list[dict[str, Any]]) -> str:
    """The maps that "auto" chose and how often; strengths of a penalty count as one map."""
    choices = [result["choice"].split("(")[0] for result in results if result["choice"]]
    return ", ".join(
        f"{choice} {choices.count(choice)}" for choice in sorted(set(choices))
    )


def tables(results: list[dict[str, Any]]) -> Iterator[str]:
    """A Markdown table for each model and size."""
    for model in dict.fromkeys(result["model"] for result in results):
        for n in SIZES:
            here = [
                result
                for result in results
                if (result["model"], result["n"]) == (model, n)
            ]
            if not here:
                continue
            draws = len({result["draw"] for result in here})
            rows = [
                f"all {here[0]['size']:,} rows"
                if n is None
                else f"{n:,} rows, {draws} draws"
            ]
            head = ["method", *METRICS, "NLL less the temperature's", "seconds"]
            rows += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
            temperature = [
                result for result in here if result["method"] == "temperature"
            ]
            for method in dict.fromkeys(result["method"] for result in here):
                own = [result for result in here if result["method"] == method]
                cells = [
                    ranged([result[name] for result in own], digits)
                    for name, digits in METRICS.items()
                ]
                label = f"{method} ({choices})" if (choices := chosen(own)) else method
                cells += [
                    difference(own, temperature),
                    f"{np.mean([r['seconds'] for r in own]):.2f}",
                ]
                rows.append(f"| {' | '.join([label, *cells])} |")
            yield f"**{model}**, " + "\n".join(rows)


def ranged(values: list[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1 or np.ptp(values) < 10**-digits:
        return mean
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{mean} [{low:.{digits}f}, {high:.{digits}f}]"


def difference(own: list[dict[str, Any]], temperature: list[dict[str, Any]]) -> str:
    """The mean difference of the NLL, with an interval over draws and test rows; paired in both."""
    by_draw = {result["draw"]: np.array(result["blocks"]) for result in temperature}
    blocks = np.array(
        [np.array(result["blocks"]) - by_draw[result["draw"]] for result in own]
    )
    rng = np.random.default_rng(0)
    means = []
    for _ in range(2000):
        draws = rng.integers(len(blocks), size=len(blocks))
        means.append(
            blocks[draws][:, rng.integers(blocks.shape[1], size=blocks.shape[1])].mean()
        )
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{blocks.mean():+.4f} [{low:+.4f}, {high:+.4f}]"


if __name__ == "__main__":
    main()
