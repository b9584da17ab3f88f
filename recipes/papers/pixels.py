"""Images decoded once and kept as bytes, and a transform of whole batches, so that a CPU keeps up with a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, Value
from torch import Tensor
from transformers import BaseImageProcessor

from hf_calib._errors import InputValueError, expected
from hf_calib.data.images import border, decode_at

_CROPS = ("none", "pad")


def decode_images(dataset: Dataset, processor: BaseImageProcessor) -> Dataset:
    """Decode and resize each image once, and keep it as 8-bit pixels in the cache of `datasets`, on disk.

    For small images, of which decoding takes longer than anything else: 3 x height x width bytes an
    image. An image that cannot be read is found here, before a training.

    Args:
        dataset: with the column `image`, as `choose_columns` returns it.
        processor: an image processor on the PIL backend, for its size.

    Returns:
        The dataset with `pixels` (bytes, height x width x 3), `height` and `width` in place of
        `image`, for `PixelTransform`.

    Raises:
        ValueError: if an image cannot be read, has more than 8 bits a channel, or another size than
            the first after the processor; the message names its row.

    >>> from PIL import Image
    >>> from transformers import ViTImageProcessorPil
    >>> images = Dataset.from_dict({"image": [Image.new("RGB", (8, 8))], "label": [1]})
    >>> decoded = decode_images(images, ViTImageProcessorPil(size={"height": 4, "width": 4}))
    >>> len(decoded[0]["pixels"]), decoded[0]["label"]
    (48, 1)
    """
    features = dataset.features.copy()
    del features["image"]
    features["pixels"] = Value("binary")
    features["height"] = Value("int32")
    features["width"] = Value("int32")
    unscaled = partial(processor, do_rescale=False, do_normalize=False)

    def decode(row: dict[str, Any], number: int) -> dict[str, Any]:
        image = decode_at(row.get("row", f"row {number}"), row["image"])
        (values,) = unscaled(images=image)["pixel_values"]
        channels_last = np.asarray(values).transpose(1, 2, 0)
        pixels = np.ascontiguousarray(channels_last, dtype=np.uint8)
        height, width, _ = pixels.shape
        return {"pixels": pixels.tobytes(), "height": height, "width": width}

    decoded = dataset.map(
        decode,
        with_indices=True,
        remove_columns="image",
        features=features,
        desc="Decoding images",
    )
    heights = np.asarray(decoded["height"][:])
    widths = np.asarray(decoded["width"][:])
    others = np.flatnonzero((heights != heights[0]) | (widths != widths[0]))
    if len(others):
        other = others[0]
        size = f"{widths[other]} x {heights[other]} in row {other}"
        first = f"{widths[0]} x {heights[0]} in row 0"
        way_out = "set the processor's size, or do_center_crop=True"
        requirement = "have one size after the processor"
        message = expected("images", requirement, f"{size}, {first}", way_out)
        raise InputValueError(message)
    return decoded


@dataclass(frozen=True)
class PixelTransform:
    """Turn decoded images into `pixel_values`, for `dataset.with_transform`: as `ImageTransform`, but a batch at once.

    Args:
        processor: the one of `decode_images`; its mean and standard deviation normalise.
        crop: "pad" shifts the image by up to `padding`, over black; "none" for evaluation.
        flip: mirror half of the images; not for digits or text.
        padding: of "pad", in pixels on each side; None for an eighth of the side, 4 at 32.

    Raises:
        ValueError: if `crop` is unknown; when called, if the dataset is not one of `decode_images`.

    Notes:
        It draws from torch's global generator, so that the Trainer's seed and the seeds that a
        DataLoader gives its workers make training reproducible (for one number of workers).

    >>> from transformers import ViTImageProcessorPil
    >>> transform = PixelTransform(ViTImageProcessorPil(), crop="pad", flip=True)
    >>> batch = {"pixels": [bytes(48)], "height": [4], "width": [4], "label": [1]}
    >>> transform(batch)["pixel_values"].shape
    torch.Size([1, 3, 4, 4])
    """

    processor: BaseImageProcessor
    crop: Literal["none", "pad"] = "none"
    flip: bool = False
    padding: int | None = None

    def __post_init__(self) -> None:
        if self.crop not in _CROPS:
            way_out = "use ImageTransform for others, on images that are not decoded"
            raise InputValueError(
                expected("crop", f"be one of {_CROPS}", repr(self.crop), way_out)
            )

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        images = stacked_pixels(batch)
        if self.crop == "pad":
            images = _shifted(images, self.padding)
        if self.flip:
            flipped = torch.rand(len(images)) < 0.5
            images = torch.where(flipped[:, None, None, None], images.flip(2), images)
        return model_inputs(images, self.processor, batch)


def stacked_pixels(batch: Mapping[str, Any]) -> Tensor:
    """(N, height, width, 3) uint8."""
    if "pixels" not in batch:
        got = ", ".join(batch) or "no column"
        way_out = "call decode_images first"
        raise InputValueError(
            expected("the dataset", "have the column pixels", got, way_out)
        )
    shape = (len(batch["pixels"]), batch["height"][0], batch["width"][0], 3)
    # A copy of the bytes, because torch writes to the memory that it reads.
    joined = bytearray().join(batch["pixels"])
    return torch.frombuffer(joined, dtype=torch.uint8).view(shape)


def model_inputs(
    images: Tensor, processor: Any, batch: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's inputs: normalised images, and the labels of the batch."""
    channels_first = images.permute(0, 3, 1, 2)
    values = channels_first.to(torch.float32, memory_format=torch.contiguous_format)
    if processor.do_rescale:
        values *= processor.rescale_factor
    if processor.do_normalize:
        mean = torch.tensor(processor.image_mean)[:, None, None]
        std = torch.tensor(processor.image_std)[:, None, None]
        values = values.sub_(mean).div_(std)
    inputs = {"pixel_values": values}
    if "label" in batch:
        inputs["labels"] = batch["label"]
    return inputs


def _shifted(images: Tensor, padding: int | None) -> Tensor:
    """(N, height, width, 3), each cut at random from the image with a black border."""
    n, height, width, _ = images.shape
    above = border(height, padding)
    beside = border(width, padding)
    black = F.pad(images, (0, 0, beside, beside, above, above))
    # (N, 1) places of the corner, and from there (N, height) rows and (N, width) columns.
    top = torch.randint(2 * above + 1, (n, 1))
    left = torch.randint(2 * beside + 1, (n, 1))
    rows = top + torch.arange(height)
    columns = left + torch.arange(width)
    numbers = torch.arange(n)
    return black[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]
