"""`CalibrationLoss`: weight x cross entropy + penalties, over a batch, with the right scaling."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from hf_calib._errors import InputTypeError, InputValueError, did_you_mean, expected
from hf_calib.losses._hyperparameters import INFINITY, ClassWeights
from hf_calib.losses.gammas import CONSTANT_0, Gamma, GammaSchedule
from hf_calib.losses.penalties import BatchPenalty, Penalty
from hf_calib.losses.statistics.definitions import (
    CROSS_ENTROPY,
    IGNORE_INDEX,
    Entropy,
    OtherPowers,
    Statistic,
)
from hf_calib.losses.statistics.dispatch import (
    RowStatistics,
    is_traced,
    multi_label_statistics,
    read_by,
    row_statistics,
)
from hf_calib.losses.weights import Weight

REDUCTIONS = ("mean", "sum", "none")
PROBLEM_TYPES = {None: None, "single_label_classification": False, "multi_label_classification": True}
# A cross entropy above this is that of a label which is masked, by -inf or by the least number of its dtype.
_IMPOSSIBLE = 1e30
# Rows, (N,) or (N, C), of this process -> those of all processes, differentiable; and how many processes there are.
Gather = Callable[[list[Tensor]], tuple[list[Tensor], int]]


@dataclass(frozen=True)
class Formula:
    """The parts of a loss: `scale * weight * CE + sum(coefficient * penalty)`."""

    scale: float = 1.0
    weight: Weight | None = None  # None: 1
    gamma: GammaSchedule = CONSTANT_0
    detach: bool = False  # the weight scales the gradient only (the `_gra` losses)
    penalties: tuple[tuple[float, Penalty], ...] = ()
    batch_penalties: tuple[tuple[float, BatchPenalty], ...] = ()
    multi_label: bool = False  # whether the formula has a meaning for a sigmoid per label, too

    @property
    def reads(self) -> tuple[Statistic, ...]:
        """All statistics that the parts read."""
        parts: list[Weight | Penalty | BatchPenalty] = [] if self.weight is None else [self.weight]
        parts += [penalty for _, penalty in self.penalties]
        parts += [penalty for _, penalty in self.batch_penalties]
        return read_by(*(part.reads for part in parts))


class CalibrationLoss(nn.Module):
    """A calibration loss over logits; make one with `make_loss`.

    Use it in any PyTorch loop, or as `Trainer(compute_loss_func=loss)`; `CalibrationTrainer` does the latter
    for you, and updates the losses that adapt. Whatever the dtype of the logits, the loss is computed in
    float32 at least, and under autocast too.

    Attributes:
        name: the name in `LOSSES`.
        hyperparameters: the values of all its hyperparameters, as JSON can hold them: infinity is "inf".
        couples_batch: whether it has a penalty on the batch as a whole.
    """

    def __init__(
        self,
        name: str,
        hyperparameters: Mapping[str, Any],
        formula: Formula,
        *,
        class_weights: ClassWeights = None,
        problem_type: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.hyperparameters = {k: INFINITY if v == math.inf else v for k, v in hyperparameters.items()}
        self.formula = formula
        self.multi_label = _is_multi_label(problem_type)
        self.gather: Gather | None = None
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", _checked_class_weights(class_weights), persistent=False)
        self._reads = formula.reads
        # Until the first float labels have been looked at: each look waits for the device.
        self._label_kind_is_open = True
        if self.multi_label:
            self.check_multi_label()

    @property
    def couples_batch(self) -> bool:
        return bool(self.formula.batch_penalties)

    @property
    def reads_labels(self) -> bool:
        """Whether the loss of a row depends on which class its label is, beyond the probabilities."""
        return False

    def gamma(self, p: Tensor, labels: Tensor | None = None) -> Gamma:
        """The weight's gamma for examples whose label has probability p (N,); negative for the inverse focal.

        For the dual focal losses p is the label's lead over its rival.
        """
        return self.formula.gamma(p)

    def extra_repr(self) -> str:
        return ", ".join([repr(self.name), *(f"{k}={v!r}" for k, v in self.hyperparameters.items())])

    def forward(
        self,
        logits: Any,
        labels: Tensor,
        *,
        reduction: str = "mean",
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        """Compute the loss.

        Args:
            logits: (N, C), or (N, L, C) for token-level labels; any float dtype. A model's output (with
                `.logits`, or a tuple whose first entry they are) is taken too, which is what the Trainer
                passes to a `compute_loss_func`.
            labels: (N,) or (N, L) integers in [0, C), -100 to ignore a row; or, for multi-label problems,
                (N, C) floats in [0, 1], -100 to ignore a decision.
            reduction: "mean" over the rows that count (weighted, if there are class weights), "sum", or
                "none" for a value per row, 0 where ignored. Losses that couple the batch refuse "none".
            num_items_in_batch: divide the sum by this instead: how many rows the whole accumulated batch
                has, over all micro-batches (and, as the Trainer counts, all processes).

        Returns:
            A scalar, or for "none" a tensor shaped like the labels; in nats, float32 or float64.

        Raises:
            ValueError: for shapes, dtypes, labels or reductions that do not fit; and for soft labels of one softmax,
                where `problem_type` does not say that each class is a sigmoid of its own.
        """
        if "CausalLM" in type(logits).__name__:
            _warn_of_unshifted_labels(logits, labels)
        logits = logits_of(logits)
        multi_label = self._check(logits, labels, reduction)
        labels = labels if multi_label else labels.long()
        with _without_autocast(logits):
            loss, stats, weights = self._rows(logits, labels, multi_label)
            if reduction == "none":
                return loss.view(labels.shape)
            return self._reduce(loss, stats, weights, labels, reduction, num_items_in_batch)

    def from_log_probs(
        self,
        log_probs: Tensor,
        *,
        entropy: Tensor | None = None,
        log_sum_sq_probs: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: str = "mean",
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        r"""Compute the loss of rows whose logits are gone, from what a fused head has kept of them.

        For language models whose head never makes the logits, such as TRL's: the same formula, and with the gradients
        of what is passed the same gradient. Where there are logits, call the loss itself.

        Args:
            log_probs: of the labels, any shape, float; with its gradient.
            entropy: of each distribution, in nats, for losses that read it (`entropy_regularized`).
            log_sum_sq_probs: $\log \sum_j p_j^2$, for those that read the other classes' squares: `bsce_gra`, and,
                where it has a gradient, `brier`, `bsce`, `focal_calibration`.
            mask: which rows count, bool, shaped like log_probs; None for all.
            reduction: as for `forward`.
            num_items_in_batch: as for `forward`.

        Returns:
            As `forward`: a scalar, or a value per row, 0 where it does not count; float32 or float64.

        Raises:
            ValueError: if the loss couples the batch, has class weights, is multi-label, reads labels or statistics
                that are not given, or needs the gradient of one that has none; or shapes differ.

        Example:
            >>> from hf_calib.losses import focal
            >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
            >>> kept = logits.log_softmax(dim=1).gather(1, labels[:, None]).squeeze(1)
            >>> focal(gamma=2.0).from_log_probs(kept), focal(gamma=2.0)(logits, labels)
            (tensor(0.0875), tensor(0.0875))
        """
        if reduction not in REDUCTIONS:
            raise InputValueError(
                expected("reduction", f"be one of {REDUCTIONS}", repr(reduction), "see the docstring")
            )
        given = {
            "log_probs": log_probs,
            "entropy": entropy,
            "log_sum_sq_probs": log_sum_sq_probs,
            "mask": mask,
        }
        for name, values in given.items():
            if values is not None and values.shape != log_probs.shape:
                got = f"{tuple(values.shape)} for {tuple(log_probs.shape)}"
                raise InputValueError(expected(name, "have the shape of log_probs", got, "pass one a row"))
        self._check_from_log_probs(log_probs, entropy, log_sum_sq_probs)
        counts = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask.bool()
        with _without_autocast(log_probs):
            wide = {
                name: values if values.dtype == torch.float64 else values.float()
                for name, values in given.items()
                if values is not None and name != "mask"
            }
            # A row that does not count may hold anything, also NaN, and gets no gradient.
            rows = {name: values.flatten().where(counts.flatten(), 0) for name, values in wide.items()}
            stats = RowStatistics(_kept_statistics(self._reads, rows))
            loss = self._per_example(stats, counts.flatten().long()).where(counts.flatten(), 0)
            if reduction == "none":
                return loss.view(log_probs.shape)
            total = loss.sum()
            if num_items_in_batch is not None:
                return total / num_items_in_batch
            return total if reduction == "sum" else total / counts.sum().clamp_min(1)

    def _check_from_log_probs(
        self, log_probs: Tensor, entropy: Tensor | None, log_sum_sq_probs: Tensor | None
    ) -> None:
        """Refuse by name a loss that these numbers do not make."""
        way_out = (
            "call it on logits (of a large head: linear_calibration_loss), or take focal, which needs no more"
        )
        refused = {
            "couples the batch": self.couples_batch,
            "has class weights": self.class_weights is not None,
            "is multi-label": bool(self.multi_label),
            "reads the labels": self.reads_labels,
        }
        for reason, holds in refused.items():
            if holds:
                raise InputValueError(
                    expected(
                        "loss", "be a formula of log-probabilities", f"{self.name!r}, which {reason}", way_out
                    )
                )
        for statistic in self._reads:
            if statistic == CROSS_ENTROPY:
                continue
            source = {Entropy(): entropy, OtherPowers(2.0): log_sum_sq_probs}.get(statistic)
            name = {Entropy(): "entropy", OtherPowers(2.0): "log_sum_sq_probs"}.get(statistic)
            if name is None:
                got = f"{self.name!r}, which reads {type(statistic).__name__}"
                raise InputValueError(
                    expected("loss", "be a formula of log_probs, entropy and log_sum_sq_probs", got, way_out)
                )
            if source is None:
                raise InputValueError(expected(name, f"be given for loss {self.name!r}", "None", way_out))
            if log_probs.requires_grad and not source.requires_grad and not self.formula.detach:
                got = "one without (TRL's log_sum_sq_probs is such a one)"
                raise InputValueError(
                    expected(name, f"have a gradient for loss {self.name!r}", got, f"{way_out}, or bsce_gra")
                )

    def normalizer(self, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The divisor of the mean: the number of rows that count, or the sum, in a dtype, of their class weights."""
        if self.class_weights is None:
            return (labels != IGNORE_INDEX).sum()
        return self._row_weights(labels).sum(dtype=dtype)

    def _row_weights(self, labels: Tensor) -> Tensor:
        """The class weight of each row (of each decision, if multi-label); 0 where it is ignored."""
        assert self.class_weights is not None
        weights, counts = self.class_weights.to(labels.device), labels != IGNORE_INDEX
        if labels.is_floating_point():
            return counts * weights
        try:
            return weights[labels.long().where(counts, 0)] * counts
        except IndexError as error:
            check_labels(labels.reshape(-1), len(weights), error)
            raise

    def _check(self, logits: Tensor, labels: Tensor, reduction: str) -> bool:
        """Refuse what does not fit, at no cost on the device; return whether the problem is multi-label."""
        if reduction not in REDUCTIONS:
            raise InputValueError(
                expected("reduction", f"be one of {REDUCTIONS}", repr(reduction), "see the docstring")
            )
        if reduction == "none" and self.couples_batch:
            raise InputValueError(
                expected("reduction", "be 'mean' or 'sum'", "'none'", f"{self.name} has no loss per example")
            )
        if not logits.is_floating_point():
            raise InputValueError(
                expected("logits", "be floating point", logits.dtype, "pass the model's raw scores")
            )
        if logits.dim() < 2:
            raise InputValueError(
                expected(
                    "logits", "have shape (N, C) or (N, L, C)", tuple(logits.shape), "add the batch axis"
                )
            )
        multi_label = labels.is_floating_point() if self.multi_label is None else self.multi_label
        wanted = logits.shape if multi_label else logits.shape[:-1]
        if labels.shape != wanted:
            raise InputValueError(
                expected(
                    "labels",
                    f"have shape {tuple(wanted)} for logits {tuple(logits.shape)}",
                    f"{tuple(labels.shape)} {labels.dtype}",
                    "integer class indices per row, or for multi-label problems one float per class",
                )
            )
        if multi_label != labels.is_floating_point():
            kind = "float (multi-label)" if multi_label else "integer (single label)"
            raise InputValueError(
                expected("labels", f"be {kind}", labels.dtype, "convert them, or set problem_type")
            )
        if multi_label:
            self.check_multi_label()
            if self._label_kind_is_open and self.multi_label is None and not is_traced():
                _refuse_distributions(labels)
                self._label_kind_is_open = False
        return multi_label

    def check_multi_label(self) -> None:
        """Raise ValueError if this loss has no multi-label form."""
        if not self.formula.multi_label:
            from hf_calib.losses.table import LOSSES  # here, because the table imports the losses

            able = ", ".join(sorted(name for name, entry in LOSSES.items() if entry.multi_label))
            raise InputValueError(
                expected(
                    "loss",
                    "have a multi-label form",
                    f"{self.name!r}, which is single-label",
                    f"use one of {able}",
                )
            )

    def _rows(
        self, logits: Tensor, labels: Tensor, multi_label: bool
    ) -> tuple[Tensor, RowStatistics, Tensor | None]:
        """Loss per row, with the class weights applied; the statistics; the weight of each row."""
        n_classes = logits.shape[-1]
        self._check_class_weights(n_classes)
        if multi_label:
            stats, share = multi_label_statistics(logits, labels, self._reads)
            loss = (self._per_example(stats, labels) * share).view(2, -1).sum(0)
        else:
            labels = labels.flatten()
            try:
                stats = row_statistics(logits.flatten(0, -2), labels, self._reads)
            except (IndexError, RuntimeError) as error:
                # PyTorch's indexing error names no label (on the CPU; a GPU only asserts).
                check_labels(labels, n_classes, error)
                raise
            loss = self._per_example(stats, labels)
        if self.class_weights is None:
            return loss, stats, None
        weights = self._row_weights(labels).to(loss).flatten()
        return loss * weights, stats, weights

    def _per_example(self, stats: RowStatistics, labels: Tensor) -> Tensor:
        formula = self.formula
        loss = stats.cross_entropy
        if formula.weight is not None:
            gamma = self.gamma(formula.weight.margin(stats), labels)
            loss = _weighted(loss, formula.weight.value(stats, gamma), formula.detach)
        terms = [(formula.scale, loss)] + [(c, penalty.value(stats)) for c, penalty in formula.penalties]
        # A term with coefficient 0 is left out, because 0 * infinity is NaN.
        return reduce(operator.add, [value if c == 1 else c * value for c, value in terms if c])

    def _reduce(
        self,
        loss: Tensor,
        stats: RowStatistics,
        weights: Tensor | None,
        labels: Tensor,
        reduction: str,
        num_items_in_batch: Tensor | float | None,
    ) -> Tensor:
        total = loss.sum()
        if reduction == "sum" and num_items_in_batch is None and not self.couples_batch:
            return total
        # Of the loss's dtype: dividing by an integer tensor would convert it, and again in the backward.
        rows = ((labels != IGNORE_INDEX).count_nonzero() if weights is None else weights.sum()).to(total)
        for coefficient, penalty in self.formula.batch_penalties:
            value, share = self._batch_penalty(penalty, stats, labels, rows)
            total = total + coefficient * value * share
        if num_items_in_batch is not None:
            return total / num_items_in_batch
        if reduction == "sum":
            return total
        return total / (rows.clamp_min(1) if weights is None else rows.where(rows > 0, 1))

    def _batch_penalty(
        self, penalty: BatchPenalty, stats: RowStatistics, labels: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The penalty, and how many rows it stands for: it is a mean, and is added to a sum."""
        counts = (labels.reshape(-1) != IGNORE_INDEX).to(stats.cross_entropy)
        if self.gather is None:
            return penalty.value(stats, counts), rows
        own_rows = rows.expand_as(counts) / max(len(counts), 1)
        own = [*(stats[statistic] for statistic in penalty.reads), counts, own_rows]
        (*gathered, all_counts, all_rows), processes = self.gather(own)
        everyone = RowStatistics(dict(zip(penalty.reads, gathered, strict=True)))
        return penalty.value(everyone, all_counts), all_rows.sum() / processes

    def _check_class_weights(self, n_classes: int) -> None:
        if self.class_weights is not None and len(self.class_weights) != n_classes:
            raise InputValueError(
                expected(
                    "class_weights",
                    f"have one entry for each of the {n_classes} classes",
                    len(self.class_weights),
                    "give them in the order of the model's labels",
                )
            )


def _weighted(loss: Tensor, weight: Tensor, detach: bool) -> Tensor:
    """weight * loss, where neither value nor gradient is NaN for an impossible label (logit -inf).

    There the loss is infinite, and 0 times infinity is NaN. So a constant weight of 0 gives 0, and any other weight
    is a constant to the gradient, which is then that of cross entropy.
    """
    if detach:
        return loss.masked_fill(weight == 0, 0) * weight.detach()
    return loss * torch.where(loss > _IMPOSSIBLE, weight.detach(), weight)


def _refuse_distributions(labels: Tensor) -> None:
    """Raise for float labels that `F.cross_entropy` would read as probabilities of the classes of one softmax."""
    rows = labels.detach().flatten(0, -2).float()
    sums_to_1 = ((rows.sum(1) - 1).abs() < 1e-3) & (rows >= 0).all(1)
    if rows.shape[1] > 1 and bool(sums_to_1.all() & ((rows > 0) & (rows < 1)).any()):
        way_out = (
            "F.cross_entropy takes probabilities of one softmax; for a sigmoid per class set "
            "problem_type='multi_label_classification'"
        )
        raise InputValueError(
            expected("labels", "be class indices, or one float per class", "rows that sum to 1", way_out)
        )


def _kept_statistics(reads: tuple[Statistic, ...], rows: Mapping[str, Tensor]) -> dict[Statistic, Tensor]:
    """The statistics that a loss reads, of what a fused head has kept."""
    found: dict[Statistic, Tensor] = {CROSS_ENTROPY: -rows["log_probs"]}
    if Entropy() in reads:
        found[Entropy()] = rows["entropy"]
    if OtherPowers(2.0) in reads:
        # Of the classes but the label, which cancels where the label has nearly all the mass.
        squares = rows["log_sum_sq_probs"].exp() - (2 * rows["log_probs"]).exp()
        found[OtherPowers(2.0)] = squares.clamp_min(0)
    return found


def check_loss(loss: object) -> None:
    """Raise for what is not a loss of this library, such as its name."""
    if not isinstance(loss, CalibrationLoss):
        way_out = "make it with hf_calib.losses.make_loss(name, **hyperparameters)"
        raise InputTypeError(expected("loss", "be a CalibrationLoss", repr(loss), way_out))


def _warn_of_unshifted_labels(outputs: Any, labels: Tensor) -> None:
    """A causal language model's logits at position t are for token t + 1: with labels as long, it learns to copy."""
    if not torch.compiler.is_compiling() and labels.dim() == 2 and labels.shape == outputs.logits.shape[:2]:
        warnings.warn(
            "These are the logits of a causal language model and as many labels. Unless the labels were shifted by one "
            "position, the model learns to copy its input. Use CalibrationTrainer, which shifts them, or pass "
            "outputs.logits[:, :-1] and labels[:, 1:].",
            UserWarning,
            stacklevel=4,
        )


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's output: a tensor, an object or mapping with `logits`, or a tuple.

    >>> logits_of((torch.zeros(2, 3), None)).shape
    torch.Size([2, 3])
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if logits is None and isinstance(outputs, tuple) and outputs:
        logits = outputs[0]
    if not isinstance(logits, Tensor):
        raise InputTypeError(
            expected(
                "the model's output", "have `logits`", type(outputs).__name__, "use a classification model"
            )
        )
    return logits


def _is_multi_label(problem_type: str | None) -> bool | None:
    """Whether the problem is multi-label; None: as the labels' dtype says."""
    if problem_type not in PROBLEM_TYPES:
        known = [kind for kind in PROBLEM_TYPES if kind]
        way_out = (
            "calibration is about classifiers"
            if problem_type == "regression"
            else did_you_mean(problem_type, known)
        )
        raise InputValueError(expected("problem_type", f"be one of {known}", repr(problem_type), way_out))
    return PROBLEM_TYPES[problem_type]


def _checked_class_weights(weights: ClassWeights) -> Tensor | None:
    if weights is None:
        return None
    try:
        tensor = torch.as_tensor(weights, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros(())
    if tensor.dim() != 1 or not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
        got = weights.tolist() if isinstance(weights, Tensor) else repr(weights)
        raise InputValueError(
            expected("class_weights", "be (C,) finite positive numbers", got, "one per class, in order")
        )
    return tensor


def _without_autocast(logits: Tensor) -> AbstractContextManager[Any]:
    """Autocast would run the kernel products of the batch penalties in 16 bits."""
    device = logits.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def check_labels(labels: Tensor, n_classes: int, error: Exception | None = None) -> None:
    """Raise for labels (N,) that are no class and not ignored, naming one."""
    wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= n_classes))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputValueError(
            expected(
                "labels",
                f"be in [0, {n_classes}) or {IGNORE_INDEX}",
                f"{int(labels[row])} in row {row}",
                "set the model's num_labels, or relabel",
            )
        ) from error
