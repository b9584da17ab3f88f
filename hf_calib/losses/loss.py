"""`@loss`, which makes a constructor of a formula; the table `LOSSES`; the module `CalibrationLoss`."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from numbers import Real
from typing import (
    Any,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    TypedDict,
    TypeVar,
    cast,
)

import torch
from torch import Tensor, nn

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    check,
    did_you_mean,
    expected,
)
from hf_calib.losses.ranges import (
    INFINITY,
    Hyperparameter,
    hyperparameters_of,
    numbers,
)
from hf_calib.losses.rows import FEW_ROWS, RecordingRows, Rows, has_own_slope
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.definitions import CROSS_ENTROPY, IGNORE_INDEX, tiny
from hf_calib.losses.statistics.door import (
    check_labels,
    decision_statistics,
    is_traced,
    row_statistics,
)

ClassWeights = Sequence[float] | Tensor | None
Divisor = Tensor | float | None  # of a sum; None goes by the reduction
Numbers = dict[defined.Statistic, Tensor]
P = ParamSpec("P")
Module = TypeVar("Module", bound="CalibrationLoss")

PROBLEM_TYPES = {
    None: None,
    "single_label_classification": False,
    "multi_label_classification": True,
}
KEPT_BY_A_HEAD = {
    defined.Entropy(): "entropy",
    defined.OtherPowers(2.0): "log_sum_sq_probs",
}


class Shared(TypedDict, total=False):
    """The arguments of every constructor in addition to the hyperparameters of its loss."""

    class_weights: ClassWeights
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
    formula: Callable[
        ..., Any
    ]  # It returns a value per row, or that and the penalty of a batch.
    module: type[CalibrationLoss]
    check: Callable[..., None]

    def make(
        self, given: Mapping[str, Any], refusal: type[Exception]
    ) -> CalibrationLoss:
        """Make the loss from arguments by name; raise `refusal` for a hyperparameter that it does not have."""
        known = self.hyperparameters
        has = "it has: " + (
            ", ".join(f"{key}={each.default!r}" for key, each in known.items())
            or "none"
        )
        names = [*known, *Shared.__annotations__]
        values = {}
        for key in given.keys() - names:
            requirement = f"the hyperparameters of loss {self.name!r}"
            raise refusal(
                f"expected {requirement}, got {key!r}; {has} ({did_you_mean(key, names)})"
            )
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
        return self.module(
            self.name, values, given.get("class_weights"), given.get("problem_type")
        )


#: All losses by name, each a `LossEntry`.
LOSSES: dict[str, LossEntry] = {}


def loss(
    *,
    source: str = "",
    multi_label: bool = False,
    check: Callable[..., None] = lambda **values: None,
    module: type[Module] | None = None,
) -> Callable[[Callable[Concatenate[Rows, P], Any]], Callable[P, Module]]:
    """Turn a formula of a row's statistics into a constructor, and add it to `LOSSES`.

    The formula, `name(rows, *, hyperparameters, **shared)`, returns one value per row, (N,), which is 0 if the label
    has probability 1, or these values and a penalty on the batch. `source` is the reference in the docstring.
    `multi_label` says whether the loss is also defined for a sigmoid per label. `check` is called with all
    hyperparameters. `module` is the class of the loss, whose table the formula reads as `rows.table`.
    """

    def declare(formula: Callable[Concatenate[Rows, P], Any]) -> Callable[P, Module]:
        @wraps(formula)
        def constructor(*args: Any, **given: Any) -> Any:
            if args:
                raise InputTypeError(
                    f"{formula.__name__} takes its hyperparameters by name only"
                )
            return entry.make(given, InputTypeError)

        made = module or CalibrationLoss
        text = inspect.getdoc(formula) or ""
        own, shared = (
            list(inspect.signature(f).parameters.values())[1:-1]
            for f in (formula, make_loss)
        )
        signature = inspect.Signature([*own, *shared], return_annotation=made)
        constructor.__signature__ = signature  # type: ignore[attr-defined]
        if source:
            text = text.replace(
                "\nExample:\n", f"\nReferences:\n    {source}.\n\nExample:\n"
            )
        constructor.__doc__ = text
        known = hyperparameters_of(formula)
        entry = LossEntry(
            formula.__name__,
            constructor,
            source,
            multi_label,
            known,
            formula,
            made,
            check,
        )
        LOSSES[entry.name] = entry
        return cast(Callable[P, Module], constructor)

    return declare


def make_loss(
    name: str,
    *,
    class_weights: ClassWeights = None,
    problem_type: str | None = None,
    **hyperparameters: Any,
) -> CalibrationLoss:
    """Make a loss by its name in `LOSSES`, for names from files and command lines; in code, call its constructor.

    Args:
        name: a key of `LOSSES`, such as "focal", "dual_focal" or "adafocal".
        class_weights: (C,) positive factors. The loss of an example (weight x CE and its own penalties) is multiplied
            by the factor of its label, and the mean is the weighted mean, as in `F.cross_entropy`. In a multi-label
            problem a factor belongs to a column. Penalties on the whole batch are not weighted.
        problem_type: "single_label_classification" or "multi_label_classification", as in a model's config; with None
            the dtype of the labels decides.
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
    shared = {"class_weights": class_weights, "problem_type": problem_type}
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
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, Any],
        class_weights: ClassWeights,
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
        self.name = name
        self.hyperparameters = {
            k: INFINITY if v == math.inf else v for k, v in values.items()
        }
        self.multi_label = PROBLEM_TYPES[problem_type]
        # It maps (N,) and (N, C) rows of this process to those of all processes, differentiably, and to their number.
        self.gather: Callable[[list[Tensor]], tuple[list[Tensor], int]] | None = None
        weights = None
        if class_weights is not None:
            try:
                device = getattr(class_weights, "device", None)
                weights = torch.tensor(numbers(class_weights), device=device)
            except (TypeError, ValueError, OverflowError):
                weights = torch.empty(0)
            # In float32 a number may become 0 or infinite.
            is_weight = weights.isfinite() & (weights > 0)
            fits = len(weights) > 0 and bool(is_weight.all())
            check(
                fits,
                "class_weights to be (C,) finite positive numbers",
                class_weights,
                "one per class",
            )
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", weights, persistent=False)
        self._values = dict(values)
        # Float labels are checked once only, because each check waits for the device.
        self._label_kind_is_open = True
        if self.multi_label:
            self.check_multi_label()
        self._make_table()
        recorded = RecordingRows(self)
        self._own_slope = has_own_slope(self._formula(recorded))
        self.couples_batch = recorded.of_batch is not None
        self.reads_labels = recorded.reads_labels
        self._reads = tuple(
            recorded.read | (recorded.of_batch.read if recorded.of_batch else {})
        )

    def _make_table(self) -> None:
        """Make the buffers that the formula reads; a loss that adapts has some."""

    def _formula(self, rows: Rows) -> Any:
        return LOSSES[self.name].formula(rows, **self._values)

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
                [0, 1], -100 to ignore a decision. Floats are always read as those of several labels, also one-hot
                rows. Fractions whose rows all sum to 1 (soft labels of one softmax) in the first batch that has
                fractions raise an error unless `problem_type` says that the problem is multi-label.
            reduction: "mean" over the rows that are not ignored, "sum", or "none" for a value per row, 0 if ignored.
                Losses that couple the batch do not support "none".
            num_items_in_batch: the number of rows in the whole accumulated batch; the sum is divided by it. It is for
                "mean" only, and 0 only if no row counts; the loss is then 0.

        Returns:
            A scalar, or for "none" a tensor shaped like the labels; in nats, float32 or float64. If the logit of a
            label is -inf, the value is the loss's limit, mostly infinity with cross entropy's gradient; never NaN.
        """
        causal = (
            "CausalLM" in type(logits).__name__ and not torch.compiler.is_compiling()
        )
        if causal and labels.shape == logits.logits.shape[:2]:
            message = "These are logits of a causal language model with equally many labels. Unless they were "
            message += "shifted by one position, the model learns to copy its input. Use CalibrationTrainer, "
            warnings.warn(
                message + "which shifts them, or pass logits[:, :-1], labels[:, 1:].",
                stacklevel=4,
            )
        logits = logits_of(logits)
        multi_label = self._check(logits, labels)
        self._check_reduction(reduction)
        check_items(num_items_in_batch, reduction, labels)
        with _without_autocast(logits):
            if multi_label:
                numbers, shares = decision_statistics(logits, labels, self._reads)
                return self._reduced(
                    numbers, labels, reduction, num_items_in_batch, shares
                )
            labels = labels.long()
            numbers = row_statistics(
                logits.flatten(0, -2), labels.flatten(), self._reads, self._own_slope
            )
            return self._reduced(numbers, labels, reduction, num_items_in_batch)

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
        counts = (
            torch.ones_like(log_probs, dtype=torch.bool)
            if mask is None
            else mask.bool()
        )
        given = {
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
        counted = torch.where(counts, 0, IGNORE_INDEX)
        check_items(num_items_in_batch, reduction, counted)

        def wide(kept: Tensor) -> Tensor:
            # A row that does not count may contain any value, also NaN, and has no gradient.
            return (
                (kept if kept.dtype == torch.float64 else kept.float())
                .where(counts, 0)
                .flatten()
            )

        with _without_autocast(log_probs):
            numbers: Numbers = {CROSS_ENTROPY: -wide(log_probs)}
            if entropy is not None:
                numbers[defined.Entropy()] = wide(entropy)
            if log_sum_sq_probs is not None:
                # The sum excludes the label. It is inaccurate if the label has nearly all the probability.
                squares = wide(log_sum_sq_probs).exp() - (2 * wide(log_probs)).exp()
                numbers[defined.OtherPowers(2.0)] = squares.clamp_min(0)
            return self._reduced(numbers, counted, reduction, num_items_in_batch)

    def _check_kept(self, given: Mapping[str, Any]) -> None:
        """Raise for a loss that cannot be computed from these statistics."""
        way_out = "call it on logits, or linear_calibration_loss, or use focal, which needs only log_probs"
        others = ", ".join(
            type(each).__name__
            for each in self._reads[1:]
            if each not in KEPT_BY_A_HEAD
        )
        refused = {
            "couples the batch": self.couples_batch,
            "has class weights": self.class_weights is not None,
            "is multi-label": self.multi_label,
            "reads the labels": self.reads_labels,
            f"reads {others}": others,
        }
        for reason, holds in refused.items():
            requirement = (
                "loss to be a formula of log_probs, entropy and log_sum_sq_probs"
            )
            check(not holds, requirement, f"{self.name!r}, which {reason}", way_out)
        for statistic in self._reads[1:]:
            name = KEPT_BY_A_HEAD[statistic]
            check(
                given[name] is not None,
                f"{name} to be given for loss {self.name!r}",
                None,
                way_out,
            )
            if given["log_probs"].requires_grad and not given[name].requires_grad:
                recorded = RecordingRows(self)
                value = self._formula(recorded).sum()
                (slope,) = torch.autograd.grad(
                    value, recorded.read[statistic], allow_unused=True
                )
                got = "one without (TRL's log_sum_sq_probs has none)"
                requirement = f"{name} to have a gradient for loss {self.name!r}"
                check(slope is None, requirement, got, f"{way_out}, or bsce_gra")

    def normalizer(self, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the divisor of the mean: the number of rows not ignored, or the sum of their class weights."""
        if self.class_weights is not None and not labels.is_floating_point():
            check_labels(labels.flatten(), len(self.class_weights), of_weights=True)
        return self._row_weights(labels).sum(dtype=dtype)

    def _row_weights(self, labels: Tensor) -> Tensor:
        """The class weight of each row, or of each decision if multi-label; True without weights, 0 if ignored."""
        counts = labels != IGNORE_INDEX
        if self.class_weights is None:
            return counts
        weights = self.class_weights.to(labels.device)
        return counts * (
            weights
            if labels.is_floating_point()
            else weights[labels.long().clamp_min(0)]
        )

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
        wanted = logits.shape if multi_label else logits.shape[:-1]
        if labels.shape != wanted:
            requirement = (
                f"labels to have shape {tuple(wanted)} for logits {tuple(logits.shape)}"
            )
            way_out = "integer class indices per row, or for multi-label problems one float per class"
            _refuse(requirement, f"{tuple(labels.shape)} {labels.dtype}", way_out)
        if multi_label != labels.is_floating_point():
            kind = "float (multi-label)" if multi_label else "integer (single label)"
            _refuse(
                f"labels to be {kind}",
                labels.dtype,
                "convert them, or set problem_type",
            )
        if multi_label:
            self.check_multi_label()
        if (
            multi_label
            and self.multi_label is None
            and self._label_kind_is_open
            and not is_traced()
        ):
            self._label_kind_is_open = False
            # `F.cross_entropy` would read such rows as probabilities of the classes of one softmax.
            rows = labels.detach().flatten(0, -2).float()
            sum_to_1 = ((rows.sum(1) - 1).abs() < 1e-3) & (rows >= 0).all(1)
            if rows.shape[1] > 1 and bool(
                sum_to_1.all() & ((rows > 0) & (rows < 1)).any()
            ):
                way_out = "F.cross_entropy accepts them; else set problem_type='multi_label_classification'"
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

    def _reduced(
        self,
        numbers: Numbers,
        labels: Tensor,
        reduction: str,
        items: Divisor,
        shares: Tensor | None = None,
    ) -> Tensor:
        """The formula's values of rows, or their sum or mean; `shares` are those of a decision's two outcomes."""
        flat = labels.flatten()
        dtype = numbers[CROSS_ENTROPY].dtype
        penalty = None
        if self.couples_batch:
            own = self._row_weights(labels).flatten().to(dtype)
            batch = None
            rows = own.sum()
            if self.gather is not None:
                # Rows that are filled up with 0 count as ignored.
                shifted = (flat - IGNORE_INDEX).to(dtype)
                (*found, all_own, all_shifted), processes = self.gather(
                    [*numbers.values(), own, shifted]
                )
                all_labels = all_shifted.long() + IGNORE_INDEX
                batch = Rows(dict(zip(numbers, found, strict=True)), all_labels, self)
                rows = all_own.sum() / processes
            values, mean = self._formula(Rows(numbers, flat, self, batch))
            penalty = mean * rows
        else:
            values = self._formula(Rows(numbers, flat, self))
        if shares is not None:
            values = (values * shares).view(2, -1).sum(0)
        is_mean = reduction == "mean" and items is None
        # For few labels, this search in Python takes less time than the operations that it saves.
        few = (
            0 < len(flat) <= FEW_ROWS and flat.device.type == "cpu" and not is_traced()
        )
        plain = is_mean and penalty is None and self.class_weights is None
        if plain and few and IGNORE_INDEX not in flat.tolist():
            return values.mean()
        weights = self._row_weights(labels).flatten()
        if self.class_weights is not None:
            values = values * weights
        if reduction == "none":
            return values.view(labels.shape)
        total = values.sum() if penalty is None else values.sum() + penalty
        if not is_mean:
            return total if items is None else over_items(total, items)
        divisor = weights.sum(dtype=dtype)
        return total / divisor.clamp_min(tiny(divisor))  # 0 where no row counts


def _refuse(requirement: str, got: object, way_out: str) -> NoReturn:
    """Raise like `check`; the message is built only here, because `torch.compile` would guard the shapes in it."""
    raise InputValueError(f"expected {requirement}, got {got}; {way_out}")


def check_items(items: Divisor, reduction: str, labels: Tensor) -> None:
    """Raise for a divisor of the sum that is no number of rows, without waiting for a device."""
    if items is None:
        return
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
