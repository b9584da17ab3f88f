"""Coverage and accuracy of an abstention rule, before and after calibration, on saved logits.

    python benchmarks/decisions.py outputs/posthoc/clinc150-0.npz outputs/posthoc/ag_news-0.npz

Each file holds pool_logits (N, C), pool_labels (N,), test_logits and test_labels, as
benchmarks/posthoc_training.py writes them. In each of 20 rounds, a random half of the pool fits the
scaler and the other half fits the rule (`AbstainRule`, delta 0.05); coverage and accuracy are
measured on the test rows. "short" counts the rounds in which the accuracy on the test rows was
below the promised one. This is partly due to chance, since the test rows are a sample.

If the test rows have other class frequencies than the pool, the promise does not hold. This is the
case for clinc150, where 3% of the validation texts and 18% of the test texts are out of scope. A
second table per file is therefore for a pool and a test set that are drawn from both together.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from markdown_lines import table_lines
from scipy.special import softmax

from hf_calib.decisions import AbstainRule
from hf_calib.decisions.promise import rows_needed
from hf_calib.scaling import SCALERS

METHODS = ("temperature", "vector", "auto")
ACCURACIES = (0.95, 0.99)
N_ROUNDS = 20

Rows = tuple[np.ndarray, np.ndarray]


class Found(NamedTuple):
    """One round: the promised accuracy, the share answered, and the accuracy of the answers, NaN for none."""

    promised: float
    method: str
    answered: float
    accuracy: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    args = parser.parse_args()
    # Where nothing can be promised, the table says 0.
    warnings.simplefilter("ignore")
    for path in args.files:
        with np.load(path) as file:
            pool = file["pool_logits"], file["pool_labels"]
            test = file["test_logits"], file["test_labels"]
        for title, splits in (("as split", as_split), ("mixed", mixed)):
            found = []
            for seed in range(args.rounds):
                rng = np.random.default_rng(seed)
                found += one_round(*splits(pool, test, rng), args.methods, rng)
            sizes = f"{len(pool[1]):,} pool rows, {len(test[1]):,} test rows"
            print(f"\n**{path.stem}, {title}: {sizes}, {args.rounds} rounds**\n")
            print_table(found)


def as_split(pool: Rows, test: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    return pool, test


def mixed(pool: Rows, test: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """The rows of both, dealt out anew."""
    logits = np.concatenate([pool[0], test[0]])
    labels = np.concatenate([pool[1], test[1]])
    order = rng.permutation(len(labels))
    first = order[: len(pool[1])]
    second = order[len(pool[1]) :]
    return (logits[first], labels[first]), (logits[second], labels[second])


def one_round(
    pool: Rows, test: Rows, methods: list[str], rng: np.random.Generator
) -> Iterator[Found]:
    logits, labels = pool
    test_logits, test_labels = test
    calibrating, fitting = np.array_split(rng.permutation(len(labels)), 2)
    for method in ("uncalibrated", *methods):
        probabilities = as_trained
        if method != "uncalibrated":
            scaler = SCALERS[method].load()()
            scaler.fit(logits[calibrating], labels[calibrating])
            probabilities = scaler.predict_proba
        probs = probabilities(logits[fitting])
        test_probs = probabilities(test_logits)
        for promised in ACCURACIES:
            if len(fitting) < rows_needed(promised, 0.05):
                continue
            rule = AbstainRule(accuracy=promised).fit(probs, labels[fitting])
            measured = rule.measure(test_probs, test_labels)
            accuracy = float("nan")
            if "accuracy" in measured:
                accuracy = measured["accuracy"].value
            yield Found(promised, method, measured["answered"].value, accuracy)


def as_trained(logits: np.ndarray) -> np.ndarray:
    return softmax(logits.astype(np.float64), axis=1)


def print_table(found: list[Found]) -> None:
    """A row for each promised accuracy and method: means over the rounds, and their standard deviation."""
    by_row: dict[tuple[float, str], list[Found]] = {}
    for each in found:
        by_row.setdefault((each.promised, each.method), []).append(each)
    rows = []
    for promised, method in sorted(by_row, key=lambda row: row[0]):
        rounds = by_row[promised, method]
        answered = spread([each.answered for each in rounds])
        kept = [each.accuracy for each in rounds if not np.isnan(each.accuracy)]
        accuracy = spread(kept) if kept else "none"
        n_short = sum(each < promised for each in kept)
        short = f"{n_short}/{len(kept)}"
        rows.append([str(promised), method, answered, accuracy, short])
    header = [
        "promised",
        "method",
        "answered",
        "accuracy of the answers",
        "short of it",
    ]
    print(*table_lines(header, rows), sep="\n")


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.4f} ± {np.std(values):.4f}"


if __name__ == "__main__":
    main()
