"""The choice of an epoch before and after the temperature: the page's table, and a run of tiny rows."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
from best_epoch import CRITERIA, MEASURED, table

from tests.helpers.places import ROOT
from tests.recipes.test_recipes import SHORT, run


def test_the_table_of_the_page_is_that_of_the_results() -> None:
    results = pandas.read_csv(ROOT / "recipes" / "results" / "best_epoch.csv")
    page = (ROOT / "docs" / "guides" / "best_epoch.md").read_text()
    assert table(results) in page


@pytest.mark.slow
def test_a_run_adds_its_epochs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": f"w{i} w{i % 3} w{i % 3}", "label": "abc"[i % 3]} for i in range(60)
    ]
    for name in ("train.csv", "test.csv"):
        pandas.DataFrame(rows).to_csv(name, index=False)
    own = [
        "--train_file",
        "train.csv",
        "--test_file",
        "test.csv",
        "--calibration_size",
        "0.4",
    ]
    own += [
        "--eval_strategy",
        "epoch",
        "--calibration_strategy",
        "evaluate",
        "--save_strategy",
        "no",
    ]
    for seed in ("0", "1", "0"):
        run(
            "best_epoch.py",
            *SHORT,
            *own,
            "--output_dir",
            "out",
            "--num_train_epochs",
            "2",
            "--seed",
            seed,
        )
    results = pandas.read_csv("best_epoch.csv")
    assert results[["seed", "epoch"]].to_numpy().tolist() == [
        [0, 1],
        [0, 2],
        [1, 1],
        [1, 2],
    ]
    assert list(results.columns) == ["seed", "epoch", *CRITERIA, *MEASURED]
