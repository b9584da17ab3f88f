"""Advice and notes of a study in sentences: what its numbers say, and what they cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from hf_calib._errors import few
from hf_calib.study.statistics import LEVEL

if TYPE_CHECKING:
    from hf_calib.study.results import StudyResults

Pair = tuple[str, str]  # loss and method

UNSCALED = "none"  # the method of the network as trained
MAIN_METRICS = {"nll": "NLL", "ece": "ECE"}  # with their short names, for headers and axes

_PRIMARY = "nll"  # proper: nothing but the true probabilities has a smaller mean
_LARGE_ECE = 0.05
_LEFT_BY_A_REPAIR = 0.5  # the largest share
_HARM = 0.005  # the least
_FEW_CALIBRATION_ROWS = 200


def map_name(method: str) -> str:
    """A post-hoc map as tables and figures name it."""
    return "no map" if method == UNSCALED else method


def pair_name(loss: str, method: str) -> str:
    """A loss with its map.

    >>> pair_name("focal", "temperature"), pair_name("focal", "none")
    ('focal with temperature', 'focal without a map')
    """
    return f"{loss} without a map" if method == UNSCALED else f"{loss} with {method}"


def advise(results: StudyResults) -> Iterator[str]:
    """Sentences that follow from the numbers of a study alone."""
    if results.baseline is None:
        yield "No training could be measured, so there is nothing to compare: see what is missing."
        return
    yield from _on_the_primary_metric(results, results.baseline)
    yield from _on_accuracy(results, results.baseline)
    if results.baseline[1] != UNSCALED:
        yield from _on_maps(results, results.baseline[1])
    if 0 < results.n_calibration < _FEW_CALIBRATION_ROWS and len(results.methods) > 1:
        yield (
            f"The maps were fitted on {results.n_calibration:,} calibration rows: other rows would give other maps, "
            "which no interval here covers."
        )
    most, rows = results.means["n_seeds"].max(), results.counted[0]
    if most == 1:
        first = (
            f"One seed: intervals cover the {rows} only, and another training may change any of these orders."
        )
    else:
        first = f"{most} seeds: a difference between losses that is not beyond chance here may still exist."
    yield f"{first} This is one dataset, one model and one length of training; with others another loss may win."


def _on_the_primary_metric(results: StudyResults, baseline: Pair) -> Iterator[str]:
    means, differences = _of(results.means, _PRIMARY), _of(results.differences, _PRIMARY)
    nll, n_seeds = means["value"], means["n_seeds"]
    best = nll.idxmin()
    if len(means) == 1:
        yield f"Only {pair_name(*best)} was measured (NLL {nll[best]:.4f}): there is nothing to compare it with."
        return
    lowest = f"Lowest NLL: {pair_name(*best)}, {nll[best]:.4f}"
    if best == baseline:
        yield f"{lowest}, the baseline itself."
    else:
        found = "no seed in common"
        if best in differences.index:
            difference = differences.loc[[best]].iloc[0]
            found = _comparison(difference)
            if difference["n_seeds"] < max(n_seeds[best], n_seeds[baseline]):
                found += f", over the {difference['n_seeds']:g} seeds that both have"
        yield f"{lowest}; {pair_name(*baseline)} has {nll[baseline]:.4f} ({found})."
    lower, higher = (_beyond_chance(results, _PRIMARY, sign=sign) for sign in (-1, 1))
    lower = [pair for pair in nll.sort_values(kind="stable").index if pair in lower]
    rows_only = f" on these {results.counted[0]}" if _one_seed(results) else ""
    unproven = [pair for pair in means.index if pair != baseline and pair not in higher]
    if lower:
        take = f"Take {pair_name(*lower[0])}."
        yield f"{take} Lower NLL than the baseline beyond chance{rows_only}: {_names(lower)}."
    elif best != baseline:
        said = (
            f"Nothing is proven: that {pair_name(*best)} is lower than {pair_name(*baseline)} may be chance."
        )
        yield f"{said} More seeds could tell."
    elif unproven:
        said = f"Nothing is proven against {_names(unproven)}"
        yield f"{said}: that {pair_name(*baseline)} is lower may be chance."
    else:
        yield f"Take {pair_name(*baseline)}: all others have a higher NLL beyond chance{rows_only}."
    if higher:
        yield f"Higher NLL beyond chance{rows_only}: {_names(higher)}."


def _comparison(found: Any) -> str:
    words = f"difference {found['value']:+.4f}"
    if np.isnan(found["p_corrected"]):
        return words
    p = f"p = {found['p_corrected']:.2g}" if found["p_corrected"] >= 0.001 else "p < .001"
    return f"{words}, 95% interval {found['low']:+.4f} to {found['high']:+.4f}, corrected {p}"


def _on_accuracy(results: StudyResults, baseline: Pair) -> Iterator[str]:
    differing = {
        word: _beyond_chance(results, "accuracy", sign=s) for word, s in (("Higher", 1), ("Lower", -1))
    }
    for word, pairs in differing.items():
        if pairs:
            yield f"{word} accuracy than {pair_name(*baseline)} beyond chance: {_names(pairs)}."
    n_others = len(_of(results.means, "accuracy").drop([baseline], errors="ignore"))
    n_compared = len(_compared(results, "accuracy"))
    if not any(differing.values()) and len(results.losses) > 1 and n_compared:
        yield "No accuracy differs from that of the baseline beyond chance."
    if n_compared < n_others:
        yield (
            f"{n_others - n_compared} of {n_others} accuracies were not compared with that of the baseline, for lack "
            "of test rows or of seeds that both have."
        )


def _on_maps(results: StudyResults, method: str) -> Iterator[str]:
    """Where the baseline's map is needed, and where it does harm, by the means of the ECE."""
    ece = _of(results.means, "ece")["value"].unstack("method").reindex(columns=[UNSCALED, method])
    before, after = ece[UNSCALED], ece.iloc[:, 1]
    repaired = (before >= _LARGE_ECE) & (after <= _LEFT_BY_A_REPAIR * before)
    for words, losses in (
        (f"ECE that is large without a map, and that {method} repairs", repaired),
        (f"ECE that is larger after {method}, in the mean over seeds", ~repaired & (after >= before + _HARM)),
    ):
        changed = [loss for loss in results.losses if losses.get(loss, False)]
        if changed:
            yield f"{words}: {few([f'{loss} {before[loss]:.3f} to {after[loss]:.3f}' for loss in changed])}."


def notes_on_statistics(results: StudyResults) -> Iterator[str]:
    """How intervals and p-values are to be read."""
    if results.baseline is None:
        return
    fewest, most = (int(results.means["n_seeds"].agg(which)) for which in ("min", "max"))
    rows = results.counted[0]
    differences = results.differences.reset_index()
    if results.baseline != ("cross_entropy", "temperature"):
        name = pair_name(*results.baseline)
        yield f"The baseline is {name}, as cross_entropy with temperature was not measured."
    if results.missing:
        n_listed = len(results.missing) + len(results.numbers.groupby(["loss", "seed"]))
        yield f"{len(results.missing)} of {n_listed} trainings have no numbers; means are over the others."
    if fewest < most:
        yield (
            f"Losses have from {fewest} to {most} seeds. Differences are over the seeds of both, so that they need not "
            "be the differences of the means."
        )
    alone = sorted(differences["loss"][differences["n_seeds"] == 1].unique()) if most > 1 else []
    if alone:
        yield (
            f"One seed in common with the baseline, so that p-values cover the {rows} only and the advice passes over "
            f"it: {few(alone)}."
        )
    if most == 1:
        yield f"With one seed, intervals and p-values cover the {rows} only, and nothing about another training."
    else:
        drawn = "sentences" if rows == "test tokens" else "rows"
        yield (
            f"Intervals (95%) cover {rows} and seeds: resampled {drawn}, the same for all trainings, and Student's t "
            f"over {most} seeds."
        )
    yield (
        "Noise makes every calibration error larger, the more so the fewer rows: an interval of one is of the error "
        "that other tests of as many rows would show, not of the error without noise. Differences in ECE and in its "
        "form with equal masses are of errors from which that noise is taken, so that they need not be those of the "
        "means."
    )
    if "classwise_ece" in results.metrics:
        yield (
            f"{results.metrics['classwise_ece']} has no intervals: noise is added to the error of each class, and a "
            "resample adds it again."
        )
    yield from _on_power(results)
    n_compared = len(differences.groupby(["loss", "method"]))
    if n_compared > 1:
        yield (
            f"P-values are corrected by Holm within each metric, for {n_compared} comparisons with the baseline; not "
            "over the metrics. Intervals are not corrected."
        )


def _on_power(results: StudyResults) -> Iterator[str]:
    """What the study could have found, and what its variance over seeds rests on."""
    more = "half of it takes up to four times as many seeds and test rows"
    for metric, size in results.detectable.items():
        found = (
            f"A true difference in {MAIN_METRICS[metric]} of {size:.2g} would be found in 80% of such studies"
        )
        yield f"{found}, on these models only." if _one_seed(results) else f"{found}; {more}."
    if results.variance == "pooled":
        yield (
            "The variance over seeds is pooled over the losses of each map: their differences to the baseline are "
            "judged as if all losses varied alike."
        )
    tests = results.equal_variances
    unequal = [
        f"{MAIN_METRICS[test.metric]} with {map_name(test.method)} (p = {test.p:.2g})"
        for test in tests[tests["p"] < LEVEL].itertuples()
    ]
    if unequal:
        yield (
            f"The losses do not vary alike over the seeds, by Bartlett's test: {few(unequal)}. With a pooled variance "
            "more than 5% of such studies then call equal losses different, up to 16% in simulations: take --variance "
            "own."
        )
    elif len(tests):
        yield (
            "Bartlett's test does not find that the losses vary differently; with few seeds it misses most of what "
            "there is."
        )


def _names(pairs: Iterable[Pair]) -> str:
    return few([pair_name(*pair) for pair in pairs])


def _of(table: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """The rows of a metric, by loss and method."""
    return table[table.index.isin([metric], level="metric")].droplevel("metric")


def _compared(results: StudyResults, metric: str) -> pandas.DataFrame:
    """The differences whose p says something: in a study of several seeds, not of one, whose p is of the test rows."""
    found = _of(results.differences, metric)
    return found[found["p_corrected"].notna() & (found["n_seeds"] >= (1 if _one_seed(results) else 2))]


def _beyond_chance(results: StudyResults, metric: str, *, sign: int) -> list[Pair]:
    """The pairs whose difference to the baseline has this sign and a corrected p below .05."""
    found = _compared(results, metric)
    return list(found[(found["value"] * sign > 0) & (found["p_corrected"] < LEVEL)].index)


def _one_seed(results: StudyResults) -> bool:
    return bool(results.means["n_seeds"].max() == 1)
