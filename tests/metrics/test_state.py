"""`CalibrationState`: equal to the functions on all rows, whatever the split and the order of merging."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tracemalloc
from functools import reduce

import numpy as np
import pyarrow
import pytest
from numpy.typing import NDArray

import hf_calib.metrics as metrics
from hf_calib import InputError
from hf_calib.metrics import CalibrationState
from hf_calib.metrics._confidence_grid import ConfidenceGrid, cells_of
from hf_calib.metrics._exact_sums import ExactSums

Rows = tuple[NDArray[np.floating], NDArray[np.int64]]
RNG = np.random.default_rng(0)


def rows_of(n: int, n_classes: int, dtype: str = "float64", sharpness: float = 2.0, seed: int = 0) -> Rows:
    """Over-confident predictions, some of them ties."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(n, n_classes))
    labels = (logits / 1.5 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    probs[: n // 20] = 1 / n_classes
    return probs.astype(dtype), labels


def state_of(probs: NDArray[np.floating], labels: NDArray[np.int64], weights=None, n_bins: int = 15):  # type: ignore[no-untyped-def]
    state = CalibrationState(n_classes=probs.shape[1], n_bins=n_bins)
    state.update(probs, labels, weights)
    return state


CASES = [
    (5_000, 4, "float32", 15, 2.0),
    (5_000, 4, "float64", 1, 2.0),
    (700, 100, "float32", 15, 3.0),
    (3_000, 2, "float64", 37, 8.0),
    (300, 7, "float16", 10, 1.0),
    (1, 3, "float32", 15, 1.0),
]


@pytest.mark.parametrize(("n", "n_classes", "dtype", "n_bins", "sharpness"), CASES)
def test_it_is_the_functions_on_all_rows(
    n: int, n_classes: int, dtype: str, n_bins: int, sharpness: float
) -> None:
    probs, labels = rows_of(n, n_classes, dtype, sharpness)
    if dtype == "float16":
        probs = (probs / probs.sum(axis=1, keepdims=True, dtype=np.float32)).astype(dtype)
    state = state_of(probs, labels, n_bins=n_bins)
    found = state.compute()
    wanted = {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.negative_log_likelihood(probs, labels),
        "brier": metrics.brier_score(probs, labels),
        "ece": metrics.expected_calibration_error(probs, labels, n_bins=n_bins),
        "classwise_ece": metrics.classwise_calibration_error(probs, labels, n_bins=n_bins),
        "mce": metrics.maximum_calibration_error(probs, labels, n_bins=n_bins),
    }
    assert list(found) == ["accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "mce"]
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-11), name
    adaptive = state.adaptive_ece()
    exact = metrics.expected_calibration_error(probs, labels, n_bins=n_bins, binning="quantile")
    assert found["adaptive_ece"] == adaptive.value
    assert abs(adaptive.value - exact) <= adaptive.error + 1e-12
    area = state.area_under_risk_coverage()
    assert abs(area.value - metrics.area_under_risk_coverage(probs, labels)) <= area.error + 1e-12


def test_no_split_and_no_order_changes_a_bit() -> None:
    probs, labels = rows_of(4_000, 5)
    whole = state_of(probs, labels).to_bytes()
    for trial in range(4):
        rng = np.random.default_rng(trial)
        order = rng.permutation(len(labels))
        cuts = np.sort(rng.integers(0, len(labels), rng.integers(1, 40)))
        parts = [state_of(probs[rows], labels[rows]) for rows in np.split(order, cuts) if len(rows)]
        rng.shuffle(parts)  # type: ignore[arg-type]
        while len(parts) > 1:  # any tree
            i = int(rng.integers(len(parts) - 1))
            parts[i] = parts[i].merge(parts.pop(i + 1))
        merged = parts[0]
        assert merged.compute() == state_of(probs, labels).compute()
        assert merged.to_bytes() == whole
        sent = [CalibrationState.from_bytes(part.to_bytes()) for part in (merged, merged)]
        assert pickle.loads(pickle.dumps(sent[0])).compute() == merged.compute()


def test_weights() -> None:
    probs, labels = rows_of(2_000, 4)
    times = np.random.default_rng(1).integers(0, 4, len(labels))
    repeated = np.repeat(np.arange(len(labels)), times)
    weighted, plain = state_of(probs, labels, 0.37 * times), state_of(probs[repeated], labels[repeated])
    for name, value in plain.compute().items():
        tolerance = 1e-12
        if name == "adaptive_ece":  # whose bins are cut within a cell
            tolerance = plain.adaptive_ece().error
        assert weighted.compute()[name] == pytest.approx(value, abs=tolerance), name
    assert weighted.n_rows == 2_000
    effective = weighted.top_label.effective_rows()[0]
    assert effective == pytest.approx(times.sum() ** 2 / (times**2).sum())
    halves = [
        state_of(probs[rows], labels[rows], 0.37 * times[rows]) for rows in (slice(900), slice(900, None))
    ]
    merged = reduce(CalibrationState.merge, halves)
    for name, value in weighted.compute().items():
        assert merged.compute()[name] == pytest.approx(value, rel=1e-12)
    assert CalibrationState.from_bytes(merged.to_bytes()).compute() == merged.compute()
    with pytest.raises(InputError, match="asked of rows without weights, got weights"):
        weighted.area_under_risk_coverage()
    with pytest.raises(
        InputError, match="expected the rows to have no weights, as those before, got weights"
    ):
        plain.merge(weighted)


def test_standard_errors_are_those_of_means() -> None:
    probs, labels = rows_of(3_000, 3)
    top = state_of(probs, labels).top_label
    logs = -np.log(probs[np.arange(len(labels)), labels])
    distances = ((probs - np.eye(3)[labels]) ** 2).sum(axis=1)
    gaps = probs.max(axis=1) - (probs.argmax(axis=1) == labels)
    root = np.sqrt(len(labels))
    assert top.standard_error("nll")[0] == pytest.approx(logs.std(ddof=1) / root, rel=1e-9)
    assert top.standard_error("brier")[0] == pytest.approx(distances.std(ddof=1) / root, rel=1e-9)
    assert top.gaps()[0][0] == pytest.approx(gaps.mean(), abs=1e-11)
    assert top.gaps()[1][0] == pytest.approx(gaps.std(ddof=1) / root, rel=1e-9)


def test_sums_of_classes() -> None:
    probs, labels = rows_of(2_500, 6)
    found = state_of(probs, labels).classes()
    predicted = probs.argmax(axis=1)
    np.testing.assert_array_equal(found.true, np.bincount(labels, minlength=6))
    np.testing.assert_allclose(found.probability, probs.sum(axis=0), atol=1e-7)
    np.testing.assert_allclose(found.probability_squared, (probs**2).sum(axis=0), atol=1e-7)
    np.testing.assert_array_equal(found.predicted, np.bincount(predicted, minlength=6))
    np.testing.assert_array_equal(found.right, np.bincount(labels[predicted == labels], minlength=6))
    for power, sums in ((1, found.confidence), (2, found.confidence_squared)):
        wanted = np.bincount(predicted, probs.max(axis=1) ** power, minlength=6)
        np.testing.assert_allclose(sums, wanted, atol=1e-7)


class TestGrid:
    """The sketch, and the bounds that it states."""

    def test_cells_are_narrow_and_in_order(self) -> None:
        confidences = np.sort(np.concatenate([RNG.random(5_000), 1 - 10.0 ** -RNG.uniform(0, 16, 5_000)]))
        cells = cells_of(confidences)
        assert (np.diff(cells) >= 0).all()
        grid = ConfidenceGrid(np.zeros(1), np.zeros(1))
        assert (grid.lowest[cells] <= confidences + 1e-16).all()
        assert (confidences <= grid.highest[cells] + 1e-16).all()
        width = grid.highest[cells] - grid.lowest[cells]
        assert (width <= (1 - grid.lowest[cells]) * 2.0**-12 * 1.001 + 2.0**-24).all()

    @pytest.mark.parametrize("seed", range(25))
    def test_the_error_is_within_its_bound(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 3_000))
        kind = seed % 5
        top = {
            0: rng.uniform(0.5, 1, n),
            1: 1 - 10.0 ** -rng.uniform(0.31, 9, n),  # bunched near 1
            2: rng.choice([0.6, 0.9, 0.90001, 0.99], n),  # ties, and nearly
            3: 0.9 + 1e-5 * rng.random(n),  # all in a cell or two
            4: np.clip(rng.beta(8, 1, n), 0.5, 1),
        }[kind]
        probs = np.stack([top, 1 - top], axis=1)
        labels = (rng.random(n) > rng.uniform(0.7, 1.0) * top).astype(int)
        state = state_of(probs, labels)
        adaptive, area = state.adaptive_ece(), state.area_under_risk_coverage()
        exact = metrics.expected_calibration_error(probs, labels, binning="quantile")
        assert abs(adaptive.value - exact) <= adaptive.error + 1e-12
        assert abs(area.value - metrics.area_under_risk_coverage(probs, labels)) <= area.error + 1e-12
        for level in (0.01, 0.5, 0.99):
            quantile = state.confidence_quantile(level)
            wanted = np.quantile(top, level, method="inverted_cdf")
            assert abs(quantile.value - wanted) <= quantile.error + 1e-12

    def test_a_cell_of_right_and_wrong_rows_can_come_near_the_bound(self) -> None:
        """The bound is no idle one: rows that a cell cannot tell apart, in the worst order for a cut."""
        top = 0.9 + 1e-9 * np.arange(200)
        labels = (np.arange(200) >= 180).astype(
            int
        )  # as many as their confidence says are wrong: the uppermost
        probs = np.stack([top, 1 - top], axis=1)
        state = state_of(probs, labels, n_bins=2)
        exact = metrics.expected_calibration_error(probs, labels, n_bins=2, binning="quantile")
        adaptive = state.adaptive_ece()
        assert 0.3 * adaptive.error < abs(adaptive.value - exact) <= adaptive.error

    def test_points_of_the_risk_coverage_curve(self) -> None:
        probs, labels = rows_of(2_000, 3)
        coverage, risk = state_of(probs, labels).grid.risk_coverage()
        assert coverage[-1] == 1
        assert risk[-1] == pytest.approx(1 - metrics.accuracy(probs, labels))
        assert (np.diff(coverage) > 0).all()


def test_exact_sums_round_once() -> None:
    values = RNG.random(60_000) * 600
    sums = ExactSums(1)
    sums.add(None, values)
    assert sums.values()[0] == pytest.approx(values.sum(), abs=60_000 * 2.0**-37)
    many = ExactSums(1)
    for part in np.array_split(values[::-1], 7):
        many.add(np.zeros(len(part), int), part)
    assert (many.whole, many.units) == (sums.whole, sums.units)


def test_arrow_batches() -> None:
    probs, labels = rows_of(300, 3)
    wanted = state_of(probs, labels, np.arange(300)).to_bytes()
    table = pyarrow.table(
        {
            **{f"p{c}": probs[:, c] for c in range(3)},
            "lists": list(probs),
            "fixed": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(probs.ravel()), 3),
            "y": labels,
            "w": np.arange(300),
        }
    )
    for columns in (["p0", "p1", "p2"], "lists", "fixed"):
        for rows in (table, *table.to_batches()):
            state = CalibrationState(n_classes=3)
            state.update_batch(rows, probs=columns, labels="y", weights="w")
            assert state.to_bytes() == wanted
    with pytest.raises(InputError, match="the column to be one of p0, p1, p2, lists, fixed, y, w, got 'p3'"):
        CalibrationState(n_classes=3).update_batch(table, probs=["p0", "p1", "p3"], labels="y")
    missing = pyarrow.table({"p": pyarrow.array([0.5, None]), "q": [0.5, 0.5], "y": [0, 1]})
    with pytest.raises(InputError, match="column 'p' to have a value in every row, got 1 missing"):
        CalibrationState(n_classes=2).update_batch(missing, probs=["p", "q"], labels="y")


class TestRefused:
    """What is wrong is named with its row, and nothing of the call is added."""

    @pytest.mark.parametrize(
        ("row", "label", "weight", "message"),
        [
            ([0.5, np.nan], 0, 1, "the scores of row 40,000 to be finite, got nan"),
            ([1.5, -0.5], 0, 1, r"the probabilities of row 40,000 to lie in \[0, 1\], got 1.5"),
            ([0.5, 0.4], 0, 1, "the probabilities of row 40,000 to sum to 1, got 0.9"),
            ([0.5, 0.5], 2, 1, r"the label of row 40,000 to lie in 0..1, got 2"),
            ([0.5, 0.5], -100, 1, "drop ignored rows first"),
            ([0.5, 0.5], 1, -1, "the weight of row 40,000 to be a finite number of at least 0, got -1"),
            ([0.5, 0.5], 1, np.nan, "the weight of row 40,000 to be a finite number"),
        ],
    )
    def test_a_row(self, row: list[float], label: int, weight: float, message: str) -> None:
        probs, labels, weights = np.full((50_000, 2), 0.5), np.zeros(50_000, int), np.ones(50_000)
        state = state_of(probs, labels, weights)
        before = state.to_bytes()
        probs[40_000], labels[40_000], weights[40_000] = row, label, weight
        with pytest.raises(InputError, match=message):
            state.update(probs, labels, weights)
        assert state.to_bytes() == before

    def test_other_inputs(self) -> None:
        state = CalibrationState(n_classes=3)
        with pytest.raises(InputError, match="the state to have rows, got none"):
            state.compute()
        state.update(np.empty((0, 3)), np.empty(0, int))
        assert state.n_rows == 0
        with pytest.raises(InputError, match=r"probs to have shape \(N, 3\)"):
            state.update(np.full((2, 2), 0.5), [0, 1])
        with pytest.raises(InputError, match="probs to be a float array, got dtype int64"):
            state.update(np.eye(3, dtype=int), [0, 1, 2])
        with pytest.raises(InputError, match="labels to be integers"):
            state.update(np.eye(3), [0.0, 1.0, 2.0])
        with pytest.raises(InputError, match="n_classes to be at least 2"):
            CalibrationState(n_classes=1)
        with pytest.raises(InputError, match="the other state's n_bins to be 15, got 10"):
            state.merge(CalibrationState(n_classes=3, n_bins=10))
        zero = state_of(np.eye(3), np.arange(3), np.zeros(3))
        with pytest.raises(InputError, match="got only rows of weight 0"):
            zero.compute()

    def test_bytes_that_are_no_state(self) -> None:
        good = state_of(np.eye(2), np.arange(2)).to_bytes()
        for bad in (b"", b"nothing", good[:200], pickle.dumps([1])):
            with pytest.raises(InputError, match="the state to be bytes that to_bytes wrote"):
                CalibrationState.from_bytes(bad)
        for place in np.random.default_rng(0).integers(len(good), size=50):
            with contextlib.suppress(InputError):  # Some bytes, as those of a date, may have any value.
                CalibrationState.from_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        assert CalibrationState.from_bytes(CalibrationState(n_classes=4).to_bytes()).n_rows == 0

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            ({"version": 2}, "version 2, where this is version 1"),
            ({"n_classes": 10**9}, r"n_classes \* n_bins to be at most 4,194,304, got 15,000,000,000"),
            ({"n_classes": 10**18}, "n_bins to be at most"),
            ({"n_classes": "2"}, "n_classes to be an integer, got '2'"),
            ({"n_bins": 10**18}, "n_bins to be at most 10,000"),
            ({"n_bins": None}, "n_bins to be an integer, got None"),
            ({"weighted": "no"}, "weighted to be True or False, got 'no'"),
            ({"n_classes": 3}, "of shape"),
        ],
    )
    def test_bytes_with_another_header(self, header: dict[str, object], message: str) -> None:
        for weights in (None, np.ones(2)):
            good = state_of(np.eye(2), np.arange(2), weights).to_bytes()
            with pytest.raises(InputError, match=message):
                CalibrationState.from_bytes(with_arrays(good, header=header))

    @pytest.mark.parametrize("key", ["version", "n_classes", "n_bins", "weighted"])
    def test_bytes_without_a_part_of_the_header(self, key: str) -> None:
        good = state_of(np.eye(2), np.arange(2)).to_bytes()
        with pytest.raises(InputError, match=f"bytes that are none .'{key}'"):
            CalibrationState.from_bytes(with_arrays(good, without=key))

    @pytest.mark.parametrize("value", [-1, np.nan, np.inf])
    def test_sums_that_no_rows_have(self, value: float) -> None:
        good = state_of(np.eye(2), np.arange(2), np.ones(2)).to_bytes()
        with pytest.raises(InputError, match="bin_mass that are not sums of rows"):
            CalibrationState.from_bytes(with_arrays(good, bin_mass=np.full(30, float(value))))
        with pytest.raises(InputError, match="bin_mass of shape"):
            CalibrationState.from_bytes(with_arrays(good, bin_mass=np.ones(30, np.float32)))
        with pytest.raises(InputError, match="arrays that do not go together"):
            CalibrationState.from_bytes(with_arrays(good, more=np.ones(30)))

    def test_an_array_is_not_read_before_its_size_is_known(self) -> None:
        """A few bytes can hold a file that unpacks to gigabytes."""
        good = state_of(np.eye(2), np.arange(2)).to_bytes()
        bomb = with_arrays(good, bin_mass=np.zeros(2**22, np.int64))
        tracemalloc.start()
        with pytest.raises(InputError, match="bin_mass of shape"):
            CalibrationState.from_bytes(bomb)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**24  # of 2**25 bytes


def with_arrays(
    state: bytes, header: dict[str, object] | None = None, without: str = "", **changed: NDArray[np.generic]
) -> bytes:
    """The bytes of a state with other arrays, or another header."""
    with np.load(io.BytesIO(state)) as file:
        arrays = dict(file)
    fields = json.loads(arrays["header"].tobytes()) | (header or {})
    fields.pop(without, None)
    arrays["header"] = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez_compressed(stream, **(arrays | changed))  # type: ignore[arg-type]
    return stream.getvalue()
