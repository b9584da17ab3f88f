"""Two processes together give the results of one alone. One pair of forks serves nearly all tests here."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_calib.metrics.state import LOGGED_METRICS
from tests.helpers.gloo_pair import run_on_two
from tests.helpers.runs import (
    BATCH_CASES,
    CASES,
    RAGGED_ROWS,
    assert_equal_runs,
    evaluate,
    run,
)
from tests.helpers.tiny import (
    N_LABELS,
    assert_same,
    sequences,
    tagged,
    tiny_bert,
    tiny_trainer,
)
from tests.helpers.two_processes import EVALUATIONS, train_and_evaluate

# Two processes start for all of them.
pytestmark = pytest.mark.slow

CALIBRATION_METRICS = tuple(LOGGED_METRICS)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_on_two(train_and_evaluate, folder)
    return folder


@pytest.fixture(scope="module")
def results(together: Path) -> dict[str, Any]:
    return torch.load(together / "results.pt", weights_only=True)


@pytest.fixture(scope="module")
def evaluations(together: Path) -> list[dict[str, Any]]:
    return [
        json.loads((together / f"evaluations_{rank}.json").read_text())
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_that_accumulate_train_as_one(
    name: str, results: dict[str, Any], tmp_path: Path
) -> None:
    alone = run(name, tmp_path, 8, 1, n=RAGGED_ROWS)
    assert len(alone["loss"]) == 4
    assert_equal_runs(results[name], alone)


def test_all_processes_keep_the_logits_of_an_evaluation_or_none(
    evaluations: list[dict[str, Any]],
) -> None:
    in_order = sequences(tiny_bert(), 13, seed=3)["label"][:]
    assert [found["kept"] for found in evaluations] == [[[in_order], []]] * 2


def test_rows_that_are_repeated_without_padding_are_counted_once(
    evaluations: list[dict[str, Any]],
) -> None:
    labels = tagged(tiny_bert("Token"), 13)["labels"]
    once = sum(
        label != -100 for row in labels for label in row[1:]
    )  # the first token of a row is a separator
    assert [found["without padding"] for found in evaluations] == [once, once]


def test_a_pass_before_the_training_changes_nothing_of_it(
    evaluations: list[dict[str, Any]],
) -> None:
    without = evaluations[0]["passed before"]["none"]
    for found in evaluations:
        for name, weights in found["passed before"].items():
            assert weights == without, name


def test_rows_that_one_process_does_not_have_are_named_on_both(
    evaluations: list[dict[str, Any]],
) -> None:
    for found in evaluations:
        assert len(found["of one"]) == 2
        for error in found["of one"]:
            assert error.startswith("expected calibration_dataset to be given on every")
            assert "got none on 1 of 2 processes" in error


def test_rows_grouped_by_length_are_evaluated_in_their_order(
    evaluations: list[dict[str, Any]],
) -> None:
    for found in evaluations:
        predicted, kept, labels = found["grouped"]
        assert predicted == labels
        assert kept == labels


# The same settings are trained on one process, too.
@pytest.mark.filterwarnings("ignore:gather_batch=True has no effect")
@pytest.mark.parametrize("name", BATCH_CASES)
def test_a_gathered_batch_penalty_is_that_of_the_whole_batch(
    name: str, results: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(name, tmp_path, 8, 1, n=RAGGED_ROWS)
    assert_equal_runs(results[name], whole)
    with pytest.warns(UserWarning, match="micro-batches of 4 of the 8 examples"):
        halves = run(name, tmp_path, 4, 2, n=8)
    assert abs(halves["loss"][0] - whole["loss"][0]) > 1e-3  # so it had to be gathered


@pytest.mark.parametrize("name", EVALUATIONS)
def test_two_processes_evaluate_as_one(
    name: str, evaluations: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert _without_times(evaluations[0][name]) == _without_times(evaluations[1][name])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # few examples do not determine a temperature
        before, after, _ = evaluate(name.split()[0], tmp_path, EVALUATIONS[name])
    ours = evaluations[0][name]
    assert ours["before"]["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-6)
    for metric in CALIBRATION_METRICS:
        key = f"eval_{metric}"
        assert ours["before"][key] == pytest.approx(before[key], rel=1e-6, abs=1e-9), (
            key
        )
        assert ours["after"][f"{key}_calibrated"] == pytest.approx(
            after[f"{key}_calibrated"], rel=1e-5, abs=1e-9
        )
    assert ours["after"]["temperature"] == pytest.approx(after["temperature"], rel=1e-6)


def _without_times(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    timed = ("time", "per_second")
    return {
        when: {k: v for k, v in found.items() if not k.endswith(timed)}
        for when, found in metrics.items()
    }


def test_gammas_temperature_and_log_agree(
    evaluations: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, second = evaluations
    for key in ("gammas", "edges", "temperature"):
        assert first[key] == second[key]
    assert [entry["step"] for entry in first["log"] if "count_14" in entry] == [1, 2]
    assert first["log"] == second["log"]
    settings = {"loss": "adafocal", "eval_strategy": "steps", "eval_steps": 1}
    alone = tiny_trainer(
        tmp_path, n=(16, 21, 13), per_device_train_batch_size=8, **settings
    )
    alone.train()
    assert alone.calibration_loss.gammas.tolist() == pytest.approx(
        first["gammas"], rel=1e-4
    )
    assert alone.temperature == pytest.approx(first["temperature"], rel=1e-3)


def test_both_processes_have_the_map_that_the_first_one_fitted(
    evaluations: list[dict[str, Any]],
) -> None:
    first, second = evaluations
    assert first["map"] == second["map"]
    assert np.array(first["map"][0]).shape == (N_LABELS, N_LABELS)
    refused, unlucky = first["refused"]
    assert refused.startswith("InputValueError: expected bias_penalty to be")
    assert unlucky == "ArithmeticError: out of luck"
    assert second["refused"] == [
        f"RuntimeError: The fit on the first process failed: {error}"
        for error in (refused, unlucky)
    ]


def test_a_push_or_a_save_that_fails_on_the_first_process_keeps_no_other_waiting(
    evaluations: list[dict[str, Any]],
) -> None:
    first, second = (found["not pushed"].splitlines() for found in evaluations)
    assert first[0].startswith(
        "InputOSError: expected the push to arrive, got OfflineModeIsEnabled for gammas"
    )
    assert first[1].startswith(
        "InputValueError: expected output to be a folder, got the file"
    )
    for ours, theirs in zip(first, second, strict=True):
        reason = ours.split(": ", 1)[1]
        assert theirs == f"RuntimeError: Another process failed: {reason}"


def test_two_processes_resume_bit_for_bit(results: dict[str, Any]) -> None:
    assert_same(results["resumed"], results["whole"])
    assert results["whole"]["gammas"].ne(1).any()


def test_both_processes_save_one_model(together: Path) -> None:
    names = ["calibration", "calibration.json", "config.json", "model.safetensors"]
    assert sorted(p.name for p in (together / "calibrated").iterdir()) == names
    assert "classifier.weight" in load_file(
        together / "calibrated" / "model.safetensors"
    )
    assert not list(together.glob("_saving-*"))
