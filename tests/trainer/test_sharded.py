"""A sharded training is the one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.helpers.gloo_pair import run_on_two
from tests.helpers.sharded import KINDS, run_kinds
from tests.helpers.tiny import differences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharded")
    run_on_two(run_kinds, made)
    return made


def results(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [torch.load(folder / kind / f"{rank}.pt") for rank in (0, 1)]


def test_a_sharded_training_ends_as_a_whole_one(folder: Path) -> None:
    (ours, others), (theirs, _) = results(folder, "FSDP2"), results(folder, "DDP")
    assert ours["shards"] >= 3  # two layers and the rest
    assert theirs["shards"] == 0
    assert others == ours
    assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes(kind: str, folder: Path) -> None:
    for found in results(folder, kind):
        assert_close(found["resumed"], found)
        assert found["resumed"]["gammas"] != [1.0] * 15


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in ("loss", "grad_norm", "gammas", "temperature", "eval"):
        assert ours[key] == pytest.approx(theirs[key], rel=2e-6, abs=1e-7), key


def test_the_saved_model_is_whole(folder: Path) -> None:
    ours, theirs = (folder / kind / "calibrated" for kind in ("FSDP2", "DDP"))
    largest, drift = differences(*(load_file(each / "model.safetensors") for each in (ours, theirs)))
    assert largest < 2e-6
    assert drift < 1e-8
    _, found = AutoModelForSequenceClassification.from_pretrained(ours, output_loading_info=True)
    assert not any(found.values())
    assert not list(folder.rglob("_saving-*"))
