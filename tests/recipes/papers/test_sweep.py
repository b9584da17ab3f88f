"""ECE_sweep against the authors' numbers and against a loop over every number of bins."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from papers.sweep import ece_sweep, sweep_error
from scipy.special import softmax

from tests.helpers.sampled import EXACT, GOLDEN_PREDICTIONS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", GOLDEN_PREDICTIONS)
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_sweep_equals_the_authors_code(golden: Path, name: str, norm: str) -> None:
    with np.load(golden / f"metrics_{name}.npz") as file:
        probs, labels = softmax(file["logits"], axis=1), file["labels"]
        theirs = file[f"ece_sweep_em_{norm}"]
    assert ece_sweep(probs, labels, norm=norm) == pytest.approx(theirs, **EXACT)


@pytest.mark.parametrize(
    "case", ["exact15", "allequal", "ones", "n7", "allcorrect", "allwrong", "nearone"]
)
def test_sweep_of_edge_cases_equals_the_authors_code(golden: Path, case: str) -> None:
    with np.load(golden / "metrics_edges.npz") as file:
        confidences = file[f"{case}__conf"]
        correct = file[f"{case}__correct"].astype(float)
        theirs = file[f"{case}__ece_sweep_em_l1"]
    assert sweep_error(confidences, correct) == pytest.approx(theirs, **EXACT)


def loop_over_numbers_of_bins(
    confidences: np.ndarray, correct: np.ndarray, norm: str
) -> float:
    """The definition: refine until an accuracy is below that of the bin before, then step back."""
    n_examples = len(confidences)
    order = np.argsort(confidences, kind="stable")
    confidences, correct = confidences[order], correct[order]

    def members(n_bins: int) -> list[np.ndarray]:
        bins = np.arange(n_examples) * n_bins // n_examples
        return [np.flatnonzero(bins == m) for m in range(n_bins)]

    found = members(1)
    for n_bins in range(2, n_examples):
        candidate = members(n_bins)
        accuracies = [correct[m].mean() for m in candidate]
        if any(after < before - 1e-12 for before, after in pairwise(accuracies)):
            break
        found = candidate
    power = 1 if norm == "l1" else 2
    total = sum(
        len(m) * abs(confidences[m].mean() - correct[m].mean()) ** power for m in found
    )
    return (total / n_examples) ** (1 / power)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("n_examples", [1, 2, 3, 4, 20, 150])
def test_sweep_equals_a_loop(n_examples: int, norm: str) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        confidences = rng.beta(3, 1, n_examples)
        if seed % 3 == 0:
            confidences = np.round(confidences * 15) / 15  # ties
        chance = (
            confidences,
            confidences > 0.7,
            np.full(n_examples, 0.5),
            confidences**8,
        )[seed % 4]
        correct = (rng.random(n_examples) < chance).astype(float)
        if seed > 9:  # shares of soft labels, without and with order
            correct = (
                rng.random(n_examples) if seed == 10 else np.clip(confidences, 0.6, 0.9)
            )
        ours = sweep_error(confidences, correct, norm=norm)
        assert ours == pytest.approx(
            loop_over_numbers_of_bins(confidences, correct, norm), **EXACT
        )
