"""Images of a test: ten crops of each, the mean probability by hand; the noise of CIFAR-10-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from datasets import Image as ImageFeature
from papers.images import gaussian_noise, logits_of_mean, ten_crops, write_ten_crop_report
from PIL import Image
from scipy.special import expit, softmax
from sklearn.metrics import log_loss
from transformers import AutoModelForImageClassification, ViTConfig, ViTImageProcessorPil

from hf_calib import CalibrationTrainer
from hf_calib.data import ImageTransform, collate_images
from hf_calib.scaling import PerLabelTemperatureScaling, TemperatureScaling
from tests.helpers.reports import quick_report  # noqa: F401
from tests.helpers.tiny import arguments

PROCESSOR = ViTImageProcessorPil(size={"height": 16, "width": 16})


def test_the_mean_is_of_probabilities() -> None:
    logits = np.random.default_rng(0).normal(0, 4, (10, 6, 3))
    mean = logits_of_mean(logits, multi_label=False)
    np.testing.assert_allclose(softmax(mean, axis=1), softmax(logits, axis=2).mean(axis=0), rtol=1e-12)
    several = logits_of_mean(logits, multi_label=True)
    np.testing.assert_allclose(expit(several), expit(logits).mean(axis=0), rtol=1e-12)
    # Sure of each, where a probability would be 1; and views that agree are each of them.
    assert np.isfinite(logits_of_mean(1000 * logits, multi_label=True)).all()
    np.testing.assert_allclose(logits_of_mean(logits[[0] * 10], multi_label=True), logits[0], rtol=1e-12)


def network(*, multi_label: bool) -> Any:
    """Random, with logits that differ from image to image."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                       intermediate_size=16, num_labels=3, initializer_range=0.3)  # fmt: skip
    config.problem_type = "multi_label_classification" if multi_label else "single_label_classification"
    return AutoModelForImageClassification.from_config(config).eval()


def rows(model: Any, n: int, seed: int, *, multi_label: bool) -> Dataset:
    """Noise, with labels drawn as the model says."""
    rng = np.random.default_rng(seed)
    images = [Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)) for _ in range(n)]
    with torch.no_grad():
        logits = model(PROCESSOR(images=images, return_tensors="pt")["pixel_values"]).logits.numpy()
    labels: Any = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    feature: Any = ClassLabel(names=["a", "b", "c"])
    if multi_label:
        labels, feature = rng.random(logits.shape) < expit(logits), Sequence(Value("float32"))
    features = Features({"image": ImageFeature(), "label": feature})
    return Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features)


@pytest.mark.parametrize(
    "multi_label",
    [
        pytest.param(True, marks=pytest.mark.slow, id="several labels"),
        pytest.param(False, marks=pytest.mark.deep, id="one label"),
    ],
)
@pytest.mark.usefixtures("quick_report")
def test_the_report_is_on_the_mean(multi_label: bool, tmp_path: Path) -> None:
    model = network(multi_label=multi_label)
    splits = {
        name: rows(model, 60, seed, multi_label=multi_label)
        for seed, name in enumerate(("calibration", "test"))
    }
    plain = {name: split.with_transform(ImageTransform(PROCESSOR)) for name, split in splits.items()}
    trainer = CalibrationTrainer(
        model,
        arguments(
            tmp_path,
            learning_rate=0,
            max_steps=1,
            save_strategy="no",
            remove_unused_columns=False,
            calibration_method="per_label_temperature" if multi_label else "temperature",
        ),
        train_dataset=rows(model, 8, 2, multi_label=multi_label).with_transform(ImageTransform(PROCESSOR)),
        calibration_dataset=plain["calibration"],
        processing_class=PROCESSOR,
        data_collator=collate_images,
    )
    crops = {name: ten_crops(split, PROCESSOR, 20) for name, split in splits.items()}
    trainer.train()
    write_ten_crop_report(trainer, crops, tmp_path / "report_ten_crops")

    # By hand, with Pillow, an image at a time.
    model.eval()
    means = {}
    for name, split in splits.items():
        probs = np.zeros((60, 3))
        for i, image in enumerate(split["image"]):
            small = image.resize((20, 20), PROCESSOR.resample)
            for left, top in ((0, 0), (4, 0), (0, 4), (4, 4), (2, 2)):
                part = small.crop((left, top, left + 16, top + 16))
                for view in (part, part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)):
                    pixels = PROCESSOR(images=view, return_tensors="pt")["pixel_values"]
                    with torch.no_grad():
                        logits = model(pixels).logits[0].double()
                    probs[i] += np.asarray(logits.sigmoid() if multi_label else logits.softmax(0)) / 10
        means[name] = probs
    truth = np.asarray(splits["test"]["label"])

    def nll(probs: np.ndarray) -> float:
        if multi_label:
            return log_loss(truth.ravel(), probs.ravel())
        return log_loss(truth, probs, labels=[0, 1, 2])

    def logits(probs: np.ndarray) -> np.ndarray:
        return np.log(probs) - np.log1p(-probs) if multi_label else np.log(probs)

    report = json.loads((tmp_path / "report_ten_crops" / "report.json").read_text())
    found = {state: report[state]["metrics"] for state in ("before", "after")}
    key = "micro_nll" if multi_label else "nll"
    assert found["before"][key]["value"] == pytest.approx(nll(means["test"]), abs=1e-5)
    # Its temperatures are of the means on the calibration rows.
    scaler: Any = PerLabelTemperatureScaling() if multi_label else TemperatureScaling()
    scaler.fit(logits(means["calibration"]), np.asarray(splits["calibration"]["label"]))
    calibrated = scaler.predict_proba(logits(means["test"]))
    assert found["after"][key]["value"] == pytest.approx(nll(calibrated), abs=1e-4)
    assert report["name"] == "cross_entropy, mean of ten crops"


def pixels(dataset: Dataset) -> np.ndarray:
    return np.stack([np.asarray(row["image"]) for row in dataset])


def grey(n: int = 3, value: int = 128) -> Dataset:
    return Dataset.from_dict(
        {"image": [Image.new("RGB", (64, 64), (value,) * 3) for _ in range(n)], "label": list(range(n))}
    )


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.10)])
def test_the_noise_is_that_of_cifar_10_c(severity: int, deviation: float) -> None:
    noisy = pixels(gaussian_noise(grey(), severity=severity))
    assert noisy.dtype == np.uint8
    # The mean falls by half a level, which is cut off; 36,864 values.
    assert noisy.mean() == pytest.approx(127.5, abs=0.6)
    assert noisy.std() / 255 == pytest.approx(deviation, rel=0.02)


def test_noise_is_cut_to_the_range_and_drawn_for_each_image_by_its_seed() -> None:
    white = pixels(gaussian_noise(grey(value=255)))
    assert white.max() == 255
    assert (white == 255).mean() == pytest.approx(0.5, abs=0.02)  # the upper half of the noise
    first = pixels(gaussian_noise(grey()))
    assert (first == pixels(gaussian_noise(grey()))).all()
    assert not (first[0] == first[1]).all()
    assert not (first == pixels(gaussian_noise(grey(), seed=1))).all()


def test_noise_keeps_the_other_columns_and_refuses_other_severities() -> None:
    assert gaussian_noise(grey())["label"][:] == [0, 1, 2]
    for severity in (0, 6, 2.5):
        with pytest.raises(ValueError, match="expected severity to be a whole number from 1 to 5"):
            gaussian_noise(grey(), severity=severity)  # type: ignore[arg-type]
