"""Labels in the form that losses and metrics read, and the answer options of a judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from hf_calib._errors import check, few
from hf_calib.language_models.label_tokens import (
    is_causal,
    keeps_positions,
    option_tokens,
    without_adapters,
)
from hf_calib.losses.statistics.definitions import IGNORE_INDEX

PLACES = "answer_places"  # (N,) in a judge's batch: the position whose logits predict the answer.


class Labels(NamedTuple):
    """The labels of a split, flattened."""

    values: NDArray[Any]
    rows: NDArray[np.int64]  # The row of each value.
    missing: NDArray[np.int64]  # Rows with a label of None.


def read_labels(dataset: Any, label_key: str) -> Labels | None:
    """Return the labels of a `datasets.Dataset` from its column; None for other datasets."""
    columns = dataset.column_names if isinstance(dataset, datasets.Dataset) else ()
    name = next(
        (name for name in (label_key, "label", "label_ids") if name in columns), None
    )
    if name is None:
        return None
    values = dataset.with_format("arrow")[name][:].combine_chunks()
    rows, missing = np.arange(len(values)), []
    while True:  # Lists have one label per token or class.
        absent = values.is_null().to_numpy(zero_copy_only=False)
        missing.append(rows[absent])
        if not hasattr(values, "value_parent_indices"):
            break
        rows = rows[values.value_parent_indices().to_numpy()]
        values = values.flatten()
    flat = values.drop_null().to_numpy(zero_copy_only=False)
    return Labels(flat, rows[~absent], np.unique(np.concatenate(missing)))


def balanced_weights(trainer: Any) -> list[float]:
    """Return weights N / (C n_c) of the training split, which give every class the same share of the loss."""
    found, way_out = (
        read_labels(trainer.train_dataset, trainer.label_key),
        "give one number per class",
    )
    counted = (
        np.empty(0) if found is None or trainer.answers is not None else found.values
    )
    requirement = "class_weights to be given as numbers where the training split has no class indices"
    check(counted.dtype.kind in "iu", requirement, "'balanced'", way_out)
    counted = counted[counted >= 0]
    counts = np.bincount(counted, minlength=trainer.n_classes or 0)
    absent = np.flatnonzero(counts == 0).tolist()
    requirement = (
        "class_weights to be 'balanced' over classes that the training split has"
    )
    check(
        not absent and len(counted) > 0,
        requirement,
        f"no examples of class {few(absent)}",
        way_out,
    )
    return (len(counted) / (len(counts) * counts)).tolist()


def aligned_labels(labels: Tensor, *, next_token: bool) -> Tensor:
    """Return labels at the positions of their logits: shifted for `next_token`; (N, 1) class indices become (N,).

    >>> aligned_labels(torch.tensor([[5, 6, 7]]), next_token=True)
    tensor([[   6,    7, -100]])
    """
    if next_token and labels.dim() > 1:
        return pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    one_column = (
        labels.dim() == 2 and labels.shape[1] == 1 and not labels.is_floating_point()
    )
    return labels.squeeze(1) if one_column else labels


# ---- Repeated rows, which give all processes equal batches ----


def n_own_rows(rows_left: int, process: int, size: int) -> int:
    """Return how many of a process's `size` rows in the last batch are not repeats."""
    return min(max(rows_left - process * size, 0), size)


def ignore_repeated_rows(
    batch: Any, key: str, loader: Any, accelerator: Accelerator
) -> None:
    """Ignore the rows from the start of the epoch that accelerate adds to the last batch of a loader."""
    shards = getattr(loader, "batch_sampler", None)
    is_last = accelerator.gradient_state.end_of_dataloader and key in batch
    if (
        not (is_last and isinstance(shards, BatchSamplerShard))
        or shards.num_processes == 1
    ):
        return
    size = shards.batch_size // (shards.num_processes if shards.split_batches else 1)
    rows_left = len(shards.batch_sampler.sampler) % (size * shards.num_processes)
    if rows_left and shards.even_batches and not shards.drop_last:
        n_own, labels = n_own_rows(rows_left, shards.process_index, size), batch[key]
        labels = labels.clone() if labels.is_floating_point() else labels.long().clone()
        if len(labels) == size:
            labels[n_own:] = IGNORE_INDEX
        elif n_own < size:  # Packed rows without padding each begin at position 0.
            starts = (
                (batch["position_ids"][0] == 0).nonzero()
                if "position_ids" in batch
                else [0]
            )
            labels[:, starts[n_own] if n_own < len(starts) else labels.shape[1] :] = (
                IGNORE_INDEX
            )
        batch[key] = labels


def number_of_classes(model: Any) -> int | None:
    """Return the model's number of labels, or the vocabulary size of a language model; None if unknown."""
    model = without_adapters(model)
    name, config = type(model).__name__, getattr(model, "config", None)
    if name.endswith(
        "ForMultipleChoice"
    ):  # The classes are the choices of each question.
        return None
    if name.endswith("ForMaskedLM") or getattr(model, "can_generate", bool)():
        return getattr(config.get_text_config(), "vocab_size", None)  # type: ignore[union-attr]
    return getattr(config, "num_labels", None)


# ---- The answers of a judge ----


class AnswerOptions:
    """Conversion of token labels to option indices, and of a language model's logits to those of the options."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        requirement = "the model to be a causal language model for answer_options"
        way_out = "load it with AutoModelForCausalLM, or leave answer_options out"
        check(is_causal(model), requirement, type(model).__name__, way_out)
        requirement = "processing_class to be a tokenizer for answer_options"
        way_out = "pass processing_class=tokenizer to the trainer"
        check(callable(tokenizer), requirement, repr(tokenizer), way_out)
        options = option_tokens(tokenizer, texts)
        self.names, self.tokens = list(options), list(options.values())
        self._keeps_positions = keeps_positions(model)

    def batch(self, collator: Callable[[Any], Any], rows: Any) -> dict[str, Any]:
        """Return a collated batch with the option (N,) and its place instead of token labels (N, L)."""
        batch = collator(rows)
        labels = batch["labels"]
        counted = labels != IGNORE_INDEX
        answered, places = (
            counted.any(dim=1),
            counted.long().argmax(dim=1),
        )  # the first position with a label
        is_option = labels.gather(1, places[:, None]) == torch.tensor(self.tokens)
        right = (counted.sum(dim=1) <= 1) & (is_option.any(dim=1) | ~answered)
        self._check_one(bool(right.all()), labels[~right].tolist(), "a batch")
        follows = not (answered & (places == 0)).any()
        check(
            follows,
            "the answer to follow a prompt",
            "one that is a row's first token",
            "add prompts",
        )
        batch["labels"] = torch.where(
            answered, is_option.long().argmax(dim=1), IGNORE_INDEX
        )
        batch[PLACES] = (places - 1).clamp_min(0)
        return batch

    def logits(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the options' logits (N, K) before each row's answer; if possible, the model computes no others."""
        inputs = dict(inputs)
        places = inputs.pop(PLACES)
        if self._keeps_positions:
            inputs["logits_to_keep"], places = places.unique(return_inverse=True)
        rows = torch.arange(len(places), device=places.device)
        return model(**inputs).logits[rows, places][:, self.tokens]

    def check(self, labels: Labels, role: str) -> None:
        """Raise before training unless each row of a split has exactly one option token as its label."""
        counted = labels.values != IGNORE_INDEX
        values, rows = labels.values[counted], labels.rows[counted]
        wrong = ~np.isin(values, self.tokens)
        wrong[1:] |= rows[1:] == rows[:-1]
        row = rows[np.argmax(wrong)] if wrong.any() else None
        self._check_one(
            row is None, values[rows == row].tolist(), f"row {row} of the {role} split"
        )

    def _check_one(self, holds: bool, found: list[Any], where: str) -> None:
        options = ", ".join(
            f"{t} ({name!r})" for t, name in zip(self.tokens, self.names, strict=True)
        )
        got, way_out = (
            f"{str(found)[:200]} in {where}",
            "set the labels of all other tokens to -100",
        )
        check(holds, f"labels to have one token per row, of {options}", got, way_out)
