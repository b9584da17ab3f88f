"""The studies of gaps and gradients, on a few rows: they write what they say, and the numbers go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from tests.recipes.test_recipes import run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Posts of three groups, with headers, whose words say the group most of the time."""
    folder = tmp_path_factory.mktemp("posts")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 200)
    said = np.where(rng.random(200) < 0.8, labels, rng.integers(0, 3, 200))
    texts = [f"From: me\n\nword{word} and {rng.integers(9)} more" for word in said]
    for name, part in (("train", slice(0, 150)), ("test", slice(150, 200))):
        rows = {"text": texts[part], "label": labels[part].tolist()}
        Dataset.from_dict(rows).to_parquet(folder / f"{name}.parquet")
    return folder


def study(name: str, data: Path, output: Path, *arguments: str) -> dict[str, Any]:
    """Run a study; return its JSON, once all its figures were seen to be whole and nothing unfinished is left."""
    run(f"studies/{name}.py", "--data", str(data), "--output", str(output), *arguments)
    figures = sorted(output.glob("*.png"))
    assert figures
    for figure in figures:
        with Image.open(figure) as image:
            image.verify()
    assert [path.name for path in output.iterdir() if path.suffix != ".png"] == [f"{name}.json"]
    record: dict[str, Any] = json.loads((output / f"{name}.json").read_text())
    assert str(data) not in json.dumps(record)
    return record


def test_smooth_calibration(data: Path, tmp_path: Path) -> None:
    small = ("--seeds", "0", "--largest", "300", "--largest-program", "100")
    record = study("smooth_calibration", data, tmp_path, *small)
    assert record["samples_within_the_bounds"] == record["samples"] == len(record["points"])
    assert record["largest_difference_to_the_program"] < 1e-9
    assert [row["rows"] for row in record["times"]] == [100, 300]


@pytest.mark.slow
def test_last_layer_gradients(data: Path, tmp_path: Path) -> None:
    record = study("last_layer_gradients", data, tmp_path, "--seeds", "0", "--epochs", "4")
    for row in record["summaries"]:
        if row["loss"] in ("cross entropy", "BSCE-GRA, gamma 2"):  # a function of the Brier score
            assert row["logits_spearman"] == pytest.approx(1, abs=1e-9)
            assert row["logits_spread_in_decades"] < 1e-6
    assert {row["epoch"] for row in record["summaries"]} == {1, 2, 3, 4}
    assert len(record["results"]) == 4 * 4


@pytest.mark.slow
def test_post_processing_gap(data: Path, tmp_path: Path) -> None:
    grid = ("--gammas", "0", "3", "--lambdas", "0", "2")
    record = study("post_processing_gap", data, tmp_path, *grid, "--epochs", "3")
    assert [(row["gamma"], row["lambda"]) for row in record["results"]] == [(0, 0), (0, 2), (3, 0), (3, 2)]
    for row in record["results"]:
        smooth = row["smooth_calibration_error_dual"]
        assert smooth**2 - 1e-9 <= row["gap_over_updates"] <= 2 * smooth + 1e-9
        assert row["gap_over_maps"] >= 0
        assert len(row["nll_by_epoch"]) == 3
