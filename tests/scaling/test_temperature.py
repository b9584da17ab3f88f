"""Temperatures against a search of the likelihood, the papers' code, and on data that do not determine one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax

from hf_calib.metrics import expected_calibration_error
from hf_calib.scaling import PerLabelTemperatureScaling, TemperatureScaling
from tests.helpers.sampled import sampled

GOLDEN = ["overconf_N2000_K10", "underconf_N1500_K50"]
TENTHS = np.arange(1, 101) / 10
BOUNDS = (1e-5, 1e5)


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
    def test_nll_is_at_least_as_low_as_theirs(
        self, case: dict[str, np.ndarray]
    ) -> None:
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
        self,
        case: dict[str, np.ndarray],
        criterion: str,
        grid: np.ndarray | None,
        key: str,
    ) -> None:
        scaler = TemperatureScaling(criterion, grid=grid).fit(
            case["logits_val"], case["labels_val"]
        )
        assert scaler.temperature_ == round(
            float(case[key]), 1
        )  # k/10 exactly, not a sum of tenths


class TestNll:
    @pytest.mark.parametrize("true_temperature", [0.01, 0.2, 1.0, 5.0, 900.0])
    @pytest.mark.parametrize(("n", "c"), [(30, 2), (500, 3), (400, 40), (60, 1000)])
    def test_reaches_the_minimum(self, n: int, c: int, true_temperature: float) -> None:
        logits, labels = sampled(n, c, true_temperature)
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        least = least_nll(logits, labels)
        assert nll(logits, labels, temperature) == pytest.approx(least, rel=1e-9)

    def test_slope_is_zero_at_the_minimum_of_a_problem_that_starts_from_a_sample(
        self,
    ) -> None:
        logits, labels = sampled(43_000, 100, 2.5)
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        probs = softmax(logits / temperature, axis=1)
        slope = np.mean(
            (probs * logits).sum(axis=1) - logits[np.arange(len(labels)), labels]
        )
        assert abs(slope) < 1e-10 * np.abs(logits).mean()

    @pytest.mark.parametrize("dtype", [np.float16, np.float64])
    def test_saturated_logits(self, dtype: type) -> None:
        logits = np.where(np.eye(3)[[0, 1, 2, 0] * 25], 1e4, -1e4).astype(dtype)
        labels = np.array([0, 1, 2, 1] * 25)
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        # Right 3 times in 4 and 1/8 for each other class: the gap of 2e4 becomes log 6.
        exact = 2e4 / np.log(6)
        assert temperature == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("criterion", "binning"), [("ece", "uniform"), ("adaptive_ece", "quantile")]
)
@pytest.mark.parametrize("kind", ["plain", "saturated", "masked"])
def test_is_the_first_least_of_the_public_metric(
    criterion: str, binning: str, kind: str
) -> None:
    logits, labels = sampled(400, 150, 1.7)
    if kind == "saturated":
        logits = np.where(logits == logits.max(axis=1, keepdims=True), 1e4, -1e4)
    elif kind == "masked":
        masked = np.random.default_rng(0).random(logits.shape) < 0.5
        masked[np.arange(400), labels] = False
        logits[masked] = -np.inf
    grid = np.linspace(0.3, 4, 60)
    errors = [
        expected_calibration_error(
            softmax(logits / t, axis=1), labels, n_bins=10, binning=binning
        )
        for t in grid
    ]
    scaler = TemperatureScaling(criterion, grid=grid, n_bins=10).fit(logits, labels)
    assert scaler.temperature_ == grid[np.argmin(errors)]


class TestMultiLabel:
    @staticmethod
    def data(temperature: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        logits = rng.normal(scale=2, size=(400, 6))
        return logits * temperature, (rng.random((400, 6)) < expit(logits)).astype(
            np.float32
        )

    @staticmethod
    def as_two_classes(
        logits: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        flat = logits.ravel()
        return np.stack([np.zeros_like(flat), flat], axis=1), labels.ravel().astype(int)

    @pytest.mark.parametrize("criterion", ["nll", "ece", "adaptive_ece"])
    def test_is_a_two_class_problem_per_logit(self, criterion: str) -> None:
        logits, labels = self.data()
        ours = (
            TemperatureScaling(criterion, multi_label=True)
            .fit(logits, labels)
            .temperature_
        )
        expected = (
            TemperatureScaling(criterion)
            .fit(*self.as_two_classes(logits, labels))
            .temperature_
        )
        assert ours == pytest.approx(expected, rel=1e-9)
        assert ours == pytest.approx(3.0, rel=0.15)


class TestDataThatDoNotDetermineT:
    def test_every_label_first_is_limited_by_the_number_of_examples(self) -> None:
        logits = np.array([[2.0, 0.0], [0.0, 2.0]] * 10)
        with pytest.warns(
            UserWarning,
            match="do not determine the temperature: every label is ranked first",
        ):
            scaler = TemperatureScaling().fit(logits, np.array([0, 1] * 10))
        # One more example with an unknown label: p = (20 + 1/2) / 21.
        assert scaler.temperature_ == pytest.approx(2 / np.log(20.5 / 0.5), rel=1e-9)

    @pytest.mark.parametrize("criterion", ["nll", "ece", "adaptive_ece"])
    def test_equal_logits(self, criterion: str) -> None:
        with pytest.warns(
            UserWarning, match="logits of each row are equal. It is 1"
        ) as caught:
            scaler = TemperatureScaling(criterion).fit(
                np.full((5, 3), 0.1), np.array([0, 1, 2, 0, 1])
            )
        assert scaler.temperature_ == 1.0
        assert [warning.filename for warning in caught] == [__file__]


class TestPerLabel:
    TRUE = np.array([0.3, 1.0, 4.0, 2000.0])

    def data(self, n: int = 600) -> tuple[np.ndarray, np.ndarray]:
        """Logits of four labels, too large by `TRUE`."""
        rng = np.random.default_rng(0)
        logits = rng.normal(scale=2, size=(n, 4))
        return logits * self.TRUE, (rng.random((n, 4)) < expit(logits)).astype(int)

    @pytest.mark.parametrize(
        "unknown", [False, pytest.param(True, marks=pytest.mark.slow)]
    )
    def test_is_temperature_scaling_of_its_known_column(self, unknown: bool) -> None:
        logits, labels = self.data(10_000)
        if unknown:
            labels[::3, 1] = -100
            labels[1, :] = -100
            logits[::3, 1] = np.tile([-np.inf, 1e4, -1e4, 0.0], 10_000)[
                : len(logits[::3])
            ]
        ours = PerLabelTemperatureScaling().fit(logits, labels)
        shared = TemperatureScaling(multi_label=True)
        for column in range(4):
            kept = labels[:, column] != -100
            one = logits[kept][:, [column]], labels[kept][:, [column]]
            assert ours.temperatures_[column] == shared.fit(*one).temperature_
            signed = np.where(one[1] == 1, one[0], -one[0])
            search = minimize_scalar(
                lambda log_t, signed=signed: np.logaddexp(
                    0, -signed / np.exp(log_t)
                ).mean(),
                bounds=np.log(BOUNDS),
                options={"xatol": 1e-10},
            )
            assert np.logaddexp(
                0, -signed / ours.temperatures_[column]
            ).mean() == pytest.approx(search.fun, rel=1e-10)
        known = labels != -100
        whole = shared.fit(logits[known][:, None], labels[known][:, None]).temperature_
        assert ours.shared_temperature_ == pytest.approx(whole)
        for criterion in ("nll", "ece", "adaptive_ece"):
            scaler = TemperatureScaling(criterion, multi_label=True)
            alone = scaler.fit(
                logits[known][:, None], labels[known][:, None]
            ).temperature_
            assert scaler.fit(logits, labels).temperature_ == pytest.approx(
                alone, rel=1e-12
            )
        np.testing.assert_allclose(ours.temperatures_, self.TRUE, rtol=0.1)

    @pytest.mark.parametrize(
        "case",
        [
            "never",
            "always",
            "unknown",
            "zeros",
            "separable",
            "wrong side",
            "out of bounds",
        ],
    )
    def test_a_label_whose_temperature_is_not_determined(self, case: str) -> None:
        logits, labels = self.data()
        if case in ("never", "always", "unknown"):
            labels[:, 1] = {"never": 0, "always": 1, "unknown": -100}[case]
        elif case in ("separable", "wrong side"):
            labels[:, 1] = (logits[:, 1] > 0) == (case == "separable")
        else:
            logits[:, 1] *= 0 if case == "zeros" else 1e7
        with pytest.warns(
            UserWarning, match="do not determine the temperature of label 1:"
        ) as caught:
            scaler = PerLabelTemperatureScaling().fit(logits, labels)
        assert [warning.filename for warning in caught] == [__file__]
        shared = scaler.shared_temperature_
        kept = {
            "separable": scaler.temperatures_[1],
            "wrong side": BOUNDS[1],
            "out of bounds": BOUNDS[1],
        }
        assert scaler.temperatures_[1] == kept.get(case, shared)
        assert BOUNDS[0] < scaler.temperatures_[0] < 1
        if case == "separable":
            with pytest.warns(UserWarning, match="every label is ranked first"):
                alone = TemperatureScaling(multi_label=True).fit(
                    logits[:, [1]], labels[:, [1]]
                )
            assert scaler.temperatures_[1] == alone.temperature_


LOGITS = np.array([[1.0, 2.0, 0.0], [0.5, 0.1, 0.3]])
LABEL_MASKED = np.array([[1.0, -np.inf, 0.0], [0.5, 0.1, 0.3]])


@pytest.mark.parametrize(
    ("logits", "labels", "multi_label", "message"),
    [
        (LABEL_MASKED, [1, 1], False, "-inf for 1 of 2"),
        (LOGITS[None], [[0, 1]], False, "reshape"),
        (LOGITS[:, :1], [0, 0], False, "at least 2 classes.*multi_label=True"),
        (LOGITS, [0], False, r"labels to have shape \(2,\), got shape \(1,\)"),
        (LOGITS, np.eye(3)[[0, 1]], False, "multi_label=True takes 0/1 labels"),
        (LOGITS, [0, -100], False, r"got -100 in row 1; .* drop ignored rows first"),
        (LOGITS, [0, 3], False, r"lie in 0..2, got 3 in row 1"),
        (LOGITS, [0, 1], True, r"have the logits' shape \(2, 3\), got shape \(2,\)"),
        (LOGITS, [[0, 1, 0.5], [0, 0, 1]], True, "be 0 or 1, got values such as 0.5"),
        (LABEL_MASKED, [[0, 1, 0], [0, 0, 1]], True, "-inf for 1 of 2"),
    ],
)
def test_refused_data(
    logits: np.ndarray, labels: list[float], multi_label: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TemperatureScaling(multi_label=multi_label).fit(logits, labels)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"criterion": "eec"}, "did you mean 'ece'"),
        ({"n_bins": 0}, "n_bins to be at least 1"),
        ({"grid": []}, "grid to be float in .* of shape .G.*; use for example"),
        ({"grid": 1.0}, "grid"),
        ({"grid": [1.0, 0.0]}, "grid to be float in .*, got 0.0"),
    ],
)
def test_refused_parameters(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TemperatureScaling(**parameters).fit(LOGITS, [0, 1])
