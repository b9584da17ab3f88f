"""Diagnosis of a report in sentences: over- or under-confident, where, and whether by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_calib._text import counted
from hf_calib.metrics.sums import Interval
from hf_calib.plots.style import shortened
from hf_calib.report.document import cell, listed, p_in_words
from hf_calib.report.measured import BinRow, Measured

if TYPE_CHECKING:
    from hf_calib.report.report import CalibrationReport

# With fewer, 15 bins hold too few for a stable ECE.
_FEW_EXAMPLES = 1_000
_FEW_IN_A_CLASS = 10
_UNRELIABLE = "examples; such rows of tables are unreliable"
_LONGEST_NAME = 60
# Nats; a calibrator that changes less changes nothing.
_UNCHANGED = 5e-7
# The fewest predictions of a class that are judged.
_CLASSES_SEEN = 20
# The most digits after the point that tell two numbers apart.
_MOST_DIGITS = 9


class Claims(NamedTuple):
    """Claims on a set of probabilities, beyond chance at a level that holds for all together."""

    verdict: str  # "over-confident", "under-confident" or "neither", on average
    ece: bool  # whether the ECE is larger than that of a calibrated model
    runs: list[BinRow]  # bins whose confidences are too high or too low
    classes: list[Any]  # each `ClassRow` whose confidence differs from its precision
    # Classes or labels whose frequency differs from their mean probability.
    frequencies: list[Any]
    # Whether a test alone, or the interval of the gap, finds a difference.
    is_weak: bool
    n_tests: int  # the number of tests in the report
    level: float  # the level of a single test

    @property
    def is_claimed(self) -> bool:
        """Whether there is a verdict on average."""
        return self.verdict != "neither"

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

    Of the reports on calibrated probabilities, at most a share 1 - confidence_level makes any
    claim, which is then wrong: the kinds of claims (overall, the ECE, bins, classes, frequencies)
    are tested together by Simes' rule, at half that level if there are two sets, and each kind is
    judged alone only if that test rejects (Simes 1986, "An improved Bonferroni procedure for
    multiple tests of significance": these tests share their labels).
    """
    n_states = len(report.states)
    level_of_one = 1 - report.settings.confidence_level
    level = level_of_one / n_states
    overall = measured.overall
    test = measured.consistency
    bins: Sequence[BinRow] = () if test is None else measured.bins
    rows: Any = measured.labels or measured.classes
    # The precision of a few predictions is mostly chance, and each test costs the others power.
    seen = [row for row in measured.classes if row.predicted >= _CLASSES_SEEN]
    kinds = [overall.p_value, _smallest(row.frequency_p_value for row in rows)]
    if test is not None:
        kinds.append(test.p_value)
        kinds.append(_smallest(row.p_value for row in bins))
        kinds.append(_smallest(row.p_value for row in seen))
    n_kinds = len(kinds)
    ranked = enumerate(sorted(kinds), 1)
    # Simes' rule: the k-th smallest of n p-values is at most k / n of the level, for any k.
    if not any(p_value <= level * rank / n_kinds for rank, p_value in ranked):
        level = 0.0
    p_values = [overall.p_value] if test is None else [overall.p_value, test.p_value]
    wrong = [row for row in seen if row.p_value < level / len(seen)]
    differ = [row for row in rows if row.frequency_p_value < level / len(rows)]
    return Claims(
        verdict=_side(overall.gap) if overall.p_value < level else "neither",
        ece=test is not None and test.p_value <= level,
        runs=significant_runs(bins, level),
        classes=sorted(wrong, key=lambda row: -abs(row.gap)),
        frequencies=sorted(
            differ, key=lambda row: -abs(row.frequency - row.mean_probability)
        ),
        is_weak=min(p_values) < level_of_one or overall.low * overall.high > 0,
        n_tests=n_states * n_kinds,
        level=level_of_one,
    )


def _smallest(p_values: Iterable[float]) -> float:
    """The smallest of several p-values, corrected by Bonferroni; 1 if there are none."""
    found = list(p_values)
    return min([1.0, *(p_value * len(found) for p_value in found)])


def _side(gap: float) -> str:
    """The side of confidence minus accuracy in words."""
    return "over-confident" if gap > 0 else "under-confident"


def _height(gap: float) -> str:
    """The side of confidence minus accuracy in a word after "too"."""
    return "high" if gap > 0 else "low"


def verdict(report: CalibrationReport) -> str:
    """The diagnosis in one sentence."""
    found = [_verdict_on(report, measured) for measured in report.states.values()]
    if report.after is not None:
        before, after = found
        found = [f"{before} before, {after} after"]
        if before == after:
            found = [f"{before} before and after"]
    if report.nll_change is not None:
        found.append(_changed(report.nll_change, report.multi_label))
    # A report may be right on the whole and wrong on a slice, which the verdict must not hide.
    differing = [each.differing for each in report.slices if each.differing]
    found += [f"{each} from the others" for each in differing]
    sentence = "; ".join(found)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _verdict_on(report: CalibrationReport, measured: Measured) -> str:
    """The verdict on one set of probabilities."""
    found = claims(report, measured)
    gap = measured.overall.gap
    by = f"by {_points(measured.overall, -1 if gap < 0 else 1)}"
    if measured.labels:
        which = _heights_of(found.frequencies, len(measured.labels))
        return _verdict_on_labels(found, which, f"{_height(gap)} {by}")
    return _verdict_on_classes(found, by)


def _verdict_on_labels(found: Claims, which: str, how: str) -> str:
    """The verdict on labels, of which so many are off, and whose mean is too high or too low."""
    worst = _worst(found.frequencies, _frequency)
    return _first_that_holds(
        (which, f"mean probabilities {which}, {worst}"),
        (found.is_claimed, f"mean probability too {how}"),
        (
            found.is_weak,
            "mean probabilities not clearly different from the frequencies",
        ),
        (True, "mean probabilities within chance of the frequencies"),
    )


def _verdict_on_classes(found: Claims, by: str) -> str:
    """The verdict on one label per row: the average, or else bins, classes or frequencies."""
    rows: Sequence[Any] = found.runs
    where = "some confidences"
    worst = ""
    # Bins are what the errors of a report are computed from, so they are named before classes.
    if not rows:
        rows = found.classes
        where = "some classes"
        worst = f", {_worst(rows, _precision)}"
    sides = sorted({_side(row.gap) for row in rows})
    are_mixed = not {found.verdict}.issuperset(sides)
    frequencies = _worst(found.frequencies, _frequency)
    return _first_that_holds(
        (found.is_claimed and are_mixed, f"{found.verdict} {by} on average"),
        (found.is_claimed, f"{found.verdict} {by}"),
        (
            len(sides) == 2,
            f"over-confident for {where} and under-confident for others{worst}",
        ),
        (sides, f"{''.join(sides)} for {where}{worst}"),
        (
            found.ece,
            "miscalibrated beyond chance, though neither over- nor under-confident on average",
        ),
        (frequencies, f"wrong about how often some classes occur, {frequencies}"),
        (found.is_weak, "not clearly miscalibrated"),
        (True, "calibrated within chance"),
    )


def _heights_of(rows: Sequence[Any], n_labels: int) -> str:
    """How many labels have mean probabilities that are too high, and too low; "" if none has."""
    heights = [_height(row.mean_probability - row.frequency) for row in rows]
    parts = []
    for height in ("high", "low"):
        n = heights.count(height)
        if n > 0:
            parts.append(f"too {height} for {n}")
    return f"{' and '.join(parts)} of {n_labels} labels" if parts else ""


def _worst(rows: Sequence[Any], in_words: Callable[[Any], str]) -> str:
    """The first of classes, the worst one, with its numbers; "" if there are none."""
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


def _points(overall: Any, sign: int = 1) -> str:
    """The gap and its interval in percentage points."""
    gap = Interval(overall.gap, overall.low, overall.high)
    return _with_ends(gap, 100 * sign, 1).replace(" [", " points [")


def _changed(change: Interval, multi_label: bool) -> str:
    """The change of the NLL by the calibration; its interval has the sign of the words."""
    nll = "NLL of all decisions" if multi_label else "NLL"
    if max(abs(each) for each in change if each is not None) < _UNCHANGED:
        return f"{nll} unchanged"
    if change.value > 0:
        return f"{nll} higher by {_with_ends(change, 1, 3)}"
    return f"{nll} lower by {_with_ends(change, -1, 3)}"


def _with_ends(found: Interval, factor: float, digits: int) -> str:
    """A multiple of an interval, with as many digits as show on which side of 0 it is."""
    value, *ends = [factor * each for each in found if each is not None]
    numbers = [value, *sorted(ends)]
    # Rounded to 0, an end would contradict a verdict beyond chance.
    if min(numbers) * max(numbers) > 0:
        digits = _digits(min(map(abs, numbers)), 0.0, digits)
    # Adding 0 turns -0.0 into 0.0.
    rounded = [round(each, digits) + 0.0 for each in numbers]
    return cell(Interval(*rounded), f".{digits}f")


def _apart(first: float, second: float, digits: int) -> list[str]:
    """Two numbers with this many digits, or with as many as are needed to tell them apart."""
    digits = _digits(first, second, digits)
    return [f"{each:.{digits}f}" for each in (first, second)]


def _digits(first: float, second: float, fewest: int) -> int:
    """The digits after the point with which two numbers look different."""
    digits = fewest
    while digits < _MOST_DIGITS and f"{first:.{digits}f}" == f"{second:.{digits}f}":
        digits += 1
    return digits


def diagnose(report: CalibrationReport) -> list[str]:
    """The verdict, sentences on each set of probabilities, and one if the loss got worse."""
    sentences = [verdict(report)]
    if report.after is None:
        return [*sentences, *_of_state(report, report.before)]
    for when, measured in report.states.items():
        for each in _of_state(report, measured):
            own = f"{each[0].lower()}{each[1:]}"
            sentences.append(f"{when.capitalize()} calibration: {own}")
    change = report.nll_change
    if change is not None and change.low is not None and change.low > 0:
        sentences.append(
            "The negative log-likelihood got worse beyond chance: the calibrator was fitted on "
            "too few examples, or on examples unlike these."
        )
    return sentences


def _of_state(report: CalibrationReport, measured: Measured) -> Iterator[str]:
    """Sentences on the means, on differences beyond chance, and on a calibrated model's ECE."""
    found = claims(report, measured)
    overall = measured.overall
    test = measured.consistency
    mean, came = _apart(overall.confidence, overall.accuracy, 4)
    means = f"Mean confidence is {mean}, accuracy {came}"
    if test is None:
        means = f"Mean probability is {mean}, frequency {came}"
    if test is None or not found.is_claimed:
        # The verdict has not stated it.
        means += f": a difference of {_points(overall)}"
    yield f"{means} ({found.judged(overall.p_value, found.is_claimed)})."
    for run in found.runs[:3]:
        said, came = _apart(run.confidence, run.accuracy, 3)
        where = f"Confidences from {run.lower:.2f} to {run.upper:.2f}"
        where += f" ({counted(run.count, 'example')})"
        too = f"too {_height(run.gap)}"
        yield f"{where} are {too}: {said} on average, with an accuracy of {came}."
    for side in ("over-confident", "under-confident"):
        rows = [row for row in found.classes if _side(row.gap) == side]
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
            f"The ECE is {test.value:.4f}; on {n_examples}, the ECE of a perfectly calibrated "
            f"model with these confidences is {test.expected:.4f} on average ({judged})."
        )


def significant_runs(rows: Sequence[BinRow], alpha: float) -> list[BinRow]:
    """Join neighbouring bins that are wrong in one direction beyond chance; the worst run first.

    alpha is divided by the number of bins (Bonferroni), so that many bins do not cause false
    alarms.
    """
    found: list[BinRow] = []
    for row in rows:
        if row.p_value >= alpha / len(rows):
            continue
        last = found[-1] if found else None
        # Edges that are equal in exact arithmetic may differ in the last bit.
        if last and np.isclose(last.upper, row.lower) and last.gap * row.gap > 0:
            row = _joined(found.pop(), row)
        found.append(row)
    return sorted(found, key=lambda row: -row.contribution)


def _joined(first: BinRow, second: BinRow) -> BinRow:
    """Two neighbouring bins as one."""
    count = first.count + second.count
    share = second.count / count
    confidence = (1 - share) * first.confidence + share * second.confidence
    accuracy = (1 - share) * first.accuracy + share * second.accuracy
    return replace(
        first,
        upper=second.upper,
        count=count,
        contribution=first.contribution + second.contribution,
        confidence=confidence,
        accuracy=accuracy,
        gap=confidence - accuracy,
    )


def warn(report: CalibrationReport) -> Iterator[str]:
    """Caveats: few examples, absent or rare classes, one bin, two classes."""
    before = report.before
    yield from _warn_of_few(report)
    rows: Any = before.labels or before.classes
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(_flaw(row, report.multi_label), []).append(_named(row))
    # Most rows have no flaw.
    names.pop("", None)
    for flaw, flawed in names.items():
        have = "has" if len(flawed) == 1 else "have"
        yield f"{listed(flawed)} {have} {flaw}."
    if report.multi_label:
        return
    if len(before.bins) == 1:
        yield (
            "All confidences lie in one bin: a reliability diagram shows one point, and an ECE "
            "only the overall gap."
        )
    if len(report.class_names) == 2:
        yield (
            "With two classes, the confidence is the probability of the predicted class, not of "
            "the positive class."
        )


def _warn_of_few(report: CalibrationReport) -> Iterator[str]:
    """A caveat if there are too few examples for binned errors."""
    noisy = "binned errors are noisy and biased upwards"
    # Few rows with large weights are as noisy as few rows.
    effective = report.before.effective
    if effective is not None:
        if effective < _FEW_EXAMPLES:
            worth = f"As the weighted examples are worth only {effective:,.0f} unweighted ones"
            yield f"{worth}, {noisy}. Use the intervals."
    elif not report.multi_label and report.n_examples < _FEW_EXAMPLES:
        only = f"With only {counted(report.n_examples, 'example')}"
        yield f"{only}, {noisy}. Use the debiased and smooth errors, and the intervals."


def _flaw(row: Any, multi_label: bool) -> str:
    """The flaw of a label's or a class's numbers, in words that follow "has"; or ""."""
    n = row.n_true if multi_label else row.support
    return _first_that_holds(
        (
            multi_label and n in (0, row.n_known),
            "one value in all rows, without an AUROC; macro averages are over the other labels",
        ),
        (n == 0, f"no {_UNRELIABLE}"),
        (n < _FEW_IN_A_CLASS, f"fewer than {_FEW_IN_A_CLASS} {_UNRELIABLE}"),
        (True, ""),
    )
