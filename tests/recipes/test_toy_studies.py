"""The studies of toys as a user runs them, in small: what they write agrees with what the library says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contourpy import contour_generator
from PIL import Image

from hf_calib.analysis import confidence_regions, two_moons_posteriors
from tests.recipes.test_recipes import run


def study(name: str, output: Path, *arguments: str) -> dict[str, Any]:
    """Run a study; return its JSON, once all its pictures were seen to be whole."""
    run(f"studies/{name}.py", "--output", str(output), *arguments)
    pictures = sorted(output.glob(f"{name}*.png"))
    assert pictures
    for picture in pictures:
        with Image.open(picture) as image:
            image.verify()
    assert not list(output.glob(".*"))  # nothing unfinished
    record: dict[str, Any] = json.loads((output / f"{name}.json").read_text())
    assert {"settings", "seeds", "seconds"} <= set(record)
    return record


def intervals(record: Any) -> list[dict[str, float]]:
    """All intervals in a record, however deep."""
    if isinstance(record, dict):
        if set(record) == {"value", "low", "high"}:
            return [record]
        return [found for value in record.values() for found in intervals(value)]
    return [found for value in record for found in intervals(value)] if isinstance(record, list) else []


def test_five_gaussians(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--train-points", "400", "--test-points", "100", "--epochs", "1", "--hidden", "16")
    record = study("five_gaussians", tmp_path, "--seeds", "0", "1", *small)
    rows = record["results"]["drawn label, all runs"]
    assert list(rows)[:3] == ["focal", "dual focal", "generalised Brier"]
    for row in rows.values():
        assert row["correlation"]["value"] == pytest.approx(np.mean(row["by run"]))
        assert len(row["by run"]) == 2
    assert (rows["focal"]["paper"], rows["generalised Brier"]["paper"]) == (0.550, 0.664)
    assert record["the paper's order"] == (record["order"] == ["focal", "dual focal", "generalised Brier"])
    assert all(found["low"] <= found["value"] <= found["high"] for found in intervals(record))
    printed = capsys.readouterr().out
    assert "{value:.3f} [{low:.3f}, {high:.3f}]".format(**rows["dual focal"]["correlation"]) in printed


@pytest.mark.slow  # five pictures
def test_gradient_factors(tmp_path: Path) -> None:
    record = study("gradient_factors", tmp_path, "--resolution", "12")
    turning = record["inverse focal pushes the label down"]
    assert turning["first at p"] == pytest.approx(0.2785, abs=5e-5)
    assert turning["ranges"]["gamma 3.59"] is None
    low, high = turning["ranges"]["gamma 5"]
    assert low < turning["first at p"] < high
    regions = record["regions"]["dual focal, gamma 1, q 0.3"]
    assert regions == confidence_regions(1.0, rival=0.3)._asdict()
    moves = record["largest change of u and g while p_y stays"]
    assert moves["u: focal, gamma 2"] < 1e-12 < 0.1 < moves["u: Brier-weighted, gamma 2"]
    # The closed form and the search agree: dual focal is over-confident, focal is not.
    for way in ("minimisers over the simplex of three classes", "found on a grid, over the posteriors"):
        focal, dual = record[way].values()
        assert focal["share over-confident"] == 0
        assert dual["share over-confident"] > 0.4


def test_decision_boundary(tmp_path: Path) -> None:
    small = ("--train-points", "200", "--test-points", "300", "--epochs", "100")
    record = study("decision_boundary", tmp_path, "--seeds", "0", "1", *small)
    focal, fcl = (record["results"][name] for name in list(record["results"])[1:])
    # With so large a gamma the focal loss stays near 1/2, which the Brier term mends.
    assert focal["ECE"]["low"] > fcl["ECE"]["value"]
    assert focal["slope on the boundary"]["value"] < fcl["slope on the boundary"]["value"]
    assert record["truth"]["true calibration error"] == 0
    # The line between the moons, measured on contours.
    across, up = np.linspace(-1.7, 2.7, 80), np.linspace(-1.2, 1.7, 80)
    grid = np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)
    truth = two_moons_posteriors(grid)[:, 0].reshape(80, 80)
    lines = contour_generator(across, up, truth).lines(0.5)
    length = sum(np.linalg.norm(np.diff(line, axis=0), axis=1).sum() for line in lines)
    assert record["truth"]["boundary length"] == pytest.approx(length, rel=0.02)


@pytest.mark.slow
def test_norms_and_entropies(tmp_path: Path, shared_data: Path) -> None:
    rows = ("--train-rows", "300", "--calibration-rows", "200", "--test-rows", "300")
    weights = ("--orders", "1", "2", "--norm-weights", "0.01", "0.3", "--entropy-weights", "1")
    record = study(
        "norms_and_entropies",
        tmp_path,
        *("--data", str(shared_data / "mnist"), "--seeds", "0", "1", "--epochs", "6", *rows, *weights),
    )
    found = {(row["penalty"], row["weight"]): row for row in record["results"]}
    plain = found["cross entropy", 0.0]
    for penalty in ("L1 norm", "L2 norm"):
        heavy, light = found[penalty, 0.3], found[penalty, 0.01]
        key = f"mean {penalty}"
        assert heavy[key]["value"] < light[key]["value"] < plain[key]["value"]
    assert found["entropy", 1.0]["mean entropy"]["value"] > plain["mean entropy"]["value"]
    change = found["L1 norm", 0.3]["ECE minus cross entropy's"]["value"]
    assert change == pytest.approx(found["L1 norm", 0.3]["ECE"]["value"] - plain["ECE"]["value"])
