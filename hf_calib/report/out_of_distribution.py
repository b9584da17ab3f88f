"""The section of a report on inputs from elsewhere: how well the model's uncertainty tells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from hf_calib.metrics.ranking import OOD_SCORES, OodDetection, ood_detection
from hf_calib.report.text import Table, columns, with_interval

# Of probabilities, whose logarithms are logits that are shifted in each row.
_OF_PROBABILITIES = ("max_probability", "entropy")


@dataclass(frozen=True)
class OodSection:
    """Inputs from elsewhere against the rows of a report.

    Args:
        name: of the data from elsewhere.
        n_examples: of them.
        before: score -> what `hf_calib.metrics.ood_detection` found for the logits as the model gives them.
        after: the same for the calibrated ones, or None.
    """

    name: str
    n_examples: int
    before: Mapping[str, OodDetection]
    after: Mapping[str, OodDetection] | None = None

    def sentences(self) -> list[str]:
        """The data that were compared, and the meaning of the columns."""
        return [
            f"{self.n_examples:,} inputs of {self.name}, which are none of the classes, against the rows of "
            "this report. An input is flagged where its uncertainty is above a threshold.",
            "AUROC: the probability that an input from elsewhere looks more uncertain than a familiar one; 0.5 is "
            "chance. FPR at 95%: the share of the inputs from elsewhere that is accepted where 95% of the familiar "
            "ones are.",
        ]

    def table(self) -> Table:
        """Both rates for each score, with intervals, before and after calibration."""
        states = columns(self.before, self.after)
        rows = [
            [f"{title}, {OOD_SCORES[score].lower()}"]
            + [with_interval(*getattr(found[score], rate)) for found in states.values()]
            for rate, title in (("auroc", "AUROC"), ("fpr95", "FPR at 95%"))
            for score in self.before
        ]
        return ["told by", *states], rows

    def curves(self) -> dict[str, OodDetection]:
        """ROC curves for the figure: each score, after calibration where it was measured."""
        found = self.before if self.after is None else self.after
        return {OOD_SCORES[score]: detection for score, detection in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the curves, of JSON's own types."""
        return {
            "name": self.name,
            "n_examples": self.n_examples,
            **{
                state: None
                if found is None
                else {
                    score: {rate: getattr(detection, rate)._asdict() for rate in ("auroc", "fpr95")}
                    for score, detection in found.items()
                }
                for state, found in (("before", self.before), ("after", self.after))
            },
        }


def ood_section(
    name: str,
    before: tuple[ArrayLike, ArrayLike],
    after: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    probabilities: bool = False,
    seed: int = 0,
) -> OodSection:
    """Measure how well out-of-distribution inputs are separated from the rows of a report.

    Args:
        name: of the data from elsewhere.
        before: logits (N, C) of the report's rows and (N', C) of those from elsewhere, as the model gives them.
        after: the calibrated ones, or None.
        probabilities: whether these are logarithms of probabilities, for which two of the scores say nothing.
        seed: of the bootstrap.

    Raises:
        ValueError: as `hf_calib.metrics.ood_detection`.
    """
    scores = _OF_PROBABILITIES if probabilities else tuple(OOD_SCORES)
    found = [
        None if pair is None else ood_detection(*pair, scores=scores, seed=seed) for pair in (before, after)
    ]
    assert found[0] is not None
    return OodSection(name, len(before[1]), found[0], found[1])  # type: ignore[arg-type]  # arrays have a length
