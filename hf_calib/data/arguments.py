"""Data arguments of the recipes: the dataset, and the rows and columns to use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from datasets import Dataset, DatasetDict, concatenate_datasets

from hf_calib._errors import check
from hf_calib._text import option, short_names
from hf_calib.data.columns import choose_columns, choose_inputs
from hf_calib.data.docstrings import docstring_dataset
from hf_calib.data.images import check_images, conversion_note
from hf_calib.data.labels import has_several_labels
from hf_calib.data.sources import (
    check_different_files,
    load_rows,
    load_splits,
    names_a_file,
)
from hf_calib.data.splits import draw_test, limit_samples, split_calibration
from hf_calib.metrics.checks import check_integer, check_names, check_type

BUILT_IN = "docstrings"
# The share of a single file that is held out to test on.
_HELD_OUT = 0.2
_OF_LABELS = (
    "label_column",
    "class_names",
    "multi_label",
    "label_separator",
    "label_columns",
    "no_label",
)


@dataclass
class DataArguments:
    """The dataset, and the rows and columns to use."""

    dataset: str | None = option(
        f"Of the Hub, a local folder, or {BUILT_IN!r}, which needs no network."
    )
    dataset_config: str | None = option("Configuration of a Hub dataset.")
    dataset_revision: str | None = option(
        "Branch or commit; refs/convert/parquet where main has a script."
    )
    train_file: str | None = option(
        "csv, tsv, json, jsonl (also .gz) or parquet; used instead of dataset."
    )
    calibration_file: str | None = option("Without it, rows of train are held out.")
    test_file: str | None = option(
        "For the report. Without it, test_size of train_file; sentences need it."
    )
    test_split: str = option("'validation' if the test labels are withheld.", "test")
    text_column: str = option("Column of texts.", "text")
    image_column: str = option("Column of images.", "image")
    label_column: str = option("Column of labels.", "label")
    class_names: list[str] | None = option("Class names in order of their id.")
    multi_label: bool = option(
        "A row has any number of labels: a list, or a text with label_separator.", False
    )
    label_separator: str | None = option(
        "With multi_label: between the labels of a text, such as '|'."
    )
    label_columns: list[str] | None = option(
        "With multi_label: one column of 0 and 1 for each label."
    )
    no_label: str | None = option(
        "With multi_label: written where a row has none, such as 'No Finding'."
    )
    calibration_size: float = option(
        "Rows of calibration_from to hold out: a fraction below 1, or a number of at least 2.",
        0.1,
    )
    calibration_from: str = option(
        "Split to hold them out of; AdaFocal uses test of ImageNet.", "train"
    )
    test_size: float | None = option(
        "Draw a new test set of train and test, by a fraction or a number of rows; "
        "0.2 of a train_file alone."
    )
    split_seed: int = option(
        "Seed of the splits; keep it for all runs that are compared.", 0
    )
    ood_data: list[str] | None = option(
        "Files or datasets of inputs of none of the classes."
    )
    ood_split: str = option("Of these, where they are no files.", "test")
    max_train_samples: int | None = option(
        "Use this many random rows, at least one per class."
    )
    max_calibration_samples: int | None = option("Use this many random rows.")
    max_test_samples: int | None = option("Use this many random rows.")

    def __post_init__(self) -> None:
        check_integer("split_seed", self.split_seed, 0, "the default is 0")
        # A command line makes floats of numbers of rows.
        self.calibration_size = rows_or_share("calibration_size", self.calibration_size)
        if self.test_size is not None:
            self.test_size = rows_or_share("test_size", self.test_size)
        for name, value in vars(self).items():
            if name.startswith("max_") and value is not None:
                check_integer(name, value, 1, "leave it out for all")
        for name in ("class_names", "label_columns", "ood_data"):
            check_names(name, getattr(self, name))
        self._check_all_are_read()

    def _check_all_are_read(self) -> None:
        """Raise for options that others make ineffective."""
        # Who names a split that is not read believes that the numbers are of it.
        is_file = self.train_file is not None
        is_built_in = not is_file and self.dataset == BUILT_IN
        is_folder = not is_file and os.path.isdir(self.dataset or "")
        are_files = all(names_a_file(source) for source in self.ood_data or ())
        of_the_hub = ("dataset_config", "dataset_revision", "test_split")
        of_several = ("label_columns", "label_separator", "no_label")
        of_one_column = ("label_column", "label_separator", "no_label")
        of_columns = ["label_column", "class_names"]
        # The inputs of ood_data are read from these columns also next to the built-in dataset.
        if not self.ood_data:
            of_columns += ["text_column", "image_column"]
        held_out = ("calibration_size", "calibration_from")
        rules: list[tuple[bool, str, Sequence[str]]] = [
            (is_file, "with train_file", of_the_hub),
            (not is_file, "without train_file", ("calibration_file", "test_file")),
            (bool(self.calibration_file), "with calibration_file", held_out),
            (is_built_in, f"for dataset {BUILT_IN!r}", (*of_the_hub, *of_columns)),
            (is_folder, "for a folder", ("dataset_revision",)),
            (not self.multi_label, "without multi_label", of_several),
            (bool(self.label_columns), "with label_columns", of_one_column),
            (are_files, "without a dataset in ood_data", ("ood_split",)),
        ]
        for holds, case, names in rules:
            if holds:
                check_left_out(self, names, case)


def check_left_out(args: DataArguments, names: Iterable[str], case: str) -> None:
    """Raise if an option that is not read in this case is given, other than by its default."""
    defaults = {each.name: each.default for each in fields(args)}
    for name in names:
        given = getattr(args, name)
        default = defaults[name] or ""
        requirement = f"{name} to be left out {case}, where it has no effect"
        way_out = f"if it is of a configuration, override it by {default!r}"
        is_left_out = not given or given == default
        check(is_left_out, requirement, repr(given), way_out)


def load_data(args: DataArguments, *, images: bool = False) -> DatasetDict:
    """Load the splits train, calibration and test, with columns `text` and `label`.

    For images: `image`, `label` and `row`, the place of an image, such as "row 17 of train", for
    errors when it is decoded later. Raise ValueError if data are missing, unreadable or empty, or
    do not fit.
    """
    kind = "images" if images else "texts"
    unread = "text_column" if images else "image_column"
    # The recipes for texts and for images share these arguments.
    check_left_out(args, [unread], f"for {kind}")
    is_built_in = args.train_file is None and args.dataset == BUILT_IN
    # These are known before data are loaded.
    if args.multi_label:
        way_out = "leave one of the two out"
        requirement = f"dataset {BUILT_IN!r} to be used with one label per row"
        check(not is_built_in, requirement, "multi_label", way_out)
        requirement = "ood_data to be used with one label per row"
        check(not args.ood_data, requirement, "multi_label", way_out)
    is_one_file = bool(args.train_file and not args.test_file)
    test_size = args.test_size
    if is_one_file and test_size is None:
        test_size = _HELD_OUT
        warnings.warn(
            f"There is no test_file, so {_HELD_OUT:.0%} of the rows of train_file are held out to "
            "test on. Name a test_file, or set test_size.",
            stacklevel=2,
        )
    if is_built_in and not images:
        dataset = docstring_dataset(seed=args.split_seed)
    else:
        stored = splits_of(args, None if is_one_file else args.test_split)
        of_labels = {name: getattr(args, name) for name in _OF_LABELS}
        dataset = choose_columns(stored, **of_labels, **_input_column(args, images))
    if images:
        for name, split in dataset.items():
            dataset[name] = _checked_images(split, name)
    # The test rows are drawn first, so that their number does not depend on the calibration's.
    if test_size is not None:
        dataset = draw_test(dataset, size=test_size, seed=args.split_seed)
    return held_out(dataset, args)


def splits_of(args: DataArguments, test_split: str | None) -> DatasetDict:
    """Load the splits without changing them."""
    return load_splits(
        # A file overrides the dataset of a configuration.
        None if args.train_file else args.dataset,
        dataset_config=args.dataset_config,
        revision=args.dataset_revision,
        test_split=test_split,
        train_file=args.train_file,
        calibration_file=args.calibration_file,
        test_file=args.test_file,
    )


def held_out(
    dataset: DatasetDict, args: DataArguments, *, stratify: bool = True
) -> DatasetDict:
    """Return the splits with one for calibration, each with at most the given number of rows."""
    dataset = split_calibration(
        dataset,
        size=args.calibration_size,
        seed=args.split_seed,
        stratify=stratify,
        source=args.calibration_from,
    )
    return limit_samples(
        dataset,
        max_train_samples=args.max_train_samples,
        max_calibration_samples=args.max_calibration_samples,
        max_test_samples=args.max_test_samples,
        seed=args.split_seed,
    )


def load_ood(args: DataArguments, *, images: bool = False) -> dict[str, Dataset]:
    """Load the inputs of `ood_data` by name, each with the column `text`, or `image` and `row`.

    A file or folder is named by the last two parts of its path, or by more if two names would be
    equal. Raise ValueError if data are missing, unreadable or empty, have no such column, or are
    given twice.
    """
    sources = args.ood_data or []
    roles = ("train_file", "calibration_file", "test_file")
    files = {name: getattr(args, name) for name in roles if getattr(args, name)}
    # Inputs that the model was trained on cannot show how it meets others.
    for source in sources:
        check_different_files({**files, "ood_data": source})
    found = {}
    for source, name in zip(sources, short_names(sources), strict=True):
        rows = load_rows(source, split=args.ood_split, argument="ood_data")
        found[name] = choose_inputs(rows, name=source, **_input_column(args, images))
        if images:
            found[name] = _checked_images(found[name], name)
    return found


def _input_column(args: DataArguments, images: bool) -> dict[str, Any]:
    if images:
        return {"image_column": args.image_column}
    return {"text_column": args.text_column}


def _checked_images(rows: Dataset, name: str) -> Dataset:
    """Add the rows' names; raise for an unreadable image, and warn of those that are not RGB."""
    note = conversion_note(check_images(rows, name), name)
    if note:
        warnings.warn(note, stacklevel=3)
    # Rows are named here, because later splits and subsets number them anew.
    places = [f"row {number} of {name}" for number in range(len(rows))]
    return concatenate_datasets([rows, Dataset.from_dict({"row": places})], axis=1)


def rows_or_share(name: str, size: Any) -> float | int:
    """Return a size for the splits: a fraction in (0, 1), or a number of rows as an integer.

    >>> rows_or_share("test_size", 0.2), rows_or_share("test_size", 2000.0)
    (0.2, 2000)
    """
    way_out = "0.1 is a tenth of the rows, and 100 are 100 rows"
    is_number = isinstance(size, Real) and not isinstance(size, bool)
    check_type(is_number, f"{name} to be a number", repr(size), way_out)
    # 1.0 may be meant as all rows, and 1 as one: both are refused.
    is_count = isinstance(size, Integral) or (size > 1 and float(size).is_integer())
    fits = 0 < size < 1 or (is_count and size >= 2)
    requirement = f"{name} to be a fraction below 1, or a number of rows from 2"
    check(fits, requirement, repr(size), way_out)
    return int(size) if is_count else float(size)


def label_maps(dataset: DatasetDict) -> dict[str, Any]:
    """Return `num_labels`, `id2label` and `label2id` for a config.

    With several labels per row, also `problem_type`.
    """
    train = dataset["train"]
    feature = train.features["label"]
    if not has_several_labels(train):
        return maps_of(feature.names)
    # Otherwise transformers guesses from the dtype of the labels, at the first training step.
    problem = {"problem_type": "multi_label_classification"}
    return maps_of(feature.feature.names) | problem


def maps_of(names: list[str]) -> dict[str, Any]:
    """Return the entries of a config about its classes."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }
