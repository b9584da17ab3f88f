"""Calibration metrics of any number of rows: float64 sums that are updated, merged, sent, and read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import digamma

from hf_calib._errors import InputTypeError, InputValueError, check, expected
from hf_calib.metrics.checks import (
    RANGE_TOLERANCE,
    ROW_SUM_TOLERANCE,
    FloatArray,
    IntArray,
    as_array,
    check_flag,
    check_integer,
    check_n_bins,
    row_chunks,
)
from hf_calib.metrics.scores import SMALLEST_PROBABILITY
from hf_calib.metrics.sums import BinSums, binned_error, class_gaps, uniform_bins, winners

if TYPE_CHECKING:
    from pyarrow import RecordBatch

MOST_SLICES = 1_000
_FIRST_LINE = b"hf_calib CalibrationState 2"  # the last word is the version
_LONGEST_HEADER = 256  # bytes
_MOST_SLOTS = 2**22  # of C M, each with 8 numbers: 270 MB, which is a vocabulary of 260,000 in 15 bins

# Confidences are counted in cells, within which 1 - p varies by a factor of 1 + 2^-12, as they bunch near 1.
_CELL_BITS = 12  # of the 52 of a fraction
_OCTAVES = 24  # halvings of 1 - p, down to the resolution of float32 near 1
N_CELLS = _OCTAVES << _CELL_BITS


# Rows


class RowError(InputValueError):
    """A row, numbered from 0 on in what was given, that is no distribution, or has no valid label or weight."""

    def __init__(self, row: int, argument: str, requirement: str, got: str, way_out: str) -> None:
        super().__init__(expected(f"{argument} of row {row:,}", requirement, got, way_out))
        self.row = row
        self.told = (argument, requirement, got, way_out)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.row, *self.told)

    def at(self, place: str, first: int) -> InputValueError:
        """The same error, of the row of a file whose first row this chunk's is."""
        argument, requirement, got, way_out = self.told
        argument = f"{argument} of row {first + self.row:,} in {place}"
        return InputValueError(expected(argument, requirement, got, way_out))


def check_rows(
    probs: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any] | None, n_classes: int
) -> None:
    """Raise unless probs (N, C) are distributions, with labels and weights (N,): a `RowError` names one that is not."""
    check(
        probs.ndim == 2,
        f"probs to have shape (N, {n_classes})",
        f"shape {probs.shape}",
        "pass one row an example",
    )
    masses = np.broadcast_to(1.0, len(probs)) if weights is None else weights
    for name, values, kinds, requirement, way_out in (
        ("probs", probs, "f", "be a float array", "pass probs.astype(float)"),
        ("labels", labels, "iu", "be integers", "pass class indices, labels.astype(int)"),
        ("weights", masses, "biuf", "hold real numbers", "pass an array of floats"),
    ):
        if values.dtype.kind not in kinds:
            raise InputTypeError(expected(name, requirement, f"dtype {values.dtype}", way_out))
        fits = values.shape == ((len(probs), n_classes) if name == "probs" else (len(probs),))
        shape = f"(N, {n_classes})" if name == "probs" else f"({len(probs)},)"
        way_out = "use one state for each set of classes, and one label for each row"
        check(fits, f"{name} to have shape {shape}", f"shape {values.shape}", way_out)
    for part in row_chunks(*probs.shape):
        _check_chunk(probs[part].T, labels[part], masses[part], part.start)


def _check_chunk(columns: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any], first: int) -> None:
    n_classes = len(columns)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = columns.sum(axis=0, dtype=np.promote_types(columns.dtype, np.float32))
        off = np.abs(sums - 1)
    low, high = columns.min(axis=0), columns.max(axis=0)  # both NaN where a value is
    # NaN makes every comparison false.
    fit = (
        off.max() <= ROW_SUM_TOLERANCE and low.min() >= -RANGE_TOLERANCE and high.max() <= 1 + RANGE_TOLERANCE
    )
    fit = fit and labels.min() >= 0 and labels.max() < n_classes
    if fit and weights.min() >= 0 and weights.max() < np.inf:
        return
    most = np.where(np.isfinite(high) & (high <= 1 + RANGE_TOLERANCE), low, high)
    logits = "if these are logits, say so: columns logit_<class>, or the softmax of them"
    several = "pass softmax probabilities; several independent labels are not one distribution"
    others = "check that labels and columns of probs mean the same classes"
    for argument, requirement, values, fits, way_out in (
        ("the scores", "be finite", most, np.isfinite(most), "look for overflow in the model's logits"),
        ("the probabilities", "lie in [0, 1]", most, np.abs(most - 0.5) <= 0.5 + RANGE_TOLERANCE, logits),
        ("the probabilities", "sum to 1", sums, off <= ROW_SUM_TOLERANCE, several),
        ("the label", f"lie in 0..{n_classes - 1}", labels, (labels >= 0) & (labels < n_classes), others),
        (
            "the weight",
            "be a finite number of at least 0",
            weights,
            (weights >= 0) & (weights < np.inf),
            "give each row a weight; 0 leaves it out",
        ),
    ):
        if not fits.all():
            row = int(fits.argmin())
            if argument == "the label" and labels[row] == -100:
                way_out = "drop ignored rows first: keep = labels != -100"
            got = f"{values[row]:.6g}" if values.dtype.kind == "f" else f"{values[row]}"
            raise RowError(first + row, argument, requirement, got, way_out)


class RowScores(NamedTuple):
    """A chunk of n rows, scored: each field but the first and the last is (n,)."""

    columns: NDArray[Any]  # (C, n), the probabilities
    labels: IntArray
    weights: FloatArray | None
    predicted: IntArray  # the first most probable class
    confidence: FloatArray
    correct: FloatArray  # 1 where the prediction is the label
    nll: FloatArray
    brier: FloatArray
    squares: FloatArray  # (C,), of the probabilities, times weights, summed


def score_chunks(
    probs: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any] | None
) -> Iterator[tuple[slice, RowScores]]:
    """Score rows that were checked, chunk by chunk; fastest where columns of probs lie in one piece (order F)."""
    for part in row_chunks(*probs.shape):
        columns = np.ascontiguousarray(probs[part].T)
        own = labels[part].astype(np.intp)
        mass = None if weights is None else weights[part].astype(np.float64)
        confidence, predicted = winners(columns.T)
        squares = np.square(columns, dtype=np.float64)
        at_label = columns[own, np.arange(len(own))].astype(np.float64)
        scores = RowScores(
            columns,
            own,
            mass,
            predicted=predicted.astype(np.intp),
            confidence=confidence,
            correct=(predicted == own).astype(np.float64),
            nll=-np.log(np.maximum(at_label, SMALLEST_PROBABILITY)),
            brier=np.maximum(squares.sum(axis=0) - 2 * at_label + 1, 0),
            squares=squares.sum(axis=1) if mass is None else squares @ mass,
        )
        yield part, scores


# Groups of rows


def _add(sums: FloatArray, slots: IntArray, values: FloatArray | None, mass: FloatArray | None) -> None:
    """Add values (n,) times mass (n,) to their slots; None counts."""
    weights = values if mass is None else mass if values is None else values * mass
    sums += np.bincount(slots, weights, sums.size).reshape(sums.shape)


def sum_shapes(n_classes: int, n_bins: int, *, by_class: bool) -> dict[str, tuple[int, ...]]:
    """Of the sums of a state: rows are grouped by the predicted class, or all are one group and classes have none."""
    n_groups = n_classes if by_class else 1
    requirement, got = f"n_classes * n_bins to be at most {_MOST_SLOTS:,}", f"{n_groups * n_bins:,}"
    check(n_groups * n_bins <= _MOST_SLOTS, requirement, got, "use fewer bins")
    shapes: dict[str, tuple[int, ...]] = {"bins": (5, n_groups, n_bins), "scores": (7, n_groups)}
    if by_class:
        # In bins of each class's probability: rows, probabilities, rows of the class. Then squares of probabilities.
        shapes |= {"class_bins": (3, n_classes, n_bins), "class_squares": (n_classes,)}
    return shapes


class GroupSums(NamedTuple):
    """What the metrics of the top label and the proper scores need of G groups of rows."""

    bins: FloatArray  # (5, G, M): rows, weights, confidences, their squares, and right ones in bins of confidence
    scores: FloatArray  # (7, G): squares of weights; then NLL, Brier score, and confidence minus correct, with squares

    @classmethod
    def empty(cls, n_groups: int, n_bins: int) -> GroupSums:
        """Of no rows."""
        return cls(np.zeros((5, n_groups, n_bins)), np.zeros((7, n_groups)))

    def add(self, rows: RowScores, groups: IntArray) -> None:
        """Add a chunk of n rows of these groups (n,)."""
        mass, confidence = rows.weights, rows.confidence
        n_bins = self.bins.shape[2]
        slots = groups * n_bins + uniform_bins(confidence, n_bins)
        _add(self.bins[0], slots, None, None)
        for sums, values in zip(self.bins[1:], (None, confidence, confidence**2, rows.correct), strict=True):
            _add(sums, slots, values, mass)
        _add(self.scores[0], groups, mass, mass)
        for place, values in enumerate((rows.nll, rows.brier, confidence - rows.correct)):
            _add(self.scores[1 + 2 * place], groups, values, mass)
            _add(self.scores[2 + 2 * place], groups, values**2, mass)

    def merge(self, other: GroupSums, groups: IntArray) -> None:
        """Add other rows, whose groups are these here, each once."""
        self.bins[:, groups] += other.bins
        self.scores[:, groups] += other.scores

    def total(self) -> GroupSums:
        """All rows as one group."""
        return GroupSums(*(sums.sum(axis=1, keepdims=True) for sums in self))

    def n_rows(self) -> IntArray:
        """Rows (G,)."""
        return self.bins[0].sum(axis=1).astype(np.intp)

    def bin_sums(self) -> BinSums:
        """The sums (G, M) of the bins."""
        return BinSums(*self.bins[[1, 2, 4]])

    def effective_rows(self) -> FloatArray:
        """Rows (G,); of rows with weights as many as would tell as much (Kish 1965)."""
        mass = self.bins[1].sum(axis=1)
        return np.divide(mass**2, self.scores[0], out=np.zeros_like(mass), where=mass > 0)

    def mean(self, name: str) -> tuple[FloatArray, FloatArray]:
        """The mean (G,) of "nll", "brier", "gap" (confidence minus correct) or "accuracy", and its standard error."""
        place = {"nll": 1, "brier": 3, "gap": 5, "accuracy": None}[name]
        right = self.bins[4].sum(axis=1)
        sums = np.stack([right, right]) if place is None else self.scores[place : place + 2]
        mass = self.bins[1].sum(axis=1)
        mean, square = np.divide(sums, mass, out=np.full_like(sums, np.nan), where=mass > 0)
        variance = np.maximum(square - mean**2, 0)
        return mean, np.sqrt(variance / np.maximum(self.effective_rows() - 1, 1))


class SliceSums:
    """The sums of the groups of rows that a column names, such as countries; a new name makes a new group."""

    def __init__(
        self, column: str, n_bins: int, names: Sequence[str] = (), groups: GroupSums | None = None
    ) -> None:
        self.column, self.n_bins, self.names = column, n_bins, list(names)
        self.groups = groups or GroupSums.empty(0, n_bins)

    def add(self, rows: RowScores, codes: IntArray, names: Sequence[str]) -> None:
        """Add a chunk of n rows, whose groups are names[codes]; raise where there are more than 1,000 groups."""
        places = self._places(names)
        self.groups.add(rows, places[codes])

    def merge(self, other: SliceSums) -> None:
        """Add the rows of others."""
        places = self._places(other.names)
        self.groups.merge(other.groups, places)

    def _places(self, names: Sequence[str]) -> IntArray:
        """The numbers of groups by their names."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys([*self.names, *names]))}
        if len(numbers) > len(self.names):
            requirement = f"column {self.column!r} to have at most {MOST_SLICES:,} different values"
            got, way_out = f"more ({names[0]!r}, ...)", "group them in a column of their own"
            check(len(numbers) <= MOST_SLICES, requirement, got, way_out)
            fewer, self.groups = self.groups, GroupSums.empty(len(numbers), self.n_bins)
            self.groups.merge(fewer, np.arange(len(self.names)))
            self.names = list(numbers)
        return np.array([numbers[name] for name in names], dtype=np.intp)


# The state


def cells_of(confidence: FloatArray) -> IntArray:
    """The cell, 0 to `N_CELLS` - 1, of each confidence (n,), float64; they go up with the confidence.

    >>> cells_of(np.array([0.0, 0.5, 0.75, 1.0])).tolist()
    [0, 4095, 8191, 98303]
    """
    rest = np.maximum(1.0 - confidence, 2.0 ** -(_OCTAVES + 1))
    leading = rest.view(np.int64) >> (52 - _CELL_BITS)
    return np.clip((1023 << _CELL_BITS) - 1 - leading, 0, N_CELLS - 1)


class CalibrationState:
    r"""Calibration metrics from sums that merge: for rows in batches, shards, processes or an engine's workers.

    For more rows than memory holds, in plain numpy, so that any engine can run it: a state for each part, `merge`, and
    `compute` gives what the functions of `hf_calib.metrics` give for all rows at once. For logits on a GPU during an
    evaluation there is `hf_calib.metrics.streaming`, which ends in such a state.

    Args:
        n_classes: C, at least 2.
        n_bins: M, at least 1.

    Notes:
        Sums are float64: another split of the rows or another order of merging changes a metric by rounding, less than
        1e-12 of it. A state has O(C M) + 294,912 numbers, whatever the number of rows.

        Equal-mass bins, quantiles and the area under the risk-coverage curve need confidences in order. They are summed
        in 98,304 cells, within each of which $1 - p$ varies by a factor of at most $1 + 2^{-12}$; rows of one cell are
        not told apart, so that these are near those of the rows, and not equal to them.

    >>> state = CalibrationState(n_classes=2)
    >>> state.update(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0]))
    >>> other = CalibrationState(n_classes=2)
    >>> other.update(np.array([[0.6, 0.4]]), np.array([0]))
    >>> found = CalibrationState.from_bytes(other.to_bytes()).merge(state).compute()
    >>> {name: round(found[name], 3) for name in ("accuracy", "nll", "brier", "ece")}
    {'accuracy': 0.667, 'nll': 0.742, 'brier': 0.54, 'ece': 0.433}
    """

    def __init__(self, *, n_classes: int, n_bins: int = 15) -> None:
        n_classes = check_integer("n_classes", n_classes, 2, "for one sigmoid output p pass [1 - p, p]")
        self._make_room(n_classes, check_n_bins(n_bins), by_class=True)

    @classmethod
    def sized(cls, n_classes: int, n_bins: int, *, by_class: bool) -> CalibrationState:
        """Of any number of classes, with sums of their own or without."""
        state = cls.__new__(cls)
        state._make_room(n_classes, n_bins, by_class=by_class)
        return state

    def update(self, probs: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Add rows; where one is wrong, the error names it, and no row of this call has been added.

        Args:
            probs: (N, C) float, rows that sum to 1; fastest as float32 or float64 columns in one piece each (order F).
            labels: (N,) int in [0, C).
            weights: (N,) of at least 0, or None; with weights for all batches or for none.
        """
        rows, targets = as_array("probs", probs), as_array("labels", labels)
        own = None if weights is None else as_array("weights", weights)
        check_rows(rows, targets, own, self.n_classes)
        for _, scores in score_chunks(rows, targets, own):
            self.add_scores(scores)

    def update_batch(
        self, batch: RecordBatch, *, probs: str | Sequence[str], labels: str, weights: str | None = None
    ) -> None:
        """Add the rows of an Arrow record batch or table.

        Args:
            batch: a `pyarrow.RecordBatch` or `pyarrow.Table`.
            probs: the column of lists of C probabilities, or the C columns of one each, in the order of the classes.
            labels: the column of class indices.
            weights: the column of weights, if there is one.

        >>> import pyarrow
        >>> batch = pyarrow.RecordBatch.from_pydict({"a": [0.9, 0.2], "b": [0.1, 0.8], "y": [0, 1]})
        >>> state = CalibrationState(n_classes=2)
        >>> state.update_batch(batch, probs=["a", "b"], labels="y")
        >>> state.compute()["accuracy"]
        1.0
        """
        asked = [probs] if isinstance(probs, str) else list(probs)
        columns = {name: _arrow_column(batch, name) for name in (*asked, labels, *filter(None, [weights]))}
        rows = columns[asked[0]] if isinstance(probs, str) else np.stack([columns[name] for name in asked]).T
        self.update(rows, columns[labels], None if weights is None else columns[weights])

    def add_scores(self, rows: RowScores) -> None:
        """Add a chunk of checked rows that others look at, too."""
        mass = rows.weights
        self.add_to_cells(rows.confidence, rows.correct, mass)
        self.groups.add(rows, rows.predicted)
        first_slots = np.arange(0, self.n_classes * self.n_bins, self.n_bins)[:, None]
        slots = uniform_bins(rows.columns, self.n_bins) + first_slots
        every_mass = None if mass is None else np.broadcast_to(mass, slots.shape).ravel()
        counts, probabilities, true = self.sums["class_bins"]
        _add(counts, slots.ravel(), None, every_mass)
        _add(probabilities, slots.ravel(), rows.columns.ravel(), every_mass)
        _add(true, slots[rows.labels, np.arange(len(rows.labels))], None, mass)
        self.sums["class_squares"] += rows.squares

    def add_to_cells(
        self, confidence: FloatArray, correct: FloatArray, mass: FloatArray | None = None
    ) -> None:
        """Add rows (n,) to what is read by confidence only, and note whether rows have weights."""
        self._set_weighted(mass is not None)
        cells = cells_of(confidence)
        for sums, values in zip(self.sums["cells"], (None, confidence, correct), strict=True):
            _add(sums, cells, values, mass)

    def merge(self, other: CalibrationState) -> CalibrationState:
        """Add the rows of another state to this one, which is returned, for `functools.reduce`."""
        for name in ("n_classes", "n_bins", "by_class"):
            mine, theirs = getattr(self, name), getattr(other, name)
            way_out = "merge states that were made alike"
            check(mine == theirs, f"the other state's {name} to be {mine}", theirs, way_out)
        if other._weighted is not None:
            self._set_weighted(other._weighted)
            for name, sums in other.sums.items():
                self.sums[name] += sums
        return self

    def compute(self) -> dict[str, float]:
        """All metrics of what was seen so far.

        Returns:
            The keys of `LOGGED_METRICS` in its order: accuracy, nll (nats), brier, ece, adaptive_ece, classwise_ece and
            mce (all but nll and brier are fractions).
        """
        top, bins = self.top_label, self.bins
        total = bins.counts.sum()
        found = {name: top.mean(name)[0][0] for name in ("accuracy", "nll", "brier")}
        found |= {"ece": binned_error(bins, total), "adaptive_ece": self.adaptive_ece()}
        if self.by_class:
            found["classwise_ece"] = np.nanmean(class_gaps(self.class_bins()))
        found["mce"] = binned_error(bins, total, "max")
        return {name: float(value) for name, value in found.items()}

    @property
    def n_rows(self) -> int:
        """Rows that were seen."""
        return int(self.groups.n_rows().sum())

    @property
    def weighted(self) -> bool:
        """Whether they have weights."""
        return bool(self._weighted)

    @property
    def top_label(self) -> GroupSums:
        """The sums by confidence bin, and of the proper scores, of one group."""
        self.check_has_rows()
        return self.groups.total()

    @property
    def bins(self) -> BinSums:
        """The sums (M,) of the equal-width bins."""
        return BinSums(*(sums[0] for sums in self.top_label.bin_sums()))

    def equal_mass_bins(self) -> BinSums:
        """The sums (M,) of bins that hold equal shares of the rows, cut between cells."""
        self.check_has_rows()
        below = np.append(0.0, np.cumsum(self.sums["cells"][0]))
        ranks = np.arange(1, self.n_bins) * below[-1] / self.n_bins
        if not self.weighted:
            # So many rows are not above the papers' edge, which is the confidence of the last of them.
            ranks = np.floor(ranks) + 1
        # The cell of an edge lies below it as a whole, since rows that tie with an edge do.
        cut = np.searchsorted(below[1:], np.minimum(ranks, below[-1])).clip(max=N_CELLS - 1)
        bins = np.searchsorted(cut + 1, np.arange(N_CELLS), side="right")
        return BinSums(*np.stack([np.bincount(bins, values, self.n_bins) for values in self.sums["cells"]]))

    def adaptive_ece(self) -> float:
        """The ECE of equal-mass bins that are cut between cells: of many rows, near that of bins cut between rows."""
        sums = self.equal_mass_bins()
        return float(binned_error(sums, sums.counts.sum()))

    def area_under_risk_coverage(self) -> float:
        """The AURC of rows without weights, with the errors of a cell evenly spread over its rows."""
        requirement = "area_under_risk_coverage to be asked of rows without weights"
        check(not self.weighted, requirement, "weights", "take it without weights")
        counts, wrong = self._from_the_top()
        rows, errors = np.cumsum(counts) - counts, np.cumsum(wrong) - wrong
        rate = wrong / counts
        area = wrong + (errors - rate * rows) * (digamma(rows + counts + 1) - digamma(rows + 1))
        return float(area.sum() / counts.sum())

    def risk_coverage(self) -> tuple[FloatArray, FloatArray]:
        """Up to 1,000 points of the curve: the share of rows that is kept, and the error rate among these."""
        kept, errors = np.cumsum(self._from_the_top(), axis=1)
        shown = np.unique(np.linspace(0, len(kept) - 1, min(1_000, len(kept))).astype(int))
        return kept[shown] / kept[-1], errors[shown] / kept[shown]

    def confidence_quantile(self, level: float) -> float:
        """The confidence below which a share of the rows lies: the mean of the cell where it is reached."""
        self.check_has_rows()
        counts, confidence, _ = self.sums["cells"][:, self.sums["cells"][0] > 0]
        up_to = np.cumsum(counts)
        cell = np.searchsorted(up_to, level * up_to[-1]).clip(max=len(counts) - 1)
        return float(confidence[cell] / counts[cell])

    def class_bins(self) -> BinSums:
        """The sums (C, M) of each class's probability, in bins of it."""
        self.check_has_rows()
        requirement, got = "the sums of classes to be asked of fewer", f"{self.n_classes:,} classes"
        check(self.by_class, requirement, got, "take what looks at the predicted class only")
        return BinSums(*self.sums["class_bins"])

    def classes(self) -> FloatArray:
        """Of each class (7, C): rows of it, its probabilities and their squares; then of the rows where it is predicted
        their mass, right ones, confidences and squares of these."""
        class_bins = self.class_bins()
        _, mass, confidence, squares, right = self.groups.bins.sum(axis=2)
        of_class = [
            class_bins.correct.sum(axis=1),
            class_bins.confidence.sum(axis=1),
            self.sums["class_squares"],
        ]
        return np.stack([*of_class, mass, right, confidence, squares])

    def to_bytes(self) -> bytes:
        """The state, to be sent or stored: a version, a line of JSON, and numbers, none of which runs when read."""
        header = {name: getattr(self, name) for name in ("n_classes", "n_bins", "by_class")}
        line = json.dumps(header | {"weighted": self._weighted}).encode()
        numbers = np.concatenate([sums.ravel() for sums in self.sums.values()])
        return b"\n".join([_FIRST_LINE, line, zlib.compress(numbers.astype("<f8").tobytes(), 1)])

    @classmethod
    def from_bytes(cls, data: bytes) -> CalibrationState:
        """The state that `to_bytes` wrote; of foreign bytes no more is unpacked than the sizes in them tell."""
        try:
            first, line, _ = bytes(data[:_LONGEST_HEADER]).split(b"\n", 2)
            if first != _FIRST_LINE:
                raise ValueError(
                    f"they start with {first[:40]!r}, where this version's do with {_FIRST_LINE!r}"
                )
            header = json.loads(line)
            check_flag("by_class", header["by_class"])
            check_flag("weighted", False if header["weighted"] is None else header["weighted"])
            n_classes = check_integer("n_classes", header["n_classes"], 1, "send it unchanged")
            state = cls.sized(n_classes, check_n_bins(header["n_bins"]), by_class=header["by_class"])
            sizes = [sums.size for sums in state.sums.values()]
            packed = data[len(first) + len(line) + 2 :]
            unpacking = zlib.decompressobj()
            unpacked = unpacking.decompress(packed, 8 * sum(sizes) + 1)
            if len(unpacked) != 8 * sum(sizes) or not unpacking.eof or unpacking.unused_data:
                raise ValueError("they hold more or fewer numbers")
            numbers = np.frombuffer(unpacked, "<f8")
            for sums, part in zip(state.sums.values(), np.split(numbers, np.cumsum(sizes)), strict=False):
                sums[...] = part.reshape(sums.shape)
            least = min(state.sums["bins"].min(), state.sums["cells"].min())
            if not np.isfinite(numbers).all() or least < 0:
                raise ValueError("they are not sums of rows")
            state._weighted = header["weighted"]
        except Exception as error:  # zlib, json, numpy and the checks each raise their own.
            got = f"{len(data):,} bytes that are none ({error})"
            way_out = "send them unchanged, and read them with the version that wrote them"
            raise InputValueError(
                expected("the state", "be bytes that to_bytes wrote", got, way_out)
            ) from error
        return state

    def check_has_rows(self) -> None:
        """Raise where there is nothing to compute from."""
        got = "only rows of weight 0" if self.n_rows else "none"
        way_out = "update it with predictions first"
        check(bool(self.groups.bins[1].any()), "the state to have rows", got, way_out)

    def _make_room(self, n_classes: int, n_bins: int, *, by_class: bool) -> None:
        self.n_classes, self.n_bins, self.by_class = n_classes, n_bins, by_class
        shapes = sum_shapes(n_classes, n_bins, by_class=by_class) | {"cells": (3, N_CELLS)}
        self.sums = {name: np.zeros(shape) for name, shape in shapes.items()}
        self.groups = GroupSums(self.sums["bins"], self.sums["scores"])
        self._weighted: bool | None = None  # until rows are seen

    def _set_weighted(self, weighted: bool) -> None:
        requirement = f"the rows to have {'weights' if self._weighted else 'no weights'}, as those before"
        way_out = "give weights with all rows or with none"
        check(self._weighted in (None, weighted), requirement, "weights" if weighted else "none", way_out)
        self._weighted = weighted

    def _from_the_top(self) -> FloatArray:
        """Rows and wrong ones (2, cells) of the cells that have any, the most confident first."""
        self.check_has_rows()
        counts, _, right = self.sums["cells"][:, ::-1]
        return np.stack([counts, counts - right])[:, counts > 0]


def _arrow_column(batch: Any, name: str) -> NDArray[Any]:
    """A column of a batch or table: (N,), or (N, C) of lists of one length."""
    import pyarrow

    names = batch.schema.names
    way_out = "name a column of the batch"
    check(name in names, f"the column to be one of {', '.join(names)}", repr(name), way_out)
    column = batch.column(name)
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    got = f"{column.null_count:,} missing values"
    check(not column.null_count, f"column {name!r} to have a value in every row", got, "fill them in")
    if not pyarrow.types.is_nested(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = column.flatten()
    if not len(column) or len(values) % len(column):
        got, way_out = "lists of different lengths", "write C probabilities for each row"
        raise InputTypeError(expected(f"column {name!r}", "hold lists of one length", got, way_out))
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)
