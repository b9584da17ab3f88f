"""Several labels per row: every layout gives the same lists of ids, and what is no label is refused with its row."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_calib.data import (
    choose_columns,
    draw_test,
    label_maps,
    multi_hot,
    split_calibration,
)

NAMES = ["joy", "fear", "anger"]
IDS = [[0, 2], [1], [], [2]]
OF_CLASS_LABELS = Features(
    {"text": Value("string"), "label": datasets.Sequence(ClassLabel(names=NAMES))}
)
ON = {"fear": [False, True, False, False], "anger": [1.0, 0.0, 0.0, 1.0]}


def splits(columns: dict[str, Any], features: Features | None = None) -> DatasetDict:
    rows = Dataset.from_dict({"text": list("abcd"), **columns}, features=features)
    return DatasetDict({"train": rows, "test": rows})


def chosen(dataset: DatasetDict, **options: Any) -> DatasetDict:
    return choose_columns(dataset, text_column="text", multi_label=True, **options)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (splits({"label": IDS}, OF_CLASS_LABELS), {}),
        (splits({"label": IDS}), {"class_names": NAMES}),
        (
            splits({"label": [[NAMES[i] for i in row] for row in IDS]}),
            {"class_names": NAMES},
        ),
        (
            splits({"label": ["0 2", "1", "", "2"]}),
            {"class_names": NAMES, "label_separator": " "},
        ),
        (
            splits({"label": ["joy| anger", "fear", "none", "anger|anger"]}),
            {"class_names": NAMES, "label_separator": "|", "no_label": "none"},
        ),
        (splits({"joy": [1, 0, 0, 0], **ON}), {"label_columns": NAMES}),
        (splits({"joy": ["1", "0", "0", "0"], **ON}), {"label_columns": NAMES}),
    ],
)
def test_each_layout_gives_the_same_lists(
    dataset: DatasetDict, options: dict[str, Any]
) -> None:
    found = chosen(dataset, **options)
    for split in found.values():
        assert split.features["label"].feature.names == NAMES
        assert split["label"][:] == IDS
    maps = label_maps(found)
    assert maps["problem_type"] == "multi_label_classification"
    assert maps["id2label"] == {0: "joy", 1: "fear", 2: "anger"}
    floats = multi_hot(found)["train"]
    assert floats["label"][:] == [
        [1.0, 0.0, 1.0],
        [0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 1.0],
    ]
    assert floats.features["label"].feature.dtype == "float32"
    assert floats["text"][:] == list("abcd")


def test_names_that_the_data_do_not_give_are_those_of_train_in_order() -> None:
    by_name = chosen(splits({"label": ["b|a", "", "c", "a"]}), label_separator="|")
    assert label_maps(by_name)["id2label"] == {0: "a", 1: "b", 2: "c"}
    by_id = chosen(splits({"label": [[2, 0], [1], [], [0]]}))
    assert label_maps(by_id)["id2label"] == {0: "0", 1: "1", 2: "2"}


def test_one_class_a_row_stays_as_it_was_and_has_no_options_of_several() -> None:
    dataset = splits({"label": ["a", "b", "a", "b"]})
    one = choose_columns(dataset, text_column="text")
    assert "problem_type" not in label_maps(one)
    assert multi_hot(one)["train"].features == one["train"].features
    with pytest.raises(
        ValueError,
        match="the data to have several labels per row, got one class per row",
    ):
        choose_columns(dataset, text_column="text", label_separator="|")


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (
            ["joy", "fear|joyy", "", "joyy"],
            {"class_names": NAMES, "label_separator": "|"},
            r"labels of split 'train' to hold the classes \(joy, fear, anger\), got 'joyy' in row 1;",
        ),
        ([[0], [1], [5], []], {}, "count from 0 without gaps, got 0, 1, 5"),
        (["a b", "b", "", "a"], {}, "label_separator to be given"),
        ([[0], None, [1], []], {}, r"1 without \(first in row 1\)"),
        ([[0], [1], [0, -1], []], {}, "to be names or ids, got -1 in row 2"),
        ([[0], [1], [], [-2]], {}, "to be names or ids, got -2 in row 3"),
        ([["a"], ["b", None], [], []], {}, "to be names or ids, got None in row 1"),
        (
            [[1, 0], [1, 0, 0], [0, 1], [0]],
            {},
            "ids, each once a row, got 1, 0, 0 in row 1; .* label_col",
        ),
        (
            ["0 0 1", "1 0 0", "", "0 0 0"],
            {"label_separator": " "},
            "got 0, 0, 1 in row 0",
        ),
        (
            [0, 1, 0, -1],
            {"label_columns": ["label"]},
            "'label' to hold 0 or 1 in split 'train', got -1 in row 3",
        ),
        ([0, 1, 0, 1], {"label_columns": ["b"]}, "the column to read from .* got 'b'"),
        (
            [["a"], ["a "], [], []],
            {"class_names": ["a", "a"]},
            "be at least one, and differ",
        ),
    ],
)
def test_what_is_no_label_is_refused_with_its_row(
    labels: list, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(splits({"label": labels}), **options)


def test_names_may_order_the_columns_of_the_labels_and_not_rename_them() -> None:
    columns = {"label_columns": NAMES}
    dataset = splits({"joy": [1, 0, 0, 0], **ON})
    found = chosen(dataset, class_names=["anger", "joy", "fear"], **columns)
    assert found["train"]["label"][:] == [[0, 1], [2], [], [0]]
    message = (
        r"class_names to be the label_columns \(joy, fear, anger\), got joy, fear, rage"
    )
    with pytest.raises(ValueError, match=message):
        chosen(dataset, class_names=["joy", "fear", "rage"], **columns)


def test_splits_are_drawn_at_random_and_keep_text_and_labels_together() -> None:
    labels = [
        [i % 3] * (i % 2) + [2] * (i == 7) for i in range(40)
    ]  # one label in one row only, and empty rows
    rows = Dataset.from_dict({"text": [str(i) for i in range(40)], "label": labels})
    whole = chosen(DatasetDict({"train": rows}))
    drawn = split_calibration(draw_test(whole, size=10, seed=1), size=0.5, seed=1)
    assert {name: len(split) for name, split in drawn.items()} == {
        "train": 15,
        "test": 10,
        "calibration": 15,
    }
    found = {
        int(text): ids
        for split in drawn.values()
        for text, ids in zip(split["text"], split["label"], strict=True)
    }
    assert found == {i: sorted(set(ids)) for i, ids in enumerate(labels)}
    assert (
        draw_test(whole, size=10, seed=1)["test"]["text"][:] == drawn["test"]["text"][:]
    )
