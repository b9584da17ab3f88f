"""What is recorded of a run, and where it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.saved_map import MAP_NAME
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import tiny_trainer

OF_A_REPORT = ("calibration/report.", "calibration/figures/")


def measured(folder: Path, **sets: Any) -> dict[str, Any]:
    """The metrics in the calibration.json of a run's calibrated model."""
    trainer = tiny_trainer(folder / "run", max_steps=1)
    for name, rows in sets.items():
        setattr(trainer, name, rows)
    trainer.train()
    trainer.save_calibrated_model(folder / "calibrated")
    record: dict[str, Any] = json.loads((folder / "calibrated" / MAP_NAME).read_text())
    return record["metrics"]


def test_the_record_says_if_the_calibrator_has_seen_the_rows(tmp_path: Path) -> None:
    apart = measured(tmp_path / "apart")
    assert (apart["n"], "seen" in apart) == (24, False)
    with pytest.warns(UserWarning, match="evaluation split is also the calibration"):
        same = measured(tmp_path / "same", calibration_dataset=None)
    assert (same["n"], same["seen"]) == (24, 24)


@pytest.mark.parametrize("is_private", [True, None])
def test_a_private_repository_of_the_arguments_is_private(
    is_private: bool | None, tmp_path: Path, hub: Hub
) -> None:
    settings = {"hub_private_repo": is_private, "hub_token": TOKEN, "max_steps": 1}
    trainer = tiny_trainer(tmp_path / "model", **settings)
    trainer.train()
    trainer.push_to_hub()
    (created,) = hub.created
    assert (created.get("visibility") == "private") is (is_private is True)


def test_a_push_without_the_calibrator_removes_that_of_an_earlier_push(
    tmp_path: Path, hub: Hub
) -> None:
    trainer = tiny_trainer(tmp_path / "model", hub_token=TOKEN)
    trainer.train()
    trainer.push_to_hub()
    pushed = hub.files["me/model"]["main"]
    of_the_map = {"calibration.json", "calibration/head.safetensors"}
    assert of_the_map <= pushed.keys()
    trainer.remove_calibration_map()
    trainer.push_to_hub()
    files = hub.files["me/model"]["main"]
    assert not of_the_map & files.keys()
    assert "calibration" not in json.loads(files["config.json"])
    card = files["README.md"].decode()
    assert "Calibrated:" not in card
    assert "- Temperature:" not in card
    assert "- Nll:" in card
    assert len(hub.commits["me/model", "main"]) == 2


def test_a_push_of_another_calibrator_has_nothing_of_the_first(
    tmp_path: Path, hub: Hub
) -> None:
    trainer = tiny_trainer(tmp_path / "model", hub_token=TOKEN)
    trainer.train()
    trainer.evaluate()
    trainer.push_to_hub()
    files = hub.files["me/model"]["main"]
    of_the_first = {name for name in files if name.startswith(OF_A_REPORT)}
    assert {"calibration/report.json", "calibration/report.md"} <= of_the_first
    assert any(name.endswith(".png") for name in of_the_first)
    assert "Calibrated:" in files["README.md"].decode()
    files["calibration/notes.txt"] = b"by hand"
    trainer.fit_temperature(TemperatureScaling("ece"))
    trainer.push_to_hub()
    files = hub.files["me/model"]["main"]
    assert not {name for name in files if name.startswith(OF_A_REPORT)}
    assert not list((tmp_path / "model").glob("calibration/report*"))
    assert {"calibration.json", "calibration/notes.txt"} <= files.keys()
    card = files["README.md"].decode()
    assert "Calibrated:" not in card
    assert "- Temperature:" not in card
    assert "- Nll:" in card
