"""Saved reports that are read back: none with numbers that no report can have."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_calib.report import calibration_report, read_report
from tests.helpers.sampled import predictions

BIN, TEST = ("before", "bins", 0), ("before", "consistency_test")
METRICS = ("before", "metrics")
ECE = (*METRICS, "ece")


@cache
def written(kind: str = "plain") -> str:
    probs, labels = predictions(100, 3)
    weights = np.linspace(0.5, 1.5, 100) if kind == "weighted" else None
    if kind == "several labels":
        labels = np.eye(3, dtype=int)[labels]
        labels[0, 0] = -100
    report = calibration_report(
        probs, labels, calibrated=probs, sample_weight=weights, n_resamples=5
    )
    return json.dumps(report.to_dict())


@pytest.mark.parametrize("kind", ["plain", "weighted", "several labels"])
def test_every_kind_of_report_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(written(kind))
    assert read_report(path) == json.loads(written(kind))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*BIN, "count"), -5),
        ((*BIN, "count"), 5.5),
        ((*BIN, "count"), True),
        ((*BIN, "count"), "3"),
        ((*BIN, "count"), 10**6),
        ((*BIN, "confidence"), 2.0),
        ((*BIN, "confidence"), -1.0),
        ((*BIN, "accuracy"), 7.0),
        ((*BIN, "accuracy"), None),
        (("n_bins",), 1),
        (("n_bins",), 10**12),
        (("n_bins",), True),
        (("n_examples",), "many"),
        (("n_examples",), -1),
        (("name",), 5),
        (("verdict",), 5),
        ((*ECE, "value"), True),
        ((*ECE, "value"), "0.1"),
        ((*ECE, "low"), "0.1"),
        ((*ECE, "title"), 5),
        ((*ECE, "value"), 7.0),
        ((*ECE, "value"), -0.5),
        ((*ECE, "high"), 7.0),
        ((*ECE, "low"), 0.9),
        ((*ECE, "low"), None),
        ((*METRICS, "brier", "value"), 2.5),
        ((*METRICS, "nll", "value"), -1.0),
        ((*METRICS, "ece"), None),
        (("n_classes",), 0),
        ((*TEST, "p_value"), 5.0),
        ((*TEST, "p_value"), None),
        (TEST, None),
        ((*TEST, "expected"), "x"),
        (("before", "overall", "p_value"), "x"),
        (("before", "overall", "gap"), []),
        (("before", "overall"), "x"),
        ((*BIN, "lower"), "x"),
        ((*BIN, "p_value"), []),
        (("before", "classes"), "x"),
        (("confidence_level",), []),
        (("confidence_level",), None),
        (("confidence_level",), 2),
        (("n_resamples",), "x"),
        (("seed",), "x"),
        (("nll_change",), "x"),
        (("nll_change", "low"), "x"),
        (("diagnosis",), "x"),
        (("warnings",), [5]),
        (("slices",), "x"),
        (("about",), "x"),
        (("after",), []),
        (("before", "bins"), []),
    ],
)
def test_what_no_report_can_have_is_refused(
    place: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    record = json.loads(written())
    *folders, name = place
    inside = record
    for key in folders:
        inside = inside[key]
    inside[name] = value
    path = tmp_path / "report.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="expected the report to hold metrics and bin"):
        read_report(path)
