"""Diagnosis of a report in sentences: over- or under-confident, where, and whether chance can explain it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.stats import t

from hf_calib.metrics.scores import negative_logs
from hf_calib.report.label_diagnosis import diagnose_labels, warnings_about_labels
from hf_calib.report.tables import BinRow, ClassRow, p_in_words, row_of_sums
from hf_calib.report.text import outside_intervals

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.any_report import AnyReport
    from hf_calib.report.assessment import Measurements, Overall

_FEW_EXAMPLES = 1_000  # below, 15 bins hold too few for a steady ECE
_FEW_IN_A_CLASS = 10
_CLASSES_NAMED = 5
_CLASSES_SEEN = 20  # predictions of a class before a judgement on it is passed


class Claims(NamedTuple):
    """Claims that the sentences on a set of probabilities may make.

    Args:
        level: of each kind of claim; 0 where there may be none, as a calibrated model would often show as much.
        n_claims: kinds of claims, over all sets of probabilities of the report.
        overall: the difference of confidence and accuracy.
        smallest: kind of claim -> the smallest p-value of its tests, corrected for their number.
    """

    level: float
    n_claims: int
    overall: Overall
    smallest: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """'over-confident', 'under-confident' or 'neither'."""
        if self.smallest["overall"] >= self.level:
            return "neither"
        return "over-confident" if self.overall.gap > 0 else "under-confident"

    @property
    def corrected(self) -> str:
        """The reason why what is beyond chance alone is not claimed."""
        return f"not beyond chance once corrected for the {self.n_claims} statements of this report"


def claims(report: AnyReport, measured: Measurements) -> Claims:
    """The claims of one of a report's sets of probabilities.

    All claims of a report on calibrated probabilities are wrong, and at most a share 1 - confidence_level of such
    reports has any: the kinds of claims (overall, the ECE, bins, classes, frequencies) are tested together by Simes'
    rule, at half that level where there are two sets, and only where that rejects is each kind judged by itself.

    References:
        Simes 1986, "An improved Bonferroni procedure for multiple tests of significance" (valid for tests that
        depend on each other as these do, all of them on the same labels).
    """
    n_sets = 1 if report.after is None else 2
    level = (1 - report.confidence_level) / n_sets
    found = measured.overall
    assert found is not None
    assert measured.consistency is not None
    classes = [row for row in measured.classes if row.predicted >= _CLASSES_SEEN]
    smallest = {
        "overall": found.p_value,
        "ece": measured.consistency.p_value,
        "bins": _smallest(row.p_value for row in measured.bins),
        "classes": _smallest(row.p_value for row in classes),
        "frequencies": _smallest(row.frequency_p_value for row in measured.classes),
    }
    ordered = sorted(smallest.values())
    rejected = any(p <= level * rank / len(ordered) for rank, p in enumerate(ordered, 1))
    return Claims(level if rejected else 0.0, n_sets * len(smallest), found, smallest)


def _smallest(p_values: Iterable[float]) -> float:
    """The smallest of several p-values, by Bonferroni; 1 of none."""
    found = list(p_values)
    return min(1.0, min(found) * len(found)) if found else 1.0


def diagnose(report: CalibrationReport) -> tuple[str, ...]:
    """The sentences of a report."""
    if report.multi_label:
        return diagnose_labels(report)
    return tuple(of_states(report, _rows_tell(report) if report.after is not None else ()))


def of_states(report: AnyReport, rows_tell: Sequence[str] = ()) -> list[str]:
    """The sentences on each set of probabilities, and on what changed from one to the other."""
    sentences = _of_state(report, report.before)
    if report.after is not None:
        before, after = report.before.metrics, report.after.metrics
        sentences += [
            "After calibration the ECE goes from "
            f"{before['ece'].value:.4f} to {after['ece'].value:.4f}, the negative log-likelihood from "
            f"{before['nll'].value:.4f} to {after['nll'].value:.4f}.",
            *rows_tell,
        ]
        sentences += [
            f"After calibration: {_lower_first(sentence)}" for sentence in _of_state(report, report.after)
        ]
    return sentences


def _of_state(report: AnyReport, measured: Measurements) -> list[str]:
    may = claims(report, measured)
    return [
        _overall_sentence(may, report.confidence_level),
        *_where(measured, may.level),
        _chance_sentence(measured, may, report.confidence_level),
    ]


def _overall_sentence(may: Claims, level: float) -> str:
    found = may.overall
    means = f"mean confidence {found.confidence:.3f}, accuracy {found.accuracy:.3f}"
    interval = f"difference {found.gap:+.3f}, {100 * level:g}% interval {found.low:+.3f} to {found.high:+.3f}"
    if may.verdict == "neither":
        if not round(found.low, 3) <= 0 <= round(found.high, 3):  # the verdict is corrected for all claims
            interval += f", which excludes 0 alone; {may.corrected}"
        return f"Overall neither over- nor under-confident beyond chance: {means} ({interval})."
    return f"Overall {may.verdict}: {means} ({interval})."


def _chance_sentence(measured: Measurements, may: Claims, level: float) -> str:
    test = measured.consistency
    assert test is not None
    expected = (
        f"{test.value:.4f}, and on {may.overall.n_examples:,} examples a perfectly calibrated model with these "
        f"confidences would show {test.expected:.4f} by chance alone"
    )
    p_value = p_in_words(test.p_value)
    if test.p_value <= may.level:
        return f"The top-label ECE is beyond chance: it is {expected} ({p_value})."
    if test.p_value <= 1 - level:
        return f"The top-label ECE is {expected} ({p_value} alone; {may.corrected})."
    return f"The top-label ECE by itself is within chance: it is {expected} ({p_value})."


def _where(assessment: Measurements, level: float) -> list[str]:
    """Bins, classes and frequencies that differ beyond chance, at this level of each kind."""
    sentences = []
    runs = significant_runs(assessment.bins, level)
    for run in runs[:3]:
        word = "too high" if run.gap > 0 else "too low"
        sentences.append(
            f"Confidences from {run.lower:.2f} to {run.upper:.2f} are {word}: {run.confidence:.3f} on average, "
            f"right {run.accuracy:.3f} of the time ({run.count:,} examples)."
        )
    if len({run.gap > 0 for run in runs}) == 2:
        sentences.append("Errors in both directions partly cancel in the overall difference.")
    for sign, word in ((1, "over-confident"), (-1, "under-confident")):
        rows = [row for row in significant_classes(assessment.classes, level) if sign * _gap(row) > 0]
        if rows:
            sentences.append(_classes_sentence(rows, word))
    return sentences + _frequencies(assessment, level)


def _frequencies(assessment: Measurements, alpha: float) -> list[str]:
    """Which classes are more frequent than the model says: their share differs from that it was trained on."""
    rows = misjudged_frequencies(assessment.classes, alpha)
    if not rows:
        return []
    named = _listed(
        [
            f'"{row.name}" ({row.frequency:.3f} of the examples, mean probability {row.mean_probability:.3f})'
            for row in rows
        ]
    )
    return [f"Some classes occur more or less often than their mean probability: {named}."]


def misjudged_frequencies(rows: Sequence[ClassRow], alpha: float) -> list[ClassRow]:
    """Classes whose frequency is not their mean probability, beyond chance, largest difference first."""
    found = [row for row in rows if row.frequency_p_value < alpha / len(rows)]
    return sorted(found, key=lambda row: -abs(row.frequency - row.mean_probability))


def _classes_sentence(rows: Sequence[ClassRow], word: str) -> str:
    named = _listed(
        [f'"{row.name}" (confidence {row.confidence:.2f}, precision {row.precision:.2f})' for row in rows]
    )
    return f"Predictions of {_counted(rows)} are {word} beyond chance: {named}."


def significant_runs(rows: Sequence[BinRow], alpha: float) -> list[BinRow]:
    """Neighbouring bins that err to the same side beyond chance, joined; largest contribution first.

    alpha is shared out over the bins (Bonferroni), so that many bins make no false alarm.
    """
    n_examples = sum(row.count for row in rows)
    found: list[BinRow] = []
    for row in rows:
        if row.p_value >= alpha / len(rows):
            continue
        if found and np.isclose(found[-1].upper, row.lower) and found[-1].gap * row.gap > 0:
            found[-1] = _join(found[-1], row, n_examples)
        else:
            found.append(row)
    return sorted(found, key=lambda row: -row.contribution)


def _join(first: BinRow, second: BinRow, n_examples: int) -> BinRow:
    return row_of_sums(
        first.lower,
        second.upper,
        count=first.count + second.count,
        confidence=first.confidence * first.count + second.confidence * second.count,
        right=round(first.accuracy * first.count + second.accuracy * second.count),
        p_value=min(first.p_value, second.p_value),
        n_examples=n_examples,
    )


def significant_classes(rows: Sequence[ClassRow], alpha: float) -> list[ClassRow]:
    """Classes whose predictions are over- or under-confident beyond chance, largest gap first."""
    judged = [row for row in rows if row.predicted >= _CLASSES_SEEN]
    found = [row for row in judged if row.p_value < alpha / len(judged)]
    return sorted(found, key=lambda row: -abs(_gap(row)))


def _gap(row: ClassRow) -> float:
    if row.confidence is None or row.precision is None:
        return 0.0
    return row.confidence - row.precision


def _rows_tell(report: CalibrationReport) -> list[str]:
    """What only the rows show of a change."""
    assert report.after is not None
    sentences = []
    if _is_worse(report):
        sentences.append(
            "The negative log-likelihood got worse beyond chance: the calibration was fitted on too few examples, or "
            "on examples unlike these."
        )
    if not np.array_equal(report.before.correct, report.after.correct):
        before, after = (state.metrics["accuracy"].value for state in (report.before, report.after))
        sentences.append(f"Predictions changed: accuracy goes from {before:.4f} to {after:.4f}.")
    return sentences


def _is_worse(report: CalibrationReport) -> bool:
    """Whether the mean NLL rose beyond chance, by the paired differences of the rows."""
    assert report.after is not None
    logs = [negative_logs(state.probs, report.labels) for state in (report.before, report.after)]
    change = logs[1] - logs[0]
    if len(change) < 2 or not np.isfinite(change).all():
        return bool(change.mean() > 0)
    error = change.std(ddof=1) / np.sqrt(len(change))
    return bool(change.mean() > t.isf((1 - report.confidence_level) / 2, len(change) - 1) * error)


def _lower_first(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def warnings_about_data(report: CalibrationReport) -> tuple[str, ...]:
    """Caveats: notes, few examples, classes that are absent or rare, two classes, equal confidences."""
    if report.multi_label:
        return warnings_about_labels(report)
    found = list(report.notes)
    if report.n_examples < _FEW_EXAMPLES:
        found.append(
            f"Only {report.n_examples:,} examples: binned errors are noisy and biased upwards. Read the debiased "
            "and smooth ones, and the intervals."
        )
    found += warnings_about_sums(report)
    if np.ptp(report.before.confidences) == 0:
        found.append("All confidences are equal: they lie in one bin, so the diagrams show one point.")
    return tuple(found)


def warnings_about_sums(report: AnyReport) -> list[str]:
    """Values outside their intervals, classes that are absent or rare, and two classes."""
    found = outside_intervals([state.metrics for state in (report.before, report.after) if state is not None])
    absent = [row for row in report.before.classes if row.support == 0]
    rare = [row for row in report.before.classes if 0 < row.support < _FEW_IN_A_CLASS]
    if absent:
        found.append(f"{_named(absent)} without examples: their rows say nothing.")
    if rare:
        found.append(f"{_named(rare)} with fewer than {_FEW_IN_A_CLASS} examples: their rows are noisy.")
    if report.n_classes == 2:
        found.append(
            "Two classes: the confidence is that of the predicted class, at least 0.5, not that of the positive class."
        )
    return found


def _named(rows: Sequence[ClassRow]) -> str:
    names = _listed([f'"{row.name}"' for row in rows])
    return f"{_counted(rows)} ({names})"


def _counted(rows: Sequence[ClassRow]) -> str:
    return f"{len(rows)} class{'es' * (len(rows) != 1)}"


def _listed(words: Sequence[str]) -> str:
    """The first of many, and how many more there are."""
    more = len(words) - _CLASSES_NAMED
    return ", ".join(words[:_CLASSES_NAMED]) + (f", and {more} more" if more > 0 else "")
