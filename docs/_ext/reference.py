"""The directive `{api} package`: a table of the names in its body, then each with its docstring."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode
from transformers import TrainingArguments


class Api(SphinxDirective):
    """The names of a package, in the order in which the page lists them.

    After a colon a class has the methods that are for users, where not all are.
    """

    has_content = True
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Make the table and the entries."""
        package = self.arguments[0]
        with mock(self.config.autodoc_mock_imports):
            module = import_module(package)
            things = {
                name: getattr(module, name)
                for name in (line.partition(":")[0] for line in self.content)
                if name
            }
        lines = [".. list-table::", "   :widths: 40 60", "   :class: names", ""]
        chosen = {
            name: members
            for name, _, members in (
                line.partition(":") for line in self.content if line
            )
        }
        for name in chosen:
            thing = things[name]
            about = first_line(
                inspect.getdoc(thing) if callable(thing) else comment_on(package, name)
            )
            lines += [f"   * - :py:obj:`{name} <{package}.{name}>`", f"     - {about}"]
        lines += [""]
        for name, members in chosen.items():
            is_all = f"{name}:" not in "\n".join(self.content)
            lines += entry(
                package, name, things[name], None if is_all else members.strip()
            )
        fence = "`" * 6
        return self.parse_text_to_nodes(
            "\n".join([fence + "{eval-rst}", *lines, fence])
        )


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
    raise SphinxError(
        f"expected {package}.{name} to have a comment that begins with #:, got none"
    )


def entry(package: str, name: str, thing: Any, members: str | None) -> list[str]:
    """The autodoc directive of a name, with these members of a class, or all of its own."""
    if inspect.isclass(thing):
        lines = [f".. autoclass:: {package}.{name}", "   :show-inheritance:"]
        if members is None and not hasattr(
            thing, "_fields"
        ):  # of a tuple: "Alias for field number 0"
            lines += ["   :members:"]
        elif members:
            lines += [f"   :members: {members}"]
        return [*lines, "", *indented(settings(thing)), ""]
    if callable(thing):
        return [f".. autofunction:: {package}.{name}", ""]
    return [f".. py:data:: {package}.{name}", "", f"   {comment_on(package, name)}", ""]


def settings(thing: type) -> list[str]:
    """A table of the fields of our own arguments, with the help of the command line."""
    own = [
        field
        for field in (fields(thing) if is_dataclass(thing) else ())
        if field.metadata.get("help")
        and field.name not in TrainingArguments.__dataclass_fields__
    ]
    if not own:
        return []
    lines = [
        ".. list-table::",
        "   :header-rows: 1",
        "   :class: names",
        "",
        "   * - field",
        "     - default",
        "     - help",
    ]
    for field in own:
        default = field.default_factory() if field.default is MISSING else field.default
        told = re.sub(
            r"([*`|\\]|_(?!\w))", r"\\\1", " ".join(field.metadata["help"].split())
        )
        lines += [
            f"   * - ``{field.name}``",
            f"     - ``{default!r}``",
            f"     - {told}",
        ]
    return lines


def indented(lines: list[str]) -> list[str]:
    """As the content of a directive."""
    return [f"   {line}" if line else "" for line in lines]


def is_left_out(
    app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    """Methods that scikit-learn gives every estimator, with links into its own pages."""
    return (
        True
        if "sklearn.utils._metadata_requests"
        in (getattr(thing, "__module__", None) or "")
        else None
    )


def by_last_name(
    app: Sphinx, env: Any, node: nodes.Element, shown: nodes.Element
) -> nodes.Node | None:
    """A link to a public name of another package, where there is one of that name; else it stays code."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    name = node["reftarget"].removesuffix("()")
    objects = env.domaindata["py"]["objects"]
    found = [
        full
        for full in objects
        if full.endswith(f".{name}") and not objects[full].aliased
    ]
    if len(found) != 1:
        return None
    place = objects[found[0]]
    return make_refnode(
        app.builder, node["refdoc"], place.docname, place.node_id, shown, found[0]
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; called by Sphinx."""
    app.add_directive("api", Api)
    app.connect("missing-reference", by_last_name)
    app.connect("autodoc-skip-member", is_left_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
