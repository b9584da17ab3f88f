"""The directive `{command} name`: what a command of `hf-calib` does and takes, from the app itself."""

from __future__ import annotations

from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hf_calib.cli import app as hf_calib

COMMANDS = typer.main.get_command(hf_calib).commands  # type: ignore[attr-defined]


class Command(SphinxDirective):
    """Help text, usage and options of one command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the text and the table."""
        command = COMMANDS[self.arguments[0]]
        context = typer.Context(command, info_name=f"hf-calib {command.name}")
        lines = [
            command.help or "",
            "",
            "```text",
            command.get_usage(context).removeprefix("Usage: "),
            "```",
            "",
        ]
        lines += ["| option | default | what it does |", "|---|---|---|"]
        for option in command.get_params(context):
            lines.append(row(option, context))
        return self.parse_text_to_nodes("\n".join(lines))


def row(option: Any, context: typer.Context) -> str:
    """An argument or option in a line of the table."""
    if option.param_type_name == "argument":
        name, default = f"`{option.make_metavar(context)}`", "required" if option.required else ""
    else:
        kind = "" if option.is_flag else f" {option.make_metavar(context)}"
        name = f"`{', '.join(option.opts)}{kind}`"
        values = option.default
        default = (
            ""
            if values in (None, False, (), []) or option.name == "help"
            else f"`{getattr(values, 'value', values)}`"
        )
        default = "required" if option.required else default
    told = " ".join((option.help or "").split())
    return f"| {name} | {default} | {told} |".replace("||", "|\\||")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
