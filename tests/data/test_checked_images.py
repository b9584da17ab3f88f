"""Images that cannot be read, or are not RGB: found, with their row, before anything is decoded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from papers.images import gaussian_noise, ten_crops
from papers.pixels import decode_images
from PIL import Image
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTImageProcessorPil

from hf_calib.data import (
    DataArguments,
    ImageTransform,
    check_images,
    check_reads_rgb,
    collate_images,
    load_data,
    load_image_processor,
    load_ood,
)
from hf_calib.data.sources import load_rows
from tests.helpers.images import PROCESSOR, real_rows


def encoded(array: np.ndarray, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind, **options)
    return stream.getvalue()


def stored(*contents: bytes | None, path: str | None = None) -> Dataset:
    rows = {"image": [{"bytes": each, "path": path} for each in contents]}
    return Dataset.from_dict(
        rows, features=Features({"image": ImageFeature(decode=False)})
    )


NOISE = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
JPEG, PNG = encoded(NOISE, "JPEG"), encoded(NOISE, "PNG")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "row 1 of train: expected image to be readable, got 0 bytes"),
        (
            b"no image",
            "got 8 bytes starting with b'no image'; it is in no format that Pillow knows; remove",
        ),
        (
            JPEG[: len(JPEG) // 2],
            "row 1 of train: expected image to be readable, got .* bytes",
        ),
        (
            PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:],
            "row 1 of train: expected image to be readable",
        ),
        (
            encoded(NOISE[..., 0].astype(np.uint16) * 256, "PNG"),
            "have 8 bits a channel, got mode 'I;16'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_row(
    contents: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_images(stored(PNG, contents), "train")


def test_bytes_behind_the_end_and_other_formats_are_accepted() -> None:
    others = [encoded(NOISE, kind) for kind in ("GIF", "BMP", "TIFF", "WEBP")]
    assert (
        check_images(
            stored(JPEG, JPEG + b"\x00" * 5, PNG, PNG + b"more", *others), "x"
        ).total()
        == 8
    )


def test_files_are_checked_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    assert check_images(stored(None, path=str(tmp_path / "a.jpg")), "x") == {"RGB": 1}
    (tmp_path / "a.jpg").write_bytes(JPEG[:-40])
    with pytest.raises(ValueError, match=r"row 0 of x: .*a\.jpg.*truncated"):
        check_images(stored(None, path=str(tmp_path / "a.jpg")), "x")
    with pytest.raises(ValueError, match=r"row 0 of x: .*missing\.jpg"):
        check_images(stored(None, path=str(tmp_path / "missing.jpg")), "x")
    nothing = pandas.DataFrame(
        {"image": [{"bytes": PNG, "path": None}, {"bytes": None, "path": None}]}
    )
    nothing.to_parquet(tmp_path / "nothing.parquet")
    with pytest.raises(
        ValueError, match=r"row 1 of x: .* got neither bytes nor a path"
    ):
        check_images(load_rows(tmp_path / "nothing.parquet"), "x")


def files(tmp_path: Path, rows: pandas.DataFrame) -> dict[str, Any]:
    """Rows as test data; train has whole images."""
    rows.to_parquet(tmp_path / "test.parquet")
    whole = {"image": [{"bytes": PNG, "path": None}] * 4, "label": [0, 1, 2, 3]}
    pandas.DataFrame(whole).to_parquet(tmp_path / "train.parquet")
    return {
        f"{name}_file": str(tmp_path / f"{name}.parquet") for name in ("train", "test")
    }


def test_a_recipe_names_a_truncated_image_by_its_row_in_the_file(
    tmp_path: Path,
) -> None:
    rows = pandas.DataFrame(
        {"image": [{"bytes": JPEG, "path": None}] * 20, "label": [0, 1, 2, 3] * 5}
    )
    args = DataArguments(
        **files(tmp_path, rows), calibration_size=2, calibration_from="test"
    )
    assert len(load_data(args, images=True)["test"]) == 18
    rows.at[17, "image"] = {"bytes": JPEG[:-100], "path": None}
    files(tmp_path, rows)
    with pytest.raises(
        ValueError, match=r"row 17 of test: expected image to be readable.*truncated"
    ):
        load_data(args, images=True)
    with pytest.raises(
        ValueError, match=r"row 17 of .*test\.parquet: expected image to be readable"
    ):
        load_ood(DataArguments(ood_data=[args.test_file]), images=True)


@pytest.mark.parametrize("file", [None, "scan.jpg"])
def test_one_that_is_damaged_in_its_middle_is_named_where_it_is_decoded(
    file: str | None, tmp_path: Path
) -> None:
    """Header and end are whole, so it is found late; the row is the file's, however rows are drawn."""
    whole = encoded(
        np.random.default_rng(0).integers(0, 256, (240, 200, 3), dtype=np.uint8), "JPEG"
    )
    middle = len(whole) // 2
    rows = pandas.DataFrame(
        {"image": [{"bytes": JPEG, "path": None}] * 40, "label": [0, 1, 2, 3] * 10}
    )
    damaged = whole[:middle] + b"\xff\xc4" * 20 + whole[middle + 40 :]
    rows.at[17, "image"] = {"bytes": damaged, "path": file}
    args = DataArguments(
        **files(tmp_path, rows), calibration_from="test", calibration_size=0.5
    )
    dataset = load_data(args, images=True)
    held = next(
        split for split in dataset.values() if "row 17 of test" in split["row"][:]
    )
    got = "got scan.jpg; broken" if file else r"got \d+ bytes starting with .* broken"
    message = rf"^row 17 of test: expected image to be readable, {got} data stream"
    transformed = held.with_transform(ImageTransform(PROCESSOR))
    for decode in (
        lambda: decode_images(held, PROCESSOR),
        lambda: ten_crops(held, PROCESSOR, 36),
        lambda: gaussian_noise(held),
        lambda: list(DataLoader(transformed, batch_size=8, collate_fn=collate_images)),
    ):
        with pytest.raises(ValueError, match=message):
            decode()


def test_grey_images_from_elsewhere_are_converted_with_a_note(
    tmp_path: Path, shared_data: Path
) -> None:
    real_rows(shared_data, "mnist", "test", 0, 5)[["image"]].to_parquet(
        tmp_path / "mnist.parquet"
    )
    args = DataArguments(ood_data=[str(tmp_path / "mnist.parquet")])
    with pytest.warns(
        UserWarning,
        match=r"All 5 images of .*mnist\.parquet are converted to RGB \(5 L\)",
    ):
        load_ood(args, images=True)


def test_a_network_of_other_than_three_channels_is_refused() -> None:
    check_reads_rgb(ViTConfig())
    with pytest.raises(
        ValueError,
        match="expected the model to read three channels, got num_channels=1",
    ):
        check_reads_rgb(ViTConfig(num_channels=1))


@pytest.mark.parametrize(
    "setting",
    [
        {"size": {"height": -3, "width": 8}},
        {"size": {"height": True, "width": 8}},
        {"size": {"height": 1.5, "width": 8}},
        {"size": {"height": "8", "width": 8}},
        {"size": {"shortest_edge": 0}},
        {"size": {"height": 30_000, "width": 30_000}},
        {"crop_size": {"height": -5, "width": 5}},
        {"image_std": [0.5, 0, 0.5]},
        {"image_std": [0.5, -1, 0.5]},
        {"image_mean": [float("nan")] * 3},
        {"image_mean": "half"},
        {"rescale_factor": 0},
        {"rescale_factor": float("inf")},
    ],
)
def test_settings_that_no_image_can_be_read_with(
    setting: dict[str, object], tmp_path: Path
) -> None:
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    assert load_image_processor(tmp_path).size.height == 8
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **setting}))
    (name,) = setting
    with pytest.raises(ValueError, match=f"usable {name} of the image processor, got"):
        load_image_processor(tmp_path)


@pytest.mark.parametrize("padding", [-1, 0.5, True, "2"])
def test_a_padding_is_a_number_of_pixels(padding: Any) -> None:
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    with pytest.raises((TypeError, ValueError), match="expected padding to be "):
        ImageTransform(processor, crop="pad", padding=padding)
