from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib.scaling import HistogramBinning, IsotonicScaling
from tests.helpers.sampled import sampled

KINDS = ["uniform", "equal_mass"]


def by_loops(probs: np.ndarray, labels: np.ndarray, edges: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The frequency of the class in the bin (low, high] of each new probability; the midpoint if empty."""
    scores = np.empty_like(new)
    for row, column in np.ndindex(*new.shape):
        low_high = zip(edges[column, :-1], edges[column, 1:], strict=True)
        bins = list(low_high)
        # The first bin takes what lies below it, the last what lies above.
        found = [b for b, (_, high) in enumerate(bins[:-1]) if new[row, column] <= high]
        number = found[0] if found else len(bins) - 1
        low = -np.inf if number == 0 else bins[number][0]
        high = np.inf if number == len(bins) - 1 else bins[number][1]
        members = (probs[:, column] > low) & (probs[:, column] <= high)
        frequency = (labels[members] == column).mean() if members.any() else sum(bins[number]) / 2
        scores[row, column] = frequency
    return scores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("c", "n_bins"), [(2, 15), (4, 7), (3, 1), (3, 90)])
def test_is_the_frequency_in_the_bin(kind: str, c: int, n_bins: int) -> None:
    logits, labels = sampled(80, c, 2.0)
    fresh = sampled(40, c, 2.0, seed=1)[0]
    scaler = HistogramBinning(n_bins, binning=kind).fit(logits, labels)
    expected = by_loops(softmax(logits, axis=1), labels, scaler.edges_, softmax(fresh, axis=1))
    np.testing.assert_allclose(scaler.class_scores(fresh), expected, rtol=1e-12)
    expected += 1e-9 * softmax(fresh, axis=1)
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(scaler.predict_proba(fresh), expected, rtol=1e-9)


def test_uniform_bins_take_a_boundary_from_below() -> None:
    probs = np.array([[0.25, 0.75], [0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
    with np.errstate(divide="ignore"):
        logits = np.log(probs)
    scaler = HistogramBinning(4).fit(logits, np.array([1, 0, 0, 0]))
    np.testing.assert_array_equal(scaler.edges_, [[0, 0.25, 0.5, 0.75, 1]] * 2)
    np.testing.assert_array_equal(scaler.frequencies_, [[0, 1, 1, 1], [0, 0, 1, 0.875]])


def test_equal_mass_bins_hold_equal_numbers() -> None:
    logits, labels = sampled(1000, 3, 2.0)
    scaler = HistogramBinning(10, binning="equal_mass").fit(logits, labels)
    for column, edges in zip(softmax(logits, axis=1).T, scaler.edges_, strict=True):
        counts = np.bincount(np.searchsorted(edges[1:-1], column, side="left"))
        assert len(counts) == 10
        assert counts.max() - counts.min() <= 2


def test_a_probability_on_an_edge_is_in_the_bin_below() -> None:
    logits, labels = [[0.0, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 0, 1]
    scaler = HistogramBinning(2).fit(logits, labels)
    np.testing.assert_allclose(scaler.frequencies_, [[1 / 3, 1], [1 / 3, 1]])
    np.testing.assert_allclose(scaler.class_scores([[0.0, 0.0]]), [[1 / 3, 1 / 3]])
    by_mass = HistogramBinning(2, binning="equal_mass").fit(logits, labels)
    assert by_mass.edges_[0, 1] == 0.5
    np.testing.assert_allclose(by_mass.frequencies_[0], [1 / 3, 1])


def test_an_empty_bin_keeps_its_midpoint() -> None:
    logits = np.log([[0.9, 0.1]] * 3)
    scaler = HistogramBinning(5).fit(logits, np.array([0, 0, 1]))
    # Uniform edges are rounded to float32.
    np.testing.assert_allclose(scaler.frequencies_[0], [0.1, 0.3, 0.5, 0.7, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(scaler.frequencies_[1], [1 / 3, 0.3, 0.5, 0.7, 0.9], rtol=1e-6)
    assert scaler.frequencies_[0, 4] == 2 / 3


def test_a_row_that_only_got_zeros_keeps_the_models_probabilities() -> None:
    rows = np.array([[0.45, 0.35, 0.2], [0.35, 0.45, 0.2], [0.05, 0.05, 0.9]])
    scaler = HistogramBinning(2).fit(np.log(rows), np.array([2, 2, 2]))
    assert scaler.class_scores(np.log([[0.4, 0.1, 0.5]]))[0, :2].tolist() == [0, 0]
    scaler.frequencies_[:] = 0
    np.testing.assert_allclose(scaler.predict_proba(np.log(rows)), rows, rtol=1e-12)


def test_refused() -> None:
    logits, labels = sampled(20, 3, 1.0)
    with pytest.raises(ValueError, match="n_bins to be at least 1, got 0"):
        HistogramBinning(0).fit(logits, labels)
    with pytest.raises(TypeError, match="n_bins to be an integer"):
        HistogramBinning(1.5).fit(logits, labels)
    with pytest.raises(ValueError, match=r"expected binning to be one of .* got 'quantile'"):
        HistogramBinning(binning="quantile").fit(logits, labels)
    with pytest.raises(ValueError, match="labels of -100"):
        HistogramBinning().fit(logits, np.append(labels[1:], -100))
    with pytest.raises(ValueError, match="at least one example"):
        HistogramBinning().fit(np.zeros((0, 3)), [])
    scaler = HistogramBinning().fit(logits, labels)
    with pytest.raises(ValueError, match="the 3 classes of fit"):
        scaler.predict_proba(logits[:, :2])


@pytest.mark.parametrize("scaling", [HistogramBinning(), IsotonicScaling(), IsotonicScaling("joint")])
def test_a_masked_class_stays_masked(scaling: HistogramBinning | IsotonicScaling) -> None:
    """Also where the class of the lowest bin is right now and then."""
    logits, labels = sampled(300, 4, 2.0)
    scaling.fit(logits, labels)
    masked = np.where([False, False, True, False], -np.inf, logits)
    probs = scaling.predict_proba(masked)
    assert (probs[:, 2] == 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1)
    assert (scaling.class_scores(masked)[:, 2] == 0).all()
