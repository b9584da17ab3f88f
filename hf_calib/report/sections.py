"""Sections that not every report has: a rule, entities, OOD inputs, soft labels, slices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr, ndtr

from hf_calib import plots
from hf_calib._text import counted
from hf_calib.decisions.promise import TITLES
from hf_calib.metrics import classwise_calibration_error
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.entities import Entities, are_bio, entity_scores, find_entities
from hf_calib.metrics.intervals import holm, interval_of_bins
from hf_calib.metrics.ranking import OOD_SCORES, OodDetection, ood_detection
from hf_calib.metrics.scores import distances, negative_logs, squared_distances
from hf_calib.metrics.state import GroupSums
from hf_calib.metrics.sums import (
    BinSums,
    Interval,
    binned_error,
    interval_of,
    top_label,
    top_label_error,
)
from hf_calib.plots.rows import slice_diagram
from hf_calib.report import document
from hf_calib.report.chance import coins_of_sums, gap_interval, p_value
from hf_calib.report.document import Bullets, Cells, Section, Table, cell, listed
from hf_calib.report.measured import (
    MEASURES,
    Settings,
    resampled_means,
)
from hf_calib.report.rows import Group, are_few

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.report import CalibrationReport

Scores = Mapping[str, Interval]


class ReportSection:
    """A part of a report with a table, and sentences on how to read the table."""

    caption: str  # the table's caption, where {level} is the level of the intervals
    title: Any  # the heading
    corner: str  # the header of the table's first column
    titles: Mapping[str, str]  # the titles of the table's rows
    sentences: Callable[[], list[str]]  # what was compared, and how to read the table
    before: Any
    after: Any = None

    @property
    def states(self) -> dict[str, Any]:
        """The results before and after calibration by the names of their columns."""
        return document.columns(self.before, self.after)

    def table(self) -> Cells:
        """A header, and a row for each result, before and after calibration."""
        return document.table_of(self.corner, self.titles, self.states)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but arrays in JSON types; undefined numbers are None."""
        return dict(document.plain(document.compared(self)))

    def figures(self, n_bins: int) -> dict[str, Figure]:
        """The figures of the section by name; most sections have none."""
        return {}

    def block(self, level: str) -> Section:
        """The heading, the table and the sentences."""
        table = Table(self.caption.format(level=level), *self.table(), title=self.title)
        return Section(self.title, [table, Bullets(self.sentences(), faint=True)])


@dataclass(frozen=True)
class DecisionSection(ReportSection):
    """A rule, measured on the rows of a report."""

    caption = "Results of the rule, with 95% intervals"
    title = "Decisions"
    corner = "decisions"
    titles = TITLES

    promise: str  # the rule in words that follow "The rule"; see the rules' `promise`
    n_fitted: int  # the number of calibration rows
    before: Scores  # the results of the rule's `measure`
    of_fit: bool = False  # whether the results are from the rows of the fit
    n_shared: int = 0  # of other rows, the number that are among those of the fit

    def sentences(self) -> list[str]:
        fitted = "Nothing of it was fitted."
        if self.n_fitted > 0:
            where = "other rows"
            if self.of_fit:
                where = "the same rows, with intervals for this rule on new inputs"
            elif self.n_shared > 0:
                where = f"rows, {self.n_shared:,} of them from the fit"
            rows = counted(self.n_fitted, "row")
            fitted = f"It was fitted on {rows}, and measured on {where}."
        sentences = [f"The rule {self.promise}. {fitted}"]
        results = self.before
        if self.of_fit and "accuracy" in results:
            sentences.append(
                "The lower end of the accuracy is the promise; its value is that of the fit's rows."
            )
        if "answered" in results and "accuracy" not in results:
            sentences.append("No input is answered.")
        if "saving" in results:
            sentences.append(
                "The saving is relative to the decision for the most probable class."
            )
        return sentences


_ENTITY_TITLES = {
    "f1": "F1",
    "precision": "Precision",
    "recall": "Recall",
    "ece_product": "ECE, product of the tokens' probabilities",
    "ece_minimum": "ECE, smallest of the tokens' probabilities",
}


@dataclass(frozen=True)
class EntitySection(ReportSection):
    """The entities of a report's sentences, as `hf_calib.metrics.entity_scores` measures them."""

    caption = "Entities, with {level} intervals over sentences"
    title = "Entities"
    corner = "entities"
    titles = _ENTITY_TITLES

    n_sentences: int
    n_true: int  # entities
    # Those predicted, before and after.
    found: tuple[Entities, ...] = field(repr=False, compare=False)
    before: Scores
    after: Scores | None = None

    @property
    def n_predicted(self) -> list[int]:
        """The numbers of predicted entities, before and after."""
        return [len(each.correct) for each in self.found]

    def sentences(self) -> list[str]:
        shown = [f"{n:,}" for n in self.n_predicted]
        predicted = shown[0]
        if self.after is not None:
            predicted = f"{shown[0]} before, {shown[1]} after"
        return [
            f"True entities: {self.n_true:,} in {counted(self.n_sentences, 'sentence')}; "
            f"predicted: {predicted}. One is correct if a true entity has the same type, first and "
            "last token. Intervals resample sentences.",
            "ECE: mean distance, over bins of confidence, between the share of correct predicted "
            "entities and their confidence, the product or the smallest of the probabilities of "
            "their tokens' tags. Missed entities have no confidence; see the recall. Noise makes "
            "both errors larger, so they have no interval.",
        ]

    def figures(self, n_bins: int) -> dict[str, Figure]:
        """The reliability of each confidence; none where a state predicts no entity."""
        # A diagram without confidences has nothing to draw.
        if 0 in self.n_predicted:
            return {}
        names = ["predicted entities"]
        if self.after is not None:
            names = ["before", "after calibration"]
        panels: Any = {"product": {}, "minimum": {}}
        for name, each in zip(names, self.found, strict=True):
            panels["product"][name] = each.product, each.correct
            panels["minimum"][name] = each.minimum, each.correct
        return {"entities": plots.reliability_grid(panels, n_bins=n_bins)}

    def to_dict(self) -> dict[str, Any]:
        record = super().to_dict()
        for state, n in zip(("before", "after"), self.n_predicted, strict=False):
            record[state] = {"n_predicted": n, **record[state]}
        return record


def with_entities(report: CalibrationReport, sentences: ArrayLike) -> CalibrationReport:
    """Add the entities of tokens with BIO tags, and a caveat; `sentences` (N,) are each token's."""
    caveat = (
        "The examples are tokens. The tokens of one sentence are not independent, but tests and "
        "intervals of their metrics treat them as independent, so the intervals are too narrow."
    )
    report = replace(report, notes=(*report.notes, caveat))
    names = report.class_names
    # Weights of tokens are none of entities, so weighted rows keep no probabilities.
    if report.before.probs is None or not are_bio(names):
        return report
    found = []
    scores = []
    for state in report.states.values():
        of_state = find_entities(state.probs, report.labels, sentences, tag_names=names)
        found.append(of_state)
        scores.append(entity_scores(of_state, **report.settings._asdict()))
    n_true = of_state.n_true
    section = EntitySection(len(n_true), int(n_true.sum()), tuple(found), *scores)
    return replace(report, entities=section)


_RATES = {"auroc": "AUROC", "fpr95": "FPR at 95%"}
# A shift of all logits in a row does not change these.
_OF_PROBABILITIES = ("max_probability", "entropy")


@dataclass(frozen=True)
class OodSection(ReportSection):
    """Out-of-distribution inputs against a report's rows, by `hf_calib.metrics.ood_detection`."""

    caption = "Out-of-distribution inputs, with {level} intervals"

    name: str  # the name of the out-of-distribution data
    n_examples: int  # the number of out-of-distribution inputs
    before: Mapping[str, OodDetection]  # by score
    after: Mapping[str, OodDetection] | None = None

    @property
    def title(self) -> str:
        return f"Out of distribution: {self.name}"

    def sentences(self) -> list[str]:
        return [
            f"The inputs of {self.name} ({self.n_examples:,}), which belong to none of the "
            "classes, are compared with the rows of this report. An input is flagged if its "
            "uncertainty is above a threshold.",
            "AUROC: the probability that such an input is more uncertain than a row of this "
            "report; 0.5 is chance. FPR at 95%: the share of such inputs that is accepted if 95% "
            "of the rows are.",
        ]

    def table(self) -> Cells:
        states = self.states
        rows = []
        for rate, title in _RATES.items():
            for score in self.before:
                cells = [cell(getattr(each[score], rate)) for each in states.values()]
                rows.append([f"{title}, {OOD_SCORES[score].lower()}", *cells])
        return ["score", *states], rows


def ood_section(
    name: str,
    before: tuple[ArrayLike, ArrayLike],
    after: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    probabilities: bool = False,
    seed: int = 0,
) -> OodSection:
    """Measure how well out-of-distribution inputs are separated from the rows of a report.

    `before` and `after` are logits (N, C) of the report's rows and (N', C) of the
    out-of-distribution inputs. If these are logarithms of `probabilities`, two scores are left out.
    The seed is for `hf_calib.metrics.ood_detection`.
    """
    scores = _OF_PROBABILITIES if probabilities else tuple(OOD_SCORES)
    found: Any = [
        pair and ood_detection(*pair, scores=scores, seed=seed)
        for pair in (before, after)
    ]
    return OodSection(name, np.shape(before[1])[0], *found)


_TRUE = "true_calibration_error"
#: The metrics against the labels of several annotators, by key; noise makes binned errors larger.
SOFT_MEASURES = {
    "accuracy": "Mean share of the predicted class",
    "ece": MEASURES["ece"].title,
    "adaptive_ece": MEASURES["adaptive_ece"].title,
    "classwise_ece": MEASURES["classwise_ece"].title,
    _TRUE: "True calibration error, by example",
    "brier": MEASURES["brier"].title,
    "nll": MEASURES["nll"].title,
}


@dataclass(frozen=True)
class SoftLabelSection(ReportSection):
    """The probabilities of a report against soft labels of its rows; see `SOFT_MEASURES`."""

    caption = "Metrics against soft labels, with {level} intervals"
    title = "Against soft labels"
    corner = "against soft labels"
    titles = SOFT_MEASURES

    n_examples: int
    # The share of rows whose label is the largest part of the soft label.
    agreement: float
    entropy: float  # of the soft labels, mean, in nats
    before: Scores
    after: Scores | None = None

    def sentences(self) -> list[str]:
        return [
            "A soft label has each class's share among an example's annotators "
            f"({self.n_examples:,} examples). In the binned errors the share of the predicted "
            "class replaces its correctness, so that an ambiguous example does not count as a "
            "wrong prediction.",
            "The true calibration error is the mean distance between an example's probabilities "
            "and its shares, and errors in it do not cancel. It includes the noise of the shares, "
            "which is larger with few annotators.",
            f"The shares have an entropy of {self.entropy:.4f} nats, a lower bound of every "
            "model's negative log-likelihood.",
        ]

    @property
    def warnings(self) -> list[str]:
        """A caveat if the shares hardly agree with the labels."""
        if self.agreement >= 0.5:
            return []
        return [
            f"The label has the largest share of the soft label in only {self.agreement:.1%} of "
            "rows. Check that they are in the order of the rows and of the model's classes."
        ]


def soft_label_section(
    soft_labels: FloatArray,
    labels: NDArray[np.int64],
    states: Sequence[NDArray[Any]],
    settings: Settings,
) -> SoftLabelSection:
    """Measure probabilities (N, C), before and perhaps after, against soft labels (N, C)."""
    agreement = float((soft_labels.argmax(axis=1) == labels).mean())
    entropy = float(entr(np.clip(soft_labels, 0, 1)).sum(axis=1).mean())
    found = [_against(soft_labels, probs, settings) for probs in states]
    return SoftLabelSection(len(labels), agreement, entropy, *found)


def _against(
    soft_labels: FloatArray, probs: NDArray[Any], settings: Settings
) -> dict[str, Interval]:
    """The metrics of probabilities (N, C) against soft labels (N, C), by key."""
    n_bins = settings.n_bins
    top = top_label(probs, soft_labels)
    means = {
        _TRUE: distances(probs, soft_labels),
        "brier": squared_distances(probs, soft_labels),
        "nll": negative_logs(probs, soft_labels),
    }
    values = {key: float(rows.mean()) for key, rows in means.items()}
    values["ece"] = top_label_error(top, n_bins=n_bins)
    values["adaptive_ece"] = top_label_error(top, n_bins=n_bins, binning="quantile")
    values["classwise_ece"] = classwise_calibration_error(
        probs, soft_labels, n_bins=n_bins
    )
    found = {key: Interval(value) for key, value in values.items()}
    share = float(top.correct.mean())
    found["accuracy"] = settings.of_frequency(share, len(probs))
    if are_few(*probs.shape):
        for key, draws in resampled_means(means, settings).items():
            found[key] = interval_of(values[key], draws, settings.confidence_level)
    return {key: found[key] for key in SOFT_MEASURES}


_SHOWN = 20
# The columns of the table: a header, and the attribute of a slice with its form.
_COLUMNS = {
    "rows": ("n_rows", ","),
    "accuracy": ("accuracy", ".3f"),
    "confidence": ("confidence", ".3f"),
    "gap": ("gap", "+.3f"),
    "ECE": ("ece", ".4f"),
    "maximum": ("mce", ".3f"),
    "NLL": ("nll.value", ".4f"),
    "Brier": ("brier.value", ".4f"),
    "p": ("judged", ""),
}
# Of a correct row, after its confidence is shifted by the gap of the others.
_LEAST_CHANCE = 1e-6
# For the interval of each slice; there may be 1,000 slices.
_RESAMPLES = 200


@dataclass(frozen=True)
class Slice:
    """One group of rows, those with one value of the column."""

    name: str
    n_rows: int
    share: float  # of all rows, or of their weight
    accuracy: float
    confidence: float
    gap: Interval  # confidence - accuracy
    ece: Interval
    mce: float
    nll: Interval
    brier: Interval
    # Of such a difference from the gap of all other rows, if there are any.
    p_value: float | None
    differs: bool = False  # beyond chance

    @property
    def judged(self) -> str:
        """The p-value as the table shows it, with a star if the slice differs."""
        shown = cell(self.p_value, "p")
        return f"{shown} *" if self.differs else shown


@dataclass(frozen=True)
class SliceSection(ReportSection):
    """The slices of one column, those that differ first."""

    caption = "Slices, with {level} intervals"

    column: str
    slices: tuple[Slice, ...]

    @property
    def title(self) -> str:
        return f"By {self.column}"

    @property
    def figure_name(self) -> str:
        """The name of the figure's file, in which a column's slash would be a folder."""
        plain = re.sub(r"[^\w.-]", "_", self.column)[:100]
        if plain != self.column:
            plain += f"-{crc32(self.column.encode()):08x}"
        return f"slices_{plain}"

    @property
    def differing(self) -> str:
        """The number of slices that differ, in words; "" if there are none."""
        n_found = sum(each.differs for each in self.slices)
        if n_found == 0:
            return ""
        differ = "differs" if n_found == 1 else "differ"
        return f"{n_found} of {len(self.slices)} values of {self.column} {differ}"

    @property
    def finding(self) -> str:
        """A sentence on the slices that differ."""
        end = "from the other rows beyond chance in confidence minus accuracy"
        if not self.differing:
            return f"No value of {self.column} differs {end}."
        found = [each for each in self.slices if each.differs]
        named = listed([f"{each.name} ({each.gap.value:+.3f})" for each in found])
        return f"{self.differing} {end}: {named}."

    def sentences(self) -> list[str]:
        n_slices = len(self.slices)
        corrected = f"corrected for {counted(n_slices, 'slice')} (Holm)"
        sentences = [
            "p is the p-value of the difference between a slice's gap and the gap of all other "
            f"rows, {corrected}."
        ]
        if n_slices > _SHOWN:
            sentences.append(f"The table has {_SHOWN} of {n_slices} slices.")
        return sentences

    def table(self) -> Cells:
        columns = {self.column: ("name", ""), **_COLUMNS}
        return document.table_of_rows(self.slices[:_SHOWN], columns)

    def figures(self, n_bins: int) -> dict[str, Figure]:
        """Each slice's gap with its interval."""
        shown = self.slices[:_SHOWN]
        names = [each.name for each in shown]
        gaps = np.array([each.gap for each in shown])
        differ = np.array([each.differs for each in shown])
        figure = slice_diagram(names, gaps, differ, column=self.column)
        return {self.figure_name: figure}


def slice_section(
    column: str, names: Sequence[str], groups: GroupSums, settings: Settings
) -> SliceSection:
    """Measure each slice of a column, and compare it with all other rows."""
    masses = groups.bins[1].sum(axis=1)
    used = np.flatnonzero(masses)
    p_values: list[Any] = [None]
    if len(used) > 1:
        p_values = slice_p_values(groups, used)
    shares = masses / masses.sum()
    slices = []
    for place, p in zip(used.tolist(), p_values, strict=True):
        group = Group.of(groups, place)
        share = float(shares[place])
        slices.append(_measure_slice(names[place], group, share, p, settings))
    slices.sort(key=_rank)
    return SliceSection(column, tuple(slices))


def _rank(found: Slice) -> tuple[bool, float]:
    """Those that differ stand first, the largest gap at their head; then the largest slices."""
    size = abs(found.gap.value) if found.differs else found.share
    return not found.differs, -size


def _measure_slice(
    name: str, group: Group, share: float, p: float | None, settings: Settings
) -> Slice:
    """The numbers of one slice, with its share of all rows and the p-value of its difference."""
    bins = group.scaled(group.uniform)
    n, stated, right = (float(part.sum()) for part in bins)
    confidence = stated / n
    accuracy = right / n
    # The sum of p (1 - p), the variance that the confidences state, is that of p less that of p^2.
    squares = float(group.bins[3].sum()) * group.effective / group.total
    _, error = group.mean_and_error("gap")
    gap, _ = gap_interval(
        confidence,
        accuracy,
        stated=max(stated - squares, 0.0) / n,
        error=error,
        effective=n,
        z=settings.z,
    )
    drawing = settings._replace(n_resamples=_RESAMPLES).drawing
    return Slice(
        name=name,
        n_rows=int(group.n_rows()[0]),
        share=share,
        accuracy=accuracy,
        confidence=confidence,
        gap=gap,
        ece=interval_of_bins(bins, **drawing),
        mce=float(binned_error(bins, n, "max")),
        nll=settings.of_mean(group, "nll"),
        brier=settings.of_mean(group, "brier"),
        p_value=p,
        differs=p is not None and p < 1 - settings.confidence_level,
    )


def slice_p_values(groups: GroupSums, used: IntArray) -> list[float]:
    """The p-value of each non-empty slice, if its gap is that of all other rows.

    It is the larger one of testing the slice against the others and the others against the slice:
    either side may have too few rows to tell its gap. It is corrected for the number of slices.
    """
    everything = Group.of(groups)
    n_all = float(groups.effective_rows().sum())
    found = []
    for place in used:
        own = Group.of(groups, place)
        others = BinSums(*np.subtract(everything.uniform, own.uniform))
        # The others may be of hardly any weight.
        n_others = max(n_all - own.effective, 1.0)
        p = _p_of_difference(own.uniform, own.effective, others, n_others)
        reverse = _p_of_difference(others, n_others, own.uniform, own.effective)
        found.append(max(p, reverse))
    return holm(found).tolist()


def _p_of_difference(
    own: BinSums, n_own: float, others: BinSums, n_others: float
) -> float:
    """The p-value of a number of correct rows, if their gap is that of others.

    It is the larger one of two: an exact one of that number, for few rows, and one that allows for
    the error of the others' gap, for many.
    """
    mass = float(others.counts.sum())
    gap = float((others.confidence - others.correct).sum()) / mass
    accuracy = float(others.correct.sum()) / mass
    scale = n_own / float(own.counts.sum())
    filled = own.counts > 0
    # Rows of a bin count as rows of its mean confidence.
    means = own.confidence[filled] / own.counts[filled]
    counts = own.counts[filled] * scale
    chances = np.clip(means - gap, _LEAST_CHANCE, 1 - _LEAST_CHANCE)
    expected = float(counts @ chances)
    variance = float(counts @ (chances * (1 - chances)))
    n_right = float(own.correct.sum()) * scale
    # The others' gap is known up to an error, which moves all expected numbers together.
    of_others = n_own**2 * accuracy * (1 - accuracy) / n_others
    z = max(abs(n_right - expected) - 0.5, 0.0) / math.sqrt(variance + of_others)
    coins = coins_of_sums(n_own, expected, expected - variance)
    return max(p_value(coins, n_right), 2 * float(ndtr(-z)))
