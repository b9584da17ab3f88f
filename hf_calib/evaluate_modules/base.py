"""Base class of the modules. Each of them names its function and the key of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import Features, Value
from datasets import Sequence as SequenceFeature

INPUTS = """
Args:
    predictions: probabilities (N, C), rows that sum to 1; not logits.
    references: class indices (N,), in [0, C).
    Further arguments are those of the function in hf_calib.metrics, such as n_bins.
"""


class ProbabilityMetric(evaluate.Metric):
    """A metric of probabilities (N, C) and class indices (N,)."""

    key: ClassVar[str]
    function: ClassVar[Callable[..., float]]
    citation: ClassVar[str] = ""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=str(type(self).__doc__),
            citation=self.citation,
            inputs_description=INPUTS,
            features=Features(
                {"predictions": SequenceFeature(Value("float64")), "references": Value("int64")}
            ),
        )

    def _compute(
        self, predictions: Sequence[Sequence[float]], references: Sequence[int], **options: Any
    ) -> dict[str, float]:
        probs, labels = np.asarray(predictions, dtype=np.float64), np.asarray(references, dtype=np.int64)
        return {self.key: type(self).function(probs, labels, **options)}
