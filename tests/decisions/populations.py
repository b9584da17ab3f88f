"""Finite populations to draw calibration rows from: of these, how often a rule is right is known, not estimated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SIZE = 200_000

Population = tuple[np.ndarray, np.ndarray]


def population(
    accuracy_at: Callable[[np.ndarray], np.ndarray],
    *,
    decimals: int | None = None,
    n_classes: int = 4,
    seed: int = 0,
) -> Population:
    """probs (SIZE, C) and labels: the top class is right with probability accuracy_at(its confidence)."""
    rng = np.random.default_rng(seed)
    confidences = 1 - 0.6 * rng.beta(0.6, 1.5, SIZE)
    if decimals is not None:
        confidences = confidences.round(decimals)
    predicted = rng.integers(n_classes, size=SIZE)
    right = rng.random(SIZE) < accuracy_at(confidences)
    probs = np.repeat(((1 - confidences) / (n_classes - 1))[:, None], n_classes, axis=1)
    probs[np.arange(SIZE), predicted] = confidences
    labels = np.where(right, predicted, (predicted + rng.integers(1, n_classes, SIZE)) % n_classes)
    return probs, labels


POPULATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "calibrated": lambda c: c,
    "over-confident": lambda c: 0.55 + 0.45 * c**4,
    "under-confident": lambda c: 1 - (1 - c) ** 2,
    "always at the promise": lambda c: np.full(len(c), 0.8999),
    # The most confident rows are wrong more often than the others.
    "not monotone": lambda c: np.where(c > 0.97, 0.85, np.where(c > 0.8, 0.97, 0.6)),
    "waves": lambda c: np.where((c * 50).astype(int) % 2 == 0, 0.8, 0.995),
}
