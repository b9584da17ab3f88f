"""The recipes on several labels a row: GoEmotions, and mosaics of MNIST digits in the layout of the chest X-rays."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from papers.networks.resnet import CifarResNetConfig, CifarResNetForImageClassification
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score
from transformers import BertConfig, BertForSequenceClassification, pipeline
from typer.testing import CliRunner

from hf_calib.cards import write_card
from hf_calib.cli import app
from hf_calib.commands.demo import train_tokenizer
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.report.comparison import read_report
from tests.helpers.mosaics import mosaics
from tests.helpers.reports import few_resamples, quick_report  # noqa: F401
from tests.recipes.test_recipes import CONFIGS, SHORT, results, run, run_on_two_processes


@pytest.fixture(scope="module")
def go_emotions(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny BERT, and 600 real comments with their labels as ids in one text."""
    folder = tmp_path_factory.mktemp("go_emotions")
    tables = {
        split: pandas.read_csv(shared_data / "goemotions" / f"{split}.csv.gz", dtype=str).head(n)
        for split, n in (("train", 400), ("dev", 200), ("test", 200))
    }
    for split, table in tables.items():
        table.to_csv(folder / f"{split}.csv", index=False)
    tokenizer = train_tokenizer(tables["train"]["text"].tolist())
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    files = {"train": "train", "calibration": "dev", "test": "test"}
    return [
        *("--config", str(CONFIGS / "go_emotions_minilm.yaml"), "--model", str(folder / "bert")),
        *(word for role, name in files.items() for word in (f"--{role}_file", str(folder / f"{name}.csv"))),
        *("--label_separator", " ", "--bf16", "false", "--max_length", "32"),
    ]


@pytest.fixture(scope="module")
def trained(go_emotions: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Files and output of a training."""
    folder, printed = tmp_path_factory.mktemp("trained"), io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        few_resamples(patch)
        run("text_classification.py", *SHORT, *go_emotions, "--loss", "focal", "--output_dir", str(folder))
    return folder, printed.getvalue()


@pytest.mark.slow  # the multi-label paths of the trainer and of the report have fast tests of their own
def test_go_emotions_is_trained_reported_and_served(
    trained: tuple[Path, str], go_emotions: list[str]
) -> None:
    tmp_path, printed = trained
    record = read_report(tmp_path / "report" / "report.json")
    metrics = results(tmp_path)["metrics"]
    assert isinstance(metrics, dict)
    for state, end in (("before", ""), ("after", "_calibrated")):
        measured = record[state]["metrics"]
        # What the trainer streams in float32: the macro ECE is its classwise one.
        for key, logged in (("micro_brier", "brier"), ("micro_nll", "nll"), ("macro_ece", "classwise_ece")):
            assert measured[key]["value"] == pytest.approx(metrics[f"test_{logged}{end}"], abs=1e-6), key
        value = measured["macro_ece"]
        assert f"{value['value']:.4f}" in printed
    saved = TrainingPredictions.load(tmp_path / "predictions.safetensors").test
    auroc = roc_auc_score(saved.labels.ravel(), saved.logits.ravel())
    assert record["before"]["metrics"]["micro_auroc"]["value"] == pytest.approx(auroc, abs=1e-12)
    assert (
        record["after"]["metrics"]["macro_nll"]["value"] < record["before"]["metrics"]["macro_nll"]["value"]
    )
    assert {"report.md", "report.html", "figures"} <= {path.name for path in (tmp_path / "report").iterdir()}

    # The per-label temperatures are in the head: a plain pipeline gives the calibrated probabilities.
    config = json.loads((tmp_path / "calibrated" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    classify = pipeline("text-classification", model=str(tmp_path / "calibrated"), device="cpu", top_k=None)
    text = pandas.read_csv(go_emotions[go_emotions.index("--test_file") + 1])["text"][0]
    served = {row["label"]: row["score"] for row in classify([text], truncation=True, max_length=32)[0]}
    temperatures = json.loads((tmp_path / "calibrated" / "calibration.json").read_text())["parameters"]
    z = saved.logits[0].astype(np.float64) / temperatures["temperatures"]
    wanted = torch.sigmoid(torch.from_numpy(z)).numpy()
    assert [served[name] for name in config["id2label"].values()] == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.usefixtures("quick_report")
@pytest.mark.deep
def test_the_default_map_and_no_map(go_emotions: list[str], tmp_path: Path) -> None:
    few = ["--max_train_samples", "32", "--max_calibration_samples", "60", "--max_test_samples", "40"]
    for method in ("auto", "none"):
        own = ["--calibration_method", method, "--output_dir", str(tmp_path / method)]
        run("text_classification.py", *SHORT, *go_emotions, *few, *own)
        record = read_report(tmp_path / method / "report" / "report.json")
        assert (record["after"] is None) == (method == "none")


@pytest.mark.deep
def test_two_processes_report_the_same(go_emotions: list[str], tmp_path: Path) -> None:
    same = [*SHORT, *go_emotions, "--learning_rate", "0", "--seed", "1"]
    run_on_two_processes("text_classification.py", *same, "--output_dir", str(tmp_path / "two"))
    run("text_classification.py", *same, "--output_dir", str(tmp_path / "one"))
    one, two = (read_report(tmp_path / name / "report" / "report.json") for name in ("one", "two"))
    for key, value in one["after"]["metrics"].items():
        assert two["after"]["metrics"][key]["value"] == pytest.approx(value["value"], abs=1e-5), key


@pytest.fixture(scope="module")
def chest_x_rays(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mosaics of two digits as png files, and the csv files that the config describes."""
    folder = tmp_path_factory.mktemp("x_rays")
    made = mosaics(shared_data / "mnist" / "test.parquet", 240, seed=0)
    rows: list[dict[str, Any]] = []
    for i, (pixels, labels) in enumerate(zip(made.pixels, made.labels, strict=True)):
        path = folder / f"{i:05}.png"
        Image.fromarray(pixels).save(path)
        names = [f"digit {c}" for c in np.flatnonzero(labels) if c]  # 0 is no finding
        rows.append({"image": str(path), "Finding Labels": "|".join(names) or "No Finding"})
    for split, part in (
        ("train", slice(0, 100)),
        ("calibration", slice(100, 160)),
        ("test", slice(160, 240)),
    ):
        pandas.DataFrame(rows[part]).to_csv(folder / f"{split}.csv", index=False)
    return folder


@pytest.mark.usefixtures("quick_report")
@pytest.mark.slow
def test_the_layout_of_the_chest_x_rays_is_trained(chest_x_rays: Path, tmp_path: Path) -> None:
    names = [f"digit {i}" for i in range(1, 10)]
    own = tmp_path / "own.yaml"
    torch.manual_seed(0)
    start = CifarResNetForImageClassification(CifarResNetConfig(depth=20, block="basic", num_labels=1000))
    start.save_pretrained(tmp_path / "weights")
    files = {f"{role}_file": str(chest_x_rays / f"{role}.csv") for role in ("train", "calibration", "test")}
    own.write_text(
        json.dumps(
            {
                **files,
                "class_names": names,
                "model": "cifar_resnet",
                "model_kwargs": {"depth": 20, "block": "basic"},
                "weights": str(tmp_path / "weights"),  # as of ImageNet, with another head
                "image_size": 28,
                "ten_crop": 32,
                "num_train_epochs": 2,
                "bf16": False,
                "dataloader_num_workers": 0,
                "report_to": "none",
                "use_cpu": True,
                "dataloader_pin_memory": False,
                "output_dir": str(tmp_path / "out"),
            }
        )
    )
    config = ["--config", str(CONFIGS / "chexnet.yaml"), "--config", str(own)]
    run("image_classification.py", *config)
    record = read_report(tmp_path / "out" / "report" / "report.json")
    assert [label["name"] for label in record["after"]["labels"]] == names
    ten_crops = read_report(tmp_path / "out" / "report_ten_crops" / "report.json")
    assert [label["name"] for label in ten_crops["after"]["labels"]] == names
    saved = TrainingPredictions.load(tmp_path / "out" / "predictions.safetensors").test
    for i, label in enumerate(record["before"]["labels"]):
        truth, scores = saved.labels[:, i], saved.logits[:, i]
        assert label["n_true"] == truth.sum()
        assert label["metrics"]["auroc"]["value"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
        precision = average_precision_score(truth, scores)
        assert label["metrics"]["average_precision"]["value"] == pytest.approx(precision, abs=1e-12)
    classify = pipeline("image-classification", model=str(tmp_path / "out" / "calibrated"), device="cpu")
    assert {row["label"] for row in classify(str(chest_x_rays / "00000.png"))} <= set(names)

    layout = ["--data", files["test_file"], "--label-column", "Finding Labels", "--label-separator", "|"]
    command = [str(tmp_path / "out" / "calibrated"), *layout, "--no-label", "No Finding", "--json"]
    done = CliRunner().invoke(app, ["evaluate", *command])
    assert done.exit_code == 0, done.output
    again = json.loads(done.stdout)["before"]["metrics"]
    for key in ("macro_brier", "micro_nll"):
        value = record["after"]["metrics"][key]["value"]
        assert again[key]["value"] == pytest.approx(value, abs=1e-4), key
    done = CliRunner().invoke(app, ["calibrate", *command, "--output", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["served_difference"] < 1e-4


def test_a_label_outside_the_names_is_refused_before_the_training(
    go_emotions: list[str], tmp_path: Path
) -> None:
    with_more = tmp_path / "test.csv"
    with_more.write_text("text,labels\nfine,3\nodd,3 28\n")
    with pytest.raises(ValueError, match=r"labels of split 'test' to be among .* got '28' in row 1"):
        run("text_classification.py", *SHORT, *go_emotions, "--test_file", str(with_more))


@pytest.mark.usefixtures("quick_report")
def test_a_trained_model_is_evaluated_by_the_command(
    trained: tuple[Path, str], go_emotions: list[str], tmp_path: Path
) -> None:
    folder = trained[0]
    test = go_emotions[go_emotions.index("--test_file") + 1]
    command = ["evaluate", str(folder / "calibrated"), "--data", test, "--label-column", "labels"]
    command += ["--label-separator", " ", "--max-length", "32"]
    done = CliRunner().invoke(app, [*command, "--json", "--output", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    again, before = json.loads(done.stdout), read_report(folder / "report" / "report.json")
    assert again["after"] is None  # the model as it is served
    for key in ("macro_nll", "micro_nll", "macro_brier", "micro_brier"):
        value = before["after"]["metrics"][key]["value"]
        assert again["before"]["metrics"][key]["value"] == pytest.approx(value, abs=1e-5), key
    assert "AUROC, macro" in CliRunner().invoke(app, command).stdout


def test_the_card_shows_the_averages(trained: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(trained[0] / "calibrated", tmp_path / "model")
    write_card(tmp_path / "model", license="mit")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Expected calibration error (ECE), the mean over the labels: **" in card
    assert "| ECE, macro |" in card
    assert "All but AUROC and average precision: lower is better. Below each number its 95%" in card
    assert "![Label errors](calibration/figures/label_errors.png)" in card


@pytest.mark.parametrize("method", [None, "per_label_temperature"])
@pytest.mark.usefixtures("quick_report")
def test_a_trained_model_is_calibrated_by_the_command(
    method: str | None, trained: tuple[Path, str], go_emotions: list[str], tmp_path: Path
) -> None:
    test = go_emotions[go_emotions.index("--test_file") + 1]
    command = ["calibrate", str(trained[0] / "calibrated"), "--data", test, "--label-column", "labels"]
    command += ["--label-separator", " ", "--max-length", "32", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*command, *(["--method", method] if method else []), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["method"] == (method or "auto")
    assert found["n_fitted"] == found["report"]["n_examples"] == 100
    assert found["served_difference"] < 1e-5
    assert "in its head, which was undone first" in found["notes"][0]
    before, after = (found["report"][state]["metrics"]["micro_nll"]["value"] for state in ("before", "after"))
    assert after < before
    served = json.loads((tmp_path / "out" / "config.json").read_text())["calibration"]
    assert served["folded"] is True
    assert read_report(tmp_path / "out" / "calibration" / "report.json")["kind"] == "multi_label"


def test_options_that_do_not_go_with_the_labels_are_refused(go_emotions: list[str], tmp_path: Path) -> None:
    model = go_emotions[go_emotions.index("--model") + 1]  # of one class a row
    test = go_emotions[go_emotions.index("--test_file") + 1]
    done = CliRunner().invoke(app, ["evaluate", model, "--data", test, "--label-separator", " "])
    assert done.exit_code == 2
    assert "go with a model whose problem_type is multi_label_classification" in done.output


def test_a_model_that_cannot_be_read_is_not_said_to_have_one_class(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text,label\nso,a|b\n")
    data = ["--data", str(tmp_path / "texts.csv"), "--label-separator", "|"]
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path), *data])
    assert done.exit_code == 2
    assert "expected the model to" in done.output
    assert "problem_type" not in done.output


@pytest.mark.deep
def test_a_study_of_several_labels(
    go_emotions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CONFIGS.parents[1]))
    study, script = tmp_path / "study", str(CONFIGS.parent / "text_classification.py")
    asked = ["compare", script, *go_emotions[:2], "--losses", "cross_entropy,focal", "--seeds", "0"]
    asked += ["--methods", "temperature,per_label_temperature", "--output", str(study)]
    result = CliRunner().invoke(app, [*asked, "--", *SHORT, *go_emotions[2:]])
    assert result.exit_code == 0, result.output
    record = json.loads((study / "report.json").read_text())
    assert not record["missing"]
    assert {each["method"] for each in record["values"]} == {"none", "temperature", "per_label_temperature"}
    assert "macro_auroc" in {each["metric"] for each in record["differences"]}
