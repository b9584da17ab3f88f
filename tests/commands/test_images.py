"""The commands on a model that reads images: real ones, and a tiny network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
from scipy.special import entr, softmax

import hf_calib.metrics as metrics
from hf_calib.metrics.sums import uniform_bins
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.images import image_of, pixels_of, real_rows, save_cifar_network
from tests.helpers.reports import quick_reports  # noqa: F401

N = 160


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A network and parquet files: CIFAR rows with labels, MNIST rows without."""
    folder = tmp_path_factory.mktemp("images")
    save_cifar_network(shared_data, folder / "model")
    real_rows(shared_data, "cifar10", "test", 0, N).to_parquet(folder / "test.parquet")
    real_rows(shared_data, "cifar10", "test", N, 3 * N).to_parquet(
        folder / "validation.parquet"
    )
    real_rows(shared_data, "mnist", "test", 0, 60)[["image"]].to_parquet(
        folder / "mnist.parquet"
    )
    return folder


def logits_of(place: Path, name: str) -> np.ndarray:
    """Logits of the network, without the command's code."""
    model = transformers.AutoModelForImageClassification.from_pretrained(
        place / "model"
    )
    with torch.no_grad():
        return model(
            pixel_values=pixels_of(pandas.read_parquet(place / name))
        ).logits.numpy()


def labels_of(place: Path) -> np.ndarray:
    return pandas.read_parquet(place / "test.parquet")["label"].to_numpy()


class TestEvaluate:
    @pytest.mark.slow
    def test_the_report_is_on_the_models_own_logits(self, place: Path) -> None:
        words = (
            "--data",
            place / "test.parquet",
            "--ood-data",
            place / "mnist.parquet",
            "--batch-size",
            50,
        )
        found = called_for_json("evaluate", place / "model", *words)
        logits, elsewhere = (
            logits_of(place, "test.parquet"),
            logits_of(place, "mnist.parquet"),
        )
        probs, labels = softmax(logits.astype(float), axis=1), labels_of(place)
        for key, metric in (
            ("accuracy", metrics.accuracy),
            ("nll", metrics.negative_log_likelihood),
            ("ece", metrics.expected_calibration_error),
        ):
            assert found["before"]["metrics"][key]["value"] == pytest.approx(
                metric(probs, labels), abs=1e-6
            )
        told = found["out_of_distribution"][0]
        assert told["n_examples"] == 60
        wanted = metrics.ood_auroc(probs, softmax(elsewhere.astype(float), axis=1))
        assert told["before"]["entropy"]["auroc"]["value"] == pytest.approx(
            wanted, abs=1e-6
        )
        said = (
            f"All 60 images of {place.name}/mnist.parquet are converted to RGB (60 L)."
        )
        assert any(said in line for line in found["warnings"])
        assert found["about"]["options"] == ["--data", "test.parquet"]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ("--data", "cut.parquet"),
                r"row 17 of .*cut\.parquet: expected image to be readable, .*truncated",
            ),
            (
                ("--data", "names.parquet"),
                r"hold the model's classes .*got 'zebra' in row 4",
            ),
            (("--data", "labels.parquet"), "to be one of label, got 'image'"),
            (
                ("--image-column", "label"),
                "image-column to be another column than the labels'",
            ),
            (("--max-length", 16), "--max-length to be given for texts only, got 16"),
            (("--ood-data", "empty.parquet"), r"empty\.parquet"),
            (
                ("--soft-labels", "counts.npz"),
                r"soft_labels in .*counts\.npz to be a float array, got dtype int64; divide each row",
            ),
            (
                ("--soft-labels", "half.npz"),
                r"soft_labels in .*half\.npz to have shape \(160, 10\), .*\(80, 10\)",
            ),
            (
                ("--soft-labels", "named.npz"),
                r"named\.npz to hold the array soft_labels or probs, got shares",
            ),
        ],
    )
    def test_wrong_input_is_refused(
        self,
        words: tuple[Any, ...],
        message: str,
        place: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        rows = pandas.read_parquet(place / "test.parquet").head(20)
        rows[["label"]].to_parquet("labels.parquet")
        rows.iloc[:0].to_parquet("empty.parquet")
        rows.assign(label=["cat"] * 4 + ["zebra"] * 16).to_parquet("names.parquet")
        rows["image"][17]["bytes"] = rows["image"][17]["bytes"][:-100]
        rows.to_parquet("cut.parquet")
        np.savez("counts.npz", soft_labels=np.ones((N, 10), int))
        np.savez("half.npz", soft_labels=np.full((N // 2, 10), 0.1))
        np.savez("named.npz", shares=np.full((N, 10), 0.1))
        data = () if words[0] == "--data" else ("--data", place / "test.parquet")
        result = call("evaluate", place / "model", *data, *words)
        assert_refused(result, message)
        assert f"/{N}" not in result.stderr  # before the model runs

    def test_soft_labels_are_measured_by_the_definitions(
        self, place: Path, shared_data: Path
    ) -> None:
        """CIFAR-10H: about fifty people named the class of each test image."""
        with np.load(
            shared_data / "cifar10h" / "cifar10h.npz", allow_pickle=False
        ) as file:
            eta = file["probs"][:N]
        np.savez(place / "shares.npz", probs=eta)
        words = (
            "--data",
            place / "test.parquet",
            "--soft-labels",
            place / "shares.npz",
            "--n-bins",
            10,
        )
        found = called_for_json("evaluate", place / "model", *words)["soft_labels"]
        probs = softmax(logits_of(place, "test.parquet").astype(float), axis=1)
        confidence, predicted = probs.max(axis=1), probs.argmax(axis=1)
        share, bins = eta[np.arange(N), predicted], uniform_bins(confidence, 10)
        wanted = {
            "accuracy": share.mean(),
            "ece": sum(abs((confidence - share)[bins == m].sum()) for m in range(10))
            / N,
            "true_calibration_error": np.linalg.norm(probs - eta, axis=1).mean(),
            "brier": ((probs - eta) ** 2).sum(axis=1).mean(),
            "nll": -(eta * np.log(probs)).sum(axis=1).mean(),
        }
        for key, value in wanted.items():
            measured = found["before"][key]
            assert measured["value"] == pytest.approx(value, abs=1e-6), key
            assert key == "ece" or measured["low"] < measured["high"]
        assert (
            found["before"]["ece"]["low"] is None
        )  # noise makes it larger, and a resample adds it again
        assert found["entropy"] == pytest.approx(entr(eta).sum(axis=1).mean())
        assert (
            found["agreement"] == (eta.argmax(axis=1) == labels_of(place)).mean() > 0.95
        )
        assert found["after"] is None


class TestCalibrate:
    def test_a_plain_pipeline_serves_the_calibrated_probabilities(
        self, place: Path, tmp_path: Path
    ) -> None:
        words = (
            "--data",
            place / "validation.parquet",
            "--test-data",
            place / "test.parquet",
        )
        options = ("--method", "temperature")
        done = called_for_json(
            "calibrate",
            place / "model",
            *words,
            *options,
            "--output",
            tmp_path / "calibrated",
        )
        assert done["n_fitted"] == 2 * N
        assert done["served_difference"] < 1e-5
        temperature = done["numbers"]["temperature"]
        images = [
            image_of(stored)
            for stored in pandas.read_parquet(place / "test.parquet")["image"][:12]
        ]
        served = transformers.pipeline(
            "image-classification", model=str(tmp_path / "calibrated")
        )(images, top_k=10)
        wanted = softmax(logits_of(place, "test.parquet")[:12] / temperature, axis=1)
        config = transformers.AutoConfig.from_pretrained(tmp_path / "calibrated")
        for row, scores in enumerate(served):
            found = {each["label"]: each["score"] for each in scores}
            assert [found[config.id2label[i]] for i in range(10)] == pytest.approx(
                wanted[row].tolist(), abs=1e-5
            )
