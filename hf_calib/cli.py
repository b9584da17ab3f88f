"""The command line `hf-calib`: each command is a dataclass of options, and a thin call of the library."""

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
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hf_calib._errors import (
    InputError,
    InputOSError,
    check,
    expected,
    printable,
    visible,
)
from hf_calib.commands import options
from hf_calib.commands.console import Done
from hf_calib.models.reading import Names

# What stands for a value, by the last word of an option's name or by its type.
_VALUES = {
    "column": "NAME",
    "split": "NAME",
    "data": "DATA",
    "output": "FOLDER",
    "method": "METHOD",
}
_VALUES |= {
    "Path": "FILE",
    "Names": "A,B,C",
    "int": "N",
    "float": "N",
    "str": "TEXT",
    "list[str]": "TEXT",
}
_FLAG: Any = partial(Parameter, kind=Parameter.KEYWORD_ONLY, default=False)
_PATIENCE = 1.0  # seconds before a stage is named
_JSON = typer.Option(
    "--json", help="Print one JSON object, and nothing else, on stdout."
)
_SHOWS_ALL = "hf_calib.shows_all"


def _print_all_options(context: typer.Context, value: bool) -> None:
    """Print the help with the options that only specialists need."""
    if value:
        context.meta[_SHOWS_ALL] = True
        context.get_help()
        raise typer.Exit


_HELP_ALL = typer.Option(
    "--help-all",
    help="Show all options and exit.",
    is_eager=True,
    callback=_print_all_options,
)
_ALL = typer.Option(
    "--all", help="Print all metrics and the whole diagnosis, as in a saved report."
)


def entry(parameter: Any) -> tuple[str, str]:
    """An argument or option with what stands for its value, and what it does."""
    name, default = parameter.metavar or "", parameter.default
    if parameter.param_type_name == "option":
        name = " ".join(
            (", ".join((*parameter.opts, *parameter.secondary_opts)), name)
        ).strip()
    end = (
        "" if default is None or isinstance(default, bool) else f" Default: {default}."
    )
    again = " May be repeated." if getattr(parameter, "multiple", False) else ""
    return name, f"{parameter.help}{again}{' Required.' if parameter.required else end}"


class _Panels:
    """The `--help` of a command, or of all: options in panels, but for those that specialists need."""

    def format_help(self: Any, context: Any, formatter: Any) -> None:
        """Print it."""
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table

        screen = Console(highlight=False, markup=False)
        screen.print(f"{self.get_usage(context)}\n\n{self.help}\n")
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(context):
            if not each.hidden or context.meta.get(_SHOWS_ALL):
                panel = each.rich_help_panel or f"{each.param_type_name.capitalize()}s"
                panels.setdefault(panel, []).append(entry(each))
        for name, command in getattr(self, "commands", {}).items():
            panels.setdefault("Commands", []).append(
                (name, command.help.split("\n")[0])
            )
        for panel, entries in panels.items():
            table = Table.grid(padding=(0, 2, 0, 0))
            for row in entries:
                table.add_row(*row)
            screen.print(Panel(table, title=panel, title_align="left"))
        screen.print(self.epilog or "")


class _Command(_Panels, TyperCommand):
    """One of `_Commands`."""


class _Commands(_Panels, TyperGroup):
    """All commands."""

    def invoke(self, context: Any) -> Any:
        """An error in the input ends with code 2 and one line on stderr; everything else is a bug, code 1."""
        try:
            check(
                sys.stdout is not None,
                "stdout to be open",
                "a closed one",
                "send it to a file",
            )
            return super().invoke(context)
        except InputError as error:
            print(f"hf-calib: {printable(error)}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_show_locals=False
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


def _parameter(kind: type[options.Command], each: Any, hint: Any) -> Parameter:
    """An argument or option of typer."""
    about, first = each.metadata, kind.first.split()
    if "argument" in about:
        info = typer.Argument(metavar=about["argument"], help=about["help"])
    else:
        named = each.type.removesuffix(" | None")
        value = _VALUES.get(each.name.rpartition("_")[2]) or _VALUES.get(named)
        info = typer.Option(
            f"--{about.get('name', each.name.replace('_', '-'))}",
            help=about["help"],
            metavar=value or "|".join(re.findall(r"'(\w+)'", named)) or None,
            rich_help_panel=None if each.name in first else "More",
            hidden=each.name not in (*first, *kind.more.split()),
        )
    default = Parameter.empty if each.default is MISSING else each.default
    # Names are a,b,c on a command line, and Path("") would be the current folder.
    hint = {Names: str | None, Path: str, Path | None: str | None}.get(hint, hint)
    return Parameter(
        each.name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, info],
    )


@contextmanager
def _telling() -> Iterator[
    tuple[Callable[[int, int | None], None], Callable[[str], None]]
]:
    """Yield what moves a bar on stderr, by rows just done of all, and what names a stage of more than a second."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "" if sys.stderr.isatty() else "1")
    columns = (
        TextColumn("rows"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bars, timer = (
        Progress(*columns, console=Console(stderr=True)),
        threading.Timer(_PATIENCE, print),
    )

    def move(done: int, total: int | None) -> None:
        bars.start()
        if not bars.tasks or bars.tasks[-1].finished:
            bars.add_task("", total=total)
        bars.advance(bars.tasks[-1].id, done)

    def begin(stage: str) -> None:
        nonlocal timer
        timer.cancel()
        timer = threading.Timer(
            _PATIENCE,
            lambda: print(f"{printable(stage)} ...", file=sys.stderr, flush=True),
        )
        timer.daemon = True
        timer.start()

    try:
        yield move, begin
    finally:
        timer.cancel()
        if bars.tasks:  # it prints a line where it was never started
            bars.stop()


def _warn(line: str) -> None:
    """A line on stderr, for what a reader of stdout must not miss, in JSON as in a table."""
    print(f"hf-calib: warning: {printable(line)}", file=sys.stderr)


def _print(parts: Iterable[Any], *, show_all: bool) -> None:
    """Documents, those of reports or their short ones; lines, wrapped; and lists of lines, which are to be copied."""
    from rich.console import Console

    screen = Console()
    try:
        for part in parts:
            if isinstance(part, str):
                screen.print(visible(part), markup=False, emoji=False, highlight=False)
            elif isinstance(part, list):
                print(*map(visible, part), sep="\n")
            else:
                getattr(
                    part, "document" if show_all else "short", lambda part=part: part
                )().show(screen)
        sys.stdout.flush()
    except OSError as error:
        if error.errno == EPIPE:  # the reader, such as head, has read enough
            raise
        # Python flushes stdout again as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        way_out = "make room there, or send it elsewhere"
        raise InputOSError(
            expected("stdout", "be writable", error.strerror, way_out)
        ) from error


def _files_in(folder: str | None) -> dict[Path, tuple[int, int]]:
    """The files in a folder and its subfolders, with what changes if one is written."""
    if not folder or not os.path.isdir(folder):
        return {}
    found = {}
    # No command writes into a deeper folder only.
    for path in (*Path(folder).glob("*"), *Path(folder).glob("*/*")):
        if path.is_file():
            stat = path.stat()
            found[path.relative_to(folder)] = (stat.st_ino, stat.st_mtime_ns)
    return found


def _with_options(
    message: str, kind: type[options.Command], chosen: Mapping[str, Any]
) -> str:
    """An error with the names of options as they are typed, in place of Python's arguments."""
    for each in kind.options():
        # Files hold arrays of these names, which are no options.
        is_array = each.name == "soft_labels" or (
            each.name == "class_names"
            and not chosen.get("class_names")
            and not chosen.get("data")
        )
        if "argument" in each.metadata:
            continue
        typed = f"--{each.metadata.get('name', each.name.replace('_', '-'))}"
        if "_" in each.name and not is_array:
            # Within quotes or a path it is a value.
            name = rf"(?<![\w'\"./=-]){each.name}(?![\w'\"/=(-]|\.\w)"
            message = re.sub(name, typed, message)
        # Other names are also words, but not in the place of the argument.
        requirements = ["to be one of", "to be given with", "to be other rows than"]
        if is_array:
            requirements = ["to name an existing file"]
        for requirement in requirements:
            said = f"expected {each.name} {requirement}"
            message = message.replace(said, f"expected {typed} {requirement}")
    return message


def _add(kind: type[options.Command]) -> None:
    """Make a dataclass of options the command of its name."""
    hints = get_type_hints(kind)
    given = [_parameter(kind, each, hints[each.name]) for each in kind.options()]
    flags = {"as_json": _JSON}
    if kind in (options.Evaluate, options.Calibrate):
        flags["show_all"] = _ALL
    has_hidden = any(
        each.name not in (*kind.first.split(), *kind.more.split())
        and "argument" not in each.metadata
        for each in kind.options()
    )
    if has_hidden:
        flags["help_all"] = _HELP_ALL
    given += [
        _FLAG(name, annotation=Annotated[bool, info]) for name, info in flags.items()
    ]

    def run(
        as_json: bool, show_all: bool = True, help_all: bool = False, **chosen: Any
    ) -> None:
        output = chosen.get("output")
        before = _files_in(output)
        try:
            with _telling() as told:
                command = kind(**chosen)
                done = command(*told, _warn)
        except InputError as error:
            raise InputError(_with_options(str(error), kind, chosen)) from error
        # The documents of the others have them.
        if kind is not options.Evaluate:
            for note in getattr(getattr(done, "report", done), "notes", ()):
                _warn(note)
        shown = getattr(command.module, "shown", lambda done: [done])
        if as_json:
            parts: list[Any] = [[json.dumps(done.to_dict(), allow_nan=False)]]
        else:
            parts = [*(done.lines if isinstance(done, Done) else shown(done))]
            if output is not None:
                after = _files_in(output)
                written = {
                    path.parts[0]
                    for path, state in after.items()
                    if before.get(path) != state
                }
                names = ", ".join(sorted(written))
                parts += ["", [f"Written to {output}: {names}"]]
        _print(parts, show_all=show_all)

    run.__signature__ = Signature(given)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in given}
    epilog = f"Example: hf-calib {kind.command()} {kind.example}"
    if has_hidden:
        epilog += f"\nAll options: hf-calib {kind.command()} --help-all"
    app.command(kind.command(), cls=_Command, help=inspect.getdoc(kind), epilog=epilog)(
        run
    )


for _kind in options.COMMANDS:
    _add(_kind)


if __name__ == "__main__":  # accelerate launch -m hf_calib.cli
    app()
