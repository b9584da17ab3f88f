"""Base class of the rules, and the checks of what all of them are fitted on and applied to."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check, few
from hf_calib.decisions.measured import Results
from hf_calib.metrics.checks import FloatArray, IntArray, as_floats, check_probs, check_probs_and_labels


class Rule(ABC):
    """A decision for each row of probabilities: a score and a threshold; subclasses are dataclasses of their options.

    Attributes:
        thresholds_: (C,) float in [0, 1], one for each class; made by `fit`.
    """

    kind: ClassVar[str]  # its name in decisions.json
    fitted: ClassVar[tuple[str, ...]] = ("thresholds_",)  # arrays (C,) that `fit` makes
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

    def measure(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Results of the rule on other rows; see `hf_calib.decisions.measured.TITLES`."""
        return self.measure_decided(self.predict(probs), probs, labels)

    def measure_decided(self, decided: NDArray[Any], probs: ArrayLike, labels: ArrayLike) -> Results:
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
        way_out = "call fit(probs, labels) with calibration rows first"
        check(hasattr(self, "thresholds_"), f"{type(self).__name__} to be fitted", "a new one", way_out)
        return self.thresholds_


class Part(NamedTuple):
    """Rows to fit a rule on, and others to measure it on."""

    probs: ArrayLike
    labels: ArrayLike
    other_probs: ArrayLike
    other_labels: ArrayLike


def measure_parts(rule: Rule, parts: Sequence[Part]) -> Results:
    """A rule on the other rows of all parts, as it was fitted in each; warnings of the fits are left out.

    Of one part: what it does on other data. Of folds: cross-fitting, in which each row is decided by a rule that was
    fitted without it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decided = [copy.copy(rule).fit(part.probs, part.labels).predict(part.other_probs) for part in parts]
    probs = np.concatenate([np.asarray(part.other_probs) for part in parts])
    labels = np.concatenate([np.asarray(part.other_labels) for part in parts])
    return rule.measure_decided(np.concatenate(decided), probs, labels)


def class_rows(probs: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, IntArray]:
    """Check probs (N, C) that sum to 1 in each row, and labels (N,); return both, probs as they are served."""
    checked, targets = check_probs_and_labels(probs, labels)
    way_out = "there is nothing to decide between fewer"
    check(checked.shape[1] > 1, "probs to have at least 2 classes", f"shape {checked.shape}", way_out)
    return _as_served(checked), targets


def class_probs(probs: ArrayLike, n_classes: int) -> FloatArray:
    """Check probs (N, C) to decide on, with the classes of `fit`."""
    return _as_served(check_probs(probs), n_classes)


def label_rows(probs: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Check probs (N, C) of independent labels, and which of them are true, (N, C) of 0 and 1."""
    rows = label_probs(probs)
    targets = as_floats("labels", labels)
    way_out = "pass 0 or 1 for every label of every row"
    check(targets.shape == rows.shape, f"labels to have shape {rows.shape}", targets.shape, way_out)
    wrong = np.argwhere(~np.isin(targets, (0, 1)))
    got = "; ".join(f"{targets[row, column]:g} in row {row}" for row, column in wrong[:1])
    check(not len(wrong), "labels to be 0 or 1", got, "drop rows whose labels are not known")
    return rows, targets == 1


def label_probs(probs: ArrayLike, n_labels: int | None = None) -> FloatArray:
    """Check probs (N, C) of independent labels, each in [0, 1]; return them as they are served."""
    rows = as_floats("probs", probs)
    way_out = "pass one probability per row and label"
    is_matrix = rows.ndim == 2 and rows.size > 0
    check(is_matrix, "probs to have shape (N, C), N >= 1", f"shape {rows.shape}", way_out)
    low, high = rows.min(), rows.max()
    got = f"values from {low:.6g} to {high:.6g}"
    lie_there = low >= 0 and high <= 1 + 1e-6  # false for NaN too
    check(lie_there, "probs to lie in [0, 1]", got, "pass scipy.special.expit(logits)")
    return _as_served(rows, n_labels)


def _as_served(probs: NDArray[Any], n_columns: int | None = None) -> FloatArray:
    """Round probabilities to float32, as a pipeline gives them; in float64, within [0, 1].

    A threshold between two probabilities that differ in float64 only, such as 1 - 1e-9 and 1 - 1e-10, would
    let more rows pass once these are served in float32 than when it was fitted.
    """
    wanted = f"probs to have the {n_columns} columns of fit"
    way_out = "pass probabilities of the model it was fitted for"
    check(n_columns in (None, probs.shape[1]), wanted, f"shape {probs.shape}", way_out)
    return np.clip(probs.astype(np.float32), 0, 1).astype(np.float64)


def listed(numbers: IntArray, noun: str) -> str:
    """Name classes or labels in a warning: "class 3", or "classes 0, 2, 5"."""
    plural = noun if len(numbers) == 1 else {"class": "classes"}.get(noun, f"{noun}s")
    return f"{plural} {few(numbers.tolist())}"


def warn(message: str) -> None:
    """A warning that points to the caller of `fit`."""
    warnings.warn(message, stacklevel=3)


def percent(value: float) -> str:
    """A share as people write it.

    >>> percent(0.95), percent(0.999)
    ('95%', '99.9%')
    """
    return f"{100 * value:.4g}%"
