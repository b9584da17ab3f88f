"""Loading, columns, splits, the built-in text set, and images."""

from __future__ import annotations

import gzip
import io
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    DatasetInfo,
    Features,
    Value,
)
from PIL import Image
from transformers import ConvNextImageProcessorPil, ViTImageProcessorPil

from hf_calib._errors import InputError
from hf_calib.data import (
    DataArguments,
    ImageTransform,
    choose_columns,
    choose_inputs,
    choose_tokens,
    collate_images,
    docstring_dataset,
    draw_test,
    limit_samples,
    load_data,
    load_ood,
    load_splits,
    split_calibration,
)
from hf_calib.data.arguments import rows_or_share
from hf_calib.data.splits import draw_rows


@pytest.mark.parametrize("column", ["label", "other"])
def test_a_column_that_is_inputs_and_labels_is_refused(column: str) -> None:
    rows = DatasetDict({"train": Dataset.from_dict({column: ["a", "b"]})})
    message = f"text_column to be another column than the labels', got '{column}'"
    with pytest.raises(ValueError, match=message):
        choose_columns(rows, text_column=column, label_column=column)
    several = {"multi_label": True, "label_columns": ["x", column]}
    with pytest.raises(ValueError, match=message):
        choose_columns(rows, text_column=column, **several)
    with pytest.raises(ValueError, match="tokens_column to be another column than"):
        choose_tokens(rows, tokens_column=column, tags_column=column)


# --- the built-in text set ---------------------------------------------------------------------------


def all_rows(dataset: DatasetDict) -> list[tuple[str, int]]:
    return [(row["text"], row["label"]) for split in dataset.values() for row in split]


@pytest.mark.slow
def test_built_in_set_has_three_stratified_seeded_splits_in_memory() -> None:
    dataset = docstring_dataset(max_per_class=60)
    counts = {name: Counter(split["label"][:]) for name, split in dataset.items()}
    n_classes = len(dataset["train"].features["label"].names)
    assert n_classes >= 5  # pandas may be absent
    for name, n_rows in (("train", 21), ("calibration", 15), ("test", 24)):
        assert counts[name] == dict.fromkeys(range(n_classes), n_rows)
    assert not any(dataset.cache_files.values())
    for text, _ in all_rows(dataset):
        assert 40 <= len(text) <= 400
        for name in (
            "numpy",
            "scipy",
            "sklearn",
            "scikit-learn",
            "pandas",
            "torch",
            "transformers",
        ):
            assert name not in text.lower()
    other = docstring_dataset(max_per_class=60, seed=1)
    assert all_rows(docstring_dataset(max_per_class=60)) == all_rows(dataset)
    assert all_rows(other) != all_rows(dataset)
    assert sorted(all_rows(other)) == sorted(all_rows(dataset))


def test_a_text_is_of_what_users_see_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its classes, their methods and its functions, but no function in another one and nothing private."""
    monkeypatch.syspath_prepend(tmp_path)
    for library in ("first_of_two", "second_of_two"):
        lines = [
            f'def {name}():\n    """{library}: what the public function {name} says."""'
            for name in (*"abcdefghij", "_private")
        ]
        lines.append('    def within():\n        """What is within a function says."""')
        method = "def method(self):"
        says = f'"""{library}: what a method of a class says."""'
        lines.append(f"class Public:\n    {method}\n        {says}")
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").write_text("\n".join(lines) + "\n")
    found = docstring_dataset(libraries=("first_of_two", "second_of_two"))
    texts = [text for text, _ in all_rows(found)]
    assert len(texts) == 22
    assert sum("what a method of a class" in text for text in texts) == 2


# --- sources -----------------------------------------------------------------------------------------

CSV = "text,label\nNA,a\n,b\nnull,a\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", CSV),
        ("rows.tsv", CSV.replace(",", "\t")),
        (
            "rows.jsonl",
            '{"text":"NA","label":"a"}\n{"text":"","label":"b"}\n{"text":"null","label":"a"}\n',
        ),
        (
            "rows.json",
            '[{"text":"NA","label":"a"},{"text":"","label":"b"},{"text":"null","label":"a"}]',
        ),
        ("rows.csv.gz", CSV),
        ("ROWS.CSV", CSV),
    ],
)
def test_file_formats_keep_texts_that_look_missing(
    tmp_path: Path, name: str, content: str
) -> None:
    data = content.encode()
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / name
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    dataset = load_splits(
        train_file=tmp_path / "train" / name,
        test_file=tmp_path / "test" / name,
        cache_dir=tmp_path / "cache",
    )
    assert list(dataset) == ["train", "test"]
    assert dataset["test"]["text"][:] == ["NA", "", "null"]
    with pytest.raises(ValueError, match="a text in every row of split 'train', got n"):
        choose_columns(dataset, text_column="text")
    filled = dataset.filter(lambda row: row["text"] != "")
    found = choose_columns(filled, text_column="text", class_names=["a", "b"])
    assert found["test"][:] == {"text": ["NA", "null"], "label": [0, 0]}


@pytest.mark.parametrize("text", ["", "  ", "\t\n", None, "\u2003"])
def test_a_row_without_a_text_is_named(text: str | None) -> None:
    rows = {"text": ["a", "b", text, "c"], "label": [0, 1, 0, 1]}
    good = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    message = r"column 'text' to .* in every row of split 'test', got .* row 2\b"
    splits = DatasetDict({"train": good, "test": Dataset.from_dict(rows)})
    with pytest.raises(ValueError, match=message):
        choose_columns(splits, text_column="text")
    with pytest.raises(ValueError, match=message.replace("test", "outside")):
        choose_inputs(splits["test"], name="outside", text_column="text")


@pytest.mark.parametrize("given", ["ab", {"a": 0, "b": 1}, {"a", "b"}, b"ab", 2])
def test_names_that_are_not_in_a_list_are_refused(given: Any) -> None:
    rows = DatasetDict({"train": Dataset.from_dict({"text": ["x"], "label": ["a"]})})
    calls: dict[str, Any] = {
        "class_names": partial(choose_columns, rows, text_column="text"),
        "label_columns": partial(
            choose_columns, rows, text_column="text", multi_label=True
        ),
        "tag_names": partial(choose_tokens, rows),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^expected {name} to be a list, got "):
            call(**{name: given})
    for name in ("class_names", "label_columns", "ood_data"):
        with pytest.raises(TypeError, match=f"^expected {name} to be a list, got "):
            DataArguments(**{name: given})


# --- one role for each file ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["same", "relative", "symlink", "hard link", "folder"])
@pytest.mark.parametrize("other", ["calibration_file", "test_file", "ood_data"])
def test_a_file_has_one_role(
    kind: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(CSV)
    (tmp_path / "other.csv").write_text(CSV)
    path = {"same": "rows.csv", "relative": "./rows.csv"}.get(kind, "link.csv")
    if kind == "symlink":
        (tmp_path / path).symlink_to("rows.csv")
    elif kind == "hard link":
        (tmp_path / path).hardlink_to("rows.csv")
    elif kind == "folder":
        (tmp_path / "here").symlink_to(tmp_path)
        path = "here/rows.csv"
    is_ood = other == "ood_data"
    given = {"train_file": "rows.csv", other: [path] if is_ood else path}
    arguments = DataArguments(**{"test_file": "other.csv", **given})
    message = (
        f"expected {other} to be another file than train_file, got {Path(path)}; give"
    )
    with pytest.raises(ValueError, match=message):
        load_ood(arguments) if is_ood else load_data(arguments)


# --- options without an effect ------------------------------------------------------------------------

FILES = {"train_file": "train.csv"}
SEVERAL = {"multi_label": True, "label_columns": ["a", "b"]}
UNREAD = [
    ({**FILES, "test_split": "validation"}, "test_split", "with train_file"),
    ({**FILES, "dataset_config": "x"}, "dataset_config", "with train_file"),
    ({**FILES, "dataset_revision": "x"}, "dataset_revision", "with train_file"),
    ({"calibration_file": "x.csv"}, "calibration_file", "without train_file"),
    ({"dataset": "x", "test_file": "x.csv"}, "test_file", "without train_file"),
    (
        {"dataset": "docstrings", "test_file": "x.csv"},
        "test_file",
        "without train_file",
    ),
    (
        {**FILES, "calibration_file": "x.csv", "calibration_size": 0.2},
        "calibration_size",
        "with calibration_file",
    ),
    (
        {**FILES, "calibration_file": "x.csv", "calibration_from": "test"},
        "calibration_from",
        "with calibration_file",
    ),
    *(
        ({"dataset": "docstrings", name: value}, name, "for dataset 'docstrings'")
        for name, value in {
            "dataset_config": "x",
            "dataset_revision": "x",
            "test_split": "validation",
            "text_column": "x",
            "image_column": "x",
            "label_column": "x",
            "class_names": ["a", "b"],
        }.items()
    ),
    ({"dataset": ".", "dataset_revision": "x"}, "dataset_revision", "for a folder"),
    *(
        ({**FILES, name: value}, name, "without multi_label")
        for name, value in {
            "label_columns": ["a", "b"],
            "label_separator": "|",
            "no_label": "none",
        }.items()
    ),
    *(
        ({**FILES, **SEVERAL, name: value}, name, "with label_columns")
        for name, value in {
            "label_column": "x",
            "label_separator": "|",
            "no_label": "none",
        }.items()
    ),
    ({"ood_split": "train"}, "ood_split", "without a dataset in ood_data"),
    (
        {"ood_split": "train", "ood_data": ["x.csv"]},
        "ood_split",
        "without a dataset in ood_data",
    ),
]


@pytest.mark.parametrize(("options", "name", "case"), UNREAD)
def test_an_option_without_an_effect_is_refused(
    options: dict[str, Any], name: str, case: str
) -> None:
    message = f"expected {name} to be left out {case}, where it has no effect, got "
    with pytest.raises(
        ValueError,
        match=f"^{message}.*; if it is of a configuration, override it by '?",
    ):
        DataArguments(**options)


READ: list[dict[str, Any]] = [
    {**FILES, "dataset": "of-a-config", "dataset_config": "", "dataset_revision": ""},
    {**FILES, "calibration_size": 0.2, "calibration_from": "test", "test_size": 0.3},
    {**FILES, "calibration_file": "x.csv", "test_file": "y.csv", "test_size": 5},
    {**FILES, "text_column": "x", "label_column": "x", "class_names": ["a", "b"]},
    {**FILES, **SEVERAL, "class_names": ["a", "b"]},
    {**FILES, "multi_label": True, "label_separator": "|", "no_label": "none"},
    {"dataset": "x", "dataset_config": "x", "dataset_revision": "x"},
    {"dataset": "x", "test_split": "validation", "calibration_from": "test"},
    {"dataset": ".", "dataset_config": "x", "test_split": "validation"},
    {"dataset": "docstrings", "ood_data": ["x.csv"], "text_column": "x"},
    {"dataset": "x", "ood_data": ["x.csv", "y"], "ood_split": "train"},
    {"dataset": "docstrings", "split_seed": 3, "max_train_samples": 9},
]


@pytest.mark.parametrize("options", READ)
def test_an_option_with_an_effect_is_accepted(options: dict[str, Any]) -> None:
    assert DataArguments(**options).split_seed in (0, 3)


def test_the_column_of_the_other_kind_of_inputs_is_refused() -> None:
    for images, name in ((True, "text_column"), (False, "image_column")):
        kind = "images" if images else "texts"
        with pytest.raises(ValueError, match=f"{name} to be left out for {kind}, "):
            load_data(DataArguments(train_file="x.csv", **{name: "x"}), images=images)


# --- classes in a subset ------------------------------------------------------------------------------


def test_a_subset_with_fewer_rows_than_classes_is_refused() -> None:
    names = ClassLabel(names=list("abcde"))
    features = Features({"text": Value("string"), "label": names})
    columns = {"text": list("stuvwxyz"), "label": [0, 1, 2, 2, 2, 2, 2, 2]}
    rows = DatasetDict({"train": Dataset.from_dict(columns, features=features)})
    message = "max_train_samples to be at least 3, a row per class, got 2; ask for"
    with pytest.raises(ValueError, match=message):
        limit_samples(rows, max_train_samples=2)
    message = r"=3 leaves no training row of 1 of 3 classes \([ab]\), which the model"
    with pytest.warns(UserWarning, match=message):
        limit_samples(rows, max_train_samples=3, seed=5)
    assert len(limit_samples(rows, max_train_samples=8)["train"]) == 8


def test_folder_of_named_files_and_its_roles(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / f"{name}.csv").write_text(
            f"text,label\nof {name},a\nmore,b\n"
        )
    folder, cache = str(tmp_path / "rows"), tmp_path / "cache"
    dataset = load_splits(folder, cache_dir=cache)
    texts = {role: split[0]["text"] for role, split in dataset.items()}
    assert texts == {
        "train": "of train",
        "calibration": "of validation",
        "test": "of test",
    }
    # A validation split that plays the test set is not the calibration set as well.
    assert list(load_splits(folder, test_split="validation", cache_dir=cache)) == [
        "train",
        "test",
    ]
    with pytest.raises(
        ValueError, match=r"name a split .*\(train, validation, test\), got 'dev'"
    ):
        load_splits(folder, test_split="dev", cache_dir=cache)
    with pytest.raises(ValueError, match="be different for each role"):
        load_splits(folder, test_split="train", cache_dir=cache)


def test_code_beside_the_data_is_not_run(tmp_path: Path) -> None:
    folder, marker = tmp_path / "scripted", tmp_path / "ran"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    with pytest.raises(
        ValueError, match=r"expected dataset to be loadable, got .*scripted"
    ):
        load_splits(str(folder), cache_dir=tmp_path / "cache")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "come from source or from files, got neither"),
        ({"source": "ag_news", "train_file": "a.csv"}, "got both"),
        (
            {"source": "someone/nothing"},
            "dataset to be loadable, got someone/nothing .*; name a folder",
        ),
        ({"train_file": "good.csv"}, "expected test_file to be given"),
        (
            {"train_file": "good.csv", "test_file": "none.csv"},
            "expected test_file to name an existing file",
        ),
        (
            {"train_file": "good.csv", "test_file": "rows.cvs"},
            "got rows.cvs; did you mean '.csv'",
        ),
        *(
            (
                {"train_file": name, "test_file": "good.csv"},
                f"train_file to be readable as {kind}",
            )
            for name, kind in (
                ("ragged.csv", "csv"),
                ("bad.jsonl", "json"),
                ("bad.parquet", "parquet"),
            )
        ),
    ],
)
def test_sources_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], message: str
) -> None:
    contents = {
        "good.csv": CSV,
        "rows.cvs": CSV,
        "ragged.csv": "text,label\na,b\nc,d,e,f\n",
    }
    for name, content in {
        **contents,
        "bad.jsonl": "not json\n",
        "bad.parquet": "not parquet",
    }.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_splits(**files, cache_dir=tmp_path / "cache")


# --- columns -----------------------------------------------------------------------------------------


def splits_of(features: Features | None = None, **columns: list) -> DatasetDict:
    """Train and test from `column=[train values, test values]`."""
    parts = [{column: values[i] for column, values in columns.items()} for i in (0, 1)]
    train, test = (Dataset.from_dict(part, features=features) for part in parts)
    return DatasetDict({"train": train, "test": test})


@pytest.mark.parametrize(
    ("kind", "labels", "given", "names", "ids"),
    [
        (
            None,
            (["low", "high", "low"], ["low"]),
            None,
            ["high", "low"],
            ([1, 0, 1], [1]),
        ),
        (
            None,
            (["low", "high"], ["low"]),
            ["low", "mid", "high"],
            ["low", "mid", "high"],
            ([0, 2], [0]),
        ),
        (
            None,
            (["a", "a "], ["a "]),
            ["a ", "a"],
            ["a ", "a"],
            ([1, 0], [0]),
        ),  # look alike and are given
        (
            None,
            (["10", "2", "-1"], ["2"]),
            None,
            ["-1", "10", "2"],
            ([1, 2, 0], [2]),
        ),  # texts of digits
        (None, ([True, False], [True]), None, ["False", "True"], ([1, 0], [1])),
        (None, ([2.0, 0.0, 1.0], [2.0]), None, ["0", "1", "2"], ([2, 0, 1], [2])),
        (Value("int8"), ([2, 0, 1], [2]), None, ["0", "1", "2"], ([2, 0, 1], [2])),
        (
            Value("uint16"),
            ([2, 0, 1], [2]),
            list("abcd"),
            list("abcd"),
            ([2, 0, 1], [2]),
        ),  # d has no rows
        (
            ClassLabel(names=["n", "p"]),
            ([1, 0], [1]),
            ["no", "yes"],
            ["no", "yes"],
            ([1, 0], [1]),
        ),
        (
            ClassLabel(names=["n", "p"]),
            ([1, 0], [1]),
            ["1", "0"],
            ["1", "0"],
            ([1, 0], [1]),
        ),
        # Texts and names that are numbers are compared as numbers.
        (None, (["1", "0"], ["1"]), ["1.0", "0.0"], ["1.0", "0.0"], ([0, 1], [0])),
        (None, (["1.0", "0.0"], ["1"]), None, ["0.0", "1.0"], ([1, 0], [1])),
        (None, ([0, 1, 2], [1]), ["1", "2", "3"], ["1", "2", "3"], ([0, 1, 2], [1])),
    ],
)
def test_labels_become_ids(
    kind: object, labels: tuple, given: list | None, names: list, ids: tuple
) -> None:
    features = (
        None if kind is None else Features({"review": Value("string"), "stars": kind})
    )
    texts = [[str(i) for i in range(len(each))] for each in labels]
    dataset = splits_of(features, review=texts, stars=labels)
    chosen = choose_columns(
        dataset, text_column="review", label_column="stars", class_names=given
    )
    for split, text, wanted in zip(chosen.values(), texts, ids, strict=True):
        assert split.features["label"] == ClassLabel(names=names)
        assert split[:] == {"text": text, "label": wanted}


def test_ids_of_class_labels_in_another_order_are_those_of_the_names() -> None:
    def rows(names: list[str]) -> Dataset:
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        return Dataset.from_dict(
            {"text": ["x", "y"], "label": [0, 1]}, features=features
        )

    dataset = DatasetDict({"train": rows(["a", "b"]), "test": rows(["b", "a"])})
    chosen = choose_columns(dataset, text_column="text")
    assert (chosen["train"]["label"][:], chosen["test"]["label"][:]) == ([0, 1], [1, 0])


AB = [["a", "b"], ["a"]]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (
            [["a", "b"], ["c"]],
            {},
            r"labels of split 'test' to hold the classes \(a, b\), got 'c' in row 0",
        ),
        (
            [[0, 2], [0]],
            {"class_names": ["a", "b"]},
            "split 'train' to hold ids in 0..1, got 2 in row 1",
        ),
        (
            [[0, 1], [1.0]],
            {"class_names": ["1.0", "0.0"]},
            "class_names that are numbers to be in the order of the ids .*, got 1.0, 0.0",
        ),
        (
            [["1", "2"], ["1"]],
            {"class_names": ["1.0", "1.00", "2"]},
            "class_names to differ as numbers, as those in the labels of split 'train', got 1 twice",
        ),
        (
            [["1", "0"], ["1"]],
            {"class_names": ["1.0", "x"]},
            "each label in the labels of split 'train' to be a name or an id of one class only, got class names '1.0'",
        ),
        ([[0, 1], [-1]], {}, "split 'test' to be labelled, got -1"),
        ([[1, 2], [1]], {}, "count from 0 without gaps, got 1, 2"),
        ([["a", "a"], ["a"]], {}, "classes to be at least two, and differ"),
        (
            [["01", "00"], ["00"]],
            {"class_names": ["a", "b"]},
            "split 'train' to hold class names or ids, got 01 in row 0",
        ),
        (
            [["0", "1"], ["0"]],
            {"class_names": ["0", "b"]},
            r"split 'train' to hold the classes \(0, b\), got '1' in row 1",
        ),
        (
            [["a", "b"], ["A"]],
            {},
            r"split 'test' to hold the classes \(a, b\), got 'A' in row 0",
        ),
        (
            [["a", None], ["a"]],
            {},
            r"value in every row of split 'train', got 1 without \(first in row 1\)",
        ),
        (
            [["a", "b"], [0]],
            {},
            "split 'test' to be texts, or integers, as in train, got 0 and 'a'",
        ),
        ([["a", ""], ["a"]], {}, r"hold a label in .* 'train', got none in row 1"),
        (
            [["a", "a "], ["a"]],
            {},
            "of train to differ visibly, got 'a' and 'a ' differ only by spaces",
        ),
        (AB, {"label_column": "labels"}, "got 'labels'; did you mean 'label'"),
        (
            AB,
            {"text_column": "txt"},
            "be one of text, label, got 'txt'; did you mean 'text'",
        ),
        (
            AB,
            {"image_column": "text"},
            "one of text_column and image_column to be given",
        ),
    ],
)
def test_columns_refuse_values(labels: list, options: dict, message: str) -> None:
    dataset = splits_of(text=[["x", "y"], ["w"]], label=labels)
    with pytest.raises(ValueError, match=message):
        choose_columns(dataset, **{"text_column": "text", **options})


# --- splits ------------------------------------------------------------------------------------------


def numbered(labels: list[int]) -> DatasetDict:
    rows = Dataset.from_dict(
        {"text": [str(i) for i in range(len(labels))], "label": labels}
    )
    return DatasetDict({"train": rows, "test": rows.select([0])})


@pytest.mark.parametrize("names", [["a", "b"], ["x", "y"]])
def test_ids_of_class_labels_in_another_order_are_not_given_names(
    names: list[str],
) -> None:
    """The ids of one of the splits would mean other classes."""
    splits = {
        split: Dataset.from_dict(
            {"text": ["u", "v"], "label": [0, 1]},
            features=Features(
                {"text": Value("string"), "label": ClassLabel(names=own)}
            ),
        )
        for split, own in (("train", ["a", "b"]), ("test", ["b", "a"]))
    }
    choose = partial(choose_columns, DatasetDict(splits), text_column="text")
    with pytest.raises(ValueError, match="classes of split 'test' to be those of the"):
        choose(class_names=names)
    assert choose()["test"]["label"][:] == [1, 0]


@pytest.mark.parametrize("of_other_names", [False, True])
@pytest.mark.parametrize("label", [-2, -100, 2, 5])
def test_an_id_outside_the_names_of_its_class_label_is_refused(
    label: int, of_other_names: bool
) -> None:
    """A negative one would otherwise count from the last class, and a large one be a class of another split."""

    def as_stored(labels: list[int], names: list[str]) -> Dataset:
        """Rows as a file may have them: the ids are compared with the names when rows are made, not when read."""
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        texts = [str(i) for i in range(len(labels))]
        table = Dataset.from_dict({"text": texts, "label": labels}).data
        return Dataset(table, DatasetInfo(features=features))

    of_train = list("abcdef") if of_other_names else ["a", "b"]
    splits = {
        "train": as_stored([0, 1], of_train),
        "test": as_stored([1, 0, label, label], ["a", "b"]),
    }
    message = (
        rf"labels of split 'test' to hold ids in 0..1, got {label} in row 2; check"
    )
    with pytest.raises(ValueError, match=message):
        choose_columns(DatasetDict(splits), text_column="text")


def test_as_many_classes_are_named_as_there_are() -> None:
    feature = ClassLabel(names=["a", "b"])
    rows = Dataset.from_dict(
        {"text": ["u", "v"], "label": [0, 1], "a": [0, 1], "b": [1, 1]},
        features=Features(
            {
                "text": Value("string"),
                "label": feature,
                "a": Value("int64"),
                "b": Value("int64"),
            }
        ),
    )
    choose = partial(
        choose_columns,
        DatasetDict({"train": rows, "test": rows}),
        text_column="text",
        class_names=["a", "b", "c"],
    )
    with pytest.raises(ValueError, match=r"as many as class_names \(3\), got 2: a, b"):
        choose()
    with pytest.raises(ValueError, match=r"class_names to be the label_columns \(a, b"):
        choose(multi_label=True, label_columns=["a", "b"])


@pytest.mark.parametrize(
    ("size", "n_rows", "stratify"), [(0.2, 20, True), (25, 25, True), (25, 25, False)]
)
def test_calibration_is_a_part_of_train(
    size: float | int, n_rows: int, stratify: bool
) -> None:
    dataset = numbered([0] * 80 + [1] * 20)

    def drawn(seed: int) -> DatasetDict:
        return split_calibration(dataset, size=size, seed=seed, stratify=stratify)

    splits = drawn(5)
    calibration, rest = (
        [int(t) for t in splits[name]["text"]] for name in ("calibration", "train")
    )
    assert len(calibration) == n_rows
    assert sorted(calibration + rest) == list(range(100))
    assert (calibration, rest) == (sorted(calibration), sorted(rest))
    assert splits["test"] is dataset["test"]
    if stratify:
        assert Counter(splits["calibration"]["label"]) == {
            0: n_rows * 4 // 5,
            1: n_rows // 5,
        }
    assert drawn(5)["calibration"]["text"][:] == splits["calibration"]["text"][:]
    assert drawn(6)["calibration"]["text"][:] != splits["calibration"]["text"][:]
    assert split_calibration(splits, size=0.5) is splits  # that is there is used


@pytest.mark.parametrize("seed", range(5))
def test_drawn_rows_keep_shares_and_leave_every_class_a_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 30, size=6)
    labels = rng.permutation(np.repeat(np.arange(6), counts))
    n_rows = int(rng.integers(1, len(labels) - 6 + 1))
    drawn = draw_rows(labels, n_rows, rng)
    assert len(np.unique(drawn)) == n_rows
    taken = np.bincount(labels[drawn], minlength=6)
    assert (taken < counts).all()
    if (counts * n_rows / len(labels) <= counts - 1).all():  # no class is short of rows
        assert (np.abs(taken - counts * n_rows / len(labels)) < 1).all()


@pytest.mark.parametrize("size", [0.0, 1.0, 1.5, -1, 0, True, "0.1", 10, 9, 0.01])
def test_sizes_that_leave_nothing_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"^expected size to "):
        split_calibration(numbered([0, 1] * 5), size=size)


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, "at least 0, got -1"),
        (1.5, TypeError, "an integer, got 1.5"),
        ("x", TypeError, "an integer, got 'x'"),
        (True, TypeError, "an integer, got True"),
    ],
)
def test_seeds_that_are_not_numbers_from_0_on_are_refused(
    seed: Any, error: type[Exception], message: str
) -> None:
    rows = numbered([0, 1] * 5)
    for draw in (
        partial(split_calibration, rows),
        partial(draw_test, rows, size=2),
        partial(limit_samples, rows, max_train_samples=2),
        docstring_dataset,
    ):
        with pytest.raises(error, match=f"^expected seed to be {message}; "):
            draw(seed=seed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            (
                {name: size},
                f"{name} to be a fraction below 1, or a number .* got {size}",
            )
            for name in ("calibration_size", "test_size")
            for size in (0.0, 1.0, 1, 1.5, -1, 0, float("nan"), float("inf"), 2000.5)
        ),
        ({"calibration_size": None}, "calibration_size to be a number, got None"),
        ({"calibration_size": True}, "calibration_size to be a number, got True"),
        ({"test_size": "0.1"}, "test_size to be a number, got '0.1'"),
        ({"max_test_samples": 0}, "max_test_samples to be at least 1, got 0"),
        ({"max_train_samples": 1.5}, "max_train_samples to be an integer, got 1.5"),
        ({"max_calibration_samples": True}, "max_calibration_samples to be an integer"),
        ({"split_seed": -1}, "split_seed to be at least 0, got -1"),
        ({"split_seed": 0.5}, "split_seed to be an integer, got 0.5"),
    ],
)
def test_sizes_and_seeds_are_checked_before_data_are_read(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^expected {words}"):
        DataArguments(dataset="docstrings", **options)


def test_a_size_is_a_fraction_or_rows_and_is_drawn_with_the_seed(
    tmp_path: Path,
) -> None:
    paths = [str(tmp_path / f"{name}.parquet") for name in ("train", "test")]
    for path in paths:
        numbered([0, 1] * 100)["train"].to_parquet(path)

    def drawn(size: float, seed: int = 0) -> list[str]:
        given: Any = {"calibration_size": size, "split_seed": seed}
        arguments = DataArguments(train_file=paths[0], test_file=paths[1], **given)
        return list(load_data(arguments)["calibration"]["text"])

    assert drawn(0.1, 1) == drawn(20, 1) == drawn(20.0, 1) == drawn(np.int64(20), 1)
    assert len(drawn(0.1)) == 20
    assert drawn(20, 1) != drawn(20, 2)


def test_subsets_are_reproducible_nested_and_of_the_seed_of_the_splits(
    tmp_path: Path,
) -> None:
    rows = numbered([0, 1] * 200)["train"]
    for name, part in (("train", rows), ("test", rows.select(range(200)))):
        part.to_parquet(tmp_path / f"{name}.parquet")
    files = {
        f"{name}_file": str(tmp_path / f"{name}.parquet") for name in ("train", "test")
    }

    def texts(n: int, seed: int) -> dict[str, list[int]]:
        limits = {
            "max_train_samples": n,
            "max_calibration_samples": 20,
            "max_test_samples": 150,
        }
        found = load_data(DataArguments(**files, **limits, split_seed=seed))
        return {
            name: [int(text) for text in split["text"]] for name, split in found.items()
        }

    small, large, other = texts(10, 1), texts(30, 1), texts(10, 2)
    assert {name: len(kept) for name, kept in small.items()} == {
        "train": 10,
        "calibration": 20,
        "test": 150,
    }
    assert set(small["train"]) < set(large["train"])
    assert texts(10, 1) == small
    for name in small:
        assert small[name] == sorted(small[name]) != other[name]
    assert max(large["train"]) > 300  # not the first rows
    with pytest.raises(ValueError, match="max_test_samples to be at least 1"):
        limit_samples(numbered([0, 1]), max_test_samples=0)


# --- another test split --------------------------------------------------------------------------------


def test_drawn_test_rows_come_from_train_and_test_and_leave_both() -> None:
    rows = numbered([0, 1, 1, 2] * 20)["train"]
    dataset = DatasetDict(
        {"train": rows.select(range(50)), "test": rows.select(range(50, 80))}
    )
    drawn = draw_test(dataset, size=0.25, seed=3)
    assert Counter(drawn["test"]["label"]) == {0: 5, 1: 10, 2: 5}
    assert sorted([*drawn["train"]["text"], *drawn["test"]["text"]]) == sorted(
        rows["text"]
    )
    assert {int(text) >= 50 for text in drawn["test"]["text"]} == {True, False}
    assert (
        draw_test(dataset, size=0.25, seed=3)["test"]["text"][:]
        == drawn["test"]["text"][:]
    )
    assert (
        draw_test(dataset, size=0.25, seed=4)["test"]["text"][:]
        != drawn["test"]["text"][:]
    )
    assert draw_test(DatasetDict({"train": rows}), size=10)["test"].num_rows == 10


def test_two_draws_with_one_seed_are_not_of_one_stream() -> None:
    """Else the calibration rows would be those at the places that the test rows had before."""
    rows = numbered([0, 1] * 50)["train"]
    test = draw_test(DatasetDict({"train": rows}), size=0.25, seed=3)["test"]
    whole = DatasetDict({"train": rows, "test": rows})
    calibration = split_calibration(whole, size=0.25, seed=3)["calibration"]
    assert len(test) == len(calibration) == 25
    assert sorted(test["text"][:]) != sorted(calibration["text"][:])


def test_of_a_file_alone_rows_are_held_out_to_test_on(tmp_path: Path) -> None:
    numbered([0, 1, 2, 3] * 50)["train"].cast_column(
        "text", Value("string")
    ).to_parquet(tmp_path / "t.parquet")
    file = str(tmp_path / "t.parquet")
    with pytest.warns(
        UserWarning, match="no test_file, so 20% of the rows of train_file are held out"
    ):
        dataset = load_data(DataArguments(train_file=file))
    sizes = {name: len(split) for name, split in dataset.items()}
    assert sizes == {"train": 144, "calibration": 16, "test": 40}
    assert len({text for split in dataset.values() for text in split["text"]}) == 200
    assert len(load_data(DataArguments(train_file=file, test_size=20))["test"]) == 20


# --- images ------------------------------------------------------------------------------------------

RAW = ViTImageProcessorPil(do_resize=False, do_rescale=False, do_normalize=False)


def gradient_image(width: int, height: int) -> Image.Image:
    """No two pixels are alike, and none is black."""
    values = 1 + np.arange(width * height).reshape(height, width)
    return Image.fromarray(
        np.stack([values % 251 + 1, values // 251 + 1, values * 0 + 9], -1).astype(
            np.uint8
        )
    )


def pixels_of(transform: ImageTransform, image: Image.Image) -> np.ndarray:
    return transform({"image": [image]})["pixel_values"][0].numpy()


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(size={"height": 32, "width": 32}),
        ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    ],
)
@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_processors_accept_images_of_every_kind(processor, crop: str) -> None:
    color = gradient_image(40, 50)
    palette = color.convert("P")
    palette.info["transparency"] = b"\x00" * 10
    images = [color, *map(color.convert, ("L", "RGBA", "1", "CMYK")), palette]
    batch = ImageTransform(processor, crop=crop, flip=True)(
        {"image": images, "label": [*range(6)]}
    )
    rows = zip(batch["pixel_values"], batch["labels"], strict=True)
    collated = collate_images(
        [{"pixel_values": pixels, "labels": label} for pixels, label in rows]
    )
    assert (collated["pixel_values"].shape, collated["pixel_values"].dtype) == (
        (6, 3, 32, 32),
        torch.float32,
    )
    assert collated["labels"].tolist() == [0, 1, 2, 3, 4, 5]


def test_padded_crop_shifts_the_image_over_black() -> None:
    torch.manual_seed(0)
    image = gradient_image(32, 16)  # borders of 4 and 2
    canvas = np.zeros((3, 16 + 4, 32 + 8))
    canvas[:, 2:-2, 4:-4] = np.asarray(image).transpose(2, 0, 1)
    places = {
        canvas[:, top : top + 16, left : left + 32].tobytes()
        for top in range(5)
        for left in range(9)
    }
    transform = ImageTransform(RAW, crop="pad")
    seen = {
        pixels_of(transform, image).astype(np.float64).tobytes() for _ in range(300)
    }
    assert seen == places  # every shift occurs, and nothing else


def test_flip_mirrors_half_of_the_images() -> None:
    torch.manual_seed(0)
    image = gradient_image(8, 4)
    upright = np.asarray(image).transpose(2, 0, 1)
    results = [pixels_of(ImageTransform(RAW, flip=True), image) for _ in range(400)]
    kept = sum(np.array_equal(pixels, upright) for pixels in results)
    assert (
        kept + sum(np.array_equal(pixels, upright[:, :, ::-1]) for pixels in results)
        == 400
    )
    assert 150 < kept < 250


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_follows_the_seed_with_and_without_workers(workers: int) -> None:
    images = [{"bytes": encoded(gradient_image(16, 16)), "path": None}] * 12
    stored = DatasetDict(
        {"train": Dataset.from_dict({"img": images, "label": [0, 1] * 6})}
    )
    dataset = choose_columns(stored, image_column="img")
    rows = dataset["train"].with_transform(ImageTransform(RAW, crop="pad", flip=True))

    def epoch(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(
            rows,
            batch_size=4,
            num_workers=workers,
            collate_fn=collate_images,
            shuffle=True,
        )
        return torch.cat([batch["pixel_values"] for batch in loader])

    first = epoch(0)
    assert torch.equal(first, epoch(0))
    assert not torch.equal(first, epoch(1))
    assert len(torch.unique(first, dim=0)) > 6  # each image draws its own crop


def test_paths_in_a_csv_file_are_images(tmp_path: Path) -> None:
    for i in range(2):
        gradient_image(8, 8 + i).save(tmp_path / f"{i}.png")
    lines = "".join(f"{tmp_path}/{i}.png,{i}\n" for i in range(2))
    path = tmp_path / "rows.csv"
    path.write_text(f"file,label\n{lines}")
    dataset = load_splits(
        train_file=path, test_split=None, cache_dir=tmp_path / "cache"
    )
    rows = choose_columns(dataset, image_column="file")["train"].with_transform(
        ImageTransform(RAW)
    )
    assert [tuple(rows[i]["pixel_values"].shape) for i in range(2)] == [
        (3, 8, 8),
        (3, 9, 8),
    ]
    with pytest.raises(
        ValueError,
        match=r"one shape after the processor, got \[\(3, 8, 8\), \(3, 9, 8\)\]",
    ):
        collate_images([rows[0], rows[1]])


def test_a_wrong_crop_deep_and_no_images_are_refused() -> None:
    with pytest.raises(
        ValueError, match="expected crop to be one of none, pad, resized"
    ):
        ImageTransform(RAW, crop="random")
    with pytest.raises(ValueError, match="to have 8 bits a channel, got mode 'F'"):
        ImageTransform(RAW)({"image": [gradient_image(8, 8).convert("F")]})
    with pytest.raises(ValueError, match=r"got label; .* remove_unused_columns=False"):
        ImageTransform(RAW)({"label": [1]})


@pytest.mark.parametrize("size", [1.0, 1.5, 2.5, 99.9])
def test_a_size_that_is_neither_a_fraction_nor_a_number_of_rows(size: float) -> None:
    message = "expected calibration_size to be a fraction below 1, or a number of rows from 2, got"
    with pytest.raises(InputError, match=message):
        rows_or_share("calibration_size", size)


def test_sizes() -> None:
    found = [rows_or_share("calibration_size", size) for size in (0.1, 2, 2.0, 100)]
    assert found == [0.1, 2, 2, 100]
