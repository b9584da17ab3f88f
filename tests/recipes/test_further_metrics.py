"""The table of other errors and maps: means over the seeds of what the library measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from papers.sweep import ece_sweep
from scipy.special import softmax

from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import TemperatureScaling
from tests.helpers.studies import Task, write_study
from tests.recipes.test_recipes import run


def test_means_over_the_seeds_of_what_has_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task()
    sharp = [task.train(seed, sharpness=3) for seed in (0, 1)]
    cells = {
        ("sharp", 0): sharp[0],
        ("sharp", 1): sharp[1],
        ("flat", 0): task.train(0),
        ("flat", 1): None,
    }
    write_study(tmp_path / "study", cells)
    run("further_metrics.py", str(tmp_path / "study"))
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
    ]
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines
    ]
    found = {
        row[0]: dict(zip(header[1:], map(float, row[1:]), strict=True)) for row in rows
    }
    assert list(found) == ["flat", "sharp"]
    values = []
    for training in sharp:
        assert training.calibration is not None
        labels = training.test.labels
        fitted = TemperatureScaling().fit(
            training.calibration.logits, training.calibration.labels
        )
        before = softmax(training.test.logits.astype(float), axis=1)
        after = fitted.predict_proba(training.test.logits)
        values.append(
            [ece_sweep(before, labels), negative_log_likelihood(after, labels)]
        )
    shown = [found["sharp"]["ECE, sweep"], found["sharp"]["NLL after T"]]
    assert shown == pytest.approx(np.mean(values, axis=0), abs=6e-4)
