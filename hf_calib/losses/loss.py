"""`@loss`, which makes a constructor of a formula; the table `LOSSES`; the module
`CalibrationLoss`."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Generic, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    check,
    did_you_mean,
    expected,
)
from hf_calib.losses.arithmetic import tiny, wide
from hf_calib.losses.checks import (
    check_items,
    check_labels,
    check_shape,
    check_shares,
    check_tensors,
    checked_class_weights,
    checked_pos_weight,
    name_wrong_label,
    refuse,
)
from hf_calib.losses.engine import Reduction, all_count, is_traced, reduced
from hf_calib.losses.ranges import INFINITY, Hyperparameter, hyperparameters_of
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.blocks import Decisions
from hf_calib.losses.statistics.definitions import IGNORE_INDEX, Statistic
from hf_calib.losses.statistics.soft_labels import (
    KNOWN_OF_EVERY_CLASS,
    SoftLabels,
    are_ignored,
    check_soft_labels,
    look_soft,
)

ClassWeights = Sequence[float] | Tensor | None
PosWeight = Sequence[float] | Tensor | float | None
Divisor = Tensor | float | None  # of a sum; None goes by the reduction
# It returns the value of each row, then its derivative by each number that it is given.
Formula = Callable[..., Any]
Reads = Callable[..., Sequence[Statistic]]
Module = TypeVar("Module", bound="CalibrationLoss")

# Python searches this many labels on the CPU in less time than one operation of PyTorch takes.
FEW_ROWS = 256

PROBLEM_TYPES = {
    None: None,
    "single_label_classification": False,
    "multi_label_classification": True,
}
KEPT_BY_A_HEAD: dict[Statistic, str] = {
    defined.Entropy(): "entropy",
    defined.OtherPowers(2.0): "log_sum_sq_probs",
}


class Shared(TypedDict, total=False):
    """The arguments of every constructor in addition to the hyperparameters of its loss."""

    class_weights: ClassWeights
    pos_weight: PosWeight
    problem_type: (
        Literal["single_label_classification", "multi_label_classification"] | None
    )


def _no_statistics(**values: Any) -> Sequence[Statistic]:
    return ()


def _no_check(**values: Any) -> None:
    """Any hyperparameters in their ranges go together."""


@dataclass(frozen=True, eq=False, kw_only=True)
class loss(Generic[Module]):  # noqa: N801, it is used as a decorator
    """Turn a formula into a constructor, and add it to `LOSSES`.

    The formula, `name(ce, *statistics, *, hyperparameters)`, gets the cross entropy of each row
    (N,) and the statistics that it reads. It returns the value of each row, 0 if the label has
    probability 1, followed by the derivative of the value by each of these: (N,), or a number for
    all rows.

    Attributes:
        source: the reference in the docstring.
        reads: gives the statistics for the hyperparameters, in the formula's order.
        rows: for a loss that couples the batch, the formula of a row, which reads the cross entropy
            only. The decorated formula is then the penalty: a scalar, followed by its derivative by
            each number of each row.
        by_autograd: the formula of a penalty returns its value only, and autograd differentiates
            it.
        few_operations: autograd differentiates the whole loss of few rows in less time than the
            slopes take.
        needs_all_rows: the formula couples the rows of a call, so they cannot be computed in
            blocks.
        multi_label: whether the loss is also defined for a sigmoid per label.
        check: is called with all hyperparameters.
        module: the class of the loss; one with a table passes it to the formula.
    """

    source: str = ""
    reads: Reads = _no_statistics
    rows: Formula | None = None
    by_autograd: bool = False
    few_operations: bool = False
    needs_all_rows: bool = False
    multi_label: bool = False
    check: Callable[..., None] = _no_check
    module: type[Module] | None = None

    def __call__(self, formula: Formula) -> Callable[..., Module]:
        known = hyperparameters_of(formula)

        def constructor(*args: Any, **given: Any) -> Any:
            if args:
                raise InputTypeError(
                    f"{formula.__name__} takes its hyperparameters by name only"
                )
            return entry.make(given, InputTypeError)

        update_wrapper(constructor, formula)
        references = f"\nReferences:\n    {self.source}.\n\nExample:\n"
        text = inspect.getdoc(formula) or ""
        if self.source:
            text = text.replace("\nExample:\n", references)
        constructor.__doc__ = text
        own = inspect.signature(formula).parameters
        shared = inspect.signature(make_loss).parameters
        parameters = [own[name] for name in known]
        parameters += [shared[name] for name in Shared.__annotations__]
        made: Any = self.module or CalibrationLoss
        signature = inspect.Signature(parameters, return_annotation=made)
        constructor.__signature__ = signature  # type: ignore[attr-defined]
        declared = vars(self) | {"module": made}
        entry = LossEntry(
            **declared,
            name=formula.__name__,
            constructor=constructor,
            hyperparameters=known,
            formula=formula,
        )
        LOSSES[entry.name] = entry
        return constructor


@dataclass(frozen=True, eq=False, kw_only=True)
class LossEntry(loss[Any]):
    """A row of `LOSSES`: constructor, formula, source, and each hyperparameter's default and
    range."""

    name: str
    constructor: Callable[..., CalibrationLoss]
    hyperparameters: Mapping[str, Hyperparameter]
    formula: Formula
    module: type[CalibrationLoss]

    @property
    def couples_batch(self) -> bool:
        return self.rows is not None

    @property
    def is_of_single_rows(self) -> bool:
        """Whether the value of a row depends on no other row."""
        return not (self.needs_all_rows or self.couples_batch)

    @property
    def takes_soft_labels(self) -> bool:
        """Whether the loss, with its default hyperparameters, has a form for soft labels of one
        softmax."""
        known = self.hyperparameters.items()
        reads = self.reads(**{name: each.default for name, each in known})
        return self.refusal_of_soft_labels(reads) is None

    def refusal_of_soft_labels(self, reads: Sequence[Statistic]) -> str | None:
        """Why a loss that reads these statistics has no form for soft labels of one softmax; None
        if it has one."""
        if self.couples_batch:
            return "couples the batch"
        kinds = [type(each) for each in reads]
        unknown = [each.__name__ for each in kinds if each not in KNOWN_OF_EVERY_CLASS]
        return f"reads {', '.join(unknown)}" if unknown else None

    def make(
        self, given: Mapping[str, Any], refusal: type[Exception]
    ) -> CalibrationLoss:
        """Make the loss from arguments by name; raise `refusal` for a hyperparameter that it does
        not have."""
        known = self.hyperparameters
        defaults = [f"{key}={each.default!r}" for key, each in known.items()]
        has = f"it has: {', '.join(defaults) or 'none'}"
        names = [*known, *Shared.__annotations__]
        for key in given.keys() - names:
            # PyTorch's name of the class weights is nearer to another one.
            nearest = did_you_mean("class_weights" if key == "weight" else key, names)
            requirement = f"the hyperparameters of loss {self.name!r}"
            raise refusal(f"expected {requirement}, got {key!r}; {has} ({nearest})")
        values = {}
        for key, each in known.items():
            value = given.get(key, each.default)
            try:
                values[key] = each.parse(value)
            except (TypeError, ValueError, OverflowError) as error:
                argument = f"{key} of loss {self.name!r}"
                raise InputValueError(
                    expected(argument, each.requirement, repr(value), has)
                ) from error
        self.check(**values)
        shared = {name: given.get(name) for name in Shared.__annotations__}
        return self.module(self.name, values, **shared)


#: All losses by name, each a `LossEntry`.
LOSSES: dict[str, LossEntry] = {}


def cross_entropy_of_rows(ce: Tensor, **values: Any) -> tuple[Tensor, float]:
    """The formula of a row of most losses with a penalty on the batch."""
    return ce, 1.0


def make_loss(
    name: str,
    *,
    class_weights: ClassWeights = None,
    pos_weight: PosWeight = None,
    problem_type: str | None = None,
    **hyperparameters: Any,
) -> CalibrationLoss:
    """Make a loss by its name in `LOSSES`, for names from files and command lines; in code,
    call its constructor.

    Args:
        name: a key of `LOSSES`, such as "focal", "dual_focal" or "adafocal".
        class_weights: (C,) positive factors. The loss of an example (weight x CE and its own
            penalties) is multiplied by the factor of its label, and the mean is the weighted mean,
            as in `F.cross_entropy`. In a multi-label problem a factor belongs to a column.
            Penalties on the whole batch are not weighted.
        pos_weight: for multi-label problems, (C,) positive factors, or one for all labels: the loss
            of a decision whose label applies is multiplied by it, as in
            `torch.nn.BCEWithLogitsLoss`. It does not change the divisor of the mean. Of
            `label_smoothing` it multiplies log p of the outcome "applies", also in its share of a
            smoothed 0.
        problem_type: "single_label_classification" or "multi_label_classification", as in a model's
            config; with None the dtype of the labels decides. With the first, floats (N, C) are
            soft labels of one softmax; with the second and with None, a label for each of C
            sigmoids.
        **hyperparameters: the hyperparameters of the loss, by name.

    Returns:
        An `nn.Module`: `loss(logits, labels, reduction="mean")`, in nats unless its docstring says
        otherwise.

    Example:
        >>> make_loss("focal", gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    if name not in [*LOSSES]:  # The name may be unhashable.
        raise InputValueError(
            expected(
                "loss", "be a name in LOSSES", repr(name), did_you_mean(name, LOSSES)
            )
        )
    shared = {
        "class_weights": class_weights,
        "pos_weight": pos_weight,
        "problem_type": problem_type,
    }
    return LOSSES[name].make(hyperparameters | shared, InputValueError)


class CalibrationLoss(nn.Module):
    """A calibration loss of logits, made by `make_loss` or a constructor.

    Use it in any PyTorch loop, or as `Trainer(compute_loss_func=loss)`; `CalibrationTrainer` also
    updates the losses that adapt. The loss is computed in float32 or float64, whatever the dtype of
    the logits.

    Attributes:
        name: the name in `LOSSES`.
        hyperparameters: the values of all hyperparameters in JSON types; infinity is "inf".
        couples_batch: whether the loss has a penalty on the whole batch.
        reads_labels: whether the loss of a row depends on the index of its label, not only on the
            probabilities.
        reads_soft_labels: whether float labels (N, C) are distributions over the classes of one
            softmax.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, Any],
        class_weights: ClassWeights,
        pos_weight: PosWeight,
        problem_type: str | None,
    ) -> None:
        super().__init__()
        _check_problem_type(problem_type)
        self.name = name
        self.hyperparameters = {
            k: INFINITY if v == math.inf else v for k, v in values.items()
        }
        self.multi_label = PROBLEM_TYPES[problem_type]
        # A trainer may learn from its first batch that there is one label per row; that says
        # nothing of floats.
        self.reads_soft_labels = problem_type == "single_label_classification"
        self.reads = tuple(self.entry.reads(**values))
        self.couples_batch = self.entry.couples_batch
        self.reads_labels = defined.Labels() in self.reads
        # It maps (N,) and (N, C) rows of this process to those of all processes, differentiably,
        # and to their number.
        self.gather: Callable[[list[Tensor]], tuple[list[Tensor], int]] | None = None
        self.class_weights: Tensor | None
        of_classes = checked_class_weights(class_weights)
        self.register_buffer("class_weights", of_classes, persistent=False)
        # (C,), or (1,) if it is of all labels.
        self.pos_weight: Tensor | None
        of_labels = checked_pos_weight(pos_weight)
        self.register_buffer("pos_weight", of_labels, persistent=False)
        self._values = dict(values)
        # Float labels are checked once only, because each check waits for the device.
        self._label_kind_is_open = True
        if self.multi_label or self.pos_weight is not None:
            self.check_multi_label()
        if self.multi_label is False:
            self.check_no_pos_weight(f"problem_type={problem_type!r}")
        self._make_table()

    @property
    def entry(self) -> LossEntry:
        return LOSSES[self.name]

    def _make_table(self) -> None:
        """Make the buffers that the formula reads; a loss that adapts has some."""

    def arguments(self, ce: Tensor) -> Mapping[str, Any]:
        """The keyword arguments of the formula: the hyperparameters, and a table if the loss has
        one."""
        return self._values

    # ---- The formulas, as `engine` calls them ----

    @property
    def row_formula(self) -> Formula | None:
        """The formula if it gives the terms of single rows by itself, so that a kernel can evaluate
        it."""
        return self.entry.formula if self.entry.is_of_single_rows else None

    def row_terms(self, numbers: Sequence[Any]) -> tuple[Tensor, Sequence[Any]]:
        """The value of each row, (N,), and its derivatives by the numbers that it is a function
        of."""
        if self.entry.rows is not None:
            value, *slopes = self.entry.rows(numbers[0], **self._values)
        else:
            arguments = self.arguments(numbers[0])
            value, *slopes = self.entry.formula(*numbers, **arguments)
        return value, slopes

    def row_values(self, numbers: Sequence[Any]) -> Tensor:
        return self.row_terms(numbers)[0]

    def penalty(self, numbers: Sequence[Any]) -> Tensor:
        """The penalty on the batch, or on that of all processes."""
        if self.gather is not None:
            # Rows that are filled up with 0 count as ignored.
            gathered, _ = self.gather([own.to(numbers[0].dtype) for own in numbers])
            pairs = zip(gathered, numbers, strict=True)
            numbers = [of_all.to(own.dtype) for of_all, own in pairs]
        found = self.entry.formula(*numbers, **self._values)
        return found if self.entry.by_autograd else found[0]

    def penalty_terms(self, numbers: Sequence[Any]) -> tuple[Tensor, Sequence[Any]]:
        """The penalty, and its derivatives by the numbers of this process."""
        # The derivatives by gathered rows are sums over the processes, which `gather` itself
        # collects.
        if self.entry.by_autograd or self.gather is not None:
            return _differentiated(self.penalty, numbers)
        value, *slopes = self.entry.formula(*numbers, **self._values)
        return value, slopes

    def extra_repr(self) -> str:
        return ", ".join(
            [repr(self.name), *(f"{k}={v!r}" for k, v in self.hyperparameters.items())]
        )

    def forward(
        self,
        logits: Any,
        labels: Tensor,
        *,
        reduction: str = "mean",
        num_items_in_batch: Divisor = None,
    ) -> Tensor:
        """Compute the loss.

        Args:
            logits: (N, C), or (N, L, C) for token-level labels, of any float dtype; or a model's
                output with logits.
            labels: (N,) or (N, L) integers in [0, C), -100 to ignore a row; for multi-label
                problems (N, C) floats in [0, 1], -100 to ignore a decision. With
                `problem_type="single_label_classification"` floats (N, C) are soft labels, shares
                of the classes that sum to 1, -100 for every class to ignore a row; the loss is the
                mean over the labels by these shares, sum_k q_k L(z, k). Without a problem type
                floats are those of several labels, also one-hot rows, and fractions whose rows all
                sum to 1 in the first batch that has fractions raise an error.
            reduction: "mean" over the rows that are not ignored, "sum", or "none" for a value per
                row, 0 if ignored. Losses that couple the batch do not support "none". With class
                weights the mean is the weighted one; of soft labels it is divided by the number of
                rows. Both are as in `F.cross_entropy`.
            num_items_in_batch: the number of rows in the whole accumulated batch; the sum is
                divided by it. It is for "mean" only, and 0 only if no row counts; the loss is then
                0.

        Returns:
            A scalar, or for "none" a tensor shaped like the labels, of soft labels (N,); in nats,
            float32 or float64. If the logit of a label is -inf, the value is the loss's limit,
            mostly infinity with cross entropy's gradient; never NaN.

        Raises:
            ValueError: if shapes or dtypes do not fit, a label is out of range, or the loss has no
                form for these labels.
        """
        if not isinstance(logits, Tensor):
            _warn_if_not_shifted(logits, labels)
            logits = logits_of(logits)
        compute = self._form_for(logits, labels)
        if reduction != "mean":
            self._check_reduction(reduction)
        if num_items_in_batch is not None:
            check_items(num_items_in_batch, reduction, labels)
        if not torch.is_autocast_enabled(logits.device.type):
            return compute(logits, labels, reduction, num_items_in_batch)
        with _without_autocast(logits):
            return compute(logits, labels, reduction, num_items_in_batch)

    def _of_rows(
        self, logits: Tensor, labels: Tensor, reduction: str, items: Divisor
    ) -> Tensor:
        """The loss of a problem with one label per row."""
        flat = labels.flatten().long()
        try:
            own = self._reduction(flat, wide(logits), reduction, items)
            value = reduced(logits.flatten(0, -2), flat, own)
        except (IndexError, RuntimeError) as error:
            # PyTorch's own error names no label.
            name_wrong_label(flat, logits.shape[-1], error)
            raise
        return value.view(labels.shape) if reduction == "none" else value

    def _of_decisions(
        self, logits: Tensor, labels: Tensor, reduction: str, items: Divisor
    ) -> Tensor:
        """The loss of a multi-label problem."""
        decisions = Decisions(logits, labels, self.reads, self.pos_weight)
        if not is_traced():
            check_shares(decisions.shares, labels)
        return self._of_outcomes(decisions, labels, reduction, items)

    def _of_soft_labels(
        self, logits: Tensor, labels: Tensor, reduction: str, items: Divisor
    ) -> Tensor:
        """The loss of labels that are distributions over the classes."""
        if not is_traced():
            check_soft_labels(labels)
        rows = SoftLabels(logits, labels, self.reads, self.class_weights)
        return self._of_outcomes(rows, labels, reduction, items)

    def _of_outcomes(
        self,
        outcomes: Decisions | SoftLabels,
        labels: Tensor,
        reduction: str,
        items: Divisor,
    ) -> Tensor:
        """The expectation of the loss over what a label may turn out to be, by autograd."""
        values = outcomes.expected(self.row_values(outcomes.numbers))
        weights = self.row_weights(labels)
        values = values.view(weights.shape) * weights.to(values.dtype)
        if reduction == "none":
            return values
        return values.sum() / divisor_of(weights, values.dtype, reduction, items)

    def _reduction(
        self, labels: Tensor, dtype: torch.dtype, reduction: str, items: Divisor
    ) -> Reduction:
        """The shares of the rows with these labels (N,) in the value, and the factor of the batch's
        penalty."""
        summed = reduction != "none"
        is_mean = reduction == "mean" and items is None
        if is_mean and self._counts_all(labels):
            share = 1 / labels.numel()
            shares = torch.full(labels.shape, share, dtype=dtype)
            scale = torch.ones((), dtype=dtype) if self.couples_batch else None
            return Reduction(self, shares, scale, summed)
        weights = self.row_weights(labels)
        counts = None if all_count(weights) else weights.bool()
        if self.class_weights is not None:
            weights = weights.to(dtype)
        divisor = divisor_of(weights, dtype, reduction, items)
        scale = None
        if self.couples_batch:
            scale = self._weight_of_batch(weights, dtype) / divisor
        return Reduction(self, weights / divisor, scale, summed, counts)

    def _weight_of_batch(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of the weights of rows, or its mean over the processes whose rows are
        gathered."""
        if self.gather is None:
            return weights.sum(dtype=dtype)
        (of_all,), processes = self.gather([weights.to(dtype)])
        return of_all.sum() / processes

    def _counts_all(self, labels: Tensor) -> bool:
        """Whether all rows are known to count equally; only few labels on the CPU are looked at."""
        if self.class_weights is not None or self.gather is not None:
            return False
        if not (labels.is_cpu and 0 < labels.numel() <= FEW_ROWS):
            return False
        return not is_traced() and IGNORE_INDEX not in labels.tolist()

    def from_log_probs(
        self,
        log_probs: Tensor,
        *,
        entropy: Tensor | None = None,
        log_sum_sq_probs: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: str = "mean",
        num_items_in_batch: Divisor = None,
    ) -> Tensor:
        r"""Compute the loss of rows without their logits,
        from statistics that a fused head has kept.

        Use it for language models whose head never stores the logits, such as TRL's. The value is
        that of `forward`, and so is the gradient if the arguments have one. A loss that needs other
        statistics raises an error.

        Args:
            log_probs: log-probabilities of the labels, float of any shape, with a gradient.
            entropy: entropy of each distribution in nats, for `entropy_regularized`.
            log_sum_sq_probs: $\log \sum_j p_j^2$, for `bsce_gra`, and, with a gradient, for
                `brier`, `bsce` and `focal_calibration`.
            mask: bool, shaped like log_probs, True for rows that count; None for all.
            reduction, num_items_in_batch: as in `forward`, which also describes the result.

        Example:
            >>> make_loss("focal", gamma=2.0).from_log_probs(torch.tensor([0.8808, 0.5]).log())
            tensor(0.0875)
        """
        given: dict[str, Any] = {"log_probs": log_probs, "entropy": entropy}
        given["log_sum_sq_probs"] = log_sum_sq_probs
        for name, each in {**given, "mask": mask}.items():
            if each is not None and each.shape != log_probs.shape:
                got = f"{tuple(each.shape)} for {tuple(log_probs.shape)}"
                refuse(f"{name} to have the shape of log_probs", got, "pass one a row")
        self._check_kept(given)
        self._check_reduction(reduction)
        labels = torch.zeros_like(log_probs, dtype=torch.long)
        if mask is not None:
            labels = labels.masked_fill(~mask.bool(), IGNORE_INDEX)
        if num_items_in_batch is not None:
            check_items(num_items_in_batch, reduction, labels)
        counts = labels == 0

        def counted(name: str) -> Tensor:
            # A row that does not count may contain any value, also NaN, and has no gradient.
            kept = given[name]
            return kept.to(wide(kept)).where(counts, 0).flatten()

        with _without_autocast(log_probs):
            log_p = counted("log_probs")
            numbers: list[Any] = [-log_p]
            for statistic in self.reads:
                if isinstance(statistic, defined.Constant):
                    number: Any = statistic.number
                elif isinstance(statistic, defined.Entropy):
                    number = counted("entropy")
                else:
                    # The sum excludes the label. It is inaccurate if the label has nearly all the
                    # probability.
                    squares = counted("log_sum_sq_probs").exp()
                    number = (squares - (2 * log_p).exp()).clamp_min(0)
                numbers.append(number)
            self._check_slopes(numbers, given)
            flat = labels.flatten()
            own = self._reduction(flat, log_p.dtype, reduction, num_items_in_batch)
            value = own.value(numbers)
        return value.view(labels.shape) if reduction == "none" else value

    def _check_kept(self, given: Mapping[str, Any]) -> None:
        """Raise for a loss that cannot be computed from these statistics."""
        way_out = "call it on logits, or linear_calibration_loss, or use focal, which needs only log_probs"
        read = [each for each in self.reads if not isinstance(each, defined.Constant)]
        others = [type(each).__name__ for each in read if each not in KEPT_BY_A_HEAD]
        refused = {
            "couples the batch": self.couples_batch,
            "has class weights": self.class_weights is not None,
            "is multi-label": self.multi_label or self.pos_weight is not None,
            "reads the labels": self.reads_labels,
            f"reads {', '.join(others)}": bool(others),
        }
        requirement = "loss to be a formula of log_probs, entropy and log_sum_sq_probs"
        for reason, holds in refused.items():
            check(not holds, requirement, f"{self.name!r}, which {reason}", way_out)
        for statistic in read:
            name = KEPT_BY_A_HEAD[statistic]
            requirement = f"{name} to be given for loss {self.name!r}"
            check(given[name] is not None, requirement, None, way_out)

    def _check_slopes(self, numbers: Sequence[Any], given: Mapping[str, Any]) -> None:
        """Raise if a statistic has no gradient, by which the loss has one."""
        if not given["log_probs"].requires_grad:
            return
        with torch.no_grad():
            _, (_, *slopes) = self.row_terms(numbers)
        for statistic, slope in zip(self.reads, slopes, strict=True):
            name = KEPT_BY_A_HEAD.get(statistic)
            has_none = name is not None and not given[name].requires_grad
            if has_none and not (isinstance(slope, float) and slope == 0):
                requirement = f"{name} to have a gradient for loss {self.name!r}"
                got = "one without (TRL's log_sum_sq_probs has none)"
                way_out = "call it on logits, or linear_calibration_loss, or use focal, which needs only log_probs"
                refuse(requirement, got, f"{way_out}, or bsce_gra")

    def normalizer(self, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the divisor of the mean: the number of rows not ignored,
        or the sum of their class weights.

        In a multi-label problem it is that of the decisions. Rows of soft labels are counted, as in
        PyTorch.
        """
        if self.class_weights is not None and not labels.is_floating_point():
            check_labels(labels.flatten(), len(self.class_weights), of_weights=True)
        return self.row_weights(labels).sum(dtype=dtype)

    def row_weights(self, labels: Tensor) -> Tensor:
        """The class weight of each row, or of each decision if multi-label; True without weights,
        0 if ignored.

        Rows of soft labels count alike, because the weights belong to the classes of each.
        """
        if self.reads_soft_labels and labels.is_floating_point():
            return ~are_ignored(labels)
        counts = labels != IGNORE_INDEX
        if self.class_weights is None:
            return counts
        weights = self.class_weights.to(labels.device)
        if not labels.is_floating_point():
            weights = weights[labels.long().clamp_min(0)]
        return counts * weights

    def _form_for(self, logits: Tensor, labels: Tensor) -> Callable[..., Tensor]:
        """The method that computes the loss of these labels; raise, without waiting for a device,
        if there is none."""
        check_tensors(logits, labels)
        has_floats = labels.is_floating_point()
        multi_label = has_floats if self.multi_label is None else self.multi_label
        is_one_per_class = has_floats and labels.shape == logits.shape
        is_soft = is_one_per_class and self.reads_soft_labels
        check_shape(labels, logits, one_per_class=multi_label or is_soft)
        if multi_label != has_floats and not is_soft:
            kind = "float (multi-label)" if multi_label else "integer (single label)"
            way_out = "convert them, or set problem_type"
            refuse(f"labels to be {kind}", labels.dtype, way_out)
        self._check_number_of_classes(logits.shape[-1])
        if multi_label:
            self.check_multi_label()
            self._check_open_kind(labels)
            return self._of_decisions
        self.check_no_pos_weight(f"{'soft' if is_soft else 'integer'} labels")
        if is_soft:
            self.check_takes_soft_labels()
            return self._of_soft_labels
        return self._of_rows

    def _check_number_of_classes(self, n_classes: int) -> None:
        """Raise if the loss has weights of another number of classes."""
        weights = self.class_weights
        if weights is not None and len(weights) != n_classes:
            requirement = (
                f"class_weights to have one entry for each of the {n_classes} classes"
            )
            way_out = "give them in the order of the model's labels"
            refuse(requirement, len(weights), way_out)
        weights = self.pos_weight
        if weights is not None and len(weights) not in (1, n_classes):
            requirement = (
                f"pos_weight to have one entry for each of the {n_classes} labels"
            )
            refuse(requirement, len(weights), "or give one number for all")

    def _check_open_kind(self, labels: Tensor) -> None:
        """Raise if float labels, of which nothing was said, may be the probabilities of the classes
        of one softmax."""
        is_open = self.multi_label is None and self._label_kind_is_open
        if not is_open or is_traced():
            return
        # Rows of 0 and 1 do not tell.
        has_fractions, are_soft = look_soft(labels.detach().flatten(0, -2))
        self._label_kind_is_open = not has_fractions
        if are_soft:
            way_out = "set problem_type='single_label_classification' for soft labels of one softmax, "
            way_out += (
                "or problem_type='multi_label_classification' for a sigmoid per class"
            )
            requirement = "labels to be class indices, or one float per class"
            refuse(requirement, "rows that sum to 1", way_out)

    def check_multi_label(self) -> None:
        """Raise ValueError if this loss has no multi-label form."""
        if not self.entry.multi_label:
            able = [name for name, entry in LOSSES.items() if entry.multi_label]
            got = f"{self.name!r}, which is single-label"
            way_out = f"use one of {', '.join(sorted(able))}"
            refuse("loss to have a multi-label form", got, way_out)

    def check_takes_soft_labels(self) -> None:
        """Raise ValueError if this loss has no form for soft labels of one softmax."""
        reason = self.entry.refusal_of_soft_labels(self.reads)
        if reason is not None:
            able = [name for name, each in LOSSES.items() if each.takes_soft_labels]
            got = f"{self.name!r}, which {reason}"
            way_out = f"use one of {', '.join(sorted(able))}"
            refuse("loss to have a form for soft labels", got, way_out)

    def check_no_pos_weight(self, got: str) -> None:
        """Raise ValueError if there is a weight of labels that apply; the caller has one label per
        row."""
        if self.pos_weight is not None:
            way_out = "use class_weights for the classes of one softmax"
            refuse("pos_weight to be used with several labels per row", got, way_out)

    def _check_reduction(self, reduction: str) -> None:
        """Raise for a reduction that this loss does not have."""
        if reduction not in ("mean", "sum", "none"):
            requirement = "reduction to be one of 'mean', 'sum', 'none'"
            refuse(requirement, repr(reduction), "see the docstring")
        if reduction == "none" and self.couples_batch:
            way_out = f"{self.name} has no loss per example"
            refuse("reduction to be 'mean' or 'sum'", "'none'", way_out)


def _differentiated(
    function: Callable[[Sequence[Any]], Tensor], numbers: Sequence[Any]
) -> tuple[Tensor, Sequence[Any]]:
    """The value, a scalar, of a function of the numbers, and its derivatives by autograd."""
    leaves = []
    for number in numbers:
        leaf = number.detach()
        leaves.append(leaf.requires_grad_(leaf.is_floating_point()))
    with torch.enable_grad():
        value = function(leaves)
        found = torch.autograd.grad(
            value,
            [leaf for leaf in leaves if leaf.requires_grad],
            materialize_grads=True,
        )
    slopes = iter(found)
    by_numbers = [next(slopes) if leaf.requires_grad else 0.0 for leaf in leaves]
    return value.detach(), by_numbers


def _warn_if_not_shifted(outputs: Any, labels: Any) -> None:
    """Warn of the output of a causal language model with as many labels as positions."""
    if torch.compiler.is_compiling() or "CausalLM" not in type(outputs).__name__:
        return
    if labels.shape == outputs.logits.shape[:2]:
        message = "These are logits of a causal language model with equally many labels. Unless they were "
        message += "shifted by one position, the model learns to copy its input. Use CalibrationTrainer, "
        message += "which shifts them, or pass logits[:, :-1], labels[:, 1:]."
        warnings.warn(message, stacklevel=5)


def divisor_of(
    weights: Tensor, dtype: torch.dtype, reduction: str, items: Divisor
) -> Tensor:
    """The divisor of a sum over rows with these weights, a scalar; above 0 also if no row
    counts."""
    if items is not None:
        divisor = torch.as_tensor(items, dtype=dtype).to(weights.device).reshape(())
    elif reduction == "mean":
        divisor = weights.sum(dtype=dtype)
    else:
        return torch.ones((), dtype=dtype, device=weights.device)
    return divisor.clamp_min(tiny(divisor))


def over_items(total: Tensor, items: Tensor | float) -> Tensor:
    """The sum of a batch over the number of rows of all; 0 where no row counts."""
    if isinstance(items, Tensor):
        return total / items.to(total.dtype).clamp_min(tiny(total))
    return total / max(items, tiny(total))


def _check_problem_type(problem_type: object) -> None:
    known = [kind for kind in PROBLEM_TYPES if kind]
    way_out = did_you_mean(problem_type, known)
    if problem_type == "regression":
        way_out = "calibration is about classifiers"
    # It may be unhashable.
    fits = problem_type in [*PROBLEM_TYPES]
    check(fits, f"problem_type to be one of {known}", repr(problem_type), way_out)


def check_loss(loss: object) -> None:
    """Raise unless the argument is a loss of this library; its name, for example, is not."""
    if not isinstance(loss, CalibrationLoss):
        way_out = "make it with hf_calib.losses.make_loss(name, **hyperparameters)"
        raise InputTypeError(
            expected("loss", "be a CalibrationLoss", repr(loss), way_out)
        )


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's output: a tensor, an object or mapping with `logits`,
    or a tuple.

    >>> logits_of((torch.zeros(2, 3), None)).shape
    torch.Size([2, 3])
    """
    first = next(iter(outputs), None) if isinstance(outputs, tuple) else outputs
    logits = (
        outputs.get("logits")
        if isinstance(outputs, Mapping)
        else getattr(outputs, "logits", first)
    )
    if not isinstance(logits, Tensor):
        got = f"{type(outputs).__name__}; use a classification model"
        raise InputTypeError(f"expected the model's output to have `logits`, got {got}")
    return logits


def _without_autocast(logits: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast, which would compute the kernel products of the batch penalties in
    16 bits."""
    device = logits.device.type
    return (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else nullcontext()
    )
