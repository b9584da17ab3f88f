"""`llms.txt`, a list of the pages, and `llms-full.txt`, all of them in one file, for programs that read text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.builders.text import TextBuilder
from sphinx.writers.text import TextTranslator

# What a page says first, and all of it, by its name: kept as each is resolved, which takes long to do again.
_TEXTS: dict[str, tuple[str, str]] = {}


class PlainText(TextTranslator):
    """The text of a page, without images and links of the gallery that only a browser shows."""

    def unknown_visit(self, node: nodes.Node) -> None:
        raise nodes.SkipNode


def keep(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Keep the text of a page that is being written."""
    if app.builder.name != "html":
        return
    builder = TextBuilder(app, app.env)
    builder.secnumbers = {}
    translator = PlainText(tree, builder)
    tree.walkabout(translator)
    about = next(
        (" ".join(each.astext().split()) for each in tree.findall(nodes.paragraph)), ""
    )
    _TEXTS[page] = about, translator.body.strip()


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write both beside the pages, once these are built."""
    if exception is not None or app.builder.name != "html":
        return
    listed = [f"# {app.config.project}", "", f"> {_TEXTS['index'][0]}", ""]
    full = []
    for page in pages(app):
        about, text = _TEXTS[page]
        listed.append(f"- [{app.env.titles[page].astext()}]({page}.html): {about}")
        full += [f"<!-- {page} -->", text, ""]
    folder = Path(app.outdir)
    (folder / "llms.txt").write_text("\n".join([*listed, ""]), encoding="utf-8")
    (folder / "llms-full.txt").write_text("\n".join(full), encoding="utf-8")


def pages(app: Sphinx) -> list[str]:
    """The pages in the order of the table of contents."""
    found, todo = [], ["index"]
    while todo:
        page = todo.pop(0)
        if page not in found:
            found.append(page)
            todo = [*app.env.toctree_includes.get(page, []), *todo]
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to the resolved pages and to the end of a build; called by Sphinx."""
    app.connect("doctree-resolved", keep)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
