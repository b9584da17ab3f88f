"""A sharded training is the one that is not. One launch serves all tests here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.helpers.gloo_pair import torchrun
from tests.helpers.sharded import KINDS
from tests.helpers.tiny import differences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    torchrun("tests.helpers.sharded", str(folder))
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {kind: [torch.load(folder / kind / f"{rank}.pt") for rank in (0, 1)] for kind in KINDS}


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2", "FSDP2, judge"])
def test_a_sharded_training_ends_as_a_whole_one(kind: str, results: Any) -> None:
    (ours, others), (theirs, _) = results[kind], results[f"DDP{kind[5:]}"]
    assert ours["shards"] >= 3  # two layers and the rest
    assert theirs["shards"] == 0
    assert others == ours
    assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "FSDP2, judge"])
def test_a_sharded_training_resumes(kind: str, results: Any) -> None:
    for found in results[kind]:
        assert_close(found["resumed"], found)
        assert found["resumed"]["gammas"] != [1.0] * 15


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in ("loss", "grad_norm", "gammas", "temperature", "eval"):
        assert ours[key] == pytest.approx(theirs[key], rel=2e-6, abs=1e-7), key


# With FSDP 2, whose checkpoints are sharded too.
@pytest.mark.parametrize(
    "saved", ["FSDP1/calibrated", "FSDP1/out/checkpoint-4", "FSDP2/calibrated", "FSDP2, judge/calibrated"]
)
def test_the_saved_models_are_whole(saved: str, folder: Path) -> None:
    ours, theirs = (load_file(folder / path / "model.safetensors") for path in (saved, "DDP" + saved[5:]))
    largest, drift = differences(ours, theirs)
    assert largest < 2e-6
    assert drift < 1e-8
    _, found = AutoModelForSequenceClassification.from_pretrained(folder / saved, output_loading_info=True)
    assert not any(found.values())
    assert not list(folder.rglob("_saving-*"))
