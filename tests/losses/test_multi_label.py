"""Multi-label problems: every (example, label) decision is a sigmoid of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import LOSSES, CalibrationLoss, make_loss
from tests.helpers.loss_cases import value_and_gradient

EXACT = {"rtol": 1e-12, "atol": 1e-12}
MULTI_LABEL = {
    "cross_entropy",
    "label_smoothing",
    "brier",
    "focal",
    "bsce",
    "bsce_gra",
    "focal_calibration",
    "adafocal",
}


def batch(*, soft: bool = False) -> tuple[Tensor, Tensor]:
    """Logits and labels (12, 5), float64, up to far beyond saturation; a few decisions ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 5, generator=generator, dtype=torch.float64)
    logits[0] = torch.tensor([19.0, 21.0, -25.0, 40.0, -800.0])
    labels = torch.rand(12, 5, generator=generator, dtype=torch.float64)
    labels = labels if soft else labels.round()
    labels[3, 1] = labels[5] = -100
    return logits, labels


def applied(formula: Any, reduction: str = "mean") -> Any:
    """A loss from a formula of z and y per decision, over those that count."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        counts = labels >= 0
        values = formula(logits[counts], labels[counts])
        return values.mean() if reduction == "mean" else values.sum()

    return loss


def binary_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y, reduction="none")


def sigmoid_focal(z: Tensor, y: Tensor, gamma: float = 3.0) -> Tensor:
    """Lin et al. 2017, as in torchvision, without alpha."""
    p = torch.sigmoid(z)
    wrong = p * (1 - y) + (1 - p) * y
    return wrong**gamma * binary_cross_entropy(z, y)


def squared_error(z: Tensor, y: Tensor) -> Tensor:
    return (torch.sigmoid(z) - y).square()


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    return binary_cross_entropy(z, 0.8 * y + 0.1)


def gradient_weighted(z: Tensor, y: Tensor) -> Tensor:
    return squared_error(z, y).detach() * binary_cross_entropy(z, y)


FORMULAS: dict[str, tuple[CalibrationLoss, Any]] = {
    "cross_entropy": (make_loss("cross_entropy"), binary_cross_entropy),
    "label_smoothing": (make_loss("label_smoothing", smoothing=0.2), smoothed),
    "brier": (make_loss("brier"), squared_error),
    "focal": (make_loss("focal", gamma=3), sigmoid_focal),
    "bsce": (
        make_loss("bsce", gamma=2, norm=2),
        lambda z, y: squared_error(z, y) * binary_cross_entropy(z, y),
    ),
    "bsce_gra": (make_loss("bsce_gra", gamma=2, norm=2), gradient_weighted),
    "focal_calibration": (
        make_loss("focal_calibration", gamma=3, brier_weight=0.5),
        lambda z, y: sigmoid_focal(z, y) + 0.5 * squared_error(z, y),
    ),
    "adafocal": (make_loss("adafocal", gamma_init=3), sigmoid_focal),
}


def test_which_losses_have_a_multi_label_form() -> None:
    assert {name for name, entry in LOSSES.items() if entry.multi_label} == MULTI_LABEL == set(FORMULAS)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name: str, reduction: str) -> None:
    loss, formula = FORMULAS[name]
    ours = value_and_gradient(loss, *batch(), reduction=reduction)
    assert_close(ours, value_and_gradient(applied(formula, reduction), *batch()), **EXACT)
    assert not ours[1][5].any()


@pytest.mark.parametrize("name", ["cross_entropy", "label_smoothing"])
def test_soft_labels_of_losses_that_are_linear_in_them(name: str) -> None:
    loss, formula = FORMULAS[name]
    ours = value_and_gradient(loss, *batch(soft=True))
    assert_close(ours, value_and_gradient(applied(formula), *batch(soft=True)), **EXACT)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_soft_label_is_the_mean_of_its_outcomes(name: str) -> None:
    loss, _ = FORMULAS[name]
    logits = batch()[0]
    yes, no = (loss(logits, torch.full_like(logits, y), reduction="none") for y in (1.0, 0.0))
    soft = loss(logits, torch.full_like(logits, 0.3), reduction="none")
    assert_close(soft, 0.3 * yes + 0.7 * no, **EXACT)


@pytest.mark.parametrize("name", FORMULAS)
def test_reductions_and_class_weights(name: str) -> None:
    loss, _ = FORMULAS[name]
    logits, labels = batch()
    counts = labels >= 0
    per_decision = loss(logits, labels, reduction="none")
    assert per_decision.shape == labels.shape
    assert not per_decision[~counts].any()
    assert loss.normalizer(labels) == counts.sum()
    assert_close(loss(logits, labels), per_decision.sum() / counts.sum(), **EXACT)
    assert_close(loss(logits, labels, num_items_in_batch=7), per_decision.sum() / 7, **EXACT)

    columns = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
    weighted = make_loss(name, class_weights=columns, **loss.hyperparameters)
    assert weighted.normalizer(labels) == (columns * counts).sum()
    assert_close(weighted(logits, labels, reduction="none"), columns * per_decision, **EXACT)
    assert_close(weighted(logits, labels, reduction="sum"), (columns * per_decision).sum(), **EXACT)


@pytest.mark.parametrize("name", sorted(MULTI_LABEL - {"bsce_gra"}))
def test_gradient_is_that_of_the_value(name: str) -> None:
    logits, labels = batch(soft=True)
    assert torch.autograd.gradcheck(
        lambda z: FORMULAS[name][0](z, labels[1:7], reduction="none"), logits[1:7].requires_grad_()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMULAS)
def test_extremes_are_finite(name: str, dtype: torch.dtype) -> None:
    loss = FORMULAS[name][0]
    logits = torch.tensor([[0.0, 17.0, 88.0, 1e4, -torch.inf], [0.0, -17.0, -88.0, -1e4, -1e4]])
    labels = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0, -100.0]])
    value, gradient = value_and_gradient(loss, logits.to(dtype), labels.to(dtype))
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert gradient.isfinite().all()
    value, gradient = value_and_gradient(loss, logits.to(dtype), torch.full_like(labels, -100))
    assert value == 0
    assert not gradient.any()
    assert loss(logits[:0], labels[:0]) == 0


@pytest.mark.parametrize("gamma", [0.3, 0.999])
@pytest.mark.parametrize("name", ["focal", "bsce", "focal_calibration"])
def test_small_gamma_at_probability_1(name: str, gamma: float) -> None:
    logits = torch.tensor([[30.0, 200.0, -200.0]])
    value, gradient = value_and_gradient(
        make_loss(name, gamma=gamma), logits, torch.tensor([[1.0, 1.0, 0.0]])
    )
    assert 0 <= value < 1e-9
    assert gradient.abs().max() < 1e-9


def test_adafocal_goes_by_the_probability_of_each_decision() -> None:
    loss = make_loss("adafocal", n_bins=2, switch=0.8)
    loss.update([0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95], [1, 1, 1, 1, 1, 0, 0, 0])
    low, high = loss.gammas.tolist()
    assert low < 0 < high
    edge = loss.edges[1]
    logits, labels = batch()
    p = torch.sigmoid(logits).where(labels == 1, torch.sigmoid(-logits))
    cross_entropy = binary_cross_entropy(logits, labels)
    want = torch.where(p < edge, (1 + p) ** -low, (1 - p) ** high) * cross_entropy
    counts = labels >= 0
    assert_close(loss(logits, labels, reduction="none")[counts], want[counts], **EXACT)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - MULTI_LABEL))
def test_the_others_refuse(name: str) -> None:
    message = (
        f"expected loss to have a multi-label form, got '{name}', which is single-label; use one of adafocal"
    )
    with pytest.raises(ValueError, match=message):
        make_loss(name, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=message):
        make_loss(name)(*batch())


def test_as_many_class_weights_as_labels() -> None:
    with pytest.raises(ValueError, match="one entry for each of the 5 classes, got 3"):
        make_loss("focal", class_weights=[1.0, 2.0, 3.0])(*batch())


def test_class_weights_of_ignored_decisions_do_not_count_in_the_mean() -> None:
    weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    logits = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]], dtype=torch.float64)
    labels = torch.tensor([[1.0, 0.0, -100.0], [-100.0, 1.0, 0.0]], dtype=torch.float64)
    counts = labels != -100
    per_decision = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, labels.clamp_min(0), reduction="none"
    )
    loss = make_loss("cross_entropy", class_weights=weights)
    expected = (per_decision * weights * counts).sum() / (weights * counts).sum()
    torch.testing.assert_close(loss(logits, labels), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss.normalizer(labels).double(), (weights * counts).sum())


def test_soft_labels_of_one_softmax_are_refused() -> None:
    """`F.cross_entropy` reads them as probabilities; a sigmoid per class is another loss."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    soft = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.9, 0.1], [0.4, 0.4, 0.2]])
    with pytest.raises(
        ValueError, match=r"got rows that sum to 1; F.cross_entropy takes .* set problem_type="
    ):
        make_loss("cross_entropy")(logits, soft)
    named = make_loss("cross_entropy", problem_type="multi_label_classification")
    assert_close(named(logits, soft), F.binary_cross_entropy_with_logits(logits, soft))
    for other in (
        soft.round(),
        soft[:, :1],
        0.9 * soft,
        soft - 100 * (soft == 1),
    ):  # one label each, or no shares
        assert torch.isfinite(make_loss("cross_entropy")(logits[:, : other.shape[1]], other))
