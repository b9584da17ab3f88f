"""predictions.safetensors: a whole file, or a refusal that names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.training import TrainingPredictions
from tests.helpers.unchecked import unchecked

LOGITS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
LABELS = np.array([0, 2, 1, 1, 0])


@pytest.mark.parametrize(
    "calibration", [None, unchecked(LOGITS[:2], np.ones((2, 3), np.float32))]
)
def test_what_is_saved_is_read_back(
    tmp_path: Path, calibration: Predictions | None
) -> None:
    saved = TrainingPredictions(
        unchecked(LOGITS[:, ::-1], LABELS, class_names=("a", "b|", "c")), calibration
    )
    saved.save(tmp_path / "p.safetensors")
    read = TrainingPredictions.load(tmp_path / "p.safetensors")
    np.testing.assert_array_equal(read.test.logits, LOGITS[:, ::-1])
    np.testing.assert_array_equal(read.test.labels, LABELS)
    assert read.class_names == ("a", "b|", "c")
    assert (read.calibration is None) == (calibration is None)
    if read.calibration is not None:
        assert read.calibration.labels.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "arrays",
    [
        {"test_logits": LOGITS, "test_labels": LABELS[:4]},
        {"test_logits": LOGITS, "test_labels": LABELS, "calibration_logits": LOGITS},
        {"calibration_logits": LOGITS, "calibration_labels": LABELS},
    ],
)
def test_arrays_that_do_not_go_together_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    save_file(arrays, tmp_path / "p.safetensors", {"class_names": '["a", "b", "c"]'})
    with pytest.raises(
        ValueError,
        match=r"expected .*p.safetensors to hold the predictions of a run, got .*3 classes",
    ):
        TrainingPredictions.load(tmp_path / "p.safetensors")


@pytest.mark.parametrize(
    "content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"no safetensors at all"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="got a file that cannot be read"):
        TrainingPredictions.load(tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match="got a file that cannot be read"):
        TrainingPredictions.load(tmp_path / "missing.safetensors")
