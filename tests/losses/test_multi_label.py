"""Multi-label problems: every (example, label) decision is a sigmoid of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import make_loss
from tests.helpers.loss_cases import (
    EXACT,
    Variant,
    make_variant,
    value_and_gradient,
    variant_id,
)

# The loss of a decision is that of two classes, or a share of it, where only the label's own class has a say.
CASES: list[tuple[Variant, float, dict[str, float]]] = [
    *(
        ((name, {}), 1.0, {})
        for name in ("cross_entropy", "focal", "focal_gra", "adafocal")
    ),
    (("label_smoothing", {"smoothing": 0.2}), 1.0, {"smoothing": 0.2}),
    (("brier", {}), 0.5, {}),
    (("bsce", {}), 0.5, {}),
    (("bsce_gra", {"gamma": 3, "norm": 2}), 2**-1.5, {"gamma": 3, "norm": 2}),
    (("focal_calibration", {"brier_weight": 1}), 1.0, {"brier_weight": 0.5}),
]
every_case = pytest.mark.parametrize(
    "case", [case for case, *_ in CASES], ids=variant_id
)


def batch() -> tuple[Tensor, Tensor]:
    """Logits and labels (12, 5), float64, up to far beyond saturation; a few decisions ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 5, generator=generator, dtype=torch.float64)
    logits[0] = torch.tensor([19.0, 21.0, -25.0, 40.0, -800.0])
    labels = torch.rand(12, 5, generator=generator, dtype=torch.float64).round()
    labels[3, 1] = labels[5] = -100
    return logits, labels


@pytest.mark.parametrize(
    ("case", "share", "given"), CASES, ids=[variant_id(case) for case, *_ in CASES]
)
def test_values_reductions_and_class_weights(
    case: Variant, share: float, given: dict[str, float]
) -> None:
    logits, labels = batch()
    single = make_variant((case[0], given), 5)

    def two_classes(z: Tensor, y: Tensor) -> Tensor:
        return share * single(
            torch.stack([torch.zeros_like(z), z], 2), y.long(), reduction="none"
        )

    ours = value_and_gradient(make_variant(case, 5), logits, labels, reduction="none")
    assert_close(ours, value_and_gradient(two_classes, logits, labels), **EXACT)
    for weights in (1, torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])):
        loss = make_variant(
            case, 5, class_weights=weights if isinstance(weights, Tensor) else None
        )
        normalizer = (weights * (labels >= 0)).sum()
        assert loss.normalizer(labels) == normalizer
        assert_close(loss(logits, labels, reduction="none"), weights * ours[0], **EXACT)
        assert_close(
            loss(logits, labels), (weights * ours[0]).sum() / normalizer, **EXACT
        )
        assert_close(
            loss(logits, labels, num_items_in_batch=7),
            (weights * ours[0]).sum() / 7,
            **EXACT,
        )


LABELS = torch.tensor([0.5, 3.0, 1.0, 7.0, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("pos_weight", [LABELS, 2.5, torch.tensor(2.5), [4.0]])
def test_pos_weight_is_pytorchs(
    pos_weight: Any, smoothing: float, reduction: str
) -> None:
    """Also with class weights, whose mean is the weighted one, and with labels that are smoothed."""
    logits, _ = batch()
    labels = torch.rand(12, 5, generator=torch.Generator().manual_seed(1)).double()
    labels[:6] = labels[:6].round()
    for class_weights in (None, torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])):
        shared = {"pos_weight": pos_weight, "class_weights": class_weights}
        loss = make_loss("cross_entropy", **shared)
        if smoothing:
            loss = make_loss("label_smoothing", smoothing=smoothing, **shared)
        weight = 1.0 if class_weights is None else class_weights.double()

        def pytorchs(
            z: Tensor, y: Tensor, weight: Any = weight, loss: Any = loss
        ) -> Tensor:
            return weight * F.binary_cross_entropy_with_logits(
                z,
                (1 - smoothing) * y + smoothing / 2,
                pos_weight=loss.pos_weight.double(),
                reduction="none",
            )

        value, gradient = value_and_gradient(pytorchs, logits, labels)
        if reduction != "none":
            divisor = 1.0
            if reduction == "mean":
                divisor = (weight * torch.ones_like(value)).sum()
            value, gradient = value.sum() / divisor, gradient / divisor
        ours = value_and_gradient(loss, logits, labels, reduction=reduction)
        assert_close(ours, (value, gradient), **EXACT)
        assert loss.normalizer(labels) == pytest.approx(
            60 if class_weights is None else 12 * 6.75
        )


@every_case
def test_pos_weight_multiplies_the_loss_of_labels_that_apply(case: Variant) -> None:
    logits, labels = batch()
    plain = make_variant(case, 5)(logits, labels, reduction="none")
    loss = make_variant(case, 5, pos_weight=LABELS)
    weight = loss.pos_weight.double()
    ours = loss(logits, labels, reduction="none")
    if case[0] == "label_smoothing":  # It also weights a share of the other outcome.
        decided = (labels >= 0) & (weight != 1)
        assert (ours != plain)[1:][decided[1:]].all()
    else:
        assert_close(ours, torch.where(labels == 1, weight * plain, plain), **EXACT)
    leaf = logits[1:4].requires_grad_()
    if not case[0].endswith("_gra"):
        assert torch.autograd.gradcheck(lambda z: loss(z, labels[1:4]), leaf)
    whole = loss(logits, labels)
    parts = [
        loss(logits[rows], labels[rows], num_items_in_batch=loss.normalizer(labels))
        for rows in (slice(4), slice(4, None))
    ]
    assert_close(sum(parts), whole, **EXACT)
    assert loss.to(torch.float64).pos_weight.dtype == torch.float64


def test_pos_weight_is_for_several_labels() -> None:
    logits, labels = batch()
    way_out = "; use class_weights for the classes of one softmax"
    with pytest.raises(ValueError, match=f"got problem_type='single_label.*{way_out}"):
        make_loss("focal", pos_weight=2, problem_type="single_label_classification")
    with pytest.raises(ValueError, match=f"got integer labels{way_out}"):
        make_loss("focal", pos_weight=2)(logits, labels[:, 0].long())
    with pytest.raises(ValueError, match="to have a multi-label form, got 'mmce'"):
        make_loss("mmce", pos_weight=2)
    with pytest.raises(ValueError, match="one entry for each of the 5 labels, got 3"):
        make_loss("focal", pos_weight=[1, 2, 3])(logits, labels)
    with pytest.raises(ValueError, match="which is multi-label"):
        make_loss("focal", pos_weight=2.0).from_log_probs(logits[:, 0])


NO_WEIGHTS: list[Any] = [0, -1.0, [1.0, 0.0], [], "3", float("nan"), True, {1: 2.0}]
# Each row of these has several numbers.
NO_WEIGHTS += [[[1.0]], torch.ones(1, 5), np.ones((1, 5))]


@pytest.mark.parametrize("weight", NO_WEIGHTS, ids=repr)
def test_pos_weight_is_finite_and_positive(weight: Any) -> None:
    message = r"expected pos_weight to be \(C,\) finite positive numbers, or one"
    with pytest.raises(ValueError, match=message):
        make_loss("cross_entropy", pos_weight=weight)


@every_case
def test_a_soft_label_is_the_mean_of_its_outcomes(case: Variant) -> None:
    """Of cross entropy that is the cross entropy to it, as PyTorch has it."""
    loss, (logits, _) = make_variant(case, 5), batch()
    yes, no, soft = (
        loss(logits, torch.full_like(logits, y), reduction="none")
        for y in (1.0, 0.0, 0.3)
    )
    assert_close(soft, 0.3 * yes + 0.7 * no, **EXACT)
    some = torch.full_like(logits, 0.3)
    if case[0] == "cross_entropy":
        assert_close(
            soft,
            F.binary_cross_entropy_with_logits(logits, some, reduction="none"),
            **EXACT,
        )
    if not case[0].endswith("_gra"):
        leaf = logits[1:7].requires_grad_()
        assert torch.autograd.gradcheck(
            lambda z: loss(z, some[1:7], reduction="none"), leaf
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_case
def test_extremes_are_finite(case: Variant, dtype: torch.dtype) -> None:
    loss = make_variant(case, 5)
    logits = torch.tensor(
        [[0.0, 17.0, 88.0, 1e4, -torch.inf], [0.0, -17.0, -88.0, -1e4, -1e4]]
    ).to(dtype)
    labels = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0, -100.0]]).to(
        dtype
    )
    value, gradient = value_and_gradient(loss, logits, labels)
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert gradient.isfinite().all()
    value, gradient = value_and_gradient(loss, logits, torch.full_like(labels, -100))
    assert value == 0
    assert not gradient.any()
    assert loss(logits[:0], labels[:0]) == 0


def test_soft_labels_of_one_softmax_are_refused_without_a_problem_type() -> None:
    """They may be the probabilities of one softmax; a sigmoid per class is another loss."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    soft = torch.tensor(
        [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.9, 0.1], [0.4, 0.4, 0.2]]
    )
    with pytest.raises(
        ValueError,
        match=r"got rows that sum to 1; set problem_type='single_.* or .*'multi_label",
    ):
        make_loss("cross_entropy")(logits, soft)
    loss = make_loss("cross_entropy")
    loss(logits, soft.round())  # Rows of 0 and 1 do not tell.
    with pytest.raises(ValueError, match="got rows that sum to 1"):
        loss(logits, soft)
    loss(logits, 0.9 * soft)
    loss(logits, soft)  # Now the labels are known to be of sigmoids.
    named = make_loss("cross_entropy", problem_type="multi_label_classification")
    assert_close(named(logits, soft), F.binary_cross_entropy_with_logits(logits, soft))
    one_label_each_or_no_shares = (
        soft.round(),
        soft[:, :1],
        0.9 * soft,
        soft - 101 * (soft == 1),
    )
    for other in one_label_each_or_no_shares:
        assert torch.isfinite(
            make_loss("cross_entropy")(logits[:, : other.shape[1]], other)
        )


@pytest.mark.parametrize("wrong", [5.5, -0.1, -99.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cross_entropy", "bsce_gra"])
def test_a_target_that_is_no_share_is_refused(name: str, wrong: float) -> None:
    logits, labels = batch()
    labels[7, 2] = wrong
    with pytest.raises(ValueError, match=rf"in \[0, 1\], got {wrong}; give 0 or 1 per"):
        make_loss(name)(logits, labels)
