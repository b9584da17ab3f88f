"""A training that is killed and resumed ends as the one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer

from hf_calib import CalibrationTrainer
from hf_calib.trainer.checkpoint import LOSS_STATE_NAME, last_complete_checkpoint
from tests.helpers.killed_training import CASES, STEPS
from tests.helpers.tiny import assert_same, tiny_trainer, weights

ADAPTIVE = {"loss": "adafocal", "eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.killed_training", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return folder


def result(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_the_resumed_training_ends_as_the_uninterrupted_one(name: str, killed: Path) -> None:
    endings = json.loads((killed / "endings.json").read_text())
    assert endings[name] == [0, -signal.SIGKILL, 0]
    whole, resumed = result(killed / name / "whole"), result(killed / name / "broken")
    assert_same(resumed["weights"], whole["weights"])
    assert_same(resumed["table"], whole["table"])
    assert resumed["temperature"] == whole["temperature"]
    assert [e for e in resumed["log"] if "loss" in e] == [e for e in whole["log"] if "loss" in e]
    assert last_step(whole) == last_step(resumed) == STEPS
    if "on start" in name or "evaluated by epochs" in name:
        # The stock Trainer evaluates anew on start, and does not make up for an evaluation at the end of an
        # epoch (which would also have moved the random streams: that case is without dropout).
        return
    assert resumed["log"] == whole["log"]


def last_step(found: dict[str, Any]) -> int:
    return found["log"][-1]["step"]


def test_the_gammas_moved(killed: Path) -> None:
    for name in CASES:
        table = result(killed / name / "whole")["table"]
        if "gammas" in table:
            assert not torch.equal(table["gammas"], torch.ones(15, dtype=torch.float64)), name


@pytest.mark.parametrize("name", ["before the optimizer", "amid the table", "amid the state"])
def test_a_checkpoint_cut_short_is_passed_over(name: str, killed: Path) -> None:
    left = killed / name / "as_left"
    assert sorted(path.name for path in left.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    with pytest.warns(UserWarning, match="checkpoint-4 was not written to its end"):
        assert last_complete_checkpoint(left, 1) == str(left / "checkpoint-2")
    said = [
        message for message in result(killed / name / "broken")["warnings"] if "written to its end" in message
    ]
    assert len(said) == 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_trainer(tmp_path, **ADAPTIVE, **SAVED).train()
    return tmp_path / "checkpoint-2"


def damage_nothing_there(path: Path) -> None:
    path.unlink()


def damage_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_no_safetensors(path: Path) -> None:
    path.write_bytes(b"not a table")


def damage_other_shape(path: Path) -> None:
    save_file({name: value[:3].clone() for name, value in load_file(path).items()}, path)


def damage_other_loss(path: Path) -> None:
    save_file({"bin_gaps": torch.zeros(15, dtype=torch.float64)}, path)


@pytest.mark.parametrize(
    "damage",
    [damage_nothing_there, damage_truncated, damage_no_safetensors, damage_other_shape, damage_other_loss],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_table_is_refused_before_training(damage: Any, named: bool, checkpoint: Path) -> None:
    for path in checkpoint.parent.glob(f"checkpoint-*/{LOSS_STATE_NAME}"):
        damage(path)
    trainer = tiny_trainer(checkpoint.parent, **ADAPTIVE, **SAVED)
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=f"{LOSS_STATE_NAME}.*resume from another checkpoint"):
        trainer.train(resume_from_checkpoint=str(checkpoint) if named else True)
    assert_same(weights(trainer.model), before)


def test_a_checkpoint_of_another_number_of_bins_is_refused(checkpoint: Path) -> None:
    trainer = tiny_trainer(checkpoint.parent, loss_kwargs={"n_bins": 10}, **ADAPTIVE, **SAVED)
    with pytest.raises(ValueError, match="'n_bins': 10"):
        trainer.train(resume_from_checkpoint=True)


def test_a_fixed_loss_needs_no_table(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, loss="focal", **SAVED).train()
    assert not list(tmp_path.rglob(LOSS_STATE_NAME))
    tiny_trainer(tmp_path, loss="focal", **SAVED).train(resume_from_checkpoint=True)


def test_nothing_to_resume_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected output_dir to hold a complete checkpoint"):
        tiny_trainer(tmp_path / "nowhere").train(resume_from_checkpoint=True)


def test_the_best_checkpoint_that_is_loaded_is_of_this_run(checkpoint: Path) -> None:
    """The stock Trainer can continue from our checkpoints; the extra file does not disturb it."""
    ours = tiny_trainer(checkpoint.parent, **ADAPTIVE, **SAVED)
    stock = Trainer(ours.model, ours.args, train_dataset=ours.train_dataset, eval_dataset=ours.eval_dataset)
    stock.train(resume_from_checkpoint=str(checkpoint))
    assert stock.state.global_step == 4


def test_checkpoints_of_several_processes(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-7"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / "optimizer.pt").touch()
    (checkpoint / "rng_state_0.pth").touch()
    # The second process did not get to it.
    with (
        pytest.warns(UserWarning, match="not written to its end"),
        pytest.raises(ValueError, match="to hold a complete checkpoint"),
    ):
        last_complete_checkpoint(tmp_path, 2)
    (checkpoint / "rng_state_1.pth").touch()
    assert last_complete_checkpoint(tmp_path, 2) == str(checkpoint)
    assert last_complete_checkpoint(tmp_path, 1) == str(checkpoint)
    for path in checkpoint.glob("rng_state_*"):
        path.unlink()
    (checkpoint / "rng_state.pth").touch()  # of a training by one process, continued by four
    assert last_complete_checkpoint(tmp_path, 4) == str(checkpoint)


def test_save_model_writes_the_table_too(tmp_path: Path) -> None:
    trainer: CalibrationTrainer = tiny_trainer(tmp_path / "out", **ADAPTIVE)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / LOSS_STATE_NAME)
    assert_same(saved, dict(trainer.calibration_loss.named_buffers()))
    assert not list((tmp_path / "model").glob("*.partial"))
