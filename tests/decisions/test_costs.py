"""Cost matrices: the least expected cost, and the saving with its interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib._errors import InputValueError
from hf_calib.decisions import CostRule
from tests.helpers.sampled import labels_by

COSTS = np.array([[0.0, 1.0, 4.0], [2.0, 0.0, 1.0], [9.0, 3.0, -1.0]])


def drawn(n: int = 3000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated probs (n, 3) and labels."""
    rng = np.random.default_rng(seed)
    probs = softmax(1.5 * rng.standard_normal((n, 3)), axis=1)
    return probs, labels_by(probs, rng)


def test_the_decision_of_least_expected_cost() -> None:
    probs, _ = drawn(200)
    wanted = [
        min(range(3), key=lambda d: sum(p[y] * COSTS[y, d] for y in range(3)))
        for p in probs
    ]
    np.testing.assert_array_equal(CostRule(COSTS).predict(probs), wanted)


def test_equal_costs_are_argmax_and_a_free_way_out_is_always_taken() -> None:
    probs, labels = drawn(200)
    np.testing.assert_array_equal(
        CostRule(1 - np.eye(3)).predict(probs), probs.argmax(axis=1)
    )
    rule = CostRule(np.hstack([1 - np.eye(3), np.full((3, 1), -1e-3)]))
    assert (rule.predict(probs) == -1).all()
    found = rule.measure(probs, labels)
    assert found["answered"].value == 0
    assert "accuracy" not in found
    assert found["cost"].value == pytest.approx(-1e-3)


def test_a_rule_keeps_its_costs_when_the_array_changes() -> None:
    """In a sweep over the cost of abstaining, one array is used for all rules."""
    costs = np.array([[0.0, 1.0, 0.1], [10.0, 0.0, 0.1]])
    cheap = CostRule(costs)
    costs[:, -1] = 0.9
    dear = CostRule(costs)
    probs = [[0.8, 0.2]]
    assert [cheap.predict(probs)[0], dear.predict(probs)[0]] == [-1, 1]
    assert np.asarray(cheap.options()["costs"])[0, -1] == 0.1


def test_savings_are_paired() -> None:
    probs, labels = drawn()
    rule = CostRule(COSTS).fit(probs, labels)
    found = rule.measure(probs, labels)
    paid = COSTS[labels, rule.predict(probs)]
    argmax = COSTS[labels, probs.argmax(axis=1)]
    assert found["cost"].value == pytest.approx(paid.mean())
    assert found["cost_argmax"].value == pytest.approx(argmax.mean())
    saving = found["saving"]
    assert saving.value == pytest.approx((argmax - paid).mean())
    error = (argmax - paid).std() / np.sqrt(len(labels))
    assert saving.low == pytest.approx(saving.value - 1.96 * error, abs=0.3 * error)
    assert saving.high == pytest.approx(saving.value + 1.96 * error, abs=0.3 * error)
    assert saving.low > 0


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            [[0, 1], [np.nan, 0]],
            r"finite and at most 1e\+12, got nan in row 1; give a forbidden",
        ),
        (
            [[0, 1, 1, 1], [1, 0, 1, 1]],
            r"\(C, C\) or \(C, C \+ 1\) with C at least 2, got shape \(2, 4\)",
        ),
        (
            [[0, 1e308], [1, 0]],
            r"got 1e\+308 in row 0; .*only the ratios of costs matter",
        ),
    ],
)
def test_costs_that_are_none(costs: object, message: str) -> None:
    with pytest.raises(InputValueError, match=message):
        CostRule(costs)  # type: ignore[arg-type]
