"""Abstention: answer where the answers are right often enough, hand over the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib.decisions._inputs import class_probs, class_rows, listed, warn
from hf_calib.decisions._promise import (
    MOST_TIMES,
    NEVER,
    certified_threshold,
    check_promise,
    check_rows_for,
    rows_needed,
    rows_to_answer,
)
from hf_calib.decisions._rule import Part, Rule, measure_parts, percent
from hf_calib.decisions.measured import PromiseCurve, answers
from hf_calib.metrics._inputs import check_flag
from hf_calib.metrics.binning import FloatArray, IntArray
from hf_calib.metrics.bootstrap import Interval
from hf_calib.metrics.calibration import winners


@dataclass(kw_only=True, eq=False)
class AbstainRule(Rule):
    r"""Answer with the most probable class where its probability is high enough; else -1, "hand over".

    For "answer when you are 95% right". The threshold is the lowest confidence above which the answers are
    right at least that often, and that is promised, not estimated: among users who each draw calibration rows
    of their own, at most a share `delta` gets a rule whose answers are right less often,

    $$P\big(\,P(\text{right} \mid \text{answered}) \ge a\,\big) \ge 1 - \delta.$$

    The promise holds whether or not the probabilities are calibrated: it only needs calibration rows that are
    drawn as the inputs are, and that neither the model nor its scaler was fitted on. Better probabilities
    answer more. For the least cost take `CostRule`; for several candidate classes, `PredictionSets`.

    Args:
        accuracy: a, in (0, 1).
        delta: in (0, 1).
        by_class: promise it for the answers of every class, with a threshold for each: all of these hold
            together with confidence 1 - delta. A class that is predicted too seldom is always handed over.

    Attributes:
        thresholds_: (C,) a prediction of this class is answered if its probability is above it.

    Raises:
        ValueError: if the accuracy cannot be promised with so many rows, which the message counts; or probs are
            no probabilities, or labels do not fit.
        TypeError: if a dtype is wrong.

    Notes:
        An accuracy can be promised from log(delta) / log(accuracy) rows on, 59 for 0.95 and 299 for 0.99; where
        the model does not reach it, everything is handed over, with a warning. By class, delta is shared among
        the classes that are predicted often enough; where these are more than can share it, among those that are
        predicted most often. Confidences are rounded to float32, as they are served.

    References:
        Geifman and El-Yaniv 2017, "Selective classification for deep neural networks"; Angelopoulos et al. 2021,
        "Learn then Test". The test is described in `hf_calib.decisions._promise.certified_threshold`.

    >>> rng = np.random.default_rng(0)
    >>> positive = rng.random(2000)
    >>> probs = np.stack([1 - positive, positive], axis=1)
    >>> labels = (rng.random(2000) < positive).astype(int)
    >>> rule = AbstainRule(accuracy=0.9).fit(probs, labels)
    >>> rule.predict([[0.02, 0.98], [0.6, 0.4]])
    array([ 1, -1])
    """

    kind: ClassVar[str] = "abstain"

    accuracy: float = 0.95
    delta: float = 0.05
    by_class: bool = False

    def __post_init__(self) -> None:
        check_promise("accuracy", self.accuracy, self.delta)
        check_flag("by_class", self.by_class)

    def fit(self, probs: ArrayLike, labels: ArrayLike) -> AbstainRule:
        """Find the thresholds on calibration rows: probs (N, C) and labels (N,)."""
        rows, targets = class_rows(probs, labels)
        confidences, predicted = winners(rows)
        right = predicted == targets
        self.check_rows(len(rows))
        if self.by_class:
            self.thresholds_ = self._by_class(confidences, predicted, right, rows.shape[1])
        else:
            found = certified_threshold(confidences, right, promised=self.accuracy, delta=self.delta)
            self.thresholds_ = np.full(rows.shape[1], found)
        if (self.thresholds_ == NEVER).all():
            needed = rows_to_answer(confidences, right, promised=self.accuracy, delta=self.delta)
            more = (
                f"more rows ({MOST_TIMES} times as many like these would not do)"
                if needed is None
                else f"more rows (about {needed:,} like these would answer some)"
            )
            warn(
                f"An accuracy of {self.accuracy:g} cannot be promised at any confidence from these {len(rows):,} rows, "
                f"of which {right.mean():.1%} are right. Every input will be handed over. Promise less, or use {more} "
                "or a better model."
            )
        elif (self.thresholds_ == NEVER).any():
            never = np.flatnonzero(self.thresholds_ == NEVER)
            warn(
                f"An accuracy of {self.accuracy:g} cannot be promised for predictions of {listed(never, 'class')}. "
                "They will always be handed over. Promise less, or use more calibration rows."
            )
        return self

    def predict(self, probs: ArrayLike) -> IntArray:
        """(N,) int: the most probable class, or -1 for "hand over"."""
        thresholds = self._fitted_thresholds()
        confidences, predicted = winners(class_probs(probs, len(thresholds)))
        return np.where(confidences > thresholds[predicted], predicted, -1)

    @property
    def answers_nothing(self) -> bool:
        """Whether every input is handed over."""
        return bool((self._fitted_thresholds() == NEVER).all())

    def measure_decided(
        self, decided: NDArray[Any], probs: ArrayLike, labels: ArrayLike
    ) -> dict[str, Interval]:
        """The share "answered" and its "accuracy" on other rows, with exact binomial intervals of 95%."""
        return answers(decided, class_rows(probs, labels)[1])

    def promise(self) -> str:
        each = "the answers of each class" if self.by_class else "its answers"
        return (
            f"answers where at least {percent(self.accuracy)} of {each} are right, which is promised with "
            f"{percent(1 - self.delta)} confidence"
        )

    def check_rows(self, n_rows: int) -> None:
        """Raise where so few calibration rows cannot promise the accuracy."""
        check_rows_for(self.accuracy, self.delta, n_rows)

    def curve(
        self,
        probs: ArrayLike,
        labels: ArrayLike,
        other_probs: ArrayLike,
        other_labels: ArrayLike,
        *,
        accuracies: Sequence[float],
    ) -> PromiseCurve:
        """Coverage and accuracy on other rows of rules like this one, each with its own promised accuracy.

        Args:
            probs: (N, C) to fit on, with labels (N,).
            labels: of these.
            other_probs: (K, C) to measure on, with other_labels (K,).
            other_labels: of those.
            accuracies: to promise; those that N rows are too few for are left out.
        """
        rows, targets = class_rows(probs, labels)
        return self.curve_of_parts([Part(rows, targets, other_probs, other_labels)], accuracies=accuracies)

    def curve_of_parts(self, parts: Sequence[Part], *, accuracies: Sequence[float]) -> PromiseCurve:
        """The same over several parts, such as the folds of a cross-fitting."""
        fewest = min(len(np.asarray(part.labels)) for part in parts)
        possible = [a for a in accuracies if fewest >= rows_needed(a, self.delta)]
        found = [measure_parts(replace(self, accuracy=accuracy), parts) for accuracy in possible]
        return PromiseCurve(
            tuple(possible),
            tuple(row["answered"].value for row in found),
            tuple(row.get("accuracy") for row in found),
        )

    def _by_class(
        self, confidences: FloatArray, predicted: IntArray, right: IntArray, n_classes: int
    ) -> FloatArray:
        """A threshold for each class; delta is shared among those predicted most often that have rows enough.

        A class that has rows enough for this share, but not for that of one class more, gets none.
        """
        counts = np.bincount(predicted, minlength=n_classes)
        often = np.argsort(-counts, kind="stable")
        sharing = 0
        for n, c in enumerate(often, 1):
            if counts[c] >= rows_needed(self.accuracy, self.delta / n):
                sharing = n
        thresholds = np.full(n_classes, NEVER)
        for c in often[:sharing]:
            thresholds[c] = certified_threshold(
                confidences[predicted == c],
                right[predicted == c],
                promised=self.accuracy,
                delta=self.delta / sharing,
            )
        return thresholds
