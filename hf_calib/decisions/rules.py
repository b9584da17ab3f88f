"""The rules: a decision for each row of probabilities is a score and a threshold, which calibration rows choose."""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check, few
from hf_calib.decisions import promise as promises
from hf_calib.decisions.promise import (
    ALWAYS,
    NEVER,
    PromiseCurve,
    Results,
    answers,
    certified_threshold,
    mean,
    share,
)
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.multi_label import check_decisions, check_label_probs
from hf_calib.metrics.sums import Interval, winners

Criterion = Literal["f1_macro", "f1_micro", "precision", "cost"]
_LARGEST_COST = 1e12  # beyond, means over rows lose the small ones
_IN_EVERY_SET = 1.0  # no score of a class is larger

#: probs and labels to fit a rule on; probs and labels of other rows to measure it on.
Part = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]
#: Thresholds from one that predicts nothing to one that predicts all rows; of the m predicted, how many are right.
Cuts = tuple[FloatArray, IntArray, IntArray]
Self = TypeVar("Self", bound="Rule")


class Rule(ABC):
    """A decision for each row of probabilities; subclasses are dataclasses of their options."""

    kind: ClassVar[str]  # its name in decisions.json
    fitted: ClassVar[tuple[str, ...]] = ("thresholds_",)  # arrays (C,) in [0, 1] that `fit` makes
    results: ClassVar[str] = ""  # what `measure` found, in words that follow the promise
    independent: ClassVar[bool] = False  # whether the columns are labels, any number of which are true

    thresholds_: FloatArray

    def fit(self: Self, probs: ArrayLike, labels: ArrayLike) -> Self:
        """Fit on calibration rows, probs (N, C) and labels (N,), of independent labels (N, C); return the rule."""
        rows, targets = self._labelled(probs, labels)
        self.check_rows(len(rows))
        self._fit(rows, targets)
        return self

    def predict(self, probs: ArrayLike) -> NDArray[Any]:
        """Decide on rows of probabilities (N, C): (N,) int, -1 for "hand over"; of sets and of labels (N, C) bool."""
        n_classes = self.n_classes
        rows = check_label_probs(probs) if self.independent else checks.check_probs(probs)
        way_out = "pass probabilities of the model it was fitted for"
        fits = rows.shape[1] == n_classes
        check(fits, f"probs to have the {n_classes} columns of fit", f"shape {rows.shape}", way_out)
        return self._decide(_as_served(rows))

    def measure(self, probs: ArrayLike, labels: ArrayLike, *, decided: NDArray[Any] | None = None) -> Results:
        """Results on other rows, by the names of `measured.TITLES`; `decided` by other rules of this kind, if given."""
        chosen = self.predict(probs) if decided is None else decided
        return self._results(chosen, *self._labelled(probs, labels))

    @abstractmethod
    def promise(self) -> str:
        """The rule in words, to end a sentence that begins with "It"."""

    def sentence(self, measured: Mapping[str, Interval], rows: str) -> str:
        """The rule in a sentence, with what was measured on these rows, if anything was."""
        found = {name: interval.value for name, interval in measured.items()}
        return f"It {self.promise()}{self.results.format(**found, rows=rows) if found else ''}."

    def check_rows(self, n_rows: int) -> None:  # noqa: B027, most rules need no number of rows
        """Raise where so few calibration rows cannot keep the promise."""

    def options(self) -> dict[str, Any]:
        """The arguments that it was made with, of JSON's own types."""
        return {field.name: np.asarray(getattr(self, field.name)).tolist() for field in fields(self)}  # type: ignore[arg-type]

    @property
    def n_classes(self) -> int:
        """C of the rows that it was fitted on."""
        way_out = "call fit(probs, labels) with calibration rows first"
        check(hasattr(self, "thresholds_"), f"{type(self).__name__} to be fitted", "a new one", way_out)
        return len(self.thresholds_)

    @property
    def answers_nothing(self) -> bool:
        """Whether every input is handed over, so that there is nothing worth saving."""
        return False

    @abstractmethod
    def _fit(self, probs: FloatArray, labels: NDArray[Any]) -> None:
        """Choose the thresholds."""

    @abstractmethod
    def _decide(self, probs: FloatArray) -> NDArray[Any]:
        """The decisions on checked rows."""

    def _results(self, decided: NDArray[Any], probs: FloatArray, labels: IntArray) -> Results:
        raise NotImplementedError

    def _labelled(self, probs: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, NDArray[Any]]:
        """Checked probs (N, C), as they are served, and labels: (N,), or (N, C) bool where they are independent."""
        if self.independent:
            decisions = check_decisions(probs, labels)
            way_out = "pass no row whose labels are not known"
            check(bool(decisions.known.all()), "labels to be 0 or 1", "-100 too", way_out)
            return _as_served(decisions.probs), decisions.true
        rows, targets = checks.check_probs_and_labels(probs, labels)
        return _as_served(rows), targets


def measure_parts(rule: Rule, parts: Sequence[Part]) -> Results:
    """A rule on the other rows of all parts, as it was fitted in each: on other data, or of folds by cross-fitting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decided = [copy.copy(rule).fit(probs, labels).predict(others) for probs, labels, others, _ in parts]
    probs, labels = (np.concatenate([np.asarray(part[k]) for part in parts]) for k in (2, 3))
    return rule.measure(probs, labels, decided=np.concatenate(decided))


def promise_curve(rule: AbstainRule, parts: Sequence[Part], accuracies: Sequence[float]) -> PromiseCurve:
    """What rules like this one do that promise each of the accuracies for which all parts have rows enough."""
    fewest = min(len(np.asarray(labels)) for _, labels, _, _ in parts)
    possible = [a for a in accuracies if fewest >= promises.rows_needed(a, rule.delta)]
    found = [measure_parts(replace(rule, accuracy=accuracy), parts) for accuracy in possible]
    answered = tuple(row["answered"].value for row in found)
    return PromiseCurve(tuple(possible), answered, tuple(row.get("accuracy") for row in found))


def percent(value: float) -> str:
    """A share as people write it, such as 95% or 99.9%."""
    return f"{100 * value:.4g}%"


def _as_served(probs: NDArray[Any]) -> FloatArray:
    """Round probabilities to float32, as a pipeline gives them; in float64, within [0, 1]."""
    # A threshold between two that differ in float64 only would let more rows pass once these are served.
    return np.clip(probs.astype(np.float32), 0, 1).astype(np.float64)


def _warn_of(noun: str, chosen: NDArray[np.bool_], said: str) -> None:
    """Warn, in words with a place for them, of classes or labels: "class 3", or "classes 0, 2, 5"; of none, nothing."""
    numbers = np.flatnonzero(chosen).tolist()
    plural = {"class": "classes"}.get(noun, f"{noun}s")
    if numbers:
        text = said.format(f"{noun if len(numbers) == 1 else plural} {few(numbers)}")
        warnings.warn(text[0].upper() + text[1:], stacklevel=4)


@dataclass(kw_only=True, eq=False)
class AbstainRule(Rule):
    r"""Answer with the most probable class where its probability is high enough; else -1, "hand over".

    For "answer when you are 95% right". The threshold is the lowest confidence above which the answers are
    right at least that often, which is promised, not estimated: of users who each draw calibration rows of their
    own, at most a share `delta` gets a rule whose answers are right less often,

    $$P\big(\,P(\text{right} \mid \text{answered}) \ge a\,\big) \ge 1 - \delta.$$

    It holds for inputs that are drawn as the calibration rows are, whether or not the probabilities are calibrated.
    Where the model does not reach it, everything is handed over. The test: `decisions.promise.certified_threshold`.

    Args:
        accuracy, delta: a and delta, in (0, 1); it takes log(delta) / log(a) rows, 59 for 0.95 and 299 for 0.99.
        by_class: promise it for the answers of every class, all together with confidence 1 - delta. A class that is
            predicted too seldom is always handed over.

    Attributes:
        thresholds_: (C,) a prediction of this class is answered if its probability is above it.

    References:
        Geifman and El-Yaniv 2017, "Selective classification for deep neural networks".

    >>> probs, labels = np.tile([[0.02, 0.98], [0.6, 0.4]], (100, 1)), np.tile([1, 0, 1, 1], 50)
    >>> AbstainRule(accuracy=0.9).fit(probs, labels).predict(probs[:2])
    array([ 1, -1])
    """

    kind: ClassVar[str] = "abstain"

    accuracy: float = 0.95
    delta: float = 0.05
    by_class: bool = False

    def __post_init__(self) -> None:
        promises.check_promise("accuracy", self.accuracy, self.delta)
        checks.check_flag("by_class", self.by_class)

    @property
    def answers_nothing(self) -> bool:
        return bool((self.thresholds_ == NEVER).all())

    def check_rows(self, n_rows: int) -> None:
        promises.check_rows_for(self.accuracy, self.delta, n_rows)

    def promise(self) -> str:
        each = "the answers of each class" if self.by_class else "its answers"
        least, confidence = percent(self.accuracy), percent(1 - self.delta)
        return f"answers where at least {least} of {each} are right, which is promised with {confidence} confidence"

    def sentence(self, measured: Mapping[str, Interval], rows: str) -> str:
        accuracy = f"{percent(self.accuracy)} accuracy"
        if self.answers_nothing:
            return f"It hands over every input: {accuracy} could not be promised."
        if "answered" not in measured:
            return super().sentence({}, rows)
        kept = measured.get("accuracy")
        right = "none" if kept is None else f"{kept.value:.1%} of its answers were right"
        share_of = f"{measured['answered'].value:.0%} of inputs at {accuracy}"
        return f"It answers {share_of} and hands over the rest ({right}, {rows})."

    def curve(
        self,
        probs: ArrayLike,
        labels: ArrayLike,
        other_probs: ArrayLike,
        other_labels: ArrayLike,
        *,
        accuracies: Sequence[float],
    ) -> PromiseCurve:
        """What rules like this one, which promise these accuracies, do on other rows; too high ones are left out."""
        return promise_curve(self, [(probs, labels, other_probs, other_labels)], accuracies)

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        self.thresholds_ = self._thresholds(probs, labels, self.accuracy)
        cannot = f"An accuracy of {self.accuracy:g} cannot be promised"
        if not self.answers_nothing:
            needed = promises.rows_needed(self.accuracy, self.delta)
            way_out = f"use more calibration rows: at least {needed:,} predictions of a class"
            said = f"{cannot} for predictions of {{}}. They will always be handed over. Promise less, or {way_out}."
            _warn_of("class", self.thresholds_ == NEVER, said)
            return
        right = (probs.argmax(axis=1) == labels).mean()
        # The larger the accuracy, the less is answered.
        lower = [k / 100 for k in range(50, math.ceil(100 * self.accuracy - 1e-9))]
        failing = bisect_left(lower, True, key=lambda a: (self._thresholds(probs, labels, a) == NEVER).all())
        less = f" ({lower[failing - 1]:g} would answer some)" if failing else ""
        message = (
            f"{cannot} at any confidence from these {len(probs):,} rows, of which {right:.1%} are right. "
        )
        message += f"Every input will be handed over. Promise less{less}, or use more rows or a better model."
        warnings.warn(message, stacklevel=3)

    def _decide(self, probs: FloatArray) -> IntArray:
        confidences, predicted = winners(probs)
        return np.where(confidences > self.thresholds_[predicted], predicted, -1)

    def _results(self, decided: NDArray[Any], probs: FloatArray, labels: IntArray) -> Results:
        return answers(decided, labels)

    def _thresholds(self, rows: FloatArray, targets: IntArray, accuracy: float) -> FloatArray:
        """The thresholds (C,) for a promised accuracy."""
        confidences, predicted = winners(rows)
        right, n_classes = predicted == targets, rows.shape[1]
        if not self.by_class:
            return np.full(n_classes, certified_threshold(confidences, right, accuracy, self.delta))
        # delta is shared among the classes predicted most often that have rows enough for their share. A class that is
        # always answered needs its share no longer, and the others share anew (Holm's step-down): while no promise is
        # broken, the classes left hold all whose promise could be, and their levels sum to at most delta. More classes
        # left never raise a level, and a class keeps its starts, so that a larger level passes all that a smaller does.
        counts = np.bincount(predicted, minlength=n_classes)
        left = np.argsort(-counts, kind="stable")
        thresholds = np.full(n_classes, NEVER)
        tested: dict[int, IntArray] = {}
        while True:
            needed = [promises.rows_needed(accuracy, self.delta / n) for n in range(1, len(left) + 1)]
            sharing = max(np.flatnonzero(counts[left] >= needed) + 1, default=0)
            for c in left[:sharing]:
                own, delta = predicted == c, self.delta / sharing
                at = tested.setdefault(int(c), promises.starts(int(counts[c]), accuracy, delta))
                thresholds[c] = certified_threshold(confidences[own], right[own], accuracy, delta, at)
            needing = left[thresholds[left] != ALWAYS]
            if len(needing) in (0, len(left)):
                return thresholds
            left = needing


@dataclass(eq=False)
class CostRule(Rule):
    r"""Take the decision whose expected cost is least; where that is the last column, -1, "hand over".

    For errors that cost different amounts, or where handing over has a price. Unlike the other rules it believes
    the probabilities, so it is as good as they are calibrated:

    $$\arg\min_d \sum_y p_y\, \text{costs}_{y d}.$$

    Nothing is estimated, and `predict` needs no `fit`. Of equal costs the first column is taken.

    Args:
        costs: (C, C) float, what it costs to decide d (column) where y (row) is true, in any unit, gains below
            0; or (C, C + 1), whose last column is what it costs to hand over.

    References:
        Chow 1970 (handing over at a cost); Elkan 2001, "The foundations of cost-sensitive learning".

    >>> rule = CostRule([[0, 1, 0.3], [10, 0, 0.3]])  # to miss class 1 costs 10, to hand over 0.3
    >>> rule.predict([[0.99, 0.01], [0.9, 0.1], [0.2, 0.8]])
    array([ 0, -1,  1])
    """

    kind: ClassVar[str] = "costs"
    fitted: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[str] = " ({cost:.4g} per input, {cost_argmax:.4g} without, {rows})"

    costs: ArrayLike

    def __post_init__(self) -> None:
        costs = checks.as_floats("costs", self.costs)
        is_matrix = costs.ndim == 2 and len(costs) >= 2 and costs.shape[1] - costs.shape[0] in (0, 1)
        way_out, got = "a row a class, a column a decision, the last to hand over", f"shape {costs.shape}"
        check(is_matrix, "costs to have shape (C, C) or (C, C + 1) with C at least 2", got, way_out)
        allowed = np.abs(costs) <= _LARGEST_COST  # NaN is not
        row, column = np.unravel_index(allowed.argmin(), costs.shape)
        got = f"{costs[row, column]} in row {row}, column {column}"
        way_out = "give a decision that must never be taken a cost that is large; only their ratios matter"
        check(bool(allowed.all()), f"costs to be finite and at most {_LARGEST_COST:g}", got, way_out)
        self.costs = self._costs = costs

    @property
    def n_classes(self) -> int:
        return len(self._costs)

    def promise(self) -> str:
        rows, columns = self._costs.shape
        return f"takes the decision of least expected cost{', or hands over where that is cheaper' * (columns - rows)}"

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        self.predict(probs)  # which refuses other classes than those of the costs

    def _decide(self, probs: FloatArray) -> IntArray:
        decided = (probs @ self._costs).argmin(axis=1)
        return np.where(decided == self.n_classes, -1, decided)

    def _results(self, decided: NDArray[Any], probs: FloatArray, labels: IntArray) -> Results:
        paid = self._costs[labels, decided]  # -1 is the last column
        argmax = self._costs[labels, probs.argmax(axis=1)]
        found = {"cost": mean(paid), "cost_argmax": mean(argmax), "saving": mean(argmax - paid)}
        return answers(decided, labels) | found


@dataclass(kw_only=True, eq=False)
class PredictionSets(Rule):
    r"""All classes that are probable enough, so that the true one is among them with probability 1 - alpha.

    For a person or a second model that chooses among few candidates. The promise, unlike that of `AbstainRule`, is an
    average over calibration rows and inputs alike, and none is handed over. With scores s of the N calibration rows,
    and q the k-th smallest of them, k = ceil((N + 1) (1 - alpha)):

    $$\{c : s_c \le q\}, \quad s_c = 1 - p_c \text{ (lac)}, \quad s_c = \sum_{j : p_j > p_c} p_j \text{ (aps)}.$$

    Args:
        alpha: in (0, 1), the share of sets that may miss the true class.
        method: "lac" gives the smallest sets on average if the probabilities are right, and an empty one where no class
            is probable enough; "aps" gives larger sets where the model is unsure, and the most probable class in each.
        by_class: hold the promise for the inputs of every true class, with a threshold for each. A class of fewer than
            1 / alpha - 1 rows is in every set.

    Attributes:
        thresholds_: (C,) a class is in the set if its score is at most this.

    References:
        Sadinle, Lei and Wasserman 2019 (LAC; also by class); Romano, Sesia and Candès 2020 (APS; without the random
        draws of the authors). The sets are those of MAPIE 1.6.

    >>> probs = np.tile([[0.9, 0.08, 0.02], [0.5, 0.4, 0.1]], (20, 1))
    >>> sets = PredictionSets(alpha=0.2).fit(probs, np.tile([0, 1], 20))
    >>> sets.predict([[0.7, 0.2, 0.1], [0.45, 0.45, 0.1]])
    array([[ True, False, False],
           [ True,  True, False]])
    """

    kind: ClassVar[str] = "sets"
    results: ClassVar[str] = " ({coverage:.1%}, with {size:.2f} classes on average, {rows})"

    alpha: float = 0.1
    method: Literal["lac", "aps"] = "lac"
    by_class: bool = False

    def __post_init__(self) -> None:
        checks.check_share("alpha", self.alpha, "0.1 lets one set in ten miss the true class")
        checks.check_choice("method", self.method, ("lac", "aps"))
        checks.check_flag("by_class", self.by_class)

    def check_rows(self, n_rows: int) -> None:
        requirement = f"the calibration rows to be at least {self._rows_needed:,} for alpha={self.alpha:g}"
        way_out = f"pass more rows, or alpha={1 / (n_rows + 1):.4g}"
        check(n_rows >= self._rows_needed, requirement, f"{n_rows:,}", way_out)

    def promise(self) -> str:
        share_of = f"{percent(1 - self.alpha)} of {'the inputs of each class' if self.by_class else 'inputs'}"
        return f"gives sets of classes that hold the true one for at least {share_of}"

    @property
    def _rows_needed(self) -> int:
        return math.ceil(1 / self.alpha - 1 - 1e-9)

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        scores = self._scores(probs)[np.arange(len(probs)), labels]
        groups = [scores[labels == c] for c in range(probs.shape[1])] if self.by_class else [scores]
        self.thresholds_ = np.resize([self._quantile(group) for group in groups], probs.shape[1])
        rare = np.array([len(group) < self._rows_needed for group in groups])
        few_rows = f"fewer than the {self._rows_needed} rows that alpha={self.alpha:g} needs"
        _warn_of("class", rare, f"{{}}: {few_rows}, so every set holds them. Use more calibration rows.")

    def _decide(self, probs: FloatArray) -> NDArray[np.bool_]:
        return self._scores(probs) <= self.thresholds_

    def _results(self, decided: NDArray[Any], probs: FloatArray, labels: IntArray) -> Results:
        covered = share(decided[np.arange(len(decided)), labels])
        return {"coverage": covered, "size": mean(decided.sum(axis=1))}

    def _scores(self, probs: FloatArray) -> FloatArray:
        """(N, C) the score of each class, at most 1."""
        if self.method == "lac":
            return 1 - probs
        order = np.argsort(-probs, axis=1, kind="stable")
        sums = np.cumsum(np.take_along_axis(probs, order, axis=1), axis=1)
        scores = np.zeros_like(sums)
        np.put_along_axis(scores, order[:, 1:], np.minimum(sums[:, :-1], _IN_EVERY_SET), axis=1)
        return scores

    def _quantile(self, scores: FloatArray) -> float:
        rank = math.ceil((len(scores) + 1) * (1 - self.alpha) - 1e-9)
        return _IN_EVERY_SET if rank > len(scores) else float(np.partition(scores, rank - 1)[rank - 1])


@dataclass(kw_only=True, eq=False)
class LabelThresholds(Rule):
    r"""Predict each label of a multi-label model where its probability is above a threshold of its own.

    Instead of 0.5 for all, which is best for none of F1, precision and costs. With $m$ predictions, $t$ of them
    true, of $P$ rows that have the label, the threshold is the one that on the calibration rows has

    - "f1_macro": the largest F1 of the label, $2 t / (m + P)$;
    - "f1_micro": together with the others, the largest $2 \sum t / (\sum m + \sum P)$;
    - "precision": the most predictions of which a share of at least `precision` is right, which is promised with
      confidence 1 - delta for all labels together, as `AbstainRule` does for classes;
    - "cost": the least $c_1 (m - t) + c_2 (P - t)$.

    Args:
        criterion: one of these.
        precision, delta: in (0, 1), for "precision" only.
        costs: (c_1, c_2), each above 0, of a false positive and of a false negative; for "cost" only.
        min_positives: a label that fewer rows have gets the threshold that is best for all labels together, with
            a warning; a promised precision does not hold for it.

    Attributes:
        thresholds_: (C,) a label is predicted if its probability is above it. It lies midway between the two that it
            separates; for "precision" it is the lower one. A probability of 0 is never predicted.
        pooled_: (C,) bool, which labels have the threshold of all.

    References:
        Lipton, Elkan and Naryanaswamy 2014, "Optimal thresholding of classifiers to maximize F1 measure".

    >>> probs = np.tile([[0.9, 0.3], [0.4, 0.1], [0.35, 0.2]], (10, 1))
    >>> rule = LabelThresholds().fit(probs, np.tile([[1, 1], [1, 0], [0, 0]], (10, 1)))
    >>> rule.thresholds_.round(3), rule.predict([[0.38, 0.2]])
    (array([0.375, 0.25 ]), array([[ True, False]]))
    """

    kind: ClassVar[str] = "labels"
    fitted: ClassVar[tuple[str, ...]] = ("thresholds_", "pooled_")
    independent: ClassVar[bool] = True

    criterion: Criterion = "f1_macro"
    precision: float | None = None
    delta: float = 0.05
    costs: tuple[float, float] | None = None
    min_positives: int = 10

    def __post_init__(self) -> None:
        checks.check_choice("criterion", self.criterion, get_args(Criterion))
        for argument, criterion in (("precision", "precision"), ("costs", "cost")):
            given, is_needed = getattr(self, argument), self.criterion == criterion
            requirement = f"{argument} to be given for criterion={criterion!r}, and for no other"
            got = f"{argument}={given} with criterion={self.criterion!r}"
            check((given is not None) == is_needed, requirement, got, "pass both or none")
        if self.precision is not None:
            promises.check_promise("precision", self.precision, self.delta)
        if self.costs is not None:
            costs = checks.as_floats("costs", self.costs)
            is_pair = costs.shape == (2,) and bool(((costs > 0) & np.isfinite(costs)).all())
            way_out = "pass (cost of a false positive, cost of a false negative)"
            check(is_pair, "costs to be two numbers above 0", self.costs, way_out)
        way_out = "a label without positives has no threshold of its own"
        check(self.min_positives >= 1, "min_positives to be at least 1", self.min_positives, way_out)

    def promise(self) -> str:
        if self.precision is not None:
            least, confidence = percent(self.precision), percent(1 - self.delta)
            right = f"at least {least} of its predictions are right"
            return f"predicts a label where {right}, which is promised with {confidence} confidence"
        aim = {"f1_macro": "a large macro F1", "f1_micro": "a large micro F1", "cost": "a small cost"}
        return f"predicts a label above a threshold of its own, chosen for {aim[self.criterion]}"

    def _fit(self, probs: FloatArray, labels: NDArray[np.bool_]) -> None:
        positives = labels.sum(axis=0)
        pooled = positives < self.min_positives
        enough = not pooled.all() or positives.sum() >= self.min_positives
        requirement = f"labels to have at least min_positives={self.min_positives} positives in all"
        check(enough, requirement, positives.sum(), "pass more rows")
        found = np.full(len(pooled), NEVER)
        found[~pooled] = self._best([(probs[:, c], labels[:, c]) for c in np.flatnonzero(~pooled)])
        never = "No probability of {} keeps what was asked for: it is never predicted. Ask for less, or use more rows."
        _warn_of("label", ~pooled & (found == NEVER), never)
        if pooled.any():
            (found[pooled],) = self._best([(probs.ravel(), labels.ravel())])
            together = f"The threshold is that of all labels together, {found[pooled][0]:.3g}."
            together += " No precision is promised for them." * (self.precision is not None)
            said = f"{{}}: fewer than {self.min_positives} positives. {together} Use more calibration rows."
            _warn_of("label", pooled, said)
        self.thresholds_, self.pooled_ = found, pooled

    def _decide(self, probs: FloatArray) -> NDArray[np.bool_]:
        return probs > self.thresholds_

    def _best(self, columns: list[tuple[FloatArray, NDArray[np.bool_]]]) -> list[float]:
        """The threshold of each (probs, labels)."""
        if self.precision is not None:
            delta = self.delta / max(len(columns), 1)
            for probs, _ in columns:
                promises.check_rows_for(self.precision, delta, len(probs), argument="precision")
            return [certified_threshold(*column, self.precision, delta) for column in columns]
        cuts = [_cuts(probs, labels) for probs, labels in columns]
        if self.costs is not None:
            false_positive, false_negative = self.costs
            gains = [(false_positive + false_negative) * hits - false_positive * m for _, m, hits in cuts]
        elif self.criterion == "f1_micro":
            f1 = _largest_micro_f1(cuts)
            gains = [2 * hits - f1 * m for _, m, hits in cuts]
        else:
            gains = [2 * hits / (m + hits[-1]) for _, m, hits in cuts]
        return [float(thresholds[gain.argmax()]) for (thresholds, *_), gain in zip(cuts, gains, strict=True)]


def _cuts(probs: FloatArray, labels: NDArray[np.bool_]) -> Cuts:
    """All thresholds that differ in what they predict, from the highest, which predicts nothing."""
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order]
    ends = np.append(np.flatnonzero(ordered[1:] < ordered[:-1]), len(ordered) - 1)  # of runs of ties
    midway = (ordered[ends] + np.append(ordered[ends[:-1] + 1], 0.0)) / 2
    hits = np.cumsum(labels[order])
    return np.append(NEVER, midway), np.append(0, ends + 1), np.append(0, hits[ends])


def _largest_micro_f1(cuts: list[Cuts]) -> float:
    """By Dinkelbach's method for the largest ratio of sums: where the best cuts for a ratio have no larger one."""
    before, f1 = -1.0, 0.0
    while f1 > before:  # fewer than ten times
        best = [(m, hits, (2 * hits - f1 * m).argmax()) for _, m, hits in cuts]
        right = sum(int(hits[i]) for _, hits, i in best)
        size = sum(int(m[i] + hits[-1]) for m, hits, i in best)
        before, f1 = f1, 2 * right / max(size, 1)
    return before
