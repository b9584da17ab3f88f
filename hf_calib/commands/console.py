"""Command-line output: results and progress for people, one JSON object for machines, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_calib._errors import InputError, printable

if TYPE_CHECKING:
    from hf_calib.report import Document

_PATIENCE = 1.0  # seconds before a stage is named


@dataclass(frozen=True)
class Done:
    """The result of a command that writes no report: lines for people, a record of JSON's own types, and warnings."""

    lines: Sequence[str]
    record: Mapping[str, Any]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record with the warnings."""
        return {**self.record, "notes": list(self.notes)}


def show(done: Done) -> None:
    """Print the lines of a result."""
    print_lines(done.lines)


@contextmanager
def exit_codes() -> Iterator[None]:
    """End with code 2 and one line on stderr for an error in the input; everything else is a bug, code 1."""
    try:
        yield
    except InputError as error:
        print(f"hf-calib: {printable(error)}", file=sys.stderr)
        raise typer.Exit(2) from None


@contextmanager
def interruptible(way_on: str) -> Iterator[None]:
    """End with code 130 and one line on stderr where the user, or a scheduler, interrupts."""
    # SIGHUP is of a terminal that is closed; under nohup it is ignored, and stays so.
    ends = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {end: signal.getsignal(end) for end in ends if signal.getsignal(end) is not signal.SIG_IGN}
    for end in handlers:
        signal.signal(end, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"hf-calib: interrupted. {way_on}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        for end, handler in handlers.items():
            signal.signal(end, handler)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Yield a function that names a stage as it begins; stderr names those that take longer than a second."""
    timer = threading.Timer(_PATIENCE, print)

    def begin(stage: str) -> None:
        nonlocal timer
        timer.cancel()
        timer = threading.Timer(_PATIENCE, lambda: print(f"{stage} ...", file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()

    try:
        yield begin
    finally:
        timer.cancel()


@contextmanager
def progress(title: str = "rows") -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on stderr, moved by calling (how many are just done, how many there are, if known)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True))

    def move(done: int, total: int | None) -> None:
        bars.start()
        if not bars.tasks or bars.tasks[-1].finished:
            bars.add_task(title, total=total)
        bars.advance(bars.tasks[-1].id, done)

    try:
        yield move
    finally:
        if bars.tasks:  # it prints a line where it was never started
            bars.stop()


def print_progress(line: str) -> None:
    """One line on stderr, with the time of day: a study takes hours, and its output often goes to a file."""
    shown = "\n".join(map(printable, line.split("\n")))  # with the last lines of a script that failed
    print(f"{time.strftime('%H:%M:%S')} {shown}", file=sys.stderr, flush=True)


def print_warnings(warnings: Iterable[str]) -> None:
    """Lines on stderr, for what a reader of stdout must not miss, in JSON as in a table."""
    for warning in warnings:
        print(f"hf-calib: warning: {printable(warning)}", file=sys.stderr)


def print_json(record: Any) -> None:
    """One object on stdout."""
    print(json.dumps(record, allow_nan=False))


def print_document(document: Document) -> None:
    """The blocks of a document that a terminal can show."""
    from rich.console import Console

    document.show(Console())


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table alone."""
    from hf_calib.report.document import Document, Table

    print_document(Document("", [Table(title, header, rows, title=title)]))


def print_lines(lines: Iterable[str]) -> None:
    """Sentences, wrapped; brackets in them are no markup."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(line, markup=False)


def print_written(output: Path | None) -> None:
    """Where the files are."""
    if output is not None:
        names = ", ".join(sorted(path.name for path in output.iterdir()))
        print(f"\nWritten to {output}: {names}")
