"""The sections of a report on what not every report has: a rule, entities, inputs from elsewhere, soft labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr

import hf_calib.metrics as metrics
from hf_calib.decisions.measured import TITLES, PromiseCurve
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.entities import Entities, are_bio, entity_scores, find_entities
from hf_calib.metrics.intervals import percentile_intervals
from hf_calib.metrics.ranking import OOD_SCORES, OodDetection, ood_detection
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.sums import Interval
from hf_calib.report.document import Block, Bullets, Section, Table
from hf_calib.report.measured import Settings
from hf_calib.report.rows import Cells, columns, plain, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.report import CalibrationReport

Scores = Mapping[str, Interval]


class ReportSection(ABC):
    """A part of a report that was measured: a table, and how to read it."""

    caption: ClassVar[str]  # of the table; {level} is that of the intervals
    title: Any  # the heading
    shown: ClassVar[int | None] = None  # the first of the sentences that a screen shows, too

    @abstractmethod
    def table(self) -> Cells:
        """A header, and rows."""

    @abstractmethod
    def sentences(self) -> list[str]:
        """What was compared, and how to read the table."""

    def to_dict(self) -> dict[str, Any]:
        """Everything but arrays, of JSON's own types; None where there is no number."""
        return dict(plain(self))

    def figures(self, n_bins: int) -> dict[str, Figure]:
        """By name, where there is something to show."""
        return {}

    def block(self, level: str) -> Block:
        """The heading, the table and the sentences."""
        table = Table(self.caption.format(level=level), *self.table(), title=self.title)
        notes = self.sentences()[: self.shown]
        found = self.sentences()[len(notes) :]
        return Section(self.title, [table, Bullets(notes, faint=True), *([Bullets(found)] if found else [])])


@dataclass(frozen=True)
class DecisionSection(ReportSection):
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

    caption = "What the rule does, with 95% intervals"
    title = "Decisions"

    promise: str
    n_fitted: int
    before: Scores
    after: Scores | None = None
    curves: Mapping[str, PromiseCurve] = field(default_factory=dict)
    n_fitted_after: int | None = None
    n_folds: int = 0

    def sentences(self) -> list[str]:
        after = "" if self.n_fitted_after is None else f" ({self.n_fitted_after:,} of them after calibration)"
        how = "and measured on others"
        if self.n_folds:
            how = (
                f"and measured on the same rows by cross-fitting: in {self.n_folds} folds, each row by a rule that was "
                "fitted without it"
            )
        sentences = [f"The rule {self.promise}. It was fitted on {self.n_fitted:,} rows{after}, {how}."]
        for state, found in columns(self.before, self.after).items():
            if "answered" in found and "accuracy" not in found:
                sentences.append(
                    f"Nothing is answered{'' if self.after is None else f' {state} calibration'}."
                )
        if "saving" in self.before:
            sentences.append("The saving is against deciding for the most probable class.")
        return sentences

    def table(self) -> Cells:
        return table_of("decisions", TITLES, columns(self.before, self.after))

    def figures(self, n_bins: int) -> dict[str, Figure]:
        from hf_calib.plots import promise_diagram

        return {"decisions": promise_diagram(self.curves)} if self.curves else {}


@dataclass(frozen=True)
class EntitySection(ReportSection):
    """The entities of a report's sentences.

    Args:
        n_sentences: S.
        n_true: true entities.
        before: score -> what `hf_calib.metrics.entity_scores` found for the probabilities as the model gives them.
        after: the same for the calibrated ones, or None.
        found: the predicted entities of both.
    """

    caption = "Entities, with {level} intervals over sentences"
    title = "Entities"
    titles: ClassVar[dict[str, str]] = {
        "f1": "F1",
        "precision": "Precision",
        "recall": "Recall",
        "ece_product": "ECE, product of the tokens' probabilities",
        "ece_minimum": "ECE, smallest of the tokens' probabilities",
    }

    n_sentences: int
    n_true: int
    before: Scores
    after: Scores | None
    found: tuple[Entities, ...] = field(repr=False, compare=False)

    def sentences(self) -> list[str]:
        counts = [f"{len(found.correct):,}" for found in self.found]
        predicted = counts[0] if self.after is None else f"{counts[0]} before, {counts[1]} after"
        return [
            f"{self.n_true:,} true entities in {self.n_sentences:,} sentences; predicted are {predicted}. One "
            "is right where a true entity has the same type, first and last token. Intervals resample sentences.",
            "ECE: mean distance, over bins of confidence, between the share of predicted entities that are right and "
            "their confidence, which is the product, or the smallest, of the probabilities of its tokens' tags. "
            "Entities that are missed have no confidence: read the recall. Noise makes both errors larger: they have "
            "no interval.",
        ]

    def table(self) -> Cells:
        return table_of("entities", self.titles, columns(self.before, self.after))

    def figures(self, n_bins: int) -> dict[str, Figure]:
        """The reliability of each confidence, before and after; none where a state predicts no entity."""
        from hf_calib.plots import reliability_grid

        names = ["predicted entities"] if self.after is None else ["before", "after calibration"]
        states = dict(zip(names, self.found, strict=True))
        if not all(len(each.correct) for each in self.found):
            return {}
        panels = {
            kind: {name: (getattr(each, kind), each.correct) for name, each in states.items()}
            for kind in ("product", "minimum")
        }
        return {"entities": reliability_grid(panels, n_bins=n_bins)}

    def to_dict(self) -> dict[str, Any]:
        record = super().to_dict()
        for state, found in zip(("before", "after"), self.found, strict=False):
            record[state] = {"n_predicted": len(found.correct), **record[state]}
        return record


def with_entities(report: CalibrationReport, sentences: ArrayLike | None) -> CalibrationReport:
    """Add what the tokens' sentences tell to their report: the entities where tags are BIO, and a caveat.

    Args:
        report: of N tokens.
        sentences: (N,) int, the same number for all tokens of a sentence; None where the rows are not tokens.

    Raises:
        ValueError: as `hf_calib.metrics.find_entities`.

    >>> from hf_calib.report import calibration_report
    >>> probs = np.tile([[0.1, 0.9, 0.0], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]], (20, 1))
    >>> names = ["O", "B-x", "I-x"]
    >>> tokens = calibration_report(probs, np.tile([1, 2, 0], 20), class_names=names, n_resamples=100)
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
    section, names = None, report.class_names
    if are_bio(names):
        states = [each for each in (report.before, report.after) if each is not None]
        found = [find_entities(each.probs, report.labels, sentences, tag_names=names) for each in states]
        scores: list[Any] = [entity_scores(each, **report.settings._asdict()) for each in found]
        before, after = [*scores, None][:2]
        n_true = found[0].n_true
        section = EntitySection(len(n_true), int(n_true.sum()), before, after, tuple(found))
    return replace(report, entities=section, notes=(*report.notes, caveat))


_RATES = {"auroc": "AUROC", "fpr95": "FPR at 95%"}
# Of probabilities, whose logarithms are logits that are shifted in each row.
_OF_PROBABILITIES = ("max_probability", "entropy")


@dataclass(frozen=True)
class OodSection(ReportSection):
    """Inputs from elsewhere against the rows of a report.

    Args:
        name: of the data from elsewhere.
        n_examples: of them.
        before: score -> what `hf_calib.metrics.ood_detection` found for the logits as the model gives them.
        after: the same for the calibrated ones, or None.
    """

    caption = "Inputs from elsewhere, with {level} intervals"

    name: str
    n_examples: int
    before: Mapping[str, OodDetection]
    after: Mapping[str, OodDetection] | None = None

    @property
    def title(self) -> str:
        return f"Out of distribution: {self.name}"

    def sentences(self) -> list[str]:
        return [
            f"{self.n_examples:,} inputs of {self.name}, which are none of the classes, against the rows of "
            "this report. An input is flagged where its uncertainty is above a threshold.",
            "AUROC: the probability that an input from elsewhere looks more uncertain than a familiar one; 0.5 is "
            "chance. FPR at 95%: the share of the inputs from elsewhere that is accepted where 95% of the familiar "
            "ones are.",
        ]

    def table(self) -> Cells:
        states = {
            state: {(rate, score): getattr(each, rate) for rate in _RATES for score, each in found.items()}
            for state, found in columns(self.before, self.after).items()
        }
        titles = {
            (rate, score): f"{title}, {OOD_SCORES[score].lower()}"
            for rate, title in _RATES.items()
            for score in self.before
        }
        return table_of("told by", titles, states)  # type: ignore[arg-type]

    def curves(self) -> dict[str, OodDetection]:
        """ROC curves for the figure: each score, after calibration where it was measured."""
        return {OOD_SCORES[score]: found for score, found in (self.after or self.before).items()}

    def to_dict(self) -> dict[str, Any]:
        found = {
            state: each and {score: {rate: getattr(d, rate) for rate in _RATES} for score, d in each.items()}
            for state, each in (("before", self.before), ("after", self.after))
        }
        return dict(plain({"name": self.name, "n_examples": self.n_examples, **found}))


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
    found: Any = [pair and ood_detection(*pair, scores=scores, seed=seed) for pair in (before, after)]
    return OodSection(name, np.shape(before[1])[0], *found)


class SoftMeasure(NamedTuple):
    """A metric of `hf_calib.metrics` that takes soft labels, and what it is called."""

    title: str
    metric: str
    options: Mapping[str, Any] = {}
    binned: bool = False  # takes the report's number of bins, and has no interval: noise makes it larger


_ECE = "expected_calibration_error"

#: The metrics against the labels of several annotators: key -> measure.
SOFT_MEASURES: dict[str, SoftMeasure] = {
    "accuracy": SoftMeasure("Mean share of the predicted class", "accuracy"),
    "ece": SoftMeasure(LOGGED_METRICS["ece"], _ECE, binned=True),
    "adaptive_ece": SoftMeasure(LOGGED_METRICS["adaptive_ece"], _ECE, {"binning": "quantile"}, binned=True),
    "classwise_ece": SoftMeasure(LOGGED_METRICS["classwise_ece"], "classwise_calibration_error", binned=True),
    "true_calibration_error": SoftMeasure("True calibration error, by example", "true_calibration_error"),
    "brier": SoftMeasure(LOGGED_METRICS["brier"], "brier_score"),
    "nll": SoftMeasure(LOGGED_METRICS["nll"], "negative_log_likelihood"),
}
_SOFT_TITLES = {key: measure.title for key, measure in SOFT_MEASURES.items()}
_LIKELY_SAME_ORDER = 0.5  # of the rows


@dataclass(frozen=True)
class SoftLabelSection(ReportSection):
    """The probabilities of a report against soft labels of its rows.

    Args:
        n_examples: N.
        agreement: the share of rows whose label has the largest share of the soft label.
        entropy: of the soft labels, mean, in nats.
        before: key -> value with interval, see `SOFT_MEASURES`.
        after: the same after calibration, or None.
    """

    caption = "Metrics against soft labels, with {level} intervals"
    title = "Against soft labels"
    shown = 2

    n_examples: int
    agreement: float
    entropy: float
    before: Scores
    after: Scores | None = None

    def sentences(self) -> list[str]:
        found = [
            f"{self.n_examples:,} soft labels: each class's share among an example's annotators. In the binned errors "
            "the share of the predicted class stands where being right does above, so that a hard example is no "
            "wrong prediction.",
            "The true calibration error is the mean distance of an example's probabilities from its shares, in which "
            "nothing cancels. Shares of few annotators scatter, and that is part of it.",
            f"The shares have an entropy of {self.entropy:.4f} nats, below which no model's negative log-likelihood "
            f"can be. The largest share is the label's in {self.agreement:.1%} of the rows.",
        ]
        if self.agreement < _LIKELY_SAME_ORDER:
            way_out = "Check that rows and classes are in the same order as the labels and the model's."
            found.append(f"That is few. {way_out}")
        return found

    def table(self) -> Cells:
        return table_of("against soft labels", _SOFT_TITLES, columns(self.before, self.after))

    def to_dict(self) -> dict[str, Any]:
        record = super().to_dict()
        for state in ("before", "after"):
            found = record[state] or {}
            record[state] = {key: {"title": _SOFT_TITLES[key], **each} for key, each in found.items()} or None
        return record


def soft_label_section(
    soft_labels: FloatArray,
    labels: NDArray[np.int64],
    before: NDArray[Any],
    after: NDArray[Any] | None,
    settings: Settings,
) -> SoftLabelSection:
    """Measure probabilities (N, C) against soft labels (N, C) of `check_soft_labels`."""

    def measure(probs: NDArray[Any]) -> dict[str, Interval]:
        resampled = [key for key, each in SOFT_MEASURES.items() if not each.binned]
        asked = [(SOFT_MEASURES[key].metric, dict(SOFT_MEASURES[key].options)) for key in resampled]
        intervals = percentile_intervals(asked, probs, soft_labels, **settings.drawing)
        found = dict(zip(resampled, intervals, strict=True))
        for key in SOFT_MEASURES.keys() - found.keys():
            function, options = getattr(metrics, SOFT_MEASURES[key].metric), SOFT_MEASURES[key].options
            found[key] = Interval(float(function(probs, soft_labels, n_bins=settings.n_bins, **options)))
        return {key: found[key] for key in SOFT_MEASURES}

    agreement = float((soft_labels.argmax(axis=1) == labels).mean())
    entropy = float(entr(np.clip(soft_labels, 0, 1)).sum(axis=1).mean())
    found = [None if probs is None else measure(probs) for probs in (before, after)]
    return SoftLabelSection(len(labels), agreement, entropy, *found)  # type: ignore[arg-type]
