"""The contract of every scaler: the tests take each row of `SCALERS`, and the variants below.

scikit-learn's own checks run as far as they apply: scalers take logits whose columns are the classes 0..C-1, of any
shape that ends in C, by position or as `logits=` and `labels=`, so that checks of other data, other labels, column
names, sparse arrays and of the wording of errors are left out; those that fit take scalers of one label per row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax
from sklearn.base import BaseEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.utils import estimator_checks

from hf_calib import scaling
from hf_calib._errors import InputError, InputTypeError, InputValueError

# Of AutoScaling two parts: most of the time here is its own.
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "AutoScaling": (2,),
}
VARIANTS: dict[str, Callable[[], BaseEstimator]] = {
    "AutoScaling-multi_label": lambda: scaling.AutoScaling(2, multi_label=True),
    "IsotonicScaling-joint": lambda: scaling.IsotonicScaling("joint"),
    "StructuredVectorScaling-multi_label": lambda: scaling.StructuredVectorScaling(
        multi_label=True
    ),
    "TemperatureScaling-ece": lambda: scaling.TemperatureScaling("ece"),
    "TemperatureScaling-multi_label": lambda: scaling.TemperatureScaling(
        multi_label=True
    ),
}
MAKE: dict[str, Callable[[], BaseEstimator]] = {
    **{
        e.name: partial(e.load(), *ARGUMENTS.get(e.name, ()))
        for e in scaling.SCALERS.values()
        # Priors hold for one number of classes, and have tests of their own.
        if e.needs != "priors"
    },
    **VARIANTS,
}


def that_need(needed: str) -> set[str]:
    return {entry.name for entry in scaling.SCALERS.values() if entry.needs == needed}


MULTI_LABEL = {
    *that_need("label_matrix"),
    *(name for name in VARIANTS if name.endswith("-multi_label")),
}
KEEP_THE_PREDICTED_CLASS = {
    "EnsembleTemperatureScaling",
    "IsotonicScaling-joint",
    "SplineScaling",
    "TemperatureScaling",
    "TemperatureScaling-ece",
}
# They fit how often each class occurs; the others fit only how far to trust the logits.
LEARN_FREQUENCIES = {
    "DirichletScaling",
    "HistogramBinning",
    "IsotonicScaling",
    "MatrixScaling",
    "VectorScaling",
}
ONE_LABEL_PER_ROW = [name for name in MAKE if name not in MULTI_LABEL]
MIX_CLASSES = {
    "DirichletScaling",
    "MatrixScaling",
    "StructuredMatrixScaling",
}  # these refuse -inf

PARAMETER_CHECKS = [
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_set_params",
]
FIT_CHECKS = [
    "check_dict_unchanged",
    "check_dont_overwrite_parameters",
    "check_estimators_dtypes",
    "check_estimators_pickle",
    "check_estimators_unfitted",
    "check_f_contiguous_array_estimator",
    "check_fit_check_is_fitted",
    "check_fit_idempotent",
    "check_inplace_ensure_writeable",
    "check_methods_sample_order_invariance",
    "check_methods_subset_invariance",
    "check_pipeline_consistency",
]


@pytest.fixture(params=MAKE)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _let_them_warn() -> Iterator[None]:
    """Warnings about data that do not determine a scaler are tested in its own file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def sampled(name: str, n: int = 400, c: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident logits, exact in float16, with the kind of labels that the scaler takes."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(n, c)).astype(np.float16).astype(np.float64)
    if name in MULTI_LABEL:
        return 2 * logits, (rng.random((n, c)) < expit(logits)).astype(int)
    return 2 * logits, (logits + rng.gumbel(size=(n, c))).argmax(axis=1)


@cache
def fitted(name: str) -> BaseEstimator:
    """The scaler of the sampled rows, which no test changes."""
    return MAKE[name]().fit(*sampled(name))


def check_probs(name: str, probs: np.ndarray, shape: tuple[int, ...]) -> None:
    assert probs.dtype == np.float64
    assert probs.shape == shape
    assert probs.min() >= 0
    assert probs.max() <= 1 + 1e-12
    if name not in MULTI_LABEL:
        np.testing.assert_allclose(probs.sum(axis=-1), 1, atol=1e-12)


def test_every_scaler_is_in_the_table() -> None:
    names = [entry.name for entry in scaling.SCALERS.values()]
    assert len(set(names)) == len(names)
    others = {
        "SCALERS",
        "Scaler",
        "ScalerEntry",
        "load_map",
        "save_map",
    }
    assert {*names, *others} == set(scaling.__all__) <= set(dir(scaling))
    for entry in scaling.SCALERS.values():
        assert getattr(scaling, entry.name) is entry.load()
        assert entry.load().__module__ == f"hf_calib.scaling.{entry.module}"
    with pytest.raises(
        AttributeError, match=r"'hf_calib\.scaling' has no attribute 'PlattScaling'"
    ):
        scaling.PlattScaling  # noqa: B018


def plain(name: str, logits: np.ndarray) -> np.ndarray:
    """The probabilities of the model itself."""
    return expit(logits) if name in MULTI_LABEL else np.exp(log_softmax(logits, axis=1))


def assert_order_of_classes_does_not_matter(
    name: str, logits: np.ndarray, labels: np.ndarray, probs: np.ndarray
) -> None:
    order = np.random.default_rng(3).permutation(logits.shape[1])
    moved = labels[:, order] if labels.ndim > 1 else np.argsort(order)[labels]
    ours = MAKE[name]().fit(logits[:, order], moved).predict_proba(logits[:, order])
    np.testing.assert_allclose(ours, probs[:, order], atol=1e-6)


class TestScikitLearnsChecks:
    @pytest.mark.parametrize("check", PARAMETER_CHECKS)
    def test_of_parameters(self, name: str, check: str) -> None:
        if not hasattr(estimator_checks, check):
            pytest.skip(f"this scikit-learn has no {check}")
        getattr(estimator_checks, check)(name, MAKE[name]())

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ONE_LABEL_PER_ROW)
    @pytest.mark.parametrize("check", FIT_CHECKS)
    def test_of_fits(self, name: str, check: str) -> None:
        if not hasattr(estimator_checks, check):
            pytest.skip(f"this scikit-learn has no {check}")
        getattr(estimator_checks, check)(name, MAKE[name]())


class TestFit:
    def test_tensors(self, name: str) -> None:
        logits, labels = sampled(name)
        expected = fitted(name).predict_proba(logits)
        with_gradient = torch.from_numpy(logits).requires_grad_()
        ours = (
            MAKE[name]()
            .fit(with_gradient, torch.from_numpy(labels))
            .predict_proba(with_gradient)
        )
        np.testing.assert_array_equal(ours, expected)

    def test_narrow_logits_are_as_good(self, name: str) -> None:
        logits, labels = sampled(name)
        bfloat = torch.from_numpy(logits).bfloat16()
        for narrow, wide in (
            (logits.astype(np.float16), logits),
            (bfloat, bfloat.double().numpy()),
        ):
            ours, theirs = (
                MAKE[name]().fit(z, labels).predict_proba(z) for z in (narrow, wide)
            )
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)

    def test_the_order_of_the_rows_does_not_matter(self, name: str) -> None:
        logits, labels = sampled(name)
        order = np.random.default_rng(1).permutation(len(logits))
        ours = MAKE[name]().fit(logits[order], labels[order]).predict_proba(logits)
        np.testing.assert_allclose(ours, fitted(name).predict_proba(logits), atol=1e-6)

    def test_fifty_rows(self, name: str) -> None:
        logits, labels = sampled(name, n=50, c=10)
        probs = MAKE[name]().fit(logits, labels).predict_proba(logits)
        check_probs(name, probs, (50, 10))
        assert (
            np.abs(probs - plain(name, logits)).max() > 0.05
        )  # they are twice too large
        assert_order_of_classes_does_not_matter(name, logits, labels, probs)

    def test_a_class_that_no_label_names(self, name: str) -> None:
        logits, labels = sampled(name)
        if labels.ndim > 1:
            labels[:, 3] = 0
        else:
            logits, labels = logits[labels != 3], labels[labels != 3]
        probs = MAKE[name]().fit(logits, labels).predict_proba(logits)
        check_probs(name, probs, logits.shape)
        assert_order_of_classes_does_not_matter(name, logits, labels, probs)
        if name in LEARN_FREQUENCIES:
            assert plain(name, logits)[:, 3].mean() > 0.05
            assert probs[:, 3].mean() < 0.01

    def test_saturated_logits(self, name: str) -> None:
        logits, labels = sampled(name)
        probs = []
        for size in (1e3, 1e4):
            saturated = np.where(logits > 0, size, -size)
            probs.append(MAKE[name]().fit(saturated, labels).predict_proba(saturated))
            check_probs(name, probs[-1], logits.shape)
        np.testing.assert_allclose(probs[1], probs[0], atol=1e-4)
        if name != "TemperatureScaling-ece":  # whose grid ends at T = 10
            gaps = []
            for found in (plain(name, saturated), probs[1]):
                right = (
                    (logits > 0) == labels
                    if labels.ndim > 1
                    else found.argmax(axis=1) == labels
                )
                confidence = (
                    np.maximum(found, 1 - found)
                    if labels.ndim > 1
                    else found.max(axis=1)
                )
                gaps.append(abs(confidence.mean() - right.mean()))
            assert gaps[1] < gaps[0] / 2

    def test_masked_classes(self, name: str) -> None:
        logits, labels = sampled(name)
        masked = np.random.default_rng(2).random(logits.shape) < 0.2
        masked[
            labels.astype(bool) if labels.ndim > 1 else (np.arange(len(labels)), labels)
        ] = False
        logits[masked] = -np.inf
        if name in MIX_CLASSES:
            with pytest.raises(ValueError, match="expected logits to be finite"):
                MAKE[name]().fit(logits, labels)
            fitted = MAKE[name]().fit(*sampled(name))
            for row in (
                logits[masked.any(axis=1)][:1],
                np.full_like(logits[:1], -np.inf),
            ):
                with pytest.raises(ValueError, match="expected logits to be finite"):
                    fitted.predict_proba(row)
            return
        probs = MAKE[name]().fit(logits, labels).predict_proba(logits)
        check_probs(name, probs, logits.shape)
        if (
            name != "HistogramBinning"
        ):  # there a bin holds all small probabilities alike
            assert probs[masked].max() < 1e-9


class TestRefused:
    def test_not_finite(self, name: str) -> None:
        logits, labels = sampled(name)
        for value in (np.nan, np.inf):
            logits[5, 1] = value
            with pytest.raises(ValueError, match=r"NaN or \+inf in 1 of 400 rows"):
                MAKE[name]().fit(logits, labels)

    def test_other_shapes_and_dtypes(self, name: str) -> None:
        logits, labels = sampled(name)
        with pytest.raises(ValueError, match="expected logits to have shape"):
            MAKE[name]().fit(logits[0], labels)
        with pytest.raises(
            ValueError, match="expected logits to hold at least one example"
        ):
            MAKE[name]().fit(logits[:0], labels[:0])
        with pytest.raises(TypeError, match="expected logits to hold real numbers"):
            MAKE[name]().fit(logits.astype(complex), labels)
        with pytest.raises(TypeError, match="expected logits to be a numpy array"):
            MAKE[name]().fit(torch.from_numpy(logits).to_sparse(), labels)


class TestPredictions:
    def test_single_rows_and_more_axes(self, name: str) -> None:
        logits, _ = sampled(name)
        scaler = fitted(name)
        whole = scaler.predict_proba(logits)
        check_probs(name, whole, logits.shape)
        np.testing.assert_allclose(
            scaler.predict_proba(logits[:1]), whole[:1], rtol=1e-12
        )
        stacked = scaler.predict_proba(logits.reshape(2, 200, 4))
        np.testing.assert_allclose(stacked.reshape(400, 4), whole, rtol=1e-12)

    def test_the_predicted_class_stays(self, name: str) -> None:
        logits, labels = sampled(name, n=1000, c=6)
        probs = MAKE[name]().fit(logits, labels).predict_proba(logits)
        if name in MULTI_LABEL - {
            "StructuredVectorScaling-multi_label"
        }:  # which moves the threshold
            np.testing.assert_array_equal(probs > 0.5, logits > 0)
        elif name in KEEP_THE_PREDICTED_CLASS:
            predicted = probs[np.arange(1000), logits.argmax(axis=1)]
            assert (
                predicted >= probs.max(axis=1) * (1 - 1e-12)
            ).all()  # some logits are tied
        elif name not in MULTI_LABEL:
            accuracy = np.mean(logits.argmax(axis=1) == labels)
            assert np.mean(probs.argmax(axis=1) == labels) > accuracy - 0.03


@pytest.mark.parametrize(
    "name", [name for name in ONE_LABEL_PER_ROW if name not in VARIANTS]
)
class TestOddInput:
    def test_numbers_whose_squares_overflow(self, name: str) -> None:
        logits, labels = sampled(name)
        message = r"expected logits to be at most 1e\+100, got .*e\+30[01]; divide"
        with pytest.raises(InputValueError, match=message):
            MAKE[name]().fit(1e300 * logits, labels)

    @pytest.mark.parametrize("scale", [1e-30, 1e-300, 0.0])
    def test_numbers_that_are_as_good_as_equal(self, name: str, scale: float) -> None:
        logits, labels = sampled(name)
        assert np.isfinite(
            MAKE[name]().fit(scale * logits, labels).predict_proba(scale * logits)
        ).all()

    def test_probabilities_are_no_logits(self, name: str) -> None:
        logits, labels = sampled(name)
        with pytest.warns(
            UserWarning,
            match=r"like probabilities\. .* Pass numpy\.log\(probs\) instead",
        ) as caught:
            MAKE[name]().fit(
                np.exp(log_softmax(logits, axis=1)).astype(np.float32), labels
            )
        assert caught[0].filename == __file__

    def test_one_hot_rows_are_logits(self, name: str) -> None:
        _, labels = sampled(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*like probabilities")
            MAKE[name]().fit(np.eye(4)[(labels + np.arange(400) // 300) % 4], labels)

    def test_other_classes_than_those_of_fit(self, name: str) -> None:
        logits, _ = sampled(name)
        for wrong in (logits[:, :2], np.c_[logits, logits[:, 0]]):
            with pytest.raises(
                InputValueError,
                match=r"expected logits to have the 4 classes of fit, got shape",
            ):
                fitted(name).predict_proba(wrong)

    def test_labels_that_are_names(self, name: str) -> None:
        logits, labels = sampled(name)
        with pytest.raises(
            InputTypeError,
            match=r"be integers, got dtype <U1; number them by the columns",
        ):
            MAKE[name]().fit(logits, np.array(list("abcd"))[labels])

    def test_it_is_a_classifier_of_scikit_learn(self, name: str) -> None:
        logits, labels = sampled(name)
        np.testing.assert_array_equal(fitted(name).classes_, [0, 1, 2, 3])
        predicted = fitted(name).predict(logits)
        np.testing.assert_array_equal(
            predicted, fitted(name).predict_proba(logits).argmax(axis=1)
        )
        assert fitted(name).score(logits, labels) == np.mean(predicted == labels)
        assert not hasattr(MAKE[name](), "classes_")


@pytest.mark.parametrize("name", MAKE)
def test_the_repr_of_a_fitted_scaler_shows_its_parameters(name: str) -> None:
    scaler = fitted(name)
    shown = repr(scaler)
    assert shown.startswith(repr(MAKE[name]()))
    assert "\n" not in shown
    assert len(shown) < 500
    if name.startswith("AutoScaling"):  # its results would be too long
        assert scaler.choice_ in shown
        return
    for parameter, value in vars(scaler).items():
        if parameter.endswith("_"):
            first = np.ravel(value)[0]
            assert f"{parameter}=" in shown
            assert isinstance(value, np.ndarray) or f"={first:.6g}" in shown


def test_several_labels_a_row_are_predicted_as_0_and_1() -> None:
    for name in ("TemperatureScaling-multi_label", "PerLabelTemperatureScaling"):
        logits, _ = sampled(name)
        np.testing.assert_array_equal(fitted(name).predict(logits), logits > 0)
        np.testing.assert_array_equal(fitted(name).classes_, [0, 1, 2, 3])


NAN, INF = float("nan"), float("inf")
WRONG = "multi_label to be True or False, got 'no'; write it without quotes"
SETTINGS: list[tuple[str, dict[str, object], str]] = [
    (
        "TemperatureScaling",
        {"criterion": LogisticRegression()},
        "criterion to be one of 'nll', .* got LogisticRegr",
    ),
    ("TemperatureScaling", {"multi_label": "no"}, WRONG),
    ("AutoScaling", {"multi_label": "no"}, WRONG),
    ("StructuredVectorScaling", {"multi_label": "no"}, WRONG),
    ("AutoScaling", {"n_folds": 1}, "n_folds to be at least 2, got 1"),
    ("HistogramBinning", {"n_bins": 0}, "n_bins to be at least 1, got 0"),
    (
        "HistogramBinning",
        {"binning": "quantile"},
        "binning to be one of .* got 'quantile'",
    ),
    (
        "SplineScaling",
        {"n_knots": 500},
        "logits to hold at least n_knots=500 rows, got 400",
    ),
    *(
        (scaler, {name: value}, f"{name} to be a finite number of at least 0")
        for scaler in ("MatrixScaling", "DirichletScaling")
        for name in ("bias_penalty", "off_diagonal_penalty")
        for value in (-1.0, True, False, np.True_, "1", [1.0], NAN, INF, 10**400)
    ),
    *(
        (scaler, {"penalty": value}, "penalty to be a finite number above 0")
        for scaler in ("StructuredVectorScaling", "StructuredMatrixScaling")
        for value in (0.0, -1.0, True, "1", None, [1.0], NAN, INF, 10**400)
    ),
    *(
        ("TemperatureScaling", {"grid": value}, "grid to ")
        for value in ([True], [1e-300], [1e300], [-1.0], ["1"], [[1.0]], 2.0, [NAN])
    ),
    *(
        (scaler, {name: value}, f"{name} to be")
        for scaler, name in (
            ("TemperatureScaling", "n_bins"),
            ("HistogramBinning", "n_bins"),
            ("SplineScaling", "n_knots"),
            ("AutoScaling", "n_folds"),
            ("AutoScaling", "random_state"),
        )
        for value in (True, False, -1, 2.5, 15.0, "15", None, [15], NAN)
    ),
    (
        "AutoScaling",
        {"random_state": -1},
        "random_state to be at least 0, got -1; random_state=0 is",
    ),
]


@pytest.mark.parametrize(("name", "settings", "message"), SETTINGS)
def test_settings_that_are_none(
    name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=f"expected {message}"):
        MAKE[name]().set_params(**settings).fit(*sampled(name))
