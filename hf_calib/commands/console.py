"""Results of commands that write no report, and progress of commands that run for hours and may be interrupted."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

from hf_calib._errors import printable


@dataclass(frozen=True)
class Done:
    """The result of a command without a report: lines, lists of lines to copy, a record for JSON, and warnings."""

    lines: Sequence[str | list[str]]
    record: Mapping[str, Any]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record with the warnings."""
        return {**self.record, "notes": list(self.notes)}


@contextmanager
def interruptible(way_on: str) -> Iterator[None]:
    """End with code 130 and one line on stderr where the user, or a scheduler, interrupts."""
    # SIGHUP is of a terminal that is closed; under nohup it is ignored, and stays so.
    ends = [
        getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
    ]
    handlers = {
        end: signal.getsignal(end)
        for end in ends
        if signal.getsignal(end) is not signal.SIG_IGN
    }
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


def print_progress(line: str) -> None:
    """One line on stderr, with the time of day: a study takes hours, and its output often goes to a file."""
    shown = "\n".join(
        map(printable, line.split("\n"))
    )  # with the last lines of a script that failed
    print(f"{time.strftime('%H:%M:%S')} {shown}", file=sys.stderr, flush=True)
