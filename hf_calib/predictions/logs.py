"""Sample logs of lm-evaluation-harness, whose answers are classes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

import numpy as np

from hf_calib._errors import check, few
from hf_calib.predictions.predictions import Predictions

OptionScores = Literal["sum", "per_character", "per_byte"]
_KEYS = {"doc_id", "arguments", "filtered_resps", "target"}
_WAY_OUT = "log a multiple-choice task"


def rows_of_log(file: TextIO) -> list[Any] | None:
    """The rows of a log of lm-evaluation-harness, in lines or a list; None for other files."""
    first = next((line for line in file if line.strip()), "null")
    file.seek(0)
    is_list = first.lstrip().startswith("[")
    try:
        found = json.load(file) if is_list else [json.loads(first)]
    except (ValueError, RecursionError):
        return None
    if not found or not _is_row(found[0]):
        return None
    if is_list:
        return list(found)
    file.seek(0)
    return [json.loads(line) for line in file if line.strip()]


def _is_row(row: Any) -> bool:
    """Whether a value of JSON is a row of a log."""
    return isinstance(row, dict) and row.keys() >= _KEYS


def read_log(rows: list[Any], name: str, scores: OptionScores = "sum") -> Predictions:
    """Return the log-likelihoods of a log's answers as logits (see `read_predictions`), and the labels."""
    for place, row in enumerate(rows):
        requirement = f"each row of {name} to have {', '.join(sorted(_KEYS))}"
        got = f"{few([row])} in row {place}"
        check(_is_row(row), requirement, got, "write the log again")
        got = f"{row.get('acc')!r} in row {place} of {name}"
        is_known = row.get("acc", 0) in (0, 1)
        check(is_known, "acc to be 0 or 1", got, "evaluate the task again")
    times = Counter(str(row["doc_id"]) for row in rows).most_common(1)
    got = f"{times[0][1]} rows with {times[0][0]} in {name}"
    check(
        times[0][1] == 1,
        "each doc_id to be in one row",
        got,
        "keep the rows of one filter",
    )
    places = [f"in row {place} of {name}" for place in range(len(rows))]
    answers = [
        _answers(row["arguments"], place)
        for row, place in zip(rows, places, strict=True)
    ]
    likelihoods = [
        _likelihoods(*each) for each in zip(rows, answers, places, strict=True)
    ]
    # If a question has fewer answers, the missing ones have probability 0.
    logits = np.full((len(rows), max(map(len, answers))), -np.inf)
    lengths = {
        "sum": lambda text: 1,
        "per_character": len,
        "per_byte": lambda text: len(text.encode()),
    }
    for own, texts, values in zip(logits, answers, likelihoods, strict=True):
        own[: len(texts)] = values / np.array(
            [max(lengths[scores](text), 1) for text in texts]
        )
    best = [int(values.argmax()) for values in likelihoods]
    names = tuple(map(str, range(logits.shape[1])))
    return Predictions(
        np.array(_targets(rows, answers, best, places)),
        logits=logits,
        class_names=names,
    )


def _answers(arguments: Any, place: str) -> list[str]:
    """The answers in a dictionary, or in the pairs of context and answer of old versions."""
    pairs = arguments
    if isinstance(arguments, dict):
        # A log with sorted keys has gen_args_10 before gen_args_2, but its log-likelihoods in order.
        pairs = [arguments[key] for key in sorted(arguments, key=_number_at_the_end)]
    try:
        texts = [pair["arg_1"] if isinstance(pair, dict) else pair[1] for pair in pairs]
    except (TypeError, KeyError, IndexError):
        texts = []
    requirement = "arguments to hold a context and an answer for each answer"
    check(bool(texts), requirement, f"{few([arguments])} {place}", _WAY_OUT)
    return [str(text).strip() for text in texts]


def _number_at_the_end(key: str) -> int:
    """The number of gen_args_2 and the like; 0 without one."""
    digits = re.search(r"\d+$", key, re.ASCII)
    return 0 if digits is None else int(digits.group())


def _likelihoods(
    row: Mapping[str, Any], answers: Sequence[str], place: str
) -> np.ndarray:
    found = row["filtered_resps"]
    try:
        likelihoods = np.array([float(each[0]) for each in found])
    except (TypeError, ValueError, IndexError, KeyError):
        likelihoods = np.empty(0)
    requirement = (
        "filtered_resps to hold a log-likelihood for each of at least 2 answers"
    )
    got = f"{few([found])} for {len(answers)} answers {place}"
    check(len(likelihoods) == len(answers) >= 2, requirement, got, _WAY_OUT)
    requirement = "filtered_resps to hold numbers below infinity, one of them finite"
    # NaN is not below infinity.
    fits = bool((likelihoods < np.inf).all() and likelihoods.max() > -np.inf)
    way_out = "remove the row, or find the cause, such as a model that has diverged"
    check(fits, requirement, f"{few([found])} {place}", way_out)
    return likelihoods


def _targets(
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[Sequence[str]],
    best: Sequence[int],
    places: Sequence[str],
) -> list[int]:
    """The indices of the correct answers, which a task gives as an index or as a text.

    A number may be the index of one answer and the text of another; the accuracies in the log decide.
    """
    targets = [str(row["target"]).strip() for row in rows]
    texts = [
        str(own.index(each)) if each in own else each
        for each, own in zip(targets, answers, strict=True)
    ]
    wrong: list[int] = []
    fitting: list[list[int]] = []
    for labels in (targets, texts):
        wrong = [
            place
            for place, (label, own) in enumerate(zip(labels, answers, strict=True))
            if label not in map(str, range(len(own)))
            or rows[place].get("acc", label == str(best[place]))
            != (label == str(best[place]))
        ]
        if not wrong:
            fitting.append([int(label) for label in labels])
    requirement = "the target to be the index or the text of the correct answer, in agreement with acc"
    place = wrong[0] if wrong else 0
    got = f"{targets[place]!r} {places[place]}"
    check(bool(fitting), requirement, got, _WAY_OUT)
    as_indices = fitting[0]
    as_texts = fitting[-1]
    differing = [
        place for place in range(len(rows)) if as_indices[place] != as_texts[place]
    ]
    place = differing[0] if differing else 0
    got = f"{targets[place]!r} {places[place]}, which is both"
    requirement = "the target to be the index of an answer or the text of one"
    way_out = "log the metric acc, which tells them apart"
    check(not differing, requirement, got, way_out)
    return as_indices
