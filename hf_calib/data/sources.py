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

# Without `keep_default_na=False` the texts "NA", "null" and "None" and empty texts would become missing values.
_CSV: dict[str, object] = {"keep_default_na": False}
_READERS: dict[str, tuple[str, dict[str, object]]] = {
    ".csv": ("csv", _CSV),
    ".tsv": ("csv", {**_CSV, "sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
_OF_NO_ROWS = ("corresponds to no data", "at least one example")
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
    """Load train, test and, if there is one, calibration data, with unchanged columns; no code is run.

    The calibration data are the first existing split of `calibration`, `validation`, `valid`, `val` and `dev`. If there
    is none, use `split_calibration`.

    Args:
        source: name of a dataset on the Hub, or a local folder of images (`train/CLASS/x.png`, `test/CLASS/y.png`) or
            of csv, json or parquet files named by split. Pass it or the files.
        dataset_config: configuration of a Hub dataset with several configurations.
        revision: branch or commit of a Hub dataset; refs/convert/parquet if main has only a script.
        test_split: the split that becomes `test`: "validation" if the labels of "test" are withheld, as in GLUE; None
            if there is none yet (see `draw_test`).
        train_file: a .csv, .tsv, .json, .jsonl (also with .gz) or .parquet file, like the other two files.
        cache_dir: cache folder of `datasets`, if not the default.

    Raises:
        ValueError: if neither or both are given, or a split or file is missing, unreadable or given twice.

    >>> load_splits(train_file="missing.csv", test_file="missing.csv")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected train_file to name an existing file, got missing.csv; check the path
    """
    files = {"train": train_file, "calibration": calibration_file, "test": test_file}
    given = {role: Path(file) for role, file in files.items() if file is not None}
    one, got = (source is None) == bool(given), "both" if given else "neither"
    check(one, "data to come from source or from files", got, "give one of the two")
    if source is None:
        for role in ("train",) if test_split is None else ("train", "test"):
            way_out = "train_file and test_file are needed"
            check(
                role in given,
                f"{role}_file to be given with the other files",
                "none",
                way_out,
            )
        for role, path in given.items():  # Files are not read yet.
            _reader(f"{role}_file", path)
        check_different_files({f"{role}_file": path for role, path in given.items()})
        return DatasetDict(
            {
                role: load_file(f"{role}_file", path, cache_dir)
                for role, path in given.items()
            }
        )
    with _refusals(
        "dataset", "be loadable", source, "name a folder, or a dataset on the Hub"
    ):
        loaded = load_dataset(
            source, dataset_config, revision=revision, cache_dir=cache_dir
        )
    calibration = next(
        (name for name in _CALIBRATION_NAMES if name in loaded and name != test_split),
        None,
    )
    named = {"train": "train", "calibration": calibration, "test": test_split}
    roles = {role: name for role, name in named.items() if name is not None}
    for role, name in roles.items():
        requirement = (
            f"{role}_split to name a split of the dataset ({', '.join(loaded)})"
        )
        check(
            name in loaded,
            requirement,
            repr(name),
            "choose one of these, or make a DatasetDict yourself",
        )
    check(
        test_split != "train",
        "splits to be different for each role",
        roles,
        "use a split for one role",
    )
    return DatasetDict({role: loaded[name] for role, name in roles.items()})


def names_a_file(data: str | PathLike[str]) -> bool:
    """Whether data are a file, which may be missing, and no dataset."""
    return os.path.isfile(data) or Path(data).suffix in (*_READERS, ".gz")


def check_different_files(files: Mapping[str, str | PathLike[str]]) -> None:
    """Raise if two arguments name one file, also by a link; one that does not exist is like no other."""
    existing = {name: file for name, file in files.items() if os.path.isfile(file)}
    for (first, own), (second, other) in combinations(existing.items(), 2):
        check(
            identity(own) != identity(other),
            f"{second} to be another file than {first}",
            Path(other),
            "give each row one role, since rows that a model has seen say nothing of it",
        )


def load_file(
    argument: str, path: Path, cache_dir: str | PathLike[str] | None
) -> Dataset:
    kind, options = _reader(argument, path)
    try:
        return load_dataset(
            kind, data_files=str(path), split="train", cache_dir=cache_dir, **options
        )
    except (StopIteration, DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        # These are the errors of datasets for an empty json file, and for a csv file with names only.
        no_rows = isinstance(error, StopIteration) or any(
            words in f"{error} {cause}" for words in _OF_NO_ROWS
        )
        check(
            not no_rows, f"{argument} to have rows", f"none in {path}", "check the file"
        )
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
    """Load the rows of one split with their columns, from a file, or from a dataset on the Hub or in a folder.

    Without a split: those of the only one, or of "test". Raise ValueError if the file, dataset or split does not exist
    or is unreadable; the message has the argument.
    """
    if names_a_file(data):
        return load_file(argument, Path(data), None)
    way_out = "name a file, a folder, or a dataset on the Hub, and one of its splits"
    with _refusals(argument, f"have a split {split or 'test'!r}", str(data), way_out):
        if split is None:
            names = get_dataset_split_names(str(data))
            split = names[0] if len(names) == 1 else "test"
        return load_dataset(str(data), split=split)


def read_column(rows: Dataset, column: str) -> Any:
    """Return a column as a pyarrow ChunkedArray, without decoding, for the selected rows of the dataset."""
    return rows.select_columns([column]).with_format("arrow")[:].column(column)


@contextmanager
def _refusals(
    argument: str, requirement: str, source: str, way_out: str
) -> Iterator[None]:
    """A context that explains the errors of the Hub and of `datasets` in one sentence."""
    try:
        yield
    except (
        *(OSError, ValueError, LookupError, ImportError, RuntimeError),
        DatasetGenerationError,
    ) as error:
        # An error about the files of a folder says what is wrong in its cause.
        said: BaseException = error
        if isinstance(error, DatasetGenerationError):
            said = error.__cause__ or error
        cause = " ".join(str(said).split())[:600]
        raise InputValueError(
            expected(argument, requirement, f"{source} ({cause})", way_out)
        ) from error


def _reader(argument: str, path: Path) -> tuple[str, dict[str, object]]:
    check(
        os.path.isfile(path),
        f"{argument} to name an existing file",
        path,
        "check the path",
    )
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    is_known = suffix.lower() in _READERS
    check(
        is_known,
        f"{argument} to end in a known format",
        path.name,
        did_you_mean(suffix, _READERS),
    )
    return _READERS[suffix.lower()]
