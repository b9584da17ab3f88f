"""Images decoded once and kept as bytes, and a transform of whole batches, so that a CPU keeps up with a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, Features, Value
from torch import Tensor
from transformers import BaseImageProcessor

from hf_calib._errors import InputValueError, expected
from hf_calib.data.images import border, decode_at

_CROPS = ("none", "pad")


def decode_images(dataset: Dataset, processor: BaseImageProcessor) -> Dataset:
    """Decode and resize each image once, and keep it as 8-bit pixels in the cache of `datasets`, on disk.

    For small images, of which decoding takes longer than anything else: 3 x height x width bytes an image. An image
    that cannot be read is found here, before a training.

    Args:
        dataset: with the column `image`, as `choose_columns` returns it.
        processor: an image processor on the PIL backend, for its size.

    Returns:
        The dataset with `pixels` (bytes, height x width x 3), `height` and `width` in place of `image`, for
        `PixelTransform`.

    Raises:
        ValueError: if an image cannot be read, has more than 8 bits a channel, or another size than the first after
            the processor; the message names its row.

    >>> from PIL import Image
    >>> from transformers import ViTImageProcessorPil
    >>> images = Dataset.from_dict({"image": [Image.new("RGB", (8, 8))], "label": [1]})
    >>> decoded = decode_images(images, ViTImageProcessorPil(size={"height": 4, "width": 4}))
    >>> len(decoded[0]["pixels"]), decoded[0]["label"]
    (48, 1)
    """
    features = Features(
        {name: feature for name, feature in dataset.features.items() if name != "image"}
        | {"pixels": Value("binary"), "height": Value("int32"), "width": Value("int32")}
    )

    def decode_rows(
        batch: dict[str, list[Any]], rows: list[int]
    ) -> dict[str, list[Any]]:
        places = batch.get("row", [f"row {row}" for row in rows])
        images = [
            decode_at(place, stored)
            for place, stored in zip(places, batch["image"], strict=True)
        ]
        arrays = [
            np.asarray(
                processor(images=image, do_rescale=False, do_normalize=False)[
                    "pixel_values"
                ][0]
            )
            for image in images
        ]
        arrays = [
            np.ascontiguousarray(array.transpose(1, 2, 0), dtype=np.uint8)
            for array in arrays
        ]
        return {
            "pixels": [array.tobytes() for array in arrays],
            "height": [len(array) for array in arrays],
            "width": [array.shape[1] for array in arrays],
        }

    decoded = dataset.map(
        decode_rows,
        with_indices=True,
        batched=True,
        batch_size=256,
        remove_columns="image",
        features=features,
        desc="Decoding images",
    )
    sizes = np.stack(
        [decoded.data.column(name).to_numpy() for name in ("height", "width")], axis=1
    )
    others = np.flatnonzero((sizes != sizes[0]).any(axis=1))
    if len(others):
        height, width = sizes[others[0]]
        got = f"{width} x {height} in row {others[0]}, {sizes[0][1]} x {sizes[0][0]} in row 0"
        way_out = "set the processor's size, or do_center_crop=True"
        raise InputValueError(
            expected("images", "have one size after the processor", got, way_out)
        )
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
        It draws from torch's global generator, so that the Trainer's seed and the seeds that a DataLoader gives its
        workers make training reproducible (for one number of workers).

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
        got, way_out = ", ".join(batch) or "no column", "call decode_images first"
        raise InputValueError(
            expected("the dataset", "have the column pixels", got, way_out)
        )
    shape = (len(batch["pixels"]), batch["height"][0], batch["width"][0], 3)
    return torch.frombuffer(bytearray().join(batch["pixels"]), dtype=torch.uint8).view(
        shape
    )


def model_inputs(
    images: Tensor, processor: Any, batch: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's inputs: normalised images, and the labels of the batch."""
    values = images.permute(0, 3, 1, 2).to(
        torch.float32, memory_format=torch.contiguous_format
    )
    if processor.do_rescale:
        values *= processor.rescale_factor
    if processor.do_normalize:
        mean, std = (
            torch.tensor(each)[:, None, None]
            for each in (processor.image_mean, processor.image_std)
        )
        values = values.sub_(mean).div_(std)
    return {
        "pixel_values": values,
        **({"labels": batch["label"]} if "label" in batch else {}),
    }


def _shifted(images: Tensor, padding: int | None) -> Tensor:
    """(N, height, width, 3), each cut at random from the image with a black border."""
    n, height, width, _ = images.shape

    def drawn(size: int) -> Tensor:
        beside = border(size, padding)
        return torch.randint(2 * beside + 1, (n, 1)) - beside + torch.arange(size)

    rows, columns = drawn(height), drawn(width)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & (
        (columns >= 0) & (columns < width)
    )[:, None, :]
    picked = images[
        torch.arange(n)[:, None, None],
        rows.clamp(0, height - 1)[:, :, None],
        columns.clamp(0, width - 1)[:, None, :],
    ]
    return picked * inside.unsqueeze(-1)
