"""The formats of files of predictions that are read in batches: parquet, csv and arrays of numpy."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

PIECE_ROWS = 2**20  # at least, of parquet files with more: what one worker reads, and what a kill costs
_BATCH_NUMBERS = 2**19


class Piece(NamedTuple):
    """Rows of a shard that are read together: all, or some row groups of a parquet file, or a range.

    Args:
        first_row: in the shard.
        n_rows: None where it is not known before they are read.
        row_groups: of a parquet file.
    """

    first_row: int = 0
    n_rows: int | None = None
    row_groups: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Contents:
    """What the head of a shard tells.

    Args:
        schema: columns and their types.
        pieces: in order.
        class_names: of arrays of numpy, where they are named.
    """

    schema: Schema
    pieces: tuple[Piece, ...]
    class_names: tuple[str, ...] | None = field(default=None)

    @property
    def whole(self) -> Piece:
        """All pieces as one."""
        groups = [group for piece in self.pieces for group in piece.row_groups or ()]
        return Piece(0, self.n_rows, tuple(groups))

    @property
    def n_rows(self) -> int | None:
        """None where it is not known before all are read."""
        counts = [piece.n_rows for piece in self.pieces]
        return None if None in counts else sum(filter(None, counts))


class Format:
    """One format; `filesystem` is of fsspec, and paths are its own."""

    def head(self, filesystem: Any, path: str) -> Contents:
        """What is in a shard, without its rows."""
        raise NotImplementedError

    def batches(
        self, filesystem: Any, path: str, columns: Sequence[str], piece: Piece, texts: Sequence[str] = ()
    ) -> Iterator[RecordBatch]:
        """The rows of a piece, in order, with these columns only; texts are read as they stand there."""
        raise NotImplementedError


class Parquet(Format):
    """Row groups; the head is at the end of the file, so that a truncated one is found before any work."""

    def head(self, filesystem: Any, path: str) -> Contents:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(_opened(filesystem, path)) as file:
            schema, metadata = file.schema_arrow, file.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        pieces: list[Piece] = []
        start, groups = 0, range(0)
        for end in range(1, len(sizes) + 1):
            groups = range(groups.start, end)
            held = sum(sizes[number] for number in groups)
            if held >= PIECE_ROWS or end == len(sizes):
                pieces.append(Piece(start, held, tuple(groups)))
                start, groups = start + held, range(end, end)
        return Contents(schema, tuple(pieces or [Piece(0, 0, ())]))

    def batches(
        self, filesystem: Any, path: str, columns: Sequence[str], piece: Piece, texts: Sequence[str] = ()
    ) -> Iterator[RecordBatch]:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(_opened(filesystem, path)) as file:
            rows = rows_at_once(file.schema_arrow, columns)
            yield from file.iter_batches(rows, row_groups=list(piece.row_groups or ()), columns=list(columns))


class Csv(Format):
    """Text, read block by block."""

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter

    def head(self, filesystem: Any, path: str) -> Contents:
        with self._reader(filesystem, path, None, ()) as reader:
            return Contents(reader.schema, (Piece(),))

    def batches(
        self, filesystem: Any, path: str, columns: Sequence[str], piece: Piece, texts: Sequence[str] = ()
    ) -> Iterator[RecordBatch]:
        with self._reader(filesystem, path, columns, texts) as reader:
            yield from reader

    def _reader(self, filesystem: Any, path: str, columns: Sequence[str] | None, texts: Sequence[str]) -> Any:
        import pyarrow
        from pyarrow import csv

        stream = filesystem.open(path, "rb", compression="gzip" if path.endswith(".gz") else None)
        return csv.open_csv(
            stream,
            read_options=csv.ReadOptions(block_size=2**22),
            parse_options=csv.ParseOptions(delimiter=self._delimiter),
            convert_options=csv.ConvertOptions(
                column_types={name: pyarrow.string() for name in texts},
                include_columns=None if columns is None else list(columns),
                strings_can_be_null=False,
                null_values=[""],
            ),
        )


class Arrays(Format):
    """Arrays of an .npz file, by memory map where they are not compressed."""

    def head(self, filesystem: Any, path: str) -> Contents:
        import pyarrow

        arrays = self._arrays(path)
        kind = next((name for name in ("logits", "probs") if name in arrays), None)
        if kind is None or "labels" not in arrays or arrays[kind].ndim != 2 or arrays["labels"].ndim != 1:
            got = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            requirement = "hold the arrays labels (N,) and logits or probs (N, C)"
            raise InputValueError(
                expected(path, requirement, got or "none", "write it with numpy.savez(path, ...)")
            )
        n_rows, n_classes = arrays[kind].shape
        value = pyarrow.from_numpy_dtype(arrays[kind].dtype)
        schema = pyarrow.schema(
            {
                kind: pyarrow.list_(value, n_classes),
                "labels": pyarrow.from_numpy_dtype(arrays["labels"].dtype),
            }
        )
        names = arrays.get("class_names")
        pieces = tuple(
            Piece(start, min(PIECE_ROWS, n_rows - start)) for start in range(0, n_rows, PIECE_ROWS)
        )
        found = None if names is None else tuple(str(name) for name in np.atleast_1d(names).tolist())
        return Contents(schema, pieces or (Piece(0, 0),), found)

    def batches(
        self, filesystem: Any, path: str, columns: Sequence[str], piece: Piece, texts: Sequence[str] = ()
    ) -> Iterator[RecordBatch]:
        import pyarrow

        arrays = self._arrays(path)
        chosen = {name: arrays[name] for name in columns}
        step = max(1, _BATCH_NUMBERS // max(array[:1].size for array in chosen.values()))
        end = piece.first_row + (piece.n_rows or 0)
        for start in range(piece.first_row, end, step):
            rows = slice(start, min(start + step, end))
            yield pyarrow.RecordBatch.from_pydict(
                {name: _arrow(np.asarray(array[rows])) for name, array in chosen.items()}
            )

    def holds_one_label_a_row(self, path: str) -> bool:
        """Whether labels are (N,); of several a row they are (N, C). False for what cannot be read."""
        try:
            return self._arrays(path)["labels"].ndim == 1
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False

    def _arrays(self, path: str) -> Mapping[str, NDArray[Any]]:
        with zipfile.ZipFile(path) as archive:
            members = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        wanted = ("logits", "probs", "labels", "class_names")
        with np.load(path, allow_pickle=False) as file:
            return {
                name: _mapped(path, members[name]) if _can_be_mapped(members[name]) else file[name]
                for name in wanted
                if name in members
            }


def rows_at_once(schema: Schema, columns: Sequence[str]) -> int:
    """Rows of a batch: fewer, the more numbers a row has."""
    import pyarrow

    types = [schema.field(name).type for name in columns if name in schema.names]
    numbers = sum(each.list_size if pyarrow.types.is_fixed_size_list(each) else 1 for each in types)
    if any(pyarrow.types.is_list(each) or pyarrow.types.is_large_list(each) for each in types):
        numbers += 64  # a guess
    return max(256, _BATCH_NUMBERS // max(numbers, 1))


def _opened(filesystem: Any, path: str) -> Any:
    """A local file by its path, which is read without Python in between."""
    return path if _is_local(filesystem) else filesystem.open(path, "rb")


def _is_local(filesystem: Any) -> bool:
    return "file" in ([filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol)


def _can_be_mapped(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type == zipfile.ZIP_STORED and entry.file_size > 0


def _mapped(path: str, entry: zipfile.ZipInfo) -> NDArray[Any]:
    """An array that is stored as it is in a zip file, by memory map."""
    with open(path, "rb") as file:
        file.seek(entry.header_offset)
        name_length, extra_length = struct.unpack("<26x2H", file.read(30))
        file.seek(entry.header_offset + 30 + name_length + extra_length)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else _header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it holds objects")
        if not np.prod(shape):
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _header_2_0(file: Any) -> Any:
    return np.lib.format.read_array_header_2_0(file)


def _arrow(array: NDArray[Any]) -> Any:
    import pyarrow

    if array.ndim == 1:
        return pyarrow.array(array)
    flat = np.ascontiguousarray(array).reshape(-1)
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat), array.shape[1])


_CSV, _TSV = Csv(","), Csv("\t")
ARRAYS = Arrays()
FORMATS: dict[str, Format] = {
    ".parquet": Parquet(),
    ".csv": _CSV,
    ".csv.gz": _CSV,
    ".tsv": _TSV,
    ".tsv.gz": _TSV,
    ".npz": ARRAYS,
}


def suffix_of(path: str) -> str | None:
    """The key of `FORMATS` that a name ends in.

    >>> suffix_of("s3://bucket/part-0.CSV.gz"), suffix_of("me/model")
    ('.csv.gz', None)
    """
    known = sorted(FORMATS, key=len, reverse=True)
    return next((suffix for suffix in known if path.lower().endswith(suffix)), None)
