"""The figures of a study's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_calib.plots import difference_diagram, rank_diagram, reliability_grid, reliability_panels
from hf_calib.study.results import LEVEL, UNSCALED, StudyResults
from hf_calib.study.text import MAIN_METRICS, best_first, map_name, pair_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "ranks": "Mean rank over the seeds among all losses and maps, with 95% intervals; the best losses are at the top.",
    "differences": "Paired differences to the baseline with 95% intervals; below 0 is better than the baseline. Each "
    "panel has a scale of its own.",
    "reliability": "Accuracy against confidence in bins, before and after the map with the smallest NLL in the "
    "mean over losses; predictions of all seeds together, whose ECE is at most the mean of the seeds' in the tables.",
}
_IN_FULL = 3  # losses whose diagrams fit side by side


def draw_figures(results: StudyResults) -> dict[str, Figure]:
    """By name; without those that there is nothing to show in."""
    losses = best_first(results)
    figures = {}
    ranks = {
        short: {
            loss: {
                map_name(method): results.ranks[loss, method, metric][:3]
                for method in results.methods
                if (loss, method, metric) in results.ranks
            }
            for loss in losses
        }
        for metric, short in MAIN_METRICS.items()
        if any(key[2] == metric for key in results.ranks)
    }
    if ranks:
        figures["ranks"] = rank_diagram(ranks)
    differences = {
        short: {loss: _differences(results, loss, metric) for loss in losses}
        for metric, short in MAIN_METRICS.items()
    }
    if results.baseline is not None and any(key[2] in MAIN_METRICS for key in results.differences):
        figures["differences"] = difference_diagram(
            differences, baseline=pair_name(*results.baseline), level=LEVEL
        )
    states = {map_name(method): method for method in (UNSCALED, best_map(results)) if method is not None}
    panels = {
        loss: {state: results.panels[loss, method] for state, method in states.items()}
        for loss in losses
        if all((loss, method) in results.panels for method in states.values())
    }
    if 0 < len(panels) <= _IN_FULL:
        rows = {state: {loss: panels[loss][state] for loss in panels} for state in states}
        figures["reliability"] = reliability_grid(rows)
    elif panels:
        figures["reliability"] = reliability_panels(panels)
    return figures


def _differences(
    results: StudyResults, loss: str, metric: str
) -> dict[str, tuple[float, float | None, float | None, float | None]]:
    """By map, with p corrected; the baseline's own difference is 0."""
    found: dict[str, tuple[float, float | None, float | None, float | None]] = {}
    for method in results.methods:
        difference = results.differences.get((loss, method, metric))
        if difference is not None:
            found[map_name(method)] = (*difference[:3], difference.p_corrected)
        elif (loss, method) == results.baseline:
            found[map_name(method)] = (0.0, None, None, None)
    return found


def best_map(results: StudyResults) -> str | None:
    """The map with the smallest NLL in the mean over losses; None if there is no map."""
    means = {}
    for method in results.methods:
        found = [
            mean.value
            for (_, name, metric), mean in results.means.items()
            if (name, metric) == (method, "nll")
        ]
        if method != UNSCALED and found:
            means[method] = sum(found) / len(found)
    return min(means, key=means.__getitem__) if means else None


def alt_texts(results: StudyResults) -> dict[str, str]:
    """Each figure in numbers, for readers who cannot see it."""
    firsts, distinct = [], []
    for metric, short in MAIN_METRICS.items():
        ranks = {key: rank.value for key, rank in results.ranks.items() if key[2] == metric}
        if ranks:
            loss, method, _ = first = min(ranks, key=ranks.__getitem__)
            firsts.append(f"{short}: {pair_name(loss, method)}, mean rank {ranks[first]:.1f} of {len(ranks)}")
        found = (d.p_corrected for key, d in results.differences.items() if key[2] == metric)
        ps = [p for p in found if p is not None]
        count = sum(p < LEVEL for p in ps)
        distinct.append(f"{short}: {count} of {len(ps)}")
    name = best_map(results)
    state = "without a map" if name is None else f"without a map and with {name}"
    return {
        "ranks": f"Mean ranks. First in {'; in '.join(firsts)}.",
        "differences": f"Differences to the baseline. Distinguishable from it in {'; in '.join(distinct)}.",
        "reliability": f"Reliability diagrams of each loss, {state}.",
    }
