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
from hf_calib.scaling import SCALERS

if TYPE_CHECKING:
    from hf_calib.commands.calibrate import Calibration
    from hf_calib.commands.decide import Decided
    from hf_calib.report import Document
    from hf_calib.report.any_report import AnyReport
    from hf_calib.scaling import PriorEstimate

_PATIENCE = 1.0  # seconds before a stage is named
_MOST_MOVED = 10  # classes in the table of class frequencies


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
    timers: list[threading.Timer] = []

    def end() -> None:
        for timer in timers:
            timer.cancel()

    def begin(stage: str) -> None:
        end()
        timers.append(threading.Timer(_PATIENCE, lambda: print(f"{stage} ...", file=sys.stderr, flush=True)))
        timers[-1].daemon = True
        timers[-1].start()

    try:
        yield begin
    finally:
        end()


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


def print_report(report: AnyReport) -> None:
    """The metrics with their intervals, and the diagnosis."""
    print_document(report.document())


def print_calibration(done: Calibration) -> None:
    """The report before and after, the fitted parameters, and the rows that they were fitted on."""
    print_report(done.report)
    numbers = {name: value for name, value in done.numbers.items() if isinstance(value, float)}
    if "weight" in numbers:  # one number for all logits: people know it as a temperature
        numbers = {"T": 1 / numbers["weight"]}
    details = [word for word in (done.criterion, done.choice) if word] + [
        f"{k} {v:.4g}" for k, v in numbers.items()
    ]
    fitted = f"Method {done.method}, fitted on {done.n_fitted:,} rows"
    fitted += f" ({', '.join(details)})." if details else "."
    notes = [f"Note: {note}" for note in done.notes if note not in done.report.warnings]  # those are printed
    if done.prior is not None:
        print_table(*_moved_classes(done.prior, done.report.class_names))
    lines = ["", fitted, f"Reported on {done.held_out}.", *notes]
    if done.served_difference is not None and done.folded:
        lines.append(
            "Folded into the model's head: a plain pipeline with the saved model gives the calibrated "
            f"probabilities (largest difference {done.served_difference:.1g})."
        )
    elif done.served_difference is not None:
        why = f"{done.method} does not fold"
        if SCALERS[done.method].foldable:
            why = "its head keeps no bias, which the map has"
        lines.append(
            f"Saved beside the model, as {why}: hf_calib.pipeline with the saved model gives "
            f"the calibrated probabilities (largest difference {done.served_difference:.1g}). A plain pipeline is not "
            "calibrated by it."
        )
    print_lines(lines)


def _moved_classes(
    prior: PriorEstimate, class_names: Sequence[str]
) -> tuple[str, list[str], list[list[str]]]:
    """The classes whose shares differ most from those that the calibrated probabilities assume."""
    order = sorted(range(len(prior.prior)), key=lambda k: -abs(prior.prior[k] - prior.train_prior[k]))
    found = "corrected for" if prior.corrects else "not corrected for"
    title = f"Class frequencies of {prior.n_rows:,} target rows, {found} (p = {prior.p_value:.3f})"
    rows = [
        [
            class_names[k],
            f"{prior.train_prior[k]:.4f}",
            f"{prior.prior[k]:.4f} [{prior.interval[k, 0]:.4f}, {prior.interval[k, 1]:.4f}]",
        ]
        for k in order[:_MOST_MOVED]
    ]
    return title, ["class", "source", "target"], rows


def print_decided(decided: Decided) -> None:
    """Print a decision rule's results before and after calibration, and the rows they are from."""
    print_table(f"Decisions of {decided.name}", *decided.section.table())
    print_lines(decided.section.sentences())
    if decided.method:
        print_lines(
            [f"After calibration: {decided.method}, fitted on {decided.n_calibrated_on:,} other rows."]
        )
    print_lines([f"Measured on {decided.held_out}, with 95% intervals."])


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
