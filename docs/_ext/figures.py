"""The directive `{plot} what it shows`: code that is run when the site is built, and the `figure` that it leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective

FOLDER = Path("_build") / "figures"


class Plot(SphinxDirective):
    """A block of Python and its figure; the blocks of a page share their names."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {"hide-code": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Run the code, save the figure, and show both."""
        code = "\n".join(self.content)
        names = self.env.temp_data.setdefault("plot_names", {})
        try:
            exec(compile(code, f"{self.env.docname}.md", "exec"), names)
            figure = names.pop("figure")
        except Exception as error:
            raise SphinxError(
                f"{self.env.docname}: {error!r} in the code of a figure"
            ) from error
        number = self.env.new_serialno("plot")
        source = Path(self.env.app.srcdir)
        file = source / FOLDER / f"{self.env.docname.replace('/', '-')}-{number}.svg"
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
        here = Path(self.env.doc2path(self.env.docname)).parent
        image = nodes.image(uri=os.path.relpath(file, here), alt=self.arguments[0])
        shown = nodes.literal_block(code, code, language="python")
        return [image] if "hide-code" in self.options else [shown, image]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx. A fork of a process that torch has run in hangs in torch."""
    app.add_directive("plot", Plot)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
