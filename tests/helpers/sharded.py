"""One training in two processes that hold the whole model each (DDP), or a shard each (FSDP 2)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from hf_calib import CalibrationTrainer
from tests.helpers.tiny import arguments, logged, sequences, tiny_bert

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
    settings = {"loss": "adafocal", "gamma_update_steps": 1, "gradient_accumulation_steps": 2, **settings}
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
    found = results(trainer)
    trainer.save_calibrated_model(folder / "calibrated")
    found["shards"] = sum(isinstance(module, FSDPModule) for module in trainer.model_wrapped.modules())
    trainer = make_trainer(kind, folder / "out", **saved)
    trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    found["resumed"] = results(trainer)
    return found


def results(trainer: CalibrationTrainer) -> dict[str, Any]:
    last = trainer.evaluate()
    return {
        "loss": logged(trainer, "loss"),
        "grad_norm": logged(trainer, "grad_norm"),
        "eval": {name: value for name, value in last.items() if not name.endswith(("time", "per_second"))},
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
