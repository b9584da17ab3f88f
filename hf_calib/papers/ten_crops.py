"""Ten crops of each test image, the protocol of CheXNet: the views, and a report on the mean of their predictions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from scipy.special import log_expit, log_softmax, logsumexp
from sklearn.base import clone
from transformers import BaseImageProcessor, ViTImageProcessorPil

from hf_calib._errors import InputValueError, expected
from hf_calib.data.images import decode_at
from hf_calib.data.pixels import decode_images, model_inputs, stacked_pixels
from hf_calib.experiments.reported_training import results_table
from hf_calib.report.writing import write_to
from hf_calib.trainer.calibration_map import in_words
from hf_calib.trainer.report import report_on

if TYPE_CHECKING:
    from hf_calib.trainer.trainer import CalibrationTrainer


def ten_crops(dataset: Dataset, processor: BaseImageProcessor, size: int) -> list[Dataset]:
    """Ten views of each image for a test: its four corners and its centre, and those of its mirror image.

    The mean of the model's probabilities over them is the usual protocol of CheXNet. Images are decoded and resized
    once, to a square, and kept as `decode_images` keeps them.

    Args:
        dataset: with the column `image`, as `choose_columns` returns it.
        processor: an image processor on the PIL backend; a crop has the size that it gives a whole image, and its
            mean and standard deviation normalise.
        size: height and width of the square; usually 256 for crops of 224.

    Returns:
        Ten datasets of the same rows, each with one view: top left, top right, bottom left, bottom right, centre, and
        the same five of the mirror image. They have `pixel_values` (3, height, width) and, where the dataset has
        labels, `labels`.

    Raises:
        ValueError: if the square is smaller than a crop, or an image cannot be read; the message names its row.

    Notes:
        The places are those of torchvision's `TenCrop`.

    >>> from PIL import Image
    >>> from transformers import ViTImageProcessorPil
    >>> images = Dataset.from_dict({"image": [Image.new("RGB", (40, 30))]})
    >>> crops = ten_crops(images, ViTImageProcessorPil(size={"height": 28, "width": 28}), 32)
    >>> len(crops), crops[0][0]["pixel_values"].shape
    (10, torch.Size([3, 28, 28]))
    """
    options: Any = processor  # of which the base class declares nothing
    first = dataset[0]
    whole = options(images=decode_at(first.get("row", "row 0"), first["image"]))["pixel_values"][0]
    height, width = np.asarray(whole).shape[1:]
    if size < max(height, width):
        requirement, way_out = f"be at least the side of a crop, {max(height, width)}", "256 is usual for 224"
        raise InputValueError(expected("the size of the images for ten crops", requirement, size, way_out))
    square = ViTImageProcessorPil(size={"height": size, "width": size}, resample=options.resample)
    decoded = decode_images(dataset, square)
    bottom, right = size - height, size - width
    places = [(0, 0), (0, right), (bottom, 0), (bottom, right), (round(bottom / 2), round(right / 2))]
    return [
        decoded.with_transform(_FixedCrop(processor, top, left, height, width, mirrored))
        for mirrored in (False, True)
        for top, left in places
    ]


@dataclass(frozen=True)
class _FixedCrop:
    """One part of each decoded image, of its mirror image where `mirrored`."""

    processor: BaseImageProcessor
    top: int
    left: int
    height: int
    width: int
    mirrored: bool

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        images = stacked_pixels(batch)
        if self.mirrored:
            images = images.flip(2)
        images = images[:, self.top : self.top + self.height, self.left : self.left + self.width]
        return model_inputs(images, self.processor, batch)


def write_ten_crop_report(
    trainer: CalibrationTrainer, crops: Mapping[str, Sequence[Any]], folder: str | Path
) -> None:
    """Report the mean probability over ten crops of the test images, before and after a map of its own.

    The trainer's map is for the saved model, which sees one view of an image. The mean of several probabilities is less
    confident, so a map of the same method is fitted to the means on the calibration rows. Called by all processes; the
    first one prints the metrics and writes the report, or warns where logits are not finite.

    Args:
        trainer: with a trained model.
        crops: what `ten_crops` makes of "calibration" and "test".
        folder: for report.md, .html, .json and the figures.

    Raises:
        ValueError: if the trainer's predictions have no logits (`prediction_loss_only`).
    """
    if trainer.args.prediction_loss_only:
        requirement, way_out = "be off for ten crops, whose logits are read", "leave it out"
        raise InputValueError(expected("prediction_loss_only", requirement, True, way_out))
    views = {split: predict_views(trainer, each) for split, each in crops.items()}
    if not trainer.is_world_process_zero():
        return
    if not all(np.isfinite(logits).all() for logits, _ in views.values()):
        report, scaler = None, None
    else:
        scaler = trainer.calibration_map
        if scaler is not None:
            scaler = clone(scaler).fit(*views["calibration"])
        name = f"{trainer.calibration_loss.name}, mean of ten crops"
        report = report_on(trainer, *views["test"], scaler, name=name)
    if report is None:
        warnings.warn(
            "Some of the model's logits are NaN or infinite on the ten crops, or several labels a row are soft. There "
            "is no report on them. Train with a smaller learning rate, or in higher precision.",
            stacklevel=2,
        )
        return
    write_to(Path(folder), report)
    print("Mean of ten crops an image; what is saved sees one image, as above:")
    print(results_table(report, None if scaler is None else in_words(scaler)))


def predict_views(
    trainer: CalibrationTrainer, views: Sequence[Any]
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Logits (N, C) of the mean probabilities over views of the same rows, and the labels; called by all processes."""
    outputs = [trainer.predict(view) for view in views]
    labels = np.asarray(outputs[0].label_ids)
    logits = np.stack([np.asarray(output.predictions, np.float64) for output in outputs])
    return logits_of_mean(logits, multi_label=labels.ndim == 2), labels


def logits_of_mean(logits: NDArray[np.float64], *, multi_label: bool) -> NDArray[np.float64]:
    """Logits whose softmax, or sigmoid of several labels a row, is the mean probability.

    Args:
        logits: (V, N, C) of V views.
        multi_label: whether each logit has a sigmoid.

    Returns:
        (N, C).

    >>> two = np.log([[[0.9, 0.1]], [[0.5, 0.5]]])
    >>> np.exp(logits_of_mean(two, multi_label=False)).round(6)
    array([[0.7, 0.3]])
    """
    if multi_label:
        return logsumexp(log_expit(logits), axis=0) - logsumexp(log_expit(-logits), axis=0)
    return logsumexp(log_softmax(logits, axis=-1), axis=0) - np.log(len(logits))
