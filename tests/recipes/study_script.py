"""A script as `compare_losses.py` starts it, with a run of a second: what a study does with processes is tested.

python study_script.py --loss focal --seed 0 --output_dir OUT [--fails LOSS] [--silent LOSS] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.training import PREDICTIONS, TrainingPredictions


def main() -> None:
    parser = argparse.ArgumentParser()
    names = (
        "config",
        "loss",
        "loss_kwargs",
        "output_dir",
        "resume_from_checkpoint",
        "fails",
        "silent",
    )
    for name in names:
        parser.add_argument(f"--{name}")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=0.0)
    args = parser.parse_args()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "starts.txt", "a") as starts:
        starts.write(f"{args.resume_from_checkpoint}\n")
    for step in (1, 2):
        if (
            args.resume_from_checkpoint
            and f"checkpoint-{step}" <= Path(args.resume_from_checkpoint).name
        ):
            continue
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(exist_ok=True)
        counts = ("global_step", "max_steps", "num_train_epochs", "epoch", "total_flos")
        state = {**dict.fromkeys(counts, step), "log_history": []}
        state["stateful_callbacks"] = {"TrainerControl": {}}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        print(f"step {step}", flush=True)
        time.sleep(args.seconds / 2)
    if args.fails in (args.loss, "all"):
        raise SystemExit(f"no such column, threads {os.environ.get('OMP_NUM_THREADS')}")
    if args.loss != args.silent:
        rng = np.random.default_rng(args.seed)
        labels = np.random.default_rng(7).integers(3, size=60)
        logits = (3 * np.eye(3)[labels] + 2 * rng.normal(size=(60, 3))).astype(
            np.float32
        )
        rows = Predictions(labels, logits=logits, class_names=("a", "b", "c"))
        (folder / "calibrated").mkdir(exist_ok=True)
        (folder / "calibrated" / "model.safetensors").write_bytes(b"weights")
        TrainingPredictions(rows, rows).save(folder / PREDICTIONS)
        training = {"seconds": 1.0, "steps": 2, "resumed": False}
        results = {"loss": args.loss, "seed": args.seed, "training": training}
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
