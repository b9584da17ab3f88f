"""The calibration sums of a pass over a dataset and, if requested, its logits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from hf_calib._compat import full_float32
from hf_calib._errors import check
from hf_calib.losses import logits_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.state import LOGGED_METRICS, CalibrationState
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.saved_map import temperature_of
from hf_calib.trainer import labels as of_labels
from hf_calib.trainer.calibration_map import check_size

# With more classes, as in a vocabulary, no class has enough rows, and the sums would need most of
# the time.
MOST_CLASSES_APART = 10_000
_SUMMED_AT_ONCE = 2**16  # At least this many logits.
_MAPPED_AT_ONCE = (
    2**20
)  # It limits the copy of logits for large batches and vocabularies.

Arrays = tuple[NDArray[Any], NDArray[Any]]


class Batch(NamedTuple):
    """Logits (N, ..., C) with labels (N, ...), or with float labels of their shape: several labels,
    or soft ones.
    """

    logits: Tensor
    labels: Tensor


@dataclass(eq=False)
class Evaluation:
    """The batches of a pass on this process, which end in the same metrics on every process."""

    # A report on this many values needs less than 80 MB and half a minute. With few classes, most
    # of the time is for resampling rows, so each row counts as at least this many values, and there
    # are at most 50,000 rows.
    FEW_VALUES: ClassVar[int] = 20_000_000
    VALUES_OF_A_ROW: ClassVar[int] = 400
    # With this many tokens a temperature's standard error is below 1%; this many logits need half a
    # GiB in float32.
    MOST_TOKENS: ClassVar[int] = 20_000
    MOST_LOGITS: ClassVar[int] = 2**27

    accelerator: Accelerator
    prefix: str = ""
    n_bins: int = 15
    keep_values: float = 0  # The most logits to keep.
    sample_tokens: bool = (
        False  # Keep a random sample, because logits of a vocabulary are large.
    )
    # Float labels are distributions over the classes of one softmax.
    reads_soft_labels: bool = False
    dataset: Any = None
    calibration_map: Any = None  # A fitted calibrator, whose metrics are computed, too.
    is_of_other_weights: bool = False  # Than those that the calibrator was fitted to.

    def __post_init__(self) -> None:
        self.raw: CalibrationState | None = None
        self.calibrated: CalibrationState | None = None
        self.multi_label = False
        self.has_soft_labels = False
        self.rows: list[Batch] = []  # What is kept.
        self.lengths: list[Tensor] = []  # Lengths of the sentences in `rows` of tokens.
        # What compute_loss has read of the batch in hand; `WatchedStep` empties it before each
        # batch.
        self.read_by_the_loss: Batch | None = None
        # The batches come from this loader. One that is under way already, as that of a training,
        # says nothing of them.
        self.loader: Any = None
        self._loader_around = self.accelerator.gradient_state.active_dataloader
        # Means of the loss over batches and their divisors, (2,) each; at the end the sums over all
        # of them.
        self._losses: list[Tensor] = []
        self._loss_of_rows: float | None = None
        self._waiting: list[Batch] = []
        self._n_waiting = 0
        self._n_rows = 0
        self._share = 1.0  # The share of labelled tokens that is kept.

    # ---- Batches ----

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (N, ..., C) with labels (N, ...), or with float labels of their
        shape.
        """
        logits = logits.detach()
        is_one_per_class = labels.is_floating_point()
        if self.raw is None:
            self._begin(logits, is_one_per_class=is_one_per_class)
        if (
            self.keep_values
            and not self.sample_tokens
            and labels.dim() == 2
            and not is_one_per_class
        ):
            self._add_lengths(labels)

        # Repeats at the end of the last batch belong to other rows of the dataset.
        n_own = self._n_own_rows(len(labels))
        rows = logits[:n_own].reshape(-1, logits.shape[-1])
        own_labels = labels[:n_own]
        targets = own_labels.reshape(rows.shape if is_one_per_class else -1)
        self._waiting.append(Batch(rows, targets))
        self._n_waiting += rows.numel()

        # Logits of several processes are gathered batch by batch, because that is the order of the
        # dataset.
        keeps_order = self.keep_values > 0 and self.accelerator.num_processes > 1
        if keeps_order or self._n_waiting >= _SUMMED_AT_ONCE:
            self._sum_up()
        else:
            # Until then a hook of the user's may work in place, and a model may reuse the memory of
            # its outputs.
            self._waiting[-1] = Batch(rows.clone(), targets.clone())

    def _begin(self, logits: Tensor, *, is_one_per_class: bool) -> None:
        """Make the sums, whose kind the first batch decides."""
        self.multi_label = is_one_per_class and not self.reads_soft_labels
        self.has_soft_labels = is_one_per_class and self.reads_soft_labels
        self.raw = self._new_state(logits.shape[-1])
        self._random = torch.Generator(logits.device)
        # Each process draws from its own tokens.
        self._random.manual_seed(self.accelerator.process_index)
        if self.calibration_map is not None:
            self.calibrated = self._new_state(logits.shape[-1])
            check_size(self.calibration_map, logits.shape[-1])
            self._mapped = on_device(self.calibration_map.affine_map(), logits)
        if is_one_per_class and self.keep_values < math.inf:
            self.keep_values = 0  # No report resamples these.

    def _new_state(self, n_classes: int) -> CalibrationState:
        return CalibrationState(
            n_classes=n_classes,
            n_bins=self.n_bins,
            by_class=n_classes <= MOST_CLASSES_APART,
        )

    def _add_lengths(self, labels: Tensor) -> None:
        """Keep the number of labelled tokens of each sentence, by which a report resamples."""
        n_labelled = (labels != IGNORE_INDEX).sum(dim=1)
        self.lengths.append(self.accelerator.gather_for_metrics(n_labelled))

    def _n_own_rows(self, n_rows: int) -> int:
        """Return how many rows of a batch are not repeats, with which accelerate fills up the last
        batch.
        """
        state = self.accelerator.gradient_state
        active = state.active_dataloader
        is_of_this_pass = active is self.loader or active is not self._loader_around
        if is_of_this_pass and state.end_of_dataloader and state.remainder > 0:
            return of_labels.n_own_rows(
                state.remainder, self.accelerator.process_index, n_rows
            )
        return n_rows

    def _sum_up(self) -> None:
        """Add the waiting batches to the sums in one update, which takes no longer than that of a
        small batch.
        """
        if self.raw is None or not self._waiting:
            return
        logits, labels = _joined(self._waiting)
        self._waiting = []
        self._n_waiting = 0
        kind = {"multi_label": self.multi_label, "soft_labels": self.has_soft_labels}
        self.raw.update_logits(logits, labels, **kind)
        if self.calibrated is not None:
            step = max(1, _MAPPED_AT_ONCE // logits.shape[1])
            for some, their_labels in zip(
                logits.split(step), labels.split(step), strict=True
            ):
                self.calibrated.update_logits(self._mapped(some), their_labels, **kind)
        if self.keep_values:
            self._keep(logits, labels)

    def add_loss(self, mean: Tensor, divisor: Tensor) -> None:
        """Add the mean loss of a batch, and the number of rows or sum of class weights by which it
        was divided.
        """
        numbers = torch.stack([mean.detach().float().mean(), divisor.float()])
        self._losses.append(numbers)

    def _mean_loss(self) -> float | None:
        """The mean over the rows of all batches and processes; NaN without labels, None without
        losses.

        A loss that couples the rows of a batch is the mean of its batches, weighted by their rows.
        """
        if not self._losses:
            return None
        means, divisors = torch.stack(self._losses).T
        counts = divisors > 0
        # The product is rounded once; on a device that has no float64, before the sum.
        wide = torch.float32 if means.device.type == "mps" else torch.float64
        of_batches = (means.to(wide) * divisors.to(wide)).where(counts, 0)
        sums = torch.stack([of_batches.sum(), divisors.to(wide).sum()])
        total, divisor = self.accelerator.reduce(sums, "sum").tolist()
        return total / divisor if divisor > 0 else math.nan

    # ---- Rows that are kept ----

    def _keep(self, logits: Tensor, labels: Tensor) -> None:
        """Gather the labelled rows of a batch in the order of the dataset."""
        kept = _labelled(labels)
        if self._share < 1:
            drawn = torch.rand(len(kept), generator=self._random, device=kept.device)
            kept &= drawn < self._share
        rows = Batch(logits[kept].float(), labels[kept])
        if self.accelerator.num_processes > 1:
            rows = self._gathered(rows)
        self.rows.append(Batch(rows.logits.cpu(), rows.labels.cpu()))
        self._n_rows += len(rows.labels)

        n_classes = logits.shape[1]
        if self.sample_tokens:
            most = min(self.MOST_TOKENS, max(1, self.MOST_LOGITS // n_classes))
            while self._n_rows > most:
                self._halve()
        elif self._n_rows * max(n_classes, self.VALUES_OF_A_ROW) > self.keep_values:
            # There are too many for a report, and a part of the rows would not be the dataset.
            self.keep_values = 0
            self.rows = []
            self.lengths = []

    def _gathered(self, rows: Batch) -> Batch:
        """Gather the rows of all processes, which have different numbers of them."""
        pad = partial(self.accelerator.pad_across_processes, pad_index=IGNORE_INDEX)
        logits, labels = self.accelerator.gather((pad(rows.logits), pad(rows.labels)))
        known = _labelled(labels)  # The others are padding.
        return Batch(logits[known], labels[known])

    def _halve(self) -> None:
        """Keep a random half of the tokens, the same on every process, and a smaller share of later
        tokens.
        """
        self._share /= 2
        n_halvings = int(1 / self._share)
        generator = torch.Generator().manual_seed(n_halvings)
        kept = torch.rand(self._n_rows, generator=generator) < 0.5
        sizes = [len(rows.labels) for rows in self.rows]
        self.rows = [
            Batch(rows.logits[part], rows.labels[part])
            for rows, part in zip(self.rows, kept.split(sizes), strict=True)
        ]
        self._n_rows = int(kept.sum())

    # ---- Results ----

    def finish(self) -> None:
        """Merge the sums of the processes; each calls it once, after the last batch."""
        self._sum_up()
        self._loss_of_rows = self._mean_loss()
        self._losses = []
        for state in (self.raw, self.calibrated):
            if state is not None:
                state.all_reduce()
        if self.rows:
            self.rows = [_joined(self.rows)]
        # A pass is kept for longer than its loader.
        self.loader = None
        self._loader_around = None

    @property
    def has_loss(self) -> bool:
        """Whether the loss of the rows is known."""
        return self._loss_of_rows is not None

    def metrics(self) -> dict[str, float]:
        """Return the loss and the calibration metrics of the pass by log key; empty if no batch had
        labels.
        """
        found: dict[str, float] = {}
        if self._loss_of_rows is not None:
            found[f"{self.prefix}_loss"] = self._loss_of_rows
        for state, suffix in ((self.raw, ""), (self.calibrated, "_calibrated")):
            if state is not None:
                for name, value in _compute(state).items():
                    found[f"{self.prefix}_{name}{suffix}"] = value
        if self.calibrated is not None:
            temperature = temperature_of(self.calibration_map)
            if temperature is not None:
                found["temperature"] = temperature
        return found

    def logits_and_labels(self) -> Arrays:
        """Return the logits (N, C) float32 and the labels of all rows that are not ignored, if
        logits were kept.

        A multi-label row counts if any of its decisions does; unknown decisions are -100. Soft
        labels are (N, C).
        """
        was_to_keep = self.keep_values > 0 or bool(self.rows)
        check(
            was_to_keep or self.raw is None,
            "the logits of this evaluation to be kept",
            got="their sums only",
            way_out="call evaluate(..., keep_logits=True)",
        )
        check_labelled(bool(self.rows) and len(self.rows[0].labels) > 0)
        rows = self.rows[0]
        return rows.logits.numpy(), rows.labels.numpy()

    def predictions(self, names: Mapping[int, str]) -> Predictions:
        """Return `logits_and_labels` with the class names by class index; logits may be NaN.

        Soft labels become their most probable class. For labels of tokens, `sentences` (N,) is the
        index of each token's sentence.
        """
        logits, labels = self.logits_and_labels()
        if self.has_soft_labels:
            labels = labels.argmax(axis=1)
        sentences = None
        if self.lengths:
            lengths = torch.cat(self.lengths).cpu().numpy()
            sentences = np.repeat(np.arange(len(lengths)), lengths)
        return Predictions(
            labels,
            logits=logits,
            class_names=tuple(
                str(names.get(index, index)) for index in range(logits.shape[1])
            ),
            sentences=sentences,
            validate=False,  # A model that has diverged has NaN, which the caller reports.
        )


class WatchedStep:
    """A trainer's `prediction_step` that also adds each batch to a pass."""

    def __init__(
        self,
        step: Callable[..., Any],
        current: Evaluation,
        *,
        next_token: bool,
        label_names: Sequence[str],
        normalizer: Callable[[Tensor], Tensor] | None,
        keeps_losses: bool,
    ) -> None:
        self.step = step
        self.current = current
        self._next_token = next_token
        self._has_several_labels = len(label_names) > 1
        self._label_names = label_names
        self._normalizer = normalizer
        self._keeps_losses = keeps_losses

    def __call__(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        current = self.current
        current.read_by_the_loss = None
        # The Trainer computes no loss of rows that have some of the labels.
        if self._has_several_labels and any(
            inputs.get(name) is not None for name in self._label_names
        ):
            of_labels.check_one_label(self._label_names)
        # Without the logits there are no metrics.
        loss, logits, labels = self.step(model, inputs, False, ignore_keys=ignore_keys)
        batch = current.read_by_the_loss
        if batch is not None and loss is not None and self._normalizer is not None:
            current.add_loss(loss, self._normalizer(batch.labels))
            # The loop's mean would weight each batch by its rows, also those that are ignored.
            loss = loss if self._keeps_losses else None
        # A compute_loss of another trainer.
        if batch is None and isinstance(labels, Tensor):
            aligned = of_labels.aligned_labels(labels, next_token=self._next_token)
            batch = Batch(logits_of(logits), aligned)
        if batch is not None:
            # An override may return the mean over several views, of which the loss reads one.
            if _are_others(logits, batch.logits):
                batch = Batch(logits, batch.labels)
            current.add(batch.logits, batch.labels)
        if prediction_loss_only:
            return loss, None, None
        return loss, logits, labels


def _are_others(returned: Any, read: Tensor) -> bool:
    """Whether a step returns logits of its own in place of those that the loss has read."""
    if not isinstance(returned, Tensor) or returned.data_ptr() == read.data_ptr():
        return False
    # Other shapes or dtypes are another form of the same logits.
    is_alike = returned.shape == read.shape and returned.dtype == read.dtype
    return is_alike and not torch.equal(returned, read)


def _joined(batches: list[Batch]) -> Batch:
    """All rows of some batches in one."""
    logits = torch.cat([batch.logits for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    return Batch(logits, labels)


def _labelled(labels: Tensor) -> Tensor:
    """The mask (N,) of rows whose label (N,), or any of (N, C), is not ignored."""
    known = labels != IGNORE_INDEX
    if known.dim() == 2:
        return known.any(dim=1)
    return known


def on_device(mapping: AffineMap, logits: Tensor) -> Callable[[Tensor], Tensor]:
    """The calibrator as a function of logits (N, C) like these, in float32 or their float64; -inf
    stays -inf.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32

    def moved(part: Any) -> Tensor:
        # There are two steps because the device may not support float64.
        return torch.as_tensor(part).to(dtype).to(logits.device)

    weight = moved(mapping.weight)
    bias = None if mapping.bias is None else moved(mapping.bias)

    @torch.no_grad()
    def mapped(rows: Tensor) -> Tensor:
        wide = rows.to(dtype)
        if weight.ndim == 2:
            with full_float32():
                result = wide @ weight.T
        else:
            # A weight of 0 would make NaN of -inf.
            masked = wide.isneginf()
            result = torch.where(masked, wide, wide.masked_fill(masked, 0) * weight)
        return result if bias is None else result + bias

    return mapped


def _compute(state: CalibrationState) -> dict[str, float]:
    """The metrics of the sums; NaN with a warning for logits that are not finite."""
    try:
        return state.compute()
    except ValueError as error:  # The model has diverged; the user decides what to do.
        warnings.warn(
            f"This evaluation has no calibration metrics: {error}. They are logged as NaN. Check "
            "the model's logits and the labels.",
            stacklevel=2,
        )
        return dict.fromkeys(LOGGED_METRICS, math.nan)


def check_labelled(found: bool) -> None:
    """Raise if a split for gammas or the calibrator has no labels."""
    check(
        found,
        "the calibration split to have labelled examples",
        got="none",
        way_out="check its label column",
    )
