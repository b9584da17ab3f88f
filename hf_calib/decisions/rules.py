"""Decision rules: a score for each row of probabilities,
and a threshold fitted to calibration rows.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputTypeError, check, expected, few
from hf_calib.decisions.promise import (
    ALWAYS,
    NEVER,
    TIED,
    Results,
    answers,
    certified_thresholds,
    check_promise,
    check_rows_for,
    mean,
    rows_needed,
    share,
    share_of_any_threshold,
    uniform_quantile,
)
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.multi_label import check_decisions, check_label_probs
from hf_calib.metrics.sums import Interval, winners

# With larger costs, means over rows lose the small costs.
_LARGEST_COST = 1e12
# No score of a class is larger.
_IN_EVERY_SET = 1.0
# A threshold for F1 or costs from fewer rows with a label is mostly chance.
_FEW_POSITIVES = 10
_PLURALS = {"class": "classes", "label": "labels"}

Self = TypeVar("Self", bound="Rule")


class Rule(ABC):
    """Base class of the decision rules, which are dataclasses of their options."""

    #: The name in decisions.json.
    kind: ClassVar[str]
    #: Arrays (C,) in [0, 1] that `fit` makes.
    fitted: ClassVar[tuple[str, ...]] = ("thresholds_",)
    #: The results of `measure`, in words that follow the promise.
    results: ClassVar[str] = ""
    #: True if any number of the columns may be true labels.
    independent: ClassVar[bool] = False

    thresholds_: FloatArray

    def fit(self: Self, probs: ArrayLike, labels: ArrayLike) -> Self:
        """Fit to calibration rows, probs (N, C) and labels (N,), or (N, C) of independent labels;
        return the rule.
        """
        rows, targets = self._labelled(probs, labels)
        self.check_rows(len(rows))
        self._fit(rows, targets)
        return self

    def predict(self, probs: ArrayLike) -> NDArray[Any]:
        """Return the decisions on probs (N, C): classes (N,) int, -1 to abstain;
        sets and labels (N, C) bool.
        """
        # It raises for a rule that is not fitted, before the rows are checked.
        n_classes = self.n_classes
        if self.independent:
            rows = check_label_probs(probs)
        else:
            rows = checks.check_probs(probs)
        requirement = f"probs to have the {n_classes} columns of fit"
        way_out = "pass probabilities of the model that the rule was fitted for"
        fits = rows.shape[1] == n_classes
        check(fits, requirement, f"shape {rows.shape}", way_out)
        return self._decide(_as_served(rows))

    def measure(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Return the results on rows not used for the fit, by the names of `promise.TITLES`."""
        decided = self.predict(probs)
        rows, targets = self._labelled(probs, labels)
        return self._results(decided, rows, targets)

    def measure_fit(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Return what the rows of the fit say about this very rule on new inputs.

        Cross-fitting would measure other rules: a threshold jumps, so a rule may answer nothing in
        every fold and a fifth of the inputs once it is fitted to all rows.
        """
        return self.measure(probs, labels)

    @abstractmethod
    def promise(self) -> str:
        """Return the rule in words that complete a sentence starting with "It"."""

    def sentence(self, measured: Mapping[str, Interval], rows: str) -> str:
        """Return the rule in a sentence, with its results on the named rows if there are any."""
        found = {name: interval.value for name, interval in measured.items()}
        results = ""
        if found:
            results = self.results.format(**found, rows=rows)
        return f"It {self.promise()}{results}."

    def check_rows(self, n_rows: int) -> None:  # noqa: B027, most rules need no number of rows
        """Raise if this number of calibration rows is too small for the guarantee."""

    def options(self) -> dict[str, Any]:
        """Return the constructor arguments in JSON types."""
        return {
            field.name: np.asarray(getattr(self, field.name)).tolist()
            for field in fields(self)  # type: ignore[arg-type]
        }

    @property
    def n_classes(self) -> int:
        """The number of classes C of the calibration rows."""
        is_fitted = hasattr(self, "thresholds_")
        requirement = f"{type(self).__name__} to be fitted"
        way_out = "call fit(probs, labels) with calibration rows first"
        check(is_fitted, requirement, "a new rule", way_out)
        return len(self.thresholds_)

    @property
    def answers_nothing(self) -> bool:
        """Whether the rule abstains on every input, so that it need not be saved."""
        return False

    @abstractmethod
    def _fit(self, probs: FloatArray, labels: NDArray[Any]) -> None:
        """Find the thresholds."""

    @abstractmethod
    def _decide(self, probs: FloatArray) -> NDArray[Any]:
        """The decisions on checked rows."""

    @abstractmethod
    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        """The results of decisions on checked rows."""

    def _labelled(
        self, probs: ArrayLike, labels: ArrayLike
    ) -> tuple[FloatArray, NDArray[Any]]:
        """Checked probs (N, C), rounded as they are served, and labels: (N,), or (N,
        C) bool if independent.
        """
        if self.independent:
            decisions = check_decisions(probs, labels)
            are_known = bool(decisions.known.all())
            way_out = "leave out rows with unknown labels"
            check(are_known, "labels to be 0 or 1", "also -100", way_out)
            return _as_served(decisions.probs), decisions.true
        rows, targets = checks.check_probs_and_labels(probs, labels)
        several = rows.shape[1] >= 2
        requirement = "probs to have at least 2 classes"
        way_out = "for one probability p of the second of two classes, "
        way_out += "np.stack([1 - p, p], axis=1)"
        check(several, requirement, f"shape {rows.shape}", way_out)
        return _as_served(rows), targets


def percent(value: float) -> str:
    """A share as a percentage without trailing zeros, such as 95% or 99.9%."""
    return f"{100 * value:.4g}%"


def _in_words(promised: float, delta: float, which: str) -> str:
    """A guaranteed accuracy with its confidence."""
    least = percent(promised)
    confidence = percent(1 - delta)
    return f"at least {least} of {which} are correct, with {confidence} confidence"


def _as_served(probs: NDArray[Any]) -> FloatArray:
    """Probabilities in [0, 1], float64, rounded to float32 as in the output of a pipeline."""
    # If two values differ in float64 only, a threshold between them would accept more rows in a
    # pipeline.
    return np.clip(probs.astype(np.float32), 0, 1).astype(np.float64)


def _warn_of(noun: str, chosen: NDArray[np.bool_], said: str) -> None:
    """Warn of classes or labels, if any, in a text with a place for "class 3" or "classes 0, 2, 5"."""
    numbers = np.flatnonzero(chosen).tolist()
    if not numbers:
        return
    if len(numbers) > 1:
        noun = _PLURALS[noun]
    text = said.format(f"{noun} {few(numbers)}")
    warnings.warn(text[0].upper() + text[1:], stacklevel=4)


def _groups(classes: IntArray, n_classes: int, by_class: bool) -> list[Any]:
    """The indices of the rows of each class, or of all rows."""
    if not by_class:
        return [slice(None)]
    return [np.flatnonzero(classes == c) for c in range(n_classes)]


def _of_labels(values: NDArray[Any], labels: IntArray) -> NDArray[Any]:
    """The value of each row (N, C) in the column of its label."""
    return values[np.arange(len(values)), labels]


@dataclass(kw_only=True, eq=False)
class AbstainRule(Rule):
    r"""Answer with the most probable class if its probability is high enough;
    otherwise abstain (-1).

    Use it for requirements such as "95% of the answers must be correct". The threshold is the
    lowest confidence above which the accuracy is guaranteed, not only estimated: if many users draw
    calibration rows of their own, at most a fraction `delta` of them get a rule with a lower
    accuracy,

    $$P\big(\,P(\text{correct} \mid \text{answered}) \ge a\,\big) \ge 1 - \delta.$$

    The guarantee holds for inputs distributed like the calibration rows, even if the model is not
    calibrated. If the model cannot reach a, the rule always abstains. The test is
    `decisions.promise.certified_threshold`.

    Args:
        accuracy, delta: a and delta, in (0, 1). They need log(delta) / log(a) rows, 59 for 0.95 and
            299 for 0.99.
        by_class: guarantee the accuracy for each class's answers, and abstain on classes predicted
            too seldom.

    Attributes:
        thresholds_: (C,) a prediction of a class is answered if its probability is above the
            threshold.

    References:
        Geifman and El-Yaniv 2017, "Selective classification for deep neural networks".

    >>> probs, labels = np.tile([[0.02, 0.98], [0.6, 0.4]], (100, 1)), np.tile([1, 0, 1, 1], 50)
    >>> AbstainRule(accuracy=0.9).fit(probs, labels).predict(probs[:2])
    array([ 1, -1])
    """

    kind = "abstain"

    accuracy: float = 0.95
    delta: float = 0.05
    by_class: bool = False

    def __post_init__(self) -> None:
        check_promise("accuracy", self.accuracy, self.delta)
        checks.check_flag("by_class", self.by_class)

    @property
    def answers_nothing(self) -> bool:
        return bool((self.thresholds_ == NEVER).all())

    def check_rows(self, n_rows: int) -> None:
        check_rows_for(self.accuracy, self.delta, n_rows)

    def promise(self) -> str:
        which = "the answers of each class" if self.by_class else "its answers"
        right = _in_words(self.accuracy, self.delta, which)
        return f"answers inputs so that {right}"

    def sentence(self, measured: Mapping[str, Interval], rows: str) -> str:
        accuracy = f"{percent(self.accuracy)} accuracy"
        if self.answers_nothing:
            return f"It abstains on every input: {accuracy} could not be promised."
        if "answered" not in measured:
            return super().sentence({}, rows)
        answered = measured["answered"].value
        right = "no answers"
        if "accuracy" in measured:
            kept = measured["accuracy"].value
            right = f"{kept:.1%} of its answers were correct"
        said = f"It answers {answered:.0%} of inputs at {accuracy}"
        return f"{said} and abstains on the rest ({right}, {rows})."

    def measure_fit(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Return the share of answered inputs, and their accuracy from the promise upwards."""
        if self.answers_nothing:
            return {"answered": Interval(0.0, 0.0, 0.0)}
        found = self.measure(probs, labels)
        # A class that is never answered adds nothing to the error of the share.
        n_thresholds = 1
        if self.by_class:
            n_thresholds = int(np.count_nonzero(self.thresholds_ < NEVER))
        answered = found["answered"].value
        found["answered"] = share_of_any_threshold(
            answered, np.size(labels), n_thresholds
        )
        # Then new inputs are answered too, whatever their confidence.
        if (self.thresholds_ == ALWAYS).all():
            found["answered"] = Interval(1.0, 1.0, 1.0)
        # The rows chose the threshold, so an interval of their own accuracy would not hold.
        if "accuracy" in found:
            right = found["accuracy"].value
            found["accuracy"] = Interval(right, min(self.accuracy, right), 1.0)
        return found

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        n_classes = probs.shape[1]
        confidences, predicted = self._answers(probs)
        correct = predicted == labels
        groups = [
            (confidences[own], correct[own])
            for own in _groups(predicted, n_classes, self.by_class)
        ]
        found = certified_thresholds(groups, self.accuracy, self.delta)
        # A threshold for all rows is that of every class.
        self.thresholds_ = np.resize(found, n_classes)

        cannot = f"An accuracy of {self.accuracy:g} cannot be promised"
        if not self.answers_nothing:
            needed = rows_needed(self.accuracy, self.delta)
            said = (
                f"{cannot} for predictions of {{}}. The rule will abstain on them. Promise less, or "
                f"use more calibration rows: at least {needed:,} predictions of a class."
            )
            _warn_of("class", self.thresholds_ == NEVER, said)
            return
        classes = " for any class" if self.by_class else ""
        n_rows = len(probs)
        rows = f"these {n_rows:,} rows, of which {correct.mean():.1%} are correct"
        # A few equal confidences are not the reason.
        ties = ""
        if len(np.unique(confidences)) < n_rows / 2:
            ties = (
                " Rows with equal confidences are tested one by one, but answered together: "
                "confidences with more digits may pass."
            )
        said = (
            f"{cannot}{classes} from {rows}.{ties} The rule will always abstain. "
            "Promise less, or use more rows or a better model."
        )
        warnings.warn(said, stacklevel=3)

    def _answers(self, probs: FloatArray) -> tuple[FloatArray, IntArray]:
        """The confidence (N,) and the class (N,) of each row's answer, if it is given."""
        return winners(probs)

    def _decide(self, probs: FloatArray) -> IntArray:
        confidences, predicted = self._answers(probs)
        return np.where(confidences > self.thresholds_[predicted], predicted, -1)

    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        return answers(decided, labels)


@dataclass(kw_only=True, eq=False)
class TopLabelRule(AbstainRule):
    r"""Answer with the predicted class of a service if its confidence is high enough;
    otherwise abstain (-1).

    Use it instead of `AbstainRule` if only the confidence c of the predicted class is known. Its
    two classes are "wrong" with $1 - c$ and "correct" with c, and the only answer is "correct": the
    prediction is given.

    Args:
        accuracy, delta: as in `AbstainRule`.
        by_class: False, as the predicted classes are unknown.

    >>> confidence = np.tile([0.9, 0.3], 100)
    >>> correct = np.tile([1, 0, 1, 1], 50)
    >>> rule = TopLabelRule(accuracy=0.9).fit(np.stack([1 - confidence, confidence], axis=1), correct)
    >>> rule.predict([[0.1, 0.9], [0.7, 0.3]])
    array([ 1, -1])
    """

    kind = "abstain_top_label"

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement = "by_class to be False for top labels"
        way_out = "leave it out, as the predicted classes are unknown"
        check(not self.by_class, requirement, self.by_class, way_out)

    def _answers(self, probs: FloatArray) -> tuple[FloatArray, IntArray]:
        shape = probs.shape
        requirement = "probs to have shape (N, 2): wrong, and correct"
        check(shape[1] == 2, requirement, f"shape {shape}", "use AbstainRule")
        return probs[:, 1], np.ones(len(probs), np.intp)


@dataclass(eq=False)
class CostRule(Rule):
    r"""Make the decision with the lowest expected cost;
    of C + 1 columns the last one means to abstain (-1).

    Use it if errors or abstaining have different costs. Unlike in other rules, probabilities must
    be calibrated:

    $$\arg\min_d \sum_y p_y\, \text{costs}_{y d}.$$

    Nothing is estimated, and `predict` needs no `fit`. If costs are equal, the first column is
    used.

    Args:
        costs: (C, C) float, the cost of decision d (column) if y (row) is true, in any unit,
            negative for gains; or (C, C + 1), where the last column is the cost of abstaining.

    References:
        Chow 1970 (abstaining at a cost); Elkan 2001, "The foundations of cost-sensitive learning".

    >>> rule = CostRule([[0, 1, 0.3], [10, 0, 0.3]])  # Missing class 1 costs 10, abstaining 0.3.
    >>> rule.predict([[0.99, 0.01], [0.9, 0.1], [0.2, 0.8]])
    array([ 0, -1,  1])
    """

    kind = "costs"
    fitted = ()
    results = " ({cost:.4g} per input, {cost_argmax:.4g} without the rule, {rows})"

    costs: ArrayLike

    def __post_init__(self) -> None:
        # A caller may go on with its own array, for other costs.
        costs = checks.as_floats("costs", self.costs).copy()
        shape = costs.shape
        is_matrix = len(shape) == 2 and shape[0] >= 2 and shape[1] - shape[0] in (0, 1)
        requirement = "costs to have shape (C, C) or (C, C + 1) with C at least 2"
        way_out = "give a row per class, and a column per decision"
        check(is_matrix, requirement, f"shape {shape}", way_out)
        # Comparisons with NaN are False.
        wrong = ~(np.abs(costs) <= _LARGEST_COST)
        requirement = f"be finite and at most {_LARGEST_COST:g}"
        way_out = (
            "give a forbidden decision a large cost; only the ratios of costs matter"
        )
        checks.refuse(wrong, "costs", requirement, costs, way_out)
        self.costs = costs
        # The same array, of a type that numpy's operators know.
        self._costs = costs

    @property
    def n_classes(self) -> int:
        return len(self._costs)

    def promise(self) -> str:
        n_classes, n_decisions = self._costs.shape
        abstains = ""
        if n_decisions > n_classes:
            abstains = ", or abstains if that is cheaper"
        return f"makes the decision with the lowest expected cost{abstains}"

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        # Nothing is estimated, but a wrong number of classes raises.
        self.predict(probs)

    def _decide(self, probs: FloatArray) -> IntArray:
        decided = (probs @ self._costs).argmin(axis=1)
        return np.where(decided == self.n_classes, -1, decided)

    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        # A decision of -1 is the last column.
        paid = self._costs[labels, decided]
        argmax = self._costs[labels, probs.argmax(axis=1)]
        found = {
            "cost": mean(paid),
            "cost_argmax": mean(argmax),
            "saving": mean(argmax - paid),
        }
        return answers(decided, labels) | found


@dataclass(kw_only=True, eq=False)
class PredictionSets(Rule):
    r"""Return all classes that are probable enough, so that the set has the true class with
    probability 1 - alpha.

    Use it if a person or a second model chooses among few candidates. Unlike in `AbstainRule`, the
    guarantee is an average over calibration rows and inputs, and the rule never abstains. With the
    k-th smallest score q of the N calibration rows, where k = ceil((N + 1) (1 - alpha)):

    $$\{c : s_c \le q\}, \quad s_c = 1 - p_c \text{ (lac)},
    \quad s_c = \sum_{j \text{ before } c} p_j \text{ (aps)},$$

    where classes are in the order of their probabilities, and of their columns if these are equal.

    Args:
        alpha: in (0, 1), the fraction of sets that may miss the true class.
        method: "lac" has the smallest sets on average if the probabilities are correct, and an
            empty set if no class is probable enough. "aps" has larger sets if the model is
            uncertain, always with the most probable class.
        by_class: guarantee 1 - alpha for the inputs of every true class, with a threshold for each.
            A class with fewer than 1 / alpha - 1 rows is in every set.

    Attributes:
        thresholds_: (C,) a class is in the set if its score is at most the threshold.

    References:
        Sadinle, Lei and Wasserman 2019 (LAC; also by class); Romano, Sesia and Candès 2020 (APS;
        without the random draws of the authors). The sets are those of MAPIE 1.6.

    >>> probs = np.tile([[0.9, 0.08, 0.02], [0.5, 0.4, 0.1]], (20, 1))
    >>> sets = PredictionSets(alpha=0.2).fit(probs, np.tile([0, 1], 20))
    >>> sets.predict([[0.7, 0.2, 0.1], [0.45, 0.45, 0.1]])
    array([[ True, False, False],
           [ True,  True, False]])
    """

    kind = "sets"
    results = " ({coverage:.1%}, with {size:.2f} classes on average, {rows})"

    alpha: float = 0.1
    method: Literal["lac", "aps"] = "lac"
    by_class: bool = False

    def __post_init__(self) -> None:
        way_out = "0.1 lets one set in ten miss the true class"
        checks.check_share("alpha", self.alpha, way_out)
        checks.check_choice("method", self.method, ("lac", "aps"))
        checks.check_flag("by_class", self.by_class)

    def check_rows(self, n_rows: int) -> None:
        needed = self._rows_needed
        requirement = (
            f"the calibration rows to be at least {needed:,} for alpha={self.alpha:g}"
        )
        way_out = f"pass more rows, or alpha={1 / (n_rows + 1):.4g}"
        check(n_rows >= needed, requirement, f"{n_rows:,}", way_out)

    def promise(self) -> str:
        which = "the inputs of each class" if self.by_class else "inputs"
        least = percent(1 - self.alpha)
        return f"gives sets of classes that contain the true class for at least {least} of {which}"

    @property
    def _rows_needed(self) -> int:
        # The smallest floats have no finite inverse.
        return math.ceil(min(1 / self.alpha, 1e18) - 1 - 1e-9)

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        groups = self._true_scores(probs, labels)
        found = [self._quantile(group) for group in groups]
        self.thresholds_ = np.resize(found, probs.shape[1])
        needed = self._rows_needed
        rare = np.array([len(group) < needed for group in groups])
        said = (
            f"{{}}: fewer rows than the {needed} that alpha={self.alpha:g} needs, so every set "
            "holds them. Use more calibration rows."
        )
        _warn_of("class", rare, said)

    def _decide(self, probs: FloatArray) -> NDArray[np.bool_]:
        return self._scores(probs) <= self.thresholds_

    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        covered = share(_of_labels(decided, labels))
        return {"coverage": covered, "size": mean(decided.sum(axis=1))}

    def measure_fit(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Return the results; given these rows, new inputs have a coverage of Beta(k, N + 1 - k).

        By class, the classes share the level of the interval, and are weighted by their rows.
        """
        found = self.measure(probs, labels)
        rows, targets = self._labelled(probs, labels)
        groups = self._true_scores(rows, targets)
        sizes = np.array([len(group) for group in groups])
        # A class without rows has no interval that could fail.
        tail = 0.025 / np.count_nonzero(sizes)
        ends = np.array([self._coverage_of_new(group, tail) for group in groups])
        low, high = sizes @ ends / len(rows)
        value = found["coverage"].value
        found["coverage"] = Interval(value, min(low, value), max(high, value))
        return found

    def _coverage_of_new(self, scores: FloatArray, tail: float) -> tuple[float, float]:
        """The ends of the coverage of new inputs, given the scores of calibration rows."""
        n_rows = len(scores)
        rank = self._rank(n_rows)
        low = uniform_quantile(rank, n_rows, tail)
        # With ties at the threshold, more rows are covered than the rank says.
        n_covered = int(np.count_nonzero(scores <= self._quantile(scores)))
        highest = rank
        if n_covered != rank:
            highest = n_covered + 1
        return low, uniform_quantile(highest, n_rows, 1 - tail)

    def _true_scores(self, probs: FloatArray, labels: IntArray) -> list[FloatArray]:
        """The scores of the true classes: of all rows, or of the rows of each class."""
        scores = _of_labels(self._scores(probs), labels)
        groups = _groups(labels, probs.shape[1], self.by_class)
        return [scores[own] for own in groups]

    def _scores(self, probs: FloatArray) -> FloatArray:
        """The scores (N, C) of the classes, at most 1."""
        if self.method == "lac":
            return 1 - probs
        order = np.argsort(-probs, axis=1, kind="stable")
        sums = np.cumsum(np.take_along_axis(probs, order, axis=1), axis=1)
        # The score of a class is the sum before it; that of the first stays 0.
        before = np.minimum(sums[:, :-1], _IN_EVERY_SET)
        scores = np.zeros_like(sums)
        np.put_along_axis(scores, order[:, 1:], before, axis=1)
        return scores

    def _rank(self, n_rows: int) -> int:
        """The rank k of the threshold among the scores of this number of rows."""
        return math.ceil((n_rows + 1) * (1 - self.alpha) - 1e-9)

    def _quantile(self, scores: FloatArray) -> float:
        rank = self._rank(len(scores))
        if rank > len(scores):
            return _IN_EVERY_SET
        # Scores that are as good as equal to it are in the sets, too.
        found = float(np.partition(scores, rank - 1)[rank - 1])
        return min(found + TIED / 2, _IN_EVERY_SET)


@dataclass(kw_only=True, eq=False)
class LabelThresholds(Rule):
    r"""Predict each label of a multi-label model if its probability is above its own threshold.

    A threshold of 0.5 for all labels is not the best for F1, precision or costs. With $m$
    predictions, $t$ of which are true, and $P$ rows that have the label, the threshold has on the
    calibration rows

    - the largest F1 of the label, $2 t / (m + P)$, if no argument is given;
    - with `precision`, the most predictions with a fraction of correct ones of at least
      `precision`, which is guaranteed with confidence 1 - delta for all labels together, as in
      `AbstainRule` for classes;
    - with `costs`, the lowest $c_1 (m - t) + c_2 (P - t)$.

    Args:
        precision, delta: in (0, 1), the guaranteed precision and the chance that it fails.
        costs: (c_1, c_2), the costs of a false positive and of a false negative, each above 0.

    Attributes:
        thresholds_: (C,) a label is predicted if its probability is above the threshold, the
            midpoint of the two probabilities that it separates, or with `precision` the lower one.
            A probability of 0 never is.

    References:
        Lipton, Elkan and Naryanaswamy 2014, "Optimal thresholding of classifiers to maximize F1
        measure".

    >>> probs = np.tile([[0.9, 0.3], [0.4, 0.1], [0.35, 0.2]], (10, 1))
    >>> rule = LabelThresholds().fit(probs, np.tile([[1, 1], [1, 0], [0, 0]], (10, 1)))
    >>> rule.thresholds_.round(3), rule.predict([[0.38, 0.2]])
    (array([0.375, 0.25 ]), array([[ True, False]]))
    """

    kind = "labels"
    independent = True

    precision: float | None = None
    delta: float = 0.05
    costs: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        checks.check_share("delta", self.delta, "0.05 is the default")
        if self.precision is not None:
            check_promise("precision", self.precision, self.delta)
        if self.costs is not None:
            costs = checks.as_floats("costs", self.costs)
            # Comparisons with NaN are False.
            is_pair = costs.shape == (2,) and 0 < costs.min() <= costs.max() < math.inf
            way_out = "pass (cost of a false positive, cost of a false negative)"
            check(is_pair, "costs to be two numbers above 0", self.costs, way_out)
        is_one = self.precision is None or self.costs is None
        requirement = "precision or costs to be given, not both"
        got = f"precision={self.precision} with costs={self.costs}"
        check(is_one, requirement, got, "leave one out")

    def promise(self) -> str:
        if self.precision is not None:
            which = "the predictions of each label"
            right = _in_words(self.precision, self.delta, which)
            return f"predicts labels so that {right}"
        aim = "a large macro F1" if self.costs is None else "a small cost"
        return f"predicts a label above its own threshold, chosen for {aim}"

    def _fit(self, probs: FloatArray, labels: NDArray[np.bool_]) -> None:
        way_out = "pass rows that have labels"
        check(bool(labels.any()), "labels to hold a positive", "none", way_out)
        n_rows, n_labels = probs.shape
        columns = list(zip(probs.T, labels.T, strict=True))
        if self.precision is not None:
            # All labels share delta at first, and have the same number of rows.
            own_delta = self.delta / n_labels
            check_rows_for(self.precision, own_delta, n_rows, "precision")
            self.thresholds_ = certified_thresholds(columns, self.precision, self.delta)
        else:
            self.thresholds_ = np.array([self._best(*column) for column in columns])
            rare = labels.sum(axis=0) < _FEW_POSITIVES
            said = (
                f"{{}}: fewer than {_FEW_POSITIVES} positives, which determine no threshold well. "
                "Use more calibration rows, or a threshold that several labels share."
            )
            _warn_of("label", rare, said)
        never = "The rule never predicts {}: no threshold meets the criterion. Add rows, or require less."
        _warn_of("label", self.thresholds_ == NEVER, never)

    def _decide(self, probs: FloatArray) -> NDArray[np.bool_]:
        return probs > self.thresholds_

    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        requirement = "be called on a rule with one class per row"
        way_out = "pass labels and predict(probs) to a metric, such as sklearn.metrics.f1_score"
        raise InputTypeError(
            expected("measure", requirement, type(self).__name__, way_out)
        )

    def _best(self, probs: FloatArray, labels: NDArray[np.bool_]) -> float:
        """The threshold of a label with the largest F1 or the lowest cost; the highest of several."""
        # Rows with equal probabilities are predicted together, the most probable first.
        negative, places = np.unique(-probs, return_inverse=True)
        ordered = -negative
        midway = (ordered + np.append(ordered[1:], 0.0)) / 2
        # The first threshold predicts nothing, the last one all rows.
        thresholds = np.append(NEVER, midway)
        # Probabilities that are as good as equal are predicted together, too.
        is_apart = np.append(True, ordered - np.append(ordered[1:], -1.0) > TIED)
        n_predicted = np.append(0, np.bincount(places).cumsum())
        n_right = np.append(0, np.bincount(places, weights=labels).cumsum())
        if self.costs is None:
            # A label without positives has an F1 of 0 at every threshold.
            gains = 2 * n_right / np.maximum(n_predicted + n_right[-1], 1)
        else:
            false_positive, false_negative = self.costs
            saved = (false_positive + false_negative) * n_right
            gains = saved - false_positive * n_predicted
        return float(thresholds[np.where(is_apart, gains, -np.inf).argmax()])
