"""Test images with noise that a classifier was not trained on, and ten crops of each, as in CheXNet."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Image
from numpy.typing import NDArray
from PIL import Image as Pillow
from scipy.special import log_expit, log_softmax, logsumexp
from sklearn.base import clone
from transformers import BaseImageProcessor, ViTImageProcessorPil

from hf_calib._errors import check
from hf_calib.data.images import decode_at
from hf_calib.experiments.reported_training import results_table
from hf_calib.predictions.predictions import Predictions
from hf_calib.trainer.calibration_map import in_words
from hf_calib.trainer.results import report_on
from papers.pixels import decode_images, model_inputs, stacked_pixels

if TYPE_CHECKING:
    from hf_calib import CalibrationTrainer

# Standard deviations by severity, of pixels in [0, 1]: those of CIFAR-10-C.
_GAUSSIAN = (0.04, 0.06, 0.08, 0.09, 0.10)


def gaussian_noise(dataset: Dataset, *, severity: int = 5, seed: int = 0) -> Dataset:
    """Add Gaussian noise to every pixel, as in CIFAR-10-C; the images have 8 bits a channel.

    The dataset has the column `image`; severity is 1 to 5, that of the papers' tables 5. Hendrycks
    and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
    2019, and its code for CIFAR-10.

    >>> grey = Dataset.from_dict({"image": [Pillow.new("RGB", (8, 8), (128, 128, 128))]})
    >>> noisy = np.asarray(gaussian_noise(grey)[0]["image"])
    >>> noisy.shape, bool(noisy.std() > 20)
    ((8, 8, 3), True)
    """
    requirement = "severity to be a whole number from 1 to 5"
    check(severity in range(1, 6), requirement, repr(severity), "the papers' is 5")

    def corrupt(row: dict[str, Any], number: int) -> dict[str, Any]:
        image = decode_at(row.get("row", f"row {number}"), row["image"])
        pixels = np.asarray(image) / 255
        rng = np.random.default_rng((seed, number))
        noise = rng.normal(scale=_GAUSSIAN[severity - 1], size=pixels.shape)
        noisy = np.clip(pixels + noise, 0, 1) * 255
        return {"image": Pillow.fromarray(noisy.astype(np.uint8))}

    features = dataset.features.copy()
    features["image"] = Image()
    return dataset.map(
        corrupt, with_indices=True, features=features, desc="Adding noise"
    )


def ten_crops(
    dataset: Dataset, processor: BaseImageProcessor, size: int
) -> list[Dataset]:
    """Ten views of each image for a test: its four corners and its centre, and those of its mirror image.

    Images are decoded and resized once, to a square, and kept as `decode_images` keeps them. The
    places are those of torchvision's `TenCrop`.

    Args:
        dataset: with the column `image`, as `choose_columns` returns it.
        processor: an image processor on the PIL backend; a crop has the size that it gives a whole
            image.
        size: height and width of the square; usually 256 for crops of 224.

    Returns:
        Ten datasets of the same rows, with `pixel_values` (3, height, width) and, where the dataset
        has them, `labels`.

    >>> images = Dataset.from_dict({"image": [Pillow.new("RGB", (40, 30))]})
    >>> crops = ten_crops(images, ViTImageProcessorPil(size={"height": 28, "width": 28}), 32)
    >>> len(crops), crops[0][0]["pixel_values"].shape
    (10, torch.Size([3, 28, 28]))
    """
    # The base class of processors declares no options.
    options: Any = processor
    first = dataset[0]
    image = decode_at(first.get("row", "row 0"), first["image"])
    (whole,) = options(images=image)["pixel_values"]
    _, height, width = np.asarray(whole).shape
    side = max(height, width)
    requirement = f"the size of the images for ten crops to be at least the side of a crop, {side}"
    check(size >= side, requirement, size, "256 is usual for 224")
    square_size = {"height": size, "width": size}
    square = ViTImageProcessorPil(size=square_size, resample=options.resample)
    decoded = decode_images(dataset, square)
    bottom = size - height
    right = size - width
    centre = (round(bottom / 2), round(right / 2))
    crops = []
    for mirrored in (False, True):
        for y, x in ((0, 0), (0, right), (bottom, 0), (bottom, right), centre):
            crop = _Crop(processor, slice(y, y + height), slice(x, x + width), mirrored)
            crops.append(decoded.with_transform(crop))
    return crops


@dataclass(frozen=True)
class _Crop:
    """The same part of each decoded image, or of its mirror image."""

    processor: BaseImageProcessor
    rows: slice
    columns: slice
    mirrored: bool

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        images = stacked_pixels(batch)
        if self.mirrored:
            images = images.flip(2)
        part = images[:, self.rows, self.columns]
        return model_inputs(part, self.processor, batch)


def write_ten_crop_report(
    trainer: CalibrationTrainer, crops: Mapping[str, Sequence[Any]], folder: str | Path
) -> None:
    """Report the mean probability over ten crops of "test", before and after a map that is fitted on "calibration".

    The trainer's map is for the saved model, which sees one view of an image. The mean of several
    probabilities is less confident, so it has a map of the same method of its own. Called by all
    processes; the first one prints the metrics and writes the report, or warns where logits are not
    finite.
    """
    requirement = "prediction_loss_only to be off for ten crops, whose logits are read"
    check(not trainer.args.prediction_loss_only, requirement, True, "leave it out")
    views = {split: _predict_views(trainer, each) for split, each in crops.items()}
    if not trainer.is_world_process_zero():
        return
    are_finite = all(np.isfinite(logits).all() for logits, _ in views.values())
    report = None
    scaler = None
    if are_finite:
        if trainer.calibration_map is not None:
            scaler = clone(trainer.calibration_map).fit(*views["calibration"])
        logits, labels = views["test"]
        numbers = sorted(trainer.class_names)
        names = tuple(trainer.class_names[number] for number in numbers) or None
        test = Predictions(labels, logits=logits, class_names=names, validate=False)
        name = f"{trainer.calibration_loss.name}, mean of ten crops"
        report = report_on(test, name, trainer.calibration_config.n_bins, scaler)
    if report is None:
        why = "some of the model's logits are NaN or infinite on them, or several labels per row are soft"
        way_out = "Train with a smaller learning rate, or in higher precision."
        warnings.warn(
            f"There is no report on ten crops: {why}. {way_out}", stacklevel=2
        )
        return
    report.save(folder)
    print("Mean of ten crops per image; what is saved sees one image, as above:")
    print(results_table(report, None if scaler is None else in_words(scaler)))


def _predict_views(
    trainer: CalibrationTrainer, views: Sequence[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits (N, C) of the mean probabilities over views of the same rows, and the labels; called by all processes."""
    outputs = [trainer.predict(view) for view in views]
    labels = np.asarray(outputs[0].label_ids)
    logits = np.stack([output.predictions for output in outputs], dtype=np.float64)
    return logits_of_mean(logits, multi_label=labels.ndim == 2), labels


def logits_of_mean(
    logits: NDArray[np.float64], *, multi_label: bool
) -> NDArray[np.float64]:
    """Logits (N, C) whose softmax (sigmoid for several labels per row) is the mean probability over V views (V, N, C).

    >>> two = np.log([[[0.9, 0.1]], [[0.5, 0.5]]])
    >>> np.exp(logits_of_mean(two, multi_label=False)).round(6)
    array([[0.7, 0.3]])
    """
    if multi_label:
        log_p = logsumexp(log_expit(logits), axis=0)
        log_one_minus_p = logsumexp(log_expit(-logits), axis=0)
        return log_p - log_one_minus_p
    return logsumexp(log_softmax(logits, axis=-1), axis=0) - np.log(len(logits))
