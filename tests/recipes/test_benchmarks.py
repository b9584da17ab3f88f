"""The benchmark of the rules of `AutoScaling` measures what `AutoScaling` does."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import AutoScaling
from tests.helpers.places import ROOT
from tests.helpers.sampled import sampled


@pytest.mark.parametrize("bias", [0.0, 2.0])
def test_the_rule_of_today_takes_the_choice_of_auto(
    bias: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "choice_rules", raising=False)
    import choice_rules

    logits, labels = sampled(400, 3, 2.0)
    logits = logits + bias * np.arange(3)
    test, test_labels = sampled(300, 3, 2.0, seed=1)
    test = test + bias * np.arange(3)
    losses, measure = choice_rules.candidates(logits, labels, test, test_labels)
    scaler = AutoScaling().fit(logits, labels)
    assert choice_rules.RULES[choice_rules.AUTO](losses) == scaler.choice_
    assert scaler.choice_.startswith("structured" if bias else "temperature")
    nll = negative_log_likelihood(scaler.predict_proba(test), test_labels)
    assert measure(scaler.choice_) == pytest.approx(nll, abs=1e-5)
