"""The two sides of every formula and statistic: the derivative that is written next to a value is autograd's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import LOSSES, CalibrationLoss, adafocal, make_loss
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.blocks import Block, CacheBlock
from tests.helpers.loss_cases import (
    EXACT,
    VARIANTS,
    make_variant,
    random_batch,
    variant_id,
)

# Losses at the gammas where a power or its derivative is special, next to the variants of all other tests.
GAMMAS = (0.0, 0.5, 1.0, 1.5, 5.0)
AT_GAMMAS = [
    (name, {"gamma": gamma})
    for name, entry in LOSSES.items()
    if "gamma" in entry.hyperparameters
    for gamma in GAMMAS
    if not (name == "inverse_focal" and gamma > 3)
]
ALL = [*VARIANTS, *(each for each in AT_GAMMAS if each not in VARIANTS)]
every_loss = pytest.mark.parametrize("variant", ALL, ids=variant_id)


def extreme_rows() -> tuple[Tensor, Tensor]:
    """Logits (N, 5), float64, and labels: ordinary rows, ties, p of 0 and 1 up to rounding and exactly, and masks."""
    generator = torch.Generator().manual_seed(0)
    ordinary = 2 * torch.randn(12, 5, generator=generator, dtype=torch.float64)
    one = torch.tensor([1.0, 0.3, 0.0, -1.0, -2.0], dtype=torch.float64)
    scaled = torch.stack([one * scale for scale in (0, 1, 12, 30, 300, 2000, 1e4)])
    masked = ordinary[:4].clone()
    masked[:, 2] = -torch.inf
    alone = torch.full((1, 5), -torch.inf, dtype=torch.float64)
    alone[0, 0] = 1.0
    tied = torch.tensor([[2.0, 2.0, 1.0, 1.0, -0.0], [0.0, -0.0, 0.0, 0.0, 1.0]])
    logits = [ordinary, scaled, scaled, masked, alone, tied.double(), ordinary[:2]]
    labels = torch.randint(5, (12,), generator=generator).tolist()
    # The label of the scaled rows is first the most probable class, and then the least; one label is impossible.
    labels += [0] * 7 + [4] * 7 + [0, 1, 2, 3] + [0] + [0, 1] + [-100, -100]
    return torch.cat(logits), torch.tensor(labels)


def numbers_of(loss: CalibrationLoss, logits: Tensor, labels: Tensor) -> list[Any]:
    """The numbers of rows, as leaves of autograd where they are functions of the logits that can be differentiated."""
    numbers = Block(logits.clone().requires_grad_(), labels, loss.reads).numbers
    found = []
    for each in numbers:
        is_leaf = isinstance(each, Tensor) and each.requires_grad
        found.append(each.detach().requires_grad_() if is_leaf else each)
    return found


def assert_slopes(terms: Any, function: Any, numbers: list[Any], read: int) -> None:
    """The slopes, as many as are read, are the derivatives of the value by autograd."""
    value = function(numbers)
    leaves = [each for each in numbers if getattr(each, "requires_grad", False)]
    wanted = torch.autograd.grad(
        value.sum(), leaves, allow_unused=True, materialize_grads=True
    )
    with torch.no_grad():
        same, slopes = terms(numbers)
    assert_close(same, value.detach(), **EXACT)
    assert len(slopes) == read
    for number, slope in zip(numbers, slopes, strict=False):
        for leaf, derivative in zip(leaves, wanted, strict=True):
            if leaf is number:
                own = torch.zeros_like(leaf) + slope
                assert own.isfinite().all()
                assert_close(own, derivative, rtol=1e-9, atol=1e-11)


@every_loss
def test_slopes_are_the_derivatives_of_the_value(variant: Any) -> None:
    loss = make_variant(variant, 5)
    numbers = numbers_of(loss, *extreme_rows())
    read = 1 if loss.couples_batch else len(numbers)
    assert_slopes(loss.row_terms, loss.row_values, numbers, read)


def test_slopes_of_a_table_with_both_kinds_of_gammas() -> None:
    loss = adafocal(n_bins=4)
    numbers = numbers_of(loss, *extreme_rows())
    loss.gammas = torch.tensor([-2.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    assert_slopes(loss.row_terms, loss.row_values, numbers, 1)
    loss.gammas = loss.gammas.abs()
    assert_slopes(loss.row_terms, loss.row_values, numbers, 1)


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if make_loss(v[0]).couples_batch], ids=variant_id
)
def test_slopes_of_a_penalty(variant: Any) -> None:
    loss = make_variant(variant, 5)
    logits, labels = extreme_rows()
    ordinary = [*range(12), -2, -1]  # the last two are ignored
    numbers = numbers_of(loss, logits[ordinary], labels[ordinary])
    assert_slopes(loss.penalty_terms, loss.penalty, numbers, len(numbers))


@pytest.mark.parametrize("authors_code", [False, True])
@pytest.mark.parametrize("variant", ["weighted", "plain"])
def test_slopes_of_mmce_for_few_and_many_pairs(
    variant: Any, authors_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many pairs take cumulative sums instead of a matrix; some confidences tie."""
    loss = make_loss("mmce", variant=variant, authors_code=authors_code)
    logits = random_batch(40, 5)[0]
    logits[5:9] = logits[4]
    numbers = numbers_of(loss, logits, torch.arange(40) % 5)
    assert_slopes(loss.penalty_terms, loss.penalty, numbers, len(numbers))
    few, (_, few_slopes, *_) = loss.penalty_terms(numbers)
    monkeypatch.setattr("hf_calib.losses.batch._FEW_PAIRS", 0)
    many, (_, many_slopes, *_) = loss.penalty_terms(numbers)
    assert_close(many, few, **EXACT)
    assert_close(many_slopes, few_slopes, **EXACT)


STATISTICS = [
    *(defined.Rival(rank) for rank in defined.RIVALS),
    *(defined.OtherPowers(power) for power in (1.0, 1.5, 2.0, 3.0)),
    *(defined.LogitNorm(order) for order in (1.0, 1.5, 2.0)),
    *(defined.MeanExcess(margin) for margin in (0.0, 1.0)),
    defined.Entropy(),
    defined.MeanLogProb(),
    defined.Confidence(),
    defined.Correct(),
    defined.Counts(),
    defined.Labels(),
    defined.LogProbs(),
]


@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 2.0, 4.0, 0.25)])
@pytest.mark.parametrize("statistic", STATISTICS, ids=repr)
def test_gradients_of_statistics(statistic: Any, weights: Any) -> None:
    """Of both kinds of blocks, for any slopes by the cross entropy and the statistic."""
    logits, labels = extreme_rows()
    # Here no label is impossible, and no class is masked: the logarithms themselves are read.
    rows = ((logits > -torch.inf).all(1) & (labels >= 0)).nonzero().squeeze(1)
    logits, labels = logits[rows], labels[rows]
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    plain = Block(leaf, labels, [statistic], given)
    generator = torch.Generator().manual_seed(1)
    slopes: list[Tensor | None] = []
    total: Any = 0
    for own in plain.numbers:
        if not own.requires_grad:
            slopes.append(None)
            continue
        slope = torch.randn(own.shape, generator=generator, dtype=torch.float64)
        slopes.append(slope)
        total = total + (slope * own).sum()
    (wanted,) = torch.autograd.grad(total, leaf)
    for kind in (Block, CacheBlock):
        block = kind(logits, labels, [statistic], given)
        for ours, autograds in zip(block.numbers, plain.numbers, strict=True):
            assert_close(ours, autograds.detach(), rtol=1e-9, atol=1e-12)
        assert_close(block.gradient(slopes), wanted, rtol=1e-8, atol=1e-10)
