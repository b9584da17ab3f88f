"""Data sources: the Hub, a local folder, or one file per split, with columns as they are stored."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, get_dataset_split_names, load_dataset
from datasets.exceptions import DatasetGenerationError

from hf_calib._errors import InputValueError, check, did_you_mean, expected
from hf_calib._files import identity

# Otherwise the texts "NA", "null" and "None" and empty texts would become missing values.
_AS_WRITTEN = {"keep_default_na": False}
# The reader of `datasets` and its options, by the ending of a file.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", _AS_WRITTEN),
    ".tsv": ("csv", {**_AS_WRITTEN, "sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
# Parts of what `datasets` says of an empty json file, and of a csv file with names only.
_OF_NO_ROWS = ("corresponds to no data", "at least one example")
# The errors of broken or missing files, of the Hub, and of readers.
_UNLOADABLE = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    RuntimeError,
    DatasetGenerationError,
)
_CALIBRATION_NAMES = ("calibration", "validation", "valid", "val", "dev")


def load_splits(
    source: str | None = None,
    *,
    dataset_config: str | None = None,
    revision: str | None = None,
    test_split: str | None = "test",
    train_file: str | PathLike[str] | None = None,
    calibration_file: str | PathLike[str] | None = None,
    test_file: str | PathLike[str] | None = None,
    cache_dir: str | PathLike[str] | None = None,
) -> DatasetDict:
    """Load train, test and, if there is one, calibration data, with unchanged columns.

    No code is run. The calibration data are the first existing split of `calibration`,
    `validation`, `valid`, `val` and `dev`. If there is none, use `split_calibration`.

    Args:
        source: name of a dataset on the Hub, or a local folder of images (`train/CLASS/x.png`,
            `test/CLASS/y.png`) or of csv, json or parquet files named by split. Pass it or the
            files.
        dataset_config: configuration of a Hub dataset with several configurations.
        revision: branch or commit of a Hub dataset; refs/convert/parquet if main has only a script.
        test_split: the split that becomes `test`: "validation" if the labels of "test" are
            withheld, as in GLUE; None if there is none yet (see `draw_test`).
        train_file: a .csv, .tsv, .json, .jsonl (also with .gz) or .parquet file, like the other two
            files.
        cache_dir: cache folder of `datasets`, if not the default.

    Raises:
        ValueError: if neither or both are given, or a split or file is missing, unreadable or given
            twice.

    >>> load_splits()
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected data to come from source or from files, got neither;
    give one of the two
    """
    files = {
        "train_file": train_file,
        "calibration_file": calibration_file,
        "test_file": test_file,
    }
    given = {name: Path(file) for name, file in files.items() if file is not None}
    is_one = (source is None) == bool(given)
    got = "both" if given else "neither"
    check(is_one, "data to come from source or from files", got, "give one of the two")
    if source is None:
        return _load_files(given, test_split is not None, cache_dir)
    way_out = "name a folder, or a dataset on the Hub"
    with _refusals("dataset", "be loadable", source, way_out):
        loaded = load_dataset(
            source, dataset_config, revision=revision, cache_dir=cache_dir
        )
    # A split is found by its name, so a misspelt one has to be refused, and not left out.
    roles = {"train": "train"}
    # A validation split that plays the test set is not the calibration set as well.
    known = [name for name in _CALIBRATION_NAMES if name != test_split]
    found = [name for name in known if name in loaded]
    if found:
        roles["calibration"] = found[0]
    if test_split is not None:
        roles["test"] = test_split
    for role, name in roles.items():
        requirement = (
            f"{role}_split to name a split of the dataset ({', '.join(loaded)})"
        )
        way_out = "choose one of these, or make a DatasetDict yourself"
        check(name in loaded, requirement, repr(name), way_out)
    requirement = "splits to be different for each role"
    check(test_split != "train", requirement, roles, "use a split for one role")
    return DatasetDict({role: loaded[name] for role, name in roles.items()})


def _load_files(
    files: Mapping[str, Path],
    needs_test: bool,
    cache_dir: str | PathLike[str] | None,
) -> DatasetDict:
    """Load files by their arguments, after all of them are checked."""
    needed = ["train_file", "test_file"] if needs_test else ["train_file"]
    for name in needed:
        requirement = f"{name} to be given with the other files"
        way_out = "train_file and test_file are needed"
        check(name in files, requirement, "none", way_out)
    # A misspelt test_file should not be found after minutes of reading the first file.
    for name, path in files.items():
        _reader(name, path)
    check_different_files(files)
    loaded = DatasetDict()
    for name, path in files.items():
        role = name.removesuffix("_file")
        loaded[role] = _load_file(name, path, cache_dir)
    return loaded


def names_a_file(data: str | PathLike[str]) -> bool:
    """Whether data are a file, which may be missing, and no dataset."""
    # A misspelt name of a file is not looked up on the Hub.
    return os.path.isfile(data) or Path(data).suffix in (*_READERS, ".gz")


def check_different_files(files: Mapping[str, str | PathLike[str]]) -> None:
    """Raise if two arguments name one file, also by a link; a missing one is like no other."""
    existing = {name: file for name, file in files.items() if os.path.isfile(file)}
    way_out = (
        "give each row one role, since rows that a model has seen say nothing of it"
    )
    for (first, own), (second, other) in combinations(existing.items(), 2):
        are_two = identity(own) != identity(other)
        requirement = f"{second} to be another file than {first}"
        check(are_two, requirement, Path(other), way_out)


def _load_file(
    argument: str, path: Path, cache_dir: str | PathLike[str] | None
) -> Dataset:
    kind, options = _reader(argument, path)
    try:
        return load_dataset(
            kind,
            data_files=str(path),
            # A file that is loaded alone is the split `train`, whatever its role here.
            split="train",
            cache_dir=cache_dir,
            **options,
        )
    except (StopIteration, *_UNLOADABLE) as error:
        # A DatasetGenerationError says only that there was an error.
        cause = error.__cause__ or error
        said = f"{error} {cause}"
        # `datasets` raises StopIteration for a json file without any text.
        has_rows = not isinstance(error, StopIteration)
        has_rows = has_rows and not any(words in said for words in _OF_NO_ROWS)
        check(has_rows, f"{argument} to have rows", f"none in {path}", "check the file")
        way_out = f"{type(cause).__name__}: {cause}"
        raise InputValueError(
            expected(argument, f"be readable as {kind}", path, way_out)
        ) from error


def load_rows(
    data: str | PathLike[str],
    *,
    split: str | None = "test",
    argument: str = "data",
) -> Dataset:
    """Load the rows of one split with their columns, from a file, a folder or the Hub.

    Without a split: those of the only one, or of "test". Raise ValueError if the file, dataset or
    split does not exist or is unreadable; the message has the argument.
    """
    if names_a_file(data):
        return _load_file(argument, Path(data), None)
    way_out = "name a file, a folder, or a dataset on the Hub, and one of its splits"
    with _refusals(argument, f"have a split {split or 'test'!r}", str(data), way_out):
        # Data without labels, such as those of another domain, are often of one split.
        if split is None:
            names = get_dataset_split_names(str(data))
            split = names[0] if len(names) == 1 else "test"
        return load_dataset(str(data), split=split)


def read_column(rows: Dataset, column: str) -> Any:
    """Return a column as a pyarrow ChunkedArray, without decoding, for the selected rows."""
    # A slice has the selected rows only; `rows.data` would be the table that they are
    # selected from.
    return rows.select_columns([column]).with_format("arrow")[:].column(column)


def column_of(
    rows: Dataset,
    argument: str,
    column: str,
    *,
    where: str = "",
    way_out: str = "remove these rows",
    may_be_null: bool = False,
) -> Any:
    """Return a column like `read_column`; raise if the column or a value is missing."""
    names = rows.column_names
    requirement = f"{argument} to be one of {', '.join(names)}"
    check(column in names, requirement, repr(column), did_you_mean(column, names))
    stored = read_column(rows, column)
    if stored.null_count and not may_be_null:
        first = stored.is_null().index(True).as_py()
        requirement = f"column {column!r} to have a value in every row{where}"
        got = f"{stored.null_count} without (first in row {first})"
        check(False, requirement, got, way_out)
    return stored


def column_of_split(
    name: str, split: Dataset, column: str, way_out: str = "remove these rows"
) -> Any:
    """Return a column of a split, which must have rows; errors have the split's name."""
    where = f"split {name!r}"
    way_of_rows = "check the file or the split's name"
    check(len(split) > 0, f"{where} to have rows", 0, way_of_rows)
    argument = f"the column to read from {where}"
    return column_of(split, argument, column, where=f" of {where}", way_out=way_out)


@contextmanager
def _refusals(
    argument: str, requirement: str, source: str, way_out: str
) -> Iterator[None]:
    """A context that explains the errors of the Hub and of `datasets` in one sentence."""
    try:
        yield
    except _UNLOADABLE as error:
        # An error about the files of a folder says what is wrong in its cause.
        said: BaseException = error
        if isinstance(error, DatasetGenerationError):
            said = error.__cause__ or error
        # Some of these messages fill a page.
        cause = " ".join(str(said).split())[:600]
        raise InputValueError(
            expected(argument, requirement, f"{source} ({cause})", way_out)
        ) from error


def _reader(argument: str, path: Path) -> tuple[str, dict[str, Any]]:
    """The reader of an existing file, by its ending."""
    is_file = os.path.isfile(path)
    check(is_file, f"{argument} to name an existing file", path, "check the path")
    ending = path.suffix.lower()
    if path.suffix == ".gz":
        ending = path.with_suffix("").suffix.lower()
    way_out = did_you_mean(ending, _READERS)
    requirement = f"{argument} to end in a known format"
    check(ending in _READERS, requirement, path.name, way_out)
    return _READERS[ending]
