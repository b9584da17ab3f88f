"""Studies on disk as `compare_losses.py` leaves them, of simulated trainings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from compare_losses import Run
from numpy.typing import NDArray

from hf_calib.predictions.training import TrainingPredictions
from tests.helpers.unchecked import unchecked


class Task:
    """Rows whose true class probabilities are known, and trainings that learn them more or less well."""

    def __init__(
        self,
        n_test: int = 300,
        n_calibration: int = 200,
        n_classes: int = 3,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.n_test = n_test
        self._true_logits = 1.5 * rng.normal(size=(n_test + n_calibration, n_classes))
        self.labels = (
            self._true_logits + rng.gumbel(size=self._true_logits.shape)
        ).argmax(axis=1)

    def train(
        self,
        seed: int,
        *,
        sharpness: float = 1.5,
        row_noise: float = 0.7,
        seed_effect: float = 0.05,
    ) -> TrainingPredictions:
        """Predictions of a training: over-confident by default, by its seed more or less, and wrong about each row."""
        rng = np.random.default_rng([seed, 1])
        factor = sharpness * np.exp(seed_effect * rng.normal())
        logits = factor * (
            self._true_logits + row_noise * rng.normal(size=self._true_logits.shape)
        )
        return self.predictions(logits)

    def predictions(self, logits: NDArray[Any]) -> TrainingPredictions:
        """Those of logits of all rows, the test rows first."""
        rows = logits.astype(np.float32)
        names = tuple(f"class {c}" for c in range(logits.shape[1]))
        test, calibration = (
            unchecked(rows[part], self.labels[part], class_names=names)
            for part in (slice(self.n_test), slice(self.n_test, None))
        )
        return TrainingPredictions(test, calibration)


def write_study(
    folder: Path, trainings: Mapping[tuple[str, int], TrainingPredictions | None]
) -> list[Run]:
    """Write the runs as `compare_losses.py` leaves them; one that is None has not finished."""
    runs = []
    for (loss, seed), predictions in trainings.items():
        path = folder / "runs" / f"{loss}-seed{seed}"
        path.mkdir(parents=True)
        runs.append(Run(loss, seed, path, (), ()))
        (path / "run.json").write_text(json.dumps({"loss": loss, "seed": seed}))
        if predictions is not None:
            predictions.save(path / "predictions.safetensors")
            (path / "results.json").write_text("{}")
    return runs
