"""Diagnosis of a report in sentences: over- or under-confident, where, and whether chance can explain it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.stats import t

from hf_calib.metrics.scores import negative_logs
from hf_calib.metrics.sums import Interval, top_label
from hf_calib.report.document import p_in_words
from hf_calib.report.measured import MEASURES, BinRow, ClassRow, Measured

if TYPE_CHECKING:
    from hf_calib.report.report import CalibrationReport

_FEW_EXAMPLES = 1_000  # below, 15 bins hold too few for a steady ECE
_FEW_IN_A_CLASS = 10
_CLASSES_NAMED = 5
_CLASSES_SEEN = 20  # predictions of a class before a judgement on it is passed


class Claims(NamedTuple):
    """Claims that the sentences on a set of probabilities may make."""

    level: float  # of each kind of claim; 0 where there may be none, as a calibrated model would often show as much
    verdict: str  # "over-confident", "under-confident" or "neither"
    corrected: str  # the reason why what is beyond chance alone is not claimed


def claims(report: CalibrationReport, measured: Measured) -> Claims:
    """The claims of one of a report's sets of probabilities.

    All claims of a report on calibrated probabilities are wrong, and at most a share 1 - confidence_level of such
    reports has any: the kinds of claims (overall, the ECE, bins, classes, frequencies) are tested together by Simes'
    rule, at half that level where there are two sets, and only where that rejects is each kind judged by itself
    (Simes 1986, "An improved Bonferroni procedure for multiple tests of significance": these tests share their labels).
    """
    level = (1 - report.settings.confidence_level) / len(report.states)
    rows = measured.labels or measured.classes
    smallest = {"overall": measured.overall.p_value}
    smallest["frequencies"] = _smallest([row.frequency_p_value for row in rows])
    if measured.consistency is not None:
        judged = [row.p_value for row in measured.classes if row.predicted >= _CLASSES_SEEN]
        bins = [row.p_value for row in measured.bins]
        smallest |= {"bins": _smallest(bins), "classes": _smallest(judged)}
        smallest["ece"] = measured.consistency.p_value
    ordered = sorted(smallest.values())
    if not any(p <= level * rank / len(ordered) for rank, p in enumerate(ordered, 1)):
        level = 0.0
    verdict = "over-confident" if measured.overall.gap > 0 else "under-confident"
    n_claims = len(report.states) * len(smallest)
    corrected = f"not beyond chance once corrected for the {n_claims} statements of this report"
    return Claims(level, verdict if smallest["overall"] < level else "neither", corrected)


def _smallest(p_values: Sequence[float]) -> float:
    """The smallest of several p-values, by Bonferroni; 1 of none."""
    return min(1.0, min(p_values) * len(p_values)) if p_values else 1.0


def diagnose(report: CalibrationReport) -> list[str]:
    """The sentences on each set of probabilities, and on what changed from one to the other."""
    sentences = list(_of_state(report, report.before))
    if report.after is not None:
        keys = ("macro_ece", "micro_nll") if report.multi_label else ("ece", "nll")
        pairs = [(report.before.metrics[key].value, report.after.metrics[key].value) for key in keys]
        ece, nll = (f"from {before:.4f} to {after:.4f}" for before, after in pairs)
        macro, of = ("macro ", " of a decision") if report.multi_label else ("", "")
        sentences += [
            f"After calibration the {macro}ECE goes {ece}, the negative log-likelihood{of} {nll}.",
            *_of_change(report, report.after),
        ]
        found = _of_state(report, report.after)
        sentences += [f"After calibration: {sentence[0].lower()}{sentence[1:]}" for sentence in found]
    return sentences


def _of_change(report: CalibrationReport, after: Measured) -> Iterator[str]:
    """What only held rows show of a change."""
    before, labels = report.before, report.labels
    if before.probs is None or report.multi_label:
        return
    change = negative_logs(after.probs, labels) - negative_logs(before.probs, labels)
    limit = 0.0
    if len(change) > 1 and np.isfinite(change).all():
        error = change.std(ddof=1) / np.sqrt(len(change))
        limit = t.isf((1 - report.settings.confidence_level) / 2, len(change) - 1) * error
    if change.mean() > limit:
        why = "it was fitted on too few examples, or on examples unlike these"
        yield f"The negative log-likelihood got worse beyond chance: {why}."
    if (top_label(before.probs, labels).correct != top_label(after.probs, labels).correct).any():
        values = [state.metrics["accuracy"].value for state in (before, after)]
        yield f"Predictions changed: accuracy goes from {values[0]:.4f} to {values[1]:.4f}."


def _of_state(report: CalibrationReport, measured: Measured) -> Iterator[str]:
    found, level, several = claims(report, measured), report.settings.confidence_level, report.multi_label
    overall, test = measured.overall, measured.consistency
    means = f"mean confidence {overall.confidence:.3f}, accuracy {overall.accuracy:.3f}"
    interval = (
        f"{overall.gap:+.3f}, {report.settings.level} interval {overall.low:+.3f} to {overall.high:+.3f}"
    )
    verdict = found.verdict
    if verdict == "neither":
        verdict = "neither over- nor under-confident beyond chance"
        if not round(overall.low, 3) <= 0 <= round(overall.high, 3):
            interval += f", which excludes 0 alone; {found.corrected}"
    if several:
        words = {"over-confident": "too high", "under-confident": "too low"}
        verdict = f"probabilities {words.get(verdict, 'neither too high nor too low')} beyond chance"
        means = f"mean probability {overall.confidence:.3f}, labels apply in {overall.accuracy:.3f}"
    yield f"Overall {verdict}: {means} (difference {interval})."
    yield from _where(measured, found.level)
    if test is None:
        return
    comparison = (
        f"{test.value:.4f}, and on {overall.n_examples:,} examples a perfectly calibrated model with these "
        f"confidences would show {test.expected:.4f} by chance alone"
    )
    end, verdict = p_in_words(test.p_value), "by itself is within chance: it is"
    if test.p_value <= found.level:
        verdict = "is beyond chance: it is"
    elif test.p_value <= 1 - level:
        end, verdict = f"{end} alone; {found.corrected}", "is"
    yield f"The top-label ECE {verdict} {comparison} ({end})."


def _where(measured: Measured, level: float) -> Iterator[str]:
    """Bins, classes and frequencies, or labels, that differ beyond chance, at this level of each kind."""
    runs = [] if measured.labels else significant_runs(measured.bins, level)
    for run in runs[:3]:
        word = "too high" if run.gap > 0 else "too low"
        yield (
            f"Confidences from {run.lower:.2f} to {run.upper:.2f} are {word}: {run.confidence:.3f} on average, "
            f"right {run.accuracy:.3f} of the time ({run.count:,} examples)."
        )
    if len({run.gap > 0 for run in runs}) == 2:
        yield "Errors in both directions partly cancel in the overall difference."
    judged = [row for row in measured.classes if row.predicted >= _CLASSES_SEEN]
    found: Any = [(r.confidence - r.precision, r) for r in judged if r.p_value < level / len(judged)]  # type: ignore[operator]
    found.sort(key=lambda pair: -abs(pair[0]))
    for sign, word in ((1, "over-confident"), (-1, "under-confident")):
        rows = [row for gap, row in found if sign * gap > 0]
        words = [f'"{r.name}" (confidence {r.confidence:.2f}, precision {r.precision:.2f})' for r in rows]
        if rows:
            yield f"Predictions of {_counted(rows)} are {word} beyond chance: {_listed(words)}."
    words = [
        f'"{row.name}" ({row.frequency:.3f} of the examples, mean probability {row.mean_probability:.3f})'
        for row in misjudged_frequencies(measured.labels or measured.classes, level)
    ]
    if words:
        what = "labels apply" if measured.labels else "classes occur"
        yield f"Some {what} more or less often than their mean probability: {_listed(words)}."


def misjudged_frequencies(rows: Sequence[ClassRow], alpha: float) -> list[ClassRow]:
    """Classes whose frequency is not their mean probability, beyond chance, largest difference first."""
    found = [row for row in rows if row.frequency_p_value < alpha / len(rows)]
    return sorted(found, key=lambda row: -abs(row.frequency - row.mean_probability))


def significant_runs(rows: Sequence[BinRow], alpha: float) -> list[BinRow]:
    """Neighbouring bins that err to the same side beyond chance, joined; largest contribution first.

    alpha is shared out over the bins (Bonferroni), so that many bins make no false alarm.
    """
    found: list[BinRow] = []
    for row in rows:
        if row.p_value >= alpha / len(rows):
            continue
        last = found[-1] if found else None
        if last and np.isclose(last.upper, row.lower) and last.gap * row.gap > 0:
            n, m = last.count, row.count
            names = ("confidence", "accuracy", "gap")
            means = {name: (n * getattr(last, name) + m * getattr(row, name)) / (n + m) for name in names}
            means["contribution"] = last.contribution + row.contribution
            p_value = min(last.p_value, row.p_value)
            found[-1] = replace(last, upper=row.upper, count=n + m, p_value=p_value, **means)
        else:
            found.append(row)
    return sorted(found, key=lambda row: -row.contribution)


def warn(report: CalibrationReport) -> Iterator[str]:
    """Caveats: few examples, values outside their intervals, absent or rare classes, two classes, equal confidences."""
    before, several = report.before, report.multi_label
    of_rows = before.state is None and not several
    if of_rows and report.n_examples < _FEW_EXAMPLES:
        advice = (
            "binned errors are noisy and biased upwards. Read the debiased and smooth ones, and the intervals"
        )
        yield f"Only {report.n_examples:,} examples: {advice}."
    yield from outside_intervals([state.metrics for state in report.states.values()])
    empty, few = "without examples: their rows say nothing", f"with fewer than {_FEW_IN_A_CLASS} examples"
    kinds = {empty: [row for row in before.classes if not row.support]}
    kinds[f"{few}: their rows are noisy"] = [r for r in before.classes if 0 < r.support < _FEW_IN_A_CLASS]
    if several:
        constant = [row for row in before.labels if row.n_true in (0, row.n_known)]
        rare = [row for row in before.labels if row not in constant and row.n_true < _FEW_IN_A_CLASS]
        alone = "with one value in all rows: they have no AUROC, and the macro averages leave them out"
        kinds = {alone: constant, f"{few} that have them: their rows are noisy": rare}
    for consequence, rows in kinds.items():
        if rows:
            named = _listed([f'"{row.name}"' for row in rows])
            yield f"{_counted(rows, several)} ({named}) {consequence}."
    if len(report.class_names) == 2 and not several:
        yield "Two classes: the confidence is that of the predicted class, at least 0.5, not that of the positive one."
    if of_rows and np.ptp(before.probs.max(axis=1)) == 0:
        yield "All confidences are equal: they lie in one bin, so the diagrams show one point."


def outside_intervals(states: Sequence[Mapping[str, Interval]]) -> list[str]:
    """A note on the errors whose value lies outside their interval in any state, if there are any."""
    inverted = [key for key, measure in MEASURES.items() if measure.interval == "inversion"]
    found = [(key, state[key]) for key in inverted for state in states if key in state]
    outside = [key for key, each in found if None not in each and not each.low <= each.value <= each.high]
    titles = ", ".join(MEASURES[key].title for key in dict.fromkeys(outside))
    note = f"Outside its interval: {titles}. Noise makes the value of such an error larger; the interval is of the "
    return [f"{note}error without noise."] if outside else []


def _counted(rows: Sequence[Any], several: bool = False) -> str:
    noun, plural = ("label", "labels") if several else ("class", "classes")
    return f"{len(rows)} {noun if len(rows) == 1 else plural}"


def _listed(words: Sequence[str]) -> str:
    """The first of many, and how many more there are."""
    more = len(words) - _CLASSES_NAMED
    return ", ".join(words[:_CLASSES_NAMED]) + (f", and {more} more" if more > 0 else "")
