"""Base class of the rules: what is fitted, and what it takes to save it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.binning import FloatArray
from hf_calib.metrics.bootstrap import Interval


class Rule(ABC):
    """A decision for each row of probabilities; subclasses are dataclasses of their options.

    Attributes:
        thresholds_: (C,) float in [0, 1], one for each class; made by `fit`.
    """

    kind: ClassVar[str]  # its name in decisions.json
    multi_label: ClassVar[bool] = False

    thresholds_: FloatArray

    @abstractmethod
    def fit(self, probs: ArrayLike, labels: ArrayLike) -> Any:
        """Fit on calibration rows; return the rule itself."""

    @abstractmethod
    def predict(self, probs: ArrayLike) -> NDArray[Any]:
        """Decide on rows of probabilities."""

    @abstractmethod
    def promise(self) -> str:
        """The rule in words, to end a sentence that begins with "It"."""

    def check_rows(self, n_rows: int) -> None:  # noqa: B027, most rules need no number of rows
        """Raise where so few calibration rows cannot keep the promise."""

    def measure(self, probs: ArrayLike, labels: ArrayLike) -> dict[str, Interval]:
        """Results of the rule on other rows; see `hf_calib.decisions.measured.TITLES`."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The arguments that it was made with, of JSON's own types."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    def _fitted_thresholds(self) -> FloatArray:
        if not hasattr(self, "thresholds_"):
            way_out = "call fit(probs, labels) with calibration rows first"
            raise InputValueError(expected(type(self).__name__, "be fitted", "a new one", way_out))
        return self.thresholds_


def percent(value: float) -> str:
    """A share as people write it.

    >>> percent(0.95), percent(0.999)
    ('95%', '99.9%')
    """
    return f"{100 * value:.4g}%"
