"""One temperature per label: each label is the shared-temperature problem of its own column."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit
from sklearn.exceptions import NotFittedError

from hf_calib.scaling import PerLabelTemperatureScaling, TemperatureScaling
from hf_calib.scaling._solver import BOUNDS

TRUE = np.array([0.3, 1.0, 4.0, 2000.0])


def sampled(n: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Logits of four labels, too large by `TRUE`."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(n, 4))
    return logits * TRUE, (rng.random((n, 4)) < expit(logits)).astype(int)


def binary_nll(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    return float(np.logaddexp(0, np.where(labels == 1, -1, 1) * logits / temperature).mean())


class TestEachLabel:
    def test_is_the_minimum_of_its_own_likelihood(self) -> None:
        logits, labels = sampled()
        scaler = PerLabelTemperatureScaling().fit(logits, labels)
        for column, temperature in enumerate(scaler.temperatures_):
            one = logits[:, column], labels[:, column]
            search = minimize_scalar(
                lambda log_t, one=one: binary_nll(*one, np.exp(log_t)),
                bounds=np.log(BOUNDS),
                method="bounded",
                options={"xatol": 1e-10},
            )
            assert binary_nll(*one, temperature) == pytest.approx(search.fun, rel=1e-10)

    def test_is_temperature_scaling_of_its_column(self) -> None:
        logits, labels = sampled()
        ours = PerLabelTemperatureScaling().fit(logits, labels)
        shared = TemperatureScaling(multi_label=True)
        alone = [shared.fit(logits[:, [column]], labels[:, [column]]).temperature_ for column in range(4)]
        np.testing.assert_array_equal(ours.temperatures_, alone)
        assert ours.shared_temperature_ == shared.fit(logits, labels).temperature_

    def test_finds_what_the_logits_were_multiplied_by(self) -> None:
        scaler = PerLabelTemperatureScaling().fit(*sampled(20_000))
        np.testing.assert_allclose(scaler.temperatures_, TRUE, rtol=0.05)

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32])
    def test_narrow_dtypes_are_read_in_float64(self, dtype: type) -> None:
        logits, labels = sampled()
        narrow = logits.astype(dtype)
        ours = PerLabelTemperatureScaling().fit(narrow, labels)
        wide = PerLabelTemperatureScaling().fit(narrow.astype(np.float64), labels)
        np.testing.assert_array_equal(ours.temperatures_, wide.temperatures_)

    def test_masked_logits_tell_nothing(self) -> None:
        logits, labels = sampled()
        logits[labels == 0] = np.where(np.arange((labels == 0).sum()) % 3 == 0, -np.inf, logits[labels == 0])
        scaler = PerLabelTemperatureScaling().fit(logits, labels)
        kept = np.isfinite(logits[:, 2])
        alone = PerLabelTemperatureScaling().fit(logits[kept][:, [2]], labels[kept][:, [2]])
        assert scaler.temperatures_[2] == pytest.approx(alone.temperatures_[0], rel=1e-9)
        assert (scaler.predict_proba(logits)[np.isneginf(logits)] == 0).all()

    def test_makes_no_second_matrix(self) -> None:
        rng = np.random.default_rng(0)
        logits = rng.normal(scale=2, size=(20_000, 60)).astype(np.float32)
        labels = rng.random(logits.shape) < expit(logits)
        tracemalloc.start()
        PerLabelTemperatureScaling().fit(logits, labels)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.5 * logits.nbytes  # float64 logits take 2


class TestUnknownLabels:
    def test_one_of_a_row_does_not_drop_the_others(self) -> None:
        logits, labels = sampled()
        labels[::3, 1] = -100
        labels[1, :] = -100
        ours = PerLabelTemperatureScaling().fit(logits, labels)
        for column in range(4):
            kept = labels[:, column] != -100
            alone = PerLabelTemperatureScaling().fit(logits[kept][:, [column]], labels[kept][:, [column]])
            assert ours.temperatures_[column] == alone.temperatures_[0]

    def test_the_shared_temperature_leaves_out_their_logits_only(self) -> None:
        logits, labels = sampled()
        labels[::3, 1] = -100
        known = labels != -100
        as_one_column = logits[known][:, np.newaxis], labels[known][:, np.newaxis]
        expected = TemperatureScaling(multi_label=True).fit(*as_one_column).temperature_
        assert PerLabelTemperatureScaling().fit(logits, labels).shared_temperature_ == pytest.approx(expected)
        for criterion in ("nll", "ece", "adaptive_ece"):
            scaler = TemperatureScaling(criterion, multi_label=True).fit(logits, labels)
            alone = TemperatureScaling(criterion, multi_label=True).fit(*as_one_column)
            assert scaler.temperature_ == pytest.approx(alone.temperature_, rel=1e-12)

    def test_what_stands_beside_them_makes_no_difference(self) -> None:
        logits, labels = sampled(10_000)  # enough for the first guess from a sample of the rows
        labels[::3, 1] = -100
        ours = PerLabelTemperatureScaling().fit(logits, labels).temperatures_
        logits[::3, 1] = np.tile([-np.inf, 1e4, -1e4, 0.0], 10_000)[: len(logits[::3])]
        np.testing.assert_array_equal(PerLabelTemperatureScaling().fit(logits, labels).temperatures_, ours)

    def test_a_label_that_is_never_known_takes_the_shared_temperature(self) -> None:
        logits, labels = sampled()
        labels[:, 2] = -100
        with pytest.warns(UserWarning, match="the same value for label 2"):
            scaler = PerLabelTemperatureScaling().fit(logits, labels)
        assert scaler.temperatures_[2] == scaler.shared_temperature_

    def test_no_label_at_all_is_refused(self) -> None:
        logits, labels = sampled()
        with pytest.raises(ValueError, match="labels to be 0 or 1, got -100 everywhere"):
            PerLabelTemperatureScaling().fit(logits, np.full_like(labels, -100))
        with pytest.raises(ValueError, match=r"got values such as -1; .* -100 where a label is not known"):
            PerLabelTemperatureScaling().fit(logits, np.where(labels == 0, -1, -100))


class TestOutputs:
    def test_probabilities(self) -> None:
        logits, labels = sampled()
        scaler = PerLabelTemperatureScaling().fit(logits, labels)
        np.testing.assert_allclose(
            scaler.predict_proba(logits), expit(logits / scaler.temperatures_), rtol=1e-14
        )
        np.testing.assert_allclose(scaler.transform(logits), logits / scaler.temperatures_, rtol=1e-15)

    def test_decisions_at_one_half_stay(self) -> None:
        logits, labels = sampled()
        probs = PerLabelTemperatureScaling().fit(logits, labels).predict_proba(logits)
        np.testing.assert_array_equal(probs > 0.5, logits > 0)

    def test_refused(self) -> None:
        logits, labels = sampled()
        with pytest.raises(NotFittedError):
            PerLabelTemperatureScaling().transform(logits)
        scaler = PerLabelTemperatureScaling().fit(logits, labels)
        with pytest.raises(ValueError, match="have the 4 classes of fit"):
            scaler.transform(logits[:, :3])
        with pytest.raises(ValueError, match=r"have the logits' shape \(600, 4\), got shape \(600,\)"):
            PerLabelTemperatureScaling().fit(logits, labels[:, 0])
        with pytest.raises(ValueError, match=r"be 0 or 1, got values such as 0\.5"):
            PerLabelTemperatureScaling().fit(logits, labels * 0.5)


class TestDataThatDoNotDetermineATemperature:
    @pytest.mark.parametrize("value", [0, 1])
    def test_never_or_always_positive(self, value: int) -> None:
        logits, labels = sampled()
        labels[:, 1] = value
        with pytest.warns(UserWarning, match="All examples have the same value for label 1, so"):
            scaler = PerLabelTemperatureScaling().fit(logits, labels)
        assert scaler.temperatures_[1] == scaler.shared_temperature_
        assert scaler.temperatures_[0] == pytest.approx(0.3, rel=0.3)

    def test_one_warning_names_all_labels(self) -> None:
        logits, labels = sampled()
        labels[:, [0, 2]] = 0
        with pytest.warns(UserWarning, match=r"the same value for 2 labels \(0, 2\)") as caught:
            PerLabelTemperatureScaling().fit(logits, labels)
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_always_on_the_right_side(self) -> None:
        logits, labels = sampled(40)
        labels[:, 1] = logits[:, 1] > 0
        with pytest.warns(UserWarning, match=r"All logits have the right sign for label 1, so .* smoothed"):
            scaler = PerLabelTemperatureScaling().fit(logits, labels)
        expected = TemperatureScaling(multi_label=True)
        with pytest.warns(UserWarning, match="All 40 labels are ranked first"):
            expected.fit(logits[:, [1]], labels[:, [1]])
        assert scaler.temperatures_[1] == expected.temperature_

    def test_no_better_than_chance(self) -> None:
        logits, labels = sampled()
        labels[:, 1] = logits[:, 1] < 0
        with pytest.warns(UserWarning, match="on the wrong side for label 1"):
            scaler = PerLabelTemperatureScaling().fit(logits, labels)
        np.testing.assert_allclose(scaler.predict_proba(logits)[:, 1], 0.5, atol=1e-3)

    def test_only_zeros(self) -> None:
        logits, labels = sampled()
        logits[:, 1] = 0
        with pytest.warns(UserWarning, match="All logits are 0 for label 1, so no temperature"):
            scaler = PerLabelTemperatureScaling().fit(logits, labels)
        assert scaler.temperatures_[1] == scaler.shared_temperature_

    def test_the_scale_is_out_of_bounds(self) -> None:
        logits, labels = sampled()
        logits[:, 1] *= 1e7
        with pytest.warns(UserWarning, match=r"at the end of the range .* \(1e-05, 100000.0\), for label 1"):
            scaler = PerLabelTemperatureScaling().fit(logits, labels)
        assert scaler.temperatures_[1] == pytest.approx(BOUNDS[1])

    def test_one_example(self) -> None:
        with pytest.warns(UserWarning, match=r"the same value for 2 labels \(0, 1\)"):
            scaler = PerLabelTemperatureScaling().fit([[2.0, -1.0]], [[1, 0]])
        assert np.isfinite(scaler.predict_proba([[2.0, -1.0]])).all()
