"""The test behind every guaranteed accuracy, which finds the answerable rows; results of rules."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, betaincinv

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, IntArray, check_share, row_chunks
from hf_calib.metrics.sums import Interval, interval_of

NEVER, ALWAYS = (
    1.0,
    0.0,
)  # No probability is above the first, every one above the second.
# Starts of the tested sequence, errors that the first start tolerates, and the factor of rows required for it.
_LADDER = ((3, 1, 12), (2, 1, 4), (1, 1, 2), (1, 0, 1))


def check_promise(argument: str, promised: float, delta: float) -> None:
    """Raise unless an accuracy can be guaranteed at all."""
    check_share(
        "delta",
        delta,
        "0.05 lets the promise fail for one draw of calibration rows in 20",
    )
    way_out = f"no number of rows guarantees only correct answers; 0.99 needs {rows_needed(0.99, delta):,}"
    check(promised != 1, f"{argument} to be below 1", promised, way_out)
    check_share(argument, promised, "use 0.95 for 95 correct answers of 100")


def check_rows_for(
    promised: float, delta: float, n_rows: int, argument: str = "accuracy"
) -> None:
    """Raise if the rows are too few to guarantee the accuracy even if all of them were correct."""
    needed = rows_needed(promised, delta)
    most = math.floor(1000 * delta ** (1 / max(n_rows, 1))) / 1000
    requirement = f"be at least {needed:,} to promise {argument}={promised:g} with delta={delta:g}"
    way_out = f"pass more rows, or promise at most {most:g}"
    check(
        n_rows >= needed,
        f"the calibration rows to {requirement}",
        f"{n_rows:,}",
        way_out,
    )


def rows_needed(promised: float, delta: float) -> int:
    """Return the least number of rows that can guarantee an accuracy if all of them are correct."""
    return math.ceil(math.log(delta) / math.log(promised))


def starts(n_rows: int, promised: float, delta: float) -> IntArray:
    """The numbers of rows at which the sequence of tests starts; empty if the rows are too few."""
    for n_starts, errors, times in _LADDER:
        level = delta / n_starts
        rows = np.arange(
            errors + 1, 10 * rows_needed(promised, level) + 10 * errors + 10
        )
        first = int(
            rows[np.argmax(bdtr(errors, rows, 1 - promised) <= level)]
        )  # The least to pass.
        if first * times <= n_rows:
            return (
                np.geomspace(first, n_rows, n_starts + 1).round().astype(np.intp)[:-1]
            )
    return np.array([], dtype=np.intp)


def certified_threshold(
    scores: FloatArray,
    right: NDArray[Any],
    promised: float,
    delta: float,
    tested: IntArray | None = None,
) -> float:
    r"""Return the lowest score above which at least the promised share is correct, with confidence 1 - delta.

    For each number m of rows, from the first that can pass up to all N, the m rows with the highest scores are tested.
    If k of them are wrong, the hypothesis "less than the promised share a is correct" has the p-value

    $$p_m = P(\text{Bin}(m, 1 - a) \le k).$$

    Independent tests at every m would each need the level delta / N (Bonferroni). A sequence of tests in a fixed order
    can use the full level for each if it stops at the first failure, but with few rows it often fails by chance.
    Therefore up to three starts, at numbers of rows that grow by a constant factor, share delta, and a sequence that
    reaches the next start adds its level to that start's (a fallback test). The first start tolerates one error if
    there are twice as many rows. Starts depend on N only, so one more row changes little. In simulations of 60 to 3,000
    rows (`tests/decisions/test_abstain.py`) more rows answer more inputs.

    Scores (N,) are in [0, 1], `right` (N,) bool is the correctness, and `tested` are the starts (None for `starts`).
    Inputs with a score *above* the threshold are answered: 1 answers none, 0 answers all. Rows with equal scores are
    answered together or not at all: the threshold is below the last that passed in a random order.

    Notes:
        The p-values are valid: given the (m + 1)-th highest score, the rows above it are a random sample of all rows
        above it. The order is valid even if accuracy does not grow with the score: between two scores above which the
        accuracy is a, rows are wrong with probability 1 - a, however many were drawn.

    References:
        Angelopoulos et al. 2021, "Learn then Test" (fixed sequences with several starts); Wiens 2003
        (fallback); Geifman and El-Yaniv 2017 (selective prediction with a guarantee).
    """
    n_rows = len(scores)
    tested = starts(n_rows, promised, delta) if tested is None else tested
    if not len(tested):
        return NEVER
    shuffled = np.random.default_rng(0).permutation(n_rows)
    order = shuffled[np.argsort(-scores[shuffled], kind="stable")]
    lower = np.append(
        scores[order][1:], ALWAYS
    )  # The (m + 1)-th highest score, for m = 1..N.
    p_values = bdtr(np.cumsum(~right[order]), np.arange(1, n_rows + 1), 1 - promised)

    passed = np.zeros(n_rows, dtype=bool)
    level = 0.0
    for start, end in zip(tested, [*(tested[1:] - 1), n_rows], strict=True):
        level += delta / len(tested)
        fails = p_values[start - 1 : end] > level
        reached = int(fails.argmax()) if fails.any() else len(fails)
        passed[start - 1 : start - 1 + reached] = True
        if reached < len(fails):
            level = 0.0
    passed &= lower < scores[order]  # A threshold is not between equal scores.
    return float(lower[passed][-1]) if passed.any() else NEVER


def one_threshold_passes(
    scores: FloatArray, right: NDArray[Any], promised: float, delta: float
) -> bool:
    """Whether some scores are equal, and some threshold would pass if it alone were tested."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=-1.0))
    wrong = np.cumsum(~right[order])[ends]
    p_values = bdtr(wrong, ends + 1, 1 - promised)
    return len(ends) < len(scores) and bool((p_values <= delta).any())


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


class PromiseCurve(NamedTuple):
    """Promised accuracies, with the coverage and the accuracy of the answers at each; None if nothing is answered."""

    promised: tuple[float, ...]
    answered: tuple[float, ...]
    kept: tuple[Interval | None, ...]


def share(flags: NDArray[np.bool_], confidence_level: float = 0.95) -> Interval:
    """Return the fraction of N values that are true, with the exact interval of Clopper and Pearson."""
    n, k = len(flags), int(np.count_nonzero(flags))
    tail = (1 - confidence_level) / 2
    low = betaincinv(k, n - k + 1, tail) if k else 0.0
    high = betaincinv(k + 1, n - k, 1 - tail) if k < n else 1.0
    return Interval(k / n, float(low), float(high))


def share_of_any_threshold(
    flags: NDArray[np.bool_], n_thresholds: int = 1, confidence_level: float = 0.95
) -> Interval:
    r"""Return the fraction of N values that are true, where true means above a chosen threshold.

    The threshold was chosen on these values, so an interval for a fixed one would not hold. This
    one holds for all thresholds at once,

    $$\sup_t |F_N(t) - F(t)| \le \sqrt{\ln(2 / \alpha) / (2 N)},$$

    with probability $1 - \alpha$. K thresholds, one for each class, share $\alpha$, and their
    distances add up.

    References:
        Dvoretzky, Kiefer and Wolfowitz 1956; Massart 1990 (the constant).
    """
    alpha = (1 - confidence_level) / n_thresholds
    distance = math.sqrt(math.log(2 / alpha) / (2 * len(flags)))
    value = float(flags.mean())
    low = max(value - n_thresholds * distance, 0.0)
    return Interval(value, low, min(value + n_thresholds * distance, 1.0))


def mean(values: ArrayLike, confidence_level: float = 0.95, seed: int = 0) -> Interval:
    """Return a mean with its percentile bootstrap interval from 1,000 resamples."""
    sample: FloatArray = np.asarray(values, dtype=np.float64)
    n, rng = len(sample), np.random.default_rng(seed)
    parts = row_chunks(1000, n, elements=2**20)
    means = [
        sample[rng.integers(0, n, (part.stop - part.start, n))].mean(axis=1)
        for part in parts
    ]
    return interval_of(float(sample.mean()), np.concatenate(means), confidence_level)


def answers(decided: NDArray[np.int64], labels: NDArray[np.int64]) -> Results:
    """Return the coverage and, if anything is answered, the accuracy of the answers."""
    answered = decided >= 0
    found = {"answered": share(answered)}
    if answered.any():
        found["accuracy"] = share(decided[answered] == labels[answered])
    return found
