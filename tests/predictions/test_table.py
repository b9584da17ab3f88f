"""Predictions in any number of files: found, checked before rows are read, and read into one matrix."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet as pq
import pytest

from hf_calib import InputError
from hf_calib.predictions import Read, read_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.slices import slices_of

NAMES = ("art", "law", "film")


def predictions_of(n: int, seed: int = 0) -> Predictions:
    rng = np.random.default_rng(seed)
    return Predictions(
        rng.integers(0, 3, n), logits=rng.normal(size=(n, 3)), class_names=NAMES
    )


def table_of(found: Predictions) -> pandas.DataFrame:
    assert found.logits is not None
    table = pandas.DataFrame(found.logits, columns=[f"logit_{name}" for name in NAMES])
    table["label"] = [NAMES[label] for label in found.labels]
    table["country"] = np.where(np.arange(len(found)) % 3 == 0, "de", "fr")
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four parquet shards of 250 rows, in row groups of 100."""
    folder = tmp_path_factory.mktemp("shards")
    for i in range(4):
        table_of(predictions_of(250, i)).to_parquet(
            folder / f"part-{i}.parquet", row_group_size=100
        )
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").write_bytes(b"crc")
    (folder / "notes.txt").write_text("not a shard")
    return folder


def all_rows() -> Predictions:
    parts = [predictions_of(250, i) for i in range(4)]
    logits = np.concatenate([part.as_logits() for part in parts])
    return Predictions(
        np.concatenate([part.labels for part in parts]),
        logits=logits,
        class_names=NAMES,
    )


def assert_all_rows(shards: Read) -> None:
    found, wanted = shards.predictions, all_rows()
    np.testing.assert_array_equal(found.labels, wanted.labels)
    np.testing.assert_array_equal(found.as_logits(), wanted.as_logits())
    assert found.class_names == NAMES


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves parts of files, as object storage does."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None or not path.is_file():
            return super().do_GET()
        content = path.read_bytes()
        start, end = map(int, wanted.groups())
        part = content[start : end + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *words: object) -> None:
        pass


class TestFound:
    def test_a_folder_a_glob_and_files(self, folder: Path) -> None:
        shards = read_predictions(str(folder))
        assert [shard.name for shard in shards.files] == [
            f"part-{i}.parquet" for i in range(4)
        ]
        assert len(shards.predictions) == 1000
        assert_all_rows(shards)
        assert_all_rows(read_predictions(f"{folder}/part-*.parquet"))
        assert_all_rows(
            read_predictions([str(folder / f"part-{i}.parquet") for i in (2, 0, 1, 3)])
        )
        assert len(read_predictions(folder / "part-2.parquet").predictions) == 250

    def test_in_memory(self, folder: Path) -> None:
        files = fsspec.filesystem("memory")
        for path in folder.glob("part-*.parquet"):
            files.pipe(f"/run/{path.name}", path.read_bytes())
        try:
            assert_all_rows(read_predictions("memory://run"))
            assert_all_rows(read_predictions("memory://run/part-*.parquet"))
        finally:
            files.rm("/run", recursive=True)

    @pytest.fixture
    def served(self, folder: Path) -> Iterator[str]:
        handler = functools.partial(Ranges, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
        server.server_close()

    def test_over_http(self, served: str) -> None:
        shards = read_predictions([f"{served}/part-{i}.parquet" for i in range(4)])
        assert_all_rows(shards)
        with pytest.raises(
            InputError,
            match=r"none.parquet to be readable as parquet, got .*credentials",
        ):
            read_predictions(f"{served}/none.parquet")

    def test_partitions(self, folder: Path, tmp_path: Path) -> None:
        for country, i in (("de", 0), ("fr", 1)):
            (tmp_path / f"country={country}").mkdir()
            table_of(predictions_of(250, i)).drop(columns="country").to_parquet(
                tmp_path / f"country={country}" / "part.parquet"
            )
        shards = read_predictions(str(tmp_path), by=["country"])
        assert shards.predictions.by["country"] == ["de"] * 250 + ["fr"] * 250
        table_of(predictions_of(250)).drop(columns="country").to_parquet(
            tmp_path / "part.parquet"
        )
        with pytest.raises(
            InputError,
            match=r"part.parquet to be in folders as the first file is, got other",
        ):
            read_predictions(str(tmp_path))

    @pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".npz"])
    def test_other_formats(self, suffix: str, tmp_path: Path) -> None:
        for i in range(4):
            path = tmp_path / f"part-{i}{suffix}"
            if suffix == ".npz":
                save_predictions(predictions_of(250, i), path)
            else:
                table = table_of(predictions_of(250, i))
                table.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
        assert_all_rows(read_predictions(str(tmp_path)))

    def test_a_compressed_npz_and_lists(self, tmp_path: Path) -> None:
        found = predictions_of(50)
        np.savez_compressed(
            tmp_path / "a.npz", logits=found.as_logits(), labels=found.labels
        )
        rows = read_predictions(str(tmp_path / "a.npz")).predictions
        np.testing.assert_array_equal(rows.as_logits(), found.as_logits())
        lists = pyarrow.table(
            {"probs": list(found.probabilities()), "label": found.labels}
        )
        pq.write_table(lists, tmp_path / "b.parquet")
        rows = read_predictions(str(tmp_path / "b.parquet")).predictions
        np.testing.assert_array_equal(rows.probabilities(), found.probabilities())
        assert rows.names == ("0", "1", "2")


class TestRefused:
    """One sentence that names the shard, before any row is read where that can be."""

    @pytest.fixture
    def copy(self, folder: Path, tmp_path: Path) -> Path:
        for path in folder.glob("part-*.parquet"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    def test_a_truncated_shard(self, copy: Path) -> None:
        path = copy / "part-2.parquet"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(
            InputError,
            match=r"expected part-2.parquet to be readable as parquet, got .*; write it again",
        ):
            read_predictions(str(copy))

    @pytest.mark.parametrize(
        ("number", "change", "message"),
        [
            (
                3,
                lambda t: t.rename(columns={"logit_law": "logit_laws"}),
                "columns to be those of the first",
            ),
            (
                3,
                lambda t: t.assign(logit_sport=0.0),
                "classes to be those .* got also 'logit_sport'",
            ),
            (
                0,
                lambda t: t.drop(columns="label"),
                "label_column to be one of .* got 'label'",
            ),
        ],
    )
    def test_other_columns_and_classes(
        self, number: int, change: Any, message: str, copy: Path
    ) -> None:
        change(table_of(predictions_of(10))).to_parquet(copy / f"part-{number}.parquet")
        with pytest.raises(
            InputError, match=f"part-{number}.parquet: expected .*{message}"
        ):
            read_predictions(str(copy))

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            (
                "logit_law",
                np.nan,
                "'logit_law' to hold numbers in every row, got none in row 217 of part-1",
            ),
            (
                "label",
                "sport",
                r"class columns \(art, law, film\), got .* in row 217 of part-1.parquet",
            ),
            (
                "label",
                None,
                "a label in every row, got none in row 217 of part-1.parquet",
            ),
        ],
    )
    def test_a_row(self, column: str, value: object, message: str, copy: Path) -> None:
        table = table_of(predictions_of(250, 1))
        table.loc[217, column] = value
        table.to_parquet(copy / "part-1.parquet", row_group_size=100)
        with pytest.raises(InputError, match=message):
            read_predictions(str(copy))

    def test_nothing_there(self, tmp_path: Path) -> None:
        for source in (str(tmp_path), f"{tmp_path}/*.parquet", "memory://nothing-here"):
            with pytest.raises(
                InputError, match=r"predictions to name existing files|to be readable"
            ):
                read_predictions(source)
        with pytest.raises(InputError, match=r"unknown://x.parquet to be readable"):
            read_predictions("unknown://x.parquet")
        table_of(predictions_of(3)).head(0).to_parquet(tmp_path / "empty.parquet")
        with pytest.raises(
            InputError, match=r"the predictions to have rows, got none in "
        ):
            read_predictions(str(tmp_path))

    def test_two_formats(self, folder: Path, tmp_path: Path) -> None:
        """Tables of several formats are one; arrays have no columns."""
        table_of(predictions_of(30)).to_parquet(tmp_path / "a.parquet")
        table_of(predictions_of(20)).to_csv(tmp_path / "b.csv", index=False)
        assert (
            len(
                read_predictions(str(tmp_path), by=["country"]).predictions.by[
                    "country"
                ]
            )
            == 50
        )
        save_predictions(predictions_of(3), tmp_path / "c.npz")
        with pytest.raises(
            InputError,
            match=r"to be tables or arrays \(.npz\), got both in .*; name the files",
        ):
            read_predictions(str(tmp_path))

    def test_weights_below_0(self, tmp_path: Path) -> None:
        table_of(predictions_of(30)).assign(w=-1.0).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(
            InputError, match="weights to be finite and at least 0, got -1 in row 0"
        ):
            read_predictions(str(tmp_path), weight_column="w")

    def test_columns_that_are_not_there(self, folder: Path) -> None:
        with pytest.raises(
            InputError,
            match=r"by to be one of .*, got 'contry'; did you mean 'country'\?",
        ):
            read_predictions(str(folder), by=["contry"])
        with pytest.raises(InputError, match=r"weight_column to be one of"):
            read_predictions(str(folder), weight_column="w")


class TestSlices:
    def test_numbers_become_fifths_and_few_values_stay(self, tmp_path: Path) -> None:
        table = table_of(predictions_of(1000)).assign(
            length=np.arange(1000)[::-1],
            version=np.arange(1000) % 7,
            ok=np.arange(1000) % 2 == 0,
        )
        table.loc[:9, "length"] = np.nan
        table.to_parquet(tmp_path / "a.parquet", row_group_size=300)
        table.to_csv(tmp_path / "b.csv", index=False)
        # In a text file the missing ones are empty texts.
        for name in ("a.parquet", "b.csv"):
            columns = ["length", "version", "ok", "country"]
            by = read_predictions(tmp_path / name, by=columns).predictions.by
            n_slices = [len(slices_of(each, by[each])[0]) for each in columns]
            assert n_slices == [6, 7, 2, 2]
            names, codes = slices_of("length", by["length"])
            counts = dict(zip(names, np.bincount(codes).tolist(), strict=True))
            assert counts.pop("(none)") == 10
            assert counts == {
                "length up to 197": 198,
                "length 197 to 395": 198,
                "length 395 to 593": 198,
                "length 593 to 791": 198,
                "length above 791": 198,
            }

    @pytest.mark.parametrize("others", [[np.inf, -np.inf], [np.inf, np.nan]])
    def test_numbers_that_are_not_finite_leave_the_fifths(
        self, others: list[float]
    ) -> None:
        length = np.arange(1000.0)
        length[:2] = others
        names, codes = slices_of("length", length.tolist())
        assert names[codes[0]] == "length above 800"
        assert names[codes[1]] in ("length up to 201", "(none)")
        assert {"length up to 201", "length 600 to 800"} <= {*names}

    @pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
    def test_zero_is_one_slice_whatever_its_sign(
        self, name: str, tmp_path: Path
    ) -> None:
        table = table_of(predictions_of(100)).assign(x=[0.0, -0.0] * 50)
        path = tmp_path / name
        table.to_csv(path, index=False) if name.endswith("csv") else table.to_parquet(
            path
        )
        found = read_predictions(path, by=["x"]).predictions
        assert slices_of("x", found.by["x"])[0] == ["0.0"]

    @pytest.mark.parametrize(
        ("first", "step", "title"),
        [
            (1_700_000_000, 1, "1700000019 to 1700000039"),
            (20_240_101, 1, "20240120 to 20240140"),
            (1_700_000_000.25, 1, "1700000019 to 1700000039"),
            (2**60, 2**10, "1.15292150460687e+18 to 1.15292150460689e+18"),
        ],
    )
    def test_fifths_of_large_numbers_stay_apart(
        self, first: float, step: int, title: str
    ) -> None:
        values = [first + step * k for k in range(100)]
        names, codes = slices_of("time", values)
        assert np.bincount(codes).tolist() == [20] * 5
        assert names[1] == f"time {title}"

    def test_a_column_of_ids_is_refused(self) -> None:
        users = [f"user {i}" for i in range(1500)]
        with pytest.raises(
            InputError, match=r"column 'user' to have at most 1,000 different values"
        ):
            slices_of("user", users)


class TestWholeColumns:
    """One type and one rule for a whole column, wherever in the files its values stand."""

    def test_names_and_ids_are_not_mixed(self, tmp_path: Path) -> None:
        """A part of the rows alone would read the name "0" as an id."""
        probs = pandas.DataFrame({"prob_x": [0.2, 0.5], "prob_y": [0.8, 0.5]})
        probs.assign(label=1).to_parquet(tmp_path / "a.parquet")
        probs.assign(label="y").to_parquet(tmp_path / "b.parquet")
        with pytest.raises(InputError, match=r"got '1' in row 0 of a\.parquet"):
            read_predictions(tmp_path)

    def test_names_in_a_late_part_of_one_file(self, tmp_path: Path) -> None:
        """The first 290,000 labels may be ids, and the last ones are names only."""
        rows = ["0.1,0.8,0.1,0"] * 290_000 + ["0.1,0.8,0.1,x"] * 10
        path = tmp_path / "a.csv"
        path.write_text("\n".join(["prob_x,prob_0,prob_9,label", *rows]) + "\n")
        with pytest.raises(InputError, match="class names '0' that are ids of other"):
            read_predictions(path)
        path.write_text("\n".join(["prob_x,prob_y,prob_z,label", *rows]) + "\n")
        with pytest.raises(InputError, match="got '0' in row 0 of a"):
            read_predictions(path)

    def test_a_file_of_one_row_that_could_be_probabilities(
        self, tmp_path: Path
    ) -> None:
        for name, logits in (("a", [[2.5, -1.0]] * 3), ("b", [[0.25, 0.75]])):
            table = pandas.DataFrame(logits, columns=["logit_a", "logit_b"])
            table.assign(label="a").to_parquet(tmp_path / f"{name}.parquet")
        assert len(read_predictions(tmp_path).predictions) == 4

    def test_a_late_text_in_a_column_of_numbers(self, tmp_path: Path) -> None:
        """More rows than a reader looks at to find the type."""
        rows = ["0.5,0.5,a,3"] * 600_000
        rows[500_000] = "0.5,0.5,a,III"
        rows[550_000] = "0.5,half,a,3"
        path = tmp_path / "a.csv"
        path.write_text("\n".join(["prob_a,prob_b,label,version", *rows]) + "\n")
        with pytest.raises(
            InputError,
            match=r"'prob_b' to hold numbers in every row, got .*half.* in row 550,000 of a\.csv",
        ):
            read_predictions(path)
        rows[550_000] = rows[0]
        path.write_text("\n".join(["prob_a,prob_b,label,version", *rows]) + "\n")
        found = read_predictions(path, by=["version"]).predictions
        assert {*found.by["version"]} == {"3", "III"}

    def test_columns_as_they_were_written(self, tmp_path: Path) -> None:
        row = {"prob_a": 0.5, "prob_b": 0.5, "label": "a", "zip": "00501"}
        row |= {"day": "2024-01-02", "seen": "true"}
        table = pandas.DataFrame([row])
        table.to_csv(tmp_path / "a.csv", index=False)
        table.to_json(tmp_path / "b.jsonl", orient="records", lines=True)
        table.to_parquet(tmp_path / "c.parquet")
        for name in ("a.csv", "b.jsonl", "c.parquet"):
            others = read_predictions(tmp_path / name, all_columns=True).others
            found = others.to_pylist()[0]
            assert {key: found[key] for key in ("zip", "day", "seen")} == {
                "zip": "00501",
                "day": "2024-01-02",
                "seen": "true",
            }

    def test_a_quoted_text_of_several_lines(self, tmp_path: Path) -> None:
        text = 'prob_a,prob_b,label,text\n0.5,0.5,a,"one\ntwo"\n0.1,0.9,b,x\n'
        (tmp_path / "a.csv").write_text(text)
        found = read_predictions(tmp_path / "a.csv", all_columns=True)
        assert found.others["text"].to_pylist() == ["one\ntwo", "x"]

    def test_other_columns_may_hold_bytes_that_are_no_text(
        self, tmp_path: Path
    ) -> None:
        rows = b"prob_a,prob_b,label,note\n0.5,0.5,a," + b"\xe9\n"
        (tmp_path / "a.csv").write_bytes(rows)
        found = read_predictions(tmp_path / "a.csv")
        assert found.predictions.labels.tolist() == [0]
        with pytest.raises(
            InputError, match=r"a\.csv to be readable as csv, got .*UTF8"
        ):
            read_predictions(tmp_path / "a.csv", all_columns=True)

    def test_a_column_that_one_file_does_not_have(self, tmp_path: Path) -> None:
        table = table_of(predictions_of(3))
        table.to_parquet(tmp_path / "a.parquet")
        table.drop(columns="country").to_parquet(tmp_path / "b.parquet")
        found = read_predictions(tmp_path, all_columns=True)
        assert found.others["country"].to_pylist()[2:] == ["fr", None, None, None]

    @pytest.mark.parametrize("dots", ["prob_a.b", "prob_.a"])
    def test_names_with_dots_are_no_paths(self, dots: str, tmp_path: Path) -> None:
        table = pandas.DataFrame({"prob_a": [0.25], dots: [0.75], "label": ["a"]})
        table.to_parquet(tmp_path / "a.parquet")
        found = read_predictions(tmp_path / "a.parquet").predictions
        np.testing.assert_array_equal(found.probabilities(), [[0.25, 0.75]])
