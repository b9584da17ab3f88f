"""The section of a token model's report on entities: how many are found, and whether their confidences are right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from hf_calib.metrics.entities import Entities, are_bio, entity_scores, find_entities
from hf_calib.metrics.sums import Interval
from hf_calib.report.text import Table, columns, with_interval

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport

TITLES = {
    "f1": "F1",
    "precision": "Precision",
    "recall": "Recall",
    "ece_product": "ECE, product of the tokens' probabilities",
    "ece_minimum": "ECE, smallest of the tokens' probabilities",
}


@dataclass(frozen=True)
class EntitySection:
    """The entities of a report's sentences.

    Args:
        n_sentences: S.
        n_true: true entities.
        before: score -> what `hf_calib.metrics.entity_scores` found for the probabilities as the model gives them.
        after: the same for the calibrated ones, or None.
        found_before: the predicted entities themselves.
        found_after: the same of the calibrated probabilities, or None.
    """

    n_sentences: int
    n_true: int
    before: Mapping[str, Interval]
    after: Mapping[str, Interval] | None
    found_before: Entities = field(repr=False, compare=False)
    found_after: Entities | None = field(repr=False, compare=False)

    def sentences(self) -> list[str]:
        """How entities were counted, and the meaning of the rows."""
        return [
            f"{self.n_true:,} true entities in {self.n_sentences:,} sentences; predicted are {self._predicted()}. One "
            "is right where a true entity has the same type, first and last token. Intervals resample sentences.",
            "ECE: mean distance, over bins of confidence, between the share of predicted entities that are right and "
            "their confidence, which is the product, or the smallest, of the probabilities of its tokens' tags. "
            "Entities that are missed have no confidence: read the recall. Noise makes both errors larger: they have "
            "no interval.",
        ]

    def table(self) -> Table:
        """Each score with its interval, before and after calibration."""
        states = columns(self.before, self.after)
        rows = [
            [title, *(_cell(found[score]) for found in states.values())] for score, title in TITLES.items()
        ]
        return ["entities", *states], rows

    def panels(self) -> dict[str, dict[str, tuple[Any, Any]]]:
        """(confidences, correct) of each confidence, before and after; none where a state predicts no entity."""
        states = {"predicted entities": self.found_before}
        if self.found_after is not None:
            states = {"before": self.found_before, "after calibration": self.found_after}
        if not all(len(entities.correct) for entities in states.values()):
            return {}
        return {
            kind: {name: (getattr(each, kind), each.correct) for name, each in states.items()}
            for kind in ("product", "minimum")
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the entities, of JSON's own types; None where there is no number."""
        return {
            "n_sentences": self.n_sentences,
            "n_true": self.n_true,
            **{
                state: None
                if scores is None or found is None
                else {
                    "n_predicted": len(found.correct),
                    **{
                        score: {
                            key: value if value is not None and math.isfinite(value) else None
                            for key, value in interval._asdict().items()
                        }
                        for score, interval in scores.items()
                    },
                }
                for state, scores, found in (
                    ("before", self.before, self.found_before),
                    ("after", self.after, self.found_after),
                )
            },
        }

    def _predicted(self) -> str:
        before = f"{len(self.found_before.correct):,}"
        return (
            before
            if self.found_after is None
            else f"{before} before, {len(self.found_after.correct):,} after"
        )


def with_entities(report: CalibrationReport, sentences: ArrayLike | None) -> CalibrationReport:
    """Add what the tokens' sentences tell to their report: the entities where tags are BIO, and a caveat.

    Args:
        report: of N tokens.
        sentences: (N,) int, the same number for all tokens of a sentence; None where the rows are not tokens.

    Raises:
        ValueError: as `hf_calib.metrics.find_entities`.

    >>> import numpy as np
    >>> from hf_calib.report import calibration_report
    >>> probs = np.tile([[0.1, 0.9, 0.0], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]], (20, 1))
    >>> tokens = calibration_report(
    ...     probs, np.tile([1, 2, 0], 20), class_names=["O", "B-x", "I-x"], n_resamples=100
    ... )
    >>> report = with_entities(tokens, np.repeat(np.arange(20), 3))
    >>> report.entities.before["f1"].value, round(report.entities.before["ece_product"].value, 2)
    (1.0, 0.28)
    """
    if sentences is None:
        return report
    caveat = (
        "The examples are tokens. Those of one sentence are not independent, as the intervals of their metrics and the "
        "tests take them: these are too narrow."
    )
    found = _measure(report, sentences) if are_bio(report.class_names) else None
    return replace(report, entities=found, notes=(*report.notes, caveat))


def _measure(report: CalibrationReport, sentences: ArrayLike) -> EntitySection:
    states = [None if state is None else state.probs for state in (report.before, report.after)]
    before, after = (
        None
        if probs is None
        else find_entities(probs, report.labels, sentences, tag_names=report.class_names)
        for probs in states
    )
    assert before is not None
    scores = [
        None
        if found is None
        else entity_scores(
            found,
            n_bins=report.n_bins,
            n_resamples=report.n_resamples,
            confidence_level=report.confidence_level,
            seed=report.seed,
        )
        for found in (before, after)
    ]
    assert scores[0] is not None
    return EntitySection(len(before.n_true), int(before.n_true.sum()), scores[0], scores[1], before, after)


def _cell(score: Interval) -> str:
    return with_interval(*score) if math.isfinite(score.value) else "-"
