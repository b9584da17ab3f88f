"""The grid of a study: which trainings there are, and when two are the same."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_calib.commands.compare_losses import parse_grid
from hf_calib.study.launch import for_shell
from hf_calib.study.plan import Cell, given, resolved, variants
from tests.helpers.places import ROOT

RECIPE = ROOT / "recipes" / "text_classification.py"


def key(
    tmp_path: Path,
    *words: str,
    config: str = "learning_rate: 2e-5\nbf16: true\n",
    loss: str = "focal",
) -> str:
    (tmp_path / "c.yaml").write_text(config)
    (variant,) = variants([loss], {}, None)
    return Cell(
        variant, 0, resolved("recipe.py", [tmp_path / "c.yaml"], words, variant)
    ).key


def test_losses_by_name_by_file_and_by_the_name_of_a_recipes_file(
    tmp_path: Path,
) -> None:
    own, keys = tmp_path / "mine.yaml", []
    for schedule in ("{25: 100, 40: 1}", "{25: 100, 30: 1}"):
        own.write_text(
            f"loss: adafocal\nloss_kwargs: {{n_bins: 5}}\ngamma_update_schedule: {schedule}\n"
        )
        found = variants(
            ["cross_entropy", str(own), "adafocal_every_10_steps"], {}, RECIPE
        )
        keys.append(Cell(found[1], 0, resolved("recipe.py", [], [], found[1])).key)
    assert keys[0] != keys[1]
    assert [v.label for v in found] == [
        "cross_entropy",
        "mine",
        "adafocal_every_10_steps",
    ]
    assert [v.loss for v in found] == ["cross_entropy", "adafocal", "adafocal"]
    assert found[1].hyperparameters == {"n_bins": 5}
    assert (found[1].config, found[0].config) == (own, None)
    name = "gamma_update_schedule"
    assert resolved("r.py", [], [], found[1])[name] == {"25": 100, "30": 1}
    assert resolved("r.py", [], [f"--{name}", "{}"], found[1])[name] == "{}"
    own.write_text(
        "loss: focal\nloss_kwargs: {gamma: 2}\n"
    )  # nothing that the script needs to know
    assert variants([str(own)], {}, None)[0].config is None


def test_each_loss_takes_the_hyperparameters_of_the_grid_that_it_has() -> None:
    grid = parse_grid(["gamma=1,2.0", "brier_weight=0.5"])
    found = variants(["cross_entropy", "focal", "focal_calibration"], grid, None)
    both = [f"focal_calibration gamma={gamma} brier_weight=0.5" for gamma in (1, 2)]
    assert [v.label for v in found] == [
        "cross_entropy",
        "focal gamma=1",
        "focal gamma=2",
        *both,
    ]
    assert found[-1].hyperparameters == {"gamma": 2, "brier_weight": 0.5}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: variants([], {}, RECIPE),
            "expected losses to name at least one loss, got none",
        ),
        (
            lambda: variants(["focl"], {}, RECIPE),
            "or YAML files, got 'focl'; did you mean 'focal'?",
        ),
        (
            lambda: variants(["focal"], {"gama": [1]}, RECIPE),
            "got 'gama'; did you mean 'gamma'",
        ),
        (
            lambda: variants(["focal", "focal"], {}, RECIPE),
            "expected losses to differ, got 'focal' twice",
        ),
        (
            lambda: given(["--loss", "focal"]),
            "this argument to the study, got --loss; list it in",
        ),
        (lambda: given(["--loss-kwargs", "{}"]), "got --loss_kwargs; use --grid"),
        (
            lambda: given(["--resume", "x"]),
            "got --resume; leave it out: finished runs are skipped",
        ),
        (lambda: parse_grid(["gamma="]), "expected --grid to be name=value,value"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    refused: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        refused()


def test_the_key_is_that_of_what_is_trained(tmp_path: Path) -> None:
    first = key(tmp_path)
    explicit = tmp_path / "focal.yaml"
    explicit.write_text("loss: focal\nloss_kwargs: {gamma: 3}\n")
    assert first == key(tmp_path, "--report_to", "none", "--run_name", "mine")
    assert first == key(
        tmp_path, "--learning_rate=2e-5", config="learning_rate: 1\nbf16: true\n"
    )
    assert first == key(
        tmp_path, "--bf16", "true", "--learning_rate", "2e-5", config="{}"
    )
    assert first != key(tmp_path, "--learning_rate", "3e-5")
    assert first != key(tmp_path, loss="dual_focal")
    assert first == key(tmp_path, loss=str(explicit))
    assert first != key(tmp_path, "--seed_of_something", "1")
    assert key(tmp_path, "--learning-rate=3e-5") == key(
        tmp_path, "--learning_rate", "3e-5"
    )


def test_of_lists_of_files_and_of_folders_the_content_counts(tmp_path: Path) -> None:
    a, b, model = tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "model"
    model.mkdir()
    for path in (a, b, model / "model.safetensors"):
        path.write_text("1")

    def found(folder: Path = model) -> dict[str, object]:
        return resolved(
            "s.py", [], ["--train_file", str(a), str(b), "--model", str(folder)]
        )

    first = found()
    shutil.copytree(model, tmp_path / "moved")  # with the times of now
    assert found(tmp_path / "moved") == first
    b.write_text("2")
    second = found()
    assert second["train_file"] != first["train_file"]
    (model / "model.safetensors").write_text("2")
    assert found()["model"] != second["model"]


def test_secrets_are_in_no_key_and_no_line(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("env: {WANDB_API_KEY: hf_secret, A: 1}\nhub_token: hf_secret\n")
    words = ["--hub_token", "hf_secret", "--api-key=hf_secret", "--x", "y"]
    assert resolved("s.py", [config], words) == {
        "script": "s.py",
        "env": {"A": 1},
        "x": "y",
    }
    assert "hf_secret" not in for_shell(words)
