"""The directive `{command} name`: what a command of `hf-calib` does and takes, from the app itself."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from hf_calib.cli import app as hf_calib

COMMANDS: dict[str, Any] = get_command(hf_calib).commands  # type: ignore[attr-defined]
# JSON, commands, options and defaults, whose quotes and dashes are to be copied.
TYPED = re.compile(
    r"(?<!\w)'[^']*(?: --|\{)[^']*'|(?<![\w-])--\w[\w-]*|(?<=Default: ).+(?=\.$)"
)


def entry(parameter: Any) -> tuple[str, str]:
    """An argument or option with what stands for its value, and what it does."""
    name = parameter.metavar or ""
    if parameter.param_type_name == "option":
        typed = ", ".join((*parameter.opts, *parameter.secondary_opts))
        name = f"{typed} {name}".strip()
    text = parameter.help
    if getattr(parameter, "multiple", False):
        text += " May be repeated."
    if parameter.required:
        return name, f"{text} Required."
    default = parameter.default
    if default is not None and not isinstance(default, bool):
        text += f" Default: {default}."
    return name, text


class Command(SphinxDirective):
    """Help text and options of one command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the text and definition lists, which wrap on a narrow screen as tables do not."""
        command = COMMANDS[self.arguments[0]]
        hidden = [each for each in command.params if each.hidden]
        lines = [command.help, ""]
        for title, parameters in (
            ("", [p for p in command.params if not p.hidden]),
            ("For specialists:", hidden),
        ):
            if parameters:
                lines += [title, ""]
            for name, text in map(entry, parameters):
                lines += [f"`{name}`", ": " + TYPED.sub(r"`\g<0>`", text), ""]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
