"""Formulas as functions for kernels: their own source, in which the functions of `arithmetic` are Triton's."""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

# A table becomes three arguments: its edges, its values, and the number of its edges.
TABLE = ("edges", "bins", "n_edges")
Constants = tuple[tuple[str, Any], ...]


@cache
def formula_in_triton(formula: Callable[..., Any], constants: Constants) -> Any:
    """The formula as a function of the cross entropy, its statistic and a table, whether it reads them or not."""
    (first, *second) = _parameters(formula)
    return _in_triton(formula, [first, *(second or ["unread"]), *TABLE], constants)


def _parameters(function: Callable[..., Any]) -> list[str]:
    code = function.__code__
    return [*code.co_varnames[: code.co_argcount]]


@cache
def _helper_in_triton(function: Callable[..., Any]) -> Any:
    """A function that a formula calls."""
    return _in_triton(function, _parameters(function), ())


def _in_triton(
    function: Callable[..., Any], parameters: list[str], constants: Constants
) -> Any:
    import triton

    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    rewriting = _Rewriting(function, dict(constants))
    statements = [rewriting.visit(each) for each in tree.body]
    if ast.get_docstring(tree) is not None:
        del statements[0]
    # Annotations, defaults and decorators mean nothing to Triton.
    head = f"def {function.__name__}({', '.join(parameters)}):\n"
    lines = "\n".join(map(ast.unparse, statements))
    text = head + textwrap.indent(lines, "    ") + "\n"
    # Triton reads the source of a function again, as debuggers do of functions without a file.
    name = f"<{function.__module__}.{function.__name__} {constants}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), rewriting.scope)
    return triton.jit(rewriting.scope[function.__name__])


class _Rewriting(ast.NodeTransformer):
    """Put constants in the place of their names, and collect the functions that are called in `scope`."""

    def __init__(self, function: Callable[..., Any], constants: dict[str, Any]) -> None:
        import triton.language

        self.constants = constants
        self.known = function.__globals__
        self.local = function.__code__.co_varnames
        self.scope = {"__name__": function.__module__, "tl": triton.language}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        from hf_calib.losses.statistics import kernels

        name = node.id
        value = self.known.get(name)
        if name in self.constants:
            return ast.Constant(self.constants[name])
        if name in self.local:
            return node
        if isinstance(value, float):
            return ast.Constant(value)
        own = getattr(kernels, name, None)
        self.scope[name] = own or _helper_in_triton(value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.args[0], ast.Name) and node.args[0].id == "table":
            node.args[:1] = [ast.Name(name) for name in TABLE]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        # The one attribute is a table's least value, which a kernel does not know.
        return ast.Constant(-math.inf)
