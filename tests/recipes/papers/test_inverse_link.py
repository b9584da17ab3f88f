"""The inverse link against the losses themselves: their gradients, and their minima at known posteriors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from papers.inverse_link import InverseLink
from scipy.special import softmax

from hf_calib.losses import CalibrationLoss, make_loss
from tests.helpers.loss_cases import VARIANTS, Variant, make_variant, variant_id

pytestmark = pytest.mark.slow

REFUSED = [
    "avuc",
    "dft",
    "ece_ce",
    "kde_ece",
    "logit_norm",
    "mbls",
    "mdca",
    "mmce",
    "power",
    "soft_ece",
]
SUPPORTED = [
    *(variant for variant in VARIANTS if variant[0] not in REFUSED),
    ("ada_dual_focal", {}),
    ("dual_focal_gra", {"rival": "mean3"}),
    ("focal_calibration", {"gamma": 0, "brier_weight": 10}),
    ("focal_calibration", {"brier_weight": 0}),
    ("inverse_focal", {"gamma": 3.5}),
]

every_variant = pytest.mark.parametrize("variant", SUPPORTED, ids=variant_id)


def random_logits(n: int, c: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, c)) * rng.choice([0.3, 1.0, 3.0], size=(n, 1))


def label_gradients(loss: CalibrationLoss, logits: np.ndarray) -> np.ndarray:
    """dL(z, y) / dz for every row and every label y: (N, C labels, C)."""
    n, c = logits.shape
    z = torch.tensor(logits).repeat_interleave(c, dim=0).requires_grad_()
    loss(z, torch.arange(c).repeat(n), reduction="sum").backward()
    assert z.grad is not None
    return z.grad.numpy().reshape(n, c, c)


class TestSolvesTheEquation:
    @every_variant
    @pytest.mark.parametrize("c", [2, 3])
    def test_expected_gradient_is_zero(self, variant: Variant, c: int) -> None:
        loss, logits = make_variant(variant, c), random_logits(60, c)
        eta = InverseLink(loss).predict_proba(logits)
        terms = eta[:, :, None] * label_gradients(loss, logits)
        residual = np.abs(terms.sum(axis=1)).max(axis=1)
        # In the other rows classes were pooled, or a posterior would be negative, or all gradients underflow.
        solved = residual < 1e-8 * np.abs(terms).max(axis=(1, 2))
        assert solved.mean() > (
            0.3 if variant != ("inverse_focal", {"gamma": 3.5}) else 0.05
        )

    @every_variant
    def test_class_weights_are_divided_out(self, variant: Variant) -> None:
        name, hyperparameters = variant
        logits = random_logits(40, 3)
        weights = np.array([0.5, 1.0, 4.0])
        unweighted = InverseLink(make_loss(name, **hyperparameters))
        if name == "label_smoothing":  # The weights stand before each log p.
            loss = make_loss(name, class_weights=weights, **hyperparameters)
            np.testing.assert_allclose(
                InverseLink(loss).predict_proba(logits),
                unweighted.predict_proba(logits - np.log(weights)),
                rtol=1e-9,
            )
            return
        plain = unweighted.predict_proba(logits)
        weighted = InverseLink(
            make_loss(name, class_weights=weights, **hyperparameters)
        ).predict_proba(logits)
        expected = plain / weights
        expected /= expected.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(weighted, expected, rtol=1e-9, atol=1e-15)


class TestKnownPosterior:
    def test_label_smoothing_with_class_weights(self) -> None:
        """The minimum of the expected loss is p_k ~ w_k ((1 - eps) eta_k + eps / C)."""
        eta, weights = np.array([[0.6, 0.3, 0.1]]), np.array([0.5, 1.0, 4.0])
        p = weights * (0.7 * eta + 0.1)
        loss = make_loss("label_smoothing", smoothing=0.3, class_weights=weights)
        gradients = label_gradients(loss, np.log(p))
        np.testing.assert_allclose(eta @ gradients[0], 0, atol=1e-9)
        found = InverseLink(loss).predict_proba(np.log(p))
        np.testing.assert_allclose(found, eta, rtol=1e-6)

    @pytest.mark.parametrize("gamma", [0.0, 1.0, 3.0])
    def test_focal_is_the_papers_formula(self, gamma: float) -> None:
        logits = random_logits(50, 4)
        p = softmax(logits, axis=1)
        phi = (1 - p) ** gamma - gamma * p * (1 - p) ** (gamma - 1) * np.log(p)
        expected = p / phi / (p / phi).sum(axis=1, keepdims=True)
        probs = InverseLink(make_loss("focal", gamma=gamma)).predict_proba(logits)
        np.testing.assert_allclose(probs, expected, rtol=1e-9)

    def test_the_table_of_the_loss_is_read_when_it_is_asked(self) -> None:
        loss = make_loss("adafocal", n_bins=2)
        link, logits = InverseLink(loss), random_logits(20, 3)
        before = link.predict_proba(logits)
        loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        assert np.abs(link.predict_proba(logits) - before).max() > 0.01


class TestBranches:
    """Probabilities that are the minimum for no posterior, or for several."""

    def test_dual_focal_within_its_jump_is_a_tie(self) -> None:
        link = InverseLink(make_loss("dual_focal"))
        probs = link.predict_proba(np.log([[0.6, 0.4], [0.649, 0.351], [0.652, 0.348]]))
        np.testing.assert_allclose(probs[:2], 0.5, atol=1e-8)
        assert (probs[:2, 0] > probs[:2, 1]).all()  # the predicted class stays
        assert probs[2, 0] > 0.5 + 1e-5

    def test_classes_that_tie_get_the_same(self) -> None:
        logits = np.log([[0.4, 0.2, 0.2, 0.2], [0.3, 0.3, 0.3, 0.1], [0.25] * 4])
        for variant in SUPPORTED:
            probs = InverseLink(make_variant(variant, 4)).predict_proba(logits)
            np.testing.assert_allclose(probs[0, 1:], probs[0, 1], rtol=1e-9)
            np.testing.assert_allclose(probs[1, :3], probs[1, 0], rtol=1e-9)
            np.testing.assert_allclose(probs[2], 0.25, rtol=1e-9)


class TestNumbers:
    @every_variant
    def test_saturated_and_masked_logits(self, variant: Variant) -> None:
        logits = np.array(
            [
                [1e4, -1e4, -1e4, 0],
                [1e4, 1e4, -1e4, -1e4],
                [0, -np.inf, -np.inf, -np.inf],
                [700, 0, -700, -np.inf],
                [40, 39.5, 0, -1e4],
            ]
        )
        probs = InverseLink(make_variant(variant, 4)).predict_proba(logits)
        assert np.isfinite(probs).all()
        np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-12)
        np.testing.assert_allclose(probs[[0, 2, 3]], np.eye(4)[[0, 0, 0]], atol=1e-12)
        np.testing.assert_allclose(probs[1], [0.5, 0.5, 0, 0], atol=1e-12)
        assert (probs[np.isneginf(logits)] == 0).all()

    @every_variant
    def test_a_masked_class_is_as_if_absent(self, variant: Variant) -> None:
        logits = random_logits(50, 3)
        masked = np.hstack([logits[:, :1], np.full((50, 1), -np.inf), logits[:, 1:]])
        expected = InverseLink(make_variant(variant, 3)).predict_proba(logits)
        probs = InverseLink(make_variant(variant, 4)).predict_proba(masked)
        np.testing.assert_allclose(
            np.delete(probs, 1, axis=1), expected, rtol=1e-9, atol=1e-15
        )
        np.testing.assert_array_equal(probs[:, 1], 0)

    def test_near_certainty_keeps_its_digits(self) -> None:
        """p -> 1: the focal factor is (1 - p)^g (1 + g), that of the other class 1; so also where 1 - p is 1e-29."""
        for gap in (30.0, 45.0, 66.0):
            log_odds = np.diff(
                InverseLink(make_loss("focal", gamma=3.0)).transform([[0.0, gap]])
            )[0, 0]
            assert log_odds == pytest.approx(
                gap + 3 * gap - np.log(4), abs=1e-2 if gap < 60 else 0.2
            )
        # A loss of other numbers, too, does not see 1 - p beyond 33: there the odds still grow, without a jump.
        of_gap = [
            np.diff(InverseLink(make_loss("dual_focal")).transform([[0.0, g]]))[0, 0]
            for g in (30, 33, 45)
        ]
        assert of_gap[0] < of_gap[1] < of_gap[2] < 6 * 45


class TestTheEstimator:
    @pytest.mark.parametrize("name", REFUSED)
    def test_losses_without_a_link(self, name: str) -> None:
        with pytest.raises(
            ValueError,
            match=f"inverse link, got '{name}'; use a loss among .*dual_focal",
        ):
            InverseLink(make_loss(name))

    @pytest.mark.parametrize("loss", ["focal", torch.nn.CrossEntropyLoss(), None])
    def test_what_is_no_loss_of_ours(self, loss: object) -> None:
        with pytest.raises(
            ValueError, match=r"expected loss to be a CalibrationLoss, got .*make_loss"
        ):
            InverseLink(loss)  # type: ignore[arg-type]

    def test_losses_that_it_cannot_undo(self) -> None:
        multi_label = make_loss("focal", problem_type="multi_label_classification")
        with pytest.raises(ValueError, match="single-label"):
            InverseLink(multi_label)
        with pytest.raises(ValueError, match="smoothing to be below 1"):
            InverseLink(make_loss("label_smoothing", smoothing=1))
        with pytest.raises(ValueError, match="the 3 classes of class_weights"):
            InverseLink(make_loss("focal", class_weights=[1, 2, 3])).predict_proba(
                [[1.0, 0.0]]
            )

    @pytest.mark.parametrize("logits", [[[np.nan, 0.0]], [[np.inf, 0.0]]])
    def test_logits_that_are_not_numbers(self, logits: list[list[float]]) -> None:
        with pytest.raises(ValueError, match=r"logits to be finite \(or -inf"):
            InverseLink(make_loss("focal")).transform(logits)
