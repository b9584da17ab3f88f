"""Predictions: logits or probabilities of labelled rows from any source, kinds of labels,
and names of files.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit, log_softmax, softmax

from hf_calib._errors import check, few, look_alikes
from hf_calib.metrics.checks import (
    FloatArray,
    check_kind,
    check_labels,
    check_names,
    check_probs,
    check_row_weights,
    check_shape,
    check_type,
    refuse,
    row_sum_tolerance,
)
from hf_calib.metrics.multi_label import check_decisions
from hf_calib.scaling import SINGLE_LABEL_SCALERS

FORMATS = (".npz", ".csv", ".tsv", ".parquet", ".jsonl")
# A 0 from rounding has no logarithm; it counts as the smallest normal float32.
_SMALLEST_PROBABILITY = np.finfo(np.float32).tiny

# It is called with the number of rows just read, and that of all rows or None.
OnRows = Callable[[int, int | None], None]


def ignore_rows(n_rows: int, n_all: int | None) -> None:
    """Do nothing; for a caller without progress."""


class LabelKind(NamedTuple):
    """The form of a task's labels, which determines probabilities, calibrators and statistics."""

    # The name in messages.
    name: str
    # True if each logit has its own probability.
    sigmoid: bool
    # True if examples are independent draws, as guarantees need.
    independent: bool
    # The post-hoc methods for it.
    maps: tuple[str, ...]

    def probabilities(self, logits: NDArray[Any]) -> NDArray[np.float64]:
        """(N, C), in float64: the softmax of logits, or their sigmoid."""
        wide = logits.astype(np.float64)
        if self.sigmoid:
            return np.asarray(expit(wide))
        # Rows with inf become NaN, which raises later.
        with np.errstate(invalid="ignore"):
            return np.asarray(softmax(wide, axis=1))


SINGLE_LABEL = LabelKind("single-label", False, True, tuple(SINGLE_LABEL_SCALERS))
TOKENS = LabelKind("token", False, False, tuple(SINGLE_LABEL_SCALERS))
_MULTI = ("auto", "temperature", "per_label_temperature", "structured_vector")
MULTI_LABEL = LabelKind("multi-label", True, True, _MULTI)
# For a calibrator, a confidence c is that of two classes, "wrong" with 1 - c and "correct" with c.
TOP_LABELS = LabelKind("top-label", False, True, tuple(SINGLE_LABEL_SCALERS))


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's logits or probabilities for N examples, with the true labels.

    They come from a file, a model or a training run.

    Args:
        labels: (N,) int in [0, C); with several labels per row (N, C) of 1, 0, or -100 for an
            unknown label.
        logits: (N, C) float; pass these or `probs`.
        probs: (N, C) float, rows that sum to 1; with several labels per row any values in [0, 1].
        class_names: C names in the order of the columns, or None.
        sentences: (N,) int, the sentence of each token; None for other examples.
        weights: (N,) float, the weight of each row; None for 1.
        by: column name -> N values, for columns that define slices.
        validate: False skips the checks, because a diverged run has logits of NaN.

    Raises:
        ValueError: unless exactly one of logits and probs is given with valid shapes and values.
        TypeError: if a dtype is wrong.

    >>> predictions = Predictions(np.array([0, 1]), logits=np.array([[2.0, 0.0], [0.0, 0.0]]))
    >>> predictions.probabilities().round(2)
    array([[0.88, 0.12],
           [0.5 , 0.5 ]])
    """

    ARRAYS: ClassVar = ("labels", "logits", "probs", "sentences", "weights")

    labels: NDArray[Any]
    logits: NDArray[Any] | None = None
    probs: NDArray[Any] | None = None
    class_names: tuple[str, ...] | None = None
    sentences: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None
    by: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    validate: InitVar[bool] = True

    def __post_init__(self, validate: bool) -> None:
        one_is_given = (self.logits is None) != (self.probs is None)
        got = "neither" if self.logits is None else "both"
        check(
            one_is_given, "predictions to hold logits or probs", got, "keep one of them"
        )
        if not validate:
            return
        _check_arrays(self)
        if self.logits is not None:
            check_kind(
                self.logits,
                "f",
                "logits to be a float array",
                "pass logits.astype(float)",
            )
            fewest = 1 if self.kind.sigmoid else 2
            shape = self.logits.shape
            fits = len(shape) == 2 and shape[0] >= 1 and shape[1] >= fewest
            requirement = (
                f"logits to have shape (N, C) with N at least 1, C at least {fewest}"
            )
            way_out = "flatten leading axes; for one logit z of two classes pass np.stack([0 * z, z], axis=1)"
            check(fits, requirement, f"shape {shape}", way_out)
            check_logits(self.logits, sigmoid=self.kind.sigmoid)
        if self.kind.sigmoid:
            check_decisions(self.probabilities(), self.labels)
        else:
            # The softmax of checked logits are probabilities, and would be another copy.
            if self.probs is not None:
                check_probs(self.probs)
            check_labels(self.labels, *self.scores.shape)
        _check_other_columns(self)
        check_names("class_names", self.class_names)
        if self.class_names is not None:
            n_names = len(self.class_names)
            requirement = f"class_names to hold {self.n_classes} names, one per column"
            check(
                n_names == self.n_classes, requirement, n_names, "name each column once"
            )
            check_class_names(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def scores(self) -> NDArray[Any]:
        """The logits (N, C), or the probabilities if there are none."""
        scores = self.probs if self.logits is None else self.logits
        assert scores is not None
        return scores

    @property
    def n_classes(self) -> int:
        """The number of columns C."""
        return self.scores.shape[1]

    @property
    def names(self) -> tuple[str, ...]:
        """The `class_names`, or the column indices."""
        return self.class_names or tuple(map(str, range(self.n_classes)))

    @property
    def kind(self) -> LabelKind:
        """The kind of labels: one per row, several per row, or those of tokens."""
        if self.labels.ndim == 2:
            return MULTI_LABEL
        return SINGLE_LABEL if self.sentences is None else TOKENS

    def probabilities(self) -> NDArray[Any]:
        """Return probabilities (N, C): `probs`, or the float64 softmax (multi-label:
        sigmoid) of `logits`.
        """
        return (
            self.scores if self.logits is None else self.kind.probabilities(self.logits)
        )

    def as_logits(self) -> NDArray[Any]:
        """Return the `logits` (N, C), or the logarithm of `probs`, where 0 counts as 1e-38."""
        if self.logits is not None:
            return self.logits
        return (
            logs_of(self.scores) - logs_of(1 - self.scores)
            if self.kind.sigmoid
            else logs_of(self.scores)
        )

    def fit_calibrator(self, scaler: Any) -> list[str]:
        """Fit a calibrator in place, with the rows' weights if any, and return the fit's warnings.

        Raises:
            ValueError: if a label has probability 0, see `check_labels_are_possible`.
        """
        self.check_labels_are_possible("fit on")
        notes = self._notes_on_zeros()
        if self.kind.sigmoid and "multi_label" in scaler.get_params():
            scaler.set_params(multi_label=True)
        weights = {} if self.weights is None else {"sample_weight": self.weights}
        # By default Python shows a warning once per place, so that a second fit would
        # have no note.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.fit(self.as_logits(), self.labels, **weights)
        return [*notes, *(str(each.message) for each in caught)]

    def check_labels_are_possible(self, purpose: str) -> None:
        """Raise if the label of a row to fit a calibrator on, or to measure one on,
        has probability 0.

        It has no logarithm, and the number in its place would decide: with 1e-38, four such rows of
        2,000 make a temperature 1.70 instead of 0.96, and one row of 2,000 changes their NLL by .3.
        """
        if self.probs is None:
            return
        is_zero = self.probs < _SMALLEST_PROBABILITY
        if self.kind.sigmoid:
            is_one = 1 - self.probs < _SMALLEST_PROBABILITY
            impossible = ((self.labels == 1) & is_zero) | ((self.labels == 0) & is_one)
            wrong = impossible.any(axis=1)
        else:
            wrong = is_zero[np.arange(len(self)), self.labels]
        n_wrong = int(np.count_nonzero(wrong))
        requirement = (
            f"the label of every row to {purpose} to have a probability above 0"
        )
        way_out = (
            "write logits, or probabilities with more digits, or remove these rows"
        )
        check(n_wrong == 0, requirement, f"0 in {n_wrong:,} of {len(self):,}", way_out)

    def _notes_on_zeros(self) -> list[str]:
        """A note on probabilities that count as 1e-38 in a fit."""
        if self.probs is None:
            return []
        is_zero = self.probs < _SMALLEST_PROBABILITY
        n_zero = int(np.count_nonzero(is_zero.any(axis=1)))
        if n_zero == 0:
            return []
        return [
            f"{n_zero:,} of the {len(self):,} rows to fit on have probabilities of 0, "
            "which count as 1e-38. Logits, or probabilities with more digits, give a better fit."
        ]

    def select(self, rows: NDArray[Any] | slice) -> Predictions:
        """Return the predictions of some rows."""
        return _selected(self, rows)


@dataclass(frozen=True, eq=False)
class TopLabels:
    """The confidences of predicted classes, and whether each is correct:
    predictions without the other classes.

    Use it if a service returns the best class only; `Predictions` has every class. All that the top
    label tells can be measured. A calibrator is fitted as for two classes, "wrong" and "correct".

    Args:
        confidence: (N,) float in [0, 1].
        correct: (N,) int, 1 for a correct prediction, otherwise 0.
        weights: (N,) float, the weight of each row; None for 1.
        by: column name -> N values, for columns that define slices.
        validate: False skips the checks.

    Raises:
        ValueError: if shapes or values are wrong.

    >>> rows = TopLabels(np.array([0.9, 0.3]), np.array([1, 0]))
    >>> rows.probabilities().round(1).tolist(), rows.labels.tolist()
    ([[0.1, 0.9], [0.7, 0.3]], [1, 0])
    """

    ARRAYS: ClassVar = ("confidence", "correct", "weights")

    confidence: FloatArray
    correct: NDArray[np.int64]
    weights: FloatArray | None = None
    by: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    validate: InitVar[bool] = True

    class_names: ClassVar = ("wrong", "correct")
    names: ClassVar = class_names
    n_classes: ClassVar = 2
    kind: ClassVar = TOP_LABELS
    sentences: ClassVar = None
    logits: ClassVar = None

    def __post_init__(self, validate: bool) -> None:
        if not validate:
            return
        _check_arrays(self)
        way_out = "pass fractions; divide percentages by 100"
        is_vector = self.confidence.ndim == 1
        got = f"shape {self.confidence.shape}"
        check(is_vector, "confidence to have shape (N,)", got, way_out)
        check_kind(self.confidence, "f", "confidence to be a float array", way_out)
        outside = ~((self.confidence >= 0) & (self.confidence <= 1))
        refuse(outside, "confidence", "lie in [0, 1]", self.confidence, way_out)
        way_out = "pass 1 for a correct prediction, otherwise 0"
        shape = self.confidence.shape
        check_shape("correct", self.correct, shape, way_out)
        wrong = ~np.isin(self.correct, (0, 1))
        refuse(wrong, "correct", "be 0 or 1", self.correct, way_out)
        _check_other_columns(self)

    def __len__(self) -> int:
        return len(self.confidence)

    @property
    def labels(self) -> NDArray[np.int64]:
        """1 for a correct prediction, otherwise 0."""
        return self.correct

    def probabilities(self) -> FloatArray:
        """Return the probabilities (N, 2) that the prediction is wrong and that it is correct."""
        return np.stack([1 - self.confidence, self.confidence], axis=1)

    def as_logits(self) -> FloatArray:
        """Return the logarithm of the probabilities (N, 2), where 0 counts as 1e-38."""
        return logs_of(self.probabilities())

    def fit_calibrator(self, scaler: Any) -> list[str]:
        """Fit a calibrator of two classes in place, and return the fit's warnings."""
        return self._of_two_classes().fit_calibrator(scaler)

    def check_labels_are_possible(self, purpose: str) -> None:
        """Raise if a wrong prediction has confidence 1, or a correct one 0."""
        self._of_two_classes().check_labels_are_possible(purpose)

    def _of_two_classes(self) -> Predictions:
        """The rows as predictions of "wrong" and "correct"."""
        probs = self.probabilities()
        return Predictions(
            self.correct, probs=probs, weights=self.weights, validate=False
        )

    def select(self, rows: NDArray[Any] | slice) -> TopLabels:
        """Return some rows."""
        return _selected(self, rows)


def _check_arrays(found: Any) -> None:
    """Raise if an array of predictions or top labels is of another type, such as a list."""
    for name in found.ARRAYS:
        values = getattr(found, name)
        is_array = isinstance(values, np.ndarray) or values is None
        got = type(values).__name__
        way_out = f"pass np.asarray({name})"
        check_type(is_array, f"{name} to be a numpy array", got, way_out)


def _check_other_columns(found: Any) -> None:
    """Raise unless there is one weight, one sentence and one value of each slice for every row."""
    n_rows = len(found)
    if found.weights is not None:
        check_row_weights("weights", found.weights, n_rows)
    if found.sentences is not None:
        way_out = "pass the sentence of each token"
        check_shape("sentences", found.sentences, (n_rows,), way_out)
    for name, values in found.by.items():
        requirement = f"by[{name!r}] to have a value for each of {n_rows:,} rows"
        way_out = "pass a value, or None, for each row"
        check(len(values) == n_rows, requirement, f"{len(values):,}", way_out)


def _selected(found: Any, rows: NDArray[Any] | slice) -> Any:
    """Some rows of predictions or top labels."""
    chosen = {}
    for name in found.ARRAYS:
        array = getattr(found, name)
        if array is not None:
            chosen[name] = array[rows]
    by = {
        name: np.array(values, object)[rows].tolist()
        for name, values in found.by.items()
    }
    return replace(found, **chosen, by=by, validate=False)


def check_logits(logits: NDArray[Any], *, sigmoid: bool = False) -> None:
    """Raise for logits (n, C) without probabilities; -inf is a class of probability 0,
    but not the largest logit.
    """
    largest = logits.max(axis=1)
    wrong = np.isnan(largest) if sigmoid else ~np.isfinite(largest)
    way_out = "remove the rows, or find the cause, such as a model that has diverged"
    requirement = "have a finite largest value in each row"
    refuse(wrong, "logits", requirement, largest, way_out)


def check_not_probabilities(logits: NDArray[Any]) -> None:
    """Raise for probabilities that are named logits, because their softmax would be nearly uniform."""
    # NaN is named later, with its row.
    within = logits.min() >= 0 and logits.max() <= 1
    if not within:
        return
    got = "values in [0, 1] whose rows all sum to 1"
    way_out = (
        "name them probs, or in a table prob_<class>; if they are logits, add 1 to all of them, which changes "
        "no probability"
    )
    check(
        np.abs(logits.sum(axis=1) - 1).max() > row_sum_tolerance(logits.shape[1]),
        "logits not to be probabilities",
        got,
        way_out,
    )


def logs_of(probs: NDArray[Any]) -> NDArray[Any]:
    """Return the logarithm of probabilities, where 0 counts as 1e-38."""
    return np.asarray(np.log(np.maximum(probs, _SMALLEST_PROBABILITY)))


def check_class_names(names: Sequence[str]) -> None:
    """Raise for class names that are blank, equal, or look the same."""
    check(
        all(name.strip() for name in names),
        "class_names to name their classes",
        "a blank one",
        "name the class",
    )
    twice = sorted(repr(name) for name, times in Counter(names).items() if times > 1)
    check(
        not twice,
        "class_names to differ",
        f"{few(twice)} twice",
        "name each class once",
    )
    alike = look_alikes(names, names)
    check(not alike, "class_names to differ visibly", alike, "rename one")


def check_same_classes(argument: str, found: Any, other: Any) -> None:
    """Raise if other rows have another number of classes or other class names."""
    names = (other.class_names, found.class_names)
    same = other.n_classes == found.n_classes and (
        None in names or names[0] == names[1]
    )
    got = f"{other.n_classes} ({few(other.names)}) for {found.n_classes} ({few(found.names)})"
    check(
        same,
        f"{argument} to have the same classes",
        got,
        "use predictions of one model",
    )


def rows_in_both(found: Any, tested: Any) -> int:
    """Return how many test rows are also among the rows to fit to,
    with the same labels and probabilities.

    If scores are rounded, different examples coincide, also within a set. Rows count as shared if
    more than twice as many coincide as by chance and 9 of 10 are distinct, or if the sets are
    equal.
    """
    keys = [_row_keys(predictions) for predictions in (found, tested)]
    (fitted, n_fitted), (reported, n_reported) = (
        np.unique(key, return_counts=True) for key in keys
    )
    _, i, j = np.intersect1d(fitted, reported, assume_unique=True, return_indices=True)
    shared = int(np.minimum(n_fitted[i], n_reported[j]).sum())
    if shared == len(found) == len(tested):
        return shared
    distinct = len(reported) >= 0.9 * len(tested)
    twins_of_fitted, twins_of_reported = (
        n[n > 1].sum() for n in (n_fitted, n_reported)
    )
    # Rows with twins within their own set tell how often different rows coincide, in
    # proportion to the size of the other set.
    by_chance = max(
        twins_of_fitted * len(tested) / len(found),
        twins_of_reported * len(found) / len(tested),
    )
    return shared if distinct and shared > 2 * by_chance else 0


def _row_keys(predictions: Any) -> NDArray[np.uint64]:
    """Hashes (N,) of each row's labels and log-probabilities to four decimals,
    equal for logits and probabilities.
    """
    logits = predictions.as_logits().astype(np.float64)
    log_probs = (
        log_expit(logits) if predictions.kind.sigmoid else log_softmax(logits, axis=1)
    )
    # Below this, a probability in float32 differs from that of the logits.
    digits = np.rint(np.maximum(log_probs, -15.0) * 1e4).astype(np.int64)
    labels = predictions.labels.reshape(len(predictions), -1).astype(np.int64)
    columns = np.concatenate([labels, digits], axis=1).view(np.uint64)
    # Multiplication by an odd number is invertible modulo 2^64: no bit of a column is
    # lost.
    factors = np.random.default_rng(0).integers(
        2**63, size=columns.shape[1], dtype=np.uint64
    ) | np.uint64(1)
    return columns @ factors


# ---- Names of files ----


def suffix_of(path: str) -> str | None:
    """Return the suffix of a name without .gz if it is one of `FORMATS`, otherwise None.

    >>> suffix_of("s3://bucket/part-0.CSV.gz"), suffix_of("me/model"), suffix_of("https://x/a.csv?y=z")
    ('.csv', None, '.csv')
    """
    name = without_query(path).lower().removesuffix(".gz")
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), None)


def without_query(path: str) -> str:
    """Return an address without its query, which is not a part of the file's name."""
    is_web = path.startswith(("http://", "https://"))
    return path.partition("?")[0] if is_web else path


def is_predictions(source: str) -> bool:
    """Whether a name (an address, a glob or a folder) stands for files of predictions rather than a
    model.

    >>> [is_predictions(name) for name in ("logits.csv.gz", "s3://bucket/run/*.parquet", "someone/some-bert-2.1")]
    [True, True, False]
    """
    # A name with a known ending is never looked up as a model on the Hub, even if the
    # file is missing.
    if os.path.isfile(source) or suffix_of(source) is not None or "://" in source:
        return True
    if os.path.isdir(source):
        if holds_model(source):
            return False
        # What a linked folder holds is seen when it is read.
        return any(
            is_read(path.relative_to(source)) or (path.is_symlink() and path.is_dir())
            for path in Path(source).rglob("*")
        )
    return bool(re.search(r"[*?\[]", source))


def holds_model(folder: str) -> bool:
    """Whether a folder has the config of a model or of an adapter."""
    names = ("config.json", "adapter_config.json")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


def is_read(path: PurePath) -> bool:
    """Whether a file in a folder of predictions is read."""
    return suffix_of(path.name) is not None and not any(
        part.startswith(("_", ".")) for part in path.parts
    )
