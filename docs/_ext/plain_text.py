"""`llms.txt`, a list of the pages, and `llms-full.txt`, all of them in one file, for programs that read text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.builders.text import TextBuilder
from sphinx.writers.text import TextTranslator


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write both beside the pages, once these are built."""
    if exception is not None or app.builder.name != "html":
        return
    root = app.env.get_doctree("index")
    listed = [f"# {app.config.project}", "", f"> {first_paragraph(root)}", ""]
    full = []
    builder = TextBuilder(app, app.env)
    builder.secnumbers = {}
    for page in pages(app):
        tree = app.env.get_doctree(page)
        title, about = app.env.titles[page].astext(), first_paragraph(tree)
        listed.append(f"- [{title}]({page}.html): {about}")
        translator = TextTranslator(tree, builder)
        app.env.apply_post_transforms(tree, page)
        for node in [
            each for each in tree.findall(nodes.Element) if "sphinx_gallery" in type(each).__module__
        ]:
            node.parent.remove(node)  # images and links that only a browser shows
        tree.walkabout(translator)
        full += [f"<!-- {page} -->", translator.body.strip(), ""]
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


def first_paragraph(tree: nodes.document) -> str:
    """What a page says first."""
    return next((" ".join(each.astext().split()) for each in tree.findall(nodes.paragraph)), "")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to the end of a build; called by Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
