"""Decision rules: a score for each row of probabilities, and a threshold fitted to calibration rows."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv

from hf_calib._errors import InputTypeError, check, few
from hf_calib.decisions import promise as promises
from hf_calib.decisions.promise import (
    ALWAYS,
    NEVER,
    PromiseCurve,
    Results,
    answers,
    certified_threshold,
    mean,
    one_threshold_passes,
    share,
    share_of_any_threshold,
)
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.multi_label import check_decisions, check_label_probs
from hf_calib.metrics.sums import Interval, winners

Criterion = Literal["f1_macro", "f1_micro", "precision", "cost"]
_LARGEST_COST = 1e12  # With larger costs, means over rows lose the small costs.
_IN_EVERY_SET = 1.0  # No score of a class is larger.

#: Thresholds from one that predicts nothing to one that predicts all rows; of the m predicted, how many are correct.
Cuts = tuple[FloatArray, IntArray, IntArray]
Self = TypeVar("Self", bound="Rule")


class Rule(ABC):
    """Base class of the decision rules, which are dataclasses of their options."""

    kind: ClassVar[str]  # its name in decisions.json
    fitted: ClassVar[tuple[str, ...]] = (
        "thresholds_",
    )  # arrays (C,) in [0, 1] that `fit` makes
    results: ClassVar[str] = (
        ""  # the results of `measure`, in words that follow the promise
    )
    independent: ClassVar[bool] = (
        False  # True if any number of the columns may be true labels.
    )

    thresholds_: FloatArray

    def fit(self: Self, probs: ArrayLike, labels: ArrayLike) -> Self:
        """Fit to calibration rows, probs (N, C) and labels (N,), or (N, C) of independent labels; return the rule."""
        rows, targets = self._labelled(probs, labels)
        self.check_rows(len(rows))
        self._fit(rows, targets)
        return self

    def predict(self, probs: ArrayLike) -> NDArray[Any]:
        """Return the decisions on probs (N, C): classes (N,) int, -1 to abstain; sets and labels (N, C) bool."""
        n_classes = self.n_classes
        rows = (
            check_label_probs(probs) if self.independent else checks.check_probs(probs)
        )
        way_out = "pass probabilities of the model that the rule was fitted for"
        fits = rows.shape[1] == n_classes
        check(
            fits,
            f"probs to have the {n_classes} columns of fit",
            f"shape {rows.shape}",
            way_out,
        )
        return self._decide(_as_served(rows))

    def measure(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Return the results on rows not used for the fit, by the names of `promise.TITLES`."""
        return self._results(self.predict(probs), *self._labelled(probs, labels))

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
        return f"It {self.promise()}{self.results.format(**found, rows=rows) if found else ''}."

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
        way_out = "call fit(probs, labels) with calibration rows first"
        check(
            hasattr(self, "thresholds_"),
            f"{type(self).__name__} to be fitted",
            "a new rule",
            way_out,
        )
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
        """Checked probs (N, C), rounded as they are served, and labels: (N,), or (N, C) bool if independent."""
        if self.independent:
            decisions = check_decisions(probs, labels)
            way_out = "leave out rows with unknown labels"
            check(
                bool(decisions.known.all()), "labels to be 0 or 1", "also -100", way_out
            )
            return _as_served(decisions.probs), decisions.true
        rows, targets = checks.check_probs_and_labels(probs, labels)
        way_out = "for one probability p of the second of two classes, np.stack([1 - p, p], axis=1)"
        several = rows.shape[1] >= 2
        check(
            several, "probs to have at least 2 classes", f"shape {rows.shape}", way_out
        )
        return _as_served(rows), targets


def percent(value: float) -> str:
    """A share as a percentage without trailing zeros, such as 95% or 99.9%."""
    return f"{100 * value:.4g}%"


def _as_served(probs: NDArray[Any]) -> FloatArray:
    """Probabilities in [0, 1], float64, rounded to float32 as in the output of a pipeline."""
    # If two values differ in float64 only, a threshold between them would accept more rows in a pipeline.
    return np.clip(probs.astype(np.float32), 0, 1).astype(np.float64)


def _warn_of(noun: str, chosen: NDArray[np.bool_], said: str) -> None:
    """Warn of classes or labels, if any, in a text with a place for "class 3" or "classes 0, 2, 5"."""
    numbers = np.flatnonzero(chosen).tolist()
    plural = {"class": "classes"}.get(noun, f"{noun}s")
    if numbers:
        text = said.format(f"{noun if len(numbers) == 1 else plural} {few(numbers)}")
        warnings.warn(text[0].upper() + text[1:], stacklevel=4)


@dataclass(kw_only=True, eq=False)
class AbstainRule(Rule):
    r"""Answer with the most probable class if its probability is high enough; otherwise abstain (-1).

    Use it for requirements such as "95% of the answers must be correct". The threshold is the lowest confidence above
    which the accuracy is guaranteed, not only estimated: if many users draw calibration rows of their own, at most a
    fraction `delta` of them get a rule with a lower accuracy,

    $$P\big(\,P(\text{correct} \mid \text{answered}) \ge a\,\big) \ge 1 - \delta.$$

    The guarantee holds for inputs distributed like the calibration rows, even if the model is not calibrated. If the
    model cannot reach a, the rule always abstains. The test is `decisions.promise.certified_threshold`.

    Args:
        accuracy, delta: a and delta, in (0, 1). They need log(delta) / log(a) rows, 59 for 0.95 and 299 for 0.99.
        by_class: guarantee the accuracy for each class's answers, and abstain on classes predicted too seldom.

    Attributes:
        thresholds_: (C,) a prediction of a class is answered if its probability is above the threshold.

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
        return f"answers inputs so that at least {least} of {each} are correct, with {confidence} confidence"

    def sentence(self, measured: Mapping[str, Interval], rows: str) -> str:
        accuracy = f"{percent(self.accuracy)} accuracy"
        if self.answers_nothing:
            return f"It abstains on every input: {accuracy} could not be promised."
        if "answered" not in measured:
            return super().sentence({}, rows)
        kept = measured.get("accuracy")
        right = (
            "no answers"
            if kept is None
            else f"{kept.value:.1%} of its answers were correct"
        )
        share_of = f"{measured['answered'].value:.0%} of inputs at {accuracy}"
        return f"It answers {share_of} and abstains on the rest ({right}, {rows})."

    def curve(
        self,
        probs: ArrayLike,
        labels: ArrayLike,
        other_probs: ArrayLike,
        other_labels: ArrayLike,
        *,
        accuracies: Sequence[float],
    ) -> PromiseCurve:
        """Return the results on other rows of rules with these accuracies, without those that are too high."""
        n_rows = len(np.asarray(labels))
        possible = [
            accuracy
            for accuracy in accuracies
            if n_rows >= promises.rows_needed(accuracy, self.delta)
        ]
        rows, targets = self._labelled(probs, labels)
        found = []
        for accuracy in possible:
            rule = replace(self, accuracy=accuracy)
            # The advice on a promise that fails takes most of the time of a fit.
            rule.thresholds_ = self._thresholds(rows, targets, accuracy)
            found.append(rule.measure(other_probs, other_labels))
        answered = tuple(row["answered"].value for row in found)
        kept = tuple(row.get("accuracy") for row in found)
        return PromiseCurve(tuple(possible), answered, kept)

    def measure_fit(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Return the share of answered inputs, and their accuracy from the promise upwards."""
        chosen = self.predict(probs)
        answered = chosen >= 0
        n_live = int(np.count_nonzero(self.thresholds_ < NEVER)) if self.by_class else 1
        if self.answers_nothing:
            return {"answered": Interval(0.0, 0.0, 0.0)}
        found = {"answered": share_of_any_threshold(answered, n_live)}
        if (self.thresholds_ == ALWAYS).all():
            found["answered"] = Interval(1.0, 1.0, 1.0)
        if answered.any():
            right = float((chosen == np.asarray(labels))[answered].mean())
            found["accuracy"] = Interval(right, min(self.accuracy, right), 1.0)
        return found

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        self.thresholds_ = self._thresholds(probs, labels, self.accuracy)
        cannot = f"An accuracy of {self.accuracy:g} cannot be promised"
        if not self.answers_nothing:
            needed = promises.rows_needed(self.accuracy, self.delta)
            way_out = (
                f"use more calibration rows: at least {needed:,} predictions of a class"
            )
            said = f"{cannot} for predictions of {{}}. The rule will abstain on them. Promise less, or {way_out}."
            _warn_of("class", self.thresholds_ == NEVER, said)
            return
        confidences, predicted = self._answers(probs)
        correct = predicted == labels
        right = f"{len(probs):,} rows, of which {correct.mean():.1%} are correct"
        # A larger accuracy means a lower coverage.
        lower = [k / 100 for k in range(50, math.ceil(100 * self.accuracy - 1e-9))]
        failing = bisect_left(
            lower,
            True,
            key=lambda a: (self._thresholds(probs, labels, a) == NEVER).all(),
        )
        less = f" ({lower[failing - 1]:g} would answer some)" if failing else ""
        classes = " for any class" if self.by_class else ""
        where = " at any confidence"
        more = ""
        if one_threshold_passes(confidences, correct, self.accuracy, self.delta):
            where = ""
            more = (
                " Rows with equal confidences are tested one by one, but answered together: "
                "confidences with more digits may pass."
            )
        message = f"{cannot}{classes}{where} from these {right}.{more} "
        message += f"The rule will always abstain. Promise less{less}, "
        message += "or use more rows or a better model."
        warnings.warn(message, stacklevel=3)

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

    def _thresholds(
        self, rows: FloatArray, targets: IntArray, accuracy: float
    ) -> FloatArray:
        """The thresholds (C,) for a guaranteed accuracy."""
        confidences, predicted = self._answers(rows)
        right = predicted == targets
        n_classes = rows.shape[1]
        if not self.by_class:
            return np.full(
                n_classes, certified_threshold(confidences, right, accuracy, self.delta)
            )
        # The most frequently predicted classes with enough rows share delta. A class that is always answered no longer
        # needs its share, which the others get (Holm's step-down): while no guarantee is violated, the other classes
        # include all whose guarantee could be, with levels of at most delta in total. Further classes never raise a
        # level, and a class keeps its starts, so a larger level passes everything that a smaller one does.
        counts = np.bincount(predicted, minlength=n_classes)
        left = np.argsort(-counts, kind="stable")
        thresholds = np.full(n_classes, NEVER)
        tested: dict[int, IntArray] = {}
        while True:
            needed = [
                promises.rows_needed(accuracy, self.delta / n)
                for n in range(1, len(left) + 1)
            ]
            sharing = max(np.flatnonzero(counts[left] >= needed) + 1, default=0)
            for c in left[:sharing]:
                own, delta = predicted == c, self.delta / sharing
                at = tested.setdefault(
                    int(c), promises.starts(int(counts[c]), accuracy, delta)
                )
                thresholds[c] = certified_threshold(
                    confidences[own], right[own], accuracy, delta, at
                )
            needing = left[thresholds[left] != ALWAYS]
            if len(needing) in (0, len(left)):
                return thresholds
            left = needing


@dataclass(kw_only=True, eq=False)
class TopLabelRule(AbstainRule):
    r"""Answer with the predicted class of a service if its confidence is high enough; otherwise abstain (-1).

    Use it instead of `AbstainRule` if only the confidence c of the predicted class is known. Its two classes are
    "wrong" with $1 - c$ and "correct" with c, and the only answer is "correct": the prediction is given.

    Args:
        accuracy, delta: as in `AbstainRule`.
        by_class: False, as the predicted classes are unknown.

    >>> confidence = np.tile([0.9, 0.3], 100)
    >>> correct = np.tile([1, 0, 1, 1], 50)
    >>> rule = TopLabelRule(accuracy=0.9).fit(np.stack([1 - confidence, confidence], axis=1), correct)
    >>> rule.predict([[0.1, 0.9], [0.7, 0.3]])
    array([ 1, -1])
    """

    kind: ClassVar[str] = "abstain_top_label"

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement = "by_class to be False for top labels"
        way_out = "leave it out, as the predicted classes are unknown"
        check(not self.by_class, requirement, self.by_class, way_out)

    def _answers(self, probs: FloatArray) -> tuple[FloatArray, IntArray]:
        return probs[:, 1], np.ones(len(probs), np.intp)


@dataclass(eq=False)
class CostRule(Rule):
    r"""Make the decision with the lowest expected cost; of C + 1 columns the last one means to abstain (-1).

    Use it if errors or abstaining have different costs. Unlike in other rules, probabilities must be calibrated:

    $$\arg\min_d \sum_y p_y\, \text{costs}_{y d}.$$

    Nothing is estimated, and `predict` needs no `fit`. If costs are equal, the first column is used.

    Args:
        costs: (C, C) float, the cost of decision d (column) if y (row) is true, in any unit, negative for gains; or
            (C, C + 1), where the last column is the cost of abstaining.

    References:
        Chow 1970 (abstaining at a cost); Elkan 2001, "The foundations of cost-sensitive learning".

    >>> rule = CostRule([[0, 1, 0.3], [10, 0, 0.3]])  # Missing class 1 costs 10, abstaining 0.3.
    >>> rule.predict([[0.99, 0.01], [0.9, 0.1], [0.2, 0.8]])
    array([ 0, -1,  1])
    """

    kind: ClassVar[str] = "costs"
    fitted: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[str] = (
        " ({cost:.4g} per input, {cost_argmax:.4g} without the rule, {rows})"
    )

    costs: ArrayLike

    def __post_init__(self) -> None:
        costs = checks.as_floats("costs", self.costs)
        is_matrix = (
            costs.ndim == 2
            and len(costs) >= 2
            and costs.shape[1] - costs.shape[0] in (0, 1)
        )
        way_out, got = (
            "give a row per class, and a column per decision",
            f"shape {costs.shape}",
        )
        check(
            is_matrix,
            "costs to have shape (C, C) or (C, C + 1) with C at least 2",
            got,
            way_out,
        )
        allowed = np.abs(costs) <= _LARGEST_COST  # This is False for NaN.
        row, column = np.unravel_index(allowed.argmin(), costs.shape)
        got = f"{costs[row, column]} in row {row}, column {column}"
        way_out = (
            "give a forbidden decision a large cost; only the ratios of costs matter"
        )
        check(
            bool(allowed.all()),
            f"costs to be finite and at most {_LARGEST_COST:g}",
            got,
            way_out,
        )
        self.costs = self._costs = costs

    @property
    def n_classes(self) -> int:
        return len(self._costs)

    def promise(self) -> str:
        rows, columns = self._costs.shape
        abstains = ", or abstains if that is cheaper" * (columns - rows)
        return f"makes the decision with the lowest expected cost{abstains}"

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        self.predict(probs)  # It raises for a wrong number of classes.

    def _decide(self, probs: FloatArray) -> IntArray:
        decided = (probs @ self._costs).argmin(axis=1)
        return np.where(decided == self.n_classes, -1, decided)

    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        paid = self._costs[labels, decided]  # -1 is the last column.
        argmax = self._costs[labels, probs.argmax(axis=1)]
        found = {
            "cost": mean(paid),
            "cost_argmax": mean(argmax),
            "saving": mean(argmax - paid),
        }
        return answers(decided, labels) | found


@dataclass(kw_only=True, eq=False)
class PredictionSets(Rule):
    r"""Return all classes that are probable enough, so that the set has the true class with probability 1 - alpha.

    Use it if a person or a second model chooses among few candidates. Unlike in `AbstainRule`, the guarantee is an
    average over calibration rows and inputs, and the rule never abstains. With the k-th smallest score q of the N
    calibration rows, where k = ceil((N + 1) (1 - alpha)):

    $$\{c : s_c \le q\}, \quad s_c = 1 - p_c \text{ (lac)},
    \quad s_c = \sum_{j \text{ before } c} p_j \text{ (aps)},$$

    where classes are in the order of their probabilities, and of their columns if these are equal.

    Args:
        alpha: in (0, 1), the fraction of sets that may miss the true class.
        method: "lac" has the smallest sets on average if the probabilities are correct, and an empty set if no class is
            probable enough. "aps" has larger sets if the model is uncertain, always with the most probable class.
        by_class: guarantee 1 - alpha for the inputs of every true class, with a threshold for each. A class with fewer
            than 1 / alpha - 1 rows is in every set.

    Attributes:
        thresholds_: (C,) a class is in the set if its score is at most the threshold.

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
    results: ClassVar[str] = (
        " ({coverage:.1%}, with {size:.2f} classes on average, {rows})"
    )

    alpha: float = 0.1
    method: Literal["lac", "aps"] = "lac"
    by_class: bool = False

    def __post_init__(self) -> None:
        checks.check_share(
            "alpha", self.alpha, "0.1 lets one set in ten miss the true class"
        )
        checks.check_choice("method", self.method, ("lac", "aps"))
        checks.check_flag("by_class", self.by_class)

    def check_rows(self, n_rows: int) -> None:
        requirement = f"the calibration rows to be at least {self._rows_needed:,} for alpha={self.alpha:g}"
        way_out = f"pass more rows, or alpha={1 / (n_rows + 1):.4g}"
        check(n_rows >= self._rows_needed, requirement, f"{n_rows:,}", way_out)

    def promise(self) -> str:
        share_of = f"{percent(1 - self.alpha)} of {'the inputs of each class' if self.by_class else 'inputs'}"
        return (
            f"gives sets of classes that contain the true class for at least {share_of}"
        )

    @property
    def _rows_needed(self) -> int:
        return math.ceil(1 / self.alpha - 1 - 1e-9)

    def _fit(self, probs: FloatArray, labels: IntArray) -> None:
        scores = self._scores(probs)[np.arange(len(probs)), labels]
        groups = (
            [scores[labels == c] for c in range(probs.shape[1])]
            if self.by_class
            else [scores]
        )
        self.thresholds_ = np.resize(
            [self._quantile(group) for group in groups], probs.shape[1]
        )
        rare = np.array([len(group) < self._rows_needed for group in groups])
        few_rows = (
            f"fewer rows than the {self._rows_needed} that alpha={self.alpha:g} needs"
        )
        _warn_of(
            "class",
            rare,
            f"{{}}: {few_rows}, so every set holds them. Use more calibration rows.",
        )

    def _decide(self, probs: FloatArray) -> NDArray[np.bool_]:
        return self._scores(probs) <= self.thresholds_

    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        covered = share(decided[np.arange(len(decided)), labels])
        return {"coverage": covered, "size": mean(decided.sum(axis=1))}

    def measure_fit(self, probs: ArrayLike, labels: ArrayLike) -> Results:
        """Return the results; given these rows, new inputs have a coverage of Beta(k, N + 1 - k).

        By class, the classes share the level of the interval, and are weighted by their rows.
        """
        found = self.measure(probs, labels)
        rows, targets = self._labelled(probs, labels)
        scores = self._scores(rows)[np.arange(len(rows)), targets]
        groups = [slice(None)]
        if self.by_class:
            groups = [targets == c for c in np.unique(targets)]
        tail = 0.025 / len(groups)
        ends = np.zeros(2)
        for group in groups:
            own = scores[group]
            ends += len(own) / len(scores) * self._coverage_of_new(own, tail)
        value = found["coverage"].value
        low = min(float(ends[0]), value)
        found["coverage"] = Interval(value, low, max(float(ends[1]), value))
        return found

    def _coverage_of_new(self, scores: FloatArray, tail: float) -> FloatArray:
        """The ends (2,) of the coverage of new inputs, given the scores of calibration rows."""
        n_rows = len(scores)
        rank = self._rank(n_rows)
        if rank > n_rows:
            return np.ones(2)
        low = betaincinv(rank, n_rows + 1 - rank, tail)
        # With ties at the threshold, more rows are covered than the rank says.
        n_covered = int(np.count_nonzero(scores <= self._quantile(scores)))
        highest = rank if n_covered == rank else n_covered + 1
        if highest > n_rows:
            return np.array([low, 1.0])
        return np.array([low, betaincinv(highest, n_rows + 1 - highest, 1 - tail)])

    def _scores(self, probs: FloatArray) -> FloatArray:
        """The scores (N, C) of the classes, at most 1."""
        if self.method == "lac":
            return 1 - probs
        order = np.argsort(-probs, axis=1, kind="stable")
        sums = np.cumsum(np.take_along_axis(probs, order, axis=1), axis=1)
        scores = np.zeros_like(sums)
        np.put_along_axis(
            scores, order[:, 1:], np.minimum(sums[:, :-1], _IN_EVERY_SET), axis=1
        )
        return scores

    def _rank(self, n_rows: int) -> int:
        """The rank k of the threshold among the scores of this number of rows."""
        return math.ceil((n_rows + 1) * (1 - self.alpha) - 1e-9)

    def _quantile(self, scores: FloatArray) -> float:
        rank = self._rank(len(scores))
        return (
            _IN_EVERY_SET
            if rank > len(scores)
            else float(np.partition(scores, rank - 1)[rank - 1])
        )


@dataclass(kw_only=True, eq=False)
class LabelThresholds(Rule):
    r"""Predict each label of a multi-label model if its probability is above its own threshold.

    A threshold of 0.5 for all labels is not the best for F1, precision or costs. With $m$ predictions, $t$ of which are
    true, and $P$ rows that have the label, the threshold is the one that has on the calibration rows

    - "f1_macro": the largest F1 of the label, $2 t / (m + P)$;
    - "f1_micro": together with the others, the largest $2 \sum t / (\sum m + \sum P)$;
    - "precision": the most predictions with a fraction of correct ones of at least `precision`, which is guaranteed
      with confidence 1 - delta for all labels together, as in `AbstainRule` for classes;
    - "cost": the lowest $c_1 (m - t) + c_2 (P - t)$.

    Args:
        criterion: one of these names.
        precision, delta: in (0, 1), for "precision" only.
        costs: (c_1, c_2), the costs of a false positive and of a false negative, each above 0; for "cost" only.
        min_positives: a label with fewer rows gets the best threshold of all labels together, with a warning; its
            precision is not guaranteed.

    Attributes:
        thresholds_: (C,) a label is predicted if its probability is above the threshold, the midpoint of the two
            probabilities that it separates, or for "precision" the lower one. A probability of 0 never is.
        pooled_: (C,) bool, True for labels with the common threshold.

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
            requirement = (
                f"{argument} to be given for criterion={criterion!r}, and for no other"
            )
            got = f"{argument}={given} with criterion={self.criterion!r}"
            check(
                (given is not None) == is_needed, requirement, got, "pass both or none"
            )
        if self.precision is not None:
            promises.check_promise("precision", self.precision, self.delta)
        if self.costs is not None:
            costs = checks.as_floats("costs", self.costs)
            is_pair = costs.shape == (2,) and bool(
                ((costs > 0) & np.isfinite(costs)).all()
            )
            way_out = "pass (cost of a false positive, cost of a false negative)"
            check(is_pair, "costs to be two numbers above 0", self.costs, way_out)
        checks.check_share("delta", self.delta, "0.05 is the default")
        way_out = "a label without positives has no threshold of its own"
        checks.check_integer("min_positives", self.min_positives, 1, way_out)

    def promise(self) -> str:
        if self.precision is not None:
            least, confidence = percent(self.precision), percent(1 - self.delta)
            right = f"at least {least} of the predictions of each label are correct"
            return f"predicts labels so that {right}, with {confidence} confidence"
        aim = {
            "f1_macro": "a large macro F1",
            "f1_micro": "a large micro F1",
            "cost": "a small cost",
        }
        return f"predicts a label above its own threshold, chosen for {aim[self.criterion]}"

    def _fit(self, probs: FloatArray, labels: NDArray[np.bool_]) -> None:
        positives = labels.sum(axis=0)
        pooled = positives < self.min_positives
        enough = not pooled.all() or positives.sum() >= self.min_positives
        requirement = f"labels to have at least min_positives={self.min_positives} positives in total"
        check(enough, requirement, positives.sum(), "pass more rows")
        found = np.full(len(pooled), NEVER)
        found[~pooled] = self._best(
            [(probs[:, c], labels[:, c]) for c in np.flatnonzero(~pooled)]
        )
        never = "The rule never predicts {}: no threshold meets the criterion. Add rows, or require less."
        _warn_of("label", ~pooled & (found == NEVER), never)
        if pooled.any():
            (found[pooled],) = self._best([(probs.ravel(), labels.ravel())])
            together = (
                f"The threshold is that of all labels together, {found[pooled][0]:.3g}."
            )
            together += " It guarantees no precision." * (self.precision is not None)
            said = f"{{}}: fewer than {self.min_positives} positives. {together} Use more calibration rows."
            _warn_of("label", pooled, said)
        self.thresholds_, self.pooled_ = found, pooled

    def _decide(self, probs: FloatArray) -> NDArray[np.bool_]:
        return probs > self.thresholds_

    def _results(
        self, decided: NDArray[Any], probs: FloatArray, labels: IntArray
    ) -> Results:
        requirement = "measure to be called on a rule with one class per row"
        way_out = "pass labels and predict(probs) to a metric, such as sklearn.metrics.f1_score"
        raise InputTypeError(
            f"expected {requirement}, got {type(self).__name__}; {way_out}"
        )

    def _best(self, columns: list[tuple[FloatArray, NDArray[np.bool_]]]) -> list[float]:
        """The best threshold for each pair (probs, labels)."""
        if self.precision is not None:
            delta = self.delta / max(len(columns), 1)
            for probs, _ in columns:
                promises.check_rows_for(
                    self.precision, delta, len(probs), argument="precision"
                )
            return [
                certified_threshold(*column, self.precision, delta)
                for column in columns
            ]
        cuts = [_cuts(probs, labels) for probs, labels in columns]
        if self.costs is not None:
            false_positive, false_negative = self.costs
            gains = [
                (false_positive + false_negative) * hits - false_positive * m
                for _, m, hits in cuts
            ]
        elif self.criterion == "f1_micro":
            f1 = _largest_micro_f1(cuts)
            gains = [2 * hits - f1 * m for _, m, hits in cuts]
        else:
            gains = [2 * hits / (m + hits[-1]) for _, m, hits in cuts]
        return [
            float(thresholds[gain.argmax()])
            for (thresholds, *_), gain in zip(cuts, gains, strict=True)
        ]


def _cuts(probs: FloatArray, labels: NDArray[np.bool_]) -> Cuts:
    """All thresholds with different predictions, from the highest, which predicts nothing."""
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order]
    ends = np.append(
        np.flatnonzero(ordered[1:] < ordered[:-1]), len(ordered) - 1
    )  # of runs of ties
    midway = (ordered[ends] + np.append(ordered[ends[:-1] + 1], 0.0)) / 2
    hits = np.cumsum(labels[order])
    return np.append(NEVER, midway), np.append(0, ends + 1), np.append(0, hits[ends])


def _largest_micro_f1(cuts: list[Cuts]) -> float:
    """The thresholds of the largest micro F1, a ratio of sums, by Dinkelbach's method."""
    before, f1 = -1.0, 0.0
    while f1 > before:  # This needs fewer than ten steps.
        best = [(m, hits, (2 * hits - f1 * m).argmax()) for _, m, hits in cuts]
        right = sum(int(hits[i]) for _, hits, i in best)
        size = sum(int(m[i] + hits[-1]) for m, hits, i in best)
        before, f1 = f1, 2 * right / max(size, 1)
    return before
