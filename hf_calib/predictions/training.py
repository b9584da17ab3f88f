"""predictions.safetensors: a trained model's logits of its calibration and test rows,
with their labels.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from hf_calib._errors import InputValueError, check, expected
from hf_calib._files import whole_file
from hf_calib.predictions.predictions import Predictions

PREDICTIONS = "predictions.safetensors"
_ARRAYS = ("logits", "labels", "sentences")


@dataclass(frozen=True, eq=False)
class TrainingPredictions:
    """The predictions of a finished run.

    Args:
        test: predictions of the test rows, not validated, because the logits of a diverged run are
            NaN.
        calibration: predictions of the calibration rows; None if the run had none.
    """

    test: Predictions
    calibration: Predictions | None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The C class names."""
        return self.test.names

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, completely or not at all."""
        rows = {"test": self.test, "calibration": self.calibration}
        found = {
            f"{split}_{name}": getattr(each, name, None)
            for split, each in rows.items()
            for name in _ARRAYS
        }
        arrays = {
            name: np.ascontiguousarray(each)
            for name, each in found.items()
            if each is not None
        }
        with whole_file(Path(path)) as unfinished:
            save_file(arrays, unfinished, {"class_names": json.dumps(self.class_names)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainingPredictions:
        """Load a file of `save`.

        Raises:
            ValueError: if the file is missing or unreadable, or its arrays do not fit together.

        >>> import tempfile
        >>> rows = Predictions(np.array([0, 1]), logits=np.eye(2, dtype=np.float32), class_names=("a", "b"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TrainingPredictions(rows, None).save(Path(folder, PREDICTIONS))
        ...     TrainingPredictions.load(Path(folder, PREDICTIONS)).test.labels.tolist()
        [0, 1]
        """
        requirement, way_out = (
            "hold the predictions of a run",
            "train again, or remove the file",
        )
        try:
            with safe_open(path, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                names = tuple(json.loads(file.metadata()["class_names"]))
        # The file may be missing, damaged or another one.
        except Exception as error:
            got = f"a file that cannot be read ({error})"
            raise InputValueError(
                expected(str(path), requirement, got, way_out)
            ) from error
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())

        def rows(split: str) -> Predictions:
            # An empty array stands for one that is not in the file.
            logits, labels, sentences = (
                arrays.get(f"{split}_{name}", np.empty(0)) for name in _ARRAYS
            )
            fits = logits.shape == (len(labels), len(names)) and labels.ndim in (1, 2)
            fits = fits and (not len(sentences) or sentences.shape == labels.shape)
            check(
                fits,
                f"{path} to {requirement}",
                f"{shapes} for {len(names)} classes",
                way_out,
            )
            about: Any = {
                "class_names": names,
                "sentences": sentences if len(sentences) else None,
            }
            return Predictions(labels, logits=logits, **about, validate=False)

        return cls(
            rows("test"),
            rows("calibration") if "calibration_logits" in arrays else None,
        )
