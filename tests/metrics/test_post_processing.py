"""The post-processing gap against brute force, closed forms, and the theory that bounds it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog, minimize
from scipy.special import expit, logit

import hf_calib.metrics.post_processing as post_processing
from hf_calib.metrics import post_processing_gap

TIGHT = {"rel": 0, "abs": 2e-10}


def as_probs(confidences: np.ndarray) -> np.ndarray:
    """Top-label confidences of at least 1/2 as two-class probabilities; label 0 is right."""
    return np.stack([confidences, 1 - confidences], axis=1)


def gap(confidences: object, correct: object, metric: str = "brier", **options: str) -> float:
    shares = as_probs(np.asarray(correct, dtype=float))
    probs = as_probs(np.asarray(confidences, dtype=float))
    return post_processing_gap(probs, shares, metric=metric, **options)


def score(values: np.ndarray, correct: np.ndarray, metric: str) -> float:
    """Mean score of probabilities, or for the NLL of logits."""
    if metric == "brier":
        return float(((values - correct) ** 2).mean())
    return float((np.logaddexp(0, values) - correct * values).mean())


def brute_force_gap(confidences: np.ndarray, correct: np.ndarray, metric: str) -> float:
    """The gap over updates at each confidence, every pair of them constrained, by a general solver."""
    at = confidences if metric == "brier" else logit(confidences)
    bounds = [(-c, 1 - c) for c in confidences] if metric == "brier" else [(-4, 4)] * len(at)
    i, j = np.triu_indices(len(at), k=1)
    reach = np.abs(at[i] - at[j])

    def within_reach(update: np.ndarray) -> np.ndarray:
        difference = update[i] - update[j]
        return np.concatenate([reach - difference, reach + difference])

    found = minimize(
        lambda update: score(at + update, correct, metric),
        np.zeros(len(at)),
        bounds=bounds,
        constraints={"type": "ineq", "fun": within_reach},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.success
    return score(at, correct, metric) - float(found.fun)


def smooth_error(confidences: np.ndarray, correct: np.ndarray, metric: str) -> float:
    """The largest mean of w (a - c) over weights |w| <= 1 of bounded slope, as a linear program."""
    at = confidences if metric == "brier" else logit(confidences) / 4
    order = np.argsort(at)
    n = len(at)
    rises = np.eye(n - 1, n, k=1) - np.eye(n - 1, n)
    reach = np.diff(at[order])
    found = linprog(
        -(correct - confidences)[order] / n,
        A_ub=np.vstack([rises, -rises]),
        b_ub=np.concatenate([reach, reach]),
        bounds=[(-1, 1)] * n,
    )
    assert found.success
    return -float(found.fun)


def sample(n_examples: int, seed: int, power: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.5, 0.999, n_examples)
    return confidences, (rng.random(n_examples) < confidences**power).astype(float)


@pytest.mark.parametrize("metric", ["brier", "nll"])
class TestBothMetrics:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("n_examples", [1, 2, 3, 8])
    def test_equals_brute_force(self, metric: str, n_examples: int, seed: int) -> None:
        confidences, correct = sample(n_examples, seed)
        if seed % 2:  # soft labels
            correct = np.random.default_rng(seed).random(n_examples)
        expected = brute_force_gap(confidences, correct, metric)
        assert gap(confidences, correct, metric) == pytest.approx(expected, rel=0, abs=2e-7)

    def test_calibrated_groups_have_none(self, metric: str) -> None:
        confidences = np.repeat([0.5, 0.75, 0.9, 1.0], [2, 4, 10, 5])
        correct = np.repeat([1, 0, 1, 0, 1, 0, 1], [1, 1, 3, 1, 9, 1, 5])
        assert gap(confidences, correct, metric) == pytest.approx(0, **TIGHT)

    @pytest.mark.parametrize("n_examples", [20, 300])
    @pytest.mark.parametrize("power", [0.2, 1.0, 5.0])
    def test_is_bounded_by_the_smooth_calibration_error(
        self, metric: str, power: float, n_examples: int
    ) -> None:
        confidences, correct = sample(n_examples, seed=0, power=power)
        smooth = smooth_error(confidences, correct, metric)
        size = gap(confidences, correct, metric)
        if metric == "brier":
            assert smooth**2 - 1e-9 <= size <= 2 * smooth + 1e-9
        else:
            assert smooth**2 / 2 - 1e-9 <= size / 4 <= smooth + 1e-9

    def test_is_the_score_that_recalibration_saves(self, metric: str) -> None:
        confidences, correct = sample(2000, seed=1)
        rule = post_processing._SCORES[metric]
        groups = post_processing._merge(rule.position(confidences), correct)
        update = post_processing.best_update(rule, groups)
        assert (np.abs(np.diff(update)) <= np.diff(groups.position) + 1e-9).all()
        mapped = np.interp(rule.position(confidences), groups.position, groups.position + update)
        if metric == "brier":
            assert mapped.min() >= 0
            assert mapped.max() <= 1
        saved = score(rule.position(confidences), correct, metric) - score(mapped, correct, metric)
        assert gap(confidences, correct, metric) == pytest.approx(saved, abs=4e-6)

    def test_a_smooth_distortion_is_found_whole(self, metric: str) -> None:
        """Confidences whose distortion is 1-Lipschitz to undo: the true probabilities are within reach."""
        true = np.linspace(0.5, 0.9, 200)
        confidences = true + 0.05 * (1 + np.cos(5 * true)) if metric == "brier" else expit(logit(true) + 0.3)
        at = (true, confidences) if metric == "brier" else (logit(true), logit(confidences))
        excess = score(at[1], true, metric) - score(at[0], true, metric)
        assert gap(confidences, true, metric) == pytest.approx(excess, **TIGHT)

    def test_values_that_nearly_tie_count_as_one(self, metric: str) -> None:
        spread = 0.7 + np.linspace(0, 1e-10, 50)
        correct = np.arange(50) % 2.0
        tied = gap(np.full(50, 0.7), correct, metric)
        assert gap(spread, correct, metric) == pytest.approx(tied, rel=0, abs=1e-8)

    def test_repeating_the_sample_changes_nothing(self, metric: str) -> None:
        confidences, correct = sample(100, seed=3)
        thrice = gap(np.tile(confidences, 3), np.tile(correct, 3), metric)
        assert thrice == pytest.approx(gap(confidences, correct, metric), **TIGHT)

    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_narrow_floats(self, metric: str, dtype: type) -> None:
        rng = np.random.default_rng(0)
        probs, labels = rng.dirichlet(np.ones(4), 100).astype(dtype), rng.integers(0, 4, 100)
        wide = post_processing_gap(probs.astype(float), labels, metric=metric)
        assert post_processing_gap(probs, labels, metric=metric) == wide

    def test_a_solver_that_fails_says_so(self, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(post_processing, "_MOST_ITERATIONS", 3)
        with pytest.raises(RuntimeError, match="the recalibration to converge, got a distance of"):
            gap(*sample(50, seed=0), metric)


class TestClosedForms:
    def test_one_confidence(self) -> None:
        assert gap([0.8] * 4, [1, 0, 0, 0]) == pytest.approx((0.8 - 0.25) ** 2, **TIGHT)
        nll = score(np.full(4, logit(0.8)), np.full(4, 0.25), "nll")
        least = score(np.full(4, logit(0.25)), np.full(4, 0.25), "nll")
        assert gap([0.8] * 4, [1, 0, 0, 0], "nll") == pytest.approx(nll - least, **TIGHT)

    def test_two_confidences_that_pull_apart(self) -> None:
        # Residuals -0.4 and 0.3 at a distance of 0.2: the updates are a and a + 0.2.
        a = (2 * -0.4 + (0.3 - 0.2)) / 3
        left = (2 * (-0.4 - a) ** 2 + (0.3 - a - 0.2) ** 2) / 3
        assert gap([0.9, 0.9, 0.7], [1, 0, 1]) == pytest.approx((2 * 0.16 + 0.09) / 3 - left, **TIGHT)

    def test_sure_and_wrong(self) -> None:
        assert gap([1.0, 1.0], [0, 0]) == pytest.approx(1, **TIGHT)
        # An update takes at most 4 from a logit, and there a nat costs a unit.
        assert gap([1.0, 1.0], [0, 0], "nll") == pytest.approx(4, **TIGHT)

    def test_sure_and_right(self) -> None:
        assert gap([1.0, 1.0, 1.0], [1, 1, 1]) == 0
        assert gap([1.0, 1.0, 1.0], [1, 1, 1], "nll") == pytest.approx(0, abs=1e-15)

    def test_no_more_than_the_calibration_term(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(20):
            confidences = rng.integers(50, 101, 60) / 100
            correct = (rng.random(60) < 0.7).astype(float)
            groups = [confidences == value for value in np.unique(confidences)]
            term = sum(g.mean() * (confidences[g].mean() - correct[g].mean()) ** 2 for g in groups)
            assert 0 <= gap(confidences, correct) <= term + 1e-10

    def test_temperature_that_fits_closes_the_gap(self) -> None:
        rng = np.random.default_rng(0)
        true = rng.uniform(0.5, 0.98, 20_000)
        correct = (rng.random(20_000) < true).astype(float)
        for metric in ("brier", "nll"):
            over = gap(expit(2 * logit(true)), correct, metric)
            assert gap(true, correct, metric) < 0.1 * over

    def test_many_classes_score_the_top_label(self) -> None:
        probs = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
        assert post_processing_gap(probs, [0, 1]) == pytest.approx(gap([0.6, 0.6], [1, 0]), **TIGHT)


class TestSmoothMaps:
    """The gap over maps that are 1-Lipschitz themselves."""

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("n_examples", [1, 2, 3, 8])
    def test_equals_brute_force(self, n_examples: int, seed: int) -> None:
        confidences, correct = sample(n_examples, seed)
        i, j = np.triu_indices(n_examples, k=1)
        reach = np.abs(confidences[i] - confidences[j])

        def within_reach(mapped: np.ndarray) -> np.ndarray:
            difference = mapped[i] - mapped[j]
            return np.concatenate([reach - difference, reach + difference])

        found = minimize(
            lambda mapped: score(mapped, correct, "brier"),
            confidences,
            bounds=[(0, 1)] * n_examples,
            constraints={"type": "ineq", "fun": within_reach},
            options={"ftol": 1e-14, "maxiter": 1000},
        )
        assert found.success
        expected = score(confidences, correct, "brier") - float(found.fun)
        assert gap(confidences, correct, smooth="map") == pytest.approx(expected, rel=0, abs=2e-7)

    def test_a_map_may_fall_and_an_update_may_stretch(self) -> None:
        # Right at .6 and wrong at .7: a map falls by .1 at most, where an update leaves the order as it is.
        assert gap([0.6, 0.7], [1, 0], smooth="map") == pytest.approx((0.16 + 0.49) / 2 - 0.45**2, **TIGHT)
        assert gap([0.6, 0.7], [1, 0]) == pytest.approx((0.16 + 0.49) / 2 - 0.25, **TIGHT)
        # Wrong at .6 and right at .7: an update stretches the distance to .2, a map keeps it at .1.
        assert gap([0.6, 0.7], [0, 1], smooth="map") == pytest.approx((0.36 + 0.09) / 2 - 0.45**2, **TIGHT)
        assert gap([0.6, 0.7], [0, 1]) == pytest.approx((0.36 + 0.09) / 2 - 0.4**2, **TIGHT)

    def test_calibrated_groups_have_none(self) -> None:
        confidences = np.repeat([0.5, 0.75, 1.0], [2, 4, 5])
        correct = np.repeat([1, 0, 1, 0, 1], [1, 1, 3, 1, 5])
        assert gap(confidences, correct, smooth="map") == pytest.approx(0, **TIGHT)

    def test_it_has_no_form_for_the_nll(self) -> None:
        with pytest.raises(ValueError, match="metric to be 'brier' where the map is smooth, got 'nll'"):
            gap([0.6], [1], "nll", smooth="map")


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="metric to be one of 'brier', 'nll', got 'ece'"):
        post_processing_gap(np.eye(2), [0, 1], metric="ece")
