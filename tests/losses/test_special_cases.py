"""The losses by what they must equal: limits, ratios, PyTorch's own losses, formulas spelled out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import (
    make_loss,
    penalties,
)
from hf_calib.metrics import kde_calibration_error
from hf_calib.metrics.kernel import KINDS, KernelKind
from tests.helpers.loss_cases import (
    BOTH_ENDS,
    INTERPRETED,
    PATHS,
    make_variant,
    random_batch,
    take_path,
    value_and_gradient,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(params=PATHS if INTERPRETED else BOTH_ENDS)
def any_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take_path(monkeypatch, request.param)
    return request.param


@pytest.fixture
def path(any_path: str) -> str:
    """For formulas of statistics: `test_gradients.py` compares those of the kernels, which take a while interpreted."""
    if INTERPRETED:
        pytest.skip("not a matter of the kernels")
    return any_path


def batch() -> tuple[Tensor, Tensor]:
    logits, labels = random_batch(40, 5)
    labels[[4, 17]] = -100
    return logits, labels


def compared(
    loss: Any, logits: Tensor, labels: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Sum and gradient; mean and gradient."""
    return (
        value_and_gradient(loss, logits, labels, reduction="sum"),
        value_and_gradient(loss, logits, labels, reduction="mean"),
    )


CROSS_ENTROPY_IN_THE_LIMIT = [
    ("label_smoothing", {"smoothing": 0}),
    ("focal", {"gamma": 0}),
    ("focal_gra", {"gamma": 0}),
    ("flsd", {"gammas": (0, 0)}),
    ("inverse_focal", {"gamma": 0}),
    ("dual_focal", {"gamma": 0}),
    ("bsce", {"gamma": 0}),
    ("bsce_gra", {"gamma": 0, "norm": 1}),
    ("ece_ce", {}),  # before its first update
    ("focal_calibration", {"gamma": 0, "brier_weight": 0}),
    ("adafocal", {"gamma_init": 0}),
    ("ada_dual_focal", {"gamma_init": 0}),
    ("entropy_regularized", {"entropy_weight": 0}),
    ("logit_norm", {"norm_weight": 0}),
    ("mmce", {"mmce_weight": 0}),
    ("soft_ece", {"ece_weight": 0}),
    ("kde_ece", {"kde_weight": 0}),
]


@pytest.mark.parametrize(("name", "hyperparameters"), CROSS_ENTROPY_IN_THE_LIMIT)
def test_limits_that_are_cross_entropy(name: str, hyperparameters: dict[str, Any], path: str) -> None:
    loss = make_loss(name, **hyperparameters)
    assert_close(compared(loss, *batch()), compared(make_loss("cross_entropy"), *batch()), **EXACT)


PAIRS = {
    "no Brier term: focal": (
        ("focal_calibration", {"gamma": 2, "brier_weight": 0}),
        ("focal", {"gamma": 2}),
    ),
    "one step: focal": (("flsd", {"gammas": (2, 2)}), ("focal", {"gamma": 2})),
    "one step, on the gradient": (("flsd_gra", {"gammas": (2, 2)}), ("focal_gra", {"gamma": 2})),
    "constant table: focal": (("adafocal", {"gamma_init": 3}), ("focal", {"gamma": 3})),
    "negative constant table": (("adafocal", {"gamma_init": -1.5}), ("inverse_focal", {"gamma": 1.5})),
    "constant table: dual focal": (("ada_dual_focal", {"gamma_init": 5}), ("dual_focal", {"gamma": 5})),
    "calfocal before an update": (("calfocal", {}), ("focal", {"gamma": 1})),
    "calfocal of no rate": (("calfocal", {"per_sample": True, "update_rate": 0}), ("focal", {"gamma": 1})),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_losses_that_are_one_another(pair: Any, path: str) -> None:
    (name, hyperparameters), (other, others) = pair
    loss = make_loss(name, **hyperparameters)
    assert_close(compared(loss, *batch()), compared(make_loss(other, **others), *batch()), **EXACT)


@pytest.mark.parametrize("suffix", ["", "_gra"])
def test_bsce_of_norm_1_is_focal(suffix: str, path: str) -> None:
    """||p - e_y||_1 = 2 (1 - p_y): the other classes have no say."""
    for gamma in (1.0, 3.0):
        bsce = compared(make_loss(f"bsce{suffix}", gamma=gamma, norm=1), *batch())
        focal = compared(make_loss(f"focal{suffix}", gamma=gamma), *batch())
        assert_close(bsce, tuple((2**gamma * v, 2**gamma * g) for v, g in focal), **EXACT)


class TestPyTorchsLosses:
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_cross_entropy(self, reduction: str, weighted: bool, path: str) -> None:
        weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25], dtype=torch.float64) if weighted else None
        loss = make_loss("cross_entropy", class_weights=weights)
        ours = value_and_gradient(loss, *batch(), reduction=reduction)

        def theirs(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits, labels, weight=weights, reduction=reduction)

        assert_close(ours, value_and_gradient(theirs, *batch()), **EXACT)

    @pytest.mark.parametrize("smoothing", [0.05, 0.3, 1.0])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_label_smoothing(self, reduction: str, smoothing: float, path: str) -> None:
        ours = value_and_gradient(
            make_loss("label_smoothing", smoothing=smoothing), *batch(), reduction=reduction
        )

        def theirs(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)

        assert_close(ours, value_and_gradient(theirs, *batch()), **EXACT)

    def test_labels_of_other_integer_types(self) -> None:
        logits, labels = random_batch(8, 2)
        for dtype in (torch.int32, torch.int16, torch.uint8, torch.bool):
            for weights in (None, [1.0, 3.0]):
                loss = make_loss("focal", class_weights=weights)
                assert_close(loss(logits, labels.to(dtype)), loss(logits, labels), **EXACT)
                assert loss.normalizer(labels.to(dtype)) == loss.normalizer(labels)


def test_dual_focal_is_at_least_focal(path: str) -> None:
    """Its rival adds to the weight; where there is none, the two are the same."""
    logits, labels = batch()
    dual = make_loss("dual_focal", gamma=3)(logits, labels, reduction="none")
    focal = make_loss("focal", gamma=3)(logits, labels, reduction="none")
    lowest = logits.argmin(1) == labels
    assert lowest.any()
    assert (dual[~lowest & (labels >= 0)] > focal[~lowest & (labels >= 0)]).all()
    assert_close(dual[lowest], focal[lowest], **EXACT)


RANKS = {
    "next": (0, 1),
    "second": (1, 2),
    "third": (2, 3),
    "mean2": (0, 2),
    "mean3": (0, 3),
    "mean_all": (0, 9),
}


@pytest.mark.parametrize("rival", RANKS)
@pytest.mark.parametrize("n_classes", [2, 3, 5, 9])
def test_rivals_one_by_one(rival: str, n_classes: int, any_path: str) -> None:
    """q, the mean of the probabilities at these ranks below the label, or 0 where nothing is there."""
    logits, labels = random_batch(30, n_classes)
    logits[20:] = logits[20:].round()  # with ties
    weights = []
    # Logits are compared: the softmax of two that tie may differ in the last digit.
    for z, probs, label in zip(logits, logits.softmax(1), labels, strict=True):
        below = sorted((p for p, score in zip(probs, z, strict=True) if score < z[label]), reverse=True)
        rivals = below[slice(*RANKS[rival])]
        weights.append((1 - probs[label] + sum(rivals) / max(len(rivals), 1)) ** 5)
    want = torch.stack(weights) * F.cross_entropy(logits, labels, reduction="none")
    assert_close(make_loss("dual_focal", rival=rival)(logits, labels, reduction="none"), want, **EXACT)


@pytest.mark.parametrize("rival", [0.1, 0.2, 0.95])
def test_a_constant_rival(rival: float, path: str) -> None:
    """(1 - p + q)^gamma CE, also where p is below q; q has no gradient, and 0 is the focal loss."""
    logits, labels = random_batch(30, 5)
    logits[0] = torch.tensor([60.0, 0, 0, 0, 0])
    labels[:2] = torch.tensor([0, int(logits[1].argmin())])
    p = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
    assert (p < rival).any()
    assert (p > rival).any()

    def formula(z: Tensor, y: Tensor) -> Tensor:
        cross_entropy = F.cross_entropy(z, y, reduction="none")
        return ((-torch.expm1(-cross_entropy) + rival) ** 5 * cross_entropy).sum()

    ours = value_and_gradient(make_loss("dual_focal", rival=rival), logits, labels, reduction="sum")
    assert_close(ours, value_and_gradient(formula, logits, labels), **EXACT)


@pytest.mark.parametrize("given", [0, "0", 0.0])
def test_a_constant_rival_of_0_is_focal(given: Any, path: str) -> None:
    for end in ("", "_gra"):
        ours = make_loss(f"dual_focal{end}", gamma=3.0, rival=given)
        assert_close(compared(ours, *batch()), compared(make_loss(f"focal{end}"), *batch()), **EXACT)


@pytest.mark.parametrize("gamma", [1.0, 2.0, 3.0, 4.0])
def test_bsce_whose_norm_is_gamma_is_the_papers_equation(gamma: float, path: str) -> None:
    """Eq. 11 as printed: the weight is a sum over the classes of scalar norms, |p_j - [j = y]|^gamma."""
    logits, labels = random_batch(20, 5)
    distance = (logits.softmax(1) - F.one_hot(labels, 5)).abs()
    want = (distance**gamma).sum(1) * F.cross_entropy(logits, labels, reduction="none")
    for name in ("bsce", "bsce_gra"):
        ours = make_loss(name, gamma=gamma, norm=gamma)(logits, labels, reduction="none")
        assert_close(ours, want, **EXACT)


@pytest.mark.parametrize("gamma", [-2.0, -0.5, 0.0, 0.5, 3.0])
def test_adafocal_takes_its_loss_from_the_sign_of_gamma(gamma: float, path: str) -> None:
    logits, labels = random_batch(9, 5)
    p = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
    want = ((1 - p) ** gamma if gamma >= 0 else (1 + p) ** -gamma) * -p.log()
    assert_close(make_loss("adafocal", gamma_init=gamma)(logits, labels, reduction="none"), want, **EXACT)


def test_calfocal_of_each_example(path: str) -> None:
    """Eq. 2: gamma = exp(lambda (p - accuracy of p's bin)), a constant to the gradient."""
    loss = make_variant(("calfocal", {"per_sample": True, "update_rate": 3}), 5)
    logits, labels = random_batch(30, 5)
    p = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
    bins = [max(0, min(14, sum(bool(q >= edge) for edge in loss.edges) - 1)) for q in p]
    gamma = torch.exp(3 * (p - loss.accuracies[bins]))

    def focal(logits: Tensor, labels: Tensor) -> Tensor:
        cross_entropy = F.cross_entropy(logits, labels, reduction="none")
        return ((-torch.expm1(-cross_entropy)) ** gamma * cross_entropy).sum()

    assert_close(
        value_and_gradient(loss, logits, labels, reduction="sum"),
        value_and_gradient(focal, logits, labels),
        **EXACT,
    )


def test_brier_of_an_impossible_label(any_path: str) -> None:
    """Its cross entropy, which has weight 0, is infinite."""
    logits = torch.tensor([[1.0, 1.0, -torch.inf]])
    value, gradient = value_and_gradient(make_loss("brier"), logits, torch.tensor([2]))
    assert value.item() == pytest.approx(1.5)
    assert_close(gradient, torch.zeros(1, 3), rtol=0, atol=1e-7)


@pytest.mark.parametrize("p", [2.0, 3.0, 16.0])
@pytest.mark.parametrize("scale", [300.0, 1e-3])
def test_logit_norm_does_not_overflow(p: float, scale: float, any_path: str) -> None:
    """300^16 is beyond float32, and 1e-3^16 below it; the norm is neither."""
    logits, labels = random_batch(12, 5)
    logits = (scale * logits / logits.abs().max()).float()
    penalty = make_loss("logit_norm", norm_weight=1.0, p=p)
    value, gradient = value_and_gradient(penalty, logits, labels, reduction="none")

    def formula(z: Tensor, y: Tensor) -> Tensor:
        norm = z.abs().pow(p).sum(1).pow(1 / p)
        return F.cross_entropy(z, y, reduction="none") + norm

    want_value, want_gradient = value_and_gradient(formula, logits.double(), labels)
    assert_close(value.double(), want_value, rtol=1e-5, atol=1e-6)
    assert_close(gradient.double(), want_gradient, rtol=1e-4, atol=1e-5)


class TestPenaltiesOnTheBatch:
    """Against loops over pairs of examples, from the papers' formulas."""

    def confidences(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, labels = random_batch(11, 4)
        confidence, predicted = logits.softmax(1).max(1)
        return logits, labels, confidence, (predicted == labels).double()

    def penalty(self, name: str, logits: Tensor, labels: Tensor, **hyperparameters: Any) -> Tensor:
        loss = make_loss(name, **hyperparameters)
        return loss(logits, labels) - make_loss("cross_entropy")(logits, labels)

    def test_plain_mmce(self, path: str) -> None:
        logits, labels, r, c = self.confidences()
        pairs = itertools.product(range(11), repeat=2)
        total = sum((c[i] - r[i]) * (c[j] - r[j]) * torch.exp(-abs(r[i] - r[j]) / 0.4) for i, j in pairs)
        ours = self.penalty("mmce", logits, labels, mmce_weight=1, variant="plain")
        assert_close(ours, (total / 11**2).sqrt(), rtol=1e-7, atol=0.0)

    def test_weighted_mmce(self, path: str) -> None:
        logits, labels, r, c = self.confidences()

        def mean(left: float, right: float, error: Any) -> Tensor:
            pairs = list(itertools.product((c == left).nonzero().flatten(), (c == right).nonzero().flatten()))
            return sum(error(r[i], r[j]) * torch.exp(-abs(r[i] - r[j]) / 0.4) for i, j in pairs) / len(pairs)

        squared = (
            mean(1, 1, lambda a, b: (1 - a) * (1 - b))
            + mean(0, 0, lambda a, b: a * b)
            - 2 * mean(1, 0, lambda a, b: (1 - a) * b)
        )
        ours = self.penalty("mmce", logits, labels, mmce_weight=1)
        assert_close(ours, squared.sqrt(), rtol=1e-7, atol=0.0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_mmce_of_confidences_that_tie_but_for_rounding(self, dtype: torch.dtype, any_path: str) -> None:
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
        _, ours = value_and_gradient(loss, logits, labels)
        _, want = value_and_gradient(formula, logits.double(), labels)
        assert_close(ours.double() / 1e6, want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("all_right", [True, False])
    def test_avuc_of_one_kind_of_rows(self, all_right: bool) -> None:
        """The threshold between certain and unsure is then the mean entropy of that kind."""
        logits, labels, r, _ = self.confidences()
        labels = logits.argmax(1) if all_right else logits.argmin(1)
        probs = logits.softmax(1)
        entropy = -(probs * probs.log()).sum(1)
        certain = entropy <= entropy.mean()
        assert 0 < certain.sum() < 11
        size = r if all_right else 1 - r
        of_certain = (size * (1 - entropy.tanh()))[certain].sum()
        of_unsure = (size * entropy.tanh())[~certain].sum()
        bad, good = (of_unsure, of_certain) if all_right else (of_certain, of_unsure)
        ours = self.penalty("avuc", logits, labels, avuc_weight=1)
        assert_close(ours, torch.log1p(bad / good), rtol=1e-7, atol=0.0)

    @pytest.mark.parametrize("variant", ["weighted", "plain"])
    def test_mmce_does_not_depend_on_the_batch_size(self, variant: str) -> None:
        """Rows that stand in the batch twice change nothing; in the authors' code they halve the value."""
        logits, labels, _, _ = self.confidences()
        once = self.penalty("mmce", logits, labels, variant=variant)
        twice = self.penalty("mmce", logits.repeat(2, 1), labels.repeat(2), variant=variant)
        assert_close(twice, once, **EXACT)

    def test_kde_ece(self, path: str) -> None:
        logits, labels, r, c = self.confidences()
        h = 0.1
        gaps = []
        for i in range(11):
            others = [j for j in range(11) if j != i]
            beta = [torch.distributions.Beta(r[j] / h + 1, (1 - r[j]) / h + 1) for j in others]
            kernel = torch.stack([b.log_prob(r[i]).exp() for b in beta])
            gaps.append(abs((kernel * c[others]).sum() / kernel.sum() - r[i]))
        ours = self.penalty("kde_ece", logits, labels, kde_weight=1)
        assert_close(ours, torch.stack(gaps).mean(), **EXACT)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("bandwidth", [0.02, 0.1, 1.0])
    def test_kde_ece_is_the_metric_of_the_batch(self, kind: KernelKind, bandwidth: float, path: str) -> None:
        logits, labels = random_batch(30, 4)
        logits[:3] *= 30  # saturated, whose probabilities are moved off 0 and 1
        logits[5:8] = logits[4]
        labels[[9, 20]] = -100
        counted = labels >= 0
        probs = logits.softmax(1)[counted].numpy()
        want = kde_calibration_error(probs, labels[counted].numpy(), bandwidth=bandwidth, kind=kind)
        ours = self.penalty("kde_ece", logits, labels, kde_weight=1, bandwidth=bandwidth, kind=kind)
        assert ours.item() == pytest.approx(want, rel=1e-9)

    def test_canonical_kde_ece_against_the_authors_code(self, golden: Path, path: str) -> None:
        with np.load(golden / "metrics_N300_K2.npz") as file:
            n_used = int(file["kde_n_used_first_rows"])
            logits, labels = torch.tensor(file["logits"][:n_used]), torch.tensor(file["labels"][:n_used])
            want = float(file["kde_canonical_bw0p1_l1"])
        ours = self.penalty("kde_ece", logits.double(), labels, kde_weight=1, kind="canonical")
        assert ours.item() == pytest.approx(want, rel=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", KINDS)
    def test_kde_ece_where_its_kernel_has_no_logarithm(
        self, kind: str, dtype: torch.dtype, path: str
    ) -> None:
        """Saturated logits, right and wrong; ties; masked classes; two examples; one class."""
        loss = make_loss("kde_ece", kind=kind)
        row = torch.tensor([1e4, 0.0, -1e4])
        masked = torch.tensor([1.0, 2.0, -torch.inf])
        batches = [
            (
                torch.stack([row, row, row.flip(0), masked, torch.zeros(3), torch.zeros(3)]),
                [0, 2, 2, 1, 0, 1],
            ),
            (torch.stack([row, row]), [0, 1]),
            (torch.randn(5, 1, generator=torch.Generator().manual_seed(0)), [0, 0, 0, 0, 0]),
        ]
        for logits, labels in batches:
            value, gradient = value_and_gradient(loss, logits.to(dtype), torch.tensor(labels))
            assert value.isfinite()
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("confidence", [0.5, 3.0, 40.0])
    def test_kde_ece_of_an_example_alone(self, confidence: float, kind: str, path: str) -> None:
        """There is no other to estimate the accuracy from: what is left is cross entropy."""
        logits = torch.tensor([[confidence, 0.0, -1.0]], dtype=torch.float64)
        for label in (0, 1):
            ours = value_and_gradient(make_loss("kde_ece", kind=kind), logits, torch.tensor([label]))
            want = value_and_gradient(make_loss("cross_entropy"), logits, torch.tensor([label]))
            assert_close(ours, want, **EXACT)
        # With others that are ignored it stands alone, too.
        several, labels = logits.repeat(3, 1), torch.tensor([1, -100, -100])
        ours = value_and_gradient(make_loss("kde_ece", kind=kind), several, labels)
        assert_close(ours, value_and_gradient(make_loss("cross_entropy"), several, labels), **EXACT)

    def test_soft_bins_grow_hard(self, path: str) -> None:
        """With cold bins, sb_ece is the L2 calibration error of equal-width bins."""
        logits, labels, r, c = self.confidences()
        bins = (r * 15).long()
        squared = torch.zeros((), dtype=torch.float64)
        for b in bins.unique():
            inside = bins == b
            squared += inside.sum() / 11 * (c[inside].mean() - r[inside].mean()) ** 2
        ours = self.penalty("soft_ece", logits, labels, bin_temperature=1e-7)
        assert_close(ours, squared.sqrt(), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("kind", ["top_label", "canonical"])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_kernel_density_in_blocks_is_the_whole_one(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = random_batch(20, 5)
    labels[3] = -100
    loss = make_loss("kde_ece", kind=kind)
    whole = value_and_gradient(loss, logits, labels)
    monkeypatch.setattr(penalties, "_KERNEL_ELEMENTS", rows * 20)
    for own, other in zip(value_and_gradient(loss, logits, labels), whole, strict=True):
        assert_close(own, other, rtol=1e-12, atol=1e-14)
