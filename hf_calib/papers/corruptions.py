"""Corrupted images: what a classifier of images may meet, and was not trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset, Image
from numpy.typing import NDArray
from PIL import Image as Pillow

from hf_calib._errors import InputValueError, expected
from hf_calib.data.images import decode_at

# Standard deviations by severity, of pixels in [0, 1]: those of CIFAR-10-C.
_GAUSSIAN = (0.04, 0.06, 0.08, 0.09, 0.10)


def gaussian_noise(dataset: Dataset, *, severity: int = 5, seed: int = 0) -> Dataset:
    """Add Gaussian noise to every pixel, as in CIFAR-10-C.

    Args:
        dataset: with the column `image`, as `choose_columns` returns it.
        severity: 1 to 5; the papers' tables have 5.
        seed: the same seed gives the same noise.

    Returns:
        The dataset with other images, of 8 bits a channel.

    Raises:
        ValueError: if severity is out of range, or an image cannot be read; the message names its row.

    References:
        Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, 2019,
        and its code for CIFAR-10.

    >>> grey = Dataset.from_dict({"image": [Pillow.new("RGB", (8, 8), (128, 128, 128))]})
    >>> noisy = np.asarray(gaussian_noise(grey)[0]["image"])
    >>> noisy.shape, bool(noisy.std() > 20)
    ((8, 8, 3), True)
    """
    if severity not in range(1, 6):
        got, way_out = repr(severity), "the papers' is 5"
        raise InputValueError(expected("severity", "be a whole number from 1 to 5", got, way_out))

    def corrupt(row: dict[str, Any], number: int) -> dict[str, Any]:
        pixels = np.asarray(decode_at(row.get("row", f"row {number}"), row["image"]))
        noisy = corrupted(pixels, _GAUSSIAN[severity - 1], np.random.default_rng((seed, number)))
        return {"image": Pillow.fromarray(noisy)}

    features = dataset.features.copy()
    features["image"] = Image()
    return dataset.map(corrupt, with_indices=True, features=features, desc="Adding noise")


def corrupted(pixels: NDArray[np.uint8], deviation: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Pixels of any shape with noise of this standard deviation in [0, 1]; cut to that range, and cut off to 8 bits."""
    noisy = pixels / 255 + rng.normal(scale=deviation, size=pixels.shape)
    return (np.clip(noisy, 0, 1) * 255).astype(np.uint8)
