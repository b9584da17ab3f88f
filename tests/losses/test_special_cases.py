"""The losses by what they must equal: their formulas, PyTorch's own losses, the metrics."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from hf_calib.language_models import for_causal_lm
from hf_calib.losses import LOSSES, linear_calibration_loss, make_loss
from hf_calib.metrics import kde_calibration_error
from tests.helpers import loss_cases as cases
from tests.helpers.loss_cases import (
    EXACT,
    Variant,
    by_formula,
    every_width,
    random_batch,
    value_and_gradient,
    wide_when_slow,
)


@wide_when_slow
@cases.every_variant
def test_value_and_gradient_are_those_of_the_formula(
    variant: Variant, width: int
) -> None:
    """Plain, summed and a row, with class weights, some rows ignored."""
    logits, labels = random_batch(40, width)
    labels[[3, 20, 39]] = -100
    logits[30], labels[30] = 3 * logits[30], logits[30].argmin()
    # The root of MMCE and of soft ECE is taken of 1e-10 more, so that it has a gradient at 0.
    tolerance = (
        {"rtol": 1e-6, "atol": 1e-9} if variant[0] in ("mmce", "soft_ece") else EXACT
    )
    for weights in (None, torch.linspace(0.5, 3, width)):
        loss = cases.make_variant(variant, width, class_weights=weights)
        formula = by_formula(variant, loss, weights)
        for reduction in ("mean", "sum") if loss.couples_batch else ("mean", "none"):
            ours = value_and_gradient(loss, logits, labels, reduction=reduction)
            assert_close(
                ours,
                value_and_gradient(formula, logits, labels, reduction=reduction),
                **tolerance,
            )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_pytorchs_losses_and_labels_of_any_integer_type(reduction: str) -> None:
    logits, labels = random_batch(40, 2)
    labels = labels.bool()
    for weights in (None, torch.tensor([0.5, 2.0]).double()):
        loss = make_loss("cross_entropy", class_weights=weights)
        wanted = F.cross_entropy(
            logits, labels.long(), weight=weights, reduction=reduction
        )
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
            assert_close(
                loss(logits, labels.to(dtype), reduction=reduction), wanted, **EXACT
            )
            assert loss.normalizer(labels.to(dtype)) == loss.normalizer(labels.long())
    labels = labels.long().index_fill(0, torch.tensor([4, 17]), -100)
    for smoothing in (0.05, 1.0):
        wanted = F.cross_entropy(
            logits, labels, label_smoothing=smoothing, reduction=reduction
        )
        ours = make_loss("label_smoothing", smoothing=smoothing)
        assert_close(ours(logits, labels, reduction=reduction), wanted, **EXACT)


@every_width
@pytest.mark.parametrize("smoothing", [0, 0.1, 0.7, 1])
def test_class_weights_with_label_smoothing_are_pytorchs(
    smoothing: float, width: int
) -> None:
    """The weight of a class belongs to its own log-probability, also to that of its share of every label."""
    logits, labels = random_batch(24, width)
    labels[[3, 20]] = -100
    weights = torch.linspace(0.2, 3, width, dtype=torch.float64)
    loss = make_loss("label_smoothing", smoothing=smoothing, class_weights=weights)

    def pytorchs(logits: torch.Tensor, labels: torch.Tensor, **given: str) -> Any:
        weight = loss.class_weights.to(logits)
        return F.cross_entropy(
            logits, labels, weight=weight, label_smoothing=smoothing, **given
        )

    for reduction in ("mean", "sum", "none"):
        ours = value_and_gradient(loss, logits, labels, reduction=reduction)
        wanted = value_and_gradient(pytorchs, logits, labels, reduction=reduction)
        assert_close(ours, wanted, **EXACT)
    # Micro-batches divided by the normalizer of all are the mean of all.
    items = loss.normalizer(labels, torch.float64)
    parts = [
        loss(logits[rows], labels[rows], num_items_in_batch=items)
        for rows in (slice(5), slice(5, None))
    ]
    assert_close(sum(parts), pytorchs(logits, labels), **EXACT)
    only_ignored = torch.full_like(labels, -100)
    value, gradient = value_and_gradient(loss, logits, only_ignored)
    assert value == 0
    assert not gradient.any()


def test_class_weights_with_label_smoothing_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.3, -1.0, 0.8]], dtype=torch.float64)
    loss = make_loss("label_smoothing", smoothing=0.1, class_weights=[1, 2, 3])
    log_p = logits.log_softmax(1)
    shares = 0.1 / 3 * (torch.tensor([1.0, 2.0, 3.0]) * log_p).sum(1)
    own = 0.9 * torch.stack([2 * log_p[0, 1], 3 * log_p[1, 2]])
    assert_close(loss(logits, torch.tensor([1, 2])), -(own + shares).sum() / 5, **EXACT)


@pytest.mark.parametrize("n_classes", [2, 3, 9, 9000])
@pytest.mark.parametrize(
    "rival", ["next", "second", "third", "mean2", "mean3", "mean_all", 0.95]
)
def test_rivals_that_tie_or_are_missing(rival: Any, n_classes: int) -> None:
    """A constant may be above p. Values only: those that tie share out a subgradient in their own ways."""
    logits, labels = random_batch(30, n_classes)
    logits[20:] = logits[20:].round()
    labels[25] = logits[25].argmin()
    variant = ("dual_focal", {"rival": rival})
    ours = cases.make_variant(variant, n_classes)(logits, labels, reduction="none")
    assert_close(ours, by_formula(variant)(logits, labels, reduction="none"), **EXACT)


@pytest.mark.parametrize("kind", ["top_label", "canonical"])
def test_kde_ece_of_one_row_of_rows_that_tie_and_of_more_pairs_than_it_looks_at_at_once(
    kind: Any,
) -> None:
    logits, labels = random_batch(30, 4)
    logits[:3] *= 30  # saturated, whose probabilities are moved off 0 and 1
    logits[5:8] = logits[4]
    labels[[9, 20]] = -100
    probs = logits.softmax(1)[labels >= 0].numpy()
    for h in (0.02, 1.0):
        want = kde_calibration_error(
            probs, labels[labels >= 0].numpy(), bandwidth=h, kind=kind
        )
        ours = make_loss("kde_ece", kde_weight=1, bandwidth=h, kind=kind)(
            logits, labels
        )
        assert (
            ours - make_loss("cross_entropy")(logits, labels)
        ).item() == pytest.approx(want, rel=1e-9)
    # A row alone has no other to estimate the accuracy from: what is left is cross entropy.
    alone = torch.where(torch.arange(30) == 12, labels, -100)
    ours = value_and_gradient(make_loss("kde_ece", kind=kind), logits, alone)
    assert_close(
        ours, value_and_gradient(make_loss("cross_entropy"), logits, alone), **EXACT
    )
    many = random_batch(2100, 3)
    ours = value_and_gradient(make_loss("kde_ece", kind=kind), *many)
    assert_close(
        ours,
        value_and_gradient(by_formula(("kde_ece", {"kind": kind})), *many),
        **EXACT,
    )


@pytest.mark.parametrize(
    ("name", "given", "others"),
    [
        ("focal", {"gamma": 3.0}, ()),
        ("focal_gra", {"gamma": 3.0}, ("0.558", "NaN")),
        ("focal_calibration", {"gamma": 3.0, "brier_weight": 0.5}, ()),
        ("focal_calibration", {"gamma": 3.0, "brier_weight": 10.0}, ()),
    ],
)
def test_the_documented_minimum_is_where_the_expected_gradient_is_0(
    name: str, given: dict[str, float], others: tuple[str, ...]
) -> None:
    """Of two classes with a posterior of 0.7, by bisection of the first logit; and no sentence is of another loss."""
    loss = make_loss(name, **given)
    low, high = 0.0, 1.0
    for _ in range(40):
        z = torch.tensor([[(low + high) / 2, 0.0]], dtype=torch.float64)
        slopes = [
            value_and_gradient(loss, z, torch.tensor([y]))[1][0, 0] for y in (0, 1)
        ]
        is_below = 0.7 * slopes[0] + 0.3 * slopes[1] < 0
        low, high = (float(z[0, 0]), high) if is_below else (low, float(z[0, 0]))
    minimum = torch.tensor(low).sigmoid()
    text = inspect.getdoc(LOSSES[name].constructor) or ""
    assert f"{minimum:.3f}" in text
    for other in others:
        assert other not in text


NUMBERS = [
    (0, "count the rows of this batch, got 0"),
    (torch.tensor(0), "count the rows of this batch, got 0"),
    (-3, "be a finite number, at least 0, got -3"),
    (torch.tensor(-3), "be a finite number, at least 0, got -3"),
    (float("nan"), "be a finite number, at least 0, got nan"),
    (torch.tensor(torch.inf), "be a finite number, at least 0, got inf"),
    (True, "be one number, got True"),
    ("4", "be one number, got '4'"),
    (torch.tensor([4, 4]), r"be one number, got tensor\(\[4, 4\]\)"),
]
WAYS = {
    "logits": lambda loss: loss,
    "log_probs": lambda loss: (
        lambda logits, labels, **given: loss.from_log_probs(
            logits.log_softmax(-1).amin(-1), mask=labels != -100, **given
        )
    ),
    "hidden": lambda loss: (
        lambda logits, labels, **given: linear_calibration_loss(
            logits, torch.eye(3).to(logits), labels, loss, **given
        )
    ),
    "shifted": lambda loss: (
        lambda logits, labels, **given: for_causal_lm(loss)(
            logits[None], labels[None], **given
        )
    ),
}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize(("items", "message"), NUMBERS)
@every_way
def test_a_number_of_items_that_is_none(way: str, items: Any, message: str) -> None:
    ours = WAYS[way](make_loss("focal"))
    with pytest.raises(
        (ValueError, TypeError), match=f"num_items_in_batch to {message}"
    ):
        ours(*random_batch(4, 3), num_items_in_batch=items)


@pytest.mark.parametrize(
    ("way", "reduction"),
    [("logits", "sum"), ("logits", "none"), ("log_probs", "none"), ("hidden", "sum")],
)
def test_a_number_of_items_belongs_to_the_mean(way: str, reduction: str) -> None:
    ours = WAYS[way](make_loss("focal"))
    with pytest.raises(ValueError, match=f"'mean', got reduction='{reduction}'"):
        ours(*random_batch(4, 3), reduction=reduction, num_items_in_batch=4)


@pytest.mark.parametrize("items", [0, torch.tensor(0), torch.tensor(0.0)])
@every_way
def test_of_no_items_the_loss_is_0(way: str, items: Any) -> None:
    logits, labels = random_batch(4, 3)
    value, gradient = value_and_gradient(
        WAYS[way](make_loss("focal")),
        logits,
        torch.full_like(labels, -100),
        num_items_in_batch=items,
    )
    assert value == 0
    assert not gradient.any()
