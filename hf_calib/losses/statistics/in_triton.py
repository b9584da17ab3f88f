"""Formulas as functions for kernels: their own source, in which the functions of `arithmetic` are
Triton's."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import math
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

# A table becomes three arguments: its edges, its values, and the number of its edges.
TABLE = ("edges", "bins", "n_edges")


@cache
def in_triton(
    function: Callable[..., Any], constants: tuple[tuple[str, Any], ...] | None = None
) -> Any:
    """A formula with its hyperparameters, which gets a table whether it reads one or not; or,
    without, a function that a formula calls."""
    from hf_calib.losses.statistics import kernels

    code = function.__code__
    parameters = [*code.co_varnames[: code.co_argcount]]
    if constants is not None:
        parameters += TABLE
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    rewriting = _Rewriting(function, dict(constants or ()), kernels)
    lines = [ast.unparse(rewriting.visit(statement)) for statement in tree.body]
    body = textwrap.indent("\n".join(lines), "    ")
    # Some versions of Triton tell functions apart by their names only.
    digest = hashlib.sha256(body.encode()).hexdigest()
    name = f"{function.__name__}_{digest[:16]}"
    # Annotations, defaults and decorators mean nothing to Triton.
    text = f"def {name}({', '.join(parameters)}):\n{body}\n"
    # Triton asks for the source of a function, which Python looks up by the name of its file.
    file = f"<{function.__module__}.{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), rewriting.scope)
    return kernels.triton.jit(rewriting.scope[name])


class _Rewriting(ast.NodeTransformer):
    """Put constants in the place of their names, and collect in `scope` what the others mean."""

    def __init__(
        self, function: Callable[..., Any], constants: dict[str, Any], kernels: Any
    ) -> None:
        self.function = function
        self.constants = constants
        self.kernels = kernels
        self.scope = {"__name__": function.__module__, "tl": kernels.tl}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        name = node.id
        if name in self.constants:
            return ast.Constant(self.constants[name])
        if name in self.function.__code__.co_varnames:
            return node
        meaning = getattr(self.kernels, name, None)
        meaning = meaning or self.function.__globals__[name]
        if isinstance(meaning, float):
            return ast.Constant(meaning)
        if inspect.isfunction(meaning):
            meaning = in_triton(meaning)
        self.scope[name] = meaning
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.args[0], ast.Name) and node.args[0].id == "table":
            node.args[:1] = [ast.Name(name) for name in TABLE]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        # The one attribute is a table's least value, which a kernel does not know.
        return ast.Constant(-math.inf)
