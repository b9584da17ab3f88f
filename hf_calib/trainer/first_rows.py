"""Rows of a trainer's datasets as its batches will have them, read before a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from hf_calib._errors import InputValueError, expected
from hf_calib.trainer.passes import random_states_kept

_FIRST = 8


def has_rows(dataset: Any) -> bool:
    """Whether rows can be read by their index; a stream may have a length, and inherits
    `__getitem__`.
    """
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return is_indexed and not isinstance(dataset, IterableDataset)


class FirstRows(NamedTuple):
    """Rows after the transform of their dataset and the collator of the run."""

    # It takes only the columns that the model reads, as those of the Trainer do.
    loader_of: Callable[[Any], Any]
    label_key: str

    def batch(self, dataset: Any, role: str) -> Mapping[str, Any] | None:
        """Return a batch of the first rows; None if there are none, or it cannot be told."""
        if has_rows(dataset):
            first = range(min(_FIRST, len(dataset)))
            batches = self._batches(dataset, role, first, size=_FIRST)
            return batches[0] if batches else None
        # Another stream may yield its rows only once.
        if not isinstance(dataset, datasets.IterableDataset):
            return None
        rows = list(dataset.take(_FIRST))
        if not rows:
            return None
        return _batch(self.loader_of(dataset), role, rows, range(len(rows)))

    def labels(self, dataset: Any, role: str, indices: Sequence[int]) -> list[Tensor]:
        """Return the labels of each of these rows as the batches will have them; none if it cannot
        be told.
        """
        if not has_rows(dataset):
            return []
        batches = self._batches(dataset, role, indices, size=1)
        found = [batch.get(self.label_key) for batch in batches]
        return [labels for labels in found if isinstance(labels, Tensor)]

    def _batches(
        self, dataset: Any, role: str, indices: Sequence[int], size: int
    ) -> list[Mapping[str, Any]]:
        """Return these rows in batches; none if it cannot be told."""
        if isinstance(dataset, datasets.Dataset):
            selected: Any = dataset.select(indices)
        else:
            selected = Subset(dataset, indices)
        loader = self.loader_of(selected)
        is_one = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        if not is_one or not has_rows(loader.dataset):
            return []
        rows: Any = loader.dataset
        if len(rows) != len(indices):  # The user's own loader is of other rows.
            return []
        places = range(len(rows))
        starts = range(0, len(rows), size)
        batches = [
            _batch(loader, role, rows, places[start : start + size]) for start in starts
        ]
        return [batch for batch in batches if batch is not None]


def _batch(
    loader: DataLoader[Any], role: str, rows: Any, places: Sequence[int]
) -> Mapping[str, Any] | None:
    """A batch as the loader makes it of these rows."""
    try:
        with random_states_kept():  # A row may be augmented at random.
            batch = loader.collate_fn([rows[place] for place in places])
    except Exception as error:  # Whatever a user's dataset or collator raises.
        raise InputValueError(
            expected(
                f"the first rows of the {role} split",
                "be made a batch",
                got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                way_out="check these rows and the data collator",
            )
        ) from error
    return batch if isinstance(batch, Mapping) else None


def is_multi_label(batch: Mapping[str, Any] | None, label_key: str) -> bool | None:
    """Whether the labels of a batch are one float per class; None if there are none, or floats of
    another shape.
    """
    labels = None if batch is None else batch.get(label_key)
    if not isinstance(labels, Tensor):
        return None
    if labels.is_floating_point() and labels.dim() != 2:
        return None
    return labels.is_floating_point()
