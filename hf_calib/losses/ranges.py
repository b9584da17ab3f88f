"""Hyperparameters of the losses, which a formula declares by annotations: types of this file,
`Literal` or `bool`."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from numbers import Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hf_calib.losses.statistics.definitions import RIVALS, RivalRank

INFINITY = "inf"  # JSON has no infinity; YAML reads its own .inf.
MOST_BINS = 10_000  # More bins have no examples.


@dataclass(frozen=True)
class Hyperparameter:
    """A hyperparameter of a loss: its range in words, such as "be a finite number and >= 0", and
    its default."""

    requirement: str
    read: Callable[[Any], Any]  # It raises TypeError or ValueError.
    holds: Callable[[Any], bool] = lambda value: True
    default: Any = None

    def parse(self, value: Any) -> Any:
        """Return the value in the hyperparameter's type; raise TypeError or ValueError if it is out
        of range."""
        parsed = self.read(value)
        if not self.holds(parsed):
            raise ValueError
        return parsed


def _real(value: Any) -> Any:
    """The number in Python's type; raise for a text and for True, which would count as 1."""
    plain = value
    if hasattr(value, "item"):
        try:
            plain = value.item()
        except RuntimeError as error:  # a tensor of several numbers
            raise TypeError from error
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise TypeError
    return plain


def _number(value: Any) -> float:
    number = float(_real(value))
    if not math.isfinite(number):
        raise ValueError
    return number


def _number_or_infinity(value: Any) -> float:
    return math.inf if value in (math.inf, INFINITY, "Infinity") else _number(value)


def numbers_of(value: Any) -> tuple[float, ...]:
    """The finite numbers of a sequence or array; raise TypeError or ValueError for anything
    else."""
    # Only the keys of a mapping would be read, a set has no order, and bytes are codes.
    if isinstance(value, Mapping | Set | bytes):
        raise TypeError
    return tuple(_number(entry) for entry in value)


_FINITE = "be a finite number"
Number = Annotated[float, Hyperparameter(_FINITE, _number)]
NonNegative = Annotated[
    float, Hyperparameter(f"{_FINITE} and >= 0", _number, lambda x: x >= 0)
]
NonPositive = Annotated[
    float, Hyperparameter(f"{_FINITE} and <= 0", _number, lambda x: x <= 0)
]
Positive = Annotated[
    float, Hyperparameter(f"{_FINITE} and > 0", _number, lambda x: x > 0)
]
AtLeastOne = Annotated[
    float, Hyperparameter(f"{_FINITE} and >= 1", _number, lambda x: x >= 1)
]
Share = Annotated[float, Hyperparameter("be in [0, 1]", _number, lambda x: 0 <= x <= 1)]
UpperLimit = Annotated[
    float, Hyperparameter("be >= 0, or infinity", _number_or_infinity, lambda x: x >= 0)
]
_whole = Hyperparameter(
    f"be a whole number from 1 to {MOST_BINS:,}",
    lambda n: operator.index(_real(n)),
    lambda n: 1 <= n <= MOST_BINS,
)
NumberOfBins = Annotated[int, _whole]
_rising = Hyperparameter(
    "be numbers in [0, 1] in strictly rising order",
    numbers_of,
    lambda each: each == tuple(sorted(set(each))) and min(each) >= 0 and max(each) <= 1,
)
Thresholds = Annotated[Sequence[float], _rising]
Gammas = Annotated[
    Sequence[float],
    Hyperparameter("be numbers >= 0", numbers_of, lambda each: min(each) >= 0),
]
_rank_or_number = Hyperparameter(
    f"be one of {', '.join(map(repr, RIVALS))}, or a number in [0, 1)",
    lambda value: value if value in RIVALS else _number(value),
    lambda rival: rival in RIVALS or 0 <= rival < 1,
)
RankOrNumber = Annotated[RivalRank | float, _rank_or_number]


def _declared(annotation: Any) -> Hyperparameter:
    if annotation is bool or get_origin(annotation) is Literal:
        options = get_args(annotation) or (True, False)
        return Hyperparameter(
            f"be one of {', '.join(map(repr, options))}",
            lambda value: value,
            lambda value: any(
                value == each and isinstance(value, type(each)) for each in options
            ),
        )
    (declared,) = annotation.__metadata__
    return declared


def hyperparameters_of(formula: Callable[..., Any]) -> dict[str, Hyperparameter]:
    """The hyperparameters that a formula declares: its keyword-only arguments that have a
    default."""
    annotations = get_type_hints(formula, include_extras=True)
    found = {}
    for each in inspect.signature(formula).parameters.values():
        if each.kind is each.KEYWORD_ONLY and each.default is not each.empty:
            declared = _declared(annotations[each.name])
            found[each.name] = replace(declared, default=each.default)
    return found
