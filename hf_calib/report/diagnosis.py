"""Diagnosis of a report in sentences: over- or under-confident, where, and whether chance can explain it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_calib._text import counted
from hf_calib.metrics.sums import Interval
from hf_calib.plots.style import shortened
from hf_calib.report.document import p_in_words
from hf_calib.report.measured import BinRow, Measured, Overall

if TYPE_CHECKING:
    from hf_calib.report.report import CalibrationReport

_FEW_EXAMPLES = 1_000  # With fewer, 15 bins hold too few for a stable ECE.
_FEW_IN_A_CLASS = 10
_CLASSES_NAMED = 5
_LONGEST_NAME = 60
_UNCHANGED = 5e-7  # Nats; a calibrator that changes less changes nothing.
_CLASSES_SEEN = 20  # The fewest predictions of a class that are judged.
_SIDES = {
    "over-confident": 1,
    "under-confident": -1,
}  # The sign of confidence minus accuracy.


class Claims(NamedTuple):
    """Claims on a set of probabilities, each beyond chance at a level that holds for all of them together."""

    verdict: str  # "over-confident", "under-confident" or "neither", on average
    ece: bool  # True if the ECE is larger than that of a calibrated model.
    runs: list[BinRow]  # Bins whose confidences are too high or too low.
    classes: list[Any]  # Each `ClassRow` whose confidence differs from its precision.
    frequencies: list[
        Any
    ]  # Classes or labels whose frequency differs from their mean probability.
    n_tests: int  # The number of tests in the report.
    level: float  # The level of a single test.

    def judged(self, p_value: float, claimed: bool) -> str:
        """A p-value with its meaning in words."""
        weak = f"not beyond chance once corrected for the {self.n_tests} tests of this report"
        words = (
            "beyond chance"
            if claimed
            else weak
            if p_value < self.level
            else "within chance"
        )
        return f"{p_in_words(p_value)}, {words}"


def claims(report: CalibrationReport, measured: Measured) -> Claims:
    """The claims on one of a report's sets of probabilities.

    Of the reports on calibrated probabilities, at most a share 1 - confidence_level makes any claim, which is then
    wrong: the kinds of claims (overall, the ECE, bins, classes, frequencies) are tested together by Simes' rule, at
    half that level if there are two sets, and each kind is judged alone only if that test rejects (Simes 1986, "An
    improved Bonferroni procedure for multiple tests of significance": these tests share their labels).
    """
    level = (1 - report.settings.confidence_level) / len(report.states)
    overall, test = measured.overall, measured.consistency
    rows: Any = measured.labels or measured.classes
    judged: Any = [row for row in measured.classes if row.predicted >= _CLASSES_SEEN]
    smallest = [overall.p_value, _smallest([row.frequency_p_value for row in rows])]
    if test is not None:
        of_rows = [
            _smallest([row.p_value for row in kind]) for kind in (measured.bins, judged)
        ]
        smallest += [test.p_value, *of_rows]
    if not any(
        p <= level * rank / len(smallest) for rank, p in enumerate(sorted(smallest), 1)
    ):
        level = 0.0
    side = "over-confident" if overall.gap > 0 else "under-confident"
    wrong = [row for row in judged if row.p_value < level / len(judged)]
    differ = [row for row in rows if row.frequency_p_value < level / len(rows)]
    return Claims(
        verdict=side if overall.p_value < level else "neither",
        ece=test is not None and test.p_value <= level,
        runs=significant_runs(measured.bins, level) if test is not None else [],
        classes=sorted(wrong, key=lambda row: -abs(row.gap)),
        frequencies=sorted(
            differ, key=lambda row: -abs(row.frequency - row.mean_probability)
        ),
        n_tests=len(report.states) * len(smallest),
        level=1 - report.settings.confidence_level,
    )


def _smallest(p_values: Sequence[float]) -> float:
    """The smallest of several p-values, corrected by Bonferroni; 1 if there are none."""
    return min(1.0, min(p_values) * len(p_values)) if p_values else 1.0


def verdict(report: CalibrationReport) -> str:
    """The diagnosis in one sentence."""
    states = [
        _verdict_on(claims(report, measured), measured)
        for measured in report.states.values()
    ]
    distinct = [*dict.fromkeys(states)]
    both = f"{' before, '.join(distinct)}{' before and' if len(distinct) == 1 else ''} after"
    found = states if len(states) == 1 else [both]
    if report.nll_change is not None:
        found.append(_changed(report.nll_change, report.multi_label))
    found += [
        f"{each.differing} from the others" for each in report.slices if each.differing
    ]
    return f"{found[0][0].upper()}{'; '.join(found)[1:]}."


def _verdict_on(found: Claims, measured: Measured) -> str:
    overall, test, side = measured.overall, measured.consistency, found.verdict
    weak = (
        min(overall.p_value, test.p_value if test else 1.0) < found.level
        or overall.low * overall.high > 0
    )
    by = f"by {_points(overall, -1 if overall.gap < 0 else 1)}"
    if test is None:
        high_or_low = [
            "high" if row.mean_probability > row.frequency else "low"
            for row in found.frequencies
        ]
        labels = [
            f"too {word} for {high_or_low.count(word)}"
            for word in sorted({*high_or_low})
        ]
        if labels:
            which = f"{' and '.join(labels)} of {len(measured.labels)} labels"
            worst = _worst(found.frequencies, _frequency)
            return f"mean probabilities {which}, {worst}"
        if side != "neither":
            return f"mean probability too {'high' if overall.gap > 0 else 'low'} {by}"
        return f"mean probabilities {'not clearly different from' if weak else 'within chance of'} the frequencies"
    rows, what = (
        (found.runs, "confidences") if found.runs else (found.classes, "classes")
    )
    sides = [
        word for word, sign in _SIDES.items() if any(sign * row.gap > 0 for row in rows)
    ]
    if side != "neither":
        return f"{side} {by}{' on average' if {*sides} - {side} else ''}"
    if sides:
        words = [f"{sides[0]} for some {what}"]
        words += [f"{word} for others" for word in sides[1:]]
        worst = "" if found.runs else f", {_worst(rows, _precision)}"
        return f"{' and '.join(words)}{worst}"
    if found.ece:
        return "miscalibrated beyond chance, though neither over- nor under-confident on average"
    if found.frequencies:
        worst = _worst(found.frequencies, _frequency)
        return f"wrong about how often some classes occur, {worst}"
    return "not clearly miscalibrated" if weak else "calibrated within chance"


def _worst(rows: Sequence[Any], in_words: Callable[[Any], str]) -> str:
    """The first of classes, the worst one, with its numbers."""
    return f"{'most of all ' if len(rows) > 1 else ''}{in_words(rows[0])}"


def _frequency(row: Any) -> str:
    """A class or label with its frequency and its mean probability."""
    came, said = _apart(row.frequency, row.mean_probability, 3)
    return f"{_named(row)} ({came} of the examples, mean probability {said})"


def _precision(row: Any) -> str:
    """A class with the confidence and the precision of its predictions."""
    said, came = _apart(row.confidence, row.precision, 2)
    return f"{_named(row)} (confidence {said}, precision {came})"


def _named(row: Any) -> str:
    return f'"{shortened(row.name, _LONGEST_NAME)}"'


def _points(overall: Overall, sign: int = 1) -> str:
    """The gap and its interval in percentage points."""
    value, low, high = (100 * sign * each for each in overall[:3])
    shown, *ends = _apart_from_0(Interval(value, *sorted([low, high])), 1)
    return f"{shown} points [{', '.join(ends)}]"


def _changed(change: Interval, multi_label: bool) -> str:
    """The change of the NLL by the calibration with its interval, which has the sign of the words."""
    nll = "NLL of all decisions" if multi_label else "NLL"
    if max(abs(each) for each in change if each is not None) < _UNCHANGED:
        return f"{nll} unchanged"
    sign = 1 if change.value > 0 else -1
    ends = [] if change.low is None else [sign * change.low, sign * change.high]
    size, *shown = _apart_from_0(Interval(sign * change.value, *sorted(ends)), 3)
    words = f"{nll} {'higher' if sign > 0 else 'lower'} by {size}"
    return f"{words} [{', '.join(shown)}]" if shown else words


def _apart_from_0(found: Interval, digits: int) -> list[str]:
    """A value and its interval, if any, with as many digits as show on which side of 0 they are."""
    numbers = [each for each in found if each is not None]
    is_apart = min(numbers) * max(numbers) > 0
    if is_apart:
        nearest = min(map(abs, numbers))
        digits = max(digits, math.ceil(-math.log10(2 * nearest)))
    return [f"{round(each, digits) + 0.0:.{digits}f}" for each in numbers]


def diagnose(report: CalibrationReport) -> list[str]:
    """The verdict, sentences on each set of probabilities, and a sentence if calibration made the loss worse."""
    sentences = [verdict(report)]
    if report.after is None:
        return [*sentences, *_of_state(report, report.before)]
    for when, measured in report.states.items():
        found = _of_state(report, measured)
        sentences += [
            f"{when.capitalize()} calibration: {each[0].lower()}{each[1:]}"
            for each in found
        ]
    change = report.nll_change
    why = "the calibrator was fitted on too few examples, or on examples unlike these"
    worse = f"The negative log-likelihood got worse beyond chance: {why}."
    is_worse = change is not None and change.low is not None and change.low > 0
    return [*sentences, worse] if is_worse else sentences


def _of_state(report: CalibrationReport, measured: Measured) -> Iterator[str]:
    """Sentences on the means, on differences beyond chance, and on the ECE of a calibrated model."""
    found, overall, test = (
        claims(report, measured),
        measured.overall,
        measured.consistency,
    )
    mean, came = _apart(overall.confidence, overall.accuracy, 4)
    means = (
        ("Mean probability is", "frequency")
        if test is None
        else ("Mean confidence is", "accuracy")
    )
    judged = found.judged(overall.p_value, is_claimed := found.verdict != "neither")
    difference = (
        ""
        if is_claimed and test is not None
        else f": a difference of {_points(overall)}"
    )
    yield f"{means[0]} {mean}, {means[1]} {came}{difference} ({judged})."
    for run in found.runs[:3]:
        said, came = _apart(run.confidence, run.accuracy, 3)
        where = f"Confidences from {run.lower:.2f} to {run.upper:.2f} ({counted(run.count, 'example')})"
        side = "high" if run.gap > 0 else "low"
        yield f"{where} are too {side}: {said} on average, with an accuracy of {came}."
    for side, sign in _SIDES.items():
        rows = [row for row in found.classes if sign * row.gap > 0]
        named = _listed([_precision(row) for row in rows])
        if rows:
            yield f"Predictions of {counted(len(rows), 'class')} are {side} beyond chance: {named}."
    if found.frequencies:
        words = [_frequency(row) for row in found.frequencies]
        what = "labels apply" if measured.labels else "classes occur"
        yield f"Some {what} more or less often than their mean probability: {_listed(words)}."
    if test is not None:
        yield (
            f"The ECE is {test.value:.4f}; on {counted(overall.n_examples, 'example')}, the ECE of a perfectly "
            f"calibrated model with these confidences is {test.expected:.4f} on average "
            f"({found.judged(test.p_value, found.ece)})."
        )


def _apart(first: float, second: float, digits: int) -> list[str]:
    """Two numbers with this many digits, or with as many as are needed to tell them apart."""
    while digits < 9 and f"{first:.{digits}f}" == f"{second:.{digits}f}":
        digits += 1
    return [f"{each:.{digits}f}" for each in (first, second)]


def significant_runs(rows: Sequence[BinRow], alpha: float) -> list[BinRow]:
    """Join neighbouring bins that are wrong in the same direction beyond chance; largest contribution first.

    alpha is divided by the number of bins (Bonferroni), so that many bins do not cause false alarms.
    """
    found: list[BinRow] = []
    for row in rows:
        if row.p_value >= alpha / len(rows):
            continue
        last = found[-1] if found else None
        if last and np.isclose(last.upper, row.lower) and last.gap * row.gap > 0:
            count, parts = last.count + row.count, last.contribution + row.contribution
            share, names = row.count / count, ("confidence", "accuracy", "gap")
            means = {
                name: (1 - share) * getattr(last, name) + share * getattr(row, name)
                for name in names
            }
            row = replace(
                found.pop(), upper=row.upper, count=count, contribution=parts, **means
            )
        found.append(row)
    return sorted(found, key=lambda row: -row.contribution)


def warn(report: CalibrationReport) -> Iterator[str]:
    """Caveats: few examples, absent or rare classes, one bin, two classes."""
    before, several = report.before, report.multi_label
    noisy = "binned errors are noisy and biased upwards"
    effective = before.effective
    if effective is not None:
        if effective < _FEW_EXAMPLES:
            worth = f"As the weighted examples are worth only {effective:,.0f} unweighted ones"
            yield f"{worth}, {noisy}. Use the intervals."
    elif not several and report.n_examples < _FEW_EXAMPLES:
        way_out = "Use the debiased and smooth errors, and the intervals"
        yield f"With only {counted(report.n_examples, 'example')}, {noisy}. {way_out}."
    rows: Any = before.labels or before.classes
    counts = [row.n_true if several else row.support for row in rows]
    kinds: dict[str, list[str]] = {}
    for row, count in zip(rows, counts, strict=True):
        what = f"{f'fewer than {_FEW_IN_A_CLASS}' if count else 'no'} examples; such rows of tables are unreliable"
        if several and count in (0, row.n_known):
            what = "one value in all rows, without an AUROC; macro averages are over the other labels"
        elif count >= _FEW_IN_A_CLASS:
            continue
        kinds.setdefault(what, []).append(_named(row))
    for what, names in kinds.items():
        yield f"{_listed(names)} {'has' if len(names) == 1 else 'have'} {what}."
    if len(before.bins) == 1 and not several:
        yield "All confidences lie in one bin: a reliability diagram shows one point, and an ECE only the overall gap."
    if len(report.class_names) == 2 and not several:
        yield "With two classes, the confidence is the probability of the predicted class, not of the positive class."


def _listed(words: Sequence[str]) -> str:
    """The first words, and the number of further words."""
    more = len(words) - _CLASSES_NAMED
    return ", ".join(words[:_CLASSES_NAMED]) + (
        f", and {more} more" if more > 0 else ""
    )
