"""The figures of the gallery: what an example calls `figure`, which is no figure of pyplot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst


def scrape(
    block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any], **_: Any
) -> str:
    """Save the `figure` that a block has made, and return the markup that shows it, with its title as the text."""
    figure = block_vars["example_globals"].pop("figure", None)
    if figure is None:
        return ""
    path = next(block_vars["image_path_iterator"])
    figure.savefig(path, dpi=130, bbox_inches="tight")
    title = figure.get_suptitle() or next(
        (axes.get_title() for axes in figure.axes if axes.get_title()), ""
    )
    return str(figure_rst([path], gallery_conf["src_dir"], fig_titles=title))


def name_thumbnails(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Give the small images of the gallery's first page the titles of their examples as their text."""
    if page == "auto_gallery/index":
        for image in [
            each for each in tree.findall(nodes.image) if not each.get("alt")
        ]:
            example = (
                Path(image["uri"]).stem.removeprefix("sphx_glr_").removesuffix("_thumb")
            )
            image["alt"] = app.env.titles[f"auto_gallery/{example}"].astext()


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to the resolved pages; called by Sphinx."""
    app.connect("doctree-resolved", name_thumbnails)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
