"""Images decoded once, and their transform of a batch at a time, against the one of an image at a time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from datasets import Image as ImageFeature
from papers.images import ten_crops
from papers.pixels import PixelTransform, decode_images
from PIL import Image
from torch.utils.data import DataLoader
from transformers import ConvNextImageProcessorPil, ViTImageProcessorPil

from hf_calib.data import ImageTransform, choose_columns, collate_images

RAW = ViTImageProcessorPil(do_resize=False, do_rescale=False, do_normalize=False)
SMALL = ViTImageProcessorPil(size={"height": 16, "width": 16})


def images_of(*arrays: np.ndarray) -> Dataset:
    return Dataset.from_dict(
        {"image": [Image.fromarray(a) for a in arrays], "label": list(range(len(arrays)))}
    )


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "processor",
    [
        SMALL,
        ViTImageProcessorPil(size={"height": 12, "width": 20}, image_mean=[0.1, 0.2, 0.3]),
        ConvNextImageProcessorPil(size={"shortest_edge": 16}),
        RAW,
    ],
    ids=["vit", "not square", "resnet", "as they are"],
)
def test_without_augmentation_both_transforms_agree(processor: Any) -> None:
    dataset = images_of(*(noise(24, 30, seed) for seed in range(5)))
    one_by_one = dataset.with_transform(ImageTransform(processor))[:]
    decoded = decode_images(dataset, processor).with_transform(PixelTransform(processor))
    at_once = decoded[:]
    assert at_once["pixel_values"].dtype == torch.float32
    torch.testing.assert_close(
        at_once["pixel_values"], torch.stack(one_by_one["pixel_values"]).float(), rtol=0, atol=2e-6
    )
    assert at_once["labels"] == one_by_one["labels"]
    batch = next(iter(DataLoader(decoded, batch_size=5, collate_fn=collate_images)))
    assert torch.equal(batch["pixel_values"], at_once["pixel_values"])
    assert batch["labels"].tolist() == [0, 1, 2, 3, 4]


def test_real_images_decode_as_they_are(shared_data: Path) -> None:
    stored = load_dataset(
        "parquet", data_files=str(shared_data / "cifar10" / "test.parquet"), split="train[:40]"
    )
    chosen = choose_columns(DatasetDict({"train": stored}), image_column="image")["train"]
    decoded = decode_images(chosen, RAW)
    for i in 0, 17, 39:
        image = Image.open(io.BytesIO(chosen[i]["image"]["bytes"])).convert("RGB")
        assert decoded[i]["pixels"] == np.asarray(image).tobytes()


def test_a_padded_crop_shifts_each_image_by_itself_over_black() -> None:
    torch.manual_seed(0)
    array = noise(16, 32)
    canvas = np.zeros((16 + 4, 32 + 8, 3))
    canvas[2:-2, 4:-4] = array
    crops = {
        (top, left): canvas[top : top + 16, left : left + 32].transpose(2, 0, 1)
        for top in range(5)
        for left in range(9)
    }
    decoded = decode_images(images_of(*[array] * 500), RAW)
    seen = PixelTransform(RAW, crop="pad")(decoded[:])["pixel_values"].numpy()
    found = [next(at for at, crop in crops.items() if np.array_equal(image, crop)) for image in seen]
    assert set(found) == set(crops)  # each of the 45; one is missing once in 2,000 seeds


def test_half_of_the_images_are_mirrored() -> None:
    torch.manual_seed(0)
    array = noise(8, 8)
    decoded = decode_images(images_of(*[array] * 400), RAW)
    seen = PixelTransform(RAW, flip=True)(decoded[:])["pixel_values"].numpy()
    mirrored = [np.array_equal(image, array[:, ::-1].transpose(2, 0, 1)) for image in seen]
    straight = [np.array_equal(image, array.transpose(2, 0, 1)) for image in seen]
    assert sum(mirrored) + sum(straight) == 400
    assert 160 < sum(mirrored) < 240  # four standard deviations


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seed_gives_the_same_augmentation(workers: int) -> None:
    transform = PixelTransform(SMALL, crop="pad", flip=True)
    decoded = decode_images(images_of(*(noise(16, 16, s) for s in range(12))), SMALL).with_transform(
        transform
    )

    def epoch() -> torch.Tensor:
        torch.manual_seed(3)
        loader = DataLoader(decoded, batch_size=4, num_workers=workers, collate_fn=collate_images)
        return torch.cat([batch["pixel_values"] for batch in loader])

    first = epoch()
    assert torch.equal(first, epoch())
    if workers:  # which do not draw the same numbers
        plain = decoded.with_transform(PixelTransform(SMALL))[:]["pixel_values"]
        assert not torch.equal(first - plain, torch.zeros_like(plain))


@pytest.mark.parametrize(
    "processor",
    [
        SMALL,
        ViTImageProcessorPil(size={"height": 12, "width": 17}, image_mean=[0.1, 0.2, 0.3], resample=3),
        ConvNextImageProcessorPil(size={"shortest_edge": 16}),
    ],
    ids=["vit", "not square", "resnet"],
)
def test_the_ten_crops_are_those_of_torchvision(processor: Any) -> None:
    """Resize, TenCrop, ToTensor, Normalize: the image mirrored as a whole, then cut as the first five."""
    arrays = [noise(24, 30, seed) for seed in range(3)]
    found = ten_crops(images_of(*arrays), processor, 20)
    mean, std = np.array(processor.image_mean), np.array(processor.image_std)
    height, width = np.asarray(processor(images=Image.fromarray(arrays[0]))["pixel_values"][0]).shape[1:]
    for i, array in enumerate(arrays):
        square = np.asarray(Image.fromarray(array).resize((20, 20), processor.resample))
        by_hand = []
        for image in (square, square[:, ::-1]):
            down, right = 20 - height, 20 - width
            middle = image[
                round(down / 2) : round(down / 2) + height, round(right / 2) : round(right / 2) + width
            ]
            by_hand += [image[:height, :width], image[:height, right:], image[down:, :width]]
            by_hand += [image[down:, right:], middle]
        for crops, part in zip(found, by_hand, strict=True):
            wanted = ((part / 255 - mean) / std).transpose(2, 0, 1)
            np.testing.assert_allclose(crops[i]["pixel_values"], wanted, rtol=0, atol=2e-6)
            assert crops[i]["labels"] == i


def test_ten_crops_of_the_whole_square_are_the_image_and_its_mirror_image() -> None:
    dataset = images_of(*(noise(24, 30, seed) for seed in range(3))).remove_columns("label")
    found = [crops[:] for crops in ten_crops(dataset, SMALL, 16)]
    whole = torch.stack(dataset.with_transform(ImageTransform(SMALL))[:]["pixel_values"])
    for i, crops in enumerate(found):
        assert crops.keys() == {"pixel_values"}
        wanted = whole if i < 5 else whole.flip(3)
        torch.testing.assert_close(crops["pixel_values"], wanted, rtol=0, atol=2e-6)
    with pytest.raises(
        ValueError, match=r"ten crops to be at least the side of a crop, 16, got 15; 256 is usual"
    ):
        ten_crops(dataset, SMALL, 15)


def test_the_transform_leaves_the_cache_as_it_is() -> None:
    decoded = decode_images(images_of(noise(8, 8), noise(8, 8, 1)), RAW)
    before = decoded[0]["pixels"]
    PixelTransform(RAW, crop="pad", flip=True)(decoded[:])
    assert decoded[0]["pixels"] == before


def test_what_cannot_be_decoded_is_refused_by_its_row(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.png", tmp_path / "b.png"
    Image.fromarray(noise(8, 8)).save(good)
    bad.write_bytes(good.read_bytes()[:60])
    dataset = Dataset.from_dict({"image": [str(good)] * 300 + [str(bad)], "label": [0] * 301})
    dataset = dataset.cast_column("image", ImageFeature(decode=False))
    with pytest.raises(ValueError, match=r"row 300: expected image to be readable, got .*b\.png"):
        decode_images(dataset, SMALL)


def test_images_of_different_sizes_are_refused() -> None:
    dataset = images_of(noise(8, 8), noise(8, 8), noise(8, 9))
    with pytest.raises(ValueError, match="got 9 x 8 in row 2, 8 x 8 in row 0; set the processor's size"):
        decode_images(dataset, RAW)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected crop to be one of .*got 'resized'; use ImageTransform"):
        PixelTransform(SMALL, crop="resized")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="have the column pixels, got image, label; call decode_images first"
    ):
        PixelTransform(SMALL)({"image": [], "label": []})
