"""One pass of a trainer's model over a dataset: its calibration sums, and its logits only where they are asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import get_sampler
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput

from hf_calib._compat import full_float32
from hf_calib._errors import check
from hf_calib.losses import logits_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.streaming import StreamingCalibration
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.saved_map import temperature_of, title_of
from hf_calib.trainer import labels as of_labels
from hf_calib.trainer.token_sample import TokenSample

_MAPPED_AT_ONCE = 2**20  # logits: their copy stays small, however large batch and vocabulary are
Arrays = tuple[NDArray[Any], NDArray[Any]]


@dataclass(eq=False)
class Evaluation:
    """Takes the batches of a pass on this process; ends with the same numbers on every process.

    Args:
        accelerator: the trainer's.
        prefix: of the log keys, such as "eval".
        n_bins: bins of the calibration errors.
        keep_values: of logits and labels, at most; fewer than infinitely many, not of several labels a row.
        sample_tokens: keep those of a `TokenSample`, where labels are (N, L).
        dataset: what the pass is over.
        calibration_map: a fitted scaler that folds; its metrics are computed beside the raw ones.
    """

    # What a report on them costs stays below 80 MB and half a minute, of which its resampling of rows takes most where
    # classes are few: each row counts as this many values at least, so there are 50,000 at most.
    FEW_VALUES: ClassVar[int] = 20_000_000
    VALUES_OF_A_ROW: ClassVar[int] = 400

    accelerator: Accelerator
    prefix: str = ""
    n_bins: int = 15
    keep_values: float = 0
    sample_tokens: bool = False
    dataset: Any = None
    calibration_map: Any = None
    # Made with the first batch, which tells the problem type and the device.
    raw: StreamingCalibration | None = field(default=None, init=False)
    calibrated: StreamingCalibration | None = field(default=None, init=False)
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    # Of the sentences in `rows`, where labels are of tokens.
    lengths: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.sample = TokenSample(self.accelerator) if self.sample_tokens and self.keep_values else None
        self._n_values = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Take a batch: logits (N, ..., C), labels (N, ...), or float labels like the logits (multi-label)."""
        logits, multi_label = logits.detach(), labels.is_floating_point()
        if self.raw is None:
            self.raw = StreamingCalibration(n_bins=self.n_bins, multi_label=multi_label)
            if self.calibration_map is not None:
                self.calibrated = StreamingCalibration(n_bins=self.n_bins, multi_label=multi_label)
                self._mapped = on_device(self.calibration_map.affine_map(), logits)
        # The last batch is filled up with repeats, to be even over processes.
        state, n_own = self.accelerator.gradient_state, len(labels)
        if state.end_of_dataloader and state.remainder > 0:
            n_own = of_labels.n_own_rows(state.remainder, self.accelerator.process_index, n_own)
        self.raw.update(logits[:n_own], labels[:n_own])
        if self.calibrated is not None:
            rows = logits[:n_own].reshape(-1, logits.shape[-1])
            targets = labels[:n_own].reshape(rows.shape if multi_label else -1)
            step = max(1, _MAPPED_AT_ONCE // rows.shape[1])
            for chunk, chunk_labels in zip(rows.split(step), targets.split(step), strict=True):
                self.calibrated.update(self._mapped(chunk), chunk_labels)
        if self.sample is not None:
            self.sample.add(logits[:n_own], labels[:n_own])
        elif self.keep_values:
            self._keep(logits.float(), labels)

    def _keep(self, logits: Tensor, labels: Tensor) -> None:
        """Gather a batch in the order of the dataset, without the rows that fill it up."""
        accelerator, multi_label = self.accelerator, labels.is_floating_point()
        if accelerator.num_processes > 1 and logits.dim() == 3:
            pad = partial(accelerator.pad_across_processes, dim=1, pad_index=IGNORE_INDEX)
            logits, labels = pad(logits), pad(labels)
        logits, labels = accelerator.gather_for_metrics((logits.contiguous(), labels.contiguous()))
        if labels.dim() == 2 and not multi_label:
            self.lengths.append((labels != IGNORE_INDEX).sum(dim=1).cpu())
        logits = logits.reshape(-1, logits.shape[-1])
        labels = labels.reshape(logits.shape if multi_label else -1)
        known = (labels != IGNORE_INDEX).any(1) if multi_label else labels != IGNORE_INDEX
        self.rows.append((logits[known].cpu(), labels[known].cpu()))
        self._n_values += len(self.rows[-1][1]) * max(logits.shape[-1], self.VALUES_OF_A_ROW)
        if self.keep_values < math.inf and (multi_label or self._n_values > self.keep_values):
            self.keep_values, self.rows, self.lengths = 0, [], []

    def finish(self) -> None:
        """Merge the processes; called by all of them, once, after the last batch."""
        for state in self._states():
            state.all_reduce()
        if self.sample is not None:
            self.rows = self.sample.finish()
        if self.rows:
            logits, labels = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
            self.rows = [(logits, labels)]

    def metrics(self) -> dict[str, float]:
        """The calibration metrics of the pass, by log key; none where no batch had labels."""
        endings = zip(("", "_calibrated"), self._states(), strict=False)
        found = {f"{self.prefix}_{k}{end}": v for end, state in endings for k, v in _compute(state).items()}
        temperature = None if self.calibrated is None else temperature_of(self.calibration_map)
        return found | ({} if temperature is None else {"temperature": temperature})

    def panels(self) -> dict[str, Arrays]:
        """(confidences, correct) before and, if there is a map, after it: for a reliability diagram."""
        names = ["before", *([] if self.calibrated is None else [f"after {title_of(self.calibration_map)}"])]
        return {n: s.top_label for n, s in zip(names, self._states(), strict=True)}

    def logits_and_labels(self) -> Arrays:
        """(N, C) float32 logits and the labels of all rows that are not ignored, if logits were kept.

        Multi-label rows count if one of their decisions does; the others are -100.
        """
        check_labelled(bool(self.rows) and len(self.rows[0][1]) > 0)
        logits, labels = self.rows[0]
        return logits.numpy(), labels.numpy()

    def predictions(self, names: Mapping[int, str]) -> Predictions:
        """`logits_and_labels` with the names of the classes by their numbers; logits may be NaN."""
        logits, labels = self.logits_and_labels()
        class_names = tuple(str(names.get(i, i)) for i in range(logits.shape[1]))
        about: dict[str, Any] = {"class_names": class_names, "sentences": self.sentences()}
        return Predictions(labels, logits=logits, **about, validate=False)

    def sentences(self) -> NDArray[Any] | None:
        """(N,) the number of its sentence for each row of `logits_and_labels`; None where labels are not of tokens."""
        if not self.rows or not self.lengths:
            return None
        lengths = torch.cat(self.lengths).numpy()
        return np.repeat(np.arange(len(lengths)), lengths)

    def _states(self) -> list[StreamingCalibration]:
        return [state for state in (self.raw, self.calibrated) if state is not None]


@dataclass
class Asked:
    """What a call of `evaluate` asks of its pass, and the pass once it is done."""

    dataset: Any = None
    keep_logits: bool = False
    done: Evaluation | None = None


def on_device(mapping: AffineMap, logits: Tensor) -> Callable[[Tensor], Tensor]:
    """A map of logits (N, C) like these, in float32, or in float64 if they are; -inf stays -inf.

    >>> rotated = AffineMap(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([0.0, 0.5]))
    >>> logits = torch.tensor([[1.0, 0.0]])
    >>> on_device(rotated, logits)(logits)
    tensor([[0.0000, 1.5000]])
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    # In two steps: the device may have no float64.
    parts = [None if part is None else torch.as_tensor(part).to(dtype).to(logits.device) for part in mapping]

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
    except ValueError as error:  # a model that has diverged: say so, but leave the decision to the user
        warnings.warn(
            f"This evaluation has no calibration metrics: {error}. They are logged as NaN. Check the model's logits "
            "and the labels.",
            stacklevel=2,
        )
        return dict.fromkeys(LOGGED_METRICS, math.nan)


def check_labelled(found: bool) -> None:
    """Refuse a split without labels, to fit gammas or a map on."""
    check(found, "the calibration split to have labelled examples", "none", "check its label column")


# ---- Passes of a trainer's model ----


def run(
    trainer: Any, current: Evaluation, loop: Callable[..., EvalLoopOutput], loader: Any, loss_only: bool
) -> EvalLoopOutput:
    """A pass by the trainer's `evaluation_loop`, whose hook for the logits is where each batch is taken."""
    if isinstance(get_sampler(loader), LengthGroupedSampler):  # which is for training
        loader.set_sampler(SequentialSampler(loader.dataset))
    hooks = trainer.preprocess_logits_for_metrics, trainer.compute_metrics
    next_token = of_labels.predicts_next_token(trainer.accelerator.unwrap_model(trainer.model))

    def take(logits: Any, labels: Any) -> Any:
        seen = vars(trainer).pop("seen", None)  # what a compute_loss of ours read of this batch
        if seen is None and isinstance(labels, Tensor):
            seen = logits_of(logits), of_labels.aligned_labels(labels, next_token=next_token)
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
    nothing: Any = {"predictions": None, "label_ids": None}
    return output._replace(**nothing) if loss_only else output


def held_out(trainer: Any, split: Any, current: Evaluation, *, n_samples: int | None = None) -> Evaluation:
    """A pass over a split in the middle of a training, or over a fixed random subset of it.

    Mode, random streams, log and progress bars of the training are left as found.
    """
    loader = of_labels.loader_of(trainer, split, n_samples)
    handler = trainer.callback_handler
    modes = [(module, module.training) for module in trainer.model.modules()]
    left = handler.callbacks, handler.eval_dataloader
    handler.callbacks = []
    try:
        with of_labels.random_state_left_as_found():
            loop = partial(Trainer.evaluation_loop, trainer, description="Calibration")
            run(trainer, current, loop, loader, loss_only=True)
    finally:
        handler.callbacks, handler.eval_dataloader = left
        for module, mode in modes:
            module.training = mode
    return current
