"""Linear maps against their objectives written down again, the authors' maps, and on data that determine little."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, log_softmax, softmax

from hf_calib import InputError
from hf_calib.scaling import (
    DirichletScaling,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
)
from hf_calib.scaling.affine import AffineMap

Linear = VectorScaling | MatrixScaling | DirichletScaling
KINDS = [VectorScaling, MatrixScaling, DirichletScaling]
MATRICES = [MatrixScaling, DirichletScaling]
STRUCTURED = [StructuredVectorScaling, StructuredMatrixScaling]


def sampled(
    n: int, c: int, temperature: float = 2.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident logits of a classifier that is right often, mixes classes, and has wrong offsets."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=1.5, size=(n, c))
    logits[np.arange(n), rng.integers(c, size=n)] += 2
    true = logits @ (
        np.eye(c) + 0.4 * rng.normal(size=(c, c)) / np.sqrt(c)
    ) + 0.5 * rng.normal(size=c)
    return logits * temperature, (true + rng.gumbel(size=(n, c))).argmax(axis=1)


def offset(n: int, c: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident logits with an offset of each class."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, c))
    return 2 * logits, (logits + np.linspace(0, 1, c) + rng.gumbel(size=(n, c))).argmax(
        axis=1
    )


def nll(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def slopes(
    scaler: Linear, features: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of the mean negative log-likelihood in a (C, C) weight and in the bias."""
    weight = np.diag(scaler.weight_) if scaler.weight_.ndim == 1 else scaler.weight_
    residual = softmax(features @ weight.T + scaler.bias_, axis=1)
    residual[np.arange(len(labels)), labels] -= 1
    return residual.T @ features / len(labels), residual.mean(axis=0)


RIDGE = 1e-6  # of what has no penalty


def of_ridge(
    scaler: VectorScaling, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of the ridge of a vector map."""
    return 2 * RIDGE * temperature * (
        temperature * scaler.weight_ - 1
    ), 2 * RIDGE * scaler.bias_


class TestVector:
    @pytest.mark.parametrize(
        ("n", "c"), [(200, 2), (600, 5), (4000, 30), (12_000, 100)]
    )
    def test_the_gradient_is_zero(self, n: int, c: int) -> None:
        logits, labels = sampled(n, c)
        scaler = VectorScaling().fit(logits, labels)
        by_weight, by_bias = slopes(scaler, logits, labels)
        ridges = of_ridge(scaler, TemperatureScaling().fit(logits, labels).temperature_)
        assert np.abs(by_weight.diagonal() + ridges[0]).max() < 1e-7
        assert np.abs(by_bias + ridges[1]).max() < 1e-7
        assert scaler.bias_.sum() == pytest.approx(0, abs=1e-10)

    def test_masked_classes(self) -> None:
        logits, labels = sampled(500, 4)
        mask = np.random.default_rng(2).random(logits.shape) < 0.3
        mask[np.arange(500), labels] = False
        masked = np.where(mask, -np.inf, logits)
        scaler = VectorScaling().fit(masked, labels)
        residual = softmax(
            np.where(mask, -np.inf, logits * scaler.weight_ + scaler.bias_), axis=1
        )
        np.testing.assert_allclose(
            scaler.predict_proba(masked), residual, rtol=1e-12, atol=1e-15
        )
        residual[np.arange(500), labels] -= 1
        ridges = of_ridge(scaler, TemperatureScaling().fit(masked, labels).temperature_)
        assert np.abs((residual * logits).mean(axis=0) + ridges[0]).max() < 1e-7
        assert np.abs(residual.mean(axis=0) + ridges[1]).max() < 1e-8


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize(
    "penalties", [(0.0, 0.0), (1.0, 1.0), (0.0, 0.3), (300.0, 0.0), (0.01, 100.0)]
)
def test_is_the_minimum_of_the_penalised_likelihood(
    kind: type[Linear], penalties: tuple[float, float]
) -> None:
    logits, labels = sampled(2000, 4)
    features = log_softmax(logits, axis=1) if kind is DirichletScaling else logits
    temperature = TemperatureScaling().fit(logits, labels).temperature_
    scaler = kind(off_diagonal_penalty=penalties[0], bias_penalty=penalties[1]).fit(
        logits, labels
    )
    by_weight, by_bias = slopes(scaler, features, labels)
    between = max(penalties[0] / 12, RIDGE)
    weight = temperature * scaler.weight_
    by_weight += 2 * temperature * between * weight * (1 - np.eye(4))
    by_weight += 2 * temperature * RIDGE * (weight - 1) * np.eye(4)
    by_bias += 2 * max(penalties[1] / 4, RIDGE) * scaler.bias_
    assert np.abs(by_weight).max() < 1e-6
    assert np.abs(by_bias).max() < 1e-6


@pytest.mark.parametrize("penalty", [1.0, 0.1])
@pytest.mark.parametrize("case", ["N300_K5", "N400_K12", "N40_K6_absent"])
def test_structured_maps_are_the_authors(
    case: str, penalty: float, golden: Path
) -> None:
    """The `SVSCalibrator` and `SMSCalibrator` of probmetrics 1.3.0, minimised by torch to a gradient of 1e-8."""
    with np.load(golden / "structured_scaling.npz") as arrays:
        logits, labels = arrays[f"{case}_logits"], arrays[f"{case}_labels"]
        theirs = {name: arrays[f"{case}_penalty{penalty:g}_{name}"] for name in NAMES}
        temperature = float(arrays[f"{case}_temperature"])
    assert TemperatureScaling().fit(logits, labels).temperature_ == pytest.approx(
        temperature, rel=1e-9
    )
    for name, kind in zip(("svs", "sms"), STRUCTURED, strict=True):
        ours = kind(penalty).fit(logits, labels)
        np.testing.assert_allclose(ours.weight_, theirs[f"{name}_weight"], atol=1e-6)
        np.testing.assert_allclose(ours.bias_, theirs[f"{name}_bias"], atol=1e-6)


NAMES = ["svs_weight", "svs_bias", "sms_weight", "sms_bias"]


def test_each_label_is_a_problem_of_two_classes() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 3)) * 3
    labels = (rng.random((300, 3)) < expit(logits / 2 + [-1, 0, 1])).astype(int)
    labels[:40, 1] = -100
    scaler = StructuredVectorScaling(0.5, multi_label=True).fit(logits, labels)
    temperature = TemperatureScaling(multi_label=True).fit(logits, labels).temperature_
    for column in range(3):
        known = labels[:, column] >= 0
        x, sign = (
            logits[known, column] / temperature,
            np.where(labels[known, column] == 1, 1, -1),
        )

        def loss(
            theta: np.ndarray, x: np.ndarray = x, sign: np.ndarray = sign
        ) -> float:
            scores = (1 + theta[0]) * x + theta[1]
            return float(
                np.logaddexp(0, -sign * scores).sum()
                + 0.5 * (4 * theta[0] ** 2 + theta[1] ** 2)
            )

        found = minimize(
            loss,
            np.zeros(2),
            method="Nelder-Mead",
            options={"xatol": 1e-9, "fatol": 1e-12},
        ).x
        assert scaler.weight_[column] * temperature == pytest.approx(
            1 + found[0], abs=1e-4
        )
        assert scaler.bias_[column] == pytest.approx(found[1], abs=1e-4)


def test_rows_with_one_class_left_of_two_change_nothing() -> None:
    logits, labels = offset(200, 2)
    alone = np.tile([1.0, -np.inf], (50, 1))
    more = np.vstack([logits, alone]), np.append(labels, np.zeros(50, int))
    ours = StructuredVectorScaling().fit(*more)
    wanted = StructuredVectorScaling().fit(logits, labels)
    np.testing.assert_allclose(ours.weight_, wanted.weight_, rtol=1e-6)
    np.testing.assert_allclose(ours.bias_, wanted.bias_, rtol=1e-6)


@pytest.mark.parametrize("kind", [*KINDS, *STRUCTURED])
@pytest.mark.parametrize(
    "case",
    [
        "one class",
        "one row",
        "absent",
        "separable",
        "map separates",
        "constant",
        "inverted",
        "saturated",
    ],
)
def test_is_finite_and_no_worse_than_uniform(kind: type[Linear], case: str) -> None:
    logits, labels = offset(60, 8)
    if case == "one class":
        labels[:] = 3
    elif case == "one row":
        logits, labels = logits[:1], labels[:1]
    elif case == "absent":
        labels[labels > 4] = 0
    elif case == "separable":
        labels = logits.argmax(axis=1)
    elif case == "map separates":
        labels = (logits * np.linspace(0.5, 2, 8) + np.linspace(-1, 1, 8)).argmax(
            axis=1
        )
    elif case == "constant":
        logits = np.zeros_like(logits)
    elif case == "inverted":
        labels = logits.argmin(axis=1)
    else:
        logits = np.where(logits > 2, 1e4, -1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        scaler = kind().fit(logits, labels)
    assert np.isfinite(scaler.weight_).all()
    assert np.isfinite(scaler.bias_).all()
    assert np.abs(scaler.transform(logits)).max() < 1e3
    assert nll(scaler.transform(logits), labels) <= np.log(8) + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_score_lowest_are_fitted_by_negative_weights(
    kind: type[Linear],
) -> None:
    """The temperature is its upper bound, which is not the scale of the logits and not warned of."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 3))
    labels = (rng.gumbel(size=(500, 3)) - 2 * logits).argmax(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = kind().fit(logits, labels)
    assert nll(scaler.transform(logits), labels) < nll(-2 * logits, labels) + 0.02


WEIGHTS = [np.array(2.0), np.array([0.5, -1.0, 2.0]), np.arange(9.0).reshape(3, 3)]


@pytest.mark.parametrize("first", WEIGHTS, ids=["number", "vector", "matrix"])
@pytest.mark.parametrize("second", WEIGHTS, ids=["number", "vector", "matrix"])
def test_a_composition_is_one_map_after_the_other(
    first: np.ndarray, second: np.ndarray
) -> None:
    logits, _ = offset(20, 3)
    own = AffineMap(first, np.array([1.0, 0.0, -1.0]))
    following = AffineMap(second, np.array([0.0, 2.0, 1.0]))
    both = own.then(following)
    np.testing.assert_allclose(both(logits), following(own(logits)), rtol=1e-12)


def test_a_negative_weight_keeps_a_mask() -> None:
    mapped = AffineMap(np.array([-1.0, 1.0, 0.0]))([[-np.inf, 2.0, -np.inf]])
    np.testing.assert_array_equal(mapped, [[-np.inf, 2.0, -np.inf]])


@pytest.mark.parametrize("kind", [*MATRICES, StructuredMatrixScaling])
def test_the_lowest_number_of_a_dtype_is_a_mask_too(kind: type[Linear]) -> None:
    logits, labels = offset(60, 3)
    narrow = logits.astype(np.float32)
    narrow[0, (labels[0] + 1) % 3] = np.finfo(np.float32).min
    with pytest.raises(InputError, match=r"got 1 of -inf, or beyond 1e\+12"):
        kind().fit(narrow, labels)


def test_classes_without_rows_are_named() -> None:
    """Only the structured maps are safe without an example of a class."""
    logits, labels = offset(200, 5)
    labels[labels > 2] = 0
    message = (
        "The data do not determine the parameters of classes 3, 4: no row has this"
    )
    for kind in KINDS:
        with pytest.warns(UserWarning, match=message) as caught:
            kind().fit(logits, labels)
        assert [each.filename for each in caught] == [__file__]
        with pytest.warns(UserWarning, match="the parameters of class 4: no row has"):
            kind().fit(logits, np.append(labels[:-1], 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in STRUCTURED:
            kind().fit(logits, labels)
