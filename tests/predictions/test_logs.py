"""Logs of lm-evaluation-harness: read as the harness scores them, or refused with the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_calib import InputError
from hf_calib.predictions import Predictions, load_predictions, read_predictions
from tests.helpers.commands import call, called_for_json
from tests.helpers.places import GOLDEN
from tests.helpers.reports import quick_reports  # noqa: F401

# Written by lm-evaluation-harness 0.4.13, --log_samples, of a task with 3 or 4 answers and metrics acc and acc_norm.
HARNESS = GOLDEN / "logs" / "samples_animals.jsonl"
ROWS = [json.loads(line) for line in HARNESS.read_text().splitlines()]


def load(path: Path, option_scores: Any = "sum") -> Predictions:
    return read_predictions(path, option_scores=option_scores).predictions


def written(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("option_scores", "metric"), [("sum", "acc"), ("per_character", "acc_norm")]
)
def test_the_answers_are_right_where_the_harness_says(
    option_scores: str, metric: str
) -> None:
    found = load(HARNESS, option_scores)
    assert found.n_classes == 4
    right = found.probabilities().argmax(axis=1) == found.labels
    np.testing.assert_array_equal(right, [row[metric] == 1 for row in ROWS])
    few = np.array([len(row["doc"]["choices"]) == 3 for row in ROWS])
    assert few.any()
    np.testing.assert_array_equal(found.probabilities()[:, 3] == 0, few)
    np.testing.assert_allclose(found.probabilities().sum(axis=1), 1)


def test_the_sum_is_the_log_likelihood() -> None:
    values = np.array([float(value) for value, _ in ROWS[1]["filtered_resps"]])
    np.testing.assert_allclose(
        load(HARNESS).probabilities()[1], np.exp(values) / np.exp(values).sum()
    )


def test_bytes_and_targets_as_texts(tmp_path: Path) -> None:
    row = json.loads(json.dumps(ROWS[1])) | {
        "target": f"{ROWS[1]['doc']['choices'][2]} ",
        "acc": 0.0,
    }
    row["arguments"]["gen_args_0"]["arg_1"] = " ééé"
    found = load(written(tmp_path / "a.jsonl", row), "per_byte")
    assert found.labels.tolist() == [2]
    assert found.as_logits()[0, 0] == pytest.approx(
        float(row["filtered_resps"][0][0]) / 6
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"filtered_resps": ["a text"]},
            r"a log-likelihood for each of at least 2 answers, got .*in row 0",
        ),
        (
            {"filtered_resps": [*ROWS[0]["filtered_resps"], ["-1.0", "False"]]},
            r"log-likelihood for each .*, got .* for 3 answers in row 0",
        ),
        *(  # the last is another answer than the one acc says
            (
                {"target": target},
                rf"the target to be the index .* agreement with acc, got '{target}' in row 0",
            )
            for target in ("7", "3", "a whale", "1")
        ),
        *(
            ({"acc": acc}, rf"acc to be 0 or 1, got {got} in row 0 of a\.jsonl")
            for acc, got in ((None, "None"), (float("nan"), "nan"), ("1.0", "'1.0'"))
        ),
        *(
            (
                {"filtered_resps": [[value, False]] * len(ROWS[0]["filtered_resps"])},
                r"filtered_resps to hold numbers below .* in row 0 of a\.jsonl; remove",
            )
            for value in ("nan", float("nan"), "inf", "-inf")
        ),
    ],
)
def test_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load(written(tmp_path / "a.jsonl", ROWS[0] | change))


def test_rows_of_two_filters(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"each doc_id to be in one row, got 2 rows with 0 in .*; keep the rows of one filter",
    ):
        load(written(tmp_path / "a.jsonl", ROWS[0], ROWS[0]))


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([("3", 3, {"acc": 1.0}), ("2", 3, {"acc": 0.0})], [3, 2]),  # indices
        ([("3", 0, {"acc": 1.0}), ("2", 3, {"acc": 0.0})], [0, 1]),  # texts
    ],
)
def test_an_index_that_is_also_the_text_of_another_answer(
    rows: list[Any], labels: list[int], tmp_path: Path
) -> None:
    assert load(of_numbers(tmp_path, rows)).labels.tolist() == labels


@pytest.mark.parametrize("acc", [{}, {"acc": 0.0}])
def test_a_target_of_two_meanings_that_no_accuracy_tells_apart(
    acc: dict[str, float], tmp_path: Path
) -> None:
    """The labels of the other reading would be those of other answers."""
    message = r"the text of one, got '3' in row 0 of a.jsonl, which is both; log the metric acc"
    with pytest.raises(InputError, match=message):
        load(of_numbers(tmp_path, [("3", 1, acc)]))


def test_the_answers_of_sorted_keys_are_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    """gen_args_10 is before gen_args_2; lengths and texts would be those of other answers."""
    texts = ["zebra", *("a" * n for n in range(2, 13))]
    likelihoods = [[str(-1.0 - i), "False"] for i in range(12)]
    row = {
        "doc_id": 0,
        "arguments": {f"gen_args_{i}": {"arg_1": each} for i, each in enumerate(texts)},
        "filtered_resps": likelihoods,
        "target": texts[7],
    }
    in_order = load(written(tmp_path / "a.jsonl", row), "per_character")
    row["arguments"] = dict(sorted(row["arguments"].items()))
    found = load(written(tmp_path / "b.jsonl", row), "per_character")
    assert found.labels.tolist() == in_order.labels.tolist() == [7]
    np.testing.assert_array_equal(found.logits, in_order.logits)


def of_numbers(tmp_path: Path, rows: list[Any]) -> Path:
    """A log of a task whose answers are the numbers 3, 2, 1 and 4: (target, best answer, metrics) a row."""
    answers = {
        f"gen_args_{i}": {"arg_1": f" {each}"} for i, each in enumerate((3, 2, 1, 4))
    }
    lines = []
    for place, (target, best, acc) in enumerate(rows):
        likelihoods = [[str(-1.0 - (i != best)), "False"] for i in range(4)]
        row = {
            "doc_id": place,
            "arguments": answers,
            "filtered_resps": likelihoods,
            "target": target,
        }
        lines.append(row | acc)
    return written(tmp_path / "a.jsonl", *lines)


def test_a_byte_order_mark_and_a_line_separator_in_a_text(tmp_path: Path) -> None:
    line = json.dumps(ROWS[0] | {"doc": "one\u2028line"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f"{line}\n", encoding="utf-8-sig")
    np.testing.assert_array_equal(
        load(tmp_path / "a.jsonl").labels, load(HARNESS).labels[:1]
    )


def test_json_lines_of_a_table(tmp_path: Path) -> None:
    """Lines with the columns of a table are one, whatever else a line holds."""
    lists = [
        {"logits": [2.0, 0.5], "label": 0, "text": "a"},
        {"logits": [0.1, 1.5], "label": 1, "text": "b"},
    ]
    columns = [
        {"prob_no": 0.9, "prob_yes": 0.1, "label": "no"},
        {"prob_no": 1, "prob_yes": 0, "label": "no"},
    ]
    for rows, labels in ((lists, [0, 1]), (columns, [0, 0])):
        assert (
            load_predictions(written(tmp_path / "rows.jsonl", *rows)).labels.tolist()
            == labels
        )
    with pytest.raises(InputError, match=r"label_column to be one of x, got 'label'"):
        load(written(tmp_path / "b.jsonl", {"x": 1}))
    (tmp_path / "c.jsonl").write_text("{not json")
    with pytest.raises(
        InputError, match=r"c.jsonl to be readable as jsonl, got .*JSON"
    ):
        load(tmp_path / "c.jsonl")


def test_commands(tmp_path: Path) -> None:
    found = called_for_json("evaluate", HARNESS, "--option-scores", "per_character")
    assert (found["n_examples"], found["n_classes"]) == (12, 4)
    words = ("--method", "temperature", "--output", tmp_path / "out")
    assert call("calibrate", HARNESS, *words).exit_code == 0


def old_form(row: dict[str, Any]) -> dict[str, Any]:
    """A row as old versions of the harness wrote it: lists in place of dictionaries, and numbers."""
    pairs = [[each["arg_0"], each["arg_1"]] for each in row["arguments"].values()]
    likelihoods = [[float(value), False] for value, _ in row["filtered_resps"]]
    return row | {"arguments": pairs, "filtered_resps": likelihoods}


@pytest.mark.parametrize("as_list", [False, True])
def test_the_lists_of_old_versions(as_list: bool, tmp_path: Path) -> None:
    rows = [old_form(row) for row in ROWS]
    path = tmp_path / "a.jsonl"
    if as_list:
        path.write_text(json.dumps(rows, indent=4))
    else:
        written(path, *rows)
    for option_scores in ("sum", "per_character", "per_byte"):
        found = load(path, option_scores)
        wanted = load(HARNESS, option_scores)
        np.testing.assert_array_equal(found.labels, wanted.labels)
        np.testing.assert_array_equal(found.as_logits(), wanted.as_logits())


def as_dictionary(values: list[Any], name: str) -> dict[str, Any]:
    """Values by keys with numbers, of which the tenth is sorted before the second."""
    found = {f"{name}_{place}": each for place, each in enumerate(values)}
    return dict(sorted(found.items()))


def without_filter(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key != "filtered_resps"}
    return kept | {"resps": [[pair] for pair in row["filtered_resps"]]}


@pytest.mark.parametrize(
    "form",
    [
        lambda row: row | {"arguments": json.dumps(row["arguments"])},
        lambda row: row | {"filtered_resps": json.dumps(row["filtered_resps"])},
        lambda row: row | {"filtered_resps": [*map(json.dumps, row["filtered_resps"])]},
        lambda row: row | {"filtered_resps": as_dictionary(row["filtered_resps"], "r")},
        lambda row: old_form(row) | {"arguments": as_dictionary(pairs(row), "gen")},
        lambda row: old_form(row) | {"arguments": json.dumps(pairs(row))},
        without_filter,
        lambda row: without_filter(old_form(row)),
        lambda row: without_filter(row) | {"resps": json.dumps(repeated(row))},
        lambda row: without_filter(row) | {"resps": as_dictionary(repeated(row), "r")},
    ],
)
def test_every_form_that_was_written(form: Any, tmp_path: Path) -> None:
    """A dictionary, a list, or either as JSON in a text, of filtered responses or all of them."""
    path = written(tmp_path / "a.jsonl", *map(form, ROWS))
    for option_scores in ("sum", "per_character"):
        found = load(path, option_scores)
        wanted = load(HARNESS, option_scores)
        np.testing.assert_array_equal(found.labels, wanted.labels)
        np.testing.assert_array_equal(found.as_logits(), wanted.as_logits())


def pairs(row: dict[str, Any]) -> list[list[str]]:
    """The context and the answer, for each answer."""
    return [[each["arg_0"], each["arg_1"]] for each in row["arguments"].values()]


def repeated(row: dict[str, Any]) -> list[list[Any]]:
    """The responses of a model that is asked once."""
    return [[pair] for pair in row["filtered_resps"]]


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": "[[1"},
        {"filtered_resps": "[[1"},
        {"filtered_resps": "5"},
        {"arguments": [["Which?"], ["Which?"]]},
        {"arguments": "a text"},
        {"arguments": {"gen_args_0": {"arg_0": "Which?"}}},
        {"arguments": 3},
        {"arguments": None},
        {"filtered_resps": 3},
        {"filtered_resps": [{"a": 1}, {"b": 2}]},
        {"filtered_resps": None},
    ],
)
def test_rows_of_another_form_are_named(change: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS[0], {**ROWS[1], **change})
    with pytest.raises(
        InputError, match=r"in row 1 of a\.jsonl; log a multiple-choice"
    ):
        load(path)


def test_a_row_that_is_no_row_of_a_log(tmp_path: Path) -> None:
    for other in ({"doc_id": 1}, [1], "text"):
        path = written(tmp_path / "a.jsonl", ROWS[0], other)
        with pytest.raises(
            InputError,
            match=r"each row of a log to have arguments, .* in row 1 of a\.jsonl",
        ):
            load(path)
