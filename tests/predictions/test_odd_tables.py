"""Tables and arrays that other tools write: what is read, and what is refused in words."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet as pq
import pytest

from hf_calib import InputError
from hf_calib.commands.options import calibrate, evaluate
from hf_calib.predictions import load_predictions, read_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling import IsotonicScaling, TemperatureScaling
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tables import write_table


def parquet(path: Path, names: list[str], *columns: Any) -> Path:
    pq.write_table(
        pyarrow.Table.from_arrays([*map(pyarrow.array, columns)], names), path
    )
    return path


@pytest.mark.parametrize("form", ["csv", "parquet", "npz"])
def test_nan_in_logits_names_the_row(form: str, tmp_path: Path) -> None:
    logits = np.array([[0.2, 0.8], [0.5, 0.5], [np.nan, 0.1], [0.3, 0.7]])
    path = tmp_path / f"a.{form}"
    if form == "npz":
        np.savez(path, logits=logits, labels=np.zeros(4, int))
    elif form == "csv":
        table = pandas.DataFrame(logits, columns=["logit_a", "logit_b"])
        table.assign(label="a").to_csv(path, index=False, na_rep="nan")
    else:
        parquet(path, ["logit_a", "logit_b", "label"], *logits.T, ["a"] * 4)
    with pytest.raises(InputError, match="got nan in row 2") as found:
        load_predictions(path)
    assert "add 1" not in str(found.value)
    assert "sum to 1" not in str(found.value)


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("twice", ["label", "prob_a", "w", "country"])
def test_two_columns_of_one_name(form: str, twice: str, tmp_path: Path) -> None:
    names = ["prob_a", "prob_b", "label", "w", "country", twice]
    values: dict[str, Any] = {
        "prob_a": [0.9],
        "prob_b": [0.1],
        "label": ["a"],
        "w": [1.0],
        "country": ["de"],
    }
    path = tmp_path / f"a.{form}"
    if form == "csv":
        row = [str(values[name][0]) for name in names]
        path.write_text(",".join(names) + "\n" + ",".join(row) + "\n")
    else:
        parquet(path, names, *(values[name] for name in names))
    with pytest.raises(
        InputError, match=f"different names, got .* columns named {twice}"
    ):
        read_predictions(path, weight_column="w", by=["country"])


@pytest.mark.parametrize(
    "types",
    list(itertools.permutations(["int64", "float32", "float64"])),
    ids=lambda types: "-".join(types),
)
def test_numbers_of_any_types_in_any_order(
    types: tuple[str, ...], tmp_path: Path
) -> None:
    for place, kind in enumerate(types):
        probs = np.array([[1, 0], [0, 1]], kind)
        weights = np.array([1, 2], kind)
        columns = (probs[:, 0], probs[:, 1], ["no", "yes"], weights)
        parquet(
            tmp_path / f"{place}.parquet",
            ["prob_no", "prob_yes", "label", "w"],
            *columns,
        )
    found = read_predictions(tmp_path, weight_column="w").predictions
    np.testing.assert_array_equal(found.probabilities(), [[1, 0], [0, 1]] * 3)
    np.testing.assert_array_equal(found.weights, [1, 2] * 3)


@pytest.mark.parametrize("fixed", [False, True])
def test_lists_of_unequal_lengths_are_not_regrouped(
    fixed: bool, tmp_path: Path
) -> None:
    rows: list[Any] = [[0.5, 0.5], [0.2, 0.3, 0.5], [1.0], [0.5, 0.5]]
    kind = pyarrow.list_(pyarrow.float64())
    row = 1
    if fixed:
        rows = [[0.5, 0.5], [0.5, 0.5], None]
        kind = pyarrow.list_(pyarrow.float64(), 2)
        row = 2
    lists = pyarrow.array(rows, kind)
    path = parquet(tmp_path / "a.parquet", ["probs", "label"], lists, [0] * len(rows))
    with pytest.raises(
        InputError, match=f"list to have 2 values, got .* in row {row} of"
    ):
        load_predictions(path)


@pytest.mark.parametrize("names", [["b", "a"], ["a", "c"], ["a", "b", "c"]])
def test_arrays_of_other_classes_are_not_pooled(
    names: list[str], tmp_path: Path
) -> None:
    for place, own in enumerate((["a", "b"], names)):
        logits = np.arange(2.0 * len(own)).reshape(2, -1)
        np.savez(
            tmp_path / f"{place}.npz", logits=logits, labels=[0, 1], class_names=own
        )
    with pytest.raises(
        InputError, match=r"1\.npz: expected the file to have the same classes"
    ):
        read_predictions(tmp_path)


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize(
    ("names", "labels", "others"),
    [
        (("n", "p"), [0, 1], None),
        (("n", "p"), [0.0, 1.0], None),
        (("n", "p"), ["n", "p"], [1, 0]),
        (("N", "p"), ["n", "P"], [1, 0]),
        (("0", "1"), [0, 1], [1, 0]),
        (("10", "20"), [10, 20], [1, 0]),
        (("True", "False"), [True, False], [1, 0]),
    ],
)
def test_ids_are_not_counted_by_the_columns_of_another_file(
    names: tuple[str, ...], labels: Any, others: Any, form: str, tmp_path: Path
) -> None:
    probs = [0.7, 0.2, 0.1][: len(names)]
    probs[0] = 1 - sum(probs[1:])
    columns = {f"prob_{name}": [p, p] for name, p in zip(names, probs, strict=True)}
    table = pandas.DataFrame(columns).assign(label=labels)
    write_table(table, tmp_path / f"b.{form}")
    write_table(table, tmp_path / f"c.{form}")
    moved = table[[*[*columns][::-1], "label"]]
    write_table(moved, tmp_path / f"a.{form}")
    paths = [tmp_path / f"{name}.{form}" for name in "abc"]
    assert len(load_predictions(paths[1:])) == 4
    if others is None:
        message = (
            rf"one order, as column 'label' holds ids, got .* in b\.{form}, c\.{form};"
        )
        with pytest.raises(InputError, match=message):
            load_predictions(paths)
        return
    found = load_predictions(paths)
    assert found.labels.tolist() == [*others, *others, *others]
    assert found.class_names == names[::-1]


class TestBy:
    def rows(self, tmp_path: Path, by: Any, name: str = "country") -> Path:
        probs = np.tile([0.7, 0.3], (6, 1))
        columns = (probs[:, 0], probs[:, 1], ["a", "b"] * 3, pyarrow.array(by))
        return parquet(
            tmp_path / "a.parquet", ["prob_a", "prob_b", "label", name], *columns
        )

    @pytest.mark.parametrize(
        "by",
        [[["de"]] * 6, [{"x": 1}] * 6, [[1, 2]] * 6],
        ids=["texts", "struct", "numbers"],
    )
    def test_of_nested_values(self, by: Any, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="'country' to hold texts or numbers, got"):
            evaluate(self.rows(tmp_path, by), by=["country"])

    @pytest.mark.parametrize("name", ["a/b", "../x", "a\\b", "é" * 200, "<img src=x>"])
    def test_of_any_name(self, name: str, tmp_path: Path) -> None:
        path = self.rows(tmp_path, ["de", "fr"] * 3, name)
        report = evaluate(path, by=[name], output=tmp_path / "out")
        assert report.slices[0].column == name
        file = report.slices[0].figure_name
        assert Path(file).name == file
        assert len(file.encode()) < 240
        assert list(report.slices[0].figures(15)) == [file]
        assert {path.name for path in tmp_path.iterdir()} == {"a.parquet", "out"}

    def test_nulls_are_a_slice(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path, ["de", None, "fr", None, "de", "fr"])
        report = evaluate(path, by=["country"])
        counts = {each.name: each.n_rows for each in report.slices[0].slices}
        assert counts == {"de": 2, "fr": 2, "(none)": 2}

    def test_nulls_and_empty_texts_are_two_slices(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path, ["de", None, "", None, "de", ""])
        report = evaluate(path, by=["country"])
        counts = {each.name: each.n_rows for each in report.slices[0].slices}
        assert counts == {"de": 2, "(none)": 2, "(empty)": 2}


class TestZeros:
    """Probabilities of 0, as services give them where they list the largest only."""

    def drawn(self, n_zero: int) -> Predictions:
        rng = np.random.default_rng(0)
        top = 0.5 + 0.5 * rng.beta(3, 1.3, 400)
        probs = np.stack([top, 1 - top], axis=1)
        labels = (rng.random(400) > top).astype(int)
        probs[:n_zero] = [1, 0]
        labels[:n_zero] = 1
        return Predictions(labels, probs=probs, class_names=("a", "b"))

    @pytest.mark.parametrize("scaler", [TemperatureScaling(), IsotonicScaling()])
    def test_at_the_label(self, scaler: Any) -> None:
        message = "the label of every row to fit on to have a probability above 0, got 0 in 4 of 400"
        with pytest.raises(InputError, match=message):
            self.drawn(4).fit_calibrator(scaler)

    def test_of_several_labels(self) -> None:
        probs = np.tile([[0.2, 0.7], [0.0, 0.6], [0.3, 1.0], [0.0, 1.0]], (10, 1))
        labels = np.tile([[0, 1], [1, 1], [1, 0], [0, 1]], (10, 1))
        with pytest.raises(InputError, match="above 0, got 0 in 20 of 40"):
            Predictions(labels, probs=probs).fit_calibrator(TemperatureScaling())

    def test_at_other_classes_are_counted(self) -> None:
        found = self.drawn(0)
        found.probs[:7] = [1, 0]  # type: ignore[index]
        found.labels[:7] = 0
        (note, *_) = found.fit_calibrator(TemperatureScaling())
        assert note.startswith("7 of the 400 rows to fit on have probabilities of 0")
        assert self.drawn(0).fit_calibrator(TemperatureScaling()) == []

    def test_of_files(self, tmp_path: Path) -> None:
        found = self.drawn(40)
        np.savez(tmp_path / "a.npz", probs=found.probs, labels=found.labels)
        words = ("calibrate", tmp_path / "a.npz", "--output", tmp_path / "out")
        assert_refused(call(*words), r"above 0, got 0 in \d+ of 200; write logits")
        assert not (tmp_path / "out").exists()
        assert called_for_json("evaluate", tmp_path / "a.npz")["n_examples"] == 400
        found = self.drawn(0)
        np.savez(tmp_path / "b.npz", probs=found.probs, labels=found.labels)
        tested = ("calibrate", tmp_path / "b.npz", "--test-data", tmp_path / "a.npz")
        result = call(*tested, "--output", tmp_path / "out")
        assert_refused(result, "every row to report on to have a probability above 0")


class TestOutput:
    def table(self, seed: int) -> pandas.DataFrame:
        top = 0.5 + 0.5 * np.random.default_rng(seed).random(60)
        return pandas.DataFrame(
            {"prob_a": top, "prob_b": 1 - top, "label": "a", "w": 1.0}
        )

    def test_a_link_is_not_written_through(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        for seed in range(2):
            self.table(seed).to_csv(tmp_path / "in" / f"{seed}.csv", index=False)
        (tmp_path / "mine.parquet").write_text("mine")
        (tmp_path / "out").mkdir()
        link = tmp_path / "out" / "predictions.parquet"
        link.symlink_to(tmp_path / "mine.parquet")
        with pytest.raises(InputError, match="no predictions but those of an earlier"):
            calibrate(tmp_path / "in", tmp_path / "out", method="temperature")
        assert (tmp_path / "mine.parquet").read_text() == "mine"
        link.unlink()
        calibrate(tmp_path / "in", tmp_path / "out", method="temperature")
        (tmp_path / "out" / "figures").rename(tmp_path / "elsewhere")
        (tmp_path / "out" / "figures").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match="to be a folder of its own, got a link"):
            calibrate(tmp_path / "in", tmp_path / "out", method="temperature")

    @pytest.mark.parametrize(
        "form", ["list", "list and texts", "weights", "second file"]
    )
    def test_a_column_with_a_name_that_is_written(
        self, form: str, tmp_path: Path
    ) -> None:
        logits = np.random.default_rng(0).normal(size=(60, 2))
        columns = {"logit_a": logits[:, 0], "logit_b": logits[:, 1], "label": 0}
        table = pandas.DataFrame(columns)
        name = "prob_a"
        value: Any = 1.0
        if form == "list":
            name = "probs"
            table = pandas.DataFrame({"logits": list(logits), "label": 0})
        elif form == "list and texts":
            name = "probs"
            table = pandas.DataFrame({"logits": list(logits), "label": 0})
            value = "text"
        elif form == "second file":
            table.to_parquet(tmp_path / "0.parquet")
        weight = "prob_a" if form == "weights" else None
        table.assign(**{name: value}).to_parquet(tmp_path / "1.parquet")
        assert len(evaluate(tmp_path, weight_column=weight).before.metrics) > 5
        with pytest.raises(InputError, match=f"names of calibrated .*, got '{name}'"):
            calibrate(tmp_path, tmp_path / "_out", weight_column=weight)
        assert not (tmp_path / "_out").exists()

    def test_files_of_one_name_but_for_the_ending(self, tmp_path: Path) -> None:
        self.table(0).to_csv(tmp_path / "a.csv", index=False)
        self.table(1).to_csv(tmp_path / "a.tsv", index=False, sep="\t")
        done = calibrate(tmp_path, tmp_path / "_out", method="temperature")
        written = pandas.read_parquet(tmp_path / "_out" / "predictions.parquet")
        assert len(written) == done.report.n_examples == 60


def test_deep_json_lines_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(InputError, match="to hold one JSON object in each line"):
        load_predictions(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null", "to hold one JSON object in each line, got 'null' in row 0"),
        ("[1, 2]", r"to hold one JSON object in each line, got '\[1, 2\]' in row 0"),
        ('{"label": 0, "logits": [1, 2]}\n\nnull', "got 'null' in row 1"),
        ("{}", "the table to have columns, got none"),
        ('{"label": 0, "logits": []}', "at least 2 classes in each row, got 0 in"),
        ('{"label": 0, "logits": [1.5]}', "at least 2 classes in each row, got 1 in"),
    ],
)
def test_lines_that_are_no_rows(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(InputError, match=message):
        load_predictions(tmp_path / "a.jsonl")


def test_a_table_without_columns(tmp_path: Path) -> None:
    pq.write_table(pyarrow.table({}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="the table to have columns, got none"):
        load_predictions(tmp_path / "a.parquet")


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "jsonl"])
def test_names_that_are_ids_of_other_classes_are_refused(
    form: str, tmp_path: Path
) -> None:
    names = ["1", "2", "3", "4", "5", "none"]
    table = pandas.DataFrame(np.full((4, 6), 1 / 6), columns=names).add_prefix("prob_")
    table["label"] = ["1", "none", "2", "3"]
    path = write_table(table, tmp_path / f"a.{form}")
    with pytest.raises(InputError, match=r"got class names '1', '2', '3', '4', '5'"):
        read_predictions(path)


@pytest.mark.parametrize("names", ["0,1,none", "10,20,none"])
def test_names_that_are_no_ids_of_other_classes_are_read(
    names: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    last = names.split(",")[1]
    path.write_text(f"label,{names}\n{last},0.5,0.3,0.2\nnone,0.5,0.3,0.2\n")
    assert load_predictions(path).labels.tolist() == [1, 2]


def test_a_missing_value_in_a_list_names_its_row(tmp_path: Path) -> None:
    rows = [[0.5, 0.5], [0.5, 0.5], [0.5, None]]
    path = parquet(tmp_path / "a.parquet", ["probs", "label"], rows, [0, 1, 0])
    with pytest.raises(InputError, match="got none in row 2 of"):
        load_predictions(path)


@pytest.mark.parametrize("ends", ['{"a":1}', "[]"])
def test_deeply_nested_json_is_refused(ends: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    opened, closed = ends.split("1") if "1" in ends else ends
    more = opened * 100_000 + "1" + closed * 100_000
    path.write_text('{"label": 0, "prob_a": 0.5, "more": ' + more + "}\n")
    with pytest.raises(InputError, match="at most 20 deep, got more in row 0"):
        load_predictions(path)


def test_brackets_in_texts_of_json_are_no_nesting(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"label": 0, "probs": [0.5, 0.5], "text": '\\"{[' * 50}
    path.write_text(json.dumps(row) + "\n")
    assert load_predictions(path).labels.tolist() == [0]


def test_many_classes_are_opened_quickly(tmp_path: Path) -> None:
    names = [f"prob_{k}" for k in range(3000)]
    for form in ("f4", "f8"):
        scores = np.full((3000, 1), 1 / 3000, form)
        parquet(tmp_path / f"{form}.parquet", [*names, "label"], *scores, [0])
    start = time.process_time()
    read_predictions(tmp_path)
    assert time.process_time() - start < 2.5


def test_rows_of_arrays_are_compared_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    # The header states more than any memory holds, and no values follow.
    with zipfile.ZipFile(path, "w") as archive:
        for name, shape, kind in (
            ("logits", (2**40, 9), "<f8"),
            ("labels", (3,), "<i8"),
        ):
            with archive.open(f"{name}.npy", "w") as file:
                header = {"descr": kind, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
    refused = "same number of rows, got 1099511627776 of logits, 3 of labels"
    with pytest.raises(InputError, match=refused):
        load_predictions(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "{head}{long}\n", "each row of a.csv to be shorter than 4 MB, got"),
        ("a.csv.gz", '{head}0.5,0.5,"{long}', "each row of a.csv.gz to be shorter"),
        ("a.tsv", "{long}", "a.tsv to begin with a line of column names, got none"),
        ("a.jsonl", '{{"logits": [{long}0]}}', "a.jsonl to be shorter than 1 MB, got"),
    ],
)
def test_a_line_without_an_end(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    n_numbers = 600_000 if name == "a.jsonl" else 2_200_000
    head = "prob_a,prob_b,label\n0.5,0.5,a\n"
    made = text.format(head=head, long="1.5," * n_numbers)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wt") as file:
        file.write(made)
    with pytest.raises(InputError, match=message):
        read_predictions(tmp_path / name)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"weight_column": "w", "by": ["w"]},
            "by to name different columns, got 'w' twice",
        ),
        ({"by": ["country", "label"]}, "to name different columns, got 'label' twice"),
        ({"weight_column": "label"}, "label_column, weight_column and by to name"),
    ],
)
def test_a_column_in_two_roles(
    columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rows = {"prob_a": [0.5], "prob_b": [0.5], "label": ["a"], "w": [1.0]}
    path = tmp_path / "a.csv"
    pandas.DataFrame({**rows, "country": ["de"]}).to_csv(path, index=False)
    with pytest.raises(InputError, match=message):
        read_predictions(path, **columns)


def test_a_link_is_no_second_file(tmp_path: Path) -> None:
    rows = "label,prob_0,prob_1\n0,0.7,0.3\n1,0.4,0.6\n"
    (tmp_path / "a.csv").write_text(rows)
    (tmp_path / "latest.csv").symlink_to("a.csv")
    os.link(tmp_path / "a.csv", tmp_path / "hard.csv")
    names = [str(tmp_path / name) for name in ("a.csv", "latest.csv", "hard.csv")]
    for sources in (tmp_path, names):
        assert len(load_predictions(sources).labels) == 2


@pytest.mark.parametrize(
    ("header", "blank"),
    [
        ("label, logit_a, logit_b", "' logit_a', ' logit_b'"),
        ("label,logit_a,logit_b, logit_c", "' logit_c'"),
        ("logit_a,logit_b, label", "' label'"),
        ("logit_a,logit_b,label ", "'label '"),
    ],
)
def test_blanks_in_a_header_are_named(header: str, blank: str, tmp_path: Path) -> None:
    numbers = ",".join(["0"] * len(header.split(",")))
    (tmp_path / "a.csv").write_text(f"{header}\n{numbers}\n")
    message = f"the names of columns to have no blanks at their ends, got {blank}; "
    with pytest.raises(InputError, match=message):
        load_predictions(tmp_path / "a.csv")


def test_blanks_in_the_names_of_other_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,logit_a,logit_b, note\na,1,2,x\n")
    assert load_predictions(tmp_path / "a.csv").class_names == ("a", "b")


@pytest.mark.parametrize("form", ["csv", "npz"])
@pytest.mark.parametrize(
    ("row", "got"), [((0.0, np.inf), "inf"), ((-np.inf, -np.inf), "-inf")]
)
def test_infinite_logits_name_the_logits(
    form: str, row: tuple[float, float], got: str, tmp_path: Path
) -> None:
    logits = np.array([(0.2, -np.inf), row])
    np.savez(tmp_path / "a.npz", logits=logits, labels=np.zeros(2, int))
    table = pandas.DataFrame(logits, columns=["logit_a", "logit_b"]).assign(label="a")
    table.to_csv(tmp_path / "a.csv", index=False)
    message = f"logits to have a finite largest value in each row, got {got} in row 1"
    with pytest.raises(InputError, match=message):
        load_predictions(tmp_path / f"a.{form}")


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_arrays_without_rows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **{kind: np.zeros((0, 3))}, labels=np.zeros(0, int))
    for label in ("label", None):
        with pytest.raises(InputError, match=r"expected a\.npz to have rows, got none"):
            read_predictions(path, label_column=label)


@pytest.mark.parametrize("pattern", ["", "*/*.csv", "**/*.csv"])
def test_linked_folders_are_read(pattern: str, tmp_path: Path) -> None:
    for name in ("run/day=1", "disk2/more"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "a.csv").write_text("score,label\n0.5,0\n")
    (tmp_path / "run" / "day=2").symlink_to(tmp_path / "disk2" / "more")
    (tmp_path / "disk2" / "more" / "loop").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "before").symlink_to("day=1")
    # A file keeps the name that it has without links.
    found = read_predictions(tmp_path / "run" / pattern, by=["day"])
    assert found.predictions.by == {"day": ["1", "2"]}
    assert [file.name for file in found.files] == ["day=1/a.csv", "day=2/a.csv"]


def test_a_folder_of_linked_folders_only_is_one_of_predictions(tmp_path: Path) -> None:
    for name in ("run", "disk2"):
        (tmp_path / name).mkdir()
    rows = "prob_a,prob_b,label\n0.5,0.5,a\n0.4,0.6,b\n"
    (tmp_path / "disk2" / "a.csv").write_text(rows)
    (tmp_path / "run" / "part").symlink_to(tmp_path / "disk2")
    assert called_for_json("evaluate", tmp_path / "run")["n_examples"] == 2


def test_integers_that_no_double_holds_are_kept_as_texts(tmp_path: Path) -> None:
    first = 2**64
    row = '{{"score": 0.5, "label": 0, "id": {}, "mixed": {}, "of": {{"ids": [1.5, {}]}}, "plain": {}}}\n'
    ids = range(first, first + 150)
    lines = [row.format(n, n - 2**63 - 1, n, "1e300") for n in ids]
    last = '{"score": 0.5, "label": 0, "mixed": 1.5}\n'
    (tmp_path / "a.jsonl").write_text("".join(lines) + last)
    others = read_predictions(tmp_path / "a.jsonl", all_columns=True).others
    assert others["id"].to_pylist() == [*map(str, ids), None]
    mixed = [str(n - 2**63 - 1) for n in ids]
    assert others["mixed"].to_pylist() == [*mixed, "1.5"]
    assert others["of"][1].as_py() == f'{{"ids": [1.5, {first + 1}]}}'
    assert others["plain"].to_pylist() == [1e300] * 150 + [None]


@pytest.mark.parametrize("linked", ["hard", "soft"])
def test_one_file_in_two_partitions_counts_in_both(linked: str, tmp_path: Path) -> None:
    for day in ("1", "2"):
        (tmp_path / "run" / f"day={day}").mkdir(parents=True)
    # A cache holds equal files once.
    stored = tmp_path / "stored"
    stored.write_text("score,label\n0.5,0\n")
    link = os.link if linked == "hard" else os.symlink
    for name in ("day=1/a.csv", "day=2/a.csv", "day=2/again.csv"):
        link(stored, tmp_path / "run" / name)
    found = read_predictions(tmp_path / "run", by=["day"]).predictions
    assert found.by == {"day": ["1", "2"]}


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize(
    ("folder", "values", "is_equal"),
    [("1", [1, 1], True), ("01", [1, 1], True), ("1", [1, 2], False)],
)
def test_a_column_that_a_folder_names_too(
    folder: str, values: list[int], is_equal: bool, form: str, tmp_path: Path
) -> None:
    table = pandas.DataFrame({"score": [0.5, 0.5], "label": 0, "day": values})
    path = tmp_path / f"day={folder}" / f"a.{form}"
    path.parent.mkdir()
    write_table(table, path)
    assert len(read_predictions(tmp_path).predictions) == 2
    if is_equal:
        found = read_predictions(tmp_path, by=["day"]).predictions
        assert [*map(str, found.by["day"])] == ["1", "1"]
        return
    for named in ({"by": ["day"]}, {"all_columns": True}):
        with pytest.raises(InputError, match=r"'day' to hold 1, .*got 2 in row 1 of"):
            read_predictions(tmp_path, **named)


@pytest.mark.parametrize("form", ["utf-16", "gzip"])
def test_a_table_that_is_no_text(form: str, tmp_path: Path) -> None:
    text = "prob_a,prob_b,label\n0.5,0.5,a\n"
    content = gzip.compress(text.encode()) if form == "gzip" else text.encode("utf-16")
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"expected a\.csv to be text in UTF-8, got"):
        read_predictions(tmp_path / "a.csv")


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("score,label\n0.5,0\n")
    (tmp_path / "b.csv").symlink_to("nothing.csv")
    for sources in (tmp_path, tmp_path / "*.csv"):
        with pytest.raises(InputError, match=r"b\.csv to be a file, got a link to no"):
            read_predictions(sources)


def test_escaped_names_of_partitions(tmp_path: Path) -> None:
    table = pandas.DataFrame({"prob_a": [0.2, 0.8], "prob_b": [0.8, 0.2]})
    table["label"] = ["b", "a"]
    table["place"] = ["San José", "a/b=c"]
    table.to_parquet(tmp_path / "run", partition_cols=["place"])
    found = read_predictions(tmp_path / "run", by=["place"]).predictions
    assert sorted(found.by["place"]) == ["San José", "a/b=c"]


def test_a_column_of_two_types_that_are_no_texts(tmp_path: Path) -> None:
    for name, more in (("a", 1), ("b", [1])):
        rows = {"prob_a": [0.2], "prob_b": [0.8], "label": ["b"], "k": [more]}
        (tmp_path / "run").mkdir(exist_ok=True)
        pandas.DataFrame(rows).to_parquet(tmp_path / "run" / f"{name}.parquet")
    assert len(read_predictions(tmp_path / "run").predictions) == 2
    with pytest.raises(InputError, match="column 'k' to have one type in all files"):
        read_predictions(tmp_path / "run", all_columns=True)


def test_weights_that_are_written_as_texts(tmp_path: Path) -> None:
    """The names of partitions are texts, and so are the other columns of a calibrated csv file."""
    rows = {
        "prob_a": [0.2, 0.6] * 20,
        "prob_b": [0.8, 0.4] * 20,
        "label": ["b", "a"] * 20,
    }
    table = pandas.DataFrame({**rows, "w": [1.5, 2.0] * 20})
    table.to_parquet(tmp_path / "run", partition_cols=["w"])
    table.to_csv(tmp_path / "a.csv", index=False)
    calibrate(tmp_path / "a.csv", tmp_path / "out", method="temperature")
    for source in ("run", "out/predictions.parquet"):
        found = read_predictions(tmp_path / source, weight_column="w").predictions
        assert sorted({*found.weights}) == [1.5, 2.0]
    table["w"] = "heavy"
    table.to_parquet(tmp_path / "b.parquet")
    with pytest.raises(InputError, match="column 'w' to hold numbers in every row"):
        read_predictions(tmp_path / "b.parquet", weight_column="w")
