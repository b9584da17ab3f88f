"""Base class of the rules: what is fitted, and what it takes to save it."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.bootstrap import Interval
from hf_calib.metrics.checks import FloatArray


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
        return self.measure_decided(self.predict(probs), probs, labels)

    def measure_decided(
        self, decided: NDArray[Any], probs: ArrayLike, labels: ArrayLike
    ) -> dict[str, Interval]:
        """The same of decisions on rows, whichever rules of this kind have made them."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The arguments that it was made with, of JSON's own types."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    @property
    def answers_nothing(self) -> bool:
        """Whether every input is handed over, so that there is nothing worth saving."""
        return False

    def _fitted_thresholds(self) -> FloatArray:
        if not hasattr(self, "thresholds_"):
            way_out = "call fit(probs, labels) with calibration rows first"
            raise InputValueError(expected(type(self).__name__, "be fitted", "a new one", way_out))
        return self.thresholds_


class Part(NamedTuple):
    """Rows to fit a rule on, and others to measure it on."""

    probs: ArrayLike
    labels: ArrayLike
    other_probs: ArrayLike
    other_labels: ArrayLike


def measure_parts(rule: Rule, parts: Sequence[Part]) -> dict[str, Interval]:
    """A rule on the other rows of all parts, as it was fitted in each; warnings of the fits are left out.

    Of one part: what it does on other data. Of folds: cross-fitting, in which each row is decided by a rule that was
    fitted without it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decided = [copy.copy(rule).fit(part.probs, part.labels).predict(part.other_probs) for part in parts]
    probs, labels = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in (2, 3))
    return rule.measure_decided(np.concatenate(decided), probs, labels)


def percent(value: float) -> str:
    """A share as people write it.

    >>> percent(0.95), percent(0.999)
    ('95%', '99.9%')
    """
    return f"{100 * value:.4g}%"
