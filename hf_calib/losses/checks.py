"""Checks of what a loss is called with. None waits for a device: there an assertion of the device
fails."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_calib._errors import InputTypeError, InputValueError, check
from hf_calib.losses.engine import is_traced
from hf_calib.losses.ranges import numbers_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX


def refuse(requirement: str, got: object, way_out: str) -> NoReturn:
    """Raise like `check`; the message is built only here, because `torch.compile` would guard the
    shapes in it."""
    raise InputValueError(f"expected {requirement}, got {got}; {way_out}")


def check_tensors(logits: Tensor, labels: Tensor) -> None:
    if not isinstance(labels, Tensor):
        refuse("labels to be a tensor", type(labels).__name__, "convert them")
    if not logits.is_floating_point():
        way_out = "pass the model's raw scores"
        refuse("logits to be floating point", logits.dtype, way_out)
    if logits.dim() < 2:
        requirement = "logits to have shape (N, C) or (N, L, C)"
        refuse(requirement, tuple(logits.shape), "add the batch axis")


def check_shape(labels: Tensor, logits: Tensor, *, one_per_class: bool) -> None:
    wanted = logits.shape if one_per_class else logits.shape[:-1]
    if labels.shape != wanted:
        requirement = (
            f"labels to have shape {tuple(wanted)} for logits {tuple(logits.shape)}"
        )
        got = f"{tuple(labels.shape)} {labels.dtype}"
        way_out = "integer class indices per row, or for multi-label problems and soft labels one float per class"
        refuse(requirement, got, way_out)


def checked_class_weights(given: Any) -> Tensor | None:
    """The weights (C,) of the classes, in float32."""
    if given is None:
        return None
    requirement = "class_weights to be (C,) finite positive numbers"
    return _checked_weights(given, requirement, "one per class")


def checked_pos_weight(given: Any) -> Tensor | None:
    """The weights (C,) or (1,) of labels that apply, in float32."""
    if given is None:
        return None
    is_one = isinstance(given, Real) or (isinstance(given, Tensor) and given.dim() == 0)
    values = [given] if is_one else given
    requirement = "pos_weight to be (C,) finite positive numbers, or one"
    return _checked_weights(values, requirement, "one per label, or one for all")


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


def check_items(items: Tensor | float, reduction: str, labels: Tensor) -> None:
    """Raise for a divisor of the sum that is no number of rows."""
    requirement = "num_items_in_batch to be a finite number, at least 0"
    way_out = "pass the number of rows in the whole accumulated batch"
    if reduction != "mean":
        got = f"reduction={reduction!r}"
        refuse("num_items_in_batch to be used with reduction 'mean'", got, way_out)
    number: Any = items
    if isinstance(items, Tensor):
        if is_traced():
            return
        if not items.is_cpu:
            torch._assert_async((items >= 0).all(), f"expected {requirement}")
            return
        if items.numel() == 1:
            number = items.item()
    if isinstance(number, bool) or not isinstance(number, Real):
        got = f"{items!r}; {way_out}"
        raise InputTypeError(f"expected num_items_in_batch to be one number, got {got}")
    if not 0 <= float(number) < math.inf:  # This is False for NaN.
        refuse(requirement, number, way_out)
    if number == 0 and bool((labels != IGNORE_INDEX).any()):
        refuse("num_items_in_batch to count the rows of this batch", 0, way_out)


def check_labels(labels: Tensor, n_classes: int, *, of_weights: bool = False) -> None:
    """Raise if a label (N,) is neither a class nor ignored, and name it;
    a GPU asserts without being waited for.

    `of_weights` says that the number of classes is that of the class weights, which may be the
    wrong one.
    """
    wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= n_classes))
    requirement = f"labels to be in [0, {n_classes}) or {IGNORE_INDEX}"
    way_out = "set the model's num_labels, or relabel"
    if labels.is_cuda:
        torch._assert_async(~wrong.any(), f"expected {requirement}")
    elif bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        label = int(labels[row])
        got = f"{label} in row {row}"
        if of_weights and label >= n_classes:
            requirement = "class_weights to have an entry for each label"
            got = f"{n_classes} for label {got}"
            way_out = "give one for each class of the model, or relabel"
        raise InputValueError(f"expected {requirement}, got {got}; {way_out}")


def name_wrong_label(labels: Tensor, n_classes: int, error: Exception) -> None:
    """Raise the error of `check_labels` after PyTorch's own. A GPU that has asserted answers no
    more questions."""
    if not labels.is_cuda:
        check_labels(labels, n_classes)
    elif "device-side assert" in str(error):
        requirement = f"labels to be in [0, {n_classes}) or {IGNORE_INDEX}"
        got = "one outside, as an assertion of the GPU says"
        way_out = "set the model's num_labels, or relabel, and start again"
        raise InputValueError(
            f"expected {requirement}, got {got}; {way_out}"
        ) from error


def check_shares(shares: Tensor, labels: Tensor) -> None:
    """Raise for multi-label targets outside [0, 1], one of whose shares is negative; a GPU is not
    waited for."""
    if not len(shares):
        return
    # This is False for NaN.
    is_right = shares.min() >= 0
    requirement = "multi-label labels to be in [0, 1]"
    way_out = "give 0 or 1 per class, or -100 to ignore a decision"
    if not shares.is_cpu:
        torch._assert_async(is_right, f"expected {requirement}; {way_out}")
    elif not is_right:
        wrong = ~(shares.view(2, -1) >= 0).all(0)
        got = labels.reshape(-1)[wrong][0].item()
        raise InputValueError(f"expected {requirement}, got {got}; {way_out}")
