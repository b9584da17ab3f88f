"""Coverage and accuracy of an abstention rule, before and after calibration, on saved logits.

    python benchmarks/decisions.py outputs/posthoc/clinc150-0.npz outputs/posthoc/ag_news-0.npz

Each file holds pool_logits (N, C), pool_labels (N,), test_logits and test_labels, as benchmarks/posthoc_training.py
writes them. In each of 20 rounds, a random half of the pool fits the scaler and the other half fits the rule
(`AbstainRule`, delta 0.05); coverage and accuracy are measured on the test rows. "short" counts the rounds in which the
accuracy on the test rows was below the promised one. This is partly due to chance, since the test rows are a sample.

If the test rows have other class frequencies than the pool, the promise does not hold. This is the case for clinc150,
where 3% of the validation texts and 18% of the test texts are out of scope. A second table per file is therefore for
a pool and a test set that are drawn from both together.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from scipy.special import softmax

from hf_calib.decisions import AbstainRule
from hf_calib.decisions.promise import rows_needed
from hf_calib.scaling import SCALERS

METHODS = ("temperature", "vector", "auto")
ACCURACIES = (0.95, 0.99)
N_ROUNDS = 20

Rows = tuple[np.ndarray, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--methods", nargs="+", default=[name for name in METHODS if name in SCALERS]
    )
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # where nothing can be promised, the table says 0
    for path in args.files:
        with np.load(path) as file:
            pool, test = (
                (file[f"{name}_logits"], file[f"{name}_labels"])
                for name in ("pool", "test")
            )
        for title, splits in (("as split", as_split), ("mixed", mixed)):
            report(
                f"{path.stem}, {title}", pool, test, splits, args.methods, args.rounds
            )


def as_split(pool: Rows, test: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    return pool, test


def mixed(pool: Rows, test: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """The rows of both, dealt out anew."""
    logits, labels = (np.concatenate(parts) for parts in zip(pool, test, strict=True))
    order = rng.permutation(len(labels))
    return tuple(
        (logits[rows], labels[rows]) for rows in np.split(order, [len(pool[1])])
    )


def report(
    title: str,
    pool: Rows,
    test: Rows,
    splits: Callable[..., tuple[Rows, Rows]],
    methods: list[str],
    n_rounds: int,
) -> None:
    """Print a row for each promised accuracy and method: means over the rounds, and their standard deviation."""
    print(
        f"\n**{title}: {len(pool[1]):,} pool rows, {len(test[1]):,} test rows, {n_rounds} rounds**\n"
    )
    print(
        f"| promised | method | answered | accuracy of the answers | short of it |\n|{'---|' * 5}"
    )
    found: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for seed in range(n_rounds):
        rng = np.random.default_rng(seed)
        for key, *result in one_round(*splits(pool, test, rng), methods, rng):
            found.setdefault(key, []).append(tuple(result))
    for (promised, method), rows in sorted(found.items(), key=lambda item: item[0][0]):
        answered, accuracy = np.array(rows).T
        kept = accuracy[~np.isnan(accuracy)]
        shown = f"{kept.mean():.4f} ± {kept.std():.4f}" if len(kept) else "none"
        short = f"{(kept < promised).sum()}/{len(kept)}"
        cells = [
            promised,
            method,
            f"{answered.mean():.4f} ± {answered.std():.4f}",
            shown,
            short,
        ]
        print(f"| {' | '.join(map(str, cells))} |")


def one_round(
    pool: Rows, test: Rows, methods: list[str], rng: np.random.Generator
) -> Iterator[tuple[tuple[float, str], float, float]]:
    """(promised, method), the share answered, and the accuracy of the answers, NaN where there are none."""
    order = rng.permutation(len(pool[1]))
    calibrating, fitting = np.array_split(order, 2)
    for method in ("uncalibrated", *methods):
        if method == "uncalibrated":
            probabilities = lambda logits: softmax(logits.astype(np.float64), axis=1)  # noqa: E731
        else:
            scaler = (
                SCALERS[method].load()().fit(pool[0][calibrating], pool[1][calibrating])
            )
            probabilities = scaler.predict_proba
        probs, other_probs = probabilities(pool[0][fitting]), probabilities(test[0])
        for accuracy in ACCURACIES:
            if len(fitting) < rows_needed(accuracy, 0.05):
                continue
            rule = AbstainRule(accuracy=accuracy).fit(probs, pool[1][fitting])
            measured = rule.measure(other_probs, test[1])
            kept = (
                measured["accuracy"].value if "accuracy" in measured else float("nan")
            )
            yield (accuracy, method), measured["answered"].value, kept


if __name__ == "__main__":
    main()
