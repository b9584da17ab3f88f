"""Several digits on one canvas: real images with several labels, of which it is known where each one is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
import torch
from PIL import Image

SIDE = 28  # of a digit; a canvas has two by two places


class Mosaics(NamedTuple):
    """N canvases: pixels (N, 56, 56) uint8, labels (N, 10) 0 or 1, and the digit at each place (N, 4), -1 for none."""

    pixels: np.ndarray
    labels: np.ndarray
    places: np.ndarray

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels (N, 3, 56, 56) in [-1, 1], and labels as float32."""
        grey = torch.from_numpy(self.pixels).float().div(127.5).sub(1)
        return grey[:, None].expand(-1, 3, -1, -1), torch.from_numpy(self.labels).float()


def mosaics(mnist: Path, n: int, *, seed: int, digits: int = 2) -> Mosaics:
    """Draw canvases of so many digits each, at different places, from the parquet file."""
    table = pandas.read_parquet(mnist).head(4000)
    images = np.stack([np.asarray(Image.open(io.BytesIO(stored["bytes"]))) for stored in table["image"]])
    classes = table["label"].to_numpy()
    rng = np.random.default_rng(seed)
    made = Mosaics(
        np.zeros((n, 2 * SIDE, 2 * SIDE), np.uint8), np.zeros((n, 10), np.int64), np.full((n, 4), -1)
    )
    for i in range(n):
        for place in rng.permutation(4)[:digits]:
            drawn = rng.integers(len(images))
            top, left = divmod(int(place), 2)
            made.pixels[i, top * SIDE : (top + 1) * SIDE, left * SIDE : (left + 1) * SIDE] = images[drawn]
            made.labels[i, classes[drawn]] = 1
            made.places[i, place] = classes[drawn]
    return made
