"""Hyperparameters of the losses: name, type and default from a formula's signature, range from its annotation.

`Annotated[float, number(at_least=0)]` declares a range; `Literal[...]` and `bool` say theirs by themselves.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.losses.statistics.definitions import RIVALS, RivalRank

INFINITY = "inf"
INFINITY_TEXTS = (INFINITY, "Infinity")  # Python's and JSON's; YAML reads its .inf by itself


@dataclass(frozen=True)
class Range:
    """The valid values of a hyperparameter: in words, and as a function that converts a value or raises."""

    requirement: str
    parse: Callable[[Any], Any]  # raises TypeError or ValueError


@dataclass(frozen=True)
class Hyperparameter(Range):
    """A hyperparameter of a loss: its range, "be a finite number and >= 0", and its default."""

    default: Any


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


def _number_of_bins(value: Any) -> int:
    if isinstance(value, bool) or operator.index(value) < 1:
        raise ValueError
    return operator.index(value)


def _one_of(options: Sequence[str]) -> Range:
    def parse(value: Any) -> str:
        if value not in options:
            raise ValueError
        return str(value)

    return Range(f"be one of {', '.join(map(repr, options))}", parse)


def _true_or_false(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _rival(value: Any) -> RivalRank | float:
    if isinstance(value, str) and value in RIVALS:
        return value
    constant = float(value)
    if isinstance(value, bool) or not 0 <= constant < 1:
        raise ValueError
    return constant


Number = Annotated[float, number()]
NonNegative = Annotated[float, number(at_least=0)]
NonPositive = Annotated[float, number(at_most=0)]
Positive = Annotated[float, number(above=0)]
AtLeastOne = Annotated[float, number(at_least=1)]
Share = Annotated[float, number(at_least=0, at_most=1)]
UpperLimit = Annotated[float, number(at_least=0, infinite=True)]
NumberOfBins = Annotated[int, Range("be a whole number >= 1", _number_of_bins)]
Thresholds = Annotated[Sequence[float], numbers(at_least=0, at_most=1, rising=True)]
Gammas = Annotated[Sequence[float], numbers(at_least=0)]
RivalOrConstant = Annotated[
    RivalRank | float, Range(f"{_one_of(tuple(RIVALS)).requirement}, or a number in [0, 1)", _rival)
]


def _range_of(annotation: Any) -> Range:
    if annotation is bool:
        return Range("be True or False", _true_or_false)
    if get_origin(annotation) is Literal:
        return _one_of(get_args(annotation))
    (declared,) = annotation.__metadata__
    return declared


def hyperparameters_of(formula: Callable[..., Any]) -> dict[str, Hyperparameter]:
    """The hyperparameters that a formula declares after its rows, in its order."""
    # Python 3.10 has no `Unpack`, which types the arguments that all losses share.
    annotations = get_type_hints(formula, localns={"Unpack": dict}, include_extras=True)
    found = {}
    for name, parameter in list(inspect.signature(formula).parameters.items())[1:]:
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            declared = _range_of(annotations[name])
            found[name] = Hyperparameter(declared.requirement, declared.parse, parameter.default)
    return found


def in_words(known: Mapping[str, Hyperparameter]) -> str:
    """Names and defaults of a loss's hyperparameters, for messages."""
    return ", ".join(f"{name}={h.default!r}" for name, h in known.items()) or "none"


def checked(loss: str, known: Mapping[str, Hyperparameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """All hyperparameters of a loss, each within its range and in its own type; those not given by their default."""
    values = {}
    for name, hyperparameter in known.items():
        value = given.get(name, hyperparameter.default)
        try:
            values[name] = hyperparameter.parse(value)
        except (TypeError, ValueError) as error:
            way_out = f"it has: {in_words(known)}"
            argument = f"{name} of loss {loss!r}"
            message = expected(argument, hyperparameter.requirement, repr(value), way_out)
            raise InputValueError(message) from error
    return values


def unknown_hyperparameter(loss: str, known: Mapping[str, Hyperparameter], given: str) -> str:
    """The message for a hyperparameter that a loss does not have."""
    suggestion = did_you_mean(given, [*known, "class_weights", "problem_type"])
    return f"expected the hyperparameters of loss {loss!r}, got {given!r}; it has: {in_words(known)} ({suggestion})"
