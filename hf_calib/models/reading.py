"""Rows for a model: their data, the reading of their columns, and labels as ids of its classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import check, few
from hf_calib._text import as_number, option, plain_name
from hf_calib.metrics.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_type,
    check_weights,
)
from hf_calib.predictions.labels import are_numbers, check_ids, label_ids

if TYPE_CHECKING:
    from datasets import Dataset

# Several in one text are separated by commas.
Names = str | Sequence[str] | None

_AS_TYPED = "write it as on the command line"


def without_none(kind: Any) -> Any:
    """The type of an option that is given, by that of its field, which may also be None.

    >>> without_none(int | None), without_none(list[str])
    (<class 'int'>, list[str])
    """
    kept = [each for each in get_args(kind) if each is not type(None)]
    may_be_none = type(None) in get_args(kind) and len(kept) == 1
    return kept[0] if may_be_none else kind


def option_value(
    name: str, kind: Any, given: Any, ends: tuple[int, int] = (0, 0)
) -> Any:
    """An option's value in its type; given may be a path, one text of a list, or a NumPy integer.

    An integer has to lie within the ends.

    Raises:
        InputError: if it is of another type, or not one of the type's values.

    >>> option_value("by", Names, "country,age")
    ['country', 'age']
    >>> option_value("n_bins", int, np.int64(10), (1, 20))
    10
    """
    value = os.fspath(given) if isinstance(given, os.PathLike) else given
    if value is None and type(None) in get_args(kind):
        return None
    plain = without_none(kind)
    if plain == Names:
        parts = value.split(",") if isinstance(value, str) else value
        texts = _texts(name, parts, given)
        counts = Counter(texts)
        twice = [text for text, times in counts.items() if times > 1]
        check(not twice, f"{name} to be different texts", few(twice), "name each once")
        return texts or None
    if plain == list[str]:
        parts = [value] if isinstance(value, str) else value
        texts = _texts(name, parts, given)
        check(texts != [], f"{name} to be a text or texts", "none", _AS_TYPED)
        return texts
    if plain in (str, Path):
        is_text = isinstance(value, str)
        check_type(is_text, f"{name} to be a text or a path", repr(given), _AS_TYPED)
        _check_not_empty(name, [value])
        return plain(value)
    if plain is int:
        least, most = ends
        way_out = "leave it out for the default"
        return check_integer(name, value, least, way_out, most=most)
    if plain is bool:
        check_flag(name, value)
    if get_origin(plain) is Literal:
        check_choice(name, value, get_args(plain))
    return value


def _texts(name: str, parts: Any, given: object) -> list[str]:
    """The texts of a list, none of them empty."""
    is_list = isinstance(parts, list | tuple | np.ndarray)
    requirement = f"{name} to be a text, or a list of texts"
    check_type(is_list, requirement, repr(given), _AS_TYPED)
    texts = [str(part) for part in parts]
    _check_not_empty(name, texts)
    return texts


def _check_not_empty(name: str, texts: Sequence[str]) -> None:
    """Raise for an empty text, which a script makes of a variable that is not set."""
    got = few([repr(text) for text in texts])
    way_out = "write one, or leave it out"
    check("" not in texts, f"{name} not to be empty", got, way_out)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading the columns of rows, and the batch size."""

    text_column: str = option("Column of texts, or of lists of tokens.", "text")
    text_pair_column: str | None = option("Column of a pair's second texts.")
    image_column: str = option(
        "Column of images, for a model that reads them.", "image"
    )
    label_column: str = option(
        "Column of labels or lists of tags: class names or class ids.", "label"
    )
    class_names: Names = option(
        "Class names in the data, in the model's order, if they differ from its own."
    )
    label_separator: str | None = option(
        "Multi-label data: what separates the labels, such as '|'."
    )
    label_columns: Names = option(
        "Multi-label data: columns of 0 and 1, one for each label."
    )
    no_label: str | None = option("Multi-label data: the text in rows without a label.")
    max_length: int | None = option(
        "Tokens per text, by default as many as the model reads."
    )
    positive_class: str | None = option(
        "Predictions with one score: the label that it is the probability of."
    )
    prob_prefix: str | None = option(
        "Predictions: beginning of the names of columns of probabilities; default: prob_."
    )
    unlisted_at: float | None = option(
        "Predictions in dictionaries: probability of an option that a row leaves out."
    )
    option_scores: Literal["sum", "per_character", "per_byte"] = option(
        "For a log of lm-evaluation-harness: log-likelihoods of whole answers (acc), of their "
        "characters (acc_norm) or bytes (acc_bytes).",
        "sum",
    )
    by: Names = option(
        "Columns: measures the rows of each of their values, and says which differ."
    )
    weight_column: str | None = option("Column of the rows' weights.")
    batch_size: int = option("Batch size.", 32)

    def __post_init__(self) -> None:
        for name in ("class_names", "label_columns", "by"):
            value = option_value(name, Names, getattr(self, name))
            # The dataclass is frozen, since several parts of a command share one.
            object.__setattr__(self, name, value)

    @property
    def of_tables(self) -> dict[str, Any]:
        """Return the options of `read_predictions`."""
        names = (
            *("label_column", "weight_column", "option_scores"),
            *("class_names", "positive_class", "prob_prefix", "unlisted_at"),
        )
        return {name: getattr(self, name) for name in names} | {"by": self.by or ()}

    def columns(self, rows: Dataset) -> dict[str, Any]:
        """Return the slices and weights of rows, as the arguments of their predictions."""
        from hf_calib.data.sources import column_of
        from hf_calib.predictions.columns import check_roles, check_slices, numbers_of

        # A slice by the label, for one, would hold one class only.
        check_roles(self.label_column, self.weight_column, self.by or ())
        by = {}
        for name in self.by or ():
            column = column_of(rows, "by", name, may_be_null=True)
            check_slices(name, column.type)
            by[name] = column.to_pylist()
        weights = None
        if self.weight_column is not None:
            column = column_of(rows, "weight_column", self.weight_column)
            numbers = numbers_of(column, self.weight_column)
            weights = check_weights(numbers, len(rows))
        return {"by": by, "weights": weights}

    def refuse(self, kind: str, *options: str) -> None:
        """Raise if options for models of texts, or of images, are given for another model."""
        for each in fields(self):
            got = getattr(self, each.name)
            fits = each.name not in options or got == each.default
            requirement = f"{each.name} to be given for {kind} only"
            check(fits, requirement, got, "leave it out")


@dataclass(frozen=True)
class RowSet:
    """A set of rows that a command names."""

    # A file, a folder, a dataset on the Hub, or files of predictions.
    data: str
    split: str = "test"
    # The name of the data in errors.
    argument: str = "data"
    # Whether the labels are read.
    labelled: bool = True

    def load(self) -> Dataset:
        """Load the rows with unchanged columns."""
        from hf_calib.data.sources import load_rows

        # Rows without labels are of the only split, whatever it is called.
        split = self.split if self.labelled else None
        return load_rows(self.data, split=split, argument=self.argument)

    @property
    def place(self) -> str | None:
        """The split that is read; None for a file, or if the rows are not labelled."""
        is_split = self.labelled and not os.path.isfile(self.data)
        return self.split if is_split else None

    def source(self) -> dict[str, str]:
        """The name of the data, without folders, and of the split if there are several."""
        split = {} if os.path.isfile(self.data) else {"split": self.split}
        return {"name": plain_name(self.data), **split}

    def options(self, reading: Reading) -> list[str]:
        """Return the options of `hf-calib evaluate` that read these rows, without its defaults."""
        # A report shows the command that measures the rows again.
        source = self.source()
        given: dict[str, Any] = {"data": source["name"]}
        if source.get("split", "test") != "test":
            given["split"] = self.split
        for each in fields(Reading):
            value = getattr(reading, each.name)
            # The size of a batch changes no number.
            if value not in (None, each.default) and each.name != "batch_size":
                given[each.name] = value
        words = []
        for name, value in given.items():
            text = str(value) if isinstance(value, str | int) else ",".join(value)
            words += [f"--{name.replace('_', '-')}", text]
        return words


_WAY_OUT = (
    "give the data's names of the model's classes, in the model's order, as class_names"
)


def names_in_data(
    own: Sequence[str], given: Sequence[str] | None, what: str = "classes"
) -> tuple[str, ...]:
    """Return the names of a model's classes in the data: its own, unless others are given."""
    names = tuple(own if given is None else given)
    requirement = (
        f"class_names to name the model's {len(own)} {what} ({few(own)}) once each"
    )
    is_one_each = len(names) == len(set(names)) == len(own)
    check(is_one_each, requirement, few(names), "follow the model's order")
    # The same names in another order would give labels to other classes.
    is_in_order = names == tuple(own) or set(names) != set(own)
    # All names are shown, as the first few of many may be in order.
    requirement = f"class_names to be in the order of the {what} ({', '.join(own)})"
    check(is_in_order, requirement, ", ".join(names), "leave class_names out")
    return names


def are_unnamed(names: Sequence[str]) -> bool:
    """Whether class names are the defaults of transformers."""
    return list(names) == [f"LABEL_{i}" for i in range(len(names))]


def class_ids(
    rows: Dataset, column: str, own: Sequence[str], given: Sequence[str] | None
) -> NDArray[np.int64]:
    """Return the ids (N,) of labels: names of the model, as given or of a ClassLabel, or ids."""
    import pyarrow
    import pyarrow.compute
    from datasets import ClassLabel

    from hf_calib.data.sources import column_of

    names = names_in_data(own, given)
    labels = column_of(rows, "label_column", column).combine_chunks()
    feature = rows.features[column]
    if isinstance(feature, ClassLabel):
        # The Hub marks withheld labels by -1.
        is_labelled = pyarrow.compute.min(labels).as_py() != -1
        way_out = "choose a split that is labelled, such as 'validation'"
        check(is_labelled, "the rows to be labelled", -1, way_out)
        # Data and model may order the same classes in two ways, which their names tell apart.
        if given is not None or not are_unnamed(own):
            labels = pyarrow.array(feature.names).take(labels)
    elif given is not None and are_numbers(labels.type):
        # Names that are given say what the labels are called, which these are not.
        are_names = names == tuple(own) or None not in map(as_number, names)
        requirement = f"class_names to name the labels of {column!r}"
        way_out = "leave class_names out where the labels are the model's ids"
        check(are_names, requirement, "numbers there", way_out)
    argument = f"column {column!r}"
    ids = label_ids(labels, argument, names, ("the model's classes", _WAY_OUT))
    way_out = "choose another label_column or split, or write the names of the classes"
    check_ids(ids, argument, len(names), way_out)
    return ids
