"""Every command line of the README and of the recipes' README runs as it stands there, on tiny data in an empty folder.

What only a Hub or a GPU has is replaced by words after the command's own, which take precedence. The walk at the end of
recipes/README.md and the commands of docs/ have tests of their own: tests/recipes/test_from_fine_tuning_to_the_hub.py
and tests/test_docs.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hf_calib import fold
from hf_calib.scaling import TemperatureScaling
from tests.helpers.hub_server import TOKEN, running_hub
from tests.helpers.places import ROOT
from tests.helpers.tiny import sequences, tagged, text_of, tiny_bert, tokenizer

START = ("hf-calib ", "python ", "accelerate ", "torchrun ")
WALK = "## From fine-tuning to the Hub"


def printed(path: str) -> list[str]:
    """The command lines of a page, each on one line, without what is said after them."""
    text = (ROOT / path).read_text(encoding="utf-8").split(WALK)[0].replace("\\\n", " ")
    lines = [line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("    ")]
    return [re.sub(r"\s+", " ", line) for line in lines if line.startswith(START)]


README, RECIPES = printed("README.md"), printed("recipes/README.md")

NAMES = {0: "art", 1: "law", 2: "film", 3: "sport"}


def save_texts(folder: Path, name: str, n: int, seed: int, **columns: Callable[[Any], Any]) -> None:
    rows = sequences(tiny_bert(), n, seed=seed)
    texts = [text_of(ids) for ids in rows["input_ids"]]
    table = pandas.DataFrame({"text": texts, "label": [NAMES[label] for label in rows["label"]]})
    for column, of in columns.items():
        table[column] = table.apply(of, axis=1)
    table.to_csv(folder / name, index=False)


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def named(**config: Any) -> Any:
    return tiny_bert(id2label=NAMES, label2id={name: i for i, name in NAMES.items()}, **config)


def texts(folder: Path) -> None:
    save(named(), folder / "MODEL")
    for i, name in enumerate(("train", "validation", "test", "more")):
        save_texts(folder, f"{name}.csv", 400, i)
    for name in ("train", "test"):
        pandas.read_csv(folder / f"{name}.csv").to_parquet(folder / f"{name}.parquet")


def posts(folder: Path) -> None:
    """As they are on a news server: the settings of 20 Newsgroups cut the headers."""
    texts(folder)
    for name in ("train", "test"):
        table = pandas.read_csv(folder / f"{name}.csv")
        table["text"] = "From: w7\nSubject: w9\n\n" + table["text"]
        table.to_csv(folder / f"{name}.csv", index=False)
        table.to_parquet(folder / f"{name}.parquet")


def calibrated(folder: Path) -> None:
    texts(folder)
    model = fold(named(), TemperatureScaling(grid=[1.7]).fit([[1.0, 0.0]] * 3, [0, 0, 1]))
    save(model, folder / "calibrated")


def pairs(folder: Path) -> None:
    save(named(), folder / "NLI")
    halves = {"premise": lambda row: row["text"][:8], "hypothesis": lambda row: row["text"][8:]}
    save_texts(folder, "test.csv", 100, 1, **halves)


def judged(folder: Path) -> None:
    reranker = tiny_bert(num_labels=1)
    save(reranker, folder / "bare")
    CrossEncoder(str(folder / "bare"), num_labels=1).save_pretrained(str(folder / "RERANKER"))
    save_texts(folder, "judged.csv", 200, 1)
    table = pandas.read_csv(folder / "judged.csv")
    table["query"], table["answer"] = table["text"].str[:8], table["text"].str[8:]
    table["label"] = np.random.default_rng(0).integers(0, 2, len(table))
    table.drop(columns="text").to_csv(folder / "judged.csv", index=False)


def emotions(folder: Path) -> None:
    save(named(problem_type="multi_label_classification"), folder / "EMOTIONS")
    rows = sequences(tiny_bert(problem_type="multi_label_classification"), 100)
    labels = ["|".join(NAMES[i] for i, on in enumerate(row) if on) for row in rows["label"]]
    table = pandas.DataFrame({"text": map(text_of, rows["input_ids"]), "label": labels})
    table.to_csv(folder / "test.csv", index=False)


def tags(folder: Path) -> None:
    names = {0: "O", 1: "B-person", 2: "I-person", 3: "B-place"}
    save(tiny_bert("Token", id2label=names), folder / "TAGGER")
    with (folder / "test.jsonl").open("w") as file:
        for row in tagged(tiny_bert("Token"), 60):
            words = text_of(row["input_ids"]).split()
            tagged_words = [names[max(tag, 0)] for tag in row["labels"]]
            file.write(json.dumps({"tokens": words, "ner_tags": tagged_words}) + "\n")


def images(folder: Path) -> None:
    data = Path(os.environ.get("HF_CALIB_SHARED", ROOT.parent / "shared")) / "data"
    if not data.is_dir():
        pytest.skip("real images are not on this machine")
    names = dict(enumerate(json.loads((data / "cifar10" / "label_names.json").read_text())))
    config = ViTConfig(
        **{"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "intermediate_size": 16, "id2label": names},
        label2id={name: i for i, name in names.items()},
    )
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained(folder / "IMAGES")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / "IMAGES")
    for name in ("cifar10", "mnist"):
        (folder / name).mkdir()
        for part in ("train", "test"):
            rows = pandas.read_parquet(data / name / f"{part}.parquet").head(100)
            rows.to_parquet(folder / name / f"{part}.parquet")
    np.savez(folder / "cifar10h.npz", soft_labels=np.full((100, 10), 0.1))


def measured(folder: Path) -> None:
    """What the lines before it have left."""
    calibrated(folder)
    for model, output in (("MODEL", "measured"), ("calibrated", "calibrated/calibration")):
        run(f"hf-calib evaluate {model} --data test.csv --output {output}", folder)
    rng = np.random.default_rng(0)
    np.savez(
        folder / "other_predictions.npz", logits=rng.normal(size=(400, 4)), labels=rng.integers(0, 4, 400)
    )


# What takes a GPU or a download: fewer rows and steps, and models that are here. And how the command is known to end.
FEW = "--use_cpu true --bf16 false --max_steps 2 --report_to none --output_dir out"
TEXTS = (
    f"{FEW} --model MODEL --max_length 16 --calibration_size 40 --max_train_samples 60 --max_test_samples 60"
)
OWN = f"{TEXTS} --train_file train.csv --test_file test.csv --eval_strategy no --save_strategy no"
OWN += " --load_best_model_at_end false"
CNN = (
    TEXTS.replace("--model MODEL ", "")
    + " --eval_strategy no --save_strategy no --load_best_model_at_end false"
)
IMAGES = FEW.replace("--max_steps 2", "--num_train_epochs 35")
IMAGES += " --train_file cifar10/train.parquet --test_file cifar10/test.parquet --image_column image"
IMAGES += " --calibration_size 20 --max_train_samples 40 --max_test_samples 20 --dataloader_num_workers 0"
IMAGES += " --eval_strategy no --save_strategy no"
LAUNCH = "--config recipes/configs/ag_news_minilm.yaml"

# Beginning of a command -> what it finds in its folder, words of it that are replaced, and words after it.
COMMANDS: dict[str, tuple[Callable[[Path], None], dict[str, str], str]] = {
    "hf-calib compare recipes/text_classification.py --config": (
        texts,
        {"ag_news_minilm.yaml": "recipes/configs/ag_news_minilm.yaml", "--seeds 0,1,2": "--seeds 0"},
        OWN.replace(" --output_dir out", "").replace(" --report_to none", ""),
    ),
    "hf-calib compare recipes/text_classification.py --output": (
        texts,
        {"--output study": "--output study --losses cross_entropy,focal --seeds 0"},
        OWN.replace(" --output_dir out", "").replace(" --report_to none", ""),
    ),
    "python recipes/text_classification.py --config recipes/configs/20newsgroups_bert": (posts, {}, OWN),
    "accelerate launch --config_file recipes/accelerate/8_gpus.yaml": (
        texts,
        {
            "--config ...": LAUNCH,
            "--config_file recipes/accelerate/8_gpus.yaml": "--cpu --num_machines 1 --num_processes 1 "
            "--mixed_precision no --dynamo_backend no",
        },
        OWN,
    ),
    "torchrun --nproc_per_node 8": (
        texts,
        {"--config ...": LAUNCH, "--nproc_per_node 8": "--nproc_per_node 2"},
        f"{OWN} --ddp_backend gloo",
    ),
    "hf-calib evaluate MODEL": (texts, {}, ""),
    "hf-calib calibrate MODEL": (texts, {}, ""),
    "hf-calib decide calibrated": (calibrated, {}, ""),
    "hf-calib push calibrated": (calibrated, {}, ""),
    "hf-calib evaluate IMAGES": (images, {}, ""),
    "hf-calib evaluate NLI": (pairs, {}, ""),
    "hf-calib calibrate RERANKER": (judged, {}, ""),
    "hf-calib evaluate EMOTIONS": (emotions, {}, ""),
    "hf-calib evaluate TAGGER": (tags, {}, ""),
    "hf-calib report measured": (measured, {}, ""),
    "hf-calib export calibrated": (calibrated, {}, ""),
    "python recipes/text_classification.py --config recipes/configs/20newsgroups_cnn": (posts, {}, CNN),
    "python recipes/text_classification.py --config recipes/configs/go_emotions": (
        emotions,
        {},
        OWN.replace("MODEL", "EMOTIONS").replace("train.csv", "test.csv")
        + " --label_separator | --label_column label --class_names art law film sport --dataset_config none",
    ),
    "python recipes/image_classification.py": (
        images,
        {"ylecun/mnist": "mnist/test.parquet"},
        IMAGES,
    ),
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
