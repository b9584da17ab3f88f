"""The command line `hf-calib`: each command is a dataclass of options,
and a thin call of the library.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING
from errno import EPIPE
from functools import partial
from importlib import metadata
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperGroup

from hf_calib._errors import (
    InputError,
    InputOSError,
    check,
    expected,
    printable,
    visible,
)
from hf_calib.commands import options
from hf_calib.models.reading import Names, without_none

# What stands for a value, by the last word of an option's name or by its type.
_VALUES: Any = {
    "column": "NAME",
    "split": "NAME",
    "data": "DATA",
    "output": "FOLDER",
    "method": "METHOD",
    Path: "FILE",
    Names: "A,B,C",
    int: "N",
    float: "N",
    str: "TEXT",
    list[str]: "TEXT",
}
# An option or a value that is none: typer's copy of click has no public name for it.
_UsageError: Any = typer.BadParameter.__base__
_FLAG: Any = partial(Parameter, kind=Parameter.KEYWORD_ONLY, default=False)
# Seconds before a stage is named.
_PATIENCE = 1.0
_JSON = typer.Option(
    "--json", help="Print one JSON object, and nothing else, on stdout."
)


def _print_all_options(context: typer.Context, value: bool) -> None:
    """Print the help with the options that only specialists need."""
    if value:
        for each in context.command.params:
            each.hidden = False  # type: ignore[attr-defined]
        print(context.get_help())
        raise typer.Exit


_HELP_ALL = typer.Option(
    "--help-all",
    help="Show all options and exit.",
    # It is read before a missing argument is an error.
    is_eager=True,
    callback=_print_all_options,
)
_ALL = typer.Option(
    "--all", help="Print all metrics and the whole diagnosis, as in a saved report."
)


class _Commands(TyperGroup):
    """All commands."""

    def invoke(self, context: Any) -> Any:
        """An error in the input ends with code 2 and one line on stderr; everything else is a bug,
        code 1.
        """
        try:
            # A shell can start a program without stdout, by >&-.
            is_open = sys.stdout is not None
            check(is_open, "stdout to be open", "a closed one", "send it to a file")
            return super().invoke(context)
        except InputError as error:
            line = printable(error)
        except _UsageError as error:
            asked = error.ctx.command_path if error.ctx else "hf-calib"
            said = printable(error.format_message()).removesuffix(".")
            line = f"{said}; see {asked} --help"
        print(f"hf-calib: {line}", file=sys.stderr)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    # The variables of a traceback could show a token, or rows of the data.
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.")
    ] = False,
) -> None:
    """Classifiers whose probabilities mean what they say."""
    if version:
        print(f"hf-calib {metadata.version('hf_calib')}")


def _typed(each: Any) -> str:
    """The name of an option as it is typed."""
    return f"--{each.name.replace('_', '-')}"


def _parameter(kind: type[options.Command], each: Any, hint: Any) -> Parameter:
    """An argument or option of typer."""
    about = each.metadata
    first = kind.first.split()
    if "argument" in about:
        info = typer.Argument(metavar=about["argument"], help=about["help"])
    else:
        plain = without_none(hint)
        is_choice = get_origin(plain) is Literal
        choices = "|".join(get_args(plain)) if is_choice else None
        # The value of --test-data and --ood-data is that of --data.
        last_word = each.name.rpartition("_")[2]
        value = _VALUES.get(last_word) or _VALUES.get(plain)
        panel = None if each.name in first else "More"
        info = typer.Option(
            _typed(each),
            help=about["help"],
            metavar=value or choices,
            rich_help_panel=panel,
            hidden=each.name not in kind.shown(),
        )
    # Names are a,b,c on a command line, and Path("") would be the current folder.
    hint = {Names: str | None, Path: str, Path | None: str | None}.get(hint, hint)
    return Parameter(
        each.name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if each.default is MISSING else each.default,
        annotation=Annotated[hint, info],
    )


@contextmanager
def _telling() -> Iterator[
    tuple[Callable[[int, int | None], None], Callable[[str], None]]
]:
    """Yield what moves a bar on stderr, by rows just done of all,
    and what names a stage of more than a second.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TimeRemainingColumn,
    )

    # A user's own settings stay. Bars of other libraries would fill a file of stderr.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "" if sys.stderr.isatty() else "1")
    columns = (
        "rows",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True))
    # This one is never started; the first stage cancels it like any other.
    timer = threading.Timer(_PATIENCE, print)

    def move(done: int, total: int | None) -> None:
        bars.start()
        # Each set of rows has a bar of its own, which begins when the one before is
        # full.
        if not bars.tasks or bars.tasks[-1].finished:
            bars.add_task("", total=total)
        bars.advance(bars.tasks[-1].id, done)

    def begin(stage: str) -> None:
        nonlocal timer
        timer.cancel()
        line = f"{printable(stage)} ..."
        say = partial(print, line, file=sys.stderr, flush=True)
        timer = threading.Timer(_PATIENCE, say)
        timer.daemon = True
        timer.start()

    try:
        yield move, begin
    finally:
        timer.cancel()
        # It prints a line where it was never started.
        if bars.tasks:
            bars.stop()


def _warn(line: str) -> None:
    """A line on stderr, for what a reader of stdout must not miss, in JSON as in a table."""
    print(f"hf-calib: warning: {printable(line)}", file=sys.stderr)


def _print(parts: Iterable[Any], *, show_all: bool) -> None:
    """Documents, those of reports or their short ones; lines, wrapped; and lists of lines,
    which are to be copied.
    """
    from rich.console import Console

    screen = Console()
    try:
        for part in parts:
            if isinstance(part, str):
                # Brackets and colons in names are no markup.
                screen.print(visible(part), markup=False, emoji=False, highlight=False)
            elif isinstance(part, list):
                # rich would break lines that are to be copied.
                print(*map(visible, part), sep="\n")
            else:
                form = getattr(part, "document" if show_all else "short", None)
                shown = part if form is None else form()
                shown.show(screen)
        # A full disk is otherwise noticed only as Python ends.
        sys.stdout.flush()
    except OSError as error:
        # The reader, such as head, has read enough.
        if error.errno == EPIPE:
            raise
        # Python flushes stdout again as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        way_out = "make room there, or send it elsewhere"
        raise InputOSError(
            expected("stdout", "be writable", error.strerror, way_out)
        ) from error


def _entries(folder: str | None) -> set[tuple[str, str, int]]:
    """The files in a folder and in those in it: their places, the first parts of these, and times."""
    if folder is None:
        return set()
    files = [path for form in ("*", "*/*") for path in Path(folder).glob(form)]
    found = set()
    for path in filter(Path.is_file, files):
        place = path.relative_to(folder)
        found.add((place.parts[0], str(place), path.stat().st_mtime_ns))
    return found


def _with_options(
    message: str, kind: type[options.Command], chosen: Mapping[str, Any]
) -> str:
    """An error with the names of options as they are typed, in place of Python's arguments."""
    are_named = chosen.get("class_names") or chosen.get("data")
    for each in kind.options():
        if "argument" in each.metadata:
            continue
        typed = _typed(each)
        # Files hold arrays of these names, which are no options.
        is_array = each.name == "soft_labels"
        if each.name == "class_names":
            is_array = not are_named
        # Names are also words, but not in the place of the argument.
        argument = rf"\bexpected {each.name} "
        if is_array:
            argument += "(?=to be given with|to name an existing)"
        message = re.sub(argument, f"expected {typed} ", message)
        if "_" in each.name and not is_array:
            # Within quotes or a path it is a value.
            name = rf"(?<![\w'\"./=-]){each.name}(?![\w'\"/=(-]|\.\w)"
            message = re.sub(name, typed, message)
    return message


def _add(kind: type[options.Command]) -> None:
    """Make a dataclass of options the command of its name."""
    kinds = kind.kinds()
    given = [_parameter(kind, each, kinds[each.name]) for each in kind.options()]
    flags = {"as_json": _JSON}
    if kind in (options.Evaluate, options.Calibrate):
        flags["show_all"] = _ALL
    if issubclass(kind, options.Rows):
        flags["help_all"] = _HELP_ALL
    given += [
        _FLAG(name, annotation=Annotated[bool, info]) for name, info in flags.items()
    ]

    def run(
        as_json: bool, show_all: bool = True, help_all: bool = False, **chosen: Any
    ) -> None:
        output = chosen.get("output")
        before = _entries(output)
        try:
            with _telling() as told:
                command = kind(**chosen)
                done = command(*told, _warn)
        except InputError as error:
            # In Python, the same message names arguments.
            raise InputError(_with_options(str(error), kind, chosen)) from error
        # The documents of the others have them.
        if kind is not options.Evaluate:
            for note in getattr(getattr(done, "report", done), "notes", ()):
                _warn(note)
        if as_json:
            # NaN is no JSON, and readers in other languages would refuse the whole
            # document.
            parts: list[Any] = [[json.dumps(done.to_dict(), allow_nan=False)]]
        else:
            parts = [*getattr(done, "lines", [done])]
            if output is not None:
                # A file that is written over has the same name, but another time.
                written = _entries(output) - before
                names = ", ".join(sorted({name for name, _, _ in written}))
                parts += ["", [f"Written to {output}: {names}"]]
        _print(parts, show_all=show_all)

    # typer reads the options of a command from its signature.
    run.__signature__ = Signature(given)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in given}
    epilog = f"Example: hf-calib {kind.command()} {kind.example}"
    if "help_all" in flags:
        epilog += f"\nAll options: hf-calib {kind.command()} --help-all"
    about = inspect.getdoc(kind)
    app.command(kind.command(), help=about, epilog=epilog)(run)


for _kind in options.COMMANDS:
    _add(_kind)


# For `accelerate launch -m hf_calib.cli`.
if __name__ == "__main__":
    app()
