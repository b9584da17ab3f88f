"""Predictions: the logits or probabilities of labelled rows, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from hf_calib._errors import InputTypeError, InputValueError, check, expected, few, look_alikes
from hf_calib.metrics.checks import check_probs_and_labels, check_rows
from hf_calib.metrics.multi_label import check_decisions
from hf_calib.predictions.kinds import MULTI_LABEL, SINGLE_LABEL, TOKENS, LabelKind

_SMALLEST_PROBABILITY = np.finfo(np.float32).tiny  # a 0 that was rounded has no logarithm


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's logits or probabilities for N examples, and the true labels.

    Made from a file, by running a model, or by a training.

    Args:
        labels: (N,) int in [0, C); of several labels a row (N, C), 1, 0, or -100 where a label is not known.
        logits: (N, C) float; give these or `probs`.
        probs: (N, C) float: rows that sum to 1, or of several labels a row any in [0, 1].
        class_names: C names in the order of the columns, or None.
        sentences: (N,) int, of tokens: which sentence each is of; None for other examples.
        weights: (N,) float, what each row counts for; None for 1.
        by: of columns that name slices, the N values.
        validate: False takes the arrays as they are: the logits of a training that diverged are NaN.

    Raises:
        ValueError: if not exactly one of logits and probs is given, or shapes or values are wrong.
        TypeError: if a dtype is wrong.

    >>> predictions = Predictions(np.array([0, 1]), logits=np.array([[2.0, 0.0], [0.0, 0.0]]))
    >>> predictions.probabilities().round(2)
    array([[0.88, 0.12],
           [0.5 , 0.5 ]])
    """

    labels: NDArray[Any]
    logits: NDArray[Any] | None = None
    probs: NDArray[Any] | None = None
    class_names: tuple[str, ...] | None = None
    sentences: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None
    by: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    validate: InitVar[bool] = True

    def __post_init__(self, validate: bool) -> None:
        if (self.logits is None) == (self.probs is None):
            got = "neither" if self.logits is None else "both"
            raise InputValueError(expected("predictions", "hold logits or probs", got, "keep one of them"))
        if not validate:
            return
        if self.logits is not None and not np.issubdtype(self.logits.dtype, np.floating):
            got = f"dtype {self.logits.dtype}"
            raise InputTypeError(expected("logits", "be a float array", got, "pass logits.astype(float)"))
        fewest = 1 if self.kind.sigmoid else 2
        if self.logits is not None and (self.logits.ndim != 2 or self.logits.shape[1] < fewest):
            way_out = "flatten leading axes; for one logit z of two classes pass np.stack([0 * z, z], axis=1)"
            got = f"shape {self.logits.shape}"
            requirement = f"have shape (N, C) with C at least {fewest}"
            raise InputValueError(expected("logits", requirement, got, way_out))
        if self.kind.sigmoid:
            check_decisions(self.probabilities(), self.labels)
        else:
            probs, labels = check_probs_and_labels(self.probabilities(), self.labels)
            if self.weights is not None:
                check_rows(probs, labels, self.weights, probs.shape[1])
        if self.class_names is not None and len(self.class_names) != self.n_classes:
            requirement = f"be {self.n_classes}, one per column"
            way_out = "name each column once"
            raise InputValueError(expected("class_names", requirement, len(self.class_names), way_out))
        if self.class_names is not None:
            if not all(name.strip() for name in self.class_names):
                got = "a blank one"
                raise InputValueError(expected("class_names", "name their classes", got, "name the class"))
            check_differ("class_names", self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def n_classes(self) -> int:
        """C, the number of columns."""
        return self._scores().shape[1]

    @property
    def names(self) -> tuple[str, ...]:
        """`class_names`, or the numbers of the columns."""
        return self.class_names or tuple(map(str, range(self.n_classes)))

    @property
    def kind(self) -> LabelKind:
        """The kind of labels: one a row, several a row, or of tokens."""
        if self.labels.ndim == 2:
            return MULTI_LABEL
        return SINGLE_LABEL if self.sentences is None else TOKENS

    def probabilities(self) -> NDArray[Any]:
        """(N, C): `probs`, or the softmax of `logits` in float64, or their sigmoid for several labels a row."""
        if self.logits is None:
            return self._scores()
        wide = self.logits.astype(np.float64)
        if self.kind.sigmoid:
            return expit(wide)
        with np.errstate(invalid="ignore"):  # rows with inf become NaN, which is refused
            return softmax(wide, axis=1)

    def as_logits(self) -> NDArray[Any]:
        """(N, C): `logits`, or the logarithm of `probs`, whose softmax they are; 0 counts as 1e-38."""
        scores = self._scores()
        if self.logits is not None:
            return scores
        return logs_of(scores) - logs_of(1 - scores) if self.kind.sigmoid else logs_of(scores)

    def select(self, rows: NDArray[Any] | slice) -> Predictions:
        """The predictions of some rows."""
        arrays = ("labels", "logits", "probs", "sentences", "weights")
        chosen = {name: array[rows] for name in arrays if (array := getattr(self, name)) is not None}
        by = {name: np.array(values, object)[rows].tolist() for name, values in self.by.items()}
        return replace(self, **chosen, by=by, validate=False)

    def _scores(self) -> NDArray[Any]:
        scores = self.probs if self.logits is None else self.logits
        assert scores is not None
        return scores


def check_same_classes(argument: str, found: Predictions, other: Predictions) -> None:
    """Raise where other rows have other classes than those found, or the same by other names."""
    names = (other.class_names, found.class_names)
    if other.n_classes != found.n_classes or (None not in names and names[0] != names[1]):
        got = f"{other.n_classes} classes and {found.n_classes}, or other names"
        raise InputValueError(
            expected(argument, "have the same classes", got, "use predictions of one model")
        )


def logs_of(probs: NDArray[Any]) -> NDArray[Any]:
    """The logarithm of probabilities, where 0 counts as 1e-38."""
    return np.asarray(np.log(np.maximum(probs, _SMALLEST_PROBABILITY)))


def check_differ(argument: str, names: Sequence[str]) -> None:
    """Refuse class names that are equal or look the same."""
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        got = f"{few(list(map(repr, twice)))} twice"
        raise InputValueError(expected(argument, "differ", got, "name each class once"))
    alike = look_alikes(names, names)
    check(not alike, f"{argument} to differ visibly", alike, "rename one")
