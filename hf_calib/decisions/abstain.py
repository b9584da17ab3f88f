"""Abstention: answer where the answers are right often enough, hand over the rest."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib.decisions import _promise
from hf_calib.decisions._promise import ALWAYS, NEVER, certified_threshold, rows_needed
from hf_calib.decisions._rule import Part, Rule, class_probs, class_rows, listed, measure_parts, percent, warn
from hf_calib.decisions.measured import PromiseCurve, Results, answers
from hf_calib.metrics.checks import FloatArray, IntArray, check_flag
from hf_calib.metrics.sums import winners


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

    Notes:
        An accuracy can be promised from log(delta) / log(accuracy) rows on, 59 for 0.95 and 299 for 0.99; where the
        model does not reach it, everything is handed over, with a warning. By class, that many predictions of each are
        needed: delta is shared among the classes that are predicted often enough, the most frequent ones where these
        are too many, and a class that is answered always hands its share on.

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
        _promise.check_promise("accuracy", self.accuracy, self.delta)
        check_flag("by_class", self.by_class)

    def fit(self, probs: ArrayLike, labels: ArrayLike) -> AbstainRule:
        """Find the thresholds on calibration rows: probs (N, C) and labels (N,)."""
        rows, targets = class_rows(probs, labels)
        self.check_rows(len(rows))
        self.thresholds_ = self._thresholds(rows, targets, self.accuracy)
        never = np.flatnonzero(self.thresholds_ == NEVER)
        if self.answers_nothing:
            right = (rows.argmax(axis=1) == targets).mean()
            lower = range(
                50, math.ceil(100 * self.accuracy - 1e-9)
            )  # percents; the larger, the less is answered
            failing = bisect_left(
                lower, True, key=lambda p: (self._thresholds(rows, targets, p / 100) == NEVER).all()
            )
            less = f" ({lower[failing - 1] / 100:g} would answer some)" if failing else ""
            warn(
                f"An accuracy of {self.accuracy:g} cannot be promised at any confidence from these {len(rows):,} rows, "
                f"of which {right:.1%} are right. Every input will be handed over. Promise less"
                f"{less}, or use more rows or a better model."
            )
        elif len(never):
            warn(
                f"An accuracy of {self.accuracy:g} cannot be promised for predictions of {listed(never, 'class')}. "
                "They will always be handed over. Promise less, or use more calibration rows: at least "
                f"{rows_needed(self.accuracy, self.delta):,} predictions of a class."
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

    def measure_decided(self, decided: NDArray[Any], probs: ArrayLike, labels: ArrayLike) -> Results:
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
        _promise.check_rows_for(self.accuracy, self.delta, n_rows)

    def curve(
        self,
        probs: ArrayLike,
        labels: ArrayLike,
        other_probs: ArrayLike,
        other_labels: ArrayLike,
        *,
        accuracies: Sequence[float],
    ) -> PromiseCurve:
        """Coverage and accuracy on (K, C) other_probs of rules like this one, fitted on (N, C) probs.

        Each promises one of the accuracies; those that N rows are too few for are left out.
        """
        return self.curve_of_parts([Part(probs, labels, other_probs, other_labels)], accuracies=accuracies)

    def curve_of_parts(self, parts: Sequence[Part], *, accuracies: Sequence[float]) -> PromiseCurve:
        """The same over several parts, such as the folds of a cross-fitting."""
        fewest = min(len(np.asarray(part.labels)) for part in parts)
        possible = [a for a in accuracies if fewest >= rows_needed(a, self.delta)]
        found = [measure_parts(replace(self, accuracy=accuracy), parts) for accuracy in possible]
        answered = tuple(row["answered"].value for row in found)
        return PromiseCurve(tuple(possible), answered, tuple(row.get("accuracy") for row in found))

    def _thresholds(self, rows: FloatArray, targets: IntArray, accuracy: float) -> FloatArray:
        """The thresholds (C,) for a promised accuracy."""
        confidences, predicted = winners(rows)
        right = predicted == targets
        n_classes = rows.shape[1]
        if not self.by_class:
            found = certified_threshold(confidences, right, promised=accuracy, delta=self.delta)
            return np.full(n_classes, found)
        # delta is shared among those classes predicted most often that have rows enough for their share. A class all of
        # whose predictions can be answered needs its share no longer, and the others share anew (Holm's step-down): as
        # long as no promise is broken, the classes left hold all those whose promise could be, and their levels sum to
        # at most delta. More classes left never raise the level of one, and a class keeps its starts, so that a larger
        # level passes all that a smaller one does.
        counts = np.bincount(predicted, minlength=n_classes)
        left = np.argsort(-counts, kind="stable")
        thresholds = np.full(n_classes, NEVER)
        tested: dict[int, IntArray] = {}
        while True:
            enough = [n for n, c in enumerate(left, 1) if counts[c] >= rows_needed(accuracy, self.delta / n)]
            sharing = max(enough, default=0)
            for c in left[:sharing]:
                own = predicted == c
                delta = self.delta / sharing
                thresholds[c] = certified_threshold(
                    confidences[own],
                    right[own],
                    promised=accuracy,
                    delta=delta,
                    tested=tested.setdefault(int(c), _promise.starts(int(counts[c]), accuracy, delta)),
                )
            needing = left[thresholds[left] != ALWAYS]
            if len(needing) in (0, len(left)):
                return thresholds
            left = needing
