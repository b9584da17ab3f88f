"""The tables with a row per run, from what a report's own sections write today."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from hf_calib.report import calibration_report
from tests.recipes.test_recipes import run
from tests.report.test_sections import elsewhere, entities


def test_every_table_also_of_numbers_without_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entity, outside = entities().entities, elsewhere().out_of_distribution
    assert entity is not None
    cell = tmp_path / "runs" / "focal-seed3"
    logits = np.random.default_rng(0).normal(size=(60, 3))
    labels = (np.random.default_rng(1).random((60, 3)) < expit(logits)).astype(int)
    several = calibration_report(expit(logits), labels, n_resamples=20)
    several.save(cell / "report")
    record = {
        "seed": 3,
        "metrics": {},
        "entities": entity.to_dict(),
        "out_of_distribution": [each.to_dict() for each in outside],
    }
    (cell / "results.json").write_text(json.dumps(record))
    run("training_tables.py", str(tmp_path))
    printed = capsys.readouterr().out
    f1, error = entity.before["f1"], entity.before["ece_product"]
    shown = f"| {f1.value:.3f} [{f1.low:.3f}, {f1.high:.3f}] | {error.value:.3f} |"
    assert f"| focal | 3 {shown}" in printed
    uncalibrated = entity.to_dict() | {"after": None}
    (cell / "results.json").write_text(json.dumps({**record, "entities": uncalibrated}))
    run("training_tables.py", str(tmp_path))
    assert f"| focal | 3 {shown}" in capsys.readouterr().out
    assert f"| {several.before.metrics['macro_ece'].value:.3f} |" in printed
