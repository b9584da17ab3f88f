"""Labels in the form that losses and metrics read, and the answer options of a judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from hf_calib._errors import check, few
from hf_calib._text import counted
from hf_calib.language_models.label_tokens import (
    is_causal,
    keeps_positions,
    option_tokens,
    without_adapters,
)
from hf_calib.losses.statistics.definitions import IGNORE_INDEX

PLACES = "answer_places"  # (N,) in a judge's batch: the position whose logits predict the answer.


class Problem(NamedTuple):
    """What a model predicts, as far as it is known before the first batch."""

    model: Any  # Without wrappers; None if each trial of a search makes its own.
    n_classes: int | None
    multi_label: bool | None
    answers: AnswerOptions | None = (
        None  # If the classes are a few tokens of a language model.
    )
    reads_soft_labels: bool = False  # Floats are shares of the classes of one softmax.


class Labels(NamedTuple):
    """The labels of a split, flattened."""

    values: NDArray[Any]
    rows: NDArray[np.int64]  # The row of each value.
    missing: NDArray[np.int64]  # Rows with a label of None.

    def check_given(self, role: str) -> None:
        """Raise if rows have a label of None."""
        n_missing = len(self.missing)
        if n_missing == 0:
            return
        check(
            False,
            f"labels of the {role} split to be given in every row",
            got=f"None in row {self.missing[0]} ({counted(n_missing, 'such row')})",
            way_out="label these rows, drop them, or give -100 to ignore them",
        )

    def check_not_ignored(self, role: str, way_out: str) -> None:
        """Raise if all rows are ignored."""
        check(
            bool((self.values != IGNORE_INDEX).any()),
            f"labels of the {role} split to be given",
            got="-100 in every row",
            way_out=way_out,
        )

    @property
    def row_sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows with labels, and their numbers of labels."""
        return np.unique(self.rows, return_counts=True)

    @property
    def are_lists_of_floats(self) -> bool:
        """Whether rows have several floats: soft labels, or one for each of several labels."""
        rows, _ = self.row_sizes
        return self.values.dtype.kind == "f" and len(rows) < len(self.values)


def label_columns(label_key: str) -> tuple[str, ...]:
    """The names that a column of labels may have; collators rename the last two."""
    return (label_key, "label", "label_ids")


def read_labels(dataset: Any, label_key: str) -> Labels | None:
    """Return the labels of a `datasets.Dataset` from its column, or of a list of rows; None for
    other datasets.

    Raise for two columns of labels that differ: a collator may take the other one.
    """
    if isinstance(dataset, datasets.Dataset):
        columns: Any = dataset.column_names
    elif are_rows(dataset):
        columns = dataset[0]
    else:
        return None
    names = [name for name in label_columns(label_key) if name in columns]
    if not names:
        return None
    found = [_labels_of(dataset, name) for name in names]
    # Collators take one of the three names; a column of another name stays what it is.
    if label_key == "labels":
        for name, other in zip(names[1:], found[1:], strict=True):
            check(
                _are_one(found[0], other),
                "a dataset to have one label column",
                got=f"{names[0]} and {name}, whose values differ",
                way_out="remove the one that is not meant",
            )
    return found[0]


def _labels_of(dataset: Any, name: str) -> Labels:
    if isinstance(dataset, datasets.Dataset):
        return _labels_of_column(dataset, name)
    return _labels_of_rows([row.get(name) for row in dataset])


def _are_one(first: Labels, second: Labels) -> bool:
    """Whether two columns have the same labels in each row."""
    return all(map(np.array_equal, first, second))


def is_in_memory(dataset: Any) -> bool:
    """Whether rows and columns of a dataset can be read at any time."""
    return isinstance(dataset, datasets.Dataset) or are_rows(dataset)


def are_rows(dataset: Any) -> bool:
    """Whether a dataset is a list of rows by their column's names."""
    is_list = isinstance(dataset, list | tuple) and len(dataset) > 0
    return is_list and all(isinstance(row, Mapping) for row in dataset)


def _labels_of_column(dataset: datasets.Dataset, name: str) -> Labels:
    # Arrow reads a column without decoding the others.
    values = dataset.with_format("arrow")[name][:].combine_chunks()
    rows = np.arange(len(values))
    missing = []
    while True:  # Lists have one label per token or class.
        absent = values.is_null().to_numpy(zero_copy_only=False)
        missing.append(rows[absent])
        if not hasattr(values, "value_parent_indices"):
            break
        rows = rows[values.value_parent_indices().to_numpy()]
        values = values.flatten()
    return Labels(
        values=values.drop_null().to_numpy(zero_copy_only=False),
        rows=rows[~absent],
        missing=np.unique(np.concatenate(missing)),
    )


def _labels_of_rows(labels: list[Any]) -> Labels:
    is_missing = np.array([label is None for label in labels])
    given = [np.asarray(label).ravel() for label in labels if label is not None]
    sizes = [len(array) for array in given]
    return Labels(
        values=np.concatenate(given) if given else np.empty(0),
        rows=np.repeat(np.flatnonzero(~is_missing), sizes),
        missing=np.flatnonzero(is_missing),
    )


def first_missing(dataset: Any, name: str) -> int | None:
    """The first row with None in a column that others have; None if there is none, or the rows are
    not in memory.
    """
    if are_rows(dataset):
        absent = np.array([row.get(name) is None for row in dataset])
    elif isinstance(dataset, datasets.Dataset) and name in dataset.column_names:
        if dataset.data.column(name).null_count == 0:
            return None
        column = dataset.with_format("arrow")[name][:]
        absent = column.is_null().to_numpy(zero_copy_only=False)
    else:
        return None
    return int(absent.argmax()) if absent.any() and not absent.all() else None


def check_one_label(label_names: Sequence[str]) -> None:
    """Raise for several label columns: losses and metrics are of one, and the Trainer evaluates all
    or none.
    """
    check(
        len(label_names) <= 1,
        "label_names to name one label column",
        got=few(label_names),
        way_out=f"set label_names=[{label_names[0]!r}] if the others are inputs of the model; for "
        "several heads with losses of their own, use transformers.Trainer or override compute_loss",
    )


def balanced_weights(
    labels: Labels | None,
    n_classes: int | None,
    arriving: Callable[[list[int]], list[Tensor]],
) -> list[float]:
    """Return weights N / (C n_c) of the training split, which give every class the same share of
    the loss.

    `arriving` gives the labels of rows as the batches will have them, or none if that is not known.
    """
    way_out = "give one number per class"
    values = np.empty(0) if labels is None else labels.values
    check(
        values.dtype.kind in "iu",
        "class_weights to be given as numbers where the training split has no class indices",
        got="'balanced'",
        way_out=way_out,
    )
    assert labels is not None
    counted = values[values >= 0]  # The others are ignored.
    counts = np.bincount(counted, minlength=n_classes or 0)
    check(
        not n_classes or len(counts) == n_classes,
        f"class_weights to be 'balanced' over labels in [0, {n_classes})",
        got=f"label {len(counts) - 1} in the training split",
        way_out="relabel, or set num_labels when the model is loaded",
    )
    absent = np.flatnonzero(counts == 0).tolist()
    check(
        len(counted) > 0 and not absent,
        "class_weights to be 'balanced' over classes that the training split has",
        got=f"no examples of class {few(absent)}",
        way_out=way_out,
    )
    # One row of each class shows whether the labels are changed before the model sees them.
    _, first = np.unique(values, return_index=True)
    _check_unchanged("class_weights", labels, labels.rows[first], arriving, way_out)
    weights = len(counted) / (len(counts) * counts)
    return weights.tolist()


def balanced_pos_weight(
    labels: Labels | None,
    n_labels: int | None,
    arriving: Callable[[list[int]], list[Tensor]],
) -> list[float]:
    """Return the negatives over the positives of each label in the training split, without ignored
    decisions.

    `arriving` is as in `balanced_weights`.
    """
    way_out = "give one number per label, or one for all"
    has_values = labels is not None and labels.values.dtype.kind in "iuf"
    sizes: list[int] = []
    if labels is not None and has_values:
        sizes = np.unique(np.unique(labels.rows, return_counts=True)[1]).tolist()
    n_columns = n_labels or max(sizes, default=0)
    check(
        sizes == [n_columns],
        "pos_weight to be given as numbers where the rows of the training split do not have 0 or 1 "
        "for each label",
        got="'balanced'",
        way_out=way_out,
    )
    assert labels is not None
    decisions = labels.values.reshape(-1, n_columns)
    is_decided = decisions >= 0
    positives = np.where(is_decided, decisions, 0).sum(axis=0)
    negatives = is_decided.sum(axis=0) - positives
    for kind, found in (("positive", positives), ("negative", negatives)):
        absent = np.flatnonzero(found <= 0).tolist()
        check(
            not absent,
            f"pos_weight to be 'balanced' over labels that have a {kind} in the training split",
            got=f"no {kind} of label {few(absent)}",
            way_out=way_out,
        )
    # One positive of each label shows whether the labels are changed before the model sees them.
    first = (decisions > 0).argmax(axis=0)
    _check_unchanged(
        "pos_weight", labels, labels.rows[first * n_columns], arriving, way_out
    )
    weights = negatives / positives
    return weights.tolist()


def _check_unchanged(
    argument: str,
    labels: Labels,
    of_rows: NDArray[np.int64],
    arriving: Callable[[list[int]], list[Tensor]],
    way_out: str,
) -> None:
    """Raise if the labels of these rows arrive as others."""
    rows = np.unique(of_rows).tolist()
    for row, found in zip(rows, arriving(rows), strict=False):
        own = labels.values[labels.rows == row]
        theirs = found.flatten().numpy()
        check(
            _are_the_same(own, theirs),
            f"{argument} to be given as numbers where a transform or collator changes the labels",
            got=f"'balanced', and labels {few(own.tolist())} of row {row}, which arrive as "
            f"{few(theirs.tolist())}",
            way_out=way_out,
        )


def _are_the_same(labels: NDArray[Any], arriving: NDArray[Any]) -> bool:
    """Whether labels are unchanged, except that a collator may repeat, cut or ignore those of
    tokens.
    """
    # Fractions are rounded on their way into a tensor.
    ours = labels[labels != IGNORE_INDEX].astype(np.float32)
    theirs = arriving[arriving != IGNORE_INDEX].astype(np.float32)
    if len(ours) == len(theirs):
        return np.array_equal(ours, theirs)
    return len(theirs) > 0 and set(theirs.tolist()) <= set(ours.tolist())


def aligned_labels(labels: Tensor, *, next_token: bool) -> Tensor:
    """Return labels at the positions of their logits: shifted for `next_token`; (N, 1) class
    indices become (N,).

    >>> aligned_labels(torch.tensor([[5, 6, 7]]), next_token=True)
    tensor([[   6,    7, -100]])
    """
    if next_token and labels.dim() > 1:
        return pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    # Float labels (N, 1) are one decision per row.
    if labels.dim() == 2 and labels.shape[1] == 1 and not labels.is_floating_point():
        return labels.squeeze(1)
    return labels


# ---- Repeated rows, which give all processes equal batches ----


def n_own_rows(rows_left: int, process: int, size: int) -> int:
    """Return how many of a process's `size` rows in the last batch are not repeats."""
    rows_from_here = max(rows_left - process * size, 0)
    return min(rows_from_here, size)


def ignore_repeated_rows(
    batch: Any, key: str, loader: Any, accelerator: Accelerator
) -> None:
    """Ignore the rows from the start of the epoch that accelerate adds to the last batch of a
    loader.
    """
    if key not in batch or not accelerator.gradient_state.end_of_dataloader:
        return
    labels = batch[key]
    if isinstance(loader, DataLoaderDispatcher):
        # After a resumption another loader of this kind is active.
        rows_left = accelerator.gradient_state.remainder
        size = len(labels)
        process = accelerator.process_index
    else:
        shards = getattr(loader, "batch_sampler", None)
        if not isinstance(shards, BatchSamplerShard) or shards.num_processes == 1:
            return
        if shards.drop_last or not shards.even_batches:
            return
        size = shards.batch_size
        if shards.split_batches:  # It is that of all processes together.
            size //= shards.num_processes
        rows_left = len(shards.batch_sampler.sampler) % (size * shards.num_processes)
        process = shards.process_index
    if rows_left <= 0:
        return

    n_own = n_own_rows(rows_left, process, size)
    # A copy, because a dataset in memory may hand out its own tensor.
    labels = labels.clone() if labels.is_floating_point() else labels.long().clone()
    if len(labels) == size:
        labels[n_own:] = IGNORE_INDEX
    elif n_own < size:  # The rows are packed into one.
        labels[:, _start_of_packed_row(batch, n_own, labels.shape[1]) :] = IGNORE_INDEX
    batch[key] = labels


def _start_of_packed_row(batch: Any, index: int, length: int) -> int:
    """The position at which one of several packed rows begins; the end if there are not as many."""
    starts = [0]
    if "position_ids" in batch:
        is_start = batch["position_ids"][0] == 0
        starts = is_start.nonzero().flatten().tolist()
    return starts[index] if index < len(starts) else length


def number_of_classes(model: Any) -> int | None:
    """Return the model's number of labels, or the vocabulary size of a language model; None if
    unknown.
    """
    model = without_adapters(model)
    name = type(model).__name__
    config = getattr(model, "config", None)
    if name.endswith(
        "ForMultipleChoice"
    ):  # The classes are the choices of each question.
        return None
    if name.endswith("ForMaskedLM") or getattr(model, "can_generate", bool)():
        return getattr(config.get_text_config(), "vocab_size", None)  # type: ignore[union-attr]
    return getattr(config, "num_labels", None)


# ---- The answers of a judge ----


class AnswerOptions:
    """Conversion of token labels to option indices, and of a language model's logits to those of
    the options.
    """

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        check(
            is_causal(model),
            "the model to be a causal language model for answer_options",
            got=type(model).__name__,
            way_out="load it with AutoModelForCausalLM, or leave answer_options out",
        )
        check(
            callable(tokenizer),
            "processing_class to be a tokenizer for answer_options",
            got=repr(tokenizer),
            way_out="pass processing_class=tokenizer to the trainer",
        )
        options = option_tokens(tokenizer, texts)
        self.names = list(options)
        self.tokens = list(options.values())
        self._keeps_positions = keeps_positions(model)

    def batch(self, collator: Callable[[Any], Any], rows: Any) -> dict[str, Any]:
        """Return a collated batch with the option (N,) and its place instead of token labels (N,
        L).
        """
        batch = collator(rows)
        labels = batch["labels"]
        is_labelled = labels != IGNORE_INDEX
        is_answered = is_labelled.any(dim=1)
        places = is_labelled.long().argmax(dim=1)  # The first position with a label.
        is_option = labels.gather(1, places[:, None]) == torch.tensor(self.tokens)

        has_one_label = is_labelled.sum(dim=1) <= 1
        is_right = has_one_label & (is_option.any(dim=1) | ~is_answered)
        self._check_one(bool(is_right.all()), labels[~is_right].tolist(), "a batch")
        is_first = is_answered & (places == 0)
        check(
            not is_first.any(),  # No logits predict a row's first token.
            "the answer to follow a prompt",
            got="one that is a row's first token",
            way_out="add prompts",
        )
        batch["labels"] = torch.where(
            is_answered, is_option.long().argmax(dim=1), IGNORE_INDEX
        )
        batch[PLACES] = (places - 1).clamp_min(0)
        return batch

    def logits(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the options' logits (N, K) before each row's answer; if possible, the model
        computes no others.
        """
        inputs = dict(inputs)
        places = inputs.pop(PLACES)
        if self._keeps_positions:
            inputs["logits_to_keep"], places = places.unique(return_inverse=True)
        rows = torch.arange(len(places), device=places.device)
        logits = model(**inputs).logits[rows, places]
        return logits[:, self.tokens]

    def check(self, labels: Labels, role: str) -> None:
        """Raise before training unless each row of a split has exactly one option token as its
        label.
        """
        is_labelled = labels.values != IGNORE_INDEX
        values = labels.values[is_labelled]
        rows = labels.rows[is_labelled]
        is_wrong = ~np.isin(values, self.tokens)
        is_wrong[1:] |= rows[1:] == rows[:-1]  # A second label of the same row.
        if is_wrong.any():
            row = rows[np.argmax(is_wrong)]
            self._check_one(
                False, values[rows == row].tolist(), f"row {row} of the {role} split"
            )

    def _check_one(self, holds: bool, found: list[Any], where: str) -> None:
        options = [
            f"{token} ({name!r})"
            for token, name in zip(self.tokens, self.names, strict=True)
        ]
        check(
            holds,
            f"labels to have one token per row, of {', '.join(options)}",
            got=f"{str(found)[:200]} in {where}",
            way_out="set the labels of all other tokens to -100",
        )
