"""Passes of a trainer's model over a dataset, our `CalibrationTrainer`'s or a stock one's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_calib.language_models.label_tokens import is_causal
from hf_calib.losses import logits_of
from hf_calib.trainer import labels as of_labels
from hf_calib.trainer.evaluation import Batch, Evaluation


class WatchedStep:
    """A trainer's `prediction_step` that also adds each batch to a pass."""

    def __init__(
        self,
        step: Callable[..., Any],
        current: Evaluation,
        *,
        next_token: bool,
        label_names: Sequence[str],
        normalizer: Callable[[Tensor], Tensor] | None = None,
        keeps_losses: bool = False,
    ) -> None:
        self.step = step
        self._normalizer = normalizer
        self._keeps_losses = keeps_losses
        self._current = current
        self._next_token = next_token
        self._label_names = label_names

    def __call__(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        self._current.read_by_the_loss = None
        if any(inputs.get(name) is not None for name in self._label_names):
            of_labels.check_one_label(self._label_names)
        # Without the logits there are no metrics.
        loss, logits, labels = self.step(model, inputs, False, ignore_keys=ignore_keys)
        batch = self._current.read_by_the_loss
        if batch is not None and loss is not None and self._normalizer is not None:
            self._current.add_loss(loss, self._normalizer(batch.labels))
            # The loop's mean would weight each batch by its rows, also those that are ignored.
            loss = loss if self._keeps_losses else None
        if batch is None and isinstance(
            labels, Tensor
        ):  # A compute_loss of another trainer.
            aligned = of_labels.aligned_labels(labels, next_token=self._next_token)
            batch = Batch(logits_of(logits), aligned)
        if batch is not None:
            self._current.add(batch.logits, batch.labels)
        if prediction_loss_only:
            return loss, None, None
        return loss, logits, labels


@contextmanager
def watched(trainer: Trainer, current: Evaluation, loader: Any) -> Iterator[None]:
    """Within this context the batches of the trainer's `evaluation_loop` over a loader are added to a pass.

    `prediction_step` is the only place where the stock loop has the logits of a batch, also if only its loss is wanted.
    It is replaced on this object, and not overridden, so that a stock trainer and a subclass with a `prediction_step`
    of its own have the metrics, too. The hooks that belong to the user are not touched.
    """
    current.loader = loader
    label_key = next(iter(trainer.label_names), "labels")
    rows = of_labels.read_labels(getattr(loader, "dataset", None), label_key)
    # Rows without any label are predicted only.
    if rows is not None and len(rows.values):
        rows.check_given("evaluated")
    outer = trainer.prediction_step
    # Within another pass, only this one has the batches.
    step = outer.step if isinstance(outer, WatchedStep) else outer
    next_token = is_causal(trainer.accelerator.unwrap_model(trainer.model))
    own = vars(trainer)
    is_a_method = "prediction_step" not in own
    # Another compute_loss may read several labels.
    ours = ("has_own_loss", "reads_labels")
    reads_one = all(getattr(trainer, name, False) for name in ours)
    own["prediction_step"] = WatchedStep(
        step,
        current,
        next_token=next_token,
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


def rows_left_out(loader: Any, args: Any) -> int:
    """The number of rows that `dataloader_drop_last` leaves out of an evaluation."""
    has_rows = isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")
    if not args.dataloader_drop_last or not has_rows:
        return 0
    of_a_step = getattr(loader, "total_batch_size", loader.batch_size)
    return max(0, len(loader.dataset) - len(loader) * of_a_step)


class MadeLoader(NamedTuple):
    """A loader, and what it was made with."""

    loader: Any
    settings: list[Any]
    # These are kept, so that no others get their ids.
    dataset: Any
    collator: Any


class SplitLoaders:
    """The loaders of a trainer's held-out splits and their random subsets.

    Each is made once, because accelerate keeps every loader.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._made: dict[tuple[int, int | None], MadeLoader] = {}

    def loader(self, dataset: Any, n_samples: int | None = None) -> Any:
        """Return the loader of a dataset, or of a fixed random subset of this size."""
        key = (id(dataset), n_samples)
        made = self._made.get(key)
        settings = self._settings(dataset)
        if made is None or made.settings != settings:
            rows = dataset
            if n_samples is not None and n_samples < len(dataset):
                generator = torch.Generator().manual_seed(self._trainer.args.seed)
                order = torch.randperm(len(dataset), generator=generator)
                rows = Subset(dataset, order[:n_samples].tolist())
            # With persistent workers, get_eval_dataloader would return the loader of the evaluation set.
            with _all_rows(self._trainer.args):
                loader = self._trainer.get_test_dataloader(rows)
            collator = self._trainer.data_collator
            made = MadeLoader(loader, settings, dataset, collator)
            self._made[key] = made
        return made.loader

    def _settings(self, dataset: Any) -> list[Any]:
        """What a loader is made with, apart from the rows: the collator, and arguments that may be changed later."""
        args = self._trainer.args
        return [
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
    """Within this context loaders keep the last rows: dropping them is for the batches of a training."""
    drops_last = args.dataloader_drop_last
    args.dataloader_drop_last = False
    try:
        yield
    finally:
        args.dataloader_drop_last = drops_last


def run_held_out(trainer: Trainer, loader: Any, current: Evaluation) -> None:
    """Run a pass over held-out rows in the midst of a training, which it leaves unchanged."""
    in_row_order(loader)
    with (
        weights_kept(trainer),
        _modes_kept(trainer.model),
        random_states_kept(),
        _without_callbacks(trainer.callback_handler),
        watched(trainer, current, loader),
    ):
        # The stock loop, since this is no evaluation that an overridden one has to report.
        Trainer.evaluation_loop(
            trainer, loader, description="Calibration", prediction_loss_only=True
        )
    current.finish()


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
    """Restore all generators that a dataset or a model may draw from, so that the run stays reproducible."""
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
