"""One training from start to report, where something goes wrong and where nothing does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_calib.cards.card import write_card
from hf_calib.experiments import train_and_report
from hf_calib.losses import make_loss
from tests.helpers.reports import quick_report  # noqa: F401
from tests.helpers.tiny import assert_same, sequences, tiny_bert, tiny_trainer, weights


def test_a_model_that_diverged_leaves_numbers_and_weights(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, loss="focal", learning_rate=0.0)
    with torch.no_grad():
        trainer.model.classifier.bias[0] = math.nan
    with (
        pytest.warns(UserWarning, match="Temperature scaling was not fitted"),
        pytest.warns(UserWarning, match="has no calibration metrics"),
        pytest.warns(UserWarning, match="There is no report on them"),
    ):
        metrics = train_and_report(trainer, trainer.eval_dataset)
    assert math.isnan(metrics["test_ece"])
    text = (tmp_path / "results.json").read_text()
    assert "NaN" not in text
    results = json.loads(text, parse_constant=pytest.fail)
    assert results["metrics"]["test_ece"] is None
    assert results["hyperparameters"] == {"gamma": 3.0}
    saved = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "uncalibrated"
    )
    assert_same(weights(saved), weights(trainer.model))
    assert not (tmp_path / "report").exists()


@pytest.mark.filterwarnings("ignore")  # The test before this one has them.
def test_results_have_no_number_for_an_infinite_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, loss="focal", learning_rate=0.0)
    with torch.no_grad():
        trainer.model.classifier.bias[0] = -math.inf
    metrics = train_and_report(trainer, trainer.eval_dataset)
    assert metrics["test_nll"] == math.inf
    text = (tmp_path / "results.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)["metrics"]
    assert found["test_nll"] is None
    assert found["test_ece"] == metrics["test_ece"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_a_second_run_leaves_nothing_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise models and figures of two runs are together, and are said to be of one."""
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    first = tiny_trainer(tmp_path, loss="adafocal", **settings)
    train_and_report(first, first.eval_dataset)
    of_both = ["predictions.safetensors", "report", "results.json"]
    of_the_first = ["calibrated", "gammas.png", *of_both]
    assert names_in(tmp_path) == of_the_first
    said = f"written to {tmp_path}: {', '.join(of_the_first)}\n"
    assert capsys.readouterr().out.endswith(said)

    (tmp_path / "report" / "of_the_first.png").touch()
    (tmp_path / "notes.txt").write_text("of the user")
    second = tiny_trainer(tmp_path, calibration_method="none")
    train_and_report(second, second.eval_dataset)
    of_the_second = [*of_both, "uncalibrated"]
    assert names_in(tmp_path) == sorted(["notes.txt", *of_the_second])
    assert not (tmp_path / "report" / "of_the_first.png").exists()
    said = f"written to {tmp_path}: {', '.join(of_the_second)}\n"
    assert capsys.readouterr().out.endswith(said)


def test_two_checkpoints_to_go_on_from_are_refused(tmp_path: Path) -> None:
    named = str(tmp_path / "checkpoint-4")
    trainer = tiny_trainer(tmp_path, resume_from_checkpoint=named)
    message = r"either resume or args.resume_from_checkpoint to be given, got True and "
    with pytest.raises(ValueError, match=message):
        train_and_report(trainer, trainer.eval_dataset, resume=True)
    assert trainer.state.global_step == 0


@pytest.mark.usefixtures("quick_report")
def test_a_run_that_goes_on_counts_its_own_steps(tmp_path: Path) -> None:
    steps: Any = {"save_strategy": "steps", "save_steps": 2}
    tiny_trainer(tmp_path, max_steps=2, **steps).train()
    trainer = tiny_trainer(tmp_path, max_steps=3, calibration_method="none", **steps)
    train_and_report(trainer, trainer.eval_dataset, resume=True)
    training = json.loads((tmp_path / "results.json").read_text())["training"]
    assert (training["steps"], training["resumed"]) == (1, True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["calibrated", "uncalibrated"])
def test_a_model_that_the_run_would_replace_is_not_trained(
    name: str, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    (tmp_path / name).mkdir()
    trainer.originals = {str(tmp_path / name)}
    with pytest.raises(
        ValueError, match=r"another folder than the model's, got .*; na"
    ):
        train_and_report(trainer, trainer.eval_dataset)
    assert trainer.state.global_step == 0


@pytest.mark.slow
def test_hyperparameters_of_several_kinds_reach_every_file(tmp_path: Path) -> None:
    """Checkpoints, results, the model's record and its card: strict JSON, from which the loss can be made again."""
    loss_kwargs: Any = '{"gamma_max": Infinity, "n_bins": 3}'
    settings = {
        "loss": "adafocal",
        "loss_kwargs": loss_kwargs,
        "save_strategy": "epoch",
        "num_train_epochs": 2,
    }
    tiny_trainer(tmp_path, calibration_method="none", **settings).train()
    (tmp_path / "checkpoint-8").rename(tmp_path / "later")
    trainer = tiny_trainer(tmp_path, **settings)
    assert (
        json.loads(trainer.args.to_json_string(), parse_constant=pytest.fail)["loss"]
        == "adafocal"
    )
    train_and_report(trainer, trainer.eval_dataset, resume=True)
    write_card(tmp_path / "calibrated", repo_id="me/x", license="mit")
    card = (tmp_path / "calibrated" / "README.md").read_text().replace("\\", "")
    assert "update_rate=1.0, gamma_init=1.0, gamma_max=inf" in card
    found = [path for path in tmp_path.rglob("*.json") if "later" not in path.parts]
    names = {path.name for path in found}
    assert {
        "results.json",
        "trainer_state.json",
        "calibration.json",
        "config.json",
    } <= names
    for path in found:
        json.loads(path.read_text(), parse_constant=pytest.fail)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["training"]["steps"], results["training"]["resumed"]) == (
        4,
        True,
    )  # its own steps
    again = make_loss(results["loss"], **results["hyperparameters"])
    assert again.hyperparameters == trainer.calibration_loss.hyperparameters


def test_predictions_that_would_have_no_logits_are_refused_before_the_training(
    tmp_path: Path,
) -> None:
    trainer, rows = (
        tiny_trainer(tmp_path, prediction_loss_only=True),
        sequences(tiny_bert(), 8),
    )
    message = r"prediction_loss_only to be off with elsewhere, whose .*, got True; leave it out"
    with pytest.raises(ValueError, match=message):
        train_and_report(trainer, rows, elsewhere={"noise": rows})
    assert trainer.state.global_step == 0


@pytest.mark.slow
def test_the_trainer_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = tiny_trainer(
        tmp_path, prediction_loss_only=True, calibration_method="matrix"
    )
    train_and_report(trainer, sequences(tiny_bert(), 30, seed=5))
    assert trainer.compute_metrics is None
    assert trainer.preprocess_logits_for_metrics is None
    assert trainer.args.prediction_loss_only is True
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    results = json.loads((tmp_path / "results.json").read_text())
    metrics = results["metrics"]
    assert results["calibration_map"] == "matrix scaling"
    assert "after matrix scaling\n" in capsys.readouterr().out
    for state, suffix in (("before", ""), ("after", "_calibrated")):
        for name in ("nll", "brier", "ece"):
            value = report[state]["metrics"][name]["value"]
            assert value == pytest.approx(metrics[f"test_{name}{suffix}"], abs=1e-6), (
                name
            )
    assert (tmp_path / "calibrated" / "model.safetensors").is_file()
    assert not (tmp_path / "uncalibrated").exists()
    beside = tmp_path / "calibrated" / "calibration"
    assert (beside / "report.json").read_text() == (
        tmp_path / "report" / "report.json"
    ).read_text()
    weights = json.loads((tmp_path / "calibrated" / "calibration.json").read_text())[
        "fingerprint"
    ]
    assert report["about"] == {"split": "test", "n": 30, "fingerprint": weights}
    write_card(tmp_path / "calibrated", repo_id="me/x", license="mit")
    card = (tmp_path / "calibrated" / "README.md").read_text()
    assert "on 30 rows of the test split." in card
    assert card.count("![") == 5
    assert f"## Calibration\n\n**{report['verdict']}**\n" in card
