"""A sharded training is the one that is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.helpers.gloo_pair import run_on_two
from tests.helpers.sharded import run_kinds
from tests.helpers.tiny import differences

pytestmark = pytest.mark.slow
deep = pytest.mark.deep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a kind is, which runs with its DDP when it is first asked for."""

    @cache
    def of(kinds: tuple[str, ...]) -> Path:
        made = tmp_path_factory.mktemp("sharded")
        run_on_two(partial(run_kinds, kinds), made)
        return made

    whole = ("DDP", "FSDP2")
    return lambda kind: of(whole if kind in whole else ("DDP", "FSDP1", "DDP, judge", "FSDP2, judge"))


def results(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [torch.load(folder / kind / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize(
    "kind", ["FSDP2", pytest.param("FSDP1", marks=deep), pytest.param("FSDP2, judge", marks=deep)]
)
def test_a_sharded_training_ends_as_a_whole_one(kind: str, folder: Callable[[str], Path]) -> None:
    ours, others = results(folder(kind), kind)
    theirs, _ = results(folder(kind), f"DDP{kind[5:]}")
    assert ours["shards"] >= 3  # two layers and the rest
    assert theirs["shards"] == 0
    assert others == ours
    assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", pytest.param("FSDP2, judge", marks=deep)])
def test_a_sharded_training_resumes(kind: str, folder: Callable[[str], Path]) -> None:
    for found in results(folder(kind), kind):
        assert_close(found["resumed"], found)
        assert found["resumed"]["gammas"] != [1.0] * 15


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in ("loss", "grad_norm", "gammas", "temperature", "eval"):
        assert ours[key] == pytest.approx(theirs[key], rel=2e-6, abs=1e-7), key


# With FSDP 2, whose checkpoints are sharded too.
@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("FSDP2", "calibrated"),
        pytest.param("FSDP1", "calibrated", marks=deep),
        pytest.param("FSDP1", "out/checkpoint-4", marks=deep),
        pytest.param("FSDP2, judge", "calibrated", marks=deep),
    ],
)
def test_the_saved_models_are_whole(kind: str, saved: str, folder: Callable[[str], Path]) -> None:
    path = folder(kind) / kind / saved
    theirs = folder(kind) / f"DDP{kind[5:]}" / saved
    largest, drift = differences(*(load_file(each / "model.safetensors") for each in (path, theirs)))
    assert largest < 2e-6
    assert drift < 1e-8
    _, found = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not any(found.values())
    assert not list(folder(kind).rglob("_saving-*"))
