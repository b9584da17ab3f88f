"""Every command line of the README and of the recipes' README runs as it stands there, on tiny data in an empty folder.

What only a Hub or a GPU has is replaced by words after the command's own, which take precedence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest

from tests.docs.running import caches, typed
from tests.docs.worlds import FEW, NAMES, image_rows, named, save, texts_of
from tests.helpers.hub_server import TOKEN, Hub
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
IMAGES += " --lr_milestones 1 --calibration_size 20 --max_train_samples 40 --max_test_samples 20 --num_train_epochs 2"

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


def test_every_command_has_a_place_to_run() -> None:
    for command in (*README, *RECIPES):
        assert [start for start in COMMANDS if command.startswith(start)], command
    for start in COMMANDS:
        assert any(command.startswith(start) for command in (*README, *RECIPES)), start


@pytest.mark.slow
@pytest.mark.parametrize("command", [*README, *RECIPES])
def test_it_runs(
    command: str,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prepare, replaced, after = next(found for start, found in COMMANDS.items() if command.startswith(start))
    monkeypatch.chdir(tmp_path)
    caches(monkeypatch, tmp_path / "home", hub)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    prepare(tmp_path)
    for word, other in replaced.items():
        assert word in command
        command = command.replace(word, other)
    said = typed(f"{command} {after}", tmp_path, command) + "".join(capfd.readouterr())
    assert "Traceback" not in said
    assert TOKEN not in said
