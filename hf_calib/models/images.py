"""Image classifiers, which decode images in batches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from hf_calib.data.columns import choose_inputs
from hf_calib.data.images import (
    ImageTransform,
    check_images,
    check_reads_rgb,
    collate_images,
    conversion_note,
    decode_at,
    load_image_processor,
)
from hf_calib.models.classifier import Classifier, Encoded, Served, refusals
from hf_calib.models.reading import Reading

_SAVE_ITS_PROCESSOR = (
    "save the image processor that the model was trained with into the model's folder"
)


class ImageClassifier(Classifier):
    """An image classifier and its image processor, on the PIL backend."""

    input_columns = ("image_column",)

    @staticmethod
    def load_processing(
        source: str | Path, model: Any, *, trust_remote_code: bool
    ) -> Any:
        """Load the image processor; the model must have three channels."""
        with refusals("the model", "be loadable", source, _SAVE_ITS_PROCESSOR):
            processor = load_image_processor(
                source, trust_remote_code=trust_remote_code
            )
        check_reads_rgb(model.config)
        return processor

    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """Check the images, which remain encoded."""
        reading.refuse("texts", "max_length", "text_column", "text_pair_column")
        images, shown = _images(rows, reading, name)
        note = conversion_note(check_images(images, shown), shown)
        return Encoded(images, note=note, name=shown)

    def inputs(self, encoded: Encoded, chunk: NDArray[np.intp]) -> list[Image.Image]:
        """Return decoded images."""
        # Images of one batch are in memory, and no others.
        return _decoded(encoded.inputs, encoded.name, chunk.tolist())

    def batch(self, inputs: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return `pixel_values` (N, 3, H, W) on the model's device."""
        transform = ImageTransform(self.processing_class)
        transformed = transform({"image": list(inputs)})
        examples = [{"pixel_values": each} for each in transformed["pixel_values"]]
        pixels = collate_images(examples)["pixel_values"]
        return {"pixel_values": pixels.to(self.model.device, torch.float32)}

    def served(self, rows: Dataset, reading: Reading, *, name: str) -> Served:
        """Return images, and the image processor, for a pipeline that resizes as here."""
        images = _decoded(*_images(rows, reading, name), range(len(rows)))
        # One with torchvision would resize slightly differently.
        options = {"image_processor": self.processing_class}
        call = {"top_k": len(self.class_names)}
        return Served(images, images, self.batch(images), options, call)

    def identities(
        self, rows: Dataset, reading: Reading, *, name: str
    ) -> Iterator[bytes]:
        """Return a digest of each image's file."""
        # Files may be many gigabytes, of which a digest is kept.
        images, _ = _images(rows, reading, name)
        for batch in images.iter(256):
            for stored in batch["image"]:
                contents = stored["bytes"]
                if contents is None:
                    contents = Path(stored["path"]).read_bytes()
                yield hashlib.blake2b(contents, digest_size=16).digest()


def _images(rows: Dataset, reading: Reading, name: str) -> tuple[Dataset, str]:
    """The column `image`, encoded, and the name of the data in messages, short for a path."""
    shown = "/".join(Path(name).parts[-2:]) if os.path.exists(name) else name
    images = choose_inputs(rows, name=shown, image_column=reading.image_column)
    return images, shown


def _decoded(images: Dataset, shown: str, rows: Sequence[int]) -> list[Image.Image]:
    """Some decoded images in RGB; an error names the row."""
    stored = zip(rows, images[rows]["image"], strict=True)
    return [decode_at(f"{shown}, row {row}", each) for row, each in stored]
