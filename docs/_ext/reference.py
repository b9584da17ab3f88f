"""The directive `{api} package`: a table of the names in its body, then each with its docstring."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode


class Api(SphinxDirective):
    """The names of a package, in the order in which the page lists them."""

    has_content = True
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Make the table and the entries."""
        package = self.arguments[0]
        module = import_module(package)
        lines = [".. list-table::", "   :widths: 40 60", "   :class: names", ""]
        names = [name for name in self.content if name.strip()]
        for name in names:
            thing = getattr(module, name)
            about = first_line(inspect.getdoc(thing) if callable(thing) else comment_on(package, name))
            lines += [f"   * - :py:obj:`{name} <{package}.{name}>`", f"     - {about}"]
        lines += [""]
        for name in names:
            lines += entry(package, name, getattr(module, name))
        fence = "`" * 6
        return self.parse_text_to_nodes("\n".join([fence + "{eval-rst}", *lines, fence]))


def first_line(text: str | None) -> str:
    """The first paragraph of a docstring."""
    return " ".join((text or "").split("\n\n")[0].split())


def comment_on(package: str, name: str) -> str:
    """The comment `#:` on a constant, in whichever module of the package it is made."""
    for module in sorted(sys.modules):
        if module == package or module.startswith(f"{package}."):
            found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
            if found:
                return " ".join(found).strip()
    raise SphinxError(f"expected {package}.{name} to have a comment that begins with #:, got none")


def entry(package: str, name: str, thing: Any) -> list[str]:
    """The autodoc directive of a name."""
    if inspect.isclass(thing):
        return [f".. autoclass:: {package}.{name}", "   :members:", "   :show-inheritance:", ""]
    if callable(thing):
        return [f".. autofunction:: {package}.{name}", ""]
    return [f".. py:data:: {package}.{name}", "", f"   {comment_on(package, name)}", ""]


def is_left_out(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Methods that scikit-learn gives every estimator, with links into its own pages."""
    return True if "sklearn.utils._metadata_requests" in (getattr(thing, "__module__", None) or "") else None


def by_last_name(app: Sphinx, env: Any, node: nodes.Element, shown: nodes.Element) -> nodes.Node | None:
    """A link to a public name of another package, where there is one of that name; else it stays code."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    name = node["reftarget"].removesuffix("()")
    objects = env.domaindata["py"]["objects"]
    found = [full for full in objects if full.endswith(f".{name}") and not objects[full].aliased]
    if len(found) != 1:
        return None
    place = objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], place.docname, place.node_id, shown, found[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx."""
    app.add_directive("api", Api)
    app.connect("missing-reference", by_last_name)
    app.connect("autodoc-skip-member", is_left_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
