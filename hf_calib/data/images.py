"""Image transforms from stored images to `pixel_values`, with Pillow and a transformers image processor."""

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
_LARGEST_SIDE = 8_192
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    Image.DecompressionBombError,
)  # from Pillow
_REPLACE = "remove or replace this row"
_END_OF_JPEG = b"\xff\xd9"
_SMALLEST_AREA = 0.08  # As a fraction of the image, as in Inception training.
_LARGEST_ASPECT = 4 / 3


def _is_side(value: Any) -> bool:
    return count(value) and 1 <= value <= _LARGEST_SIDE


_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "size": _is_side,
    "crop_size": _is_side,
    "image_mean": number,
    "image_std": positive,
    "rescale_factor": positive,
}


@dataclass(frozen=True)
class ImageTransform:
    """Convert stored images to `pixel_values`, for `dataset.with_transform`; torchvision is not needed.

    Use a transform with `crop` and `flip` for train, and a plain one for the other splits. The Trainer needs
    `remove_unused_columns=False`. Random draws use torch's generator, which the Trainer seeds.

    Args:
        processor: an image processor with the PIL backend from `load_image_processor`, which resizes and normalises.
        crop: "pad" shifts the image by up to `padding` over black (CIFAR); "resized" crops 8% to 100% of the area and
            changes the aspect ratio by up to 4/3 (photographs); "none" is for evaluation.
        flip: whether to mirror half of the images; not for digits or text.
        padding: padding of "pad" in pixels on each side; None for an eighth of the side, which is 4 at 32.

    Raises:
        ValueError: if `crop` is unknown; when called, if an image cannot be read or has more than 8 bits per channel.
            The message has its row if the dataset has the column `row` of `load_data`.

    >>> from transformers import ViTImageProcessorPil
    >>> transform = ImageTransform(ViTImageProcessorPil(size={"height": 8, "width": 8}), crop="pad", flip=True)
    >>> example = transform({"image": [Image.new("L", (20, 10))], "label": [1]})
    >>> example["pixel_values"][0].shape, example["labels"]
    (torch.Size([3, 8, 8]), [1])
    """

    processor: BaseImageProcessor
    crop: Literal["none", "pad", "resized"] = "none"
    flip: bool = False
    padding: int | None = None

    def __post_init__(self) -> None:
        requirement = f"crop to be one of {', '.join(_CROPS)}"
        check(
            self.crop in _CROPS, requirement, repr(self.crop), "use none for evaluation"
        )
        if self.padding is not None:
            check_integer("padding", self.padding, 0, "the default is an eighth")

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        got = ", ".join(batch) or "no column"
        way_out = "use choose_columns, and remove_unused_columns=False in the training arguments"
        check("image" in batch, "the dataset to have the column image", got, way_out)
        rows = batch.get("row", [None] * len(batch["image"]))
        images = [
            decode_at(row, stored)
            for row, stored in zip(rows, batch["image"], strict=True)
        ]
        images = [_CROPS[self.crop](image, self.padding) for image in images]
        if self.flip:
            images = [
                ImageOps.mirror(image) if _draw() < 0.5 else image for image in images
            ]
        pixels = self.processor(images=images)["pixel_values"]
        transformed: dict[str, list[Any]] = {
            "pixel_values": [torch.as_tensor(np.asarray(p)) for p in pixels]
        }
        if "label" in batch:
            transformed["labels"] = batch["label"]
        return transformed


def load_image_processor(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a model's image processor from a folder or the Hub, with the PIL backend (without torchvision).

    Raise ValueError for settings with which no image can be read, or which make images of over 8,192 pixels a side.
    """
    processor = AutoImageProcessor.from_pretrained(
        source, backend="pil", trust_remote_code=trust_remote_code
    )
    way_out = "save the image processor that the model was trained with"
    for name, kind in _SETTINGS.items():
        given = getattr(processor, name, None)
        fields = getattr(given, "__dict__", given)  # Of transformers' SizeDict.
        if isinstance(fields, Mapping):
            values = [each for key, each in fields.items() if "pixels" not in key]
        else:
            values = list(given) if isinstance(given, list | tuple) else [given]
        fits = all(each is None or kind(each) for each in values)
        check(fits, f"a usable {name} of the image processor", given, way_out)
    return processor


def collate_images(examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack the examples of `ImageTransform`, as the Trainer's `data_collator`; ValueError if shapes differ.

    Returns:
        `pixel_values` (N, 3, H, W) and, if the examples have labels, `labels` (N,) int64, or (N, C) float32 for lists
        of floats.

    >>> batch = collate_images([{"pixel_values": torch.zeros(3, 8, 8), "labels": 1}] * 2)
    >>> batch["pixel_values"].shape, batch["labels"]
    (torch.Size([2, 3, 8, 8]), tensor([1, 1]))
    """
    pixels = [example["pixel_values"] for example in examples]
    shapes = sorted({tuple(image.shape) for image in pixels})
    way_out = "set its size, or do_center_crop=True"
    check(
        len(shapes) <= 1,
        "images to have one shape after the processor",
        shapes,
        way_out,
    )
    batch = {"pixel_values": torch.stack(pixels)}
    if "labels" in examples[0]:
        labels = np.array([example["labels"] for example in examples])
        batch["labels"] = torch.as_tensor(
            labels.astype(np.float32 if labels.ndim == 2 else np.int64)
        )
    return batch


def check_images(rows: datasets.Dataset, name: str) -> Counter[str]:
    """Count the images of each Pillow mode ("RGB", "L", ...); raise for unreadable images and those with over 8 bits.

    The check reads the header and the end of a JPEG and the checksums of a PNG. It decodes images in other formats or
    without an end. The ValueError has the row and `name`, the name of the rows with the column `image`.

    >>> images = datasets.Dataset.from_dict({"image": [Image.new("L", (8, 8))]})
    >>> check_images(images.cast_column("image", datasets.Image(decode=False)), "train")
    Counter({'L': 1})
    """
    images = rows.select_columns(["image"]).cast_column(
        "image", datasets.Image(decode=False)
    )
    modes: Counter[str] = Counter()
    for batch in images.iter(batch_size=256):
        for stored in batch["image"]:
            with _errors_at(f"row {modes.total()} of {name}", stored):
                modes[_checked_mode(stored)] += 1
    return modes


def conversion_note(modes: Mapping[str, int], name: str) -> str | None:
    """Return two sentences on the conversion of images that are not RGB, or None if all are RGB.

    >>> conversion_note({"RGB": 8, "L": 1, "RGBA": 1}, "test")
    '2 of the 10 images of test are converted to RGB (1 L, 1 RGBA). Grey is repeated, and transparency dropped.'
    """
    others = {mode: n for mode, n in modes.items() if mode != "RGB"}
    if not others:
        return None
    n_all, n_others = sum(modes.values()), sum(others.values())
    which = f"All {n_all:,}" if n_others == n_all else f"{n_others:,} of the {n_all:,}"
    kinds = ", ".join(f"{n:,} {mode}" for mode, n in others.items())
    return f"{which} images of {name} are converted to RGB ({kinds}). Grey is repeated, and transparency dropped."


def check_reads_rgb(config: PreTrainedConfig) -> None:
    """Raise unless the model has three channels, because images are RGB here and in transformers' pipelines."""
    channels = getattr(config, "num_channels", 3)
    way_out = "set num_channels=3; grey images are repeated in each"
    check(
        channels == 3,
        "the model to read three channels",
        f"num_channels={channels}",
        way_out,
    )


def decode_at(
    place: str | None, stored: Image.Image | Mapping[str, Any]
) -> Image.Image:
    """Return an RGB image from a Pillow image, or from encoded bytes or a path as `datasets` stores them.

    Error messages name the place, such as "row 17 of train", if it is known.
    """
    with _errors_at(place, stored):
        image = (
            stored
            if isinstance(stored, Image.Image)
            else _DECODER.decode_example(_with_bytes(stored))
        )
        _check_bits(image)
    if "transparency" in image.info:  # Otherwise Pillow warns.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _checked_mode(stored: Mapping[str, Any]) -> str:
    """The mode of a stored image; raise if it cannot be read."""
    contents = _with_bytes(stored)["bytes"]
    if contents is None:  # The file is missing or in an archive.
        check(
            stored.get("path") is not None,
            "image to be readable",
            "neither bytes nor a path",
            _REPLACE,
        )
        return decode_at(None, stored).mode
    with Image.open(io.BytesIO(contents)) as image:
        mode, kind = image.mode, image.format
        _check_bits(image)
        if kind == "PNG":
            image.verify()
    if not (kind == "PNG" or (kind == "JPEG" and contents.endswith(_END_OF_JPEG))):
        decode_at(None, stored)
    return mode


def _with_bytes(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The image with the contents of a local file, which Pillow would leave open if it cannot read it."""
    path, contents = stored.get("path"), stored.get("bytes")
    if contents is None and path is not None and os.path.isfile(path):
        contents = Path(path).read_bytes()
    return {"path": path, "bytes": contents}


def _check_bits(image: Image.Image) -> None:
    has_8_bits = not image.mode.startswith(("I", "F"))  # Pillow would clip them at 255.
    check(
        has_8_bits,
        "image to have 8 bits a channel",
        f"mode {image.mode!r}",
        "scale it to 0..255 first",
    )


@contextmanager
def _errors_at(place: str | None, stored: Any) -> Iterator[None]:
    """A context that explains Pillow's errors and names the place of the image."""
    try:
        yield
    except _UNREADABLE as error:
        message = str(error)
        if not isinstance(error, InputValueError):
            is_unknown = isinstance(
                error, UnidentifiedImageError
            )  # It names an object in memory.
            cause = "it is in no format that Pillow knows" if is_unknown else message
            contents = stored.get("bytes") or b""
            got = (
                stored.get("path")
                or f"{len(contents)} bytes starting with {contents[:16]!r}"
            )
            message = expected("image", "be readable", got, f"{cause}; {_REPLACE}")
        raise InputValueError(
            message if place is None else f"{place}: {message}"
        ) from error


def _draw(low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * float(torch.rand(()))


def border(size: int, padding: int | None) -> int:
    """Return the padding of a side of this size in pixels; by default an eighth, which is the usual 4 at 32."""
    return max(1, round(size / 8)) if padding is None else padding


def _padded_crop(image: Image.Image, padding: int | None) -> Image.Image:
    width, height = image.size
    borders = (border(width, padding), border(height, padding))
    left, top = (int(torch.randint(2 * each + 1, ())) for each in borders)
    return ImageOps.expand(image, border=borders).crop(
        (left, top, left + width, top + height)
    )


def _resized_crop(image: Image.Image, padding: int | None) -> Image.Image:
    """A random part of the image, which the processor resizes."""
    width, height = image.size
    area = width * height * _draw(_SMALLEST_AREA, 1.0)
    aspect = math.exp(_draw(-math.log(_LARGEST_ASPECT), math.log(_LARGEST_ASPECT)))
    sides = [(width, math.sqrt(area * aspect)), (height, math.sqrt(area / aspect))]
    sizes = [min(whole, max(1, round(side))) for whole, side in sides]
    rooms = [whole - size for (whole, _), size in zip(sides, sizes, strict=True)]
    left, top = (int(torch.randint(room + 1, ())) for room in rooms)
    return image.crop((left, top, left + sizes[0], top + sizes[1]))


_CROPS = {
    "none": lambda image, padding: image,
    "pad": _padded_crop,
    "resized": _resized_crop,
}
