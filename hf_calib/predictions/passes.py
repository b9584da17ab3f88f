"""One pass over shards of predictions: what is summed, by several processes, and going on where a kill ended it."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputOSError, expected
from hf_calib._files import whole_file
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.state import GroupSums, SliceSums
from hf_calib.predictions.shard_formats import Piece
from hf_calib.predictions.shards import Shards

MOST_WORKERS = 8  # by default: a worker holds up to 0.3 GB
_ROWS_WORTH_WORKERS = 5_000_000  # a worker takes a second or two to start
_SECONDS_BETWEEN_SAVES = 5.0

# Called with the rows that were just read, and all rows; None where that is not known.
OnRows = Callable[[int, int | None], None]


@dataclass
class Tally:
    """What is summed over rows.

    Args:
        states: by name: "before", "after".
        slices: by the columns that name them.
        n_rows: that were read.
    """

    states: dict[str, CalibrationState] = field(default_factory=dict)
    slices: dict[str, SliceSums] = field(default_factory=dict)
    n_rows: int = 0

    def merge(self, other: Tally) -> None:
        """Add the rows of another one."""
        self.n_rows += other.n_rows
        for name, state in other.states.items():
            if name in self.states:
                self.states[name].merge(state)
            else:
                self.states[name] = state
        for column, sums in other.slices.items():
            if column in self.slices:
                self.slices[column].merge(sums)
            else:
                self.slices[column] = sums

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything, for one file."""
        made = {column: [sums.n_bins, sums.names] for column, sums in self.slices.items()}
        states = {f"state:{name}": _bytes(state.to_bytes()) for name, state in self.states.items()}
        slices = {
            f"slice:{column}:{name}": array
            for column, sums in self.slices.items()
            for name, array in sums.groups._asdict().items()
        }
        facts = {"slices": made, "n_rows": self.n_rows}
        return {"facts": _bytes(json.dumps(facts).encode()), **states, **slices}

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Tally:
        """What `to_arrays` gave."""
        facts = json.loads(arrays["facts"].tobytes())
        tally = cls(n_rows=facts["n_rows"])
        for name, array in arrays.items():
            if name.startswith("state:"):
                tally.states[name.removeprefix("state:")] = CalibrationState.from_bytes(array.tobytes())
        for column, (n_bins, names) in facts["slices"].items():
            groups = GroupSums(*(arrays[f"slice:{column}:{name}"] for name in GroupSums._fields))
            tally.slices[column] = SliceSums(column, n_bins, names, groups)
        return tally


class Summed(Protocol):
    """What a piece gives."""

    n_rows: int


S = TypeVar("S", bound=Summed)
T = TypeVar("T", contravariant=True)


class Merging(Protocol[T]):
    """What the results of all pieces are merged into."""

    def merge(self, other: T, /) -> None:
        """Add that of other rows."""


# What a pass does with a piece; it is sent to other processes.
Work = Callable[[Shards, int, Piece], S]


@dataclass
class TallyByFile:
    """What is summed over files, and over the file that is being read: it may turn out to be wrong, and be repaired.

    Args:
        shards: the files.
        done: pieces that were merged.
        done_whole: those of them that are of files of which all were.
        whole: of these files.
        begun: of the next one.
    """

    shards: Shards
    done: int = 0
    done_whole: int = 0
    whole: Tally = field(default_factory=Tally)
    begun: Tally = field(default_factory=Tally)

    @property
    def n_rows(self) -> int:
        """Rows that were read."""
        return self.whole.n_rows + self.begun.n_rows

    def merge(self, more: Tally) -> None:
        """Add the next piece."""
        pieces = self.shards.pieces
        self.begun.merge(more)
        self.done += 1
        if self.done == len(pieces) or pieces[self.done][0] != pieces[self.done - 1][0]:
            self.whole.merge(self.begun)
            self.begun = Tally()
            self.done_whole = self.done


@dataclass(frozen=True)
class Unfinished:
    """The file that holds what was summed until a kill, and goes with the end of the pass.

    Args:
        path: of the file.
        options: what else the sums depend on.
    """

    path: Path
    options: str

    def read(self, shards: Shards) -> TallyByFile:
        """What is done; nothing where the files or the options are others."""
        try:
            header, arrays = read_kept(self.path)
            names = ("whole", "begun")
            if header["options"] == self.options:
                whole, begun = (Tally.from_arrays(_under(name, arrays)) for name in names)
                done, done_whole, files = header["done"], header["done_whole"], header["files"]
                identity = shards.identity()
                if files == identity[: len(files)]:
                    return TallyByFile(shards, done, done_whole, whole, begun)
                if done > done_whole:
                    files.pop()  # which was being read
                if files == identity[: len(files)]:
                    return TallyByFile(shards, done_whole, done_whole, whole)
        except (OSError, ValueError, KeyError, EOFError):
            pass
        return TallyByFile(shards)

    def write(self, found: TallyByFile) -> None:
        """Keep it."""
        n_files = found.shards.pieces[found.done - 1][0] + 1 if found.done else 0
        header = {
            "done": found.done,
            "done_whole": found.done_whole,
            "files": found.shards.identity()[:n_files],
            "options": self.options,
        }
        arrays: dict[str, NDArray[Any]] = {}
        for name, tally in (("whole", found.whole), ("begun", found.begun)):
            arrays |= {f"{name}/{key}": array for key, array in tally.to_arrays().items()}
        keep(self.path, header, arrays)


def keep(path: Path, header: Any, arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays with a header of JSON's types, whole or not at all."""
    with whole_file(path) as unfinished:
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, header=_bytes(json.dumps(header).encode()), **arrays)
        unfinished.write_bytes(stream.getvalue())


def read_kept(path: Path) -> tuple[Any, dict[str, NDArray[Any]]]:
    """What `keep` wrote.

    Raises:
        OSError, ValueError, KeyError, EOFError: if there is no such file, or it is another.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads(arrays.pop("header").tobytes()), arrays


def _under(prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def measure_in_one_pass(
    shards: Shards,
    work: Work[Tally],
    *,
    unfinished: Unfinished | None = None,
    workers: int | None = None,
    on_rows: OnRows | None = None,
) -> Tally:
    """`run_pass` for sums that are kept while it runs, so that the same call goes on after a kill.

    Args:
        shards: the files.
        work: for a piece; a picklable object.
        unfinished: where the sums are kept; None keeps none.
        workers: see `run_pass`.
        on_rows: called as rows are done.

    Raises:
        ValueError, OSError: as `run_pass`; the sums of the pieces before are kept.
    """
    found = TallyByFile(shards) if unfinished is None else unfinished.read(shards)
    if on_rows is not None and found.n_rows:
        on_rows(found.n_rows, shards.n_rows)
    saved = time.monotonic()

    def save_now_and_then() -> None:
        nonlocal saved
        if unfinished is not None and time.monotonic() - saved > _SECONDS_BETWEEN_SAVES:
            unfinished.write(found)
            saved = time.monotonic()

    left = shards.pieces[found.done :]
    try:
        run_pass(shards, work, found, pieces=left, workers=workers, on_rows=on_rows, after=save_now_and_then)
    except BaseException:
        if unfinished is not None and found.done:
            unfinished.write(found)
        raise
    return found.whole


def run_pass(
    shards: Shards,
    work: Work[S],
    into: Merging[S],
    *,
    pieces: Sequence[tuple[int, Piece]] | None = None,
    workers: int | None = None,
    on_rows: OnRows | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Do some work for all pieces, and merge what it gives in the order of the pieces.

    Args:
        shards: the files.
        work: for a piece; a picklable object.
        into: what the results are merged into.
        pieces: some of them; None takes all.
        workers: processes; None takes as many as there are CPUs, 8 at most, and one for fewer than 5 million rows.
        on_rows: called as rows are done.
        after: called after each piece.

    Raises:
        ValueError: as `work`.
        OSError: if a worker was killed.
    """
    chosen = shards.pieces if pieces is None else list(pieces)
    with _results(shards, work, chosen, _n_workers(shards, len(chosen), workers)) as results:
        try:
            for more in results:
                into.merge(more)
                if on_rows is not None:
                    on_rows(more.n_rows, shards.n_rows)
                if after is not None:
                    after()
        except BrokenProcessPool as error:
            way_out = "give it more memory or --workers 1; with --output the same command goes on"
            raise InputOSError(expected("the workers", "run", "one that was killed", way_out)) from error


def _n_workers(shards: Shards, n_pieces: int, asked: int | None) -> int:
    if shards.filesystem.protocol == "memory":  # which no other process has
        return 1
    if asked is None:
        is_small = shards.n_rows is not None and shards.n_rows < _ROWS_WORTH_WORKERS
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        asked = 1 if is_small else min(available, MOST_WORKERS)
    return max(1, min(asked, n_pieces))


@contextmanager
def _results(
    shards: Shards, work: Work[S], pieces: list[tuple[int, Piece]], n_workers: int
) -> Iterator[Iterator[S]]:
    """What the work gives for each piece, in order."""
    if n_workers == 1:
        yield (work(shards, *piece) for piece in pieces)
        return
    pool = ProcessPoolExecutor(n_workers, get_context("spawn"), _begin, (shards, work))
    try:
        yield pool.map(_do, pieces)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_OF_THIS_WORKER: list[Any] = []


def _begin(shards: Shards, work: Work[Any]) -> None:
    _OF_THIS_WORKER[:] = [shards, work]


def _do(piece: tuple[int, Piece]) -> Any:
    shards, work = _OF_THIS_WORKER
    return work(shards, *piece)


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)
