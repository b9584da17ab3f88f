"""Advice and notes of a study in sentences: the conclusions from its numbers, and their limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas

from hf_calib._errors import few
from hf_calib._text import counted
from hf_calib.report.document import p_in_words
from hf_calib.study.statistics import LEVEL

if TYPE_CHECKING:
    from hf_calib.study.results import StudyResults

Pair = tuple[str, str]  # Loss and method.

UNSCALED = "none"  # The method of the model as trained.
MAIN_METRICS = {"nll": "NLL", "ece": "ECE"}  # Short names for headers and axes.

_PRIMARY = "nll"  # It is proper: the true probabilities have the lowest mean.
_FEW_CALIBRATION_ROWS = 200


def map_name(method: str) -> str:
    """The name of a post-hoc calibrator in tables and figures."""
    return "uncalibrated" if method == UNSCALED else method


def pair_name(loss: str, method: str) -> str:
    """The name of a loss with its calibrator.

    >>> pair_name("focal", "temperature"), pair_name("focal", "none")
    ('focal with temperature', 'focal without calibration')
    """
    return (
        f"{loss} without calibration" if method == UNSCALED else f"{loss} with {method}"
    )


def advise(results: StudyResults) -> Iterator[str]:
    """Return sentences that follow from the numbers of a study alone."""
    if results.baseline is None:
        yield "No run could be measured, so there is nothing to compare: see the missing runs."
        return
    yield from _on_the_primary_metric(results, results.baseline)
    for word, sign in (("Higher", 1), ("Lower", -1)):
        pairs = _beyond_chance(results, "accuracy", sign=sign)
        yield from _compared(results, f"{word} accuracy", pairs)
    if 0 < results.n_calibration < _FEW_CALIBRATION_ROWS and len(results.methods) > 1:
        yield (
            f"The calibrators were fitted on {counted(results.n_calibration, 'calibration row')}. Other rows would "
            "give other calibrators, which no interval here covers."
        )
    n_seeds, rows = results.means["n_seeds"].max(), results.counted[0]
    if n_seeds == 1:
        first = f"With one seed, intervals cover the {rows} only, and another run may change these orders."
    else:
        first = f"With {n_seeds} seeds, a difference between losses that is not beyond chance may still exist."
    yield f"{first} This is one dataset, one model and one length of training; with others another loss may win."


def _on_the_primary_metric(results: StudyResults, baseline: Pair) -> Iterator[str]:
    nll, differences = (
        of_metric(table, _PRIMARY)
        for table in (results.means["value"], results.differences)
    )
    best = nll.idxmin()
    if len(nll) == 1:
        yield f"Only {pair_name(*best)} was measured (NLL {nll[best]:.4f}): there is nothing to compare it with."
        return
    lowest = f"Lowest NLL: {pair_name(*best)}, {nll[best]:.4f}"
    reference = results.reference(best)
    if reference is None:
        yield f"{lowest}, the baseline itself."
    elif reference not in nll:
        yield f"{lowest}; {pair_name(*reference)} was not measured."
    else:
        found = "no seed in common"
        if best in differences.index:
            found = _in_words(differences.loc[best], results)
        yield f"{lowest}; {pair_name(*reference)} has {nll[reference]:.4f} ({found})."
    lower, higher = (_beyond_chance(results, _PRIMARY, sign=sign) for sign in (-1, 1))
    lower = sorted(lower, key=lambda pair: nll[pair])
    compared = [pair for pair in nll.index if results.reference(pair) == baseline]
    unproven = [pair for pair in compared if pair not in higher]
    if best in lower:
        yield f"Use {pair_name(*best)}."
    elif reference is not None:
        may_be = f"that {pair_name(*best)} is lower than {pair_name(*reference)} may be chance. Use more seeds."
        yield f"T{may_be[1:]}" if lower else f"Nothing is proven: {may_be}"
    elif unproven:
        yield f"Nothing is proven against {_names(unproven)}: that {pair_name(*best)} is lower may be chance."
    else:
        yield f"Use {pair_name(*best)}: all that are compared with it have a higher NLL beyond chance{_only(results)}."
    yield from _compared(results, "Lower NLL", lower)
    yield from _compared(results, "Higher NLL", higher)


def _in_words(row: pandas.Series, results: StudyResults) -> str:
    """A difference with its interval and p-value."""
    value, low, high, _, p, n_seeds = row
    found = f"difference {value:+.4f}"
    if not np.isnan(p):
        interval = f"95% interval {low:+.4f} to {high:+.4f}"
        found += f", {interval}, corrected {p_in_words(p)}"
    if n_seeds < min(2, results.means["n_seeds"].max()):
        found += ", from one seed only"
    return found


def _compared(results: StudyResults, found: str, pairs: list[Pair]) -> Iterator[str]:
    """Sentences on pairs that differ beyond chance, each with what it is compared with."""
    baseline = results.baseline or ("", "")
    direct = [pair for pair in pairs if results.reference(pair) == baseline]
    alike = [pair for pair in pairs if pair not in direct]
    references = {pair_name(*baseline): direct}
    references[f"{baseline[0]} with the same calibrator"] = alike
    for reference, named in references.items():
        if named:
            yield f"{found} than {reference} beyond chance{_only(results)}: {_names(named)}."


def _only(results: StudyResults) -> str:
    """The limit of a claim from one seed, in words."""
    only = f" on these {results.counted[0]}"
    return only if results.means["n_seeds"].max() == 1 else ""


def notes_on_statistics(results: StudyResults) -> Iterator[str]:
    """Return sentences on how to read intervals and p-values, and on the power of the study."""
    if results.baseline is None:
        return
    fewest, most = (
        int(results.means["n_seeds"].agg(which)) for which in ("min", "max")
    )
    rows = results.counted[0]
    differences = results.differences.reset_index()
    if results.baseline != ("cross_entropy", "temperature"):
        name = pair_name(*results.baseline)
        yield f"The baseline is {name}, as cross_entropy with temperature was not measured."
    if results.missing:
        n_listed = len(results.missing) + len(results.numbers.groupby(["loss", "seed"]))
        runs = f"{len(results.missing)} of {counted(n_listed, 'run')}"
        yield f"{runs} could not be measured; means are over the other runs."
    if fewest < most:
        yield (
            f"Losses have from {fewest} to {most} seeds. Differences are over the seeds of both, and need not be those "
            "of the means; the advice passes over losses that share one seed with the baseline."
        )
    drawn = "sentences" if rows == "test tokens" else "rows"
    yield (
        f"With one seed, intervals and p-values cover the {rows} only, and say nothing about another run."
        if most == 1
        else f"Intervals (95%) cover {rows} and seeds: resampled {drawn}, the same for all runs, and Student's t "
        f"over {most} seeds."
    )
    yield (
        "Noise makes every calibration error larger, and more so with fewer rows. An interval is for the error that "
        "other tests with as many rows would show; the class-wise and the smooth error have none. Differences in ECE "
        "and in adaptive ECE are of errors without that noise, so that they need not be the differences of the means."
    )
    scope = (
        "on these models only"
        if most == 1
        else "to find half of it takes up to four times as many seeds and test rows"
    )
    for metric, size in results.detectable.items():
        name = MAIN_METRICS[metric]
        found = f"A true difference in {name} of {size:.2g} would be found in 80% of such studies"
        if np.isinf(size):
            found = f"No true difference in {name} that is possible would be found in 80% of such studies"
        yield f"{found}; {scope}."
    if results.variance == "pooled":
        yield (
            "The variance over seeds is pooled over the losses of each calibrator, as if all varied alike. If they do "
            "not, up to 16% of such studies call equal losses different: compare their spread in results.csv."
        )
    n_compared = len(differences.groupby(["loss", "method"]))
    if n_compared:
        yield (
            f"Differences of a loss are to {results.baseline[0]} with the same calibrator, those of another calibrator "
            f"of it to {pair_name(*results.baseline)}, on the same seeds and {rows}. P-values are corrected "
            f"by Holm within each metric, for {n_compared} comparisons, intervals are not. Where p is below {LEVEL:g}, "
            "a word says whether the loss is better or worse; otherwise the study does not separate them. Two losses "
            "with overlapping intervals need not be equal."
        )


def of_metric(table: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Return the rows of a metric by loss and method."""
    return table[table.index.isin([metric], level="metric")].droplevel("metric")


def _names(pairs: Iterable[Pair]) -> str:
    return few([pair_name(*pair) for pair in pairs])


def _beyond_chance(results: StudyResults, metric: str, *, sign: int) -> list[Pair]:
    """The pairs whose difference to the baseline has this sign and a corrected p below .05.

    In a study of several seeds the p of a pair with one seed is ignored, because it covers the test rows only.
    """
    found = of_metric(results.differences, metric)
    found = found[found["n_seeds"] >= min(2, results.means["n_seeds"].max())]
    return list(
        found[(found["value"] * sign > 0) & (found["p_corrected"] < LEVEL)].index
    )
