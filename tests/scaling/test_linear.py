"""Vector, matrix and Dirichlet scaling against the objective written down again, and where it has no minimum."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import gammaln, log_softmax, softmax
from sklearn.exceptions import NotFittedError

from hf_calib.scaling import DirichletScaling, MatrixScaling, TemperatureScaling, VectorScaling
from hf_calib.scaling._linear import LinearProblem

Linear = VectorScaling | MatrixScaling | DirichletScaling
KINDS = [VectorScaling, MatrixScaling, DirichletScaling]
MATRICES = [MatrixScaling, DirichletScaling]


def sampled(n: int, c: int, temperature: float = 2.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident logits of a classifier that is right often, mixes classes, and has wrong offsets."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=1.5, size=(n, c))
    logits[np.arange(n), rng.integers(c, size=n)] += 2
    true = logits @ (np.eye(c) + 0.4 * rng.normal(size=(c, c)) / np.sqrt(c)) + 0.5 * rng.normal(size=c)
    return logits * temperature, (true + rng.gumbel(size=(n, c))).argmax(axis=1)


def nll(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def fitted_nll(scaler: Linear, logits: np.ndarray, labels: np.ndarray) -> float:
    return nll(scaler.transform(logits), labels)


def odir(scaler: Linear, temperature: float, off_diagonal: float, bias: float) -> float:
    c = len(scaler.bias_)
    off = scaler.weight_ * temperature * (1 - np.eye(c))
    return off_diagonal / (c * (c - 1)) * (off**2).sum() + bias / c * (scaler.bias_**2).sum()


def slopes(scaler: Linear, features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of the mean negative log-likelihood in a (C, C) weight and in the bias."""
    weight = np.diag(scaler.weight_) if scaler.weight_.ndim == 1 else scaler.weight_
    residual = softmax(features @ weight.T + scaler.bias_, axis=1)
    residual[np.arange(len(labels)), labels] -= 1
    return residual.T @ features / len(labels), residual.mean(axis=0)


def as_problem(logits: object, labels: list[int]) -> LinearProblem:
    return LinearProblem(np.asarray(logits, dtype=float), np.array(labels), lambda block: block)


class TestVector:
    @pytest.mark.parametrize(("n", "c"), [(200, 2), (600, 5), (4000, 30), (8000, 100)])
    def test_the_gradient_is_zero(self, n: int, c: int) -> None:
        logits, labels = sampled(n, c)
        scaler = VectorScaling().fit(logits, labels)
        by_weight, by_bias = slopes(scaler, logits, labels)
        assert np.abs(by_weight.diagonal()).max() < 1e-7
        assert np.abs(by_bias).max() < 1e-8
        assert scaler.bias_.sum() == pytest.approx(0, abs=1e-10)

    def test_is_the_minimum_that_a_derivative_free_search_finds(self) -> None:
        logits, labels = sampled(200, 2)

        def loss(theta: np.ndarray) -> float:
            return nll(logits * theta[:2] + np.array([theta[2], -theta[2]]), labels)

        search = minimize(
            loss, np.array([0.5, 0.5, 0.0]), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-15}
        )
        scaler = VectorScaling().fit(logits, labels)
        assert fitted_nll(scaler, logits, labels) == pytest.approx(search.fun, abs=1e-12)
        np.testing.assert_allclose([*scaler.weight_, scaler.bias_[0]], search.x, atol=1e-5)

    def test_mean_probabilities_are_the_frequencies_of_the_labels(self) -> None:
        logits, labels = sampled(1000, 6)
        probs = VectorScaling().fit(logits, labels).predict_proba(logits)
        np.testing.assert_allclose(probs.mean(axis=0), np.bincount(labels) / 1000, atol=1e-8)

    def test_finds_the_true_parameters(self) -> None:
        rng = np.random.default_rng(0)
        logits = rng.normal(scale=3, size=(100_000, 3))
        weight, bias = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.0, 1.0])
        labels = (logits * weight + bias + rng.gumbel(size=logits.shape)).argmax(axis=1)
        scaler = VectorScaling().fit(logits, labels)
        np.testing.assert_allclose(scaler.weight_, weight, atol=0.03)
        np.testing.assert_allclose(scaler.bias_, bias, atol=0.05)

    def test_masked_classes(self) -> None:
        logits, labels = sampled(500, 4)
        mask = np.random.default_rng(2).random(logits.shape) < 0.3
        mask[np.arange(500), labels] = False
        masked = np.where(mask, -np.inf, logits)
        scaler = VectorScaling().fit(masked, labels)
        residual = softmax(np.where(mask, -np.inf, logits * scaler.weight_ + scaler.bias_), axis=1)
        np.testing.assert_allclose(scaler.predict_proba(masked), residual, rtol=1e-12, atol=1e-15)
        residual[np.arange(500), labels] -= 1
        assert np.abs((residual * logits).mean(axis=0)).max() < 1e-7
        assert np.abs(residual.mean(axis=0)).max() < 1e-8

    def test_a_mask_stays_whatever_the_weight(self) -> None:
        logits, _ = sampled(300, 3)
        scaler = VectorScaling()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            scaler.fit(logits, logits.argmin(axis=1))
        assert scaler.weight_.max() < 0
        assert scaler.predict_proba([[0.0, -np.inf, 1.0]])[0, 1] == 0

    def test_makes_no_second_matrix(self) -> None:
        logits, labels = sampled(20_000, 100)
        narrow = logits.astype(np.float32)
        del logits
        tracemalloc.start()
        VectorScaling().fit(narrow, labels)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < narrow.nbytes / 2


class TestMatrix:
    @pytest.mark.parametrize("kind", MATRICES)
    @pytest.mark.parametrize("penalties", [(0.0, 0.0), (1.0, 1.0), (0.0, 0.3), (300.0, 0.0), (0.01, 100.0)])
    def test_is_the_minimum_of_the_penalised_likelihood(
        self, kind: type[Linear], penalties: tuple[float, float]
    ) -> None:
        logits, labels = sampled(2000, 4)
        features = log_softmax(logits, axis=1) if kind is DirichletScaling else logits
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        scaler = kind(off_diagonal_penalty=penalties[0], bias_penalty=penalties[1]).fit(logits, labels)
        by_weight, by_bias = slopes(scaler, features, labels)
        by_weight += 2 * penalties[0] / 12 * temperature**2 * scaler.weight_ * (1 - np.eye(4))
        by_bias += 2 * penalties[1] / 4 * scaler.bias_
        assert np.abs(by_weight).max() < 1e-6
        assert np.abs(by_bias).max() < 1e-6

    def test_default_penalties_are_the_documented_ones(self) -> None:
        logits, labels = sampled(500, 5)
        written = MatrixScaling(off_diagonal_penalty=10 * 25 * 4 / 500, bias_penalty=5 / 1000)
        np.testing.assert_array_equal(
            MatrixScaling().fit(logits, labels).weight_, written.fit(logits, labels).weight_
        )

    def test_is_a_free_multinomial_regression_without_penalties(self) -> None:
        logits, labels = sampled(400, 3)

        def loss(theta: np.ndarray) -> float:
            table = np.vstack([theta.reshape(2, 4), np.zeros(4)])  # the last class is the reference
            return nll(logits @ table[:, :3].T + table[:, 3], labels)

        search = minimize(loss, np.zeros(8), method="BFGS", options={"gtol": 1e-7})
        scaler = MatrixScaling(off_diagonal_penalty=0, bias_penalty=0).fit(logits, labels)
        assert fitted_nll(scaler, logits, labels) == pytest.approx(search.fun, abs=1e-9)

    def test_heavy_penalties_leave_one_weight_per_class(self) -> None:
        logits, labels = sampled(1000, 4)
        scaler = MatrixScaling(off_diagonal_penalty=1e9, bias_penalty=1e9).fit(logits, labels)
        np.testing.assert_allclose(scaler.weight_, np.diag(scaler.weight_.diagonal()), atol=1e-6)
        np.testing.assert_allclose(scaler.bias_, 0, atol=1e-6)
        assert (
            nll(logits * scaler.weight_.diagonal(), labels)
            <= TemperatureScaling().fit(logits, labels)._objective(logits, labels).nll(1 / 2).value + 1e-9
        )

    @pytest.mark.parametrize("penalty", [0.1, 10.0])
    def test_more_penalty_costs_likelihood_and_draws_to_the_diagonal(self, penalty: float) -> None:
        logits, labels = sampled(800, 5)
        light = MatrixScaling(off_diagonal_penalty=penalty).fit(logits, labels)
        heavy = MatrixScaling(off_diagonal_penalty=10 * penalty).fit(logits, labels)
        assert fitted_nll(light, logits, labels) < fitted_nll(heavy, logits, labels)
        assert odir(light, 1, 1, 0) > odir(heavy, 1, 1, 0)

    def test_default_penalties_generalise_with_few_examples_per_weight(self) -> None:
        logits, labels = sampled(5000, 30)
        train, test = slice(600), slice(600, None)
        default = MatrixScaling().fit(logits[train], labels[train])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            free = MatrixScaling(off_diagonal_penalty=0, bias_penalty=0).fit(logits[train], labels[train])
        temperature = TemperatureScaling().fit(logits[train], labels[train])
        ours = fitted_nll(default, logits[test], labels[test])
        assert ours < fitted_nll(free, logits[test], labels[test]) / 2
        assert ours < nll(temperature.transform(logits[test]), labels[test])

    def test_is_seconds_at_151_classes(self) -> None:
        logits, labels = sampled(3000, 151)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it converges, and the penalties determine every weight
            scaler = MatrixScaling().fit(logits, labels)
        by_weight, _ = slopes(scaler, logits, labels)
        assert np.abs(by_weight.diagonal()).max() < 1e-6

    @pytest.mark.parametrize("kind", MATRICES)
    @pytest.mark.parametrize("mask", [-np.inf, np.finfo(np.float32).min])
    def test_masks_are_refused(self, kind: type[Linear], mask: float) -> None:
        logits, labels = sampled(50, 3)
        masked = logits.copy()
        masked[:2, 1], labels[:2] = mask, 0
        with pytest.raises(
            ValueError,
            match=r"be finite, as the classes are mixed, got 2 of -inf, or beyond 1e\+12; use Vector",
        ):
            kind().fit(masked, labels)
        scaler = kind()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            scaler.fit(logits, labels)
        with pytest.raises(ValueError, match="2 of -inf"):
            scaler.predict_proba(masked)

    @pytest.mark.parametrize("name", ["off_diagonal_penalty", "bias_penalty"])
    @pytest.mark.parametrize("penalty", [-1.0, np.nan, np.inf, "1", [1.0]])
    def test_refused_penalties(self, name: str, penalty: object) -> None:
        with pytest.raises(ValueError, match=f"expected {name} to be a finite number of at least 0"):
            MatrixScaling(**{name: penalty}).fit(*sampled(50, 3))


class TestDirichlet:
    def test_sees_the_probabilities_only(self) -> None:
        logits, labels = sampled(500, 4)
        offset = np.random.default_rng(1).normal(scale=50, size=(500, 1))
        probs = DirichletScaling().fit(logits, labels).predict_proba(logits)
        shifted = DirichletScaling().fit(logits + offset, labels).predict_proba(logits + offset)
        from_logs = DirichletScaling().fit(log_softmax(logits, axis=1), labels).predict_proba(logits)
        np.testing.assert_allclose(shifted, probs, atol=1e-6)
        np.testing.assert_allclose(from_logs, probs, atol=1e-6)

    def test_transform(self) -> None:
        logits, labels = sampled(500, 4)
        scaler = DirichletScaling().fit(logits, labels)
        expected = log_softmax(logits, axis=1) @ scaler.weight_.T + scaler.bias_
        np.testing.assert_allclose(scaler.transform(logits), expected, rtol=1e-12, atol=1e-12)

    def test_is_the_exact_map_of_dirichlet_distributed_probabilities(self) -> None:
        rng = np.random.default_rng(0)
        alphas = np.array([[4.0, 1.0, 2.0], [1.0, 5.0, 1.5], [2.0, 1.0, 3.0]])
        labels = rng.integers(3, size=50_000)
        probs = np.array([rng.dirichlet(alpha, size=50_000) for alpha in alphas])[labels, np.arange(50_000)]
        posterior = log_softmax(
            np.log(probs) @ (alphas - 1).T - (gammaln(alphas).sum(axis=1) - gammaln(alphas.sum(axis=1))),
            axis=1,
        )
        scaler = DirichletScaling(off_diagonal_penalty=0, bias_penalty=0).fit(np.log(probs), labels)
        assert np.abs(scaler.predict_proba(np.log(probs)) - np.exp(posterior)).mean() < 0.003


class TestAll:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("factor", [1e-3, 1e4])
    def test_follows_the_scale_of_the_logits(self, kind: type[Linear], factor: float) -> None:
        logits, labels = sampled(800, 4)
        probs = kind().fit(logits, labels).predict_proba(logits)
        if kind is DirichletScaling:  # log-probabilities are not in proportion to the logits
            assert np.isfinite(kind().fit(logits * factor, labels).predict_proba(logits * factor)).all()
            return
        scaled = kind().fit(logits * factor, labels)
        np.testing.assert_allclose(scaled.predict_proba(logits * factor), probs, atol=1e-6)
        assert scaled.weight_.max() < 10 / factor

    @pytest.mark.parametrize("kind", KINDS)
    def test_fits_better_than_a_temperature(self, kind: type[Linear]) -> None:
        logits, labels = sampled(3000, 6)
        temperature = TemperatureScaling().fit(logits, labels)
        assert fitted_nll(kind().fit(logits, labels), logits, labels) < nll(
            temperature.transform(logits), labels
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_wrong_number_of_classes(self, kind: type[Linear]) -> None:
        scaler = kind().fit(*sampled(300, 4))
        with pytest.raises(ValueError, match=r"have the 4 classes of fit, got shape \(2, 3\)"):
            scaler.transform(np.zeros((2, 3)))

    @pytest.mark.parametrize("kind", KINDS)
    def test_not_fitted(self, kind: type[Linear]) -> None:
        with pytest.raises(NotFittedError):
            kind().transform(np.zeros((2, 2)))


class TestDataThatDoNotDetermineTheParameters:
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_absent_class(self, kind: type[Linear]) -> None:
        logits, labels = sampled(400, 4)
        logits, labels = logits[labels != 3], labels[labels != 3]
        with pytest.warns(
            UserWarning,
            match=r"There is no example of class 3, so .* The labels were smoothed by 1 / \(N \+ 1\)\. Fit",
        ):
            scaler = kind().fit(logits, labels)
        probs = scaler.predict_proba(logits)
        if kind is VectorScaling:
            assert probs[:, 3].mean() == pytest.approx(1 / 4 / (len(labels) + 1), rel=1e-4)
        assert 0 < probs[:, 3].mean() < 0.1
        assert np.isfinite(scaler.weight_).all()

    def test_the_smoothed_labels_are_the_objective(self) -> None:
        logits, labels = sampled(400, 4)
        logits, labels = logits[labels != 3], labels[labels != 3]
        with pytest.warns(UserWarning, match="no example of class 3"):
            scaler = VectorScaling().fit(logits, labels)
        smoothing = 1 / (len(labels) + 1)
        targets = (1 - smoothing) * np.eye(4)[labels] + smoothing / 4
        residual = softmax(logits * scaler.weight_ + scaler.bias_, axis=1) - targets
        assert np.abs((residual * logits).mean(axis=0)).max() < 1e-6
        assert np.abs(residual.mean(axis=0)).max() < 1e-7

    def test_masked_classes_get_none_of_the_smoothing(self) -> None:
        logits, labels = sampled(400, 4)
        masked = np.hstack([logits, np.full((400, 1), -np.inf)])
        with pytest.warns(UserWarning, match="no example of class 4"):
            scaler = VectorScaling().fit(masked, labels)
        residual = scaler.predict_proba(masked)[:, :4]
        residual -= 400 / 401 * np.eye(4)[labels] + 1 / 401 / 4
        assert np.abs(residual.mean(axis=0)).max() < 1e-7

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_label_ranked_first(self, kind: type[Linear]) -> None:
        logits, _ = sampled(300, 4)
        with pytest.warns(UserWarning, match="All 300 labels are ranked first by the fitted map, so"):
            scaler = kind().fit(logits, logits.argmax(axis=1))
        assert 1 / 1000 < fitted_nll(scaler, logits, logits.argmax(axis=1)) < 0.1
        assert np.abs(scaler.transform(logits)).max() < 1e3

    def test_a_map_that_separates_is_found_where_the_logits_do_not(self) -> None:
        logits, _ = sampled(300, 3)
        with pytest.warns(UserWarning, match="All 300 labels are ranked first by the fitted map, so"):
            scaler = VectorScaling().fit(logits, (logits * [1.0, 2.0, 0.5] + [0.0, 1.0, -1.0]).argmax(axis=1))
        assert np.abs(scaler.transform(logits)).max() < 1e3

    @pytest.mark.parametrize(("second", "separated"), [(1.0, False), (1.5, True)])
    def test_a_tie_is_not_ranked_first(self, second: float, separated: bool) -> None:
        problem = as_problem([[2.0, 0.0], [second, 1.0], [0.0, 2.0]], [0, 0, 1])
        for weight in (np.ones(2), np.eye(2)):
            assert problem.is_separated_by(weight, np.zeros(2)) is separated

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    @pytest.mark.parametrize(
        ("first", "free_bias", "separated"),
        [
            ([1.0, 2.0, 1.0, 0.0], True, True),  # a threshold at 1: two rows on it, the others apart
            ([0.9, 2.0, 1.0, 0.0], True, False),
            ([1.0, 2.0, 1.0, 0.0], False, False),  # the threshold is 0
            ([0.0, 2.0, 0.0, -1.0], False, True),
            ([-0.1, 2.0, 0.0, -1.0], False, False),
            ([0.0, 2.0, 0.1, -1.0], False, False),
            ([1.0, 1.0, 1.0, 1.0], True, False),
            ([0.0, 0.0, 0.0, 0.0], False, False),
        ],
    )
    def test_a_class_is_separated_up_to_ties(
        self, first: list[float], free_bias: bool, separated: bool, sign: float
    ) -> None:
        mixed = np.array([0.0, 5.0, 1.0, 3.0])  # the second class's logit tells nothing
        problem = as_problem(np.stack([sign * np.array(first), mixed], axis=1), [0, 0, 1, 1])
        assert problem.separated_classes(free_bias=free_bias).tolist() == [separated, False]

    def test_one_class_is_separated_by_its_own_logit(self) -> None:
        logits, labels = sampled(500, 4)
        rare = np.flatnonzero(labels == 2)
        logits[:, 2] = np.where(labels == 2, 5.0, -5.0) + np.random.default_rng(0).uniform(size=500)
        assert 0 < len(rare) < 500
        with pytest.warns(
            UserWarning, match="Class 2 is perfectly separated from the others by its own logit, so"
        ):
            scaler = VectorScaling().fit(logits, labels)
        assert np.abs(scaler.transform(logits)).max() < 1e3

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_example(self, kind: type[Linear]) -> None:
        with pytest.warns(UserWarning, match="no example of class 1"):
            scaler = kind().fit([[2.0, 0.0]], [0])
        # Half of the label is unknown: p = 3/4.
        limit = 0.75 if kind is VectorScaling else 0.9
        assert 0.5 < scaler.predict_proba([[2.0, 0.0]])[0, 0] <= limit + 1e-6

    @pytest.mark.parametrize("kind", KINDS)
    def test_equal_logits_leave_the_frequencies(self, kind: type[Linear]) -> None:
        labels = np.array([0, 1, 2, 0, 1, 0])
        scaler = kind().fit(np.full((6, 3), 0.1), labels)
        expected = np.array([3, 2, 1]) / 6
        tolerance = 1e-8 if kind is VectorScaling else 0.1  # the others draw the bias to 0
        np.testing.assert_allclose(scaler.predict_proba(np.full(3, 0.1)), expected, atol=tolerance)

    @pytest.mark.parametrize("kind", KINDS)
    def test_saturated_logits(self, kind: type[Linear]) -> None:
        logits = np.where(np.eye(3)[[0, 1, 2, 0, 1, 2] * 25], 1e4, -1e4).astype(np.float16)
        labels = np.array([0, 1, 2, 1, 2, 0] * 25)  # right every other time
        probs = kind().fit(logits, labels).predict_proba(logits)
        if kind is VectorScaling:
            np.testing.assert_allclose(probs, np.where(logits > 0, 0.5, 0.25), atol=1e-8)
        assert probs[np.arange(150), labels].min() > 0.2

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_warning_points_at_the_caller(self, kind: type[Linear]) -> None:
        with pytest.warns(UserWarning, match="the data do not determine the parameters") as caught:
            kind().fit(*sampled(10, 12))
        assert [warning.filename for warning in caught] == [__file__]

    def test_a_fit_that_does_not_converge_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hf_calib.scaling._newton._MAX_STEPS", 1)
        with pytest.warns(UserWarning, match="The fit did not converge"):
            VectorScaling().fit(*sampled(500, 5))

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_a_class_that_is_all_but_separated_is_named_whatever_the_sign(self, sign: float) -> None:
        """One row of 400 lies a hair on the other side; with a weight far below 0 where the logit is turned."""
        rng = np.random.default_rng(1)
        labels = rng.integers(0, 3, 400)
        logits = rng.normal(size=(400, 3))
        logits[:, 0] = np.where(labels == 0, 1, -1) * rng.uniform(0.5, 1.5, 400)
        logits[np.flatnonzero(labels == 0)[0], 0] = logits[labels != 0, 0].max() - 1e-9
        logits[:, 0] *= sign
        with pytest.warns(UserWarning, match="Class 0 is almost perfectly separated"):
            scaler = VectorScaling().fit(logits, labels)
        assert 0 < sign * scaler.weight_[0] < 100

    def test_a_mixing_that_is_penalised_may_rank_all_labels_first(self) -> None:
        """The penalty bounds it, so that the data do determine the parameters."""
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 3, 400)
        logits = 4 * np.eye(3)[(labels + 1) % 3] + 0.2 * rng.normal(size=(400, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler = MatrixScaling(off_diagonal_penalty=0.01, bias_penalty=0.01).fit(logits, labels)
        assert (scaler.transform(logits).argmax(axis=1) == labels).all()

    def test_a_class_that_is_all_but_separated_does_not_run_away(self) -> None:
        rng = np.random.default_rng(2)
        logits = 100 * rng.normal(size=(40, 5))
        labels = (logits / 100 + 0.5 * rng.gumbel(size=logits.shape)).argmax(axis=1)
        with pytest.warns(UserWarning, match="almost perfectly separated from the others by"):
            scaler = DirichletScaling().fit(logits, labels)
        assert np.abs(scaler.weight_).max() < 1
        fresh = 100 * rng.normal(size=(2000, 5))
        true = (fresh / 100 + 0.5 * rng.gumbel(size=fresh.shape)).argmax(axis=1)
        assert scaler.predict_proba(fresh)[np.arange(2000), true].min() > 1e-9
