"""The directives of the loss pages: `{losses-table}`, and `{loss} name`, with the loss's docstring and its figure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hf_calib.losses import LOSSES

FIGURES = Path("_build") / "loss_figures"


class LossesTable(SphinxDirective):
    """A table of some losses: from `LOSSES` and, one line per loss in the body, when to use it."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Make the table."""
        lines = [
            "| loss | when | multi-label | soft labels | couples the batch | source |",
            "|---|---|---|---|---|---|",
        ]
        for line in self.content:
            name, when = (cell.strip() for cell in line.split("|"))
            if name not in LOSSES:
                raise self.error(f"expected losses of hf_calib, got {name}")
            entry = LOSSES[name]
            marks = [
                "yes" if entry.multi_label else "",
                "yes" if entry.takes_soft_labels else "",
                "yes" if entry.constructor().couples_batch else "",
            ]
            title = f"{{py:obj}}`{name} <hf_calib.losses.{name}>`"
            lines.append(f"| {' | '.join([title, when, *marks, entry.source])} |")
        found = self.parse_text_to_nodes("\n".join(lines))
        for table in found:
            table["classes"].append("losses")
        return found


class Loss(SphinxDirective):
    """A loss by its name: the figure of its weight and of its gradient, then its docstring."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Draw the figure and make the entry."""
        name = self.arguments[0]
        fence = "`" * 6
        entry = (
            f"{fence}{{eval-rst}}\n.. autofunction:: hf_calib.losses.{name}\n{fence}"
        )
        shown = self.parse_text_to_nodes(entry)
        for node in shown:
            for signature in node.findall(addnodes.desc_signature):
                signature["_toc_name"] = (
                    ""  # The heading above it is in the contents of the page.
                )
        return [*self.figure_of(name), *shown]

    def figure_of(self, name: str) -> list[nodes.Node]:
        """The image."""
        from loss_figures import draw

        folder = Path(self.env.app.srcdir) / FIGURES
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}.svg"
        alt = draw(name, file)
        here = Path(self.env.doc2path(self.env.docname)).parent
        return [nodes.image(uri=os.path.relpath(file, here), alt=alt)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives; called by Sphinx. A fork of a process that torch has run in hangs in torch."""
    app.add_directive("losses-table", LossesTable)
    app.add_directive("loss", Loss)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
