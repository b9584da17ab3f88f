"""The rows of a fit: checked logits and labels, in the one form that every calibrator reads."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax

from hf_calib._errors import check, few
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray
from hf_calib.scaling._base import as_logits

# The curvature of a loss sums squares of logits, which have to be finite.
_LARGEST = 1e100


@dataclass(frozen=True)
class Rows:
    """Checked logits (N, C) with one class for each row, or with several labels for each row."""

    # They keep the dtype of the user, because a fit converts them block by block.
    logits: NDArray[Any]
    # The class of each row (N,), or for sigmoids the mask (N, C) of labels 1.
    labels: NDArray[Any]
    # (N,), above 0 with mean 1; None if all rows count the same.
    weights: FloatArray | None = None
    # (N, C) for sigmoids; None if all labels are known.
    known: NDArray[np.bool_] | None = None

    @classmethod
    def checked(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        multi_label: bool = False,
    ) -> Rows:
        """Check the arguments of a user, and return the rows that count."""
        matrix = as_matrix(logits, least_columns=1 if multi_label else 2)
        if multi_label:
            positive, known = _as_binary_labels(labels, matrix)
            return cls(matrix, positive, known=known)
        numbers = _as_class_labels(labels, matrix)
        shares = checks.check_weights(weights, len(matrix))
        rows = cls(matrix, numbers, shares)
        if shares is None:
            return rows
        # Weights are scaled to mean 1 where rows are chosen, and a slice does not copy the logits.
        return rows[:] if shares.all() else rows[shares > 0]

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, chosen: Any) -> Rows:
        weights = None if self.weights is None else self.weights[chosen]
        if weights is not None:
            weights = weights / weights.mean()
        known = None if self.known is None else self.known[chosen]
        return Rows(self.logits[chosen], self.labels[chosen], weights, known)

    @property
    def sigmoid(self) -> bool:
        return self.labels.ndim == 2

    @property
    def shares(self) -> FloatArray:
        """The weights (N,), which are ones if all rows count the same."""
        return np.ones(len(self)) if self.weights is None else self.weights

    def with_logits(self, logits: FloatArray) -> Rows:
        return replace(self, logits=logits)

    def two_classes(self, column: int | slice = slice(None)) -> Rows:
        """The known examples of one label or of all, as rows of two classes."""
        logits = self.logits[:, column]
        labels = self.labels[:, column]
        if self.known is not None:
            known = self.known[:, column]
            logits = logits[known]
            labels = labels[known]
        # The softmax of -z/2 and z/2 is the sigmoid of z.
        half = logits.ravel().astype(np.float64) / 2
        return Rows(np.stack([-half, half], axis=1), labels.ravel().astype(np.int64))

    def losses(self, logits: FloatArray) -> FloatArray:
        """The negative log-likelihood (N,) of each row with other logits."""
        if self.sigmoid:
            of_decisions = log_expit(np.where(self.labels, logits, -logits))
            counted: Any = True if self.known is None else self.known
            return -of_decisions.sum(axis=1, where=counted)
        return -at_labels(log_softmax(logits, axis=1), self.labels)


def at_labels(matrix: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    """The number (N,) that each row of a matrix (N, C) has for its label."""
    return matrix[np.arange(len(labels)), labels]


def as_matrix(logits: ArrayLike, *, least_columns: int) -> NDArray[Any]:
    """Check logits (N, C) for `fit`."""
    logits = as_logits(logits)
    shape = f"shape {logits.shape}"
    way_out = "use logits.reshape(-1, num_labels)"
    check(logits.ndim == 2, "logits to have shape (N, C)", shape, way_out)
    has_columns = logits.shape[1] >= least_columns
    way_out = "for one logit per example, pass multi_label=True, which uses the sigmoid"
    check(has_columns, "logits to have at least 2 classes", shape, way_out)
    low = float(logits.min())
    high = float(logits.max())
    way_out = "divide them by a number, which a temperature compensates for"
    check(high <= _LARGEST, f"logits to be at most {_LARGEST:g}", f"{high:g}", way_out)
    # A single column of shares, as of one label, has no sums that would give it away.
    if logits.shape[1] > 1 and 0 <= low <= high <= 1:
        _warn_of_probabilities(logits)
    return logits


def _warn_of_probabilities(logits: NDArray[Any]) -> None:
    """Warn if the rows of numbers in [0, 1] sum to 1; the caller's caller's caller is a `fit`."""
    distances = np.abs(logits.sum(axis=1, dtype=np.float64) - 1)
    is_sum = distances.max() <= checks.row_sum_tolerance(logits.shape[1])
    # One-hot rows are the logits of toy data more often than probabilities.
    is_one_hot = np.isin(logits, (0, 1)).all()
    if is_sum and not is_one_hot:
        message = (
            "The logits are in [0, 1] and their rows sum to 1, like probabilities. "
            "Calibrators of these are poor. Pass numpy.log(probs) instead."
        )
        warnings.warn(message, UserWarning, stacklevel=5)


def _as_class_labels(labels: ArrayLike, logits: NDArray[Any]) -> NDArray[np.int64]:
    """Check one class index per row of the logits."""
    labels = checks.as_array("labels", labels)
    way_out = "pass one class index per example (multi_label=True takes 0/1 labels of shape (N, C))"
    checks.check_shape("labels", labels, logits.shape[:1], way_out)
    numbers = checks.check_labels(labels, *logits.shape)
    _refuse_masked(at_labels(logits, numbers))
    return numbers


def _as_binary_labels(
    labels: ArrayLike, logits: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Check a 0/1 label for every logit; return the masks of 1 and of known labels."""
    labels = checks.as_array("labels", labels)
    way_out = "multi_label=True takes a 0/1 label for every logit"
    requirement = f"labels to have the logits' shape {logits.shape}"
    got = f"shape {labels.shape}"
    check(labels.shape == logits.shape, requirement, got, way_out)
    requirement = "labels to be 0 or 1"
    positive = labels == 1
    known = positive | (labels == 0)
    others = few(labels[~known & (labels != -100)][:1].tolist())
    way_out = "pass hard labels, and -100 where a label is not known"
    check(not others, requirement, f"values such as {others}", way_out)
    way_out = "pass at least one label of 0 or 1"
    check(bool(known.any()), requirement, "-100 everywhere", way_out)
    _refuse_masked(logits[positive])
    # A masked label is 0 at any temperature, so it tells nothing.
    known &= ~np.isneginf(logits)
    return positive, None if known.all() else known


def _refuse_masked(of_labels: NDArray[Any]) -> None:
    """Raise unless the labels' logits are finite, since the loss would be infinite."""
    masked = np.count_nonzero(np.isneginf(of_labels))
    got = f"-inf for {masked} of {len(of_labels)}"
    way_out = "mask only classes that cannot be the label"
    check(not masked, "logits to be finite for every label", got, way_out)
