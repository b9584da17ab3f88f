"""Predictions, and their arrays in files: the same rows, in the same order, or a clear refusal."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib import calibrate
from hf_calib._errors import InputError, InputValueError
from hf_calib.predictions import (
    Predictions,
    TopLabels,
    load_predictions,
    read_predictions,
    save_predictions,
)
from tests.helpers.reports import quick_reports  # noqa: F401

NAMES = ("art", "law", "NA", "sport")
LOGITS = np.random.default_rng(0).normal(size=(6, 4)) * 3
PROBS = softmax(LOGITS, axis=1)
LABELS = np.array([0, 3, 2, 1, 0, 2])


class TestPredictions:
    def test_logits_and_probabilities_are_one_thing(self) -> None:
        from_logits, from_probs = (
            Predictions(LABELS, logits=LOGITS),
            Predictions(LABELS, probs=PROBS),
        )
        np.testing.assert_allclose(from_logits.probabilities(), PROBS, rtol=1e-14)
        np.testing.assert_allclose(
            softmax(from_probs.as_logits(), axis=1), PROBS, rtol=1e-13
        )
        assert from_logits.as_logits() is LOGITS
        assert from_probs.probabilities() is PROBS
        assert (len(from_probs), from_probs.n_classes) == (6, 4)
        half = Predictions(LABELS, logits=LOGITS.astype(np.float16))
        np.testing.assert_allclose(half.probabilities().sum(axis=1), 1, rtol=1e-12)

    def test_a_probability_of_0_has_a_finite_logarithm(self) -> None:
        certain = Predictions(
            np.array([1]), probs=np.array([[1.0, 0.0]], dtype=np.float32)
        )
        assert certain.as_logits()[0, 0] == 0
        assert -88 < certain.as_logits()[0, 1] < -87

    def test_select(self) -> None:
        chosen = Predictions(LABELS, logits=LOGITS, class_names=NAMES).select(
            np.array([4, 1])
        )
        np.testing.assert_array_equal(chosen.logits, LOGITS[[4, 1]])
        np.testing.assert_array_equal(chosen.labels, [0, 3])
        assert chosen.class_names == NAMES

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"probs": PROBS}, "hold logits or probs, got both"),
            ({"logits": None}, "hold logits or probs, got neither"),
            (
                {"logits": LOGITS[:, 0]},
                r"logits to have shape \(N, C\) .* got shape \(6,\)",
            ),
            ({"logits": LOGITS[:, :1]}, r"C at least 2, got shape \(6, 1\)"),
            ({"logits": LABELS}, "logits to be a float array, got dtype int64"),
            (
                {"logits": np.where(np.eye(6, 4) > 0, np.nan, LOGITS)},
                "got nan in row 0",
            ),
            ({"labels": LABELS + 1}, "labels to lie in 0..3, got 4"),
            ({"labels": LABELS[:5]}, r"labels to have shape \(6,\), got shape \(5,\)"),
            (
                {"labels": LABELS.astype(float)},
                "labels to be integers, got dtype float64",
            ),
            (
                {"class_names": "abcd"},
                "class_names to be a list, got 'abcd'; write",
            ),
            (
                {"class_names": NAMES[:3]},
                "class_names to hold 4 names, one per column, got 3",
            ),
            (
                {"class_names": ("a", "b", "a", "b")},
                "class_names to differ, got 'a', 'b' twice",
            ),
            (
                {"class_names": ("caf\u00e9", "cafe\u0301", "a", "b")},
                r"differ visibly, got 'caf\\xe9' and 'cafe\\u0301' differ only by spaces or by their Unicode",
            ),
        ],
    )
    def test_refused(self, change: dict[str, Any], message: str) -> None:
        is_type = "got dtype" in message or "to be a list" in message
        with pytest.raises(TypeError if is_type else ValueError, match=message):
            Predictions(**{"labels": LABELS, "logits": LOGITS, **change})


class TestNpz:
    @pytest.mark.parametrize(
        ("kind", "values"), [("logits", LOGITS), ("probs", PROBS.astype(np.float32))]
    )
    @pytest.mark.parametrize("names", [NAMES, None])
    def test_round_trip(
        self, kind: str, values: np.ndarray, names: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "deep" / "predictions.npz"
        save_predictions(Predictions(LABELS, **{kind: values}, class_names=names), path)
        read = load_predictions(path)
        np.testing.assert_array_equal(getattr(read, kind), values)
        assert getattr(read, kind).dtype == values.dtype
        np.testing.assert_array_equal(read.labels, LABELS)
        assert read.class_names == names
        assert [file.name for file in path.parent.iterdir()] == ["predictions.npz"]

    def test_a_failure_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "predictions.npz"
        path.write_bytes(b"before")

        def fail(target: Path, **arrays: Any) -> None:
            Path(target).write_bytes(b"half")
            raise OSError("no space left on device")

        monkeypatch.setattr(np, "savez", fail)
        with pytest.raises(OSError, match="no space"):
            save_predictions(Predictions(LABELS, logits=LOGITS), path)
        assert path.read_bytes() == b"before"
        assert len(list(tmp_path.iterdir())) == 1
        with pytest.raises(ValueError, match=r"path to end in .npz, got out.csv"):
            save_predictions(Predictions(LABELS, logits=LOGITS), tmp_path / "out.csv")

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            (
                {
                    "logits": LOGITS,
                    "labels": np.array(["a", 1, None] * 2, dtype=object),
                },
                r"be readable as npz, got .*allow_pickle.*; write it with numpy.savez",
            ),
            (
                {"scores": LOGITS},
                r"hold the arrays labels and logits \(or probs\), got labels, scores",
            ),
            (
                {"logits": LOGITS, "class_names": np.array(["", *"bcd"])},
                r"name their classes, got a blank one",
            ),
            (
                {"logits": np.where(np.eye(6, 4) > 0, np.inf, LOGITS)},
                "got inf in row 0",
            ),
            *(  # of a model that is more or less sure
                (
                    {
                        "logits": softmax(
                            saturation * np.eye(4)[LABELS], axis=1
                        ).astype(dtype)
                    },
                    r"expected logits not to be probabilities, got values in \[0, 1\] whose rows",
                )
                for saturation in (1e4, 40.0, 8.0, 1.0)
                for dtype in (np.float64, np.float16)
            ),
        ],
    )
    def test_arrays_that_are_refused_without_a_warning(
        self,
        arrays: dict[str, Any],
        message: str,
        tmp_path: Path,
        recwarn: pytest.WarningsRecorder,
    ) -> None:
        np.savez(tmp_path / "p.npz", **{"labels": LABELS, **arrays})
        with pytest.raises(ValueError, match=message):
            load_predictions(tmp_path / "p.npz")
        assert not recwarn.list

    def test_the_way_out_for_logits_that_look_like_probabilities(
        self, tmp_path: Path
    ) -> None:
        save_predictions(Predictions(LABELS, logits=PROBS + 1), tmp_path / "p.npz")
        found = load_predictions(tmp_path / "p.npz").probabilities()
        np.testing.assert_allclose(found, softmax(PROBS, axis=1), rtol=1e-12)

    def test_unlabelled_numbers_that_are_no_rows(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "scalar.npz", logits=np.float64(3))
        with pytest.raises(
            InputValueError, match=r"logits to have shape \(N, C\) .*, got shape \(\)"
        ):
            read_predictions(tmp_path / "scalar.npz", label_column=None)

    def test_headers_are_compared_with_the_scores_before_they_are_read(
        self, tmp_path: Path
    ) -> None:
        """A small file may unpack to more than any memory holds."""
        path = tmp_path / "p.npz"
        for name, shape, kind, message in (
            ("class_names", (50_000_000,), "<U8", "at most 4 values, .* 50,000,000"),
            ("class_names", (4,), "<U500000", "of at most 4,096 bytes, got 2,000,000"),
            ("sentences", (6, 2**40), "<i8", "sentences to hold at most 24 values"),
            ("prediction", (6,), "<U90000", "prediction to hold texts of at most"),
        ):
            np.savez(path, logits=LOGITS, labels=LABELS)
            header = {"descr": kind, "fortran_order": False, "shape": shape}
            with (
                zipfile.ZipFile(path, "a") as archive,
                archive.open(f"{name}.npy", "w") as file,
            ):
                np.lib.format.write_array_header_1_0(file, header)
            with pytest.raises(InputValueError, match=message):
                load_predictions(path)

    def test_weights_are_not_left_out_silently(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "p.npz", logits=LOGITS, labels=LABELS, weights=np.ones(6))
        with pytest.raises(InputError, match=r"p\.npz to have no weights, got the arr"):
            load_predictions(tmp_path / "p.npz")

    def test_names_that_only_a_later_file_has(self, tmp_path: Path) -> None:
        plain = Predictions(LABELS, logits=LOGITS)
        save_predictions(plain, tmp_path / "a.npz")
        save_predictions(replace(plain, class_names=NAMES), tmp_path / "b.npz")
        assert load_predictions(tmp_path).class_names == NAMES
        other = replace(plain, class_names=NAMES[::-1])
        save_predictions(other, tmp_path / "c.npz")
        with pytest.raises(InputError, match=r"c\.npz: .* to have the same classes"):
            load_predictions(tmp_path)

    def test_files_of_one_and_of_several_labels_per_row(self, tmp_path: Path) -> None:
        save_predictions(Predictions(LABELS, logits=LOGITS), tmp_path / "a.npz")
        several = np.eye(4, dtype=int)[LABELS]
        save_predictions(Predictions(several, logits=LOGITS), tmp_path / "b.npz")
        message = r"b\.npz: expected the labels to be single-label, .* got multi-label"
        with pytest.raises(InputError, match=message):
            load_predictions(tmp_path)

    def test_arrays_of_another_filesystem_or_no_files(self) -> None:
        import fsspec

        with fsspec.open("memory://folder/z.npz", "wb") as file:
            np.savez(file, logits=LOGITS, labels=LABELS)
        with pytest.raises(InputError, match=r"npz file to lie on this machine, got"):
            read_predictions("memory://folder/z.npz")
        with pytest.raises(InputError, match="sources to name predictions, got none"):
            read_predictions([])

    def test_a_header_that_claims_terabytes(self, tmp_path: Path) -> None:
        header = (
            b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 4), }".ljust(
                117
            )
            + b"\n"
        )
        with zipfile.ZipFile(tmp_path / "p.npz", "w") as archive:
            archive.writestr(
                "logits.npy",
                b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header,
            )
        with pytest.raises(
            InputValueError, match="expected predictions to be readable as npz, got"
        ):
            load_predictions(tmp_path / "p.npz")

    @pytest.mark.parametrize("content", ["text", "nothing", "one array", "half"])
    def test_what_is_no_archive(self, content: str, tmp_path: Path) -> None:
        path = tmp_path / "some.npz"
        save_predictions(Predictions(LABELS, logits=LOGITS), path)
        if content == "one array":
            with path.open("wb") as file:
                np.save(file, LOGITS)
        else:
            whole = path.read_bytes()
            path.write_bytes(
                {"text": b"hello", "nothing": b"", "half": whole[: len(whole) // 2]}[
                    content
                ]
            )
        with pytest.raises(ValueError, match=r"be readable as npz, got .*some.npz"):
            load_predictions(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1.0] * 6}, r"weights to be a numpy array, got list; pass np"),
        ({"sentences": [0] * 6}, "sentences to be a numpy array, got list"),
        (
            {"sentences": np.zeros(5, int)},
            r"sentences to have shape \(6,\), got shape \(5,\)",
        ),
        (
            {"by": {"country": ["de"] * 5}},
            r"by\['country'\] to have a value for each of 6 rows, got 5",
        ),
    ],
)
def test_what_belongs_to_the_rows_is_an_array_of_their_length(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Predictions(LABELS, logits=LOGITS, **change)


def test_top_labels_are_arrays_of_one_length() -> None:
    correct = np.array([1, 0])
    confidence = np.array([0.9, 0.4])
    for arguments, message in (
        (([0.9, 0.4], correct), "confidence to be a numpy array, got list"),
        ((confidence, [1, 0]), "correct to be a numpy array, got list"),
        ((confidence, correct, [1.0, 1.0]), "weights to be a numpy array, got list"),
        ((confidence, correct, None, {"a": [1]}), r"by\['a'\] to have a value for"),
    ):
        with pytest.raises(InputError, match=message):
            TopLabels(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, None, 1]), "labels to be integers, got None in row 1; drop rows"),
        ([0, 1, 1], r"labels to be a numpy array, got list; pass np\.asarray"),
    ],
)
def test_labels_that_are_missing_or_no_array(labels: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Predictions(labels, probs=np.full((3, 2), 0.5))


def test_sentences_are_kept_and_what_needs_a_table_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    logits = 2.0 * np.eye(3)[labels] + rng.normal(size=(60, 3))
    tokens = Predictions(labels, logits=logits, sentences=np.arange(60) // 5)
    save_predictions(tokens, tmp_path / "a.npz")
    calibrate(tmp_path / "a.npz", tmp_path / "out", method="temperature")
    for name in ("a.npz", "out/predictions.npz"):
        found = load_predictions(tmp_path / name)
        assert found.kind is tokens.kind
        assert found.sentences is not None
        assert {*found.sentences} <= {*range(12)}
    weighted = replace(tokens, weights=np.ones(60), by={"src": ["a"] * 60})
    with pytest.raises(InputError, match="no weights or slices, got src, weights"):
        save_predictions(weighted, tmp_path / "b.npz")
    top = TopLabels(np.array([0.2, 0.9]), np.array([0, 1]), np.ones(2))
    with pytest.raises(InputError, match="no weights or slices, got weights"):
        save_predictions(top, tmp_path / "b.npz")
    with pytest.raises(InputError, match="to be Predictions or TopLabels, got str"):
        save_predictions("abc", tmp_path / "b.npz")  # type: ignore[arg-type]
