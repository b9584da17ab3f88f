from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from hf_calib.metrics import expected_calibration_error
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling._objectives import SigmoidObjective, SoftmaxObjective
from hf_calib.scaling._solver import BOUNDS
from tests.helpers.sampled import sampled

GOLDEN = ["overconf_N2000_K10", "underconf_N1500_K50"]
TENTHS = np.arange(1, 101) / 10


def nll(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    log_probs = log_softmax(logits.astype(np.float64) / temperature, axis=1)
    return float(-log_probs[np.arange(len(labels)), labels].mean())


def least_nll(logits: np.ndarray, labels: np.ndarray) -> float:
    """The minimum by a derivative-free search over log T."""
    search = minimize_scalar(
        lambda log_t: nll(logits, labels, np.exp(log_t)),
        bounds=np.log(BOUNDS),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return float(search.fun)


@pytest.fixture(params=GOLDEN)
def case(request: pytest.FixtureRequest, golden: Path) -> dict[str, np.ndarray]:
    with np.load(golden / f"temperature_{request.param}.npz") as arrays:
        return dict(arrays)


class TestAgainstThePapersCode:
    def test_nll_is_at_least_as_low_as_theirs(self, case: dict[str, np.ndarray]) -> None:
        logits, labels = case["logits_val"], case["labels_val"]
        theirs = float(case["T_nll_continuous_mixnmatch_lbfgsb"])
        ours = TemperatureScaling().fit(logits, labels).temperature_
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert nll(logits, labels, ours) <= nll(logits, labels, theirs) + 1e-15

    @pytest.mark.parametrize(
        ("criterion", "grid", "key"),
        [
            ("ece", None, "T_ece"),
            ("adaptive_ece", None, "T_adaece_argmin_on_grid"),
            ("nll", TENTHS, "T_nll"),
        ],
    )
    def test_grid_choice(
        self, case: dict[str, np.ndarray], criterion: str, grid: np.ndarray | None, key: str
    ) -> None:
        scaler = TemperatureScaling(criterion, grid=grid).fit(case["logits_val"], case["labels_val"])
        assert scaler.temperature_ == round(float(case[key]), 1)  # k/10 exactly, not a sum of tenths

    @pytest.mark.parametrize(
        ("criterion", "key"),
        [("ece", "ece_b15_on_grid"), ("adaptive_ece", "adaece_b15_on_grid"), ("nll", "nll_on_grid")],
    )
    def test_objective_at_every_grid_point(
        self, case: dict[str, np.ndarray], criterion: str, key: str
    ) -> None:
        scaler = TemperatureScaling(criterion)
        objective = SoftmaxObjective(case["logits_val"], case["labels_val"])
        ours = scaler._scores(objective, TENTHS)
        np.testing.assert_allclose(ours, case[key], rtol=1e-12, atol=1e-14)


class TestNll:
    @pytest.mark.parametrize("true_temperature", [0.01, 0.2, 1.0, 5.0, 900.0])
    @pytest.mark.parametrize(("n", "c"), [(30, 2), (500, 3), (400, 40), (60, 1000)])
    def test_reaches_the_minimum(self, n: int, c: int, true_temperature: float) -> None:
        logits, labels = sampled(n, c, true_temperature)
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        least = least_nll(logits, labels)
        assert nll(logits, labels, temperature) == pytest.approx(least, rel=1e-9)

    def test_slope_is_zero_at_the_minimum_of_a_problem_that_starts_from_a_sample(self) -> None:
        logits, labels = sampled(43_000, 100, 2.5)
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        probs = softmax(logits / temperature, axis=1)
        slope = np.mean((probs * logits).sum(axis=1) - logits[np.arange(len(labels)), labels])
        assert abs(slope) < 1e-10 * np.abs(logits).mean()

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32])
    def test_narrow_dtypes_are_read_in_float64(self, dtype: type) -> None:
        logits, labels = sampled(300, 5, 2.0)
        narrow = logits.astype(dtype)
        ours = TemperatureScaling().fit(narrow, labels).temperature_
        assert ours == TemperatureScaling().fit(narrow.astype(np.float64), labels).temperature_

    @pytest.mark.parametrize(("n", "true_temperature"), [(15, 0.1), (50, 0.3), (800, 40.0)])
    def test_is_the_root_of_the_slope_to_the_last_digits(self, n: int, true_temperature: float) -> None:
        errors = []
        for seed in range(30):
            logits, labels = sampled(n, 5, true_temperature, seed)
            temperature = TemperatureScaling().fit(logits, labels).temperature_
            curve = SoftmaxObjective(logits, labels).nll(1 / temperature)
            errors.append(abs(curve.slope / curve.curvature * temperature))  # of beta, relative
        assert max(errors) < 5e-15

    @pytest.mark.parametrize("factor", [1e-3, 0.5, 30.0, 1e3])
    def test_follows_the_scale_of_the_logits(self, factor: float) -> None:
        logits, labels = sampled(800, 10, 1.7)
        base = TemperatureScaling().fit(logits, labels).temperature_
        scaled = TemperatureScaling().fit(logits * factor, labels).temperature_
        assert scaled == pytest.approx(base * factor, rel=1e-10)

    def test_ignores_an_offset_per_row(self) -> None:
        logits, labels = sampled(300, 4, 2.0)
        offset = np.random.default_rng(1).normal(scale=1e4, size=(300, 1))
        shifted = TemperatureScaling().fit(logits + offset, labels).temperature_
        assert shifted == pytest.approx(TemperatureScaling().fit(logits, labels).temperature_, rel=1e-9)

    @pytest.mark.parametrize("dtype", [np.float16, np.float64])
    def test_saturated_logits(self, dtype: type) -> None:
        logits = np.where(np.eye(3)[[0, 1, 2, 0] * 25], 1e4, -1e4).astype(dtype)
        labels = np.array([0, 1, 2, 1] * 25)
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        # Right 3 times in 4 and 1/8 for each other class: the gap of 2e4 becomes log 6.
        exact = 2e4 / np.log(6)
        assert temperature == pytest.approx(exact, rel=1e-9)

    def test_a_class_never_seen(self) -> None:
        logits, labels = sampled(300, 4, 2.0)
        keep = labels != 3
        temperature = TemperatureScaling().fit(logits[keep], labels[keep]).temperature_
        assert nll(logits[keep], labels[keep], temperature) == pytest.approx(
            least_nll(logits[keep], labels[keep]), rel=1e-9
        )

    def test_a_masked_class_is_as_if_absent(self) -> None:
        logits, labels = sampled(300, 4, 2.0)
        masked = np.hstack([logits, np.full((300, 1), -np.inf)])
        expected = TemperatureScaling().fit(logits, labels).temperature_
        assert TemperatureScaling().fit(masked, labels).temperature_ == pytest.approx(expected, rel=1e-12)

    def test_classes_masked_in_some_rows(self) -> None:
        logits, labels = sampled(300, 4, 2.0)
        mask = np.random.default_rng(2).random((300, 4)) < 0.3
        mask[np.arange(300), labels] = False
        logits[mask] = -np.inf
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        assert nll(logits, labels, temperature) == pytest.approx(least_nll(logits, labels), rel=1e-9)

    @pytest.mark.parametrize("criterion", ["nll", "ece"])
    def test_makes_no_second_matrix(self, criterion: str) -> None:
        logits, labels = sampled(20_000, 200, 2.0)
        narrow = logits.astype(np.float32)
        del logits
        scaler = TemperatureScaling(criterion, grid=None if criterion == "nll" else [1.0, 2.0])
        scaler.fit(narrow[:100], labels[:100])  # what is imported late is not counted
        tracemalloc.start()
        scaler.fit(narrow, labels)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < narrow.nbytes / 4


class TestDataThatDoNotDetermineT:
    def test_every_label_first_is_limited_by_the_number_of_examples(self) -> None:
        logits = np.array([[2.0, 0.0], [0.0, 2.0]] * 10)
        with pytest.warns(
            UserWarning, match=r"All 20 labels are ranked first, .* smoothed by 1 / \(N \+ 1\)\. Fit"
        ):
            scaler = TemperatureScaling().fit(logits, np.array([0, 1] * 10))
        # One more example with an unknown label: p = (20 + 1/2) / 21.
        assert scaler.temperature_ == pytest.approx(2 / np.log(20.5 / 0.5), rel=1e-9)

    def test_more_such_examples_make_it_sharper(self) -> None:
        logits, _ = sampled(400, 5, 1.0)
        labels = logits.argmax(axis=1)
        with pytest.warns(UserWarning, match="ranked first"):
            few = TemperatureScaling().fit(logits[:20], labels[:20]).temperature_
        with pytest.warns(UserWarning, match="ranked first"):
            many = TemperatureScaling().fit(logits, labels).temperature_
        assert BOUNDS[0] < many < few

    def test_one_example(self) -> None:
        with pytest.warns(UserWarning, match="All 1 labels are ranked first"):
            right = TemperatureScaling().fit([[2.0, 0.0]], [0])
        assert right.predict_proba([[2.0, 0.0]])[0, 0] == pytest.approx(0.75)
        with pytest.warns(UserWarning, match="below the mean logit of their rows"):
            wrong = TemperatureScaling().fit([[2.0, 0.0]], [1])
        assert wrong.temperature_ == BOUNDS[1]

    def test_labels_against_the_ranking(self) -> None:
        logits, _ = sampled(200, 5, 1.0)
        with pytest.warns(UserWarning, match="uniform probabilities fit best"):
            scaler = TemperatureScaling().fit(logits, logits.argmin(axis=1))
        np.testing.assert_allclose(scaler.predict_proba(logits), 0.2, atol=1e-3)

    @pytest.mark.parametrize("criterion", ["nll", "ece", "adaptive_ece"])
    def test_equal_logits(self, criterion: str) -> None:
        with pytest.warns(UserWarning, match="The temperature was set to 1"):
            scaler = TemperatureScaling(criterion).fit(np.full((5, 3), 0.1), np.array([0, 1, 2, 0, 1]))
        assert scaler.temperature_ == 1.0

    @pytest.mark.parametrize(("factor", "bound"), [(1e-7, BOUNDS[0]), (1e7, BOUNDS[1])])
    def test_a_minimum_out_of_bounds(self, factor: float, bound: float) -> None:
        logits, labels = sampled(300, 4, 1.0)
        with pytest.warns(UserWarning, match="at the end of the range that is searched"):
            scaler = TemperatureScaling().fit(logits * factor, labels)
        assert scaler.temperature_ == pytest.approx(bound, rel=1e-12)


class TestCalibrationErrors:
    @pytest.mark.parametrize(("criterion", "binning"), [("ece", "uniform"), ("adaptive_ece", "quantile")])
    def test_is_the_first_least_of_the_public_metric(self, criterion: str, binning: str) -> None:
        logits, labels = sampled(700, 6, 1.6)
        grid = np.linspace(0.3, 4, 60)
        errors = [
            expected_calibration_error(softmax(logits / t, axis=1), labels, n_bins=10, binning=binning)
            for t in grid
        ]
        scaler = TemperatureScaling(criterion, grid=grid, n_bins=10).fit(logits, labels)
        assert scaler.temperature_ == grid[np.argmin(errors)]

    def test_the_first_of_equally_good_temperatures(self) -> None:
        logits, labels = sampled(50, 3, 1.0)
        scaler = TemperatureScaling("ece", grid=[2.0, 1.0, 2.0, 1.0]).fit(logits, labels)
        assert scaler.temperature_ in (1.0, 2.0)
        tied = TemperatureScaling("ece", grid=[1.0, 1.0 + 1e-16, 1.0]).fit(logits, labels)
        assert tied.temperature_ == 1.0

    @pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
    def test_confidence_needs_no_softmax(self, temperature: float) -> None:
        logits, labels = sampled(300, 7, 30.0)
        logits[:, 6] = -np.inf
        objective = SoftmaxObjective(logits, np.minimum(labels, 5))
        expected = softmax(logits / temperature, axis=1)
        np.testing.assert_allclose(objective.confidences(1 / temperature), expected.max(axis=1), rtol=1e-14)
        assert (objective.correct == (expected.argmax(axis=1) == np.minimum(labels, 5))).all()


class TestMultiLabel:
    @staticmethod
    def data(temperature: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        logits = rng.normal(scale=2, size=(400, 6))
        return logits * temperature, (rng.random((400, 6)) < expit(logits)).astype(np.float32)

    @staticmethod
    def as_two_classes(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = logits.ravel()
        return np.stack([np.zeros_like(flat), flat], axis=1), labels.ravel().astype(int)

    @pytest.mark.parametrize("criterion", ["nll", "ece", "adaptive_ece"])
    def test_is_a_two_class_problem_per_logit(self, criterion: str) -> None:
        logits, labels = self.data()
        ours = TemperatureScaling(criterion, multi_label=True).fit(logits, labels).temperature_
        expected = TemperatureScaling(criterion).fit(*self.as_two_classes(logits, labels)).temperature_
        assert ours == pytest.approx(expected, rel=1e-9)
        assert ours == pytest.approx(3.0, rel=0.15)

    def test_one_logit_per_example(self) -> None:
        logits, labels = self.data()
        ours = TemperatureScaling(multi_label=True).fit(logits[:, :1], labels[:, :1]).temperature_
        two_classes = self.as_two_classes(logits[:, :1], labels[:, :1])
        assert nll(*two_classes, ours) == pytest.approx(least_nll(*two_classes), rel=1e-9)

    def test_saturated_and_masked_logits(self) -> None:
        logits, labels = self.data(1000.0)
        expected = TemperatureScaling(multi_label=True).fit(logits, labels).temperature_
        masked = np.hstack([logits, np.full((400, 1), -np.inf)])
        with_zeros = np.hstack([labels, np.zeros((400, 1))])
        ours = TemperatureScaling(multi_label=True).fit(masked, with_zeros)
        assert ours.temperature_ == pytest.approx(expected, rel=1e-12)
        assert ours.predict_proba(masked)[0, -1] == 0

    def test_every_label_on_its_side(self) -> None:
        logits = np.array([[2.0, -2.0], [-2.0, 2.0]])
        with pytest.warns(UserWarning, match="All 4 labels are ranked first"):
            scaler = TemperatureScaling(multi_label=True).fit(logits, logits > 0)
        assert scaler.temperature_ == pytest.approx(2 / np.log(4.5 / 0.5), rel=1e-9)

    def test_curve_is_the_mean_binary_cross_entropy(self) -> None:
        logits, labels = self.data()
        curve = SigmoidObjective(logits, labels == 1).nll(0.5)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            torch.tensor(logits / 2), torch.tensor(labels, dtype=torch.float64)
        )
        assert curve.value == pytest.approx(loss.item(), rel=1e-12)


class TestOutputs:
    def fitted(self) -> TemperatureScaling:
        return TemperatureScaling().fit(*sampled(200, 4, 2.0))

    def test_transform_divides(self) -> None:
        scaler = self.fitted()
        logits = np.random.default_rng(3).normal(size=(2, 5, 4)).astype(np.float32)  # (N, L, C)
        np.testing.assert_array_equal(
            scaler.transform(logits), logits.astype(np.float64) / scaler.temperature_
        )

    def test_probabilities(self) -> None:
        scaler = self.fitted()
        logits = np.array([[1e4, -1e4, 0.0, 1.0], [0.5, 0.2, -np.inf, 0.1]])
        probs = scaler.predict_proba(logits)
        np.testing.assert_allclose(probs, softmax(logits / scaler.temperature_, axis=1), rtol=1e-14)
        assert probs[1, 2] == 0

    def test_sigmoid_probabilities(self) -> None:
        logits, labels = TestMultiLabel.data()
        scaler = TemperatureScaling(multi_label=True).fit(logits, labels)
        np.testing.assert_allclose(
            scaler.predict_proba(logits), expit(logits / scaler.temperature_), rtol=1e-14
        )

    def test_input_is_not_changed(self) -> None:
        logits, labels = sampled(100, 4, 2.0)
        before = logits.copy()
        TemperatureScaling().fit(logits, labels).predict_proba(logits)
        np.testing.assert_array_equal(logits, before)

    def test_a_cpu_tensor_or_a_list_will_do(self) -> None:
        logits, labels = sampled(100, 4, 2.0)
        expected = TemperatureScaling().fit(logits, labels).temperature_
        from_tensors = TemperatureScaling().fit(torch.tensor(logits), torch.tensor(labels))
        from_lists = TemperatureScaling().fit(logits.tolist(), labels.tolist())
        assert type(expected) is float
        assert from_tensors.temperature_ == from_lists.temperature_ == expected

    def test_not_fitted(self) -> None:
        with pytest.raises(NotFittedError):
            TemperatureScaling().transform(np.zeros((2, 2)))


def test_scikit_learn_conventions() -> None:
    scaler = TemperatureScaling("ece", grid=TENTHS, n_bins=10, multi_label=True)
    params = scaler.get_params()
    assert params == {"criterion": "ece", "grid": TENTHS, "n_bins": 10, "multi_label": True}
    copy = clone(scaler).set_params(multi_label=False, grid=None)
    assert "ece" in repr(copy)
    assert copy.fit(*sampled(200, 4, 2.0)) is copy
    assert copy.get_params()["grid"] is None  # fit leaves the parameters alone
    assert not hasattr(clone(copy), "temperature_")


LOGITS = np.array([[1.0, 2.0, 0.0], [0.5, 0.1, 0.3]])
WITH_NAN = np.array([[1.0, np.nan, 0.0], [0.5, 0.1, 0.3]])
WITH_INF = np.array([[1.0, np.inf, 0.0], [0.5, 0.1, 0.3]])
LABEL_MASKED = np.array([[1.0, -np.inf, 0.0], [0.5, 0.1, 0.3]])


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (WITH_NAN, [0, 1], ValueError, "expected logits to be finite .* NaN or .inf in 1 of 2 rows"),
        (WITH_INF, [0, 1], ValueError, "NaN or .inf in 1 of 2 rows"),
        (LABEL_MASKED, [1, 1], ValueError, "-inf for the label of 1 examples"),
        (np.full((2, 3), -np.inf), [1, 1], ValueError, "-inf for the label of 2 examples"),
        (np.zeros((0, 3)), [], ValueError, "at least one example, got shape .0, 3."),
        (LOGITS[0], [0], ValueError, r"shape \(N, C\), got shape \(3,\)"),
        (LOGITS[None], [[0, 1]], ValueError, "reshape"),
        (LOGITS[:, :1], [0, 0], ValueError, "at least 2 classes.*multi_label=True"),
        (LOGITS.astype(complex), [0, 1], TypeError, "dtype complex128"),
        ([["a", "b"]], [0], TypeError, "hold real numbers"),
        (LOGITS, [0], ValueError, r"labels to have shape \(2,\), got shape \(1,\)"),
        (LOGITS, np.eye(3)[[0, 1]], ValueError, "multi_label=True takes 0/1 labels"),
        (LOGITS, [0.0, 1.0], TypeError, "be integers, got dtype float64"),
        (LOGITS, [0, -100], ValueError, "1 labels of -100; drop ignored positions"),
        (LOGITS, [0, 3], ValueError, r"lie in 0..2, got labels from 0 to 3"),
        (LOGITS, [-1, 1], ValueError, "labels from -1 to 1"),
    ],
)
def test_refused_data(logits: np.ndarray, labels: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TemperatureScaling().fit(logits, labels)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (LOGITS, [0, 1], r"have the logits' shape \(2, 3\), got shape \(2,\)"),
        (LOGITS, [[0, 1, 0.5], [0, 0, 1]], "be 0 or 1, got values such as 0.5"),
        (LOGITS, [[0, 1, -1], [0, 0, 1]], "got values such as -1"),
        (LABEL_MASKED, [[0, 1, 0], [0, 0, 1]], "-inf for the label of 1 examples"),
    ],
)
def test_refused_multi_label_data(logits: np.ndarray, labels: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TemperatureScaling(multi_label=True).fit(logits, labels)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"criterion": "eec"}, "did you mean 'ece'"),
        ({"n_bins": 0}, "n_bins to be at least 1"),
        ({"grid": []}, "grid to be a sequence of finite temperatures > 0"),
        ({"grid": [1.0, 0.0]}, "grid"),
        ({"grid": [1.0, np.nan]}, "grid"),
        ({"grid": 1.0}, "grid"),
    ],
)
def test_refused_parameters(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TemperatureScaling(**parameters).fit(LOGITS, [0, 1])
