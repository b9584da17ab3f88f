"""TRL's trainers on two processes train, measure and calibrate as on one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.gloo_pair import torchrun

pytest.importorskip(
    "trl", reason="TRL has an environment of its own: make test-trainers"
)

from tests.trl.test_calibrated_reward import noisy_pairs
from tests.trl.test_calibrated_reward import trained as reward_trained
from tests.trl.test_calibrated_sft import losses
from tests.trl.test_calibrated_sft import trained as sft_trained

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)

GLOBAL_BATCH = 8
REWARDS = {
    "loss": "adafocal",
    "calibration_method": "temperature",
    "eval_strategy": "epoch",
}


def results(folder: Path, batch: int) -> dict[str, Any]:
    """Losses, weights, and the reward model's gammas, temperature and metrics."""
    sft = sft_trained(
        folder, "completion", loss="focal", per_device_train_batch_size=batch
    )
    splits = {"calibration_dataset": noisy_pairs(30), "eval_dataset": noisy_pairs(9)}
    rewards = reward_trained(
        folder,
        splits=splits,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        **REWARDS,
    )
    evaluated = rewards.evaluate()
    return {
        "losses": torch.tensor(losses(sft)),
        "weights": torch.cat(
            [value.detach().flatten() for value in sft.model.parameters()]
        ),
        "reward weights": torch.cat(
            [value.detach().flatten() for value in rewards.model.parameters()]
        ),
        "gammas": rewards.calibration_loss.state_dict()["gammas"],
        "temperature": torch.tensor(rewards.temperature),
        "metrics": torch.tensor(
            [evaluated[f"eval_{name}"] for name in ("nll", "ece", "nll_calibrated")]
        ),
    }


def test_two_processes_are_one(tmp_path: Path) -> None:
    torchrun("tests.trl.test_two_processes", str(tmp_path))
    together = torch.load(tmp_path / "results.pt", weights_only=True)
    for name, value in results(tmp_path / "alone", GLOBAL_BATCH).items():
        torch.testing.assert_close(
            together[name],
            value,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


if __name__ == "__main__":
    found = results(Path(sys.argv[1]) / "run", GLOBAL_BATCH // 2)
    if dist.get_rank() == 0:
        torch.save(found, Path(sys.argv[1]) / "results.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads have aborted finished processes
