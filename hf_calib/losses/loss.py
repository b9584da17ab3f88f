"""`@loss`, which makes a constructor of a formula; the table `LOSSES`; the module `CalibrationLoss`."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NoReturn, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    check,
    did_you_mean,
    expected,
)
from hf_calib.losses.arithmetic import tiny
from hf_calib.losses.engine import Reduction, all_count, is_traced, reduced
from hf_calib.losses.ranges import (
    INFINITY,
    Hyperparameter,
    hyperparameters_of,
    numbers_of,
)
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.blocks import (
    Decisions,
    check_labels,
    check_shares,
    name_wrong_label,
)
from hf_calib.losses.statistics.definitions import IGNORE_INDEX, Statistic, wide
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


@dataclass(frozen=True, eq=False)
class LossEntry:
    """A row of `LOSSES`: constructor, formula, source, and each hyperparameter's default and range."""

    name: str
    constructor: Callable[..., CalibrationLoss]
    source: str
    multi_label: bool
    hyperparameters: Mapping[str, Hyperparameter]
    formula: Formula
    reads: Reads
    rows: Formula | None
    by_autograd: bool
    few_operations: bool
    needs_all_rows: bool
    module: type[CalibrationLoss]
    check: Callable[..., None]

    @property
    def couples_batch(self) -> bool:
        return self.rows is not None

    @property
    def takes_soft_labels(self) -> bool:
        """Whether the loss, with its default hyperparameters, has a form for soft labels of one softmax."""
        known = self.hyperparameters.items()
        reads = self.reads(**{name: each.default for name, each in known})
        return not self.couples_batch and not _known_of_one_label_only(reads)

    def make(
        self, given: Mapping[str, Any], refusal: type[Exception]
    ) -> CalibrationLoss:
        """Make the loss from arguments by name; raise `refusal` for a hyperparameter that it does not have."""
        known = self.hyperparameters
        defaults = [f"{key}={each.default!r}" for key, each in known.items()]
        has = f"it has: {', '.join(defaults) or 'none'}"
        names = [*known, *Shared.__annotations__]
        for key in given.keys() - names:
            requirement = f"the hyperparameters of loss {self.name!r}"
            # PyTorch's name of the class weights is nearer to another one.
            wanted = "class_weights" if key == "weight" else key
            way_out = f"{has} ({did_you_mean(wanted, names)})"
            raise refusal(f"expected {requirement}, got {key!r}; {way_out}")
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


def loss(
    *,
    source: str = "",
    reads: Reads = lambda **values: (),
    rows: Formula | None = None,
    by_autograd: bool = False,
    few_operations: bool = False,
    needs_all_rows: bool = False,
    multi_label: bool = False,
    check: Callable[..., None] = lambda **values: None,
    module: type[Module] | None = None,
) -> Callable[[Formula], Callable[..., Module]]:
    """Turn a formula into a constructor, and add it to `LOSSES`.

    The formula, `name(ce, *statistics, *, hyperparameters)`, gets the cross entropy of each row (N,) and the statistics
    that it reads. It returns the value of each row, 0 if the label has probability 1, followed by the derivative of the
    value by each of these: (N,), or a number for all rows.

    Args:
        source: the reference in the docstring.
        reads: gives the statistics for the hyperparameters, in the formula's order.
        rows: for a loss that couples the batch, the formula of a row, which reads the cross entropy only. The decorated
            formula is then the penalty: a scalar, followed by its derivative by each number of each row.
        by_autograd: the formula returns its value only, and autograd differentiates it.
        few_operations: autograd differentiates the whole loss of few rows in less time than the slopes take.
        needs_all_rows: the formula couples the rows of a call, so they cannot be computed in blocks.
        multi_label: whether the loss is also defined for a sigmoid per label.
        check: is called with all hyperparameters.
        module: the class of the loss; one with a table passes it to the formula.
    """

    def declare(formula: Formula) -> Callable[..., Module]:
        made: Any = module or CalibrationLoss
        known = hyperparameters_of(formula)

        def constructor(*args: Any, **given: Any) -> Any:
            if args:
                raise InputTypeError(
                    f"{formula.__name__} takes its hyperparameters by name only"
                )
            return entry.make(given, InputTypeError)

        for attribute in ("__name__", "__qualname__", "__module__"):
            setattr(constructor, attribute, getattr(formula, attribute))
        references = f"\nReferences:\n    {source}.\n\nExample:\n"
        text = inspect.getdoc(formula) or ""
        if source:
            text = text.replace("\nExample:\n", references)
        constructor.__doc__ = text
        own = inspect.signature(formula).parameters
        shared = inspect.signature(make_loss).parameters
        parameters = [own[name] for name in known]
        parameters += [shared[name] for name in Shared.__annotations__]
        signature = inspect.Signature(parameters, return_annotation=made)
        constructor.__signature__ = signature  # type: ignore[attr-defined]
        entry = LossEntry(
            name=formula.__name__,
            constructor=constructor,
            source=source,
            multi_label=multi_label,
            hyperparameters=known,
            formula=formula,
            reads=reads,
            rows=rows,
            by_autograd=by_autograd,
            few_operations=few_operations,
            needs_all_rows=needs_all_rows or rows is not None,
            module=made,
            check=check,
        )
        LOSSES[entry.name] = entry
        return constructor

    return declare


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
    """Make a loss by its name in `LOSSES`, for names from files and command lines; in code, call its constructor.

    Args:
        name: a key of `LOSSES`, such as "focal", "dual_focal" or "adafocal".
        class_weights: (C,) positive factors. The loss of an example (weight x CE and its own penalties) is multiplied
            by the factor of its label, and the mean is the weighted mean, as in `F.cross_entropy`. In a multi-label
            problem a factor belongs to a column. Penalties on the whole batch are not weighted.
        pos_weight: for multi-label problems, (C,) positive factors, or one for all labels: the loss of a decision whose
            label applies is multiplied by it, as in `torch.nn.BCEWithLogitsLoss`. It does not change the divisor of the
            mean. Of `label_smoothing` it multiplies log p of the outcome "applies", also in its share of a smoothed 0.
        problem_type: "single_label_classification" or "multi_label_classification", as in a model's config; with None
            the dtype of the labels decides. With the first, floats (N, C) are soft labels of one softmax; with the
            second and with None, a label for each of C sigmoids.
        **hyperparameters: the hyperparameters of the loss, by name.

    Returns:
        An `nn.Module`: `loss(logits, labels, reduction="mean")`, in nats unless its docstring says otherwise.

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

    Use it in any PyTorch loop, or as `Trainer(compute_loss_func=loss)`; `CalibrationTrainer` also updates the losses
    that adapt. The loss is computed in float32 or float64, whatever the dtype of the logits.

    Attributes:
        name: the name in `LOSSES`.
        hyperparameters: the values of all hyperparameters in JSON types; infinity is "inf".
        couples_batch: whether the loss has a penalty on the whole batch.
        reads_labels: whether the loss of a row depends on the index of its label, not only on the probabilities.
        reads_soft_labels: whether float labels (N, C) are distributions over the classes of one softmax.
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
        known = [kind for kind in PROBLEM_TYPES if kind]
        way_out = did_you_mean(problem_type, known)
        way_out = (
            "calibration is about classifiers"
            if problem_type == "regression"
            else way_out
        )
        check(
            problem_type in [*PROBLEM_TYPES],
            f"problem_type to be one of {known}",
            repr(problem_type),
            way_out,
        )
        entry = LOSSES[name]
        self.name = name
        self.hyperparameters = {
            k: INFINITY if v == math.inf else v for k, v in values.items()
        }
        self.multi_label = PROBLEM_TYPES[problem_type]
        # A trainer may learn from its first batch that there is one label per row; that says nothing of floats.
        self.reads_soft_labels = problem_type == "single_label_classification"
        self.reads = tuple(entry.reads(**values))
        self.couples_batch = entry.couples_batch
        self.needs_all_rows = entry.needs_all_rows
        self.by_autograd = entry.by_autograd
        self.few_operations = entry.few_operations
        self.reads_labels = defined.Labels() in self.reads
        # It maps (N,) and (N, C) rows of this process to those of all processes, differentiably, and to their number.
        self.gather: Callable[[list[Tensor]], tuple[list[Tensor], int]] | None = None
        weights = None
        if class_weights is not None:
            requirement = "class_weights to be (C,) finite positive numbers"
            weights = _checked_weights(class_weights, requirement, "one per class")
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", weights, persistent=False)
        # (C,), or (1,) if it is of all labels.
        self.pos_weight: Tensor | None
        self.register_buffer(
            "pos_weight", _checked_pos_weight(pos_weight), persistent=False
        )
        self._values = dict(values)
        # Float labels are checked once only, because each check waits for the device.
        self._label_kind_is_open = True
        if self.multi_label or self.pos_weight is not None:
            self.check_multi_label()
        if self.multi_label is False:
            self.check_no_pos_weight(f"problem_type={problem_type!r}")
        self._make_table()

    def _make_table(self) -> None:
        """Make the buffers that the formula reads; a loss that adapts has some."""

    def arguments(self, ce: Tensor) -> Mapping[str, Any]:
        """The keyword arguments of the formula: the hyperparameters, and a table if the loss has one."""
        return self._values

    # ---- The formulas, as `engine` calls them ----

    @property
    def row_formula(self) -> Formula | None:
        """The formula if it gives the terms of single rows by itself, so that a kernel can evaluate it."""
        entry = LOSSES[self.name]
        return None if entry.by_autograd or entry.needs_all_rows else entry.formula

    def row_values(self, numbers: Sequence[Any]) -> Tensor:
        """The value of each row, (N,), for its numbers."""
        entry = LOSSES[self.name]
        if entry.rows is not None:
            return entry.rows(numbers[0], **self._values)[0]
        found = entry.formula(*numbers, **self.arguments(numbers[0]))
        return found if entry.by_autograd else found[0]

    def row_terms(self, numbers: Sequence[Any]) -> tuple[Tensor, Sequence[Any]]:
        """The value of each row, and its derivatives by the numbers that it is a function of."""
        entry = LOSSES[self.name]
        if entry.rows is not None:
            value, *slopes = entry.rows(numbers[0], **self._values)
        elif entry.by_autograd:
            return _differentiated(self.row_values, numbers)
        else:
            value, *slopes = entry.formula(*numbers, **self.arguments(numbers[0]))
        return value, slopes

    def penalty(self, numbers: Sequence[Any]) -> Tensor:
        """The penalty on the batch, or on that of all processes."""
        entry = LOSSES[self.name]
        if self.gather is not None:
            # Rows that are filled up with 0 count as ignored.
            gathered, _ = self.gather([own.to(numbers[0].dtype) for own in numbers])
            pairs = zip(gathered, numbers, strict=True)
            numbers = [of_all.to(own.dtype) for of_all, own in pairs]
        found = entry.formula(*numbers, **self._values)
        return found if entry.by_autograd else found[0]

    def penalty_terms(self, numbers: Sequence[Any]) -> tuple[Tensor, Sequence[Any]]:
        """The penalty, and its derivatives by the numbers of this process."""
        entry = LOSSES[self.name]
        # The derivatives by gathered rows are sums over the processes, which `gather` itself collects.
        if entry.by_autograd or self.gather is not None:
            return _differentiated(self.penalty, numbers)
        value, *slopes = entry.formula(*numbers, **self._values)
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
            logits: (N, C), or (N, L, C) for token-level labels, of any float dtype; or a model's output with logits.
            labels: (N,) or (N, L) integers in [0, C), -100 to ignore a row; for multi-label problems (N, C) floats in
                [0, 1], -100 to ignore a decision. With `problem_type="single_label_classification"` floats (N, C) are
                soft labels, shares of the classes that sum to 1, -100 for every class to ignore a row; the loss is the
                mean over the labels by these shares, sum_k q_k L(z, k). Without a problem type floats are those of
                several labels, also one-hot rows, and fractions whose rows all sum to 1 in the first batch that has
                fractions raise an error.
            reduction: "mean" over the rows that are not ignored, "sum", or "none" for a value per row, 0 if ignored.
                Losses that couple the batch do not support "none". With class weights the mean is the weighted one; of
                soft labels it is divided by the number of rows. Both are as in `F.cross_entropy`.
            num_items_in_batch: the number of rows in the whole accumulated batch; the sum is divided by it. It is for
                "mean" only, and 0 only if no row counts; the loss is then 0.

        Returns:
            A scalar, or for "none" a tensor shaped like the labels, of soft labels (N,); in nats, float32 or float64.
            If the logit of a label is -inf, the value is the loss's limit, mostly infinity with cross entropy's
            gradient; never NaN.

        Raises:
            ValueError: if shapes or dtypes do not fit, a label is out of range, or the loss has no form for these
                labels.
        """
        if not isinstance(logits, Tensor):
            _warn_if_not_shifted(logits, labels)
            logits = logits_of(logits)
        multi_label = self._check(logits, labels)
        if reduction != "mean":
            self._check_reduction(reduction)
        if num_items_in_batch is not None:
            check_items(num_items_in_batch, reduction, labels)
        compute = self._of_rows
        if multi_label:
            compute = self._of_decisions
        elif labels.is_floating_point():
            compute = self._of_soft_labels
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
        """The loss of a multi-label problem, by autograd."""
        decisions = Decisions(logits, labels, self.reads, self.pos_weight)
        if not is_traced():
            check_shares(decisions.shares, labels)
        weights = self.row_weights(labels).to(decisions.shares).flatten()
        divisor = divisor_of(weights, weights.dtype, reduction, items)
        shares = decisions.shares * (weights / divisor).repeat(2)
        values = self.row_values(decisions.numbers) * shares
        if reduction == "none":
            return values.view(2, -1).sum(0).view(labels.shape)
        return values.sum()

    def _of_soft_labels(
        self, logits: Tensor, labels: Tensor, reduction: str, items: Divisor
    ) -> Tensor:
        """The expectation of the loss over labels that are distributions, by autograd."""
        if not is_traced():
            check_soft_labels(labels)
        weights = None
        if self.class_weights is not None:
            weights = self.class_weights.to(logits.device, wide(logits))
        rows = SoftLabels(logits, labels, self.reads, weights)
        shares = rows.shares if weights is None else rows.shares * weights
        values = torch.linalg.vecdot(self.row_values(rows.numbers), shares)
        if reduction == "none":
            return values.view(labels.shape[:-1])
        counts = self.row_weights(labels)
        return values.sum() / divisor_of(counts, values.dtype, reduction, items)

    def _reduction(
        self, labels: Tensor, dtype: torch.dtype, reduction: str, items: Divisor
    ) -> Reduction:
        """The shares of the rows with these labels (N,) in the value, and the factor of the batch's penalty."""
        summed = reduction != "none"
        is_mean = reduction == "mean" and items is None
        if is_mean and self._counts_all(labels):
            share = 1 / labels.numel()
            shares = torch.full(labels.shape, share, dtype=dtype)
            scale = torch.ones((), dtype=dtype) if self.couples_batch else None
            return Reduction(self, shares, scale, summed, None)
        weights = self.row_weights(labels)
        counts = None if all_count(weights) else weights.bool()
        of_classes = None
        if self.class_weights is not None:
            weights = weights.to(dtype)
            of_classes = self.class_weights.to(labels.device, dtype)
        divisor = divisor_of(weights, dtype, reduction, items)
        shares = weights / divisor
        scale = None
        if self.couples_batch:
            rows = weights.sum(dtype=dtype)
            if self.gather is not None:
                (all_weights,), processes = self.gather([weights.to(dtype)])
                rows = all_weights.sum() / processes
            scale = rows / divisor
        return Reduction(self, shares, scale, summed, of_classes, counts)

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
        r"""Compute the loss of rows without their logits, from statistics that a fused head has kept.

        Use it for language models whose head never stores the logits, such as TRL's. The value is that of `forward`,
        and so is the gradient if the arguments have one. A loss that needs other statistics raises an error.

        Args:
            log_probs: log-probabilities of the labels, float of any shape, with a gradient.
            entropy: entropy of each distribution in nats, for `entropy_regularized`.
            log_sum_sq_probs: $\log \sum_j p_j^2$, for `bsce_gra`, and, with a gradient, for `brier`, `bsce` and
                `focal_calibration`.
            mask: bool, shaped like log_probs, True for rows that count; None for all.
            reduction, num_items_in_batch: as in `forward`, which also describes the result.

        Example:
            >>> make_loss("focal", gamma=2.0).from_log_probs(torch.tensor([0.8808, 0.5]).log())
            tensor(0.0875)
        """
        counts = torch.ones_like(log_probs, dtype=torch.bool)
        if mask is not None:
            counts = mask.bool()
        given: dict[str, Any] = {
            "log_probs": log_probs,
            "entropy": entropy,
            "log_sum_sq_probs": log_sum_sq_probs,
        }
        for name, each in {**given, "mask": counts}.items():
            if each is not None and each.shape != log_probs.shape:
                got = f"{tuple(each.shape)} for {tuple(log_probs.shape)}"
                _refuse(f"{name} to have the shape of log_probs", got, "pass one a row")
        self._check_kept(given)
        self._check_reduction(reduction)
        labels = torch.where(counts, 0, IGNORE_INDEX)
        if num_items_in_batch is not None:
            check_items(num_items_in_batch, reduction, labels)

        def counted(kept: Tensor) -> Tensor:
            # A row that does not count may contain any value, also NaN, and has no gradient.
            return kept.to(wide(kept)).where(counts, 0).flatten()

        with _without_autocast(log_probs):
            log_p = counted(log_probs)
            numbers: list[Any] = [-log_p]
            for statistic in self.reads:
                if isinstance(statistic, defined.Constant):
                    numbers.append(statistic.number)
                elif isinstance(statistic, defined.Entropy):
                    numbers.append(counted(given["entropy"]))
                else:
                    # The sum excludes the label. It is inaccurate if the label has nearly all the probability.
                    squares = counted(given["log_sum_sq_probs"]).exp()
                    others = squares - (2 * log_p).exp()
                    numbers.append(others.clamp_min(0))
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
            if name is None or given[name].requires_grad:
                continue
            is_constant = isinstance(slope, float) and slope == 0
            requirement = f"{name} to have a gradient for loss {self.name!r}"
            got = "one without (TRL's log_sum_sq_probs has none)"
            way_out = "call it on logits, or linear_calibration_loss, or use focal, which needs only log_probs"
            check(is_constant, requirement, got, f"{way_out}, or bsce_gra")

    def normalizer(self, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the divisor of the mean: the number of rows not ignored, or the sum of their class weights.

        In a multi-label problem it is that of the decisions. Rows of soft labels are counted, as in PyTorch.
        """
        if self.class_weights is not None and not labels.is_floating_point():
            check_labels(labels.flatten(), len(self.class_weights), of_weights=True)
        return self.row_weights(labels).sum(dtype=dtype)

    def row_weights(self, labels: Tensor) -> Tensor:
        """The class weight of each row, or of each decision if multi-label; True without weights, 0 if ignored.

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

    def _check(self, logits: Tensor, labels: Tensor) -> bool:
        """Check shapes and dtypes without waiting for the device; return whether the problem is multi-label."""
        if not isinstance(labels, Tensor):
            _refuse("labels to be a tensor", type(labels).__name__, "convert them")
        if not logits.is_floating_point():
            _refuse(
                "logits to be floating point",
                logits.dtype,
                "pass the model's raw scores",
            )
        if logits.dim() < 2:
            _refuse(
                "logits to have shape (N, C) or (N, L, C)",
                tuple(logits.shape),
                "add the batch axis",
            )
        multi_label = (
            labels.is_floating_point() if self.multi_label is None else self.multi_label
        )
        is_one_per_class = labels.is_floating_point() and labels.shape == logits.shape
        is_soft = is_one_per_class and self.reads_soft_labels
        wanted = logits.shape if multi_label or is_soft else logits.shape[:-1]
        if labels.shape != wanted:
            requirement = (
                f"labels to have shape {tuple(wanted)} for logits {tuple(logits.shape)}"
            )
            way_out = "integer class indices per row, or for multi-label problems and soft labels one float per class"
            _refuse(requirement, f"{tuple(labels.shape)} {labels.dtype}", way_out)
        if multi_label != labels.is_floating_point() and not is_soft:
            kind = "float (multi-label)" if multi_label else "integer (single label)"
            _refuse(
                f"labels to be {kind}",
                labels.dtype,
                "convert them, or set problem_type",
            )
        if multi_label:
            self.check_multi_label()
        elif is_soft:
            self.check_takes_soft_labels()
        if not multi_label:
            self.check_no_pos_weight(f"{'soft' if is_soft else 'integer'} labels")
        if (
            multi_label
            and self.multi_label is None
            and self._label_kind_is_open
            and not is_traced()
        ):
            # They may be the probabilities of the classes of one softmax. Rows of 0 and 1 do not tell.
            has_fractions, are_soft = look_soft(labels.detach().flatten(0, -2))
            self._label_kind_is_open = not has_fractions
            if are_soft:
                way_out = "set problem_type='single_label_classification' for soft labels of one softmax, or "
                way_out += (
                    "problem_type='multi_label_classification' for a sigmoid per class"
                )
                _refuse(
                    "labels to be class indices, or one float per class",
                    "rows that sum to 1",
                    way_out,
                )
        if (
            self.class_weights is not None
            and len(self.class_weights) != logits.shape[-1]
        ):
            requirement = f"class_weights to have one entry for each of the {logits.shape[-1]} classes"
            _refuse(
                requirement,
                len(self.class_weights),
                "give them in the order of the model's labels",
            )
        n_labels = logits.shape[-1]
        if self.pos_weight is not None and len(self.pos_weight) not in (1, n_labels):
            requirement = (
                f"pos_weight to have one entry for each of the {n_labels} labels"
            )
            _refuse(requirement, len(self.pos_weight), "or give one number for all")
        return multi_label

    def check_multi_label(self) -> None:
        """Raise ValueError if this loss has no multi-label form."""
        able = sorted(name for name, entry in LOSSES.items() if entry.multi_label)
        got = f"{self.name!r}, which is single-label"
        check(
            self.name in able,
            "loss to have a multi-label form",
            got,
            f"use one of {', '.join(able)}",
        )

    def check_takes_soft_labels(self) -> None:
        """Raise ValueError if this loss has no form for soft labels of one softmax."""
        unknown = _known_of_one_label_only(self.reads)
        if not self.couples_batch and not unknown:
            return
        able = sorted(name for name, each in LOSSES.items() if each.takes_soft_labels)
        reason = "couples the batch"
        if not self.couples_batch:
            reason = f"reads {', '.join(unknown)}"
        got = f"{self.name!r}, which {reason}"
        way_out = f"use one of {', '.join(able)}"
        _refuse("loss to have a form for soft labels", got, way_out)

    def check_no_pos_weight(self, got: str) -> None:
        """Raise ValueError if there is a weight of labels that apply; the caller has one label per row."""
        if self.pos_weight is not None:
            way_out = "use class_weights for the classes of one softmax"
            _refuse("pos_weight to be used with several labels per row", got, way_out)

    def _check_reduction(self, reduction: str) -> None:
        """Raise for a reduction that this loss does not have."""
        if reduction not in ("mean", "sum", "none"):
            _refuse(
                "reduction to be one of 'mean', 'sum', 'none'",
                repr(reduction),
                "see the docstring",
            )
        if reduction == "none" and self.couples_batch:
            _refuse(
                "reduction to be 'mean' or 'sum'",
                "'none'",
                f"{self.name} has no loss per example",
            )


def _differentiated(
    function: Callable[[Sequence[Any]], Tensor], numbers: Sequence[Any]
) -> tuple[Tensor, Sequence[Any]]:
    """The value of a function of the numbers, and the derivatives of its sum by autograd."""
    leaves = []
    for number in numbers:
        leaf = number.detach()
        leaves.append(leaf.requires_grad_(leaf.is_floating_point()))
    with torch.enable_grad():
        value = function(leaves)
        found = torch.autograd.grad(
            value.sum(),
            [leaf for leaf in leaves if leaf.requires_grad],
            materialize_grads=True,
        )
    slopes = iter(found)
    by_numbers = [next(slopes) if leaf.requires_grad else 0.0 for leaf in leaves]
    return value.detach(), by_numbers


def _known_of_one_label_only(reads: Sequence[Statistic]) -> list[str]:
    """The names of the statistics that are not known with every class of a row as its label."""
    kinds = [type(each) for each in reads]
    return [kind.__name__ for kind in kinds if kind not in KNOWN_OF_EVERY_CLASS]


def _checked_pos_weight(given: Any) -> Tensor | None:
    """The weights (C,) or (1,) of labels that apply, in float32."""
    if given is None:
        return None
    is_one = isinstance(given, Real) or (isinstance(given, Tensor) and given.dim() == 0)
    values = [given] if is_one else given
    requirement = "pos_weight to be (C,) finite positive numbers, or one"
    way_out = "one per label, or one for all"
    return _checked_weights(values, requirement, way_out)


def _checked_weights(given: Any, requirement: str, way_out: str) -> Tensor:
    """Weights (C,) in float32; raise unless they are finite positive numbers."""
    try:
        device = getattr(given, "device", None)
        weights = torch.tensor(numbers_of(given), device=device)
    except (TypeError, ValueError, OverflowError):
        weights = torch.empty(0)
    # In float32 a number may become 0 or infinite.
    is_weight = weights.isfinite() & (weights > 0)
    fits = len(weights) > 0 and bool(is_weight.all())
    check(fits, requirement, given, way_out)
    return weights


def _warn_if_not_shifted(outputs: Any, labels: Any) -> None:
    """Warn of the output of a causal language model with as many labels as positions."""
    if torch.compiler.is_compiling() or "CausalLM" not in type(outputs).__name__:
        return
    if labels.shape == outputs.logits.shape[:2]:
        message = "These are logits of a causal language model with equally many labels. Unless they were "
        message += "shifted by one position, the model learns to copy its input. Use CalibrationTrainer, "
        message += "which shifts them, or pass logits[:, :-1], labels[:, 1:]."
        warnings.warn(message, stacklevel=5)


def _refuse(requirement: str, got: object, way_out: str) -> NoReturn:
    """Raise like `check`; the message is built only here, because `torch.compile` would guard the shapes in it."""
    raise InputValueError(f"expected {requirement}, got {got}; {way_out}")


def check_items(items: Tensor | float, reduction: str, labels: Tensor) -> None:
    """Raise for a divisor of the sum that is no number of rows, without waiting for a device."""
    requirement = "num_items_in_batch to be a finite number, at least 0"
    way_out = "pass the number of rows in the whole accumulated batch"
    if reduction != "mean":
        got = f"reduction={reduction!r}"
        _refuse("num_items_in_batch to be used with reduction 'mean'", got, way_out)
    if isinstance(items, Tensor) and (is_traced() or not items.is_cpu):
        if not is_traced():
            torch._assert_async((items >= 0).all(), f"expected {requirement}")
        return
    is_one = isinstance(items, Tensor) and items.numel() == 1
    number = items.item() if is_one else items  # type: ignore[union-attr]
    if isinstance(number, bool) or not isinstance(number, Real):
        got = f"{items!r}; {way_out}"
        raise InputTypeError(f"expected num_items_in_batch to be one number, got {got}")
    if not 0 <= float(number) < math.inf:  # This is False for NaN.
        _refuse(requirement, number, way_out)
    if number == 0 and bool((labels != IGNORE_INDEX).any()):
        _refuse("num_items_in_batch to count the rows of this batch", 0, way_out)


def divisor_of(
    weights: Tensor, dtype: torch.dtype, reduction: str, items: Divisor
) -> Tensor:
    """The divisor of a sum over rows with these weights, a scalar; above 0 also if no row counts."""
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


def check_loss(loss: object) -> None:
    """Raise unless the argument is a loss of this library; its name, for example, is not."""
    if not isinstance(loss, CalibrationLoss):
        way_out = "make it with hf_calib.losses.make_loss(name, **hyperparameters)"
        raise InputTypeError(
            expected("loss", "be a CalibrationLoss", repr(loss), way_out)
        )


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's output: a tensor, an object or mapping with `logits`, or a tuple.

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
    """A context without autocast, which would compute the kernel products of the batch penalties in 16 bits."""
    device = logits.device.type
    return (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else nullcontext()
    )
