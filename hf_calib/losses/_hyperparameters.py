"""What a loss's hyperparameters may be: default, type and range, checked before any training."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_calib._errors import InputValueError, did_you_mean, expected


@dataclass(frozen=True)
class Hyperparameter:
    """A default, and a function that returns the value in its own type or raises TypeError or ValueError."""

    default: Any
    requirement: str
    parse: Callable[[Any], Any]


def real(
    default: float, low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf
) -> Hyperparameter:
    """A finite number in [low, high], and greater than `above`."""
    bounds = [f">= {low:g}"] * (low > -math.inf) + [f"> {above:g}"] * (above > -math.inf)
    bounds += [f"<= {high:g}"] * (high < math.inf)

    def parse(value: Any) -> float:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
        if not (math.isfinite(number) and low <= number <= high and number > above):
            raise ValueError
        return number

    return Hyperparameter(default, " and ".join(["be a finite number", *bounds]), parse)


def whole(default: int, low: int) -> Hyperparameter:
    """A whole number, at least `low`."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or operator.index(value) < low:
            raise ValueError
        return operator.index(value)

    return Hyperparameter(default, f"be a whole number >= {low}", parse)


def choice(*options: str) -> Hyperparameter:
    """One of the options; the first is the default."""

    def parse(value: Any) -> str:
        if value not in options:
            raise ValueError
        return str(value)

    return Hyperparameter(options[0], f"be one of {', '.join(map(repr, options))}", parse)


def flag(default: bool) -> Hyperparameter:
    """True or False."""

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    return Hyperparameter(default, "be True or False", parse)


def reals(
    default: tuple[float, ...], low: float, high: float = math.inf, *, rising: bool = False
) -> Hyperparameter:
    """A non-empty sequence of numbers in [low, high], strictly rising if asked."""
    item = real(0.0, low, high)

    def parse(value: Any) -> tuple[float, ...]:
        if isinstance(value, str):
            raise TypeError
        numbers = tuple(item.parse(number) for number in value)
        if not numbers or (rising and any(a >= b for a, b in itertools.pairwise(numbers))):
            raise ValueError
        return numbers

    order = " in strictly rising order" if rising else ""
    return Hyperparameter(default, f"be numbers in [{low:g}, {high:g}]{order}", parse)


def checked(loss: str, known: Mapping[str, Hyperparameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """All hyperparameters of a loss: the given values, checked, and the defaults of the rest."""
    own = ", ".join(f"{name}={h.default!r}" for name, h in known.items()) or "none"
    for name in given:
        if name not in known:
            raise ValueError(
                f"expected the hyperparameters of loss {loss!r}, got {name!r}; "
                f"it has: {own}" + (f" ({did_you_mean(name, known)})" if known else "")
            )
    values = {}
    for name, hyperparameter in known.items():
        value = given.get(name, hyperparameter.default)
        try:
            values[name] = hyperparameter.parse(value)
        except (TypeError, ValueError) as error:
            message = expected(
                f"{name} of loss {loss!r}", hyperparameter.requirement, repr(value), f"it has: {own}"
            )
            raise InputValueError(message) from error
    return values
