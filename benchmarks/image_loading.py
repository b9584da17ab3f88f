"""Images per second that one process loads: decoded every time one by one, or decoded once and transformed in batches.

    OMP_NUM_THREADS=1 PYTHONPATH=recipes python benchmarks/image_loading.py [IMAGES.parquet]

5,000 images of 32 x 32 (the column `image` of the file; without one drawn at random, as PNG), crop
with padding, flip, normalise, batches of 128, through a DataLoader without workers. Best of 3
epochs.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from papers.pixels import PixelTransform, decode_images
from PIL import Image
from torch.utils.data import DataLoader
from transformers import ViTImageProcessorPil

from hf_calib.data import ImageTransform, choose_columns, collate_images

N_IMAGES = 5_000


def images() -> Dataset:
    if len(sys.argv) > 1:
        stored = load_dataset(
            "parquet", data_files=sys.argv[1], split=f"train[:{N_IMAGES}]"
        )
        return choose_columns(DatasetDict({"train": stored}), image_column="image")[
            "train"
        ]
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (N_IMAGES, 32, 32, 3), dtype=np.uint8)
    return Dataset.from_dict(
        {"image": [Image.fromarray(each) for each in noise], "label": [0] * N_IMAGES}
    )


def images_per_second(dataset: Dataset) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in DataLoader(
            dataset, batch_size=128, shuffle=True, collate_fn=collate_images
        ):
            pass
        times.append(time.perf_counter() - start)
    return len(dataset) / min(times)


def main() -> None:
    dataset, processor = (
        images(),
        ViTImageProcessorPil(size={"height": 32, "width": 32}),
    )
    start = time.perf_counter()
    decoded = decode_images(dataset, processor)
    print(f"decoded once in {time.perf_counter() - start:.1f} s")
    augmented = {"crop": "pad", "flip": True}
    one_by_one = images_per_second(
        dataset.with_transform(ImageTransform(processor, **augmented))
    )
    at_once = images_per_second(
        decoded.with_transform(PixelTransform(processor, **augmented))
    )
    print(
        f"ImageTransform {one_by_one:,.0f} images/s, PixelTransform {at_once:,.0f}: {at_once / one_by_one:.1f} times"
    )


if __name__ == "__main__":
    main()
