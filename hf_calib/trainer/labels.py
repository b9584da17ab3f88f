"""Labels as the loss and the metrics read them, and what a model says of its classes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import IterableDataset, Subset

from hf_calib._errors import InputValueError, check, expected, few
from hf_calib.losses.statistics.definitions import IGNORE_INDEX

LABEL_NAMES = ("label", "label_ids")  # that collators rename


class Labels(NamedTuple):
    """The labels of a split, flattened."""

    values: NDArray[Any]
    rows: NDArray[np.int64]  # the row of each value
    missing: NDArray[np.int64]  # rows where a label is None


def read_labels(dataset: Any, label_key: str) -> Labels | None:
    """The labels of a `datasets.Dataset` from its column, or of a list of rows; None for other datasets."""
    names: Any = ()
    if isinstance(dataset, datasets.Dataset):
        names = dataset.column_names
    elif isinstance(dataset, list | tuple) and all(isinstance(row, Mapping) for row in dataset):
        names = dataset[0] if dataset else ()
    name = next((name for name in (label_key, *LABEL_NAMES) if name in names), None)
    if name is None:
        return None
    if not isinstance(dataset, datasets.Dataset):
        try:
            dataset = datasets.Dataset.from_dict({name: [row.get(name) for row in dataset]})
        except pyarrow.ArrowException:  # they are of several kinds
            return None
    values = dataset.with_format("arrow")[name][:].combine_chunks()
    rows, missing = np.arange(len(values)), []
    while True:  # of lists: one label per token or class
        absent = values.is_null().to_numpy(zero_copy_only=False)
        missing.append(rows[absent])
        if not hasattr(values, "value_parent_indices"):
            break
        rows = rows[values.value_parent_indices().to_numpy()]
        values = values.flatten()
    flat = values.drop_null().to_numpy(zero_copy_only=False)
    return Labels(flat, rows[~absent], np.unique(np.concatenate(missing)))


def has_rows(dataset: Any) -> bool:
    """Whether rows can be read by their index. A stream may have a length, and inherits `__getitem__`."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return indexed and not isinstance(dataset, IterableDataset)


def loader_of(trainer: Any, dataset: Any, n_samples: int | None = None) -> Any:
    """A loader of a dataset, or of a fixed random subset, without the columns that the model does not take.

    It is made once: accelerate remembers every one that it prepares.
    """
    made = vars(trainer).setdefault("loaders_of_splits", [])
    for made_for, size, loader in made:
        if made_for is dataset and size == n_samples:
            return loader
    rows = dataset
    if n_samples is not None and n_samples < len(dataset):
        generator = torch.Generator().manual_seed(trainer.args.seed)
        rows = Subset(dataset, torch.randperm(len(dataset), generator=generator)[:n_samples].tolist())
    # get_eval_dataloader would, with persistent workers, give the loader of the evaluation set.
    made.append((dataset, n_samples, trainer.get_test_dataloader(rows)))
    return made[-1][2]


def collated_labels(trainer: Any, dataset: Any, role: str, row: int | None = None) -> Tensor | None:
    """The labels of a row, or the first ones, as collator and transforms convert them; None where it cannot be told.

    At batch size 1 one row is collated, since rows need not fit together then.
    """
    if not (has_rows(dataset) and len(dataset)):
        return None
    loader, args = loader_of(trainer, dataset), trainer.args
    batch_size = args.train_batch_size if role == "training" else args.eval_batch_size
    rows = range(min(2, batch_size, len(dataset))) if row is None else [row]
    with random_state_left_as_found():  # reading a row may augment it
        try:
            batch = loader.collate_fn([loader.dataset[index] for index in rows])
        except Exception as error:
            what = f"{'the first rows' if row is None else f'row {row}'} of the {role} split"
            got, way_out = f"{type(error).__name__}: {error}", "check its rows and the data collator"
            raise InputValueError(expected(what, "be made a batch", got, way_out)) from error
    labels = batch.get(trainer.label_key)
    return labels if isinstance(labels, Tensor) else None


def has_label_per_class(trainer: Any, dataset: Any, role: str) -> bool | None:
    """Whether the labels of a dataset are one float per class; None where this cannot be told."""
    labels = collated_labels(trainer, dataset, role)
    if labels is None or (labels.is_floating_point() and labels.dim() != 2):
        return None
    return labels.is_floating_point()


def decide_problem_type(trainer: Any, multi_label: bool) -> None:
    """Take it that a row has several labels, or one; the loss is held to it."""
    trainer.decided_problem_type = f"{'multi' if multi_label else 'single'}_label_classification"
    trainer.calibration_loss.multi_label = multi_label
    if multi_label:
        trainer.calibration_loss.check_multi_label()


def balanced_class_weights(trainer: Any) -> list[float]:
    """Weights N / (C n_c) of the training split, which give every class the same share of the loss."""
    dataset, n_classes, way_out = trainer.train_dataset, trainer.n_classes, "give one number per class"
    found = read_labels(dataset, trainer.label_key)
    several = has_label_per_class(trainer, dataset, "training")
    readable = not several and found is not None and found.values.dtype.kind in "iu"
    where = "class_weights to be given as numbers where"
    check(readable, f"{where} the training split has no column of class indices", "'balanced'", way_out)
    assert found is not None
    for row in sorted({int(found.rows[i]) for i in np.unique(found.values, return_index=True)[1]}):
        arriving = collated_labels(trainer, dataset, "training", row)
        arrives = [] if arriving is None else arriving.flatten().tolist()
        same = {*arrives, IGNORE_INDEX} == {*found.values[found.rows == row], IGNORE_INDEX}
        got = f"'balanced', and a row {row} that arrives as {arrives}"
        check(arriving is None or same, f"{where} a transform or collator changes the labels", got, way_out)
    counted = found.values[found.values >= 0]
    counts = np.bincount(counted, minlength=n_classes or 0)
    fits, got = n_classes in (None, len(counts)), f"label {len(counts) - 1} in the training split"
    requirement = f"class_weights to be 'balanced' over labels in [0, {n_classes})"
    check(fits, requirement, got, "relabel, or set num_labels")
    absent = np.flatnonzero(counts == 0).tolist()
    got = f"no examples of class {few(absent)}" if absent else "no labels"
    requirement = "class_weights to be 'balanced' over classes that the training split has"
    check(not absent and len(counts) > 0, requirement, got, way_out)
    return (len(counted) / (len(counts) * counts)).tolist()


def aligned_labels(labels: Tensor, *, next_token: bool) -> Tensor:
    """The labels (N,), (N, 1), (N, L) or float (N, C), each at the position of the logits that it belongs to.

    For `next_token` they are shifted, as transformers does for causal language models; the last position is ignored.

    >>> aligned_labels(torch.tensor([[5, 6, 7]]), next_token=True)
    tensor([[   6,    7, -100]])
    >>> aligned_labels(torch.tensor([[5], [6]]), next_token=False)
    tensor([5, 6])
    """
    if next_token and labels.dim() > 1:
        return pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    one_column = labels.dim() == 2 and labels.shape[1] == 1 and not labels.is_floating_point()
    return labels.squeeze(1) if one_column else labels


def n_own_rows(rows_left: int, process: int, size: int) -> int:
    """Of a process's `size` rows in the last batch, those that are not repeats: it is filled up to be even.

    >>> [n_own_rows(5, process, 4) for process in range(3)]
    [4, 1, 0]
    """
    return min(max(rows_left - process * size, 0), size)


def ignore_repeated_rows(batch: Any, key: str, loader: Any, accelerator: Accelerator) -> None:
    """Ignore the rows that accelerate adds from the start of the epoch, so that processes have equal batches."""
    shards = getattr(loader, "batch_sampler", None)
    is_last = accelerator.gradient_state.end_of_dataloader and key in batch
    if not (is_last and isinstance(shards, BatchSamplerShard)) or shards.num_processes == 1:
        return
    size = shards.batch_size // (shards.num_processes if shards.split_batches else 1)
    rows_left = len(shards.batch_sampler.sampler) % (size * shards.num_processes)
    if rows_left and shards.even_batches and not shards.drop_last:
        n_own, labels = n_own_rows(rows_left, shards.process_index, size), batch[key]
        labels = labels.clone() if labels.is_floating_point() else labels.long().clone()
        if len(labels) == size:
            labels[n_own:] = IGNORE_INDEX
        elif n_own < size:  # rows end to end in one, without padding: each begins at position 0
            starts = (batch["position_ids"][0] == 0).nonzero() if "position_ids" in batch else [0]
            labels[:, starts[n_own] if n_own < len(starts) else labels.shape[1] :] = IGNORE_INDEX
        batch[key] = labels


def first_rows(batch: dict[str, Any], without: set[str]) -> dict[str, Tensor]:
    """Four rows of a batch on the CPU."""
    kept = {k: v for k, v in batch.items() if k not in without and isinstance(v, Tensor)}
    return {k: (v[:4] if v.dim() else v).cpu() for k, v in kept.items()}


@contextmanager
def random_state_left_as_found() -> Iterator[None]:
    """Restore Python's, NumPy's and PyTorch's random states (CPU, and the current CUDA device) on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# ---- Models ----


def without_adapters(model: Any) -> Any:
    """The model that adapters are on, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def generates(model: Any, *, encoder_decoder: bool) -> bool:
    """Whether the model generates text, with an encoder or without one."""
    model = without_adapters(model)
    able = hasattr(model, "can_generate") and bool(model.can_generate())
    return able and bool(getattr(model.config, "is_encoder_decoder", False)) == encoder_decoder


def predicts_next_token(model: Any) -> bool:
    """Whether the model is a decoder-only language model: its logits at position t are for token t + 1."""
    return generates(model, encoder_decoder=False)


def number_of_classes(model: Any) -> int | None:
    """The model's number of labels, for a language model the size of its vocabulary; None if it does not say."""
    model = without_adapters(model)
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if name.endswith("ForMultipleChoice"):  # its classes are the choices of each question
        return None
    of_vocabulary = name.endswith("ForMaskedLM") or (hasattr(model, "can_generate") and model.can_generate())
    return (
        getattr(config.get_text_config(), "vocab_size", None)
        if of_vocabulary
        else getattr(config, "num_labels", None)
    )
