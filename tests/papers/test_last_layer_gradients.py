"""Per-example gradients of the last layer against autograd's, and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import softmax

from hf_calib.losses import LOSSES, make_loss
from hf_calib.papers import last_layer_gradient_norms

PER_EXAMPLE = [name for name in LOSSES if not make_loss(name).couples_batch]


def head_and_data(bias: bool = True) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(6, 5, bias=bias, dtype=torch.float64)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    features = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return head, features, torch.randint(0, 5, (12,), generator=generator)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_equal_to_autograds(name: str, bias: bool) -> None:
    head, features, labels = head_and_data(bias)
    loss = make_loss(name)
    norms = last_layer_gradient_norms(loss, head(features), labels, features, bias=bias)
    for row in range(len(features)):
        value = loss(head(features[row : row + 1]), labels[row : row + 1], reduction="sum")
        gradients = torch.autograd.grad(value, list(head.parameters()))
        by_autograd = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert norms[row] == pytest.approx(float(by_autograd), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "power"),
    [
        ("cross_entropy", {}, 0.5),
        ("bsce_gra", {"gamma": 2.0}, 1.5),
        ("bsce_gra", {"gamma": 5.0}, 3.0),
    ],
)
def test_a_power_of_the_brier_score(name: str, options: dict[str, float], power: float) -> None:
    head, features, labels = head_and_data()
    logits = head(features).detach().numpy()
    brier = ((softmax(logits, axis=1) - np.eye(5)[labels]) ** 2).sum(axis=1)
    expected = brier**power * np.sqrt((features.numpy() ** 2).sum(axis=1) + 1)
    norms = last_layer_gradient_norms(make_loss(name, **options), logits, labels, features)
    np.testing.assert_allclose(norms, expected, rtol=1e-12)


def test_focal_is_its_factor_times_cross_entropy() -> None:
    head, features, labels = head_and_data()
    logits = head(features)
    p = softmax(logits.detach().numpy(), axis=1)[np.arange(12), labels]
    factor = (1 - p) ** 3 - 3 * p * (1 - p) ** 2 * np.log(p)
    plain = last_layer_gradient_norms(make_loss("cross_entropy"), logits, labels, features)
    norms = last_layer_gradient_norms(make_loss("focal", gamma=3.0), logits, labels, features)
    np.testing.assert_allclose(norms, factor * plain, rtol=1e-12)


def test_rows_that_do_not_count_and_saturated_logits() -> None:
    norms = last_layer_gradient_norms(
        make_loss("focal"), np.float32([[0, 0], [1e4, 0], [0, 1e4]]), [-100, 0, 0], np.ones((3, 4))
    )
    np.testing.assert_allclose(norms, [0, 0, np.sqrt(2 * 5)], rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((2, 3)), [0, 1], np.zeros((3, 4))), r"be \(N, C\), \(N,\) and \(N, H\), got shapes"),
        ((np.zeros((2, 3)), [[0, 1]], np.zeros((2, 4))), "one row of each an example"),
        ((np.zeros((2, 3)), [0.0, 1.0], np.zeros((2, 4))), "labels to hold integers, got dtype float64"),
        ((np.zeros((2, 3)), [0, 3], np.zeros((2, 4))), r"labels to be in \[0, 3\) or -100, got 3 in row 1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        last_layer_gradient_norms(make_loss("focal"), *arguments)  # type: ignore[arg-type]


def test_a_loss_of_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="loss to have a loss per example, got 'mmce'"):
        last_layer_gradient_norms(make_loss("mmce"), np.zeros((2, 3)), [0, 1], np.zeros((2, 4)))
    with pytest.raises(TypeError, match="loss to be a CalibrationLoss, got 'focal'"):
        last_layer_gradient_norms("focal", np.zeros((2, 3)), [0, 1], np.zeros((2, 4)))  # type: ignore[arg-type]
