"""`@loss`, which makes a constructor of a formula; the table `LOSSES`; the module `CalibrationLoss`."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn

from hf_calib._errors import InputTypeError, InputValueError, check, did_you_mean, expected
from hf_calib.losses.ranges import (
    INFINITY,
    Hyperparameter,
    checked,
    hyperparameters_of,
    unknown_hyperparameter,
)
from hf_calib.losses.rows import FEW_ROWS, RecordingRows, Rows
from hf_calib.losses.statistics.definitions import (
    CROSS_ENTROPY,
    IGNORE_INDEX,
    Entropy,
    OtherPowers,
    Statistic,
)
from hf_calib.losses.statistics.door import decision_statistics, is_traced, row_statistics

ClassWeights = Sequence[float] | Tensor | None
ProblemType = Literal["single_label_classification", "multi_label_classification"] | None
# Rows, (N,) or (N, C), of this process -> those of all processes, differentiable; and how many processes there are.
Gather = Callable[[list[Tensor]], tuple[list[Tensor], int]]
P = ParamSpec("P")
Module = TypeVar("Module", bound="CalibrationLoss")

REDUCTIONS = ("mean", "sum", "none")
PROBLEM_TYPES = {None: None, "single_label_classification": False, "multi_label_classification": True}
_OF_BATCH = 'It couples the batch: reductions "mean" and "sum" only; its first term is in nats.'
_SHARED = {"class_weights": "ClassWeights", "problem_type": "ProblemType"}


class Shared(TypedDict, total=False):
    """What every constructor takes beside the hyperparameters of its loss."""

    class_weights: ClassWeights
    problem_type: ProblemType


@dataclass(frozen=True, eq=False)
class LossEntry:
    """A row of `LOSSES`: the constructor, formula and source in one line, and each hyperparameter's default and range.

    `formula(rows, **hyperparameters)` returns a value per row; or, of a batch, that and its penalty.
    """

    name: str
    constructor: Callable[..., CalibrationLoss]
    summary: str
    source: str
    multi_label: bool
    hyperparameters: Mapping[str, Hyperparameter]
    formula: Callable[..., Any]
    module: type[CalibrationLoss]
    check: Callable[..., None] | None

    def make(self, given: Mapping[str, Any], refusal: type[Exception]) -> CalibrationLoss:
        """The loss with these hyperparameters, class weights and problem type; a `refusal` of others."""
        wrong = next((name for name in given if name not in (*self.hyperparameters, *_SHARED)), None)
        if wrong is not None:
            raise refusal(unknown_hyperparameter(self.name, self.hyperparameters, wrong))
        shared = {name: given[name] for name in _SHARED if name in given}
        values = checked(self.name, self.hyperparameters, given)
        if self.check is not None:
            self.check(**values)
        return self.module(self, values, **shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return _entry_of, (self.name,)


def _entry_of(name: str) -> LossEntry:
    return LOSSES[name]


#: The named losses: name -> `LossEntry`.
LOSSES: dict[str, LossEntry] = {}


def loss(
    summary: str,
    *,
    source: str = "",
    multi_label: bool = False,
    check: Callable[..., None] | None = None,
    module: type[Module] | None = None,
) -> Callable[[Callable[Concatenate[Rows, P], Any]], Callable[P, Module]]:
    """Make a loss of a formula of a row's numbers, and enter it into `LOSSES`.

    The formula `name(rows, *, hyperparameters, **shared)` returns a value per row, (N,), 0 where the label has
    probability 1; or that and a penalty on the batch. Its signature says names, defaults and ranges; its docstring is
    that of the constructor, to which `_documentation` adds what all have in common.

    Args:
        summary: the formula in one line; p is the probability of the label y.
        source: paper and equation, which are the docstring's references unless it has its own.
        multi_label: whether the formula has a meaning for a sigmoid per label, too.
        check: called with all hyperparameters, for what their ranges do not say.
        module: the class that is made, where the formula reads a table of it as `rows.table`.
    """

    def declare(formula: Callable[Concatenate[Rows, P], Any]) -> Callable[P, Module]:
        @wraps(formula)
        def constructor(*args: Any, **given: Any) -> Module:
            if args:
                raise InputTypeError(f"{entry.name} takes its hyperparameters by name only")
            return cast(Module, entry.make(given, InputTypeError))

        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [inspect.Parameter(k, keyword, default=None, annotation=v) for k, v in _SHARED.items()]
        signature = inspect.signature(formula)
        own = list(signature.parameters.values())[1:-1]
        made = module or CalibrationLoss
        constructor.__signature__ = inspect.Signature([*own, *shared], return_annotation=made)  # type: ignore[attr-defined]
        constructor.__doc__ = _documentation(
            inspect.getdoc(formula) or "", str(signature.return_annotation), source, multi_label
        )
        name, known = formula.__name__, hyperparameters_of(formula)
        entry = LossEntry(name, constructor, summary, source, multi_label, known, formula, made, check)
        LOSSES[name] = entry
        return constructor

    return declare


def _documentation(text: str, returns: str, source: str, multi_label: bool) -> str:
    """A constructor's docstring, with what all have in common: two arguments, what is returned, the source."""
    first, *rest = re.split(r"\n(Args|Returns|Warns|Notes|References|Example):\n", text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    sections["Args"] = sections.get("Args", "").rstrip() + (
        "\n    class_weights: (C,) positive factors of the classes; see `make_loss`."
        "\n    problem_type: "
        + (
            "None goes by the labels' dtype; see `make_loss`."
            if multi_label
            else 'None or "single_label_classification"; there is no multi-label form.'
        )
    )
    couples = "tuple" in returns
    sections.setdefault(
        "Returns", f"    A `CalibrationLoss`. {_OF_BATCH if couples else 'Its value is in nats.'}"
    )
    if source:
        sections.setdefault("References", f"    {source}.")
    order = ("Args", "Returns", "Warns", "Notes", "References", "Example")
    found = (f"{name}:\n" + sections[name].strip("\n") for name in order if name in sections)
    return "\n\n".join([first.strip(), *found]) + "\n"


def make_loss(
    name: str, *, class_weights: ClassWeights = None, problem_type: str | None = None, **hyperparameters: Any
) -> CalibrationLoss:
    """Make a loss by its name in `LOSSES`: for names that come from a file or a command line.

    Where the name is known when the code is written, call the constructor, which an editor completes.

    Args:
        name: see `LOSSES`; "adafocal" adapts by itself, "focal" and "dual_focal" are the usual fixed ones.
        class_weights: (C,) positive factors; each example's loss (weight x CE and its own penalties) is
            multiplied by that of its label, and the mean is the weighted mean, as in `F.cross_entropy`. In
            a multi-label problem they belong to the columns. Penalties on the whole batch are not weighted.
        problem_type: "single_label_classification" or "multi_label_classification", as in a model's config;
            None tells them apart by the labels' dtype.
        **hyperparameters: the loss's own, by name.

    Returns:
        An `nn.Module`: `loss(logits, labels, reduction="mean")`. An `AdaptiveLoss` where it has a table that
        `update` fits to held-out predictions.

    Example:
        >>> import torch
        >>> loss = make_loss("focal", gamma=2.0)
        >>> loss(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    if name not in LOSSES:
        raise InputValueError(expected("loss", "be a name in LOSSES", repr(name), did_you_mean(name, LOSSES)))
    shared = {"class_weights": class_weights, "problem_type": problem_type}
    return LOSSES[name].make(hyperparameters | shared, InputValueError)


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
        entry: LossEntry,
        values: Mapping[str, Any],
        *,
        class_weights: ClassWeights = None,
        problem_type: str | None = None,
    ) -> None:
        super().__init__()
        self.name = entry.name
        self.hyperparameters = {k: INFINITY if v == math.inf else v for k, v in values.items()}
        self.multi_label = _is_multi_label(problem_type)
        self.gather: Gather | None = None
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", _checked_class_weights(class_weights), persistent=False)
        self._entry = entry
        self._values = dict(values)
        # Until the first float labels have been looked at: each look waits for the device.
        self._label_kind_is_open = True
        if self.multi_label:
            self.check_multi_label()
        self._make_table()
        recorded = self._recorded()
        self._reads = tuple(recorded.read)
        self._reads_of_batch: tuple[Statistic, ...] = ()
        if recorded.of_batch is not None:
            self._reads_of_batch = tuple(recorded.of_batch.read)[1:]
            self._reads = tuple(dict.fromkeys([*self._reads, *self._reads_of_batch]))
        self.couples_batch = recorded.of_batch is not None
        #: Whether the loss of a row depends on which class its label is, beyond the probabilities.
        self.reads_labels = recorded.reads_labels

    def _make_table(self) -> None:
        """Make the buffers that the formula reads; a loss that adapts has some."""

    def _recorded(self) -> RecordingRows:
        rows = RecordingRows(self)
        rows.result = self._entry.formula(rows, **self._values)
        return rows

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
            logits: (N, C), or (N, L, C) for token-level labels; any float dtype; or a model's output that has them,
                which is what the Trainer passes to a `compute_loss_func`.
            labels: (N,) or (N, L) integers in [0, C), -100 to ignore a row; or, for multi-label problems,
                (N, C) floats in [0, 1], -100 to ignore a decision. Rows of shares that sum to 1, the soft labels of
                one softmax, are refused, unless `problem_type` says that each class is a sigmoid of its own.
            reduction: "mean" over the rows that count (weighted, if there are class weights), "sum", or
                "none" for a value per row, 0 where ignored. Losses that couple the batch refuse "none".
            num_items_in_batch: divide the sum by this instead: how many rows the whole accumulated batch
                has, over all micro-batches (and, as the Trainer counts, all processes).

        Returns:
            A scalar, or for "none" a tensor shaped like the labels; in nats, float32 or float64. Where the logit of a
            label is -inf it is the loss's limit: mostly infinite, with the gradient of cross entropy; never NaN.
        """
        if "CausalLM" in type(logits).__name__:
            _warn_of_unshifted_labels(logits, labels)
        logits = logits_of(logits)
        multi_label = self._check(logits, labels, reduction)
        with _without_autocast(logits):
            if multi_label:
                return self._of_decisions(logits, labels, reduction, num_items_in_batch)
            flat = labels.long().flatten()
            try:
                numbers = row_statistics(logits.flatten(0, -2), flat, self._reads)
            except (IndexError, RuntimeError) as error:
                # PyTorch's indexing error names no label (on the CPU; a GPU only asserts).
                check_labels(flat, logits.shape[-1], error)
                raise
            weighs = self.class_weights is not None
            weights = self._row_weights(flat).to(numbers[CROSS_ENTROPY]) if weighs else None
            if self.couples_batch:
                return self._of_batch(numbers, flat, weights, reduction, num_items_in_batch)
            values = self._per_row(numbers, flat)
            values = values if weights is None else values * weights
            if reduction == "none":
                return values.view(labels.shape)
            return _reduced(values, flat, weights, reduction, num_items_in_batch)

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

        Notes:
            Refused are losses that couple the batch, have class weights, are multi-label, read labels or statistics
            that are not given, or need the gradient of one that has none.

        Example:
            >>> from hf_calib.losses import focal
            >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
            >>> kept = logits.log_softmax(dim=1).gather(1, labels[:, None]).squeeze(1)
            >>> focal(gamma=2.0).from_log_probs(kept), focal(gamma=2.0)(logits, labels)
            (tensor(0.0875), tensor(0.0875))
        """
        _check_reduction(reduction)
        counts = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask.bool()
        given = {"log_probs": log_probs, "entropy": entropy, "log_sum_sq_probs": log_sum_sq_probs}
        kept = {name: each for name, each in given.items() if each is not None}
        for name, each in {**kept, "mask": counts}.items():
            got = f"{tuple(each.shape)} for {tuple(log_probs.shape)}"
            fits = each.shape == log_probs.shape
            check(fits, f"{name} to have the shape of log_probs", got, "pass one a row")
        self._check_kept(kept)
        with _without_autocast(log_probs):
            labels = torch.where(counts.flatten(), 0, IGNORE_INDEX)
            # A row that does not count may hold anything, also NaN, and gets no gradient.
            wide = {
                name: (each if each.dtype == torch.float64 else each.float()).flatten().where(labels == 0, 0)
                for name, each in kept.items()
            }
            numbers: dict[Statistic, Tensor] = {CROSS_ENTROPY: -wide["log_probs"]}
            if Entropy() in self._reads:
                numbers[Entropy()] = wide["entropy"]
            if OtherPowers(2.0) in self._reads:
                # Of the classes but the label, which cancels where the label has nearly all the mass.
                squares = wide["log_sum_sq_probs"].exp() - (2 * wide["log_probs"]).exp()
                numbers[OtherPowers(2.0)] = squares.clamp_min(0)
            found = self._per_row(numbers, labels).where(labels == 0, 0)
            if reduction == "none":
                return found.view(log_probs.shape)
            return _reduced(found, labels, None, reduction, num_items_in_batch)

    def _check_kept(self, kept: Mapping[str, Tensor]) -> None:
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
            requirement = "loss to be a formula of log-probabilities"
            check(not holds, requirement, f"{self.name!r}, which {reason}", way_out)
        names = {Entropy(): "entropy", OtherPowers(2.0): "log_sum_sq_probs"}
        for statistic in self._reads[1:]:
            got = f"{self.name!r}, which reads {type(statistic).__name__}"
            requirement = "loss to be a formula of log_probs, entropy and log_sum_sq_probs"
            check(statistic in names, requirement, got, way_out)
            name = names[statistic]
            check(name in kept, f"{name} to be given for loss {self.name!r}", "None", way_out)
            if kept["log_probs"].requires_grad and not kept[name].requires_grad:
                recorded = self._recorded()
                read = recorded.read[statistic]
                (slope,) = torch.autograd.grad(recorded.result.sum(), read, allow_unused=True)
                got = "one without (TRL's log_sum_sq_probs is such a one)"
                requirement = f"{name} to have a gradient for loss {self.name!r}"
                check(slope is None, requirement, got, f"{way_out}, or bsce_gra")

    def normalizer(self, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The divisor of the mean: the number of rows that count, or the sum, in a dtype, of their class weights."""
        if self.class_weights is None:
            return (labels != IGNORE_INDEX).sum()
        return self._row_weights(labels).sum(dtype=dtype)

    def _row_weights(self, labels: Tensor) -> Tensor:
        """The class weight of each row (of each decision, if multi-label); 0 where it is ignored."""
        assert self.class_weights is not None
        weights = self.class_weights.to(labels.device)
        counts = labels != IGNORE_INDEX
        if labels.is_floating_point():
            return counts * weights
        try:
            return weights[labels.long().where(counts, 0)] * counts
        except IndexError as error:
            check_labels(labels.reshape(-1), len(weights), error)
            raise

    def _check(self, logits: Tensor, labels: Tensor, reduction: str) -> bool:
        """Refuse what does not fit, at no cost on the device; return whether the problem is multi-label."""
        _check_reduction(reduction)
        if reduction == "none" and self.couples_batch:
            _refuse("reduction to be 'mean' or 'sum'", "'none'", f"{self.name} has no loss per example")
        if not logits.is_floating_point():
            _refuse("logits to be floating point", logits.dtype, "pass the model's raw scores")
        if logits.dim() < 2:
            _refuse("logits to have shape (N, C) or (N, L, C)", tuple(logits.shape), "add the batch axis")
        multi_label = labels.is_floating_point() if self.multi_label is None else self.multi_label
        wanted = logits.shape if multi_label else logits.shape[:-1]
        if labels.shape != wanted:
            requirement = f"labels to have shape {tuple(wanted)} for logits {tuple(logits.shape)}"
            way_out = "integer class indices per row, or for multi-label problems one float per class"
            _refuse(requirement, f"{tuple(labels.shape)} {labels.dtype}", way_out)
        if multi_label != labels.is_floating_point():
            kind = "float (multi-label)" if multi_label else "integer (single label)"
            _refuse(f"labels to be {kind}", labels.dtype, "convert them, or set problem_type")
        if multi_label:
            self.check_multi_label()
            if self._label_kind_is_open and self.multi_label is None and not is_traced():
                _refuse_distributions(labels)
                self._label_kind_is_open = False
        if self.class_weights is not None and len(self.class_weights) != logits.shape[-1]:
            requirement = f"class_weights to have one entry for each of the {logits.shape[-1]} classes"
            _refuse(requirement, len(self.class_weights), "give them in the order of the model's labels")
        return multi_label

    def check_multi_label(self) -> None:
        """Raise ValueError if this loss has no multi-label form."""
        able = ", ".join(sorted(name for name, entry in LOSSES.items() if entry.multi_label))
        got = f"{self.name!r}, which is single-label"
        check(self._entry.multi_label, "loss to have a multi-label form", got, f"use one of {able}")

    def _per_row(self, numbers: Mapping[Statistic, Tensor], labels: Tensor) -> Tensor:
        values: Tensor = self._entry.formula(Rows(numbers, labels, self), **self._values)
        return values

    def _of_decisions(
        self, logits: Tensor, labels: Tensor, reduction: str, items: Tensor | float | None
    ) -> Tensor:
        """The loss of a sigmoid per label: of both outcomes of each decision, by their shares."""
        numbers, share = decision_statistics(logits, labels, self._reads)
        values = (self._per_row(numbers, labels) * share).view(2, -1).sum(0)
        weights = None if self.class_weights is None else self._row_weights(labels).to(values).flatten()
        values = values if weights is None else values * weights
        if reduction == "none":
            return values.view(labels.shape)
        return _reduced(values, labels, weights, reduction, items)

    def _of_batch(
        self,
        numbers: Mapping[Statistic, Tensor],
        labels: Tensor,
        weights: Tensor | None,
        reduction: str,
        items: Tensor | float | None,
    ) -> Tensor:
        """The loss with a penalty on the batch; the penalty is a mean, and is added to a sum."""
        counts = (labels != IGNORE_INDEX).to(numbers[CROSS_ENTROPY])
        rows = counts.sum() if weights is None else weights.sum()
        batch, share = Rows(numbers, labels, self), rows
        if self.gather is not None:
            read = [numbers[statistic] for statistic in self._reads_of_batch]
            own = [*read, counts, rows.expand_as(counts) / max(len(counts), 1)]
            (*gathered, all_counts, all_rows), processes = self.gather(own)
            found = dict(zip(self._reads_of_batch, gathered, strict=True))
            batch = Rows(found, torch.where(all_counts > 0, 0, IGNORE_INDEX), self)
            share = all_rows.sum() / processes
        values, penalty = self._entry.formula(Rows(numbers, labels, self, batch), **self._values)
        total = (values if weights is None else values * weights).sum() + penalty * share
        if items is not None:
            return cast(Tensor, total / items)
        return cast(Tensor, total if reduction == "sum" else total / rows.where(rows > 0, 1))


def _reduced(
    values: Tensor, labels: Tensor, weights: Tensor | None, reduction: str, items: Tensor | float | None
) -> Tensor:
    """The sum of values per row, or their mean over the rows that count."""
    if items is not None:
        return values.sum() / items
    if reduction == "sum":
        return values.sum()
    if weights is not None:
        rows = weights.sum()
        return values.sum() / rows.where(rows > 0, 1)
    if labels.device.type == "cpu" and 0 < labels.numel() <= FEW_ROWS and not is_traced():
        counted = labels.numel() - labels.flatten().tolist().count(IGNORE_INDEX)
        return values.mean() if counted == labels.numel() else values.sum() / max(counted, 1)
    # Of the values' dtype: dividing by an integer tensor would convert it, and again in the backward.
    return values.sum() / (labels != IGNORE_INDEX).count_nonzero().to(values).clamp_min(1)


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        _refuse(f"reduction to be one of {REDUCTIONS}", repr(reduction), "see the docstring")


def _refuse(requirement: str, got: object, way_out: str) -> NoReturn:
    """As `check`; what is refused on every batch is worded only where it is: `torch.compile` would guard the shapes."""
    raise InputValueError(f"expected {requirement}, got {got}; {way_out}")


def _refuse_distributions(labels: Tensor) -> None:
    """Raise for float labels that `F.cross_entropy` would read as probabilities of the classes of one softmax."""
    rows = labels.detach().flatten(0, -2).float()
    sums_to_1 = ((rows.sum(1) - 1).abs() < 1e-3) & (rows >= 0).all(1)
    if rows.shape[1] > 1 and bool(sums_to_1.all() & ((rows > 0) & (rows < 1)).any()):
        way_out = "F.cross_entropy takes probabilities of one softmax; for a sigmoid per class set "
        way_out += "problem_type='multi_label_classification'"
        _refuse("labels to be class indices, or one float per class", "rows that sum to 1", way_out)


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
        got = type(outputs).__name__
        raise InputTypeError(
            expected("the model's output", "have `logits`", got, "use a classification model")
        )
    return logits


def _is_multi_label(problem_type: str | None) -> bool | None:
    """Whether the problem is multi-label; None: as the labels' dtype says."""
    known = [kind for kind in PROBLEM_TYPES if kind]
    regression = problem_type == "regression"
    way_out = "calibration is about classifiers" if regression else did_you_mean(problem_type, known)
    check(problem_type in PROBLEM_TYPES, f"problem_type to be one of {known}", repr(problem_type), way_out)
    return PROBLEM_TYPES[problem_type]


def _checked_class_weights(weights: ClassWeights) -> Tensor | None:
    if weights is None:
        return None
    try:
        tensor = torch.as_tensor(weights, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros(())
    fits = tensor.dim() == 1 and bool((torch.isfinite(tensor) & (tensor > 0)).all())
    got = weights.tolist() if isinstance(weights, Tensor) else repr(weights)
    check(fits, "class_weights to be (C,) finite positive numbers", got, "one per class, in order")
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
        got = f"{int(labels[row])} in row {row}"
        way_out = "set the model's num_labels, or relabel"
        message = expected("labels", f"be in [0, {n_classes}) or {IGNORE_INDEX}", got, way_out)
        raise InputValueError(message) from error
