"""The command line `hf-calib`: each command is a dataclass of options, and a thin call of the library."""

from __future__ import annotations

import inspect
import json
import os
import re
from dataclasses import MISSING
from functools import partial
from importlib import metadata
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hf_calib.commands import console, options
from hf_calib.models.reading import Names

# What stands for a value, by the last word of an option's name or by its type.
_VALUES = {"column": "NAME", "split": "NAME", "data": "DATA", "output": "FOLDER", "method": "METHOD"}
_VALUES |= {"Path": "FILE", "Names": "A,B,C", "int": "N", "float": "N", "str": "TEXT", "list[str]": "TEXT"}
_FLAG: Any = partial(Parameter, kind=Parameter.KEYWORD_ONLY, default=False)
_JSON = typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
_ALL = typer.Option("--all", help="Print all metrics and the whole diagnosis, as in a saved report.")


def entry(parameter: Any) -> tuple[str, str]:
    """An argument or option with what stands for its value, and what it does."""
    name, default = parameter.metavar or "", parameter.default
    if parameter.param_type_name == "option":
        name = " ".join((", ".join((*parameter.opts, *parameter.secondary_opts)), name)).strip()
    end = "" if default is None or isinstance(default, bool) else f" Default: {default}."
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
            if not each.hidden:
                panel = each.rich_help_panel or f"{each.param_type_name.capitalize()}s"
                panels.setdefault(panel, []).append(entry(each))
        for name, command in getattr(self, "commands", {}).items():
            panels.setdefault("Commands", []).append((name, command.help.split("\n")[0]))
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


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
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
    hint = str | None if hint == Names else hint  # a,b,c on a command line
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


def _add(kind: type[options.Command]) -> None:
    """Make a dataclass of options the command of its name."""
    hints = get_type_hints(kind)
    given = [_parameter(kind, each, hints[each.name]) for each in kind.options()]
    flags = {"as_json": _JSON} | ({"show_all": _ALL} if kind in (options.Evaluate, options.Calibrate) else {})
    given += [_FLAG(name, annotation=Annotated[bool, info]) for name, info in flags.items()]

    def run(as_json: bool, show_all: bool | None = None, **chosen: Any) -> None:
        with console.telling() as told:
            command = kind(**chosen)
            done = command(*told)
        # The documents of the others have them.
        if kind not in (options.Evaluate, options.CompareReports, options.CompareLosses):
            console.print_warnings(getattr(getattr(done, "report", done), "notes", ()))
        if as_json:
            print(json.dumps(done.to_dict(), allow_nan=False))
        else:
            asked = {} if show_all is None else {"show_all": show_all}
            getattr(command.module, "show", console.show)(done, **asked)
            if chosen.get("output") is not None:
                print(f"\nWritten to {chosen['output']}: {', '.join(sorted(os.listdir(chosen['output'])))}")

    run.__signature__ = Signature(given)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in given}
    epilog = f"Example: hf-calib {kind.command()} {kind.example}\nAll options: docs/command_line.md"
    app.command(kind.command(), cls=_Command, help=inspect.getdoc(kind), epilog=epilog)(run)


for _kind in options.COMMANDS:
    _add(_kind)


if __name__ == "__main__":  # accelerate launch -m hf_calib.cli
    app()
