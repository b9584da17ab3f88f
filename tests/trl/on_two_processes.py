"""TRL's trainers on two processes: torchrun --nproc_per_node 2 -m tests.trl.on_two_processes FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trl.test_calibrated_reward import noisy_pairs
from tests.trl.test_calibrated_reward import trained as reward_trained
from tests.trl.test_calibrated_sft import losses
from tests.trl.test_calibrated_sft import trained as sft_trained

GLOBAL_BATCH = 8
REWARDS = {"loss": "adafocal", "calibration_method": "temperature", "eval_strategy": "epoch"}


def results(folder: Path, batch: int) -> dict[str, Any]:
    """Losses, weights, and the reward model's gammas, temperature and metrics."""
    sft = sft_trained(folder, "completion", loss="focal", per_device_train_batch_size=batch)
    splits = {"calibration_dataset": noisy_pairs(30), "eval_dataset": noisy_pairs(9)}
    rewards = reward_trained(
        folder, splits=splits, per_device_train_batch_size=batch, gradient_accumulation_steps=1, **REWARDS
    )
    evaluated = rewards.evaluate()
    return {
        "losses": torch.tensor(losses(sft)),
        "weights": torch.cat([value.detach().flatten() for value in sft.model.parameters()]),
        "reward weights": torch.cat([value.detach().flatten() for value in rewards.model.parameters()]),
        "gammas": rewards.calibration_loss.state_dict()["gammas"],
        "temperature": torch.tensor(rewards.temperature),
        "metrics": torch.tensor([evaluated[f"eval_{name}"] for name in ("nll", "ece", "nll_calibrated")]),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = results(folder / "run", GLOBAL_BATCH // 2)
    if dist.get_rank() == 0:
        torch.save(found, folder / "results.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads have aborted finished processes
