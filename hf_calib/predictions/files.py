"""Files of predictions: found, opened by their formats, read column by column,
and their errors in one sentence.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import accumulate, islice, zip_longest
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TextIO
from urllib.parse import unquote

from hf_calib._errors import (
    InputError,
    InputValueError,
    check,
    expected,
    few,
)
from hf_calib._files import identity
from hf_calib.metrics.checks import RowError, check_type
from hf_calib.predictions.predictions import (
    FORMATS,
    is_read,
    suffix_of,
    without_query,
)

if TYPE_CHECKING:
    from pyarrow import Schema, Table

_CLOSE = "end each row by a new line, and close all quotation marks"
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
NUMBERS_WAY = (
    "name the class columns logit_<class> or prob_<class>, and fill in missing values"
)
# The bytes in which pyarrow looks for the end of a row of a text file.
_BLOCK = 2**22
# The most characters of a JSON line, so that a line that never ends is named.
_LONGEST_LINE = 2**20
# The deepest lists and objects in a row of JSON; pyarrow ends the process at much
# deeper ones.
_MOST_NESTED = 20
# Doubles hold all integers up to this one.
_EXACT = 2**53
# The numbers of a parquet file that are held twice for a moment.
_NUMBERS_AT_ONCE = 2**22


class File(NamedTuple):
    """A file of predictions."""

    # The path in its filesystem.
    path: str
    # The path below the given folder or address, for messages.
    name: str
    # The columns and values of folders that are named column=value.
    partition: tuple[tuple[str, str], ...] = ()


# ---- Finding files ----


def find_files(sources: Sequence[str]) -> tuple[Any, list[File]]:
    """Return the filesystem, and all files of sources in the order of their names.

    Args:
        sources: files, folders, globs or fsspec addresses, all on one filesystem.
    """
    import fsspec

    found: dict[Any, File] = {}
    places = set()
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
            # A link is no second file, but a partition of its own may hold one.
            folder, name = os.path.split(file.path)
            place = os.path.join(os.path.realpath(folder), name)
            if place not in places:
                places.add(place)
                found.setdefault((identity(file.path), file.partition), file)
    # One filesystem opens all files.
    kinds = {type(each) for each in filesystems}
    way_out = "read the files of each place with a separate command"
    got = few(list(sources))
    check(len(kinds) == 1, "the predictions to lie in one place", got, way_out)
    # Filesystems list files in any order, and the rows should be the same everywhere.
    return filesystems[0], sorted(found.values(), key=lambda file: file.path)


def _files_of(filesystem: Any, root: str) -> Iterator[File]:
    """The files of one source: the named one, or those of a folder or a glob that are read."""
    glob = re.search(r"[*?\[]", without_query(root))
    is_named = False
    finding = _through_links() if "file" in filesystem.protocol else filesystem
    # The name of a file may have brackets or a question mark.
    if glob and not filesystem.exists(root):
        paths = finding.glob(root)
        base = root[: glob.start()].rpartition("/")[0]
    elif filesystem.isdir(root):
        paths = finding.find(root)
        base = root.rstrip("/")
    else:
        is_missing = "file" in filesystem.protocol and not os.path.exists(root)
        is_named = not is_missing and (
            suffix_of(root) is not None or filesystem.exists(root)
        )
        paths = [root] if is_named else []
        base = without_query(root).rpartition("/")[0]
    if finding is not filesystem:
        # Of a file that is found twice the first path counts, which names its own folders.
        paths = sorted(paths, key=lambda path: _is_linked(base, path))
    for path in paths:
        plain = without_query(path)
        name = plain[len(base) :].lstrip("/") if base else plain
        # Spark leaves files such as _SUCCESS and .part-0.parquet.crc next to the rows;
        # a file that is named is read whatever its name.
        if not is_named and not is_read(PurePosixPath(name)):
            continue
        _check_ending(name)
        is_broken = finding is not filesystem and not os.path.exists(path)
        way_out = "remove the link, or restore its file"
        check(not is_broken, f"{path} to be a file", "a link to nothing", way_out)
        kind = filesystem.info(path)["type"]
        got = "a folder" if kind == "directory" else "no regular file"
        way_out = "name a file, or the folder above it"
        check(kind == "file", f"{path} to be a file", got, way_out)
        folders = [each for each in name.split("/")[:-1] if "=" in each]
        # Writers of partitions escape "/" and "=" and what file systems dislike.
        partition: Any = tuple(
            tuple(unquote(part) for part in each.split("=", 1)) for each in folders
        )
        yield File(path, name, partition)


def _through_links() -> Any:
    """The filesystem of this machine, which finds files below linked folders too."""
    from fsspec.implementations.local import LocalFileSystem

    class ThroughLinks(LocalFileSystem):
        # `glob` calls it as well, and reads the types only.
        def find(
            self,
            path: str,
            maxdepth: int | None = None,
            withdirs: bool = False,
            detail: bool = False,
        ) -> Any:
            most = math.inf if maxdepth is None else maxdepth
            folder = path.rstrip("/")
            found = {
                each: {"type": kind}
                for each, kind in _below(folder, most, ())
                if withdirs or kind != "directory"
            }
            return found if detail else sorted(found)

    return ThroughLinks(skip_instance_cache=True)


def _is_linked(base: str, path: str) -> bool:
    """Whether a path below a folder leads through a linked folder."""
    folder = os.path.dirname(path)
    own = os.path.relpath(folder, base or "/")
    straight = os.path.normpath(os.path.join(os.path.realpath(base or "/"), own))
    return os.path.realpath(folder) != straight


def _below(
    folder: str, depth: float, above: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """The paths below a folder with their types."""
    place = os.path.realpath(folder or "/")
    # A link to a folder above itself would never end.
    if place in above or depth < 1:
        return
    try:
        with os.scandir(folder or "/") as listed:
            entries = list(listed)
    except OSError:
        # A folder that may not be read has no files, as in fsspec.
        return
    for each in entries:
        path = f"{folder}/{each.name}"
        if not each.is_dir():
            yield path, "file" if each.is_file() else "other"
            continue
        yield path, "directory"
        # Files in such folders are not read.
        if not each.name.startswith(("_", ".")):
            yield from _below(path, depth - 1, (*above, place))


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

    Columns of csv files are read as numbers or as texts, as `load` says.
    """

    # Whether types are known before columns are read.
    typed: ClassVar[bool] = True
    # Of text files the types that fit the first row.
    schema: Schema
    # Of text files known after `load`.
    n_rows: int

    def __init__(self, filesystem: Any, file: File) -> None:
        self.filesystem = filesystem
        self.file = file

    @cached_property
    def folders(self) -> dict[str, str]:
        """The columns of the folders' names that are not stored, with their values."""
        stored = self.schema.names
        return {key: value for key, value in self.file.partition if key not in stored}

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """The type of each column."""
        import pyarrow

        stored = {field.name: field.type for field in self.schema}
        return stored | dict.fromkeys(self.folders, pyarrow.string())

    @cached_property
    def names(self) -> list[str]:
        """All columns: the stored ones, perhaps with repeats, and those of the folders' names."""
        return [*self.schema.names, *self.folders]

    def load(  # noqa: B027, most formats have types
        self, numbers: Sequence[str], others: Sequence[str]
    ) -> None:
        """Read what has to be read at once: columns as numbers, and others as texts."""

    def options(self, name: str) -> list[str]:
        """Return the keys of a column of dictionaries, in their order."""
        from pyarrow import types

        kind = self.kinds[name]
        if types.is_struct(kind):
            return [field.name for field in kind]
        is_map = types.is_map(kind) and types.is_string(kind.key_type)
        requirement = f"column {name!r} to hold dictionaries with texts as keys"
        check_type(is_map, requirement, kind, "write all files alike")
        # Only parquet has such columns, which may be read twice.
        found: dict[str, None] = {}
        for _, part in self.parts([name], width=2):
            found |= dict.fromkeys(part[name].keys.unique().to_pylist())
        return list(found)

    @abstractmethod
    def first_rows(self, names: Sequence[str], most: int) -> list[dict[str, Any]]:
        """Return these stored columns of the first rows; a text file's are texts."""

    @abstractmethod
    def parts(self, names: Sequence[str], width: int) -> Iterator[tuple[int, Table]]:
        """Yield stored columns in tables, each with its first row's number;
        a value has `width` numbers.
        """


def open_file(filesystem: Any, file: File) -> Opened:
    """Open a table; its header is read, and an error names the file."""
    kinds = {".parquet": _Parquet, ".jsonl": _JsonLines}
    kind: Any = kinds.get(str(suffix_of(file.path)), _Text)
    with readable(file.name):
        opened: Opened = kind(filesystem, file)
    return opened


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

        # Of a file on this machine, pyarrow itself reads several columns at a time.
        is_here = "file" in self.filesystem.protocol
        opening: Any = nullcontext(self.file.path)
        if not is_here:
            opening = self.filesystem.open(self.file.path, "rb")
        with opening as source, ParquetFile(source) as parquet:
            yield parquet

    def first_rows(self, names: Sequence[str], most: int) -> list[dict[str, Any]]:
        with readable(self.file.name), self._opened() as parquet:
            for batch in parquet.iter_batches(most, columns=list(names)):
                return list(batch.to_pylist())
        return []

    def parts(self, names: Sequence[str], width: int) -> Iterator[tuple[int, Table]]:
        with self._opened() as parquet:
            first = 0
            # A row group of lists may be too large to be held twice.
            if width > 1:
                at_once = max(1, _NUMBERS_AT_ONCE // width)
                for rows in parquet.iter_batches(at_once, columns=list(names)):
                    yield first, rows
                    first += len(rows)
                return
            for group in range(parquet.num_row_groups):
                n_rows = parquet.metadata.row_group(group).num_rows
                step = max(1, _NUMBERS_AT_ONCE // max(n_rows, 1))
                for start in range(0, len(names), step):
                    some = list(names[start : start + step])
                    yield first, parquet.read_row_group(group, columns=some)
                first += n_rows


class _Held(Opened):
    """A file in one table, which gives each column away as it is read."""

    columns_left: dict[str, Any]

    def hold(self, table: Table) -> None:
        """Take the columns of a table."""
        self.n_rows = table.num_rows
        # Of several columns with one name none is read.
        self.columns_left = dict(zip(table.column_names, table.columns, strict=True))

    def parts(self, names: Sequence[str], width: int) -> Iterator[tuple[int, Table]]:
        import pyarrow

        for name in names:
            yield 0, pyarrow.table({name: self.columns_left.pop(name)})


class _Text(_Held):
    """A .csv or .tsv file."""

    typed = False

    def __init__(self, filesystem: Any, file: File) -> None:
        import pyarrow

        super().__init__(filesystem, file)
        self.separator = _SEPARATORS[str(suffix_of(file.path))]
        names, rows = self._head(1)
        row = rows[0] if rows else []
        fields = []
        # If the first row is too short, the columns at its end count as missing
        # numbers.
        for name, text in zip_longest(names, row[: len(names)], fillvalue=""):
            kind = pyarrow.float64() if _is_number(text) else pyarrow.string()
            fields.append((name, kind))
        self.schema = pyarrow.schema(fields)

    def first_rows(self, names: Sequence[str], most: int) -> list[dict[str, Any]]:
        every, rows = self._head(most)
        # Rows of another length are named when the file is read.
        whole = [row for row in rows if len(row) == len(every)]
        pairs = [dict(zip(every, row, strict=True)) for row in whole]
        return [{name: row[name] for name in names} for row in pairs]

    def _head(self, most: int) -> tuple[list[str], list[list[str]]]:
        """The names of the columns, and the first rows."""
        # Excel writes a byte-order mark, which would be a part of the first name.
        reading = {"compression": "infer", "encoding": "utf-8-sig", "newline": ""}
        # Columns that are not read may hold other bytes.
        reading["errors"] = "replace"
        with self.filesystem.open(self.file.path, "rt", **reading) as opened:
            start = opened.read(_BLOCK)
        # The last line of a full block may be cut off.
        lines = start if len(start) < _BLOCK else start[: start.rfind("\n") + 1]
        got = "none in the first 4 MB" if start else "an empty file"
        requirement = f"{self.file.name} to begin with a line of column names"
        check(bool(lines.strip()), requirement, got, _CLOSE)
        # These bytes begin a compressed file, or are between the letters of UTF-16.
        is_text = not lines.startswith("\x1f") and "\0" not in lines.partition("\n")[0]
        got = "a compressed file, or one in another encoding"
        way_out = "write it in UTF-8; the name of a compressed file ends in .gz"
        check(is_text, f"{self.file.name} to be text in UTF-8", got, way_out)
        text = io.StringIO(lines, newline="")
        # Empty lines are no rows, for pyarrow either.
        rows = filter(None, csv.reader(text, delimiter=self.separator))
        names = next(rows)
        first: list[list[str]] = []
        # A field may be longer than the csv module reads; pyarrow says what is wrong.
        with suppress(csv.Error):
            first.extend(islice(rows, most))
        return names, first

    def load(self, numbers: Sequence[str], others: Sequence[str]) -> None:
        import pyarrow

        # As texts, ids keep their zeros and dates their form. A column that is in both
        # lists is read as numbers.
        types = dict.fromkeys(others, pyarrow.string())
        types |= dict.fromkeys(numbers, pyarrow.float64())
        stored = {
            name: kind for name, kind in types.items() if name not in self.folders
        }
        with readable(self.file.name):
            try:
                self.hold(self._read(stored, use_threads=True))
            except pyarrow.ArrowInvalid:
                # Only one thread knows the number of the row.
                try:
                    self.hold(self._read(stored, use_threads=False))
                except pyarrow.ArrowInvalid as error:
                    self._explain(str(error))
                    raise

    def _read(self, types: Mapping[str, Any], *, use_threads: bool) -> Table:
        from pyarrow import csv as text

        reading = text.ReadOptions(use_threads=use_threads, block_size=_BLOCK)
        parsing = text.ParseOptions(delimiter=self.separator, newlines_in_values=True)
        # Only an empty cell of a column of numbers is missing: a class may be named NA
        # or null.
        converting = text.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=[""],
            strings_can_be_null=False,
        )
        with self.filesystem.open(self.file.path, "rb", compression="infer") as opened:
            return text.read_csv(opened, reading, parsing, converting)

    def _explain(self, words: str) -> None:
        """Raise for what pyarrow says of a row: its header is row 1."""
        file = self.file.name
        width = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", words)
        if width:
            requirement = f"the table to have {width[2]} values in every row"
            got = f"{width[3]} in row {int(width[1]) - 2} of {file}"
            way_out = "write exactly one value per column in each row"
            check(False, requirement, got, way_out)
        # pyarrow reads text in blocks, and a row may lie in two of them.
        is_long = "straddles two block boundaries" in words
        requirement = f"each row of {file} to be shorter than 4 MB"
        check(not is_long, requirement, "a longer one", _CLOSE)
        pattern = r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to double: (.*)"
        number = re.search(pattern, words)
        if number:
            column = self.schema.names[int(number[1])]
            where = f" in row {int(number[2]) - 2:,} of {file}" if number[2] else ""
            check_numbers(False, column, f"{number[3]}{where}")


def _is_number(text: str) -> bool:
    """Whether a text is a number, or a missing one."""
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


class _JsonLines(_Held):
    """A .jsonl file, which is parsed in one block, because a block's types are those of its own
    rows.
    """

    def __init__(self, filesystem: Any, file: File) -> None:
        super().__init__(filesystem, file)
        # This comes first, because pyarrow would end the process at some of these
        # lines.
        with filesystem.open(file.path, "rt", compression="infer") as lines:
            _check_objects(lines, file.name)
        with filesystem.open(file.path, "rb", compression="infer") as opened:
            content = opened.read()
        table = _with_whole_numbers(_parsed_json(content), content)
        self.schema = table.schema
        self.hold(table)

    def first_rows(self, names: Sequence[str], most: int) -> list[dict[str, Any]]:
        import pyarrow

        columns = {name: self.columns_left[name][:most] for name in names}
        return list(pyarrow.table(columns).to_pylist())


def _parsed_json(content: bytes) -> Table:
    """The table of JSON lines, with texts as they were written, also those that are dates."""
    import pyarrow
    from pyarrow import json as lines

    # The size of a block is a 32-bit integer for pyarrow.
    block = min(max(len(content), 1), 2**31 - 1)
    reading = lines.ReadOptions(block_size=block)
    table = lines.read_json(io.BytesIO(content), read_options=reading)
    fields = [field.with_type(_without_dates(field.type)) for field in table.schema]
    schema = pyarrow.schema(fields)
    if schema == table.schema:
        return table
    parsing = lines.ParseOptions(explicit_schema=schema)
    return lines.read_json(io.BytesIO(content), reading, parsing)


def _with_whole_numbers(table: Table, content: bytes) -> Table:
    """The table, with columns as texts whose integers no double holds,
    as different ids would become equal.
    """
    import pyarrow

    names = table.column_names
    large = [name for name in names if _has_large_doubles(table[name])]
    if not large:
        return table
    texts: dict[str, list[str | None]] = {name: [] for name in large}
    is_rounded = dict.fromkeys(large, False)
    # `splitlines` would also split at the separators that a text may hold, such as
    # U+2028.
    for line in content.decode("utf-8-sig").split("\n"):
        if not line.strip():
            continue
        row = json.loads(line)
        for name in large:
            value = row.get(name)
            text = None if value is None else json.dumps(value, ensure_ascii=False)
            texts[name].append(text)
            is_rounded[name] |= _is_rounded(value)
    for name in large:
        if is_rounded[name]:
            column = pyarrow.array(texts[name], pyarrow.string())
            table = table.set_column(names.index(name), name, column)
    return table


def _has_large_doubles(column: Any) -> bool:
    """Whether a column, or a list or an object in it, holds doubles so large that integers next to
    them are none.
    """
    import pyarrow.compute as compute
    from pyarrow import types

    if types.is_list(column.type):
        return _has_large_doubles(compute.list_flatten(column))
    if types.is_struct(column.type):
        places = range(column.type.num_fields)
        parts = [compute.struct_field(column, place) for place in places]
        return any(_has_large_doubles(part) for part in parts)
    if not types.is_floating(column.type):
        return False
    largest = compute.max(compute.abs(column)).as_py()
    return largest is not None and largest >= _EXACT


def _is_rounded(value: Any) -> bool:
    """Whether a value of JSON has an integer that no double holds."""
    if isinstance(value, dict):
        return any(_is_rounded(each) for each in value.values())
    if isinstance(value, list):
        return any(_is_rounded(each) for each in value)
    if not isinstance(value, int) or abs(value) < _EXACT:
        return False
    # Of more digits a float would be infinite, which Python refuses to make.
    return value.bit_length() > 1023 or int(float(value)) != value


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
    """Raise unless each line is a JSON object; pyarrow ends the whole process at nulls and at deep
    nesting.
    """
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
            _CLOSE,
        )
        # The number of brackets is counted faster than their depth, which is at most as
        # large.
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
    # Brackets within texts are no nesting.
    brackets = re.sub(r'"(?:[^"\\]|\\.)*"|[^][}{"]', "", text)
    steps = [1 if each in "{[" else -1 for each in brackets]
    return max(accumulate(steps), default=0)


# ---- Errors ----


def check_numbers(holds: bool, name: str, got: object) -> None:
    """Raise unless a column holds numbers."""
    requirement = f"column {name!r} to hold numbers in every row"
    check_type(holds, requirement, got, NUMBERS_WAY)


@contextmanager
def naming(file: File, files: Sequence[File], first: int = 0) -> Iterator[None]:
    """A context in which errors of rows, from `first` on, name file and row,
    and others one of several files.
    """
    try:
        yield
    except RowError as error:
        raise error.at(file.name, first) from None
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
    # Drivers and damaged files raise many types.
    except Exception as error:
        words = " ".join(str(error).split())
        suffix = str(suffix_of(name) or "")[1:]
        requirement = f"be readable as {suffix}" if suffix else "be readable"
        way_out = (
            "write it again, or check the address, its packages and the credentials"
        )
        got = words[:300] or type(error).__name__
        raise InputValueError(expected(name, requirement, got, way_out)) from error
