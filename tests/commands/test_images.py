"""The commands on a model that reads images: real ones, and a tiny network."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
from PIL import Image
from scipy.special import entr, softmax

import hf_calib.metrics as metrics
from hf_calib.metrics.sums import uniform_bins
from hf_calib.models.classifier import load_classifier
from hf_calib.models.reading import Reading, RowSet
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.images import cifar_names, image_of, pixels_of, real_rows, save_cifar_network
from tests.helpers.reports import quick_reports  # noqa: F401

N = 160


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A network and parquet files: CIFAR rows with labels, MNIST rows without."""
    folder = tmp_path_factory.mktemp("images")
    save_cifar_network(shared_data, folder / "model")
    real_rows(shared_data, "cifar10", "test", 0, N).to_parquet(folder / "test.parquet")
    real_rows(shared_data, "cifar10", "test", N, 3 * N).to_parquet(folder / "validation.parquet")
    real_rows(shared_data, "mnist", "test", 0, 60)[["image"]].to_parquet(folder / "mnist.parquet")
    return folder


def logits_of(place: Path, name: str) -> np.ndarray:
    """Logits of the network, without the command's code."""
    model = transformers.AutoModelForImageClassification.from_pretrained(place / "model")
    with torch.no_grad():
        return model(pixel_values=pixels_of(pandas.read_parquet(place / name))).logits.numpy()


def labels_of(place: Path) -> np.ndarray:
    return pandas.read_parquet(place / "test.parquet")["label"].to_numpy()


def png_of_no_pixels() -> bytes:
    """A file whose checksums are right, and whose pixels cannot be decoded."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)), (b"IDAT", b"none"), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class TestEvaluate:
    def test_the_report_is_on_the_models_own_logits(self, place: Path) -> None:
        words = ("--data", place / "test.parquet", "--ood-data", place / "mnist.parquet", "--batch-size", 50)
        found = called_for_json("evaluate", place / "model", *words)
        logits, elsewhere = logits_of(place, "test.parquet"), logits_of(place, "mnist.parquet")
        probs, labels = softmax(logits.astype(float), axis=1), labels_of(place)
        for key, metric in (
            ("accuracy", metrics.accuracy),
            ("nll", metrics.negative_log_likelihood),
            ("ece", metrics.expected_calibration_error),
        ):
            assert found["before"]["metrics"][key]["value"] == pytest.approx(metric(probs, labels), abs=1e-6)
        told = found["out_of_distribution"][0]
        assert told["n_examples"] == 60
        wanted = metrics.ood_auroc(probs, softmax(elsewhere.astype(float), axis=1))
        assert told["before"]["entropy"]["auroc"]["value"] == pytest.approx(wanted, abs=1e-6)
        said = f"All 60 images of {place.name}/mnist.parquet are converted to RGB (60 L)."
        assert any(said in line for line in found["warnings"])
        assert found["about"]["options"] == ["--data", "test.parquet"]

    def test_an_image_folder_gives_what_the_parquet_file_does(
        self, place: Path, tmp_path: Path, shared_data: Path
    ) -> None:
        rows, names = pandas.read_parquet(place / "test.parquet").head(60), cifar_names(shared_data)
        for name in names:
            (tmp_path / "images" / "test" / name).mkdir(parents=True)
        for i, row in rows.iterrows():
            image_of(row["image"]).save(tmp_path / "images" / "test" / names[row["label"]] / f"{i}.png")
        rows.to_parquet(tmp_path / "rows.parquet")
        folder, file = (
            called_for_json("evaluate", place / "model", "--data", tmp_path / name)
            for name in ("images", "rows.parquet")
        )
        for key in ("accuracy", "nll", "classwise_ece"):
            wanted = file["before"]["metrics"][key]["value"]
            assert folder["before"]["metrics"][key]["value"] == pytest.approx(wanted, abs=1e-6)

    def test_grey_and_transparent_images_are_converted_and_it_is_said(
        self, place: Path, tmp_path: Path
    ) -> None:
        rows = pandas.read_parquet(place / "test.parquet").head(20)
        for row, mode in ((2, "L"), (4, "RGBA"), (7, "L")):
            image_of(rows["image"][row]).convert(mode).save(tmp_path / "a.png")
            rows["image"][row]["bytes"] = (tmp_path / "a.png").read_bytes()
        rows.to_parquet(tmp_path / "mixed.parquet")
        found = called_for_json("evaluate", place / "model", "--data", tmp_path / "mixed.parquet")
        said = f"3 of the 20 images of {tmp_path.name}/mixed.parquet are converted to RGB (2 L, 1 RGBA)."
        assert any(said in line for line in found["warnings"])

    @pytest.mark.parametrize(
        ("change", "words", "message"),
        [
            ("cut", (), r"row 17 of .*rows\.parquet: expected image to be readable, .*truncated"),
            ("pixels", ("--batch-size", 2), r"rows\.parquet, row 5: expected image to be readable"),
            ("label", (), r"hold the model's ids, 0\.\.9, got 10 in row 3"),
            ("name", (), r"hold the model's classes .*got 'zebra' in row 4"),
            ("no image", (), "to be one of label, got 'image'"),
            (
                "",
                ("--label-column", "lable"),
                "label_column to be one of image, label, got 'lable'; did you mean",
            ),
            ("", ("--image-column", "label"), "column 'label' to hold images"),
            ("", ("--max-length", 16), "max_length to be given for texts only, got 16"),
            ("", ("--ood-data", "EMPTY"), r"empty\.parquet"),
            ("", ("--ood-data", "CUT"), r"row 2 of .*cut\.parquet: expected image to be readable"),
        ],
    )
    def test_wrong_input_is_refused(
        self,
        change: str,
        words: tuple[Any, ...],
        message: str,
        place: Path,
        tmp_path: Path,
        shared_data: Path,
    ) -> None:
        rows = pandas.read_parquet(place / "test.parquet").head(20)
        if change == "label":
            rows.loc[3, "label"] = 10
        elif change == "name":
            rows["label"] = [cifar_names(shared_data)[label] for label in rows["label"]]
            rows.loc[4, "label"] = "zebra"
        elif change == "no image":
            rows = rows[["label"]]
        elif change == "cut":
            rows["image"][17]["bytes"] = rows["image"][17]["bytes"][:-100]
        elif change == "pixels":
            rows["image"][5]["bytes"] = png_of_no_pixels()
        rows.to_parquet(tmp_path / "rows.parquet")
        others = pandas.read_parquet(place / "mnist.parquet").head(4)
        others.iloc[:0].to_parquet(tmp_path / "empty.parquet")
        others["image"][2]["bytes"] = others["image"][2]["bytes"][:60]
        others.to_parquet(tmp_path / "cut.parquet")
        files = {"EMPTY": tmp_path / "empty.parquet", "CUT": tmp_path / "cut.parquet"}
        words = tuple(files.get(word, word) for word in words)
        assert_refused(
            call("evaluate", place / "model", "--data", tmp_path / "rows.parquet", *words), message
        )

    def test_a_model_without_its_processor_or_of_one_channel_is_refused(
        self, place: Path, tmp_path: Path
    ) -> None:
        config = transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_channels=1
        )
        transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
        words = ("evaluate", tmp_path, "--data", place / "test.parquet")
        assert_refused(call(*words), "save the image processor that the model was trained with")
        transformers.ViTImageProcessorPil().save_pretrained(tmp_path)
        assert_refused(call(*words), "the model to read three channels, got num_channels=1")


class TestSoftLabels:
    """CIFAR-10H: about fifty people named the class of each test image."""

    @pytest.fixture
    def shares(self, place: Path, shared_data: Path) -> Path:
        with np.load(shared_data / "cifar10h" / "cifar10h.npz", allow_pickle=False) as file:
            np.savez(place / "shares.npz", probs=file["probs"][:N])
            np.savez(place / "counts.npz", soft_labels=file["counts"][:N])
            np.savez(place / "half.npz", soft_labels=file["probs"][: N // 2])
            np.savez(place / "named.npz", shares=file["probs"][:N])
            np.savez(place / "twice.npz", soft_labels=2 * file["probs"][:N])
        return place / "shares.npz"

    def test_the_numbers_are_those_of_the_definitions(self, place: Path, shares: Path) -> None:
        words = ("--data", place / "test.parquet", "--soft-labels", shares, "--n-bins", 10)
        found = called_for_json("evaluate", place / "model", *words)["soft_labels"]
        probs = softmax(logits_of(place, "test.parquet").astype(float), axis=1)
        eta = np.load(shares)["probs"]
        confidence, predicted = probs.max(axis=1), probs.argmax(axis=1)
        share, bins = eta[np.arange(N), predicted], uniform_bins(confidence, 10)
        wanted = {
            "accuracy": share.mean(),
            "ece": sum(abs((confidence - share)[bins == m].sum()) for m in range(10)) / N,
            "true_calibration_error": np.linalg.norm(probs - eta, axis=1).mean(),
            "brier": ((probs - eta) ** 2).sum(axis=1).mean(),
            "nll": -(eta * np.log(probs)).sum(axis=1).mean(),
        }
        for key, value in wanted.items():
            measured = found["before"][key]
            assert measured["value"] == pytest.approx(value, abs=1e-6), key
            assert key == "ece" or measured["low"] < measured["high"]
        assert found["before"]["ece"]["low"] is None  # noise makes it larger, and a resample adds it again
        assert found["entropy"] == pytest.approx(entr(eta).sum(axis=1).mean())
        assert found["agreement"] == (eta.argmax(axis=1) == labels_of(place)).mean() > 0.95
        assert found["after"] is None

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("missing.npz", "soft_labels to name an existing file"),
            ("counts.npz", "soft_labels to be a float array, got dtype int64; divide each row"),
            ("twice.npz", r"soft_labels to lie in \[0, 1\], got 1\.88235 in row 0"),
            ("half.npz", r"soft_labels in .*half\.npz to have shape \(160, 10\), .*got shape \(80, 10\)"),
            ("named.npz", r"named\.npz to hold the array soft_labels or probs, got shares"),
            ("test.parquet", r"soft_labels to be readable as npz, got .*test\.parquet"),
        ],
    )
    def test_other_files_are_refused(self, name: str, message: str, place: Path, shares: Path) -> None:
        words = ("--data", place / "test.parquet", "--soft-labels", place / name)
        result = call("evaluate", place / "model", *words)
        assert_refused(result, message)
        assert f"/{N}" not in result.stderr  # before the model runs


class TestCalibrate:
    def test_a_plain_pipeline_serves_the_calibrated_probabilities(self, place: Path, tmp_path: Path) -> None:
        words = ("--data", place / "validation.parquet", "--test-data", place / "test.parquet")
        options = ("--target-data", place / "test.parquet", "--method", "temperature")
        done = called_for_json(
            "calibrate", place / "model", *words, *options, "--output", tmp_path / "calibrated"
        )
        assert done["n_fitted"] == 2 * N
        assert done["served_difference"] < 1e-5
        temperature = done["numbers"]["temperature"]
        images = [image_of(stored) for stored in pandas.read_parquet(place / "test.parquet")["image"][:12]]
        served = transformers.pipeline("image-classification", model=str(tmp_path / "calibrated"))(
            images, top_k=10
        )
        wanted = softmax(logits_of(place, "test.parquet")[:12] / temperature, axis=1)
        assert not done["prior"]["shifted"]
        names = served_names(tmp_path / "calibrated")
        for row, scores in enumerate(served):
            found = {each["label"]: each["score"] for each in scores}
            assert [found[name] for name in names] == pytest.approx(wanted[row].tolist(), abs=1e-5)


def served_names(folder: Path) -> list[str]:
    config = transformers.AutoConfig.from_pretrained(folder)
    return [config.id2label[i] for i in range(config.num_labels)]


def test_images_are_decoded_as_a_pipeline_decodes_them(place: Path) -> None:
    """By the network's own processor, whatever the mode."""
    model = str(place / "model")
    classifier = load_classifier(model, "image")
    rows = RowSet(str(place / "mnist.parquet")).load().select(range(8))
    ours = classifier.logits(classifier.encode(rows, Reading(), name="mnist", labelled=False))
    images = [image_of(stored) for stored in pandas.read_parquet(place / "mnist.parquet")["image"][:8]]
    assert isinstance(images[0], Image.Image)
    plain = transformers.pipeline("image-classification", model=model)
    theirs = plain(images, top_k=10, function_to_apply="none")
    for row, scores in zip(ours, theirs, strict=True):
        found = {each["label"]: each["score"] for each in scores}
        assert [found[name] for name in classifier.class_names] == pytest.approx(row.tolist(), abs=1e-5)
