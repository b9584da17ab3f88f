"""The directive `{citation} key ...`: BibTeX entries of the library's own list, as it puts them on model cards."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hf_calib.cards.card import references

ENTRIES = {key: entry for _, entry, key in references()}


class Citation(SphinxDirective):
    """The entries, each in its block."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Make the blocks."""
        return [
            nodes.literal_block(ENTRIES[key], ENTRIES[key], language="bibtex")
            for key in self.arguments[0].split()
        ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx."""
    app.add_directive("citation", Citation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
