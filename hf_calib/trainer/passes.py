"""Passes of a trainer's model over a dataset, our `CalibrationTrainer`'s or a stock one's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_calib.language_models.label_tokens import is_causal
from hf_calib.trainer import labels as of_labels
from hf_calib.trainer.evaluation import Evaluation, WatchedStep


@contextmanager
def watched(trainer: Trainer, current: Evaluation, loader: Any) -> Iterator[None]:
    """Within this context the batches of the trainer's `evaluation_loop` over a loader are added to
    a pass.

    `prediction_step` is the only place where the stock loop has the logits of a batch, also if only
    its loss is wanted. It is replaced on this object, and not overridden, so that a stock trainer
    and a subclass with a `prediction_step` of its own have the metrics, too. The hooks that belong
    to the user are not touched.
    """
    current.loader = loader
    label_key = next(iter(trainer.label_names), "labels")
    rows = of_labels.read_labels(getattr(loader, "dataset", None), label_key)
    # Rows without any label are predicted only.
    if rows is not None and len(rows.values):
        rows.check_given("evaluated")
    outer = trainer.prediction_step
    own = vars(trainer)
    is_a_method = "prediction_step" not in own
    # A stock trainer has none of ours. Another compute_loss may read several labels.
    ours: Any = trainer
    reads_one = own.get("reads_labels", False) and ours.has_own_loss
    own["prediction_step"] = WatchedStep(
        # Within another pass, only this one has the batches.
        outer.step if isinstance(outer, WatchedStep) else outer,
        current,
        next_token=is_causal(trainer.accelerator.unwrap_model(trainer.model)),
        label_names=trainer.label_names if reads_one else (),
        normalizer=getattr(own.get("calibration_loss"), "normalizer", None),
        keeps_losses="loss" in trainer.args.include_for_metrics,
    )
    try:
        yield
    finally:
        if is_a_method:
            del own["prediction_step"]
        else:
            own["prediction_step"] = outer
        current.read_by_the_loss = None


def in_row_order(loader: Any) -> None:
    """Let a loader read its rows in their order, if it has them in the order for training."""
    # Other iterables of batches, such as a list, have no sampler.
    if not isinstance(loader, DataLoader):
        return
    is_of_batches = isinstance(loader.sampler, BatchSampler)
    sampler: Any = loader.sampler if is_of_batches else loader.batch_sampler
    # Each of several processes has a shard of the batches.
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    if isinstance(getattr(sampler, "sampler", None), LengthGroupedSampler):
        sampler.sampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]


@contextmanager
def passing(trainer: Trainer, current: Evaluation, loader: Any) -> Iterator[None]:
    """Within this context the trainer's `evaluation_loop` over a loader is a pass, which then has
    its results.
    """
    in_row_order(loader)
    with weights_kept(trainer), watched(trainer, current, loader):
        yield
    current.finish()


def rows_left_out(loader: Any) -> int:
    """The number of rows that `dataloader_drop_last` leaves out of an evaluation."""
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__len__"):
        return 0
    of_a_step: Any = getattr(loader, "total_batch_size", loader.batch_size)
    return max(0, len(loader.dataset) - len(loader) * of_a_step)


class MadeLoader(NamedTuple):
    """A loader, and what it was made with."""

    loader: Any
    made_with: list[Any]
    held: tuple[Any, Any]  # Rows and collator, so that no others get their ids.


class SplitLoaders:
    """The loaders of a trainer's held-out split and of its random subsets by their size.

    Each is made once, because accelerate keeps every loader.
    """

    def __init__(self, trainer: Trainer) -> None:
        # Its arguments and its collator may change between two passes.
        self._trainer = trainer
        self._made: dict[int | None, MadeLoader] = {}

    def loader(self, dataset: Any, n_samples: int | None = None) -> Any:
        """Return the loader of a dataset, or of a fixed random subset of this size."""
        made_with = self._made_with(dataset)
        made = self._made.get(n_samples)
        if made is not None and made.made_with == made_with:
            return made.loader
        rows = dataset
        if n_samples is not None and n_samples < len(dataset):
            generator = torch.Generator().manual_seed(self._trainer.args.seed)
            order = torch.randperm(len(dataset), generator=generator)
            rows = Subset(dataset, order[:n_samples].tolist())
        # With persistent workers, get_eval_dataloader would return the loader of the evaluation
        # set.
        with _all_rows(self._trainer.args):
            loader = self._trainer.get_test_dataloader(rows)
        held = (dataset, self._trainer.data_collator)
        self._made[n_samples] = MadeLoader(loader, made_with, held)
        return loader

    def _made_with(self, dataset: Any) -> list[Any]:
        """What a loader is made with: the rows, the collator, and arguments that may be changed
        later.
        """
        args = self._trainer.args
        return [
            id(dataset),
            id(self._trainer.data_collator),
            # A list may have other rows in a later training; a stream has no length.
            len(dataset) if hasattr(dataset, "__len__") else None,
            # Its transform, for example, which a loader copies.
            getattr(dataset, "format", None),
            args.eval_batch_size,
            args.dataloader_num_workers,
            args.remove_unused_columns,
            args.seed,
        ]


@contextmanager
def _all_rows(args: Any) -> Iterator[None]:
    """Within this context loaders keep the last rows: dropping them is for the batches of a
    training.
    """
    drops_last = args.dataloader_drop_last
    args.dataloader_drop_last = False
    try:
        yield
    finally:
        args.dataloader_drop_last = drops_last


def run_held_out(trainer: Trainer, loader: Any, current: Evaluation) -> None:
    """Run a pass over held-out rows in the midst of a training, which it leaves unchanged."""
    with (
        _modes_kept(trainer.model),
        random_states_kept(),
        _without_callbacks(trainer.callback_handler),
        passing(trainer, current, loader),
    ):
        # The stock loop, since this is no evaluation that an overridden one has to report.
        Trainer.evaluation_loop(
            trainer, loader, description="Calibration", prediction_loss_only=True
        )


@contextmanager
def weights_kept(trainer: Trainer) -> Iterator[None]:
    """Restore the weights that the Trainer rounds to 16 bits for a pass after the training."""
    args = trainer.args
    rounds = args.bf16_full_eval or args.fp16_full_eval
    if not rounds or trainer.is_in_train:
        yield
        return
    assert trainer.model is not None
    weights = [(weight, weight.data) for weight in trainer.model.parameters()]
    buffers = [
        (module, name, buffer)
        for module in trainer.model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for weight, data in weights:
            weight.data = data
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


@contextmanager
def _modes_kept(model: nn.Module | None) -> Iterator[None]:
    """Restore the mode of each module, because some may be frozen in the mode of evaluation."""
    assert model is not None
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore all generators that a dataset or a model may draw from, so that the run stays
    reproducible.
    """
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _without_callbacks(handler: CallbackHandler) -> Iterator[None]:
    """Keep log and progress bars of the run unchanged."""
    callbacks = handler.callbacks
    loader = handler.eval_dataloader
    handler.callbacks = []
    try:
        yield
    finally:
        handler.callbacks = callbacks
        handler.eval_dataloader = loader
