"""Prediction sets that hold the true class as often as promised (split conformal prediction)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.decisions._rule import Rule, class_probs, class_rows, listed, percent, warn
from hf_calib.decisions.measured import Results, mean, share
from hf_calib.metrics.checks import FloatArray, check_choice, check_flag, check_share

_ALL = 1.0  # no score is larger


@dataclass(kw_only=True, eq=False)
class PredictionSets(Rule):
    r"""All classes that are probable enough, so that the true one is among them with probability 1 - alpha.

    For a person or a second model that chooses among few candidates. The promise, unlike that of `AbstainRule`,
    is an average over calibration rows and inputs alike, and holds for every input, none is handed over.

    With scores s of the N calibration rows, and q the k-th smallest of them, k = ceil((N + 1) (1 - alpha)):

    $$\{c : s_c \le q\}, \quad s_c = 1 - p_c \text{ (lac)}, \quad s_c = \sum_{j : p_j > p_c} p_j \text{ (aps)}.$$

    Args:
        alpha: in (0, 1), the share of sets that may miss the true class.
        method: "lac" gives the smallest sets on average if the probabilities are right (for an under-confident model
            those of "aps" may be smaller), and an empty one where no class is probable enough; "aps" gives larger sets
            where the model is unsure and smaller ones where it is sure, and none is empty: the most probable class is
            in each.
        by_class: hold the promise for the inputs of every true class, with a threshold for each.

    Attributes:
        thresholds_: (C,) a class is in the set if its score is at most this.

    Notes:
        APS is deterministic here, so that an input always gets the same set; the authors leave out the last class
        at random, for sets that are smaller on average. By class, a class of fewer than 1 / alpha - 1 rows is in
        every set. MAPIE 1.6 gives the same sets (APS where its random numbers are 1).

    References:
        Sadinle, Lei and Wasserman 2019 (LAC; also by class); Romano, Sesia and Candès 2020 (APS).

    >>> probs = np.tile([[0.9, 0.08, 0.02], [0.5, 0.4, 0.1]], (20, 1))
    >>> sets = PredictionSets(alpha=0.2).fit(probs, np.tile([0, 1], 20))
    >>> sets.predict([[0.7, 0.2, 0.1], [0.45, 0.45, 0.1]])
    array([[ True, False, False],
           [ True,  True, False]])
    """

    kind: ClassVar[str] = "sets"

    alpha: float = 0.1
    method: Literal["lac", "aps"] = "lac"
    by_class: bool = False

    def __post_init__(self) -> None:
        check_share("alpha", self.alpha, "0.1 lets one set in ten miss the true class")
        check_choice("method", self.method, ("lac", "aps"))
        check_flag("by_class", self.by_class)

    def fit(self, probs: ArrayLike, labels: ArrayLike) -> PredictionSets:
        """Find the thresholds on calibration rows: probs (N, C) and labels (N,)."""
        rows, targets = class_rows(probs, labels)
        self.check_rows(len(rows))
        scores = self._scores(rows)[np.arange(len(rows)), targets]
        n_classes = rows.shape[1]
        if not self.by_class:
            self.thresholds_ = np.full(n_classes, self._quantile(scores))
            return self
        self.thresholds_ = np.array([self._quantile(scores[targets == c]) for c in range(n_classes)])
        rare = np.flatnonzero(np.bincount(targets, minlength=n_classes) < self._rows_needed)
        if len(rare):
            warn(
                f"{listed(rare, 'class').capitalize()}: fewer than the {self._rows_needed} rows that "
                f"alpha={self.alpha:g} needs, so every set holds them. Use more calibration rows."
            )
        return self

    def predict(self, probs: ArrayLike) -> NDArray[np.bool_]:
        """(N, C) bool: which classes are in the set of each row."""
        thresholds = self._fitted_thresholds()
        return self._scores(class_probs(probs, len(thresholds))) <= thresholds

    def measure_decided(self, decided: NDArray[Any], probs: ArrayLike, labels: ArrayLike) -> Results:
        """The "coverage" of other rows, with its exact binomial interval of 95%, and the mean "size" of the sets."""
        targets = class_rows(probs, labels)[1]
        covered = share(decided[np.arange(len(decided)), targets])
        return {"coverage": covered, "size": mean(decided.sum(axis=1))}

    def promise(self) -> str:
        share_of = f"{percent(1 - self.alpha)} of {'the inputs of each class' if self.by_class else 'inputs'}"
        return f"gives sets of classes that hold the true one for at least {share_of}"

    def check_rows(self, n_rows: int) -> None:
        """Raise where so few calibration rows leave no class out."""
        requirement = f"the calibration rows to be at least {self._rows_needed:,} for alpha={self.alpha:g}"
        way_out = f"pass more rows, or alpha={1 / (n_rows + 1):.4g}"
        check(n_rows >= self._rows_needed, requirement, f"{n_rows:,}", way_out)

    @property
    def _rows_needed(self) -> int:
        return math.ceil(1 / self.alpha - 1 - 1e-9)

    def _scores(self, probs: FloatArray) -> FloatArray:
        """(N, C) the score of each class, at most 1."""
        if self.method == "lac":
            return 1 - probs
        order = np.argsort(-probs, axis=1, kind="stable")
        sums = np.cumsum(np.take_along_axis(probs, order, axis=1), axis=1)
        scores = np.empty_like(sums)
        np.put_along_axis(scores, order[:, :1], 0.0, axis=1)
        np.put_along_axis(scores, order[:, 1:], np.minimum(sums[:, :-1], _ALL), axis=1)
        return scores

    def _quantile(self, scores: FloatArray) -> float:
        rank = math.ceil((len(scores) + 1) * (1 - self.alpha) - 1e-9)
        return _ALL if rank > len(scores) else float(np.partition(scores, rank - 1)[rank - 1])
