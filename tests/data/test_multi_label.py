"""Several labels a row: every layout gives the same lists of ids, and what is no label is refused with its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_calib.data import (
    DataArguments,
    choose_columns,
    collate_images,
    draw_test,
    label_maps,
    load_data,
    multi_hot,
    split_calibration,
)

NAMES = ["joy", "fear", "anger"]
IDS = [[0, 2], [1], [], [2]]
NAMED = [[NAMES[i] for i in row] for row in IDS]
OF_CLASS_LABELS = Features(
    {"text": Value("string"), "label": datasets.Sequence(ClassLabel(names=["joy", "fear", "anger"]))}
)


def splits(columns: dict[str, Any], features: Features | None = None) -> DatasetDict:
    rows = Dataset.from_dict({"text": list("abcd"), **columns}, features=features)
    return DatasetDict({"train": rows, "test": rows})


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (splits({"label": IDS}, OF_CLASS_LABELS), {}),
        (splits({"label": IDS}), {"class_names": NAMES}),
        (splits({"label": NAMED}), {"class_names": NAMES}),
        (splits({"label": ["0 2", "1", "", "2"]}), {"class_names": NAMES, "label_separator": " "}),
        (
            splits({"label": ["joy| anger", "fear", "none", "anger|anger"]}),
            {"class_names": NAMES, "label_separator": "|", "no_label": "none"},
        ),
        (
            splits({"joy": [1, 0, 0, 0], "fear": [False, True, False, False], "anger": [1.0, 0.0, 0.0, 1.0]}),
            {"label_columns": NAMES},
        ),
        (
            splits({"joy": ["1", "0", "0", "0"], "fear": [0, 1, 0, 0], "anger": [1, 0, 0, 1]}),
            {"label_columns": NAMES},
        ),
    ],
)
def test_each_layout_gives_the_same_lists(dataset: DatasetDict, options: dict[str, Any]) -> None:
    chosen = choose_columns(dataset, text_column="text", multi_label=True, **options)
    for split in chosen.values():
        assert split.features["label"].feature.names == NAMES
        assert split["label"][:] == IDS
    maps = label_maps(chosen)
    assert maps["problem_type"] == "multi_label_classification"
    assert maps["id2label"] == {0: "joy", 1: "fear", 2: "anger"}
    floats = multi_hot(chosen)["train"]
    assert floats["label"][:] == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert floats.features["label"].feature.dtype == "float32"
    assert floats["text"][:] == list("abcd")


def test_names_that_the_data_do_not_give_are_those_of_train_in_order() -> None:
    chosen = choose_columns(
        splits({"label": ["b|a", "", "c", "a"]}), text_column="text", multi_label=True, label_separator="|"
    )
    assert label_maps(chosen)["id2label"] == {0: "a", 1: "b", 2: "c"}
    by_id = choose_columns(splits({"label": [[2, 0], [1], [], [0]]}), text_column="text", multi_label=True)
    assert label_maps(by_id)["id2label"] == {0: "0", 1: "1", 2: "2"}


def test_one_class_a_row_stays_as_it_was() -> None:
    chosen = choose_columns(splits({"label": [0, 1, 0, 1]}), text_column="text")
    assert "problem_type" not in label_maps(chosen)
    assert multi_hot(chosen)["train"].features == chosen["train"].features


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"label": ["joy", "fear|joyy", "", "joyy"]},
            {"class_names": NAMES, "label_separator": "|"},
            r"labels of split 'train' to be among joy, fear, anger, got 'joyy' in row 1 \(2 such rows\)",
        ),
        ({"label": [[0], [1], [2], [3]]}, {"class_names": NAMES}, r"got '3' in row 3 \(1 such rows\)"),
        ({"label": [[0], [1], [5], []]}, {}, "count from 0 without gaps, got 0, 1, 5"),
        ({"label": ["a b", "b", "", "a"]}, {}, "label_separator to be given"),
        ({"label": ["ab", "b", "", "a"]}, {"label_separator": ""}, "label_separator to be given"),
        ({"label": [[0], [1], [], []]}, {"label_columns": []}, "label_columns to name a column, got none"),
        ({"label": [[0], None, [1], []]}, {}, r"1 without \(first in row 1\)"),
        ({"label": [["a"], ["b", None], [], []]}, {}, "None in row 1"),
        ({"label": [[0], [1], [0, -1], []]}, {}, "to be names or ids, got -1 in row 2"),
        ({"label": [0, 1, -1, 0]}, {}, "to be names or ids, got -1 in row 2"),
        (
            {"label": [[1, 0], [1, 0, 0], [0, 1], [0]]},
            {},
            "ids, each once a row, got 1, 0, 0 in row 1; .* label_col",
        ),
        ({"label": ["0 0 1", "1 0 0", "", "0 0 0"]}, {"label_separator": " "}, "got 0, 0, 1 in row 0"),
        (
            {"a": [0, 1, 0, -1]},
            {"label_columns": ["a"]},
            "'a' to hold 0 or 1 in split 'train', got -1 in row 3",
        ),
        ({"a": ["0", "1", "", "1"]}, {"label_columns": ["a"]}, "0 or 1 in split 'train', got '' in row 2"),
        ({"a": ["0", "1", "yes", "1"]}, {"label_columns": ["a"]}, "got 'yes' in row 2"),
        ({"a": [0, 1, 0, 1]}, {"label_columns": ["b"]}, "the column to read from .* got 'b'"),
        ({"label": [["a"], ["a "], [], []]}, {"class_names": ["a", "a"]}, "be at least one, and differ"),
        (
            {"a": [0, 1, 0, 1]},
            {"label_columns": ["a"], "class_names": NAMES},
            "among joy, .* got 'a' in row 1",
        ),
    ],
)
def test_what_is_no_label_is_refused_with_its_row(
    columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_columns(splits(columns), text_column="text", multi_label=True, **options)


def test_withheld_labels_and_other_columns_are_refused() -> None:
    dataset = splits({"label": [[0], [-1], [], []]}, OF_CLASS_LABELS)
    with pytest.raises(ValueError, match="labels of split 'train' to be names or ids, got -1 in row 1"):
        choose_columns(dataset, text_column="text", multi_label=True)
    with pytest.raises(TypeError, match="column 'label' to hold lists of labels, or texts with a separator"):
        choose_columns(splits({"label": [0.5, 0.1, 0.2, 0.3]}), text_column="text", multi_label=True)


def test_options_of_several_labels_need_it() -> None:
    dataset = splits({"label": ["a", "b", "a", "b"]})
    with pytest.raises(
        ValueError, match="expected the data to have several labels a row, got one class a row"
    ):
        choose_columns(dataset, text_column="text", label_separator="|")


def test_splits_are_drawn_at_random_and_keep_text_and_labels_together() -> None:
    n = 40
    labels = [
        [i % 3] * (i % 2) + [2] * (i == 7) for i in range(n)
    ]  # one label in one row only, and empty rows
    rows = Dataset.from_dict({"text": [str(i) for i in range(n)], "label": labels})
    chosen = choose_columns(DatasetDict({"train": rows}), text_column="text", multi_label=True)
    drawn = split_calibration(draw_test(chosen, size=10, seed=1), size=0.5, seed=1)
    assert {name: len(split) for name, split in drawn.items()} == {"train": 15, "test": 10, "calibration": 15}
    texts = [int(text) for split in drawn.values() for text in split["text"]]
    assert sorted(texts) == list(range(n))
    for split in drawn.values():
        for text, found in zip(split["text"], split["label"], strict=True):
            assert found == sorted(set(labels[int(text)]))
    again = draw_test(chosen, size=10, seed=1)
    assert again["test"]["text"][:] == drawn["test"]["text"][:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "docstrings"}, "dataset 'docstrings' to go with one label a row"),
        ({"dataset": "x", "ood_data": ["y"]}, "ood_data to go with one label a row"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_first(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_data(DataArguments(multi_label=True, **options))


def test_the_real_file_of_go_emotions(shared_data: Path) -> None:
    folder = shared_data / "goemotions"
    names = pandas.read_json(folder / "label_names.json")[0].tolist()
    files = {
        f"{role}_file": str(folder / f"{name}.csv.gz") for role, name in (("train", "dev"), ("test", "test"))
    }
    args = DataArguments(
        **files,
        label_column="labels",
        multi_label=True,
        label_separator=" ",
        class_names=names,
        calibration_size=500,
    )
    dataset = multi_hot(load_data(args))
    table = pandas.read_csv(folder / "test.csv.gz", dtype=str)
    assert dataset["test"]["text"][:] == table["text"].tolist()
    wanted = np.zeros((len(table), 28), np.float32)
    for row, ids in enumerate(table["labels"]):
        wanted[row, [int(i) for i in ids.split()]] = 1
    np.testing.assert_array_equal(dataset["test"]["label"][:], wanted)
    assert len(dataset["calibration"]) == 500


def test_images_are_collated_with_floats() -> None:
    import torch

    rows = [{"pixel_values": torch.zeros(3, 2, 2), "labels": row} for row in ([1.0, 0.0], [0.0, 0.0])]
    labels = collate_images(rows)["labels"]
    assert labels.dtype == torch.float32
    assert labels.tolist() == [[1.0, 0.0], [0.0, 0.0]]
