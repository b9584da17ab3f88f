"""Classifiers of images, decoded a batch at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from hf_calib.models.classifier import Classifier, Encoded, Progress
from hf_calib.models.loading import refusals
from hf_calib.models.reading import Reading

_SAVE_ITS_PROCESSOR = "save the image processor that the model was trained with into the model's folder"


@dataclass(frozen=True, eq=False)
class ReadableImages:
    """Images that have been checked, and are decoded a batch at a time.

    Args:
        rows: N rows of the column `image`, encoded.
        name: of the data.
    """

    rows: Dataset
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def decoded(self, start: int, stop: int) -> list[Image.Image]:
        """Some of them, in RGB; an error names the row."""
        stored = self.rows[start:stop]["image"]
        return [decode_at(f"{self.name}, row {row}", each) for row, each in enumerate(stored, start)]


class ImageClassifier(Classifier):
    """An image classifier and its image processor, on the PIL backend: no torchvision is needed."""

    @staticmethod
    def load_processing(source: str | Path, model: Any, *, trust_remote_code: bool) -> Any:
        """The image processor; the model has to read three channels."""
        with refusals("the model", "be loadable", source, _SAVE_ITS_PROCESSOR):
            processor = load_image_processor(source, trust_remote_code=trust_remote_code)
        check_reads_rgb(model.config)
        return processor

    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """Check the images, whose labels are not read."""
        reading.refuse("max_length", "text_pair_column")
        shown = _shown(name)
        images = choose_inputs(rows, name=shown, image_column=reading.image_column)
        note = conversion_note(check_images(images, shown), shown)
        return Encoded(ReadableImages(images, shown), note=note)

    def encode(self, rows: Dataset, reading: Reading, *, name: str, labelled: bool = True) -> Encoded:
        """Check the images first, then their labels."""
        inputs = self.encode_inputs(rows, reading, name=name)
        if not labelled:
            return inputs
        return Encoded(inputs.inputs, self.read_labels(rows, reading, name), note=inputs.note)

    def logits(
        self, encoded: Encoded, *, batch_size: int = 32, on_progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """(N, C) of the images, in their order."""
        images = encoded.inputs
        logits = np.empty((len(images), len(self.class_names)), dtype=np.float32)
        for start in range(0, len(images), batch_size):
            decoded = images.decoded(start, min(start + batch_size, len(images)))
            logits[start : start + len(decoded)] = self.run(self.batch(decoded))
            if on_progress is not None:
                on_progress(len(decoded), len(images))
        return logits

    def batch(self, inputs: Sequence[Image.Image]) -> dict[str, Tensor]:
        """`pixel_values` (N, 3, H, W) on the model's device."""
        examples = ImageTransform(self.processing_class)({"image": list(inputs)})["pixel_values"]
        pixels = collate_images([{"pixel_values": pixels} for pixels in examples])["pixel_values"]
        return {"pixel_values": pixels.to(self.model.device, torch.float32)}

    def as_served(self, rows: Dataset, n: int, reading: Reading, *, name: str) -> list[Image.Image]:
        """The first n images."""
        n = min(n, len(rows))
        images = choose_inputs(rows.select(range(n)), name=_shown(name), image_column=reading.image_column)
        return ReadableImages(images, _shown(name)).decoded(0, n)

    def served_batch(self, served: Sequence[Image.Image], reading: Reading) -> dict[str, Tensor]:
        """The images."""
        return self.batch(served)

    def serving_options(self, folder: Path, reading: Reading) -> tuple[dict[str, Any], dict[str, Any]]:
        """All scores, of images that are resized as here: with torchvision a pipeline does it a little otherwise."""
        processor = load_image_processor(folder)
        return {"image_processor": processor}, {"top_k": len(self.class_names)}

    def identities(self, rows: Dataset, reading: Reading, *, name: str) -> Iterator[bytes]:
        """A digest of each image's file."""
        images = choose_inputs(rows, name=_shown(name), image_column=reading.image_column)
        for batch in images.iter(256):
            for stored in batch["image"]:
                contents = stored["bytes"]
                contents = Path(stored["path"]).read_bytes() if contents is None else contents
                yield hashlib.blake2b(contents, digest_size=16).digest()


def _shown(name: str) -> str:
    """The name of the data in messages: of a path the end, which says of most datasets what they are."""
    return "/".join(Path(name).parts[-2:]) if os.path.exists(name) else name
