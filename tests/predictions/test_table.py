"""Predictions in any number of files: found, checked before rows are read, and read in batches."""

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
from hf_calib.predictions import Table, open_predictions, save_predictions
from hf_calib.predictions import table as tables
from hf_calib.predictions.one_pass import (
    Slicing,
    choose_slicings,
    draw_sample,
    half_of,
    measure_in_one_pass,
)
from hf_calib.predictions.predictions import Predictions

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


def assert_all_rows(shards: Table) -> None:
    found, wanted = shards.load(), all_rows()
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
        shards = open_predictions(str(folder))
        assert [shard.name for shard in shards.files] == [
            f"part-{i}.parquet" for i in range(4)
        ]
        assert shards.n_rows == 1000
        assert_all_rows(shards)
        assert_all_rows(open_predictions(f"{folder}/part-*.parquet"))
        assert_all_rows(
            open_predictions([str(folder / f"part-{i}.parquet") for i in (2, 0, 1, 3)])
        )
        assert open_predictions(str(folder / "part-2.parquet")).n_rows == 250

    def test_in_memory(self, folder: Path) -> None:
        files = fsspec.filesystem("memory")
        for path in folder.glob("part-*.parquet"):
            files.pipe(f"/run/{path.name}", path.read_bytes())
        try:
            assert_all_rows(open_predictions("memory://run"))
            assert_all_rows(open_predictions("memory://run/part-*.parquet"))
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
        shards = open_predictions([f"{served}/part-{i}.parquet" for i in range(4)])
        assert_all_rows(shards)
        with pytest.raises(
            InputError,
            match=r"none.parquet to be readable as parquet, got .*credentials",
        ):
            open_predictions(f"{served}/none.parquet")

    def test_partitions(self, folder: Path, tmp_path: Path) -> None:
        for country, i in (("de", 0), ("fr", 1)):
            (tmp_path / f"country={country}").mkdir()
            table_of(predictions_of(250, i)).drop(columns="country").to_parquet(
                tmp_path / f"country={country}" / "part.parquet"
            )
        shards = open_predictions(str(tmp_path), by=["country"])
        values = [
            batch.by[0][1] for part in shards.parts for _, batch in shards.batches(part)
        ]
        assert values == [["de"], ["fr"]]
        assert choose_slicings(shards) == (Slicing("country"),)
        table_of(predictions_of(250)).drop(columns="country").to_parquet(
            tmp_path / "part.parquet"
        )
        with pytest.raises(
            InputError,
            match=r"part.parquet to be in folders as the first file is, got other",
        ):
            open_predictions(str(tmp_path))

    @pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".npz"])
    def test_other_formats(
        self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tables, "PIECE_ROWS", 90)
        for i in range(4):
            path = tmp_path / f"part-{i}{suffix}"
            if suffix == ".npz":
                save_predictions(predictions_of(250, i), path)
            else:
                table = table_of(predictions_of(250, i))
                table.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
        assert_all_rows(open_predictions(str(tmp_path)))

    def test_a_compressed_npz_and_lists(self, tmp_path: Path) -> None:
        found = predictions_of(50)
        np.savez_compressed(
            tmp_path / "a.npz", logits=found.as_logits(), labels=found.labels
        )
        rows = open_predictions(str(tmp_path / "a.npz")).load()
        np.testing.assert_array_equal(rows.as_logits(), found.as_logits())
        lists = pyarrow.table(
            {"probs": list(found.probabilities()), "label": found.labels}
        )
        pq.write_table(lists, tmp_path / "b.parquet")
        rows = open_predictions(str(tmp_path / "b.parquet")).load()
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
            open_predictions(str(copy))

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
            open_predictions(str(copy))

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
            draw_sample(open_predictions(str(copy)))

    def test_nothing_there(self, tmp_path: Path) -> None:
        for source in (str(tmp_path), f"{tmp_path}/*.parquet", "memory://nothing-here"):
            with pytest.raises(
                InputError, match=r"predictions to name existing files|to be readable"
            ):
                open_predictions(source)
        with pytest.raises(InputError, match=r"unknown://x.parquet to be readable"):
            open_predictions("unknown://x.parquet")
        table_of(predictions_of(3)).head(0).to_parquet(tmp_path / "empty.parquet")
        with pytest.raises(
            InputError, match=r"the predictions to have rows, got none in "
        ):
            open_predictions(str(tmp_path))

    def test_two_formats(self, folder: Path, tmp_path: Path) -> None:
        """Tables of several formats are one; arrays have no columns."""
        table_of(predictions_of(30)).to_parquet(tmp_path / "a.parquet")
        table_of(predictions_of(20)).to_csv(tmp_path / "b.csv", index=False)
        assert (
            len(open_predictions(str(tmp_path), by=["country"]).load().by["country"])
            == 50
        )
        save_predictions(predictions_of(3), tmp_path / "c.npz")
        with pytest.raises(
            InputError,
            match=r"to be tables or arrays \(.npz\), got both in .*; name the files",
        ):
            open_predictions(str(tmp_path))

    def test_weights_below_0(self, tmp_path: Path) -> None:
        table_of(predictions_of(30)).assign(w=-1.0).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(
            InputError, match="weights to be finite and at least 0, got -1 in row 0"
        ):
            open_predictions(str(tmp_path), weight_column="w").load()

    def test_columns_that_are_not_there(self, folder: Path) -> None:
        with pytest.raises(
            InputError,
            match=r"by to be one of .*, got 'contry'; did you mean 'country'\?",
        ):
            open_predictions(str(folder), by=["contry"])
        with pytest.raises(InputError, match=r"weight_column to be one of"):
            open_predictions(str(folder), weight_column="w")


class TestSamples:
    def test_one_sample_of_any_split(self, folder: Path, tmp_path: Path) -> None:
        """The hash is of the file's name and the row's number: batches, row groups and folders do not change it."""
        found = draw_sample(open_predictions(str(folder)), most=130)
        for i in range(4):
            table_of(predictions_of(250, i)).to_parquet(
                tmp_path / f"part-{i}.parquet", row_group_size=17
            )
        again = draw_sample(open_predictions(str(tmp_path)), most=130)
        np.testing.assert_array_equal(found.as_logits(), again.as_logits())
        rows = {tuple(row) for row in all_rows().as_logits()}
        assert len({tuple(row) for row in found.as_logits()} & rows) == 130
        assert len(draw_sample(open_predictions(str(folder)))) == 1000

    def test_it_is_a_fair_draw(self, folder: Path) -> None:
        shards = open_predictions(str(folder))
        hashes = np.concatenate([shards.parts[i].hashes(0, 20_000) for i in range(4)])
        assert len(np.unique(hashes)) == 80_000
        assert abs(half_of(hashes).mean() - 0.5) < 0.01
        shares = np.bincount((hashes >> np.uint64(60)).astype(int), minlength=16) / len(
            hashes
        )
        assert np.abs(shares - 1 / 16).max() < 0.005

    def test_halves(self, folder: Path) -> None:
        shards = open_predictions(str(folder))
        halves = [
            {tuple(row) for row in draw_sample(shards, half=half).as_logits()}
            for half in (0, 1)
        ]
        assert not halves[0] & halves[1]
        assert len(halves[0] | halves[1]) == 1000


class TestSlicing:
    def test_numbers_become_fifths_and_few_values_stay(self, tmp_path: Path) -> None:
        table = table_of(predictions_of(1000)).assign(
            length=np.arange(1000)[::-1],
            version=np.arange(1000) % 7,
            ok=np.arange(1000) % 2 == 0,
        )
        table.loc[:9, "length"] = np.nan
        table.to_parquet(tmp_path / "a.parquet", row_group_size=300)
        table.to_csv(tmp_path / "b.csv", index=False)
        for name in ("a.parquet", "b.csv"):
            shards = open_predictions(
                str(tmp_path / name), by=["length", "version", "ok", "country"]
            )
            slicings = {each.column: each for each in choose_slicings(shards)}
            assert [each.edges is None for each in slicings.values()] == [
                False,
                True,
                True,
                True,
            ]
            edges = slicings["length"].edges
            assert edges is not None
            np.testing.assert_allclose(edges, np.arange(198, 990, 198), atol=2)
            assert slicings["length"].names([0, 989, None]) == [
                f"length up to {edges[0]:g}",
                f"length above {edges[-1]:g}",
                "(none)",
            ]

    @pytest.mark.parametrize("others", [[np.inf, -np.inf], [np.inf, np.nan]])
    def test_numbers_that_are_not_finite_leave_the_fifths(
        self, others: list[float], tmp_path: Path
    ) -> None:
        length = np.arange(1000.0)
        length[:2] = others
        table_of(predictions_of(1000)).assign(length=length).to_parquet(
            tmp_path / "a.parquet"
        )
        (found,) = choose_slicings(
            open_predictions(str(tmp_path / "a.parquet"), by=["length"])
        )
        assert found.edges is not None
        np.testing.assert_allclose(found.edges, [200, 400, 600, 800], atol=2)
        assert found.names([np.inf])[0].startswith("length above ")

    @pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
    def test_zero_is_one_slice_whatever_its_sign(
        self, name: str, tmp_path: Path
    ) -> None:
        table = table_of(predictions_of(100)).assign(x=[0.0, -0.0] * 50)
        path = tmp_path / name
        table.to_csv(path, index=False) if name.endswith("csv") else table.to_parquet(
            path
        )
        shards = open_predictions(str(path), by=["x"])
        (sums,) = measure_in_one_pass(
            shards, 15, choose_slicings(shards)
        ).slices.values()
        assert list(sums.names) == ["0.0"]

    def test_a_column_of_ids_is_refused(self, tmp_path: Path) -> None:
        table = table_of(predictions_of(1500)).assign(
            user=[f"user {i}" for i in range(1500)]
        )
        table.to_parquet(tmp_path / "a.parquet")
        shards = open_predictions(str(tmp_path), by=["user"])
        with pytest.raises(
            InputError, match=r"column 'user' to have at most 1,000 different values"
        ):
            measure_in_one_pass(shards, 15, choose_slicings(shards))
