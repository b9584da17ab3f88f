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
from hf_calib.metrics.slices import SliceSums
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
        made = {column: [sums.n_bins, sums.weighted, sums.names] for column, sums in self.slices.items()}
        states = {f"state:{name}": _bytes(state.to_bytes()) for name, state in self.states.items()}
        slices = {
            f"slice:{column}:{name}": array
            for column, sums in self.slices.items()
            for name, array in sums.arrays().items()
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
        for column, (n_bins, weighted, names) in facts["slices"].items():
            prefix = f"slice:{column}:"
            own = {
                name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)
            }
            tally.slices[column] = SliceSums(column, n_bins, weighted=weighted)
            tally.slices[column].restore(names, own)
        return tally


class Summed(Protocol):
    """What a piece gives, and what that of all pieces is merged into."""

    n_rows: int

    def merge(self, other: Any) -> None:
        """Add that of other rows."""


S = TypeVar("S", bound=Summed)
# What a pass does with a piece; it is sent to other processes.
Work = Callable[[Shards, int, Piece], S]


@dataclass(frozen=True)
class Unfinished:
    """The file that holds what was summed until a kill, and goes with the end of the pass.

    Args:
        path: of the file.
        options: what else the sums depend on.
    """

    path: Path
    options: str

    def read(self, shards: Shards) -> tuple[int, Tally]:
        """How many pieces are done, and their sums; none where the files or the options are others."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            header = json.loads(arrays.pop("header").tobytes())
            if header == self._header(shards, header["done"]):
                return header["done"], Tally.from_arrays(arrays)
        except (OSError, ValueError, KeyError, EOFError):
            pass
        return 0, Tally()

    def write(self, shards: Shards, done: int, tally: Tally) -> None:
        """Keep the sums of the first pieces."""
        arrays = tally.to_arrays() | {"header": _bytes(json.dumps(self._header(shards, done)).encode())}
        with whole_file(self.path) as path:
            stream = io.BytesIO()
            np.savez(stream, allow_pickle=False, **arrays)
            path.write_bytes(stream.getvalue())

    def remove(self) -> None:
        """The pass is over."""
        self.path.unlink(missing_ok=True)

    def _header(self, shards: Shards, done: int) -> dict[str, Any]:
        """Of the files that are done: a later one may be written again after an error named it."""
        last = shards.pieces[done - 1][0] if done else -1
        return {"done": done, "files": shards.identity()[: last + 1], "options": self.options}


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
    if unfinished is None:
        tally = Tally()
        run_pass(shards, work, tally, workers=workers, on_rows=on_rows)
        return tally
    done, tally = unfinished.read(shards)
    if on_rows is not None and tally.n_rows:
        on_rows(tally.n_rows, shards.n_rows)
    saved = time.monotonic()

    def save_now_and_then() -> None:
        nonlocal done, saved
        done += 1
        if time.monotonic() - saved > _SECONDS_BETWEEN_SAVES:
            unfinished.write(shards, done, tally)
            saved = time.monotonic()

    left = shards.pieces[done:]
    try:
        run_pass(shards, work, tally, pieces=left, workers=workers, on_rows=on_rows, after=save_now_and_then)
    except BaseException:
        if done:
            unfinished.write(shards, done, tally)
        raise
    return tally


def run_pass(
    shards: Shards,
    work: Work[S],
    into: S,
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
