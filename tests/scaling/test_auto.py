"""The map that cross-validation chooses: which, how good, and on data that say little."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from scipy.special import expit, log_softmax, softmax

from hf_calib.predictions import Predictions
from hf_calib.scaling import (
    AutoScaling,
    StructuredVectorScaling,
    TemperatureScaling,
)
from hf_calib.scaling.auto import choose

METHODS = [
    "identity",
    "temperature",
    "structured_vector",
    "vector",
    "structured_matrix",
    "matrix",
]


def drawn(true: np.ndarray, seed: int = 0) -> np.ndarray:
    return (true + np.random.default_rng(seed).gumbel(size=true.shape)).argmax(axis=1)


def some_logits(n: int, c: int, seed: int = 1) -> np.ndarray:
    logits = 1.5 * np.random.default_rng(seed).normal(size=(n, c))
    logits[np.arange(n), np.arange(n) % c] += 2
    return logits


def nll(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def silently_fitted(
    logits: np.ndarray, labels: np.ndarray, **parameters: object
) -> AutoScaling:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return AutoScaling(**parameters).fit(logits, labels)


class TestChoice:
    """Labels drawn from a known map of the logits: the choice is of its kind, and nearly as good."""

    def test_calibrated_logits_stay(self) -> None:
        logits = some_logits(2000, 5)
        scaler = AutoScaling().fit(logits, drawn(logits))
        assert scaler.choice_ in ("identity", "temperature")
        assert (
            abs(
                nll(scaler.transform(logits), drawn(logits, 5))
                - nll(logits, drawn(logits, 5))
            )
            < 0.002
        )

    def test_over_confident_logits_get_a_temperature(self) -> None:
        logits = some_logits(2000, 5)
        scaler = AutoScaling().fit(2 * logits, drawn(logits))
        assert scaler.choice_ == "temperature"
        expected = TemperatureScaling().fit(2 * logits, drawn(logits)).temperature_
        np.testing.assert_allclose(scaler.transform(2 * logits), 2 * logits / expected)

    def test_wrong_offsets_get_a_vector(self) -> None:
        logits = some_logits(2000, 5)
        true = logits + np.array([0, 0, 1, 2, 0])
        scaler = AutoScaling().fit(2 * logits, drawn(true))
        assert "vector" in scaler.choice_
        assert scaler.weight_.shape == (5,)
        np.testing.assert_allclose(
            scaler.bias_ - scaler.bias_[0], [0, 0, 1, 2, 0], atol=0.4
        )

    def test_confused_classes_get_a_matrix(self) -> None:
        logits = some_logits(3000, 5)
        mixing = np.eye(5)
        mixing[0, 1] = mixing[3, 2] = 0.7
        scaler = AutoScaling().fit(2 * logits, drawn(logits @ mixing.T))
        assert "matrix" in scaler.choice_
        fresh = some_logits(3000, 5, seed=9)
        labels = drawn(fresh @ mixing.T, 4)
        assert (
            nll(scaler.transform(2 * fresh), labels)
            < nll(fresh @ mixing.T, labels) + 0.01
        )

    def test_multi_label(self) -> None:
        rng = np.random.default_rng(0)
        logits = 2 * rng.normal(size=(1500, 4))
        true = logits + np.array([-2, 0, 1, 0])
        labels = (rng.random(logits.shape) < expit(true)).astype(int)
        labels[:50, 2] = -100
        scaler = AutoScaling(multi_label=True).fit(2 * logits, labels)
        assert scaler.choice_.startswith("structured_vector")
        np.testing.assert_allclose(
            scaler.predict_proba(2 * logits), expit(true), atol=0.12
        )
        methods = dict.fromkeys(row["method"] for row in scaler.results_)
        assert list(methods) == [
            "identity",
            "temperature",
            "per_label_temperature",
            "structured_vector",
        ]
        two_labels = silently_fitted(logits[:50, :2], labels[:50, :2], multi_label=True)
        sizes = {row["method"]: row["n_parameters"] for row in two_labels.results_}
        assert sizes["structured_vector"] == 2 * sizes["per_label_temperature"] == 4


class TestResults:
    def test_say_what_each_got(self) -> None:
        logits = some_logits(600, 4)
        labels = drawn(logits + np.array([0, 0, 0, 2]))
        scaler = AutoScaling().fit(logits, labels)
        rows = scaler.results_
        assert list(dict.fromkeys(row["method"] for row in rows)) == METHODS
        assert rows == json.loads(json.dumps(rows))
        assert [row["chosen"] for row in rows].count(True) == 1
        tried = [row for row in rows if row["left_out"] is None]
        temperature = next(row for row in rows if row["method"] == "temperature")
        assert all(
            row["difference"] == pytest.approx(row["nll"] - temperature["nll"])
            for row in tried
        )
        chosen = next(row for row in tried if row["chosen"])
        assert chosen["difference"] < 0
        name = chosen["method"] + (
            "" if chosen["penalty"] is None else f"(penalty={chosen['penalty']:g})"
        )
        assert scaler.choice_ == name

    def test_are_those_of_rows_held_out(self) -> None:
        """One candidate by hand: fits on four parts, and a temperature of their rows, judged on the fifth."""
        logits = some_logits(200, 3)
        labels = drawn(logits + np.array([0, 0, 2]))
        scaler = AutoScaling(random_state=3).fit(logits, labels)
        folds = np.random.default_rng(3).permutation(np.arange(200) % 5)
        mapped, losses = np.empty_like(logits), np.empty(200)
        for fold in range(5):
            train = folds != fold
            mapped[~train] = (
                StructuredVectorScaling(0.1)
                .fit(logits[train], labels[train])
                .transform(logits[~train])
            )
        for fold in range(5):
            train = folds != fold
            top = (
                TemperatureScaling()
                .fit(mapped[train], labels[train])
                .transform(mapped[~train])
            )
            losses[~train] = -log_softmax(top, axis=1)[
                np.arange(len(top)), labels[~train]
            ]
        row = next(
            r
            for r in scaler.results_
            if (r["method"], r["penalty"]) == ("structured_vector", 0.1)
        )
        assert row["nll"] == pytest.approx(losses.mean(), abs=1e-5)
        assert row["standard_error"] == pytest.approx(
            losses.std(ddof=1) / np.sqrt(200), abs=1e-5
        )

    def test_only_a_clear_loss_ends_a_family(self) -> None:
        """Each vector is a little worse than the one before it, and the second matrix much."""
        logits = some_logits(300, 3, seed=2)
        scaler = silently_fitted(logits, drawn(logits, 2))
        rows = {(row["method"], row["penalty"]): row for row in scaler.results_}
        of_vectors = [rows["structured_vector", p]["nll"] for p in (1, 0.1, 0.01)]
        assert of_vectors == sorted(of_vectors)
        assert rows["structured_vector", 0.001]["left_out"] is None
        why = rows["structured_matrix", 0.01]["left_out"]
        assert why.startswith("structured_matrix(penalty=0.1) was clearly worse")
        assert rows["structured_matrix", 0.001]["left_out"] == why

    def test_of_many_rows_are_those_of_a_random_sample(self) -> None:
        """The offset of the second half would go unnoticed in the first 20,000 rows."""
        n = 40_000
        logits = np.random.default_rng(0).normal(scale=2, size=(n, 2))
        offsets = np.zeros((n, 2))
        offsets[n // 2 :, 1] = 1.5
        labels = drawn(logits + offsets)
        scaler = AutoScaling(2).fit(logits, labels)
        assert "vector" in scaler.choice_
        (chosen,) = (row for row in scaler.results_ if row["chosen"])
        probs = scaler.predict_proba(logits)
        losses = -np.log(probs[np.arange(n), labels])
        of_sample = losses.std() / np.sqrt(20_000)
        assert chosen["standard_error"] == pytest.approx(of_sample, rel=0.05)

    @pytest.mark.parametrize(("n_wrong", "tried"), [(4, False), (5, True)])
    def test_few_wrong_rows_tell_no_more_than_a_temperature(
        self, n_wrong: int, tried: bool
    ) -> None:
        logits = some_logits(60, 3)
        labels = logits.argmax(axis=1)
        labels[:n_wrong] = logits[:n_wrong].argmin(axis=1)
        scaler = silently_fitted(logits, labels)
        left_out = {row["method"]: row["left_out"] for row in scaler.results_}
        assert left_out["temperature"] is None
        reason = "4 wrong rows do not tell more than a temperature"
        assert (left_out["vector"] == reason) is not tried

    def test_a_label_that_is_not_known_is_not_wrong(self) -> None:
        logits = np.random.default_rng(0).normal(size=(60, 3))
        labels = (logits > 0).astype(int)
        labels[:20, 0] = -100
        scaler = silently_fitted(logits, labels, multi_label=True)
        assert scaler.results_[2]["left_out"].startswith("0 wrong rows do not tell")

    def test_large_matrices_are_left_out(self) -> None:
        """Six rows of 10,000 classes, all of them wrong."""
        logits = some_logits(6, 10_000)
        scaler = silently_fitted(logits, logits.argmin(axis=1))
        left_out = {
            row["method"]: row["left_out"] for row in scaler.results_ if row["left_out"]
        }
        assert left_out["structured_matrix"] == left_out["matrix"]
        assert left_out["matrix"].startswith("N C^2 = 6.0e+08 is more than 5e+08")


class TestLittleData:
    @pytest.mark.parametrize(
        "case",
        [
            "one row",
            "two rows",
            "one class",
            "one row per class",
            "constant",
            "ties",
            "separable",
        ],
    )
    def test_is_finite_and_no_worse_than_before(self, case: str) -> None:
        logits = some_logits(40, 6)
        labels = drawn(logits)
        if case in ("one row", "two rows"):
            n = 1 + (case == "two rows")
            logits, labels = logits[:n], labels[:n]
        elif case == "one class":
            labels[:] = 2
        elif case == "one row per class":
            logits, labels = logits[:6], np.arange(6)
        elif case == "constant":
            logits = np.ones_like(logits)
        elif case == "ties":
            logits, labels = (
                np.repeat(logits[:8].round(), 5, axis=0),
                np.repeat(labels[:8], 5),
            )
        else:
            labels = logits.argmax(axis=1)
        scaler = silently_fitted(logits, labels)
        scaled = scaler.transform(logits)
        assert np.isfinite(scaled).all()
        assert nll(scaled, labels) <= nll(logits, labels) + 0.05
        np.testing.assert_allclose(
            softmax(scaled, axis=1), scaler.predict_proba(logits)
        )

    def test_rows_without_a_known_label_change_nothing(self) -> None:
        """As many as to fill whole parts of the rows."""
        logits = some_logits(60, 3)
        labels = (expit(logits) > np.random.default_rng(0).random(logits.shape)).astype(
            int
        )
        labels[:, 0][::3] = -100
        labels[7:] = -100
        scaler = silently_fitted(logits, labels, multi_label=True)
        known = silently_fitted(logits[:7], labels[:7], multi_label=True)
        assert scaler.results_ == known.results_
        np.testing.assert_array_equal(scaler.transform(logits), known.transform(logits))


@pytest.mark.parametrize(
    ("name", "n", "gain", "taken"),
    [
        ("structured_matrix(penalty=1)", 500, 2.5, True),
        ("structured_matrix(penalty=1)", 500, 1.5, False),
        ("structured_matrix(penalty=0.1)", 500, 2.5, False),
        ("matrix", 500, 3.5, True),
        ("matrix", 1000, 2.5, True),
        ("identity", 200, 9.0, False),
    ],
)
def test_how_many_standard_errors_a_map_has_to_gain(
    name: str, n: int, gain: float, taken: bool
) -> None:
    noise = np.random.default_rng(0).normal(size=n)
    noise -= noise.mean()
    error = noise.std(ddof=1) / np.sqrt(n)
    losses = {"temperature": np.zeros(n), name: noise - gain * error}
    assert choose(losses) == (name if taken else "temperature")


class TestRareClasses:
    """Rows that lack a class do not take its probability to 0, and the fit says so."""

    @staticmethod
    def rows(n_of_last: int, n: int = 1500) -> tuple[np.ndarray, np.ndarray]:
        logits = np.random.default_rng(0).normal(scale=3.0, size=(n, 4))
        labels = drawn(logits / 1.6)
        keeps = np.isin(np.arange(n), np.flatnonzero(labels == 3)[n_of_last:])
        return logits[~keeps], labels[~keeps]

    @pytest.mark.parametrize("n_of_last", [0, 1, 2])
    def test_one_class_has_hardly_a_row(self, n_of_last: int) -> None:
        logits, labels = self.rows(n_of_last)
        scaler = AutoScaling()
        with pytest.warns(UserWarning, match="the parameters of class 3: fewer than 3"):
            scaler.fit(logits, labels)
        assert scaler.choice_.startswith("temperature")
        assert scaler.predict_proba(5 * np.eye(4))[3, 3] > 0.5

    def test_a_class_that_is_rare_anyway_leaves_the_others_their_offsets(self) -> None:
        logits = some_logits(500, 60)
        labels = drawn(2 * logits + np.linspace(0, 3, 60))
        assert np.bincount(labels, minlength=60).min() == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler = AutoScaling(n_folds=2).fit(logits, labels)
        left_out = {each["method"]: each["left_out"] for each in scaler.results_}
        assert "rows have class" in left_out["vector"]
        assert "rows have class" in left_out["matrix"]
        assert scaler.choice_.startswith("structured")

    @pytest.mark.parametrize("value", [0, 1])
    def test_a_label_of_several_is_never_or_always_given(self, value: int) -> None:
        rng = np.random.default_rng(0)
        logits = rng.normal(scale=3.0, size=(1000, 3))
        labels = rng.random(logits.shape) < expit(logits * [0.6, 1.5, 0.6])
        labels[:, 2] = value
        scaler = AutoScaling(multi_label=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.fit(logits, labels.astype(int))
        told = [str(each.message) for each in caught]
        assert any("the parameters of a value of label 2" in each for each in told)
        assert scaler.choice_ == "per_label_temperature"
        assert any("the temperature of label 2: " in each for each in told)
        low, high = scaler.predict_proba([[0, 0, -3.0], [0, 0, 3.0]])[:, 2]
        assert low < 0.4
        assert high > 0.6

    def test_a_note_of_the_command(self) -> None:
        logits, labels = self.rows(0)
        (note,) = Predictions(labels, logits=logits).fit_calibrator(AutoScaling())
        assert "the parameters of class 3" in note
