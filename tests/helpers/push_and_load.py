"""Trains, pushes and loads again: `HF_ENDPOINT=... python -m tests.helpers.push_and_load FOLDER TOKEN`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.tiny import tiny_bert
from tests.helpers.trained import lora, trained


def push(repository: str, folder: Path, token: str, *, adapters: bool = False) -> dict[str, object]:
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "hub_token": token}
    settings |= {"push_to_hub": True, "hub_model_id": repository, "hub_strategy": "every_save"}
    model = lora(tiny_bert()) if adapters else None
    trainer = trained(folder, model, **settings)
    if adapters:
        trainer.save_model()  # leaves adapters, which must not be uploaded beside the merged weights
    trainer.push_to_hub(dataset="words | <b>", language="en")
    pushed = AutoModelForSequenceClassification.from_pretrained(f"me/{repository}", token=token).eval()
    trainer.save_calibrated_model(folder / "local")
    local = AutoModelForSequenceClassification.from_pretrained(folder / "local").eval()
    ids = torch.tensor(trainer.calibration_dataset["input_ids"])
    with torch.no_grad():
        ours, theirs = local(input_ids=ids).logits, pushed(input_ids=ids).logits
        plain = trainer.model.eval()(input_ids=ids).logits
    return {
        "temperature": trainer.temperature,
        "bit_equal": torch.equal(ours, theirs),
        "off_by": float((theirs - plain / trainer.temperature).abs().max()),
        "ece": trainer.state.log_history[-1]["eval_ece"],
        "ece_calibrated": trainer.state.log_history[-1]["eval_ece_calibrated"],
    }


if __name__ == "__main__":
    folder, token = Path(sys.argv[1]), sys.argv[2]
    found = {
        "plain": push("plain", folder / "plain", token),
        "adapters": push("adapters", folder / "adapters", token, adapters=True),
    }
    (folder / "found.json").write_text(json.dumps(found))
