"""A map for each group, between one map for all and a map of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from hf_calib.scaling import (
    GroupedScaling,
    Scaler,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
)

SIZES = {"art": 2000, "biology": 400, "law": 2000, "rare": 20}
OFFSETS = {
    "art": [0, 0, 0],
    "biology": [1, 0, 0],
    "law": [0, 0, 1.5],
    "rare": [0, 1, 0],
}
SCALES = {"art": 0.5, "biology": 0.5, "law": 1.0, "rare": 0.5}


def draw(
    seed: int, sizes: dict[str, int] = SIZES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels and groups, whose true maps have the offsets and scales above."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(list(sizes), list(sizes.values()))
    logits = rng.normal(scale=2, size=(len(groups), 3))
    labels = (true_scores(logits, groups) + rng.gumbel(size=logits.shape)).argmax(
        axis=1
    )
    return logits, labels, groups


def true_scores(logits: np.ndarray, groups: np.ndarray) -> np.ndarray:
    names = groups.tolist()
    return logits * np.array([[SCALES[g]] for g in names]) + np.array(
        [OFFSETS[g] for g in names]
    )


@pytest.mark.parametrize(
    ("base", "own"),
    [
        ("temperature", TemperatureScaling),
        ("structured_vector", StructuredVectorScaling),
        ("vector", VectorScaling),
    ],
)
def test_the_common_map_is_the_one_of_all_rows(base: str, own: Any) -> None:
    logits, labels, groups = draw(0)
    scaler = GroupedScaling(base).fit(logits, labels, groups=groups)
    common = own().fit(logits, labels)
    np.testing.assert_allclose(
        scaler.predict_proba(logits), common.predict_proba(logits), atol=1e-12
    )
    unknown = scaler.predict_proba(logits[:5], groups=["?", "Law", "", "law ", "0"])
    np.testing.assert_array_equal(unknown, scaler.predict_proba(logits[:5]))


def test_each_groups_map_is_the_minimum_of_its_penalised_loss() -> None:
    logits, labels, groups = draw(0)
    scaler = GroupedScaling("temperature").fit(logits, labels, groups=groups)
    assert scaler.groups_ == sorted(SIZES)
    assert scaler.sizes_.tolist() == [SIZES[name] for name in scaler.groups_]
    penalty = float(scaler.choice_.removeprefix("penalty="))
    mapped = TemperatureScaling().fit(logits, labels).transform(logits)
    for name in scaler.groups_:
        own = groups == name
        n = int(own.sum())

        def loss(
            theta: np.ndarray,
            rows: np.ndarray = mapped[own],
            y: np.ndarray = labels[own],
            n: int = n,
        ) -> float:
            scores = rows * (1 + theta[:3]) + theta[3:]
            return float(
                -log_softmax(scores, axis=1)[np.arange(n), y].mean()
                + penalty * 3 / n * theta @ theta
            )

        found = minimize(loss, np.zeros(6), options={"gtol": 1e-9}).x
        wanted = softmax(mapped[own] * (1 + found[:3]) + found[3:], axis=1)
        ours = scaler.predict_proba(logits[own], groups=groups[own])
        np.testing.assert_allclose(ours, wanted, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_draws", "fewest"), [(3, 2), pytest.param(10, 8, marks=pytest.mark.deep)]
)
def test_groups_that_are_alike_get_one_map(n_draws: int, fewest: int) -> None:
    chosen = []
    for seed in range(n_draws):
        logits, labels = alike(seed, [0, 0, 0])
        chosen.append(
            GroupedScaling().fit(logits, labels, groups=np.arange(900) % 9).choice_
        )
    assert chosen.count("temperature, one map for all") >= fewest
    one = GroupedScaling().fit(logits, labels, groups=["all"] * 900)
    assert one.choice_ == "temperature, one map for all"
    wanted = TemperatureScaling().fit(logits, labels).predict_proba(logits)
    np.testing.assert_allclose(
        one.predict_proba(logits, groups=["all"] * 900), wanted, atol=1e-12
    )


def alike(seed: int, offsets: list[float]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2, size=(900, 3))
    return logits, (logits / 2 + offsets + rng.gumbel(size=logits.shape)).argmax(axis=1)


def test_masked_classes_stay_masked() -> None:
    logits, labels, groups = draw(0)
    masked = labels != 1
    logits[masked, 1] = -np.inf
    scaler = GroupedScaling().fit(logits, labels, groups=groups)
    assert np.isfinite(scaler.biases_).all()
    probs = scaler.predict_proba(logits, groups=groups)
    assert (probs[masked, 1] == 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize("base", ["temperature", "vector"])
def test_comes_back_bit_for_bit(base: str, tmp_path: Path) -> None:
    logits, labels, groups = draw(0)
    names = {"law": "é'\n\"<law>", "art": "", "biology": "-1", "rare": "  x"}
    groups = np.array([names[group] for group in groups])
    scaler = GroupedScaling(base).fit(logits, labels, groups=groups)
    scaler.save_pretrained(tmp_path)
    loaded = Scaler.from_pretrained(tmp_path)
    assert isinstance(loaded, GroupedScaling)
    assert (loaded.groups_, loaded.choice_, loaded.base) == (
        scaler.groups_,
        scaler.choice_,
        base,
    )
    ours, theirs = (
        each.predict_proba(logits, groups=groups) for each in (loaded, scaler)
    )
    assert ours.tobytes() == theirs.tobytes()


FIT: dict[str, tuple[dict[str, Any], str]] = {
    "a group too few": (
        {"groups": ["a"] * 3},
        r"groups to have shape \(4,\), got shape \(3,\)",
    ),
    "None": (
        {"groups": np.array(["a", None, "b", "c"], dtype=object)},
        "words or integers, got NoneType",
    ),
    "base": ({"base": "matrix"}, "base to be one of .*, got 'matrix'"),
    "folds": ({"n_folds": 1}, "n_folds to be at least 2, got 1"),
}


@pytest.mark.parametrize("case", FIT)
def test_bad_input(case: str) -> None:
    given, message = FIT[case]
    made = {
        key: given[key] for key in ("base", "n_folds", "random_state") if key in given
    }
    logits = given.get("logits", np.random.default_rng(0).normal(size=(4, 3)))
    with pytest.raises((ValueError, TypeError), match=message):
        GroupedScaling(**made).fit(
            logits,
            given.get("labels", [0, 1, 2, 0]),
            groups=given.get("groups", ["a", "a", "b", "b"]),
        )
