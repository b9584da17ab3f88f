"""`compare` from Python: real trainings, resumed to the same bits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_calib import CalibrationTrainer
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.study import compare
from tests.helpers.tiny import arguments, sequences, tiny_bert

SETS = {
    name: sequences(tiny_bert(), n, seed=i)
    for i, (name, n) in enumerate({"train": 16, "cal": 60, "test": 80}.items())
}


class StopAt(TrainerCallback):
    """Interrupts a training, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def make_trainer(
    loss: str, seed: int, *callbacks: TrainerCallback, **overrides: Any
) -> CalibrationTrainer:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, **overrides}
    return CalibrationTrainer(
        tiny_bert(seed=seed, dropout=0.1),
        arguments("unused", loss=loss, seed=seed, **settings),
        train_dataset=SETS["train"],
        calibration_dataset=SETS["cal"],
        eval_dataset=SETS["cal"],
        callbacks=list(callbacks),
    )


def predictions(study: str) -> dict[str, bytes]:
    """By cell: the logits of its test rows."""
    files = sorted(Path(study).glob("cells/*/predictions.safetensors"))
    return {
        path.parent.name: TrainingPredictions.load(path).test.logits.tobytes()
        for path in files
    }


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The evaluation split is also")
def test_an_interrupted_study_goes_on_to_the_same_bits(
    in_an_empty_folder: Path,
) -> None:
    settings: dict[str, Any] = {
        "losses": ["adafocal"],
        "seeds": [1],
        "methods": ["temperature"],
    }
    settings["test_dataset"] = SETS["test"]
    whole = compare(make_trainer, output="whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        compare(
            lambda loss, seed: make_trainer(loss, seed, StopAt(5)),
            output="cut",
            **settings,
        )
    cell = next(Path("cut/cells").iterdir())
    assert (cell / "checkpoint-4").is_dir()
    resumed = compare(make_trainer, output="cut", **settings)
    assert predictions("cut") == predictions("whole") != {}
    assert resumed.results().equals(whole.results())
    assert resumed.seeds == (1,)
    assert not resumed.missing
    assert not list(Path("cut").glob("cells/*/checkpoint-*"))
    assert {
        "report.md",
        "report.html",
        "report.json",
        "results.csv",
        "cells",
        "study.json",
    } == {path.name for path in Path("cut").iterdir()}
    compare(
        lambda loss, seed: make_trainer(loss, seed, StopAt(1)), output="cut", **settings
    )  # trains nothing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The evaluation split is also")
def test_a_training_that_fails_is_reported_with_its_error(
    in_an_empty_folder: Path,
) -> None:
    class Fails(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            if args.loss == "focal":
                raise RuntimeError("the disk is on fire")

    results = compare(
        lambda loss, seed: make_trainer(loss, seed, Fails()),
        losses=["focal", "cross_entropy"],
        seeds=[3],
        grid={"gamma": [2.0]},
        methods=["temperature"],
        test_dataset=SETS["test"],
        output="study",
        keep_models=False,
    )
    assert results.missing == {
        ("focal gamma=2", 3): "RuntimeError: the disk is on fire"
    }
    (log,) = Path("study").glob("cells/focal*/log.txt")
    assert "Traceback" in log.read_text()
    assert not list(Path("study").glob("cells/*/calibrated"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": []}, "expected seeds to be different whole numbers"),
        ({"seeds": [1, 1]}, "expected seeds to be different whole numbers"),
        ({"methods": ["temprature"]}, "got 'temprature'; did you mean 'temperature'"),
        ({"losses": ["focl"]}, "did you mean 'focal'"),
        (
            {"variance": "pool"},
            "expected variance to be one of 'own', 'pooled', got 'pool'",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_trainer_is_made(
    in_an_empty_folder: Path, change: dict[str, Any], message: str
) -> None:
    settings: dict[str, Any] = {
        "losses": ["focal"],
        "seeds": [0],
        "test_dataset": SETS["test"],
        **change,
    }
    with pytest.raises(ValueError, match=message):
        compare(lambda loss, seed: pytest.fail("made"), output="study", **settings)
    assert not Path("study").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda loss, seed: make_trainer("focal", seed),
            "loss='focal', seed=0 for .'cross_entropy', 0.",
        ),
        (
            lambda loss, seed: make_trainer(loss, 5),
            "write CalibrationTrainingArguments.loss=loss, seed=seed",
        ),
        (
            lambda loss, seed: make_trainer(loss, seed).train,
            "make_trainer to return a CalibrationTrainer",
        ),
    ],
)
def test_a_make_trainer_that_ignores_loss_or_seed_is_refused(
    in_an_empty_folder: Path, make: Any, message: str
) -> None:
    settings: dict[str, Any] = {
        "losses": ["cross_entropy"],
        "seeds": [0],
        "test_dataset": SETS["test"],
    }
    with pytest.raises((ValueError, TypeError), match=message):
        compare(make, output="study", **settings)
