"""Comparisons of saved runs: which seeds count together, and how their p is corrected."""

from __future__ import annotations

import numpy as np
import pytest
from saved_runs import Family, Run, comparison_lines, run_lines
from scipy.special import softmax

from hf_calib.metrics.intervals import holm

DECLARED = Family(losses=("fcl", "dual_focal"), seeds=(3, 4, 5))


def a_run(gain: float, seed: int) -> Run:
    """A run on 400 rows whose NLL is lower by about the gain."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 3, 400)
    logits = rng.normal(size=(400, 3)) + 2 * np.eye(3)[labels]
    logits += np.random.default_rng(seed).normal(scale=0.05, size=logits.shape)
    logits += gain * np.eye(3)[labels]
    probs = softmax(logits, axis=1)
    return Run(labels, {"none": probs, "nll": probs}, {"nll": 1.0}, (0.0, 0.0))


def runs_of(**seeds: int) -> dict[str, Run]:
    """The runs of each loss, from seed 1 to a number of seeds."""
    gains = {"cross_entropy": 0.0, "dual_focal": 0.1, "fcl": 0.3, "focal": 0.02}
    found = {}
    for loss, last in seeds.items():
        for seed in range(1, last + 1):
            name = loss if seed == 1 else f"{loss}-seed{seed}"
            found[name] = a_run(gains[loss], 100 * len(loss) + seed)
    return found


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def p_of(shown: str) -> float:
    return 0.0005 if shown == "< .001" else float(shown)


@pytest.mark.slow
def test_declared_seeds_are_a_group_of_their_own_when_all_are_there() -> None:
    found = runs_of(cross_entropy=5, dual_focal=5, fcl=5, focal=2)
    compared = cells(list(comparison_lines(found, DECLARED)))
    assert [row[:2] for row in compared] == [
        ["dual_focal", "1, 2"],
        ["dual_focal", "3, 4, 5"],
        ["fcl", "1, 2"],
        ["fcl", "3, 4, 5"],
        ["focal", "1, 2"],
    ]
    means = [row[:2] for row in cells(list(run_lines(found, DECLARED)))]
    assert ["cross_entropy", "mean of 3, 4, 5"] in means
    assert ["fcl", "mean of 1, 2"] in means
    without = runs_of(cross_entropy=5, dual_focal=4, fcl=4)
    assert [row[1] for row in cells(list(comparison_lines(without, DECLARED)))] == [
        "1, 2",
        "1, 2",
    ]


@pytest.mark.parametrize("column", [3, 6])
def test_p_is_corrected_within_the_declared_family_alone(column: int) -> None:
    found = runs_of(cross_entropy=5, dual_focal=5, fcl=5, focal=2)
    rows = cells(list(comparison_lines(found, DECLARED)))
    for seeds in ("1, 2", "3, 4, 5"):
        of_family = [row for row in rows if row[1] == seeds]
        expected = holm([p_of(row[column]) for row in of_family])
        shown = [p_of(row[column + 1]) for row in of_family]
        assert shown == pytest.approx(expected, abs=0.003)


def test_a_claim_without_runs_counts_in_the_correction() -> None:
    found = runs_of(cross_entropy=5, fcl=5)
    rows = cells(list(comparison_lines(found, DECLARED)))
    (declared,) = [row for row in rows if row[1] == "3, 4, 5"]
    assert p_of(declared[7]) == pytest.approx(min(1, 2 * p_of(declared[6])), abs=0.002)
