"""A state of logits must have the one-shot metrics, however the rows are cut, merged and spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

import hf_calib.metrics as metrics
from hf_calib._errors import InputValueError
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.sums import class_gaps, uniform_bins
from tests.helpers.gloo_pair import run_on_two
from tests.helpers.sampled import EXACT


def random_batch(
    n_examples: int, n_classes: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(
        n_examples, n_classes, generator=generator, dtype=torch.float64
    )
    return logits.to(dtype), torch.randint(
        0, n_classes, (n_examples,), generator=generator
    )


def random_multi_label(
    n_examples: int, n_classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, _ = random_batch(n_examples, n_classes)
    noise = 2 * torch.randn(
        logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return logits, (logits + noise > 1).long()


def one_shot(
    probs: np.ndarray, labels: np.ndarray, n_bins: int = 15
) -> dict[str, float]:
    adaptive = metrics.expected_calibration_error(
        probs, labels, n_bins=n_bins, binning="quantile"
    )
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "ece": metrics.expected_calibration_error(probs, labels, n_bins=n_bins),
        "adaptive_ece": adaptive,
        "classwise_ece": metrics.classwise_calibration_error(
            probs, labels, n_bins=n_bins
        ),
        "mce": metrics.maximum_calibration_error(probs, labels, n_bins=n_bins),
        "nll": metrics.negative_log_likelihood(probs, labels),
        "brier": metrics.brier_score(probs, labels),
    }


def streamed(
    logits: torch.Tensor,
    labels: torch.Tensor,
    batch: int = 64,
    *,
    multi_label: bool = False,
    **settings: Any,
) -> CalibrationState:
    state = CalibrationState(n_classes=logits.shape[-1], **settings)
    for rows, targets in zip(logits.split(batch), labels.split(batch), strict=True):
        state.update_logits(rows, targets, multi_label=multi_label)
    return state


def gaps_of(state: CalibrationState) -> np.ndarray:
    return class_gaps(state.class_bins())


def assert_same(state: CalibrationState, expected: dict[str, float]) -> None:
    computed = state.compute()
    assert computed.keys() == expected.keys()
    for name, value in expected.items():
        assert type(computed[name]) is float
        assert computed[name] == pytest.approx(value, **EXACT), name


# The same numbers as the one-shot functions


@pytest.mark.parametrize("n_classes", [2, 10, 100])
def test_equals_the_one_shot_metrics(n_classes: int) -> None:
    logits, labels = random_batch(700, n_classes)
    expected = one_shot(softmax(logits.numpy(), axis=1), labels.numpy())
    assert_same(streamed(logits, labels), expected)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7, 500])
@pytest.mark.parametrize("n_bins", [1, 10])
def test_batch_size_and_chunk_size_do_not_matter(
    batch: int, n_bins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = random_batch(150 if batch == 1 else 500, 6)
    expected = one_shot(softmax(logits.numpy(), axis=1), labels.numpy(), n_bins)
    assert_same(streamed(logits, labels, batch, n_bins=n_bins), expected)
    monkeypatch.setattr("hf_calib.metrics.on_device._CHUNK_ELEMENTS", 20)
    assert_same(streamed(logits, labels, batch, n_bins=n_bins), expected)
    monkeypatch.setattr("hf_calib.metrics.state._MOST_KEPT", 60)
    assert_same(streamed(logits, labels, batch, n_bins=n_bins), expected)


@pytest.mark.parametrize("multi_label", [False, True])
def test_states_of_parts_merge(multi_label: bool) -> None:
    logits, labels = (random_multi_label if multi_label else random_batch)(600, 5)
    whole = streamed(logits, labels, multi_label=multi_label)
    sent = CalibrationState.from_bytes(whole.to_bytes())
    parts = [
        streamed(logits[k::3], labels[k::3], multi_label=multi_label) for k in range(3)
    ]
    merged = parts[2].merge(parts[0]).merge(parts[1])
    assert merged.compute() == pytest.approx(sent.compute(), **EXACT)
    assert merged.n_rows == (3_000 if multi_label else 600)


def test_its_state_is_that_of_the_probabilities() -> None:
    logits, labels = random_batch(900, 6)
    probs = softmax(logits.numpy(), axis=1)
    state = CalibrationState(n_classes=6)
    state.update(probs, labels.numpy())
    ours = streamed(logits, labels)
    sums_of_ours = ours.sums
    for name, sums in state.sums.items():
        np.testing.assert_allclose(
            sums_of_ours[name], sums, rtol=1e-10, atol=1e-12, err_msg=name
        )


def test_arrays_and_logits_in_one_state() -> None:
    logits, labels = random_batch(900, 6)
    probs = softmax(logits.numpy(), axis=1)
    expected = streamed(logits, labels).compute()
    mixed = CalibrationState(n_classes=6)
    mixed.update_logits(logits[:200], labels[:200])
    mixed.update(probs[200:500], labels[200:500].numpy())
    mixed.update_logits(logits[500:], labels[500:])
    assert mixed.n_rows == 900
    found = mixed.compute()
    # Equal-mass bins are those of cells if some of the rows are.
    exact = expected.pop("adaptive_ece")
    assert found.pop("adaptive_ece") == pytest.approx(exact, abs=1e-3)
    assert found == pytest.approx(expected, **EXACT)


def test_reading_changes_no_later_value() -> None:
    logits, labels = random_batch(700, 6)
    state = CalibrationState(n_classes=6)
    state.update_logits(logits[:300], labels[:300])
    state.compute()
    state.equal_mass_bins()
    state.to_bytes()
    state.update_logits(logits[300:], labels[300:])
    assert_same(state, streamed(logits, labels).compute())


def test_invalid_logits_are_not_merged_or_sent() -> None:
    state = streamed(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    before = state.compute()
    wrong = streamed(torch.zeros(3, 2), torch.tensor([0, 5, 1]))
    for use in (lambda: state.merge(wrong), wrong.to_bytes):
        with pytest.raises(InputValueError, match=r"labels to lie in 0\.\.1"):
            use()
    assert state.compute() == before


def test_tokens_are_flattened_and_ignored_labels_left_out() -> None:
    logits, labels = random_batch(240, 7)
    labels[::3] = -100
    logits[0] = torch.nan  # padding may hold anything
    kept = labels != -100
    expected = one_shot(softmax(logits[kept].numpy(), axis=1), labels[kept].numpy())
    state = CalibrationState(n_classes=7)
    state.update_logits(logits.view(8, 30, 7), labels.view(8, 30))
    assert_same(state, expected)
    assert len(state.top_label_rows.confidence) == 160
    assert len(state.top_label_rows.correct) == 160


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_narrow_labels_do_not_wrap_around(dtype: torch.dtype) -> None:
    logits, labels = random_batch(500, 200)
    labels[labels > 100] = -100
    narrow = streamed(logits, labels.to(dtype))
    wide = streamed(logits, labels)
    assert narrow.compute() == wide.compute()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_are_widened_before_the_softmax(dtype: torch.dtype) -> None:
    logits, labels = random_batch(300, 5, dtype)
    assert (
        streamed(logits, labels).compute() == streamed(logits.float(), labels).compute()
    )


def test_large_and_masked_logits_keep_their_nll() -> None:
    logits = torch.tensor([[2000.0, 0.0, -torch.inf], [1000.5, 1000.0, 0.0]])
    state = streamed(logits, torch.tensor([1, 0]))
    assert state.compute()["nll"] == pytest.approx(
        (2000 + np.log1p(np.exp(-0.5))) / 2, rel=1e-7
    )


# What it keeps


@pytest.mark.parametrize("kind", [None, "multi_label", "soft_labels"])
def test_update_never_reads_a_value_back(kind: str | None) -> None:
    """Meta tensors have no values, so whatever would wait for a device raises on them."""
    logits = torch.empty(8, 5, device="meta", dtype=torch.float16)
    shape = (8,) if kind is None else (8, 5)
    dtype = torch.float16 if kind == "soft_labels" else torch.long
    labels = torch.empty(shape, device="meta", dtype=dtype)
    flags = {} if kind is None else {kind: True}
    state = CalibrationState(n_classes=5)
    state.update_logits(logits, labels, **flags)
    state.update_logits(logits, labels, **flags)


# Several labels per row


@pytest.mark.parametrize("label_dtype", [torch.long, torch.float32, torch.bool])
def test_multi_label_equals_binary_metrics(label_dtype: torch.dtype) -> None:
    logits, labels = random_multi_label(300, 4)
    positive = expit(logits.numpy())
    as_binary = np.stack([1 - positive, positive], axis=-1).reshape(-1, 2)
    expected = one_shot(as_binary, labels.numpy().ravel())
    expected["brier"] /= 2  # (p - y)^2, where the two-class sum counts it twice
    gaps = [class_gap(positive[:, c], labels.numpy()[:, c]) for c in range(4)]
    expected["classwise_ece"] = np.mean(gaps)
    state = streamed(logits, labels.to(label_dtype), multi_label=True)
    assert_same(state, expected)
    np.testing.assert_allclose(gaps_of(state), gaps, rtol=1e-12)


def class_gap(probs: np.ndarray, labels: np.ndarray) -> float:
    bins = uniform_bins(probs, 15)
    return sum(abs((probs - labels)[bins == m].sum()) for m in range(15)) / len(probs)


def test_multi_label_leaves_out_single_labels() -> None:
    logits, labels = random_multi_label(200, 3)
    labels[::2, 0] = -100
    labels[:, 2] = -100
    logits[0, 0] = torch.nan
    state = streamed(logits, labels, multi_label=True)
    assert len(state.top_label_rows.confidence) == 300
    first = class_gap(expit(logits[1::2, 0].numpy()), labels[1::2, 0].numpy())
    second = class_gap(expit(logits[:, 1].numpy()), labels[:, 1].numpy())
    np.testing.assert_allclose(gaps_of(state), [first, second, np.nan], rtol=1e-12)
    assert state.compute()["classwise_ece"] == pytest.approx(
        (first + second) / 2, **EXACT
    )


def test_multi_label_nll_of_extreme_logits_is_exact() -> None:
    logits = torch.tensor([[500.0, -torch.inf]])
    state = streamed(logits, torch.tensor([[0, 0]]), multi_label=True)
    assert state.compute()["nll"] == 250


# What users get wrong


def test_empty_state_has_no_metrics() -> None:
    empty = CalibrationState(n_classes=2)
    only_ignored = streamed(torch.zeros(3, 2), torch.full((3,), -100))
    for state in (empty, only_ignored):
        assert state.top_label_rows.confidence.shape == (0,)
        assert state.top_label_rows.correct.shape == (0,)
        for read in (state.compute, state.class_bins, state.equal_mass_bins):
            with pytest.raises(
                ValueError, match=r"to have rows, got none; .* labels of -100 do not"
            ):
                read()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_counted(bad: float) -> None:
    logits, labels = random_batch(50, 4)
    logits[3, 1] = logits[3, 2] = logits[17, 0] = bad
    state = streamed(logits, labels, batch=10)
    with pytest.raises(
        ValueError, match=r"be finite, got NaN in 2 of 50 rows; look for overflow"
    ):
        state.compute()


@pytest.mark.parametrize(
    ("labels", "multi_label", "message"),
    [
        (
            [0, 4, 1, -1],
            False,
            r"labels to lie in 0\.\.3 or be -100, got 2 that do not",
        ),
        (
            [[0, 1, 2, 0], [1, 1, 0, 0]],
            True,
            r"labels to be 0, 1 or -100, got 1 that do not",
        ),
    ],
)
def test_labels_out_of_range_are_counted(
    labels: list, multi_label: bool, message: str
) -> None:
    logits = torch.zeros(len(labels), 4)
    state = streamed(logits, torch.tensor(labels), multi_label=multi_label)
    with pytest.raises(ValueError, match=message):
        state.compute()


@pytest.mark.parametrize(
    ("logits", "labels", "multi_label", "error", "message"),
    [
        (
            np.zeros((2, 3)),
            torch.zeros(2),
            False,
            TypeError,
            r"logits to be a torch\.Tensor, got ndarray",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2, 3).long(),
            False,
            ValueError,
            r"set multi_label=True only",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2).long(),
            True,
            ValueError,
            r"have shape \(2, 3\), got \(2,\)",
        ),
        (
            torch.zeros(2, 1),
            torch.zeros(2).long(),
            False,
            ValueError,
            r"sigmoid output needs multi_label=True",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    logits: object,
    labels: torch.Tensor,
    multi_label: bool,
    error: type[Exception],
    message: str,
) -> None:
    state = CalibrationState(n_classes=np.shape(logits)[-1])
    with pytest.raises(error, match=message):
        state.update_logits(logits, labels, multi_label=multi_label)


def test_logits_of_other_classes_are_refused() -> None:
    state = streamed(*random_batch(20, 3))
    with pytest.raises(InputValueError, match="have the 3 classes of the state, got 4"):
        state.update_logits(*random_batch(20, 4))


# Several processes


UNEVEN, ONE_WITHOUT_ROWS = [150, 90], [0, 120]


def reduce_in_process(rank: int, folder: Path) -> None:
    """Take this rank's share of the rows, reduce, and write down what it then holds."""
    held: dict[str, object] = {}
    for sizes in (UNEVEN, ONE_WITHOUT_ROWS):
        logits, labels = (part.split(sizes)[rank] for part in spread_batch(sizes))
        state = CalibrationState(n_classes=5)
        if sizes[rank] > 0:
            state = streamed(logits, labels, batch=16)
        state.all_reduce()
        held[str(sizes)] = {
            "metrics": state.compute(),
            "class_gaps": gaps_of(state).tolist(),
            "confidences": state.top_label_rows.confidence.tolist(),
            "correct": state.top_label_rows.correct.tolist(),
        }
    nobody = CalibrationState(n_classes=5)
    nobody.all_reduce()
    held["nobody"] = len(nobody.top_label_rows.confidence)
    try:
        streamed(*random_batch(10, 3 + rank)).all_reduce()
    except ValueError as error:
        held["error"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(held))


def spread_batch(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = random_batch(sum(sizes), 5)
    labels[::7] = -100
    return logits, labels


@pytest.mark.slow
def test_all_processes_hold_the_same_state(tmp_path: Path) -> None:
    run_on_two(reduce_in_process, tmp_path)
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert first == second
    for sizes in (UNEVEN, ONE_WITHOUT_ROWS):
        alone = streamed(*spread_batch(sizes))
        held = first[str(sizes)]
        assert held["metrics"] == pytest.approx(alone.compute(), **EXACT)
        assert held["class_gaps"] == pytest.approx(gaps_of(alone).tolist(), **EXACT)
        assert held["confidences"] == alone.top_label_rows.confidence.tolist()
        assert held["correct"] == alone.top_label_rows.correct.tolist()
    assert first["nobody"] == 0
    assert first["error"].startswith(
        "expected every process to have the n_classes, n_bins and by_class (4, 15, 1), "
        "got (3, 15, 1); evaluate the same model"
    )


# A vocabulary, whose classes have no sums of their own


def test_a_vocabulary_has_the_same_metrics_but_that_of_its_classes() -> None:
    logits, labels = random_batch(400, 51)
    labels[::7] = -100
    counts = (labels != -100).numpy()
    expected = one_shot(softmax(logits.numpy(), axis=1)[counts], labels.numpy()[counts])
    del expected["classwise_ece"]
    whole = streamed(logits, labels, by_class=False)
    assert_same(whole, expected)
    parts = streamed(logits[:100], labels[:100], by_class=False)
    parts.merge(streamed(logits[100:], labels[100:], by_class=False))
    sent = CalibrationState.from_bytes(whole.to_bytes())
    assert parts.compute() == pytest.approx(sent.compute(), **EXACT)
    with pytest.raises(
        InputValueError, match=r"few enough for classwise sums, got 51 classes"
    ):
        _ = gaps_of(whole)


# Soft labels


def soft_batch(n: int = 40, n_classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    shares = torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    return logits, (2 * shares).softmax(1)


@pytest.mark.parametrize("n_classes", [2, 5, 40])
def test_soft_labels_have_the_metrics_of_their_shares(n_classes: int) -> None:
    logits, shares = soft_batch(n_classes=n_classes)
    counted = torch.arange(40) != 7
    probs = logits.softmax(1)[counted].numpy()
    own = shares[counted].numpy()
    shares[7] = -100
    state = CalibrationState(n_classes=n_classes)
    state.update_logits(logits[:9], shares[:9], soft_labels=True)
    state.update_logits(logits[9:], shares[9:], soft_labels=True)
    assert_same(state, one_shot(probs, own))
    assert state.n_rows == 39
    hard = metrics.accuracy(probs, own.argmax(axis=1))
    assert state.compute()["accuracy"] != pytest.approx(hard)


def test_rows_of_soft_labels_are_divided_by_their_sum() -> None:
    logits, shares = soft_batch()
    rounded = (shares * torch.linspace(0.996, 1.004, 40)[:, None]).float()
    state = CalibrationState(n_classes=5)
    state.update_logits(logits, rounded, soft_labels=True)
    exact = CalibrationState(n_classes=5)
    exact.update_logits(logits, shares, soft_labels=True)
    assert state.compute() == pytest.approx(exact.compute(), rel=1e-5)
    # Sums of shares that are not 1 would not be those of rows.
    assert CalibrationState.from_bytes(state.to_bytes()).n_rows == 40


def test_one_hot_soft_labels_are_hard_ones_also_of_masked_classes() -> None:
    logits, shares = soft_batch()
    logits[:, 4] = -torch.inf
    labels = shares[:, :4].argmax(1)
    soft = CalibrationState(n_classes=5)
    soft.update_logits(
        logits, torch.nn.functional.one_hot(labels, 5).float(), soft_labels=True
    )
    hard = CalibrationState(n_classes=5)
    hard.update_logits(logits, labels)
    assert soft.compute() == pytest.approx(hard.compute(), rel=1e-12)


def test_soft_labels_that_are_not_shares_are_counted() -> None:
    logits, shares = soft_batch()
    shares[3, 0] += 0.1
    shares[5, :2] = torch.tensor([-0.1, torch.nan])
    shares[7] = torch.tensor([1.2, -0.2, 0.0, 0.0, 0.0])
    # A row is ignored as a whole.
    shares[9, 0] = -100
    state = CalibrationState(n_classes=5)
    state.update_logits(logits, shares, soft_labels=True)
    with pytest.raises(ValueError, match=r"shares of at least 0 that sum to 1.* got 4"):
        state.compute()


def test_soft_labels_are_of_one_softmax() -> None:
    logits, shares = soft_batch()
    state = CalibrationState(n_classes=5)
    with pytest.raises(ValueError, match="one of multi_label and soft_labels"):
        state.update_logits(logits, shares, soft_labels=True, multi_label=True)
    with pytest.raises(TypeError, match="labels to be integers"):
        state.update_logits(logits, shares)


@pytest.mark.parametrize("by_class", [True, False])
def test_states_of_soft_labels_are_merged_and_sent(by_class: bool) -> None:
    """Also next to hard labels, of which a one-hot row is one."""
    logits, shares = soft_batch()
    labels = shares[25:].argmax(1)
    whole = CalibrationState(n_classes=5, by_class=by_class)
    mixed = torch.cat([shares[:25], torch.nn.functional.one_hot(labels, 5)])
    whole.update_logits(logits, mixed, soft_labels=True)
    soft = CalibrationState(n_classes=5, by_class=by_class)
    soft.update_logits(logits[:25], shares[:25], soft_labels=True)
    hard = CalibrationState(n_classes=5, by_class=by_class)
    hard.update_logits(logits[25:], labels)
    merged = CalibrationState.from_bytes(soft.to_bytes()).merge(hard)
    wanted = CalibrationState.from_bytes(whole.to_bytes())
    assert merged.compute() == pytest.approx(wanted.compute(), **EXACT)
    assert merged.n_rows == 40
