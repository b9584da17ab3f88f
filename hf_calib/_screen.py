"""What the commands show: tables and progress for people, one JSON object for machines, and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from hf_calib.posthoc import Calibration
    from hf_calib.report import CalibrationReport


@contextmanager
def exit_codes() -> Iterator[None]:
    """End with code 2 and one line on stderr for what a user passed; everything else is a bug, code 1."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        if not message.startswith("expected "):
            raise
        print(f"hf-calib: {message}", file=sys.stderr)
        raise typer.Exit(2) from None


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, which is moved by calling (rows just done, rows in all); keep libraries quiet."""
    import transformers
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    transformers.logging.set_verbosity_error()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: list[TaskID] = []
        left = 0

        def move(done: int, total: int) -> None:
            nonlocal left
            if not left:
                tasks.append(bars.add_task("predicting", total=total))
                left = total
            left -= done
            bars.advance(tasks[-1], done)

        yield move


def print_json(record: Any) -> None:
    """One object on stdout."""
    print(json.dumps(record, allow_nan=False))


def print_report(report: CalibrationReport) -> None:
    """The metrics with their intervals, and what they mean."""
    from hf_calib.report.text import metric_table, summary

    print_table(f"Calibration of {report.name}", *metric_table(report))
    print_lines([summary(report), "", *report.diagnosis, *(f"Mind: {line}" for line in report.warnings)])


def print_calibration(done: Calibration) -> None:
    """What was fitted, on what, and the report before and after."""
    print_report(done.report)
    numbers = {name: value for name, value in done.numbers.items() if isinstance(value, float)}
    details = ([done.criterion] if done.criterion else []) + [f"{k} {v:.4g}" for k, v in numbers.items()]
    scaler = done.method.replace("_", " ") + (f" ({', '.join(details)})" if details else "")
    fitted = f"Fitted the method {scaler} on {done.n_fitted:,} rows"
    lines = ["", f"{fitted}.", f"Reported on {done.held_out}.", *(f"Mind: {note}" for note in done.notes)]
    if done.served_difference is not None:
        lines.append(
            "Folded into the model's head: a plain pipeline with the saved model gives the calibrated "
            f"probabilities (largest difference {done.served_difference:.1g})."
        )
    print_lines(lines)


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose first column may wrap, and whose numbers don't."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(
            escape(name), justify="right" if i else "left", no_wrap=bool(i), min_width=0 if i else 20
        )
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Sentences, wrapped; brackets in them mean nothing."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(line, markup=False)


def print_written(output: Path | None) -> None:
    """Say where the files are."""
    if output is not None:
        print_lines(["", f"Written to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}"])
