"""Classifiers with one logit, whose sigmoid is a probability: rerankers, toxicity scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from hf_calib._errors import check
from hf_calib.models.labels import column_of
from hf_calib.models.reading import Reading
from hf_calib.models.texts import TextClassifier


class OneLogitClassifier(TextClassifier):
    """A sequence classifier with one logit, and its tokenizer."""

    @staticmethod
    def load_processing(source: str | Path, model: Any, *, trust_remote_code: bool) -> Any:
        """The tokenizer; the model is made to say that its logit has a sigmoid, as pipelines take it."""
        if model.config.problem_type is None:
            model.config.problem_type = "multi_label_classification"
        return TextClassifier.load_processing(source, model, trust_remote_code=trust_remote_code)

    def read_labels(self, rows: Dataset, reading: Reading, name: str) -> NDArray[Any]:
        if reading.label_columns or reading.label_separator or reading.no_label:
            return super().read_labels(rows, reading, name)
        values = column_of(rows, "label_column", reading.label_column).to_pylist()
        wrong = [row for row, value in enumerate(values) if value not in (0, 1)]
        got = f"{values[wrong[0]]!r} in row {wrong[0]} ({len(wrong)} such rows)" if wrong else ""
        way_out = "a model with one logit has one probability: write 1 where it should be high, and else 0"
        check(not wrong, f"column {reading.label_column!r} to hold 0 and 1", got, way_out)
        return np.array(values, dtype=np.float32)[:, None]
