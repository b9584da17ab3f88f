"""Multi-label problems: every (example, label) decision is a sigmoid of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss
from tests.helpers.loss_cases import EXACT, FORMULAS, Row, make_variant, value_and_gradient, variant_id

CASES = [
    ("cross_entropy", {}),
    ("label_smoothing", {"smoothing": 0.2}),
    ("brier", {}),
    ("focal", {}),
    ("focal_gra", {}),
    ("bsce", {"gamma": 2, "norm": 2}),
    ("bsce_gra", {"gamma": 3, "norm": 2}),
    ("focal_calibration", {}),
    ("adafocal", {}),
]
MULTI_LABEL = {name for name, _ in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=variant_id)


class Decisions(Row):
    """What the formulas read of N decisions, z and y (N,): the label's other outcome counts for nothing."""

    def __init__(self, z: Tensor, y: Tensor, table: AdaptiveLoss) -> None:
        self.z, self.table = z, table
        self.log_p = torch.stack([F.logsigmoid(z), F.logsigmoid(-z)], 1)
        self.ce = -self.log_p.gather(1, (y == 0).long()[:, None]).squeeze(1)
        self.p_y = torch.exp(-self.ce)
        self.p, self.truth = torch.sigmoid(z)[:, None], y[:, None]
        self.brier = (self.p - self.truth).square().sum(1)


def formula(case: tuple[str, dict[str, float]], table: AdaptiveLoss) -> Callable[..., Tensor]:
    def rows(logits: Tensor, labels: Tensor) -> Tensor:
        counts = labels >= 0
        values = FORMULAS[case[0]](Decisions(logits[counts], labels[counts], table), **case[1])
        return torch.zeros_like(logits).masked_scatter(counts, values)

    return rows


def batch() -> tuple[Tensor, Tensor]:
    """Logits and labels (12, 5), float64, up to far beyond saturation; a few decisions ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 5, generator=generator, dtype=torch.float64)
    logits[0] = torch.tensor([19.0, 21.0, -25.0, 40.0, -800.0])
    labels = torch.rand(12, 5, generator=generator, dtype=torch.float64).round()
    labels[3, 1] = labels[5] = -100
    return logits, labels


def test_which_losses_have_a_multi_label_form() -> None:
    assert {name for name, entry in LOSSES.items() if entry.multi_label} == MULTI_LABEL


@every_case
def test_formulas_reductions_and_class_weights(case: tuple[str, dict[str, float]]) -> None:
    loss = make_variant(case, 5)
    logits, labels = batch()
    counts = labels >= 0
    ours = value_and_gradient(loss, logits, labels, reduction="none")
    assert_close(ours, value_and_gradient(formula(case, loss), logits, labels), **EXACT)
    assert not ours[0][~counts].any()
    assert not ours[1][~counts].any()
    assert loss.normalizer(labels) == counts.sum()
    assert_close(loss(logits, labels), ours[0].sum() / counts.sum(), **EXACT)
    assert_close(loss(logits, labels, num_items_in_batch=7), ours[0].sum() / 7, **EXACT)

    columns = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
    weighted = make_variant(case, 5, class_weights=columns)
    assert weighted.normalizer(labels) == (columns * counts).sum()
    assert_close(weighted(logits, labels, reduction="none"), columns * ours[0], **EXACT)
    mean = (columns * ours[0]).sum() / (columns * counts).sum()
    assert_close(weighted(logits, labels), mean, **EXACT)


@every_case
def test_a_soft_label_is_the_mean_of_its_outcomes(case: tuple[str, dict[str, float]]) -> None:
    """Of cross entropy that is the cross entropy to it, as PyTorch has it."""
    loss, (logits, _) = make_variant(case, 5), batch()
    yes, no = (loss(logits, torch.full_like(logits, y), reduction="none") for y in (1.0, 0.0))
    some = torch.full_like(logits, 0.3)
    soft = loss(logits, some, reduction="none")
    assert_close(soft, 0.3 * yes + 0.7 * no, **EXACT)
    if case[0] == "cross_entropy":
        want = F.binary_cross_entropy_with_logits(logits, some, reduction="none")
        assert_close(soft, want, **EXACT)
    if not case[0].endswith("_gra"):
        leaf = logits[1:7].requires_grad_()
        assert torch.autograd.gradcheck(lambda z: loss(z, some[1:7], reduction="none"), leaf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_case
def test_extremes_are_finite(case: tuple[str, dict[str, float]], dtype: torch.dtype) -> None:
    loss = make_variant(case, 5)
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


@pytest.mark.parametrize("name", sorted(set(LOSSES) - MULTI_LABEL))
def test_the_others_refuse(name: str) -> None:
    message = f"loss to have a multi-label form, got '{name}', which is single-label; use one of adafocal"
    with pytest.raises(ValueError, match=message):
        make_loss(name, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=message):
        make_loss(name)(*batch())


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
    one_label_each_or_no_shares = (soft.round(), soft[:, :1], 0.9 * soft, soft - 100 * (soft == 1))
    for other in one_label_each_or_no_shares:
        assert torch.isfinite(make_loss("cross_entropy")(logits[:, : other.shape[1]], other))
