"""Losses that adapt to held-out predictions: AdaFocal's and CalFocal's gammas, ECE-CE's gaps."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import InputValueError, expected
from hf_calib.losses._calibration_loss import CalibrationLoss
from hf_calib.losses.gammas import BinStatistics, GammaRule
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.losses.statistics.dispatch import RowStatistics

# The buffer whose length, the number of classes, is known only from the first update on.
SIZED_BY_UPDATE = "class_gaps"
ROUNDING = 1e-9
PASSES_BEFORE_WARNING = 100


class AdaptiveLoss(CalibrationLoss):
    """A loss with a table that `update` fits to held-out predictions.

    The table lives on the CPU in float64, wherever the loss is moved, so that it is the same on every device
    and in every checkpoint; the copies that training reads are made once per update.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copies: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}
        self._passes_without_update = 0

    def forward(self, logits: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        """Compute the loss; see `CalibrationLoss.forward`.

        Warns:
            UserWarning: once, where the Trainer's `compute_loss_func` is never updated.
        """
        loss = super().forward(logits, labels, **kwargs)
        # The stock Trainer passes the model's output; CalibrationTrainer, which updates, passes logits.
        if not isinstance(logits, Tensor) and loss.requires_grad and not torch.compiler.is_compiling():
            self._passes_without_update += 1
            if self._passes_without_update == PASSES_BEFORE_WARNING:
                warnings.warn(
                    f"{self.name!r} has trained for {PASSES_BEFORE_WARNING} batches and was never updated: it is still "
                    "the loss that it was at first, and does not adapt. Use CalibrationTrainer, which updates it from "
                    "held-out predictions, or call its update() from a callback.",
                    UserWarning,
                    stacklevel=4,
                )
        return loss

    @abstractmethod
    def update(
        self, confidences: Any, correct: Any, *, class_gaps: Any = None, progress: float | None = None
    ) -> None:
        """Fit the table to held-out predictions, which must not be those that are reported.

        Args:
            confidences: (N,) top-label probabilities in [0, 1].
            correct: (N,) whether the predicted class was right, bool or 0/1.
            class_gaps: (C,) calibration error of each class. `ece_ce` needs it, the others leave it.
            progress: share of the training that is done, in [0, 1]. `ece_ce` needs it, the others leave it.

        Raises:
            ValueError: for an empty set, lengths that differ, NaN, values outside their range, or what the
                loss needs and was not given. The table is then as it was.
        """

    @abstractmethod
    def log_values(self) -> dict[str, float]:
        """The table as numbers to log: `calibration_gap_00`, ..., `edge_00`, ... and so on."""

    def _apply(self, fn: Any, recurse: bool = True) -> AdaptiveLoss:
        """`.to()`, `.half()` and the like move the class weights, not the table."""
        table = dict(self._buffers)
        super()._apply(fn, recurse)
        self._buffers |= {name: value for name, value in table.items() if name != "class_weights"}
        return self

    def _like(self, name: str, tensor: Tensor) -> Tensor:
        """The buffer `name` on the tensor's device, in its dtype."""
        key = (name, tensor.device, tensor.dtype)
        if key not in self._copies:
            self._copies[key] = self.get_buffer(name).to(tensor)
        return self._copies[key]

    @abstractmethod
    def _limits(self) -> dict[str, tuple[float, float]]:
        """Between what the entries of each buffer lie, in any table of this loss."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name, (low, high) in self._limits().items():
            if (saved := state_dict.get(prefix + name)) is not None:
                self._check_entries(name, saved, low, high)
        sized = state_dict.get(prefix + SIZED_BY_UPDATE)
        if SIZED_BY_UPDATE in self._buffers and sized is not None:
            setattr(self, SIZED_BY_UPDATE, torch.zeros_like(sized, dtype=torch.float64))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._copies.clear()

    def _check_entries(self, name: str, saved: Tensor, low: float, high: float) -> None:
        """Refuse what no update of this loss can have written."""
        way_out = f"load the table of a loss {self.name!r} with {self.hyperparameters}"
        own_shape = self.get_buffer(name).shape
        if saved.shape != own_shape and not (name == SIZED_BY_UPDATE and saved.dim() == 1):
            requirement = f"have shape {tuple(own_shape)}"
            raise InputValueError(
                expected(f"{name} of the saved table", requirement, tuple(saved.shape), way_out)
            )
        fits = (saved >= low - ROUNDING) & (saved <= high + ROUNDING)  # false for NaN
        if name == "accuracies":
            fits |= saved.isnan()  # of an empty bin
        if not bool(fits.all()):
            requirement = f"be in [{low:g}, {high:g}]"
            got = f"{saved[~fits].tolist()[0]} among them"
            raise InputValueError(expected(f"{name} of the saved table", requirement, got, way_out))

    def _set(self, **values: Tensor) -> None:
        for name, value in values.items():
            setattr(self, name, value.to("cpu", torch.float64))
        self._copies.clear()
        self._passes_without_update = -sys.maxsize


class GammaTableLoss(AdaptiveLoss):
    """AdaFocal, CalFocal: gamma comes from a table over bins of the true-class probability. AdaDualFocal: of the lead.

    Buffers, float64: `edges` (M + 1,) of the bins, `gammas` (M,), and of the last update `gaps` (M,), mean
    confidence minus accuracy, and `accuracies` (M,), NaN before there is one; `counts` (M,), the held-out
    examples in each bin, is not saved.
    """

    def __init__(self, *args: Any, rule: GammaRule, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rule = rule
        m = rule.n_bins
        self.edges: Tensor
        self.gammas: Tensor
        self.gaps: Tensor
        self.accuracies: Tensor
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(m, dtype=torch.float64), persistent=False)
        self.register_buffer("edges", torch.linspace(0, 1, m + 1, dtype=torch.float64))
        self.register_buffer("gammas", torch.full((m,), rule.gamma_init, dtype=torch.float64))
        self.register_buffer("gaps", torch.zeros(m, dtype=torch.float64))
        self.register_buffer("accuracies", torch.full((m,), torch.nan, dtype=torch.float64))

    @torch.no_grad()
    def update(
        self, confidences: Any, correct: Any, *, class_gaps: Any = None, progress: float | None = None
    ) -> None:
        """Fit bins and gammas to held-out predictions; see `AdaptiveLoss.update`.

        Example:
            >>> from hf_calib.losses import adafocal
            >>> loss = adafocal(n_bins=2)
            >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
            >>> loss.gammas.tolist()  # over-confident in both bins: both gammas grow
            [1.28..., 2.45...]
        """
        held_out = _checked_predictions(confidences, correct)
        bins = BinStatistics.of(*held_out, self.rule.n_bins)
        self._set(
            edges=bins.edges,
            gammas=self.rule.updated(self.gammas, bins),
            gaps=bins.gaps,
            accuracies=bins.accuracies,
            counts=bins.counts,
        )

    def gamma(self, p: Tensor, labels: Tensor | None = None) -> Tensor:
        bins = torch.bucketize(p, self._like("edges", p)[1:-1], right=True)
        return self.rule.of_examples(p, bins, self._like("gammas", p), self._like("accuracies", p))

    def log_values(self) -> dict[str, float]:
        return {
            **_numbered("gamma", self.gammas),
            **_numbered("calibration_gap", self.gaps),
            **_numbered("edge", self.edges),
            **_numbered("count", self.counts),
        }

    def _limits(self) -> dict[str, tuple[float, float]]:
        limits = (self.rule.gamma_min, self.rule.gamma_max)
        return {"edges": (0.0, 1.0), "gammas": limits, "gaps": (-1.0, 1.0), "accuracies": (0.0, 1.0)}


class EceCrossEntropy(AdaptiveLoss):
    """Cross entropy whose weight moves, as training goes on, from 1 to the held-out gaps of the example.

    weight = (1 - t) + t * (|bin gap| + |mass gap| + 2 |class gap|) / 3, with t the training progress.
    Buffers, float64: `bin_gaps` (M,) and `mass_gaps` (M,) of the equal-width and equal-mass bins,
    `class_gaps` (C,), `progress` (); `counts` (M,), the held-out examples in each equal-width bin, is not
    saved. The mass gap goes by the rank of p_y within the batch, as in the authors' code.
    """

    def __init__(self, *args: Any, n_bins: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bin_gaps: Tensor
        self.mass_gaps: Tensor
        self.class_gaps: Tensor
        self.progress: Tensor
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(n_bins, dtype=torch.float64), persistent=False)
        self.register_buffer("bin_gaps", torch.zeros(n_bins, dtype=torch.float64))
        self.register_buffer("mass_gaps", torch.zeros(n_bins, dtype=torch.float64))
        self.register_buffer("class_gaps", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("progress", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(
        self, confidences: Any, correct: Any, *, class_gaps: Any = None, progress: float | None = None
    ) -> None:
        """Take the gaps from held-out predictions; see `AdaptiveLoss.update`.

        A progress of 0 means plain cross entropy, of 1 the weights of the gaps alone.
        """
        if class_gaps is None or progress is None:
            got = f"class_gaps={class_gaps}, progress={progress}"
            raise InputValueError(
                expected("class_gaps and progress", f"be given to {self.name}", got, "pass both")
            )
        if not 0 <= progress <= 1:
            raise InputValueError(
                expected("progress", "be in [0, 1]", progress, "pass epochs done / epochs in all")
            )
        class_gaps = _on_cpu(class_gaps)
        if class_gaps.dim() != 1 or len(class_gaps) == 0 or not bool(class_gaps.isfinite().all()):
            got = class_gaps.tolist()
            raise InputValueError(expected("class_gaps", "be (C,) finite numbers", got, "pass one per class"))
        confidences, correct = _checked_predictions(confidences, correct)
        n_bins = len(self.bin_gaps)
        index = (torch.searchsorted(self._bin_edges(), confidences) - 1).clamp_min(0)
        totals = torch.zeros(2, n_bins, dtype=torch.float64)
        totals[0].index_add_(0, index, confidences - correct)
        totals[1].index_add_(0, index, torch.ones_like(confidences))
        self._set(
            bin_gaps=totals[0] / totals[1].clamp_min(1),
            mass_gaps=BinStatistics.of(confidences, correct, n_bins).gaps,
            class_gaps=class_gaps,
            counts=totals[1],
            progress=torch.tensor(float(progress), dtype=torch.float64),
        )

    def log_values(self) -> dict[str, float]:
        return {
            **_numbered("calibration_gap", self.bin_gaps),
            **_numbered("edge", self._bin_edges()),
            **_numbered("count", self.counts),
        }

    @property
    def reads_labels(self) -> bool:
        return True

    def _bin_edges(self) -> Tensor:
        return torch.linspace(0, 1, len(self.bin_gaps) + 1).double()

    def _limits(self) -> dict[str, tuple[float, float]]:
        gaps = (-1.0, 1.0)
        return {
            "bin_gaps": gaps,
            "mass_gaps": gaps,
            "class_gaps": (-sys.float_info.max, sys.float_info.max),
            "progress": (0.0, 1.0),
        }

    def _rows(
        self, logits: Tensor, labels: Tensor, multi_label: bool
    ) -> tuple[Tensor, RowStatistics, Tensor | None]:
        if len(self.class_gaps) not in (0, logits.shape[-1]):
            got, way_out = len(self.class_gaps), "update the loss with the gaps of this model's classes"
            raise InputValueError(
                expected("class_gaps", f"have one entry for each of {logits.shape[-1]} classes", got, way_out)
            )
        return super()._rows(logits, labels, multi_label)

    def gamma(self, p: Tensor, labels: Tensor | None = None) -> Tensor:
        """The weight itself: what the table says of examples with these labels, all of one batch."""
        if labels is None or len(self.class_gaps) == 0:
            return torch.ones_like(p)
        valid = labels != IGNORE_INDEX
        n_bins = len(self.bin_gaps)
        bin_index = (p * n_bins).long().clamp(max=n_bins - 1)
        bin_gap = self._like("bin_gaps", p)[bin_index] * (p < 1)
        rank = p.argsort(stable=True).argsort()  # rows that do not count have p = 1, and come last
        size = valid.sum() // n_bins
        mass_index = torch.where(size > 0, rank // size.clamp_min(1), n_bins - 1).clamp(max=n_bins - 1)
        mass_gap = self._like("mass_gaps", p)[mass_index]
        class_gap = self._like("class_gaps", p)[labels.where(valid, 0)]
        progress = self._like("progress", p)
        return 1 - progress + progress * (bin_gap.abs() + mass_gap.abs() + 2 * class_gap.abs()) / 3


def _numbered(name: str, values: Tensor) -> dict[str, float]:
    """Log keys `name_00`, `name_01`, ... for the values."""
    return {f"{name}_{i:02d}": value for i, value in enumerate(values.tolist())}


def _on_cpu(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()


def _checked_predictions(confidences: Any, correct: Any) -> tuple[Tensor, Tensor]:
    """Check held-out predictions; return both as (N,) float64 on the CPU."""
    confidences, correct = _on_cpu(confidences), _on_cpu(correct)
    if confidences.dim() != 1 or confidences.shape != correct.shape or len(confidences) == 0:
        raise InputValueError(
            expected(
                "confidences and correct",
                "be two (N,) vectors, N >= 1",
                f"{tuple(confidences.shape)} and {tuple(correct.shape)}",
                "pass one entry per held-out example",
            )
        )
    for name, values in (("confidences", confidences), ("correct", correct)):
        outside = ~((values >= 0) & (values <= 1))  # NaN too
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            raise InputValueError(
                expected(
                    name,
                    "be in [0, 1]",
                    f"{values[row].item()} in row {row} ({int(outside.sum())} such)",
                    "pass probabilities, not logits; NaN means the model's logits are NaN",
                )
            )
    return confidences, correct
