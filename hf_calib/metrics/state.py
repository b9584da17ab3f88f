"""Calibration metrics of any number of rows: sums that are updated, merged, sent, and read."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.metrics._confidence_grid import N_CELLS, Bounded, ConfidenceGrid, cells_of
from hf_calib.metrics._exact_sums import ExactSums, WeightedSums
from hf_calib.metrics._row_scores import RowScores, check_rows, score_chunks
from hf_calib.metrics._top_label_sums import ConfidenceBins, GroupSums, ProperScores
from hf_calib.metrics.checks import FloatArray, IntArray, as_array, check_flag, check_integer, check_n_bins
from hf_calib.metrics.sums import BinSums, binned_error, class_gaps, uniform_bins

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_VERSION = 1
_MOST_WAITING = 16  # chunks
# Each class and bin has 14 numbers: 470 MB in all, which is a vocabulary of 260,000 in 15 bins.
_MOST_SLOTS = 2**22
_LONGEST_HEADER = 256  # bytes


class ClassSums(NamedTuple):
    """Sums (C,) over the rows, by class.

    Args:
        true: rows of the class, or their weight.
        probability: its probabilities.
        probability_squared: their squares.
        predicted: rows for which it is the most probable class.
        right: those of them that are of the class.
        confidence: their confidences.
        confidence_squared: the squares of these.
    """

    true: FloatArray
    probability: FloatArray
    probability_squared: FloatArray
    predicted: FloatArray
    right: FloatArray
    confidence: FloatArray
    confidence_squared: FloatArray


class CalibrationState:
    r"""Calibration metrics from sums that merge: for rows in batches, shards, processes or an engine's workers.

    For more rows than memory holds, in plain numpy, so that any engine can run it: a state for each part, `merge`, and
    `compute` gives what the functions of `hf_calib.metrics` give for all rows at once. For logits on a GPU during an
    evaluation there is `hf_calib.metrics.streaming`.

    Args:
        n_classes: C, at least 2.
        n_bins: M, at least 1.

    Raises:
        TypeError: if one is no integer.
        ValueError: if one is out of range.

    Notes:
        Without weights all counts and sums are integers (numbers are rounded to multiples of $2^{-36}$ once): no split
        of the rows and no order of merging changes a bit of the result, which differs from that of the functions by
        7e-12 at most. With weights sums are float64, and orders differ by rounding. A state has
        O(C M) + 196,610 numbers, whatever the number of rows.

        Equal-mass bins, quantiles and the area under the risk-coverage curve need confidences in order. They are
        counted on a grid of 98,305 cells, within a factor of $1 + 2^{-12}$ of $1 - p$: `adaptive_ece`,
        `area_under_risk_coverage` and `confidence_quantile` say how far from the value of the rows they are at most.

    >>> state = CalibrationState(n_classes=2)
    >>> state.update(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0]))
    >>> other = CalibrationState(n_classes=2)
    >>> other.update(np.array([[0.6, 0.4]]), np.array([0]))
    >>> found = CalibrationState.from_bytes(other.to_bytes()).merge(state).compute()
    >>> {name: round(found[name], 3) for name in ("accuracy", "nll", "brier", "ece")}
    {'accuracy': 0.667, 'nll': 0.742, 'brier': 0.54, 'ece': 0.433}
    """

    def __init__(self, *, n_classes: int, n_bins: int = 15) -> None:
        self.n_classes = check_integer("n_classes", n_classes, 2, "for one sigmoid output p pass [1 - p, p]")
        self.n_bins = check_n_bins(n_bins)
        n_slots = self.n_classes * self.n_bins
        if n_slots > _MOST_SLOTS:
            requirement = f"be at most {_MOST_SLOTS:,}"
            raise InputValueError(
                expected("n_classes * n_bins", requirement, f"{n_slots:,}", "use fewer bins")
            )
        self._weighted: bool | None = None  # until rows are seen

    def update(self, probs: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Add rows.

        Args:
            probs: (N, C) float, rows that sum to 1; fastest as float32 or float64 columns in one piece each (order F).
            labels: (N,) int in [0, C).
            weights: (N,) of at least 0, or None; with weights for all batches or for none.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if shapes do not fit, or a row is no distribution or has no valid label or weight: the message
                names it, and no row of this call has been added.
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

        Raises:
            TypeError, ValueError: as `update`; if a column is missing or has missing values.

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

    def add_scores(self, scores: RowScores) -> None:
        """Add a chunk of rows that others look at, too."""
        weights = scores.weights
        self._start(weights is not None)
        self._bins.add(scores, scores.predicted)
        self._scores.add(scores, None)
        self._waiting.append((cells_of(scores.confidences) * 2 + scores.correct, weights))
        if len(self._waiting) == _MOST_WAITING:
            self._count_cells()
        n_rows = len(scores.labels)
        bins = uniform_bins(scores.columns, self.n_bins)
        slots = bins + np.arange(0, self.n_classes * self.n_bins, self.n_bins)[:, None]
        of_labels = slots.ravel().take(scores.labels * n_rows + np.arange(n_rows))
        self._bin_true += np.bincount(of_labels, weights, minlength=len(self._bin_true))
        every_weight = None if weights is None else np.broadcast_to(weights, slots.shape).ravel()
        self._bin_mass += np.bincount(slots.ravel(), every_weight, minlength=len(self._bin_mass))
        wide = scores.columns.astype(np.float64, copy=False)
        by_class = self._by_class

        def weighed(values: FloatArray) -> FloatArray:
            return values if weights is None else values * weights

        by_class["bin_probability"].add_fractions(slots.ravel(), weighed(wide).ravel())
        by_class["probability_squared"].add_rows(weighed(wide**2))

    def merge(self, other: CalibrationState) -> CalibrationState:
        """Add the rows of another state to this one, which is returned, so that it goes into `functools.reduce`.

        Raises:
            ValueError: if n_classes or n_bins differ, or one has weights and the other has none.
        """
        for name in ("n_classes", "n_bins"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                way_out = "merge states that were made alike"
                raise InputValueError(expected(f"the other state's {name}", f"be {mine}", theirs, way_out))
        if other._weighted is None:
            return self
        self._start(other._weighted)
        self._bins.merge(other._bins)
        self._scores.merge(other._scores)
        for mine, theirs in zip(self._arrays_of_counts(), other._arrays_of_counts(), strict=True):
            mine += theirs
        for name, sums in self._by_class.items():
            sums.merge(other._by_class[name])
        return self

    def compute(self) -> dict[str, float]:
        """All metrics of what was seen so far.

        Returns:
            The keys of `LOGGED_METRICS` in its order: accuracy, nll (nats), brier, ece, adaptive_ece, classwise_ece and
            mce (all but nll and brier are fractions).

        Raises:
            ValueError: if no row was seen, or all weights are 0.
        """
        top, bins = self.top_label, self.bins
        total = float(bins.counts.sum())
        return {
            "accuracy": float(top.accuracies()[0][0]),
            "nll": float(top.mean("nll")[0]),
            "brier": float(top.mean("brier")[0]),
            "ece": float(binned_error(bins, total)),
            "adaptive_ece": self.adaptive_ece().value,
            "classwise_ece": float(np.mean(class_gaps(self.class_bins()))),
            "mce": float(binned_error(bins, total, "max")),
        }

    @property
    def n_rows(self) -> int:
        """Rows that were seen."""
        return 0 if self._weighted is None else int(self._bins.counts["rows"].sum())

    @property
    def weighted(self) -> bool:
        """Whether they have weights."""
        return bool(self._weighted)

    @property
    def top_label(self) -> GroupSums:
        """The sums by confidence bin, and of the proper scores, of one group."""
        self.check_has_rows()
        return GroupSums.of_all(self._bins, self._scores)

    @property
    def bins(self) -> BinSums:
        """The sums (M,) of the equal-width bins."""
        counts, confidence, correct = self.top_label.bins()
        return BinSums(counts[0], confidence[0], correct[0])

    @property
    def grid(self) -> ConfidenceGrid:
        """Right and wrong predictions by confidence, on a fine grid."""
        self.check_has_rows()
        self._count_cells()
        wrong, right = self._cells.reshape(N_CELLS, 2).T
        return ConfidenceGrid(right, wrong, weighted=self.weighted)

    def adaptive_ece(self) -> Bounded:
        """The ECE of equal-mass bins, and how far from that of the rows it is at most."""
        sums, error = self.grid.equal_mass_bins(self.n_bins)
        return Bounded(float(binned_error(sums, sums.counts.sum())), error)

    def area_under_risk_coverage(self) -> Bounded:
        """The AURC, and how far from that of the rows it is at most.

        Raises:
            ValueError: if rows have weights: it has no weighted form, as it averages over rows.
        """
        if self.weighted:
            way_out = "take it without weights"
            raise InputValueError(
                expected("area_under_risk_coverage", "be asked of rows without weights", "weights", way_out)
            )
        return self.grid.area_under_risk_coverage()

    def confidence_quantile(self, level: float) -> Bounded:
        """The confidence below which a share of the rows lies, and how far from it that may be."""
        return self.grid.quantile(level)

    def class_bins(self) -> BinSums:
        """The sums (C, M) of each class's probability, in bins of it."""
        self.check_has_rows()
        shape = (self.n_classes, self.n_bins)
        names = ("bin_mass", "bin_probability", "bin_true")
        return BinSums(*(self._class_values(name).reshape(shape) for name in names))

    def classes(self) -> ClassSums:
        """The sums of each class."""
        bins, masses = self.class_bins(), self._bins.masses().sum(axis=1)
        return ClassSums(
            true=bins.correct.sum(axis=1),
            probability=bins.confidence.sum(axis=1),
            probability_squared=self._class_values("probability_squared"),
            predicted=masses.sum(axis=1),
            right=masses[:, 1],
            confidence=self._bins.of("confidence").sum(axis=(1, 2)),
            confidence_squared=self._bins.of("confidence_squared").sum(axis=(1, 2)),
        )

    def to_bytes(self) -> bytes:
        """The state, to be sent or stored: compressed arrays and a version, nothing that runs when it is read."""
        header = {
            "version": _VERSION,
            "n_classes": self.n_classes,
            "n_bins": self.n_bins,
            "weighted": self._weighted,
        }
        arrays = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)} | self._arrays()
        stream = io.BytesIO()
        np.savez_compressed(stream, allow_pickle=False, **arrays)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> CalibrationState:
        """The state that `to_bytes` wrote; safe for bytes of unknown origin: sizes are checked before data are read.

        Raises:
            ValueError: if it is none, or of another version.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as file:
                header = json.loads(_read(file, "header", np.dtype(np.uint8)).tobytes())
                if header["version"] != _VERSION:
                    raise ValueError(
                        f"version {str(header['version'])[:20]}, where this is version {_VERSION}"
                    )
                state = cls(n_classes=header["n_classes"], n_bins=header["n_bins"])
                if header["weighted"] is not None:
                    check_flag("weighted", header["weighted"])
                    state._start(header["weighted"])
                arrays = state._arrays()
                if set(file.namelist()) != {f"{name}.npy" for name in ("header", *arrays)}:
                    raise ValueError("arrays that do not go together")
                for name, array in arrays.items():
                    array[...] = _read(file, name, array.dtype, array.shape)
        except Exception as error:  # zipfile, zlib, numpy and tokenize each raise their own on broken files.
            got = f"{len(data):,} bytes that are none ({error})"
            way_out = "send them unchanged, and read them with the version that wrote them"
            raise InputValueError(
                expected("the state", "be bytes that to_bytes wrote", got, way_out)
            ) from error
        return state

    def check_has_rows(self) -> None:
        """Raise where there is nothing to compute from."""
        if not self.n_rows or not self._bins.masses().any():
            got = "none" if not self.n_rows else "only rows of weight 0"
            raise InputValueError(expected("the state", "have rows", got, "update it with predictions first"))

    def _start(self, weighted: bool) -> None:
        """Make room for the first rows, or check that later ones have weights as they had."""
        if self._weighted is None:
            self._weighted = weighted
            kind = WeightedSums if weighted else ExactSums
            n_classes, n_slots = self.n_classes, self.n_classes * self.n_bins
            count = np.float64 if weighted else np.int64
            # By the predicted class, whose sums over the bins are the class's own.
            self._bins = ConfidenceBins(self.n_bins, weighted=weighted, n_groups=n_classes)
            self._scores = ProperScores(weighted=weighted, n_groups=1)
            self._cells = np.zeros(2 * N_CELLS, count)
            self._waiting: list[tuple[IntArray, FloatArray | None]] = []
            self._bin_mass, self._bin_true = np.zeros(n_slots, count), np.zeros(n_slots, count)
            self._by_class: dict[str, Any] = {
                "bin_probability": kind(n_slots),
                "probability_squared": kind(n_classes),
            }
        elif self._weighted != weighted:
            got = "weights" if weighted else "none"
            requirement = f"have {'weights' if self._weighted else 'no weights'}, as those before"
            raise InputValueError(
                expected("the rows", requirement, got, "give weights with all rows or with none")
            )

    def _count_cells(self) -> None:
        """Add the chunks that wait: a pass over all cells, which are more than a chunk has rows."""
        if self._waiting:
            slots = np.concatenate([slots for slots, _ in self._waiting])
            weights = [weights for _, weights in self._waiting if weights is not None]
            self._cells += np.bincount(
                slots, np.concatenate(weights) if weights else None, minlength=2 * N_CELLS
            )
            self._waiting.clear()

    def _class_values(self, name: str) -> FloatArray:
        counts = {"bin_mass": "_bin_mass", "bin_true": "_bin_true"}
        if name in counts:
            return np.asarray(getattr(self, counts[name]), dtype=np.float64)
        return np.asarray(self._by_class[name].values(), dtype=np.float64)

    def _arrays_of_counts(self) -> list[NDArray[Any]]:
        self._count_cells()
        return [self._cells, self._bin_mass, self._bin_true]

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that rows change, by name."""
        if self._weighted is None:
            return {}
        counts = dict(zip(("cells", "bin_mass", "bin_true"), self._arrays_of_counts(), strict=True))
        by_class = {
            f"{name}.{part}": getattr(sums, part)
            for name, sums in self._by_class.items()
            for part in sums.fields
        }
        bins = {f"bins.{name}": array for name, array in self._bins.arrays().items()}
        scores = {f"scores.{name}": array for name, array in self._scores.arrays().items()}
        return counts | by_class | bins | scores


def _arrow_column(batch: Any, name: str) -> NDArray[Any]:
    """A column of a batch or table: (N,), or (N, C) of lists of one length."""
    import pyarrow

    if name not in batch.schema.names:
        requirement = f"be one of {', '.join(batch.schema.names)}"
        raise InputValueError(expected("the column", requirement, repr(name), "name a column of the batch"))
    column = batch.column(name)
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if column.null_count:
        got = f"{column.null_count:,} missing values"
        raise InputValueError(expected(f"column {name!r}", "have a value in every row", got, "fill them in"))
    if not pyarrow.types.is_nested(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = column.flatten()
    if not len(column) or len(values) % len(column):
        got, way_out = "lists of different lengths", "write C probabilities for each row"
        raise InputTypeError(expected(f"column {name!r}", "hold lists of one length", got, way_out))
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)


def _read(
    file: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None
) -> NDArray[Any]:
    """An array of a state, of which no more is read than this shape has, or without one than a header has."""
    with file.open(f"{name}.npy") as stream:
        np.lib.format.read_magic(stream)
        found, _, kind = np.lib.format.read_array_header_1_0(stream)
        if kind != dtype or found != (shape or found):
            raise ValueError(f"{name} of shape {found} and dtype {kind}")
        size = _LONGEST_HEADER if shape is None else math.prod(shape) * dtype.itemsize
        array = np.frombuffer(stream.read(size), dtype)
    if array.shape != (shape or array.shape) or not ((array >= 0) & (array < np.inf)).all():
        raise ValueError(f"{name} that are not sums of rows")
    return array
