"""The benchmarks measure what the library does: the choice of `AutoScaling`, and the losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.testing import assert_close

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


@pytest.fixture
def of_losses(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    import losses

    return losses


def test_losses_by_hand_are_those_that_they_are_compared_with(
    of_losses: ModuleType,
) -> None:
    logits, labels = map(torch.from_numpy, sampled(40, 3, 2.0))
    logits = logits.double()
    names = [*of_losses.BY_HAND, "adafocal"]
    cases = of_losses.make_cases(names, [], 3, "cpu")
    for name in names:
        by_hand = cases[name, "by hand"].loss(logits, labels)
        for kind in ("definition", "plain"):
            with cases[name, kind].context():
                assert_close(cases[name, kind].loss(logits, labels), by_hand)


def test_a_table_of_the_losses(
    of_losses: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(of_losses, "LEAST_SECONDS", 0)
    file = tmp_path / "losses.json"
    arguments = ["--shapes", "32x4", "--rounds", "1", "--dtypes", "float32"]
    arguments += ["--losses", "cross_entropy", "focal", "power"]
    of_losses.main([*arguments, "--output", str(file)])
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("time / F.cross_entropy"))
    assert header.split()[-4:] == ["by", "hand", "definition", "plain"]
    shown = next(line for line in lines if line.startswith("power"))
    assert shown.split()[1] == "-"
    assert all(float(cell) > 0 for cell in shown.split()[2:])
    records = json.loads(file.read_text())
    assert records[0]["loss"] == "F.cross_entropy"
    assert {each["loss"] for each in records if each["kind"] == "torch"} == {
        "F.cross_entropy",
        "hand focal",
    }
    assert all(each["ms"] > 0 and each["peak"] > 0 for each in records)
