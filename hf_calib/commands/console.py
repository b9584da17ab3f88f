"""Command-line output: results and progress for people, one JSON object for machines, and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

from hf_calib._errors import InputError, printable

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
def telling() -> Iterator[tuple[Callable[[int, int | None], None], Callable[[str], None]]]:
    """Yield what moves a bar on stderr, by rows just done of all, and what names a stage that takes more than a second.

    An error in the input ends with code 2 and one line on stderr; everything else is a bug, code 1.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars, timer = Progress(*columns, console=Console(stderr=True)), threading.Timer(_PATIENCE, print)

    def move(done: int, total: int | None) -> None:
        bars.start()
        if not bars.tasks or bars.tasks[-1].finished:
            bars.add_task("", total=total)
        bars.advance(bars.tasks[-1].id, done)

    def begin(stage: str) -> None:
        nonlocal timer
        timer.cancel()
        timer = threading.Timer(_PATIENCE, lambda: print(f"{stage} ...", file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()

    try:
        try:
            yield move, begin
        finally:
            timer.cancel()
            if bars.tasks:  # it prints a line where it was never started
                bars.stop()
    except InputError as error:
        print(f"hf-calib: {printable(error)}", file=sys.stderr)
        raise typer.Exit(2) from None


def print_progress(line: str) -> None:
    """One line on stderr, with the time of day: a study takes hours, and its output often goes to a file."""
    shown = "\n".join(map(printable, line.split("\n")))  # with the last lines of a script that failed
    print(f"{time.strftime('%H:%M:%S')} {shown}", file=sys.stderr, flush=True)


def print_warnings(warnings: Iterable[str]) -> None:
    """Lines on stderr, for what a reader of stdout must not miss, in JSON as in a table."""
    for warning in warnings:
        print(f"hf-calib: warning: {printable(warning)}", file=sys.stderr)


def show(*parts: Any, show_all: bool = True) -> None:
    """Print documents, those of reports or their short ones, and lines, wrapped, whose brackets are no markup."""
    from rich.console import Console

    screen = Console()
    for part in parts:
        if isinstance(part, Done):
            show(*part.lines)
        elif isinstance(part, str):
            screen.print(part, markup=False, highlight=False)
        else:
            getattr(part, "document" if show_all else "short", lambda part=part: part)().show(screen)
