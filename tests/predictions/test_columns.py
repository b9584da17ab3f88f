"""Tables of predictions: which columns hold what, and labels as the ids of classes."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from scipy.special import softmax

from hf_calib._errors import InputValueError
from hf_calib.predictions import load_predictions

NAMES = (
    "art",
    "law",
    "NA",
    "sport",
)  # a name that some readers take for a missing value
LOGITS = np.random.default_rng(0).normal(size=(6, 4)) * 3
PROBS = softmax(LOGITS, axis=1)
LABELS = np.array([0, 3, 2, 1, 0, 2])


def write(table: pandas.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    return path


def as_table(
    values: np.ndarray, prefix: str, labels: Any = LABELS, **others: Any
) -> pandas.DataFrame:
    columns = {f"{prefix}{name}": values[:, i] for i, name in enumerate(NAMES)}
    return pandas.DataFrame({**others, **columns, "label": labels})


class TestLabels:
    @pytest.mark.parametrize(
        ("names", "labels", "ids"),
        [
            (NAMES, list(LABELS), list(LABELS)),
            (NAMES, [NAMES[label] for label in LABELS], list(LABELS)),
            (
                NAMES,
                [NAMES[label].upper() for label in LABELS],
                list(LABELS),
            ),  # no two differ in case only
            (NAMES, LABELS.astype(float), list(LABELS)),
            (NAMES, pandas.array(LABELS, dtype="Int64"), list(LABELS)),
            (("us", "US"), ["US", "us"], [1, 0]),
            (("7", "3"), [7, 3, 7], [0, 1, 0]),  # integers for names
            (("-1", "0", "1"), [0, -1, 1], [1, 0, 2]),
            (("2", "1", "0"), [0, 1, 2], [2, 1, 0]),
            (
                ("0", "1", "many"),
                [1, 0, 2],
                [1, 0, 2],
            ),  # not all names are: these are numbers of columns
            (("10", "20", "-"), [1, 0, 2], [1, 0, 2]),
            # Names and labels that are numbers are compared as numbers.
            (("1.0", "2.0", "3.0"), [1.0, 1.0, 2.0], [0, 0, 1]),
            (("1.0", "2.0", "3.0"), [1, 3, 2], [0, 2, 1]),
            (("1.0", "0.0"), [0.0, 1.0, 1.0], [1, 0, 0]),
            (("1.0", "0.0"), [0, 1, 1], [1, 0, 0]),
            (("+1", "-1"), [-1, 1], [1, 0]),
            (("1e0", "0e0"), [0, 1], [1, 0]),
            (("1", "0"), [0.0, 1.0], [1, 0]),
            (("0.50", "0.1"), [0.1, 0.5], [1, 0]),
            (("01", "00"), [0, 1], [1, 0]),
            (("0.0", "1.0"), ["1", "+0"], [1, 0]),
            (("9007199254740993", "9007199254740992"), [2**53, 2**53 + 1], [1, 0]),
            (("²", "x"), [0, 1], [0, 1]),
            (("False", "True"), [True, False], [1, 0]),
        ],
    )
    @pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
    def test_are_names_or_ids(
        self,
        names: tuple[str, ...],
        labels: Any,
        ids: list[int],
        name: str,
        tmp_path: Path,
    ) -> None:
        columns = {
            f"logit_{each}": 0.1 + i + np.arange(len(labels))
            for i, each in enumerate(names)
        }
        table = pandas.DataFrame({"topic": labels, **columns})
        read = load_predictions(write(table, tmp_path / name), label_column="topic")
        np.testing.assert_array_equal(read.labels, ids)
        assert read.class_names == names

    @pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
    @pytest.mark.parametrize(
        ("names", "labels", "message"),
        [
            (("1", "1.0", "2"), [1.0, 2.0], "class_names to differ as numbers"),
            (("1.0", "2.0", "3.0"), [0.0, 1.0], "hold the names of the class columns"),
            (("1.0", "x", "y"), [1.0, 0.0], "a name or an id of one class only"),
        ],
    )
    def test_numbers_of_no_class_or_of_several(
        self,
        names: tuple[str, ...],
        labels: list[float],
        message: str,
        name: str,
        tmp_path: Path,
    ) -> None:
        table = pandas.DataFrame({f"prob_{each}": [1 / 3] * 2 for each in names})
        with pytest.raises(ValueError, match=message):
            load_predictions(write(table.assign(label=labels), tmp_path / name))

    @pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.tsv"])
    @pytest.mark.parametrize(
        ("names", "labels"),
        [
            (("true", "false"), ["true", "false", "true"]),
            (("TRUE", "FALSE"), ["FALSE", "TRUE", "TRUE"]),
            (("01", "02"), ["02", "01", "01"]),
            (("1.50", "1.5"), ["1.5", "1.50", "1.5"]),
            (("1e3", "NA"), ["NA", "1e3", "NA"]),
            (("1.0", "2.0"), ["2.0", "1.0", "2.0"]),
        ],
    )
    def test_are_what_stands_in_the_file(
        self, names: tuple[str, str], labels: list[str], name: str, tmp_path: Path
    ) -> None:
        table = pandas.DataFrame(
            {f"prob_{names[0]}": [0.5, 0.2, 0.9], f"prob_{names[1]}": [0.5, 0.8, 0.1]}
        )
        found = load_predictions(write(table.assign(label=labels), tmp_path / name))
        assert found.class_names == names
        assert [names[i] for i in found.labels] == labels

    @pytest.mark.parametrize("labels", [[0, None], ["a", None], [0.0, np.nan]])
    def test_missing_ones(self, labels: list[Any], tmp_path: Path) -> None:
        table = pandas.DataFrame({"a": [0.5, 0.5], "b": [0.5, 0.5], "label": labels})
        with pytest.raises(
            ValueError,
            match=r"hold a label in every row, got none in row 1 of p.parquet",
        ):
            load_predictions(write(table, tmp_path / "p.parquet"))

    def test_names_that_differ_in_case_only(self, tmp_path: Path) -> None:
        table = pandas.DataFrame(
            {"prob_us": [0.5, 0.2], "prob_US": [0.5, 0.8], "label": "Us"}
        )
        with pytest.raises(ValueError, match="got 'Us'"):
            load_predictions(write(table, tmp_path / "p.csv"))

    @pytest.mark.parametrize("label", ["1e+300", str(2**63 + 1)])
    def test_one_beyond_64_bits_is_shown_as_it_is(
        self, label: str, tmp_path: Path
    ) -> None:
        (tmp_path / "p.csv").write_text(f"label,prob_a,prob_b\n0,1,0\n{label},0,1\n")
        with pytest.raises(ValueError, match=f"got {re.escape(label)} in row 1"):
            load_predictions(tmp_path / "p.csv")


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz", "p.tsv", "p.parquet"])
@pytest.mark.parametrize(
    ("prefix", "kind"), [("logit_", "logits"), ("prob_", "probs"), ("", "probs")]
)
def test_columns(name: str, prefix: str, kind: str, tmp_path: Path) -> None:
    values = LOGITS if kind == "logits" else PROBS
    read = load_predictions(write(as_table(values, prefix), tmp_path / name))
    np.testing.assert_allclose(getattr(read, kind), values, rtol=1e-15)
    np.testing.assert_array_equal(read.labels, LABELS)
    assert read.class_names == NAMES


def test_other_columns_are_ignored_beside_prefixes(tmp_path: Path) -> None:
    table = as_table(PROBS, "prob_", target=LABELS[::-1], text=list("abcdef"))
    table.to_csv(tmp_path / "p.csv")  # with its index, a column without a name
    read = load_predictions(tmp_path / "p.csv")
    assert read.class_names == NAMES
    np.testing.assert_array_equal(read.labels, LABELS)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.tsv"])
@pytest.mark.parametrize(
    ("cells", "got"),
    [
        ("1,2,0\n1,2,0,7", "4 in row 1"),
        ("1,2,0\n1,2", "2 in row 1"),
        ("1,2,0,9", "4 in row 0"),
    ],
)
def test_a_row_of_another_length(
    cells: str, got: str, name: str, tmp_path: Path
) -> None:
    text = f"logit_a,logit_b,label\n{cells}\n".replace(
        ",", "\t" if "tsv" in name else ","
    )
    path = tmp_path / name
    path.write_bytes(
        gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    )
    message = (
        f"the table to have 3 values in every row, got {got} of {name}; write exactly"
    )
    with pytest.raises(InputValueError, match=message):
        load_predictions(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prob_a,prob_a,label\n.5,.5,0\n", "contained multiple columns named prob_a"),
        ("a,b,label,label\n.5,.5,0,1\n", "contained multiple columns named label"),
        (
            "a,b,Labels,label\n.5,.5,0,0\n",
            "got 'Labels' next to the label column 'label'; name",
        ),
        (
            "a,b,target,label\n.5,.5,0,0\n",
            "got 'target' next to the label column 'label'; name",
        ),
        (",a,b,label\n0,.5,.5,0\n", "class columns to name their classes, got ''"),
        (
            "prob_a,prob_,label\n.5,.5,0\n",
            "class columns to name their classes, got 'prob_'",
        ),
        (
            "logit_a,logit_b,label\n.5,.5,0\n.1,.9,1\n",
            "logits not to be probabilities, .* prob_<class>",
        ),
        (
            "a,b,label\n.5,.5,a\n.5,.5,\n",
            "a label in every row, got none in row 1 of p.csv",
        ),
        (
            "a,b,label\n.5,.5,0\n.5,.5,  \n",
            "a label in every row, got none in row 1 of p.csv",
        ),
        ("a,b,label\n.5,.5,0.5\n", "hold class names or ids, got 0.5 in row 0"),
        (
            "a,b,label\n.5,.5,inf\n",
            "hold the names of the class columns .*, got 'inf' in row 0",
        ),
        ("a,b,label\n.5,.5,a \n", r"got 'a ' \('a ' and 'a' differ only by spaces"),
        (
            "a,b,label\n.5,.5,a\u200b\n",
            r"got 'a\\u200b' \('a\\u200b' and 'a' differ only by",
        ),
        ("e\u0301,b,label\n.5,.5,\u00e9\n", r"\('\\xe9' and 'e\\u0301' differ only by"),
        (
            "a,b,label\n.5,.5,0\n,1,1\n",
            r"'a' to hold numbers in every row, got none in row 1 of p.csv; .*fill in",
        ),
        (
            "label;a;b\n0;1;0\n",
            "to have several columns, got one column .*separate .* by commas",
        ),
        (
            "label\ta\tb\n0\t1\t0\n",
            "to have several columns, got one column .*separate .* by commas",
        ),
        ("label,prob_a,prob_b\n", "the predictions to have rows, got none in .*p.csv"),
        ("", "p.csv to begin with a line of column names, got an empty file"),
    ],
)
def test_ambiguous_tables_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_predictions(tmp_path / "p.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.drop(columns="label"),
            "label_column to be one of logit_art, .*got 'label'",
        ),
        (lambda t: t.rename(columns={"label": "labels"}), "did you mean 'labels'"),
        (
            lambda t: t.assign(label="music"),
            r"class columns \(art, law, NA, sport\), got 'music'",
        ),
        (lambda t: t.assign(label=4), "labels to lie in 0..3, got 4 in row 0 of p.csv"),
        (
            lambda t: t.assign(logit_law="x"),
            "column 'logit_law' to hold numbers in every row",
        ),
        (
            lambda t: t.assign(prob_art=0.5),
            "got logit_ and prob_ columns; keep one kind",
        ),
        (
            lambda t: t[["logit_law", "label"]],
            "each of at least 2 classes, got logit_law",
        ),
        (
            lambda t: t.rename(columns=lambda c: c.removeprefix("logit_")),
            "hold probabilities, as their names .* got -?[0-9.]+ in row 0 of p.csv; name the columns",
        ),
    ],
)
def test_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = write(change(as_table(LOGITS, "logit_")), tmp_path / "p.csv")
    with pytest.raises(
        TypeError if "hold numbers" in message else ValueError, match=message
    ):
        load_predictions(path)


def test_what_is_no_table(tmp_path: Path) -> None:
    whole = gzip.compress(b"prob_a,prob_b,label\n" + b"0.5,0.5,0\n" * 1000)
    (tmp_path / "p.csv.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "p.parquet").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "p.pkl").write_bytes(b"")
    for name, message in (
        ("p.csv.gz", "p.csv.gz to be readable as csv, got"),
        ("p.parquet", "p.parquet to be readable as parquet, got"),
        ("nothing.csv", "name existing files, got .*nothing.csv, where there are none"),
        ("a" * 5000 + ".csv", "name existing files, got .*aaaa"),
        (
            "p.pkl",
            r"to end in .npz, .csv, .tsv, .parquet, .jsonl, got p.pkl, which has another",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load_predictions(tmp_path / name)
