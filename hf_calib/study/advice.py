"""Advice and notes of a study in sentences: what its numbers say, and what they cannot."""

from __future__ import annotations

from collections.abc import Mapping

from hf_calib._errors import few
from hf_calib.study.results import LEVEL, UNSCALED, Difference, Estimate, StudyResults
from hf_calib.study.text import MAIN_METRICS, map_name, pair_name

PRIMARY = "nll"  # proper: nothing but the true probabilities has a smaller mean
FEWEST_SEEDS_OF_A_RANK_TEST = 6
_LARGE_ECE = 0.05
_REPAIRED = 0.5  # of it, at most, is left after the map
_HARMED = 0.005  # is added by it, at least
_FEW_CALIBRATION_ROWS = 200

Pair = tuple[str, str]


def advise(results: StudyResults) -> tuple[str, ...]:
    """Sentences that follow from the numbers of a study alone."""
    if results.baseline is None:
        return ("No training could be measured, so there is nothing to compare: see what is missing.",)
    return (
        *_on_the_primary_metric(results, results.baseline),
        *_on_accuracy(results, results.baseline),
        *_on_maps(results, results.baseline[1]),
        *_on_few_calibration_rows(results),
        _on_what_is_unknown(results),
    )


def _on_the_primary_metric(results: StudyResults, baseline: Pair) -> list[str]:
    means = {
        (loss, method): mean for (loss, method, metric), mean in results.means.items() if metric == PRIMARY
    }
    best = min(means, key=lambda pair: means[pair].value)
    its_own = f"{pair_name(*baseline)} has {means[baseline].value:.4f}"
    sentences = []
    if len(means) == 1:
        return [
            f"Only {pair_name(*best)} was measured (NLL {means[best].value:.4f}): there is nothing to compare it with."
        ]
    if best == baseline:
        sentences.append(f"Lowest NLL: {pair_name(*best)}, {means[best].value:.4f}, the baseline itself.")
    else:
        difference = results.differences.get((*best, PRIMARY))
        found = "no seed in common" if difference is None else _comparison(difference)
        if difference is not None and difference.n_seeds < max(means[best].n_seeds, means[baseline].n_seeds):
            found += f", over the {difference.n_seeds} seeds that both have"
        sentences.append(f"Lowest NLL: {pair_name(*best)}, {means[best].value:.4f}; {its_own} ({found}).")
    better = sorted(_beyond_chance(results, PRIMARY, sign=-1), key=lambda pair: means[pair].value)
    rows_only = f" on these {results.counted[0]}" if _one_seed(results) else ""
    if better:
        names = few([pair_name(*pair) for pair in better])
        sentences.append(
            f"Take {pair_name(*better[0])}. Lower NLL than the baseline beyond chance{rows_only}: {names}."
        )
    elif best == baseline:
        sentences.append(_on_the_baseline(results, means, baseline, rows_only))
    else:
        sentences.append(_not_proven(results, best, baseline))
    worse = [pair_name(*pair) for pair in _beyond_chance(results, PRIMARY, sign=1)]
    if worse:
        sentences.append(f"Higher NLL beyond chance{rows_only}: {few(worse)}.")
    return sentences


def _on_the_baseline(
    results: StudyResults, means: Mapping[Pair, Estimate], baseline: Pair, rows_only: str
) -> str:
    """The baseline has the lowest mean: whether all others are higher beyond chance."""
    worse = _beyond_chance(results, PRIMARY, sign=1)
    open_ones = [pair_name(*pair) for pair in means if pair != baseline and pair not in worse]
    if not open_ones:
        return f"Take {pair_name(*baseline)}: all others have a higher NLL beyond chance{rows_only}."
    return f"Nothing is proven against {few(open_ones)}: that {pair_name(*baseline)} is lower may be chance."


def _not_proven(results: StudyResults, best: Pair, baseline: Pair) -> str:
    """The lowest mean that is not beyond chance: no reason to take either, and what would decide."""
    said = f"Nothing is proven: that {pair_name(*best)} is lower than {pair_name(*baseline)} may be chance"
    difference = results.differences.get((*best, PRIMARY))
    if difference is None or difference.low is None or difference.n_seeds < 2:
        return f"{said}. Five seeds or more could tell."
    if difference.fewest_seeds is None:
        return f"{said}. A true difference of this size takes more than 100 seeds, or more test rows."
    needed = _seeds(difference.fewest_seeds, difference.most_seeds)
    return f"{said}. To find a true difference of this size in 80% of studies takes {needed}."


def _seeds(fewest: int, most: int | None) -> str:
    """How many seeds are needed, by a variance over seeds that few seeds tell only roughly."""
    if fewest == most:
        return f"{most} seeds"
    return f"{fewest} to {'more than 100' if most is None else most} seeds"


def _on_accuracy(results: StudyResults, baseline: Pair) -> list[str]:
    sentences = []
    for sign, word in ((1, "Higher"), (-1, "Lower")):
        names = [pair_name(*pair) for pair in _beyond_chance(results, "accuracy", sign=sign)]
        if names:
            sentences.append(f"{word} accuracy than {pair_name(*baseline)} beyond chance: {few(names)}.")
    others = [key for key in results.means if key[2] == "accuracy" and key[:2] != baseline]
    compared = [_is_compared(results, key) for key in others]
    if not sentences and len(results.losses) > 1 and any(compared):
        sentences.append("No accuracy differs from that of the baseline beyond chance.")
    if not all(compared):
        sentences.append(
            f"{compared.count(False)} of {len(compared)} accuracies were not compared with that of the baseline, for "
            "lack of test rows or of seeds that both have."
        )
    return sentences


def _on_maps(results: StudyResults, method: str) -> list[str]:
    """Where the baseline's map is needed, and where it does harm, by the means of the ECE."""
    if method == UNSCALED:
        return []
    repaired, harmed = [], []
    for loss in results.losses:
        before, after = (results.means.get((loss, each, "ece")) for each in (UNSCALED, method))
        if before is None or after is None:
            continue
        change = f"{loss} {before.value:.3f} to {after.value:.3f}"
        if before.value >= _LARGE_ECE and after.value <= _REPAIRED * before.value:
            repaired.append(change)
        elif after.value >= before.value + _HARMED:
            harmed.append(change)
    sentences = []
    if repaired:
        sentences.append(f"ECE that is large without a map, and that {method} repairs: {few(repaired)}.")
    if harmed:
        sentences.append(f"ECE that is larger after {method}, in the mean over seeds: {few(harmed)}.")
    return sentences


def _on_few_calibration_rows(results: StudyResults) -> list[str]:
    if not 0 < results.n_calibration < _FEW_CALIBRATION_ROWS or results.methods == (UNSCALED,):
        return []
    return [
        f"The maps were fitted on {results.n_calibration:,} calibration rows: other rows would give other maps, which "
        "no interval here covers."
    ]


def _on_what_is_unknown(results: StudyResults) -> str:
    if _one_seed(results):
        first = (
            f"One seed: intervals cover the {results.counted[0]} only, and another training may change any of these "
            "orders."
        )
    else:
        most = max(mean.n_seeds for mean in results.means.values())
        first = f"{most} seeds: a difference between losses that is not beyond chance here may still exist."
    return f"{first} This is one dataset, one model and one length of training; with others another loss may win."


def notes_on_statistics(results: StudyResults) -> tuple[str, ...]:
    """How intervals and p-values are to be read."""
    if results.baseline is None:
        return ()
    n_seeds = [mean.n_seeds for mean in results.means.values()]
    most, fewest = max(n_seeds), min(n_seeds)
    rows = results.counted[0]
    drawn = "sentences" if rows == "test tokens" else "rows"
    notes = []
    if results.baseline != ("cross_entropy", "temperature"):
        why = f"The baseline is {pair_name(*results.baseline)}, as cross_entropy with temperature was not measured."
        notes.append(why)
    if results.missing:
        n_listed = len(results.missing) + len({(loss, seed) for loss, seed, _, _ in results.values})
        notes.append(
            f"{len(results.missing)} of {n_listed} trainings have no numbers; means are over the others."
        )
    if fewest < most:
        notes.append(
            f"Losses have from {fewest} to {most} seeds. Differences are over the seeds of both, so that they need not "
            "be the differences of the means."
        )
    alone = {loss for (loss, _, _), found in results.differences.items() if found.n_seeds == 1 < most}
    if alone:
        notes.append(
            f"One seed in common with the baseline, so that p-values cover the {rows} only and the advice passes over "
            f"it: {few(sorted(alone))}."
        )
    if most == 1:
        notes.append(
            f"With one seed, intervals and p-values cover the {rows} only, and nothing about another training."
        )
    else:
        notes.append(
            f"Intervals (95%) cover {rows} and seeds: resampled {drawn}, the same for all trainings, and Student's t "
            f"over {most} seeds."
        )
    if most < FEWEST_SEEDS_OF_A_RANK_TEST:
        notes.append(
            f"With {most} seed{'s' * (most > 1)} no rank test (sign, Wilcoxon) over the seeds can reach p < .05 "
            f"two-sided: its smallest p is 2/2^{most} = {2 / 2**most:g}."
        )
    notes.append(
        "Noise makes every calibration error larger, the more so the fewer rows: an interval of one is of the error "
        "that other tests of as many rows would show, not of the error without noise. Differences in ECE and in its "
        "form with equal masses are of errors from which that noise is taken, so that they need not be those of the "
        "means."
    )
    if "classwise_ece" in results.metrics:
        notes.append(
            f"{results.metrics['classwise_ece']} has no intervals: noise is added to the error of each class, and a "
            "resample adds it again."
        )
    n_compared = len({(loss, method) for loss, method, _ in results.differences})
    notes += _on_power(results)
    if n_compared > 1:
        notes.append(
            f"P-values are corrected by Holm within each metric, for {n_compared} comparisons with the baseline; not "
            "over the metrics. Intervals are not corrected."
        )
    return tuple(notes)


def _on_power(results: StudyResults) -> list[str]:
    """What the study could have found, and what its variance over seeds rests on."""
    notes = []
    for metric, found in results.detectable.items():
        half = (
            f"half of it with {_seeds(found.fewest_seeds, found.most_seeds)}"
            if found.fewest_seeds is not None
            else "half of it not with 100 seeds: the test rows, too, are a sample"
        )
        if _one_seed(results):
            half = "on these models only"
        notes.append(
            f"A true difference in {MAIN_METRICS[metric]} of {found.value:.2g} would be found in 80% of such studies, "
            f"{half}."
        )
    if results.variance == "pooled":
        notes.append(
            "The variance over seeds is pooled over the losses of each map: their differences to the baseline are "
            "judged as if all losses varied alike."
        )
        unequal = [
            f"{MAIN_METRICS[metric]} with {map_name(method)} (p = {p:.2g})"
            for (method, metric), p in results.equal_variances.items()
            if p < LEVEL
        ]
        if unequal:
            notes.append(
                f"The losses do not vary alike over the seeds, by Bartlett's test: {few(unequal)}. With a pooled "
                "variance more than 5% of such studies then call equal losses different, up to 16% in simulations: "
                "take --variance own."
            )
        elif results.equal_variances:
            notes.append(
                "Bartlett's test does not find that the losses vary differently; with few seeds it misses most of what "
                "there is."
            )
    return notes


def _beyond_chance(results: StudyResults, metric: str, *, sign: int) -> list[Pair]:
    """The pairs whose difference to the baseline has this sign and a corrected p below .05.

    In a study of several seeds, one that a pair has a single seed for says nothing: its p is of the test rows only.
    """
    return [
        (loss, method)
        for (loss, method, of), found in results.differences.items()
        if of == metric
        and found.value * sign > 0
        and _is_compared(results, (loss, method, of))
        and found.p_corrected is not None
        and found.p_corrected < LEVEL
    ]


def _is_compared(results: StudyResults, key: tuple[str, str, str]) -> bool:
    """Whether a difference has a p that says something: in a study of several seeds, of more than one seed."""
    found = results.differences.get(key)
    fewest = 1 if _one_seed(results) else 2
    return found is not None and found.p_corrected is not None and found.n_seeds >= fewest


def _comparison(found: Difference) -> str:
    words = f"difference {found.value:+.4f}"
    if found.low is None or found.high is None or found.p_corrected is None:
        return words
    p = f"p = {found.p_corrected:.2g}" if found.p_corrected >= 0.001 else "p < .001"
    return f"{words}, 95% interval {found.low:+.4f} to {found.high:+.4f}, corrected {p}"


def _one_seed(results: StudyResults) -> bool:
    return max(mean.n_seeds for mean in results.means.values()) == 1
