"""The rows of a report's tables: what each confidence bin and each class shows, and how cells are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, ndtr

from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.state import CalibrationState
from hf_calib.metrics.sums import BinSums, Interval, class_gaps, uniform_edges

T = TypeVar("T")
Cells = tuple[list[str], list[list[str]]]  # a header, and rows


@dataclass(frozen=True)
class BinRow:
    """The examples of one confidence bin, or of a run of them."""

    lower: float
    upper: float
    count: int
    confidence: float  # mean confidence
    accuracy: float
    gap: float  # confidence - accuracy: above 0 is over-confident
    contribution: float  # |gap| count / N: these add up to the ECE
    p_value: float  # of such a gap, either way, if the confidences were right


@dataclass(frozen=True)
class ClassRow:
    """One class: how often it occurs, how likely it was said to be, and how far its predictions hold."""

    index: int
    name: str
    support: int  # examples of the class
    frequency: float  # support / N
    mean_probability: float  # over all N examples; equals the frequency if calibrated
    class_gap: float  # the class's term of the classwise calibration error
    predicted: int  # examples for which it is the most probable class
    precision: float | None  # how often it is right then; None if it is never predicted
    confidence: float | None  # mean confidence then
    p_value: float  # of confidence - precision, if the confidences were right
    frequency_p_value: float  # of frequency - mean_probability, if the probabilities were right


def bin_rows(
    sums: BinSums, coins: Coins, *, counts: NDArray[Any] | None = None, scale: float = 1.0
) -> tuple[BinRow, ...]:
    """The equal-width bins that hold examples, from the lowest.

    Sums and coins are of M bins; where they are of weights, counts (M,) are rows, and scale effective rows a weight.
    """
    edges, total = uniform_edges(len(sums.counts)), float(sums.counts.sum())
    rows = []
    for m in np.flatnonzero(sums.counts).tolist():
        mass, confidence, right = (float(part[m]) for part in sums)
        count = int(mass if counts is None else counts[m])
        gap, p_value = (confidence - right) / mass, coins.group(m).p_value(right * scale)
        stated, accuracy, part = min(confidence / mass, 1.0), right / mass, abs(gap) * mass / total
        lower, upper = edges[m : m + 2].tolist()
        rows.append(BinRow(lower, upper, count, stated, accuracy, gap, part, p_value))
    return tuple(rows)


def class_rows(
    state: CalibrationState, names: tuple[str, ...], predicted: Coins, classes: Coins, scale: float
) -> tuple[ClassRow, ...]:
    """One row a class; the coins are those of its predictions, and of its probabilities in all rows."""
    total, gaps = float(state.bins.counts.sum()), class_gaps(state.class_bins())
    to_rows, rows = state.n_rows / total, []
    for c, (name, sums) in enumerate(zip(names, state.classes().T.tolist(), strict=True)):
        true, probability, _, mass, right, confidence, _ = sums
        found = ClassRow(
            index=c,
            name=name,
            support=round(true * to_rows),
            frequency=true / total,
            mean_probability=probability / total,
            class_gap=float(gaps[c]),
            predicted=round(mass * to_rows),
            precision=right / mass if mass else None,
            confidence=confidence / mass if mass else None,
            p_value=predicted.group(c).p_value(right * scale) if mass else 1.0,
            frequency_p_value=classes.group(c).p_value(true * scale),
        )
        rows.append(found)
    return tuple(rows)


def worst_bins(rows: tuple[BinRow, ...], limit: int = 5) -> tuple[BinRow, ...]:
    """The bins that add most to the ECE, worst first; those with the largest gap are the emptiest ones."""
    return tuple(sorted(rows, key=lambda row: (-row.contribution, row.lower))[:limit])


def p_cell(p_value: float) -> str:
    """A p-value as tables show it: none below the least that 1,000 resamples can give.

    >>> p_cell(0.6543), p_cell(1 / 1001)
    ('0.65', '< 0.001')
    """
    return "< 0.001" if p_value < 0.001 else f"{p_value:.2g}"


def p_in_words(p_value: float) -> str:
    """A p-value as sentences state it."""
    return f"p {'' if p_value < 0.001 else '= '}{p_cell(p_value)}"


def with_interval(value: float, low: float | None, high: float | None, form: str = ".4f") -> str:
    """A metric as the tables show it.

    >>> with_interval(0.05, 0.04, 0.061), with_interval(0.05, None, None), with_interval(np.nan, None, None)
    ('0.0500 [0.0400, 0.0610]', '0.0500', 'not defined')
    """
    if math.isnan(value):
        return "not defined"
    shown = format(value, form)
    return shown if low is None or high is None else f"{shown} [{low:{form}}, {high:{form}}]"


def cell(found: Interval, form: str = ".4f") -> str:
    """The same of an interval."""
    return with_interval(found.value, found.low, found.high, form)


def columns(before: T, after: T | None) -> dict[str, T]:
    """Values before and after calibration, by the name of their table column."""
    return {"value": before} if after is None else {"before": before, "after": after}


def table_of(corner: str, titles: Mapping[str, str], states: Mapping[str, Mapping[str, Interval]]) -> Cells:
    """Each metric that any state has, by the titles of their keys."""
    rows = [
        [title, *(cell(found[key]) if key in found else "" for found in states.values())]
        for key, title in titles.items()
        if any(key in found for found in states.values())
    ]
    return [corner, *states], rows


def table_of_rows(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> Cells:
    """A table of columns, each with what it shows of a row."""
    return list(columns), [[shown(row) for shown in columns.values()] for row in rows]


def titled(metrics: Mapping[str, Interval], titles: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Metrics as a record has them, each with its title."""
    return {key: {"title": titles[key], **found._asdict()} for key, found in metrics.items()}


def plain(value: Any) -> Any:
    """A value of JSON's own types, without curves and fields that are not compared; None where no number is finite.

    >>> plain({"ece": Interval(0.5, float("nan")), "names": ("a", "b")})
    {'ece': {'value': 0.5, 'low': None, 'high': None}, 'names': ['a', 'b']}
    """
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value) if each.compare}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items() if key != "curve"}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


_AS_GOOD_AS_0 = 1e-9
_AS_GOOD_AS_NORMAL = 10_000.0  # a variance
_REACH = 10  # standard deviations, beyond which nothing counts


class Coins(NamedTuple):
    """Independent coins, summed up; each field may be an array, of one sum each.

    Those with a chance p of at least 1/2 are summed apart, as the sum of both kinds can be far from normal on either
    side: a thousand coins at .999 and a thousand at .001.
    """

    likely: Any  # how many have such a chance
    heads: Any  # the sum of p of the others
    heads_variance: Any  # that of p (1 - p) of the others
    tails: Any  # the sum of 1 - p of the likely ones
    tails_variance: Any  # that of p (1 - p) of the likely ones

    @classmethod
    def of(cls, chances: NDArray[Any], groups: NDArray[np.intp] | None = None, n_groups: int = 1) -> Coins:
        """Coins with these chances, (N,) summed within groups (N,), or (N, C) within columns."""
        wide = np.clip(np.ravel(chances).astype(np.float64), 0, 1)
        if chances.ndim == 2:
            n_groups = chances.shape[1]
            groups = np.tile(np.arange(n_groups), len(chances))
        slots = np.zeros(len(wide), np.intp) if groups is None else groups
        likely = wide >= 0.5
        rarer = np.where(likely, 1 - wide, wide)
        variances = rarer * (1 - rarer)
        parts = (likely, rarer * ~likely, variances * ~likely, rarer * likely, variances * likely)
        found = cls(*(np.bincount(slots, part, n_groups).astype(np.float64) for part in parts))
        return found if groups is not None else found.group(0)

    @classmethod
    def of_sums(cls, count: Any, chances: Any, squares: Any) -> Coins:
        """Coins that are known by their number, the sum of their chances and that of the squares of these.

        They are taken as all likely or all unlikely, as those of a bin are.

        >>> [round(coins.p_value(7), 6) for coins in (Coins.of_sums(10, 9.0, 8.1), Coins.of(np.full(10, 0.9)))]
        [0.140382, 0.140382]
        """
        variance = np.maximum(chances - squares, 0.0)
        likely = np.greater_equal(chances, count / 2)
        tails = np.maximum(count - chances, 0.0) * likely
        return cls(count * likely, chances * ~likely, variance * ~likely, tails, variance * likely)

    def group(self, number: int) -> Coins:
        """One of the sums."""
        return Coins(*(float(field[number]) for field in self))

    def p_value(self, n_heads: float) -> float:
        """How likely a number of heads as far from the mean is, either way: twice the smaller tail, at most 1.

        The seldom heads, and the seldom tails, are each taken as binomial with their mean and variance, of a number
        of coins that need not be whole; that is near the truth in both of its limits, the normal and the Poisson one
        (Ehm 1991, "Binomial approximation to the Poisson binomial distribution"; Choi and Xia 2002).
        """
        excess = n_heads - self.likely  # heads of the unlikely less tails of the likely
        variance = self.heads_variance + self.tails_variance
        if variance > _AS_GOOD_AS_NORMAL:
            z = (excess - self.heads + self.tails) / np.sqrt(variance)
            half = 0.5 / np.sqrt(variance)
            return float(min(1.0, 2 * min(ndtr(z + half), ndtr(half - z))))
        heads, first_heads = _distribution(self.heads, self.heads_variance)
        tails, first_tails = _distribution(self.tails, self.tails_variance)
        together = np.convolve(heads, tails[::-1])
        place = round(excess - first_heads + first_tails + len(tails) - 1)
        at_most = together[: max(0, place + 1)].sum()
        at_least = together[max(0, place) :].sum()
        return float(min(1.0, 2 * min(at_most, at_least)))


def _distribution(mean: float, variance: float) -> tuple[FloatArray, int]:
    """The probabilities of numbers of heads from the second result on, beyond which they are as good as 0."""
    if mean <= 0:
        return np.ones(1), 0
    reach = _REACH * np.sqrt(variance) + _REACH
    first = max(0, int(mean - reach))
    counts = np.arange(first, int(mean + reach) + 2, dtype=np.float64)
    share = max(1 - variance / mean, _AS_GOOD_AS_0)  # of each coin, which goes to 0 in the Poisson limit
    coins = mean / share
    inside = counts < coins
    at_most = np.ones(len(counts))
    at_most[inside] = betainc(coins - counts[inside], counts[inside] + 1, 1 - share)
    return np.diff(at_most, prepend=0.0), first
