"""`CalibrationState`: equal to the functions on all rows, whatever the split and the order of merging."""

from __future__ import annotations

import pickle
import time
import tracemalloc
import zlib
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import softmax

import hf_calib.metrics as metrics
from hf_calib import InputError
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.state import GroupSums, score_chunks
from hf_calib.metrics.sums import BinSums, TopLabel, bin_sums, binned_error

Rows = tuple[NDArray[np.floating], NDArray[np.int64]]
RNG = np.random.default_rng(0)


def rows_of(
    n: int,
    n_classes: int,
    dtype: str = "float64",
    sharpness: float = 2.0,
    seed: int = 0,
) -> Rows:
    """Over-confident predictions, some of them ties."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(n, n_classes))
    labels = (logits / 1.5 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    probs[: n // 20] = 1 / n_classes
    return probs.astype(dtype), labels


def state_of(
    probs: NDArray[np.floating],
    labels: NDArray[np.int64],
    weights=None,
    n_bins: int = 15,
):  # type: ignore[no-untyped-def]
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
        probs = (probs / probs.sum(axis=1, keepdims=True, dtype=np.float32)).astype(
            dtype
        )
    state = state_of(probs, labels, n_bins=n_bins)
    found = state.compute()
    wanted = {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.negative_log_likelihood(probs, labels),
        "brier": metrics.brier_score(probs, labels),
        "ece": metrics.expected_calibration_error(probs, labels, n_bins=n_bins),
        "classwise_ece": metrics.classwise_calibration_error(
            probs, labels, n_bins=n_bins
        ),
        "mce": metrics.maximum_calibration_error(probs, labels, n_bins=n_bins),
    }
    assert list(found) == [
        "accuracy",
        "nll",
        "brier",
        "ece",
        "adaptive_ece",
        "classwise_ece",
        "mce",
    ]
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-11), name


def test_no_split_and_no_order_changes_a_metric() -> None:
    probs, labels = rows_of(4_000, 5)
    whole = state_of(probs, labels)
    for trial in range(4):
        rng = np.random.default_rng(trial)
        order = rng.permutation(len(labels))
        cuts = np.sort(rng.integers(0, len(labels), rng.integers(1, 40)))
        parts = [
            state_of(probs[rows], labels[rows])
            for rows in np.split(order, cuts)
            if len(rows)
        ]
        rng.shuffle(parts)  # type: ignore[arg-type]
        while len(parts) > 1:  # any tree
            i = int(rng.integers(len(parts) - 1))
            parts[i] = parts[i].merge(parts.pop(i + 1))
        merged = parts[0]
        assert merged.compute() == pytest.approx(whole.compute(), rel=1e-12, abs=1e-15)
        sent = [
            CalibrationState.from_bytes(part.to_bytes()) for part in (merged, merged)
        ]
        assert pickle.loads(pickle.dumps(sent[0])).compute() == merged.compute()


def test_weights() -> None:
    probs, labels = rows_of(2_000, 4)
    times = np.random.default_rng(1).integers(0, 4, len(labels))
    repeated = np.repeat(np.arange(len(labels)), times)
    weighted, plain = (
        state_of(probs, labels, 0.37 * times),
        state_of(probs[repeated], labels[repeated]),
    )
    for name, value in plain.compute().items():
        tolerance = 1e-12
        if name == "adaptive_ece":  # whose bins are cut within a cell
            tolerance = 2e-3
        assert weighted.compute()[name] == pytest.approx(value, abs=tolerance), name
    assert weighted.n_rows == 2_000
    effective = weighted.top_label.effective_rows()[0]
    assert effective == pytest.approx(times.sum() ** 2 / (times**2).sum())
    halves = [
        state_of(probs[rows], labels[rows], 0.37 * times[rows])
        for rows in (slice(900), slice(900, None))
    ]
    merged = reduce(CalibrationState.merge, halves)
    for name, value in weighted.compute().items():
        assert merged.compute()[name] == pytest.approx(value, rel=1e-12)
    assert CalibrationState.from_bytes(merged.to_bytes()).compute() == merged.compute()
    assert not state_of(probs, labels, np.ones(len(labels))).weighted
    assert state_of(probs[:2], labels[:2], np.array([0.5, 1.5])).weighted


def test_standard_errors_are_those_of_means() -> None:
    probs, labels = rows_of(3_000, 3)
    top = state_of(probs, labels).top_label
    logs = -np.log(probs[np.arange(len(labels)), labels])
    distances = ((probs - np.eye(3)[labels]) ** 2).sum(axis=1)
    gaps = probs.max(axis=1) - (probs.argmax(axis=1) == labels)
    root = np.sqrt(len(labels))
    assert top.mean("nll")[1][0] == pytest.approx(logs.std(ddof=1) / root, rel=1e-9)
    assert top.mean("brier")[1][0] == pytest.approx(
        distances.std(ddof=1) / root, rel=1e-9
    )
    assert top.mean("gap")[0][0] == pytest.approx(gaps.mean(), abs=1e-11)
    assert top.mean("gap")[1][0] == pytest.approx(gaps.std(ddof=1) / root, rel=1e-9)


def confidences_of(kind: str, n: int) -> NDArray[np.floating]:
    rng = np.random.default_rng(len(kind))
    kinds = {
        "spread": rng.uniform(0.5, 1, n),
        "bunched near 1": 1 - 10.0 ** -rng.uniform(0.31, 9, n),
        "ties": rng.choice([0.6, 0.9, 0.99], n),
        "high": np.clip(rng.beta(8, 1, n), 0.5, 1),
    }
    return kinds[kind]


@pytest.mark.parametrize("kind", ["spread", "bunched near 1", "ties", "high"])
def test_what_needs_confidences_in_order_is_near_that_of_the_rows(kind: str) -> None:
    """Confidences are counted in cells; where each cell holds one value, nothing is lost."""
    top = confidences_of(kind, 20_000)
    probs = np.stack([top, 1 - top], axis=1)
    labels = (RNG.random(len(top)) > 0.9 * top).astype(int)
    state = state_of(probs, labels)
    tolerance = {"ties": 1e-12, "bunched near 1": 1e-3}.get(kind, 1e-4)
    exact = metrics.expected_calibration_error(probs, labels, binning="quantile")
    if kind == "ties":  # The papers' edges leave the rows of the least confidence out.
        right = labels == 0
        exact = sum(
            abs((top - right)[top == value].sum()) for value in np.unique(top)
        ) / len(top)
    assert state.compute()["adaptive_ece"] == pytest.approx(exact, abs=tolerance)


@pytest.mark.parametrize("n", [100, 104, 105])
def test_equal_mass_bins_are_the_quantile_bins_of_rows_in_cells_of_their_own(
    n: int,
) -> None:
    confidence = np.linspace(0.51, 0.99, n)
    probs = np.stack([confidence, 1 - confidence], axis=1)
    labels = np.arange(n) % 2
    found = state_of(probs, labels).equal_mass_bins()
    wanted = bin_sums(TopLabel(confidence, 1.0 - labels), 15, "quantile")
    # The papers' bins leave out the row with the least confidence.
    least = np.array([[1.0], [confidence[0]], [1.0]])
    np.testing.assert_allclose(np.stack(found)[:, 1:], np.stack(wanted)[:, 1:])
    np.testing.assert_allclose(np.stack(found)[:, :1], np.stack(wanted)[:, :1] + least)


def test_groups_are_the_metrics_of_their_rows() -> None:
    probs, labels = rows_of(3_000, 4)
    weights, groups = RNG.random(3_000), RNG.integers(0, 3, 3_000)
    found = GroupSums.empty(3, 15)
    for chunk in score_chunks(probs, labels, weights):
        found.add(chunk.rows, groups[chunk.place])
    for place in range(3):
        own = groups == place
        kept = {"sample_weight": weights[own]}
        assert found.n_rows()[place] == own.sum()
        nll = metrics.negative_log_likelihood(probs[own], labels[own], **kept)
        assert found.mean("nll")[0][place] == pytest.approx(nll, rel=1e-12)
        ece = metrics.expected_calibration_error(probs[own], labels[own], **kept)
        bins = BinSums(*(part[place] for part in found.bin_sums()))
        assert binned_error(bins, weights[own].sum()) == pytest.approx(ece, rel=1e-12)


class TestRefused:
    """What is wrong is named with its row, and nothing of the call is added."""

    @pytest.mark.parametrize(
        ("row", "label", "weight", "message"),
        [
            ([0.5, np.nan], 0, 1, r"probs to be finite, got nan in row 40,000"),
            ([0.5, 0.4], 0, 1, "each row of probs to sum to 1, got 0.9 in row 40,000"),
            ([0.5, 0.5], 2, 1, r"labels to lie in 0..1, got 2 in row 40,000"),
            (
                [0.5, 0.5],
                1,
                -1,
                "weights to be finite and at least 0, got -1 in row 40,000",
            ),
        ],
    )
    def test_a_row(
        self, row: list[float], label: int, weight: float, message: str
    ) -> None:
        probs, labels, weights = (
            np.full((50_000, 2), 0.5),
            np.zeros(50_000, int),
            np.ones(50_000),
        )
        state = state_of(probs, labels, weights)
        before = state.to_bytes()
        probs[40_000], labels[40_000], weights[40_000] = row, label, weight
        with pytest.raises(InputError, match=message):
            state.update(probs, labels, weights)
        assert state.to_bytes() == before

    @pytest.mark.parametrize("other", [3, None, b"", {}, CalibrationState])
    def test_what_is_no_state_is_not_merged(self, other: Any) -> None:
        state = CalibrationState(n_classes=3)
        before = state.to_bytes()
        with pytest.raises(TypeError, match="expected other to be a CalibrationState"):
            state.merge(other)
        assert state.to_bytes() == before

    def test_other_inputs(self) -> None:
        state = CalibrationState(n_classes=3)
        with pytest.raises(InputError, match="the state to have rows, got none"):
            state.compute()
        state.update(np.empty((0, 3)), np.empty(0, int))
        assert state.n_rows == 0
        with pytest.raises(InputError, match=r"probs to have shape \(N, 3\)"):
            state.update(np.full((2, 2), 0.5), [0, 1])
        with pytest.raises(
            InputError, match="probs to be a float array, got dtype int64"
        ):
            state.update(np.eye(3, dtype=int), [0, 1, 2])
        with pytest.raises(
            InputError, match="the other state's n_bins to be 15, got 10"
        ):
            state.merge(CalibrationState(n_classes=3, n_bins=10))
        zero = state_of(np.eye(3), np.arange(3), np.zeros(3))
        for method in ("compute", "equal_mass_bins", "class_bins"):
            with pytest.raises(InputError, match="have rows, got only rows of weight"):
                getattr(zero, method)()
        empty = CalibrationState(n_classes=3)
        for method in ("compute", "equal_mass_bins", "class_bins"):
            with pytest.raises(InputError, match="the state to have rows, got none"):
                getattr(empty, method)()

    def test_bytes_that_are_no_state(self) -> None:
        good = state_of(np.eye(2), np.arange(2)).to_bytes()
        header, numbers = good.split(b"\n", 1)
        damaged = bytes([numbers[40] ^ 0xFF])
        others = [
            header.replace(b"State 5", b"State 3"),
            header.replace(b"15", b"16"),
            b"[]",
        ]
        bad = [
            b"",
            b"nothing",
            good[:200],
            good[:-1],
            good[:90] + damaged + good[91:],
            pickle.dumps([1]),
        ]
        for each in [*bad, *(b"\n".join([other, numbers]) for other in others)]:
            with pytest.raises(
                InputError, match="the state to be bytes that to_bytes wrote"
            ):
                CalibrationState.from_bytes(each)
        assert (
            CalibrationState.from_bytes(CalibrationState(n_classes=4).to_bytes()).n_rows
            == 0
        )
        for each in (None, 5, "text", good.decode("latin-1"), [1], np.eye(2)):
            with pytest.raises(TypeError, match="expected data to be bytes, got"):
                CalibrationState.from_bytes(each)  # type: ignore[arg-type]
        for each in (bytearray(good), memoryview(good)):
            assert CalibrationState.from_bytes(each).to_bytes() == good  # type: ignore[arg-type]


# ---- Bytes of others ----

HEADER = b'["hf_calib CalibrationState 5", 3, 15, true]'


def packed(header: bytes, numbers: bytes) -> bytes:
    return header + b"\n" + zlib.compress(numbers, 1)


def numbers_of(state: CalibrationState) -> NDArray[np.float64]:
    data = state.to_bytes()
    assert data.split(b"\n", 1)[0] == HEADER
    return np.frombuffer(zlib.decompress(data.split(b"\n", 1)[1])).copy()


def test_hostile_headers_and_sizes_are_refused_at_once() -> None:
    """Whatever the bytes say: less than a second and 100 MB."""
    bomb = zlib.compress(bytes(10**8), 1)
    small = zlib.compress(bytes(8 * 1_000))
    sizes = ["1000000000", "10" + "0" * 3_000, "-3", "0", "true", "3.0", "NaN", "1e3"]
    sizes += ["null", '"3"', "[3]", "1e999", "Infinity"]
    headers = [HEADER.replace(b" 3,", f" {size},".encode()) for size in sizes]
    headers += [HEADER.replace(b"15", size.encode()) for size in sizes if size != "3.0"]
    headers += [
        HEADER.replace(b"true", each) for each in (b'"no"', b"1", b"null", b"[]")
    ]
    headers += [b"[" * 100_000, b"[" * 100 + b"]" * 100, b'{"a":' * 9_000, b"\xff\xfe"]
    headers += [HEADER + b" " * 10**6, HEADER[:-1] + b", 1]", b"", b"null", b"[]"]
    large = b'["hf_calib CalibrationState 5", 17000, 15, true]'
    tracemalloc.start()
    start = time.process_time()
    for header in [*headers, HEADER, large]:
        for body in (bomb, small[:-1]):
            with pytest.raises(InputError, match="bytes that to_bytes wrote"):
                CalibrationState.from_bytes(header + b"\n" + body)
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    assert seconds < 5  # in all, under tracemalloc


def test_a_state_with_too_many_sums_is_refused_before_it_is_made() -> None:
    message = r"at most [0-9,]+ sums, got .*; pass by_class=False"
    for n_classes, n_bins in ((10**9, 15), (10**7, 15), (10**5, 10_000)):
        with pytest.raises(InputError, match=message):
            CalibrationState(n_classes=n_classes, n_bins=n_bins)
        CalibrationState(n_classes=n_classes, n_bins=n_bins, by_class=False).to_bytes()
    with pytest.raises(InputError, match=message):
        CalibrationState(n_classes=10**5).to_bytes()


def test_trailing_and_missing_bytes() -> None:
    good = state_of(*rows_of(50, 3)).to_bytes()
    for each in (good + b"\0", good + good, good[:-1], good[:-5], b"\n" + good):
        with pytest.raises(InputError, match="bytes that to_bytes wrote"):
            CalibrationState.from_bytes(each)
    numbers = numbers_of(state_of(*rows_of(50, 3))).tobytes()
    for each in (numbers + bytes(8), numbers[:-8], numbers[:-1], b"", 2 * numbers):
        with pytest.raises(InputError, match="bytes that to_bytes wrote"):
            CalibrationState.from_bytes(packed(HEADER, each))


@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=25, derandomize=True, deadline=None)
@given(data=st.data())
def test_changed_sums_are_refused(weighted: bool, data: st.DataObject) -> None:
    """A sum that no rows can have, whichever it is: negative, NaN, infinite, or at odds with the others."""
    weights = np.linspace(0.5, 2, 200) if weighted else None
    state = state_of(*rows_of(200, 3), weights)
    numbers = numbers_of(state)
    place = data.draw(st.integers(0, len(numbers) - 1))
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, -1e-3, -5.0, 1e300]))
    is_gap = (
        place == 5 * 15 + 5
    )  # The sum of confidence minus correctness may be negative.
    numbers[place] = -500.0 if is_gap and np.isfinite(value) else value
    with pytest.raises(InputError, match="bytes that to_bytes wrote"):
        CalibrationState.from_bytes(packed(HEADER, numbers.tobytes()))


# The place of each sum of a state of three classes in 15 bins among its numbers, and what determines it.
PLACES = {
    "weights": slice(15, 30),
    "confidences": slice(30, 45),
    "squared confidences": slice(45, 60),
    "correct rows": slice(60, 75),
    "gap": slice(80, 81),
    "rows by the probability of a class": slice(82, 127),
    "probabilities of a class": slice(127, 172),
    "true rows of a class": slice(172, 217),
    "cells": slice(217, None),
}


@pytest.mark.parametrize("sums", PLACES)
@pytest.mark.parametrize(
    "change", [1.0, pytest.param(-1.0, marks=pytest.mark.slow), 0.5]
)
def test_sums_at_odds_with_each_other_are_refused(sums: str, change: float) -> None:
    """One more or one less in any sum that others determine."""
    numbers = numbers_of(state_of(*rows_of(200, 3)))
    filled = np.flatnonzero(numbers[PLACES[sums]]) + (PLACES[sums].start or 0)
    assert len(filled) > 0
    for place in filled[:: len(filled) // 5 + 1]:
        changed = numbers.copy()
        changed[place] += change
        with pytest.raises(InputError, match="bytes that to_bytes wrote"):
            CalibrationState.from_bytes(packed(HEADER, changed.tobytes()))


@pytest.mark.slow
@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    n_classes=st.integers(1, 5),
    n_bins=st.integers(1, 20),
    by_class=st.booleans(),
    seed=st.integers(0, 10**6),
    sharpness=st.sampled_from([0.0, 1.0, 30.0, 1e3]),
    scale=st.sampled_from([None, 0.0, 1.0, 1e-99, 1e99]),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_every_state_of_rows_comes_back(
    n_classes: int,
    n_bins: int,
    by_class: bool,
    seed: int,
    sharpness: float,
    scale: float | None,
    dtype: str,
) -> None:
    rng = np.random.default_rng(seed)
    state = CalibrationState(n_classes=n_classes, n_bins=n_bins, by_class=by_class)
    for _ in range(int(rng.integers(0, 3))):
        n = int(rng.integers(0, 40))
        probs = softmax(
            sharpness * rng.normal(size=(n, n_classes)).astype(dtype), axis=1
        )
        weights = None if scale is None else scale * rng.integers(0, 3, n)
        state.update(probs, rng.integers(0, n_classes, n), weights)
    loaded = CalibrationState.from_bytes(state.to_bytes())
    assert loaded.to_bytes() == state.to_bytes()
    assert (
        CalibrationState.from_bytes(loaded.merge(state).to_bytes()).n_rows
        == 2 * state.n_rows
    )


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_state_of_logits_comes_back(multi_label: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(300, 4, generator=generator)
    logits[:5] = torch.tensor([200.0, 0.0, -200.0, 3.0])
    labels = torch.randint(0, 4, (300,), generator=generator)
    if multi_label:
        labels = torch.randint(0, 2, (300, 4), generator=generator)
    labels[7] = -100
    state = CalibrationState(n_classes=4)
    state.update_logits(logits, labels, multi_label=multi_label)
    sent = CalibrationState.from_bytes(state.to_bytes())
    found = sent.compute()
    wanted = state.compute()
    # A state that was sent has its equal-mass bins from cells.
    assert found.pop("adaptive_ece") == pytest.approx(
        wanted.pop("adaptive_ece"), abs=2e-2
    )
    assert found == wanted
    assert CalibrationState.from_bytes(sent.to_bytes()).to_bytes() == sent.to_bytes()
