"""The labels of rows, as the ids of a model's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import check, did_you_mean, few
from hf_calib.metrics.checks import refuse
from hf_calib.predictions.labels import label_ids

if TYPE_CHECKING:
    from datasets import Dataset

_WAY_OUT = "give the data's names of the model's classes, in the model's order, as class_names"


def column_of(rows: Dataset, argument: str, column: str) -> Any:
    """A column as a pyarrow array; raises if it is missing or has gaps."""
    from hf_calib.data.labels import read_column

    names = rows.column_names
    requirement = f"{argument} to be one of {', '.join(names)}"
    check(column in names, requirement, repr(column), did_you_mean(column, names))
    stored = read_column(rows, column).combine_chunks()
    requirement = f"column {column!r} to have a value in every row"
    check(not stored.null_count, requirement, f"{stored.null_count} without", "remove these rows")
    return stored


def names_in_data(own: Sequence[str], given: Sequence[str] | None, what: str = "classes") -> tuple[str, ...]:
    """The data's names of a model's classes: the model's own unless others are given, one for each."""
    names = tuple(own if given is None else given)
    requirement = f"class_names to name the model's {len(own)} {what} ({few(own)}) once each"
    is_one_each = len(names) == len(set(names)) == len(own)
    check(is_one_each, requirement, few(names), "follow the model's order")
    return names


def are_unnamed(names: Sequence[str]) -> bool:
    """Whether class names are those that transformers gives where nobody has given any."""
    return list(names) == [f"LABEL_{i}" for i in range(len(names))]


def class_ids(
    rows: Dataset, column: str, own: Sequence[str], given: Sequence[str] | None
) -> NDArray[np.int64]:
    """(N,) the ids of labels that are names, of the model or as given, or ids; names of a ClassLabel count."""
    import pyarrow.compute
    from datasets import ClassLabel

    names, labels = names_in_data(own, given), column_of(rows, "label_column", column)
    feature = rows.features[column]
    if isinstance(feature, ClassLabel):
        is_labelled = pyarrow.compute.min(labels).as_py() != -1  # as the Hub marks them
        way_out = "choose a split that is labelled, such as 'validation'"
        check(is_labelled, "the rows to be labelled", -1, way_out)
        if given is not None or not are_unnamed(own):
            labels = pyarrow.array(feature.names).take(labels)
    elif given is not None and pyarrow.types.is_integer(labels.type):
        are_names = names == tuple(own) or all(name.lstrip("-").isdigit() for name in names)
        way_out = "leave class_names out where the labels are the model's ids"
        check(are_names, f"class_names to name the labels of {column!r}", "numbers there", way_out)
    ids = label_ids(labels, column, names, ("the model's classes", _WAY_OUT))
    way_out = "choose another label_column or split, or write the names of the classes"
    requirement = f"hold the model's ids, 0..{len(names) - 1}"
    refuse((ids < 0) | (ids >= len(names)), f"column {column!r}", requirement, ids, way_out)
    return ids
