"""Sample logs of lm-evaluation-harness, whose answers are classes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import check, few
from hf_calib.metrics.checks import FloatArray
from hf_calib.predictions.predictions import Predictions

OptionScores = Literal["sum", "per_character", "per_byte"]
_KEYS = {"doc_id", "arguments", "target"}
# The log-likelihoods after a filter, or as the model gave them.
_RESPONSES = ("filtered_resps", "resps")
_WAY_OUT = "log a multiple-choice task"


def rows_of_log(file: TextIO) -> list[Any] | None:
    """The rows of a log of lm-evaluation-harness, in lines or a list; None for other files."""
    # The first line decides, so that a large table is not parsed here.
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
    is_object = isinstance(row, dict) and row.keys() >= _KEYS
    return is_object and any(name in row for name in _RESPONSES)


@dataclass(frozen=True)
class _Question:
    """A row of a log."""

    # The place in messages.
    place: str
    answers: Sequence[str]
    # The log-likelihoods of the answers, as natural logarithms.
    likelihoods: FloatArray
    # The index of the correct answer, or its text.
    target: str
    # 1 if the likeliest answer is correct; None if the log does not say.
    accuracy: Any

    @property
    def index(self) -> int | None:
        """The index of the correct answer if the target is one."""
        indices = map(str, range(len(self.answers)))
        return int(self.target) if self.target in indices else None

    @property
    def index_of_text(self) -> int | None:
        """The index of the correct answer if the target is its text, or else an index."""
        is_text = self.target in self.answers
        return self.answers.index(self.target) if is_text else self.index

    def agrees(self, label: int | None) -> bool:
        """Whether there is such an answer, and the log says the same of the likeliest one."""
        is_right = label == self.likelihoods.argmax()
        return label is not None and self.accuracy in (None, is_right)


def read_log(rows: list[Any], name: str, scores: OptionScores = "sum") -> Predictions:
    """Return the log-likelihoods of a log's answers as logits (see `read_predictions`),
    and the labels.
    """
    questions = []
    for number, row in enumerate(rows):
        questions.append(_question(row, f"in row {number} of {name}"))
    # With several filters, the harness logs each question once for each of them.
    doc_id, times = Counter(str(row["doc_id"]) for row in rows).most_common(1)[0]
    got = f"{times} rows with {doc_id} in {name}"
    way_out = "keep the rows of one filter"
    check(times == 1, "each doc_id to be in one row", got, way_out)
    n_classes = max(len(each.answers) for each in questions)
    # If a question has fewer answers, the missing ones have probability 0.
    logits = np.full((len(questions), n_classes), -np.inf)
    for own, each in zip(logits, questions, strict=True):
        lengths = [_length(answer, scores) for answer in each.answers]
        own[: len(lengths)] = each.likelihoods / np.array(lengths)
    names = tuple(map(str, range(n_classes)))
    return Predictions(_labels(questions), logits=logits, class_names=names)


def _length(answer: str, scores: OptionScores) -> int:
    """The number by which the log-likelihood of an answer is divided."""
    if scores == "sum":
        return 1
    # The log-likelihood of an empty answer is divided by 1, not by 0.
    return max(len(answer if scores == "per_character" else answer.encode()), 1)


def _question(row: Any, place: str) -> _Question:
    names = ", ".join([*sorted(_KEYS), _RESPONSES[0]])
    requirement = f"each row of a log to have {names}"
    check(_is_row(row), requirement, f"{few([row])} {place}", "write the log again")
    accuracy = row.get("acc")
    is_known = "acc" not in row or accuracy in (0, 1)
    way_out = "evaluate the task again"
    check(is_known, "acc to be 0 or 1", f"{accuracy!r} {place}", way_out)
    answers = _answers(row["arguments"], place)
    name = next(each for each in _RESPONSES if each in row)
    likelihoods = _likelihoods(row[name], name, len(answers), place)
    target = str(row["target"]).strip()
    return _Question(place, answers, likelihoods, target, accuracy)


def _answers(arguments: Any, place: str) -> list[str]:
    """The answers, each in a pair of context and answer."""
    try:
        texts = [_answer(pair) for pair in _in_order(arguments)]
    except (TypeError, ValueError, LookupError, RecursionError):
        texts = []
    requirement = "arguments to hold a context and an answer for each answer"
    check(bool(texts), requirement, f"{few([arguments])} {place}", _WAY_OUT)
    return [str(text).strip() for text in texts]


def _answer(pair: Any) -> Any:
    """The answer of a pair, whose context may be left out where they have names."""
    return pair["arg_1"] if isinstance(pair, dict) else _in_order(pair)[1]


def _in_order(values: Any) -> list[Any]:
    """The values of a list, of a dictionary whose keys end in numbers, or of either as JSON:
    versions of the harness, and datasets made of its logs, have all of them.
    """
    if isinstance(values, str):
        values = json.loads(values)
    if isinstance(values, dict):
        # A log with sorted keys has gen_args_10 before gen_args_2,
        # but its log-likelihoods in order.
        return [values[key] for key in sorted(values, key=_number_at_the_end)]
    return list(values)


def _number_at_the_end(key: str) -> int:
    """The number of gen_args_2 and the like; 0 without one."""
    digits = re.search(r"\d+$", key, re.ASCII)
    return 0 if digits is None else int(digits.group())


def _likelihoods(found: Any, name: str, n_answers: int, place: str) -> FloatArray:
    """The log-likelihoods of the answers, each in a pair with whether it is the likeliest text;
    `resps` has a list of such pairs for each answer, one for each repetition.
    """
    try:
        pairs = [_in_order(each) for each in _in_order(found)]
        if name == "resps":
            pairs = [_in_order(each[0]) for each in pairs]
        likelihoods = np.array([float(pair[0]) for pair in pairs])
    except (TypeError, ValueError, LookupError, RecursionError):
        likelihoods = np.empty(0)
    got = f"{few([found])} for {n_answers} answers {place}"
    requirement = f"{name} to hold a log-likelihood for each of at least 2 answers"
    check(len(likelihoods) == n_answers >= 2, requirement, got, _WAY_OUT)
    requirement = f"{name} to hold numbers below infinity, one of them finite"
    # NaN is not below infinity.
    fits = bool((likelihoods < np.inf).all() and likelihoods.max() > -np.inf)
    way_out = "remove the row, or find the cause, such as a model that has diverged"
    check(fits, requirement, f"{few([found])} {place}", way_out)
    return likelihoods


def _labels(questions: Sequence[_Question]) -> NDArray[np.int64]:
    """The indices of the correct answers, which a task gives as an index or as a text.

    A number may be the index of one answer and the text of another; the accuracies in the log
    decide.
    """
    as_indices = [each.index for each in questions]
    as_texts = [each.index_of_text for each in questions]
    fitting = []
    wrong = questions[0]
    for labels in (as_indices, as_texts):
        pairs = zip(questions, labels, strict=True)
        others = [each for each, label in pairs if not each.agrees(label)]
        if others:
            wrong = others[0]
        else:
            fitting.append(labels)
    requirement = "the target to be the index or the text of the correct answer, in agreement with acc"
    check(bool(fitting), requirement, f"{wrong.target!r} {wrong.place}", _WAY_OUT)
    twofold = [each for each in questions if each.index != each.index_of_text]
    first = (twofold or questions)[0]
    got = f"{first.target!r} {first.place}, which is both"
    requirement = "the target to be the index of an answer or the text of one"
    way_out = "log the metric acc, which tells them apart"
    check(len(fitting) == 1 or not twofold, requirement, got, way_out)
    return np.array(fitting[0])
