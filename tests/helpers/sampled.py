"""Predictions whose labels were drawn from known probabilities, and where the metrics' golden values are."""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

EXACT = {
    "rel": 1e-12,
    "abs": 1e-14,
}  # for pytest.approx: equal but for rounding in float64

GOLDEN_PREDICTIONS = [
    "N5000_K10",
    "N2000_K100",
    "N300_K2",
    "missing_last_class_N400_K10",
]
GOLDEN_EDGE_CASES = [
    "exact15",
    "allequal",
    "ones",
    "n7",
    "n1",
    "discrete5",
    "allcorrect",
    "allwrong",
    "nearone",
]


def random_predictions(
    n_examples: int, n_classes: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and labels that have nothing to do with them."""
    rng = np.random.default_rng(seed)
    probs = softmax(3 * rng.standard_normal((n_examples, n_classes)), axis=1)
    return probs, rng.integers(0, n_classes, n_examples)


def two_classes(
    confidences: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of two classes, and labels, 0 where a confidence is right."""
    return np.stack([confidences, 1 - confidences], axis=1), np.where(right, 0, 1)


def sampled(
    n: int, c: int, temperature: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `temperature` times the ones which the labels were drawn from."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2, size=(n, c))
    return logits * temperature, (logits + rng.gumbel(size=(n, c))).argmax(axis=1)


def labels_by(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A label (N,) for each row of probs (N, C), drawn by it."""
    return (
        (rng.random((len(probs), 1)) > probs.cumsum(axis=1))
        .sum(axis=1)
        .clip(0, probs.shape[1] - 1)
    )


def predictions(
    n_examples: int = 400, n_classes: int = 4, temperature: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities at a temperature, and labels drawn from those at temperature 1."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((n_examples, n_classes))
    truth = softmax(logits, axis=1)
    return softmax(logits / temperature, axis=1), labels_by(truth, rng)
