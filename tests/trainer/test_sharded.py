"""A sharded training is the one that is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForSequenceClassification

from hf_calib import CalibrationTrainer
from tests.helpers.gloo_pair import run_on_two
from tests.helpers.tiny import arguments, differences, logged, sequences, tiny_bert

KINDS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["BertLayer"],
    },
}


def make_trainer(kind: str, folder: Path, **settings: Any) -> CalibrationTrainer:
    model = tiny_bert(num_hidden_layers=2)
    settings = {
        "loss": "adafocal",
        "gamma_update_steps": 1,
        "gradient_accumulation_steps": 2,
        **settings,
    }
    sharding = {"fsdp": True, "fsdp_config": KINDS[kind]} if KINDS[kind] else {}
    args = arguments(folder, per_device_train_batch_size=2, **settings, **sharding)
    if sharding:
        # accelerate would take DDP on CPUs; it shards if it takes each for an accelerator with a number.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        PartialState._shared_state["device"] = torch.device("cpu")  # without one
    return CalibrationTrainer(
        model,
        args,
        train_dataset=sequences(model, 32),
        calibration_dataset=sequences(model, 21, seed=2),
        eval_dataset=sequences(model, 13, seed=3),
    )


def run(kind: str, folder: Path) -> dict[str, Any]:
    """Train; return what must not depend on the kind, and how many modules are sharded."""
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(kind, folder / "out", **saved)
    trainer.train()
    found = ends(trainer)
    trainer.save_calibrated_model(folder / "calibrated")
    found["shards"] = sum(
        isinstance(module, FSDPModule) for module in trainer.model_wrapped.modules()
    )
    trainer = make_trainer(kind, folder / "out", **saved)
    trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    found["resumed"] = ends(trainer)
    return found


def ends(trainer: CalibrationTrainer) -> dict[str, Any]:
    last = trainer.evaluate()
    return {
        "loss": logged(trainer, "loss"),
        "grad_norm": logged(trainer, "grad_norm"),
        "eval": {
            name: value
            for name, value in last.items()
            if not name.endswith(("time", "per_second"))
        },
        "gammas": trainer.calibration_loss.gammas.tolist(),
        "temperature": trainer.temperature,
    }


def run_kinds(rank: int, folder: Path) -> None:
    for kind in KINDS:
        (folder / kind).mkdir(exist_ok=True)
        torch.save(run(kind, folder / kind), folder / kind / f"{rank}.pt")
        dist.barrier()
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        AcceleratorState._reset_state()


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
    largest, drift = differences(
        *(load_file(each / "model.safetensors") for each in (ours, theirs))
    )
    assert largest < 2e-6
    assert drift < 1e-8
    _, found = AutoModelForSequenceClassification.from_pretrained(
        ours, output_loading_info=True
    )
    assert not any(found.values())
    assert not list(folder.rglob("_saving-*"))
