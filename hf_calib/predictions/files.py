"""Files of predictions: found, opened by their formats, read column by column, and their errors in one sentence."""

from __future__ import annotations

import csv
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TextIO

from hf_calib._errors import (
    InputError,
    InputTypeError,
    InputValueError,
    check,
    expected,
    few,
)
from hf_calib._files import identity
from hf_calib.metrics.checks import RowError
from hf_calib.predictions.predictions import (
    FORMATS,
    is_read,
    suffix_of,
    without_query,
)

if TYPE_CHECKING:
    from pyarrow import Schema, Table

NUMBERS_WAY = (
    "name the class columns logit_<class> or prob_<class>, and fill in missing values"
)
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_BLOCK = 2**22  # The bytes in which pyarrow looks for the end of a row of a text file.
_LONGEST_LINE = 2**20  # In bytes, of a JSON line.
_MOST_NESTED = 20  # In a row of JSON.
_NUMBERS_AT_ONCE = 2**22  # Of a parquet file, which are held twice for a moment.


class File(NamedTuple):
    """A file of predictions."""

    path: str  # The path in its filesystem.
    name: str  # The path below the given folder or address, for messages.
    partition: tuple[tuple[str, str], ...] = ()  # From folder names column=value.


# ---- Finding files ----


def find_files(sources: Sequence[str]) -> tuple[Any, list[File]]:
    """Return the filesystem, and all files of sources in the order of their names.

    Args:
        sources: files, folders, globs or fsspec addresses, all on one filesystem.
    """
    import fsspec

    found: dict[Any, File] = {}
    filesystems = []
    way_out = f"check the path; files end in {', '.join(FORMATS)}, or a folder has them"
    for source in sources:
        with readable(source):
            filesystem, root = fsspec.core.url_to_fs(source)
            filesystems.append(filesystem)
            files = list(_files_of(filesystem, root))
        got = f"{few([source])}, where there are none"
        check(bool(files), "predictions to name existing files", got, way_out)
        for file in files:
            # A link is no second file.
            found.setdefault(identity(file.path), file)
    kinds = {type(each) for each in filesystems}
    way_out = "read the files of each place with a separate command"
    got = few(list(sources))
    check(len(kinds) == 1, "the predictions to lie in one place", got, way_out)
    return filesystems[0], sorted(found.values(), key=lambda file: file.path)


def _files_of(filesystem: Any, root: str) -> Iterator[File]:
    """The files of one source: the named one, or those of a folder or a glob that are read."""
    glob = re.search(r"[*?\[]", without_query(root))
    is_named = False
    if glob and not filesystem.exists(root):
        paths = filesystem.glob(root)
        base = root[: glob.start()].rpartition("/")[0]
    elif filesystem.isdir(root):
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
        if not is_named and not is_read(PurePosixPath(name)):
            continue
        _check_ending(name)
        kind = filesystem.info(path)["type"]
        got = "a folder" if kind == "directory" else "no regular file"
        way_out = "name a file, or the folder above it"
        check(kind == "file", f"{path} to be a file", got, way_out)
        folders = [each for each in name.split("/")[:-1] if "=" in each]
        partition: Any = tuple(tuple(each.split("=", 1)) for each in folders)
        yield File(path, name, partition)


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


# ---- Opened files ----


class Opened(ABC):
    """A table of rows in a file, of which each column is read once.

    Texts of csv files have the type of texts in the schema, as they are all read as they were written, except for
    those columns that `load` names as numbers.
    """

    typed: ClassVar[bool] = True  # Whether columns have types before they are read.
    schema: Schema
    n_rows: int  # Of text files known after `load`.

    def __init__(self, filesystem: Any, file: File) -> None:
        self.filesystem = filesystem
        self.file = file

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """The type of each stored column."""
        return {field.name: field.type for field in self.schema}

    @cached_property
    def names(self) -> list[str]:
        """All columns: the stored ones, perhaps with repeats, and those of the folders' names."""
        folders = [key for key, _ in self.file.partition]
        return [*self.schema.names, *(key for key in folders if key not in self.kinds)]

    def load(  # noqa: B027, most formats have types
        self, numbers: Sequence[str], others: Sequence[str]
    ) -> None:
        """Read what has to be read at once: columns as numbers, and others as texts."""

    @abstractmethod
    def first(self, name: str) -> Any:
        """Return a column's value in the first row; None if there is no row."""

    @abstractmethod
    def columns(
        self, names: Sequence[str], width: int
    ) -> Iterator[tuple[int, str, Any]]:
        """Yield columns in parts: the part's first row, the name, and the values; a value has `width` numbers."""


def open_file(filesystem: Any, file: File) -> Opened:
    """Open a table; its header is read, and an error names the file."""
    kinds = {".parquet": _Parquet, ".jsonl": _JsonLines}
    kind: Any = kinds.get(str(suffix_of(file.path)), _Text)
    with readable(file.name):
        opened: Opened = kind(filesystem, file)
    return opened


def columns_in(
    opened: Opened, names: Sequence[str], width: int = 1
) -> Iterator[tuple[int, str, Any]]:
    """Yield columns of an opened file, and those of its folders' names, as `Opened.columns` does."""
    import pyarrow

    constants = dict(opened.file.partition)
    stored = [name for name in names if name in opened.kinds]
    with readable(opened.file.name):
        for name in names:
            if name not in opened.kinds:
                values = [constants[name]] * opened.n_rows
                yield 0, name, pyarrow.array(values, pyarrow.string())
        if stored:
            yield from opened.columns(stored, width)


class _Parquet(Opened):
    """A parquet file; a few columns of a row group are in memory at a time."""

    def __init__(self, filesystem: Any, file: File) -> None:
        super().__init__(filesystem, file)
        with self._opened() as parquet:
            self.schema = parquet.schema_arrow
            self.n_rows = parquet.metadata.num_rows

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        from pyarrow.parquet import ParquetFile

        if "file" in self.filesystem.protocol:
            with ParquetFile(self.file.path) as parquet:
                yield parquet
            return
        with self.filesystem.open(self.file.path, "rb") as opened:
            yield ParquetFile(opened)

    def first(self, name: str) -> Any:
        with readable(self.file.name), self._opened() as parquet:
            for batch in parquet.iter_batches(1, columns=[name]):
                return batch.column(name)[0].as_py() if len(batch) else None
        return None

    def columns(
        self, names: Sequence[str], width: int
    ) -> Iterator[tuple[int, str, Any]]:
        with self._opened() as parquet:
            if width > 1:
                yield from self._lists(parquet, names, width)
                return
            first = 0
            for group in range(parquet.num_row_groups):
                n_rows = parquet.metadata.row_group(group).num_rows
                step = max(1, _NUMBERS_AT_ONCE // max(n_rows, 1))
                for start in range(0, len(names), step):
                    some = list(names[start : start + step])
                    rows = parquet.read_row_group(group, columns=some)
                    for name in some:
                        yield first, name, rows[name]
                first += n_rows

    def _lists(
        self, parquet: Any, names: Sequence[str], width: int
    ) -> Iterator[tuple[int, str, Any]]:
        first = 0
        at_once = max(1, _NUMBERS_AT_ONCE // width)
        for rows in parquet.iter_batches(at_once, columns=list(names)):
            for name in names:
                yield first, name, rows.column(name)
            first += len(rows)


class _Held(Opened):
    """A file in one table, which gives each column away as it is read."""

    columns_left: dict[str, Any]

    def hold(self, table: Table) -> None:
        """Take the columns of a table."""
        self.n_rows = table.num_rows
        # Of several columns with one name none is read.
        self.columns_left = dict(zip(table.column_names, table.columns, strict=True))

    def columns(
        self, names: Sequence[str], width: int
    ) -> Iterator[tuple[int, str, Any]]:
        for name in names:
            yield 0, name, self.columns_left.pop(name)


class _Text(_Held):
    """A .csv or .tsv file."""

    typed = False

    def __init__(self, filesystem: Any, file: File) -> None:
        import pyarrow

        super().__init__(filesystem, file)
        self.separator = _SEPARATORS[str(suffix_of(file.path))]
        names, self.first_row = self._head()
        self.schema = pyarrow.schema([(name, pyarrow.string()) for name in names])

    def _head(self) -> tuple[list[str], list[str]]:
        """The names of the columns, and the first row."""
        with self.filesystem.open(self.file.path, "rb", compression="infer") as opened:
            start = opened.read(_BLOCK)
        is_whole = len(start) < _BLOCK
        lines = start if is_whole else start[: start.rfind(b"\n") + 1]
        got = "none in the first 4 MB" if start else "an empty file"
        requirement = f"{self.file.name} to begin with a line of column names"
        way_out = "end each row by a new line, and close all quotation marks"
        check(bool(lines.strip()), requirement, got, way_out)
        # Columns that are not read may hold other bytes.
        text = io.StringIO(lines.decode("utf-8-sig", "replace"), newline="")
        rows = (row for row in csv.reader(text, delimiter=self.separator) if row)
        names = next(rows)
        try:
            return names, next(rows, [])
        except csv.Error:
            # A field may be longer than the csv module reads; pyarrow says what is wrong.
            return names, []

    def first(self, name: str) -> Any:
        place = self.schema.names.index(name)
        return self.first_row[place] if place < len(self.first_row) else None

    def load(self, numbers: Sequence[str], others: Sequence[str]) -> None:
        import pyarrow

        types = dict.fromkeys(others, pyarrow.string())
        types |= dict.fromkeys(numbers, pyarrow.float64())
        stored = {name: kind for name, kind in types.items() if name in self.kinds}
        with readable(self.file.name):
            self.hold(self._loaded(stored))

    def _loaded(self, types: Mapping[str, Any]) -> Table:
        import pyarrow

        try:
            return self._read(types, use_threads=True)
        except pyarrow.ArrowInvalid:
            # Only one thread knows the number of the row.
            try:
                return self._read(types, use_threads=False)
            except pyarrow.ArrowInvalid as error:
                self._explain(str(error))
                raise

    def _read(self, types: Mapping[str, Any], *, use_threads: bool) -> Table:
        from pyarrow import csv as text

        reading = text.ReadOptions(use_threads=use_threads, block_size=_BLOCK)
        parsing = text.ParseOptions(delimiter=self.separator, newlines_in_values=True)
        converting = text.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=[""],
            strings_can_be_null=False,
        )
        with self.filesystem.open(self.file.path, "rb", compression="infer") as opened:
            return text.read_csv(opened, reading, parsing, converting)

    def _explain(self, words: str) -> None:
        """Raise for a text in a column of numbers."""
        pattern = r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to double: (.*)"
        found = re.search(pattern, words)
        if found is None:
            return
        column, row, got = found.groups()
        argument = f"column {self.schema.names[int(column)]!r}"
        # The header is row 1 for pyarrow.
        where = f" in row {int(row) - 2:,} of {self.file.name}" if row else ""
        requirement = "hold numbers in every row"
        raise InputTypeError(
            expected(argument, requirement, f"{got}{where}", NUMBERS_WAY)
        )


class _JsonLines(_Held):
    """A .jsonl file, which is parsed in one block, because a block's types are those of its own rows."""

    def __init__(self, filesystem: Any, file: File) -> None:
        super().__init__(filesystem, file)
        with filesystem.open(file.path, "rt", compression="infer") as lines:
            _check_objects(lines, file.name)
        with filesystem.open(file.path, "rb", compression="infer") as opened:
            table = _parsed_json(opened.read())
        self.schema = table.schema
        self.hold(table)

    def first(self, name: str) -> Any:
        return self.columns_left[name][0].as_py() if self.n_rows else None


def _parsed_json(content: bytes) -> Table:
    """The table of JSON lines, with texts as they were written, also those that are dates."""
    import pyarrow
    from pyarrow import json

    block = min(max(len(content), 1), 2**31 - 1)
    reading = json.ReadOptions(block_size=block)
    table = json.read_json(io.BytesIO(content), read_options=reading)
    fields = [field.with_type(_without_dates(field.type)) for field in table.schema]
    schema = pyarrow.schema(fields)
    if schema == table.schema:
        return table
    parsing = json.ParseOptions(explicit_schema=schema)
    return json.read_json(io.BytesIO(content), reading, parsing)


def _without_dates(kind: Any) -> Any:
    """A type of JSON values in which dates are texts."""
    import pyarrow
    from pyarrow import types

    if types.is_timestamp(kind):
        return pyarrow.string()
    if types.is_list(kind):
        return pyarrow.list_(_without_dates(kind.value_type))
    if types.is_struct(kind):
        return pyarrow.struct(
            [field.with_type(_without_dates(field.type)) for field in kind]
        )
    return kind


def _check_objects(lines: TextIO, name: str) -> None:
    """Raise unless each line is a JSON object; pyarrow ends the whole process at nulls and at deep nesting."""
    row = 0
    for line in lines:
        text = line.strip().lstrip("\ufeff")
        if not text:
            continue
        check(
            text.startswith("{"),
            f"{name} to hold one JSON object in each line",
            f"{text[:40]!r} in row {row}",
            "write each row as an object",
        )
        check(
            len(text) <= _LONGEST_LINE,
            f"each row of {name} to be shorter than 1 MB",
            f"a longer one in row {row}",
            "end each row by a new line, and close all quotation marks",
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


# ---- Errors ----


@contextmanager
def naming(file: File, files: Sequence[File]) -> Iterator[None]:
    """A context in which errors of rows name the file and the row, and other errors one of several files."""
    try:
        yield
    except RowError as error:
        raise error.at(file.name, 0) from None
    except InputError as error:
        if len(files) == 1:
            raise
        raise type(error)(f"{file.name}: {error}") from error


@contextmanager
def readable(name: str) -> Iterator[None]:
    """A context that explains errors of drivers and files in one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # Drivers and damaged files raise many types.
        words = " ".join(str(error).split())
        width = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", words)
        if width:
            row = int(width[1]) - 2
            got = f"{width[3]} in row {row} of {name}"
            way_out = "write exactly one value per column in each row"
            requirement = f"have {width[2]} values in every row"
            raise InputValueError(
                expected("the table", requirement, got, way_out)
            ) from error
        # pyarrow reads text in blocks, and a row may lie in two of them.
        if "straddles two block boundaries" in words:
            way_out = "end each row by a new line, and close all quotation marks"
            requirement = f"each row of {name} to be shorter than 4 MB"
            check(False, requirement, "a longer one", way_out)
        suffix = str(suffix_of(name) or "")[1:]
        requirement = f"be readable as {suffix}" if suffix else "be readable"
        way_out = (
            "write it again, or check the address, its packages and the credentials"
        )
        got = words[:300] or type(error).__name__
        raise InputValueError(expected(name, requirement, got, way_out)) from error
