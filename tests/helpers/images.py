"""A tiny network for CIFAR images, and real images for it, in the forms that a command reads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas
import torch
from papers.networks.resnet import CifarResNetConfig, CifarResNetForImageClassification
from PIL import Image
from pyarrow import parquet
from transformers import ViTImageProcessorPil

from hf_calib.data import ImageTransform

PROCESSOR = ViTImageProcessorPil(size={"height": 32, "width": 32})
N_STEPS, BATCH = 20, 32


def cifar_names(data: Path) -> list[str]:
    """The ten classes of CIFAR-10."""
    return json.loads((data / "cifar10" / "label_names.json").read_text())


def real_rows(
    data: Path, name: str, split: str, start: int, stop: int
) -> pandas.DataFrame:
    """Rows of a parquet file of images: `image`, a struct of bytes and path, and `label`."""
    return (
        parquet.read_table(data / name / f"{split}.parquet")
        .slice(start, stop - start)
        .to_pandas()
    )


def image_of(stored: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(stored["bytes"]))


def pixels_of(rows: pandas.DataFrame) -> torch.Tensor:
    """(N, 3, 32, 32), as the network reads them."""
    images = [image_of(stored) for stored in rows["image"]]
    return torch.stack(ImageTransform(PROCESSOR)({"image": images})["pixel_values"])


def save_cifar_network(data: Path, folder: Path) -> Any:
    """A ResNet-8, trained for some steps, which is enough to be wrong with some confidence; saved."""
    torch.manual_seed(0)
    names = cifar_names(data)
    config = CifarResNetConfig(
        depth=8,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    model = CifarResNetForImageClassification(config)
    rows = real_rows(data, "cifar10", "train", 0, N_STEPS * BATCH // 2)
    pixels, labels = pixels_of(rows), torch.tensor(rows["label"].to_numpy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(N_STEPS):
        part = slice(step % (N_STEPS // 2) * BATCH, (step % (N_STEPS // 2) + 1) * BATCH)
        model(pixel_values=pixels[part], labels=labels[part]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    return model
