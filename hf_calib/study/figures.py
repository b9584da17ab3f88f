"""The figures of a study's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_calib.plots import difference_diagram, reliability_grid
from hf_calib.study.results import LEVEL, UNSCALED, StudyResults
from hf_calib.study.text import MAIN_METRICS, best_first, map_name, pair_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "differences": "Paired differences to the baseline with 95% intervals; below 0 is better than the baseline. Each "
    "panel has a scale of its own.",
    "reliability": "Accuracy against confidence in bins, of up to three losses with the smallest NLL, before and "
    "after the map with the smallest NLL in the mean over losses; "
    "predictions of all seeds together, whose ECE is at most the mean of the seeds' in the tables.",
}
_SIDE_BY_SIDE = 3


def draw_figures(results: StudyResults) -> dict[str, Figure]:
    """By name; without those that there is nothing to show in."""
    losses = best_first(results)
    figures = {}
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
    if panels:
        shown = list(panels)[:_SIDE_BY_SIDE]
        rows = {state: {loss: panels[loss][state] for loss in shown} for state in states}
        figures["reliability"] = reliability_grid(rows)
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
    distinct = []
    for metric, short in MAIN_METRICS.items():
        found = (d.p_corrected for key, d in results.differences.items() if key[2] == metric)
        ps = [p for p in found if p is not None]
        count = sum(p < LEVEL for p in ps)
        distinct.append(f"{short}: {count} of {len(ps)}")
    name = best_map(results)
    state = "without a map" if name is None else f"without a map and with {name}"
    return {
        "differences": f"Differences to the baseline. Distinguishable from it in {'; in '.join(distinct)}.",
        "reliability": f"Reliability diagrams, {state}.",
    }
