"""Models on a Hub unfolded by their names: `python -m tests.helpers.unfold_from_hub FOLDER`; HF_ENDPOINT says where."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from hf_calib import unfold
from hf_calib.cli import app

if __name__ == "__main__":
    folder = sys.argv[1]
    found: dict[str, object] = {}
    for revision in ("main", "old"):
        loaded = AutoModelForSequenceClassification.from_pretrained("me/model", revision=revision)
        unfolded = unfold(loaded, revision=revision)
        found[revision] = [unfolded.exact, unfolded.largest_difference]
        torch.save(loaded.state_dict(), f"{folder}/{revision}.pt")
    done = CliRunner().invoke(app, ["unfold", "me/model", f"{folder}/out", "--json"])
    found["command"] = json.loads(done.stdout) if done.exit_code == 0 else done.output
    print(json.dumps(found))
