"""Rows that a model is run over: which data they are, and how their columns are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_calib._errors import check
from hf_calib._text import plain_name

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_calib.predictions.logs import OptionScores
    from hf_calib.predictions.predictions import Predictions


@dataclass(frozen=True)
class Reading:
    """How the columns of rows are read, as the options of `hf-calib evaluate` say, and how many rows run at a time."""

    text_column: str = "text"
    text_pair_column: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    class_names: Sequence[str] | None = None
    label_separator: str | None = None
    label_columns: Sequence[str] | None = None
    no_label: str | None = None
    max_length: int | None = None
    option_scores: OptionScores = "sum"
    by: tuple[str, ...] = ()
    weight_column: str | None = None
    batch_size: int = 32

    @property
    def of_tables(self) -> dict[str, Any]:
        """Options of `open_predictions`."""
        names = ("label_column", "weight_column", "by", "option_scores")
        return {name: getattr(self, name) for name in names}

    def with_columns(self, found: Predictions, rows: Dataset) -> Predictions:
        """Predictions of rows with their weights and slices."""
        from hf_calib.models.labels import column_of

        by = {name: column_of(rows, "by", name).to_pylist() for name in self.by}
        weights = None
        if self.weight_column is not None:
            weights = np.array(column_of(rows, "weight_column", self.weight_column), np.float64)
        return replace(found, by=by, weights=weights) if by or weights is not None else found

    def refuse(self, *options: str) -> None:
        """Raise if one of these, which are for models of texts, is given for another."""
        for option in options:
            got = getattr(self, option)
            check(got is None, f"{option} to be given for texts only", got, "leave it out")


@dataclass(frozen=True)
class RowSet:
    """One set of rows that a command names."""

    data: str  # a file, a folder or a dataset on the Hub; for predictions, their files
    dataset_config: str | None = None
    split: str = "test"
    argument: str = "data"  # what errors call it
    labelled: bool = True  # whether its labels are read

    def load(self) -> Dataset:
        """The rows, with the columns as they are."""
        from hf_calib.data.sources import load_rows

        options: Any = {name: getattr(self, name) for name in ("dataset_config", "split", "argument")}
        return load_rows(self.data, **options)

    def source(self) -> dict[str, str]:
        """The name of the data, without folders, and of the split where there are several."""
        split = {} if os.path.isfile(self.data) else {"split": self.split}
        return {"name": plain_name(self.data), **split}

    def options(self, reading: Reading) -> list[str]:
        """Of `hf-calib evaluate`, to read the same rows in the same way; its own defaults are left out."""
        source, words = self.source(), []
        given: dict[str, Any] = {"data": source["name"], "dataset_config": self.dataset_config}
        if source.get("split", "test") != "test":
            given["split"] = self.split
        for each in fields(reading):
            value = getattr(reading, each.name)
            given[each.name] = None if value == each.default or each.name == "batch_size" else value
        for name, value in given.items():
            if value is not None:
                text = str(value) if isinstance(value, str | int) else ",".join(value)
                words += [f"--{name.replace('_', '-')}", text]
        return words
