"""Predictions of a classifier, from the Hub or a folder, for labelled images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_calib.papers.networks  # noqa: F401  # the papers' networks, for the Auto classes
from hf_calib.data.columns import choose_inputs
from hf_calib.data.images import (
    ImageTransform,
    check_images,
    check_reads_rgb,
    collate_images,
    conversion_note,
    decode_at,
)
from hf_calib.predictions.files import Predictions
from hf_calib.predictions.labels import label_ids
from hf_calib.predictions.loading import check_problem, load_trained, refusals
from hf_calib.predictions.rows import LabelledRows

_SAVE_ITS_PROCESSOR = "save the image processor that the model was trained with into the model's folder"


@dataclass(frozen=True, eq=False)
class ImageClassifier:
    """A model and its image processor, as a pipeline would load them, but in float32 and without torchvision.

    Args:
        model: an image classifier, in evaluation mode.
        processing_class: its image processor, on the PIL backend.
        class_names: C names, in the order of the logits.
    """

    model: Any
    processing_class: Any
    class_names: tuple[str, ...]

    def batch(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """`pixel_values` (N, 3, H, W) on the model's device."""
        examples = ImageTransform(self.processing_class)({"image": list(images)})["pixel_values"]
        pixels = collate_images([{"pixel_values": pixels} for pixels in examples])["pixel_values"]
        return {"pixel_values": pixels.to(self.model.device, torch.float32)}

    @torch.inference_mode()
    def logits(self, batch: dict[str, Tensor]) -> NDArray[np.float32]:
        """(N, C) float32."""
        return self.model(**batch).logits.float().cpu().numpy()


def load_image_classifier(
    name: str | Path, *, multi_label: bool = False, trust_remote_code: bool = False
) -> ImageClassifier:
    """Load a fine-tuned image classifier, on the accelerator where there is one.

    Args:
        name: a model on the Hub, or a local folder.
        multi_label: whether it has several labels per image, in place of one.
        trust_remote_code: whether code that comes with the model may run here.

    Raises:
        ValueError: if it cannot be loaded, has no trained head or no image processor of its own, is of the other kind
            or a regression, or does not read three channels.
    """
    model = load_trained(name, AutoModelForImageClassification, trust_remote_code=trust_remote_code)
    with refusals("the model", "be loadable", name, _SAVE_ITS_PROCESSOR):
        processor = AutoImageProcessor.from_pretrained(
            name, backend="pil", trust_remote_code=trust_remote_code
        )
    check_problem(model.config, "image", multi_label=multi_label)
    check_reads_rgb(model.config)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    names = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
    return ImageClassifier(model.to(device).eval(), processor, names)


@dataclass(frozen=True, eq=False)
class ReadableImages:
    """Images that have been checked, and are decoded a batch at a time.

    Args:
        rows: N rows of the column `image`, encoded.
        name: of the data.
        note: what becomes of those that are not RGB; None where all are.
    """

    rows: Dataset
    name: str
    note: str | None

    def __len__(self) -> int:
        return len(self.rows)

    def decoded(self, start: int, stop: int) -> list[Image.Image]:
        """Some of them, in RGB; an error names the row."""
        stored = self.rows[start:stop]["image"]
        return [decode_at(f"{self.name}, row {row}", each) for row, each in enumerate(stored, start)]

    def predict_logits(
        self,
        classifier: ImageClassifier,
        *,
        batch_size: int = 32,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Run a classifier over them; the logits (N, C) are in their order."""
        logits = np.empty((len(self), len(classifier.class_names)), dtype=np.float32)
        for start in range(0, len(self), batch_size):
            images = self.decoded(start, min(start + batch_size, len(self)))
            logits[start : start + len(images)] = classifier.logits(classifier.batch(images))
            if on_progress is not None:
                on_progress(len(images), len(self))
        return logits


@dataclass(frozen=True, eq=False)
class CheckedImages:
    """Labelled images that a classifier can read.

    Args:
        classifier: the one that they are for.
        inputs: N images.
        labels: (N,) int64, the model's ids.
    """

    classifier: ImageClassifier
    inputs: ReadableImages
    labels: NDArray[np.int64]

    def predict(
        self, *, batch_size: int = 32, on_progress: Callable[[int, int], None] | None = None
    ) -> Predictions:
        """Run the classifier over them, in the rows' order."""
        logits = self.inputs.predict_logits(self.classifier, batch_size=batch_size, on_progress=on_progress)
        return Predictions(self.labels, logits=logits, class_names=self.classifier.class_names)


@dataclass(frozen=True)
class LabelledImages(LabelledRows):
    """The images that a model is run over, and how they are read.

    Args:
        data: a parquet file, an image folder or a data set on the Hub.
        config_name: configuration of a Hub data set.
        split: of a Hub data set or folder.
        image_column: the column of images; where there is none of this name, the only one of images.
        label_column: the column of labels: the model's class names, or its class ids.
        class_names: the data's names of the model's classes, in the model's order, if they differ.
        batch_size: images at a time.
    """

    image_column: str = "image"
    label_column: str = "label"
    class_names: Sequence[str] | None = None
    batch_size: int = 32

    encoding: ClassVar[str] = "checking {:,} images"
    task: ClassVar[str] = "image-classification"

    @property
    def shown(self) -> str:
        """The name of the data in messages: of a path the end, which says of most data sets what they are."""
        return "/".join(Path(self.data).parts[-2:]) if os.path.exists(self.data) else self.data

    def load_classifier(
        self, source: str, *, multi_label: bool = False, trust_remote_code: bool
    ) -> ImageClassifier:
        """The model, with its image processor."""
        return load_image_classifier(source, multi_label=multi_label, trust_remote_code=trust_remote_code)

    def encode(self, classifier: ImageClassifier, rows: Dataset) -> CheckedImages:
        """Check labels and images, before the model is run."""
        inputs = self.encode_inputs(classifier, rows)
        labels = label_ids(rows, self.label_column, classifier.class_names, self.class_names)
        return CheckedImages(classifier, inputs, labels)

    def encode_inputs(self, classifier: ImageClassifier, rows: Dataset) -> ReadableImages:
        """Check the images, whose labels are not read."""
        images = choose_inputs(rows, name=self.shown, image_column=self.image_column)
        note = conversion_note(check_images(images, self.shown), self.shown)
        return ReadableImages(images, self.shown, note)

    def predict_logits(
        self, classifier: ImageClassifier, inputs: Any, on_progress: Any = None
    ) -> NDArray[np.float32]:
        """Run the classifier over inputs of `encode_inputs`."""
        return inputs.predict_logits(classifier, batch_size=self.batch_size, on_progress=on_progress)

    def as_served(self, rows: Dataset, n: int) -> list[Image.Image]:
        """The first n, as a pipeline takes them."""
        n = min(n, len(rows))
        images = choose_inputs(rows.select(range(n)), name=self.shown, image_column=self.image_column)
        return ReadableImages(images, self.shown, None).decoded(0, n)

    def first_batch(self, classifier: ImageClassifier, served: Sequence[Image.Image]) -> dict[str, Tensor]:
        """What the model reads of these."""
        return classifier.batch(served)

    def serving(self, classifier: ImageClassifier, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of a pipeline with the model saved in a folder, and of its call."""
        # With torchvision a pipeline resizes a little otherwise, by more than its check allows.
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        return {"image_processor": processor}, {"top_k": len(classifier.class_names)}

    def identities(self, rows: Dataset) -> Iterator[bytes]:
        """What two rows of the same image have in common: a digest of its file."""
        images = choose_inputs(rows, name=self.shown, image_column=self.image_column)
        for batch in images.iter(256):
            for stored in batch["image"]:
                contents = stored["bytes"]
                contents = Path(stored["path"]).read_bytes() if contents is None else contents
                yield hashlib.blake2b(contents, digest_size=16).digest()
