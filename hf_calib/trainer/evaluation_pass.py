"""One pass of a model over a dataset: its calibration sums, and its logits only where they are asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from hf_calib._compat import full_float32
from hf_calib._errors import InputValueError, expected
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.streaming import StreamingCalibration
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.saved_map import temperature_of, title_of
from hf_calib.trainer.token_sample import TokenSample

_MAPPED_AT_ONCE = 2**20  # logits: their copy stays small, however large batch and vocabulary are


class EvaluationPass:
    """Takes the batches of a pass on this process; ends with the same numbers on every process.

    Args:
        accelerator: the trainer's.
        prefix: of the log keys, such as "eval".
        n_bins: bins of the calibration errors.
        calibration_map: a fitted scaler that folds; its metrics are computed beside the raw ones.
        keep_logits: keep logits and labels, for a fit or a report that needs them.
        keep_at_most: drop them once all processes together have more values than this, or where labels are several
            per row.
        sample_tokens: keep those of a `TokenSample`, where labels are (N, L).
    """

    # What a report on them costs stays below 80 MB and half a minute, of which its resampling of rows takes most where
    # classes are few: each row counts as this many values at least, so there are 50,000 at most.
    FEW_VALUES = 20_000_000
    VALUES_OF_A_ROW = 400

    def __init__(
        self,
        accelerator: Accelerator,
        prefix: str,
        *,
        n_bins: int,
        calibration_map: Any = None,
        keep_logits: bool = False,
        keep_at_most: int | None = None,
        sample_tokens: bool = False,
    ) -> None:
        self.accelerator = accelerator
        self.prefix = prefix
        self.n_bins = n_bins
        self.calibration_map = calibration_map
        self.keep_logits = keep_logits
        self.keep_at_most = keep_at_most
        self.sample = TokenSample(accelerator) if sample_tokens else None
        # Made with the first batch, which tells the problem type.
        self.raw: StreamingCalibration | None = None
        self.calibrated: StreamingCalibration | None = None
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.n_values = 0  # in `rows`
        self.lengths: list[Tensor] = []  # where labels are of tokens: how many each sentence has in `rows`

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Take a batch: logits (..., C), labels (...), or float labels like the logits (multi-label)."""
        own = self._n_not_repeated(len(labels))
        logits = logits.detach()[:own]
        labels = labels[:own]
        multi_label = labels.is_floating_point()
        if self.raw is None:
            self.raw = StreamingCalibration(n_bins=self.n_bins, multi_label=multi_label)
            if self.calibration_map is not None:
                self.calibrated = StreamingCalibration(n_bins=self.n_bins, multi_label=multi_label)
        self.raw.update(logits, labels)
        if self.calibrated is not None:
            mapping, n_classes = self.calibration_map.affine_map(), logits.shape[-1]
            step = max(1, _MAPPED_AT_ONCE // n_classes)
            rows = logits.reshape(-1, n_classes)
            targets = labels.reshape(rows.shape) if multi_label else labels.reshape(-1)
            for chunk, chunk_labels in zip(rows.split(step), targets.split(step), strict=True):
                self.calibrated.update(mapped(chunk, mapping), chunk_labels)
        if self.keep_logits and self.sample is not None:
            self.sample.add(logits, labels)
        elif self.keep_logits:
            if labels.ndim == 2 and not multi_label:
                self.lengths.append((labels != IGNORE_INDEX).sum(dim=1))
            logits = logits.reshape(-1, logits.shape[-1])
            labels = labels.reshape(logits.shape) if multi_label else labels.reshape(-1)
            keep = (labels != IGNORE_INDEX).any(1) if multi_label else labels != IGNORE_INDEX
            kept = logits[keep].float()
            self.rows.append((kept, labels[keep]))
            self.n_values += len(kept) * max(kept.shape[-1], self.VALUES_OF_A_ROW)
            if self.keep_at_most is not None and (multi_label or self.n_values > self._own_share()):
                self.keep_logits, self.rows = False, []

    def finish(self) -> None:
        """Merge the processes; called by all of them, once, after the last batch."""
        for state in self._states():
            state.all_reduce()
        if self.keep_at_most is not None and self.accelerator.num_processes > 1:
            # All of them keep theirs, or none: what follows is collective.
            kept = torch.tensor([float(self.keep_logits)], device=self.accelerator.device)
            if self.accelerator.reduce(kept, "sum") < self.accelerator.num_processes:
                self.rows = []
        if self.sample is not None:
            self.rows = self.sample.finish()
        if self.rows:
            sizes = [len(labels) for _, labels in self.rows]
            logits, labels = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
            self.rows = [(self._in_order(logits, sizes), self._in_order(labels, sizes))]
        if self.rows and self.lengths:
            self.lengths = [self._in_order(torch.cat(self.lengths), list(map(len, self.lengths)))]

    def metrics(self) -> dict[str, float]:
        """The calibration metrics of the pass, by log key; none where no batch had labels."""
        if self.raw is None:
            return {}
        prefix = self.prefix
        metrics = {f"{prefix}_{name}": value for name, value in _compute(self.raw).items()}
        if self.calibrated is not None:
            calibrated = _compute(self.calibrated)
            metrics |= {f"{prefix}_{name}_calibrated": value for name, value in calibrated.items()}
            temperature = temperature_of(self.calibration_map)
            metrics |= {} if temperature is None else {"temperature": temperature}
        return metrics

    def panels(self) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """(confidences, correct) before and, if there is a map, after it: for a reliability diagram."""
        names = (
            ["before"] if self.calibrated is None else ["before", f"after {title_of(self.calibration_map)}"]
        )
        return {n: (s.confidences, s.correct) for n, s in zip(names, self._states(), strict=True)}

    def labelled(self) -> StreamingCalibration:
        """The sums of the pass, which had labels.

        Raises:
            ValueError: if no batch had labels.
        """
        if self.raw is None:
            raise InputValueError(_no_labels())
        return self.raw

    def logits_and_labels(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(N, C) float32 logits and the labels of all rows that are not ignored, if logits were kept.

        Multi-label rows count if one of their decisions does; the others are -100.

        Raises:
            ValueError: if there are none.
        """
        if not self.rows or len(self.rows[0][1]) == 0:
            raise InputValueError(_no_labels())
        logits, labels = self.rows[0]
        return logits.cpu().numpy(), labels.cpu().numpy()

    def predictions(self, names: Mapping[int, str]) -> Predictions:
        """Predictions from `logits_and_labels` and `sentences`, with the names of the classes by their numbers.

        The logits may be NaN: nothing is validated.
        """
        logits, labels = self.logits_and_labels()
        return Predictions(
            labels,
            logits=logits,
            class_names=tuple(str(names.get(i, i)) for i in range(logits.shape[1])),
            sentences=self.sentences(),
            validate=False,
        )

    def sentences(self) -> np.ndarray[Any, Any] | None:
        """(N,) the number of its sentence for each row of `logits_and_labels`; None where labels are not of tokens."""
        if not self.rows or not self.lengths:
            return None
        lengths = self.lengths[0].numpy()
        return np.repeat(np.arange(len(lengths)), lengths)

    def _own_share(self) -> float:
        assert self.keep_at_most is not None
        return self.keep_at_most / self.accelerator.num_processes

    def _states(self) -> list[StreamingCalibration]:
        return [state for state in (self.raw, self.calibrated) if state is not None]

    def _n_not_repeated(self, size: int) -> int:
        """Rows of this batch that are not repeats: the last batch is filled up to be even over processes."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(max(state.remainder - self.accelerator.process_index * size, 0), size)

    def _in_order(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """All processes' rows in the order of the dataset, as one process has them: cross-validation splits by it."""
        gathered = self._gather(rows).cpu()
        return (
            gathered if self.accelerator.num_processes == 1 else gathered[_in_turns(gather_object([sizes]))]
        )

    def _gather(self, rows: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return rows
        sizes = self.accelerator.gather(torch.tensor([len(rows)], device=rows.device))
        padded = self.accelerator.gather(self.accelerator.pad_across_processes(rows, dim=0))
        parts = padded.split(int(sizes.max()))
        return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


@dataclass
class Evaluation:
    """One call of `evaluate`.

    Attributes:
        dataset: what is evaluated.
        done: its pass, once that is over; never for several sets, which are evaluations of their own.
    """

    dataset: Any
    done: EvaluationPass | None = None


def _in_turns(sizes: list[list[int]]) -> Tensor:
    """Row numbers, batch by batch, of rows that lie process by process: the batches are dealt out in turns.

    Args:
        sizes: of each process, the rows of its batches.

    >>> _in_turns([[2, 1], [2]])
    tensor([0, 1, 3, 4, 2])
    """
    starts = [sum(map(sum, sizes[:process])) for process in range(len(sizes))]
    turns = []
    for turn in range(max(map(len, sizes))):
        for process, batches in enumerate(sizes):
            if turn < len(batches):
                turns.append(torch.arange(starts[process], starts[process] + batches[turn]))
                starts[process] += batches[turn]
    return torch.cat(turns)


@torch.no_grad()
def mapped(logits: Tensor, mapping: AffineMap) -> Tensor:
    """The map of logits (N, C) on their device, in float32, or in float64 if they are; -inf stays -inf.

    >>> mapped(torch.tensor([[1.0, 0.0]]), AffineMap(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([0.0, 0.5])))
    tensor([[0.0000, 1.5000]])
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weight = torch.as_tensor(mapping.weight).to(wide.dtype).to(wide.device)
    if weight.ndim == 2:
        with full_float32():
            result = wide @ weight.T
    else:
        masked = wide.isneginf()
        result = torch.where(masked, wide, wide.masked_fill(masked, 0) * weight)
    return (
        result
        if mapping.bias is None
        else result + torch.as_tensor(mapping.bias).to(wide.dtype).to(wide.device)
    )


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


def _no_labels() -> str:
    return expected("the calibration split", "have labelled examples", "none", "check its label column")
