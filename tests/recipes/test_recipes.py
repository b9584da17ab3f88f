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
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

from hf_calib import CalibrationTrainer
from hf_calib.commands.demo import train_tokenizer
from hf_calib.data import DataArguments, docstring_dataset, load_data
from hf_calib.experiments import train_and_report
from hf_calib.report.rows import with_interval
from hf_calib.scaling.saved_map import load_map
from hf_calib.trainer.calibration_map import in_words
from tests.helpers.places import ROOT
from tests.helpers.reports import quick_report  # noqa: F401
from tests.helpers.tiny import LENGTH, VOCABULARY, arguments

CONFIGS = ROOT / "recipes" / "configs"
SHORT = [
    "--report_to",
    "none",
    "--use_cpu",
    "true",
    "--num_train_epochs",
    "1",
    "--dataloader_pin_memory",
    "false",
]


def run(recipe: str, *arguments: str) -> dict[str, Any]:
    """Run a script as `python recipes/RECIPE ARGUMENTS` does, return its names; what it prints goes to capsys."""
    path = str(ROOT / "recipes" / recipe)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few steps leave models whose temperature is not determined
        patch.setattr(sys, "argv", [path, *arguments])
        patch.syspath_prepend(str(Path(path).parent))
        return runpy.run_path(path, run_name="__main__")


def run_on_two_processes(recipe: str, *arguments: str) -> str:
    """Launch a script with torchrun; return what both processes print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(ROOT / "recipes" / recipe), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Local files and a tiny BERT, in place of the Hub."""
    folder = tmp_path_factory.mktemp("text")
    dataset = docstring_dataset(max_per_class=40)
    for split in ("train", "test"):
        rows = dataset[split]
        names = rows.features["label"].int2str(rows["label"])
        posts = [f"Subject: a question\n\n{text}" for text in rows["text"]]  # a header, which some tasks cut
        Dataset.from_dict({"text": posts, "label": names}).to_json(folder / f"{split}.jsonl")
    tokenizer = train_tokenizer(dataset["train"]["text"])
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    files = ["--train_file", str(folder / "train.jsonl"), "--test_file", str(folder / "test.jsonl")]
    return ["--model", str(folder / "bert"), *files, "--calibration_size", "30", "--max_length", "32"]


def results(output_dir: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((output_dir / "results.json").read_text())
    return content


@pytest.mark.usefixtures("quick_report")
def test_text_recipe_trains_reports_and_saves(
    text_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["--config", str(CONFIGS / "ag_news_minilm.yaml")]
    loss = ["--config", str(CONFIGS / "losses" / "adafocal_every_10_steps.yaml"), "--gamma_update_steps", "2"]
    options = [*SHORT, *text_arguments, *task, *loss, "--calibration_method", "auto"]
    run("text_classification.py", *options, "--output_dir", str(tmp_path))
    printed = capsys.readouterr().out
    assert f"after {in_words(load_map(tmp_path / 'calibrated').scaler)}" in printed
    assert {"calibrated", "results.json", "report", "gammas.png"} <= {p.name for p in tmp_path.iterdir()}
    assert results(tmp_path)["loss"] == "adafocal"
    metrics = results(tmp_path)["metrics"]
    assert isinstance(metrics, dict)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    for state, suffix in (("before", ""), ("after", "_calibrated")):
        # Not the adaptive ECE: this model's confidences are alike to 1e-7, and float32 has more ties than float64.
        for name in ("accuracy", "nll", "brier", "ece", "classwise_ece"):
            measured = report[state]["metrics"][name]
            assert measured["value"] == pytest.approx(metrics[f"test_{name}{suffix}"], abs=1e-6), name
            assert with_interval(*(measured[key] for key in ("value", "low", "high"))) in printed
    assert (tmp_path / "report" / "figures" / "reliability.png").is_file()
    prediction = pipeline("text-classification", model=str(tmp_path / "calibrated"), device="cpu")(
        "an array"
    )[0]
    assert prediction["label"] in {"numpy", "scipy", "sklearn", "pandas", "torch", "transformers"}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_text_recipe_on_two_processes_reports_the_same_as_on_one(
    text_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--loss", "focal", "--seed", "1", "--learning_rate", "0", "--save_strategy", "no"]
    settings += ["--calibration_method", "temperature"]
    same = [*SHORT, *text_arguments, *settings]
    printed = run_on_two_processes("text_classification.py", *same, "--output_dir", str(tmp_path / "two"))
    assert printed.count("after temperature scaling, T = ") == 1  # one table, from one process
    run("text_classification.py", *same, "--output_dir", str(tmp_path / "one"))
    one, two = (results(tmp_path / name)["metrics"] for name in ("one", "two"))
    assert isinstance(one, dict)
    assert isinstance(two, dict)
    for key in ("test_ece", "test_adaptive_ece", "test_nll_calibrated", "temperature"):
        assert two[key] == pytest.approx(one[key], rel=1e-5), key

    capsys.readouterr()
    run("inverse_link.py", str(tmp_path / "one"))
    cells = [cell.split() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert float(cells[3][0]) == pytest.approx(one["test_ece"], abs=1e-3)  # rounded
    assert float(cells[8][0]) == pytest.approx(one["test_nll_calibrated"], abs=1e-3)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("finsen_cnn", marks=pytest.mark.slow),
        *(
            pytest.param(task, marks=pytest.mark.deep)
            for task in ("20newsgroups_cnn", "ag_news_cnn", "20newsgroups_bert", "ag_news_bert")
        ),
    ],
)
@pytest.mark.usefixtures("quick_report")
def test_text_recipe_trains_each_task(task: str, text_arguments: list[str], tmp_path: Path) -> None:
    glove = tmp_path / "glove.txt"
    glove.write_text("".join(f"{word} {' '.join(['0.1'] * 8)}\n" for word in ("array", "the", "of")))
    loss = "focal_calibration_finsen" if task == "finsen_cnn" else "dual_focal"
    cnn = ["--model", "global_pooling_cnn", "--glove_file", str(glove)] if task.endswith("cnn") else []
    files = (CONFIGS / f"{task}.yaml", CONFIGS / "losses" / f"{loss}.yaml")
    configs = [word for file in files for word in ("--config", str(file))]
    columns = ["--text_column", "text", "--label_column", "label"]
    own = [*cnn, *columns, "--eval_max_length", "32", "--output_dir", str(tmp_path / "out")]
    run("text_classification.py", *SHORT, *text_arguments, *configs, *own)
    assert results(tmp_path / "out")["loss"] == loss.removesuffix("_finsen")
    assert results(tmp_path / "out")["calibration_map"] == "temperature scaling"


@pytest.mark.usefixtures("quick_report")
def test_models_that_return_more_than_logits_are_reported_too(tmp_path: Path) -> None:
    size = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, num_labels=3, **size
    )
    model = BartForSequenceClassification(config).eval()
    ids = torch.randint(4, VOCABULARY, (48, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = config.eos_token_id
    with torch.no_grad():
        labels = model(ids).logits.argmax(dim=1)
    labels[::5] = (labels[::5] + 1) % 3  # not all right: the temperature is determined
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "label": labels.tolist()})
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, learning_rate=0, prediction_loss_only=True, save_strategy="no"),
        train_dataset=rows.select(range(16)),
        calibration_dataset=rows.select(range(16, 40)),
    )
    train_and_report(trainer, rows)
    assert {"calibrated", "results.json", "report"} <= {path.name for path in tmp_path.iterdir()}


@pytest.fixture(scope="module")
def image_arguments(shared_data: Path) -> list[str]:
    folder = shared_data / "cifar10"
    files = ["--train_file", str(folder / "train.parquet"), "--test_file", str(folder / "test.parquet")]
    few = ["--max_train_samples", "48", "--max_calibration_samples", "32", "--max_test_samples", "32"]
    return [*files, *few, "--save_strategy", "no"]


@pytest.fixture(scope="module")
def image_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    vit = ViTConfig(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=16)  # fmt: skip
    resnet = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    models = {"vit": ViTForImageClassification(vit), "resnet": ResNetForImageClassification(resnet)}
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in models}
    for name, model in models.items():
        model.save_pretrained(folders[name])
        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize(
    ("model", "bf16"),
    [
        pytest.param("vit", "true", marks=pytest.mark.slow),
        pytest.param("resnet", "false", marks=pytest.mark.deep),
    ],
)
@pytest.mark.usefixtures("quick_report")
def test_image_recipe(
    model: str,
    bf16: str,
    image_arguments: list[str],
    image_models: dict[str, str],
    shared_data: Path,
    tmp_path: Path,
) -> None:
    task = ["--config", str(CONFIGS / f"cifar10_{model}.yaml"), "--load_best_model_at_end", "false"]
    own = ["--image_column", "image", "--calibration_size", "32", "--eval_strategy", "no", "--bf16", bf16]
    settings = [*task, *own, "--model", image_models[model], "--loss", "dual_focal"]
    (tmp_path / "elsewhere").mkdir()
    digits = tmp_path / "elsewhere" / "digits.parquet"
    Dataset.from_parquet(str(shared_data / "mnist" / "test.parquet")).select(range(100)).to_parquet(digits)
    settings += ["--ood_data", str(digits), "--ood_noise", "true", "--decode_once", "true", "--crop", "pad"]
    run("image_classification.py", *SHORT, *settings, *image_arguments, "--output_dir", str(tmp_path))
    calibration = json.loads((tmp_path / "calibrated" / "config.json").read_text())["calibration"]
    assert calibration["folded"] is True
    assert calibration["n_examples"] == 32
    found = json.loads((tmp_path / "results.json").read_text())["out_of_distribution"]
    assert [(section["name"], section["n_examples"]) for section in found] == [
        ("elsewhere/digits.parquet", 100),
        ("gaussian noise", 32),
    ]
    assert all(0 <= section["after"]["entropy"]["auroc"]["value"] <= 1 for section in found)


@pytest.mark.parametrize(
    ("task", "network", "extra"),
    [
        pytest.param("cifar10_papers", "resnet20", ["--loss", "adafocal"], marks=pytest.mark.slow),
        pytest.param("cifar10_short", "vgg16", ["--bf16", "false"], marks=pytest.mark.deep),
        pytest.param("cifar100_papers", "densenet40", ["--label_column", "label"], marks=pytest.mark.deep),
        pytest.param("tiny_imagenet_papers", "resnet18", ["--image_size", "32"], marks=pytest.mark.deep),
        pytest.param("svhn_papers", "resnet110_stochastic_depth", [], marks=pytest.mark.deep),
    ],
)
@pytest.mark.usefixtures("quick_report")
def test_networks_of_the_papers_from_scratch(
    task: str, network: str, extra: list[str], image_arguments: list[str], tmp_path: Path
) -> None:
    files = (CONFIGS / f"{task}.yaml", CONFIGS / "networks" / f"{network}.yaml")
    configs = [word for file in files for word in ("--config", str(file))]
    own = ["--image_column", "image", "--calibration_size", "32", "--dataloader_num_workers", "0"]
    short = [*SHORT, "--num_train_epochs", "2", "--lr_milestones", "1", "--max_steps", "-1"]
    settings = [*configs, *own, *short, *extra, *image_arguments]
    trainer = run("image_classification.py", *settings, "--output_dir", str(tmp_path))["trainer"]
    config = json.loads((tmp_path / "calibrated" / "config.json").read_text())
    assert config["calibration"]["folded"] is True
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(trainer.args.learning_rate / 10)
    if task.endswith("_papers"):  # the authors' SGD decays biases and norms too
        decayed, spared = trainer.optimizer.param_groups
        assert len(decayed["params"]) == len(list(trainer.model.parameters()))
        assert not spared["params"]
    answers = pipeline("image-classification", str(tmp_path / "calibrated"))(Image.new("RGB", (32, 32)))
    assert answers[0]["label"] in config["label2id"]


@pytest.mark.deep  # `calibration_from` of small files is tested with the data
def test_half_of_the_test_images_calibrate(image_arguments: list[str], shared_data: Path) -> None:
    folder = shared_data / "cifar10"
    args = DataArguments(
        train_file=str(folder / "train.parquet"),
        test_file=str(folder / "test.parquet"),
        calibration_from="test",
        calibration_size=5000,
    )
    dataset = load_data(args, images=True)
    assert {name: len(split) for name, split in dataset.items()} == {
        "train": 50_000,
        "calibration": 5_000,
        "test": 5_000,
    }


@pytest.mark.deep
@pytest.mark.usefixtures("quick_report")
def test_ten_crops_on_two_processes_are_those_on_one(
    image_arguments: list[str], image_models: dict[str, str], tmp_path: Path
) -> None:
    settings = ["--model", image_models["vit"], "--ten_crop", "36", "--learning_rate", "0"]
    settings += ["--loss", "mmce", "--gather_batch", "true"]
    same = [*SHORT, *settings, *image_arguments, "--calibration_method", "temperature"]
    same += ["--max_test_samples", "31"]  # one is repeated, and left out again
    printed = run_on_two_processes("image_classification.py", *same, "--output_dir", str(tmp_path / "two"))
    assert printed.count("Mean of ten crops an image") == 1
    # One table each of the test set and of its crops, from one process.
    assert printed.count("after temperature scaling, T = ") == 2
    run("image_classification.py", *same, "--output_dir", str(tmp_path / "one"))
    paths = (tmp_path / name / "report_ten_crops" / "report.json" for name in ("one", "two"))
    one, two = (json.loads(path.read_text()) for path in paths)
    for state in ("before", "after"):
        for key in ("nll", "brier", "accuracy"):
            ours, theirs = (found[state]["metrics"][key]["value"] for found in (two, one))
            assert ours == pytest.approx(theirs, abs=1e-6), (state, key)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem
)
def test_accelerate_configs_are_known_to_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes in (1, 8)
