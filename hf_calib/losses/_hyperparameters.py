"""Hyperparameters of the losses: name, type and default from a constructor's signature, range from its annotation.

Each is checked before any training. `Annotated[float, number(at_least=0)]` declares a range; `Literal[...]` and
`bool` say theirs by themselves.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from torch import Tensor

from hf_calib._errors import InputTypeError, InputValueError, did_you_mean, expected

ClassWeights = Sequence[float] | Tensor | None
ProblemType = Literal["single_label_classification", "multi_label_classification"] | None
Constructor = TypeVar("Constructor", bound=Callable[..., Any])
INFINITY = "inf"
INFINITY_TEXTS = (INFINITY, "Infinity")  # Python's and JSON's; YAML reads its .inf by itself
# What every constructor takes beside the hyperparameters of its loss.
SHARED_ARGUMENTS = ("class_weights", "problem_type")


@dataclass(frozen=True)
class Range:
    """The valid values of a hyperparameter: in words, and as a function that converts a value or raises."""

    requirement: str
    parse: Callable[[Any], Any]  # raises TypeError or ValueError


@dataclass(frozen=True)
class Hyperparameter:
    """A hyperparameter of a loss.

    Attributes:
        default: its default.
        requirement: its type and range in words: "be a finite number and >= 0".
        parse: a function that returns a value in its own type, or raises TypeError or ValueError.
    """

    default: Any
    requirement: str
    parse: Callable[[Any], Any]


def number(
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    infinite: bool = False,
) -> Range:
    """A finite number within these bounds; or infinity, also as the text "inf", which JSON can hold."""
    bounds = [f">= {at_least:g}"] * (at_least > -math.inf) + [f"> {above:g}"] * (above > -math.inf)
    bounds += [f"<= {at_most:g}"] * (at_most < math.inf)

    def parse(value: Any) -> float:
        if isinstance(value, bool | str) and not (infinite and value in INFINITY_TEXTS):
            raise TypeError
        parsed = float(value)
        within = at_least <= parsed <= at_most and parsed > above
        if not (within and (infinite or math.isfinite(parsed))):
            raise ValueError
        return parsed

    requirement = " and ".join(["be a finite number", *bounds])
    return Range(requirement + (", or infinity" if infinite else ""), parse)


def whole_number(*, at_least: int) -> Range:
    """An integer, at least this."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or operator.index(value) < at_least:
            raise ValueError
        return operator.index(value)

    return Range(f"be a whole number >= {at_least}", parse)


def numbers(*, at_least: float, at_most: float = math.inf, rising: bool = False) -> Range:
    """A non-empty sequence of numbers within these bounds, strictly rising if asked."""
    each = number(at_least=at_least, at_most=at_most)

    def parse(value: Any) -> tuple[float, ...]:
        if isinstance(value, str):
            raise TypeError
        parsed = tuple(each.parse(entry) for entry in value)
        if not parsed or (rising and any(a >= b for a, b in itertools.pairwise(parsed))):
            raise ValueError
        return parsed

    order = " in strictly rising order" if rising else ""
    return Range(f"be numbers in [{at_least:g}, {at_most:g}]{order}", parse)


# The annotations that several constructors share.
NonNegative = Annotated[float, number(at_least=0)]
Positive = Annotated[float, number(above=0)]
AtLeastOne = Annotated[float, number(at_least=1)]
NumberOfBins = Annotated[int, whole_number(at_least=1)]


def _one_of(options: tuple[str, ...]) -> Range:
    def parse(value: Any) -> str:
        if value not in options:
            raise ValueError
        return str(value)

    return Range(f"be one of {', '.join(map(repr, options))}", parse)


def _true_or_false(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _range_of(annotation: Any) -> Range:
    if annotation is bool:
        return Range("be True or False", _true_or_false)
    if get_origin(annotation) is Literal:
        return _one_of(get_args(annotation))
    (declared,) = annotation.__metadata__
    return declared


@cache
def hyperparameters_of(constructor: Callable[..., Any]) -> Mapping[str, Hyperparameter]:
    """The hyperparameters that a loss's constructor declares, in its order."""
    annotations = get_type_hints(constructor, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name not in SHARED_ARGUMENTS:
            declared = _range_of(annotations[name])
            found[name] = Hyperparameter(parameter.default, declared.requirement, declared.parse)
    return found


def in_words(constructor: Callable[..., Any]) -> str:
    """Names and defaults of a loss's hyperparameters, for messages."""
    known = hyperparameters_of(constructor)
    return ", ".join(f"{name}={h.default!r}" for name, h in known.items()) or "none"


def checked(constructor: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """The hyperparameters that a constructor was given, each within its range and in its own type."""
    values = {}
    for name, hyperparameter in hyperparameters_of(constructor).items():
        try:
            values[name] = hyperparameter.parse(given[name])
        except (TypeError, ValueError) as error:
            raise InputValueError(
                expected(
                    f"{name} of loss {constructor.__name__!r}",
                    hyperparameter.requirement,
                    repr(given[name]),
                    f"it has: {in_words(constructor)}",
                )
            ) from error
    return values


def unknown_hyperparameter(constructor: Callable[..., Any], given: str) -> str:
    """The message for a hyperparameter that a loss does not have."""
    suggestion = did_you_mean(given, [*hyperparameters_of(constructor), *SHARED_ARGUMENTS])
    return (
        f"expected the hyperparameters of loss {constructor.__name__!r}, got {given!r}; "
        f"it has: {in_words(constructor)} ({suggestion})"
    )


def constructor(function: Constructor) -> Constructor:
    """Let the constructor of a loss suggest a hyperparameter for one that it does not have."""

    @wraps(function)
    def checking(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in inspect.signature(function).parameters:
                raise InputTypeError(unknown_hyperparameter(function, name))
        return function(*args, **given)

    return cast(Constructor, checking)


def warn_caller(message: str) -> None:
    """Warn where this package was called, whether a constructor was called there or `make_loss`."""
    package = __name__.rpartition(".")[0]
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(package):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
