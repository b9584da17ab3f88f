"""Transforms of stored images to `pixel_values`, with Pillow and a transformers image processor."""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import BaseImageProcessor, PreTrainedConfig

# It is imported from its own module, because the package requires torchvision in transformers 5.17.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hf_calib._errors import InputValueError, check, expected
from hf_calib._records import count, number, positive
from hf_calib.metrics.checks import check_integer

_DECODER = datasets.Image()
# In float32, an image with three channels and this side takes 800 MB.
_LARGEST_SIDE = 8_192
# Pillow's errors; a broken PNG is a SyntaxError.
_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_REPLACE = "remove or replace this row"
_END_OF_JPEG = b"\xff\xd9"
# As in the training of Inception; the area is a fraction of the image's.
_SMALLEST_AREA = 0.08
_LARGEST_ASPECT = 4 / 3


def _is_side(value: Any) -> bool:
    return count(value) and 1 <= value <= _LARGEST_SIDE


# What makes a setting of an image processor usable, so that no image of a broken one is a bug here.
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "size": _is_side,
    "crop_size": _is_side,
    "image_mean": number,
    "image_std": positive,
    "rescale_factor": positive,
}


@dataclass(frozen=True)
class ImageTransform:
    """Convert stored images to `pixel_values`, for `dataset.with_transform`, without torchvision.

    Use a transform with `crop` and `flip` for train, and a plain one for the other splits. The
    Trainer needs `remove_unused_columns=False`. Random draws use torch's generator, which the
    Trainer seeds.

    Args:
        processor: an image processor with the PIL backend from `load_image_processor`, which
            resizes and normalises.
        crop: "pad" shifts the image by up to `padding` over black (CIFAR); "resized" crops 8% to
            100% of the area and changes the aspect ratio by up to 4/3 (photographs); "none" is for
            evaluation.
        flip: whether to mirror half of the images; not for digits or text.
        padding: padding of "pad" in pixels on each side; None for an eighth of the side, which is 4
            at 32.

    Raises:
        ValueError: if `crop` is unknown; when called, if an image cannot be read or has more than 8
            bits per channel. The message has its row if the dataset has the column `row` of
            `load_data`.

    >>> from transformers import ViTImageProcessorPil
    >>> processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    >>> transform = ImageTransform(processor, crop="pad", flip=True)
    >>> example = transform({"image": [Image.new("L", (20, 10))], "label": [1]})
    >>> example["pixel_values"][0].shape, example["labels"]
    (torch.Size([3, 8, 8]), [1])
    """

    processor: BaseImageProcessor
    crop: Literal["none", "pad", "resized"] = "none"
    flip: bool = False
    padding: int | None = None

    def __post_init__(self) -> None:
        is_known = self.crop in _CROPS
        requirement = f"crop to be one of {', '.join(_CROPS)}"
        check(is_known, requirement, repr(self.crop), "use none for evaluation")
        if self.padding is not None:
            check_integer("padding", self.padding, 0, "the default is an eighth")

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        got = ", ".join(batch) or "no column"
        way_out = "use choose_columns, and remove_unused_columns=False in the training arguments"
        check("image" in batch, "the dataset to have the column image", got, way_out)
        rows = batch.get("row", [None] * len(batch["image"]))
        images = []
        for row, stored in zip(rows, batch["image"], strict=True):
            image = _CROPS[self.crop](decode_at(row, stored), self.padding)
            images.append(image)
        if self.flip:
            images = [_flipped_or_not(image) for image in images]
        pixels = self.processor(images=images)["pixel_values"]
        as_tensors = [torch.as_tensor(np.asarray(each)) for each in pixels]
        transformed: dict[str, list[Any]] = {"pixel_values": as_tensors}
        if "label" in batch:
            transformed["labels"] = batch["label"]
        return transformed


def load_image_processor(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a model's image processor from a folder or the Hub, with the PIL backend.

    Raise ValueError for settings with which no image can be read, or which make images of over
    8,192 pixels a side.
    """
    processor = AutoImageProcessor.from_pretrained(
        source, backend="pil", trust_remote_code=trust_remote_code
    )
    way_out = "save the image processor that the model was trained with"
    # A size of 0 or a deviation of 0 would be an error, or infinite, at the first image.
    for name, kind in _SETTINGS.items():
        given = getattr(processor, name, None)
        values = [given]
        # transformers' SizeDict keeps its entries as attributes.
        entries = getattr(given, "__dict__", given)
        if isinstance(entries, Mapping):
            # The most pixels of an image are no side of it.
            values = [each for key, each in entries.items() if "pixels" not in key]
        elif isinstance(given, list | tuple):
            values = list(given)
        fits = all(each is None or kind(each) for each in values)
        check(fits, f"a usable {name} of the image processor", given, way_out)
    return processor


def collate_images(examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack the examples of `ImageTransform`, as the Trainer's `data_collator`.

    Returns:
        `pixel_values` (N, 3, H, W) and, if the examples have labels, `labels` (N,) int64, or (N, C)
        float32 for lists of floats.

    Raises:
        ValueError: if the shapes of images differ.

    >>> batch = collate_images([{"pixel_values": torch.zeros(3, 8, 8), "labels": 1}] * 2)
    >>> batch["pixel_values"].shape, batch["labels"]
    (torch.Size([2, 3, 8, 8]), tensor([1, 1]))
    """
    pixels = [example["pixel_values"] for example in examples]
    # Processors that keep the aspect ratio leave images of several shapes.
    shapes = sorted({tuple(image.shape) for image in pixels})
    requirement = "images to have one shape after the processor"
    way_out = "set its size, or do_center_crop=True"
    check(len(shapes) <= 1, requirement, shapes, way_out)
    batch = {"pixel_values": torch.stack(pixels)}
    if "labels" in examples[0]:
        # torch makes a tensor of a list of arrays number by number.
        labels = torch.as_tensor(np.array([example["labels"] for example in examples]))
        # A loss with a sigmoid for each label takes floats.
        are_several = labels.ndim == 2
        batch["labels"] = labels.float() if are_several else labels.long()
    return batch


def check_images(rows: datasets.Dataset, name: str) -> Counter[str]:
    """Count the images of each Pillow mode ("RGB", "L", ...), and check all of them.

    Raise ValueError for an unreadable image, or one with over 8 bits a channel, with its row and
    `name`, the name of the rows with the column `image`. The check reads the header and the end of
    a JPEG and the checksums of a PNG. It decodes images in other formats or without an end.

    >>> images = datasets.Dataset.from_dict({"image": [Image.new("L", (8, 8))]})
    >>> check_images(images.cast_column("image", datasets.Image(decode=False)), "train")
    Counter({'L': 1})
    """
    images = rows.select_columns(["image"])
    images = images.cast_column("image", datasets.Image(decode=False))
    # An unreadable image would otherwise end a run in the middle of an epoch.
    modes: Counter[str] = Counter()
    for batch in images.iter(batch_size=256):
        for stored in batch["image"]:
            # The number of images that were counted is that of this row.
            with _errors_at(f"row {modes.total()} of {name}", stored):
                modes[_checked_mode(stored)] += 1
    return modes


def conversion_note(modes: Mapping[str, int], name: str) -> str | None:
    """Return two sentences on the conversion of images that are not RGB, or None if all are RGB.

    >>> print(conversion_note({"RGB": 8, "L": 2}, "test"))
    2 of the 10 images of test are converted to RGB (2 L). Grey is repeated, and transparency
    dropped.
    """
    others = {mode: n for mode, n in modes.items() if mode != "RGB"}
    if not others:
        return None
    n_all = sum(modes.values())
    n_others = sum(others.values())
    which = f"All {n_all:,}" if n_others == n_all else f"{n_others:,} of the {n_all:,}"
    kinds = ", ".join(f"{n:,} {mode}" for mode, n in others.items())
    said = f"{which} images of {name} are converted to RGB ({kinds})."
    return f"{said} Grey is repeated, and transparency dropped."


def check_reads_rgb(config: PreTrainedConfig) -> None:
    """Raise unless the model has three channels: images are RGB, as in transformers' pipelines."""
    channels = getattr(config, "num_channels", 3)
    requirement = "the model to read three channels"
    way_out = "set num_channels=3; grey images are repeated in each"
    check(channels == 3, requirement, f"num_channels={channels}", way_out)


def decode_at(
    place: str | None, stored: Image.Image | Mapping[str, Any]
) -> Image.Image:
    """Return an RGB image from a Pillow image, or from bytes or a path as `datasets` stores them.

    Error messages name the place, such as "row 17 of train", if it is known.
    """
    with _errors_at(place, stored):
        if isinstance(stored, Image.Image):
            image = stored
        else:
            image = _DECODER.decode_example(_with_bytes(stored))
        _check_bits(image)
    # Pillow warns if it drops the transparency of a palette at once.
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _checked_mode(stored: Mapping[str, Any]) -> str:
    """The mode of a stored image; raise if it cannot be read."""
    contents = _with_bytes(stored)["bytes"]
    if contents is None:
        # The file is missing or in an archive.
        has_path = stored.get("path") is not None
        got = "neither bytes nor a path"
        check(has_path, "image to be readable", got, _REPLACE)
        return decode_at(None, stored).mode
    with Image.open(io.BytesIO(contents)) as image:
        mode = image.mode
        is_png = image.format == "PNG"
        # The header of a JPEG that was cut off is whole, so its end is looked at.
        is_whole = image.format == "JPEG" and contents.endswith(_END_OF_JPEG)
        _check_bits(image)
        if is_png:
            image.verify()
    if not is_png and not is_whole:
        decode_at(None, stored)
    return mode


def _with_bytes(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The image with the contents of a local file, which Pillow leaves open if it is broken."""
    path = stored.get("path")
    contents = stored.get("bytes")
    if contents is None and path is not None and os.path.isfile(path):
        contents = Path(path).read_bytes()
    return {"path": path, "bytes": contents}


def _check_bits(image: Image.Image) -> None:
    # Pillow would clip the modes with more bits, I, I;16 and F, at 255.
    has_8_bits = not image.mode.startswith(("I", "F"))
    requirement = "image to have 8 bits a channel"
    check(has_8_bits, requirement, f"mode {image.mode!r}", "scale it to 0..255 first")


@contextmanager
def _errors_at(place: str | None, stored: Any) -> Iterator[None]:
    """A context that explains Pillow's errors and names the place of the image."""
    try:
        yield
    except _UNREADABLE as error:
        message = str(error)
        if not isinstance(error, InputValueError):
            cause = message
            if isinstance(error, UnidentifiedImageError):
                # The message names an object in memory.
                cause = "it is in no format that Pillow knows"
            contents = stored.get("bytes") or b""
            start = f"{len(contents)} bytes starting with {contents[:16]!r}"
            got = stored.get("path") or start
            message = expected("image", "be readable", got, f"{cause}; {_REPLACE}")
        if place is not None:
            message = f"{place}: {message}"
        raise InputValueError(message) from error


def _draw(low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * float(torch.rand(()))


def _flipped_or_not(image: Image.Image) -> Image.Image:
    return ImageOps.mirror(image) if _draw() < 0.5 else image


def border(size: int, padding: int | None) -> int:
    """Return the padding of a side of this size in pixels: by default an eighth, as 4 at 32."""
    return max(1, round(size / 8)) if padding is None else padding


def _padded_crop(image: Image.Image, padding: int | None) -> Image.Image:
    """A part of the image's size, at a random place of the image within black borders."""
    width, height = image.size
    across = border(width, padding)
    down = border(height, padding)
    left = int(torch.randint(2 * across + 1, ()))
    top = int(torch.randint(2 * down + 1, ()))
    padded = ImageOps.expand(image, border=(across, down))
    return padded.crop((left, top, left + width, top + height))


def _resized_crop(image: Image.Image, padding: int | None) -> Image.Image:
    """A random part of the image, which the processor resizes."""
    width, height = image.size
    area = width * height * _draw(_SMALLEST_AREA, 1.0)
    # The logarithm of the aspect ratio is uniform, so that wide and high parts are as frequent.
    log_aspect = _draw(-math.log(_LARGEST_ASPECT), math.log(_LARGEST_ASPECT))
    aspect = math.exp(log_aspect)
    # A part of this area and aspect ratio may be larger than the image on one side.
    part_width = min(width, max(1, round(math.sqrt(area * aspect))))
    part_height = min(height, max(1, round(math.sqrt(area / aspect))))
    left = int(torch.randint(width - part_width + 1, ()))
    top = int(torch.randint(height - part_height + 1, ()))
    return image.crop((left, top, left + part_width, top + part_height))


_CROPS = {
    "none": lambda image, padding: image,
    "pad": _padded_crop,
    "resized": _resized_crop,
}
