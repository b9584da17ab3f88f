"""Formulas as MathML, which browsers draw by themselves: no script, nothing fetched, the text's own colour."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

_SIZE = re.compile(
    r"\\[bB]igg?[lrm]?(?![a-zA-Z])"
)  # of brackets; a browser stretches them by itself


def visit_inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_drawn(node, as_block=False))
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_drawn(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _drawn(node: nodes.Element, *, as_block: bool) -> str:
    try:
        return tex2mathml(_SIZE.sub("", node.astext()), as_block=as_block)
    except MathError as error:
        raise SphinxError(
            f"{node.source}:{node.line}: {error} in the formula {node.astext()!r}"
        ) from error


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer; called by Sphinx."""
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_inline, None),
        block_renderers=(visit_block, None),
    )
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
