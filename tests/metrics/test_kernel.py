"""The kernel calibration error against the authors' code and against scipy's densities, pair by pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import dirichlet

from hf_calib.metrics import kde_calibration_error
from hf_calib.metrics.kernel import BANDWIDTHS
from tests.helpers.sampled import EXACT

PREDICTIONS = ["N5000_K10", "N2000_K100", "N300_K2"]


def load(golden: Path, case: str) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """The rows that the authors' code was run on, and its results."""
    with np.load(golden / f"metrics_{case}.npz") as file:
        n_used = int(file["kde_n_used_first_rows"])
        probs, labels = (
            softmax(file["logits"][:n_used], axis=1),
            file["labels"][:n_used],
        )
        return (
            probs,
            labels,
            {key: float(file[key]) for key in file if key.startswith("kde_")},
        )


def random_predictions(
    n_examples: int, n_classes: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(n_classes), n_examples), rng.integers(
        0, n_classes, n_examples
    )


class TestAgainstTheAuthorsCode:
    @pytest.mark.parametrize("case", PREDICTIONS)
    @pytest.mark.parametrize(("bandwidth", "key"), [(0.02, "bw0p02"), (0.1, "bw0p1")])
    def test_top_label(
        self, golden: Path, case: str, bandwidth: float, key: str
    ) -> None:
        probs, labels, theirs = load(golden, case)
        l1 = kde_calibration_error(probs, labels, bandwidth=bandwidth)
        l2 = kde_calibration_error(probs, labels, bandwidth=bandwidth, norm="l2")
        assert l1 == pytest.approx(theirs[f"kde_toplabel_{key}_l1"], **EXACT)
        # Theirs is not rooted.
        assert l2**2 == pytest.approx(theirs[f"kde_toplabel_{key}_l2"], **EXACT)

    def test_canonical(self, golden: Path) -> None:
        probs, labels, theirs = load(golden, "N300_K2")
        error = kde_calibration_error(probs, labels, bandwidth=0.1, kind="canonical")
        assert error == pytest.approx(theirs["kde_canonical_bw0p1_l1"], **EXACT)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_canonical(n_classes: int, soft: bool) -> None:
    probs, hard = random_predictions(40, n_classes)
    shares = (
        random_predictions(40, n_classes, seed=1)[0]
        if soft
        else np.eye(n_classes)[hard]
    )
    gaps = []
    for i in range(40):
        others = np.arange(40) != i
        kernel = np.array(
            [
                dirichlet.pdf(probs[i] / probs[i].sum(), p / 0.1 + 1)
                for p in probs[others]
            ]
        )
        gaps.append(kernel @ shares[others] / kernel.sum() - probs[i])
    labels = shares if soft else hard

    def error(norm: str) -> float:
        return kde_calibration_error(
            probs, labels, bandwidth=0.1, kind="canonical", norm=norm
        )

    assert error("l1") == pytest.approx(np.abs(gaps).sum(axis=1).mean(), rel=1e-10)
    assert error("l2") == pytest.approx(
        np.sqrt(np.square(gaps).sum(axis=1).mean()), rel=1e-10
    )


class TestBandwidth:
    @pytest.mark.slow
    def test_is_the_most_likely_of_the_grid(self) -> None:
        probs, labels = random_predictions(40, 3)
        likelihoods = []
        for bandwidth in BANDWIDTHS:
            densities = np.array(
                [
                    [dirichlet.pdf(p / p.sum(), q / bandwidth + 1) for q in probs]
                    for p in probs
                ]
            )
            np.fill_diagonal(densities, 0)
            with np.errstate(divide="ignore"):
                likelihoods.append(np.log(densities.sum(axis=1)).sum())
        chosen = BANDWIDTHS[np.argmax(likelihoods)]
        given = kde_calibration_error(probs, labels, kind="canonical", bandwidth=chosen)
        assert kde_calibration_error(probs, labels, kind="canonical") == pytest.approx(
            given, **EXACT
        )

    @pytest.mark.parametrize("bandwidth", [0.0, -1.0, 1e-9, np.nan, np.inf])
    def test_out_of_range_is_refused(self, bandwidth: float) -> None:
        with pytest.raises(
            ValueError,
            match=r"expected bandwidth to be finite and at least 1e-08, got .*; bandw",
        ):
            kde_calibration_error(np.eye(2), [0, 1], bandwidth=bandwidth)


@pytest.mark.parametrize("kind", ["top_label", "canonical"])
@pytest.mark.parametrize("bandwidth", [1e-8, 1e-5, 0.02, 1.0, None])
def test_certain_predictions_give_no_nan(kind: str, bandwidth: float | None) -> None:
    probs = np.vstack([np.eye(3), np.eye(3), [[0.2, 0.5, 0.3]]])
    for labels in ([0, 1, 2, 0, 1, 2, 1], [0, 1, 2, 1, 2, 0, 1], [1, 2, 0, 1, 2, 0, 0]):
        error = kde_calibration_error(probs, labels, bandwidth=bandwidth, kind=kind)
        assert 0 <= error <= 2
