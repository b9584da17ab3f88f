"""Predictions in any number of files: a file, several, a folder, a glob or an address, opened without reading rows."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputError, InputValueError, expected, few
from hf_calib.metrics.checks import RowError
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.shard_formats import FORMATS, Contents, Piece, suffix_of
from hf_calib.predictions.table_columns import Batch, TableColumns

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# Beyond, rows are measured in one pass. Every row up to here is held: 0.5 GB of float64.
MOST_ROWS_HELD = 1_000_000
_MOST_NUMBERS_HELD = 2**26
_BYTES_OF_A_ROW = 64  # at least, of a text whose rows are not counted before they are read
_HEADS_AT_ONCE = 16


class Shard(NamedTuple):
    """One file.

    Args:
        path: as its filesystem calls it.
        name: below the folder or address that was given; in messages.
        identity: its size, and when it was changed or what it is, where the filesystem tells.
        constants: the values that folders on the way to it name, column=value.
    """

    path: str
    name: str
    identity: str
    constants: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Shards:
    """Predictions in files, whose heads were read and checked.

    Made by `open_shards`; it can be sent to another process.

    Args:
        name: of all, for titles.
        filesystem: of fsspec.
        files: in the order of their names.
        contents: what the head of each tells.
        columns: which are read.
        by: the columns that name slices, also those that folders name.
    """

    name: str
    filesystem: Any = field(repr=False)
    files: tuple[Shard, ...] = field(repr=False)
    contents: tuple[Contents, ...] = field(repr=False)
    columns: TableColumns
    by: tuple[str, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """C, in the order of the columns."""
        return self.columns.class_names

    @cached_property
    def n_rows(self) -> int | None:
        """None where it is not known before all are read."""
        counts = [each.n_rows for each in self.contents]
        return None if None in counts else sum(filter(None, counts))

    @cached_property
    def pieces(self) -> list[tuple[int, Piece]]:
        """The number of a file and rows of it that are read together, in order."""
        return [(i, piece) for i, each in enumerate(self.contents) for piece in each.pieces]

    def fit_into_memory(self) -> bool:
        """Whether all rows may be held at once."""
        if self.n_rows is not None:
            return self.n_rows <= MOST_ROWS_HELD and self.n_rows * len(self.class_names) <= _MOST_NUMBERS_HELD
        sizes = [int(shard.identity.split()[0]) for shard in self.files]
        return sum(sizes) <= MOST_ROWS_HELD * _BYTES_OF_A_ROW

    def batches(self, number: int, piece: Piece) -> Iterator[tuple[int, Batch]]:
        """The rows of a piece, in batches with the number of their first row in the file.

        Raises:
            TypeError, ValueError: if the file cannot be read, or a row is wrong: named with the file and the row.
        """
        texts = (self.columns.label, *self.columns.by)
        for first, batch in self.tables(number, piece, self.columns.names, texts):
            with self.naming(number, first):
                yield first, self._with_constants(self.columns.read(batch), number)

    def tables(
        self, number: int, piece: Piece, columns: Sequence[str], texts: Sequence[str] = ()
    ) -> Iterator[tuple[int, RecordBatch]]:
        """The same as record batches of some columns."""
        shard, row = self.files[number], piece.first_row
        found = FORMATS[suffix_of(shard.path) or ""].batches(
            self.filesystem, shard.path, columns, piece, texts
        )
        while True:
            try:
                batch = next(found, None)
            except InputError:
                raise
            except Exception as error:  # a driver may raise anything
                raise _unreadable(shard.name, error, f" after row {row:,}") from error
            if batch is None:
                return
            if len(batch):
                yield row, batch
            row += len(batch)

    def naming(self, number: int, first: int) -> _Naming:
        """A context in which errors of rows name this file and the row in it."""
        return _Naming(self.files[number].name, first)

    def load(self) -> Predictions:
        """All rows, held at once; for those that fit into memory."""
        parts = [batch for number, piece in self.pieces for _, batch in self.batches(number, piece)]
        if not parts:
            raise InputValueError(no_rows(self.name))
        scores = np.concatenate([part.scores for part in parts])
        return self.predictions(np.concatenate([part.labels for part in parts]), scores)

    def predictions(self, labels: NDArray[np.int64], scores: NDArray[Any]) -> Predictions:
        """Rows with labels (n,) and scores (n, C), which are logits or probabilities as the files hold them."""
        is_logits = self.columns.kind == "logits"
        return Predictions(
            labels,
            logits=scores if is_logits else None,
            probs=None if is_logits else scores,
            class_names=self.class_names,
        )

    def row_hashes(self, number: int, first: int, n_rows: int) -> NDArray[np.uint64]:
        """Numbers (n,) as if drawn at random, which the name of the file and the number of the row determine."""
        seed = zlib.crc32(PurePosixPath(self.files[number].name).name.encode())
        return mixed(np.arange(first, first + n_rows, dtype=np.uint64), seed)

    def identity(self) -> list[str]:
        """What tells these files from others, or from themselves once they are written again."""
        return [f"{shard.name} {shard.identity}" for shard in self.files]

    def _with_constants(self, batch: Batch, number: int) -> Batch:
        """Put the columns that folders name among those of the table."""
        constants = dict(self.files[number].constants)
        own = iter(batch.by)
        zeros = np.zeros(len(batch.labels), np.intp)
        return batch._replace(
            by=tuple((zeros, [constants[name]]) if name in constants else next(own) for name in self.by)
        )


def open_shards(
    sources: str | Sequence[str],
    *,
    label_column: str = "label",
    weight_column: str | None = None,
    by: Sequence[str] = (),
) -> Shards:
    """Find the files, and read and check their heads, before any row is read.

    Args:
        sources: files, folders, globs or addresses that fsspec knows (s3://, gs://, hf://, https://, memory://), all on
            one filesystem: of .parquet, .csv, .tsv (also .gz) or, on this machine, .npz. In a folder, files below it
            are read, also of partitions (`country=de/part-0.parquet`), and those whose names begin with "_" or "." are
            not.
        label_column: of labels, see `load_predictions`.
        weight_column: of weights, or None.
        by: columns that name slices.

    Raises:
        ValueError: if there is no such file, one is unreadable or truncated, or has other columns than the first.
    """
    given = [sources] if isinstance(sources, str) else list(sources)
    filesystem, files = _find(given)
    with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
        contents = tuple(pool.map(lambda shard: _head(filesystem, shard), files))
    constants = {name for name, _ in files[0].constants}
    in_table = [name for name in by if name not in constants]
    first = contents[0]
    try:
        n_classes = _length_of_lists(filesystem, files[0], first)
        columns = TableColumns.of(
            first.schema,
            label_column,
            weight=weight_column,
            by=in_table,
            class_names=first.class_names,
            n_classes=n_classes,
        )
    except InputError as error:
        raise type(error)(f"{files[0].name}: {error}") if len(files) > 1 else error from error
    found = Shards(
        given[0] if len(given) == 1 else few(given), filesystem, files, contents, columns, tuple(by)
    )
    for shard, each in zip(files, contents, strict=True):
        try:
            columns.check_same(each.schema)
        except InputError as error:
            raise type(error)(f"{shard.name}: {error}") from error
        if {name for name, _ in shard.constants} != constants:
            got, way_out = "other folders", "name the columns of all partitions alike"
            raise InputValueError(expected(shard.name, "be in folders as the first shard is", got, way_out))
    if found.n_rows == 0:
        raise InputValueError(no_rows(found.name))
    return found


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


def is_many(source: str) -> bool:
    """Whether a name means several files, or ones elsewhere: an address, a glob, or a folder of predictions.

    >>> is_many("s3://bucket/run/*.parquet"), is_many("me/model")
    (True, False)
    """
    if "://" in source:
        return True
    if os.path.exists(source):
        is_model = any(
            os.path.isfile(os.path.join(source, name)) for name in ("config.json", "adapter_config.json")
        )
        return os.path.isdir(source) and not is_model and any(_below(source))
    return bool(re.search(r"[*?\[]", source))


def no_rows(name: str) -> str:
    """The error for files without rows."""
    return expected(
        "the predictions", "have rows", f"none in {name}", "write the predictions below the header"
    )


class _Naming:
    """A context in which errors of rows name a file and the row in it."""

    def __init__(self, name: str, first: int) -> None:
        self._name, self._first = name, first

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RowError):
            raise error.at(self._name, self._first) from None
        if isinstance(error, InputError) and not str(error).startswith(self._name):
            raise type(error)(f"{self._name}: {error}") from error


def _below(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        yield from (os.path.join(root, name) for name in names if _is_shard(name))


def _is_shard(name: str) -> bool:
    return not name.startswith(("_", ".")) and suffix_of(name) is not None


def _find(sources: Sequence[str]) -> tuple[Any, tuple[Shard, ...]]:
    """The filesystem, and all files in the order of their names."""
    import fsspec

    found: dict[str, Shard] = {}
    filesystems = []
    for source in sources:
        try:
            filesystem, root = fsspec.core.url_to_fs(source)
            filesystems.append(filesystem)
            found |= {shard.path: shard for shard in _shards_of(filesystem, root)}
        except InputError:
            raise
        except ImportError as error:
            way_out = "install what it names"
            raise InputValueError(expected(source, "be readable", str(error), way_out)) from error
        except Exception as error:  # a driver may raise anything: no credentials, no such bucket, no network
            raise _unreadable(source, error) from error
    if len({type(each) for each in filesystems}) > 1:
        got, way_out = few(list(sources)), "read those of each place by a command of its own"
        raise InputValueError(expected("the predictions", "lie in one place", got, way_out))
    if not found:
        got, way_out = few(list(sources)), f"name files ending in {', '.join(FORMATS)}, or a folder of them"
        raise InputValueError(
            expected("the predictions", "name existing files", f"{got}, where there are none", way_out)
        )
    return filesystems[0], tuple(found[path] for path in sorted(found))


def _shards_of(filesystem: Any, root: str) -> list[Shard]:
    """The files of one source."""
    has_glob = bool(re.search(r"[*?\[]", root)) and not filesystem.exists(root)
    if has_glob:
        paths = [path for path in filesystem.glob(root) if _is_shard(PurePosixPath(path).name)]
        base = root[: re.search(r"[*?\[]", root).start()].rpartition("/")[0]  # type: ignore[union-attr]
    elif suffix_of(root) is not None and not filesystem.isdir(root):
        paths, base = [root], root.rpartition("/")[0]
    else:
        base = root.rstrip("/")
        below = (path[len(base) :].strip("/").split("/") for path in filesystem.find(root))
        paths = [
            "/".join([base, *parts])
            for parts in below
            if _is_shard(parts[-1]) and not any(part.startswith(("_", ".")) for part in parts)
        ]
    return [_shard(filesystem, path, base) for path in paths]


def _shard(filesystem: Any, path: str, base: str) -> Shard:
    info = filesystem.info(path)
    if info["type"] != "file":
        raise InputValueError(expected(path, "be a file", "a folder", "name the folder above it"))
    stamp = next(
        (info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if info.get(key)), ""
    )
    name = path[len(base) :].lstrip("/") if base else path
    folders = PurePosixPath(name).parts[:-1]
    constants = tuple(tuple(part.split("=", 1)) for part in folders if "=" in part)
    return Shard(path, name, f"{info.get('size') or 0} {stamp}", constants)  # type: ignore[arg-type]


def _head(filesystem: Any, shard: Shard) -> Contents:
    kind = FORMATS[suffix_of(shard.path) or ""]
    try:
        return kind.head(filesystem, shard.path)
    except InputError:
        raise
    except Exception as error:  # a driver may raise anything
        raise _unreadable(shard.name, error) from error


def _length_of_lists(filesystem: Any, shard: Shard, contents: Contents) -> int | None:
    """C, from the first row, where the type of a column of lists does not tell it."""
    import pyarrow

    names = [name for name in ("logits", "probs", "probabilities") if name in contents.schema.names]
    if not names or pyarrow.types.is_fixed_size_list(contents.schema.field(names[0]).type):
        return None
    piece = next((piece for piece in contents.pieces if piece.n_rows != 0), None)
    if piece is None or not hasattr(contents.schema.field(names[0]).type, "value_type"):
        return None
    kind = FORMATS[suffix_of(shard.path) or ""]
    first = next(iter(kind.batches(filesystem, shard.path, names[:1], piece)))
    length = first.column(names[0]).value_lengths()[0].as_py()
    return None if length is None else int(length)


def _unreadable(name: str, error: BaseException, where: str = "") -> InputValueError:
    words = " ".join(str(error).split())[:300] or type(error).__name__
    way_out = "write it again, or check the address and the credentials"
    return InputValueError(expected(name, f"be readable{where}", words, way_out))
