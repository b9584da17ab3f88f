"""Loading, columns, splits, the built-in text set, and images."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image
from transformers import (
    ConvNextImageProcessorPil,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTImageProcessorPil,
)

from hf_calib.data import (
    DataArguments,
    ImageTransform,
    choose_columns,
    collate_images,
    docstring_dataset,
    draw_test,
    limit_samples,
    load_data,
    load_splits,
    split_calibration,
)
from hf_calib.data.splits import draw_rows

# --- the built-in text set ---------------------------------------------------------------------------


def write_library(folder: Path, name: str, files: dict[str, str]) -> None:
    for path, source in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(source)


def function(name: str, docstring: str) -> str:
    return f'def {name}():\n    """{docstring}"""\n    raise RuntimeError\n\n\n'


def sentences(word: str, count: int) -> str:
    return "".join(
        function(f"f{i}", f"Compute the {word} of number {i} in a way nobody expects.") for i in range(count)
    )


@pytest.fixture
def two_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = (
        "raise RuntimeError('imported')\n"
        + function(
            "long_one", "A first paragraph about NumPy, scikit-learn and\n    TorchScript.\n\n    More."
        )
        + function("_private", "A private function whose docstring is long enough to be taken.")
        + function("short", "Too short.")
        + function("too_long", "word " * 100)
        + "class Kept:\n    '''A public class whose docstring is long enough to be taken.'''\n"
        + "    def method(self):\n        '''A public method whose docstring is long enough.'''\n"
        + "        def inner():\n            '''A function inside of a method, which nobody can call.'''\n"
        + "class _Hidden:\n    def method(self):\n        '''A method of a private class, which is not public.'''\n"
    )
    broken = "def f(:\n    '''A docstring in a file that does not parse, which is skipped.'''\n"
    escapes = 'def f():\n    """A docstring with an escape \\d that Python warns about."""\n'
    files = {
        "__init__.py": module,
        "broken.py": broken,
        "_core/escapes.py": escapes,
        "tests/test_it.py": function("f", "A test function whose docstring is long enough."),
    }
    write_library(tmp_path, "alpha_calib_test", {**files, "more.py": sentences("alpha", 20)})
    write_library(tmp_path, "beta_calib_test", {"__init__.py": sentences("beta", 30) + module})
    return "alpha_calib_test", "beta_calib_test"


def all_rows(dataset: DatasetDict) -> list[tuple[str, int]]:
    return [(row["text"], row["label"]) for split in dataset.values() for row in split]


def test_docstrings_are_public_first_paragraphs_without_library_names(two_libraries: tuple[str, str]) -> None:
    rows = all_rows(docstring_dataset(libraries=two_libraries))
    of_alpha = {text for text, label in rows if label == 0}
    assert {text for text in of_alpha if "alpha" not in text} == {
        "A first paragraph about library, library and libraryScript.",
        "A public class whose docstring is long enough to be taken.",
        "A public method whose docstring is long enough.",
        "A docstring with an escape \\d that Python warns about.",
    }
    # The second library repeats three of the first one's, which are dropped.
    assert Counter(label for _, label in rows) == {0: 24, 1: 30}
    few = all_rows(docstring_dataset(libraries=two_libraries, max_per_class=10))
    assert Counter(label for _, label in few) == {0: 10, 1: 10}


def test_missing_library_is_left_out(two_libraries: tuple[str, str]) -> None:
    dataset = docstring_dataset(libraries=(two_libraries[0], "not_installed_anywhere", two_libraries[1]))
    assert dataset["train"].features["label"].names == list(two_libraries)
    with pytest.raises(ValueError, match="at least two installed packages"):
        docstring_dataset(libraries=(two_libraries[0], "not_installed_anywhere"))
    with pytest.raises(ValueError, match="max_per_class"):
        docstring_dataset(max_per_class=0)


@pytest.fixture(scope="module")
def docstrings() -> DatasetDict:
    return docstring_dataset(max_per_class=60)


def test_built_in_set_has_three_stratified_splits_in_memory(docstrings: DatasetDict) -> None:
    counts = {name: Counter(split["label"][:]) for name, split in docstrings.items()}
    n_classes = len(docstrings["train"].features["label"].names)
    assert n_classes >= 5  # pandas may be absent
    assert counts["train"] == dict.fromkeys(range(n_classes), 21)
    assert counts["calibration"] == dict.fromkeys(range(n_classes), 15)
    assert counts["test"] == dict.fromkeys(range(n_classes), 24)
    assert not any(docstrings.cache_files.values())
    for text, _ in all_rows(docstrings):
        assert 40 <= len(text) <= 400
        for name in ("numpy", "scipy", "sklearn", "scikit-learn", "pandas", "torch", "transformers"):
            assert name not in text.lower()


def test_built_in_set_is_reproducible_and_seeded(docstrings: DatasetDict) -> None:
    again = docstring_dataset(max_per_class=60)
    other = docstring_dataset(max_per_class=60, seed=1)
    assert all_rows(again) == all_rows(docstrings)
    assert all_rows(other) != all_rows(docstrings)
    assert sorted(all_rows(other)) == sorted(all_rows(docstrings))


# --- sources -----------------------------------------------------------------------------------------

CSV = "text,label\nNA,a\n,b\nnull,a\n"


def test_real_csv_gz_files(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "ag_news"
    names = json.loads((folder / "label_names.json").read_text())
    dataset = load_splits(
        train_file=folder / "train_20k.csv.gz", test_file=folder / "test.csv.gz", cache_dir=tmp_path
    )
    dataset = choose_columns(dataset, text_column="text", class_names=names)
    assert dataset["test"].features["label"].names == ["World", "Sports", "Business", "Sci/Tech"]
    assert Counter(dataset["test"]["label"][:]) == dict.fromkeys(range(4), 1900)
    with gzip.open(folder / "test.csv.gz", "rt", encoding="utf-8") as file:
        assert file.readline().strip() == "text,label"
        assert dataset["test"][0]["text"] in file.readline()
    dataset = split_calibration(dataset, size=0.1, seed=3)
    assert Counter(dataset["calibration"]["label"][:]) == dict.fromkeys(range(4), 500)
    assert len(dataset["train"]) == 18_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", CSV),
        ("rows.tsv", CSV.replace(",", "\t")),
        ("rows.jsonl", '{"text":"NA","label":"a"}\n{"text":"","label":"b"}\n{"text":"null","label":"a"}\n'),
        ("rows.json", '[{"text":"NA","label":"a"},{"text":"","label":"b"},{"text":"null","label":"a"}]'),
        ("rows.csv.gz", CSV),
        ("ROWS.CSV", CSV),
    ],
)
def test_file_formats_keep_texts_that_look_missing(tmp_path: Path, name: str, content: str) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    dataset = load_splits(train_file=tmp_path / name, test_file=tmp_path / name, cache_dir=tmp_path / "cache")
    dataset = choose_columns(dataset, text_column="text")
    assert list(dataset) == ["train", "test"]
    assert dataset["test"][:] == {"text": ["NA", "", "null"], "label": [0, 1, 0]}


def test_parquet_with_a_calibration_file(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["x", "y"], "label": [1, 0]})
    rows.to_parquet(tmp_path / "rows.parquet")
    path = tmp_path / "rows.parquet"
    dataset = load_splits(
        train_file=path, calibration_file=path, test_file=path, cache_dir=tmp_path / "cache"
    )
    assert list(dataset) == ["train", "calibration", "test"]
    assert dataset["calibration"]["label"][:] == [1, 0]


def test_folder_of_named_files_and_its_roles(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / f"{name}.csv").write_text(f"text,label\nof {name},a\nmore,b\n")
    folder, cache = str(tmp_path / "rows"), tmp_path / "cache"
    dataset = load_splits(folder, cache_dir=cache)
    texts = {role: split[0]["text"] for role, split in dataset.items()}
    assert texts == {"train": "of train", "calibration": "of validation", "test": "of test"}
    # A validation split that plays the test set is not the calibration set as well.
    assert list(load_splits(folder, test_split="validation", cache_dir=cache)) == ["train", "test"]
    with pytest.raises(ValueError, match=r"name a split .*\(train, validation, test\), got 'dev'"):
        load_splits(folder, test_split="dev", cache_dir=cache)
    with pytest.raises(ValueError, match="be different for each role"):
        load_splits(folder, test_split="train", cache_dir=cache)


def test_code_beside_the_data_is_not_run(tmp_path: Path) -> None:
    folder, marker = tmp_path / "scripted", tmp_path / "ran"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    with pytest.raises(ValueError, match=r"expected dataset to be loadable, got .*scripted"):
        load_splits(str(folder), cache_dir=tmp_path / "cache")
    assert not marker.exists()


def test_a_dataset_that_is_not_there_is_said_in_one_sentence(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "someone/nothing"):
        with pytest.raises(ValueError, match=rf"dataset to be loadable, got {name} .*; name a folder") as e:
            load_splits(name)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "come from source or from files, got neither"),
        ({"source": "ag_news", "train_file": "a.csv"}, "got both"),
        ({"train_file": "good.csv"}, "expected test_file to be given"),
        ({"test_file": "good.csv"}, "expected train_file to be given"),
        ({"train_file": "good.csv", "test_file": "none.csv"}, "expected test_file to name an existing file"),
        ({"train_file": "good.csv", "test_file": "rows.cvs"}, "got rows.cvs; did you mean '.csv'"),
        *(
            ({"train_file": name, "test_file": "good.csv"}, f"expected train_file to be readable as {kind}")
            for name, kind in (
                *(("ragged.csv", "csv"), ("empty.csv", "csv")),
                *(("bad.jsonl", "json"), ("bad.parquet", "parquet")),
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
        "empty.csv": "",
        "bad.jsonl": "not json\n",
        "bad.parquet": "not parquet",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_splits(**files, cache_dir=tmp_path / "cache")


# --- columns -----------------------------------------------------------------------------------------


def splits_of(features: Features | None = None, **columns: list) -> DatasetDict:
    """Train and test from `column=[train values, test values]`."""
    parts = {
        name: {column: values[i] for column, values in columns.items()}
        for i, name in enumerate(("train", "test"))
    }
    return DatasetDict({name: Dataset.from_dict(part, features=features) for name, part in parts.items()})


def rows_of(kind: object, train: list, test: list) -> DatasetDict:
    """Splits with labels of a type."""
    features = None if kind is None else Features({"text": Value("string"), "label": kind})
    texts = [[str(i) for i in range(len(labels))] for labels in (train, test)]
    return splits_of(features, text=texts, label=[train, test])


@pytest.mark.parametrize(
    ("kind", "labels", "given", "names", "ids"),
    [
        (None, (["low", "high", "low"], ["low"]), None, ["high", "low"], ([1, 0, 1], [1])),
        (None, (["low", "high"], ["low"]), ["low", "mid", "high"], ["low", "mid", "high"], ([0, 2], [0])),
        (None, (["us", "US"], ["US"]), None, ["US", "us"], ([1, 0], [0])),  # differ in case
        (None, (["a", "a "], ["a "]), ["a ", "a"], ["a ", "a"], ([1, 0], [0])),  # look alike and are given
        (None, (["10", "2", "-1"], ["2"]), None, ["-1", "10", "2"], ([1, 2, 0], [2])),  # texts of digits
        (None, ([True, False], [True]), None, ["False", "True"], ([1, 0], [1])),
        (None, ([2.0, 0.0, 1.0], [2.0]), None, ["0", "1", "2"], ([2, 0, 1], [2])),
        (Value("int8"), ([2, 0, 1], [2]), None, ["0", "1", "2"], ([2, 0, 1], [2])),
        (Value("uint16"), ([2, 0, 1], [2]), list("abcd"), list("abcd"), ([2, 0, 1], [2])),  # d has no rows
        (ClassLabel(names=["n", "p"]), ([1, 0], [1]), None, ["n", "p"], ([1, 0], [1])),
        (ClassLabel(names=["n", "p"]), ([1, 0], [1]), ["no", "yes"], ["no", "yes"], ([1, 0], [1])),
    ],
)
def test_labels_become_ids(kind: object, labels: tuple, given: list | None, names: list, ids: tuple) -> None:
    dataset = rows_of(kind, *labels).rename_columns({"text": "review", "label": "stars"})
    chosen = choose_columns(dataset, text_column="review", label_column="stars", class_names=given)
    for split, wanted in zip((chosen["train"], chosen["test"]), ids, strict=True):
        assert split.features["label"] == ClassLabel(names=names)
        assert split[:] == {"text": [str(i) for i in range(len(wanted))], "label": wanted}


def test_ids_of_class_labels_in_another_order_are_those_of_the_names() -> None:
    def rows(names: list[str]) -> Dataset:
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        return Dataset.from_dict({"text": ["x", "y"], "label": [0, 1]}, features=features)

    dataset = DatasetDict({"train": rows(["a", "b"]), "test": rows(["b", "a"])})
    chosen = choose_columns(dataset, text_column="text")
    assert (chosen["train"]["label"][:], chosen["test"]["label"][:]) == ([0, 1], [1, 0])


AB = [["a", "b"], ["a"]]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([["a", "b"], ["c"]], {}, r"labels of split 'test' to be among a, b, got 'c' in row 0"),
        ([[0, 1], [2]], {}, "labels of split 'test' to be among 0, 1, got 2"),
        ([[0, 2], [0]], {"class_names": ["a", "b"]}, "split 'train' to be among a, b, got 2 in row 1"),
        ([[0, 1], [-1]], {}, "split 'test' to be labelled, got -1"),
        ([[-1, -1], [0]], {}, "split 'train' to be labelled, got -1"),
        ([[1, 2], [1]], {}, "count from 0 without gaps, got 1, 2"),
        (AB, {"class_names": ["a", "x"]}, "split 'train' to be among a, x, got 'b' in row 1"),
        ([["a", "a"], ["a"]], {}, "classes to be at least two, and differ"),
        (AB, {"class_names": ["a", "a"]}, "classes to be at least two, and differ"),
        ([["a", None], ["a"]], {}, r"value in every row of split 'train', got 1 without \(first in row 1\)"),
        ([["a", "b"], [0]], {}, "split 'test' to be texts, or integers, as in train, got 0 and 'a'"),
        ([["a", ""], ["a"]], {}, r"hold a label in .* 'train', got none in 1 rows \(first in row 1"),
        ([["a", "b"], [" "]], {}, "hold a label in every row of split 'test', got none in 1 rows"),
        ([["a", "a "], ["a"]], {}, "of train to differ visibly, got 'a' and 'a ' differ only by spaces"),
        ([["caf\u00e9", "cafe\u0301"], ["b"]], {}, r"visibly, got 'cafe\\u0301' and 'caf\\xe9' differ"),
        (
            [["a", "b"], ["b "]],
            {},
            r"among a, b, got 'b ' in row 0 \(1 such rows\) \('b ' and 'b' differ only",
        ),
        (AB, {"label_column": "labels"}, "got 'labels'; did you mean 'label'"),
        (AB, {"text_column": "txt"}, "be one of text, label, got 'txt'; did you mean 'text'"),
        (AB, {"image_column": "text"}, "one of text_column and image_column to be given"),
        (AB, {"text_column": None}, "one of text_column and image_column to be given"),
    ],
)
def test_columns_refuse_values(labels: list, options: dict, message: str) -> None:
    dataset = splits_of(text=[["x", "y"], ["w"]], label=labels)
    with pytest.raises(ValueError, match=message):
        choose_columns(dataset, **{"text_column": "text", **options})


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        ({"label": [[0.5, 1.0], [0.5]]}, "text", "column 'label' to hold one class in each row"),
        ({"label": [[[0], [1]], [[0]]]}, "text", "column 'label' to hold one class in each row"),
        ({"text": [[1, 2], [3]]}, "text", "column 'text' to hold texts in split 'train'"),
        ({"text": [[1, 2], [3]]}, "image", "column 'text' to hold images in split 'train'"),
    ],
)
def test_columns_refuse_types(columns: dict, kind: str, message: str) -> None:
    dataset = splits_of(**{"text": [["x", "y"], ["w"]], "label": AB, **columns})
    with pytest.raises(TypeError, match=message):
        choose_columns(dataset, **{f"{kind}_column": "text"})


def test_missing_text_and_empty_split_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'text' to have a value in every row of split 'test'"):
        choose_columns(splits_of(text=[["x", "y"], [None, "z"]], label=[[0, 1], [0, 1]]), text_column="text")
    with pytest.raises(ValueError, match="expected split 'test' to have rows, got 0"):
        choose_columns(splits_of(text=[["x", "y"], []], label=[[0, 1], []]), text_column="text")


# --- splits ------------------------------------------------------------------------------------------


def numbered(labels: list[int]) -> DatasetDict:
    rows = Dataset.from_dict({"text": [str(i) for i in range(len(labels))], "label": labels})
    return DatasetDict({"train": rows, "test": rows.select([0])})


@pytest.mark.parametrize("stratify", [True, False])
@pytest.mark.parametrize(("size", "n_rows"), [(0.2, 20), (25, 25)])
def test_calibration_is_a_part_of_train(size: float | int, n_rows: int, stratify: bool) -> None:
    dataset = numbered([0] * 80 + [1] * 20)
    splits = split_calibration(dataset, size=size, seed=5, stratify=stratify)
    drawn = [int(text) for text in splits["calibration"]["text"][:]]
    rest = [int(text) for text in splits["train"]["text"][:]]
    assert len(drawn) == n_rows
    assert sorted(drawn + rest) == list(range(100))
    assert drawn == sorted(drawn)
    assert rest == sorted(rest)
    assert splits["test"] is dataset["test"]
    if stratify:
        assert Counter(splits["calibration"]["label"][:]) == {0: n_rows * 4 // 5, 1: n_rows // 5}
    again = split_calibration(dataset, size=size, seed=5, stratify=stratify)
    assert again["calibration"]["text"][:] == splits["calibration"]["text"][:]
    other = split_calibration(dataset, size=size, seed=6, stratify=stratify)
    assert other["calibration"]["text"][:] != splits["calibration"]["text"][:]


def test_calibration_that_is_there_is_used() -> None:
    dataset = numbered([0, 1] * 5)
    dataset["calibration"] = dataset["test"]
    assert split_calibration(dataset, size=0.5) is dataset


@pytest.mark.parametrize("seed", range(20))
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


def test_subsets_are_reproducible_and_nested() -> None:
    dataset = split_calibration(numbered([0, 1] * 50), size=0.2)
    small = limit_samples(dataset, max_train_samples=10, max_calibration_samples=500, seed=1)
    large = limit_samples(dataset, max_train_samples=30, seed=1)
    assert {name: len(split) for name, split in small.items()} == {"train": 10, "calibration": 20, "test": 1}
    assert set(small["train"]["text"][:]) < set(large["train"]["text"][:])
    again = limit_samples(dataset, max_train_samples=10, seed=1)
    assert again["train"]["text"][:] == small["train"]["text"][:]
    other = limit_samples(dataset, max_train_samples=10, seed=2)
    assert other["train"]["text"][:] != small["train"]["text"][:]
    kept = [int(text) for text in large["train"]["text"]]
    assert kept == sorted(kept)
    assert max(kept) > 80  # not the first rows
    with pytest.raises(ValueError, match="max_test_samples to be at least 1"):
        limit_samples(dataset, max_test_samples=0)


def test_the_seed_of_the_splits_draws_their_subsets(tmp_path: Path) -> None:
    for name, n in (("train", 400), ("test", 200)):
        rows = "".join(f"{name} {i},{'ab'[i % 2]}\n" for i in range(n))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}")

    def texts(seed: int) -> dict[str, list[str]]:
        files = {f"{name}_file": str(tmp_path / f"{name}.csv") for name in ("train", "test")}
        limits = {"max_train_samples": 40, "max_calibration_samples": 20, "max_test_samples": 30}
        arguments = DataArguments(**files, **limits, split_seed=seed)
        return {name: split["text"][:] for name, split in load_data(arguments).items()}

    first, other = texts(0), texts(1)
    assert {name: len(kept) for name, kept in first.items()} == {"train": 40, "calibration": 20, "test": 30}
    assert texts(0) == first
    for name, kept in first.items():
        assert kept == sorted(kept, key=lambda text: int(text.split()[1]))
        assert kept != other[name]


# --- another test split --------------------------------------------------------------------------------


def test_drawn_test_rows_come_from_train_and_test_and_leave_both() -> None:
    rows = numbered([0, 1, 1, 2] * 20)["train"]
    dataset = DatasetDict({"train": rows.select(range(50)), "test": rows.select(range(50, 80))})
    drawn = draw_test(dataset, size=0.25, seed=3)
    assert drawn["test"].num_rows == 20
    assert Counter(drawn["test"]["label"][:]) == {0: 5, 1: 10, 2: 5}
    assert sorted([*drawn["train"]["text"], *drawn["test"]["text"]]) == sorted(rows["text"])
    assert {int(text) >= 50 for text in drawn["test"]["text"]} == {True, False}
    assert draw_test(dataset, size=0.25, seed=3)["test"]["text"][:] == drawn["test"]["text"][:]
    assert draw_test(dataset, size=0.25, seed=4)["test"]["text"][:] != drawn["test"]["text"][:]
    without_test = DatasetDict({"train": dataset["train"]})
    assert draw_test(without_test, size=10)["test"].num_rows == 10


def test_two_draws_with_one_seed_are_not_of_one_stream() -> None:
    """Else the calibration rows would be those at the places that the test rows had before."""
    rows = numbered([0, 1] * 50)["train"]
    test = draw_test(DatasetDict({"train": rows}), size=0.25, seed=3)["test"]
    whole = DatasetDict({"train": rows, "test": rows})
    calibration = split_calibration(whole, size=0.25, seed=3)["calibration"]
    assert len(test) == len(calibration) == 25
    assert sorted(test["text"][:]) != sorted(calibration["text"][:])


def test_of_a_file_alone_rows_are_held_out_to_test_on(tmp_path: Path) -> None:
    rows = "".join(f"text {i},{i % 4}\n" for i in range(200))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}")
    file = str(tmp_path / "train.csv")
    with pytest.warns(UserWarning, match="no test_file, so 20% of the rows of train_file are held out"):
        dataset = load_data(DataArguments(train_file=file))
    sizes = {name: len(split) for name, split in dataset.items()}
    assert sizes == {"train": 144, "calibration": 16, "test": 40}
    assert len({text for split in dataset.values() for text in split["text"]}) == 200
    sized = load_data(DataArguments(train_file=file, test_size=20))
    assert len(sized["test"]) == 20


def test_test_size_is_checked() -> None:
    with pytest.raises(ValueError, match="expected size to"):
        draw_test(numbered([0, 1] * 4), size=1.5)
    with pytest.raises(ValueError, match="got 9 rows; pass a smaller one; it is calibration_size"):
        draw_test(numbered([0, 1] * 4), size=9)


# --- images ------------------------------------------------------------------------------------------

RAW = ViTImageProcessorPil(do_resize=False, do_rescale=False, do_normalize=False)


def gradient_image(width: int, height: int) -> Image.Image:
    """No two pixels are alike, and none is black."""
    values = 1 + np.arange(width * height).reshape(height, width)
    return Image.fromarray(
        np.stack([values % 251 + 1, values // 251 + 1, values * 0 + 9], -1).astype(np.uint8)
    )


def pixels_of(transform: ImageTransform, image: Image.Image) -> np.ndarray:
    return transform({"image": [image]})["pixel_values"][0].numpy()


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(size={"height": 32, "width": 32}),
        ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    ],
    ids=["vit", "resnet"],
)
@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_processors_accept_images_of_every_kind(processor, crop: str) -> None:
    color = gradient_image(40, 50)
    palette = color.convert("P")
    palette.info["transparency"] = b"\x00" * 10
    images = [color, *map(color.convert, ("L", "RGBA", "1", "CMYK")), palette]
    batch = ImageTransform(processor, crop=crop, flip=True)({"image": images, "label": [0, 1, 2, 3, 4, 5]})
    rows = zip(*(batch[key] for key in batch), strict=True)
    collated = collate_images([{"pixel_values": pixels, "labels": label} for pixels, label in rows])
    assert collated["pixel_values"].shape == (6, 3, 32, 32)
    assert collated["pixel_values"].dtype == torch.float32
    assert collated["labels"].tolist() == [0, 1, 2, 3, 4, 5]


def test_plain_transform_is_the_processor() -> None:
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    image = gradient_image(20, 30)
    expected = processor(images=image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(pixels_of(ImageTransform(processor), image), expected)
    gray = gradient_image(8, 8).convert("L")  # three equal channels in its own values
    pixels = pixels_of(ImageTransform(RAW), gray)
    np.testing.assert_array_equal(pixels, np.broadcast_to(np.asarray(gray), (3, 8, 8)))


def test_padded_crop_shifts_the_image_over_black() -> None:
    torch.manual_seed(0)
    image = gradient_image(32, 16)  # borders of 4 and 2
    canvas = np.zeros((3, 16 + 4, 32 + 8))
    canvas[:, 2:-2, 4:-4] = np.asarray(image).transpose(2, 0, 1)
    seen = set()
    for _ in range(300):
        pixels = pixels_of(ImageTransform(RAW, crop="pad"), image)
        offsets = [
            (top, left)
            for top in range(5)
            for left in range(9)
            if np.array_equal(pixels, canvas[:, top : top + 16, left : left + 32])
        ]
        assert len(offsets) == 1
        seen.update(offsets)
    assert len(seen) == 45  # every shift occurs


def test_resized_crop_cuts_parts_of_the_right_size() -> None:
    torch.manual_seed(0)
    image = gradient_image(60, 60)
    shares = []
    for _ in range(300):
        _, height, width = pixels_of(ImageTransform(RAW, crop="resized"), image).shape
        shares.append(height * width / 3600)
        if max(height, width) < 60:
            assert 0.7 < width / height < 1.43  # 3/4 to 4/3, up to whole pixels
    assert min(shares) < 0.12
    assert max(shares) > 0.9
    assert min(shares) > 0.07


def test_flip_mirrors_half_of_the_images() -> None:
    torch.manual_seed(0)
    image = gradient_image(8, 4)
    upright = np.asarray(image).transpose(2, 0, 1)
    results = [pixels_of(ImageTransform(RAW, flip=True), image) for _ in range(400)]
    kept = sum(np.array_equal(pixels, upright) for pixels in results)
    mirrored = sum(np.array_equal(pixels, upright[:, :, ::-1]) for pixels in results)
    assert kept + mirrored == 400
    assert 150 < kept < 250


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def image_splits(images: list[dict], labels: list[int]) -> DatasetDict:
    rows = Dataset.from_dict({"img": images, "label": labels})
    return DatasetDict({"train": rows, "test": rows})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_follows_the_seed_with_and_without_workers(workers: int) -> None:
    images = [{"bytes": encoded(gradient_image(16, 16)), "path": None}] * 12
    dataset = choose_columns(image_splits(images, [0, 1] * 6), image_column="img")
    rows = dataset["train"].with_transform(ImageTransform(RAW, crop="pad", flip=True))

    def epoch(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(
            rows, batch_size=4, num_workers=workers, collate_fn=collate_images, shuffle=True
        )
        return torch.cat([batch["pixel_values"] for batch in loader])

    first = epoch(0)
    assert torch.equal(first, epoch(0))
    assert not torch.equal(first, epoch(1))
    assert len(torch.unique(first, dim=0)) > 6  # each image draws its own crop


def test_image_folder_trains_with_the_stock_trainer(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for shade, name in ((40, "dark"), (220, "light")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (20, 20), (shade + i,) * 3).save(folder / f"{i}.png")
    dataset = load_splits(str(tmp_path / "images"), cache_dir=tmp_path / "cache")
    dataset = choose_columns(dataset, image_column="image")
    assert dataset["train"].features["label"].names == ["dark", "light"]
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=2)
    model = ResNetForImageClassification(config)
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    training = {"per_device_train_batch_size": 4, "num_train_epochs": 4, "learning_rate": 0.05}
    folder = str(tmp_path / "run")
    arguments = TrainingArguments(folder, remove_unused_columns=False, use_cpu=True, **training, **quiet)
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate_images,
        train_dataset=dataset["train"].with_transform(ImageTransform(processor, crop="pad", flip=True)),
        eval_dataset=dataset["test"].with_transform(ImageTransform(processor)),
    )
    trainer.train()
    prediction = trainer.predict(trainer.eval_dataset)
    assert prediction.label_ids.tolist() == dataset["test"]["label"][:]
    assert (prediction.predictions.argmax(axis=1) == prediction.label_ids).all()


def test_real_parquet_images(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "cifar10" / "test.parquet"
    dataset = load_splits(train_file=path, test_file=path, cache_dir=tmp_path)
    dataset = choose_columns(dataset, image_column="image")
    assert dataset["test"].cache_files  # the images are not copied
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    rows = dataset["test"].with_transform(ImageTransform(processor))
    batch = collate_images([rows[i] for i in range(4)])
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    assert batch["labels"].tolist() == [3, 8, 8, 0]  # cat, ship, ship, airplane
    stored = dataset["test"][0]["image"]["bytes"]
    raw = np.asarray(Image.open(io.BytesIO(stored)))
    np.testing.assert_allclose(
        batch["pixel_values"][0].numpy() * 127.5 + 127.5, raw.transpose(2, 0, 1), atol=1e-3
    )


def test_paths_in_a_csv_file_are_images(tmp_path: Path) -> None:
    for i in range(2):
        gradient_image(8, 8 + i).save(tmp_path / f"{i}.png")
    lines = "".join(f"{tmp_path}/{i}.png,{i}\n" for i in range(2))
    (tmp_path / "rows.csv").write_text(f"file,label\n{lines}")
    path = tmp_path / "rows.csv"
    dataset = load_splits(train_file=path, test_file=path, cache_dir=tmp_path / "cache")
    rows = choose_columns(dataset, image_column="file")["train"].with_transform(ImageTransform(RAW))
    assert [tuple(rows[i]["pixel_values"].shape) for i in range(2)] == [(3, 8, 8), (3, 9, 8)]
    with pytest.raises(ValueError, match=r"one shape after the processor, got \[\(3, 8, 8\), \(3, 9, 8\)\]"):
        collate_images([rows[0], rows[1]])


def test_unreadable_images_are_named() -> None:
    deep = Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16))
    for stored, message in (
        (
            {"bytes": b"hello", "path": "folder/a.png"},
            "got folder/a.png; it is in no format that Pillow knows",
        ),
        ({"bytes": None, "path": "/nowhere/b.png"}, "got /nowhere/b.png"),
        ({"bytes": encoded(deep), "path": None}, "to have 8 bits a channel, got mode 'I;16'"),
        (deep.convert("F"), "to have 8 bits a channel, got mode 'F'"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageTransform(RAW)({"image": [stored]})


def test_a_wrong_crop_and_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="expected crop to be one of none, pad, resized"):
        ImageTransform(RAW, crop="random")
    with pytest.raises(ValueError, match=r"got label; .* remove_unused_columns=False"):
        ImageTransform(RAW)({"label": [1]})
