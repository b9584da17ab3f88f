"""The losses by what they must equal: their formulas, limits, one another, PyTorch's own losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import make_loss
from hf_calib.metrics import kde_calibration_error
from tests.helpers.loss_cases import (
    EXACT,
    WIDTHS,
    Variant,
    by_formula,
    every_variant,
    every_width,
    make_variant,
    random_batch,
    value_and_gradient,
    variant_id,
    widened,
)

# The root of MMCE and of soft ECE is taken of 1e-10 more, so that it has a gradient at 0.
ROOTED = {"rtol": 1e-6, "atol": 1e-9}


@every_width
@every_variant
def test_value_and_gradient_are_those_of_the_formula(variant: Variant, width: int) -> None:
    """Plain, summed and a row, with class weights, some rows ignored."""
    logits, labels = random_batch(40, width)
    labels[[3, 20, 39]] = -100
    logits[30], labels[30] = 3 * logits[30], logits[30].argmin()
    tolerance = ROOTED if variant[0] in ("mmce", "soft_ece") else EXACT
    for weights in (None, torch.linspace(0.5, 3, width)):
        loss = make_variant(variant, width, class_weights=weights)
        formula = by_formula(variant, loss, weights)
        for reduction in ("mean", "sum") if loss.couples_batch else ("mean", "none"):
            ours = value_and_gradient(loss, logits, labels, reduction=reduction)
            wanted = value_and_gradient(formula, logits, labels, reduction=reduction)
            assert_close(ours, wanted, **tolerance)


CROSS_ENTROPY = ("cross_entropy", {})
EQUAL: list[tuple[Variant, Variant]] = [
    (("label_smoothing", {"smoothing": 0}), CROSS_ENTROPY),
    (("flsd", {"gammas": (0, 0)}), CROSS_ENTROPY),
    (("dual_focal", {"gamma": 0}), CROSS_ENTROPY),
    (("bsce_gra", {"gamma": 0, "norm": 1}), CROSS_ENTROPY),
    (("ece_ce", {}), CROSS_ENTROPY),  # before its first update
    (("adafocal", {"gamma_init": 0}), CROSS_ENTROPY),
    (("ada_dual_focal", {"gamma_init": 0}), CROSS_ENTROPY),
    (("logit_norm", {"norm_weight": 0}), CROSS_ENTROPY),
    (("kde_ece", {"kde_weight": 0}), CROSS_ENTROPY),
    (("mbls", {"margin": 100}), CROSS_ENTROPY),
    (("power", {"exponent": 1e-9}), CROSS_ENTROPY),
    (("focal_calibration", {"gamma": 2, "brier_weight": 0}), ("focal", {"gamma": 2})),
    (("flsd_gra", {"gammas": (2, 2)}), ("focal_gra", {"gamma": 2})),
    (("adafocal", {"gamma_init": 3}), ("focal", {"gamma": 3})),
    (("adafocal", {"gamma_init": -1.5}), ("inverse_focal", {"gamma": 1.5})),
    (("ada_dual_focal", {"gamma_init": 5}), ("dual_focal", {"gamma": 5})),
    (("calfocal", {}), ("focal", {"gamma": 1})),  # before its first update
    (("dual_focal", {"gamma": 3, "rival": "0"}), ("focal", {})),
    (("dual_focal_gra", {"gamma": 3, "rival": 0}), ("focal_gra", {})),
]


@pytest.mark.parametrize("pair", EQUAL, ids=lambda pair: variant_id(pair[0]))
def test_losses_that_are_one_another(pair: tuple[Variant, Variant]) -> None:
    logits, labels = random_batch(40, 5)
    labels[[4, 17]] = -100
    one, other = (value_and_gradient(make_loss(name, **given), logits, labels) for name, given in pair)
    assert_close(one, other, rtol=1e-7 if pair[0][0] == "power" else 1e-10, atol=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pytorchs_losses(weighted: bool, reduction: str) -> None:
    logits, labels = random_batch(40, 5)
    labels[[4, 17]] = -100
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25]).double() if weighted else None
    loss = make_loss("cross_entropy", class_weights=weights)
    wanted = F.cross_entropy(logits, labels, weight=weights, reduction=reduction)
    assert_close(loss(logits, labels, reduction=reduction), wanted, **EXACT)
    for smoothing in () if weighted else (0.05, 1.0):
        wanted = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)
        ours = make_loss("label_smoothing", smoothing=smoothing)
        assert_close(ours(logits, labels, reduction=reduction), wanted, **EXACT)


def test_labels_of_other_integer_types() -> None:
    logits, labels = random_batch(8, 2)
    for weights in (None, [1.0, 3.0]):
        loss = make_loss("focal", class_weights=weights)
        for dtype in (torch.int32, torch.int16, torch.uint8, torch.bool):
            assert_close(loss(logits, labels.to(dtype)), loss(logits, labels), **EXACT)
            assert loss.normalizer(labels.to(dtype)) == loss.normalizer(labels)


@pytest.mark.parametrize("n_classes", [2, 3, 9, 9000])
@pytest.mark.parametrize("rival", ["next", "second", "third", "mean2", "mean3", "mean_all", 0.95])
def test_rivals_that_tie_or_are_missing(rival: Any, n_classes: int) -> None:
    """A constant may be above p. Values only: those that tie share out a subgradient in their own ways."""
    logits, labels = random_batch(30, n_classes)
    logits[20:] = logits[20:].round()
    labels[25] = logits[25].argmin()
    variant = ("dual_focal", {"rival": rival})
    ours = make_variant(variant, n_classes)(logits, labels, reduction="none")
    assert_close(ours, by_formula(variant)(logits, labels, reduction="none"), **EXACT)


@every_width
def test_brier_of_an_impossible_label(width: int) -> None:
    """Its cross entropy, which has weight 0, is infinite."""
    logits, labels = widened(torch.tensor([[1.0, 1.0, -torch.inf]] * 9), width), torch.tensor([2] * 9)
    value, gradient = value_and_gradient(make_loss("brier"), logits, labels)
    assert value.item() == pytest.approx(1.5)
    assert_close(gradient, torch.zeros_like(logits), rtol=0, atol=1e-7)


@every_width
@pytest.mark.parametrize("p", [2.0, 3.0, 16.0])
@pytest.mark.parametrize("scale", [300.0, 1e-3])
def test_logit_norm_does_not_overflow(p: float, scale: float, width: int) -> None:
    """300^16 is beyond float32, and 1e-3^16 below it; the norm is neither."""
    logits, labels = random_batch(12, width)
    logits = (scale * logits / logits.abs().max()).float()
    variant = ("logit_norm", {"norm_weight": 1.0, "p": p})
    value, gradient = value_and_gradient(make_variant(variant, width), logits, labels, reduction="none")
    want_value, true = value_and_gradient(by_formula(variant), logits.double(), labels, reduction="none")
    assert_close(value.double(), want_value, rtol=1e-5, atol=1e-6)
    assert_close(gradient.double(), true, rtol=1e-4, atol=1e-5)


def penalty(name: str, logits: Tensor, labels: Tensor, **hyperparameters: Any) -> Tensor:
    loss = make_loss(name, **hyperparameters)
    return loss(logits, labels) - make_loss("cross_entropy")(logits, labels)


class TestPenaltiesOnTheBatch:
    """Beyond their formulas, which stand above."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_mmce_of_confidences_that_tie_but_for_rounding(self, dtype: torch.dtype) -> None:
        """The kernel has a kink there: the pair has no part in the gradient, whichever side rounding takes."""
        few_ulps = 8 * torch.finfo(dtype).eps
        logits = torch.tensor([[1, 0], [1 + few_ulps, 0], [1 - few_ulps, 0], [2, 0], [0, 3]], dtype=dtype)
        labels = torch.tensor([0, 1, 1, 0, 0])
        right = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]).double()
        groups = torch.tensor([0, 0, 0, 1, 2])

        def formula(z: Tensor, _: Tensor) -> Tensor:
            r = z.softmax(1).amax(1)
            distance = (r[:, None] - r).abs() * (groups[:, None] != groups)
            return (right - r) @ torch.exp(-distance / 0.4) @ (right - r) / 25

        loss = make_loss("mmce", mmce_weight=1e6, variant="plain", authors_code=True)
        _, want = value_and_gradient(formula, logits.double(), labels)
        for width in WIDTHS:
            more = F.pad(widened(logits, width), (0, 0, 0, 5)), F.pad(labels, (0, 5), value=-100)
            _, ours = value_and_gradient(loss, *more)
            assert_close(ours[:5, :2].double() / 1e6, want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("variant", ["weighted", "plain"])
    def test_mmce_does_not_depend_on_the_batch_size(self, variant: str) -> None:
        """Rows that stand in the batch twice change nothing; in the authors' code they halve the value."""
        logits, labels = random_batch(11, 4)
        once = penalty("mmce", logits, labels, variant=variant)
        assert_close(penalty("mmce", logits.repeat(2, 1), labels.repeat(2), variant=variant), once, **EXACT)

    @pytest.mark.parametrize("all_right", [True, False])
    def test_avuc_of_one_kind_of_rows(self, all_right: bool) -> None:
        """The threshold between certain and unsure is then the mean entropy of that kind."""
        logits, _ = random_batch(11, 4)
        labels = logits.argmax(1) if all_right else logits.argmin(1)
        ours = value_and_gradient(make_loss("avuc"), logits, labels)
        assert_close(ours, value_and_gradient(by_formula(("avuc", {})), logits, labels), **EXACT)

    @pytest.mark.parametrize("kind", ["top_label", "canonical"])
    @pytest.mark.parametrize("bandwidth", [0.02, 1.0])
    def test_kde_ece_is_the_metric_of_the_batch(self, kind: Any, bandwidth: float) -> None:
        logits, labels = random_batch(30, 4)
        logits[:3] *= 30  # saturated, whose probabilities are moved off 0 and 1
        logits[5:8] = logits[4]
        labels[[9, 20]] = -100
        counted = labels >= 0
        probs = logits.softmax(1)[counted].numpy()
        want = kde_calibration_error(probs, labels[counted].numpy(), bandwidth=bandwidth, kind=kind)
        ours = penalty("kde_ece", logits, labels, kde_weight=1, bandwidth=bandwidth, kind=kind)
        assert ours.item() == pytest.approx(want, rel=1e-9)

    @pytest.mark.parametrize("kind", ["top_label", "canonical"])
    def test_kde_ece_of_an_example_alone(self, kind: str) -> None:
        """Beside ignored ones there is no other to estimate the accuracy from: what is left is cross entropy."""
        for confidence in (0.5, 40.0):
            logits = torch.tensor([[confidence, 0.0, -1.0]] * 3, dtype=torch.float64)
            for labels in (torch.tensor([1, -100, -100]), torch.tensor([-100, 0, -100])):
                ours = value_and_gradient(make_loss("kde_ece", kind=kind), logits, labels)
                want = value_and_gradient(make_loss("cross_entropy"), logits, labels)
                assert_close(ours, want, **EXACT)

    @pytest.mark.parametrize("kind", ["top_label", "canonical"])
    def test_kde_ece_of_more_pairs_than_it_looks_at_at_once(self, kind: str) -> None:
        logits, labels = random_batch(2100, 3)
        labels[3] = -100
        variant = ("kde_ece", {"kind": kind})
        ours = value_and_gradient(make_variant(variant, 3), logits, labels)
        assert_close(ours, value_and_gradient(by_formula(variant), logits, labels), **EXACT)


@pytest.mark.parametrize(("exponent", "sharper"), [(0.5, 2.0), (0.2, 1.25)])
def test_the_minimum_of_power_is_the_sharpened_posterior(exponent: float, sharper: float) -> None:
    posterior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = (sharper * posterior.log())[None].expand(3, 3).clone().requires_grad_()
    each = make_loss("power", exponent=exponent)(logits, torch.arange(3), reduction="none")
    (slope,) = torch.autograd.grad(posterior @ each, logits)
    assert_close(slope.sum(0), torch.zeros(3).double(), rtol=0, atol=1e-12)
