"""Calibration metrics of any number of rows, from sums that are updated, merged and sent."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, check, expected
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.possible import impossible_sums
from hf_calib.metrics.scores import nats_of, negative_logs, squared_distances
from hf_calib.metrics.sums import (
    BinSums,
    TopLabel,
    above_first_edge,
    add_to,
    binned_error,
    class_gaps,
    equal_shares,
    top_label_error,
    uniform_bins,
    winners,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hf_calib.metrics.on_device import LogitScores

# The last word is the version.
_FORMAT = "hf_calib CalibrationState 5"
# In bytes.
_LONGEST_HEADER = 100
# The most sums of bytes: 16 MiB, as of 46,000 classes in 15 bins.
_MOST_SENT = 2**21
# The most in memory: 1 GiB.
_MOST_SUMS = 2**27

# The most predictions of logits on a device, some 100 MB, before it is waited for.
_MOST_KEPT = 2**22

# With so few classes, most probabilities are above the first bin, and are not searched for.
_FEW_CLASSES = 3

# Confidences are counted in cells, within which 1 - p varies by a factor of 1 + 2^-12, because many
# are near 1. A cell has the first 12 of the 52 bits of the fraction, in each of the 24 halvings of
# 1 - p down to float32's resolution, and the first 8 in the 29 further halvings down to float64's.
_CELL_BITS = 12
_OCTAVES = 24
_DEEP_BITS = 8
_DEEP_OCTAVES = 29
_N_FINE = _OCTAVES << _CELL_BITS
N_CELLS = _N_FINE + (_DEEP_OCTAVES << _DEEP_BITS)
# The bits of a positive float64, read as an integer, rise with it. Without the bits of the fraction
# that do not count, they number the cells of 1 - p; these are the numbers of 1 and of 2^-24.
_FINE_SHIFT = 52 - _CELL_BITS
_DEEP_SHIFT = 52 - _DEEP_BITS
_FINE_TOP = 1023 << _CELL_BITS
_DEEP_TOP = (1023 - _OCTAVES) << _DEEP_BITS

_NO_ROWS = TopLabel(np.empty(0), np.empty(0))

# The metrics that an evaluation logs, by key, such as eval_ece, and eval_ece_calibrated with the
# calibrator.
LOGGED_METRICS = {
    "accuracy": "Accuracy",
    "nll": "Negative log-likelihood (nats)",
    "brier": "Brier score",
    "ece": "Expected calibration error (ECE)",
    "adaptive_ece": "Adaptive ECE",
    "classwise_ece": "Classwise ECE",
    "mce": "Maximum calibration error",
}


# Names of metrics that are turned around so that larger is better, such as neg_nll.
_TURNED_AROUND = {"neg", "negative", "negated", "minus", "inv", "inverse", "inverted"}


def is_turned_around(log_key: str) -> bool:
    """Whether a log key, such as eval_neg_nll, names a negative or inverse metric."""
    return not _TURNED_AROUND.isdisjoint(log_key.lower().split("_"))


def lower_is_better(log_key: str) -> bool:
    """Whether a log key, such as eval_ece_calibrated, names a metric that should be small."""
    name = "_" + log_key.removesuffix("_calibrated")
    errors = [f"_{key}" for key in LOGGED_METRICS if key != "accuracy"]
    return name.endswith(tuple(errors)) and not is_turned_around(name)


class RowScores(NamedTuple):
    """The confidence, correctness and proper scores of n rows, each (n,), float64."""

    confidence: FloatArray
    # 0.0 or 1.0
    correct: FloatArray
    nll: FloatArray
    brier: FloatArray
    weights: FloatArray | None = None

    def part(self, rows: slice) -> RowScores:
        """The same columns for some of the rows."""
        columns = [each[rows] for each in self if each is not None]
        return RowScores(*columns)

    def terms(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """The terms (n,) that the rows add to the bins and to the scores of `GroupSums`."""
        confidence, correct, nll, brier, _ = self
        ones = np.ones(len(confidence))
        gap = confidence - correct
        in_bin = [ones, confidence, confidence * confidence, correct]
        scores = [ones, nll, nll * nll, brier, brier * brier, gap, gap * gap]
        if self.weights is not None:
            in_bin = [self.weights * term for term in in_bin]
            scores = [self.weights * term for term in scores]
            scores[0] *= self.weights
        return [ones, *in_bin], scores


class ScoredChunk(NamedTuple):
    """A chunk of n rows with their probabilities and scores."""

    # The rows among all.
    place: slice
    # The probabilities (C, n).
    columns: NDArray[Any]
    labels: IntArray
    # The first most probable class of each row.
    predicted: IntArray
    rows: RowScores


def score_chunks(
    probs: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any] | None
) -> Iterator[ScoredChunk]:
    """Score checked rows in chunks; fastest if columns of probs are contiguous (order F)."""
    for part in checks.row_chunks(len(probs), max(4, probs.shape[1])):
        columns = np.ascontiguousarray(probs[part].T)
        confidence, predicted = winners(columns.T)
        own = labels[part].astype(np.intp)
        correct = (predicted == own).astype(np.float64)
        nll = negative_logs(columns.T, own)
        brier = squared_distances(columns.T, own)
        mass = None if weights is None else weights[part].astype(np.float64)
        rows = RowScores(confidence, correct, nll, brier, mass)
        yield ScoredChunk(part, columns, own, predicted, rows)


def score_top_labels(
    confidence: FloatArray, correct: NDArray[Any], weights: FloatArray | None
) -> RowScores:
    """Score rows of which only the top label is known: as two classes, "correct" and "wrong"."""
    right = correct.astype(np.float64)
    chance = np.where(right > 0, confidence, 1 - confidence)
    brier = 2 * (1 - chance) ** 2
    return RowScores(confidence, right, nats_of(chance), brier, weights)


def add_class_bins(class_bins: FloatArray, chunk: ScoredChunk) -> None:
    """Add a chunk to the sums (3, C, M) of `BinSums` in bins of each class's probability."""
    _, n_classes, n_bins = class_bins.shape
    columns = chunk.columns
    weights = chunk.rows.weights
    if weights is None:
        weights = np.ones(len(chunk.labels))
    above, slots = _slots_above(columns, n_bins)
    terms = (np.tile(weights, (n_classes, 1)), weights * columns)
    for sums, term in zip(class_bins[:2], terms, strict=True):
        flat = term.reshape(-1)
        np.add.at(sums.reshape(-1), slots, flat[above])
        # All others are in the first bin.
        flat[above] = 0
        sums[:, 0] += term.sum(axis=1)
    of_label = columns[chunk.labels, np.arange(len(weights))]
    slots = chunk.labels * n_bins + uniform_bins(of_label, n_bins)
    add_to(class_bins[2:], slots, [weights])


def _slots_above(columns: NDArray[Any], n_bins: int) -> tuple[Any, IntArray]:
    """The places of the probabilities (C, n) that may be above their first bin, and their slots."""
    n_classes, n_rows = columns.shape
    flat = columns.reshape(-1)
    if n_classes <= _FEW_CLASSES:
        first_slots = np.arange(n_classes) * n_bins
        return slice(None), np.repeat(first_slots, n_rows) + uniform_bins(flat, n_bins)
    above, bins = above_first_edge(flat, n_bins)
    return above, above // n_rows * n_bins + bins


class GroupSums(NamedTuple):
    """Sums of G groups of rows for the metrics of the top label and the proper scores."""

    # (5, G, M): rows, weights, confidences, their squares, correct rows.
    bins: FloatArray
    # (7, G): squared weights; then NLL, Brier score and confidence minus correct, each with
    # squares.
    scores: FloatArray

    @classmethod
    def empty(cls, n_groups: int, n_bins: int) -> GroupSums:
        """The sums of groups without rows."""
        return cls(np.zeros((5, n_groups, n_bins)), np.zeros((7, n_groups)))

    def add(self, rows: RowScores, groups: IntArray) -> None:
        """Add a chunk of n rows, each to its group (n,)."""
        n_bins = self.bins.shape[2]
        slots = groups * n_bins + uniform_bins(rows.confidence, n_bins)
        in_bin, scores = rows.terms()
        add_to(self.bins, slots, in_bin)
        add_to(self.scores, groups, scores)

    def n_rows(self) -> IntArray:
        """The numbers of rows (G,)."""
        return self.bins[0].sum(axis=1).astype(np.intp)

    def bin_sums(self) -> BinSums:
        """The sums (G, M) of the bins."""
        return BinSums(*self.bins[[1, 2, 4]])

    def effective_rows(self) -> FloatArray:
        """The numbers of rows (G,) or, with weights, the effective sample sizes (Kish 1965)."""
        mass = self.bins[1].sum(axis=1)
        return _quotient(mass**2, self.scores[0], 0.0)

    def mean(self, name: str) -> tuple[FloatArray, FloatArray]:
        """The mean (G,) of "nll", "brier", "gap" or "accuracy", and its standard error."""
        mass = self.bins[1].sum(axis=1)
        if name == "accuracy":
            # The square of 0 or 1 is the same.
            first = self.bins[4].sum(axis=1)
            second = first
        else:
            place = {"nll": 1, "brier": 3, "gap": 5}[name]
            first, second = self.scores[place : place + 2]
        mean = _quotient(first, mass, np.nan)
        variance = np.maximum(_quotient(second, mass, np.nan) - mean**2, 0)
        return mean, np.sqrt(variance / np.maximum(self.effective_rows() - 1, 1))


def _quotient(sums: FloatArray, divisors: FloatArray, otherwise: float) -> FloatArray:
    """The sums (G,) by the divisors (G,), of which some may be 0."""
    found = np.full_like(sums, otherwise)
    return np.divide(sums, divisors, out=found, where=divisors > 0)


def cells_of(confidence: FloatArray) -> IntArray:
    """The cell, 0 to `N_CELLS` - 1, of each confidence (n,); cells rise with confidence."""
    least = 2.0 ** -(_OCTAVES + _DEEP_OCTAVES)
    bits = np.clip(1.0 - confidence, least, 1 - 2.0**-53).view(np.int64)
    cells = _FINE_TOP - 1 - (bits >> _FINE_SHIFT)
    deep = cells >= _N_FINE
    if deep.any():
        cells[deep] = _N_FINE + _DEEP_TOP - 1 - (bits[deep] >> _DEEP_SHIFT)
    return cells


def _cell_edges() -> FloatArray:
    """The edges (N_CELLS + 1,) of the confidences of the cells; the last cell ends at 1."""
    fine = (_FINE_TOP - np.arange(_N_FINE)) << _FINE_SHIFT
    deep = (_DEEP_TOP - np.arange(N_CELLS - _N_FINE)) << _DEEP_SHIFT
    return np.append(1 - np.concatenate([fine, deep]).view(np.float64), 1)


def _sum_shapes(
    n_classes: int, n_bins: int, *, by_class: bool
) -> dict[str, tuple[int, ...]]:
    """The shapes of the sums of a state, except for its cells, with or without classes."""
    # As in `GroupSums`, of all rows.
    shapes: dict[str, tuple[int, ...]] = {"bins": (5, 1, n_bins), "scores": (7, 1)}
    if by_class:
        # Rows, probabilities and rows of the class in bins of each class's probability.
        shapes["class_bins"] = (3, n_classes, n_bins)
    return shapes


def _check_size(n_classes: Any, n_bins: Any, by_class: Any, most: int) -> None:
    """Raise for arguments of a state that are out of range, or need more sums than these."""
    c = checks.check_integer("n_classes", n_classes, 1, "pass the columns of probs")
    m = checks.check_n_bins(n_bins)
    checks.check_flag("by_class", by_class)
    shapes = _sum_shapes(c, m, by_class=by_class)
    n_sums = sum(math.prod(shape) for shape in shapes.values())
    check(
        n_sums <= most,
        f"{c:,} classes and {m:,} bins to need at most {most:,} sums",
        f"{n_sums:,}",
        "pass by_class=False",
    )


class CalibrationState:
    r"""Calibration metrics from sums that can be merged, for rows in batches or processes.

    Use it if the rows do not fit in memory. It needs only numpy, so any engine can run it: make a
    state for each part, `merge` them, and `compute` the metrics, which equal those of the functions
    of `hf_calib.metrics` for all rows, up to rounding. `update_logits` adds tensors on any device;
    the sums stay there until they are read.

    Args:
        n_classes: number of classes C.
        by_class: whether to keep sums of each class, for the classwise ECE; pass False for a large
            vocabulary.

    Notes:
        A state has O(C M) sums, and counts of rows in 105,728 cells of the confidence p, within
        which $1 - p$ varies by a factor of at most $1 + 2^{-12}$, or $1 + 2^{-8}$ if it is below
        $2^{-24}$. Equal-mass bins are computed from these cells, and are close to those of the
        rows. The rows of `update_logits` have two numbers each until they are merged or sent, so
        their adaptive ECE is exact.

    >>> state = CalibrationState(n_classes=2)
    >>> state.update(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0]))
    >>> other = CalibrationState(n_classes=2)
    >>> other.update(np.array([[0.6, 0.4]]), np.array([0]))
    >>> found = CalibrationState.from_bytes(other.to_bytes()).merge(state).compute()
    >>> {name: round(found[name], 3) for name in ("accuracy", "nll", "brier", "ece")}
    {'accuracy': 0.667, 'nll': 0.742, 'brier': 0.54, 'ece': 0.433}
    """

    def __init__(
        self, *, n_classes: int, n_bins: int = 15, by_class: bool = True
    ) -> None:
        _check_size(n_classes, n_bins, by_class, _MOST_SUMS)
        self.n_classes = int(n_classes)
        self.n_bins = int(n_bins)
        self.by_class = bool(by_class)
        shapes = _sum_shapes(self.n_classes, self.n_bins, by_class=self.by_class)
        self._sums = {name: np.zeros(shape) for name, shape in shapes.items()}
        # Rows, confidences and correct rows.
        self._sums["cells"] = np.zeros((3, N_CELLS))
        # The numbers of rows of logits, of those that are not finite, of invalid indices, of
        # invalid 0/1 labels, and of invalid soft labels.
        self._counts = np.zeros(5)
        self._on_device: LogitScores | None = None
        # The rows of logits that have been read.
        self._rows = _NO_ROWS

    @property
    def sums(self) -> dict[str, FloatArray]:
        """The sums by name; this waits for the device of logits."""
        self._read_device()
        return self._sums

    def _read_device(self) -> None:
        """Add the scores of logits, if there are any."""
        if self._on_device is None:
            return
        columns, class_bins, counts = self._on_device.fetch()
        rows = RowScores(*columns)
        self._on_device = None
        self._counts += counts
        if class_bins is not None:
            self._sums["class_bins"] += class_bins
        for part in checks.row_chunks(len(rows.confidence)):
            self._add_rows(rows.part(part))
        self._rows = TopLabel(*np.hstack([self._rows, rows[:2]]))

    @property
    def top_label_rows(self) -> TopLabel:
        """The confidences (N,) of `update_logits` and their correctness (N,): 0, 1 or a share."""
        self._read_device()
        return self._rows

    def update(
        self, probs: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
    ) -> None:
        """Add rows with labels (N,), or none if one is invalid; fast if columns are contiguous."""
        rows = checks.as_array("probs", probs)
        targets = checks.as_array("labels", labels)
        own = None if weights is None else checks.as_floats("weights", weights)
        checks.check_rows(rows, targets, own, self.n_classes)
        self._read_device()
        for chunk in score_chunks(rows, targets, own):
            self._add_rows(chunk.rows)
            if self.by_class:
                add_class_bins(self._sums["class_bins"], chunk)

    def update_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        multi_label: bool = False,
        soft_labels: bool = False,
    ) -> None:
        """Add a batch of tensors; the NLL is exact even if a probability underflows.

        Values are checked when the metrics are read, because a check here would wait for the
        device.

        Args:
            logits: (..., C), any float dtype.
            labels: (...) int in [0, C), or with multi_label (..., C) of 0 and 1; -100 is ignored.
                With soft_labels (..., C) float, shares that sum to 1, or -100 for every class.
            multi_label: if False, logits are one softmax per row. If True, each logit is a sigmoid
                with a label of 0 or 1 and counts as one binary prediction, with confidence max(p, 1
                - p) and Brier score (p - y)^2.
            soft_labels: if True, all metrics are those against the shares q, divided by their sum:
                the NLL is -sum q log p, and a prediction is correct by the share of its class.

        >>> import torch
        >>> state = CalibrationState(n_classes=2)
        >>> state.update_logits(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> [round(state.compute()[name], 3) for name in ("accuracy", "nll", "brier", "ece")]
        [0.5, 0.72, 0.549, 0.425]
        """
        from hf_calib.metrics.on_device import LogitScores, check_batch

        checks.check_flag("multi_label", multi_label)
        checks.check_flag("soft_labels", soft_labels)
        way_out = "soft labels are of one softmax"
        both = multi_label and soft_labels
        check(not both, "one of multi_label and soft_labels", "both", way_out)
        kind = {"multi_label": multi_label, "soft_labels": soft_labels}
        check_batch(logits, labels, n_classes=self.n_classes, **kind)
        if self._on_device is None:
            sizes = {"n_classes": self.n_classes, "n_bins": self.n_bins}
            self._on_device = LogitScores(
                **sizes, by_class=self.by_class, device=logits.device
            )
        self._on_device.add(logits, labels, **kind)
        if self._on_device.n_kept > _MOST_KEPT:
            self._read_device()

    def all_reduce(self) -> None:
        """Share the rows of all processes of torch.distributed; each calls it once, at its end."""
        from hf_calib.metrics import on_device

        if on_device.n_processes() == 1:
            return
        own = np.array([[self.n_classes], [self.n_bins], [self.by_class]], dtype=int)
        sizes = [tuple(each[:, 0].tolist()) for each in on_device.gathered(own)]
        for theirs in sizes:
            check(
                theirs == max(sizes),
                f"every process to have the n_classes, n_bins and by_class {max(sizes)}",
                theirs,
                "evaluate the same model on all",
            )
        for sums in (*self.sums.values(), self._counts):
            sums[...] = on_device.summed(sums)
        parts = on_device.gathered(np.stack(self.top_label_rows))
        self._rows = TopLabel(*np.concatenate(parts, axis=1))

    def _add_rows(self, rows: RowScores) -> None:
        """Add scored rows, except to the sums of classes."""
        sums = self._sums
        in_bin, scores = rows.terms()
        ones, mass, stated, _, right = in_bin
        add_to(sums["cells"], cells_of(rows.confidence), [mass, stated, right])
        sums["scores"][:, 0] += [ones @ term for term in scores]
        add_to(sums["bins"], uniform_bins(rows.confidence, self.n_bins), in_bin)

    def merge(self, other: CalibrationState) -> CalibrationState:
        """Add the rows of another state and return this one, for `functools.reduce`."""
        is_state = isinstance(other, CalibrationState)
        requirement = "other to be a CalibrationState"
        way_out = "pass what was made by CalibrationState(n_classes=...)"
        checks.check_type(is_state, requirement, type(other).__name__, way_out)
        for name in ("n_classes", "n_bins", "by_class"):
            mine = getattr(self, name)
            theirs = getattr(other, name)
            requirement = f"the other state's {name} to be {mine}"
            way_out = "merge states that were made alike"
            check(mine == theirs, requirement, theirs, way_out)
        for state in (self, other):
            state._check_logits()
        self._rows = _NO_ROWS
        for name, sums in other.sums.items():
            self.sums[name] += sums
        self._counts += other._counts
        return self

    def compute(self) -> dict[str, float]:
        """Return the `LOGGED_METRICS`: nll in nats, brier in [0, 2], the others fractions."""
        top = self.top_label
        bins = self.bins
        n = bins.counts.sum()
        found = {name: top.mean(name)[0][0] for name in ("accuracy", "nll", "brier")}
        found["ece"] = binned_error(bins, n)
        if len(self.top_label_rows.confidence) == self.n_rows:
            options = {"n_bins": self.n_bins, "binning": "quantile"}
            found["adaptive_ece"] = top_label_error(self.top_label_rows, **options)
        else:
            ranked = self.equal_mass_bins()
            found["adaptive_ece"] = binned_error(ranked, ranked.counts.sum())
        if self.by_class:
            found["classwise_ece"] = np.nanmean(class_gaps(self.class_bins()))
        found["mce"] = binned_error(bins, n, "max")
        return {name: float(value) for name, value in found.items()}

    @property
    def top_label(self) -> GroupSums:
        """Return the sums of all rows as one group: by confidence bin, and of the proper scores."""
        self._check_has_rows()
        return GroupSums(self.sums["bins"], self.sums["scores"])

    def _check_has_rows(self) -> None:
        """Raise unless there are rows of a weight above 0, all of which are valid."""
        self._check_logits()
        got = "only rows of weight 0" if self.n_rows else "none"
        way_out = "update it with predictions first; labels of -100 do not count"
        has_rows = bool(self.sums["bins"][1].any())
        check(has_rows, "the state to have rows", got, way_out)

    def _check_logits(self) -> None:
        """Raise if logits or labels that were added as tensors are invalid."""
        self._read_device()
        n_rows, not_finite, *invalid = self._counts.astype(int)
        if not_finite == 0 and not any(invalid):
            return
        allowed = (
            f"lie in 0..{self.n_classes - 1} or be -100",
            "be 0, 1 or -100",
            "be shares of at least 0 that sum to 1, or -100 for every class",
        )
        for n, requirement in zip(invalid, allowed, strict=True):
            check(
                n == 0,
                f"labels to {requirement}",
                f"{n} that do not",
                "check that the labels and the model's head mean the same classes",
            )
        check(
            not_finite == 0,
            "probabilities to be finite",
            f"NaN in {not_finite} of {n_rows} rows",
            "look for overflow in the model's logits",
        )

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return int(self.sums["bins"][0].sum())

    @property
    def weighted(self) -> bool:
        """Whether any weight is not 1, in which case the sum of (w - 1)^2 is not 0."""
        rows, mass = self.sums["bins"][:2].sum(axis=(1, 2))
        return bool(rows != mass or mass != self.sums["scores"][0, 0])

    @property
    def bins(self) -> BinSums:
        """The sums (M,) of the equal-width bins."""
        return BinSums(*(sums[0] for sums in self.top_label.bin_sums()))

    def equal_mass_bins(self) -> BinSums:
        """Return the sums (M,) of bins with equal shares of the rows; edges are between cells."""
        self._check_has_rows()
        return equal_shares(self.sums["cells"], self.n_bins, weighted=self.weighted)

    def class_bins(self) -> BinSums:
        """Return the sums (C, M) in bins of each class's probability."""
        check(
            self.by_class,
            "classes to be few enough for classwise sums",
            f"{self.n_classes:,} classes",
            "use metrics of the predicted class only",
        )
        self._check_has_rows()
        return BinSums(*self.sums["class_bins"])

    def to_bytes(self) -> bytes:
        """Return the state as a line of JSON and numbers, of which reading executes no code."""
        _check_size(self.n_classes, self.n_bins, self.by_class, _MOST_SENT)
        header = json.dumps([_FORMAT, self.n_classes, self.n_bins, self.by_class])
        self._check_logits()
        numbers = np.concatenate([sums.ravel() for sums in self.sums.values()])
        return (
            header.encode() + b"\n" + zlib.compress(numbers.astype("<f8").tobytes(), 1)
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> CalibrationState:
        """Read a state that `to_bytes` wrote; others raise, and need no more memory than it."""
        are_bytes = isinstance(data, bytes | bytearray | memoryview)
        way_out = "pass what to_bytes returned"
        checks.check_type(are_bytes, "data to be bytes", type(data).__name__, way_out)
        try:
            return cls._unpacked(bytes(data))
        except (ValueError, TypeError, zlib.error) as error:
            got = f"{len(data):,} bytes that are none ({error})"
            requirement = "be bytes that to_bytes wrote"
            raise InputValueError(
                expected("the state", requirement, got, "send them unchanged")
            ) from error

    @classmethod
    def _unpacked(cls, data: bytes) -> CalibrationState:
        header, _, packed = data.partition(b"\n")
        if len(header) > _LONGEST_HEADER:
            raise ValueError("no header")
        written, n_classes, n_bins, by_class = json.loads(header)
        way_out = "read it with the version that wrote it"
        check(
            written == _FORMAT, f"the format to be {_FORMAT!r}", repr(written), way_out
        )
        # The size in the header is checked before anything is allocated or unpacked.
        _check_size(n_classes, n_bins, by_class, _MOST_SENT)
        state = cls(n_classes=n_classes, n_bins=n_bins, by_class=by_class)
        n_sums = sum(sums.size for sums in state.sums.values())
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(packed, 8 * n_sums + 1)
        is_whole = unpacking.eof and not unpacking.unused_data
        if len(content) != 8 * n_sums or not is_whole:
            raise ValueError(f"not {n_sums:,} numbers")
        numbers = np.frombuffer(content, "<f8")
        for sums in state.sums.values():
            sums.flat[:] = numbers[: sums.size]
            numbers = numbers[sums.size :]
        wrong = impossible_sums(state.sums, _cell_edges())
        if wrong is not None:
            raise ValueError(f"no rows have these {wrong}")
        return state
