"""Soft labels of one softmax: the expectation of the loss over the labels of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import LOSSES, linear_calibration_loss, make_loss
from hf_calib.losses.loss import CalibrationLoss
from tests.helpers.loss_cases import (
    EXACT,
    VARIANTS,
    Variant,
    make_variant,
    random_batch,
    value_and_gradient,
    variant_id,
)

SINGLE = {"problem_type": "single_label_classification"}
# dual_focal with a constant instead of the rival reads no rival.
REFUSED = {"dual_focal", "dual_focal_gra", "ada_dual_focal", "mbls", "ece_ce"}
REFUSED |= {"mmce", "soft_ece", "kde_ece", "mdca", "avuc"}
ABLE = [variant for variant in VARIANTS if variant[0] not in REFUSED]
every_able = pytest.mark.parametrize("variant", ABLE, ids=variant_id)
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])


def shares(n: int = 9, n_classes: int = 5) -> Tensor:
    """Rows that sum to 1, float64, the first of one class, the second without two."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    rows = logits.softmax(1)
    rows[0] = F.one_hot(torch.tensor(2), n_classes)
    rows[1, 3:] = 0
    return rows / rows.sum(1, keepdim=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_is_pytorchs(smoothing: float, reduction: str) -> None:
    logits, _ = random_batch(9, 5)
    for weights in (None, WEIGHTS):
        shared: dict[str, Any] = {"class_weights": weights, **SINGLE}
        loss = make_loss("label_smoothing", smoothing=smoothing, **shared)
        if smoothing == 0:
            loss = make_loss("cross_entropy", **shared)

        def pytorchs(
            z: Tensor, q: Tensor, weights: Any = weights, **given: str
        ) -> Tensor:
            weight = None if weights is None else weights.to(z)
            return F.cross_entropy(
                z, q, weight=weight, label_smoothing=smoothing, **given
            )

        ours = value_and_gradient(loss, logits, shares(), reduction=reduction)
        wanted = value_and_gradient(pytorchs, logits, shares(), reduction=reduction)
        assert_close(ours, wanted, **EXACT)


@every_able
def test_the_loss_is_the_mean_over_the_labels(variant: Variant) -> None:
    """By the shares, of the losses of hard labels; the gradient, too, also where the weight is a constant."""
    logits, _ = random_batch(9, 5)
    q = shares()
    for weights in (None, WEIGHTS):
        hard = make_variant(variant, 5, class_weights=weights)
        soft = make_variant(variant, 5, class_weights=weights, **SINGLE)

        def expectation(z: Tensor, q: Tensor, hard: Any = hard) -> Tensor:
            of_classes = []
            for k in range(5):
                labels = torch.full((9,), k)
                of_classes.append(q[:, k] * hard(z, labels, reduction="none"))
            return torch.stack(of_classes).sum(0)

        wanted = value_and_gradient(expectation, logits, q)
        ours = value_and_gradient(soft, logits, q, reduction="none")
        assert_close(ours, wanted, **EXACT)
        assert_close(soft(logits, q, reduction="sum"), wanted[0].sum(), **EXACT)
        assert_close(soft(logits, q), wanted[0].mean(), **EXACT)
        assert soft.normalizer(q) == 9


@every_able
def test_one_hot_rows_are_hard_labels(variant: Variant) -> None:
    """Also from p = 0 to p = 1, and next to masked classes; a row of -100 is one that is ignored."""
    logits, labels = random_batch(12, 5, scale=3.0)
    logits[1] = torch.tensor([0.0, 400.0, -400.0, 1.0, 30.0])
    logits[2:4, 3] = -torch.inf
    labels[1:4] = torch.tensor([1, 0, 2])
    rows = F.one_hot(labels, 5).double()
    labels[7] = rows[7] = -100
    soft = make_variant(variant, 5, **SINGLE)
    hard = make_variant(variant, 5)
    for reduction in ("mean", "sum", "none"):
        ours = value_and_gradient(soft, logits, rows, reduction=reduction)
        wanted = value_and_gradient(hard, logits, labels, reduction=reduction)
        assert_close(ours, wanted, **EXACT)
    assert soft.normalizer(rows) == 11
    ignored = torch.full_like(rows, -100)
    value, gradient = value_and_gradient(soft, logits, ignored)
    assert value == 0
    assert not gradient.any()
    assert soft(logits[:0], rows[:0]) == 0


@every_able
def test_a_masked_class_with_a_share_has_the_limit_of_the_hard_loss(
    variant: Variant,
) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.0]]).double()
    soft = make_variant(variant, 3, **SINGLE)
    hard = make_variant(variant, 3)
    q = torch.tensor([[0.25, 0.75, 0.0]]).double()
    value, gradient = value_and_gradient(soft, logits, q)
    parts = [
        value_and_gradient(hard, logits, torch.tensor([label])) for label in (0, 1)
    ]
    wanted = [0.25 * own + 0.75 * masked for own, masked in zip(*parts, strict=True)]
    assert_close((value, gradient), tuple(wanted), **EXACT)
    assert gradient.isfinite().all()


@pytest.mark.slow
@every_able
def test_gradients_of_first_and_second_order(variant: Variant) -> None:
    logits, _ = random_batch(3, 5)
    loss = make_variant(variant, 5, class_weights=WEIGHTS, **SINGLE)
    leaf = logits.requires_grad_()
    own_slope = variant[0].endswith("_gra") or variant[0] in ("dft", "calfocal")
    if not own_slope:
        assert torch.autograd.gradcheck(lambda z: loss(z, shares(3)), leaf)
        assert torch.autograd.gradgradcheck(lambda z: loss(z, shares(3)), leaf)


@pytest.mark.parametrize("name", ["cross_entropy", "brier", "focal_calibration"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(name: str, dtype: torch.dtype) -> None:
    """Labels of any float type; the loss is computed in float32."""
    logits, _ = random_batch(9, 5)
    loss = make_loss(name, **SINGLE)
    q = shares().to(dtype)
    value, gradient = value_and_gradient(loss, logits.to(dtype), q)
    assert (value.dtype, gradient.dtype) == (torch.float32, dtype)
    wanted = loss(logits.to(dtype).double(), q.double())
    assert_close(value.double(), wanted, rtol=1e-6, atol=1e-6)
    assert_close(loss(logits, q.float()), loss(logits, q.double()), **EXACT)


def test_the_probability_of_a_certain_class_is_not_subtracted() -> None:
    """In float32, 1 - p is 0 from a distance of 17 on, and the sum of the other powers is not."""
    logits = torch.tensor([[30.0, 0.0, 1.0]])
    q = torch.tensor([[1.0, 0.0, 0.0]])
    for name in ("brier", "bsce"):
        loss = make_loss(name, **SINGLE)
        wanted = make_loss(name)(logits.double(), torch.tensor([0]))
        assert loss(logits, q).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.slow
def test_tokens_items_compiled_and_under_autocast() -> None:
    logits, _ = random_batch(12, 5)
    q = shares(12)
    q[5] = -100
    loss = make_loss("focal", **SINGLE)
    whole = loss(logits, q)
    rows = loss(logits, q, reduction="none")
    tokens = loss(logits.view(3, 4, 5), q.view(3, 4, 5), reduction="none")
    assert_close(tokens, rows.view(3, 4), **EXACT)
    items = loss.normalizer(q)
    assert items == 11
    parts = [
        loss(logits[part], q[part], num_items_in_batch=items)
        for part in (slice(5), slice(5, None))
    ]
    assert_close(sum(parts), whole, **EXACT)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(
        value_and_gradient(compiled, logits, q), value_and_gradient(loss, logits, q)
    )
    torch.compiler.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(loss(logits, q), whole, **EXACT)
    gradient = torch.func.grad(lambda z: loss(z, q))(logits)
    assert_close(gradient, value_and_gradient(loss, logits, q)[1], **EXACT)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_losses_are_refused_by_name(name: str) -> None:
    logits, _ = random_batch(9, 5)
    message = f"to have a form for soft labels, got '{name}', which .*brier, .*focal"
    with pytest.raises(ValueError, match=message):
        make_loss(name, **SINGLE)(logits, shares())
    assert not REFUSED & {variant[0] for variant in ABLE}
    assert REFUSED | {variant[0] for variant in ABLE} == LOSSES.keys()


def test_a_constant_rival_is_known_of_every_label() -> None:
    logits, labels = random_batch(9, 5)
    ours = make_loss("dual_focal", rival=0.1, **SINGLE)
    hard = make_loss("dual_focal", rival=0.1)(logits, labels)
    assert_close(ours(logits, F.one_hot(labels, 5).double()), hard, **EXACT)


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ([0.5, 0.2, 0.2], "a row 4 from 0.2 to 0.5 with sum 0.9"),
        ([1.2, -0.2, 0.0], "a row 4 from -0.2 to 1.2 with sum 1"),
        ([1.0, 1.0, 0.0], "a row 4 from 0 to 1 with sum 2"),
        ([float("nan"), 0.0, 1.0], "a row 4 from nan to nan with sum nan"),
        ([-100.0, -100.0, 1.0], "a row 4 from -100 to 1 with sum -199"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_rows_that_are_no_shares(row: Any, got: str, dtype: torch.dtype) -> None:
    logits, _ = random_batch(9, 3)
    q = shares(9, 3).to(dtype)
    q[4] = torch.tensor(row)
    got = got.replace("0.9", "0.\\d+").replace("0.2", "0.\\d+")
    message = rf"shares of at least 0 whose rows sum to 1, got {got}; divide .* several labels"
    with pytest.raises(ValueError, match=message):
        make_loss("focal", **SINGLE)(logits, q)


@pytest.mark.parametrize("n_classes", [3, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shares_may_be_rounded_to_their_dtype(
    dtype: torch.dtype, n_classes: int
) -> None:
    logits, _ = random_batch(9, n_classes)
    q = shares(9, n_classes).to(dtype)
    assert make_loss("cross_entropy", **SINGLE)(logits, q).isfinite()


def test_soft_labels_have_the_shape_of_the_logits() -> None:
    logits, _ = random_batch(9, 5)
    loss = make_loss("focal", **SINGLE)
    with pytest.raises(ValueError, match=r"shape \(9,\) for logits .*soft labels one"):
        loss(logits, shares()[:, :4])
    with pytest.raises(ValueError, match="labels to be integer"):
        loss(logits, torch.ones(9))
    with pytest.raises(ValueError, match="integers of shape"):
        linear_calibration_loss(logits, torch.eye(5).double(), shares(), loss)


def test_both_kinds_of_labels_go_with_one_loss() -> None:
    logits, labels = random_batch(9, 5)
    loss: CalibrationLoss = make_loss("focal", **SINGLE)
    assert_close(loss(logits, labels), make_loss("focal")(logits, labels), **EXACT)
    assert loss(logits, shares()).isfinite()
