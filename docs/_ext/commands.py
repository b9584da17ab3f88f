"""The directive `{command} name`: what a command of `hf-calib` does and takes, from the app itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hf_calib.cli import app as hf_calib

COMMANDS = {command.name: command for command in hf_calib.registered_commands}
KINDS = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH"}
# JSON, commands and options, whose quotes and dashes are to be copied.
TYPED = re.compile(r"(?<!\w)'[^']*(?: --|\{)[^']*'|(?<![\w-])--\w[\w-]*")


class Command(SphinxDirective):
    """Help text and options of one command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the text and a definition list, which wraps on a narrow screen as a table does not."""
        command = COMMANDS[self.arguments[0]]
        lines = [inspect.getdoc(command.callback) or "", ""]
        for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
            lines += [*entry(parameter), ""]
        return self.parse_text_to_nodes("\n".join(lines))


def entry(parameter: inspect.Parameter) -> tuple[str, str]:
    """The term and the definition of an argument or option."""
    annotation, info = get_args(parameter.annotation)[:2]
    assert get_origin(parameter.annotation) is Annotated
    default = getattr(parameter.default, "value", parameter.default)
    if type(info).__name__ == "ArgumentInfo":
        name = info.metavar or parameter.name.upper()
    else:
        first = info.default if isinstance(info.default, str) and info.default.startswith("--") else None
        names = [first] if first else info.param_decls or [f"--{parameter.name.replace('_', '-')}"]
        name = " ".join([names[0], *kind(annotation, info)])
        name = name.replace("/", ", ")
    definition = [TYPED.sub(r"`\g<0>`", " ".join((info.help or "").split()))]
    if default is inspect.Parameter.empty:
        definition.append("Required.")
    elif isinstance(info.show_default, str):  # what stands for None
        definition.append(f"Default: {info.show_default}.")
    elif default is not None and default is not False and default != ():
        definition.append(f"Default: `{default}`.")
    return f"`{name}`", f": {' '.join(definition)}"


def kind(annotation: Any, info: Any) -> list[str]:
    """The value that an option takes; nothing for a flag."""
    several = get_origin(annotation) in (Union, UnionType)
    first = next(
        each for each in (get_args(annotation) if several else (annotation,)) if each is not NoneType
    )
    if get_origin(first) is Literal:
        return [", ".join(get_args(first))]
    of = (get_args(first) or (first,))[0]
    if of is bool:
        return []
    return [info.metavar or KINDS[of]]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
