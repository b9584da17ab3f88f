"""The studies of training dynamics, on a few rows: they write what they say, and the numbers go together."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

pytestmark = pytest.mark.slow  # a dozen trainings
STUDIES = Path(__file__).parents[2] / "recipes" / "studies"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Posts of three groups, with headers, whose words say the group most of the time."""
    folder = tmp_path_factory.mktemp("posts")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 150)
    said = np.where(rng.random(150) < 0.8, labels, rng.integers(0, 3, 150))
    texts = [f"From: me\n\nword{word} and {rng.integers(9)} more" for word in said]
    for name, part in (("train", slice(0, 110)), ("test", slice(110, 150))):
        rows = {"text": texts[part], "label": labels[part].tolist()}
        Dataset.from_dict(rows).to_parquet(folder / f"{name}.parquet")
    return folder


def ran(name: str, data: Path, output: Path, **options: Any) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(name, STUDIES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    sizes = {"rows": 64, "validation": 40, "epochs": 3, "batch_size": 16, "vocab_size": 40, "max_length": 6}
    words = [word for key, value in {**sizes, **options}.items() for word in (f"--{key}", str(value))]
    study.main(["--data", str(data), "--output", str(output), "--seeds", "0", *words])
    return json.loads((output / f"{name}.json").read_text())


def test_the_overhead_is_counted_in_rows(data: Path, tmp_path: Path) -> None:
    runs = {run["setting"]: run for run in ran("overhead", data, tmp_path, epochs=2)["runs"]}
    beyond = {name: run["rows_beyond_the_evaluations"] for name, run in runs.items()}
    assert beyond["focal, fixed gamma"] == beyond["every epoch, at the evaluation"] == 0
    assert beyond["every epoch, a split of its own"] == 2 * 40
    assert beyond["every step, 250 rows"] == 8 * 40
    assert runs["every epoch, at the evaluation"]["updates"] == 2


def test_validation_and_training(data: Path, tmp_path: Path) -> None:
    found = ran("validation_and_training", data, tmp_path)
    assert [run["gamma"] for run in found["runs"]] == [0, 3, 4, 5]
    for run in found["runs"]:
        summary = found["summary"]["of_gamma"][str(run["gamma"])]
        assert summary["adaptive_ece"] == pytest.approx(run["adaptive_ece"][-1], abs=1e-4)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    names = ("gaps", "correspondence")
    assert pictures == {f"validation_and_training_{name}.png" for name in names}


@pytest.mark.parametrize(("name", "n_runs"), [("gamma_dynamics", 12), ("confidence_dynamics", 4)])
def test_the_longer_ones(name: str, n_runs: int, data: Path, tmp_path: Path) -> None:
    found = ran(name, data, tmp_path, epochs=5)
    assert len(found["runs"]) == n_runs
    assert len(list(tmp_path.glob("*.png"))) == (3 if name == "gamma_dynamics" else 4)
    assert list(tmp_path.glob("*.unfinished")) == []
