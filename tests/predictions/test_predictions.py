"""Predictions from files and from a model: the same rows, in the same order, or a clear refusal."""

from __future__ import annotations

import gzip
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Value
from scipy.special import softmax

from hf_calib._errors import InputValueError
from hf_calib.data.sources import load_rows
from hf_calib.models.classifier import load_classifier, predict
from hf_calib.predictions import load_predictions, open_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from tests.helpers.tiny import N_LABELS, TEXT, sequences, text_of, tiny_bert, tokenizer

NAMES = ("art", "law", "NA", "sport")  # a name that some readers take for a missing value
LOGITS = np.random.default_rng(0).normal(size=(6, 4)) * 3
PROBS = softmax(LOGITS, axis=1)
LABELS = np.array([0, 3, 2, 1, 0, 2])


def write(table: pandas.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    return path


def as_table(values: np.ndarray, prefix: str, labels: Any = LABELS, **others: Any) -> pandas.DataFrame:
    columns = {f"{prefix}{name}": values[:, i] for i, name in enumerate(NAMES)}
    return pandas.DataFrame({**others, **columns, "label": labels})


class TestPredictions:
    def test_logits_and_probabilities_are_one_thing(self) -> None:
        from_logits, from_probs = Predictions(LABELS, logits=LOGITS), Predictions(LABELS, probs=PROBS)
        np.testing.assert_allclose(from_logits.probabilities(), PROBS, rtol=1e-14)
        np.testing.assert_allclose(softmax(from_probs.as_logits(), axis=1), PROBS, rtol=1e-13)
        assert from_logits.as_logits() is LOGITS
        assert from_probs.probabilities() is PROBS
        assert (len(from_probs), from_probs.n_classes) == (6, 4)

    def test_a_probability_of_0_has_a_finite_logarithm(self) -> None:
        certain = Predictions(np.array([1]), probs=np.array([[1.0, 0.0]], dtype=np.float32))
        assert certain.as_logits()[0, 0] == 0
        assert -88 < certain.as_logits()[0, 1] < -87

    def test_float16_logits_are_widened_before_the_softmax(self) -> None:
        half = Predictions(LABELS, logits=LOGITS.astype(np.float16))
        np.testing.assert_allclose(half.probabilities().sum(axis=1), 1, rtol=1e-12)

    def test_select(self) -> None:
        chosen = Predictions(LABELS, logits=LOGITS, class_names=NAMES).select(np.array([4, 1]))
        np.testing.assert_array_equal(chosen.logits, LOGITS[[4, 1]])
        np.testing.assert_array_equal(chosen.labels, [0, 3])
        assert chosen.class_names == NAMES

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"probs": PROBS}, ValueError, "hold logits or probs, got both"),
            ({"logits": None}, ValueError, "hold logits or probs, got neither"),
            ({"logits": LOGITS[:, 0]}, ValueError, r"logits to have shape \(N, C\) .* got shape \(6,\)"),
            ({"logits": LOGITS[:, :1]}, ValueError, r"C at least 2, got shape \(6, 1\)"),
            ({"logits": LABELS}, TypeError, "logits to be a float array, got dtype int64"),
            ({"logits": np.where(np.eye(6, 4) > 0, np.nan, LOGITS)}, ValueError, "got nan in row 0"),
            ({"labels": LABELS + 1}, ValueError, "labels to lie in 0..3, got 4"),
            ({"labels": LABELS[:5]}, ValueError, r"labels to have shape \(6,\), got shape \(5,\)"),
            ({"labels": LABELS.astype(float)}, TypeError, "labels to be integers, got dtype float64"),
            ({"class_names": NAMES[:3]}, ValueError, "class_names to be 4, one per column, got 3"),
            ({"class_names": ("a", "b", "a", "b")}, ValueError, "class_names to differ, got 'a', 'b' twice"),
            (
                {"class_names": ("caf\u00e9", "cafe\u0301", "a", "b")},
                ValueError,
                r"differ visibly, got 'caf\\xe9' and 'cafe\\u0301' differ only by spaces or by their Unicode form",
            ),
        ],
    )
    def test_refused(self, change: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            Predictions(**{"labels": LABELS, "logits": LOGITS, **change})


class TestNpz:
    @pytest.mark.parametrize(("kind", "values"), [("logits", LOGITS), ("probs", PROBS.astype(np.float32))])
    @pytest.mark.parametrize("names", [NAMES, None])
    def test_round_trip(self, kind: str, values: np.ndarray, names: Any, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "predictions.npz"
        save_predictions(Predictions(LABELS, **{kind: values}, class_names=names), path)
        read = load_predictions(path)
        np.testing.assert_array_equal(getattr(read, kind), values)
        assert getattr(read, kind).dtype == values.dtype
        np.testing.assert_array_equal(read.labels, LABELS)
        assert read.class_names == names
        assert [file.name for file in path.parent.iterdir()] == ["predictions.npz"]

    def test_a_failure_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_only_npz_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"path to end in .npz, got out.csv"):
            save_predictions(Predictions(LABELS, logits=LOGITS), tmp_path / "out.csv")

    def test_objects_are_not_unpickled(self, tmp_path: Path) -> None:
        path = tmp_path / "objects.npz"
        np.savez(path, logits=LOGITS, labels=np.array(["a", 1, None], dtype=object))
        with pytest.raises(
            ValueError, match=r"be readable as npz, got .*allow_pickle.*; write it with numpy.savez"
        ):
            load_predictions(path)

    @pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
    def test_probabilities_are_no_logits(self, dtype: type, tmp_path: Path) -> None:
        path = tmp_path / "p.npz"
        save_predictions(Predictions(LABELS, logits=PROBS.astype(dtype)), path)
        with pytest.raises(
            ValueError, match=r"expected logits to be logits, got values in \[0, 1\] whose rows"
        ):
            load_predictions(path)
        save_predictions(Predictions(LABELS, logits=PROBS.astype(dtype) + 1), path)  # the way out for logits
        np.testing.assert_allclose(load_predictions(path).probabilities(), softmax(PROBS, axis=1), rtol=2e-3)

    @pytest.mark.parametrize("saturation", [1e4, 40.0, 8.0])
    def test_neither_are_those_of_a_model_that_is_sure(self, saturation: float, tmp_path: Path) -> None:
        probs = softmax(saturation * np.eye(4)[LABELS], axis=1)
        save_predictions(Predictions(LABELS, logits=probs), tmp_path / "p.npz")
        with pytest.raises(
            ValueError, match=r"expected logits to be logits, got values in \[0, 1\] whose rows"
        ):
            load_predictions(tmp_path / "p.npz")

    def test_missing_arrays_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "other.npz"
        np.savez(path, scores=LOGITS, labels=LABELS)
        with pytest.raises(
            ValueError, match=r"hold the arrays labels and logits \(or probs\), got scores, labels"
        ):
            load_predictions(path)

    def test_class_names_of_bytes(self, tmp_path: Path) -> None:
        names = np.array([b"a", "ä".encode(), b"c", b"d"])
        np.savez(tmp_path / "p.npz", probs=PROBS, labels=LABELS, class_names=names)
        assert load_predictions(tmp_path / "p.npz").class_names == ("a", "ä", "c", "d")

    @pytest.mark.parametrize("damage", ["compression", "encrypted", "header that claims terabytes"])
    def test_damaged_archives(self, damage: str, tmp_path: Path) -> None:
        path = tmp_path / "p.npz"
        if damage == "header that claims terabytes":
            header = (
                b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 4), }".ljust(117) + b"\n"
            )
            member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("logits.npy", member)
        else:
            np.savez(path, probs=PROBS, labels=LABELS)
            content = bytearray(path.read_bytes())
            for mark, method, flags in ((b"PK\x03\x04", 8, 6), (b"PK\x01\x02", 10, 8)):
                place = content.find(mark)
                while place >= 0:
                    if damage == "compression":
                        content[place + method] = 99
                    else:
                        content[place + flags] |= 1
                    place = content.find(mark, place + 4)
            path.write_bytes(content)
        with pytest.raises(InputValueError, match="expected predictions to be readable as npz, got"):
            load_predictions(path)

    @pytest.mark.parametrize("content", ["text", "nothing", "one array", "half"])
    def test_what_is_no_archive(self, content: str, tmp_path: Path) -> None:
        path = tmp_path / "some.npz"
        save_predictions(Predictions(LABELS, logits=LOGITS), path)
        if content == "one array":
            with path.open("wb") as file:
                np.save(file, LOGITS)
        else:
            whole = path.read_bytes()
            path.write_bytes({"text": b"hello", "nothing": b"", "half": whole[: len(whole) // 2]}[content])
        with pytest.raises(ValueError, match=r"be readable as npz, got .*some.npz"):
            load_predictions(path)


class TestTables:
    @pytest.mark.parametrize("name", ["p.csv", "p.csv.gz", "p.tsv", "p.parquet"])
    @pytest.mark.parametrize(("prefix", "kind"), [("logit_", "logits"), ("prob_", "probs"), ("", "probs")])
    def test_columns(self, name: str, prefix: str, kind: str, tmp_path: Path) -> None:
        values = LOGITS if kind == "logits" else PROBS
        read = load_predictions(write(as_table(values, prefix), tmp_path / name))
        np.testing.assert_allclose(getattr(read, kind), values, rtol=1e-15)
        np.testing.assert_array_equal(read.labels, LABELS)
        assert read.class_names == NAMES

    @pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
    def test_labels_by_name(self, name: str, tmp_path: Path) -> None:
        texts = [NAMES[label] for label in LABELS]
        table = as_table(LOGITS, "logit_", texts, text=list("abcdef")).rename(columns={"label": "topic"})
        read = load_predictions(write(table, tmp_path / name), label_column="topic")
        np.testing.assert_array_equal(read.labels, LABELS)

    def test_classes_with_integers_for_names_are_found_by_name(self, tmp_path: Path) -> None:
        table = pandas.DataFrame({"label": [7, 3, 7], "prob_7": [0.5, 0.25, 1.0], "prob_3": [0.5, 0.75, 0.0]})
        read = load_predictions(write(table, tmp_path / "p.csv"))
        np.testing.assert_array_equal(read.labels, [0, 1, 0])
        assert read.class_names == ("7", "3")

    @pytest.mark.parametrize(
        ("names", "labels", "ids"),
        [
            (("-1", "0", "1"), [0, -1, 1], [1, 0, 2]),
            (("2", "1", "0"), [0, 1, 2], [2, 1, 0]),
            (
                ("0", "1", "many"),
                [1, 0, 2],
                [1, 0, 2],
            ),  # one name is not an integer: these are numbers of columns
            (("10", "2", "-"), [1, 0, 2], [1, 0, 2]),
        ],
    )
    @pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
    def test_integers_for_some_or_all_names(
        self, name: str, names: tuple[str, ...], labels: list[int], ids: list[int], tmp_path: Path
    ) -> None:
        columns = {f"logit_{class_name}": np.array([0.1, 0.2, 0.3]) + i for i, class_name in enumerate(names)}
        read = load_predictions(write(pandas.DataFrame({"label": labels, **columns}), tmp_path / name))
        np.testing.assert_array_equal(read.labels, ids)
        assert read.class_names == names

    @pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.tsv"])
    @pytest.mark.parametrize(
        ("names", "labels"),
        [
            (("true", "false"), ["true", "false", "true"]),
            (("TRUE", "FALSE"), ["FALSE", "TRUE", "TRUE"]),
            (("01", "02"), ["02", "01", "01"]),
            (("1.50", "1.5"), ["1.5", "1.50", "1.5"]),
            (("1e3", "NA"), ["NA", "1e3", "NA"]),
        ],
    )
    def test_labels_are_what_stands_in_the_file(
        self, names: tuple[str, str], labels: list[str], name: str, tmp_path: Path
    ) -> None:
        table = pandas.DataFrame({f"prob_{names[0]}": [0.5, 0.2, 0.9], f"prob_{names[1]}": [0.5, 0.8, 0.1]})
        found = load_predictions(write(table.assign(label=labels), tmp_path / name))
        assert found.class_names == names
        assert [names[i] for i in found.labels] == labels

    @pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.tsv"])
    @pytest.mark.parametrize(("cells", "got"), [("1,2,0,7", "4 in row 1"), ("1,2", "2 in row 1")])
    def test_a_row_of_another_length(self, cells: str, got: str, name: str, tmp_path: Path) -> None:
        text = f"logit_a,logit_b,label\n1,2,0\n{cells}\n".replace(",", "\t" if "tsv" in name else ",")
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        with pytest.raises(
            InputValueError, match=f"the table to have 3 values in every row, got {got} of {name}; give each"
        ):
            load_predictions(path)

    def test_every_row_with_a_value_too_many(self, tmp_path: Path) -> None:
        """pandas takes the first column for an index then, and shifts all others."""
        (tmp_path / "t.csv").write_text("logit_a,logit_b,label\n" + "0.1,0.2,0,9\n" * 3)
        with pytest.raises(InputValueError, match="3 values in every row, got 4 in row 0"):
            load_predictions(tmp_path / "t.csv")

    def test_names_that_differ_in_case_are_different(self, tmp_path: Path) -> None:
        table = pandas.DataFrame({"prob_us": [0.5, 0.2], "prob_US": [0.5, 0.8], "label": ["US", "us"]})
        np.testing.assert_array_equal(load_predictions(write(table, tmp_path / "p.csv")).labels, [1, 0])
        with pytest.raises(ValueError, match="got 'Us'"):
            load_predictions(write(table.assign(label="Us"), tmp_path / "p.csv"))

    @pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
    @pytest.mark.parametrize(
        "labels", [LABELS.astype(float), pandas.array(LABELS, dtype="Int64")], ids=["float", "Int64"]
    )
    def test_whole_numbers_are_ids(self, labels: Any, name: str, tmp_path: Path) -> None:
        read = load_predictions(write(as_table(LOGITS, "logit_", labels), tmp_path / name))
        np.testing.assert_array_equal(read.labels, LABELS)

    def test_floats_and_truth_values_that_are_names(self, tmp_path: Path) -> None:
        table = pandas.DataFrame({"label": [2.0, 1.0], "prob_1.0": [0.5, 0.5], "prob_2.0": [0.5, 0.5]})
        np.testing.assert_array_equal(load_predictions(write(table, tmp_path / "p.csv")).labels, [1, 0])
        table = pandas.DataFrame({"label": [True, False], "prob_False": [0.5, 0.5], "prob_True": [0.5, 0.5]})
        np.testing.assert_array_equal(load_predictions(write(table, tmp_path / "p.parquet")).labels, [1, 0])

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            (
                "prob_a,prob_a,label\n.5,.5,0\n",
                ValueError,
                "contained multiple columns named prob_a",
            ),
            ("a,b,a,label\n.5,.5,0,0\n", ValueError, "contained multiple columns named a"),
            (
                "a,b,label,label\n.5,.5,0,1\n",
                ValueError,
                "contained multiple columns named label",
            ),
            (
                "a,b,Labels,label\n.5,.5,0,0\n",
                ValueError,
                "got 'Labels' beside the label column 'label'; name",
            ),
            (
                "a,b,target,label\n.5,.5,0,0\n",
                ValueError,
                "got 'target' beside the label column 'label'; name",
            ),
            (",a,b,label\n0,.5,.5,0\n", ValueError, "class columns to name their classes, got ''"),
            ("prob_a,prob_,label\n.5,.5,0\n", ValueError, "class columns to name their classes, got 'prob_'"),
            ("logit_a,logit_b,label\n.5,.5,0\n.1,.9,1\n", ValueError, "logits to be logits, .* prob_<class>"),
            (
                "a,b,label\n.5,.5,a\n.5,.5,\n",
                ValueError,
                r"a label in every row, got none in row 1 of p.csv",
            ),
            (
                "a,b,label\n.5,.5,0\n.5,.5,  \n",
                ValueError,
                r"a label in every row, got none in row 1 of p.csv",
            ),
            ("a,b,label\n.5,.5,0.5\n", ValueError, "hold class names or ids, got 0.5 in row 0"),
            ("a,b,label\n.5,.5,inf\n", ValueError, "hold class names or ids, got inf in row 0"),
            ("a,b,label\n.5,.5,a \n", ValueError, r"got 'a ' \('a ' and 'a' differ only by spaces"),
            ("a,b,label\n.5,.5,a\u200b\n", ValueError, r"got 'a\\u200b' \('a\\u200b' and 'a' differ only by"),
            ("e\u0301,b,label\n.5,.5,\u00e9\n", ValueError, r"\('\\xe9' and 'e\\u0301' differ only by"),
        ],
    )
    def test_ambiguous_tables_are_refused(
        self, text: str, error: type[Exception], message: str, tmp_path: Path
    ) -> None:
        (tmp_path / "p.csv").write_text(text, encoding="utf-8")
        with pytest.raises(error, match=message):
            load_predictions(tmp_path / "p.csv")

    def test_missing_labels_of_parquet(self, tmp_path: Path) -> None:
        for labels in ([0, None], ["a", None], [0.0, np.nan]):
            table = pandas.DataFrame({"a": [0.5, 0.5], "b": [0.5, 0.5], "label": labels})
            with pytest.raises(
                ValueError, match=r"hold a label in every row, got none in row 1 of p.parquet"
            ):
                load_predictions(write(table, tmp_path / "p.parquet"))

    def test_other_columns_are_ignored_beside_prefixes(self, tmp_path: Path) -> None:
        table = as_table(PROBS, "prob_", target=LABELS[::-1], text=list("abcdef"))
        table.to_csv(tmp_path / "p.csv")  # with its index, a column without a name
        read = load_predictions(tmp_path / "p.csv")
        assert read.class_names == NAMES
        np.testing.assert_array_equal(read.labels, LABELS)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (
                lambda t: t.drop(columns="label"),
                ValueError,
                "label_column to be one of logit_art, .*got 'label'",
            ),
            (lambda t: t.rename(columns={"label": "labels"}), ValueError, "did you mean 'labels'"),
            (
                lambda t: t.assign(label="music"),
                ValueError,
                r"class columns \(art, law, NA, sport\), got 'music'",
            ),
            (lambda t: t.assign(label=4), ValueError, "labels to lie in 0..3, got 4"),
            (lambda t: t.assign(logit_law="x"), TypeError, "column 'logit_law' to hold numbers in every row"),
            (lambda t: t.assign(prob_art=0.5), ValueError, "got logit_ and prob_ columns; keep one kind"),
            (lambda t: t[["logit_law", "label"]], ValueError, "each of at least 2 classes, got logit_law"),
            (
                lambda t: t.rename(columns=lambda c: c.removeprefix("logit_")),
                ValueError,
                "hold probabilities, as their names .* got -?[0-9.]+ in row 0 of p.csv; name the columns",
            ),
        ],
    )
    def test_refused(self, change: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
        path = write(change(as_table(LOGITS, "logit_")), tmp_path / "p.csv")
        with pytest.raises(error, match=message):
            load_predictions(path)

    def test_an_empty_cell(self, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text("prob_a,prob_b,label\n0.5,0.5,0\n,1,1\n")
        with pytest.raises(
            ValueError,
            match=r"'prob_a' to hold numbers in every row, got none in row 1 of p.csv; .*fill in missing values",
        ):
            load_predictions(path)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("class_names", np.array(["", "b"])), ("logits", np.array([[np.inf, 0.0], [0.0, 1.0]]))],
    )
    def test_arrays_that_are_refused_without_a_warning(
        self, name: str, value: np.ndarray, tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        arrays = {"logits": np.eye(2) + 1, "labels": np.array([0, 1]), name: value}
        np.savez(tmp_path / "p.npz", **arrays)
        with pytest.raises(ValueError, match=r"name their classes, got a blank one|got nan in row 0"):
            load_predictions(tmp_path / "p.npz")
        assert not recwarn.list

    @pytest.mark.parametrize("mark", [";", "\t"])
    def test_columns_that_are_not_separated_by_commas(self, mark: str, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text("label,prob_a,prob_b\n0,1,0\n1,0,1\n".replace(",", mark))
        with pytest.raises(
            ValueError, match=r"to have several columns, got one column .*separate .* by commas"
        ):
            load_predictions(path)

    def test_a_header_only(self, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text("label,prob_a,prob_b\n")
        with pytest.raises(ValueError, match="the table to have rows, got a header only"):
            load_predictions(path)

    @pytest.mark.parametrize("label", ["1e+300", str(2**63 + 1)])
    def test_a_label_beyond_64_bits_is_shown_as_it_is(self, label: str, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text(f"label,prob_a,prob_b\n0,1,0\n{label},0,1\n")
        with pytest.raises(ValueError, match=f"got {re.escape(label)} in row 1"):
            load_predictions(path)

    @pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
    def test_what_is_no_table(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        path.write_bytes(b"\xff\xfe\x00" if name.endswith("parquet") else b"")
        with pytest.raises(ValueError, match=f"{name} to be readable as {path.suffix[1:]}, got"):
            load_predictions(path)

    def test_half_a_download(self, tmp_path: Path) -> None:
        whole = gzip.compress(b"prob_a,prob_b,label\n" + b"0.5,0.5,0\n" * 1000)
        (tmp_path / "p.csv.gz").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"p.csv.gz to be readable as csv, got"):
            load_predictions(tmp_path / "p.csv.gz")

    def test_no_such_file_or_format(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"name existing files, got .*nothing.csv, where there are none"):
            load_predictions(tmp_path / "nothing.csv")
        with pytest.raises(ValueError, match="name existing files, got aaaa"):
            load_predictions("a" * 5000 + ".csv")
        (tmp_path / "p.pkl").write_bytes(b"")
        with pytest.raises(
            ValueError,
            match=r"existing files, got .*p.pkl, .*; files end in .npz, .csv, .tsv, .parquet, .jsonl",
        ):
            load_predictions(tmp_path / "p.pkl")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    names = dict(enumerate(NAMES))
    tiny_bert(id2label=names, label2id={name: i for i, name in names.items()}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def some_texts(n: int = 21) -> tuple[list[str], list[int], torch.Tensor]:
    """Texts of several lengths, labels, and the logits that the model gives each text alone."""
    rows = sequences(tiny_bert(), n)
    ids = [row[: 2 + i % 7] for i, row in enumerate(rows["input_ids"])]
    with torch.no_grad():
        logits = torch.cat([tiny_bert().eval()(torch.tensor([row])).logits for row in ids])
    return [text_of(row) for row in ids], list(rows["label"]), logits


class TestPredict:
    @pytest.mark.parametrize("batch_size", [1, 4, 100])
    def test_rows_keep_their_order(self, batch_size: int, model_folder: Path) -> None:
        texts, labels, logits = some_texts()
        done: list[tuple[int, int]] = []
        found = predict(
            load_classifier(model_folder),
            Dataset.from_dict({"text": texts, "label": labels}),
            batch_size=batch_size,
            on_progress=lambda *step: done.append(step),
        )
        assert found.logits is not None
        assert found.logits.dtype == np.float32
        np.testing.assert_allclose(found.logits, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
        np.testing.assert_array_equal(found.labels, labels)
        assert found.class_names == NAMES
        assert sum(step for step, _ in done) == 21
        assert {total for _, total in done} == {21}

    def test_agrees_with_a_pipeline(self, model_folder: Path) -> None:
        texts, labels, _ = some_texts(6)
        found = predict(load_classifier(model_folder), Dataset.from_dict({"text": texts, "label": labels}))
        classify = transformers.pipeline("text-classification", model=str(model_folder), top_k=None)
        served = [{row["label"]: row["score"] for row in scores} for scores in classify(texts)]
        np.testing.assert_allclose(
            found.probabilities(), [[scores[name] for name in NAMES] for scores in served], atol=1e-6
        )

    def test_long_texts_are_cut(self, model_folder: Path) -> None:
        rows = Dataset.from_dict({"text": ["w1 " * 300, "w1 " * 16, "w1 w1"], "label": [0, 0, 0]})
        classifier = load_classifier(model_folder)
        found = predict(classifier, rows).as_logits()
        np.testing.assert_allclose(found[0], found[1], atol=1e-5)  # the 16 tokens that the model can read
        found = predict(classifier, rows, max_length=2).as_logits()
        np.testing.assert_allclose(found[0], found[2], atol=1e-5)

    def test_roberta_counts_positions_from_behind_the_padding_token(self, tmp_path: Path) -> None:
        words = tokenizer()
        size = {**TEXT, "max_position_embeddings": 16 + words.pad_token_id + 1}
        config = transformers.RobertaConfig(**size, num_labels=N_LABELS, pad_token_id=words.pad_token_id)
        transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
        words.save_pretrained(tmp_path)
        classifier = load_classifier(tmp_path)
        assert classifier.longest == 16
        rows = Dataset.from_dict({"text": ["w1 " * 300, "w1 w1"], "label": [0, 0]})
        assert np.isfinite(predict(classifier, rows).as_logits()).all()

    def test_texts_without_a_token(self, model_folder: Path) -> None:
        rows = Dataset.from_dict({"text": ["w1", "", "w2"], "label": [0, 1, 2]})
        with pytest.raises(ValueError, match=r"none in 1 of 3 rows \(first in row 1\); remove these rows"):
            predict(load_classifier(model_folder), rows)

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        tiny_bert().save_pretrained(tmp_path)
        message = (
            r"to come with its tokenizer, got one of 5 tokens, for a model that has 64; save the tokenizer"
        )
        with pytest.raises(ValueError, match=message):
            load_classifier(tmp_path)

    def test_texts_of_unknown_words(self, model_folder: Path) -> None:
        classifier = load_classifier(model_folder)
        known, unknown = "w1 w2 w3 w4", "der Hund bellt laut"
        rows = Dataset.from_dict({"text": [known, unknown], "label": [0, 1]})
        assert len(predict(classifier, rows)) == 2  # half of them
        rows = Dataset.from_dict({"text": [known, unknown, "und wie"], "label": [0, 1, 2]})
        with pytest.raises(ValueError, match="be known to the tokenizer, got 6 unknown ones of 10; save the"):
            predict(classifier, rows)

    def test_special_tokens_are_no_words(self, model_folder: Path) -> None:
        classifier = load_classifier(model_folder)
        rows = Dataset.from_dict({"text": ["[PAD] [PAD]"], "label": [0]})
        with pytest.raises(ValueError, match="be known to the tokenizer, got special tokens only"):
            predict(classifier, rows)

    def test_a_tokenizer_of_another_model(self, model_folder: Path, tmp_path: Path) -> None:
        tiny_bert(vocab_size=40).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        rows = Dataset.from_dict({"text": ["w1 w50"], "label": [0]})
        with pytest.raises(
            ValueError, match="token ids to be below the model's 40, got 55; save the tokenizer"
        ):
            predict(load_classifier(tmp_path), rows)

    def test_a_decoder_without_a_padding_token(self, tmp_path: Path) -> None:
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=N_LABELS
        )
        model = transformers.GPT2ForSequenceClassification(config).eval()
        model.save_pretrained(tmp_path)
        words = tokenizer()
        words.pad_token = None
        words.save_pretrained(tmp_path)
        texts, labels, _ = some_texts(5)
        found = predict(load_classifier(tmp_path), Dataset.from_dict({"text": texts, "label": labels}))
        with torch.no_grad():
            wanted = [model(torch.tensor([words(text)["input_ids"]])).logits[0].numpy() for text in texts]
        np.testing.assert_allclose(found.as_logits(), wanted, atol=1e-6)

    def test_sixteen_bit_weights_are_read_in_float32(self, tmp_path: Path) -> None:
        tiny_bert().bfloat16().save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        assert load_classifier(tmp_path).model.dtype == torch.float32


def labelled(labels: Any, feature: Any = None) -> Dataset:
    features = None if feature is None else Features({"text": Value("string"), "label": feature})
    return Dataset.from_dict({"text": ["w1 w2"] * len(labels), "label": labels}, features=features)


class TestLabels:
    @pytest.mark.parametrize(
        "rows",
        [
            labelled([3, 0, 1]),
            labelled(["sport", "art", "law"]),
            labelled(["Sport", "ART", "law"]),
            labelled([1, 0, 2], ClassLabel(names=["art", "sport", "law"])),  # another order than the model's
        ],
        ids=["numbers", "names", "capitals", "ClassLabel"],
    )
    def test_mean_the_models_classes(self, rows: Dataset, model_folder: Path) -> None:
        found = predict(load_classifier(model_folder), rows)
        np.testing.assert_array_equal(found.labels, [3, 0, 1])

    def test_of_other_names(self, model_folder: Path) -> None:
        names = ["Kunst", "Recht", "NA", "Sport"]
        found = predict(load_classifier(model_folder), labelled(["Sport", "Kunst"]), class_names=names)
        np.testing.assert_array_equal(found.labels, [3, 0])

    @pytest.mark.parametrize("class_names", [None, ["1", "2", "3", "4"]])
    def test_numbers_that_are_names(self, class_names: list[str] | None, tmp_path: Path) -> None:
        model = tiny_bert(id2label={i: str(i + 1) for i in range(4)})
        model.save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        found = predict(load_classifier(tmp_path), labelled([3, 1, 2]), class_names=class_names)
        np.testing.assert_array_equal(found.labels, [2, 0, 1])

    @pytest.mark.parametrize(
        ("names", "labels", "ids"),
        [
            (("-1", "0", "1", "2"), [0, -1, 2], [1, 0, 3]),
            (("0", "1", "2", "many"), [2, 0, 3], [2, 0, 3]),  # one name is not an integer: these are ids
        ],
    )
    def test_integers_for_some_or_all_names(
        self, names: tuple[str, ...], labels: list[int], ids: list[int], tmp_path: Path
    ) -> None:
        tiny_bert(id2label=dict(enumerate(names))).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        np.testing.assert_array_equal(predict(load_classifier(tmp_path), labelled(labels)).labels, ids)

    def test_names_that_differ_in_case_only(self, tmp_path: Path) -> None:
        tiny_bert(id2label=dict(enumerate(("us", "US", "it", "IT")))).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        classifier = load_classifier(tmp_path)
        np.testing.assert_array_equal(predict(classifier, labelled(["US", "us", "IT"])).labels, [1, 0, 3])
        with pytest.raises(ValueError, match=r"hold the model's classes .us, US, it, IT., got 'Us'"):
            predict(classifier, labelled(["US", "Us"]))

    def test_floats_and_truth_values(self, model_folder: Path, tmp_path: Path) -> None:
        classifier = load_classifier(model_folder)
        np.testing.assert_array_equal(predict(classifier, labelled([3.0, 0.0, 1.0])).labels, [3, 0, 1])
        with pytest.raises(
            ValueError,
            match=r"hold the model's classes .*got 'true' in row 0; give the data's",
        ):
            predict(classifier, labelled([True, False]))
        tiny_bert(id2label=dict(enumerate(("false", "true", "a", "b")))).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        np.testing.assert_array_equal(
            predict(load_classifier(tmp_path), labelled([True, False])).labels, [1, 0]
        )

    def test_names_for_numbers_are_not_ignored(self, model_folder: Path) -> None:
        with pytest.raises(ValueError, match="class_names to name the labels of 'label', got numbers there"):
            predict(load_classifier(model_folder), labelled([3, 0]), class_names=["a", "b", "c", "d"])

    def test_a_model_without_names_takes_numbers(self, tmp_path: Path) -> None:
        tiny_bert().save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        rows = labelled([2, 0], ClassLabel(names=["x", "y", "z"]))
        np.testing.assert_array_equal(predict(load_classifier(tmp_path), rows).labels, [2, 0])

    @pytest.mark.parametrize(
        ("rows", "options", "error", "message"),
        [
            (
                labelled(["art", "music", "film"]),
                {},
                ValueError,
                r"\(art, law, NA, sport\), got 'music' in row 1; give the",
            ),
            (labelled(["art", " "]), {}, ValueError, r"a label in every row, got none in row 1"),
            (labelled(["art", "law\u00a0"]), {}, ValueError, r"'law\\xa0' and 'law' differ only by spaces"),
            (labelled([0, 4]), {}, ValueError, "hold the model's ids, 0..3, got 4 in row 1;"),
            (
                labelled([0, -1], ClassLabel(names=NAMES)),
                {},
                ValueError,
                "be labelled, got -1; choose a split",
            ),
            (labelled([0, None]), {}, ValueError, "have a value in every row, got 1 without"),
            (labelled([0.5, 1.0]), {}, ValueError, "hold class names or ids, got 0.5 in row 0"),
            (labelled([[0], [1]]), {}, TypeError, "hold one class in each row, got list"),
            (
                labelled([0]),
                {"label_column": "lable"},
                ValueError,
                "label_column to be one of text, label, .*mean",
            ),
            (
                labelled([0]),
                {"text_column": "texts"},
                ValueError,
                "text_column to be one of text, label, .*mean",
            ),
            (labelled([0]), {"text_column": "label"}, TypeError, "column 'label' to hold texts"),
            (
                labelled([0]),
                {"class_names": ["a"]},
                ValueError,
                "name the model's 4 classes .* once each, got a",
            ),
            (labelled([0]), {"class_names": ["a"] * 4}, ValueError, "once each, got a, a, a, a"),
            (labelled([0]).select([]), {}, ValueError, "expected data to have rows, got none"),
            (labelled([0]), {"batch_size": 0}, ValueError, "batch_size to be at least 1, got 0"),
            (labelled([0]), {"max_length": 0}, ValueError, "max_length to be at least 1, got 0"),
        ],
    )
    def test_refused(
        self, rows: Dataset, options: dict[str, Any], error: type[Exception], message: str, model_folder: Path
    ) -> None:
        with pytest.raises(error, match=message):
            predict(load_classifier(model_folder), rows, **options)


class TestLoading:
    @pytest.mark.parametrize("name", ["data.csv", "data.csv.gz", "data.jsonl", "data.parquet"])
    def test_rows_of_a_file(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        table = pandas.DataFrame({"text": ["a", "NA"], "label": ["x", "None"]})
        if name.endswith("jsonl"):
            table.to_json(path, orient="records", lines=True)
        else:
            write(table, path)
        assert load_rows(path)[:] == {"text": ["a", "NA"], "label": ["x", "None"]}

    def test_a_split_of_a_folder(self, tmp_path: Path) -> None:
        for split in ("train", "test"):
            write(pandas.DataFrame({"text": [split], "label": [0]}), tmp_path / f"{split}.csv")
        assert load_rows(tmp_path)["text"] == ["test"]
        assert load_rows(tmp_path, split="train")["text"] == ["train"]
        with pytest.raises(
            ValueError, match=r"expected data to have a split 'validation', got .*; name a file"
        ):
            load_rows(tmp_path, split="validation")

    @pytest.mark.parametrize("name", ["nothing.csv", "deep/nothing.parquet"])
    def test_no_such_file(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"to name an existing file, got .*nothing"):
            load_rows(name)

    def test_no_such_data_set(self) -> None:
        with pytest.raises(ValueError, match="expected data to have a split 'test', got someone/nothing"):
            load_rows("someone/nothing")

    def test_no_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.csv"
        path.write_text("text,label\n")
        with pytest.raises(ValueError, match=r"expected data to have rows, got none in .*empty\.csv"):
            load_rows(path)

    def test_no_such_model(self, tmp_path: Path) -> None:
        for name in ("someone/nothing", tmp_path):
            with pytest.raises(
                ValueError, match=r"expected the model to be loadable, got .*; name a fine-tuned cl"
            ) as e:
                load_classifier(name)
            assert "\n" not in str(e.value)

    @pytest.mark.parametrize("size", [0, 4, 0.5])
    def test_truncated_weights(self, size: float, model_folder: Path, tmp_path: Path) -> None:
        shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
        path = tmp_path / "model.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * size) if size < 1 else int(size)])
        with pytest.raises(
            ValueError, match=r"the model to be loadable, got .*; check that its files are complete"
        ):
            load_classifier(tmp_path)

    def test_weights_of_another_shape(self, model_folder: Path, tmp_path: Path) -> None:
        shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
        config = (tmp_path / "config.json").read_text()
        (tmp_path / "config.json").write_text(
            config.replace('"intermediate_size": 16', '"intermediate_size": 32')
        )
        with pytest.raises(
            ValueError, match=r"the model to be loadable, got .*; check that its files are complete"
        ):
            load_classifier(tmp_path)

    def test_over_long_names(self) -> None:
        with pytest.raises(ValueError, match="the model to be loadable, got aaa"):
            load_classifier("a" * 5000)
        with pytest.raises(ValueError, match="to name an existing file, got aaa"):
            load_rows("a" * 5000 + ".csv")
        with pytest.raises(ValueError, match="data to have a split 'test', got aaa"):
            load_rows("a" * 5000)

    def test_a_model_without_a_trained_head(self, tmp_path: Path) -> None:
        tiny_bert().bert.save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match=r"to be a fine-tuned classifier, got no classifier.bias, classifier.w"
        ):
            load_classifier(tmp_path)

    @pytest.mark.parametrize(
        "config",
        [{"problem_type": "multi_label_classification"}, {"problem_type": "regression"}, {"num_labels": 1}],
    )
    def test_models_of_other_kinds(self, config: dict[str, Any], tmp_path: Path) -> None:
        tiny_bert(**config).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match="expected the model to choose one of several classes, got problem_type="
        ):
            load_classifier(tmp_path)


def test_unlabelled_numbers_that_are_no_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "scalar.npz", logits=np.float64(3))
    with pytest.raises(InputValueError, match=r"expected logits to have shape \(N, C\) .*, got shape \(\)"):
        open_predictions(tmp_path / "scalar.npz", label_column=None).load()
