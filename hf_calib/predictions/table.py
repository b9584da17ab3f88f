"""Predictions in any number of files, here or on object storage, opened without reading rows: one reader for all."""

from __future__ import annotations

import csv
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputError, InputTypeError, InputValueError, check, did_you_mean, expected, few
from hf_calib._files import whole_file
from hf_calib.metrics.checks import RowError
from hf_calib.predictions.columns import (
    LISTS,
    NUMBERS_WAY,
    Batch,
    Columns,
    check_different,
    check_not_probabilities,
    columns_of,
    is_list,
)
from hf_calib.predictions.predictions import Predictions

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.dataset import Fragment

FORMATS = (".npz", ".csv", ".tsv", ".parquet", ".jsonl")
KINDS = ("logits", "probs")
# Beyond, rows are measured in one pass. Every row up to here is held: 0.5 GB of float64.
MOST_ROWS_HELD = 1_000_000
_MOST_NUMBERS_HELD = 2**26
_BYTES_OF_A_ROW = 64  # at least, of a text whose rows are not counted before they are read
_BATCH_NUMBERS = 2**19
PIECE_ROWS = 2**20  # at least, of a parquet file with more: what one thread reads
_HEADS_AT_ONCE = 16
_UNREADABLE_NPZ = (
    *(OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile),
    *(NotImplementedError, RuntimeError),  # packed in a way that is not known, or encrypted
    MemoryError,  # a header that claims more than there can be
    TypeError,  # one array, not a file of them
)


class File(NamedTuple):
    """One file."""

    path: str  # as its filesystem calls it
    name: str  # below the folder or address that was given; in messages
    n_bytes: int
    constants: tuple[tuple[str, str], ...] = ()  # what folders on the way to it name, column=value

    @property
    def kind(self) -> str:
        """For messages: " as csv"."""
        return f" as {str(suffix_of(self.path))[1:]}"


class Part(NamedTuple):
    """Rows of a file that are read together: all, or some row groups of a parquet file."""

    file: int  # its number
    first: int  # the number of its first row in the file
    n_rows: int | None  # None where it is not known before they are read
    rows: Any  # the fragment of pyarrow, or the predictions of an npz file


@dataclass(frozen=True)
class Table:
    """Predictions in files, whose heads were read and checked; made by `open_predictions`.

    Args:
        name: of all, for titles.
        files: in the order of their names.
        parts: in order.
        columns: which are read.
        by: the columns that name slices, also those that folders name.
        schema: of the first file.
    """

    name: str
    files: tuple[File, ...] = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)
    columns: Columns
    by: tuple[str, ...] = ()
    schema: Any = field(default=None, repr=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """C, in the order of the columns."""
        return self.columns.class_names

    @cached_property
    def n_rows(self) -> int | None:
        """None where it is not known before all are read."""
        counts = [part.n_rows for part in self.parts]
        return None if None in counts else sum(filter(None, counts))

    def fits_into_memory(self) -> bool:
        """Whether all rows may be held at once."""
        if self.n_rows is not None:
            return self.n_rows <= MOST_ROWS_HELD and self.n_rows * len(self.class_names) <= _MOST_NUMBERS_HELD
        return sum(file.n_bytes for file in self.files) <= MOST_ROWS_HELD * _BYTES_OF_A_ROW

    def batches(self, part: Part) -> Iterator[tuple[int, Batch]]:
        """The rows of a part, in batches with the number of their first row in the file."""
        for first, batch in self.tables(part, self.columns.names):
            with self.naming(part, first):
                found = self.columns.read(batch)
                constants = dict(self.files[part.file].constants)
                own, zeros = iter(found.by), np.zeros(len(found.labels), np.intp)
                by = ((zeros, [constants[name]]) if name in constants else next(own) for name in self.by)
                yield first, found._replace(by=tuple(by))

    def tables(self, part: Part, columns: Sequence[str]) -> Iterator[tuple[int, RecordBatch]]:
        """The same as record batches of some columns."""
        file, row = self.files[part.file], part.first
        rows = max(256, _BATCH_NUMBERS // max(len(columns), len(self.class_names), 1))
        with _readable(file.name, file.kind, lambda: f" after row {row:,}" if row else "", self.schema):
            # Others than those that are read have the types of their own file.
            schema = self.schema if set(columns) <= set(self.columns.names) else None
            for batch in _record_batches(part.rows, schema, columns, rows):
                if len(batch):
                    yield row, batch
                row += len(batch)

    @contextmanager
    def naming(self, part: Part, first: int) -> Iterator[None]:
        """A context in which errors of rows name this file and the row in it."""
        with _naming_file(self.files[part.file], self.files, first):
            yield

    def load(self) -> Predictions:
        """All rows, held at once; for those that fit into memory."""
        if isinstance(self.parts[0].rows, Predictions) and len(self.parts) == 1:
            return self.parts[0].rows  # also of several labels a row
        batches = [batch for part in self.parts for _, batch in self.batches(part)]
        way_out = "write the predictions below the header"
        check(bool(batches), "the table to have rows", f"a header only in {self.name}", way_out)
        weights = None
        if self.columns.weight is not None:
            weights = np.concatenate([each.weights for each in batches if each.weights is not None])
        by = {
            name: [value for each in batches for value in np.array(each.by[k][1], object)[each.by[k][0]]]
            for k, name in enumerate(self.by)
        }
        return self.predictions(
            np.concatenate([each.labels for each in batches]),
            np.concatenate([each.scores for each in batches]),
            weights,
            by,
        )

    def predictions(
        self,
        labels: NDArray[np.int64],
        scores: NDArray[Any],
        weights: NDArray[np.float64] | None = None,
        by: dict[str, list[Any]] | None = None,
    ) -> Predictions:
        """Rows with labels (n,) and scores (n, C), which are logits or probabilities as the files hold them."""
        kind = self.columns.kind or "probs"
        names = None if len(self.columns.scores) == 1 and not self.class_names else self.class_names
        return Predictions(labels, **{kind: scores}, class_names=names, weights=weights, by=by or {})  # type: ignore[arg-type]

    def columns_of(self, number: int) -> list[str]:
        """The names of all columns of a file."""
        rows = next(part.rows for part in self.parts if part.file == number)
        return [*self.columns.names] if isinstance(rows, Predictions) else list(rows.physical_schema.names)

    def row_hashes(self, part: Part, first: int, n_rows: int) -> NDArray[np.uint64]:
        """Numbers (n,) as if drawn at random, which the name of the file and the number of the row determine."""
        seed = zlib.crc32(PurePosixPath(self.files[part.file].name).name.encode())
        return mixed(np.arange(first, first + n_rows, dtype=np.uint64), seed)


def open_predictions(
    sources: str | os.PathLike[str] | Sequence[str],
    *,
    label_column: str | None = "label",
    weight_column: str | None = None,
    by: Sequence[str] = (),
) -> Table:
    """Find the files, and read and check their heads, before any row is read.

    Args:
        sources: files, folders, globs or addresses that fsspec knows (s3://, gs://, hf://, https://, memory://), all on
            one filesystem: of .parquet, .csv, .tsv (also .gz), .jsonl or, on this machine, .npz. In a folder, files
            below it are read, also of partitions (`country=de/part-0.parquet`), and those whose names begin with "_"
            or "." are not.
        label_column: of labels, see `load_predictions`; None where they are not to be read.
        weight_column: of weights, or None.
        by: columns that name slices.

    Raises:
        ValueError: if there is no such file, one is unreadable or truncated, or has other columns than the first.

    >>> open_predictions("missing.csv")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.csv, where there are ...
    """
    given = [os.fspath(sources)] if isinstance(sources, str | os.PathLike) else list(sources)
    filesystem, files = _find(given)
    name = given[0] if len(given) == 1 else few(given)
    kinds = {suffix_of(file.path) == ".npz" for file in files}
    got, way_out = f"both in {name}", "name the files of one kind, or a glob such as 'run/*.parquet'"
    check(len(kinds) == 1, "predictions to be tables or arrays (.npz)", got, way_out)
    if suffix_of(files[0].path) == ".npz":
        return _open_arrays(name, files, label_column, weight_column, by)
    constants = {key for key, _ in files[0].constants}
    in_table = [key for key in by if key not in constants]
    with _naming_file(files[0], files):
        schema, columns = _first_head(filesystem, files[0], label_column, weight_column, in_table)

    def head(number: int) -> list[Part]:
        file = files[number]
        got, way_out = "other folders", "name the columns of all partitions alike"
        same = {key for key, _ in file.constants} == constants
        check(same, f"{file.name} to be in folders as the first file is", got, way_out)
        with _readable(file.name, file.kind):
            fragment, names = _fragment(filesystem, file.path, schema, columns)
        with _naming_file(file, files):
            columns.check_same(names)
        return [Part(number, *rest) for rest in _row_groups(fragment)]

    with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
        parts = tuple(part for found in pool.map(head, range(len(files))) for part in found)
    found = Table(name, files, parts, columns, tuple(by), schema)
    if found.n_rows == 0:
        way_out = "write the predictions below the header"
        raise InputValueError(expected("the predictions", "have rows", f"none in {name}", way_out))
    return found


def load_predictions(path: str | os.PathLike[str], *, label_column: str = "label") -> Predictions:
    """Read predictions and labels, all at once.

    For a model that runs elsewhere; `predict` runs one here.

    Args:
        path: a file, folder, glob or address, see `open_predictions`, of
            .npz: arrays `logits` or `probs` (N, C), `labels` (N,) int, and perhaps `class_names`
            (C,) str. Pickled objects are not read.
            .csv, .tsv (also .gz), .jsonl or .parquet: a column of labels, and one column for each class, in the order
            of the classes: `logit_<class>` or `prob_<class>`, beside which other columns are ignored, or just
            `<class>`, which are probabilities; or a column of lists, `logits` or `probs`.
        label_column: the column of labels in a table: class names, or class ids from 0 on. If every class
            name is an integer, an integer label is a name.

    Returns:
        The predictions; the class names are those of the columns.

    Raises:
        ValueError: if the file is missing or unreadable, or something in it is missing, ambiguous or wrong.
        TypeError: if a column or array is not numeric.

    >>> load_predictions("missing.npz")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.npz, where there are ...
    """
    return open_predictions(path, label_column=label_column).load()


def save_predictions(predictions: Predictions, path: str | os.PathLike[str]) -> None:
    """Write predictions as .npz, for `load_predictions`: the whole file or nothing; a file there is replaced.

    Args:
        predictions: what to write.
        path: ends in .npz; missing folders are created.

    Raises:
        ValueError: if the path ends in anything else.
    """
    path = Path(path)
    check(path.suffix == ".npz", "path to end in .npz", path.name, "name the file predictions.npz")
    kind = "logits" if predictions.probs is None else "probs"
    arrays = {kind: getattr(predictions, kind), "labels": predictions.labels}
    if predictions.class_names is not None:
        arrays["class_names"] = np.array(predictions.class_names, dtype=np.str_)
    with whole_file(path) as unfinished:
        np.savez(unfinished, allow_pickle=False, **arrays)


def mixed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Scramble numbers (n,): the finaliser of splitmix64, on every machine the same.

    References:
        Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    >>> mixed(np.arange(2, dtype=np.uint64), 0).tolist()
    [0, 6238072747940578789]
    """
    found = numbers + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return found ^ (found >> np.uint64(31))


def suffix_of(path: str) -> str | None:
    """The one of `FORMATS` that a name ends in, without .gz.

    >>> suffix_of("s3://bucket/part-0.CSV.gz"), suffix_of("me/model")
    ('.csv', None)
    """
    name = path.lower().removesuffix(".gz")
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), None)


def is_many(source: str) -> bool:
    """Whether a name means several files, or ones elsewhere: an address, a glob, or a folder of predictions.

    >>> is_many("s3://bucket/run/*.parquet"), is_many("me/model")
    (True, False)
    """
    if "://" in source:
        return True
    if os.path.isdir(source):
        is_model = any(
            os.path.isfile(os.path.join(source, f"{name}config.json")) for name in ("", "adapter_")
        )
        below = ((folder, names) for folder, _, names in os.walk(source))
        return not is_model and any(
            _is_read(os.path.relpath(folder, source), names) for folder, names in below
        )
    return not os.path.exists(source) and bool(re.search(r"[*?\[]", source))


def _is_read(folder: str, names: Sequence[str]) -> bool:
    """Whether a file of these is read in a folder of predictions."""
    hidden = any(part.startswith(("_", ".")) for part in PurePosixPath(folder).parts if part != ".")
    return not hidden and any(not n.startswith(("_", ".")) and suffix_of(n) for n in names)


def _find(sources: Sequence[str]) -> tuple[Any, tuple[File, ...]]:
    """The filesystem, and all files in the order of their names."""
    import fsspec

    found: dict[str, File] = {}
    filesystems = []
    for source in sources:
        with _readable(source):
            filesystem, root = fsspec.core.url_to_fs(source)
            filesystems.append(filesystem)
            found |= {file.path: file for file in _files_of(filesystem, root)}
    got, way_out = few(list(sources)), "read those of each place by a command of its own"
    check(len({type(each) for each in filesystems}) == 1, "the predictions to lie in one place", got, way_out)
    if not found:
        known = ", ".join(FORMATS)
        exists = len(sources) == 1 and os.path.isfile(sources[0])
        if exists:
            suffix = Path(sources[0]).suffix
            way_out = did_you_mean(suffix, FORMATS)
            requirement = f"be a file ending in {known}"
            raise InputValueError(expected("predictions", requirement, Path(sources[0]).name, way_out))
        got, way_out = (
            f"{got}, where there are none",
            f"check the path; files end in {known}, or a folder has them",
        )
        raise InputValueError(expected("predictions", "name existing files", got, way_out))
    return filesystems[0], tuple(found[path] for path in sorted(found))


def _files_of(filesystem: Any, root: str) -> list[File]:
    """The files of one source."""
    glob = re.search(r"[*?\[]", root)
    if glob and not filesystem.exists(root):
        paths, base = filesystem.glob(root), root[: glob.start()].rpartition("/")[0]
    elif suffix_of(root) is not None and not filesystem.isdir(root):
        local = "file" in filesystem.protocol
        paths, base = ([root] if not local or os.path.exists(root) else []), root.rpartition("/")[0]
    else:
        paths, base = filesystem.find(root) if filesystem.isdir(root) else [], root.rstrip("/")
    found = []
    for path in sorted(paths):
        name = path[len(base) :].lstrip("/") if base else path
        folder, _, last = name.rpartition("/")
        if not _is_read(folder, [last]):
            continue
        info = filesystem.info(path)
        way_out = "name the folder above it"
        check(info["type"] == "file", f"{path} to be a file", "a folder", way_out)
        constants = tuple(tuple(part.split("=", 1)) for part in folder.split("/") if "=" in part)
        found.append(File(path, name, int(info.get("size") or 0), constants))
    return found


def _first_head(
    filesystem: Any, file: File, label: str | None, weight: str | None, by: Sequence[str]
) -> tuple[Any, Columns]:
    """The schema of a file, in which texts stand as they are and scores are float64, and its columns."""
    import pyarrow

    suffix = suffix_of(file.path)
    names: Sequence[str] = ()
    if suffix in (".csv", ".tsv"):
        with _readable(file.name, file.kind):
            header = _header(filesystem, file.path)
        check_different(header)
        texts = {label, *by}
        fields = {name: pyarrow.string() if name in texts else pyarrow.float64() for name in header}
        schema = pyarrow.schema(list(fields.items()))
        return schema, columns_of(schema, label, weight, by)
    with _readable(file.name, file.kind):
        fragment, _ = _fragment(filesystem, file.path, None, None)
        schema = fragment.physical_schema
        lists = [name for name in schema.names if name in LISTS and is_list(schema.field(name).type)]
        if lists:
            kind = schema.field(lists[0]).type
            size = getattr(kind, "list_size", None)
            if size is None:
                first = fragment.head(1, columns=lists[:1]).column(0)
                size = len(first[0]) if len(first) and first[0].is_valid else 0
            names = tuple(map(str, range(size)))
    return schema, columns_of(schema, label, weight, by, names)


def _header(filesystem: Any, path: str) -> list[str]:
    """The names of a text file's columns."""
    compression = "gzip" if path.lower().endswith(".gz") else None
    with filesystem.open(path, "rt", compression=compression, encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file, delimiter="\t" if suffix_of(path) == ".tsv" else ","), None)
    if not header:
        raise ValueError(f"{path} is empty")
    return header


def _fragment(filesystem: Any, path: str, schema: Any, columns: Columns | None) -> tuple[Fragment, list[str]]:
    """A file as a fragment of pyarrow, and the names of its columns."""
    import pyarrow.dataset as datasets
    from pyarrow import csv as text
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    suffix = suffix_of(path)
    if suffix in (".csv", ".tsv"):
        kind: Any = datasets.CsvFileFormat(
            parse_options=text.ParseOptions(delimiter="\t" if suffix == ".tsv" else ","),
            read_options=text.ReadOptions(block_size=2**22),
            convert_options=text.ConvertOptions(
                column_types={name: schema.field(name).type for name in columns.names} if columns else None,
                strings_can_be_null=False,
                null_values=[""],
            ),
        )
    else:
        kind = datasets.ParquetFileFormat() if suffix == ".parquet" else datasets.JsonFileFormat()
    local = "file" in filesystem.protocol
    files = LocalFileSystem() if local else PyFileSystem(FSSpecHandler(filesystem))
    fragment = kind.make_fragment(path, files)
    names = _header(filesystem, path) if suffix in (".csv", ".tsv") else fragment.physical_schema.names
    return fragment, list(names)


def _row_groups(fragment: Fragment) -> Iterator[tuple[int, int | None, Fragment]]:
    """The first row, the number of rows and the fragment of each part."""
    if not hasattr(fragment, "row_groups"):
        yield 0, None, fragment
        return
    start, groups, held = 0, [], 0
    for group in fragment.row_groups:
        groups.append(group.id)
        held += group.num_rows
        if held >= PIECE_ROWS or group.id == fragment.row_groups[-1].id:
            yield start, held, fragment.subset(row_group_ids=groups)
            start, groups, held = start + held, [], 0


def _record_batches(rows: Any, schema: Any, columns: Sequence[str], size: int) -> Iterator[RecordBatch]:
    if isinstance(rows, Predictions):
        yield from _of_arrays(rows, columns, size)
    else:
        yield from rows.to_batches(schema=schema, columns=list(columns), batch_size=size, use_threads=False)


def _open_arrays(
    name: str, files: Sequence[File], label: str | None, weight: str | None, by: Sequence[str]
) -> Table:
    """Files of arrays, which are read at once."""
    for option, value in (("weight_column", weight), ("by", by)):
        check(not value, f"{option} to go with tables", f"{few(files[0].name)}", "write a .parquet file")
    found = [_read_npz(file, labelled=label is not None) for file in files]
    kinds = {("probs" if each.logits is None else "logits", each.n_classes) for each in found}
    got, way_out = few([file.name for file in files]), "use one model's"
    check(len(kinds) == 1, "the arrays to be of one kind and model", got, way_out)
    parts = tuple(Part(i, 0, len(each), each) for i, each in enumerate(found))
    kind = next(iter(kinds))[0]
    columns = Columns(kind, (kind,), found[0].names, "labels")
    return Table(name, tuple(files), parts, columns, ())


def _of_arrays(rows: Predictions, columns: Sequence[str], size: int) -> Iterator[RecordBatch]:
    import pyarrow

    for start in range(0, len(rows), size):
        part = rows.select(slice(start, start + size))
        flat = pyarrow.array(np.ascontiguousarray(part._scores()).reshape(-1))
        lists = pyarrow.FixedSizeListArray.from_arrays(flat, rows.n_classes)
        made = {"logits": lists, "probs": lists, "labels": pyarrow.array(part.labels)}
        yield pyarrow.RecordBatch.from_pydict({name: made[name] for name in columns})


def _read_npz(file: File, *, labelled: bool) -> Predictions:
    try:
        with open(file.path, "rb") as opened, np.load(opened, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in (*KINDS, "labels", "class_names") if key in archive}
            found = ", ".join(archive.files)
    except _UNREADABLE_NPZ as error:
        way_out = "write it with numpy.savez, plain arrays only"
        got = f"{file.path} ({error})"
        raise InputValueError(expected("predictions", "be readable as npz", got, way_out)) from error
    if not labelled:
        n_rows = max((len(np.atleast_1d(arrays[kind])) for kind in KINDS if kind in arrays), default=0)
        arrays["labels"] = np.zeros(n_rows, int)
    holds = "labels" in arrays and any(kind in arrays for kind in KINDS)
    way_out = "write it with numpy.savez(path, logits=logits, labels=labels)"
    check(holds, f"{file.name} to hold the arrays labels and logits (or probs)", found or "none", way_out)
    names = arrays.pop("class_names", None)
    if names is not None:
        listed = np.atleast_1d(names).tolist()
        names = tuple(each.decode() if isinstance(each, bytes) else str(each) for each in listed)
    made = Predictions(arrays.pop("labels"), **arrays, class_names=names)
    check_not_probabilities(made.logits)
    return made


@contextmanager
def _naming_file(file: File, files: Sequence[File], first: int = 0) -> Iterator[None]:
    try:
        yield
    except RowError as error:
        raise error.at(file.name, first) from None
    except InputError as error:
        raise type(error)(f"{file.name}: {error}") if len(files) > 1 else error from error


@contextmanager
def _readable(
    name: str, kind: str = "", where: Callable[[], str] = str, schema: Any = None
) -> Iterator[None]:
    """A context in which what a driver or a file raises is told in one sentence."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputValueError(expected(name, "be readable", str(error), "install what it names")) from error
    except (
        Exception
    ) as error:  # a driver may raise anything: no credentials, no such bucket, a truncated file
        words = " ".join(str(error).split())
        if width := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", words):
            row, n_wanted, n_found = map(int, width.groups())
            got, way_out = (
                f"{n_found} in row {row - 2} of {name}",
                "give each row a value for each column, and none more",
            )
            requirement = f"have {n_wanted} values in every row"
            raise InputValueError(expected("the table", requirement, got, way_out)) from error
        if number := re.search(r"In CSV column #(\d+).*conversion error to double: invalid value", words):
            column = schema.names[int(number[1])]
            got = f"others in {name} ({words[:100]})"
            requirement = "hold numbers in every row"
            raise InputTypeError(expected(f"column {column!r}", requirement, got, NUMBERS_WAY)) from error
        way_out = "write it again, or check the address and the credentials"
        got = f"{words[:300] or type(error).__name__}"
        raise InputValueError(expected(name, f"be readable{kind}{where()}", got, way_out)) from error
