"""The directive `{command} name`: what a command of `hf-calib` does and takes, from the app itself."""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hf_calib.cli import app as hf_calib

COMMANDS = {
    command.callback.__name__: command for command in hf_calib.registered_commands if command.callback
}
KINDS = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH"}


class Command(SphinxDirective):
    """Help text and options of one command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the text and the table."""
        command = COMMANDS[self.arguments[0]]
        lines = [inspect.getdoc(command.callback) or "", ""]
        lines += ["| argument | default | what it is |", "|---|---|---|"]
        parameters = inspect.signature(command.callback, eval_str=True).parameters.values()
        lines += [row(parameter) for parameter in parameters]
        return self.parse_text_to_nodes("\n".join(lines))


def row(parameter: inspect.Parameter) -> str:
    """An argument or option in a line of the table."""
    annotation, info = get_args(parameter.annotation)[:2]
    assert get_origin(parameter.annotation) is Annotated
    default = getattr(parameter.default, "value", parameter.default)
    is_required = default is inspect.Parameter.empty
    if type(info).__name__ == "ArgumentInfo":
        name = info.metavar or parameter.name.upper()
    else:
        first = info.default if isinstance(info.default, str) and info.default.startswith("--") else None
        names = [first] if first else info.param_decls or [f"--{parameter.name.replace('_', '-')}"]
        name = " ".join([names[0], *kind(annotation, info)])
    shown = "" if default in (None, False, ()) else f"`{default}`"
    if isinstance(info.show_default, str):  # what stands for None
        shown = f"`{info.show_default}`"
    told = " ".join((info.help or "").split()).replace("|", r"\|")
    return f"| `{name}` | {'required' if is_required else shown} | {told} |"


def kind(annotation: Any, info: Any) -> list[str]:
    """The value that an option takes; nothing for a flag."""
    types = [each for each in (get_args(annotation) or (annotation,)) if each is not NoneType]
    of = get_args(types[0])[0] if get_args(types[0]) else types[0]
    if of is bool:
        return []
    if issubclass(of, Enum):
        return [", ".join(each.value for each in of)]
    return [info.metavar or KINDS[of]]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
