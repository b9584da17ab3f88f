"""The test behind every guaranteed accuracy, which finds the answerable rows; results of rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, betaincinv

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, IntArray, check_share
from hf_calib.metrics.sums import Interval, interval_of

# No probability is above this threshold.
NEVER = 1.0
# Every probability is above this threshold, unless it is 0 itself.
ALWAYS = 0.0
# Scores that are closer are equal: float32 moves those of a pipeline by some 1e-7, and a calibrator
# such as isotonic scaling gives one score to many rows,
# which all would cross a threshold beside it.
TIED = 1e-6
# Starts of the tested sequence, errors that the first start tolerates, and the factor of rows
# required for it.
_LADDER = ((3, 1, 12), (2, 1, 4), (1, 1, 2), (1, 0, 1))


def check_promise(argument: str, promised: float, delta: float) -> None:
    """Raise unless an accuracy can be guaranteed at all."""
    way_out = "0.05 lets the promise fail for one draw of calibration rows in 20"
    check_share("delta", delta, way_out)
    needed = rows_needed(0.99, delta)
    way_out = (
        f"no number of rows guarantees only correct answers; 0.99 needs {needed:,}"
    )
    check(promised != 1, f"{argument} to be below 1", promised, way_out)
    check_share(argument, promised, "use 0.95 for 95 correct answers of 100")


def check_rows_for(
    promised: float, delta: float, n_rows: int, argument: str = "accuracy"
) -> None:
    """Raise if the rows are too few to guarantee the accuracy even if all of them were correct."""
    needed = rows_needed(promised, delta)
    requirement = f"the calibration rows to be at least {needed:,} to promise "
    requirement += f"{argument}={promised:g} with delta={delta:g}"
    # Rounded down, so that it can be promised.
    most = math.floor(1000 * delta ** (1 / max(n_rows, 1))) / 1000
    way_out = f"pass more rows, or promise at most {most:g}"
    check(n_rows >= needed, requirement, f"{n_rows:,}", way_out)


def rows_needed(promised: float, delta: float) -> int:
    """Return the least number of rows that can guarantee an accuracy if all of them are correct."""
    return math.ceil(math.log(delta) / math.log(promised))


def starts(n_rows: int, promised: float, delta: float) -> IntArray:
    """The numbers of rows at which the sequence of tests starts; empty if the rows are too few."""
    for n_starts, errors, times in _LADDER:
        level = delta / n_starts
        most = 10 * (rows_needed(promised, level) + errors + 1)
        # More rows than there are would be no start, and may not fit into memory.
        rows = np.arange(errors + 1, min(most, n_rows + 1))
        passing = np.flatnonzero(bdtr(errors, rows, 1 - promised) <= level)
        if len(passing) == 0:
            continue
        # The least number of rows that can pass with these errors.
        first = int(rows[passing[0]])
        if first * times <= n_rows:
            # The last of these numbers is the end of the sequence.
            numbers = np.geomspace(first, n_rows, n_starts + 1)
            return numbers[:-1].round().astype(np.intp)
    return np.array([], dtype=np.intp)


def certified_threshold(
    scores: FloatArray,
    right: NDArray[Any],
    promised: float,
    delta: float,
    tested: IntArray,
) -> float:
    r"""Return the lowest score above which at least the promised share is correct,
    with confidence 1 - delta.

    For each number m of rows, from the first that can pass up to all N, the m rows with the highest
    scores are tested. If k of them are wrong, the hypothesis "less than the promised share a is
    correct" has the p-value

    $$p_m = P(\text{Bin}(m, 1 - a) \le k).$$

    Independent tests at every m would each need the level delta / N (Bonferroni). A sequence of
    tests in a fixed order can use the full level for each if it stops at the first failure, but
    with few rows it often fails by chance. Therefore up to three starts, at numbers of rows that
    grow by a constant factor, share delta, and a sequence that reaches the next start adds its
    level to that start's (a fallback test). The first start tolerates one error if there are twice
    as many rows. Starts depend on N only, so one more row changes little. In simulations of 60 to
    3,000 rows (`tests/decisions/test_abstain.py`) more rows answer more inputs.

    Scores (N,) are in [0, 1], `right` (N,) bool is the correctness, and `tested` are the `starts`.
    Inputs with a score *above* the threshold are answered: 1 answers none, 0 answers all. Rows with
    equal scores are answered together or not at all: the threshold is below the last that passed in
    a random order. Scores are equal if they differ by less than `TIED`, and the threshold is half
    of this above the first score that is not answered.

    Notes:
        The p-values are valid: given the (m + 1)-th highest score, the rows above it are a random
        sample of all rows above it. The order is valid even if accuracy does not grow with the
        score: between two scores above which the accuracy is a, rows are wrong with probability
        1 - a, however many were drawn.

    References:
        Angelopoulos et al. 2021, "Learn then Test" (fixed sequences with several starts); Wiens
        2003 (fallback); Geifman and El-Yaniv 2017 (selective prediction with a guarantee).
    """
    if len(tested) == 0:
        return NEVER
    n_rows = len(scores)
    shuffled = np.random.default_rng(0).permutation(n_rows)
    order = shuffled[np.argsort(-scores[shuffled], kind="stable")]
    ordered = scores[order]
    n_wrong = np.cumsum(~right[order])
    p_values = bdtr(n_wrong, np.arange(1, n_rows + 1), 1 - promised)

    # No number of rows before the first start is tested.
    first, *others = np.split(p_values, tested - 1)
    passed = [np.zeros(len(first), dtype=bool)]
    level = 0.0
    for sequence in others:
        level += delta / len(tested)
        # Tests count up to the first failure.
        reached = np.logical_and.accumulate(sequence <= level)
        passed.append(reached)
        if not reached[-1]:
            level = 0.0

    # The threshold of m rows is just above the (m + 1)-th highest score,
    # which may not equal the m-th.
    possible = np.append(ordered[1:] + TIED / 2, ALWAYS)
    is_apart = np.append(ordered[:-1] - ordered[1:] > TIED, ordered[-1] > 0)
    is_threshold = np.concatenate(passed) & is_apart
    return float(possible[is_threshold].min(initial=NEVER))


def certified_thresholds(
    groups: Sequence[tuple[FloatArray, NDArray[Any]]], promised: float, delta: float
) -> FloatArray:
    """Return a threshold for each group of scores and correctness, for promises that hold together.

    The largest groups with enough rows share delta. A group that is always answered no longer needs
    its share, which the others get (Holm's step-down): while no guarantee is violated, the other
    groups include all whose guarantee could be, with levels of at most delta in total. Further
    groups never raise a level, and a group keeps its starts, so a larger level passes everything
    that a smaller one does.
    """
    sizes = np.array([len(scores) for scores, _ in groups])
    left = np.argsort(-sizes, kind="stable")
    thresholds = np.full(len(groups), NEVER)
    tested: dict[int, IntArray] = {}
    while True:
        needed = [
            rows_needed(promised, delta / n_sharing)
            for n_sharing in range(1, len(left) + 1)
        ]
        # The sizes fall and the needed rows grow, so these are the first groups.
        n_sharing = np.count_nonzero(sizes[left] >= needed)
        for group in left[:n_sharing]:
            scores, right = groups[group]
            level = delta / n_sharing
            if group not in tested:
                tested[group] = starts(len(scores), promised, level)
            thresholds[group] = certified_threshold(
                scores, right, promised, level, tested[group]
            )
        needing = left[thresholds[left] != ALWAYS]
        if len(needing) in (0, len(left)):
            return thresholds
        left = needing


Results = dict[str, Interval]
# The results that `measure` of the rules may return, with their titles in tables.
TITLES = {
    "answered": "Inputs answered",
    "accuracy": "Accuracy of the answers",
    "cost": "Mean cost of the decisions",
    "cost_argmax": "Mean cost of the most probable class",
    "saving": "Saving per input",
    "coverage": "Sets that hold the true class",
    "size": "Classes per set",
}


def uniform_quantile(rank: int, n: int, level: float) -> float:
    """The quantile of the rank-th smallest of n uniform numbers, Beta(rank, n + 1 - rank).

    Ranks 0 and n + 1 are the ends 0 and 1.
    """
    if rank == 0:
        return 0.0
    if rank > n:
        return 1.0
    return float(betaincinv(rank, n + 1 - rank, level))


def share(flags: NDArray[np.bool_]) -> Interval:
    """Return the fraction of N values that are true, with the exact 95% interval of Clopper and
    Pearson.
    """
    n = len(flags)
    n_true = int(np.count_nonzero(flags))
    low = uniform_quantile(n_true, n, 0.025)
    high = uniform_quantile(n_true + 1, n, 0.975)
    return Interval(n_true / n, low, high)


def share_of_any_threshold(value: float, n_rows: int, n_thresholds: int) -> Interval:
    r"""Return a fraction of N rows above a chosen threshold, with its 95% interval for new rows.

    The threshold was chosen on these rows, so an interval for a fixed one would not hold. This one
    holds for all thresholds at once,

    $$\sup_t |F_N(t) - F(t)| \le \sqrt{\ln(2 / \alpha) / (2 N)},$$

    with probability $1 - \alpha$. K thresholds, one for each class, share $\alpha$, and their
    distances add up.

    References:
        Dvoretzky, Kiefer and Wolfowitz 1956; Massart 1990 (the constant).
    """
    alpha = 0.05 / n_thresholds
    of_one = math.sqrt(math.log(2 / alpha) / (2 * n_rows))
    distance = n_thresholds * of_one
    return Interval(value, max(value - distance, 0.0), min(value + distance, 1.0))


def mean(values: NDArray[Any]) -> Interval:
    """Return a mean with its 95% percentile bootstrap interval from 1,000 resamples."""
    n = len(values)
    rng = np.random.default_rng(0)
    # One resample at a time takes no more memory than the rows.
    means = np.array([values[rng.integers(0, n, n)].mean() for _ in range(1000)])
    return interval_of(float(values.mean()), means, 0.95)


def answers(decided: NDArray[np.int64], labels: NDArray[np.int64]) -> Results:
    """Return the coverage and, if anything is answered, the accuracy of the answers."""
    answered = decided >= 0
    found = {"answered": share(answered)}
    if answered.any():
        found["accuracy"] = share(decided[answered] == labels[answered])
    return found
