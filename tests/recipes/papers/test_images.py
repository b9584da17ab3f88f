"""Images of a test: ten crops of each, the mean probability by hand; the noise of CIFAR-10-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Sequence, Value
from datasets import Image as ImageFeature
from papers.images import (
    gaussian_noise,
    logits_of_mean,
    ten_crops,
    write_ten_crop_report,
)
from PIL import Image
from scipy.special import expit, logit, softmax
from sklearn.metrics import log_loss
from transformers import (
    AutoModelForImageClassification,
    ViTConfig,
    ViTImageProcessorPil,
)

from hf_calib import CalibrationTrainer
from hf_calib.data import ImageTransform, collate_images
from hf_calib.scaling import PerLabelTemperatureScaling
from tests.helpers.reports import quick_report  # noqa: F401
from tests.helpers.tiny import arguments

PROCESSOR = ViTImageProcessorPil(size={"height": 16, "width": 16})


def test_the_mean_is_of_probabilities() -> None:
    logits = np.random.default_rng(0).normal(0, 4, (10, 6, 3))
    mean = logits_of_mean(logits, multi_label=False)
    np.testing.assert_allclose(
        softmax(mean, axis=1), softmax(logits, axis=2).mean(axis=0), rtol=1e-12
    )
    several = logits_of_mean(logits, multi_label=True)
    np.testing.assert_allclose(expit(several), expit(logits).mean(axis=0), rtol=1e-12)
    # Sure of each, where a probability would be 1.
    assert np.isfinite(logits_of_mean(1000 * logits, multi_label=True)).all()


def network() -> Any:
    """Random, with several labels per row and logits that differ from image to image."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                       intermediate_size=16, num_labels=3, initializer_range=0.3)  # fmt: skip
    config.problem_type = "multi_label_classification"
    return AutoModelForImageClassification.from_config(config).eval()


def rows(model: Any, n: int, seed: int) -> Dataset:
    """Noise, with labels drawn as the model says."""
    rng = np.random.default_rng(seed)
    images = [
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        for _ in range(n)
    ]
    with torch.no_grad():
        logits = model(
            PROCESSOR(images=images, return_tensors="pt")["pixel_values"]
        ).logits.numpy()
    labels = (rng.random(logits.shape) < expit(logits)).tolist()
    features = Features({"image": ImageFeature(), "label": Sequence(Value("float32"))})
    return Dataset.from_dict({"image": images, "label": labels}, features=features)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_report")
def test_the_report_is_on_the_mean(tmp_path: Path) -> None:
    model = network()
    splits = {
        name: rows(model, 60, seed) for seed, name in enumerate(("calibration", "test"))
    }
    settings = {
        "learning_rate": 0,
        "max_steps": 1,
        "calibration_method": "per_label_temperature",
    }
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, remove_unused_columns=False, **settings),
        train_dataset=rows(model, 8, 2).with_transform(ImageTransform(PROCESSOR)),
        calibration_dataset=splits["calibration"].with_transform(
            ImageTransform(PROCESSOR)
        ),
        processing_class=PROCESSOR,
        data_collator=collate_images,
    )
    crops = {name: ten_crops(split, PROCESSOR, 20) for name, split in splits.items()}
    trainer.train()
    write_ten_crop_report(trainer, crops, tmp_path / "report_ten_crops")
    model.eval()
    with torch.no_grad():
        probs = {name: np.mean([model(view[:]["pixel_values"]).logits.double().sigmoid() for view in views], axis=0)
                 for name, views in crops.items()}  # fmt: skip
    report = json.loads((tmp_path / "report_ten_crops" / "report.json").read_text())
    found = [
        report[state]["metrics"]["micro_nll"]["value"] for state in ("before", "after")
    ]
    # Its temperatures are of the means on the calibration rows.
    scaler = PerLabelTemperatureScaling().fit(
        logit(probs["calibration"]), np.array(splits["calibration"]["label"])
    )
    after = scaler.predict_proba(logit(probs["test"]))
    truth = np.ravel(splits["test"]["label"])
    assert found[0] == pytest.approx(log_loss(truth, probs["test"].ravel()), abs=1e-5)
    assert found[1] == pytest.approx(log_loss(truth, after.ravel()), abs=1e-4)


def pixels(dataset: Dataset) -> np.ndarray:
    return np.stack([np.asarray(row["image"]) for row in dataset])


def grey(n: int = 3, value: int = 128) -> Dataset:
    return Dataset.from_dict(
        {
            "image": [Image.new("RGB", (64, 64), (value,) * 3) for _ in range(n)],
            "label": list(range(n)),
        }
    )


@pytest.mark.parametrize(
    ("severity", "deviation"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.10)]
)
def test_the_noise_is_that_of_cifar_10_c(severity: int, deviation: float) -> None:
    noisy = pixels(gaussian_noise(grey(), severity=severity))
    assert noisy.dtype == np.uint8
    # The mean falls by half a level, which is cut off; 36,864 values.
    assert noisy.mean() == pytest.approx(127.5, abs=0.6)
    assert noisy.std() / 255 == pytest.approx(deviation, rel=0.02)
