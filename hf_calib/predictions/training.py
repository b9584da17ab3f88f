"""predictions.safetensors: what a trained model says of its calibration and test rows, with their labels."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hf_calib._errors import InputValueError, expected
from hf_calib._files import whole_file
from hf_calib.predictions.predictions import Predictions

PREDICTIONS = "predictions.safetensors"
_WAY_OUT = "train again, or remove the file"


@dataclass(frozen=True, eq=False)
class TrainingPredictions:
    """The predictions that a finished training leaves.

    Args:
        test: logits of the rows that are reported, not validated: those of a training that diverged are NaN.
        calibration: of the rows that a map may be fitted on; None where the training had none.
    """

    test: Predictions
    calibration: Predictions | None

    @property
    def class_names(self) -> tuple[str, ...]:
        """C of them."""
        return self.test.names

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, all of it or nothing."""
        arrays = {
            f"{split}_{name}": array
            for split, rows in (("test", self.test), ("calibration", self.calibration))
            if rows is not None
            for name in ("logits", "labels", "sentences")
            if (array := getattr(rows, name)) is not None
        }
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        with whole_file(Path(path)) as unfinished:
            save_file(contiguous, unfinished, {"class_names": json.dumps(self.class_names)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainingPredictions:
        """Read what `save` wrote.

        Raises:
            ValueError: if the file is missing, unreadable, or its arrays do not go together.

        >>> import tempfile
        >>> rows = Predictions(np.array([0, 1]), logits=np.eye(2, dtype=np.float32), class_names=("a", "b"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TrainingPredictions(rows, None).save(Path(folder, PREDICTIONS))
        ...     TrainingPredictions.load(Path(folder, PREDICTIONS)).test.labels.tolist()
        [0, 1]
        """
        requirement = "hold a training's predictions"
        try:
            with safe_open(path, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                names = tuple(json.loads((file.metadata() or {})["class_names"]))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            got = f"a file that cannot be read ({error})"
            raise InputValueError(expected(str(path), requirement, got, _WAY_OUT)) from error

        def rows(split: str) -> Predictions:
            logits, labels = (arrays.get(f"{split}_{kind}", np.empty(())) for kind in ("logits", "labels"))
            sentences = arrays.get(f"{split}_sentences")
            fits = logits.ndim == 2 and labels.ndim in (1, 2) and len(labels) == len(logits)
            fits = fits and (sentences is None or sentences.shape == labels.shape)
            if not fits or logits.shape[1] != len(names):
                shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
                got = f"{shapes} for {len(names)} classes"
                raise InputValueError(expected(str(path), requirement, got, _WAY_OUT))
            return Predictions(labels, logits=logits, class_names=names, sentences=sentences, validate=False)

        return cls(rows("test"), rows("calibration") if "calibration_logits" in arrays else None)
