"""A pass of a trainer's model over a dataset: its calibration sums and, if requested, its logits."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import get_sampler
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import SequentialSampler, Subset
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput

from hf_calib._compat import full_float32
from hf_calib._errors import check
from hf_calib.language_models.label_tokens import is_causal
from hf_calib.losses import logits_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.streaming import StreamingCalibration
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.saved_map import temperature_of
from hf_calib.trainer import labels as of_labels

_SUMMED_AT_ONCE = 2**16  # At least this many logits.
_MAPPED_AT_ONCE = (
    2**20
)  # It limits the copy of logits for large batches and vocabularies.
Arrays = tuple[NDArray[Any], NDArray[Any]]


@dataclass(eq=False)
class Evaluation:
    """The batches of a pass on this process, which end in the same metrics on every process."""

    # A report on this many values needs less than 80 MB and half a minute. With few classes, most of the time is for
    # resampling rows, so each row counts as at least this many values, and there are at most 50,000 rows.
    FEW_VALUES: ClassVar[int] = 20_000_000
    VALUES_OF_A_ROW: ClassVar[int] = 400
    # With this many tokens a temperature's standard error is below 1%; this many logits need half a GiB in float32.
    MOST_TOKENS: ClassVar[int] = 20_000
    MOST_LOGITS: ClassVar[int] = 2**27

    accelerator: Accelerator
    prefix: str = ""
    n_bins: int = 15
    keep_values: float = 0  # The most logits to keep.
    sample_tokens: bool = (
        False  # Keep a random sample, because logits of a vocabulary are large.
    )
    dataset: Any = None
    calibration_map: Any = None  # A fitted calibrator, whose metrics are computed, too.

    def __post_init__(self) -> None:
        self.raw: StreamingCalibration | None = None
        self.calibrated: StreamingCalibration | None = None
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.lengths: list[Tensor] = []  # Lengths of the sentences in `rows` of tokens.
        self._waiting, self._n_waiting = list[tuple[Tensor, Tensor]](), 0
        self._n_rows, self._share = 0, 1.0  # The share of labelled tokens that is kept.

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (N, ..., C) with labels (N, ...), or with float labels of their shape if multi-label."""
        logits, multi_label = logits.detach(), labels.is_floating_point()
        if self.raw is None:
            self.raw = StreamingCalibration(n_bins=self.n_bins, multi_label=multi_label)
            self._random = torch.Generator(labels.device).manual_seed(
                self.accelerator.process_index
            )
            if self.calibration_map is not None:
                self.calibrated = StreamingCalibration(
                    n_bins=self.n_bins, multi_label=multi_label
                )
                self._mapped = on_device(self.calibration_map.affine_map(), logits)
            if multi_label and self.keep_values < math.inf:
                self.keep_values = 0  # No report resamples these.
        if (
            self.keep_values
            and labels.dim() == 2
            and not (multi_label or self.sample_tokens)
        ):
            self.lengths.append(
                self.accelerator.gather_for_metrics((labels != IGNORE_INDEX).sum(dim=1))
            )
        # The last batch is filled up with repeats, so that processes have equal batches.
        state, n_own = self.accelerator.gradient_state, len(labels)
        if state.end_of_dataloader and state.remainder > 0:
            n_own = of_labels.n_own_rows(
                state.remainder, self.accelerator.process_index, n_own
            )
        rows = logits[:n_own].reshape(-1, logits.shape[-1])
        targets = labels[:n_own].reshape(rows.shape if multi_label else -1)
        self._waiting.append((rows, targets))
        self._n_waiting += rows.numel()
        gathers = (
            self.keep_values and self.accelerator.num_processes > 1
        )  # to keep the order
        if gathers or self._n_waiting >= _SUMMED_AT_ONCE:
            self._sum_up()

    def _sum_up(self) -> None:
        """Add the waiting batches to the sums in one update, which takes no longer than that of a small batch."""
        if self._waiting and self.raw is not None:
            rows, targets = (
                torch.cat(parts) for parts in zip(*self._waiting, strict=True)
            )
            self._waiting, self._n_waiting = [], 0
            self.raw.update(rows, targets)
            if self.calibrated is not None:
                step = max(1, _MAPPED_AT_ONCE // rows.shape[1])
                for chunk, chunk_labels in zip(
                    rows.split(step), targets.split(step), strict=True
                ):
                    self.calibrated.update(self._mapped(chunk), chunk_labels)
            if self.keep_values:
                self._keep(rows, targets)

    def _keep(self, logits: Tensor, labels: Tensor) -> None:
        """Gather the labelled rows of a batch in the order of the dataset."""
        known = _labelled(labels)
        if self._share < 1:
            known &= (
                torch.rand(len(known), generator=self._random, device=known.device)
                < self._share
            )
        logits, labels = logits[known].float(), labels[known]
        if (
            self.accelerator.num_processes > 1
        ):  # Processes have different numbers of rows.
            pad = partial(self.accelerator.pad_across_processes, pad_index=IGNORE_INDEX)
            logits, labels = self.accelerator.gather((pad(logits), pad(labels)))
            known = _labelled(labels)
            logits, labels = logits[known], labels[known]
        self.rows.append((logits.cpu(), labels.cpu()))
        self._n_rows += len(labels)
        if self.sample_tokens:
            while self._n_rows > min(
                self.MOST_TOKENS, max(1, self.MOST_LOGITS // logits.shape[1])
            ):
                self._halve()
        elif (
            self._n_rows * max(logits.shape[1], self.VALUES_OF_A_ROW) > self.keep_values
        ):
            self.keep_values, self.rows, self.lengths = 0, [], []

    def _halve(self) -> None:
        """Keep a random half of the tokens, the same on every process, and a smaller share of later tokens."""
        self._share /= 2
        generator = torch.Generator().manual_seed(int(1 / self._share))
        kept = torch.rand(self._n_rows, generator=generator) < 0.5
        parts = kept.split([len(labels) for _, labels in self.rows])
        self.rows = [
            (row[part], of[part])
            for (row, of), part in zip(self.rows, parts, strict=True)
        ]
        self._n_rows = int(kept.sum())

    def finish(self) -> None:
        """Merge the sums of the processes; each calls it once, after the last batch."""
        self._sum_up()
        for state in self._states():
            state.all_reduce()
        if self.rows:
            logits, labels = (
                torch.cat(parts) for parts in zip(*self.rows, strict=True)
            )
            self.rows = [(logits, labels)]

    def metrics(self) -> dict[str, float]:
        """Return the calibration metrics of the pass by log key; empty if no batch had labels."""
        endings = zip(("", "_calibrated"), self._states(), strict=False)
        found = {
            f"{self.prefix}_{k}{end}": v
            for end, state in endings
            for k, v in _compute(state).items()
        }
        temperature = (
            None if self.calibrated is None else temperature_of(self.calibration_map)
        )
        return found | ({} if temperature is None else {"temperature": temperature})

    def logits_and_labels(self) -> Arrays:
        """Return the logits (N, C) float32 and the labels of all rows that are not ignored, if logits were kept.

        A multi-label row counts if any of its decisions does; unknown decisions are -100.
        """
        check_labelled(bool(self.rows) and len(self.rows[0][1]) > 0)
        logits, labels = self.rows[0]
        return logits.numpy(), labels.numpy()

    def predictions(self, names: Mapping[int, str]) -> Predictions:
        """Return `logits_and_labels` with the class names by class index; logits may be NaN.

        For labels of tokens, `sentences` (N,) is the index of each token's sentence.
        """
        logits, labels = self.logits_and_labels()
        class_names = tuple(str(names.get(i, i)) for i in range(logits.shape[1]))
        lengths = torch.cat(self.lengths).cpu().numpy() if self.lengths else None
        sentences = (
            None if lengths is None else np.repeat(np.arange(len(lengths)), lengths)
        )
        about: dict[str, Any] = {"class_names": class_names, "sentences": sentences}
        return Predictions(labels, logits=logits, **about, validate=False)

    def _states(self) -> list[StreamingCalibration]:
        return [state for state in (self.raw, self.calibrated) if state is not None]


def _labelled(labels: Tensor) -> Tensor:
    """The mask (N,) of rows whose label (N,), or any of (N, C), is not ignored."""
    known = labels != IGNORE_INDEX
    return known.any(dim=1) if known.dim() == 2 else known


def on_device(mapping: AffineMap, logits: Tensor) -> Callable[[Tensor], Tensor]:
    """The calibrator as a function of logits (N, C) like these, in float32 or their float64; -inf stays -inf."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    # There are two steps because the device may not support float64.
    parts = [
        None if part is None else torch.as_tensor(part).to(dtype).to(logits.device)
        for part in mapping
    ]

    @torch.no_grad()
    def mapped(rows: Tensor) -> Tensor:
        (weight, bias), wide = parts, rows.to(dtype)
        assert weight is not None
        if weight.ndim == 2:
            with full_float32():
                result = wide @ weight.T
        else:
            masked = wide.isneginf()
            result = torch.where(masked, wide, wide.masked_fill(masked, 0) * weight)
        return result if bias is None else result + bias

    return mapped


def _compute(state: StreamingCalibration) -> dict[str, float]:
    try:
        return state.compute()
    except ValueError as error:  # The model has diverged; the user decides what to do.
        logged = "They are logged as NaN. Check the model's logits and the labels."
        warnings.warn(
            f"This evaluation has no calibration metrics: {error}. {logged}",
            stacklevel=2,
        )
        return dict.fromkeys(LOGGED_METRICS, math.nan)


def check_labelled(found: bool) -> None:
    """Raise if a split for gammas or the calibrator has no labels."""
    check(
        found,
        "the calibration split to have labelled examples",
        "none",
        "check its label column",
    )


# ---- Passes of a trainer's model ----


def run(
    trainer: Any,
    current: Evaluation,
    loop: Callable[..., EvalLoopOutput],
    loader: Any,
    loss_only: bool,
) -> EvalLoopOutput:
    """Run the trainer's `evaluation_loop`, whose hook for the logits reads each batch."""
    if isinstance(
        get_sampler(loader), LengthGroupedSampler
    ):  # That sampler is for training.
        loader.set_sampler(SequentialSampler(loader.dataset))
    hooks = trainer.preprocess_logits_for_metrics, trainer.compute_metrics
    next_token = is_causal(trainer.accelerator.unwrap_model(trainer.model))

    def take(logits: Any, labels: Any) -> Any:
        seen = vars(trainer).pop("seen", None)  # Our compute_loss has read this batch.
        if seen is None and isinstance(labels, Tensor):
            seen = (
                logits_of(logits),
                of_labels.aligned_labels(labels, next_token=next_token),
            )
        if seen is not None:
            current.add(*seen)
        if loss_only:
            return torch.zeros(1, device=trainer.accelerator.device)
        return logits if hooks[0] is None else hooks[0](logits, labels)

    trainer.preprocess_logits_for_metrics = take
    trainer.compute_metrics = None if loss_only else hooks[1]
    try:
        output = loop(loader, prediction_loss_only=False)
    finally:
        trainer.preprocess_logits_for_metrics, trainer.compute_metrics = hooks
    current.finish()
    return output._replace(predictions=None, label_ids=None) if loss_only else output  # type: ignore[arg-type]


def loader_of(trainer: Any, dataset: Any, n_samples: int | None) -> Any:
    """The loader of a dataset or of a fixed random subset, made once, because accelerate keeps every loader."""
    made = vars(trainer).setdefault(
        "loaders_of_splits", {}
    )  # It keeps the datasets and their ids.
    if (id(dataset), n_samples) not in made:
        rows = dataset
        if n_samples is not None and n_samples < len(dataset):
            generator = torch.Generator().manual_seed(trainer.args.seed)
            rows = Subset(
                dataset,
                torch.randperm(len(dataset), generator=generator)[:n_samples].tolist(),
            )
        # With persistent workers, get_eval_dataloader would return the loader of the evaluation set.
        made[id(dataset), n_samples] = dataset, trainer.get_test_dataloader(rows)
    return made[id(dataset), n_samples][1]


def held_out(
    trainer: Any, split: Any, current: Evaluation, *, n_samples: int | None = None
) -> Evaluation:
    """Run a pass over a split, or a fixed random subset of it, during training.

    Mode, random states, log and progress bars of the run are unchanged afterwards.
    """
    loader, handler = loader_of(trainer, split, n_samples), trainer.callback_handler
    modes = [(module, module.training) for module in trainer.model.modules()]
    left = (
        handler.callbacks,
        handler.eval_dataloader,
        random.getstate(),
        np.random.get_state(),
    )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    handler.callbacks = []
    try:
        with torch.random.fork_rng(devices=devices):
            loop = partial(Trainer.evaluation_loop, trainer, description="Calibration")
            run(trainer, current, loop, loader, loss_only=True)
    finally:
        handler.callbacks, handler.eval_dataloader = left[:2]
        random.setstate(left[2])
        np.random.set_state(left[3])
        for module, mode in modes:
            module.training = mode
    return current
