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
from hf_calib.report.document import listed, p_in_words
from hf_calib.report.measured import BinRow, Measured, Overall

if TYPE_CHECKING:
    from hf_calib.report.report import CalibrationReport

_FEW_EXAMPLES = 1_000  # With fewer, 15 bins hold too few for a stable ECE.
_FEW_IN_A_CLASS = 10
_UNRELIABLE = "examples; such rows of tables are unreliable"
_LONGEST_NAME = 60
_UNCHANGED = 5e-7  # Nats; a calibrator that changes less changes nothing.
_CLASSES_SEEN = 20  # The fewest predictions of a class that are judged.
# The sign of confidence minus accuracy.
_SIDES = {"over-confident": 1, "under-confident": -1}


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
        words = _first_that_holds(
            (claimed, "beyond chance"),
            (p_value < self.level, weak),
            (True, "within chance"),
        )
        return f"{p_in_words(p_value)}, {words}"


def _first_that_holds(*sentences: tuple[Any, str]) -> str:
    """The first sentence whose condition holds."""
    return next(sentence for holds, sentence in sentences if holds)


def claims(report: CalibrationReport, measured: Measured) -> Claims:
    """The claims on one of a report's sets of probabilities.

    Of the reports on calibrated probabilities, at most a share 1 - confidence_level makes any claim, which is then
    wrong: the kinds of claims (overall, the ECE, bins, classes, frequencies) are tested together by Simes' rule, at
    half that level if there are two sets, and each kind is judged alone only if that test rejects (Simes 1986, "An
    improved Bonferroni procedure for multiple tests of significance": these tests share their labels).
    """
    level = (1 - report.settings.confidence_level) / len(report.states)
    overall = measured.overall
    test = measured.consistency
    rows: Any = measured.labels or measured.classes
    judged: Any = [row for row in measured.classes if row.predicted >= _CLASSES_SEEN]
    smallest = [overall.p_value, _smallest([row.frequency_p_value for row in rows])]
    if test is not None:
        smallest.append(test.p_value)
        smallest.append(_smallest([row.p_value for row in measured.bins]))
        smallest.append(_smallest([row.p_value for row in judged]))
    n_kinds = len(smallest)
    ranked = enumerate(sorted(smallest), 1)
    if not any(p_value <= level * rank / n_kinds for rank, p_value in ranked):
        level = 0.0
    verdict = "neither"
    if overall.p_value < level:
        verdict = "over-confident" if overall.gap > 0 else "under-confident"
    runs: list[BinRow] = []
    if test is not None:
        runs = significant_runs(measured.bins, level)
    wrong = [row for row in judged if row.p_value < level / len(judged)]
    wrong.sort(key=lambda row: -abs(row.gap))
    differ = [row for row in rows if row.frequency_p_value < level / len(rows)]
    differ.sort(key=lambda row: -abs(row.frequency - row.mean_probability))
    return Claims(
        verdict=verdict,
        ece=test is not None and test.p_value <= level,
        runs=runs,
        classes=wrong,
        frequencies=differ,
        n_tests=len(report.states) * n_kinds,
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
    found = states
    if len(states) > 1:
        before, after = states
        found = [f"{before} before, {after} after"]
        if before == after:
            found = [f"{before} before and after"]
    if report.nll_change is not None:
        found.append(_changed(report.nll_change, report.multi_label))
    found += [
        f"{each.differing} from the others" for each in report.slices if each.differing
    ]
    sentence = "; ".join(found)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _verdict_on(found: Claims, measured: Measured) -> str:
    overall = measured.overall
    test = measured.consistency
    smallest = overall.p_value if test is None else min(overall.p_value, test.p_value)
    is_weak = smallest < found.level or overall.low * overall.high > 0
    by = f"by {_points(overall, -1 if overall.gap < 0 else 1)}"
    if test is None:
        return _verdict_on_labels(found, measured, by, is_weak)
    rows: Sequence[Any] = found.runs
    what = "confidences"
    worst = ""
    if not found.runs:
        rows = found.classes
        what = "classes"
        worst = f", {_worst(rows, _precision)}"
    sides = [
        word for word, sign in _SIDES.items() if any(sign * row.gap > 0 for row in rows)
    ]
    are_mixed = any(word != found.verdict for word in sides)
    frequencies = _worst(found.frequencies, _frequency)
    return _first_that_holds(
        (found.verdict != "neither" and are_mixed, f"{found.verdict} {by} on average"),
        (found.verdict != "neither", f"{found.verdict} {by}"),
        (
            len(sides) == 2,
            f"over-confident for some {what} and under-confident for others{worst}",
        ),
        (sides, f"{''.join(sides)} for some {what}{worst}"),
        (
            found.ece,
            "miscalibrated beyond chance, though neither over- nor under-confident on average",
        ),
        (
            found.frequencies,
            f"wrong about how often some classes occur, {frequencies}",
        ),
        (is_weak, "not clearly miscalibrated"),
        (True, "calibrated within chance"),
    )


def _verdict_on_labels(
    found: Claims, measured: Measured, by: str, is_weak: bool
) -> str:
    rows = found.frequencies
    n_high = sum(row.mean_probability > row.frequency for row in rows)
    n_low = len(rows) - n_high
    parts = []
    if n_high > 0:
        parts.append(f"too high for {n_high}")
    if n_low > 0:
        parts.append(f"too low for {n_low}")
    side = "high" if measured.overall.gap > 0 else "low"
    which = f"{' and '.join(parts)} of {len(measured.labels)} labels"
    return _first_that_holds(
        (rows, f"mean probabilities {which}, {_worst(rows, _frequency)}"),
        (found.verdict != "neither", f"mean probability too {side} {by}"),
        (is_weak, "mean probabilities not clearly different from the frequencies"),
        (True, "mean probabilities within chance of the frequencies"),
    )


def _worst(rows: Sequence[Any], in_words: Callable[[Any], str]) -> str:
    """The first of classes, the worst one, with its numbers."""
    if not rows:
        return ""
    words = in_words(rows[0])
    return f"most of all {words}" if len(rows) > 1 else words


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
        sentences += _of_state(report, report.before)
        return sentences
    for when, measured in report.states.items():
        for each in _of_state(report, measured):
            own = f"{each[0].lower()}{each[1:]}"
            sentences.append(f"{when.capitalize()} calibration: {own}")
    change = report.nll_change
    if change is not None and change.low is not None and change.low > 0:
        sentences.append(
            "The negative log-likelihood got worse beyond chance: the calibrator was fitted on too few examples, or "
            "on examples unlike these."
        )
    return sentences


def _of_state(report: CalibrationReport, measured: Measured) -> Iterator[str]:
    """Sentences on the means, on differences beyond chance, and on the ECE of a calibrated model."""
    found = claims(report, measured)
    overall = measured.overall
    test = measured.consistency
    is_claimed = found.verdict != "neither"
    stated = "Mean probability" if test is None else "Mean confidence"
    observed = "frequency" if test is None else "accuracy"
    difference = f": a difference of {_points(overall)}"
    if is_claimed and test is not None:
        # The verdict has stated it.
        difference = ""
    mean, came = _apart(overall.confidence, overall.accuracy, 4)
    judged = found.judged(overall.p_value, is_claimed)
    yield f"{stated} is {mean}, {observed} {came}{difference} ({judged})."
    for run in found.runs[:3]:
        said, came = _apart(run.confidence, run.accuracy, 3)
        where = f"Confidences from {run.lower:.2f} to {run.upper:.2f} ({counted(run.count, 'example')})"
        side = "high" if run.gap > 0 else "low"
        yield f"{where} are too {side}: {said} on average, with an accuracy of {came}."
    for side, sign in _SIDES.items():
        rows = [row for row in found.classes if sign * row.gap > 0]
        if rows:
            named = listed([_precision(row) for row in rows])
            yield f"Predictions of {counted(len(rows), 'class')} are {side} beyond chance: {named}."
    if found.frequencies:
        named = listed([_frequency(row) for row in found.frequencies])
        what = "labels apply" if measured.labels else "classes occur"
        yield f"Some {what} more or less often than their mean probability: {named}."
    if test is not None:
        judged = found.judged(test.p_value, found.ece)
        n_examples = counted(overall.n_examples, "example")
        yield (
            f"The ECE is {test.value:.4f}; on {n_examples}, the ECE of a perfectly calibrated model with these "
            f"confidences is {test.expected:.4f} on average ({judged})."
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
            row = _joined(found.pop(), row)
        found.append(row)
    return sorted(found, key=lambda row: -row.contribution)


def _joined(first: BinRow, second: BinRow) -> BinRow:
    """Two neighbouring bins as one."""
    count = first.count + second.count
    share = second.count / count
    return replace(
        first,
        upper=second.upper,
        count=count,
        contribution=first.contribution + second.contribution,
        confidence=(1 - share) * first.confidence + share * second.confidence,
        accuracy=(1 - share) * first.accuracy + share * second.accuracy,
        gap=(1 - share) * first.gap + share * second.gap,
    )


def warn(report: CalibrationReport) -> Iterator[str]:
    """Caveats: few examples, absent or rare classes, one bin, two classes."""
    before = report.before
    yield from _warn_of_few(report)
    rows: Any = before.labels or before.classes
    kinds: dict[str, list[str]] = {}
    for row in rows:
        what = _flaw_of_label(row) if report.multi_label else _flaw_of_class(row)
        if what:
            kinds.setdefault(what, []).append(_named(row))
    for what, names in kinds.items():
        have = "has" if len(names) == 1 else "have"
        yield f"{listed(names)} {have} {what}."
    if report.multi_label:
        return
    if len(before.bins) == 1:
        yield "All confidences lie in one bin: a reliability diagram shows one point, and an ECE only the overall gap."
    if len(report.class_names) == 2:
        yield "With two classes, the confidence is the probability of the predicted class, not of the positive class."


def _warn_of_few(report: CalibrationReport) -> Iterator[str]:
    """A caveat if there are too few examples for binned errors."""
    noisy = "binned errors are noisy and biased upwards"
    effective = report.before.effective
    if effective is not None:
        if effective < _FEW_EXAMPLES:
            worth = f"As the weighted examples are worth only {effective:,.0f} unweighted ones"
            yield f"{worth}, {noisy}. Use the intervals."
    elif not report.multi_label and report.n_examples < _FEW_EXAMPLES:
        only = f"With only {counted(report.n_examples, 'example')}"
        yield f"{only}, {noisy}. Use the debiased and smooth errors, and the intervals."


def _flaw_of_label(row: Any) -> str:
    """The flaw of a label's numbers in words; "" if there is none."""
    return _first_that_holds(
        (
            row.n_true in (0, row.n_known),
            "one value in all rows, without an AUROC; macro averages are over the other labels",
        ),
        (row.n_true < _FEW_IN_A_CLASS, f"fewer than {_FEW_IN_A_CLASS} {_UNRELIABLE}"),
        (True, ""),
    )


def _flaw_of_class(row: Any) -> str:
    """The flaw of a class's numbers in words; "" if there is none."""
    return _first_that_holds(
        (row.support == 0, f"no {_UNRELIABLE}"),
        (row.support < _FEW_IN_A_CLASS, f"fewer than {_FEW_IN_A_CLASS} {_UNRELIABLE}"),
        (True, ""),
    )
