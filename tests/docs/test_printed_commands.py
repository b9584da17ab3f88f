"""Every command line of the README and of the recipes' README runs as it stands there, on tiny data in an empty folder.

What only a Hub or a GPU has is replaced by words after the command's own, which take precedence.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest

from tests.docs.worlds import FEW, NAMES, image_rows, named, save, texts_of
from tests.helpers.hub_server import TOKEN, running_hub
from tests.helpers.places import ROOT

START = ("hf-calib ", "python ", "accelerate ", "torchrun ")


def printed(path: str) -> list[str]:
    """The command lines of a page, each on one line, without what is said after them."""
    text = (ROOT / path).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("    ")]
    return [re.sub(r"\s+", " ", line) for line in lines if line.startswith(START)]


README, RECIPES = printed("README.md"), printed("recipes/README.md")


def texts(folder: Path) -> None:
    save(named(), folder / "MODEL")
    for seed, name in enumerate(("train", "validation", "test")):
        texts_of(named(), 400, seed + 1).to_csv(folder / f"{name}.csv", index=False)


def posts(folder: Path) -> None:
    """As they are on a news server: the settings of 20 Newsgroups cut the headers."""
    texts(folder)
    for name in ("train", "test"):
        table = pandas.read_csv(folder / f"{name}.csv")
        table["text"] = "From: w7\nSubject: w9\n\n" + table["text"]
        table.to_parquet(folder / f"{name}.parquet")


def emotions(folder: Path) -> None:
    model = named(problem_type="multi_label_classification")
    save(model, folder / "MODEL")
    texts_of(model, 100, 1).to_csv(folder / "test.csv", index=False)


def images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("train", 60), ("test", 40), ("mnist", 20)):
        image_rows(n, rng).to_parquet(folder / f"{name}.parquet")


# How the command is known to end, on few rows.
OWN = f"{FEW.replace('google-bert/bert-base-uncased', 'MODEL')} --output_dir out"
IMAGES = "--use_cpu true --bf16 false --report_to none --output_dir out --eval_strategy no --save_strategy no"
IMAGES += (
    " --train_file train.parquet --test_file test.parquet --image_column image --dataloader_num_workers 0"
)
IMAGES += " --calibration_size 20 --max_train_samples 40 --max_test_samples 20"

# Beginning of a command -> what it finds in its folder, words of it that are replaced, and words after it.
COMMANDS: dict[str, tuple[Callable[[Path], None], dict[str, str], str]] = {
    "hf-calib evaluate MODEL": (texts, {}, ""),
    "hf-calib calibrate MODEL": (texts, {}, ""),
    "python recipes/text_classification.py --config recipes/configs/20newsgroups_cnn": (
        posts,
        {},
        OWN.replace("--model MODEL", ""),
    ),
    "python recipes/text_classification.py --config recipes/configs/go_emotions": (
        emotions,
        {},
        f"{OWN} --train_file test.csv --test_file test.csv --label_separator | --label_column label "
        f"--class_names {' '.join(NAMES.values())} --dataset_config none",
    ),
    "python recipes/image_classification.py": (images, {"ylecun/mnist": "mnist.parquet"}, IMAGES),
}


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    known |= {"PYTHONPATH": str(ROOT), "COLUMNS": "120", **environment}
    return subprocess.run(
        shlex.split(command), cwd=folder, env=known, capture_output=True, text=True, timeout=400
    )


def test_every_command_has_a_place_to_run() -> None:
    for command in (*README, *RECIPES):
        assert [start for start in COMMANDS if command.startswith(start)], command
    for start in COMMANDS:
        assert any(command.startswith(start) for command in (*README, *RECIPES)), start


@pytest.mark.slow
@pytest.mark.parametrize("command", [*README, *RECIPES])
def test_it_runs(command: str, tmp_path: Path) -> None:
    prepare, replaced, after = next(found for start, found in COMMANDS.items() if command.startswith(start))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    prepare(tmp_path)
    for word, other in replaced.items():
        assert word in command
        command = command.replace(word, other)
    with running_hub() as hub:
        done = run(
            f"{command} {after}",
            tmp_path,
            **{"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")},
            **{"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"},
        )
    assert done.returncode == 0, f"{command} {after}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert "Traceback" not in done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
