"""Post-hoc calibrators on fine-tuned text classifiers, by the number of calibration rows.

    OMP_NUM_THREADS=1 python benchmarks/posthoc.py outputs/posthoc/*.npz --results benchmarks/results/posthoc.csv

The files are those of benchmarks/posthoc_training.py. From the pool of each, calibration sets of
100, 300 and 1,000 rows are drawn --draws times without replacement, and all rows are used once.
Every method is fitted to each set and measured on all test rows. A fit is a line of the results
file. An interrupted run resumes.

It prints one table for no calibrator, the temperature and auto; with --all one for each model and
size. They give means over the draws, and the range of 95% of them. The last two columns compare
with the temperature on the same draw and the same test rows: the mean difference of the NLL, with a
95% interval that resamples the draws and the test rows. For multi-label models, each label of each
row is a decision between two classes, over which everything is averaged; the classwise ECE is the
mean over the labels.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from markdown_lines import table_lines
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
# None: the whole pool.
SIZES = [100, 300, 1000, None]
# The digits of each.
METRICS = {
    "accuracy": 3,
    "nll": 4,
    "brier": 4,
    "ece": 4,
    "classwise_ece": 5,
    "smooth_ece": 4,
}
SETTING = ("model", "n", "size", "draw", "method")
COLUMNS = (*SETTING, "choice", "seconds", *METRICS, "blocks")
# Of test rows, for the interval; their mean losses are kept of each fit.
_BLOCKS = 50

# The columns of one fit.
Result = dict[str, Any]


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


def read(path: Path) -> list[Result]:
    """The results that are there; numbers as numbers."""
    with path.open(newline="") as file:
        rows: list[Result] = list(csv.DictReader(file))
    for row in rows:
        for name in ("seconds", *METRICS):
            row[name] = float(row[name])
        for name in ("size", "draw"):
            row[name] = int(row[name])
        row["n"] = int(row["n"]) if row["n"] else None
        row["choice"] = row["choice"] or None
        row["blocks"] = [float(each) for each in row["blocks"].split()]
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
) -> Iterator[Result]:
    """A result for each model, size, draw and method that is not known yet."""
    for path in paths:
        with np.load(path) as saved:
            pool = saved["pool_logits"]
            pool_labels = saved["pool_labels"]
            test = saved["test_logits"]
            labels = saved["test_labels"]
        methods = ["none", *(SINGLE_LABEL if labels.ndim == 1 else MULTI_LABEL)]
        settings: list[tuple[int | None, int, int]] = []
        for n in SIZES:
            if n is None:
                settings.append((None, len(pool), 0))
            elif n < len(pool):
                settings += [(n, n, draw) for draw in range(draws)]
        for (n, size, draw), method in product(settings, methods):
            if (path.stem, n, draw, method) in known:
                continue
            rows = np.random.default_rng([draw, size]).permutation(len(pool))[:size]
            start = time.perf_counter()
            fitted = probabilities(method, pool[rows], pool_labels[rows], test)
            seconds = time.perf_counter() - start
            probs, choice = fitted
            setting = (path.stem, n, size, draw, method)
            result = dict(zip(SETTING, setting, strict=True))
            result |= {"seconds": seconds, "choice": choice}
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
        of_label = np.where(labels == 1, probs, 1 - probs)
        per_row = -np.log(np.maximum(of_label, 1e-12)).mean(axis=1)
        # Each label is a decision between two classes.
        decisions = [np.stack([1 - column, column], axis=1) for column in probs.T]
        whole = labels.astype(np.int64).T
        errors = map(classwise_calibration_error, decisions, whole)
        classwise = np.mean(list(errors))
        probs = np.concatenate(decisions)
        labels = whole.ravel()
    else:
        of_label = probs[np.arange(len(labels)), labels]
        per_row = -np.log(np.maximum(of_label, 1e-12))
        classwise = classwise_calibration_error(probs, labels)
    blocks = [block.mean() for block in np.array_split(per_row, _BLOCKS)]
    return {
        "accuracy": accuracy(probs, labels),
        "nll": float(per_row.mean()),
        "brier": brier_score(probs, labels),
        "ece": expected_calibration_error(probs, labels),
        "classwise_ece": float(classwise),
        "smooth_ece": smooth_calibration_error(probs, labels),
        "blocks": [round(float(mean), 5) for mean in blocks],
    }


def of_settings(results: list[Result]) -> dict[tuple[str, int | None], list[Result]]:
    """The results of each model and number of rows."""
    found: dict[tuple[str, int | None], list[Result]] = {}
    for result in results:
        found.setdefault((result["model"], result["n"]), []).append(result)
    return found


def of_method(results: list[Result], method: str) -> list[Result]:
    return [result for result in results if result["method"] == method]


def values(results: list[Result], name: str) -> list[float]:
    return [result[name] for result in results]


def summary(results: list[Result]) -> str:
    """One Markdown table: nothing, the temperature and auto, for each model and size."""
    header = ["model, rows"]
    for metric in ("NLL", "ECE", "classwise ECE"):
        header.append(f"{metric}: none, T, auto")
    header += ["NLL, auto less T", "auto chose"]
    rows = []
    for (model, _), here in of_settings(results).items():
        none = of_method(here, "none")
        temperature = of_method(here, "temperature")
        auto = of_method(here, "auto")
        row = [f"{model}, {here[0]['size']:,}"]
        for metric in ("nll", "ece", "classwise_ece"):
            means = [np.mean(values(own, metric)) for own in (none, temperature, auto)]
            digits = METRICS[metric]
            row.append(", ".join(f"{mean:.{digits}f}" for mean in means))
        rows.append([*row, difference(auto, temperature), chosen(auto)])
    return "\n".join(table_lines(header, rows))


def chosen(results: list[Result]) -> str:
    """The maps that "auto" chose and how often; strengths of a penalty count as one map."""
    choices = [result["choice"].split("(")[0] for result in results if result["choice"]]
    return ", ".join(
        f"{choice} {choices.count(choice)}" for choice in sorted(set(choices))
    )


def tables(results: list[Result]) -> Iterator[str]:
    """A Markdown table for each model and size."""
    header = ["method", *METRICS, "NLL less the temperature's", "seconds"]
    found = of_settings(results)
    models = dict.fromkeys(result["model"] for result in results)
    for model, n in product(models, SIZES):
        here = found.get((model, n))
        if here is None:
            continue
        title = f"all {here[0]['size']:,} rows"
        if n is not None:
            title = f"{n:,} rows, {len(set(values(here, 'draw')))} draws"
        rows = []
        for method in dict.fromkeys(values(here, "method")):
            own = of_method(here, method)
            choices = chosen(own)
            row = [f"{method} ({choices})" if choices else method]
            for name, digits in METRICS.items():
                row.append(ranged(values(own, name), digits))
            row.append(difference(own, of_method(here, "temperature")))
            row.append(f"{np.mean(values(own, 'seconds')):.2f}")
            rows.append(row)
        lines = [title, "", *table_lines(header, rows)]
        yield f"**{model}**, " + "\n".join(lines)


def ranged(values: list[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1 or np.ptp(values) < 10**-digits:
        return mean
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{mean} [{low:.{digits}f}, {high:.{digits}f}]"


def difference(own: list[Result], temperature: list[Result]) -> str:
    """The mean difference of the NLL, with an interval over draws and test rows; paired in both."""
    by_draw = {result["draw"]: result["blocks"] for result in temperature}
    gaps = [np.subtract(each["blocks"], by_draw[each["draw"]]) for each in own]
    # (draws, blocks)
    blocks = np.array(gaps)
    n_draws, n_blocks = blocks.shape
    rng = np.random.default_rng(0)
    means = []
    for _ in range(2000):
        draws = rng.integers(n_draws, size=n_draws)
        drawn_blocks = rng.integers(n_blocks, size=n_blocks)
        means.append(blocks[draws][:, drawn_blocks].mean())
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{blocks.mean():+.4f} [{low:+.4f}, {high:+.4f}]"


if __name__ == "__main__":
    main()
