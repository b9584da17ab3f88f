"""The recipes on several labels per row: GoEmotions, and noise in the layout of the chest X-rays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from papers.networks.resnet import CifarResNetConfig, CifarResNetForImageClassification
from PIL import Image
from sklearn.metrics import roc_auc_score
from transformers import pipeline

from hf_calib.predictions.training import TrainingPredictions
from tests.helpers.reports import quick_report  # noqa: F401
from tests.recipes.test_recipes import CONFIGS, SHORT, results, run, save_bert


@pytest.fixture(scope="module")
def go_emotions(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """A tiny BERT, and 600 real comments with their labels as ids in one text."""
    folder = tmp_path_factory.mktemp("go_emotions")
    tables = {
        split: pandas.read_csv(
            shared_data / "goemotions" / f"{split}.csv.gz", dtype=str
        ).head(n)
        for split, n in (("train", 400), ("dev", 200), ("test", 200))
    }
    for split, table in tables.items():
        table.to_csv(folder / f"{split}.csv", index=False)
    save_bert(folder / "bert", tables["train"]["text"])
    files = {"train": "train", "calibration": "dev", "test": "test"}
    return [
        *(
            "--config",
            str(CONFIGS / "go_emotions_minilm.yaml"),
            "--model",
            str(folder / "bert"),
        ),
        *(
            word
            for role, name in files.items()
            for word in (f"--{role}_file", str(folder / f"{name}.csv"))
        ),
        *(
            "--dataset_config",
            "",
            "--label_separator",
            " ",
            "--bf16",
            "false",
            "--max_length",
            "32",
        ),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_go_emotions_is_trained_reported_and_served(
    go_emotions: list[str], tmp_path: Path
) -> None:
    run(
        "text_classification.py",
        *SHORT,
        *go_emotions,
        "--loss",
        "focal",
        "--output_dir",
        str(tmp_path),
    )
    record = json.loads((tmp_path / "report" / "report.json").read_text())
    metrics = results(tmp_path)["metrics"]
    assert isinstance(metrics, dict)
    for state, end in (("before", ""), ("after", "_calibrated")):
        measured = record[state]["metrics"]
        # What the trainer streams in float32: the macro ECE is its classwise one.
        for key, logged in (
            ("micro_brier", "brier"),
            ("micro_nll", "nll"),
            ("macro_ece", "classwise_ece"),
        ):
            assert measured[key]["value"] == pytest.approx(
                metrics[f"test_{logged}{end}"], abs=1e-6
            ), key
    saved = TrainingPredictions.load(tmp_path / "predictions.safetensors").test
    auroc = roc_auc_score(saved.labels.ravel(), saved.logits.ravel())
    assert record["before"]["metrics"]["micro_auroc"]["value"] == pytest.approx(
        auroc, abs=1e-12
    )
    assert (
        record["after"]["metrics"]["macro_nll"]["value"]
        < record["before"]["metrics"]["macro_nll"]["value"]
    )
    assert {"report.md", "report.html", "figures"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }

    # The per-label temperatures are in the head: a plain pipeline gives the calibrated probabilities.
    config = json.loads((tmp_path / "calibrated" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    classify = pipeline(
        "text-classification",
        model=str(tmp_path / "calibrated"),
        device="cpu",
        top_k=None,
    )
    text = pandas.read_csv(go_emotions[go_emotions.index("--test_file") + 1])["text"][0]
    served = {
        row["label"]: row["score"]
        for row in classify([text], truncation=True, max_length=32)[0]
    }
    temperatures = json.loads(
        (tmp_path / "calibrated" / "calibration.json").read_text()
    )["parameters"]
    z = saved.logits[0].astype(np.float64) / temperatures["temperatures"]
    wanted = torch.sigmoid(torch.from_numpy(z)).numpy()
    assert [served[name] for name in config["id2label"].values()] == pytest.approx(
        wanted.tolist(), abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_the_layout_of_the_chest_x_rays_is_trained(tmp_path: Path) -> None:
    """Ten crops, the weights of another head, and rows without a finding."""
    rng = np.random.default_rng(0)
    names = ["Edema", "Mass", "Hernia"]
    for role, n in {"train": 64, "calibration": 60, "test": 80}.items():
        rows = []
        for i, labels in enumerate(rng.random((n, 3)) < 0.4):
            path = tmp_path / f"{role}{i}.png"
            Image.fromarray(rng.integers(0, 256, (40, 40), dtype=np.uint8)).save(path)
            found = "|".join(name for name, on in zip(names, labels, strict=True) if on)
            rows.append({"image": str(path), "Finding Labels": found or "No Finding"})
        pandas.DataFrame(rows).to_csv(tmp_path / f"{role}.csv", index=False)
    config = CifarResNetConfig(depth=20, block="basic", num_labels=1000)
    CifarResNetForImageClassification(config).save_pretrained(tmp_path / "weights")
    own = {
        **{
            f"{role}_file": str(tmp_path / f"{role}.csv")
            for role in ("train", "calibration", "test")
        },
        **{
            "class_names": names,
            "model": "cifar_resnet",
            "model_kwargs": {"depth": 20, "block": "basic"},
        },
        **{
            "weights": str(tmp_path / "weights"),
            "image_size": 28,
            "ten_crop": 32,
            "num_train_epochs": 2,
        },
        **{
            "bf16": False,
            "dataloader_num_workers": 0,
            "report_to": "none",
            "use_cpu": True,
        },
        **{"dataloader_pin_memory": False, "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    configs = [
        "--config",
        str(CONFIGS / "chexnet.yaml"),
        "--config",
        str(tmp_path / "own.yaml"),
    ]
    run("image_classification.py", *configs)
    record = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert [label["name"] for label in record["after"]["labels"]] == names
    ten_crops = json.loads(
        (tmp_path / "out" / "report_ten_crops" / "report.json").read_text()
    )
    assert [label["name"] for label in ten_crops["after"]["labels"]] == names
    saved = TrainingPredictions.load(tmp_path / "out" / "predictions.safetensors").test
    for i, label in enumerate(record["before"]["labels"]):
        truth, scores = saved.labels[:, i], saved.logits[:, i]
        assert label["n_true"] == truth.sum()
        assert label["metrics"]["auroc"]["value"] == pytest.approx(
            roc_auc_score(truth, scores), abs=1e-12
        )
    classify = pipeline(
        "image-classification", model=str(tmp_path / "out" / "calibrated"), device="cpu"
    )
    assert {row["label"] for row in classify(str(tmp_path / "test0.png"))} <= set(names)
