"""What is recorded of a run, and where it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_calib.scaling.saved_map import MAP_NAME
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import tiny_trainer


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
