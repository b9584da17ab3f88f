"""Thresholds of the labels of a multi-label model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.decisions._promise import NEVER, certified_threshold, check_promise, check_rows_for
from hf_calib.decisions._rule import Rule, label_probs, label_rows, listed, percent, warn
from hf_calib.metrics.checks import FloatArray, IntArray, as_floats, check_choice

Criterion = Literal["f1_macro", "f1_micro", "precision", "cost"]
_MOST_STEPS = 100  # of the F1's fixed point, which takes fewer than ten


class _Cuts(NamedTuple):
    """Predictions at each threshold: m rows, `hits` of them right, out of `positives` in the data."""

    thresholds: FloatArray
    m: IntArray
    hits: IntArray
    positives: int


@dataclass(kw_only=True, eq=False)
class LabelThresholds(Rule):
    r"""Predict each label of a multi-label model where its probability is above a threshold of its own.

    Instead of 0.5 for all, which is best for none of F1, precision and costs. With $m$ predictions, $t$ of them
    true, of $P$ rows that have the label, the threshold is the one that on the calibration rows has

    - "f1_macro": the largest F1 of the label, $2 t / (m + P)$;
    - "f1_micro": together with the others of their own, the largest $2 \sum t / (\sum m + \sum P)$;
    - "precision": the most predictions of which a share of at least `precision` is right, which is promised with
      confidence 1 - delta for all labels together, as `AbstainRule` does for classes;
    - "cost": the least $c_1 (m - t) + c_2 (P - t)$.

    Args:
        criterion: one of these.
        precision: in (0, 1), for "precision" only.
        delta: in (0, 1), for "precision" only.
        costs: (c_1, c_2), each above 0, of a false positive and of a false negative; for "cost" only.
        min_positives: a label that fewer rows have gets the threshold that is best for all labels together, with
            a warning; a promised precision does not hold for it.

    Attributes:
        thresholds_: (C,) a label is predicted if its probability is above it.
        pooled_: (C,) bool, which labels have the threshold of all.

    Notes:
        A threshold lies midway between the two probabilities that it separates, but for "precision", where it is
        the lower one. A probability of 0 is never predicted.

    References:
        Lipton, Elkan and Naryanaswamy 2014, "Optimal thresholding of classifiers to maximize F1 measure".

    >>> probs = np.tile([[0.9, 0.3], [0.4, 0.1], [0.35, 0.2]], (10, 1))
    >>> rule = LabelThresholds().fit(probs, np.tile([[1, 1], [1, 0], [0, 0]], (10, 1)))
    >>> rule.thresholds_.round(3)
    array([0.375, 0.25 ])
    >>> rule.predict([[0.38, 0.2]])
    array([[ True, False]])
    """

    kind: ClassVar[str] = "labels"
    fitted: ClassVar[tuple[str, ...]] = ("thresholds_", "pooled_")
    multi_label: ClassVar[bool] = True

    criterion: Criterion = "f1_macro"
    precision: float | None = None
    delta: float = 0.05
    costs: tuple[float, float] | None = None
    min_positives: int = 10

    def __post_init__(self) -> None:
        check_choice("criterion", self.criterion, ("f1_macro", "f1_micro", "precision", "cost"))
        for argument, criterion in (("precision", "precision"), ("costs", "cost")):
            given = getattr(self, argument)
            wanted = self.criterion == criterion
            way_out = f"{argument} is what {criterion!r} needs"
            check(given is not None or not wanted, f"{argument} to be given", "none", way_out)
            requirement = f"{argument} to be given for criterion={criterion!r} only"
            check(given is None or wanted, requirement, given, f"pass criterion={criterion!r}")
        if self.precision is not None:
            check_promise("precision", self.precision, self.delta)
        if self.costs is not None:
            costs = as_floats("costs", self.costs)
            is_pair = costs.shape == (2,) and bool(((costs > 0) & np.isfinite(costs)).all())
            way_out = "pass (cost of a false positive, cost of a false negative)"
            check(is_pair, "costs to be two numbers above 0", self.costs, way_out)
            self.costs = (float(costs[0]), float(costs[1]))
        way_out = "a label without positives has no threshold of its own"
        check(self.min_positives >= 1, "min_positives to be at least 1", self.min_positives, way_out)

    def fit(self, probs: ArrayLike, labels: ArrayLike) -> LabelThresholds:
        """Find the thresholds on calibration rows: probs (N, C) and labels (N, C) of 0 and 1."""
        rows, targets = label_rows(probs, labels)
        positives = targets.sum(axis=0)
        self.pooled_: NDArray[np.bool_] = positives < self.min_positives
        enough = not self.pooled_.all() or positives.sum() >= self.min_positives
        requirement = f"labels to have at least min_positives={self.min_positives} positives in all"
        check(enough, requirement, positives.sum(), "pass more rows")
        own = np.flatnonzero(~self.pooled_)
        self.thresholds_ = np.full(rows.shape[1], NEVER)
        self.thresholds_[own] = self._best([(rows[:, c], targets[:, c]) for c in own])
        never = own[self.thresholds_[own] == NEVER]
        if len(never):
            warn(
                f"No probability of {listed(never, 'label')} keeps what was asked for. It will never be predicted. "
                "Ask for less, or use more calibration rows."
            )
        if self.pooled_.any():
            (pooled,) = self._best([(rows.ravel(), targets.ravel())])
            self.thresholds_[self.pooled_] = pooled
            promise = " No precision is promised for them." if self.criterion == "precision" else ""
            warn(
                f"{listed(np.flatnonzero(self.pooled_), 'label').capitalize()}: fewer than {self.min_positives} "
                f"positives. The threshold is that of all labels together, {pooled:.3g}.{promise} Use more "
                "calibration rows."
            )
        return self

    def predict(self, probs: ArrayLike) -> NDArray[np.bool_]:
        """(N, C) bool: which labels each row has."""
        thresholds = self._fitted_thresholds()
        return label_probs(probs, len(thresholds)) > thresholds

    def promise(self) -> str:
        if self.precision is not None:
            return (
                f"predicts a label where at least {percent(self.precision)} of its predictions are right, which is "
                f"promised with {percent(1 - self.delta)} confidence"
            )
        aim = {"f1_macro": "a large macro F1", "f1_micro": "a large micro F1", "cost": "a small cost"}
        return f"predicts a label above a threshold of its own, chosen for {aim[self.criterion]}"

    def _best(self, columns: list[tuple[FloatArray, NDArray[np.bool_]]]) -> list[float]:
        """The threshold of each (probs, labels)."""
        if self.criterion == "precision":
            assert self.precision is not None
            delta = self.delta / max(len(columns), 1)
            found = []
            for probs, labels in columns:
                check_rows_for(self.precision, delta, len(probs), "precision")
                found.append(certified_threshold(probs, labels, promised=self.precision, delta=delta))
            return found
        cuts = [_cuts(probs, labels) for probs, labels in columns]
        if self.criterion == "f1_micro":
            return _best_together(cuts)
        return [float(cut.thresholds[self._gain(cut).argmax()]) for cut in cuts]

    def _gain(self, cut: _Cuts) -> FloatArray:
        """The gain of each threshold of one label."""
        if self.costs is None:
            return 2 * cut.hits / (cut.m + cut.positives)
        false_positive, false_negative = self.costs
        return (false_positive + false_negative) * cut.hits - false_positive * cut.m


def _cuts(probs: FloatArray, labels: NDArray[np.bool_]) -> _Cuts:
    """All thresholds that differ in what they predict, from the highest, which predicts nothing."""
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order]
    ends = np.append(np.flatnonzero(ordered[1:] < ordered[:-1]), len(ordered) - 1)  # of runs of ties
    midway = (ordered[ends] + np.append(ordered[ends[:-1] + 1], 0.0)) / 2
    hits = np.cumsum(labels[order])
    return _Cuts(np.append(NEVER, midway), np.append(0, ends + 1), np.append(0, hits[ends]), int(hits[-1]))


def _best_together(cuts: list[_Cuts]) -> list[float]:
    """The thresholds with the largest micro F1, by Dinkelbach's method for the largest ratio of sums."""
    f1 = 0.0
    positives = sum(cut.positives for cut in cuts)
    for _ in range(_MOST_STEPS):
        chosen = [int((2 * cut.hits - f1 * cut.m).argmax()) for cut in cuts]
        hits = sum(int(cut.hits[i]) for cut, i in zip(cuts, chosen, strict=True))
        predicted = sum(int(cut.m[i]) for cut, i in zip(cuts, chosen, strict=True))
        before, f1 = f1, 2 * hits / max(predicted + positives, 1)
        if f1 <= before:
            break
    return [float(cut.thresholds[i]) for cut, i in zip(cuts, chosen, strict=True)]
