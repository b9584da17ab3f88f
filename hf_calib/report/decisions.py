"""The section of a report on decisions: what a rule promises, and what it does on the report's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_calib.decisions.measured import TITLES, PromiseCurve
from hf_calib.metrics.sums import Interval
from hf_calib.report.text import Table, columns, with_interval


@dataclass(frozen=True)
class DecisionSection:
    """A rule, measured on the rows of a report.

    Args:
        promise: what it does, in words that go on from "The rule"; see the rules' `promise`.
        n_fitted: calibration rows that it was fitted on, with the probabilities before calibration and with
            those after it.
        before: what `measure` of the rule found.
        after: the same for the rule that was fitted after calibration, or None.
        curves: for `AbstainRule`, other promised accuracies, by the name of the probabilities.
        n_fitted_after: rows that the rule after calibration was fitted on, where these are others.
        n_folds: of the cross-fitting by which it was measured; 0 where that was on other data.
    """

    promise: str
    n_fitted: int
    before: Mapping[str, Interval]
    after: Mapping[str, Interval] | None = None
    curves: Mapping[str, PromiseCurve] = field(default_factory=dict)
    n_fitted_after: int | None = None
    n_folds: int = 0

    def sentences(self) -> list[str]:
        """The promise of the rule, and the inputs it holds for."""
        after = "" if self.n_fitted_after is None else f" ({self.n_fitted_after:,} of them after calibration)"
        how = (
            f"and measured on the same rows by cross-fitting: in {self.n_folds} folds, each row by a rule that was "
            "fitted without it"
            if self.n_folds
            else "and measured on others"
        )
        said = [f"The rule {self.promise}. It was fitted on {self.n_fitted:,} rows{after}, {how}."]
        for state, found in columns(self.before, self.after).items():
            if "answered" in found and "accuracy" not in found:
                said.append(f"Nothing is answered{'' if self.after is None else f' {state} calibration'}.")
        if "saving" in self.before:
            said.append("The saving is against deciding for the most probable class.")
        return said

    def table(self) -> Table:
        """Results of the rule, with 95% intervals, before and after calibration."""
        states = columns(self.before, self.after)
        keys = [key for key in TITLES if any(key in found for found in states.values())]
        rows = [
            [TITLES[key], *(with_interval(*found[key]) if key in found else "" for found in states.values())]
            for key in keys
        ]
        return ["decisions", *states], rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {
            "promise": self.promise,
            "n_fitted": self.n_fitted,
            "n_fitted_after": self.n_fitted_after,
            "n_folds": self.n_folds,
            **{
                state: None if found is None else {key: interval._asdict() for key, interval in found.items()}
                for state, found in (("before", self.before), ("after", self.after))
            },
            "curves": {
                name: {
                    "promised": list(curve.promised),
                    "answered": list(curve.answered),
                    "kept": [None if kept is None else kept._asdict() for kept in curve.kept],
                }
                for name, curve in self.curves.items()
            },
        }
