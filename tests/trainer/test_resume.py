"""A training that is killed and resumed ends as the one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainerState

from hf_calib import CalibrationTrainer
from hf_calib.losses import make_loss
from hf_calib.scaling import TemperatureScaling
from hf_calib.trainer.calibration_map import map_of_checkpoint
from hf_calib.trainer.saving import LOSS_STATE_NAME, load_loss_state, newest_checkpoint
from tests.helpers.gloo_pair import forked
from tests.helpers.tiny import (
    arguments,
    assert_same,
    sequences,
    tiny_bert,
    tiny_trainer,
    weights,
)

STEPS_OF_EPOCH, STEPS = 3, 6
BASE: dict[str, Any] = {
    "loss": "adafocal",
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 1}
BY_EPOCHS = {"save_steps": 3, "kill": 4}
QUICK: dict[str, dict[str, Any]] = {
    "amid the state": {**BY_STEPS, "kill": "state"},
    "every 2 steps": {"gamma_update_steps": 2, "gamma_update_samples": 16, **BY_EPOCHS},
}
SLOW: dict[str, dict[str, Any]] = {
    "by a schedule": {
        "gamma_update_schedule": {1: 2},
        "gradient_accumulation_steps": 2,
        **BY_EPOCHS,
    },
    "ece_ce, with a temperature": {
        **{**BY_STEPS, "eval_steps": 2, "kill": 5},
        **{"loss": "ece_ce", "calibration_strategy": "evaluate"},
    },
    "evaluated on start": {
        **BY_STEPS,
        "eval_steps": 3,
        "eval_on_start": True,
        "kill": 5,
    },
    "evaluated, no checkpoint of its own": {
        **BY_STEPS,
        "kill": 5,
        "calibration": False,
    },
    "each epoch, saved by epochs": {"save_strategy": "epoch", "kill": 4},
}
CASES = {**QUICK, **SLOW}


def make_trainer(folder: Path, case: dict[str, Any]) -> CalibrationTrainer:
    settings = {
        **BASE,
        **{k: v for k, v in case.items() if k not in ("kill", "calibration")},
    }
    model = tiny_bert(dropout=0.1)
    held_out = {"eval_dataset": sequences(model, 13, seed=3)}
    if case.get("calibration", True):
        held_out["calibration_dataset"] = sequences(model, 21, seed=2)
    rows = 4 * STEPS_OF_EPOCH * case.get("gradient_accumulation_steps", 1) - 1
    return CalibrationTrainer(
        model,
        arguments(folder, **settings),
        train_dataset=sequences(model, rows),
        **held_out,
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            die()


_save_state = TrainerState.save_to_json


def half_written(state: TrainerState, path: str) -> None:
    """Die amid the state of the second checkpoint."""
    _save_state(state, path)
    if state.global_step == 2 * BASE["save_steps"]:
        text = Path(path).read_text()
        Path(path).write_text(text[: len(text) // 2])
        die()


def train(
    folder: Path,
    case: dict[str, Any],
    *,
    kill: int | str | None = None,
    resume: bool = False,
) -> None:
    trainer = make_trainer(folder, case)
    if kill == "state":
        TrainerState.save_to_json = half_written  # type: ignore[method-assign]
    elif kill is not None:
        trainer.add_callback(DieAt(int(kill)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    timed = ("time", "per_second")
    torch.save(
        {
            "weights": weights(trainer.model),
            "table": dict(trainer.calibration_loss.named_buffers()),
            "temperature": trainer.temperature,
            "log": [
                {k: v for k, v in entry.items() if not k.endswith(timed)}
                for entry in trainer.state.log_history
                if "train_loss" not in entry  # the mean since the resumption
            ],
        },
        folder / "result.pt",
    )


def run(folder: Path, name: str) -> list[int]:
    """The case's training as it is meant to be, killed, and resumed; how each ended."""
    case, whole, broken = CASES[name], folder / "whole", folder / "broken"
    endings = []
    for train_it in (
        partial(train, whole, case),
        partial(train, broken, case, kill=case["kill"]),
        partial(train, broken, case, resume=True),
    ):
        if len(endings) == 2:
            shutil.copytree(broken, folder / "as_left")
        endings.append(os.waitstatus_to_exitcode(os.waitpid(forked(train_it), 0)[1]))
    return endings


ADAPTIVE = {"loss": "adafocal", "eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, which runs when it is first asked for."""
    folder = tmp_path_factory.mktemp("killed")
    train(folder / "first", {})  # what is imported late is then there for the forks

    @cache
    def of(name: str) -> Path:
        assert run(folder / name, name) == [0, -signal.SIGKILL, 0]
        return folder / name

    return of


def result(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_resumed_training_ends_as_the_uninterrupted_one(
    name: str, killed: Callable[[str], Path]
) -> None:
    whole, resumed = result(killed(name) / "whole"), result(killed(name) / "broken")
    if "gammas" in whole["table"]:  # else the test would show nothing
        assert not torch.equal(
            whole["table"]["gammas"], torch.ones(15, dtype=torch.float64)
        )
    assert_same(resumed["weights"], whole["weights"])
    assert_same(resumed["table"], whole["table"])
    assert resumed["temperature"] == whole["temperature"]
    assert [e for e in resumed["log"] if "loss" in e] == [
        e for e in whole["log"] if "loss" in e
    ]
    assert last_step(whole) == last_step(resumed) == STEPS
    if "on start" in name:
        # The stock Trainer evaluates anew on start.
        return
    assert resumed["log"] == whole["log"]


def last_step(found: dict[str, Any]) -> int:
    return found["log"][-1]["step"]


def test_a_checkpoint_cut_short_is_passed_over(killed: Callable[[str], Path]) -> None:
    left = killed("amid the state") / "as_left"
    assert sorted(path.name for path in left.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert newest_checkpoint(left, "adafocal") == str(left / "checkpoint-2")


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny_trainer(folder, **ADAPTIVE, **SAVED).train()
    return folder


@pytest.fixture
def checkpoint(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of the first of its two checkpoints, beside the second."""
    shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "checkpoint-2"


def rewrite(
    path: Path, *, metadata: dict[str, str] | None = None, **changes: torch.Tensor
) -> None:
    """Change a table, and what the file says about it."""
    with safe_open(path, "pt") as file:
        said = file.metadata()
    save_file(
        {**load_file(path), **changes}, path, said if metadata is None else metadata
    )


def other_shape(path: Path) -> None:
    rewrite(
        path, **{name: value[:3].clone() for name, value in load_file(path).items()}
    )


OTHERS = {"loss": "ada_dual_focal", "hyperparameters": "{}"}
REFUSED: dict[str, Any] = {
    rf"checkpoint-\d to hold {LOSS_STATE_NAME}, got no such file": Path.unlink,
    rf"{LOSS_STATE_NAME} to hold the table of loss 'adafocal' with .*shape": other_shape,
    "Unexpected key": partial(rewrite, bin_gaps=torch.zeros(15, dtype=torch.float64)),
    "got the table of loss 'ada_dual_focal' with {}; resume from another": partial(
        rewrite, metadata=OTHERS
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_table_is_refused(message: str, checkpoint: Path) -> None:
    REFUSED[message](checkpoint / LOSS_STATE_NAME)
    with pytest.raises(ValueError, match=message):
        load_loss_state(make_loss("adafocal"), checkpoint)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_kwargs": {"gamma_max": 5.0}}, "'gamma_max': 5.0.*'gamma_max': 20.0"),
        ({"loss": "calfocal"}, "'calfocal', .* of one with loss 'adafocal', {"),
        ({"loss": "focal"}, "'focal', {'gamma': 3.0}, got .* loss 'adafocal', {"),
        (
            {"class_weights": [1.0, 1.0, 1.0, 2.0]},
            "class_weights=1.0, 1.0, 1.0, 2.0, got .* one with loss 'adafocal', {",
        ),
    ],
)
def test_a_checkpoint_of_another_loss_is_refused(
    settings: dict[str, Any], message: str, checkpoint: Path
) -> None:
    trainer = tiny_trainer(checkpoint.parent, **{**ADAPTIVE, **SAVED, **settings})
    before = weights(trainer.model)
    way_out = "; start a new training with its weights: load the model from this folder"
    with pytest.raises(ValueError, match=f"{message}.*{way_out}"):
        trainer.train(resume_from_checkpoint=True)
    assert_same(weights(trainer.model), before)
    assert trainer.is_in_train is False


@pytest.fixture(scope="module")
def of_focal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a whole training, after which no step is left."""
    folder = tmp_path_factory.mktemp("focal")
    tiny_trainer(folder, **FOCAL).train()
    return folder / "checkpoint-4"


FOCAL = {
    "loss": "focal",
    "class_weights": [1.0, 0.1, 1.0, 2.0],
    **{"save_strategy": "steps", "save_steps": 4, "save_only_model": True},
}


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": "cross_entropy"},
        {"loss": "adafocal", "eval_strategy": "steps", "eval_steps": 1},
        {"loss_kwargs": {"gamma": 2.0}},
        {"class_weights": None},
        {"class_weights": [1.0, 0.1, 1.0, 3.0]},
    ],
)
def test_a_model_is_not_said_to_be_trained_with_another_loss(
    changed: dict[str, Any], of_focal: Path
) -> None:
    """Not even by a training without further steps, whose records have the loss of its arguments."""
    trainer = tiny_trainer(of_focal.parent, **{**FOCAL, **changed})
    message = (
        r"with loss 'focal', {'gamma': 3.0}, class_weights=1.0, 0.1.*; start a new"
    )
    for which in (True, str(of_focal)):
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=which)


def test_the_same_loss_and_checkpoints_that_do_not_say_theirs_are_resumed(
    of_focal: Path, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path / "same", **FOCAL)
    trainer.train(resume_from_checkpoint=str(of_focal))
    old = tmp_path / "checkpoint-4"
    shutil.copytree(of_focal, old)
    state = json.loads((old / "trainer_state.json").read_text())
    assert state["stateful_callbacks"].pop("CalibrationLoss")["loss"] == "focal"
    (old / "trainer_state.json").write_text(json.dumps(state))
    trainer = tiny_trainer(tmp_path, loss="cross_entropy")
    trainer.train(resume_from_checkpoint=str(old))
    assert trainer.state.global_step == 4


def test_a_checkpoint_with_a_calibrator_in_its_weights_is_not_resumed(
    of_focal: Path, tmp_path: Path
) -> None:
    """The weights of older versions were replaced by a calibrated copy that was saved to their folder."""
    replaced = tmp_path / "checkpoint-4"
    shutil.copytree(of_focal, replaced)
    trainer = tiny_trainer(tmp_path, **FOCAL)
    trainer.fit_temperature()
    trainer.save_calibrated_model(tmp_path / "calibrated")
    for name in ("config.json", "model.safetensors", "calibration.json"):
        shutil.copy(tmp_path / "calibrated" / name, replaced / name)
    message = "to hold the model as trained, got .*point-4, with a calibrator in its"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("form", ["a folder", "a link to itself"])
def test_a_calibrator_that_is_no_file_is_named(form: str, of_focal: Path) -> None:
    file = of_focal.with_name(form) / "calibration.json"
    if form == "a folder":
        file.mkdir(parents=True)
    else:
        file.parent.mkdir()
        file.symlink_to(file.name)
    with pytest.raises(ValueError, match=r"calibration.json to hold a fitted calibr"):
        map_of_checkpoint(file.parent, TemperatureScaling())


def test_nothing_to_resume_from_is_refused(tmp_path: Path) -> None:
    """In the words of the stock Trainer, which other programs may look for."""
    (tmp_path / "checkpoint-x").mkdir()
    ours = tiny_trainer(tmp_path)
    stock = Trainer(ours.model, ours.args, train_dataset=ours.train_dataset)
    for trainer in (stock, ours):
        message = "^No valid checkpoint found in output directory "
        with pytest.raises(ValueError, match=message + re.escape(f"({tmp_path})")):
            trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    (tmp_path / "file").touch()
    for name in ("checkpoint-99", "nowhere/checkpoint-99", "file"):
        path = tmp_path / name
        message = re.escape(f"got {path} (no such folder); resume from another")
        for given in (path, str(path)):
            with pytest.raises(ValueError, match=f"a complete checkpoint, {message}"):
                trainer.train(resume_from_checkpoint=given)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("given", [5, 0, 1.5, ["checkpoint-2"]])
def test_what_is_no_path_of_a_checkpoint_is_refused(given: Any, tmp_path: Path) -> None:
    message = re.escape(
        f"the path of a checkpoint, or True for the newest, got {given!r};"
    )
    with pytest.raises(TypeError, match=message):
        tiny_trainer(tmp_path).train(resume_from_checkpoint=given)


# ---- Incomplete checkpoints ----


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_another_kind(path: Path) -> None:
    path.write_text("[]")


INCOMPLETE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    f"{name}, {change.__name__}": (name, change, f"{name} cut short or damaged")
    for name in (
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        LOSS_STATE_NAME,
    )
    for change in (cut, emptied)
}
INCOMPLETE |= {
    "no state": ("trainer_state.json", Path.unlink, "trainer_state.json is missing"),
    "not a state": (
        "trainer_state.json",
        of_another_kind,
        "trainer_state.json cut short or damaged",
    ),
    "no optimizer": ("optimizer.pt", Path.unlink, "the optimizer's state is missing"),
    "no scheduler": ("scheduler.pt", Path.unlink, "scheduler.pt is missing"),
    "no weights": ("model.safetensors", Path.unlink, "the model's weights are missing"),
}


def of_the_state(**entries: Any) -> Callable[[Path], None]:
    """A change of some entries in a state."""

    def changed(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return changed


def without_entries(path: Path) -> None:
    path.write_text("{}")


STATES: dict[str, Callable[[Path], None]] = {
    "global_step: none": without_entries,
    "global_step: '3'": of_the_state(global_step="3"),
    "global_step: True": of_the_state(global_step=True),
    "global_step: -1": of_the_state(global_step=-1),
    "global_step: 4, above max_steps 1": of_the_state(max_steps=1),
    "global_step: 3, in the folder of step 4": of_the_state(global_step=3),
    "epoch: None": of_the_state(epoch=None),
    "log_history: {}": of_the_state(log_history={}),
    "log_history: [{'step': 1}, 7]": of_the_state(log_history=[{"step": 1}, 7]),
    "best_metric: 'low'": of_the_state(best_metric="low"),
    "stateful_callbacks: []": of_the_state(stateful_callbacks=[]),
    "stateful_callbacks: {}": of_the_state(stateful_callbacks={}),
    "stateful_callbacks: {'CalibrationLoss': {'loss': 3}, 'TrainerControl': {}}": of_the_state(
        stateful_callbacks={"CalibrationLoss": {"loss": 3}, "TrainerControl": {}}
    ),
    "epoch: nan": of_the_state(epoch=float("nan")),
    f"global_step: {10**30}": of_the_state(global_step=10**30),
    "log_history: [{'calibration_gap_00': 1.0}]": of_the_state(
        log_history=[{"calibration_gap_00": 1.0}]
    ),
    "unknown entries: steps": of_the_state(steps=3),
}
INCOMPLETE["no table"] = (
    LOSS_STATE_NAME,
    Path.unlink,
    f"{LOSS_STATE_NAME} is missing",
)
INCOMPLETE |= {
    found: ("trainer_state.json", change, f"trainer_state.json with {found}")
    for found, change in STATES.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logging_steps", "eval_steps", "save_steps"])
@pytest.mark.parametrize("steps", [0, -2, "2", None])
def test_intervals_of_a_state_that_cannot_be_counted_are_refused(
    name: str, steps: Any, checkpoint: Path
) -> None:
    of_the_state(**{name: steps})(checkpoint / "trainer_state.json")
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
    by_steps = {**ADAPTIVE, **SAVED, **settings, "eval_steps": 2}
    trainer = tiny_trainer(checkpoint.parent, **by_steps)
    message = f"trainer_state.json to hold a positive {name}, got {steps!r}; resume"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    # The numbers of what there is not are not read.
    none = dict.fromkeys(("eval_strategy", "logging_strategy", "save_strategy"), "no")
    unread = tiny_trainer(checkpoint.parent, **{**ADAPTIVE, **SAVED, **none})
    unread._resume_from = str(checkpoint)
    unread._set_up_training()


def test_a_state_too_large_to_read_is_not_read(checkpoint: Path) -> None:
    with (checkpoint / "trainer_state.json").open("r+b") as file:
        file.truncate(2**33)  # It takes no place on the disk.
    trainer = tiny_trainer(checkpoint.parent, **ADAPTIVE, **SAVED)
    with pytest.raises(ValueError, match=r"trainer_state.json of 8,589,934,592 bytes"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("case", INCOMPLETE)
def test_incomplete_checkpoints_are_skipped(case: str, checkpoint: Path) -> None:
    name, change, problem = INCOMPLETE[case]
    newer = checkpoint.with_name("checkpoint-4")
    change(newer / name)
    assert newest_checkpoint(checkpoint.parent, "adafocal") == str(checkpoint)
    trainer = tiny_trainer(checkpoint.parent, **ADAPTIVE, **SAVED)
    with pytest.raises(ValueError, match="resume_from_checkpoint to be a comp") as told:
        trainer.train(resume_from_checkpoint=str(newer))
    assert f"got {newer} ({problem}); resume from {checkpoint}, the" in str(told.value)
    change(checkpoint / name)
    assert newest_checkpoint(checkpoint.parent, "adafocal") is None
    with pytest.raises(ValueError, match=r"^No valid checkpoint found in") as told:
        trainer.train(resume_from_checkpoint=True)
    assert f"incomplete: checkpoint-4 ({problem}), checkpoint-2 (" in str(told.value)


def test_a_run_resumes_from_the_newest_complete_checkpoint_and_says_so(
    checkpoint: Path,
) -> None:
    cut(checkpoint.with_name("checkpoint-4") / "optimizer.pt")
    trainer = tiny_trainer(checkpoint.parent, **ADAPTIVE, **SAVED)
    message = (
        r"Incomplete: checkpoint-4 \(optimizer.pt cut .* resumes from .*point-2, the"
    )
    with pytest.warns(UserWarning, match=message):
        trainer.train(resume_from_checkpoint=True)
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == [1, 2, 3, 4]


def test_a_loss_without_a_table_needs_none(checkpoint: Path) -> None:
    newer = checkpoint.with_name("checkpoint-4")
    (newer / LOSS_STATE_NAME).unlink()
    assert newest_checkpoint(checkpoint.parent, "focal") == str(newer)


def test_checkpoints_are_ordered_by_their_steps(checkpoint: Path) -> None:
    for step in (9, 10):
        later = checkpoint.with_name(f"checkpoint-{step}")
        shutil.copytree(checkpoint, later)
        at_step = of_the_state(global_step=step, max_steps=step)
        at_step(later / "trainer_state.json")
    newest = checkpoint.with_name("checkpoint-10")
    assert newest_checkpoint(checkpoint.parent, "adafocal") == str(newest)
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-11-old"))
    checkpoint.with_name("checkpoint-12").write_text("a file")
    assert newest_checkpoint(checkpoint.parent, "adafocal") == str(newest)


def test_a_checkpoint_of_the_model_only_is_complete(tmp_path: Path) -> None:
    settings = {**SAVED, "save_only_model": True, "calibration_method": "none"}
    tiny_trainer(tmp_path, **settings).train()
    resumed = tiny_trainer(tmp_path, **settings, num_train_epochs=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8


def test_the_best_checkpoint_that_is_loaded_is_of_this_run(checkpoint: Path) -> None:
    """The stock Trainer can continue from our checkpoints; the extra file does not disturb it."""
    ours = tiny_trainer(checkpoint.parent, **ADAPTIVE, **SAVED)
    stock = Trainer(
        ours.model,
        ours.args,
        train_dataset=ours.train_dataset,
        eval_dataset=ours.eval_dataset,
    )
    stock.train(resume_from_checkpoint=str(checkpoint))
    assert stock.state.global_step == 4


def test_a_training_that_resumes_after_its_last_step_makes_up_for_the_update(
    tmp_path: Path,
) -> None:
    """The checkpoint of an epoch's last step was saved before the update at the epoch's end."""
    settings = {
        "loss": "adafocal",
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "no",
    }
    whole = tiny_trainer(tmp_path, **settings)
    with pytest.warns(UserWarning, match="The loss will never adapt"):
        whole.train()
    resumed = tiny_trainer(tmp_path, **settings)
    with pytest.warns(UserWarning, match="The loss will never adapt"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert not whole.calibration_loss.gammas.eq(1).all()
    assert_same(
        resumed.calibration_loss.state_dict(), whole.calibration_loss.state_dict()
    )
