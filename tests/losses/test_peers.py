"""MbLS, MDCA, AvUC, DFT and the power loss, against their papers' formulas spelled out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import avuc, cross_entropy, dft, focal, make_loss, mbls, mdca, power
from tests.helpers.loss_cases import BOTH_ENDS, random_batch, take_path, value_and_gradient

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(params=BOTH_ENDS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take_path(monkeypatch, request.param)
    return request.param


def batch(seed: int = 0, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    return random_batch(30, 6, scale=scale, seed=seed)


class TestMbls:
    @pytest.mark.parametrize("margin", [0.0, 2.0, 10.0])
    def test_is_what_each_distance_exceeds_the_margin_by(self, margin: float, path: str) -> None:
        logits, labels = batch()
        total = 0.0
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
            excess = sum(max(0.0, max(row) - z - margin) for z in row) / len(row)
            total += math.log(sum(math.exp(z - row[label]) for z in row)) + 0.3 * excess
        ours = mbls(margin=margin, margin_weight=0.3)(logits, labels)
        assert ours.item() == pytest.approx(total / len(labels), rel=1e-10)

    def test_leaves_near_logits_alone(self, path: str) -> None:
        logits, labels = batch(scale=1.0)
        ours, plain = (value_and_gradient(loss, logits, labels) for loss in (mbls(), cross_entropy()))
        assert_close(ours, plain, **EXACT)

    def test_a_masked_class_is_as_if_it_were_not_there(self, path: str) -> None:
        logits, labels = batch()
        labels = labels.clamp_max(4)
        masked = logits.clone()
        masked[:, 5] = -torch.inf
        loss = mbls(margin=1.0)
        value, gradient = value_and_gradient(loss, masked, labels)
        without = value_and_gradient(loss, logits[:, :5], labels)
        assert_close((value, gradient[:, :5]), without, **EXACT)
        assert (gradient[:, 5] == 0).all()


class TestMdca:
    @pytest.mark.parametrize("gamma", [0.0, 2.0])
    def test_is_the_gap_of_the_frequencies(self, gamma: float, path: str) -> None:
        logits, labels = batch()
        labels[[3, 8]] = -100
        probs, own = logits.softmax(1)[labels != -100], labels[labels != -100]
        gaps = [abs(probs[:, j].mean() - (own == j).double().mean()) for j in range(6)]
        expected = focal(gamma=gamma)(logits, labels) + 0.7 * sum(gaps) / 6
        assert_close(mdca(mdca_weight=0.7, gamma=gamma)(logits, labels), expected, **EXACT)

    def test_is_nothing_where_mean_probabilities_are_the_frequencies(self, path: str) -> None:
        logits = torch.tensor([[0.7, 0.3], [0.3, 0.7]], dtype=torch.float64).log()
        labels = torch.tensor([0, 1])
        assert_close(mdca()(logits, labels), cross_entropy()(logits, labels), **EXACT)


class TestAvuc:
    def test_counts_softly(self, path: str) -> None:
        logits, labels = batch(scale=2.0)
        probs = logits.softmax(1)
        entropies = [-sum(p * math.log(p) for p in row) for row in probs.tolist()]
        right = (logits.argmax(1) == labels).tolist()
        means = [
            sum(u for u, r in zip(entropies, right, strict=True) if r == kind) / right.count(kind)
            for kind in (True, False)
        ]
        counts = dict.fromkeys(("AC", "AU", "IC", "IU"), 0.0)
        for row, u, is_right in zip(probs.tolist(), entropies, right, strict=True):
            certain = u <= sum(means) / 2
            share = (max(row) if is_right else 1 - max(row)) * (1 - math.tanh(u) if certain else math.tanh(u))
            counts[("A" if is_right else "I") + ("C" if certain else "U")] += share
        assert min(counts.values()) > 0
        penalty = math.log(1 + (counts["AU"] + counts["IC"]) / (counts["AC"] + counts["IU"]))
        ours = avuc(avuc_weight=0.5)(logits, labels) - cross_entropy()(logits, labels)
        assert ours.item() == pytest.approx(0.5 * penalty, rel=1e-9)

    @pytest.mark.parametrize("kind", ["right", "wrong", "ignored"])
    def test_of_one_kind_of_rows_it_is_finite(self, kind: str, path: str) -> None:
        logits, _ = batch()
        labels = {"right": logits.argmax(1), "wrong": logits.argmin(1), "ignored": torch.full((30,), -100)}
        value, gradient = value_and_gradient(avuc(), logits, labels[kind])
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()


class TestLossesOfTheProbability:
    def test_dft_is_cross_entropy_with_its_gradient_scaled(self, path: str) -> None:
        logits, labels = batch()
        value, gradient = value_and_gradient(dft(), logits, labels, reduction="none")
        ce, slope = value_and_gradient(cross_entropy(), logits, labels, reduction="none")
        assert_close(value, (-ce).exp() * ce, **EXACT)
        assert_close(gradient, (-ce).exp()[:, None] * slope, **EXACT)

    def test_has_the_gradient_of_the_probability(self, path: str) -> None:
        logits, labels = batch()
        ours, other = (value_and_gradient(loss, logits, labels)[1] for loss in (dft(), power(exponent=1.0)))
        assert_close(ours, other, **EXACT)

    @pytest.mark.parametrize("exponent", [0.3, 1.0, 10.0])
    def test_power(self, exponent: float, path: str) -> None:
        logits, labels = batch()
        p = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
        ours = power(exponent=exponent)(logits, labels, reduction="none")
        assert_close(ours, (1 - p**exponent) / exponent, **EXACT)

    def test_of_a_small_exponent_power_is_cross_entropy(self, path: str) -> None:
        logits, labels = batch()
        ours, plain = (
            value_and_gradient(loss, logits, labels) for loss in (power(exponent=1e-9), cross_entropy())
        )
        assert_close(ours, plain, rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize(("exponent", "sharper"), [(0.5, 2.0), (0.2, 1.25)])
    def test_its_minimum_is_the_sharpened_posterior(self, exponent: float, sharper: float) -> None:
        posterior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        solver = torch.optim.LBFGS(
            [logits], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            solver.zero_grad()
            each = power(exponent=exponent)(logits.expand(3, 3), torch.arange(3), reduction="none")
            risk = posterior @ each
            risk.backward()
            return risk

        solver.step(closure)
        expected = posterior**sharper / (posterior**sharper).sum()
        assert_close(logits.detach().softmax(1)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mbls", {"margin": -1}),
        ("mbls", {"margin_weight": "x"}),
        ("mdca", {"gamma": -1}),
        ("avuc", {"avuc_weight": -0.1}),
        ("power", {"exponent": 0}),
        ("dft", {"gamma": 1}),
    ],
)
def test_values_out_of_range_are_refused(name: str, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*of loss '{name}'|of loss '{name}', got"):
        make_loss(name, **wrong)
