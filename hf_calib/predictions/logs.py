"""Predictions that other tools have logged: readers, each known by what its lines hold."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hf_calib._errors import InputValueError, did_you_mean, expected, few
from hf_calib.predictions.predictions import Predictions

SUFFIXES = (".jsonl", ".json")
OptionScores = Literal["sum", "per_character", "per_byte"]
OPTION_SCORES: tuple[OptionScores, ...] = ("sum", "per_character", "per_byte")


@dataclass(frozen=True)
class LogOptions:
    """How a log is read.

    Args:
        label_column: the key of the label, where the tool has none of its own.
        option_scores: of answers with several tokens: the log-likelihood of the whole answer ("sum", lm-eval's acc), or
            of a character or byte of it ("per_character", acc_norm; "per_byte", acc_bytes).
        label_tokens: label -> the tokens that stand for it, for log-probabilities of a next token.
    """

    label_column: str = "label"
    option_scores: OptionScores = "sum"
    label_tokens: Mapping[str, Sequence[str]] | None = None


class _Rows(NamedTuple):
    """The scores of a log's rows, label -> logit, and their labels."""

    scores: list[dict[str, float]]
    labels: list[str]
    names: tuple[str, ...] | None = None


def is_log(source: str) -> bool:
    """Whether a name means the file of a log, and not one of JSON lines with a table's columns."""
    path = Path(source)
    if path.suffix.lower() not in SUFFIXES or not os.path.isfile(path):
        return False
    if path.suffix.lower() == ".json":
        return True
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return True  # whose reading says what is wrong
    of_tables = ("logit_", "prob_", "logits", "probs", "probabilities")
    return not isinstance(first, dict) or not any(str(key).startswith(of_tables) for key in first)


def load_log(path: str | os.PathLike[str], options: LogOptions = LogOptions()) -> Predictions:
    """Read the predictions that another tool has logged with their labels.

    Known are, by what the lines of a .jsonl file or the list of a .json file hold:

    - sample logs of lm-evaluation-harness (``--log_samples``), multiple choice;
    - outputs of a pipeline of transformers, lists of label and score for all labels (``top_k=None``), beside a label;
    - responses of vLLM or OpenAI with ``top_logprobs`` of the first token, beside a label, with `label_tokens`.

    Args:
        path: of the file.
        options: how it is read.

    Raises:
        ValueError: if it is none of these, or a row lacks what is read: the message names it.
    """
    rows = _read(Path(path))
    for _, holds, read in _READERS:
        if holds(rows[0], options):
            found = read(rows, options)
            return _predictions(found, Path(path).name)
    got = f"{few(sorted(map(str, rows[0])))} in {Path(path).name}"
    way_out = f"known are {', '.join(name for name, *_ in _READERS)}; or write a csv file with prob_<class> and label"
    raise InputValueError(expected("the first row", "be of a log that is known", got, way_out))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        # Without the byte order mark that some editors write.
        text = path.read_text(encoding="utf-8-sig")
        found = json.loads(text) if path.suffix.lower() == ".json" else None
        if found is None:
            # Not splitlines, which also ends a line at a U+2028 within a text.
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        got, way_out = f"{path.name} ({error})", "write one JSON object a line, or a list of them"
        raise InputValueError(expected("the log", "be readable as JSON", got, way_out)) from error
    rows = found if isinstance(found, list) else [found]
    if not rows or not all(isinstance(row, dict) for row in rows):
        got = "none" if not rows else "others"
        raise InputValueError(
            expected("the log", "hold objects", f"{got} in {path.name}", "write one JSON object a line")
        )
    return rows


def _predictions(rows: _Rows, name: str) -> Predictions:
    """Rows as a matrix; a label that a row has no score for has probability 0 there."""
    names = rows.names or tuple(sorted({label for row in rows.scores for label in row}, key=_in_order))
    number = {label: i for i, label in enumerate(names)}
    logits = np.full((len(rows.scores), len(names)), -np.inf)
    for logit, row in zip(logits, rows.scores, strict=True):
        for label, score in row.items():
            logit[number[label]] = score
    for place, label in enumerate(rows.labels):
        if label not in number:
            way_out = did_you_mean(label, names)
            got = f"{label!r} in row {place} of {name}"
            raise InputValueError(expected("the label", f"be one of {few(names)}", got, way_out))
    labels = np.array([number[label] for label in rows.labels], dtype=np.int64)
    return Predictions(labels, logits=logits, class_names=names)


def _in_order(label: str) -> tuple[str, int]:
    """Numbers at the end of a name, LABEL_2 and LABEL_10, by their size."""
    start = label.rstrip("0123456789")
    return start, int(label[len(start) :] or 0)


def _harness(rows: list[dict[str, Any]], options: LogOptions) -> _Rows:
    scores, options_of = [], []
    seen = set()
    for place, row in enumerate(rows):
        key = (row.get("doc_id"), row.get("filter"))
        if row.get("doc_id") in seen:
            got, way_out = f"{key[0]} twice (filter {key[1]!r})", "keep the rows of one filter"
            raise InputValueError(expected("doc_id", "be there once", got, way_out))
        seen.add(row.get("doc_id"))
        answers = [str(argument["arg_1"]).strip() for argument in row["arguments"].values()]
        found = row["filtered_resps"]
        try:
            likelihoods = [float(each[0]) for each in found]
        except (TypeError, ValueError, IndexError):
            likelihoods = []
        if not len(likelihoods) == len(answers) >= 2:
            got = f"{few(found)} for {len(answers)} answers in row {place}"
            way_out = "log a multiple-choice task"
            requirement = "hold a log-likelihood for each of at least 2 answers"
            raise InputValueError(expected("filtered_resps", requirement, got, way_out))
        lengths = {
            "sum": [1] * len(answers),
            "per_character": [len(answer) for answer in answers],
            "per_byte": [len(answer.encode()) for answer in answers],
        }[options.option_scores]
        scores.append(
            {str(i): value / max(n, 1) for i, (value, n) in enumerate(zip(likelihoods, lengths, strict=True))}
        )
        best = max(range(len(answers)), key=likelihoods.__getitem__)
        options_of.append((answers, best))
    return _Rows(scores, _targets(rows, options_of))


def _targets(rows: list[dict[str, Any]], options_of: list[tuple[list[str], int]]) -> list[str]:
    """The indices of the right answers, which a task names by their index or by their text.

    A number may be both, the index of one answer and the text of another. The accuracies in the log decide.
    """
    targets = [str(row["target"]).strip() for row in rows]
    texts = [
        str(answers.index(target)) if target in answers else target
        for target, (answers, _) in zip(targets, options_of, strict=True)
    ]
    for labels in (targets, texts):
        if all(map(_is_target, labels, rows, options_of)):
            return labels
    place = list(map(_is_target, targets, rows, options_of)).index(False)
    got, way_out = f"{targets[place]!r} in row {place}", "log a multiple-choice task"
    requirement = "be the index or the text of the right answer, as acc says"
    raise InputValueError(expected("the target", requirement, got, way_out))


def _is_target(label: str, row: Mapping[str, Any], options: tuple[list[str], int]) -> bool:
    """Whether a label can be the index of the right answer, by the row's accuracy."""
    answers, best = options
    right = label == str(best)
    return label in map(str, range(len(answers))) and row.get("acc", right) == right


def _outputs_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The list of label and score in a row, wherever it is."""
    for value in row.values():
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = value[0]  # of a batch of one
        if (
            isinstance(value, list)
            and value
            and all(isinstance(each, dict) and {"label", "score"} <= each.keys() for each in value)
        ):
            return value
    return None


def _pipeline(rows: list[dict[str, Any]], options: LogOptions) -> _Rows:
    scores, labels = [], []
    for place, row in enumerate(rows):
        found = _outputs_of(row)
        shares = {str(each["label"]): float(each["score"]) for each in found or ()}
        total, least = math.fsum(shares.values()), min(shares.values(), default=0.0)
        if least < 0 or not abs(total - 1) <= 1e-3:
            got = f"{least if least < 0 else total:.4g} in row {place}"
            requirement, way_out = "be probabilities that sum to 1", "call the pipeline with top_k=None"
            raise InputValueError(expected("the scores of all labels", requirement, got, way_out))
        scores.append({label: _log(share) for label, share in shares.items()})
        labels.append(_label_of(row, options, place))
    return _Rows(scores, labels)


def _label_of(row: Mapping[str, Any], options: LogOptions, place: int) -> str:
    if options.label_column not in row:
        got, way_out = (
            f"{few(list(row))} in row {place}",
            "write the label beside the output, or name its key",
        )
        raise InputValueError(expected("each row", f"have the key {options.label_column!r}", got, way_out))
    return str(row[options.label_column])


def _top_logprobs(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Tokens with log-probabilities of the first token, in a row or in an object in it."""
    for each in (row, *(value for value in row.values() if isinstance(value, dict))):
        choices = each.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            found = choices[0].get("logprobs") or {}
            if found.get("content"):
                return list(found["content"][0].get("top_logprobs", ()))
            if isinstance(found.get("top_logprobs"), list) and found["top_logprobs"]:  # of completions
                return [{"token": token, "logprob": p} for token, p in found["top_logprobs"][0].items()]
    return None


def _next_token(rows: list[dict[str, Any]], options: LogOptions) -> _Rows:
    if options.label_tokens is None:
        way_out = 'name them: --label-tokens \'{"yes": ["Yes", " yes"], "no": ["No", " no"]}\''
        raise InputValueError(expected("label_tokens", "say which tokens are which label", "none", way_out))
    tokens: dict[str, str] = {}
    for label, all_of in options.label_tokens.items():
        for token in all_of:
            if tokens.setdefault(token, label) != label:
                got, way_out = f"{token!r} for {tokens[token]} and {label}", "leave it out of one of them"
                raise InputValueError(expected("label_tokens", "have each token in one label", got, way_out))
    scores, labels = [], []
    for place, row in enumerate(rows):
        shares = dict.fromkeys(options.label_tokens, 0.0)
        for each in _top_logprobs(row) or ():
            if each["token"] in tokens:
                shares[tokens[each["token"]]] += math.exp(float(each["logprob"]))
        if not any(shares.values()):
            got = f"{few([repr(each['token']) for each in _top_logprobs(row) or ()])} in row {place}"
            way_out = "ask for more top_logprobs, or add the tokens that are there"
            raise InputValueError(expected("top_logprobs", "hold a token of a label", got, way_out))
        scores.append({label: _log(share) for label, share in shares.items()})
        labels.append(_label_of(row, options, place))
    return _Rows(scores, labels, tuple(options.label_tokens))


def _log(share: float) -> float:
    return math.log(max(share, float(np.finfo(np.float32).tiny)))


_HARNESS = {"doc_id", "arguments", "filtered_resps", "target"}
_READERS: tuple[tuple[str, Callable[..., bool], Callable[..., _Rows]], ...] = (
    (
        "lm-evaluation-harness",
        lambda row, options: row.keys() >= _HARNESS,
        _harness,
    ),
    ("vLLM and OpenAI", lambda row, options: _top_logprobs(row) is not None, _next_token),
    ("pipelines", lambda row, options: _outputs_of(row) is not None, _pipeline),
)
