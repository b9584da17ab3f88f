"""Cost matrices: the decision of least expected cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.decisions._rule import Rule, class_probs, class_rows
from hf_calib.decisions.measured import Results, answers, mean
from hf_calib.metrics.checks import IntArray, as_floats

_LARGEST = 1e12  # beyond, means over rows lose the small ones


@dataclass(eq=False)
class CostRule(Rule):
    r"""Take the decision whose expected cost is least; where that is the last column, -1, "hand over".

    For errors that cost different amounts, or where handing over has a price. Unlike the other rules it
    believes the probabilities, so it is as good as they are calibrated:

    $$\arg\min_d \sum_y p_y\, \text{costs}_{y d}.$$

    Args:
        costs: (C, C) float, what it costs to decide d (column) where y (row) is true, in any unit, gains below
            0; or (C, C + 1), whose last column is what it costs to hand over.

    Notes:
        Nothing is estimated: `fit` checks that the classes are those of the costs, and `predict` needs no `fit`.
        Of equal costs the first column is taken.

    References:
        Chow 1970 (handing over at a cost); Elkan 2001, "The foundations of cost-sensitive learning".

    >>> rule = CostRule([[0, 1, 0.3], [10, 0, 0.3]])  # to miss class 1 costs 10, to hand over 0.3
    >>> rule.predict([[0.99, 0.01], [0.9, 0.1], [0.2, 0.8]])
    array([ 0, -1,  1])
    """

    kind: ClassVar[str] = "costs"
    fitted: ClassVar[tuple[str, ...]] = ()

    costs: ArrayLike

    def __post_init__(self) -> None:
        costs = as_floats("costs", self.costs)
        is_matrix = costs.ndim == 2 and len(costs) >= 2 and costs.shape[1] - costs.shape[0] in (0, 1)
        requirement = "costs to have shape (C, C) or (C, C + 1) with C at least 2"
        way_out = "give each true class a row, each decision a column, and handing over the last one"
        check(is_matrix, requirement, f"shape {costs.shape}", way_out)
        wrong = np.argwhere(~np.isfinite(costs))
        got = "; ".join(f"{costs[row, column]} in row {row}, column {column}" for row, column in wrong[:1])
        way_out = "give a decision that must never be taken a cost that is large"
        check(not len(wrong), "costs to be finite", got, way_out)
        largest = np.abs(costs).max()
        way_out = "state them in a larger unit: only their ratios matter"
        check(largest <= _LARGEST, f"costs to be at most {_LARGEST:g}", f"{largest:g}", way_out)
        self.costs = costs

    def fit(self, probs: ArrayLike, labels: ArrayLike) -> CostRule:
        """Check that probs (N, C) and labels (N,) have the classes of the costs."""
        rows, _ = class_rows(probs, labels)
        class_probs(rows, len(np.asarray(self.costs)))
        return self

    def predict(self, probs: ArrayLike) -> IntArray:
        """(N,) int: the class to decide for, or -1 for "hand over"."""
        costs = np.asarray(self.costs)
        decided = (class_probs(probs, len(costs)) @ costs).argmin(axis=1)
        return np.where(decided == len(costs), -1, decided)

    def measure_decided(self, decided: NDArray[Any], probs: ArrayLike, labels: ArrayLike) -> Results:
        """The "cost" per input, "cost_argmax" of the most probable class and the "saving", with 95% intervals.

        Those of costs are by paired bootstrap, those of the share "answered" and its "accuracy" exact binomial ones.
        """
        costs = np.asarray(self.costs)
        rows, targets = class_rows(probs, labels)
        paid = costs[targets, decided]  # -1 is the last column
        argmax = costs[targets, rows.argmax(axis=1)]
        return {
            **answers(decided, targets),
            "cost": mean(paid),
            "cost_argmax": mean(argmax),
            "saving": mean(argmax - paid),
        }

    def promise(self) -> str:
        rows, columns = np.asarray(self.costs).shape
        last = ", or hands over where that is cheaper" if columns > rows else ""
        return f"takes the decision of least expected cost{last}"
