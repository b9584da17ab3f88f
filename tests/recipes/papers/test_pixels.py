"""Images decoded once, and their transform of a batch at a time, against the one of an image at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from papers.images import ten_crops
from papers.pixels import PixelTransform, decode_images
from PIL import Image
from transformers import ConvNextImageProcessorPil, ViTImageProcessorPil

from hf_calib.data import ImageTransform

RAW = ViTImageProcessorPil(do_resize=False, do_rescale=False, do_normalize=False)
SMALL = ViTImageProcessorPil(size={"height": 16, "width": 16})


def images_of(*arrays: np.ndarray) -> Dataset:
    return Dataset.from_dict(
        {
            "image": [Image.fromarray(a) for a in arrays],
            "label": list(range(len(arrays))),
        }
    )


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        1, 256, (height, width, 3), dtype=np.uint8
    )


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(
            size={"height": 12, "width": 20}, image_mean=[0.1, 0.2, 0.3]
        ),
        ConvNextImageProcessorPil(size={"shortest_edge": 16}),
        RAW,
    ],
    ids=["not square", "resnet", "as they are"],
)
def test_without_augmentation_both_transforms_agree(processor: Any) -> None:
    dataset = images_of(*(noise(24, 30, seed) for seed in range(5)))
    one_by_one = dataset.with_transform(ImageTransform(processor))[:]
    decoded = decode_images(dataset, processor).with_transform(
        PixelTransform(processor)
    )
    at_once = decoded[:]
    assert at_once["pixel_values"].dtype == torch.float32
    torch.testing.assert_close(
        at_once["pixel_values"],
        torch.stack(one_by_one["pixel_values"]).float(),
        rtol=0,
        atol=2e-6,
    )
    assert at_once["labels"] == one_by_one["labels"]


def test_a_padded_crop_shifts_each_image_by_itself_over_black() -> None:
    torch.manual_seed(0)
    array = noise(16, 32)
    canvas = np.zeros((16 + 4, 32 + 8, 3))
    canvas[2:-2, 4:-4] = array
    crops = {
        (top, left): canvas[top : top + 16, left : left + 32].transpose(2, 0, 1)
        for top in range(5)
        for left in range(9)
    }
    decoded = decode_images(images_of(*[array] * 500), RAW)
    seen = PixelTransform(RAW, crop="pad")(decoded[:])["pixel_values"].numpy()
    found = [
        next(at for at, crop in crops.items() if np.array_equal(image, crop))
        for image in seen
    ]
    assert set(found) == set(
        crops
    )  # each of the 45; one is missing once in 2,000 seeds


def test_the_ten_crops_are_those_of_torchvision() -> None:
    """Resize, TenCrop, ToTensor, Normalize: the image mirrored as a whole, then cut as the first five."""
    size = {"height": 12, "width": 17}
    processor: Any = ViTImageProcessorPil(
        size=size, image_mean=[0.1, 0.2, 0.3], resample=3
    )
    arrays = [noise(24, 30, seed) for seed in range(3)]
    found = ten_crops(images_of(*arrays), processor, 20)
    mean, std = np.array(processor.image_mean), np.array(processor.image_std)
    height, width = np.asarray(
        processor(images=Image.fromarray(arrays[0]))["pixel_values"][0]
    ).shape[1:]
    for i, array in enumerate(arrays):
        square = np.asarray(Image.fromarray(array).resize((20, 20), processor.resample))
        by_hand = []
        for image in (square, square[:, ::-1]):
            down, right = 20 - height, 20 - width
            middle = image[
                round(down / 2) : round(down / 2) + height,
                round(right / 2) : round(right / 2) + width,
            ]
            by_hand += [
                image[:height, :width],
                image[:height, right:],
                image[down:, :width],
            ]
            by_hand += [image[down:, right:], middle]
        for crops, part in zip(found, by_hand, strict=True):
            wanted = ((part / 255 - mean) / std).transpose(2, 0, 1)
            np.testing.assert_allclose(
                crops[i]["pixel_values"], wanted, rtol=0, atol=2e-6
            )
            assert crops[i]["labels"] == i


def test_wrong_use_is_refused() -> None:
    for wrong, message in (
        (
            lambda: PixelTransform(SMALL, crop="resized"),
            "expected crop to be one of .*use ImageTransform",
        ),  # type: ignore[arg-type]
        (
            lambda: PixelTransform(SMALL)({"image": []}),
            "have the column pixels, got image; call decode_images first",
        ),
        (
            lambda: decode_images(images_of(noise(8, 8), noise(8, 9)), RAW),
            "got 9 x 8 in row 1, 8 x 8 in row 0",
        ),
        (
            lambda: ten_crops(images_of(noise(8, 8)), SMALL, 15),
            "at least the side of a crop, 16, got 15; 256 is",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
