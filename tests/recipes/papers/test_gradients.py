"""Weights, gradient factors and regions against the papers' formulas."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from papers.gradients import (
    gradient_factors,
    last_layer_gradient_norms,
    reversed_range,
    simplex_grid,
    uncertainty_weights,
)
from scipy.special import lambertw

from hf_calib.losses import LOSSES, CalibrationLoss, make_loss
from hf_calib.losses.pointwise import MAX_INVERSE_GAMMA

pytestmark = pytest.mark.slow

P = np.linspace(0.005, 0.995, 199)
GRID = simplex_grid(40)
LABELS = np.zeros(len(GRID), dtype=int)


def of_three(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose label, class 1, has probability p, and whose other two classes differ."""
    return np.stack([0.7 * (1 - p), p, 0.3 * (1 - p)], axis=1), np.ones(
        len(p), dtype=int
    )


def inverse_focal(gamma: float) -> CalibrationLoss:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # gammas that push labels down are what is looked at
        return make_loss("inverse_focal", gamma=gamma)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.0, 5.0])
def test_focal_and_inverse_focal_have_the_papers_factor(gamma: float) -> None:
    focal = (1 - P) ** gamma - gamma * P * (1 - P) ** (gamma - 1) * np.log(P)
    inverse = (1 + P) ** gamma + gamma * P * (1 + P) ** (gamma - 1) * np.log(P)
    for loss, wanted in (
        (make_loss("focal", gamma=gamma), focal),
        (inverse_focal(gamma), inverse),
    ):
        factors = gradient_factors(loss, *of_three(P))
        np.testing.assert_allclose(factors, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gamma", [1.0, 2.5, 5.0])
def test_dual_focal_factor_counts_the_rivals_gradient_in(gamma: float) -> None:
    p, q = GRID[:, 0], np.where(GRID[:, :1] > GRID + 1e-12, GRID, 0).max(axis=1)
    logs = np.log(GRID)
    below = logs < logs[:, :1]
    clear = below.any(axis=1) & (
        np.abs(logs - logs[:, :1])[:, 1:].min(axis=1) > 1e-9
    )  # no ties
    weight = 1 - p + q
    # d(q - p)/dz_y = -p (q + 1 - p), and the label's own pull is 1 - p.
    factor = weight**gamma - gamma * weight ** (gamma - 1) * p * (q + 1 - p) / (
        1 - p
    ) * np.log(p)
    found = gradient_factors(make_loss("dual_focal", gamma=gamma), GRID, LABELS)
    np.testing.assert_allclose(found[clear], factor[clear], rtol=1e-10)
    weights = uncertainty_weights(make_loss("dual_focal", gamma=gamma), GRID, LABELS)
    np.testing.assert_allclose(weights[clear], weight[clear] ** gamma, rtol=1e-12)


@pytest.mark.parametrize(("gamma", "norm"), [(2.0, 2.0), (1.0, 1.0), (3.0, 1.5)])
def test_the_generalised_brier_score_is_the_weight_of_bsce(
    gamma: float, norm: float
) -> None:
    wanted = np.linalg.norm(GRID - np.eye(3)[0], ord=norm, axis=1) ** gamma
    for name in ("bsce", "bsce_gra"):
        weights = uncertainty_weights(
            make_loss(name, gamma=gamma, norm=norm), GRID, LABELS
        )
        np.testing.assert_allclose(weights, wanted, rtol=1e-12)
    # What distinguishes the two: with the weight detached, it is the factor.
    factors = gradient_factors(
        make_loss("bsce_gra", gamma=gamma, norm=norm), GRID, LABELS
    )
    np.testing.assert_allclose(factors, wanted, rtol=1e-12)


def test_inverse_focal_turns_around_where_lambert_says() -> None:
    worst = lambertw(np.exp(-1)).real
    assert worst == pytest.approx(0.2785, abs=5e-5)
    assert abs(MAX_INVERSE_GAMMA - 1 / worst) < 2e-3
    assert reversed_range(0.0) is None
    assert reversed_range(1 / worst - 1e-9) is None
    low, high = reversed_range(1 / worst + 1e-6) or (0, 1)
    assert low < worst < high < low + 0.01
    for gamma in (4.0, 8.0):
        ends = np.array(reversed_range(gamma))
        points = np.r_[ends, ends.mean(), ends[0] / 2, (1 + ends[1]) / 2]
        at = gradient_factors(inverse_focal(gamma), *of_three(points))
        np.testing.assert_allclose(at[:2], 0, atol=1e-9)
        assert at[2] < 0 < at[3:].min()
    with pytest.raises(ValueError, match=r"expected gamma to lie in \[0, 1000\], got"):
        reversed_range(-4.0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "name", [name for name in LOSSES if not make_loss(name).couples_batch]
)
def test_norms_in_the_last_layer_are_autograds(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 5, bias=bias, dtype=torch.float64)
    features, labels = (
        torch.randn(12, 6, dtype=torch.float64),
        torch.randint(0, 5, (12,)),
    )
    loss = make_loss(name)
    norms = last_layer_gradient_norms(
        loss, head(features).detach(), labels, features, bias=bias
    )
    for row in range(len(features)):
        value = loss(
            head(features[row : row + 1]), labels[row : row + 1], reduction="sum"
        )
        gradients = torch.autograd.grad(value, list(head.parameters()))
        by_autograd = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert norms[row] == pytest.approx(float(by_autograd), rel=1e-12)
