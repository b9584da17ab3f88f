"""Names of files and addresses: what is read as what, and what is never printed."""

from __future__ import annotations

import gzip
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pandas
import pytest

from hf_calib import InputError
from hf_calib._errors import expected
from hf_calib.commands.source import name_of
from hf_calib.predictions import load_predictions, read_predictions
from hf_calib.predictions.predictions import is_predictions
from tests.helpers.commands import assert_refused, call


class SilentHandler(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_: object) -> None:
        pass


TABLE = pandas.DataFrame(
    {"prob_no": [0.9, 0.2], "prob_yes": [0.1, 0.8], "label": ["no", "yes"]}
)


@pytest.mark.parametrize("name", ["exists.json", "exists.dat", "exists.pkl", "exists"])
def test_an_existing_file_is_refused_by_its_ending(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    message = rf"expected predictions to end in \.npz, .*, got {name}, which has another ending; write"
    with pytest.raises(InputError, match=message):
        read_predictions(tmp_path / name)
    assert_refused(call("evaluate", tmp_path / name), message)


def test_a_missing_file_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"to name existing files, got .*, where there"
    ):
        read_predictions(tmp_path / "missing.csv")


@pytest.mark.parametrize("other", ["part-01.csv", "empty", "none-*.csv"])
def test_each_source_has_files(other: str, tmp_path: Path) -> None:
    """A report on fewer rows than were named would look like one on all of them."""
    TABLE.to_csv(tmp_path / "part-1.csv", index=False)
    (tmp_path / "empty").mkdir()
    sources = [tmp_path / "part-1.csv", tmp_path / other]
    message = (
        rf"to name existing files, got \S*{re.escape(other)}, where there are none"
    )
    with pytest.raises(InputError, match=message):
        read_predictions(sources)
    assert_refused(call("evaluate", *sources), message)


def test_a_report_on_several_files_names_them(tmp_path: Path) -> None:
    for name in ("part-0.csv", "part-1.csv"):
        TABLE.to_csv(tmp_path / name, index=False)
    done = call("evaluate", tmp_path / "part-0.csv", tmp_path / "part-1.csv")
    assert "Calibration report: part-0, part-1" in done.output


@pytest.mark.parametrize("name", ["_x.csv", ".x.csv", "x.CSV", "x.TSV"])
def test_a_file_that_is_named_is_read(name: str, tmp_path: Path) -> None:
    separator = "\t" if name.endswith("TSV") else ","
    TABLE.to_csv(tmp_path / name, index=False, sep=separator)
    assert load_predictions(tmp_path / name).labels.tolist() == [0, 1]


def test_of_a_folder_such_files_are_not_read(tmp_path: Path) -> None:
    TABLE.to_csv(tmp_path / "_x.csv", index=False)
    TABLE.to_csv(tmp_path / "a.csv", index=False)
    (tmp_path / "notes.json").write_text("{}")
    assert [file.name for file in read_predictions(tmp_path).files] == ["a.csv"]


@pytest.mark.parametrize("name", ["a.CSV.GZ", "a.csv.GZ", "a.tsv.Gz", "a.jsonl.GZ"])
def test_compressed_files_with_other_endings(name: str, tmp_path: Path) -> None:
    with gzip.open(tmp_path / name, "wt") as file:
        file.write(TABLE.to_csv(index=False))
    with pytest.raises(InputError, match=f"to end in .gz, got {name}; rename the file"):
        read_predictions(tmp_path / name)


def test_a_compressed_file(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.CSV.gz", "wt") as file:
        file.write(TABLE.to_csv(index=False))
    assert load_predictions(tmp_path / "a.CSV.gz").labels.tolist() == [0, 1]


def test_an_address_with_a_query_has_the_ending_before_it(tmp_path: Path) -> None:
    TABLE.to_csv(tmp_path / "a.csv", index=False)
    handler = partial(SilentHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = (
            f"http://127.0.0.1:{server.server_port}/a.csv?download=true&x=a.parquet"
        )
        assert is_predictions(address)
        found = load_predictions(address)
        assert name_of(address) == "a"
        server.shutdown()
        thread.join()
    assert found.labels.tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "address",
    [
        "http://me:sesame@127.0.0.1:9/a.csv",
        "http://me:ses@sesame@127.0.0.1:9/a.csv",
        "http://127.0.0.1:9/a.csv?token=sesame",
        "http://127.0.0.1:9/a.csv?download=true&sig=sesame",
        "http://me:sesame@127.0.0.1:9/a.json",
        "http://me:sesame@127.0.0.1:9/*.csv",
        f"http://me:{'x' * 200}sesame@127.0.0.1:9/{'y' * 100}.csv",
        "nothing://me:sesame@host/a.csv",
        "memory://me:sesame@host/a.csv",
    ],
)
def test_passwords_are_not_printed(address: str, tmp_path: Path) -> None:
    TABLE.to_csv(tmp_path / "a.csv", index=False)
    for words in (
        ["evaluate", address],
        ["evaluate", address, tmp_path / "a.csv"],
        ["evaluate", address, "--data", tmp_path / "a.csv"],
        ["decide", address],
        ["calibrate", address, "--output", tmp_path / "out"],
        ["evaluate", tmp_path / "a.csv", "--ood-data", address],
    ):
        result = call(*words)
        assert_refused(result, "expected ")
        assert "sesame" not in result.output
        assert "xxx" not in result.output


@pytest.mark.slow
def test_the_name_of_a_report_has_no_password(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    with files.open("/me:sesame@host/a.csv", "w") as file:
        file.write(TABLE.to_csv(index=False))
    result = call("evaluate", "memory://me:sesame@host/a.csv", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "sesame" not in result.output
    assert "sesame" not in (tmp_path / "report.json").read_text()
    assert "sesame" not in (tmp_path / "report.html").read_text()
    files.rm("/me:sesame@host/a.csv")


def test_other_at_signs_and_question_marks_are_kept() -> None:
    said = expected("by", "be a column", "me@host or why?so", "see https://host/a")
    assert (
        said == "expected by to be a column, got me@host or why?so; see https://host/a"
    )


def test_arrays_of_another_byte_order(tmp_path: Path) -> None:
    logits = np.array([[2.0, 0.5], [0.1, 1.5]])
    for name, kind in (("little", "<"), ("big", ">")):
        labels = np.array([0, 1]).astype(f"{kind}i8")
        path = tmp_path / f"{name}.npz"
        np.savez(path, logits=logits.astype(f"{kind}f4"), labels=labels)
    little, big = (
        load_predictions(tmp_path / f"{name}.npz") for name in ("little", "big")
    )
    np.testing.assert_array_equal(big.probabilities(), little.probabilities())
    assert big.scores.dtype.isnative
    assert call("evaluate", tmp_path / "big.npz").exit_code == 0
