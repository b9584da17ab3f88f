"""The recipes as a user runs them: scripts, files, one process and two.

Scripts of one process run in this one, which has imported what they import; two processes are launched as a user
launches them.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

from hf_calib.commands.demo import train_tokenizer
from hf_calib.data import docstring_dataset
from hf_calib.report import Interval
from hf_calib.report.document import cell
from hf_calib.scaling.saved_map import load_map
from hf_calib.trainer.calibration_map import in_words
from tests.helpers.places import ROOT
from tests.helpers.reports import quick_report  # noqa: F401

CONFIGS = ROOT / "recipes" / "configs"
SHORT = ["--report_to", "none", "--use_cpu", "true", "--num_train_epochs", "1"]
SHORT += ["--dataloader_pin_memory", "false"]


def run(recipe: str, *arguments: str) -> dict[str, Any]:
    """Run a script as `python recipes/RECIPE ARGUMENTS` does, return its names; what it prints goes to capsys."""
    path = str(ROOT / "recipes" / recipe)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # so few steps leave models whose temperature is not determined
        patch.setattr(sys, "argv", [path, *arguments])
        patch.syspath_prepend(str(Path(path).parent))
        return runpy.run_path(path, run_name="__main__")


def save_bert(
    folder: Path,
    texts: Any,
    kind: type = BertForSequenceClassification,
    **settings: Any,
) -> None:
    """A random one, and a tokenizer of the texts' words."""
    tokenizer = train_tokenizer(list(texts))
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind(BertConfig(vocab_size=len(tokenizer), **size, **settings)).save_pretrained(
            folder
        )
    tokenizer.model_max_length = settings.get("max_position_embeddings", 512)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def text_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Local files and a tiny BERT, in place of the Hub."""
    folder = tmp_path_factory.mktemp("text")
    dataset = docstring_dataset(max_per_class=40)
    for split in ("train", "test"):
        rows = dataset[split]
        names = rows.features["label"].int2str(rows["label"])
        posts = [
            f"Subject: a question\n\n{text}" for text in rows["text"]
        ]  # a header, which some tasks cut
        Dataset.from_dict({"text": posts, "label": names}).to_json(
            folder / f"{split}.jsonl"
        )
    save_bert(folder / "bert", dataset["train"]["text"])
    files = [
        "--train_file",
        str(folder / "train.jsonl"),
        "--test_file",
        str(folder / "test.jsonl"),
    ]
    return [
        "--model",
        str(folder / "bert"),
        *files,
        "--calibration_size",
        "30",
        "--max_length",
        "32",
    ]


def results(output_dir: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((output_dir / "results.json").read_text())
    return content


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_text_recipe_trains_reports_and_saves(
    text_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["--config", str(CONFIGS / "ag_news_minilm.yaml")]
    loss = [
        "--config",
        str(CONFIGS / "losses" / "adafocal_every_10_steps.yaml"),
        "--gamma_update_steps",
        "2",
    ]
    options = [*SHORT, *text_arguments, *task, *loss, "--calibration_method", "auto"]
    run("text_classification.py", *options, "--output_dir", str(tmp_path))
    printed = capsys.readouterr().out
    assert f"after {in_words(load_map(tmp_path / 'calibrated').scaler)}" in printed
    assert {"calibrated", "results.json", "report", "gammas.png"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert results(tmp_path)["loss"] == "adafocal"
    metrics = results(tmp_path)["metrics"]
    assert isinstance(metrics, dict)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    for state, suffix in (("before", ""), ("after", "_calibrated")):
        # Not the adaptive ECE: this model's confidences are alike to 1e-7, and float32 has more ties than float64.
        for name in ("accuracy", "nll", "brier", "ece", "classwise_ece"):
            measured = report[state]["metrics"][name]
            assert measured["value"] == pytest.approx(
                metrics[f"test_{name}{suffix}"], abs=1e-6
            ), name
            assert (
                cell(Interval(*(measured[key] for key in ("value", "low", "high"))))
                in printed
            )
    assert (tmp_path / "report" / "figures" / "reliability.png").is_file()
    prediction = pipeline(
        "text-classification", model=str(tmp_path / "calibrated"), device="cpu"
    )("an array")[0]
    assert prediction["label"] in {
        "numpy",
        "scipy",
        "sklearn",
        "pandas",
        "torch",
        "transformers",
    }


@pytest.mark.parametrize(
    ("recipe", "name", "length"),
    [
        ("text_classification.py", "max_length", "0"),
        ("text_classification.py", "eval_max_length", "-5"),
        ("token_classification.py", "max_length", "0"),
        ("language_model.py", "max_length", "-1"),
        ("best_epoch.py", "max_length", "0"),
    ],
)
def test_lengths_that_leave_no_tokens_are_refused(
    recipe: str, name: str, length: str, tmp_path: Path
) -> None:
    """A tokenizer takes 0 for no limit, and counts a negative number from the end."""
    message = f"^expected {name} to be at least 1, got {length}$"
    with pytest.raises(SystemExit, match=message):
        run(recipe, f"--{name}={length}", "--output_dir", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_text_recipe_on_two_processes_reports_the_same_as_on_one(
    text_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "--loss",
        "focal",
        "--seed",
        "1",
        "--learning_rate",
        "0",
        "--save_strategy",
        "no",
    ]
    settings += ["--calibration_method", "temperature"]
    same = [*SHORT, *text_arguments, *settings]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    words = [
        *launcher,
        str(CONFIGS.parent / "text_classification.py"),
        *same,
        "--output_dir",
        str(tmp_path / "two"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.count("after temperature scaling, T = ") == 1
    )  # one table, from one process
    run("text_classification.py", *same, "--output_dir", str(tmp_path / "one"))
    one, two = (
        cast("dict[str, float]", results(tmp_path / name)["metrics"])
        for name in ("one", "two")
    )
    for key in ("test_ece", "test_adaptive_ece", "test_nll_calibrated", "temperature"):
        assert two[key] == pytest.approx(one[key], rel=1e-5), key

    capsys.readouterr()
    run("inverse_link.py", str(tmp_path / "one"))
    cells = [
        cell.split() for cell in capsys.readouterr().out.splitlines()[-1].split("|")
    ]
    assert float(cells[3][0]) == pytest.approx(one["test_ece"], abs=1e-3)  # rounded
    assert float(cells[8][0]) == pytest.approx(one["test_nll_calibrated"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_text_recipe_trains_the_papers_cnn(
    text_arguments: list[str], tmp_path: Path
) -> None:
    glove = tmp_path / "glove.txt"
    glove.write_text(
        "".join(f"{word} {' '.join(['0.1'] * 8)}\n" for word in ("array", "the", "of"))
    )
    configs = [word for name in ("finsen_cnn", "losses/focal_calibration_finsen")
               for word in ("--config", str(CONFIGS / f"{name}.yaml"))]  # fmt: skip
    own = [
        "--model",
        "global_pooling_cnn",
        "--glove_file",
        str(glove),
        "--eval_max_length",
        "32",
    ]
    own += [
        "--text_column",
        "text",
        "--label_column",
        "label",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    run("text_classification.py", *SHORT, *text_arguments, *configs, *own)
    assert results(tmp_path / "out")["loss"] == "focal_calibration"
    assert results(tmp_path / "out")["calibration_map"] == "temperature scaling"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_image_recipe_trains_a_network_of_the_papers(
    shared_data: Path, tmp_path: Path
) -> None:
    configs = [word for name in ("cifar10_papers", "networks/resnet20")
               for word in ("--config", str(CONFIGS / f"{name}.yaml"))]  # fmt: skip
    cifar, digits = shared_data / "cifar10", tmp_path / "elsewhere" / "digits.parquet"
    digits.parent.mkdir()
    Dataset.from_parquet(str(shared_data / "mnist" / "test.parquet")).select(
        range(100)
    ).to_parquet(digits)
    own = [
        "--train_file",
        str(cifar / "train.parquet"),
        "--test_file",
        str(cifar / "test.parquet"),
    ]
    own += [
        "--max_train_samples",
        "48",
        "--max_test_samples",
        "32",
        "--calibration_size",
        "32",
    ]
    own += [
        "--image_column",
        "image",
        "--save_strategy",
        "no",
        "--dataloader_num_workers",
        "0",
    ]
    own += ["--num_train_epochs", "2", "--lr_milestones", "1", "--loss", "adafocal"]
    own += [
        "--ood_data",
        str(digits),
        "--ood_noise",
        "true",
        "--decode_once",
        "true",
        "--crop",
        "pad",
    ]
    output = ["--output_dir", str(tmp_path)]
    trainer = run("image_classification.py", *configs, *SHORT, *own, *output)["trainer"]
    config = json.loads((tmp_path / "calibrated" / "config.json").read_text())
    assert config["calibration"]["folded"] is True
    assert config["calibration"]["n_examples"] == 32
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(
        trainer.args.learning_rate / 10
    )
    decayed, spared = (
        trainer.optimizer.param_groups
    )  # the authors' SGD decays biases and norms too
    assert len(decayed["params"]) == len(list(trainer.model.parameters()))
    assert not spared["params"]
    found = json.loads((tmp_path / "results.json").read_text())["out_of_distribution"]
    sizes = [(section["name"], section["n_examples"]) for section in found]
    assert sizes == [("elsewhere/digits.parquet", 100), ("gaussian noise", 32)]
    assert all(
        0 <= section["after"]["entropy"]["auroc"]["value"] <= 1 for section in found
    )
    answers = pipeline("image-classification", str(tmp_path / "calibrated"))(
        Image.new("RGB", (32, 32))
    )
    assert answers[0]["label"] in config["label2id"]
