"""Sample logs of lm-evaluation-harness, multiple choice, as predictions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

import numpy as np

from hf_calib._errors import check, few
from hf_calib.predictions.predictions import Predictions

OptionScores = Literal["sum", "per_character", "per_byte"]
_KEYS = {"doc_id", "arguments", "filtered_resps", "target"}
_WAY_OUT = "log a multiple-choice task"


def is_log(file: TextIO) -> bool:
    """Whether the first line of a file is a row of such a log."""
    try:
        row = json.loads(next((line for line in file if line.strip()), "null"))
    except ValueError:
        return False
    return isinstance(row, dict) and row.keys() >= _KEYS


def read_log(file: TextIO, name: str, scores: OptionScores = "sum") -> Predictions:
    """The log-likelihoods of a log's answers as logits, see `open_predictions`, and the right ones as labels."""
    rows = [json.loads(line) for line in file if line.strip()]
    times = Counter(str(row["doc_id"]) for row in rows).most_common(1)
    got = f"{times[0][1]} rows with {times[0][0]} in {name}"
    check(times[0][1] == 1, "doc_id to be there once", got, "keep the rows of one filter")
    answers = [[str(each["arg_1"]).strip() for each in row["arguments"].values()] for row in rows]
    likelihoods = [_likelihoods(*each) for each in zip(rows, answers, range(len(rows)), strict=True)]
    # A question with fewer answers gives the missing ones probability 0.
    logits = np.full((len(rows), max(map(len, answers))), -np.inf)
    lengths = {"sum": lambda text: 1, "per_character": len, "per_byte": lambda text: len(text.encode())}
    for own, texts, values in zip(logits, answers, likelihoods, strict=True):
        own[: len(texts)] = values / np.array([max(lengths[scores](text), 1) for text in texts])
    best = [int(values.argmax()) for values in likelihoods]
    names = tuple(map(str, range(logits.shape[1])))
    return Predictions(np.array(_targets(rows, answers, best)), logits=logits, class_names=names)


def _likelihoods(row: Mapping[str, Any], answers: Sequence[str], place: int) -> np.ndarray:
    found = row["filtered_resps"]
    try:
        likelihoods = np.array([float(each[0]) for each in found])
    except (TypeError, ValueError, IndexError):
        likelihoods = np.empty(0)
    requirement = "filtered_resps to hold a log-likelihood for each of at least 2 answers"
    got = f"{few(found)} for {len(answers)} answers in row {place}"
    check(len(likelihoods) == len(answers) >= 2, requirement, got, _WAY_OUT)
    return likelihoods


def _targets(
    rows: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[str]], best: Sequence[int]
) -> list[int]:
    """The places of the right answers, which a task names by their place or by their text.

    A number may be both, the place of one answer and the text of another. The accuracies in the log decide.
    """
    targets = [str(row["target"]).strip() for row in rows]
    texts = [
        str(own.index(each)) if each in own else each for each, own in zip(targets, answers, strict=True)
    ]
    wrong: list[int] = []
    for labels in (targets, texts):
        wrong = [
            place
            for place, (label, own) in enumerate(zip(labels, answers, strict=True))
            if label not in map(str, range(len(own)))
            or rows[place].get("acc", label == str(best[place])) != (label == str(best[place]))
        ]
        if not wrong:
            return [int(label) for label in labels]
    requirement = "the target to be the index or the text of the right answer, as acc says"
    check(not wrong, requirement, f"{targets[wrong[0]]!r} in row {wrong[0]}", _WAY_OUT)
    return []
