"""Models that are trained, pushed and loaded again: `python -m tests.helpers.push_and_load FOLDER TOKEN`.

HF_ENDPOINT says where the Hub is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForSequenceClassification

from hf_calib.decisions import CostRule, Decisions
from tests.helpers.reports import few_resamples, no_figures
from tests.helpers.tiny import last_evaluation, tiny_bert
from tests.helpers.trained import lora, trained

# Weights that are on the Hub before a push to a branch; only the branch's are stale then.
BRANCH = "calibrated"
WEIGHTS_BEFORE = {
    # No adapter_config.json here: transformers 5.17 reads that of main for any branch.
    "main": ["adapter_model.safetensors", "model-00001-of-00001.safetensors"],
    BRANCH: ["adapter_config.json", "pytorch_model.bin"],
}


def push(
    repository: str, folder: Path, token: str, *, adapters: bool = False, revision: str | None = None
) -> dict[str, object]:
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "hub_token": token}
    settings |= {"push_to_hub": True, "hub_model_id": repository, "hub_strategy": "every_save"}
    if revision is not None:
        settings |= {"hub_strategy": "end"}
    model = lora(tiny_bert()) if adapters else None
    trainer = trained(folder, model, **settings)
    if adapters:
        trainer.save_model()  # leaves adapters, which must not be uploaded beside the merged weights
    if revision is not None:
        api = HfApi(token=token)
        api.create_branch(f"me/{repository}", branch=revision)
        for branch, names in WEIGHTS_BEFORE.items():
            for name in names:
                api.upload_file(
                    path_or_fileobj=b"old", path_in_repo=name, repo_id=f"me/{repository}", revision=branch
                )
    names = tuple(trainer.model.config.id2label.values())
    Decisions(CostRule(1 - np.eye(len(names))), names).save(folder)
    trainer.push_to_hub(dataset="words | <b>", language="en", revision=revision)
    pushed = AutoModelForSequenceClassification.from_pretrained(
        f"me/{repository}", token=token, revision=revision or "main"
    ).eval()
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
        "ece": last_evaluation(trainer)["eval_ece"],
        "ece_calibrated": last_evaluation(trainer)["eval_ece_calibrated"],
    }


if __name__ == "__main__":
    # What the reports in the cards hold is tested elsewhere.
    few_resamples(pytest.MonkeyPatch())
    no_figures(pytest.MonkeyPatch())
    folder, token = Path(sys.argv[1]), sys.argv[2]
    found = {
        "plain": push("plain", folder / "plain", token),
        "adapters": push("adapters", folder / "adapters", token, adapters=True),
        "branch": push("branch", folder / "branch", token, revision=BRANCH),
    }
    (folder / "found.json").write_text(json.dumps(found))
