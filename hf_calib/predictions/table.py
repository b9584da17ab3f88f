"""Predictions in any number of local or remote files, opened without reading rows, by one reader."""

from __future__ import annotations

import operator
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import accumulate
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputError, InputValueError, check, expected, few
from hf_calib._files import identity
from hf_calib.metrics.checks import RowError
from hf_calib.predictions.columns import Batch, Columns, columns_of, list_columns
from hf_calib.predictions.formats import (
    OptionScores,
    load_arrays,
    read_log,
    rows_of_log,
)
from hf_calib.predictions.predictions import (
    FORMATS,
    Predictions,
    check_same_classes,
    is_read,
    suffix_of,
    without_query,
)

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyarrow.dataset import Fragment

# Up to this number, all rows are held in memory (0.5 GB of float64); more are measured in one pass.
MOST_ROWS_HELD = 1_000_000
_MOST_NUMBERS_HELD = 2**26
_BYTES_OF_A_ROW = 64  # The least size in a text file, whose rows are not counted first.
_BATCH_NUMBERS = 2**19
PIECE_ROWS = 2**20  # The approximate part of a larger parquet file for one thread.
_HEADS_AT_ONCE = 16
_MOST_NESTED = 20  # In a row of JSON.


class File(NamedTuple):
    """A file of predictions."""

    path: str  # The path in its filesystem.
    name: str  # The path below the given folder or address, for messages.
    n_bytes: int
    constants: tuple[tuple[str, str], ...] = ()  # From folder names column=value.


class Part(NamedTuple):
    """Rows of a file that are read together: all rows, or some row groups of a parquet file."""

    file: File
    first: int  # The index of its first row in the file.
    n_rows: int | None  # None if unknown before reading.
    fragment: Fragment

    def hashes(self, first: int, n_rows: int) -> NDArray[np.uint64]:
        """Return pseudo-random numbers (n,) that depend only on the file's name and the row index."""
        stream = np.random.Philox(
            key=zlib.crc32(PurePosixPath(self.file.name).name.encode())
        )
        skipped = first % 4  # Four are drawn at once.
        return np.asarray(
            stream.advance(first // 4).random_raw(skipped + n_rows)[skipped:]
        )


@dataclass(frozen=True)
class Table:
    """Predictions in files with checked headers, returned by `open_predictions`."""

    name: str  # For titles.
    files: tuple[File, ...] = field(repr=False)  # In the order of their names.
    parts: tuple[Part, ...] = field(repr=False)  # In order.
    columns: Columns  # The columns that are read.
    schema: Schema = field(repr=False)  # The schema of the first file.
    held: Predictions | None = field(default=None, repr=False)  # Of arrays or a log.

    @property
    def class_names(self) -> tuple[str, ...]:
        """The C class names, in the order of the columns."""
        return self.columns.class_names

    @cached_property
    def n_rows(self) -> int | None:
        """The number of rows; None if unknown before reading."""
        counts = [part.n_rows for part in self.parts]
        return None if None in counts else sum(filter(None, counts))

    def fits_into_memory(self) -> bool:
        """Whether all rows fit in memory."""
        if self.n_rows is not None:
            return (
                self.n_rows <= MOST_ROWS_HELD
                and self.n_rows * len(self.class_names) <= _MOST_NUMBERS_HELD
            )
        return (
            sum(file.n_bytes for file in self.files) <= MOST_ROWS_HELD * _BYTES_OF_A_ROW
        )

    def batches(
        self, part: Part, *, more: Sequence[str] = ()
    ) -> Iterator[tuple[int, Batch]]:
        """Yield the rows of a part in batches, with the index of their first row; `table` has further columns."""
        for first, rows in self.tables(
            part, list(dict.fromkeys([*self.columns.names, *more]))
        ):
            with _naming(part.file, self.files, first):
                yield first, self.columns.read(rows)

    def tables(
        self, part: Part, columns: Sequence[str]
    ) -> Iterator[tuple[int, RecordBatch]]:
        """Yield unchanged columns of a part; columns that are not read have the types of their file."""
        import pyarrow

        row, n_rows = (
            part.first,
            max(256, _BATCH_NUMBERS // max(len(columns), len(self.class_names))),
        )
        own = part.fragment.physical_schema
        known = set(self.columns.names)
        types = [
            (self.schema if each in known else own).field(each) for each in columns
        ]
        read = {
            "schema": pyarrow.schema(types),
            "batch_size": n_rows,
            "use_threads": False,
        }
        with _readable(part.file):
            for rows in part.fragment.to_batches(columns=list(columns), **read):
                if len(rows):
                    yield row, rows
                row += len(rows)

    def load(self) -> Predictions:
        """Load all rows, if they fit in memory."""
        if self.held is not None:
            return self.held
        batches = [batch for part in self.parts for _, batch in self.batches(part)]
        way_out = "write the predictions below the header"
        check(
            bool(batches),
            "the table to have rows",
            f"a header only in {self.name}",
            way_out,
        )
        labels = np.concatenate([each.labels for each in batches])
        scores = np.concatenate([each.scores for each in batches])
        weights = [each.weights for each in batches if each.weights is not None]
        by = {
            name: [
                value
                for each in batches
                for value in np.array(each.by[k][1], object)[each.by[k][0]]
            ]
            for k, name in enumerate(self.columns.by)
        }
        return self.predictions(
            labels, scores, np.concatenate(weights) if weights else None, by
        )

    def predictions(
        self,
        labels: NDArray[np.int64],
        scores: NDArray[Any],
        weights: NDArray[np.float64] | None = None,
        by: dict[str, list[Any]] | None = None,
    ) -> Predictions:
        """Return checked predictions with labels (n,) and scores (n, C), logits or probabilities as in the files."""
        found: dict[str, Any] = {
            self.columns.kind: scores,
            "class_names": self.class_names,
            "by": by or {},
        }
        return Predictions(labels, **found, weights=weights, validate=False)


def open_predictions(
    sources: str | os.PathLike[str] | Sequence[str],
    *,
    label_column: str | None = "label",
    weight_column: str | None = None,
    by: Sequence[str] = (),
    option_scores: OptionScores = "sum",
) -> Table:
    """Open files of predictions and check their headers without reading rows; arrays and logs are read at once.

    Args:
        sources: files, folders, globs or fsspec addresses (s3://, gs://, hf://, https://, memory://), all on one
            filesystem, in the formats of `load_predictions`. In a folder, all files below it are read, also partitions
            (`country=de/part-0.parquet`), except those whose names begin with "_" or ".".
        label_column: column of labels, see `load_predictions`; None if labels are not read.
        weight_column: column of weights, or None.
        by: columns that define slices.
        option_scores: scores of the answers in a log of lm-evaluation-harness: the "sum" of their tokens'
            log-likelihoods (acc), "per_character" (acc_norm) or "per_byte" (acc_bytes).

    Raises:
        ValueError: if a file is missing, unreadable or truncated, or has other columns than the first.

    >>> open_predictions("missing.csv")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.csv, where there are ...
    """
    given = (
        [os.fspath(sources)]
        if isinstance(sources, str | os.PathLike)
        else list(sources)
    )
    filesystem, files = _find(given)
    name = given[0] if len(given) == 1 else few(given)

    def head(file: File) -> tuple[Predictions | None, Fragment, list[str]]:
        with _readable(file):
            held = _held(
                filesystem, file, option_scores, labelled=label_column is not None
            )
            fragment = (
                _fragment(filesystem, file) if held is None else _fragment_of(held)
            )
            return (
                held,
                fragment,
                [*fragment.physical_schema.names, *dict(file.constants)],
            )

    with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
        heads = list(pool.map(head, files))
    (held, first, _), *_ = heads
    way_out = "name the files of one kind, or a glob such as 'run/*.parquet'"
    alike = len({each is None for each, *_ in heads}) == 1
    check(
        alike, "predictions to be tables or arrays (.npz)", f"both in {name}", way_out
    )
    with _naming(files[0], files):
        schema = _schema(files[0], first, {label_column, *by})
        classes = _names_of_lists(first, schema) if held is None else held.names
        columns = columns_of(schema, label_column, weight_column, by, classes)
        read = [*columns.scores, *filter(None, [columns.weight])]
        schema = _widest(schema, read, [fragment for _, fragment, _ in heads])
    parts = []
    for file, (found, fragment, names) in zip(files, heads, strict=True):
        way_out = "name the columns of all partitions alike"
        same = [key for key, _ in file.constants] == [
            key for key, _ in files[0].constants
        ]
        check(
            same,
            f"{file.name} to be in folders as the first file is",
            "other folders",
            way_out,
        )
        with _naming(file, files):
            columns.check_same(names)
            if held is not None and found is not None:
                check_same_classes("the file", held, found)
        parts += [
            Part(file, *each)
            for each in _pieces(fragment, None if found is None else len(found))
        ]
    table = Table(
        name, files, tuple(parts), columns, schema, held if len(files) == 1 else None
    )
    got, way_out = f"none in {name}", "write the predictions below the header"
    check(table.n_rows != 0, "the predictions to have rows", got, way_out)
    return table


def load_predictions(
    path: str | os.PathLike[str], *, label_column: str = "label"
) -> Predictions:
    """Load predictions and labels into memory.

    Use it for a model that runs elsewhere; `predict` runs a model here.

    Args:
        path: a file, folder, glob or address (see `open_predictions`) in one of these formats.
            .npz, a local file: arrays `logits` or `probs` (N, C), `labels` (N,) int, and optionally `class_names`
            (C,) str. Pickled objects are not read.
            .csv, .tsv (also .gz), .jsonl or .parquet: a column of labels, and one column per class, in the order of
            the classes: `logit_<class>` or `prob_<class>`, with other columns ignored, or only `<class>`, which are
            probabilities; or a column of lists, `logits` or `probs`.
            .jsonl: a log of lm-evaluation-harness (`--log_samples`, multiple choice).
        label_column: column of labels in a table: class names, with upper and lower case ignored unless names differ
            by it alone, or class ids from 0. If every class name is a number, labels are names, and 1 is "1.0". Names
            that are ids of other classes, next to names that are no numbers, are refused, except for a column of
            integers.

    Raises:
        ValueError: if the file is missing or unreadable, or its content is incomplete, ambiguous or wrong.
        TypeError: if a column or array is not numeric.

    >>> load_predictions("missing.npz")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.npz, where there are ...
    """
    return open_predictions(path, label_column=label_column).load()


# ---- Finding files ----


def _find(sources: Sequence[str]) -> tuple[Any, tuple[File, ...]]:
    """The filesystem, and all files in the order of their names."""
    import fsspec

    found: dict[Any, File] = {}
    filesystems = []
    way_out = f"check the path; files end in {', '.join(FORMATS)}, or a folder has them"
    for source in sources:
        with _readable(File(source, source, 0)):
            filesystem, root = fsspec.core.url_to_fs(source)
            filesystems.append(filesystem)
            files = list(_files_of(filesystem, root))
        got = f"{few([source])}, where there are none"
        check(bool(files), "predictions to name existing files", got, way_out)
        for file in files:
            # A link is no second file.
            found.setdefault(identity(file.path), file)
    got, way_out = (
        few(list(sources)),
        "read the files of each place with a separate command",
    )
    check(
        len({type(each) for each in filesystems}) == 1,
        "the predictions to lie in one place",
        got,
        way_out,
    )
    return filesystems[0], tuple(sorted(found.values(), key=lambda file: file.path))


def _files_of(filesystem: Any, root: str) -> Iterator[File]:
    """The files of one source: the named one, or those of a folder or a glob that are read."""
    glob = re.search(r"[*?\[]", without_query(root))
    is_folder = filesystem.isdir(root)
    is_named = False
    if glob and not filesystem.exists(root):
        paths = filesystem.glob(root)
        base = root[: glob.start()].rpartition("/")[0]
    elif is_folder:
        paths = filesystem.find(root)
        base = root.rstrip("/")
    else:
        is_missing = "file" in filesystem.protocol and not os.path.exists(root)
        is_named = not is_missing and (
            suffix_of(root) is not None or filesystem.exists(root)
        )
        paths = [root] if is_named else []
        base = without_query(root).rpartition("/")[0]
    for path in paths:
        plain = without_query(path)
        name = plain[len(base) :].lstrip("/") if base else plain
        if is_named or is_read(PurePosixPath(name)):
            _check_ending(name)
            info = filesystem.info(path)
            got = "a folder" if info["type"] == "directory" else "no regular file"
            way_out = "name a file, or the folder above it"
            check(info["type"] == "file", f"{path} to be a file", got, way_out)
            constants: Any = tuple(
                tuple(each.split("=", 1))
                for each in name.split("/")[:-1]
                if "=" in each
            )
            yield File(path, name, int(info.get("size") or 0), constants)


def _check_ending(name: str) -> None:
    """Raise for a file whose name does not say how it is read."""
    way_out = "write the predictions in one of these formats"
    requirement = f"predictions to end in {', '.join(FORMATS)}"
    got = f"{name}, which has another ending"
    check(suffix_of(name) is not None, requirement, got, way_out)
    # Readers of compressed files know the ending in lower case only.
    is_known = not name.lower().endswith(".gz") or name.endswith(".gz")
    requirement = "the name of a compressed file to end in .gz"
    check(is_known, requirement, name, "rename the file")


# ---- Headers ----


def _held(
    filesystem: Any, file: File, option_scores: OptionScores, *, labelled: bool
) -> Predictions | None:
    """The predictions of a file of arrays or a log; None for a table."""
    suffix = suffix_of(file.path)
    if suffix == ".npz":
        return load_arrays(file.path, "predictions", labelled=labelled)
    if suffix == ".jsonl":
        with filesystem.open(
            file.path, "rt", compression="infer", encoding="utf-8-sig"
        ) as lines:
            rows = rows_of_log(lines)
            if rows is not None:
                return read_log(rows, file.name, option_scores)
            lines.seek(0)
            _check_objects(lines, file.name)
    return None


def _check_objects(lines: TextIO, name: str) -> None:
    """Raise unless each line is a JSON object; pyarrow ends the whole process at nulls and at deep nesting."""
    row = 0
    for line in lines:
        text = line.strip()
        if not text:
            continue
        check(
            text.startswith("{"),
            f"{name} to hold one JSON object in each line",
            f"{text[:40]!r} in row {row}",
            "write each row as an object",
        )
        n_opened = text.count("{") + text.count("[")
        check(
            n_opened <= _MOST_NESTED or _depth(text) <= _MOST_NESTED,
            f"{name} to nest values at most {_MOST_NESTED} deep",
            f"more in row {row}",
            "write each row as an object of numbers, texts and lists",
        )
        row += 1


def _depth(text: str) -> int:
    """How deep the values of a text of JSON are nested."""
    brackets = re.sub(r'"(?:[^"\\]|\\.)*"|[^][}{"]', "", text)
    steps = [1 if each in "{[" else -1 for each in brackets]
    return max(accumulate(steps), default=0)


def _fragment(filesystem: Any, file: File) -> Fragment:
    """A file as a pyarrow fragment."""
    import pyarrow.dataset as datasets
    from pyarrow import csv as text
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    suffix = suffix_of(file.path)
    kind: Any = (
        datasets.ParquetFileFormat()
        if suffix == ".parquet"
        else datasets.JsonFileFormat()
    )
    if suffix in (".csv", ".tsv"):
        kind = datasets.CsvFileFormat(
            parse_options=text.ParseOptions(
                delimiter="\t" if suffix == ".tsv" else ","
            ),
            read_options=text.ReadOptions(block_size=2**22),
            convert_options=text.ConvertOptions(
                strings_can_be_null=False, null_values=[""]
            ),
        )
    local = "file" in filesystem.protocol
    files = LocalFileSystem() if local else PyFileSystem(FSSpecHandler(filesystem))
    named = [datasets.field(key) == value for key, value in file.constants]
    partition = {"partition_expression": reduce(operator.and_, named)} if named else {}
    return kind.make_fragment(file.path, files, **partition)


def _fragment_of(held: Predictions) -> Fragment:
    """Arrays as a pyarrow fragment with a column of lists."""
    import pyarrow
    import pyarrow.dataset as datasets

    def lists(array: NDArray[Any]) -> Any:
        flat = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
        return (
            flat
            if array.ndim == 1
            else pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
        )

    kind = "probs" if held.logits is None else "logits"
    columns = {kind: lists(held.scores), "labels": lists(held.labels)}
    return next(iter(datasets.dataset(pyarrow.table(columns)).get_fragments()))


def _schema(file: File, fragment: Fragment, texts: set[str | None]) -> Schema:
    """The schema of a file; in text files labels are unchanged, as 01 or TRUE may be names, and numbers are float64."""
    import pyarrow

    fields = list(fragment.physical_schema)
    if suffix_of(file.path) in (".csv", ".tsv"):
        wide = dict.fromkeys([pyarrow.int64(), pyarrow.null()], pyarrow.float64())
        types = [
            pyarrow.string() if each.name in texts else wide.get(each.type, each.type)
            for each in fields
        ]
        fields = [
            each.with_type(kind) for each, kind in zip(fields, types, strict=True)
        ]
    return pyarrow.schema(
        [*fields, *(pyarrow.field(key, pyarrow.string()) for key, _ in file.constants)]
    )


def _widest(
    schema: Schema, names: Sequence[str], fragments: Sequence[Fragment]
) -> Schema:
    """The schema with numbers of a type that holds those of all files, in any order."""
    import pyarrow
    from pyarrow import types

    found = {name: {schema.field(name).type} for name in names}
    for fragment in fragments:
        own = fragment.physical_schema
        times = Counter(own.names)
        for each in own:
            if each.name in found and times[each.name] == 1:
                found[each.name].add(each.type)
    wide = {
        name
        for name, kinds in found.items()
        if len(kinds) > 1
        and all(types.is_floating(t) or types.is_integer(t) for t in kinds)
    }
    return pyarrow.schema(
        each.with_type(pyarrow.float64()) if each.name in wide else each
        for each in schema
    )


def _names_of_lists(fragment: Fragment, schema: Schema) -> tuple[str, ...]:
    """The classes of a column of lists: the indices of the values in its first row."""
    lists = list_columns(schema)[:1]
    rows = fragment.head(1, columns=lists) if lists else None
    if rows is None or not len(rows):
        return ()
    scores = rows.column(0)[0].as_py() or ()
    return tuple(map(str, range(len(scores))))


def _pieces(
    fragment: Fragment, n_rows: int | None
) -> Iterator[tuple[int, int | None, Fragment]]:
    """The first row, the number of rows and the fragment of each part."""
    if not hasattr(fragment, "row_groups"):
        yield 0, n_rows, fragment
        return
    starts = np.cumsum([0, *(group.num_rows for group in fragment.row_groups)])
    pieces = starts[:-1] // PIECE_ROWS
    for piece in np.unique(pieces):
        ids = np.flatnonzero(pieces == piece)
        n_rows = int(starts[ids[-1] + 1] - starts[ids[0]])
        yield int(starts[ids[0]]), n_rows, fragment.subset(row_group_ids=ids.tolist())


# ---- Errors ----


@contextmanager
def _naming(file: File, files: Sequence[File], first: int = 0) -> Iterator[None]:
    """A context in which errors of rows name the file and the row, and other errors name one of several files."""
    try:
        yield
    except RowError as error:
        raise error.at(file.name, first) from None
    except InputError as error:
        raise (
            type(error)(f"{file.name}: {error}") if len(files) > 1 else error
        ) from error


@contextmanager
def _readable(file: File) -> Iterator[None]:
    """A context that explains errors of drivers and files in one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # Drivers and damaged files raise many types.
        words = " ".join(str(error).split())
        if width := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", words):
            row, n_wanted, n_found = map(int, width.groups())
            got = f"{n_found} in row {row - 2} of {file.name}"
            way_out = "write exactly one value per column in each row"
            requirement = f"have {n_wanted} values in every row"
            raise InputValueError(
                expected("the table", requirement, got, way_out)
            ) from error
        way_out = "end each row by a new line, and close all quotation marks"
        # pyarrow reads text in blocks, and a row may lie in two of them.
        if "straddles two block boundaries" in words:
            most = "1 MB" if suffix_of(file.name) == ".jsonl" else "4 MB"
            requirement = f"each row of {file.name} to be shorter than {most}"
            check(False, requirement, "a longer one", way_out)
        if "Empty CSV file or block" in words:
            requirement = f"{file.name} to begin with a line of column names"
            got = "none in the first 4 MB" if file.n_bytes else "an empty file"
            check(False, requirement, got, way_out)
        twice = re.search(r"multiple columns named ([^;]+)", words)
        if twice:
            requirement = f"the columns of {file.name} to have different names"
            got = f"a file that contained multiple columns named {twice[1]}"
            check(False, requirement, got, "rename or remove all but one")
        requirement = (
            f"be readable as {str(suffix_of(file.name) or '')[1:]}".removesuffix(" as ")
        )
        way_out = (
            "write it again, or check the address, its packages and the credentials"
        )
        got = words[:300] or type(error).__name__
        raise InputValueError(expected(file.name, requirement, got, way_out)) from error
